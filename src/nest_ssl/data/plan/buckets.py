"""Batches of utterances of about the same duration: less padding, and equal work on all ranks."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from nest_ssl.data.batch.randomness import Stream, generator_for
from nest_ssl.data.plan.order import Indices, Order
from nest_ssl.data.plan.plan import BatchSpec, Cut, Plan, spares_after

Buckets = npt.NDArray[np.uint16]
"""Number of the bucket of each utterance."""


class BucketedPlan(Plan):
    """Every step takes utterances of one bucket (`fully_randomized`: of one bucket per rank), of its batch size."""

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
        """(num_batches,) which of the epoch's steps, numbered bucket by bucket, comes at each place."""
        if self.strategy == "fixed_order":
            return np.arange(len(self._step_buckets))
        own = rank if self.strategy == "fully_randomized" else 0
        key = (epoch, own)
        if key != self._schedule_key:
            rng = generator_for(self.seed, Stream.SCHEDULE, *key)
            self._shuffled_steps, self._schedule_key = rng.permutation(len(self._step_buckets)), key
        return self._shuffled_steps

    def _group(self, epoch: int, rank: int) -> Indices:
        """The epoch's order, bucket by bucket."""
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
    """Bucket of each utterance, and the longest duration in each bucket (0 where it is empty).

    Without `bins_s`, buckets hold equal shares of the audio, as lhotse estimates them.
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
    """Utterances per batch of each bucket such that the padded batch lasts at most `batch_duration_s`."""
    sizes = []
    for duration_s in longest_s:
        counted_s = duration_s + (duration_s**2 / quadratic_s if quadratic_s else 0.0)
        size = max(1, int(batch_duration_s // max(counted_s, 0.01)))
        sizes.append(size if max_size is None else min(size, max_size))
    return sizes
