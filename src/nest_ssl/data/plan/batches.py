"""The batch plan: which utterances every rank reads in every step. Ranks do not communicate: each computes its part.

A plan is a pure function of (seed, epoch, data, world size, settings). Every rank has the same number of batches.
The last, incomplete step of an epoch is dropped (`drop_last`), or its utterances are divided equally among the ranks
as smaller batches; the fewer than `world_size` utterances that are missing for that come from the start of the epoch.
"""

from __future__ import annotations

import hashlib
import json
from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from nest_ssl.data.plan.order import Indices, Order
from nest_ssl.data.randomness import Stream, generator_for

Positions = npt.NDArray[np.int64]
Buckets = npt.NDArray[np.uint16]
"""The bucket of each utterance."""

MIN_SPARES = 16
"""With 1 % of bad files, 16 in a row have a probability of 1e-32."""


@dataclass(frozen=True)
class BatchSpec:
    """One rank's batch: everything that a worker needs to make it."""

    epoch: int
    step: int
    rank: int
    indices: Indices
    """Utterances to read."""
    spares: Indices
    """The next utterances of the plan, which replace, in order, those that cannot be read."""


class Plan(ABC):
    """The batches of all ranks."""

    world_size: int
    seed: int

    @abstractmethod
    def num_batches(self) -> int | None:
        """Return the number of batches per epoch and rank; None: endless."""

    @abstractmethod
    def batch(self, epoch: int, step: int, rank: int) -> BatchSpec:
        """Return batch number `step` of `rank`, without computing those before it."""

    @abstractmethod
    def settings(self) -> dict[str, Any]:
        """Return everything that the batches depend on."""

    @property
    @abstractmethod
    def utterances_per_epoch(self) -> int | None:
        """The utterances that each rank reads in an epoch, padding included; None: endless."""

    def hash(self) -> str:
        """Return a hash that is equal on two ranks only if they follow the same plan.

        It includes the first batch of rank 0, which would differ if the ranks' numpy versions shuffled differently.
        """
        first = self.batch(0, 0, 0).indices.tolist() if self.num_batches() != 0 else []
        text = json.dumps({**self.settings(), "first": first}, sort_keys=True)
        return hashlib.sha256(text.encode()).hexdigest()


