"""`nest-ssl fit`: the largest batches that fit on a GPU, found by trying; NeMo's counterpart is OOMptimizer.

A trial is a short run on random audio with the model, step, engine, optimizer and average of a real one: it warms up
with its largest shape, trains on the shape in question until the step is a replayed CUDA graph, then on another shape,
the first one again, a validation batch, and a last step. What was found for each bucket is then tried together, with
every shape that the batch plan would use if there is a manifest, and timed.
"""

from __future__ import annotations

import contextlib
import dataclasses
import gc
import itertools
import logging
import math
import os
import shutil
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from nest_ssl.config import DatasetConfig, NestConfig
from nest_ssl.data import AudioNoiseBatch, PlannedLoader, build_loader, random_batch
from nest_ssl.data.batch.loader import TORCH_PREFETCH
from nest_ssl.data.build import FLOAT32_BYTES
from nest_ssl.data.plan.batches import BatchSpec
from nest_ssl.launch.ranks import ALONE
from nest_ssl.model import EncDecDenoiseMaskedTokenPredModel
from nest_ssl.run_folder import listed_devices, ranks_per_node
from nest_ssl.training.parallel import World, joined
from nest_ssl.training.step import TrainStep
from nest_ssl.training.trainer import build_step, place_model
from nest_ssl.training.validation import Validation, has_data
from nest_ssl.training.watching import Watch

log = logging.getLogger(__name__)

Fits = Callable[[int, float], bool]
"""Whether a batch of so many utterances of this duration, in seconds, fits."""

PRECISION = 16  # a batch size is found to 1 / 16 of itself
ROUNDS = 3  # the first step of a shape runs uncaptured, the second is captured and compared, the third is replayed
TIMED = 3
"""Steps of each shape that are timed."""
SPARE_SHARE = 0.01
"""Of the card, kept from a shape's first step: capturing it may take a little more, and a capture that runs out of
memory leaves torch's random generator unusable."""
MOST_TRIES = 5
MOST_KEPT = 3
"""Batches: of two shapes, and of a validation."""
MOST_LOOKED_AT = 10_000
"""Steps of an epoch that are added up; their order is shuffled, so the first ones are a fair sample."""
NUM_SIGNALS = 2
"""Audio and noise, as workers pass them on."""
HOST_SHARE = 0.5
"""Of the host's free memory, for batches: the page cache, the noise bank and the ranks themselves need the rest."""
USUAL_WORKERS = 8
PINNED = 3
"""Batches that wait in pinned memory, or are on their way to the GPU."""


@dataclass(frozen=True)
class Bucket:
    """The most utterances of up to `longest_s` seconds that fit into a batch."""

    longest_s: float
    batch_size: int

    @property
    def total_s(self) -> float:
        return self.longest_s * self.batch_size


# ---- the search ----


