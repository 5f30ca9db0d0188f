"""The eight models that NeMo 2.7.3 saved, and the numbers it computes from them."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import numpy.typing as npt
import pytest
import torch
from torch import Tensor

from nest_ssl import EncDecMaskedTokenPredModel, load

GOLDEN = Path(__file__).parent / "golden"
CASES = sorted(path.stem for path in GOLDEN.glob("*.nemo"))

Arrays = dict[str, npt.NDArray[np.float64]]


@pytest.fixture(scope="module", params=CASES)
def case(request: pytest.FixtureRequest) -> tuple[EncDecMaskedTokenPredModel, Arrays]:
    with np.load(GOLDEN / f"{request.param}.npz") as arrays:
        return load(GOLDEN / f"{request.param}.nemo"), dict(arrays)


@pytest.fixture(scope="module")
def batch() -> dict[str, Tensor]:
    with np.load(GOLDEN / "batch.npz") as arrays:
        audio, noisy, length = (torch.from_numpy(arrays[key]) for key in ("audio", "noisy", "audio_len"))
    return {
        "input_signal": audio,
        "input_signal_length": length,
        "noisy_input_signal": noisy,
        "noisy_input_signal_length": length,
    }


def largest_difference(ours: Tensor, recorded: npt.NDArray[np.float64]) -> float:
    assert tuple(ours.shape) == recorded.shape
    return float(np.abs(ours.detach().numpy() - recorded).max())


def test_there_are_eight_cases() -> None:
    assert len(CASES) == 8


def test_features_equal_nemos(case: tuple[EncDecMaskedTokenPredModel, Arrays], batch: dict[str, Tensor]) -> None:
    model, recorded = case
    for name, key in (("input_signal", "mel_clean"), ("noisy_input_signal", "mel_noisy")):
        mels, length = model.preprocessor(input_signal=batch[name], length=batch["input_signal_length"])
        assert (length.numpy() == recorded["mel_len"]).all()
        if key in recorded:
            assert largest_difference(mels, recorded[key]) < 1e-4


def test_tokens_of_valid_frames_are_identical(
    case: tuple[EncDecMaskedTokenPredModel, Arrays], batch: dict[str, Tensor]
) -> None:
    model, recorded = case
    tokens = model(**batch)[3].numpy()
    assert tokens.shape == recorded["tokens"].shape
    frames_per_token = model.quantizer.cfg.combine_time_steps
    # In the padding NeMo's codes are ties of a zero vector; a post_conv token is an encoder frame.
    valid = recorded["encoded_len"] if model.pre_encoder is not None else recorded["mel_len"] // frames_per_token
    for row, length in enumerate(valid):
        assert (tokens[row, : int(length)] == recorded["tokens"][row, : int(length)]).all()


def test_encoder_layers_and_log_probs_equal_nemos(
    case: tuple[EncDecMaskedTokenPredModel, Arrays], batch: dict[str, Tensor]
) -> None:
    model, recorded = case
    seen: dict[int, Tensor] = {}
    hooks = [
        layer.register_forward_hook(lambda _m, _i, out, index=index: seen.__setitem__(index, out))
        for index, layer in enumerate(model.encoder.layers)
    ]
    with torch.no_grad():
        log_probs, encoded_len, masks, _ = model(**batch)
        mels, mel_len = model.preprocessor(
            input_signal=batch["noisy_input_signal"], length=batch["noisy_input_signal_length"]
        )
        encoded, _ = model.encoder(audio_signal=mels, length=mel_len)
    for hook in hooks:
        hook.remove()
    assert (encoded_len.numpy() == recorded["encoded_len"]).all()
    assert tuple(masks.shape) == recorded["mask"].shape
    assert not masks.any()
    assert largest_difference(encoded, recorded["encoded"]) < 1e-4
    assert largest_difference(log_probs, recorded["log_probs"]) < 1e-4
    for index, out in seen.items():
        assert largest_difference(out, recorded[f"layer_{index}"]) < 1e-4


def test_loss_and_every_gradient_equal_nemos(
    case: tuple[EncDecMaskedTokenPredModel, Arrays], batch: dict[str, Tensor]
) -> None:
    model, recorded = case
    masks = torch.from_numpy(recorded["mask"])
    with torch.no_grad():
        log_probs, encoded_len, _, tokens = model.eval()(**batch)
        loss = model.loss(masks=masks, decoder_outputs=log_probs, targets=tokens, decoder_lengths=encoded_len)
    assert abs(float(loss) - float(recorded["loss"])) < 1e-5
    statistics = {name: value.clone() for name, value in model.state_dict().items()}
    model.train().zero_grad()
    log_probs, encoded_len, _, tokens = model(**batch)
    assert abs(float(log_probs.detach().mean()) - float(recorded["train_log_probs_mean"])) < 1e-5
    model.loss(masks=masks, decoder_outputs=log_probs, targets=tokens, decoder_lengths=encoded_len).backward()
    model.load_state_dict(statistics)
    model.eval()
    nemo = {key.removeprefix("grad/"): value for key, value in recorded.items() if key.startswith("grad/")}
    ours = {name: p.grad.numpy() for name, p in model.named_parameters() if p.grad is not None}
    assert ours.keys() == nemo.keys()
    largest = max(float(np.linalg.norm(gradient)) for gradient in nemo.values())
    for name, gradient in nemo.items():
        allowed = 1e-3 * max(float(np.linalg.norm(gradient)), 1e-3 * largest)
        assert float(np.linalg.norm(ours[name] - gradient)) < allowed, name
