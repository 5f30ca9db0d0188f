"""The batch plan: which utterances every rank reads in every step. Ranks do not communicate: each computes its part.

A plan is a pure function of (seed, epoch, data, world size, settings). Every rank has the same number of batches.
The last, incomplete step of an epoch is dropped (`drop_last`), or its utterances are divided equally among the ranks
as smaller batches; the fewer than `world_size` utterances that are missing for that come from the start of the epoch.

Where durations are known, the plan also decides how long a step's batches are padded to be (`StepShapes`), the same on
all ranks.
"""

from __future__ import annotations

import hashlib
import heapq
import itertools
import json
from abc import ABC, abstractmethod
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
import numpy.typing as npt

from nest_ssl.data.plan.order import Indices, Order
from nest_ssl.data.randomness import Stream, generator_for

Positions = npt.NDArray[np.int64]
Buckets = npt.NDArray[np.uint16]
"""The bucket of each utterance."""
Seconds = npt.NDArray[np.float32]
NumSamples = npt.NDArray[np.int64]

MIN_SPARES = 16
"""With 1 % of bad files, 16 in a row have a probability of 1e-32."""
MAX_SHAPES = 32
"""Shapes of a run: each takes a CUDA graph, seconds to capture and memory to keep."""
MIN_SAVING = 0.001
"""A further shape must save at least this share of the padded audio."""
FRAME_S = 0.01
"""Padded lengths are multiples of this, and at least a sample longer than what the manifest states."""
MAX_LOOKED_AT = 20_000_000
"""Utterances of all ranks' own orders (`replicated`) that are looked at in an epoch, about 2 s; beyond that, every step
is as long as the longest utterance."""


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
    num_samples: int | None = None
    """What the batches of this step are padded to on all ranks; None: not planned."""


@dataclass(frozen=True, order=True)
class Shape:
    """The size of a step's batches with padding, equal on all ranks."""

    batch_size: int
    num_samples: int


