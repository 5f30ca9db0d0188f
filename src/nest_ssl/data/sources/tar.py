"""Audio in tar shards with random access, so that a plan can resume anywhere and divide the work among ranks.

Each process reads the headers of a shard once, when it opens it (20,000 members in about a second); audio is read with
one seek. Streaming a tar file, as webdataset does, could neither start at batch k nor give the same batches with any
number of workers. Shards must therefore be uncompressed files.
"""

from __future__ import annotations

import itertools
import logging
import os
import re
import tarfile
import time
from collections.abc import Iterable, Iterator
from typing import Generic, TypeVar

import numpy as np
import numpy.typing as npt
from torch.utils.data import IterableDataset, get_worker_info

from nest_ssl.audio import AudioError
from nest_ssl.audio.signal import ChannelSelector
from nest_ssl.data.batch.augmentation import Augmentation
from nest_ssl.data.batch.collate import AudioNoiseItem
from nest_ssl.data.batch.make import OnRead
from nest_ssl.data.manifest.listing import NOT_AUDIO
from nest_ssl.data.manifest.read import KeptOpen, Manifest, Paths, Utterance, open_manifests, split_paths
from nest_ssl.data.plan.batches import FixedSizePlan
from nest_ssl.data.plan.order import Indices, ShardOrder
from nest_ssl.data.sources.files import ManifestDataset

log = logging.getLogger(__name__)

LAYOUTS = {"scatter": "contiguous", "replicate": "replicated"}
PROGRESS_EVERY_S = 1.0
SUB_SEGMENT = re.compile(r"-sub\d+$")
"""NeMo's suffix for further utterances cut from the same member."""


V = TypeVar("V")


class AmbiguousNameError(ValueError):
    """Several members fit a manifest's path equally well."""


class Members(Generic[V]):
    """What a manifest's path finds in tar files: a member of that name, or one whose path ends like it.

    As in NeMo, folder and extension need not agree. Of several members that differ only there, the one that shares
    most of the path is meant: of spk1/001.wav and spk2/001.wav, /data/spk2/001.flac is the second.
    """

    def __init__(self, members: Iterable[tuple[str, V]]) -> None:
        self._by_stem: dict[str, list[tuple[str, V]]] = {}
        for name, value in members:
            self._by_stem.setdefault(_stem(name), []).append((name, value))

    def names(self) -> Iterator[str]:
        return (name for members in self._by_stem.values() for name, _ in members)

    def find(self, name: str) -> V | None:
        """Return what belongs to a manifest's path; None if there is nothing; raise AmbiguousNameError."""
        stem = _stem(name)
        found = self._by_stem.get(stem) or self._by_stem.get(SUB_SEGMENT.sub("", stem))
        if found is None:
            return None
        if len(found) > 1:
            likeness = [_likeness(member, name) for member, _ in found]
            found = [one for one, like in zip(found, likeness, strict=True) if like == max(likeness)]
        if len(found) > 1:
            raise AmbiguousNameError(
                f"{len(found)} members fit equally well ({found[0][0]}, {found[1][0]}). "
                "Write the members' own paths into the manifest."
            )
        return found[0][1]


def _likeness(member: str, name: str) -> tuple[bool, bool, int, bool, bool]:
    """Rank members with the stem of a manifest's path; transcripts may have it, too."""
    folders, others = member.split("/")[-2::-1], name.split("/")[-2::-1]
    shared = sum(1 for _ in itertools.takewhile(lambda pair: pair[0] == pair[1], zip(folders, others, strict=False)))
    same_base = os.path.basename(member) == os.path.basename(name)
    is_audio = os.path.splitext(member)[1].lower() not in NOT_AUDIO
    return member == name, is_audio, shared, shared == len(folders), same_base


