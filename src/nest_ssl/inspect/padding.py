"""The share of padding for each way to form batches, computed with the data loader's own samplers."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from nest_ssl.config import DatasetConfig
from nest_ssl.data import PlannedLoader, build_loader
from nest_ssl.data.plan.batches import BatchSpec
from nest_ssl.data.sources.files import PlannedBatches

MAX_UTTERANCES = 100_000
"""Batches are counted until they contain this many: orders are shuffled, so the first ones are a fair sample.
lhotse creates an object for every utterance: 100,000 take about 10 s."""

Durations = NDArray[np.float64]


@dataclass(frozen=True)
class Filling:
    """A sequence of batches in seconds of audio, with and without padding."""

    num_batches: int = 0
    num_utterances: int = 0
    audio_s: float = 0.0
    padded_s: float = 0.0
    largest_s: float = 0.0
    """Seconds in the largest batch, with padding: what must fit into memory."""

    @property
    def padding_share(self) -> float:
        return 1 - self.audio_s / self.padded_s if self.padded_s else 0.0

    @property
    def mean_s(self) -> float:
        """Seconds in an average batch, with padding."""
        return self.padded_s / self.num_batches if self.num_batches else 0.0


@dataclass(frozen=True)
class Batching:
    """One way to form batches, and its result for the data."""

    name: str
    keys: str
    """Keys of `train_ds` that select it; empty for the lower bound."""
    filling: Filling
    num_total: int
    """Utterances to put into batches."""
    complete: bool = True
    """Every batch of an epoch was counted."""
    problem: str = ""
    """Why there are no figures."""

    @property
    def num_batches(self) -> int:
        """Batches per epoch; extrapolated if not all were counted."""
        if self.complete or not self.filling.num_utterances:
            return self.filling.num_batches
        return round(self.filling.num_batches * self.num_total / self.filling.num_utterances)

    @property
    def left_out_share(self) -> float | None:
        """Share of utterances that `drop_last` leaves out; None if unknown."""
        if self.problem or not self.complete:
            return None
        return max(0.0, 1 - self.filling.num_utterances / self.num_total)


def fill(batches: Iterable[Durations]) -> Filling:
    """Sum over batches, each given by its durations and padded to the longest."""
    num_batches = num_utterances = 0
    audio_s = padded_s = largest_s = 0.0
    for durations_s in batches:
        batch_s = float(durations_s.max()) * len(durations_s)
        num_batches, num_utterances = num_batches + 1, num_utterances + len(durations_s)
        audio_s, padded_s = audio_s + float(durations_s.sum()), padded_s + batch_s
        largest_s = max(largest_s, batch_s)
    return Filling(num_batches, num_utterances, audio_s, padded_s, largest_s)


def sorted_batches(durations_s: Durations, batch_size: int) -> Iterator[Durations]:
    """Batches of this size with the least possible padding: utterances sorted by duration.

    An incomplete batch is put where it saves most.
    """
    longest_first = np.sort(durations_s)[::-1]
    num_full, rest = divmod(len(longest_first), batch_size)
    sizes = [batch_size] * num_full
    if rest:
        # A batch is as long as its first utterance; batches after the incomplete one start `rest` positions later.
        before_s = np.cumsum([0.0, *longest_first[: num_full * batch_size : batch_size]])
        after_s = np.cumsum([0.0, *longest_first[rest::batch_size][::-1]])[::-1]
        padded_s = batch_size * (before_s + after_s) + rest * longest_first[::batch_size]
        sizes.insert(int(padded_s.argmin()), rest)
    yield from np.split(longest_first, np.cumsum(sizes)[:-1])


def compare(config: DatasetConfig, batch_size: int, *, seed: int = 0) -> list[Batching]:
    """The ways to form batches that a user can choose from, by number of utterances or by duration.

    Batches by duration may have as many seconds as the largest shuffled batch (or `config.batch_duration`): the same
    memory, better used. lhotse exceeds this when a long utterance is added last to a batch.
    """
    plain = replace(
        config,
        batch_size=batch_size,
        shuffle=True,
        use_bucketing=False,
        use_lhotse=False,
        batch_duration=None,
        bucket_batch_size=None,
        bucketing_batch_size=None,
        bucketing_weights=None,
        noise_manifest=None,
        num_workers=0,
        pin_memory=False,
    )
    durations_s = _durations_s(build_loader(replace(plain, drop_last=False), seed=seed), config.min_audio_len_secs)
    num_total = len(durations_s)
    shuffled = _try("shuffled", f"batch_size={batch_size}", plain, num_total, seed)
    total_s = config.batch_duration or shuffled.filling.largest_s or batch_size * float(durations_s.max())
    bucketed = replace(plain, use_bucketing=True)
    by_duration = replace(bucketed, batch_size=None, batch_duration=total_s)
    bucket_keys = f"use_bucketing=true num_buckets={config.num_buckets}"
    duration_keys = f"{bucket_keys} batch_size=null batch_duration={total_s:.1f}"
    return [
        shuffled,
        _try("buckets", f"{bucket_keys} batch_size={batch_size}", bucketed, num_total, seed),
        _try("buckets, by duration", duration_keys, by_duration, num_total, seed),
        _try(
            "lhotse, by duration",
            f"use_lhotse=true {duration_keys}",
            replace(by_duration, use_lhotse=True),
            num_total,
            seed,
        ),
        Batching(
            f"lower bound (sorted, {batch_size} each)", "", fill(sorted_batches(durations_s, batch_size)), num_total
        ),
    ]


def _try(name: str, keys: str, config: DatasetConfig, num_total: int, seed: int) -> Batching:
    """A row of the comparison, or the reason why these settings do not allow it."""
    if config.use_lhotse and config.bucket_duration_bins is None and num_total < config.num_buckets:
        problem = f"lhotse cannot make {config.num_buckets} buckets (num_buckets) from {num_total} utterances."
        return Batching(name, keys, Filling(), num_total, problem=problem)
    try:
        loader = build_loader(config, seed=seed)
    except ValueError as error:
        return Batching(name, keys, Filling(), num_total, problem=str(error))
    filling, complete = _fill_from(_batches(loader, config.min_audio_len_secs))
    return Batching(name, keys, filling, num_total, complete)


def _fill_from(batches: Iterator[Durations]) -> tuple[Filling, bool]:
    """Fill from the first MAX_UTTERANCES or a few more; and whether that was all."""
    complete = True

    def first() -> Iterator[Durations]:
        nonlocal complete
        num_utterances = 0
        for durations_s in batches:
            if num_utterances >= MAX_UTTERANCES:
                complete = False
                return
            num_utterances += len(durations_s)
            yield durations_s

    filling = fill(first())
    return filling, complete


def _durations_s(loader: PlannedLoader, least_s: float) -> Durations:
    """The duration of every utterance; short ones are padded to `least_s`, as the data loader does."""
    assert isinstance(loader.dataset, PlannedBatches)
    stated_s = np.concatenate([source.durations_s for source in loader.dataset.sources])
    return np.maximum(stated_s.astype(np.float64), least_s)


def _batches(loader: PlannedLoader, least_s: float) -> Iterator[Durations]:
    """The durations in each batch of epoch 0."""
    all_s = _durations_s(loader, least_s) if isinstance(loader.dataset, PlannedBatches) else np.empty(0)
    for spec in loader.batches:
        if isinstance(spec, BatchSpec):
            yield all_s[spec.indices]
        else:
            yield np.maximum([float(cut.duration) for cut in spec.cuts], least_s)
