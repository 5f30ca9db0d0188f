"""Pure functions on samples."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from nest_ssl.audio import resample, to_mono, trim_silence


def trim_by_definition(samples: np.ndarray) -> np.ndarray:
    """Frame by frame: 2048 samples around every 512th, zeros beyond the ends, kept within 60 dB of the loudest."""
    padded = np.pad(samples.astype(np.float64), 1024)
    frames = [padded[i * 512 : i * 512 + 2048] for i in range(1 + len(samples) // 512)]
    level_db = 20 * np.log10(np.maximum([np.sqrt(np.mean(frame**2)) for frame in frames], 1e-5))
    loud = np.flatnonzero(level_db > level_db.max() - 60)
    return samples[loud[0] * 512 : (loud[-1] + 1) * 512]


@given(st.integers(1, 6000), st.integers(0, 3000), st.integers(0, 3000), st.floats(-7, 0))
def test_trimming_follows_its_definition(length: int, before: int, after: int, exponent: float) -> None:
    rng = np.random.default_rng(length)
    parts = [
        10**exponent * rng.uniform(-1, 1, before),
        rng.uniform(-1, 1, length),
        10**exponent * rng.uniform(-1, 1, after),
    ]
    samples = np.concatenate(parts).astype(np.float32)
    np.testing.assert_array_equal(trim_silence(samples), trim_by_definition(samples))


def test_trimming_digital_silence_leaves_it() -> None:
    assert len(trim_silence(np.zeros(3000, dtype=np.float32))) == 3000


@given(st.integers(1, 5000), st.sampled_from([8000, 11025, 15999, 22050, 44100, 48000]))
def test_resampling_keeps_the_duration(num_samples: int, rate: int) -> None:
    resampled = resample(np.ones(num_samples, dtype=np.float32), rate, 16000)
    assert 0 <= len(resampled) - num_samples * 16000 / rate <= 1 + 1e-6


def test_resampling_keeps_a_tone() -> None:
    def tone(rate: int) -> np.ndarray:
        return np.sin(2 * np.pi * 440 * np.arange(rate) / rate).astype(np.float32)

    np.testing.assert_allclose(resample(tone(44100), 44100, 16000)[500:-500], tone(16000)[500:-500], atol=1e-3)


@pytest.mark.parametrize("selector", [-1, [], [0, -1], "left", 1.5])
def test_selectors_that_make_no_sense_are_refused(selector: object) -> None:
    with pytest.raises(TypeError, match="channel_selector"):
        to_mono(np.zeros((10, 2), dtype=np.float32), selector)  # type: ignore[arg-type]


def test_mono_is_returned_as_it_is() -> None:
    samples = np.ones(10, dtype=np.float32)
    assert to_mono(samples, "average") is samples
    assert to_mono(samples, 0) is samples
    with pytest.raises(ValueError, match="1 channel"):
        to_mono(samples, 1)
