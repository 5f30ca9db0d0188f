"""From a dataset's configuration to its loader: open the sources, plan the batches for all ranks, load those of one."""

from __future__ import annotations

import hashlib
import inspect
import logging
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import numpy.typing as npt

from nest_ssl import plugins
from nest_ssl.config.data import DatasetConfig
from nest_ssl.data.batch.augmentation import build_augmentor
from nest_ssl.data.batch.loader import BatchSampler, PlannedLoader, PlanSampler, Prefetch
from nest_ssl.data.batch.make import BatchMaker, OnRead, Readers
from nest_ssl.data.manifest.read import split_groups
from nest_ssl.data.plan.batches import (
    BucketedPlan,
    Buckets,
    Durations,
    FixedSizePlan,
    Plan,
    duration_buckets,
    merge_incomplete,
    sizes_for_duration,
)
from nest_ssl.data.plan.order import ChainOrder, MixtureOrder, Order, share_out, temperature_weights
from nest_ssl.data.sources.files import AudioNoiseDataset, ManifestDataset, PlannedBatches, Source, open_noise
from nest_ssl.data.sources.lhotse import CutBatches, LhotseAudioNoiseDataset, LhotseInputs
from nest_ssl.data.sources.tar import LAYOUTS, TarredAudioNoiseDataset

log = logging.getLogger(__name__)

FLOAT32_BYTES = 4


def build_loader(
    config: DatasetConfig,
    *,
    rank: int = 0,
    world_size: int = 1,
    seed: int = 0,
    bad_files_path: Path | None = None,
    same_every_epoch: bool = False,
    on_read: OnRead = None,
    mix: bool = True,
) -> PlannedLoader:
    """Return the loader of one rank.

    `seed` is the run's, used unless the configuration has its own. Bad files are listed in `bad_files_path`, one JSON
    line each. `same_every_epoch` repeats epoch 0, noise included, so that validation is comparable, and never stops the
    run over bad files. `on_read` is called with the path of every file just before it is read, in the process that
    reads it. Without `mix`, batches have no `noisy_audio` until `AudioNoiseBatch.mixed` makes it, on a GPU if they are
    there: a third less to pass between processes. With several ranks, set `loader.bad_data.count` to let them add up
    their bad files.
    """
    seed = seed if config.seed is None else config.seed
    dataset: PlannedBatches | LhotseAudioNoiseDataset
    sampler: BatchSampler
    if config.use_lhotse:
        inputs = LhotseInputs(config, seed, open_sources)
        dataset = LhotseAudioNoiseDataset(sources=inputs.sources, maker=_build_maker(config, seed, on_read, mix))
        sampler = CutBatches(config, inputs, rank=rank, world_size=world_size, seed=seed, same=same_every_epoch)
        num_batches = None
    else:
        sources = _open_source(config) if config.source is not None else open_sources(config)
        plan = build_plan(config, sources, world_size=world_size, seed=seed)
        num_batches = plan.num_batches()
        if num_batches == 0:
            num, s = sum(map(len, sources)), "" if world_size == 1 else "s"
            key = "batch_size" if config.batch_duration is None else "batch_duration"
            raise ValueError(
                f"{key}: {num} utterance{' does' if num == 1 else 's do'} not fill one batch on each of "
                f"{world_size} rank{s}, so none would be read. Lower it, or set drop_last=false."
            )
        if rank == 0 and any(num_unread for _, num_unread in plan.unread()):
            log.info("%s", describe_unread(plan, sources))
        dataset = PlannedBatches(sources, _build_maker(config, seed, on_read, mix))
        sampler = PlanSampler(plan, rank, same_every_epoch=same_every_epoch)
        for source in sources if rank == 0 else []:
            if isinstance(source, ManifestDataset) and (outside := source.manifest.outside_limits()):
                log.warning("%s: %s", source.name, outside)
    if rank == 0 and (world_size > 1 or sampler.shapes()):
        log.info("%s", describe_shapes(config, sampler))
    prefetch = Prefetch(
        config.num_workers if num_batches is None else min(config.num_workers, num_batches), config.prefetch_factor
    )
    prefetch = _bounded(prefetch, config, sampler, mix, is_first=rank == 0)
    return PlannedLoader(
        dataset,
        sampler,
        max_bad_fraction=config.max_bad_fraction,
        bad_files_path=bad_files_path,
        rank=rank,
        world_size=world_size,
        stops_if_bad=not same_every_epoch,
        num_workers=prefetch.num_workers,
        pin_memory=config.pin_memory,
        persistent_workers=config.persistent_workers,
        prefetch_factor=prefetch.factor,
    )


