"""Batches formed by lhotse (`use_lhotse: true`): its samplers choose the utterances; the rest works as elsewhere.

lhotse's samplers give every rank the same number of batches by themselves. They run in the training process, so that
batches do not depend on the number of workers; resuming at batch k skips the metadata of those before. Samplers draw
from NeMo's manifests (plain or tarred), lhotse's own manifests, Shar folders, and mixtures of them.

A sampler forms the batches of all ranks and returns one, so every rank knows the longest cut of a step and, where the
batch sizes are set, what all ranks pad their batches to.

lhotse is an optional package (extra `lhotse`), imported when a loader or dataset is built.
"""

from __future__ import annotations

import dataclasses
import hashlib
import itertools
import json
import logging
import os
import shlex
import time
from collections import defaultdict, deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache, partial
from typing import Any

import numpy as np
from torch.utils.data import Dataset

from nest_ssl.audio import AudioError
from nest_ssl.audio.read import check_regular, check_samples
from nest_ssl.audio.signal import Samples
from nest_ssl.config.checks import Range, short
from nest_ssl.config.data import AugmentorConfig, DatasetConfig
from nest_ssl.config.parsing import parse, read_yaml
from nest_ssl.data.batch.augmentation import build_augmentor
from nest_ssl.data.batch.collate import AudioNoiseBatch
from nest_ssl.data.batch.loader import BatchSampler
from nest_ssl.data.batch.make import BatchMaker, Place, Speech
from nest_ssl.data.manifest.read import Paths
from nest_ssl.data.plan.batches import FRAME_S, MAX_SHAPES, MIN_SPARES, Durations, Seconds, Shape
from nest_ssl.data.sources.files import ManifestDataset, open_noise

log = logging.getLogger(__name__)

SOURCE = "nest_ssl_source"
"""Key of a cut's custom fields: the number of the dataset that reads it; `index` is its number there."""

SOURCE_TYPES = ("file", "memory", "shar")
"""The types of a lhotse.AudioSource that are read. 'command' is a shell line, and a 'url' may be 'pipe:' and one."""
READ_BY_SHELL = (".sph", ".opus")
"""Files that lhotse passes to a command through a shell, .opus if LHOTSE_LEGACY_OPUS_LOADING is set."""

LOG_EVERY_S, BEAT_EVERY_S = 30.0, 1.0
"""How often passing over batches is logged, and reported to the watchdog."""

MOST_NESTED = 16
"""Groups within groups of `input_cfg`."""
KEYS = {
    "nemo": {"manifest_filepath"},
    "nemo_tarred": {"manifest_filepath", "tarred_audio_filepaths"},
    "lhotse": {"cuts_path"},
    "lhotse_shar": {"shar_path"},
    "group": {"input_cfg"},
}

Cut = Any
"""One of lhotse's cuts."""
CutSet = Any
"""A lhotse.CutSet."""


@cache
def _lhotse() -> Any:
    """Import lhotse (0.3 s), or say how to install it."""
    try:
        import lhotse
        import lhotse.audio
        import lhotse.dataset.sampling
    except ModuleNotFoundError as error:
        if error.name != "lhotse":
            raise
        raise ValueError(
            "use_lhotse: lhotse, which 'use_lhotse: true' and LhotseAudioNoiseDataset need, is not installed. "
            "Run: pip install 'nest-ssl[lhotse]'"
        ) from None
    return lhotse


@dataclass(frozen=True)
class CutBatchSpec:
    """One rank's batch of cuts; for the fields see BatchSpec."""

    epoch: int
    step: int
    rank: int
    cuts: list[Cut]
    spares: list[Cut]
    num_samples: int | None = None


