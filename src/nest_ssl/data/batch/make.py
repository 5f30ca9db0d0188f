"""Make one batch of the plan: read the speech, draw the noise, mix. Files that cannot be read are replaced.

The files of a batch are read in parallel threads where this process may use several cores; a worker has one.
"""

from __future__ import annotations

import contextlib
import math
import os
import threading
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from dataclasses import dataclass, field, replace
from functools import cache
from itertools import chain
from typing import TypeVar

import numpy as np
import torch

from nest_ssl.audio import AudioError
from nest_ssl.audio.signal import Samples, pad_audio
from nest_ssl.data.batch.augmentation import Augmentation, NoiseSource, SpeakerNoiseAugmentation
from nest_ssl.data.batch.collate import (
    AudioNoiseBatch,
    AudioNoiseItem,
    BadDataError,
    BadFile,
    lengths_of,
    loan,
    mixture,
    needed,
    pack_rows,
    pad_rows,
    with_noise,
)
from nest_ssl.data.randomness import utterance_generators

MOST_NAMED = 5
"""Files in one message."""
T = TypeVar("T")
R = TypeVar("R")

OnRead = Callable[[str], None] | None
"""Called with the path of a file just before it is read, in the process that reads it."""


@dataclass(frozen=True)
class Speech:
    """One utterance, as read."""

    sample_id: str
    audio_filepath: str
    """For messages and the batch's list of files."""
    samples: Samples
    """(N,) float32 at the dataset's sample rate."""


@dataclass(frozen=True)
class Place:
    """Place of a batch in the plan."""

    epoch: int
    step: int
    rank: int


class Readers:
    """As many threads as torch may use, and a report of the files they read.

    `on_read` is last called with the file that has been read for longest: if one never returns, that is the one.
    """

    def __init__(self, on_read: OnRead = None) -> None:
        self.on_read = on_read
        self._paths: dict[int, str] = {}
        """The file of each thread that reads, the oldest first."""
        self._lock = threading.Lock()

    def map(self, function: Callable[[T], R], items: Sequence[T]) -> list[R]:
        """Call `function`, which calls `reading`, for every item; raise the first error when all have ended."""
        if min(torch.get_num_threads(), len(items)) < 2:
            return [self._run(function, item) for item in items]
        pool = _pool(os.getpid(), torch.get_num_threads())
        tasks = [pool.submit(self._run, function, item) for item in items]
        try:
            wait(tasks)
        finally:  # Ctrl-C
            for task in tasks:
                task.cancel()
        return [task.result() for task in tasks]

    def reading(self, path: str) -> None:
        """Note that this thread is about to read `path`."""
        if self.on_read is None:
            return
        with self._lock:
            self._paths.pop(threading.get_ident(), None)
            self.on_read(path)
            self._paths[threading.get_ident()] = path
            oldest = next(iter(self._paths.values()))
            if oldest != path:
                self.on_read(oldest)
        if threading.current_thread() is not threading.main_thread():
            _block_here_if_ever(path)

    def _run(self, function: Callable[[T], R], item: T) -> R:
        try:
            return function(item)
        finally:
            with self._lock:
                self._paths.pop(threading.get_ident(), None)
                if self.on_read is not None and self._paths:
                    self.on_read(next(iter(self._paths.values())))

    def __reduce__(self) -> tuple[type[Readers], tuple[OnRead]]:
        return Readers, (self.on_read,)


def _block_here_if_ever(path: str) -> None:
    """Open the file once: soundfile opens one at a time, so one that blocks there would hold up the other threads."""
    with contextlib.suppress(OSError):  # reported when it is read
        if os.path.isfile(path):  # no FIFO, which is refused when it is read, and no name in a shard
            os.close(os.open(path, os.O_RDONLY))


@cache
def _pool(pid: int, num_threads: int) -> ThreadPoolExecutor:
    """Return the pool of this process: threads do not survive a fork."""
    return ThreadPoolExecutor(num_threads, thread_name_prefix="read")