class TarShard:
    """The members of one tar file, by name.

    `on_read` is called with the path every second while headers are read: on a slow disk that takes longer than the
    watchdog gives a single read.
    """

    def __init__(self, path: str, on_read: OnRead = None) -> None:
        self.path = path
        self.damage = ""
        """Where the headers end too early; members after it cannot be found."""
        members: dict[str, tuple[int, int]] = {}
        said_at_s = time.monotonic()
        try:
            with tarfile.open(path, "r:") as tar:
                for member in tar:
                    if on_read is not None and time.monotonic() - said_at_s > PROGRESS_EVERY_S:
                        said_at_s = time.monotonic()
                        on_read(path)
                    if member.isreg() and not member.issparse():  # whose bytes have gaps
                        members[member.name.removeprefix("./")] = (member.offset_data, member.size)
                end = tar.offset
            with open(path, "rb") as file:  # tarfile takes a damaged header for the end, which has zeros instead
                file.seek(end)
                if file.read(tarfile.BLOCKSIZE).strip(b"\0"):
                    self.damage = f"the shard is damaged at byte {end:,}"
        except (OSError, ValueError, OverflowError, tarfile.TarError) as error:  # of a size that no file has
            if not members:  # the part before the end of a truncated shard is good
                raise AudioError(path, f"not a readable, uncompressed tar file: {error}") from None
            self.damage = f"the shard is damaged: {error}"
        self._members = Members(members.items())
        self._file = open(path, "rb", buffering=0)  # noqa: SIM115

    def names(self) -> Iterable[str]:
        """Return the names of all members."""
        return self._members.names()

    def read(self, name: str) -> bytes:
        try:
            place = self._members.find(name)
        except AmbiguousNameError as error:
            raise AudioError(f"{self.path}/{name}", str(error)) from None
        if place is None:
            reason = self.damage or "links and sparse files are not read"
            raise AudioError(f"{self.path}/{name}", f"no such member in the shard ({reason})")
        offset, size = place
        num_there = os.fstat(self._file.fileno()).st_size - offset
        if num_there < size:  # before as much memory is asked for
            raise AudioError(f"{self.path}/{name}", f"the shard ends after {max(num_there, 0)} of {size} bytes")
        self._file.seek(offset)
        return self._file.read(size)

    def close(self) -> None:
        self._file.close()


class TarredAudioNoiseDataset(ManifestDataset, IterableDataset[AudioNoiseItem]):
    """Audio in tar shards, with one manifest for all shards or one per shard.

    Iterating yields the utterances of rank `global_rank` in the order of a plan; `build_loader` ignores the rank and
    plans for all ranks itself. Utterances are numbered shard by shard.
    """

    def __init__(
        self,
        noise_manifest: Paths | None = None,
        batch_augmentor: Augmentation | None = None,
        min_audio_len_secs: float = 1.0,
        pad_audio_mode: str = "repeat",
        *,
        audio_tar_filepaths: Paths,
        manifest_filepath: Paths,
        sample_rate: int,
        int_values: bool = False,
        max_duration: float | None = None,
        min_duration: float | None = None,
        trim: bool = False,
        channel_selector: ChannelSelector = None,
        shuffle_n: int = 0,
        shard_strategy: str = "scatter",
        shard_manifests: bool = False,
        global_rank: int = 0,
        world_size: int = 1,
        seed: int = 0,
        noise_bank_gb: float = 0.0,
    ) -> None:
        super().__init__(
            open_manifests(manifest_filepath, min_duration_s=min_duration, max_duration_s=max_duration),
            sample_rate=sample_rate,
            noise_manifest=noise_manifest,
            batch_augmentor=batch_augmentor,
            min_audio_len_secs=min_audio_len_secs,
            pad_audio_mode=pad_audio_mode,
            trim=trim,
            int_values=int_values,
            channel_selector=channel_selector,
            seed=seed,
            noise_bank_gb=noise_bank_gb,
        )
        if shard_strategy not in LAYOUTS:
            raise ValueError(f"tarred_shard_strategy: {shard_strategy!r} is not one of 'scatter', 'replicate'.")
        self.shard_strategy, self.shuffle_n = shard_strategy, shuffle_n
        self.global_rank, self.world_size = global_rank, world_size
        self._tars = KeptOpen(TarShard)
        self._paths = _existing(split_paths(audio_tar_filepaths))
        self._numbers: Indices | None = None
        """The number of each utterance in the manifest; None if manifests are per shard: both numberings agree."""
        if shard_manifests or len(self.manifest.paths) > 1:
            self.shard_sizes = self._sizes_of_shard_manifests()
            _check_archive(self._paths[0])
        else:
            self._numbers, self.shard_sizes = _sorted_by_shard(self.manifest, self._paths, self._tars)
        self._ends = np.cumsum(self.shard_sizes)

    def __len__(self) -> int:
        return int(self._ends[-1])

    def __iter__(self) -> Iterator[AudioNoiseItem]:
        """Yield the items of this rank or, in a worker, its share of them."""
        plan = FixedSizePlan(
            self.order(seed=self.maker.seed, shuffle=self.shuffle_n > 0),
            batch_size=1,
            world_size=self.world_size,
            drop_last=False,
            seed=self.maker.seed,
            fingerprint=self.manifest.fingerprint(),
            layout=LAYOUTS[self.shard_strategy],
        )
        worker = get_worker_info()
        first, every = (0, 1) if worker is None else (worker.id, worker.num_workers)
        for step in range(first, plan.cut.num_steps, every):
            yield self.item(int(plan.batch(0, step, self.global_rank).indices[0]))

    @property
    def durations_s(self) -> npt.NDArray[np.float32]:
        return self.manifest.durations_s if self._numbers is None else self.manifest.durations_s[self._numbers]

    def order(self, *, seed: int, shuffle: bool, stream: int = 0) -> ShardOrder:
        return ShardOrder(self.shard_sizes, seed, shuffle, self.shuffle_n, stream)

    def utterance(self, index: int) -> Utterance:
        return self.manifest[index if self._numbers is None else int(self._numbers[index])]

    def source(self, index: int, utterance: Utterance, on_read: OnRead = None) -> tuple[str | bytes, str]:
        shard = self._paths[int(np.searchsorted(self._ends, index, side="right"))]
        name = utterance.audio_filepath
        with self._tars.file(shard, on_read=on_read) as tar:
            return tar.read(name), f"{shard}/{name}"

    def _sizes_of_shard_manifests(self) -> tuple[int, ...]:
        sizes = self.manifest.num_per_file
        if len(sizes) != len(self._paths):
            raise ValueError(
                f"{len(sizes)} manifests for {len(self._paths)} tar shards. Give one manifest for all shards, or as "
                "many manifests as shards, in the same order."
            )
        return tuple(sizes)