class LhotseAudioNoiseDataset(Dataset[AudioNoiseBatch]):
    """Turns cuts into a noisy batch."""

    def __init__(
        self,
        noise_manifest: Paths | None = None,
        batch_augmentor_cfg: AugmentorConfig | Mapping[str, Any] | None = None,
        *,
        sample_rate: int = 16000,
        sources: Sequence[ManifestDataset] = (),
        maker: BatchMaker | None = None,
    ) -> None:
        _lhotse()
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
        """Make a batch that the sampler describes, or one of any cuts (then with the random numbers of batch 0)."""
        if not isinstance(spec, CutBatchSpec):
            spec = CutBatchSpec(0, 0, 0, list(spec), [])
        place = Place(spec.epoch, spec.step, spec.rank)
        return self.maker.make(spec.cuts, spec.spares, self._read, place, spec.num_samples)

    def _read(self, cut: Cut) -> Speech:
        custom = cut.custom or {}
        if SOURCE in custom:
            speech = self.sources[int(custom[SOURCE])].read(int(custom["index"]), self.maker.readers.reading)
            return replace(speech, sample_id=cut.id)
        name = _name(cut)
        _refuse_commands(cut)
        for source in _audio_sources(cut):
            if source.type == "file":
                check_regular(source.source, name)
                if not os.path.exists(source.source):  # lhotse would list every decoder's error
                    raise AudioError(name, "No such file or directory")
        self.maker.readers.reading(name)
        try:
            channels = cut.resample(self.maker.sample_rate).load_audio()
            samples: Samples = np.ascontiguousarray(channels.mean(axis=0), dtype=np.float32)
        except MemoryError:
            raise
        except Exception as error:  # lhotse has six decoders, each with errors of its own
            reason = str(error).rpartition(" failed. Details:\n")[2].splitlines()[:1] or [type(error).__name__]
            raise AudioError(name, reason[0]) from None
        check_samples(samples, name)
        return Speech(cut.id, name, samples)


def _name(cut: Cut) -> str:
    first = next(_audio_sources(cut), None)
    return str(first.source) if first is not None and first.type in ("file", "url") else str(cut.id)


def _audio_sources(item: Any) -> Iterator[Any]:
    """Yield every lhotse.AudioSource that reading a cut or recording opens: of its tracks and room responses too."""
    lhotse = _lhotse()
    inner: list[Any] = []  # by type: a cut's custom fields, which are data, answer to any attribute
    if isinstance(item, lhotse.cut.MixedCut):
        inner = [track.cut for track in item.tracks]
    elif isinstance(item, lhotse.cut.data.DataCut):
        inner = [item.recording]
    elif isinstance(item, lhotse.Recording):
        yield from item.sources
    for part in inner:
        yield from _audio_sources(part)
    transforms = item.transforms if isinstance(item, lhotse.cut.MixedCut | lhotse.Recording) else None
    for transform in transforms or ():
        if isinstance(transform, Mapping):
            transform = lhotse.augmentation.AudioTransform.from_dict(transform)
        yield from _audio_sources(getattr(transform, "rir", None))


def _refuse_commands(cut: Cut) -> None:
    """Raise ValueError if reading the cut could run a shell command: manifests are data, not programs."""
    for source in _audio_sources(cut):
        if source.type not in SOURCE_TYPES:
            raise ValueError(
                f"cut {cut.id!r}: its audio has a source of type {source.type!r} ({str(source.source)[:80]!r}), which "
                "is not read: it could run any command. Save the audio as files, and write the cuts again."
            )
        path = str(source.source) if source.type == "file" else ""
        if path.lower().endswith(READ_BY_SHELL) and shlex.quote(path) != path:
            raise ValueError(
                f"cut {cut.id!r}: {path[:80]!r} is not read: lhotse would pass it to a shell, which gives characters "
                "of it a meaning. Rename the file, or convert it to FLAC."
            )


