"""The whole model: what NeMo's gets wrong, independence of the batch, and no value read back from the device."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from nest_ssl import EncDecDenoiseMaskedTokenPredModel, EncDecMaskedTokenPredModel
from nest_ssl.modules import MultiMLMLoss
from nest_ssl.modules.conformer import _log_once
from tests.helpers import NO_DROPOUT, model_section, noise_batch, tiny_model

STREAMING: dict[str, Any] = {
    "encoder.causal_downsampling": True,
    "encoder.conv_context_size": "causal",
    "encoder.conv_norm_type": "layer_norm",
    "encoder.att_context_style": "chunked_limited",
    "encoder.att_context_size": [14, 6],
}
VARIANTS: dict[str, dict[str, Any]] = {
    "pre_conv": {},
    "post_conv": {"mask_position": "post_conv"},
    "streaming": STREAMING,
    "post_conv_streaming": {**STREAMING, "mask_position": "post_conv"},
    "books": {"num_books": 3},
    "squeezed": {"squeeze_single": True},
    "separate_blocks": {"masking.allow_overlap": False, "masking.mask_prob": 0.4},
    "striding_abs_pos": {"encoder.subsampling": "striding", "encoder.self_attention_model": "abs_pos"},
    "stochastic_depth": {"encoder.stochastic_depth_drop_prob": 0.5},
    "several_contexts": {"encoder.att_context_size": [[4, 2], [-1, -1]], "encoder.conv_norm_type": "layer_norm"},
}
LENGTHS = [24_000, 16_007, 20_000]


def train_inputs(batch: dict[str, Tensor]) -> dict[str, Any]:
    return {
        "audio": batch["input_signal"],
        "audio_len": batch["input_signal_length"],
        "noisy_audio": batch["noisy_input_signal"],
        "noisy_audio_len": batch["noisy_input_signal_length"],
    }


@pytest.mark.parametrize("name", VARIANTS)
def test_masked_loss_equals_the_loss_of_the_full_forward(name: str) -> None:
    likely = {} if name == "separate_blocks" else {"masking.mask_prob": 0.1}
    model = tiny_model({**NO_DROPOUT, **VARIANTS[name], **likely, "encoder.stochastic_depth_drop_prob": 0.0})
    model.train(name != "several_contexts")  # there, two passes in training would draw two contexts
    batch = noise_batch(LENGTHS)
    model.zero_grad()
    log_probs, lengths, masks, tokens = model(**batch, apply_mask=True, generator=torch.Generator().manual_seed(3))
    plain = model.loss(masks=masks, decoder_outputs=log_probs, targets=tokens, decoder_lengths=lengths)
    plain.backward()
    expected = {k: p.grad.clone() for k, p in model.named_parameters() if p.grad is not None}
    model.zero_grad()
    predicted = model.masked_loss(**train_inputs(batch), generator=torch.Generator().manual_seed(3))
    predicted.loss.backward()
    assert int(predicted.counts_G.sum()) > 0
    torch.testing.assert_close(predicted.loss, plain, atol=1e-5, rtol=1e-5)
    for key, gradient in expected.items():
        torch.testing.assert_close(model.get_parameter(key).grad, gradient, atol=1e-5, rtol=1e-3, msg=key)


@pytest.mark.parametrize("name", VARIANTS)
def test_gradients_reach_every_trainable_parameter(name: str) -> None:
    model = tiny_model(VARIANTS[name]).train()
    model.masked_loss(**train_inputs(noise_batch(LENGTHS))).loss.backward()
    without = [k for k, p in model.named_parameters() if p.requires_grad and p.grad is None]
    assert not without


def test_post_conv_lets_the_gradient_flow_through_the_mask_to_the_subsampling() -> None:
    model = tiny_model({"mask_position": "post_conv", "masking.mask_prob": 0.2}).train()
    model.masked_loss(**train_inputs(noise_batch(LENGTHS))).loss.backward()
    assert model.pre_encoder is not None
    first = next(iter(model.pre_encoder.parameters()))
    assert first.grad is not None
    assert first.grad.abs().sum() > 0


def test_post_conv_masks_have_the_shape_of_the_masked_features() -> None:
    model = tiny_model({"mask_position": "post_conv", "masking.mask_prob": 0.2}).eval()
    for apply_mask in (False, True):
        log_probs, _, masks, tokens = model(**noise_batch(LENGTHS), apply_mask=apply_mask)
        assert masks.shape == (3, 32, log_probs.shape[1])
        assert tokens.shape[1] == log_probs.shape[1]
        assert bool(masks.any()) == apply_mask


def test_streaming_gives_at_most_one_frame_more_than_tokens_and_the_loss_drops_it() -> None:
    model = tiny_model(STREAMING)
    log_probs, lengths, masks, tokens = model(**noise_batch(LENGTHS), apply_mask=True)
    assert log_probs.shape[1] - tokens.shape[1] in (0, 1)
    loss = model.loss(masks=masks, decoder_outputs=log_probs, targets=tokens, decoder_lengths=lengths)
    assert torch.isfinite(loss)


def test_no_masked_frame_gives_a_loss_of_zero_with_gradients() -> None:
    model = tiny_model({"masking.mask_prob": 0.0}).train()
    loss = model.masked_loss(**train_inputs(noise_batch(LENGTHS))).loss
    loss.backward()
    assert float(loss.detach()) == 0
    gradients = [p.grad for p in model.parameters() if p.requires_grad]
    assert all(g is not None and torch.isfinite(g).all() and not g.any() for g in gradients)
    log_probs, lengths, masks, tokens = model(**noise_batch(LENGTHS))
    assert not model.loss(masks=masks, decoder_outputs=log_probs, targets=tokens, decoder_lengths=lengths).any()


@pytest.mark.parametrize("wrong", [-1, 16])
def test_a_code_that_the_decoder_does_not_have_is_refused(wrong: int) -> None:
    loss = MultiMLMLoss()
    targets = torch.zeros(2, 5, 1, dtype=torch.long)
    targets[1, 3] = wrong
    with pytest.raises(RuntimeError, match="contains a code that the decoder does not have: it has 0 to 15"):
        loss(masks=torch.ones(2, 3, 5), decoder_outputs=torch.zeros(2, 5, 16, 1), targets=targets)


def test_a_quantizer_with_more_codes_than_the_decoder_is_refused_before_a_model_is_built() -> None:
    """On a GPU it would be an assertion on the device in the first step."""
    with pytest.raises(ValueError, match=r"model\.decoder\.num_classes is 64, but quantizer\.num_classes is 128"):
        tiny_model({"quantizer.num_classes": 128})


def test_features_can_be_given_in_place_of_audio() -> None:
    model = tiny_model(NO_DROPOUT).eval()
    batch = noise_batch(LENGTHS)
    clean, length = model.preprocessor(input_signal=batch["input_signal"], length=batch["input_signal_length"])
    noisy, _ = model.preprocessor(input_signal=batch["noisy_input_signal"], length=batch["input_signal_length"])
    by_audio = model(**batch)
    by_features = model(
        processed_signal=clean,
        processed_signal_length=length,
        processed_noisy_input_signal=noisy,
        processed_noisy_input_signal_length=length,
    )
    for ours, expected in zip(by_features, by_audio, strict=True):
        torch.testing.assert_close(ours, expected)


def test_the_noise_by_itself_is_accepted_and_not_used() -> None:
    model = tiny_model().eval()
    batch = noise_batch(LENGTHS)
    noise = {"noise_signal": batch["input_signal"], "noise_signal_length": batch["input_signal_length"]}
    torch.testing.assert_close(model(**batch, **noise)[0], model(**batch)[0])


@pytest.mark.parametrize(
    "name", ["pre_conv", "streaming", "striding_abs_pos", "post_conv", "books", "post_conv_streaming"]
)
def test_an_utterance_gives_the_same_alone_and_padded_in_a_batch(name: str) -> None:
    # instance_norm and group_norm take their statistics over the padding too, in NeMo and here.
    model = tiny_model(VARIANTS[name], seed=4).eval()
    batch = noise_batch([40_000, 16_007, 28_323])
    log_probs, lengths, _, tokens = model(**batch)
    for row, samples in enumerate(batch["input_signal_length"].tolist()):
        alone = {
            key: value[row : row + 1] if value.ndim == 1 else value[row : row + 1, :samples]
            for key, value in batch.items()
        }
        log_probs_alone, length_alone, _, tokens_alone = model(**alone)
        valid = int(lengths[row])
        assert int(length_alone) == valid
        torch.testing.assert_close(log_probs[row, :valid], log_probs_alone[0, :valid], atol=1e-5, rtol=0)
        whole = int(model.preprocessor.featurizer.num_frames(torch.tensor(samples))) // 8
        assert torch.equal(tokens[row, :whole], tokens_alone[0, :whole])


class CountSynchronising(TorchDispatchMode):
    """Lists calls that make a GPU wait for the host or for another rank."""

    NAMES = ("_local_scalar_dense", "nonzero", "is_nonzero", "item", "masked_select", "unique", "equal", "c10d")

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.found: list[str] = []

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        name = str(func)
        if name.split(".")[0] in self.NAMES or name.split(".")[1] in self.NAMES:
            self.found.append(name)
        indices = args[1] if name.startswith("aten.index") and isinstance(args[1], list) else []
        if any(isinstance(index, Tensor) and index.dtype == torch.bool for index in indices):
            self.found.append(f"{name} with a boolean index")
        return func(*args, **(kwargs or {}))


def test_the_counter_sees_what_it_is_meant_to_see() -> None:
    x = torch.ones(3)
    with CountSynchronising() as counter:
        x.sum().item()
        x[x > 0]
        torch.nonzero(x)
    assert len(counter.found) >= 3


@pytest.mark.parametrize("name", VARIANTS)
def test_training_forward_and_loss_never_wait_for_the_device(name: str) -> None:
    model = tiny_model(VARIANTS[name]).train()
    batch = noise_batch(LENGTHS)
    with CountSynchronising() as counter:
        model.masked_loss(**train_inputs(batch)).loss.backward()
        log_probs, lengths, masks, tokens = model(**batch, apply_mask=True)
        model.loss(masks=masks, decoder_outputs=log_probs, targets=tokens, decoder_lengths=lengths)
    assert not counter.found


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")
@pytest.mark.parametrize("name", VARIANTS)
def test_cuda_reports_no_synchronisation(name: str) -> None:
    model = tiny_model(VARIANTS[name]).cuda().train()
    batch = {key: value.cuda() for key, value in noise_batch(LENGTHS).items()}
    for _ in range(2):  # compiling may wait, a step may not
        with torch.autocast("cuda", torch.bfloat16):
            loss = model.masked_loss(**train_inputs(batch)).loss
        loss.backward()
        model(**batch, apply_mask=True)
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        with torch.autocast("cuda", torch.bfloat16):
            loss = model.masked_loss(**train_inputs(batch)).loss
        loss.backward()
        log_probs, lengths, masks, tokens = model(**batch, apply_mask=True)
        model.loss(masks=masks, decoder_outputs=log_probs, targets=tokens, decoder_lengths=lengths)
    finally:
        torch.cuda.set_sync_debug_mode("default")


def test_a_model_cast_to_bf16_keeps_its_targets() -> None:
    model = tiny_model().eval()
    batch = noise_batch(LENGTHS)
    tokens = model(**batch)[3]
    assert model.to(torch.bfloat16).quantizer.codebooks.dtype == torch.float64
    assert torch.equal(model(**batch)[3], tokens)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64])
@pytest.mark.parametrize("position", ["pre_conv", "post_conv"])
def test_a_model_computes_in_the_precision_it_was_cast_to(dtype: torch.dtype, position: str) -> None:
    model = tiny_model({"mask_position": position}).eval()
    log_probs = model(**noise_batch(LENGTHS))[0]
    cast = model.to(dtype)(**noise_batch(LENGTHS), apply_mask=False)[0]
    assert cast.dtype == dtype
    torch.testing.assert_close(cast.float(), log_probs, atol=0.2 if dtype != torch.float64 else 1e-4, rtol=0)


@pytest.mark.parametrize("training", [False, True])
def test_the_forward_is_one_graph_for_the_compiler(training: bool) -> None:
    torch._dynamo.reset()
    model = tiny_model(NO_DROPOUT).train(training)
    batch = noise_batch(LENGTHS)
    expected = model(**batch)[0]
    compiled = torch.compile(model, backend="eager", fullgraph=True)
    torch.testing.assert_close(compiled(**batch)[0], expected)


def test_bf16_autocast_does_not_move_a_single_target() -> None:
    model = tiny_model(NO_DROPOUT).eval()
    batch = noise_batch(LENGTHS)
    expected = model(**batch)[3]
    with torch.autocast("cpu", torch.bfloat16):
        assert torch.equal(model(**batch)[3], expected)


def test_sync_max_audio_length_true_is_readable_and_changes_nothing(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO")
    _log_once.cache_clear()
    tiny_model({"encoder.sync_max_audio_length": True})
    synced, plain = tiny_model({"encoder.sync_max_audio_length": True}), tiny_model()
    assert synced.encoder.sync_max_audio_length
    assert not plain.encoder.sync_max_audio_length
    assert sum("changes nothing" in message for message in caplog.messages) == 1
    batch = noise_batch(LENGTHS)
    torch.testing.assert_close(synced.eval()(**batch)[0], plain.eval()(**batch)[0])


def test_the_config_stays_as_the_user_wrote_it() -> None:
    model = tiny_model({"mask_position": "post_conv"})
    assert model.cfg.masking.block_size == 40
    assert model.cfg.masking.feat_in == 80
    assert model.mask_processor.cfg.block_size == 5
    assert model.mask_processor.cfg.feat_in == 32


@pytest.mark.parametrize("kind", [EncDecMaskedTokenPredModel, EncDecDenoiseMaskedTokenPredModel])
def test_sizes_are_those_of_the_design(kind: type[EncDecMaskedTokenPredModel]) -> None:
    with torch.device("meta"):
        model = kind(model_section(tiny=False))
    assert sum(p.numel() for p in model.parameters()) == 113_106_000
    assert sum(p.numel() for p in model.encoder.parameters()) == 108_762_112