def _existing(paths: list[str]) -> list[str]:
    bad = [path for path in paths if not os.path.isfile(path)]
    if bad and os.path.exists(bad[0]):
        what = "a folder" if os.path.isdir(bad[0]) else "not a regular file"
        raise ValueError(f"tarred_audio_filepaths: {bad[0]}: is {what}. Give uncompressed tar files.")
    if bad:
        raise FileNotFoundError(
            f"tarred_audio_filepaths: {bad[0]}: no such file ({len(bad)} of {len(paths)} shards are missing)."
        )
    return paths


def _check_archive(path: str) -> None:
    """Refuse shards that are no tar files before a run begins; the headers of all are read when their turn comes."""
    try:
        tarfile.open(path, "r:").close()
    except (OSError, ValueError, OverflowError, tarfile.TarError) as error:
        what = f"not a readable, uncompressed tar file: {error}"
        raise ValueError(f"tarred_audio_filepaths: {path}: {what}.") from error


def _sorted_by_shard(manifest: Manifest, paths: list[str], tars: KeptOpen[TarShard]) -> tuple[Indices, tuple[int, ...]]:
    """Return the manifest numbers sorted by shard, and the size of each shard. Reads the headers of all shards."""

    def members() -> Iterator[tuple[str, int]]:
        for number, path in enumerate(paths):
            with tars.file(path) as tar:
                if tar.damage:
                    log.warning("%s: %s: members after that are lost", path, tar.damage)
                yield from ((name, number) for name in tar.names())

    shard_of_name = Members(members())

    def shard_of_line(utterance: Utterance) -> int:
        try:
            number = shard_of_name.find(utterance.audio_filepath)
        except AmbiguousNameError as error:
            where = f"{utterance.manifest}:{utterance.line}: {utterance.audio_filepath}"
            raise ValueError(f"{where}: {error} Or give one manifest per shard.") from None
        return -1 if number is None else number

    shard_of = np.fromiter(map(shard_of_line, manifest), np.int64, len(manifest))
    num_missing = int(np.count_nonzero(shard_of < 0))
    if num_missing:
        log.warning("%s: %d utterances are in none of the shards: left out", manifest.name, num_missing)
    if num_missing == len(shard_of):
        raise ValueError(f"{manifest.name}: none of its {num_missing} utterances is in the shards ({paths[0]}, …).")
    order = np.argsort(shard_of, kind="stable")[num_missing:]
    return order.astype(np.uint32), tuple(np.bincount(shard_of[order], minlength=len(paths)).tolist())


def _stem(name: str) -> str:
    return os.path.splitext(os.path.basename(name))[0]