def describe_shapes(config: DatasetConfig, sampler: BatchSampler) -> str:
    """Return one line for the log: the shapes of a run, or why they are not planned."""
    shapes = sampler.shapes()
    if shapes:
        ends = [f"{shape.batch_size} x {shape.num_samples / config.sample_rate:.2f} s" for shape in shapes]
        found = f"batches have {len(shapes)} shapes, {ends[0]} to {ends[-1]}" if ends[1:] else f"batches are {ends[0]}"
        num_left = sampler.num_sizes_without_shape()
        return f"{found}; {num_left} more batch sizes have none: use fewer buckets" if num_left else found
    if config.use_lhotse:
        reason, way_out = CutBatches.why_no_shapes(config)
    elif config.bucketing_strategy == "fully_randomized" and _is_bucketed(config):
        reason, way_out = "each rank has its own bucket", "bucketing_strategy=synced_randomized makes them equal"
    else:
        reason, way_out = "not every duration is known", "'nest-ssl prepare' measures durations"
    return f"batches of different ranks have different shapes ({reason}): no CUDA graphs on several GPUs; {way_out}"


def describe_unread(plan: Plan, sources: Sequence[Source]) -> str:
    """Return what an epoch does not read because its last steps are incomplete, by bucket, for the log."""
    counts = plan.unread()
    num_all, num_unread = (sum(column) for column in zip(*counts, strict=True))
    durations_s = np.concatenate([source.durations_s for source in sources])
    bucket_of = plan.bucket_of if isinstance(plan, BucketedPlan) else np.zeros(len(durations_s), dtype=np.uint16)
    total_s = np.bincount(bucket_of, durations_s, minlength=len(counts))
    numbers = np.bincount(bucket_of, minlength=len(counts))
    # Other utterances are left out in every epoch: their hours are those of the average utterance of the bucket.
    unread_h = [n * s / k / 3600 if k else 0.0 for (_, n), s, k in zip(counts, total_s, numbers, strict=True)]
    longest_s = np.zeros(len(counts), dtype=np.float32)
    np.maximum.at(longest_s, bucket_of, durations_s)
    parts = [
        f"{n:,} of {length:,} up to {end_s:.1f} s" + ("" if np.isnan(hours) else f" ({hours:,.2f} h)")
        for (length, n), end_s, hours in zip(counts, longest_s, unread_h, strict=True)
        if n
    ]
    in_hours = "" if np.isnan(sum(unread_h)) else f", {sum(unread_h):,.2f} of {total_s.sum() / 3600:,.2f} h"
    by_bucket = f" By bucket: {'; '.join(parts)}." if len(counts) > 1 else ""
    return (
        f"an epoch on {plan.world_size} {'rank' if plan.world_size == 1 else 'ranks'} does not read {num_unread:,} of "
        f"{num_all:,} utterances{in_hours}: drop_last leaves out incomplete steps, other utterances in every epoch."
        f"{by_bucket} drop_last=false reads them."
    )