def largest(fits: Callable[[int], bool], most: int, guess: int = 1, least: int = 0) -> int:
    """The largest number up to `most` that fits, to 1 / 16; `least` is known to. The search goes out from `guess`."""
    size, too_large, stride = least, most + 1, max(1, guess // PRECISION)
    tried = min(max(guess, least + 1), most)
    while too_large - size > max(1, size // PRECISION):
        if fits(tried):
            size = tried
        else:
            too_large = tried
        if too_large > most:
            tried = min(size + stride, most)
        elif size == 0:
            tried = max(too_large - stride, 1)
        else:
            tried = (size + too_large) // 2
        stride *= 2
    return size


def fit_buckets(fits: Fits, longest_s: list[float], most: int) -> list[Bucket]:
    """A bucket for each duration, shortest first; the search of one starts at as much audio as the next longer one."""
    found: list[Bucket] = []
    for duration_s in sorted(longest_s, reverse=True):
        least = found[-1].batch_size if found else 0  # shorter ones take no more memory
        guess = round(found[-1].total_s / duration_s) if found else 1
        size = largest(lambda batch, duration_s=duration_s: fits(batch, duration_s), most, guess, least)  # type: ignore[misc]
        if size == 0:
            raise ValueError(
                f"not even one utterance of {duration_s:g} s fits. Lower model.train_ds.max_duration or "
                f"model.activation_budget, or take a smaller model."
            )
        found.append(Bucket(duration_s, size))
        log.info("up to %g s: %d utterances, %g s of audio", duration_s, size, found[-1].total_s)
    return found[::-1]


def settle(holds: Callable[[list[Bucket]], bool], buckets: list[Bucket]) -> list[Bucket]:
    """The buckets, all made smaller by 1 / 16 until they fit together in one run."""
    for _ in range(MOST_TRIES):
        if holds(buckets):
            return buckets
        log.info("together they do not fit: trying smaller ones")
        buckets = [
            dataclasses.replace(one, batch_size=max(1, one.batch_size - max(1, one.batch_size // PRECISION)))
            for one in buckets
        ]
    raise ValueError("fit: the batches that fit one by one do not fit together. Lower --memory-share.")


def bucket_durations(dataset: DatasetConfig) -> list[float]:
    """The longest duration of each bucket: the configured ones, or halves of the longest utterance down to 4 s."""
    longest_s = dataset.max_duration
    if longest_s is None:
        raise ValueError("model.train_ds.max_duration: not set. Give the longest utterance to train on, in seconds.")
    if dataset.bucket_duration_bins is not None:
        return [*(edge for edge in dataset.bucket_duration_bins if edge < longest_s), longest_s]
    durations = [longest_s]
    while durations[-1] / 2 >= 4:
        durations.append(durations[-1] / 2)
    return durations[::-1]


# ---- what is printed ----


def keys_for(buckets: list[Bucket]) -> dict[str, Any]:
    """The keys of `model.train_ds` that make these batches."""
    if len(buckets) == 1:
        return {"batch_size": buckets[0].batch_size}
    return {
        "use_bucketing": True,
        "bucket_duration_bins": [bucket.longest_s for bucket in buckets[:-1]],
        "bucket_batch_size": [bucket.batch_size for bucket in buckets],
    }


def overrides_for(keys: Mapping[str, Any]) -> list[str]:
    """What `nest-ssl pretrain` is given to use these keys of `model.train_ds`."""

    def text(value: Any) -> str:
        if isinstance(value, list):
            return f"[{','.join(map(text, value))}]"
        return str(value).lower() if isinstance(value, bool) else f"{value:g}"

    return [f"model.train_ds.{key}={text(value)}" for key, value in keys.items()]


@dataclass(frozen=True)
class Host:
    """What the ranks of this machine share."""

    memory_bytes: float
    cores: int
    num_ranks: int

    @classmethod
    def here(cls, num_ranks: int) -> Host:
        room = [float(line.split()[1]) * 1024 for line in _lines("/proc/meminfo") if line.startswith("MemAvailable")]
        limits = [*_lines("/sys/fs/cgroup/memory.max"), *_lines("/sys/fs/cgroup/memory/memory.limit_in_bytes")]
        room += [float(limit) for limit in limits if limit.isdigit()]
        if Path("/dev/shm").is_dir():  # batches travel through it
            room.append(shutil.disk_usage("/dev/shm").free)
        cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
        return cls(min(room, default=8e9), cores, num_ranks)


def _lines(path: str) -> list[str]:
    try:
        return Path(path).read_text().splitlines()
    except OSError:
        return []


def loader_keys(dataset: DatasetConfig, buckets: list[Bucket], host: Host) -> dict[str, Any]:
    """The keys of `model.train_ds` with which the batches that wait fit into the host's memory.

    A worker has the batch it makes and those it has prefetched. Fewer are prefetched before there are fewer workers.
    """
    samples = max(bucket.total_s for bucket in buckets) * dataset.sample_rate
    batch_bytes = NUM_SIGNALS * FLOAT32_BYTES * samples
    wanted = dataset.num_workers or min(USUAL_WORKERS, max(1, host.cores // host.num_ranks - 1))
    room = int(HOST_SHARE * host.memory_bytes / host.num_ranks / batch_bytes) - PINNED
    workers = max(1, min(wanted, room // 2))
    ahead = max(1, min(dataset.prefetch_factor or TORCH_PREFETCH, room // workers - 1))
    if workers < wanted:
        log.warning(
            "the host's memory (%.1f GB for each rank) has room for %d workers, not %d: a batch takes %.1f GB",
            host.memory_bytes / host.num_ranks / 1e9,
            workers,
            wanted,
            batch_bytes / 1e9,
        )
    prefetch_gb = math.ceil(10 * workers * ahead * batch_bytes / 1e9) / 10
    return {"num_workers": workers, "prefetch_factor": ahead, "prefetch_gb": prefetch_gb}


@dataclass(frozen=True)
class Fitted:
    """What was found for a card."""

    buckets: list[Bucket]
    keys: dict[str, Any]
    """Of `model.train_ds`."""
    step_s: dict[Bucket, float] = field(default_factory=dict)
    """Seconds of a batch, for every shape that was timed."""
    peak_share: float = 0.0
    """Memory reserved by torch, of the whole card."""
    hours_per_epoch: float | None = None

    @property
    def overrides(self) -> list[str]:
        return overrides_for(self.keys)


# ---- trials ----


class Card:
    """The device's memory, of which training may use a share; a CPU has no limit."""

    def __init__(self, device: torch.device, share: float) -> None:
        self.device, self.share, self.is_gpu = device, share, device.type == "cuda"
        self.total_bytes = torch.cuda.get_device_properties(device).total_memory if self.is_gpu else 1

    def allow(self, num_bytes_less: float = 0.0) -> None:
        """Let torch use the share, less so many bytes."""
        if self.is_gpu:
            share = max(self.share - num_bytes_less / self.total_bytes, 0.01)
            torch.cuda.set_per_process_memory_fraction(share, self.device)

    def clear(self) -> None:
        gc.collect()
        self.wait()
        if self.is_gpu:
            torch._C._cuda_clearCublasWorkspaces()  # one for every stream there was, in the middle of large blocks
            torch.cuda.empty_cache()
            torch.cuda.reset_peak_memory_stats(self.device)

    def wait(self) -> None:
        if self.is_gpu:
            torch.cuda.synchronize(self.device)

    @property
    def peak_share(self) -> float:
        return torch.cuda.max_memory_reserved(self.device) / self.total_bytes if self.is_gpu else 0.0


class TrainingTrial:
    """Trains a model of the configuration for a few steps, and tells whether the memory was enough."""

    def __init__(self, cfg: NestConfig, world: World, card: Card) -> None:
        self.cfg, self.world, self.card = cfg, world, card
        self.model = EncDecDenoiseMaskedTokenPredModel(cfg.model).train()
        self.watch = Watch()
        place_model(cfg, self.model, world, self.watch)
        self.validation = validation_shape(cfg)
        self.step_s: dict[Bucket, float] = {}
        """Seconds of a batch, for shapes that were timed."""
        self.peak_share = 0.0
        """Of the card, in the latest trial."""
        self._fitted: dict[float, Bucket] = {}
        self._step: TrainStep | None = None
        self._seen: set[Bucket] = set()
        self._batches: dict[Bucket, AudioNoiseBatch] = {}
        self._num_steps = 0

    def __call__(self, batch_size: int, duration_s: float) -> bool:
        shape = Bucket(duration_s, batch_size)
        fitted = self.holds([shape, self._other(shape), shape])
        if fitted:
            self._fitted[duration_s] = shape
        log.info("  %d x %g s: %s", batch_size, duration_s, "fits" if fitted else "does not fit")
        return fitted

    def _other(self, shape: Bucket) -> Bucket:
        """The largest batch of another duration that fitted; until there is one, a batch half as long."""
        others = [one for one in self._fitted.values() if one.longest_s != shape.longest_s]
        half = dataclasses.replace(shape, longest_s=shape.longest_s / 2)
        return max(others, key=lambda one: one.total_s, default=half)

    def holds(self, shapes: Sequence[Bucket], *, timed: bool = False) -> bool:
        """Whether a run that trains on these shapes, one after another, and validates has enough memory."""
        self.card.allow()
        fitted = True
        try:
            # Every trial begins as a run does: without gradients, optimizer state, average and graphs.
            steps = self.cfg.trainer.max_steps
            self._step = build_step(self.cfg, self.model, self.world, self.watch, steps if steps > 0 else 1_000_000)
            self._step.engine.expect((one.batch_size, self._num_samples(one)) for one in shapes)
            self.warm_up(max(shapes, key=lambda one: one.total_s))
            for shape in shapes:
                self.train(shape)
            self.validate()
            if timed:
                self.step_s = {shape: self._time(shape) for shape in shapes}
            else:
                self.train(shapes[-1])
            engine = self._step.engine
            if engine.uses_graphs:
                fitted = all(engine.is_captured(one.batch_size, self._num_samples(one)) for one in shapes)
        except torch.OutOfMemoryError:
            fitted = False
        self.peak_share = self.card.peak_share
        self._forget()  # outside the handler: the error holds the activations of the step
        return fitted

    def warm_up(self, shape: Bucket) -> None:
        """Begin as a run does: its largest batch is captured before all others."""
        inputs = NUM_SIGNALS * FLOAT32_BYTES * shape.batch_size * self._num_samples(shape)
        for spared in (SPARE_SHARE * self.card.total_bytes + inputs, 0.0):
            self.card.allow(spared)
            assert self._step is not None
            self._step.warm_up(self._batch(shape), self._context())
        self._seen.add(shape)

    def train(self, shape: Bucket) -> None:
        """Train on batches of this shape; when it is new, until its step is a replayed graph."""
        batch, is_new = self._batch(shape), shape not in self._seen
        for number in range(ROUNDS if is_new else 1):
            self.card.allow(SPARE_SHARE * self.card.total_bytes if is_new and number == 0 else 0.0)
            self._update(batch)
        self._seen.add(shape)

    def validate(self) -> None:
        """A validation of one batch, as the loop does it."""
        step = self._step
        assert step is not None
        if self.validation is None:
            return
        average = step.average
        if average is None or average.config.validate_original_weights:
            averaged: contextlib.AbstractContextManager[None] = contextlib.nullcontext()
        else:
            averaged = average.in_the_model()
        loaders: Any = {"": [self._batch(self.validation)]}
        with averaged:
            Validation(self.model, step.engine, loaders, self.world, self.watch, self.cfg.trainer, self.cfg.seed).run(
                most_batches=1
            )

    def _update(self, batch: AudioNoiseBatch) -> None:
        """One update, of two batches if there are several: with and without an exchange are two graphs."""
        step = self._step
        assert step is not None
        count = min(step.accumulate, 2)
        for number in range(count):
            self._run(step.to_device(batch), begins=number == 0, updates=number == count - 1)

    def _run(self, moved: AudioNoiseBatch, *, begins: bool = True, updates: bool = True) -> None:
        assert self._step is not None
        self._step(moved, begins=begins, updates=updates, step=self._num_steps, context=self._context())
        self._num_steps += updates

    def _context(self) -> tuple[int, int] | None:
        contexts = self.model.encoder.contexts
        return contexts[0] if len(contexts) > 1 else None

    def _time(self, shape: Bucket) -> float:
        assert self._step is not None
        moved = self._step.to_device(self._batch(shape))
        self.card.wait()
        started = time.perf_counter()
        for _ in range(TIMED):
            self._run(moved)
        self.card.wait()
        return (time.perf_counter() - started) / TIMED

    def _forget(self) -> None:
        if self._step is not None:
            self._step.release()
        self._step = None
        self._seen.clear()
        for parameter in self.model.parameters():
            parameter.grad = None
        self.model.train()
        self.card.clear()

    def _num_samples(self, shape: Bucket) -> int:
        return round(shape.longest_s * self.cfg.model.sample_rate)

    def _batch(self, shape: Bucket) -> AudioNoiseBatch:
        """A batch of this shape; the latest ones are kept, since 1 GB of audio takes half a second to make."""
        if shape not in self._batches:
            while len(self._batches) >= MOST_KEPT:
                del self._batches[next(iter(self._batches))]
            self._batches[shape] = random_batch(shape.batch_size, self._num_samples(shape))
        return self._batches[shape]


def validation_shape(cfg: NestConfig) -> Bucket | None:
    """The largest batch of a validation; None if there is none."""
    dataset = cfg.model.validation_ds
    if dataset is None or cfg.trainer.limit_val_batches == 0:
        return None
    longest_s = dataset.max_duration or (cfg.model.train_ds.max_duration if cfg.model.train_ds is not None else None)
    if longest_s is None:
        return None
    if dataset.bucket_batch_size is not None:
        return Bucket(longest_s, dataset.bucket_batch_size[-1])
    if dataset.batch_duration is not None:
        return Bucket(longest_s, max(1, int(dataset.batch_duration // longest_s)))
    return Bucket(longest_s, dataset.batch_size or 1)


# ---- the whole ----


def fit(cfg: NestConfig, *, memory_share: float, most: int) -> Fitted:
    """The buckets of `cfg.model.train_ds` with the largest batches for `memory_share` of one GPU of this machine."""
    if not torch.cuda.is_available():
        raise ValueError("fit: no CUDA GPU was found; there is no card to fit the batches to.")
    if cfg.trainer.accelerator == "cpu":
        raise ValueError("fit: trainer.accelerator=cpu: there is no card to fit the batches to. Use gpu.")
    if cfg.model.train_ds is None:
        raise ValueError("fit: the configuration has no model.train_ds.")
    if not 0 < memory_share <= 1:
        raise ValueError(f"fit: --memory-share {memory_share} is not above 0 and at most 1.")
    trainer, listed = cfg.trainer, listed_devices(cfg.trainer.devices)
    per_node = ranks_per_node(trainer.devices, trainer.accelerator, torch.cuda.device_count)
    num_ranks = per_node * trainer.num_nodes
    is_sharded = trainer.strategy_name == "fsdp" and num_ranks > 1
    if is_sharded:
        log.warning(
            "trainer.strategy=fsdp: fit trains one rank with whole weights and CUDA graphs. Sharded over %d ranks, "
            "weights and optimizer take less and steps are not captured: larger batches may fit, and times differ.",
            num_ranks,
        )
    one = dataclasses.replace(trainer, devices=1 if listed is None else listed[:1], num_nodes=1)
    alone = dataclasses.replace(cfg, trainer=one)
    # Several ranks need memory for their exchange and their communicators: one rank makes all collectives with itself.
    with joined(one, ALONE, collectives=num_ranks > 1 and not is_sharded) as world:
        card = Card(world.device, memory_share)
        try:
            return _fit(alone, world, card, most, Host.here(per_node), num_ranks)
        finally:
            torch.cuda.set_per_process_memory_fraction(1.0, world.device)


def _fit(cfg: NestConfig, world: World, card: Card, most: int, host: Host, num_ranks: int) -> Fitted:
    dataset = cfg.model.train_ds
    assert dataset is not None
    durations_s = bucket_durations(dataset)
    # What a loader refuses, it should refuse before the search.
    _loader(cfg, [Bucket(longest_s, 1) for longest_s in durations_s], num_ranks)
    try:
        trial = TrainingTrial(cfg, world, card)
    except torch.OutOfMemoryError as error:
        raise ValueError("fit: the model alone does not fit on this card. Take a smaller one.") from error
    found = fit_buckets(trial, durations_s, most)
    loader: PlannedLoader | None = None

    def holds(buckets: list[Bucket]) -> bool:
        nonlocal loader
        loader = _loader(cfg, buckets, num_ranks)
        return trial.holds(_shapes(loader, buckets, dataset.sample_rate), timed=True)

    buckets = settle(holds, found)
    hours = None if loader is None else hours_per_epoch(loader, trial.step_s, dataset.sample_rate)
    keys = {**keys_for(buckets), **loader_keys(dataset, buckets, host)}
    fitted = Fitted(buckets, keys, dict(trial.step_s), trial.peak_share, hours)
    _report(fitted, num_ranks)
    return fitted


def _loader(cfg: NestConfig, buckets: list[Bucket], num_ranks: int) -> PlannedLoader | None:
    """The loader that these buckets would have; None without data. It reads no audio."""
    dataset = cfg.model.train_ds
    if dataset is None or not has_data(dataset):
        return None
    fitted = dataclasses.replace(dataset, **keys_for(buckets), num_workers=0, pin_memory=False, noise_manifest=None)
    return build_loader(fitted, world_size=num_ranks, seed=cfg.seed)


def _shapes(loader: PlannedLoader | None, buckets: list[Bucket], sample_rate: int) -> list[Bucket]:
    """The shapes of a run, smallest first: graphs of growing batches take the most memory."""
    planned = [] if loader is None else loader.shapes()
    shapes = [Bucket(shape.num_samples / sample_rate, shape.batch_size) for shape in planned] or buckets
    return sorted(shapes, key=lambda shape: shape.total_s)


def hours_per_epoch(loader: PlannedLoader, step_s: Mapping[Bucket, float], sample_rate: int) -> float | None:
    """The time that the GPU takes for an epoch; None if its length is unknown or its shapes are not planned."""
    if loader.batches.utterances_per_epoch() is None or not step_s:
        return None
    specs = list(itertools.islice(loader.batches, MOST_LOOKED_AT))
    seconds = [
        _time_of(Bucket(spec.num_samples / sample_rate, len(spec.indices)), step_s)
        for spec in specs
        if isinstance(spec, BatchSpec) and spec.num_samples is not None
    ]
    return sum(seconds) / len(seconds) * len(loader) / 3600 if seconds else None


def _time_of(shape: Bucket, step_s: Mapping[Bucket, float]) -> float:
    """The time of a batch: measured, or in proportion to that of the measured batch that is closest in size."""
    closest = min(step_s, key=lambda one: (abs(one.total_s - shape.total_s), one != shape))
    return step_s[closest] * shape.total_s / closest.total_s


def _report(fitted: Fitted, num_ranks: int) -> None:
    log.info("torch reserved up to %.0f %% of the card, validation included", 100 * fitted.peak_share)
    for shape, seconds in fitted.step_s.items():
        log.info("  %d x %g s: %.0f ms per batch", shape.batch_size, round(shape.longest_s, 2), 1000 * seconds)
    if fitted.hours_per_epoch is not None:
        gpus = "1 GPU" if num_ranks == 1 else f"{num_ranks} GPUs, if the data and the network keep up"
        log.info("an epoch takes %.2f hours on %s", fitted.hours_per_epoch, gpus)
