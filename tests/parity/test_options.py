"""Every option that NEST's configs use, against what NeMo 2.7.3 computed with it (see record_nemo.py)."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import torch
from torch import Tensor

from nest_ssl import EncDecDenoiseMaskedTokenPredModel, EncDecMaskedTokenPredModel
from tests.helpers import model_section
from tests.parity import cases

OPTIONS = Path(__file__).parent / "options"
WITHOUT_NOISE = ("dw_striding_8", "post_conv")

Recorded = dict[str, npt.NDArray[Any]]


def recorded(name: str) -> Recorded:
    with np.load(OPTIONS / f"{name}.npz") as arrays:
        return dict(arrays)


def build(
    overrides: dict[str, Any], kind: type[EncDecMaskedTokenPredModel] = EncDecDenoiseMaskedTokenPredModel
) -> EncDecMaskedTokenPredModel:
    model = kind(model_section({**cases.BASE, **overrides}, tiny=False))
    cases.fill_parameters(model.state_dict())
    return model


def outputs(model: EncDecMaskedTokenPredModel) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    clean, noisy, lengths = cases.audio()
    inputs = {"input_signal": clean, "input_signal_length": lengths}
    if isinstance(model, EncDecDenoiseMaskedTokenPredModel):
        inputs |= {"noisy_input_signal": noisy, "noisy_input_signal_length": lengths}
    out: tuple[Tensor, Tensor, Tensor, Tensor] = model(**inputs)
    return out


def assert_equals_nemo(model: EncDecMaskedTokenPredModel, nemo: Recorded) -> None:
    clean, _, lengths = cases.audio()
    with torch.no_grad():
        mels, mel_len = model.eval().preprocessor(input_signal=clean, length=lengths)
        log_probs, encoded_len, masks, tokens = outputs(model)
        encoded, _ = model.encoder(audio_signal=mels, length=mel_len)
    assert (mel_len.numpy() == nemo["mel_len"]).all()
    assert (encoded_len.numpy() == nemo["encoded_len"]).all()
    np.testing.assert_allclose(mels.numpy()[:, ::5, ::7], nemo["mels"], atol=1e-4, rtol=1e-5)
    np.testing.assert_allclose(encoded.numpy(), nemo["encoded"], atol=1e-4)
    np.testing.assert_allclose(log_probs.numpy(), nemo["log_probs"], atol=1e-4)
    assert tokens.shape == nemo["tokens"].shape
    per_token = model.loss.cfg.combine_time_steps
    for row in range(len(lengths)):
        valid = int(encoded_len[row]) if model.pre_encoder is not None else int(mel_len[row]) // per_token
        assert (tokens[row, :valid].numpy() == nemo["tokens"][row, :valid]).all()

    model.train()
    log_probs, encoded_len, _, tokens = outputs(model)
    mask = cases.token_mask(len(lengths), 4, masks.shape[2], per_token)
    loss = model.loss(masks=mask, decoder_outputs=log_probs, targets=tokens, decoder_lengths=encoded_len)
    assert abs(float(loss.detach()) - float(nemo["loss"])) < 1e-5
    loss.backward()
    assert_gradients_equal(model, json.loads(str(nemo["gradients"])))


def assert_gradients_equal(model: torch.nn.Module, nemo: dict[str, list[float]]) -> None:
    ours = {k: cases.gradient_marks(k, p.grad) for k, p in model.named_parameters() if p.grad is not None}
    assert ours.keys() == nemo.keys()
    largest = max(norm for norm, _ in nemo.values())
    for name, (norm, along) in nemo.items():
        allowed = 1e-3 * max(norm, 1e-3 * largest)
        assert abs(ours[name][0] - norm) < allowed, name
        assert abs(ours[name][1] - along) < allowed, name


@pytest.mark.parametrize("name", cases.CASES)
def test_option_equals_nemo(name: str) -> None:
    assert_equals_nemo(build(cases.CASES[name]), recorded(name))


@pytest.mark.parametrize("name", WITHOUT_NOISE)
def test_model_without_noise_equals_nemo(name: str) -> None:
    model = build(cases.CASES[name], EncDecMaskedTokenPredModel)
    assert_equals_nemo(model, recorded(f"without_noise_{name}"))


def train_outputs(overrides: dict[str, Any], draws: int) -> npt.NDArray[np.float32]:
    model = build(overrides).train()
    clean, _, lengths = cases.audio()
    with torch.no_grad():
        mels, mel_len = model.preprocessor(input_signal=clean, length=lengths)
        return np.stack([model.encoder(audio_signal=mels, length=mel_len)[0].numpy() for _ in range(draws)])


def dropout_statistics(name: str, prob: float) -> tuple[float, float]:
    """Root mean square z of the means, and the ratio of the variances, ours over NeMo's."""
    torch.manual_seed(1)
    nemo = recorded(f"random_{name}")
    drawn = train_outputs({f"encoder.{name}": prob, "encoder.conv_norm_type": "layer_norm"}, cases.DROPOUT_DRAWS)
    mean, var = drawn.mean(0), drawn.var(0)
    z = (mean - nemo["mean"]) / np.sqrt((var + nemo["var"]) / cases.DROPOUT_DRAWS + 1e-12)
    return float(np.sqrt((z**2).mean())), float(var.mean() / nemo["var"].mean())


@pytest.mark.parametrize("name", cases.DROPOUTS)
def test_dropout_acts_where_and_as_much_as_nemos(name: str) -> None:
    z, ratio = dropout_statistics(name, 0.3)
    assert z < 1.3
    assert abs(ratio - 1) < 0.07


def test_the_dropout_statistics_notice_another_rate() -> None:
    assert abs(dropout_statistics("dropout", 0.35)[1] - 1) > 0.07


RANDOM_CHOICES = {
    **{name: {**cases.STOCHASTIC_DEPTH, **overrides} for name, overrides in cases.DEPTHS.items()},
    "contexts": cases.CONTEXTS,
}


@pytest.mark.parametrize("name", RANDOM_CHOICES)
def test_random_choices_have_nemos_outcomes_as_often(name: str) -> None:
    torch.manual_seed(2)
    nemo = recorded(f"random_{name}")
    share = nemo["counts"] / nemo["counts"].sum()
    draws = 300
    counts = np.zeros(len(share))
    for one in train_outputs(RANDOM_CHOICES[name], draws):
        distance = np.abs(nemo["distinct"] - one).max(axis=(1, 2, 3))
        assert distance.min() < 1e-4  # no outcome that NeMo does not have
        counts[distance.argmin()] += 1
    spread = np.sqrt(share * (1 - share) * (1 / draws + 1 / nemo["counts"].sum()))
    assert (np.abs(counts / draws - share) < 4.5 * spread).all()