def _bounded(prefetch: Prefetch, config: DatasetConfig, sampler: BatchSampler, mix: bool, is_first: bool) -> Prefetch:
    """Keep what is prefetched within `prefetch_gb`, if the size of a batch is known."""
    num_samples = sampler.largest_batch()
    if num_samples is None or prefetch.num_workers == 0:
        return prefetch
    num_signals = 3 if mix else 2  # audio, noise and their sum
    batch_bytes = num_signals * FLOAT32_BYTES * num_samples
    bounded = prefetch.bounded(batch_bytes, config.prefetch_gb * 1e9)
    if bounded != prefetch and is_first:
        log.info(
            "prefetch_gb=%g: batches take up to %.0f MB, so num_workers is %d (was %d) and prefetch_factor %d (was %s)",
            config.prefetch_gb,
            batch_bytes / 1e6,
            bounded.num_workers,
            prefetch.num_workers,
            bounded.factor,
            prefetch.factor or "2, torch's default",
        )
    return bounded


def open_batches(dataset: DatasetConfig, seed: int, *, same_every_epoch: bool = False) -> PlannedLoader:
    """Return the batches that one rank trains on with this seed, to be looked at; bad files do not end anything."""
    # Neither workers nor pinned memory change the batches.
    here = replace(dataset, num_workers=0, pin_memory=False, max_bad_fraction=1.0)
    return build_loader(here, seed=seed, same_every_epoch=same_every_epoch)


def _build_maker(config: DatasetConfig, seed: int, on_read: OnRead, mix: bool) -> BatchMaker:
    readers = Readers(on_read)
    noise = open_noise(config.noise_manifest, config.sample_rate, bank_gb=config.noise_bank_gb, on_read=readers.reading)
    return BatchMaker(
        sample_rate=config.sample_rate,
        noise=noise,
        augmentor=build_augmentor(config.batch_augmentor),
        seed=seed,
        min_audio_len_secs=config.min_audio_len_secs,
        pad_audio_mode=config.pad_audio_mode,
        mix=mix,
        readers=readers,
    )


# ---- sources ----


def _open_source(config: DatasetConfig) -> list[Source]:
    """Open the registered source that `source:` names."""
    assert config.source is not None
    registered = plugins.sources.find(config.source)
    assert registered is not None, "the configuration has checked the name"
    try:
        inspect.signature(registered).bind(config, **config.source_options)
    except TypeError as error:
        raise ValueError(f"source_options: '{config.source}' cannot be opened: {error}.") from None
    source = registered(config, **config.source_options)
    if not isinstance(source, Source):
        raise ValueError(f"source: '{config.source}' is a {type(source).__name__}, not a nest_ssl.data.Source.")
    if len(source) == 0:
        raise ValueError(f"source: '{config.source}' is empty.")
    return [source]


def open_sources(config: DatasetConfig) -> list[ManifestDataset]:
    """Open the datasets that are mixed (`is_concat`) or are buckets (`bucketing_batch_size`); otherwise one."""
    if config.source is not None:
        raise ValueError(f"source: '{config.source}' does not read manifests, which are needed here.")
    if config.manifest_filepath is None:
        raise ValueError("manifest_filepath: a value is needed and none was given.")
    in_groups = config.is_concat or config.bucketing_batch_size is not None
    manifests = _groups(config.manifest_filepath, in_groups)
    if config.is_tarred:
        sources: list[ManifestDataset] = _open_tarred(config, manifests, in_groups)
    else:
        sources = [
            AudioNoiseDataset(
                manifest_filepath=paths,
                sample_rate=config.sample_rate,
                int_values=config.int_values,
                max_duration=config.max_duration,
                min_duration=config.min_duration,
                max_utts=config.max_utts,
                trim=config.trim_silence,
                channel_selector=config.channel_selector,
            )
            for paths in manifests
        ]
    for source in sources:
        if len(source) == 0:
            all_s = source.manifest.all_durations_s()
            reason = "is empty."
            if len(all_s):
                reason = (
                    "no utterance is left between min_duration and max_duration: their durations are "
                    f"{all_s.min():g} to {all_s.max():g} s. Set other limits, or write durations in seconds."
                )
            raise ValueError(f"{source.name}: {reason}")
    return sources