@dataclass
class BatchMaker:
    """Turns utterances into a batch; the same for every kind of dataset."""

    sample_rate: int
    noise: NoiseSource | None
    augmentor: Augmentation | None
    seed: int = 0
    min_audio_len_secs: float = 1.0
    pad_audio_mode: str = "repeat"
    mix: bool = True
    """Add `noisy_audio` to the batch; otherwise `AudioNoiseBatch.mixed` does that later."""
    readers: Readers = field(default_factory=Readers)

    def make(
        self,
        wanted: Sequence[T],
        spares: Sequence[T],
        read: Callable[[T], Speech],
        place: Place,
        num_samples: int | None = None,
    ) -> AudioNoiseBatch:
        """Make a batch of `wanted`, with `spares` in place of those that cannot be read.

        Audio longer than the planned `num_samples` is cropped, that of spares too.
        """
        bad: list[BadFile] = []
        speech = self._read_all(wanted, spares, read, place, bad)
        audio_rows = [np.asarray(one.samples[:num_samples], np.float32) for one in speech]
        generators = utterance_generators(self.seed, place.epoch, place.step, place.rank, len(speech))
        bad_noise: list[list[BadFile]] = [[] for _ in speech]  # per utterance: threads end in any order

        def noise_of(i: int) -> Samples:
            return self._noise(len(audio_rows[i]), generators[i], place, bad_noise[i])

        audio = self._padded_rows(audio_rows)
        batch = AudioNoiseBatch(audio=audio, audio_len=lengths_of(audio_rows))
        if isinstance(self.augmentor, SpeakerNoiseAugmentation):
            batch = self.augmentor.augment(
                batch, audio_rows, noise_of, generators=generators, mix=self.mix, for_each=self.readers.map
            )
        else:
            noise_rows = self.readers.map(noise_of, range(len(audio_rows)))
            noise = pad_rows(noise_rows, audio.shape[1])
            mix_now = self.mix and self.augmentor is None
            batch = with_noise(batch, noise, lengths_of(noise_rows), mix_now)
            if self.augmentor is not None:
                batch = self._augmented(self.augmentor, batch, generators)
        return replace(
            batch.shared(),
            sample_id=[one.sample_id for one in speech],
            audio_filepaths=[one.audio_filepath for one in speech],
            loan=loan(),
            bad_files=[*bad, *chain(*bad_noise)],
            planned_samples=num_samples,
            cropped_files=[one.audio_filepath for one in speech if len(one.samples) > (num_samples or math.inf)],
        )

    def _padded_rows(self, audio_rows: Sequence[Samples]) -> torch.Tensor:
        """Return (B, N), as int16 if nobody adds to it here and every row is exactly that."""
        longest = max(map(len, audio_rows))
        is_ours = self.augmentor is None or isinstance(self.augmentor, SpeakerNoiseAugmentation)
        stays_as_read = is_ours and not self.mix  # a registered augmentation is given float32
        packed = pack_rows(audio_rows, longest) if stays_as_read else None
        return pad_rows(audio_rows, longest) if packed is None else packed

    def item(self, speech: Speech, rng: np.random.Generator) -> AudioNoiseItem:
        """Return one utterance with its noise, for callers who batch by themselves."""
        audio = self._padded(speech).samples
        noise = self._noise(len(audio), rng, Place(0, 0, 0), [])
        (noise_row,) = pad_rows([noise], len(audio))
        return AudioNoiseItem(
            sample_id=speech.sample_id,
            audio=torch.from_numpy(audio),
            audio_len=torch.tensor(len(audio)),
            noise=noise_row,
            noise_len=torch.tensor(len(noise)),
        )

    def _augmented(
        self, augmentor: Augmentation, batch: AudioNoiseBatch, generators: Sequence[np.random.Generator]
    ) -> AudioNoiseBatch:
        """Apply a registered augmentation, check what it returns, and mix unless it did."""
        before = needed(batch.audio).shape
        batch = augmentor(batch, generator=generators)
        changed = batch.noise if batch.noisy_audio is None else batch.noisy_audio
        for name, tensor in (("audio", batch.audio), ("noise or noisy_audio", changed)):
            if tensor is None or tensor.shape != before:
                raise ValueError(
                    f"batch_augmentor: {type(augmentor).__name__} returned a batch whose {name} has the shape "
                    f"{None if tensor is None else tuple(tensor.shape)} instead of {tuple(before)}."
                )
        if self.mix and batch.noisy_audio is None:
            batch = replace(batch, noisy_audio=mixture(needed(batch.audio), needed(batch.noise)))
        return batch

    def _read_all(
        self, wanted: Sequence[T], spares: Sequence[T], read: Callable[[T], Speech], place: Place, bad: list[BadFile]
    ) -> list[Speech]:
        def outcome(utterance: T) -> Speech | AudioError:
            try:
                return self._padded(read(utterance))
            except AudioError as error:
                return error

        stand_ins = (self.readers.map(outcome, [spare])[0] for spare in spares)
        return [self._first_read(chain([first], stand_ins), place, bad) for first in self.readers.map(outcome, wanted)]

    def _first_read(self, outcomes: Iterable[Speech | AudioError], place: Place, bad: list[BadFile]) -> Speech:
        """Return the first utterance that could be read: the wanted one, or its replacement."""
        for number, outcome in enumerate(outcomes):
            if not isinstance(outcome, AudioError):
                return outcome
            bad.append(replace(_bad("speech", outcome, place), stand_in=number > 0))
        named = [f"  {file.audio_filepath}: {file.reason}" for file in bad if file.kind == "speech"]
        more = [f"  … and {len(named) - MOST_NAMED} more"] if len(named) > MOST_NAMED else []
        lines = "\n".join(named[:MOST_NAMED] + more).lstrip()  # a file in the first line, which reports quote
        raise BadDataError(f"none of these neighbours in the plan can be read: {lines}")

    def _padded(self, speech: Speech) -> Speech:
        min_num_samples = int(self.min_audio_len_secs * self.sample_rate)
        return replace(speech, samples=pad_audio(speech.samples, min_num_samples, self.pad_audio_mode))

    def _noise(self, num_samples: int, rng: np.random.Generator, place: Place, bad: list[BadFile]) -> Samples:
        if self.noise is None:
            return np.zeros(num_samples, np.float32)
        noise = self.noise.sample(num_samples, rng, lambda error: bad.append(_bad("noise", error, place)))
        if noise is not None:
            return noise
        bad.append(BadFile("no-noise", bad[-1].audio_filepath, bad[-1].reason, place.epoch, place.step, place.rank))
        return np.zeros(num_samples, np.float32)


def _bad(kind: str, error: AudioError, place: Place) -> BadFile:
    return BadFile(kind, error.path, error.reason, place.epoch, place.step, place.rank)
