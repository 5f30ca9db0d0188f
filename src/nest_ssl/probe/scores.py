"""Accuracies with intervals, and differences of two systems on the same utterances. N utterances, R resamples."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

NUM_RESAMPLES = 5000
CONFIDENCE = 0.95


@dataclass(frozen=True)
class Score:
    """A share, or a difference of shares, with its interval of 95 % (percentile bootstrap over utterances)."""

    accuracy: float
    low: float
    high: float


def score(correct_N: NDArray[np.bool_], seed: int) -> Score:
    """Of one system."""
    return _interval(correct_N.astype(np.float64), seed)


def difference(correct_N: NDArray[np.bool_], other_N: NDArray[np.bool_], seed: int) -> Score:
    """Of two systems, paired: each resample holds the same utterances for both."""
    return _interval(correct_N.astype(np.float64) - other_N, seed)


def _interval(values_N: NDArray[np.float64], seed: int) -> Score:
    rng = np.random.default_rng(seed)
    count = len(values_N)
    # A resample is a draw of how often each utterance is taken; in parts, so that 100,000 utterances fit in memory.
    parts = np.array_split(np.arange(NUM_RESAMPLES), max(1, NUM_RESAMPLES * count // 10_000_000))
    means_R = np.concatenate([values_N[rng.integers(count, size=(len(part), count))].mean(axis=1) for part in parts])
    tail = (1 - CONFIDENCE) / 2
    low, high = np.quantile(means_R, (tail, 1 - tail))
    return Score(float(values_N.mean()), float(low), float(high))


def confusion(true_N: NDArray[np.int64], predicted_N: NDArray[np.int64], num_classes: int) -> NDArray[np.int64]:
    """(C, C) counts: a row for each true class, a column for each answer."""
    counts = np.zeros((num_classes, num_classes), np.int64)
    np.add.at(counts, (true_N, predicted_N), 1)
    return counts
