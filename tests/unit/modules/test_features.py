from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from nest_ssl.checkpoint import read_nemo
from nest_ssl.modules import AudioToMelSpectrogramPreprocessor
from nest_ssl.modules.features import mel_filters, pre_emphasised
from nest_ssl.modules.inputs import valid_frames

HAS_GPU = torch.cuda.is_available()
GOLDEN = Path(__file__).parents[2] / "parity" / "golden"
OPTIONS = {"window_size": 0.025, "features": 80, "n_fft": 512}


def test_filterbanks_equal_those_in_nemos_files() -> None:
    for name, bands in (("pre_conv", 80), ("xlarge_style", 128)):
        theirs = read_nemo(GOLDEN / f"{name}.nemo").weights["preprocessor.featurizer.fb"][0]
        torch.testing.assert_close(mel_filters(16_000, 512, bands, 0, 8_000), theirs, atol=1e-8, rtol=1e-6)


def test_dither_is_added_in_training_only_and_follows_the_generator() -> None:
    preprocessor = AudioToMelSpectrogramPreprocessor(**OPTIONS, dither=0.1)
    audio, length = 0.1 * torch.randn(1, 8_000), torch.tensor([8_000])

    def mels(seed: int) -> torch.Tensor:
        out: torch.Tensor = preprocessor(audio, length, generator=torch.Generator().manual_seed(seed))[0]
        return out

    preprocessor.eval()
    assert torch.equal(mels(0), mels(1))
    preprocessor.train()
    assert torch.equal(mels(0), mels(0))
    assert not torch.equal(mels(0), mels(1))


VARIANTS: list[dict[str, Any]] = [
    {},
    {"preemph": None},
    {"n_fft": 511},
    {"log": False, "mag_power": 1.0, "window": "none"},
    {"window_stride": 0.02, "pad_to": 0},  # more than half a frame
    {"window_stride": 0.5, "n_fft": 400},  # gaps between frames; longer than most utterances here
]


@pytest.mark.parametrize("options", VARIANTS)
def test_frames_past_the_end_are_zero_whatever_the_samples_there(options: dict[str, Any]) -> None:
    preprocessor = AudioToMelSpectrogramPreprocessor(**{**OPTIONS, **options}).eval()
    length = torch.tensor([16_000, 0, 9_000, 1, 159, 160, 15_999, 0, 400, 15_900])
    audio = torch.randn(len(length), 16_000)  # not silent past the ends
    mels, num_frames = preprocessor(audio, length)
    assert mels.shape[2] == int(preprocessor.featurizer.num_padded_frames(torch.tensor(16_000)))
    assert not mels.where(~valid_frames(num_frames, mels.shape[2])[:, None], 0.0).any()
    assert torch.isfinite(mels).all()


@pytest.mark.parametrize(
    "device",
    ["cpu", pytest.param("cuda", marks=[pytest.mark.gpu, pytest.mark.skipif(not HAS_GPU, reason="no CUDA GPU")])],
)
def test_pre_emphasis_rounds_the_product_and_the_difference(device: str) -> None:
    audio = (0.1 * torch.randn(2, 4_000)).cumsum(1)  # neighbours are close: the difference nearly cancels
    samples = audio.numpy()
    product = (np.float32(0.97) * samples[:, :-1]).astype(np.float32)
    expected = np.concatenate((samples[:, :1], samples[:, 1:] - product), axis=1)
    assert np.array_equal(pre_emphasised(audio.to(device), 0.97).cpu().numpy(), expected)
    fused = torch.sub(audio[:, 1:].double(), audio[:, :-1].double(), alpha=float(np.float32(0.97))).float()
    assert not np.array_equal(fused.numpy(), expected[:, 1:])  # one rounding would show


def test_an_utterance_does_not_hear_its_neighbours_in_the_batch() -> None:
    audio, length = torch.randn(3, 16_000), torch.tensor([9_000, 8_000, 16_000])
    preprocessor = AudioToMelSpectrogramPreprocessor(**OPTIONS).eval()
    mels, frames = preprocessor(audio, length)
    for row, (samples, valid) in enumerate(zip(length.tolist(), frames.tolist(), strict=True)):
        alone, _ = preprocessor(audio[row : row + 1, :samples], length[row : row + 1])
        torch.testing.assert_close(mels[row, :, :valid], alone[0, :, :valid], atol=1e-5, rtol=1e-5)


def test_frames_are_padded_to_a_multiple() -> None:
    audio, length = torch.randn(1, 16_000), torch.tensor([16_000])
    for pad_to, frames in ((16, 112), (0, 101), (50, 150)):
        mels, valid = AudioToMelSpectrogramPreprocessor(**OPTIONS, pad_to=pad_to).eval()(audio, length)
        assert mels.shape[2] == frames
        assert valid.tolist() == [100]
        assert not mels[:, :, 100:].any()


def test_frames_past_the_end_have_the_value_asked_for() -> None:
    audio, length = torch.randn(2, 16_000), torch.tensor([16_000, 8_000])
    for normalize in ("per_feature", None):
        options = {**OPTIONS, "normalize": normalize}
        mels, valid = AudioToMelSpectrogramPreprocessor(**options, pad_value=-4.0).eval()(audio, length)
        inside = valid_frames(valid, mels.shape[2])[:, None]
        expected, _ = AudioToMelSpectrogramPreprocessor(**options).eval()(audio, length)
        assert torch.equal(mels, torch.where(inside, expected, -4.0))
        assert not expected.where(~inside, 0.0).any()


def test_each_band_of_an_utterance_has_mean_zero_and_deviation_one() -> None:
    audio = torch.randn(2, 16_000)
    mels, length = AudioToMelSpectrogramPreprocessor(**OPTIONS).eval()(audio, torch.tensor([16_000, 9_000]))
    for row, valid in enumerate(length.tolist()):
        inside = mels[row, :, :valid]
        torch.testing.assert_close(inside.mean(1), torch.zeros(80), atol=1e-4, rtol=0)
        torch.testing.assert_close(inside.std(1), torch.ones(80), atol=1e-3, rtol=0)


def test_a_window_of_none_is_rectangular_and_not_saved() -> None:
    preprocessor = AudioToMelSpectrogramPreprocessor(**OPTIONS, window="none").eval()
    assert "featurizer.window" not in preprocessor.state_dict()
    assert torch.isfinite(preprocessor(torch.randn(1, 8_000), torch.tensor([8_000]))[0]).all()


def test_autocast_does_not_touch_the_features() -> None:
    preprocessor = AudioToMelSpectrogramPreprocessor(**OPTIONS).eval()
    audio, length = torch.randn(1, 8_000), torch.tensor([8_000])
    with torch.autocast("cpu", torch.bfloat16):
        inside = preprocessor(audio, length)[0]
    assert inside.dtype == torch.float32
    assert torch.equal(inside, preprocessor(audio, length)[0])
