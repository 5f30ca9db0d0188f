"""Batches formed by lhotse (`use_lhotse: true`): its samplers choose the utterances, everything after is as elsewhere.

lhotse's samplers give every rank the same number of batches by themselves. They live in the training process, so that
batches do not depend on the number of loader processes; going on at batch k passes over the metadata of those before.
"""

from __future__ import annotations

import dataclasses
import hashlib
import itertools
import json
import logging
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import soundfile
from lhotse import CutSet
from lhotse.audio import AudioLoadingError, DurationMismatchError
from lhotse.dataset.sampling import DynamicBucketingSampler, DynamicCutSampler
from torch.utils.data import Dataset

from nest_ssl.audio import AudioError
from nest_ssl.audio.signal import Samples
from nest_ssl.config import AugmentorConfig, DatasetConfig, parse
from nest_ssl.data.batch.augmentation import build_augmentor
from nest_ssl.data.batch.batch import AudioNoiseBatch
from nest_ssl.data.batch.loader import BatchSampler, PlannedLoader
from nest_ssl.data.batch.maker import BatchMaker, Place
from nest_ssl.data.manifest.read import Paths
from nest_ssl.data.plan.plan import MIN_SPARES
from nest_ssl.data.sources.files import ManifestDataset, open_noise
from nest_ssl.data.sources.lhotse_inputs import SOURCE, LhotseInputs

log = logging.getLogger(__name__)

CANNOT_READ = (AudioLoadingError, DurationMismatchError, soundfile.LibsndfileError, OSError)

Cut = Any
"""One of lhotse's cuts."""


@dataclass(frozen=True)
class CutBatchSpec:
    """One rank's batch of cuts; the fields as in plan.BatchSpec."""

    epoch: int
    step: int
    rank: int
    cuts: list[Cut]
    spares: list[Cut]


class LhotseAudioNoiseDataset(Dataset[AudioNoiseBatch]):
    """From cuts to a noisy batch."""

    def __init__(
        self,
        noise_manifest: Paths | None = None,
        batch_augmentor_cfg: AugmentorConfig | Mapping[str, Any] | None = None,
        *,
        sample_rate: int = 16000,
        sources: Sequence[ManifestDataset] = (),
        maker: BatchMaker | None = None,
    ) -> None:
        self.sources = sources
        self.maker = maker or BatchMaker(
            sample_rate=sample_rate,
            noise=open_noise(noise_manifest, sample_rate),
            augmentor=build_augmentor(
                parse(AugmentorConfig, batch_augmentor_cfg, where="batch_augmentor") if batch_augmentor_cfg else None
            ),
            min_audio_len_secs=0.0,
        )

    def __getitem__(self, spec: CutBatchSpec | CutSet) -> AudioNoiseBatch:
        """A batch of the sampler's, or of any cuts (then with noise and mixing of batch 0)."""
        if not isinstance(spec, CutBatchSpec):
            spec = CutBatchSpec(0, 0, 0, list(spec), [])
        batch, used = self.maker.make(spec.cuts, spec.spares, self._read, Place(spec.epoch, spec.step, spec.rank))
        batch.sample_id = [cut.id for cut in used]
        batch.audio_filepaths = [_name(cut) for cut in used]
        return batch

    def _read(self, cut: Cut) -> Samples:
        custom = cut.custom or {}
        if SOURCE in custom:
            return self.sources[int(custom[SOURCE])].read(int(custom["index"]), self.maker.readers.reading)
        self.maker.readers.reading(_name(cut))
        try:
            channels = cut.resample(self.maker.sample_rate).load_audio()
        except CANNOT_READ as error:
            raise AudioError(_name(cut), str(error).splitlines()[0]) from None
        samples: Samples = np.ascontiguousarray(channels.mean(axis=0), dtype=np.float32)
        if not np.isfinite(samples.sum()):
            raise AudioError(_name(cut), "samples are NaN or infinite")
        return samples


def _name(cut: Cut) -> str:
    sources = cut.recording.sources if cut.has_recording else []
    return str(sources[0].source) if sources and sources[0].type in ("file", "url") else str(cut.id)


