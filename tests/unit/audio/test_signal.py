"""Pure functions on samples."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from nest_ssl.audio.signal import (
    gain_for_ratio,
    pad_audio,
    place_in_order,
    power,
    repeat_to,
    resample,
    split_length,
    to_mono,
    trim_silence,
    white_noise,
)
from tests.fuzz.effort import examples


def trim_by_definition(samples: np.ndarray) -> np.ndarray:
    """Frame by frame: 2048 samples around every 512th, zeros beyond the ends, kept within 60 dB of the loudest."""
    padded = np.pad(samples.astype(np.float64), 1024)
    frames = [padded[i * 512 : i * 512 + 2048] for i in range(1 + len(samples) // 512)]
    level_db = 20 * np.log10(np.maximum([np.sqrt(np.mean(frame**2)) for frame in frames], 1e-5))
    loud = np.flatnonzero(level_db > level_db.max() - 60)
    return samples[loud[0] * 512 : (loud[-1] + 1) * 512]


@examples(100)
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


@examples(100)
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


@examples(100)
@given(ratio_db=st.floats(-30, 30), seed=st.integers(0, 100))
def test_the_gain_brings_the_signals_to_the_requested_ratio(ratio_db: float, seed: int) -> None:
    rng = np.random.default_rng(seed)
    signal, added = rng.standard_normal((2, 4000)).astype(np.float32)
    scaled = added * np.float32(gain_for_ratio(power(signal), power(added), ratio_db))
    assert 10 * np.log10(power(signal) / power(scaled)) == pytest.approx(ratio_db, abs=1e-3)


def test_nothing_can_be_scaled_to_a_ratio_with_silence() -> None:
    assert gain_for_ratio(1.0, 0.0, 10.0) == 0.0
    assert power(np.empty(0, np.float32)) == 0.0


@examples(100)
@given(num_samples=st.integers(0, 500), lengths=st.lists(st.integers(0, 60), min_size=1, max_size=8))
def test_placed_segments_follow_each_other_inside_the_utterance(num_samples: int, lengths: list[int]) -> None:
    num_samples = max(num_samples, sum(lengths))
    starts = place_in_order(num_samples, lengths, np.random.default_rng(0))
    ends = [start + length for start, length in zip(starts, lengths, strict=True)]
    assert all(end <= start for end, start in zip(ends[:-1], starts[1:], strict=True))
    assert starts[0] >= 0
    assert ends[-1] <= num_samples


@examples(100)
@given(num_samples=st.integers(0, 10_000), num_parts=st.integers(1, 9))
def test_parts_add_up_to_the_whole(num_samples: int, num_parts: int) -> None:
    parts = split_length(num_samples, num_parts, np.random.default_rng(0))
    assert len(parts) == num_parts
    assert sum(parts) == num_samples
    assert min(parts) >= 0


def test_parts_of_a_long_stretch_are_about_equal() -> None:
    parts = split_length(1_000_000, 4, np.random.default_rng(0))
    assert max(abs(part - 250_000) for part in parts) < 3000  # 7 standard deviations


def test_repeating_goes_round_and_cuts_at_the_length() -> None:
    samples = np.array([1, 2, 3], np.float32)
    assert repeat_to(samples, 7).tolist() == [1, 2, 3, 1, 2, 3, 1]
    assert repeat_to(samples, 2).tolist() == [1, 2]
    assert repeat_to(np.empty(0, np.float32), 2).tolist() == [0, 0]


def test_short_audio_is_padded_by_repeating_or_with_zeros_and_long_audio_is_left_alone() -> None:
    samples = np.array([1, 2], np.float32)
    assert pad_audio(samples, 5, "repeat").tolist() == [1, 2, 1, 2, 1]
    assert pad_audio(samples, 5, "zero").tolist() == [1, 2, 0, 0, 0]
    assert pad_audio(samples, 1, "zero") is samples
    with pytest.raises(ValueError, match="'mirror' is not one of 'repeat', 'zero'"):
        pad_audio(samples, 5, "mirror")


@pytest.mark.parametrize("level_db", [-90, -46, 0])
def test_white_noise_has_the_level_asked_for(level_db: float) -> None:
    noise = white_noise(200_000, level_db, np.random.default_rng(0))
    assert noise.dtype == np.float32
    assert 10 * np.log10(power(noise)) == pytest.approx(level_db, abs=0.05)