class CutBatches(BatchSampler):
    """One rank's batches, as lhotse's sampler forms them."""

    def __init__(
        self, config: DatasetConfig, inputs: LhotseInputs, *, rank: int, world_size: int, seed: int, same: bool
    ) -> None:
        if config.batch_size is None and config.batch_duration is None and not _has_fixed_sizes(config):
            raise ValueError("batch_duration: needed with 'use_lhotse: true', or else batch_size.")
        if config.concurrent_bucketing and world_size > 1:
            raise ValueError(
                f"concurrent_bucketing: not possible on {world_size} ranks: lhotse then fills its buckets in a thread, "
                "so each rank would form other batches. Set concurrent_bucketing=false."
            )
        self.config, self.inputs = config, inputs
        self.rank, self.world_size, self.seed, self.same_every_epoch = rank, world_size, seed, same
        self._levels_s = _levels_s(config, inputs.durations_s())

    def __iter__(self) -> Iterator[CutBatchSpec]:
        start = self.take_start()
        batches = self._batches(self.epoch)
        ahead: deque[_Batch] = deque()
        first: list[Cut] = []
        passing_over = _PassingOver(self.epoch, start, self.on_skip)
        for step in itertools.count():
            while len(ahead) < 2 or sum(len(later.cuts) for later in itertools.islice(ahead, 1, None)) < MIN_SPARES:
                batch = next(batches, None)
                if batch is None:
                    break
                ahead.append(batch)
                first += batch.cuts[: MIN_SPARES - len(first)]
            if not ahead:
                return
            batch = ahead.popleft()
            if step < start:
                passing_over.report(step + 1)
            else:
                following = itertools.chain(*(later.cuts for later in ahead), first)
                spares = list(itertools.islice(following, MIN_SPARES))
                yield CutBatchSpec(self.epoch, step, self.rank, batch.cuts, spares, batch.num_samples)

    def _batches(self, epoch: int) -> Iterator[_Batch]:
        """Yield the batches of a new sampler: lhotse's keep state that depends on how far they were read."""
        config, sampling = self.config, _lhotse().dataset.sampling
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
            if _has_fixed_sizes(config):
                ends_s = [*(config.bucket_duration_bins or []), float("inf")]
                constraint = sampling.dynamic_bucketing.FixedBucketBatchSizeConstraint(ends_s, config.bucket_batch_size)
                shared |= {"constraint": constraint, "max_duration": None, "max_cuts": None}
            try:
                sampler = _noting(sampling.DynamicBucketingSampler)(
                    cuts,
                    num_buckets=config.num_buckets,
                    duration_bins=config.bucket_duration_bins,
                    num_cuts_for_bins_estimate=config.num_cuts_for_bins_estimate,
                    buffer_size=config.bucket_buffer_size,
                    concurrent=config.concurrent_bucketing,
                    **shared,
                )
            except AssertionError as error:  # how lhotse refuses
                raise ValueError(f"num_buckets={config.num_buckets}: {error or 'at least 2 are needed'}") from error
        else:
            sampler = _noting(sampling.DynamicCutSampler)(
                cuts, shuffle_buffer_size=config.shuffle_buffer_size, **shared
            )
        sampler.set_epoch(epoch)
        for batch in sampler:
            yield _Batch(list(batch), self._num_samples(sampler.noted))
            sampler.noted.clear()

    def _num_samples(self, step: list[_Noted]) -> int | None:
        """Return the planned length of a step of these batches; None at the end of the data or if sizes differ."""
        sizes = {batch.size for batch in step}
        if len(step) != self.world_size or len(sizes) != 1:
            return None
        levels_s = self._levels_s.get(sizes.pop(), np.empty(0))
        level = int(np.searchsorted(levels_s, max(batch.longest_s for batch in step)))
        return self._in_samples(levels_s[level]) if level < len(levels_s) else None

    def _in_samples(self, level_s: float) -> int:
        durations = Durations(np.empty(0, np.float32), self.config.sample_rate, self.config.min_audio_len_secs)
        return int(durations.num_samples(np.asarray(level_s)))

    def shapes(self) -> list[Shape]:
        both = [(size, level_s) for size, levels_s in self._levels_s.items() for level_s in levels_s.tolist()]
        return sorted({Shape(size, self._in_samples(level_s)) for size, level_s in both})

    def largest_batch(self) -> int | None:
        """Return the largest planned batch; else the configured duration, which lhotse exceeds by one utterance."""
        planned = [shape.batch_size * shape.num_samples for shape in self.shapes()]
        of_duration = self.config.batch_duration
        by_duration = [] if of_duration is None else [int(of_duration * self.config.sample_rate)]
        return min([max(planned), *by_duration]) if planned else next(iter(by_duration), None)

    @staticmethod
    def why_no_shapes(config: DatasetConfig) -> tuple[str, str]:
        """Return the reason why nothing is planned, and the way out."""
        if config.batch_size is None and not _has_fixed_sizes(config):
            way_out = "bucket_duration_bins with bucket_batch_size, or use_lhotse=false, make them equal"
            return "lhotse fills each batch up to batch_duration", way_out
        if len(config.bucket_duration_bins or []) >= MAX_SHAPES:
            return f"more than {MAX_SHAPES} buckets", "use fewer"
        return "the longest duration is unknown", "set max_duration"

    def plan_hash(self) -> str:
        """Hash all settings: lhotse's batches depend on most of them."""
        settings = {**dataclasses.asdict(self.config), "num_workers": None, "pin_memory": None}
        del settings["source"], settings["source_options"]  # refused with lhotse; older checkpoints have none
        del settings["prefetch_gb"]  # changes no batch, and older checkpoints have none
        text = json.dumps([settings, self.world_size, self.seed, self.inputs.fingerprint()], sort_keys=True)
        return hashlib.sha256(text.encode()).hexdigest()

    def utterances_per_epoch(self) -> int | None:
        return None