@dataclass(frozen=True)
class Cut:
    """How positions [0, length) become steps of `world_size` batches."""

    length: int
    batch_size: int
    world_size: int
    drop_last: bool
    layout: str = "interleaved"
    """interleaved: a step takes the next world_size x batch_size positions. contiguous: each rank has its own stretch,
    so that it opens few shards. replicated: each rank visits everything."""

    @property
    def share(self) -> int:
        """The number of positions of each rank, padding included."""
        if self.layout == "replicated":
            return self.length - (self.length % self.batch_size if self.drop_last else 0)
        if self.drop_last:
            return self.length // (self.world_size * self.batch_size) * self.batch_size
        return -(-self.length // self.world_size)

    @property
    def num_steps(self) -> int:
        return -(-self.share // self.batch_size)

    def positions(self, step: int, rank: int) -> Positions:
        """Return the positions of one batch. Those past `length` are padding and mean the positions from 0 on."""
        size = min(self.batch_size, self.share - step * self.batch_size)
        if self.layout == "interleaved":
            first = step * self.batch_size * self.world_size + rank * size
        elif self.layout == "contiguous":
            first = rank * self.share + step * self.batch_size
        else:
            first = step * self.batch_size
        return np.arange(first, first + size)


class _EpochCache:
    """Remembers the order of the last epoch."""

    def __init__(self, order: Order) -> None:
        self._order = order
        self._epoch: int | None = None
        self._indices: Indices = np.empty(0, dtype=np.uint32)

    def __call__(self, epoch: int) -> Indices:
        if epoch != self._epoch:
            self._indices, self._epoch = self._order.indices(epoch), epoch
        return self._indices


class FixedSizePlan(Plan):
    """`batch_size` utterances per batch, in the given order."""

    def __init__(
        self,
        order: Order,
        *,
        batch_size: int,
        world_size: int,
        drop_last: bool,
        seed: int,
        fingerprint: str,
        layout: str = "interleaved",
        endless: bool = False,
    ) -> None:
        self.world_size, self.seed, self.fingerprint = world_size, seed, fingerprint
        self.order, self.endless = order, endless
        self.cut = Cut(len(order), batch_size, world_size, drop_last, layout)
        self._indices = _EpochCache(order)

    def num_batches(self) -> int | None:
        return None if self.endless else self.cut.num_steps

    @property
    def utterances_per_epoch(self) -> int | None:
        return None if self.endless else self.cut.share

    def batch(self, epoch: int, step: int, rank: int) -> BatchSpec:
        # Endless: one round of the order after another, whatever the trainer counts as an epoch.
        round_number, step_in_round = divmod(step, self.cut.num_steps) if self.endless else (epoch, step)
        positions = self.cut.positions(step_in_round, rank)
        if self.cut.layout == "replicated":  # each rank has its own order
            round_number = round_number * self.world_size + rank
        indices = self._indices(round_number)
        spares = spares_after(indices, int(positions[-1]) + 1, len(positions))
        return BatchSpec(epoch, step, rank, indices[positions % len(indices)], spares)

    def settings(self) -> dict[str, Any]:
        return {
            "plan": "fixed size",
            "seed": self.seed,
            "data": self.fingerprint,
            "order": self.order.settings(),
            "cut": vars(self.cut),
            "endless": self.endless,
        }


def spares_after(indices: Indices, first: int, batch_size: int) -> Indices:
    """Return the utterances that follow, continuing at the beginning after the last one."""
    return indices[np.arange(first, first + max(batch_size, MIN_SPARES)) % len(indices)]


class BucketedPlan(Plan):
    """Batches of utterances of similar duration: less padding, and equal work on all ranks.

    Every step reads from one bucket (`fully_randomized`: one bucket per rank), with the bucket's batch size.
    """

    def __init__(
        self,
        order: Order,
        bucket_of: Buckets,
        *,
        batch_sizes: list[int],
        world_size: int,
        drop_last: bool,
        seed: int,
        fingerprint: str,
        strategy: str = "synced_randomized",
        repeats: list[int] | None = None,
        layout: str = "interleaved",
    ) -> None:
        self.world_size, self.seed, self.fingerprint = world_size, seed, fingerprint
        self.order, self.bucket_of, self.strategy, self.layout = order, bucket_of, strategy, layout
        self.repeats = repeats or [1] * len(batch_sizes)
        sizes = np.bincount(bucket_of, minlength=len(batch_sizes)).tolist()
        self.cuts = [Cut(n, b, world_size, drop_last, layout) for n, b in zip(sizes, batch_sizes, strict=True)]
        self._starts = np.cumsum([0, *sizes])
        steps = [cut.num_steps * times for cut, times in zip(self.cuts, self.repeats, strict=True)]
        self._step_buckets = np.repeat(np.arange(len(steps)), steps)
        self._step_numbers = np.concatenate([np.arange(n) for n in steps]) if steps else np.empty(0, dtype=np.int64)
        self._grouped_round: int | None = None
        self._grouped: Indices = np.empty(0, dtype=np.uint32)
        self._schedule_key: tuple[int, int] | None = None
        self._shuffled_steps: npt.NDArray[np.int64] = np.empty(0, dtype=np.int64)

    def num_batches(self) -> int:
        return len(self._step_buckets)

    @property
    def utterances_per_epoch(self) -> int:
        return sum(cut.share * times for cut, times in zip(self.cuts, self.repeats, strict=True))

    def batch(self, epoch: int, step: int, rank: int) -> BatchSpec:
        slot = self._schedule(epoch, rank)[step]
        bucket, number = int(self._step_buckets[slot]), int(self._step_numbers[slot])
        cut, start = self.cuts[bucket], int(self._starts[bucket])
        positions = cut.positions(number % cut.num_steps, rank)
        members = self._group(epoch, rank)[start : start + cut.length]
        spares = spares_after(members, int(positions[-1]) + 1, len(positions))
        return BatchSpec(epoch, step, rank, members[positions % len(members)], spares)

    def _schedule(self, epoch: int, rank: int) -> npt.NDArray[np.int64]:
        """Return (num_batches,) which of the epoch's steps, numbered bucket by bucket, comes at each place."""
        if self.strategy == "fixed_order":
            return np.arange(len(self._step_buckets))
        own = rank if self.strategy == "fully_randomized" else 0
        key = (epoch, own)
        if key != self._schedule_key:
            rng = generator_for(self.seed, Stream.SCHEDULE, *key)
            self._shuffled_steps, self._schedule_key = rng.permutation(len(self._step_buckets)), key
        return self._shuffled_steps

    def _group(self, epoch: int, rank: int) -> Indices:
        """Return the epoch's order, sorted by bucket."""
        round_number = epoch * self.world_size + rank if self.layout == "replicated" else epoch
        if round_number != self._grouped_round:
            indices = self.order.indices(round_number)
            self._grouped = indices[np.argsort(self.bucket_of[indices], kind="stable")]
            self._grouped_round = round_number
        return self._grouped

    def settings(self) -> dict[str, Any]:
        return {
            "plan": "buckets",
            "seed": self.seed,
            "data": self.fingerprint,
            "order": self.order.settings(),
            "cuts": [vars(cut) for cut in self.cuts],
            "strategy": self.strategy,
            "repeats": self.repeats,
        }


def duration_buckets(
    durations_s: npt.NDArray[np.float32], *, num_buckets: int, bins_s: list[float] | None = None
) -> tuple[Buckets, list[float]]:
    """Return the bucket of each utterance, and the longest duration in each bucket (0 if it is empty).

    Without `bins_s`, buckets contain equal shares of the audio, as lhotse estimates them.
    """
    if bins_s is None:
        ordered = np.sort(durations_s)
        reached = np.cumsum(ordered, dtype=np.float64)
        shares = reached[-1] / num_buckets * np.arange(1, num_buckets)
        bins_s = np.unique(ordered[np.searchsorted(reached, shares)]).tolist()
    bucket_of = np.searchsorted(np.asarray(bins_s, dtype=np.float32), durations_s, side="left").astype(np.uint16)
    longest_s = np.zeros(len(bins_s) + 1, dtype=np.float32)
    np.maximum.at(longest_s, bucket_of, durations_s)
    return bucket_of, longest_s.tolist()


def sizes_for_duration(
    longest_s: list[float], *, batch_duration_s: float, quadratic_s: float | None, max_size: int | None
) -> list[int]:
    """Return the batch size of each bucket for which a padded batch lasts at most `batch_duration_s`."""
    sizes = []
    for duration_s in longest_s:
        counted_s = duration_s + (duration_s**2 / quadratic_s if quadratic_s else 0.0)
        size = max(1, int(batch_duration_s // max(counted_s, 0.01)))
        sizes.append(size if max_size is None else min(size, max_size))
    return sizes
