"""From a configuration to the plan for its datasets."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from nest_ssl.config import DatasetConfig
from nest_ssl.data.plan.buckets import BucketedPlan, Buckets, duration_buckets, sizes_for_duration
from nest_ssl.data.plan.order import ChainOrder, MixtureOrder, Order, share_out, temperature_weights
from nest_ssl.data.plan.plan import FixedSizePlan, Plan
from nest_ssl.data.sources.files import ManifestDataset
from nest_ssl.data.sources.tar import LAYOUTS


def build_plan(config: DatasetConfig, sources: Sequence[ManifestDataset], *, world_size: int, seed: int) -> Plan:
    """Who reads what, for all ranks."""
    shuffle = config.concat_shuffle if config.is_concat else config.shuffle
    orders = tuple(source.order(seed=seed, shuffle=shuffle, stream=d) for d, source in enumerate(sources))
    fingerprint = hashlib.sha256("".join(source.manifest.fingerprint() for source in sources).encode()).hexdigest()
    layout = LAYOUTS[config.tarred_shard_strategy] if config.is_tarred else "interleaved"
    if not (config.use_bucketing or config.bucketing_batch_size is not None):
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
        )
    if config.is_concat:
        raise ValueError("is_concat: cannot be combined with buckets; 'use_lhotse: true' with input_cfg does both.")
    bucket_of, batch_sizes = _buckets(config, sources)
    return BucketedPlan(
        ChainOrder(orders),
        bucket_of,
        batch_sizes=batch_sizes,
        world_size=world_size,
        drop_last=config.drop_last,
        seed=seed,
        fingerprint=fingerprint,
        strategy=config.bucketing_strategy,
        repeats=config.bucketing_weights,
        layout=layout,
    )


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


def _buckets(config: DatasetConfig, sources: Sequence[ManifestDataset]) -> tuple[Buckets, list[int]]:
    """Bucket of each utterance, and the batch size of each bucket."""
    if config.bucketing_batch_size is not None:
        bucket_of = np.repeat(np.arange(len(sources), dtype=np.uint16), [len(source) for source in sources])
        size = config.bucketing_batch_size
        sizes = size if isinstance(size, list) else [size * (len(sources) - d) for d in range(len(sources))]
        for key, values in (("bucketing_batch_size", sizes), ("bucketing_weights", config.bucketing_weights)):
            if values is not None and len(values) != len(sources):
                raise ValueError(f"{key}: {len(values)} values for {len(sources)} buckets.")
        return bucket_of, sizes
    bucket_of, longest_s = duration_buckets(
        np.maximum(_durations_s(sources), np.float32(config.min_audio_len_secs)),  # shorter audio is padded to that
        num_buckets=config.num_buckets,
        bins_s=config.bucket_duration_bins,
    )
    if config.bucket_batch_size is not None:
        return bucket_of, config.bucket_batch_size
    if config.batch_duration is None:
        return bucket_of, [_needed_batch_size(config)] * len(longest_s)
    return bucket_of, sizes_for_duration(
        longest_s,
        batch_duration_s=config.batch_duration,
        quadratic_s=config.quadratic_duration,
        max_size=config.batch_size,
    )


def _durations_s(sources: Sequence[ManifestDataset]) -> npt.NDArray[np.float32]:
    durations_s = np.concatenate([source.durations_s for source in sources])
    if np.isnan(durations_s).any():
        name = next(s.manifest.name for s in sources if np.isnan(s.durations_s).any())
        raise ValueError(f"{name}: use_bucketing needs every 'duration'. Run 'nest-ssl prepare' to measure them.")
    return durations_s


def _needed_batch_size(config: DatasetConfig) -> int:
    if config.batch_size is None:
        raise ValueError("batch_size: a value is needed and none was given.")
    return config.batch_size