class _PassingOver:
    """Reports how far a resumed run is with forming the batches that it has trained on before."""

    def __init__(self, epoch: int, num_batches: int, on_skip: Callable[[], None] | None) -> None:
        self._epoch, self._num_batches, self._on_skip = epoch, num_batches, on_skip
        self._began_s = self._logged_s = self._beat_s = time.monotonic()

    def report(self, num_done: int) -> None:
        now_s = time.monotonic()
        if self._on_skip is not None and now_s - self._beat_s >= BEAT_EVERY_S:
            self._beat_s = now_s
            self._on_skip()
        if now_s - self._logged_s >= LOG_EVERY_S:
            self._logged_s = now_s
            left_s = (now_s - self._began_s) / num_done * (self._num_batches - num_done)
            log.info(
                "resuming epoch %d: passed over %d of %d batches; about %.0f s left",
                *(self._epoch, num_done, self._num_batches, left_s),
            )


@dataclass(frozen=True)
class _Batch:
    """One rank's batch of a step, and what all ranks pad theirs to."""

    cuts: list[Cut]
    num_samples: int | None


@dataclass(frozen=True)
class _Noted:
    """A batch of any rank."""

    size: int
    longest_s: float


@cache
def _noting(sampler: Any) -> Any:
    """Return a class of lhotse's sampler that lists the batches it formed, of all ranks, in `noted`."""

    class Noting(sampler):  # type: ignore[misc]
        noted: list[_Noted]

        def __iter__(self) -> Any:
            self.noted = []
            return super().__iter__()

        def _next_batch(self) -> CutSet:
            batch = super()._next_batch()
            self.noted.append(_Noted(len(batch), max(float(cut.duration) for cut in batch)))
            return batch

    return Noting


