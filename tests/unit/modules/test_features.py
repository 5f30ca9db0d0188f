from __future__ import annotations

from pathlib import Path

import torch

from nest_ssl.checkpoint import read_nemo
from nest_ssl.modules import AudioToMelSpectrogramPreprocessor
from nest_ssl.modules.features import mel_filters

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


def test_frames_are_padded_to_a_multiple() -> None:
    audio, length = torch.randn(1, 16_000), torch.tensor([16_000])
    for pad_to, frames in ((16, 112), (0, 101), (50, 150)):
        mels, valid = AudioToMelSpectrogramPreprocessor(**OPTIONS, pad_to=pad_to).eval()(audio, length)
        assert mels.shape[2] == frames
        assert valid.tolist() == [100]
        assert not mels[:, :, 100:].any()


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
