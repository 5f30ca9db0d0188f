"""Making one batch of the plan: read the speech, draw the noise, mix. Bad files are replaced on the way."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from itertools import chain
from typing import TypeVar

import numpy as np
import torch

from nest_ssl.audio import AudioError
from nest_ssl.audio.signal import Samples, pad_audio
from nest_ssl.data.batch.augmentation import SpeakerNoiseAugmentation
from nest_ssl.data.batch.bad_data import BadDataError, BadFile
from nest_ssl.data.batch.batch import AudioNoiseBatch, AudioNoiseItem, lengths_of, pad_rows, with_noise
from nest_ssl.data.batch.noise import NoiseSource
from nest_ssl.data.batch.randomness import utterance_generators
from nest_ssl.data.batch.shared_blocks import loan
from nest_ssl.data.batch.threads import Readers

T = TypeVar("T")


@dataclass(frozen=True)
class Place:
    """Place of a batch in the plan."""

    epoch: int
    step: int
    rank: int


@dataclass
class BatchMaker:
    """From utterances to a batch; the same for every kind of dataset."""

    sample_rate: int
    noise: NoiseSource | None
    augmentor: SpeakerNoiseAugmentation | None
    seed: int = 0
    min_audio_len_secs: float = 1.0
    pad_audio_mode: str = "repeat"
    mix: bool = True
    """Give `noisy_audio` beside `noise`; else `AudioNoiseBatch.mixed` does."""
    readers: Readers = field(default_factory=Readers)

    def make(
        self, wanted: Sequence[T], spares: Sequence[T], read: Callable[[T], Samples], place: Place
    ) -> tuple[AudioNoiseBatch, list[T]]:
        """The batch, and the utterances in it: `wanted`, with `spares` in place of those that cannot be read."""
        bad: list[BadFile] = []
        audio_rows, used = self._read_all(wanted, spares, read, place, bad)
        generators = utterance_generators(self.seed, place.epoch, place.step, place.rank, len(used))
        bad_noise: list[list[BadFile]] = [[] for _ in used]  # of each utterance: threads end in any order

        def noise_of(i: int) -> Samples:
            return self._noise(len(audio_rows[i]), generators[i], place, bad_noise[i])

        audio = pad_rows(audio_rows, max(map(len, audio_rows)))
        batch = AudioNoiseBatch(audio=audio, audio_len=lengths_of(audio_rows))
        if self.augmentor is not None:
            batch = self.augmentor.augment(
                batch, noise_of, generators=generators, mix=self.mix, for_each=self.readers.map
            )
        else:
            noise_rows = self.readers.map(noise_of, range(len(audio_rows)))
            noise = pad_rows(noise_rows, audio.shape[1])
            batch = with_noise(batch, noise, lengths_of(noise_rows), self.mix)
        return replace(batch, loan=loan(), bad_files=[*bad, *chain(*bad_noise)]), used

    def item(self, sample_id: str, samples: Samples, rng: np.random.Generator) -> AudioNoiseItem:
        """One utterance with its noise, for those who batch by themselves."""
        audio = self._padded(samples)
        noise = self._noise(len(audio), rng, Place(0, 0, 0), [])
        (noise_row,) = pad_rows([noise], len(audio))
        return AudioNoiseItem(
            sample_id=sample_id,
            audio=torch.from_numpy(audio),
            audio_len=torch.tensor(len(audio)),
            noise=noise_row,
            noise_len=torch.tensor(len(noise)),
        )

    def _read_all(
        self, wanted: Sequence[T], spares: Sequence[T], read: Callable[[T], Samples], place: Place, bad: list[BadFile]
    ) -> tuple[list[Samples], list[T]]:
        def outcome(utterance: T) -> Samples | AudioError:
            try:
                return self._padded(read(utterance))
            except AudioError as error:
                return error

        rows: list[Samples] = []
        used: list[T] = []
        stand_ins = ((spare, self.readers.map(outcome, [spare])[0]) for spare in spares)
        for first in zip(wanted, self.readers.map(outcome, wanted), strict=True):
            found, samples = self._first_read(chain([first], stand_ins), place, bad)
            rows.append(samples)
            used.append(found)
        return rows, used

    def _first_read(
        self, outcomes: Iterable[tuple[T, Samples | AudioError]], place: Place, bad: list[BadFile]
    ) -> tuple[T, Samples]:
        """The first utterance that could be read: a wanted one, or a stand-in."""
        for number, (utterance, outcome) in enumerate(outcomes):
            if not isinstance(outcome, AudioError):
                return utterance, outcome
            bad.append(replace(_bad("speech", outcome, place), stand_in=number > 0))
        named = "\n".join(f"  {file.audio_filepath}: {file.reason}" for file in bad if file.kind == "speech")
        raise BadDataError(f"none of these neighbours in the plan can be read:\n{named}")

    def _padded(self, samples: Samples) -> Samples:
        return pad_audio(samples, int(self.min_audio_len_secs * self.sample_rate), self.pad_audio_mode)

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
