"""Bad input gives a clear error or a documented result."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from nest_ssl import EncDecMaskedTokenPredModel
from tests.helpers import noise_batch, tiny_model


@pytest.fixture(scope="module")
def model() -> EncDecMaskedTokenPredModel:
    return tiny_model().eval()


def changed(**changes: Any) -> dict[str, Tensor]:
    return {**noise_batch([16_000, 12_000]), **changes}


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"input_signal": torch.zeros(16_000)}, r"input_signal: expected audio of shape \(batch, samples\)"),
        ({"input_signal": torch.zeros(2, 0)}, "expected audio of shape"),
        ({"input_signal": torch.zeros(2, 1, 16_000)}, "expected audio of shape"),
        ({"input_signal": torch.zeros(2, 16_000, dtype=torch.int16)}, "floating-point audio.*int16: 32768"),
        ({"input_signal_length": torch.tensor([16_000.0, 12_000.0])}, "input_signal_length: expected integers"),
        ({"input_signal_length": torch.tensor([16_000])}, r"input_signal_length: expected shape \(2,\), .* got \(1,\)"),
        ({"input_signal_length": torch.tensor([[16_000], [12_000]])}, r"expected shape \(2,\), .* got \(2, 1\)"),
        ({"input_signal_length": [16_000, 12_000]}, "input_signal_length: expected a tensor of integers, got list"),
        ({"input_signal_length": torch.tensor([True, True])}, "expected integers, got torch.bool"),
        ({"input_signal_length": torch.zeros(2, dtype=torch.long, device="meta")}, "is on meta, but what it measures"),
        ({"input_signal": [[0.0] * 16_000] * 2}, "input_signal: expected audio of shape .* got list"),
        ({"input_signal": torch.zeros(0, 16_000)}, r"got \(0, 16000\): it is empty"),
        ({"input_signal": torch.zeros(2, 16_000).to_sparse()}, "got layout torch.sparse_coo"),
        ({"input_signal": torch.zeros(2, 16_000, device="meta")}, "is on meta, but the model is on cpu"),
        (
            {"noisy_input_signal": torch.zeros(1, 16_000), "noisy_input_signal_length": torch.tensor([16_000])},
            "input_signal has 2 rows and noisy_input_signal has 1",
        ),
        ({"input_signal_length": torch.tensor([16_001, 12_000])}, r"input_signal_length\[0\] is 16001"),
        ({"noisy_input_signal_length": torch.tensor([16_000, -1])}, r"noisy_input_signal_length\[1\] is -1"),
        ({"noisy_input_signal": torch.full((2, 16_000), float("nan"))}, r"noisy_input_signal\[0\] holds NaN"),
        ({"input_signal": torch.full((2, 16_000), float("inf"))}, r"input_signal\[0\] holds NaN or infinite"),
        ({"input_signal": None}, "neither input_signal nor processed_signal is given"),
        ({"noisy_input_signal_length": None}, "neither noisy_input_signal nor processed_noisy_input_signal"),
        (
            {"processed_signal": torch.zeros(2, 80, 101), "processed_signal_length": torch.tensor([100, 75])},
            "both input_signal and processed_signal",
        ),
    ],
)
def test_wrong_input_gives_a_clear_error(
    model: EncDecMaskedTokenPredModel, changes: dict[str, Any], words: str
) -> None:
    with pytest.raises(ValueError, match=words):
        model(**changed(**changes))


@pytest.mark.parametrize(
    ("features", "words"),
    [
        (torch.zeros(2, 81, 100), r"shape \(batch, 80, frames\)"),
        (torch.zeros(2, 80), r"shape \(batch, 80, frames\)"),
        (torch.zeros(2, 80, 100, dtype=torch.long), "floating-point features"),
    ],
)
def test_wrong_features_give_a_clear_error(model: EncDecMaskedTokenPredModel, features: Tensor, words: str) -> None:
    length = torch.tensor([100, 50])
    with pytest.raises(ValueError, match=words):
        model(
            processed_signal=features,
            processed_signal_length=length,
            processed_noisy_input_signal=features,
            processed_noisy_input_signal_length=length,
        )


ONE = torch.tensor([100])


@pytest.mark.parametrize(
    ("module", "arguments", "words"),
    [
        (
            "preprocessor",
            {"input_signal": torch.zeros(1600), "length": ONE},
            r"shape \(batch, samples\), got \(1600,\)",
        ),
        ("preprocessor", {"input_signal": torch.zeros(1, 1600).short(), "length": ONE}, "int16: 32768"),
        ("preprocessor", {"input_signal": torch.zeros(2, 1600), "length": ONE}, r"length: expected shape \(2,\)"),
        ("quantizer", {"input_signal": torch.zeros(1, 81, 16)}, r"shape \(batch, 80, frames\), got \(1, 81, 16\)"),
        ("mask_processor", {"input_feats": torch.zeros(80, 16), "input_lengths": ONE}, r"\(batch, 80, frames\)"),
        ("mask_processor", {"input_feats": torch.zeros(2, 80, 16), "input_lengths": ONE}, "input_lengths: expected"),
        ("encoder", {"audio_signal": torch.zeros(1, 100, 80), "length": ONE}, r"\(batch, 80, frames\), got \(1, 100"),
        ("encoder", {"audio_signal": torch.zeros(1, 80, 0), "length": ONE}, "it is empty"),
        ("encoder", {"audio_signal": torch.zeros(1, 80, 99), "length": ONE.float()}, "length: expected integers"),
        ("decoder", {"encoder_output": torch.zeros(1, 33, 9)}, r"shape \(batch, 32, frames\)"),
        (
            "loss",
            {"masks": torch.zeros(1, 9), "decoder_outputs": torch.zeros(1, 1, 64, 1), "targets": torch.zeros(1, 1, 1)},
            r"masks: expected a tensor of shape \(batch, features, frames\)",
        ),
        (
            "loss",
            {"masks": torch.zeros(1, 80, 8), "decoder_outputs": torch.zeros(1, 1, 64, 1), "targets": torch.zeros(1, 1)},
            r"targets: expected a tensor of shape \(1, tokens, 1\)",
        ),
    ],
)
def test_every_module_names_the_shape_it_expects(
    model: EncDecMaskedTokenPredModel, module: str, arguments: dict[str, Any], words: str
) -> None:
    with pytest.raises(ValueError, match=words):
        model.get_submodule(module)(**arguments)


@pytest.mark.parametrize("dtype", [torch.int8, torch.uint8, torch.int16, torch.int32])
def test_lengths_may_be_any_integers(model: EncDecMaskedTokenPredModel, dtype: torch.dtype) -> None:
    batch = noise_batch([120, 100])
    lengths = {key: value.to(dtype) for key, value in batch.items() if key.endswith("length")}
    assert torch.equal(model(**{**batch, **lengths})[0], model(**batch)[0])


def test_fewer_frames_than_a_token_are_no_token_and_a_loss_of_zero() -> None:
    model = tiny_model({"preprocessor.pad_to": 0}).train()
    batch = noise_batch([800, 500])
    assert model(**batch)[3].shape == (2, 0, 1)
    loss = model.masked_loss(*batch.values()).loss
    loss.backward()
    assert float(loss.detach()) == 0


def test_a_length_beyond_the_frames_counts_as_the_frames(model: EncDecMaskedTokenPredModel) -> None:
    features = torch.randn(1, 80, 100)
    beyond, expected = (model.encoder(audio_signal=features, length=torch.tensor([n])) for n in (999, 100))
    assert torch.equal(beyond[0], expected[0])
    assert torch.equal(beyond[1], expected[1])


def test_a_length_of_zero_gives_no_frames_and_finite_numbers(model: EncDecMaskedTokenPredModel) -> None:
    length = torch.tensor([16_000, 0])
    log_probs, encoded_len, masks, _ = model(
        **changed(input_signal_length=length, noisy_input_signal_length=length), apply_mask=True
    )
    assert encoded_len.tolist()[1] == 0
    assert torch.isfinite(log_probs).all()
    assert not masks[1].any()


def test_less_than_one_frame_of_audio_is_no_frame(model: EncDecMaskedTokenPredModel) -> None:
    mels, length = model.preprocessor(input_signal=torch.randn(1, 100), length=torch.tensor([100]))
    assert length.tolist() == [0]
    assert not mels.any()


def test_one_frame_of_audio_is_finite(model: EncDecMaskedTokenPredModel) -> None:
    mels, length = model.preprocessor(input_signal=torch.randn(1, 200), length=torch.tensor([200]))
    assert length.tolist() == [1]
    assert torch.isfinite(mels).all()


def test_half_precision_audio_is_read_as_float32(model: EncDecMaskedTokenPredModel) -> None:
    batch = changed()
    as_double = {key: value.double() if value.is_floating_point() else value for key, value in batch.items()}
    torch.testing.assert_close(model(**as_double)[0], model(**batch)[0])


def test_in_training_a_length_beyond_the_signal_counts_as_the_signals() -> None:
    model = tiny_model().train()
    batch = changed(input_signal_length=torch.tensor([99_999, 12_000]))
    batch["noisy_input_signal_length"] = batch["input_signal_length"]
    assert model(**batch)[1].tolist() == [13, 10]


def test_in_training_a_nan_shows_in_the_loss() -> None:
    model = tiny_model({"masking.mask_prob": 0.2}).train()
    batch = changed()
    batch["noisy_input_signal"][0, 5_000] = float("nan")
    predicted = model.masked_loss(
        batch["input_signal"],
        batch["input_signal_length"],
        batch["noisy_input_signal"],
        batch["noisy_input_signal_length"],
    )
    assert not torch.isfinite(predicted.loss)


def test_inputs_are_not_modified() -> None:
    model = tiny_model().train()
    batch = noise_batch([16_000, 12_000])
    before = {key: value.clone() for key, value in batch.items()}
    model(**batch, apply_mask=True)
    assert all(torch.equal(batch[key], before[key]) for key in batch)