def _levels_s(config: DatasetConfig, durations_s: Seconds | None) -> dict[int, Seconds]:
    """Return the padded durations of each batch size, increasing; none if sizes vary or the longest is unknown."""
    if durations_s is not None and len(durations_s):
        longest_s = float(durations_s.max()) + FRAME_S / 2  # float32 may be less than the cut's own duration
    elif config.max_duration is not None:
        longest_s = config.max_duration
    else:
        return {}
    bins_s = config.bucket_duration_bins if config.use_bucketing else None
    ends_s = [*(end_s for end_s in bins_s or [] if end_s < longest_s), longest_s]
    levels: defaultdict[int, list[float]] = defaultdict(list)
    if _has_fixed_sizes(config):
        for end_s, size in zip(ends_s, config.bucket_batch_size or [], strict=False):
            levels[size].append(end_s)
    elif config.batch_size is not None:
        levels[config.batch_size] = np.linspace(0, longest_s, MAX_SHAPES + 1)[1:].tolist() if bins_s is None else ends_s
    if sum(map(len, levels.values())) > MAX_SHAPES:
        return {}
    return {size: np.asarray(of_size) for size, of_size in levels.items()}


def _has_fixed_sizes(config: DatasetConfig) -> bool:
    return config.use_bucketing and config.bucket_batch_size is not None


@dataclass(frozen=True)
class Input:
    """One of the inputs that are mixed."""

    weight: float
    cuts: Callable[[int], CutSet]
    """Returns the cuts of an epoch."""


class LhotseInputs:
    """All inputs of a configuration, opened once; their cuts are made again for each epoch."""

    def __init__(
        self, config: DatasetConfig, seed: int, open_sources: Callable[[DatasetConfig], list[ManifestDataset]]
    ) -> None:
        _lhotse()
        for key in ("is_concat", "bucketing_batch_size", "bucketing_weights"):
            if getattr(config, key):
                log.warning(
                    "%s: is not used with 'use_lhotse: true'; set datasets and their weights in input_cfg.", key
                )
        self.config, self.seed, self._open_sources = config, seed, open_sources
        self.sources: list[ManifestDataset] = []
        self._named: list[str] = []
        self._lasts_well = partial(_lasts_between, config.min_duration or 0.0, config.max_duration or float("inf"))
        entries = _mixed(_entries(config))
        self._inputs = [Input(weight, self._open(kind, entry)) for kind, entry, weight in entries]
        for given, (kind, entry, _) in zip(self._inputs, entries, strict=True):
            # Mixed endlessly, they would be searched for ever.
            if len(entries) > 1 and not any(map(self._lasts_well, given.cuts(0))):
                name = ", ".join(str(entry[key]) for key in sorted(KEYS[kind]))
                raise ValueError(f"input_cfg: {name}: no utterance is left between min_duration and max_duration.")

    def cuts(self, epoch: int) -> CutSet:
        """Return the inputs mixed by weight: endless if there are several, unless `force_finite`."""
        cut_sets = [given.cuts(epoch) for given in self._inputs]
        if len(cut_sets) == 1:
            cuts = cut_sets[0]
        else:
            if not self.config.force_finite:
                cut_sets = [cuts.repeat(preserve_id=True) for cuts in cut_sets]
            cuts = _lhotse().CutSet.mux(
                *cut_sets, weights=[given.weight for given in self._inputs], seed=self.seed + epoch
            )
        return cuts.filter(self._lasts_well)

    def durations_s(self) -> Seconds | None:
        """Return the durations of all utterances; None if lhotse's own files are read, or one is unknown."""
        if self._named or not self.sources:
            return None
        durations_s = np.concatenate([source.durations_s for source in self.sources])
        return durations_s if (durations_s > 0).all() else None

    def fingerprint(self) -> str:
        """Hash the manifests' contents, and the names and sizes of lhotse's files."""
        parts = [source.manifest.fingerprint() for source in self.sources]
        parts += [f"{path} {os.stat(path).st_size}" for path in self._named]
        return hashlib.sha256("\n".join(parts).encode()).hexdigest()

    def _open(self, kind: str, entry: dict[str, Any]) -> Callable[[int], CutSet]:
        if kind in ("nemo", "nemo_tarred"):
            return self._open_manifests(entry)
        return self._open_cuts(str(entry["cuts_path"])) if kind == "lhotse" else self._open_shar(entry["shar_path"])

    def _open_manifests(self, entry: dict[str, Any]) -> Callable[[int], CutSet]:
        tarred = entry.get("tarred_audio_filepaths")
        config = replace(
            self.config,
            manifest_filepath=entry["manifest_filepath"],
            tarred_audio_filepaths=tarred,
            is_tarred=tarred is not None,
            is_concat=False,
            endless=False,
            bucketing_batch_size=None,
        )
        (source,) = self._open_sources(config)
        number = len(self.sources)
        self.sources.append(source)
        seed = self.seed + number
        return lambda epoch: _lhotse().CutSet(ManifestCuts(source, number, seed, config.shuffle, epoch))

    def _open_cuts(self, path: str) -> Callable[[int], CutSet]:
        self._named.append(path)
        FileCuts("cuts_path", path, read := partial(_lhotse().CutSet.from_file, path)).check()
        return lambda epoch: _lhotse().CutSet(FileCuts("cuts_path", path, read))

    def _open_shar(self, folders: str | list[str]) -> Callable[[int], CutSet]:
        listed = [folders] if isinstance(folders, str) else list(folders)
        self._named += [os.path.join(folder, name) for folder in listed for name in sorted(os.listdir(folder))]
        shuffle, seed, cut_set = self.config.shuffle, self.seed, _lhotse().CutSet

        def part(folder: str, epoch: int) -> FileCuts:
            read = partial(cut_set.from_shar, in_dir=folder, shuffle_shards=shuffle, seed=seed + epoch)
            return FileCuts("shar_path", folder, read)

        def cuts(epoch: int) -> CutSet:
            parts = [cut_set(part(folder, epoch)) for folder in listed]
            return parts[0] if len(parts) == 1 else cut_set.mux(*parts, seed=seed + epoch)

        for folder in listed:
            part(folder, 0).check()
        return cuts


