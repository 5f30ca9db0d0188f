"""From a dataset's configuration to its loader."""

from __future__ import annotations

from pathlib import Path

from nest_ssl.config import DatasetConfig
from nest_ssl.data.batch.augmentation import build_augmentor
from nest_ssl.data.batch.loader import PlannedLoader, PlanSampler
from nest_ssl.data.batch.maker import BatchMaker
from nest_ssl.data.batch.threads import OnRead, Readers
from nest_ssl.data.plan.from_config import build_plan
from nest_ssl.data.sources.files import PlannedBatches, open_noise
from nest_ssl.data.sources.opening import open_sources


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
    """The loader of one rank.

    `seed` is the run's, used unless the configuration has its own. Bad files are listed in `bad_files_path`, one JSON
    line each. `same_every_epoch` repeats epoch 0, noise included: what validation needs to be comparable. `on_read` is
    called with the path of every file just before it is read, in the process that reads it. Without `mix`,
    batches have no `noisy_audio` until `AudioNoiseBatch.mixed` makes it, on a GPU if they are there: a third less to
    carry between processes.
    """
    seed = seed if config.seed is None else config.seed
    if config.use_lhotse:
        from nest_ssl.data.sources.lhotse import build_lhotse_loader  # lhotse takes 0.3 s to import

        return build_lhotse_loader(
            config,
            build_maker(config, seed, on_read, mix),
            rank=rank,
            world_size=world_size,
            seed=seed,
            bad_files_path=bad_files_path,
            same_every_epoch=same_every_epoch,
        )
    sources = open_sources(config)
    plan = build_plan(config, sources, world_size=world_size, seed=seed)
    num_batches = plan.num_batches()
    if num_batches == 0:
        num = sum(map(len, sources))
        raise ValueError(
            f"drop_last: {num} utterances do not fill one batch on each of {world_size} ranks, so none would be read."
        )
    return PlannedLoader(
        PlannedBatches(sources, build_maker(config, seed, on_read, mix)),
        PlanSampler(plan, rank, same_every_epoch=same_every_epoch),
        max_bad_fraction=config.max_bad_fraction,
        bad_files_path=bad_files_path,
        num_workers=config.num_workers if num_batches is None else min(config.num_workers, num_batches),
        pin_memory=config.pin_memory,
        persistent_workers=config.persistent_workers,
        prefetch_factor=config.prefetch_factor,
    )


def build_maker(config: DatasetConfig, seed: int, on_read: OnRead = None, mix: bool = True) -> BatchMaker:
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
