"""Batch augmentation: noise and other speakers of the batch, added at a drawn energy ratio. B batch, N samples."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, fields

import numpy as np
import torch
from torch import Tensor

from nest_ssl.audio.signal import Samples, gain_for_ratio, place_in_order, power, repeat_to, split_length
from nest_ssl.config import AugmentorConfig
from nest_ssl.config.targets import resolve_target
from nest_ssl.data.batch.batch import AudioNoiseBatch, with_noise
from nest_ssl.data.batch.randomness import RandomSource, per_utterance
from nest_ssl.data.batch.shared_blocks import empty


@dataclass(frozen=True)
class Segment:
    """Samples, and where in the utterance they are added."""

    start: int
    samples: Samples


@dataclass(frozen=True)
class Added:
    """What is added to one utterance: `gain` times each segment."""

    gain: float
    segments: list[Segment]


@dataclass(frozen=True, kw_only=True)
class SpeakerNoiseAugmentation:
    """With probability `prob`, add one stretch of noise or of one other utterance of the batch.

    Energy ratios are in dB, of the utterance over the noise that the stretch is cut from.
    """

    prob: float = 0.0
    noise_ratio: float = 0.0
    min_r_speech: float = -5.0
    max_r_speech: float = 5.0
    min_r_noise: float = -5.0
    max_r_noise: float = 20.0
    min_mix_rate: float = 0.0
    max_mix_rate: float = 1.0
    keep_unselected_noise: bool = True

    def __post_init__(self) -> None:
        names = {f.name for f in fields(self)}
        AugmentorConfig(**{name: getattr(self, name) for name in names})  # the checks of the configuration

    def __call__(self, batch: AudioNoiseBatch, *, generator: RandomSource = None) -> AudioNoiseBatch:
        """A new batch with `noise`, `noise_len` and `noisy_audio`; `batch` is not changed."""
        if batch.audio is None or batch.audio_len is None or batch.noise is None or batch.noise_len is None:
            raise ValueError("augmentation needs audio, audio_len, noise and noise_len")
        noise_rows = _rows(batch.noise, batch.noise_len)
        return self.augment(batch, noise_rows.__getitem__, generators=per_utterance(generator, len(noise_rows)))

    def augment(
        self,
        batch: AudioNoiseBatch,
        noise_of: Callable[[int], Samples],
        *,
        generators: Sequence[np.random.Generator],
        mix: bool = True,
        for_each: Callable[[Callable[[int], int], Sequence[int]], Iterable[int]] = map,
    ) -> AudioNoiseBatch:
        """As calling it, with `noise_of(i)` in place of `batch.noise[i]`: asked for only where it is used.

        `for_each` may treat utterances at once if none shares its generator with another.
        """
        assert batch.audio is not None
        assert batch.audio_len is not None
        audio_rows = _rows(batch.audio, batch.audio_len)
        noise = empty(*batch.audio.shape)
        noise_rows = noise.numpy()

        def fill(i: int) -> int:
            """Write row i of the noise; its length."""
            row, rng = noise_rows[i], generators[i]
            if rng.random() < self.prob:
                _write(row, self._added(i, audio_rows, noise_of, rng))
            elif self.keep_unselected_noise:
                raw = noise_of(i)[: len(row)]
                _write(row, Added(1.0, [Segment(0, raw)]))
                return len(raw)
            else:
                row[:] = 0
            return len(audio_rows[i])

        noise_len = torch.tensor(list(for_each(fill, range(len(audio_rows)))), dtype=torch.int64)
        return with_noise(batch, noise, noise_len, mix)

    def _added(
        self, i: int, audio_rows: Sequence[Samples], noise_of: Callable[[int], Samples], rng: np.random.Generator
    ) -> Added:
        audio = audio_rows[i]
        mix_len = self._mix_len(len(audio), rng)
        mix_start = _integer(rng, 0, len(audio) - mix_len)
        from_noise, ratio_db = self._draw_source(len(audio_rows), rng)
        source = noise_of(i) if from_noise else audio_rows[_other(i, len(audio_rows), rng)]
        if len(source) <= mix_len:
            source = clip = repeat_to(source, mix_len)
        else:
            start = _integer(rng, 0, len(source) - mix_len)
            clip = source[start : start + mix_len]
        return Added(gain_for_ratio(power(audio), power(source), ratio_db), [Segment(mix_start, clip)])

    def _mix_len(self, num_samples: int, rng: np.random.Generator) -> int:
        least, most = int(num_samples * self.min_mix_rate), int(num_samples * self.max_mix_rate)
        return _integer(rng, least, most) if least < most else max(1, least)

    def _draw_source(self, batch_size: int, rng: np.random.Generator) -> tuple[bool, float]:
        """Noise (or else speech), and the energy ratio in dB."""
        if rng.random() < self.noise_ratio or batch_size == 1:
            return True, rng.uniform(self.min_r_noise, self.max_r_noise)
        return False, rng.uniform(self.min_r_speech, self.max_r_speech)


@dataclass(frozen=True, kw_only=True)
class MultiSpeakerNoiseAugmentation(SpeakerNoiseAugmentation):
    """With probability `prob`, add several segments of noise or of several other utterances of the batch.

    Energy ratios are in dB, of the utterance over the added signal, both over the whole utterance.
    """

    min_num_segments: int = 1
    max_num_segments: int = 5
    min_num_speakers: int = 1
    max_num_speakers: int = 4

    def _added(
        self, i: int, audio_rows: Sequence[Samples], noise_of: Callable[[int], Samples], rng: np.random.Generator
    ) -> Added:
        audio = audio_rows[i]
        mix_len = max(1, int(len(audio) * rng.uniform(self.min_mix_rate, self.max_mix_rate)))
        num_segments = int(rng.integers(self.min_num_segments, self.max_num_segments, endpoint=True))
        num_speakers = int(rng.integers(self.min_num_speakers, self.max_num_speakers, endpoint=True))
        lengths = split_length(mix_len, num_segments, rng)
        from_noise, ratio_db = self._draw_source(len(audio_rows), rng)
        if from_noise:
            pieces = np.split(repeat_to(noise_of(i), mix_len), np.cumsum(lengths)[:-1])
        else:
            others = [row for j, row in enumerate(audio_rows) if j != i]
            speakers = rng.permutation(len(others))[:num_speakers]
            pieces = _speech_pieces([others[j] for j in speakers], lengths, rng)
        starts = place_in_order(len(audio), lengths, rng)
        # Segments do not overlap, so the added signal's energy is the sum of theirs.
        added_power = sum(power(piece) * len(piece) for piece in pieces) / len(audio)
        gain = gain_for_ratio(power(audio), added_power, ratio_db)
        return Added(gain, [Segment(start, piece) for start, piece in zip(starts, pieces, strict=True)])


def _speech_pieces(speakers: Sequence[Samples], lengths: Sequence[int], rng: np.random.Generator) -> list[Samples]:
    """One piece per length: each speaker once, then on from a random one whenever the last has had its turn."""
    pieces: list[Samples] = []
    turn = 0
    for length in lengths:
        speech = speakers[turn]
        start = _integer(rng, 0, len(speech) - length)
        pieces.append(repeat_to(speech[start:], length))
        turn += 1
        if turn == len(speakers):
            turn = int(rng.integers(len(speakers)))
    return pieces


def _write(row: Samples, added: Added) -> None:
    """Fill `row` with the added signal: zeros, and the scaled segments, each sample written once."""
    end = 0
    for segment in sorted(added.segments, key=lambda segment: segment.start):
        row[end : segment.start] = 0
        end = segment.start + len(segment.samples)
        np.multiply(segment.samples, np.float32(added.gain), out=row[segment.start : end])
    row[end:] = 0


def _rows(signal: Tensor, lengths: Tensor) -> list[Samples]:
    """Valid samples of each row, as views."""
    return [row[:length] for row, length in zip(signal.numpy(), lengths.tolist(), strict=True)]


def _integer(rng: np.random.Generator, least: int, below: int) -> int:
    """Uniform in [least, below), or `least` where that is empty."""
    return int(rng.integers(least, below)) if least < below else least


def _other(i: int, num: int, rng: np.random.Generator) -> int:
    """Uniform in [0, num) without `i`."""
    j = int(rng.integers(num - 1))
    return j + (j >= i)


def build_augmentor(config: AugmentorConfig | None) -> SpeakerNoiseAugmentation | None:
    """The augmentor that `batch_augmentor:` describes."""
    if config is None:
        return None
    multi = resolve_target(config._target_, "batch_augmentor._target_") == MultiSpeakerNoiseAugmentation.__name__
    cls = MultiSpeakerNoiseAugmentation if multi else SpeakerNoiseAugmentation
    return cls(**{f.name: getattr(config, f.name) for f in fields(cls)})