class FileCuts:
    """The cuts that lhotse reads from a file or folder; what it stumbles over is one line that names it."""

    def __init__(self, key: str, path: str, read: Callable[[], CutSet]) -> None:
        self._key, self._path, self._read = key, path, read

    def __iter__(self) -> Iterator[Cut]:
        try:
            for cut in self._read() or ():
                if not isinstance(cut, _lhotse().cut.Cut):
                    raise ValueError(f"they are of type {type(cut).__name__}")
                if not (cut.start >= 0 and cut.duration > 0):
                    raise ValueError(f"cut {cut.id!r} starts at {cut.start} s and lasts {cut.duration} s")
                yield cut
        except MemoryError:
            raise
        except Exception as error:  # each of its formats has errors of its own
            reason = (str(error).splitlines() or [""])[0] or type(error).__name__
            raise ValueError(f"{self._key}: {self._path}: lhotse cannot read these cuts ({reason}).") from error

    def check(self) -> None:
        """Refuse cuts of which not even the first can be read before a run begins."""
        if next(iter(self), None) is None:
            raise ValueError(f"{self._key}: {self._path}: has no cut.")


class ManifestCuts:
    """The utterances of one of our datasets as cuts, in its order for an epoch; made while iterating."""

    def __init__(self, source: ManifestDataset, number: int, seed: int, shuffle: bool, epoch: int) -> None:
        self._source, self._number = source, number
        self._order, self._epoch = source.order(seed=seed, shuffle=shuffle), epoch

    def __iter__(self) -> Iterator[Cut]:
        for index in self._order.indices(self._epoch).tolist():
            yield self._cut(index)

    def _cut(self, index: int) -> Cut:
        lhotse = _lhotse()
        utterance = self._source.utterance(index)
        if utterance.duration_s is None:
            where = f"{utterance.manifest}:{utterance.line}"
            raise ValueError(f"{where}: no 'duration', which lhotse needs. Run 'nest-ssl prepare' to measure it.")
        name, rate = f"{self._number}-{index}", self._source.sample_rate
        end_s = utterance.offset_s + utterance.duration_s
        recording = lhotse.Recording(
            id=name,
            sources=[lhotse.AudioSource("file", [0], utterance.audio_filepath)],
            sampling_rate=rate,
            num_samples=round(end_s * rate),
            duration=end_s,
        )
        custom = {SOURCE: self._number, "index": index}
        return lhotse.MonoCut(name, utterance.offset_s, utterance.duration_s, 0, recording=recording, custom=custom)


