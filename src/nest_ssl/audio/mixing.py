"""Pure functions for mixing signals: energies, gains, lengths and places of segments. N samples."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

Samples = npt.NDArray[np.float32]


def power(samples: Samples) -> float:
    """Mean square; 0 for no samples.

    Squares are summed pairwise by numpy and not by BLAS, whose result depends on its number of threads.
    """
    return float(np.square(samples).sum()) / len(samples) if len(samples) else 0.0


def gain_for_ratio(signal_power: float, added_power: float, ratio_db: float) -> float:
    """Factor for the added signal that brings signal over added to `ratio_db`; 0 when nothing can be scaled."""
    if added_power <= 0:
        return 0.0
    return float(np.sqrt(signal_power / (10 ** (ratio_db / 10) * added_power)))


def repeat_to(samples: Samples, num_samples: int) -> Samples:
    """The first `num_samples` of `samples` repeated without end; silence when there are none."""
    if len(samples) >= num_samples:
        return samples[:num_samples]
    if len(samples) == 0:
        return np.zeros(num_samples, np.float32)
    return np.resize(samples, num_samples)


def pad_audio(samples: Samples, min_num_samples: int, mode: str) -> Samples:
    """At least `min_num_samples`: by repeating ('repeat') or by silence at the end ('zero')."""
    if len(samples) >= min_num_samples:
        return samples
    if mode == "repeat":
        return repeat_to(samples, min_num_samples)
    if mode == "zero":
        return np.pad(samples, (0, min_num_samples - len(samples)))
    raise ValueError(f"pad_audio_mode: {mode!r} is not one of 'repeat', 'zero'.")


def white_noise(num_samples: int, level_db: float, generator: np.random.Generator) -> Samples:
    """Gaussian noise of `level_db` relative to a power of 1."""
    noise: Samples = generator.standard_normal(num_samples, np.float32)
    noise *= np.float32(10 ** (level_db / 20))
    return noise


def split_length(num_samples: int, num_parts: int, generator: np.random.Generator) -> list[int]:
    """Lengths of `num_parts` parts: every sample falls into one of them with equal probability."""
    if num_parts == 1:
        return [num_samples]
    return generator.multinomial(num_samples, np.full(num_parts, 1 / num_parts)).tolist()  # type: ignore[no-any-return]


def place_in_order(num_samples: int, lengths: Sequence[int], generator: np.random.Generator) -> list[int]:
    """Starts of segments that follow each other without overlap inside `num_samples`.

    Each segment starts anywhere that leaves room for all the segments after it.
    """
    starts: list[int] = []
    earliest, latest = 0, num_samples - sum(lengths)
    for length in lengths:
        start = int(generator.integers(earliest, latest)) if earliest < latest else earliest
        starts.append(start)
        earliest = start + length
        latest += length
    return starts
