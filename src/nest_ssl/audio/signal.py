"""Pure functions on sample arrays: channels to mono, sample rate, silence at the ends.

N samples, C channels.
"""

from __future__ import annotations

import math
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
    """(N,) from (N,) or (N, C): one channel, the mean of a list of channels, or (None, 'average') the mean of all."""
    channels = _chosen_channels(channel_selector)
    num_channels = 1 if samples.ndim == 1 else samples.shape[1]
    if channels is not None and max(channels) >= num_channels:
        raise ValueError(
            f"channel_selector {channel_selector} asks for more than the {num_channels} channel(s) there are"
        )
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
    """The channel numbers of a selector; None for all of them."""
    if channel_selector is None or channel_selector == "average":
        return None
    channels = [channel_selector] if isinstance(channel_selector, int) else channel_selector
    if not isinstance(channels, list) or not channels or not all(isinstance(c, int) and c >= 0 for c in channels):
        raise TypeError(
            f"channel_selector is {channel_selector!r}. Give a channel number, a list of them, or 'average'."
        )
    return channels


def resample(samples: Samples, from_rate: int, to_rate: int) -> Samples:
    """(N,) at `to_rate`, ceil(N * to_rate / from_rate) samples long: soxr HQ, the length librosa and NeMo give."""
    if from_rate == to_rate:
        return samples
    num_samples = math.ceil(len(samples) * (float(to_rate) / from_rate))
    resampled: Samples = soxr.resample(samples, from_rate, to_rate, quality="HQ")[:num_samples]
    missing = num_samples - len(resampled)
    return np.pad(resampled, (0, missing)) if missing else resampled


def trim_silence(samples: Samples) -> Samples:
    """Without the frames at both ends that are 60 dB or more below the loudest frame.

    Frames of 2048 samples every 512, centred, zeros beyond the ends: the choice of librosa.effects.trim and NeMo.
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