class CutBatches(BatchSampler):
    """One rank's batches, as lhotse's sampler forms them."""

    def __init__(
        self, config: DatasetConfig, inputs: LhotseInputs, *, rank: int, world_size: int, seed: int, same: bool
    ) -> None:
        if config.batch_size is None and config.batch_duration is None:
            raise ValueError("batch_duration: needed with 'use_lhotse: true', or else batch_size.")
        self.config, self.inputs = config, inputs
        self.rank, self.world_size, self.seed, self.same_every_epoch = rank, world_size, seed, same

    def __iter__(self) -> Iterator[CutBatchSpec]:
        start = self.take_start()
        batches = self._batches(self.epoch)
        ahead: deque[list[Cut]] = deque()
        first: list[Cut] = []
        for step in itertools.count():
            while len(ahead) < 2 or sum(map(len, ahead)) - len(ahead[0]) < MIN_SPARES:
                batch = next(batches, None)
                if batch is None:
                    break
                ahead.append(batch)
                first += batch[: MIN_SPARES - len(first)]
            if not ahead:
                return
            cuts = ahead.popleft()
            if step >= start:
                spares = list(itertools.islice(itertools.chain(*ahead, first), MIN_SPARES))
                yield CutBatchSpec(self.epoch, step, self.rank, cuts, spares)

    def _batches(self, epoch: int) -> Iterator[list[Cut]]:
        """A sampler anew for each epoch: lhotse's keep state that depends on how far they were read."""
        config = self.config
        shared = {
            "max_duration": config.batch_duration,
            "max_cuts": config.batch_size,
            "quadratic_duration": config.quadratic_duration,
            "shuffle": config.shuffle,
            "drop_last": config.drop_last,
            "rank": self.rank,
            "world_size": self.world_size,
            "seed": self.seed,
        }
        cuts = self.inputs.cuts(epoch)
        if config.use_bucketing:
            try:
                sampler = DynamicBucketingSampler(
                    cuts,
                    num_buckets=config.num_buckets,
                    duration_bins=config.bucket_duration_bins,
                    num_cuts_for_bins_estimate=config.num_cuts_for_bins_estimate,
                    buffer_size=config.bucket_buffer_size,
                    concurrent=config.concurrent_bucketing,
                    **shared,
                )
            except AssertionError as error:  # lhotse's way to refuse
                raise ValueError(f"num_buckets={config.num_buckets}: {error or 'at least 2 are needed'}") from error
        else:
            sampler = DynamicCutSampler(cuts, shuffle_buffer_size=config.shuffle_buffer_size, **shared)
        sampler.set_epoch(epoch)
        for batch in sampler:
            yield list(batch)

    def plan_hash(self) -> str:
        """Over all settings: lhotse's batches depend on most of them."""
        settings = {**dataclasses.asdict(self.config), "num_workers": None, "pin_memory": None}
        text = json.dumps([settings, self.world_size, self.seed, self.inputs.fingerprint()], sort_keys=True)
        return hashlib.sha256(text.encode()).hexdigest()

    def utterances_per_epoch(self) -> int | None:
        return None


def build_lhotse_loader(
    config: DatasetConfig,
    maker: BatchMaker,
    *,
    rank: int,
    world_size: int,
    seed: int,
    bad_files_path: Path | None,
    same_every_epoch: bool,
) -> PlannedLoader:
    """As build.build_loader, for `use_lhotse: true`."""
    for key in ("is_concat", "bucketing_batch_size", "bucketing_weights"):
        if getattr(config, key):
            log.warning("%s: is not used with 'use_lhotse: true'; give datasets and their weights by input_cfg.", key)
    inputs = LhotseInputs(config, seed)
    return PlannedLoader(
        LhotseAudioNoiseDataset(sources=inputs.sources, maker=maker),
        CutBatches(config, inputs, rank=rank, world_size=world_size, seed=seed, same=same_every_epoch),
        max_bad_fraction=config.max_bad_fraction,
        bad_files_path=bad_files_path,
        num_workers=config.num_workers,
        pin_memory=config.pin_memory,
        persistent_workers=config.persistent_workers,
        prefetch_factor=config.prefetch_factor,
    )