class Plan(ABC):
    """The batches of all ranks."""

    world_size: int
    seed: int
    step_shapes: StepShapes | None = None
    """None: durations are unknown, or batch sizes differ between ranks."""
    largest_batch: int | None = None
    """Samples of the largest batch, with padding; None: durations are unknown."""

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

    @abstractmethod
    def unread(self) -> list[tuple[int, int]]:
        """Return for each bucket how many utterances it has, and how many of them no epoch reads (`drop_last`)."""

    def shapes(self) -> list[Shape]:
        """Return all shapes of a run, the smallest batch size first; none if they are not planned."""
        return [] if self.step_shapes is None else self.step_shapes.shapes()

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
    def num_unread(self) -> int:
        """The number of positions that no rank reads."""
        return max(self.length - self.share * (1 if self.layout == "replicated" else self.world_size), 0)

    @property
    def num_steps(self) -> int:
        return -(-self.share // self.batch_size)

    @property
    def num_full_steps(self) -> int:
        """Steps of `batch_size` utterances per rank; there is at most one more, which is smaller."""
        return self.share // self.batch_size

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

    def longest(self, durations_s: Seconds) -> Seconds:
        """Return (num_steps,) the longest of each step on any rank, from the (length,) durations in order.

        `replicated`: of one rank, from the durations in its own order.
        """
        if self.share == 0:
            return np.empty(0, dtype=np.float32)
        starts = np.arange(0, self.share, self.batch_size)
        if self.layout == "replicated":
            return np.maximum.reduceat(durations_s[: self.share], starts)
        read_s = np.resize(durations_s, self.share * self.world_size)  # begins again after the last one
        if self.layout == "interleaved":
            return np.maximum.reduceat(read_s, starts * self.world_size)
        of_ranks_s: Seconds = np.maximum.reduceat(read_s.reshape(self.world_size, -1), starts, axis=1)
        longest_s: Seconds = of_ranks_s.max(axis=0)
        return longest_s


@dataclass(frozen=True)
class Durations:
    """What the plan knows of the utterances' lengths."""

    seconds: Seconds
    """(num_utterances,)"""
    sample_rate: int
    least_s: float = 0.0
    """Shorter audio is padded to this."""

    def num_samples(self, seconds: npt.NDArray[np.floating[Any]]) -> NumSamples:
        """Return the samples that audio of these durations, which may be rounded, is padded to."""
        frame = max(1, round(FRAME_S * self.sample_rate))
        stated = np.ceil(np.maximum(seconds.astype(np.float64), self.least_s) * self.sample_rate).astype(np.int64)
        padded: NumSamples = (stated // frame + 1) * frame
        return padded


class StepShapes:
    """The padded length of every step: the longest utterance that any rank reads in it, rounded up to few levels.

    Batches of one size share their levels, which are chosen from the steps of epoch 0, whatever the epoch a run starts
    in. An epoch's last, smaller step of a bucket has its own shape, as long as the bucket's longest utterance, if there
    is room for it within MAX_SHAPES.
    """

    def __init__(
        self,
        durations: Durations,
        cuts: Sequence[Cut],
        longest_s: Seconds,
        members: Callable[[int, int], Sequence[Indices]],
        repeats: Sequence[int] = (1,),
    ) -> None:
        """Plan for buckets with these `cuts`; `members` returns the order of each, for an epoch and a rank."""
        self.durations, self.cuts, self.repeats, self._members = durations, cuts, repeats, members
        self._longest = durations.num_samples(longest_s).tolist()
        self._epoch: int | None = None
        self._planned: list[list[int | None]] = []

    def num_samples(self, epoch: int, bucket: int, step: int) -> int | None:
        """Return the padded length of one of a bucket's steps; None if its shape is not planned."""
        if epoch != self._epoch:
            self._planned, self._epoch = self._plan(epoch), epoch
        return self._planned[bucket][step]

    def shapes(self) -> list[Shape]:
        levels = {Shape(size, length) for size, lengths in self._levels.items() for length in lengths.tolist()}
        return sorted(levels | self._last_shapes)

    @property
    def num_sizes_left_out(self) -> int:
        """Batch sizes that got no level, because there are more than MAX_SHAPES."""
        return len({cut.batch_size for cut in self.cuts if cut.num_full_steps}) - len(self._levels)

    def largest(self) -> int:
        """Return the samples in the largest batch, without computing an epoch's order."""
        both = zip(self.cuts, self._longest, strict=True)
        return max((min(cut.batch_size, cut.share) * longest for cut, longest in both), default=0)

    def _plan(self, epoch: int) -> list[list[int | None]]:
        planned: list[list[int | None]] = []
        for cut, longest, lengths in zip(self.cuts, self._longest, self._lengths(epoch), strict=True):
            levels, full = self._levels.get(cut.batch_size), lengths[: cut.num_full_steps]
            steps: list[int | None] = [None] * len(full)
            if levels is not None:
                steps = levels[np.searchsorted(levels, full)].tolist()
            if cut.num_steps > cut.num_full_steps:
                last = Shape(cut.share % cut.batch_size, longest)
                steps.append(longest if last in self._last_shapes else None)
            planned.append(steps)
        return planned

    def _lengths(self, epoch: int) -> list[NumSamples]:
        """Return, for each bucket, (num_steps,) the samples of the longest utterance of each step on any rank."""
        first = self.cuts[0]
        ranks = range(first.world_size if first.layout == "replicated" else 1)
        if len(ranks) > 1 and len(ranks) * sum(cut.share for cut in self.cuts) > MAX_LOOKED_AT:
            return [np.full(cut.num_steps, n) for cut, n in zip(self.cuts, self._longest, strict=True)]
        longest_s = [np.zeros(cut.num_steps, dtype=np.float32) for cut in self.cuts]
        for rank in ranks:
            for cut, members, so_far_s in zip(self.cuts, self._members(epoch, rank), longest_s, strict=True):
                np.maximum(so_far_s, cut.longest(self.durations.seconds[members]), out=so_far_s)
        return [self.durations.num_samples(seconds) for seconds in longest_s]

    @cached_property
    def _last_shapes(self) -> set[Shape]:
        """The shapes of the buckets' last, smaller steps."""
        sizes = {cut.batch_size for cut in self.cuts if cut.num_full_steps}
        last = {
            Shape(cut.share % cut.batch_size, longest)
            for cut, longest in zip(self.cuts, self._longest, strict=True)
            if cut.num_steps > cut.num_full_steps
        }
        return last if len(sizes) + len(last) <= MAX_SHAPES else set()

    @cached_property
    def _levels(self) -> dict[int, NumSamples]:
        """The padded lengths for each batch size, in increasing order."""
        lengths: defaultdict[int, list[NumSamples]] = defaultdict(list)
        longest: defaultdict[int, int] = defaultdict(int)
        for cut, times, n, of_bucket in zip(self.cuts, self.repeats, self._longest, self._lengths(0), strict=True):
            if cut.num_full_steps:
                lengths[cut.batch_size].append(np.repeat(of_bucket[: cut.num_full_steps], times))
                longest[cut.batch_size] = max(longest[cut.batch_size], n)
        return choose_levels(
            {size: np.concatenate(parts) for size, parts in lengths.items()},
            longest,
            MAX_SHAPES - len(self._last_shapes),
        )


def choose_levels(lengths: dict[int, NumSamples], longest: dict[int, int], most: int) -> dict[int, NumSamples]:
    """Return at most `most` padded lengths in all, which keep the padding of batches of these sizes and lengths low.

    The last of each size is `longest`. One after another, the level that saves most padding is added, as long as it
    saves MIN_SAVING of the whole. Of more than `most` sizes, those with the least audio get no level.
    """
    audio = {size: size * int(of_size.sum()) for size, of_size in lengths.items()}
    sizes = sorted(audio, key=lambda size: (-audio[size], size))[:most]
    levels = {size: [longest[size]] for size in sizes}
    numbers = itertools.count()  # of the entries, so that the heap never compares arrays
    splits: list[tuple[int, int, int, NumSamples, int, int]] = []

    def look_at(size: int, ordered: NumSamples, upper: int) -> None:
        """Find the best level for these lengths, which are padded to `upper` so far."""
        if len(ordered):
            saved = size * np.arange(1, len(ordered) + 1) * (upper - ordered)
            place = int(saved.argmax())
            heapq.heappush(splits, (-int(saved[place]), next(numbers), size, ordered, place, upper))

    for size in sizes:
        look_at(size, np.sort(lengths[size]), longest[size])
    worth_it = max(1, MIN_SAVING * sum(audio.values()))
    for _ in range(most - len(sizes)):
        if not splits or -splits[0][0] < worth_it:
            break
        _, _, size, ordered, place, upper = heapq.heappop(splits)
        level = int(ordered[place])
        levels[size].append(level)
        look_at(size, ordered[: place + 1], level)
        look_at(size, ordered[place + 1 :], upper)
    return {size: np.sort(np.asarray(of_size, dtype=np.int64)) for size, of_size in levels.items()}


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
        durations: Durations | None = None,
    ) -> None:
        self.world_size, self.seed, self.fingerprint = world_size, seed, fingerprint
        self.order, self.endless = order, endless
        self.cut = Cut(len(order), batch_size, world_size, drop_last, layout)
        self._indices = _EpochCache(order)
        if durations is not None:
            longest_s = durations.seconds.max(keepdims=True)
            self.step_shapes = StepShapes(durations, [self.cut], longest_s, self._members)
            self.largest_batch = self.step_shapes.largest()

    def num_batches(self) -> int | None:
        return None if self.endless else self.cut.num_steps

    def unread(self) -> list[tuple[int, int]]:
        return [(self.cut.length, self.cut.num_unread)]

    @property
    def utterances_per_epoch(self) -> int | None:
        return None if self.endless else self.cut.share

    def batch(self, epoch: int, step: int, rank: int) -> BatchSpec:
        # Endless: one round of the order after another, whatever the trainer counts as an epoch.
        round_number, step_in_round = divmod(step, self.cut.num_steps) if self.endless else (epoch, step)
        positions = self.cut.positions(step_in_round, rank)
        replicated = self.cut.layout == "replicated"  # each rank has its own order
        indices = self._indices(round_number * self.world_size + rank if replicated else round_number)
        spares = spares_after(indices, int(positions[-1]) + 1, len(positions))
        shapes = self.step_shapes
        num_samples = None if shapes is None else shapes.num_samples(round_number, 0, step_in_round)
        return BatchSpec(epoch, step, rank, indices[positions % len(indices)], spares, num_samples)

    def _members(self, round_number: int, rank: int) -> list[Indices]:
        if self.cut.layout == "replicated":
            return [self.order.indices(round_number * self.world_size + rank)]
        return [self._indices(round_number)]

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
        durations: Durations | None = None,
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
        if durations is not None:
            longest_s = np.zeros(len(batch_sizes), dtype=np.float32)
            np.maximum.at(longest_s, bucket_of, durations.seconds)
            shapes = StepShapes(durations, self.cuts, longest_s, self._members, self.repeats)
            self.largest_batch = shapes.largest()
            one_bucket_per_step = strategy != "fully_randomized" or world_size == 1
            self.step_shapes = shapes if one_bucket_per_step else None

    def num_batches(self) -> int:
        return len(self._step_buckets)

    def unread(self) -> list[tuple[int, int]]:
        return [(cut.length, cut.num_unread) for cut in self.cuts]

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
        shapes = self.step_shapes
        num_samples = None if shapes is None else shapes.num_samples(epoch, bucket, number % cut.num_steps)
        return BatchSpec(epoch, step, rank, members[positions % len(members)], spares, num_samples)

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
            self._grouped, self._grouped_round = self._sorted_by_bucket(round_number), round_number
        return self._grouped

    def _sorted_by_bucket(self, round_number: int) -> Indices:
        indices = self.order.indices(round_number)
        return indices[np.argsort(self.bucket_of[indices], kind="stable")]

    def _members(self, epoch: int, rank: int) -> list[Indices]:
        if self.layout == "replicated":  # not kept: the next one asked for is another rank's
            grouped = self._sorted_by_bucket(epoch * self.world_size + rank)
        else:
            grouped = self._group(epoch, rank)
        return np.split(grouped, self._starts[1:-1])

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


def merge_incomplete(
    bucket_of: Buckets, batch_sizes: Sequence[int], *, world_size: int, drop_last: bool, layout: str
) -> Buckets:
    """Return the buckets after joining those that fill no step on all ranks, and would never be read, with neighbours.

    Two buckets together have the batch size of the longer one, which is the smaller: no batch becomes too large.
    """
    counts = np.bincount(bucket_of, minlength=len(batch_sizes)).tolist()

    def fills_no_step(bucket: int) -> bool:
        return Cut(counts[bucket], batch_sizes[bucket], world_size, drop_last, layout).num_steps == 0

    joins: list[int] = list(range(len(counts)))
    filled = [bucket for bucket, count in enumerate(counts) if count]
    while len(filled) > 1:
        small = next((place for place, bucket in enumerate(filled) if fills_no_step(bucket)), None)
        if small is None:
            break
        place = min(small, len(filled) - 2)
        shorter, longer = filled[place : place + 2]
        counts[longer], counts[shorter] = counts[longer] + counts[shorter], 0
        joins = [longer if bucket == shorter else bucket for bucket in joins]
        del filled[place]
    return bucket_of if joins == list(range(len(counts))) else np.asarray(joins, dtype=bucket_of.dtype)[bucket_of]


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