def _open_tarred(config: DatasetConfig, manifests: list[list[str]], in_groups: bool) -> list[ManifestDataset]:
    if config.tarred_audio_filepaths is None:
        raise ValueError("tarred_audio_filepaths: a value is needed with 'is_tarred: true' and none was given.")
    tars = _groups(config.tarred_audio_filepaths, in_groups)
    if len(tars) != len(manifests):
        raise ValueError(f"manifest_filepath has {len(manifests)} datasets, tarred_audio_filepaths has {len(tars)}.")
    return [
        TarredAudioNoiseDataset(
            audio_tar_filepaths=shards,
            manifest_filepath=paths,
            sample_rate=config.sample_rate,
            int_values=config.int_values,
            max_duration=config.max_duration,
            min_duration=config.min_duration,
            trim=config.trim_silence,
            channel_selector=config.channel_selector,
            shuffle_n=config.shuffle_n,
            shard_strategy=config.tarred_shard_strategy,
            shard_manifests=config.shard_manifests,
        )
        for shards, paths in zip(tars, manifests, strict=True)
    ]


def _groups(paths: str | list[str] | list[list[str]], in_groups: bool) -> list[list[str]]:
    """Return the files of each dataset; all in one unless the datasets are kept apart."""
    groups = split_groups(paths)
    if not in_groups:
        return [[path for group in groups for path in group]]
    if len(groups) == 1 and not isinstance(paths, str) and not isinstance(paths[0], str):
        return [[path] for path in groups[0]]  # NeMo's validation sections wrap the list once more
    return groups


# ---- the plan ----


def build_plan(config: DatasetConfig, sources: Sequence[Source], *, world_size: int, seed: int) -> Plan:
    """Return the plan of who reads what, for all ranks."""
    shuffle = config.concat_shuffle if config.is_concat else config.shuffle
    orders = tuple(source.order(seed=seed, shuffle=shuffle, stream=d) for d, source in enumerate(sources))
    fingerprint = hashlib.sha256("".join(source.fingerprint() for source in sources).encode()).hexdigest()
    layout = LAYOUTS[config.tarred_shard_strategy] if config.is_tarred else "interleaved"
    durations = _known_durations(config, sources)
    if not _is_bucketed(config):
        batch_size = _needed_batch_size(config)
        return FixedSizePlan(
            _mixture(config, orders, world_size * batch_size, seed) if config.is_concat else orders[0],
            batch_size=batch_size,
            world_size=world_size,
            drop_last=config.drop_last,
            seed=seed,
            fingerprint=fingerprint,
            layout=layout,
            endless=config.endless,
            durations=durations,
        )
    if config.is_concat:
        raise ValueError("is_concat: cannot be combined with buckets; 'use_lhotse: true' with input_cfg does both.")
    bucketing = _buckets(config, sources)
    bucket_of = bucketing.bucket_of
    if config.bucketing_batch_size is None:  # those are datasets of their own, not neighbours in length
        bucket_of = merge_incomplete(
            bucket_of, bucketing.batch_sizes, world_size=world_size, drop_last=config.drop_last, layout=layout
        )
    return BucketedPlan(
        ChainOrder(orders),
        bucket_of,
        batch_sizes=bucketing.batch_sizes,
        world_size=world_size,
        drop_last=config.drop_last,
        seed=seed,
        fingerprint=fingerprint,
        strategy=config.bucketing_strategy,
        repeats=config.bucketing_weights,
        layout=layout,
        durations=durations,
    )


def _is_bucketed(config: DatasetConfig) -> bool:
    return config.use_bucketing or config.bucketing_batch_size is not None


