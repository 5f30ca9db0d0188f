"""Orders: the sequence in which an epoch visits the utterances, the same on every rank.

An order is a pure function of its settings and the epoch. It knows nothing of batches or ranks; `batches.py` cuts it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from nest_ssl.data.randomness import Stream, generator_for

Indices = npt.NDArray[np.uint32]
"""Utterance numbers: 40 MB for ten million of them."""


class Order(Protocol):
    """Which utterance comes at each position of an epoch."""

    def __len__(self) -> int:
        """Return the number of positions in an epoch."""

    def indices(self, epoch: int) -> Indices:
        """Return (len,) the utterance at each position."""

    def settings(self) -> dict[str, Any]:
        """Return everything that `indices` depends on, for the plan's hash."""


@dataclass(frozen=True)
class PlainOrder:
    """Every utterance once, in manifest order or reshuffled in each epoch."""

    num_utterances: int
    seed: int
    shuffle: bool
    stream: int = 0
    """Gives each dataset of a mixture its own random numbers."""

    def __len__(self) -> int:
        return self.num_utterances

    def indices(self, epoch: int) -> Indices:
        indices = np.arange(self.num_utterances, dtype=np.uint32)
        if self.shuffle:
            generator_for(self.seed, Stream.ORDER, epoch, self.stream).shuffle(indices)
        return indices

    def settings(self) -> dict[str, Any]:
        return {"kind": "plain", **vars(self)}


@dataclass(frozen=True)
class ShardOrder:
    """Every utterance once, shard by shard, so that few shards are open at a time.

    Shuffled: shards in random order, and each utterance moved by up to `shuffle_n` places, as a buffer of that size
    would. Utterances are numbered shard by shard.
    """

    shard_sizes: tuple[int, ...]
    seed: int
    shuffle: bool
    shuffle_n: int = 0
    stream: int = 0

    def __len__(self) -> int:
        return sum(self.shard_sizes)

    def indices(self, epoch: int) -> Indices:
        sizes = np.asarray(self.shard_sizes, dtype=np.int64)
        if not self.shuffle:
            return np.arange(len(self), dtype=np.uint32)
        rng = generator_for(self.seed, Stream.SHARDS, epoch, self.stream)
        shards = rng.permutation(len(sizes))
        first = (np.cumsum(sizes) - sizes)[shards]
        indices = _ranges(first, sizes[shards])
        if self.shuffle_n > 1:
            moved = np.arange(len(indices)) + rng.uniform(0, self.shuffle_n, len(indices))
            indices = indices[np.argsort(moved, kind="stable")]
        return indices

    def settings(self) -> dict[str, Any]:
        return {"kind": "shards", **vars(self)}


@dataclass(frozen=True)
class ChainOrder:
    """One dataset after another, each in its own order."""

    datasets: tuple[Order, ...]

    def __len__(self) -> int:
        return sum(map(len, self.datasets))

    def indices(self, epoch: int) -> Indices:
        parts, first = [], 0
        for order in self.datasets:
            parts.append(order.indices(epoch) + np.uint32(first))
            first += len(order)
        return np.concatenate(parts)

    def settings(self) -> dict[str, Any]:
        return {"kind": "chain", "datasets": [order.settings() for order in self.datasets]}


@dataclass(frozen=True)
class MixtureOrder:
    """Datasets mixed in fixed numbers per epoch, each in passes of its own that need not end with an epoch.

    Epoch e takes the next `counts[d]` utterances of dataset d, so no utterance comes for the n-th time before all
    others of its dataset came n - 1 times. `in_turn` alternates between the datasets; otherwise they are spread at
    random.
    """

    datasets: tuple[Order, ...]
    counts: tuple[int, ...]
    seed: int
    in_turn: bool = False

    def __len__(self) -> int:
        return sum(self.counts)

    def indices(self, epoch: int) -> Indices:
        which = np.repeat(np.arange(len(self.counts)), self.counts)
        if self.in_turn:  # the n-th of every dataset before the (n + 1)-th of any
            which = which[np.argsort(np.concatenate([np.arange(count) for count in self.counts]), kind="stable")]
        else:
            generator_for(self.seed, Stream.MIXTURE, epoch).shuffle(which)
        out = np.empty(len(which), dtype=np.uint32)
        first = 0
        for d, (order, count) in enumerate(zip(self.datasets, self.counts, strict=True)):
            out[which == d] = _stream(order, epoch * count, (epoch + 1) * count) + np.uint32(first)
            first += len(order)
        return out

    def settings(self) -> dict[str, Any]:
        return {"kind": "mixture", **vars(self), "datasets": [order.settings() for order in self.datasets]}


def temperature_weights(sizes: Sequence[int], temperature: float) -> list[float]:
    """Return sizes to the power 1 / temperature: 1 keeps the proportions, large values equalise the datasets."""
    return (np.asarray(sizes, dtype=np.float64) ** (1 / temperature)).tolist()  # type: ignore[no-any-return]


def share_out(total: int, weights: Sequence[float]) -> tuple[int, ...]:
    """Split `total` into integers proportional to `weights`, by largest remainders; at least 1 each."""
    exact = np.asarray(weights, dtype=np.float64) / np.sum(weights) * total
    counts = np.floor(exact + 1e-9).astype(np.int64)
    short = total - int(counts.sum())
    counts[np.argsort(counts - exact, kind="stable")[:short]] += 1
    counts = np.maximum(counts, 1)
    counts[counts.argmax()] -= int(counts.sum()) - total
    return tuple(counts.tolist())


def _stream(order: Order, start: int, stop: int) -> Indices:
    """Return positions [start, stop) of the order's passes, counted from the first pass on."""
    size = len(order)
    parts = [np.empty(0, dtype=np.uint32)]
    for number in range(start // size, -(-stop // size)):
        first = number * size
        parts.append(order.indices(number)[max(start - first, 0) : stop - first])
    return np.concatenate(parts)


def _ranges(firsts: npt.NDArray[np.int64], sizes: npt.NDArray[np.int64]) -> Indices:
    """Concatenate [first, first + size) of all pairs."""
    ends = np.cumsum(sizes)
    indices: Indices = np.arange(ends[-1] if len(ends) else 0, dtype=np.uint32)
    # Differences may wrap around; their sums do not.
    indices += np.repeat((firsts - (ends - sizes)).astype(np.uint32), sizes)
    return indices
