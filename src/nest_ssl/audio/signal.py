"""Pure functions on sample arrays: mono, resampling, trimming, padding, gains and segments for mixing.

N samples, C channels.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import soxr
from numpy.typing import NDArray

Samples = NDArray[np.float32]
ChannelSelector = int | str | list[int] | None

TRIM_HOP = 512
TRIM_HOPS_PER_FRAME = 4
TRIM_TOP_DB = 60.0
TRIM_FLOOR = 1e-5


def to_mono(samples: Samples, channel_selector: ChannelSelector = None) -> Samples:
    """Return (N,) from (N,) or (N, C): one channel, the mean of a list of them, or (None, 'average') of all."""
    channels = _chosen_channels(channel_selector)
    num_channels = 1 if samples.ndim == 1 else samples.shape[1]
    if channels is not None and max(channels) >= num_channels:
        raise ValueError(f"channel_selector is {channel_selector}, but the file has only {num_channels} channel(s)")
    if samples.ndim == 1:
        return samples
    if num_channels == 1:
        return samples[:, 0]
    if channels is None:
        return _mean(samples)
    return samples[:, channels[0]] if len(channels) == 1 else _mean(samples[:, channels])


def _mean(samples_NC: Samples) -> Samples:
    mean: Samples = samples_NC.mean(axis=1, dtype=np.float32)
    return mean


def _chosen_channels(channel_selector: Any) -> list[int] | None:
    """Return the channel numbers of a selector; None for all of them."""
    if channel_selector is None or channel_selector == "average":
        return None
    channels = [channel_selector] if isinstance(channel_selector, int) else channel_selector
    if not isinstance(channels, list) or not channels or not all(isinstance(c, int) and c >= 0 for c in channels):
        raise TypeError(
            f"channel_selector is {channel_selector!r}. Give a channel number, a list of them, or 'average'."
        )
    return channels


def resample(samples: Samples, from_rate: int, to_rate: int) -> Samples:
    """Return ceil(N * to_rate / from_rate) samples at `to_rate`: soxr HQ, the length that librosa and NeMo give."""
    if from_rate == to_rate:
        return samples
    num_samples = math.ceil(len(samples) * (float(to_rate) / from_rate))
    resampled: Samples = soxr.resample(samples, from_rate, to_rate, quality="HQ")[:num_samples]
    missing = num_samples - len(resampled)
    return np.pad(resampled, (0, missing)) if missing else resampled


def trim_silence(samples: Samples) -> Samples:
    """Cut the frames at both ends that are 60 dB or more below the loudest frame.

    Frames have 2048 samples, every 512, centred, with zeros beyond the ends: as librosa.effects.trim and NeMo do it.
    """
    num_hops = -(-len(samples) // TRIM_HOP)
    half = TRIM_HOPS_PER_FRAME // 2
    energy_per_hop = np.zeros(num_hops + 2 * half, dtype=np.float64)
    whole = samples[: len(samples) // TRIM_HOP * TRIM_HOP].reshape(-1, TRIM_HOP)
    energy_per_hop[half : half + len(whole)] = np.einsum("hs,hs->h", whole, whole, dtype=np.float64)
    rest = samples[whole.size :].astype(np.float64)
    energy_per_hop[half + len(whole)] += rest @ rest

    num_frames = 1 + len(samples) // TRIM_HOP
    energy = sum(energy_per_hop[k : k + num_frames] for k in range(TRIM_HOPS_PER_FRAME))
    rms = np.sqrt(energy / (TRIM_HOP * TRIM_HOPS_PER_FRAME))
    level_db = 20 * np.log10(np.maximum(rms, TRIM_FLOOR))
    loud = np.flatnonzero(level_db > level_db.max() - TRIM_TOP_DB)
    return samples[loud[0] * TRIM_HOP : (loud[-1] + 1) * TRIM_HOP]


def power(samples: Samples) -> float:
    """Return the mean square; 0 for no samples.

    numpy sums the squares pairwise; the result of BLAS would depend on its number of threads.
    """
    return float(np.square(samples).sum()) / len(samples) if len(samples) else 0.0


def gain_for_ratio(signal_power: float, added_power: float, ratio_db: float) -> float:
    """Return the gain that puts the added signal `ratio_db` below the signal; 0 if there is nothing to scale."""
    if added_power <= 0:
        return 0.0
    return float(np.sqrt(signal_power / (10 ** (ratio_db / 10) * added_power)))


def repeat_to(samples: Samples, num_samples: int) -> Samples:
    """Repeat `samples` to a length of `num_samples`, or cut it to that; silence if there are none."""
    if len(samples) >= num_samples:
        return samples[:num_samples]
    if len(samples) == 0:
        return np.zeros(num_samples, np.float32)
    return np.resize(samples, num_samples)


def pad_audio(samples: Samples, min_num_samples: int, mode: str) -> Samples:
    """Extend to at least `min_num_samples`: by repeating ('repeat') or with silence at the end ('zero')."""
    if len(samples) >= min_num_samples:
        return samples
    if mode == "repeat":
        return repeat_to(samples, min_num_samples)
    if mode == "zero":
        return np.pad(samples, (0, min_num_samples - len(samples)))
    raise ValueError(f"pad_audio_mode: {mode!r} is not one of 'repeat', 'zero'.")


def white_noise(num_samples: int, level_db: float, generator: np.random.Generator) -> Samples:
    """Return Gaussian noise at `level_db` relative to a power of 1."""
    noise: Samples = generator.standard_normal(num_samples, np.float32)
    noise *= np.float32(10 ** (level_db / 20))
    return noise


def split_length(num_samples: int, num_parts: int, generator: np.random.Generator) -> list[int]:
    """Return the lengths of `num_parts` parts: each sample falls into any of them with equal probability."""
    if num_parts == 1:
        return [num_samples]
    return generator.multinomial(num_samples, np.full(num_parts, 1 / num_parts)).tolist()  # type: ignore[no-any-return]


def place_in_order(num_samples: int, lengths: Sequence[int], generator: np.random.Generator) -> list[int]:
    """Return the starts of segments that follow each other without overlap within `num_samples`.

    Each segment starts anywhere that leaves room for all segments after it.
    """
    starts: list[int] = []
    earliest, latest = 0, num_samples - sum(lengths)
    for length in lengths:
        start = draw_integer(generator, earliest, latest)
        starts.append(start)
        earliest = start + length
        latest += length
    return starts


def speech_in_turns(
    speakers: Sequence[Samples], lengths: Sequence[int], generator: np.random.Generator
) -> list[Samples]:
    """Return one piece per length: each speaker once, then again from a random one after the last speaker."""
    pieces: list[Samples] = []
    turn = 0
    for length in lengths:
        speech = speakers[turn]
        start = draw_integer(generator, 0, len(speech) - length)
        pieces.append(repeat_to(speech[start:], length))
        turn += 1
        if turn == len(speakers):
            turn = int(generator.integers(len(speakers)))
    return pieces


def draw_integer(generator: np.random.Generator, least: int, below: int) -> int:
    """Draw uniformly from [least, below); `least` if that is empty."""
    return int(generator.integers(least, below)) if least < below else least


@dataclass(frozen=True)
class Segment:
    """Samples, and where in the utterance they are added."""

    start: int
    samples: Samples


@dataclass(frozen=True)
class Added:
    """What is added to one utterance: `gain` times each segment."""

    gain: float
    segments: list[Segment]


def write_added(row: Samples, added: Added) -> None:
    """Fill `row` with the added signal: zeros, and the scaled segments, each sample written once."""
    end = 0
    for segment in sorted(added.segments, key=lambda segment: segment.start):
        row[end : segment.start] = 0
        end = segment.start + len(segment.samples)
        np.multiply(segment.samples, np.float32(added.gain), out=row[segment.start : end])
    row[end:] = 0
