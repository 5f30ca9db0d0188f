from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from nest_ssl.audio.mixing import (
    gain_for_ratio,
    pad_audio,
    place_in_order,
    power,
    repeat_to,
    split_length,
    white_noise,
)


@given(ratio_db=st.floats(-30, 30), seed=st.integers(0, 100))
def test_the_gain_brings_the_signals_to_the_requested_ratio(ratio_db: float, seed: int) -> None:
    rng = np.random.default_rng(seed)
    signal, added = rng.standard_normal((2, 4000)).astype(np.float32)
    scaled = added * np.float32(gain_for_ratio(power(signal), power(added), ratio_db))
    assert 10 * np.log10(power(signal) / power(scaled)) == pytest.approx(ratio_db, abs=1e-3)


def test_nothing_can_be_scaled_to_a_ratio_with_silence() -> None:
    assert gain_for_ratio(1.0, 0.0, 10.0) == 0.0
    assert power(np.empty(0, np.float32)) == 0.0


@given(num_samples=st.integers(0, 500), lengths=st.lists(st.integers(0, 60), min_size=1, max_size=8))
def test_placed_segments_follow_each_other_inside_the_utterance(num_samples: int, lengths: list[int]) -> None:
    num_samples = max(num_samples, sum(lengths))
    starts = place_in_order(num_samples, lengths, np.random.default_rng(0))
    ends = [start + length for start, length in zip(starts, lengths, strict=True)]
    assert all(end <= start for end, start in zip(ends[:-1], starts[1:], strict=True))
    assert starts[0] >= 0
    assert ends[-1] <= num_samples


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