def _lasts_between(least_s: float, most_s: float, cut: Any) -> bool:
    return least_s <= float(cut.duration) <= most_s


def is_endless(config: DatasetConfig) -> bool:
    """Tell whether an epoch never ends: several inputs are mixed endlessly, unless `force_finite`."""

    return not config.force_finite and len(_mixed(_entries(config))) > 1


def _entries(config: DatasetConfig) -> list[dict[str, Any]]:
    """Return the inputs that a configuration names, in the form of `input_cfg`."""
    if config.input_cfg is not None:
        return _listed(config.input_cfg)
    entries: list[dict[str, Any]] = []
    if config.manifest_filepath is not None:
        entry = {"type": "nemo", "manifest_filepath": config.manifest_filepath}
        if config.tarred_audio_filepaths is not None:
            entry |= {"type": "nemo_tarred", "tarred_audio_filepaths": config.tarred_audio_filepaths}
        entries.append(entry)
    if config.cuts_path is not None:
        entries.append({"type": "lhotse", "cuts_path": config.cuts_path})
    if config.shar_path is not None:
        entries.append({"type": "lhotse_shar", "shar_path": config.shar_path})
    if not entries:
        raise ValueError("use_lhotse: needs one of manifest_filepath, cuts_path, shar_path and input_cfg.")
    return entries


def _listed(input_cfg: str | list[dict[str, Any]]) -> list[dict[str, Any]]:
    listed = read_yaml(input_cfg) if isinstance(input_cfg, str) else input_cfg
    if not isinstance(listed, list) or not listed:
        what = f"{input_cfg} does not contain" if isinstance(input_cfg, str) else f"{short(input_cfg)} is not"
        raise ValueError(f"input_cfg: {what} a list of inputs.")
    return listed


def _mixed(entries: list[dict[str, Any]], depth: int = 0) -> list[tuple[str, dict[str, Any], float]]:
    """Return kind, entry and weight of every input; those of a group share its weight."""
    inputs: list[tuple[str, dict[str, Any], float]] = []
    for entry in entries:
        kind, weight = _checked(entry), float(entry.get("weight", 1.0))
        if kind != "group":
            inputs.append((kind, entry, weight))
            continue
        if depth == MOST_NESTED:
            inner = given if isinstance(given := entry["input_cfg"], str) else "one of them"
            raise ValueError(f"input_cfg: {depth} groups within groups. Does {inner} name itself?")
        members = _mixed(_listed(entry["input_cfg"]), depth + 1)
        total = sum(own for *_, own in members)
        inputs += [(own_kind, member, weight * own / total) for own_kind, member, own in members]
    return inputs


def _checked(entry: dict[str, Any]) -> str:
    """Return the type of an entry, after checking that it has all keys it needs and no others."""
    if not isinstance(entry, dict):
        raise ValueError(f"input_cfg: {short(entry)} is not a mapping with a 'type'.")
    kind = entry.get("type")
    if kind not in KEYS:
        raise ValueError(f"input_cfg: type {kind!r} is not one of {', '.join(map(repr, KEYS))}.")
    missing = KEYS[kind] - set(entry)
    unknown = set(entry) - KEYS[kind] - {"type", "weight", "tags"}
    if missing or unknown:
        what = f"needs {sorted(missing)}" if missing else f"does not take {sorted(unknown)}"
        raise ValueError(f"input_cfg: type {kind!r} {what}.")
    try:
        Range(0, above=True).check("input_cfg: weight", float(entry.get("weight", 1.0)))
    except TypeError as error:
        raise ValueError(f"input_cfg: weight: {entry['weight']} is not a number.") from error
    return str(kind)