def _known_durations(config: DatasetConfig, sources: Sequence[Source]) -> Durations | None:
    """Return the durations of all utterances; None if one is unknown."""
    parts = [source.durations_s for source in sources]
    durations_s = parts[0] if len(parts) == 1 else np.concatenate(parts)  # one manifest's are memory-mapped: no copy
    if not (durations_s > 0).all():  # NaN; and 0, which means: to the end of the file
        return None
    return Durations(durations_s, config.sample_rate, config.min_audio_len_secs)


def _mixture(config: DatasetConfig, orders: tuple[Order, ...], step_size: int, seed: int) -> MixtureOrder:
    sizes = [len(order) for order in orders]
    total = max(int(sum(sizes) * config.concat_sampling_scale), len(sizes))
    if config.endless:  # whole steps, so that nothing is left over at the end of a round
        total = -(-total // step_size) * step_size
    seed = seed if config.concat_sampling_seed is None else config.concat_sampling_seed
    technique = config.concat_sampling_technique or "round-robin"
    if technique == "round-robin":
        counts = share_out(total, [1.0] * len(sizes))
    elif technique == "temperature":
        counts = share_out(total, temperature_weights(sizes, config.concat_sampling_temperature))
    else:
        weights = config.concat_sampling_probabilities or [1.0] * len(sizes)
        if len(weights) != len(sizes) or min(weights) <= 0:
            raise ValueError(f"concat_sampling_probabilities: {weights} are not {len(sizes)} positive numbers.")
        counts = share_out(total, weights)
    return MixtureOrder(orders, counts, seed, in_turn=technique == "round-robin")


@dataclass(frozen=True)
class _Bucketing:
    bucket_of: Buckets
    batch_sizes: list[int]
    """The batch size of each bucket."""


def _buckets(config: DatasetConfig, sources: Sequence[Source]) -> _Bucketing:
    """Divide the utterances into buckets: by dataset (`bucketing_batch_size`) or by duration."""
    if config.bucketing_batch_size is not None:
        bucket_of = np.repeat(np.arange(len(sources), dtype=np.uint16), [len(source) for source in sources])
        size = config.bucketing_batch_size
        sizes = size if isinstance(size, list) else [size * (len(sources) - d) for d in range(len(sources))]
        for key, values in (("bucketing_batch_size", sizes), ("bucketing_weights", config.bucketing_weights)):
            if values is not None and len(values) != len(sources):
                raise ValueError(
                    f"{key}: {len(values)} values for {len(sources)} buckets. Each dataset in manifest_filepath is one."
                )
        return _Bucketing(bucket_of, sizes)
    bucket_of, longest_s = duration_buckets(
        np.maximum(_durations_s(sources), np.float32(config.min_audio_len_secs)),  # shorter audio is padded to that
        num_buckets=config.num_buckets,
        bins_s=config.bucket_duration_bins,
    )
    if config.bucket_batch_size is not None:
        return _Bucketing(bucket_of, config.bucket_batch_size)
    if config.batch_duration is None:
        return _Bucketing(bucket_of, [_needed_batch_size(config)] * len(longest_s))
    sizes = sizes_for_duration(
        longest_s,
        batch_duration_s=config.batch_duration,
        quadratic_s=config.quadratic_duration,
        max_size=config.batch_size,
    )
    return _Bucketing(bucket_of, sizes)


def _durations_s(sources: Sequence[Source]) -> npt.NDArray[np.float32]:
    durations_s = np.concatenate([source.durations_s for source in sources])
    for source in sources:
        if num_unknown := int(np.isnan(source.durations_s).sum()):
            raise ValueError(
                f"{source.name}: use_bucketing needs every 'duration', which {num_unknown:,} of {len(source):,} lines "
                "do not have. Run 'nest-ssl prepare' to measure them."
            )
    return durations_s


def _needed_batch_size(config: DatasetConfig) -> int:
    if config.batch_size is None:
        raise ValueError("batch_size: a value is needed and none was given.")
    return config.batch_size
