"""What is added to the speech of a batch: noise drawn from a manifest, and other speakers, at a drawn energy ratio.

`NoiseSource` draws noise, by segment from disk or from a bank in memory; an entry that cannot be read is reported and
another one is drawn. The augmentations mix it into a batch. B batch, N samples.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor

from nest_ssl import plugins
from nest_ssl.audio import AudioError, audio_info, read_audio
from nest_ssl.audio.signal import (
    Added,
    Samples,
    Segment,
    draw_integer,
    gain_for_ratio,
    place_in_order,
    power,
    repeat_to,
    speech_in_turns,
    split_length,
    white_noise,
    write_added,
)
from nest_ssl.config.data import AugmentorConfig
from nest_ssl.config.targets import TARGETS, resolve_target
from nest_ssl.data.batch.collate import AudioNoiseBatch, empty, with_noise
from nest_ssl.data.manifest.read import Utterance
from nest_ssl.data.randomness import RandomSource, one_generator, per_utterance

NoiseSample = Utterance | Mapping[str, Any]
"""A line of a noise manifest, as an Utterance or as a plain mapping with NeMo's keys."""

MIN_WHITE_NOISE_DB, MAX_WHITE_NOISE_DB = -90, -46
MAX_SEGMENT_TRIALS = 100
MAX_NOISE_TRIALS = 20


class Augmentation(Protocol):
    """What `model.train_ds.batch_augmentor` can be; `nest_ssl.plugins.register_augmentation` adds one."""

    def __call__(self, batch: AudioNoiseBatch, *, generator: Sequence[np.random.Generator]) -> AudioNoiseBatch:
        """Return a new batch; `generator[i]` provides the random numbers for utterance i.

        `batch` has `audio` and `noise`, both (B, N), and their lengths. Return other `noise`, which is then added to
        the audio, or set `noisy_audio` yourself; shapes stay, and `batch` is not changed.
        """


def build_augmentor(config: AugmentorConfig | None) -> Augmentation | None:
    """Return the augmentation that `batch_augmentor:` describes."""
    if config is None:
        return None
    registered = plugins.augmentations.find(config._target_, built_in=TARGETS)
    if registered is not None:
        try:
            inspect.signature(registered).bind(**config.options)
        except TypeError as error:
            raise ValueError(f"batch_augmentor: '{config._target_}' cannot be built: {error}.") from None
        augmentation: Augmentation = registered(**config.options)
        return augmentation
    multi = resolve_target(config._target_, "batch_augmentor._target_") == MultiSpeakerNoiseAugmentation.__name__
    cls = MultiSpeakerNoiseAugmentation if multi else SpeakerNoiseAugmentation
    return cls(**{f.name: getattr(config, f.name) for f in fields(cls)})


@dataclass(frozen=True, kw_only=True)
class SpeakerNoiseAugmentation:
    """With probability `prob`, add one stretch of noise or of one other utterance of the batch.

    Energy ratios are in dB: the utterance over the noise that the stretch is cut from.
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
        AugmentorConfig(**{name: getattr(self, name) for name in names})  # runs the checks of the configuration

    def __call__(self, batch: AudioNoiseBatch, *, generator: RandomSource = None) -> AudioNoiseBatch:
        """Return a new batch with `noise`, `noise_len` and `noisy_audio`; `batch` is not changed."""
        if batch.audio is None or batch.audio_len is None or batch.noise is None or batch.noise_len is None:
            raise ValueError("augmentation needs audio, audio_len, noise and noise_len")
        noise_rows = _rows(batch.noise, batch.noise_len)
        generators = per_utterance(generator, len(noise_rows))
        return self.augment(batch, _rows(batch.audio, batch.audio_len), noise_rows.__getitem__, generators=generators)

    def augment(
        self,
        batch: AudioNoiseBatch,
        audio_rows: Sequence[Samples],
        noise_of: Callable[[int], Samples],
        *,
        generators: Sequence[np.random.Generator],
        mix: bool = True,
        for_each: Callable[[Callable[[int], int], Sequence[int]], Iterable[int]] = map,
    ) -> AudioNoiseBatch:
        """Do what calling it does, but with `noise_of(i)`, called only where noise is used, as `batch.noise[i]`.

        `audio_rows` are the utterances without padding, in float32 even if the batch has them as int16. `for_each` may
        process utterances in parallel if no two share a generator.
        """
        assert batch.audio is not None
        noise = empty(*batch.audio.shape)
        noise_rows = noise.numpy()

        def fill(i: int) -> int:
            """Write row i of the noise and return its length."""
            row, rng = noise_rows[i], generators[i]
            if rng.random() < self.prob:
                write_added(row, self._added(i, audio_rows, noise_of, rng))
            elif self.keep_unselected_noise:
                raw = noise_of(i)[: len(row)]
                write_added(row, Added(1.0, [Segment(0, raw)]))
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
        mix_start = draw_integer(rng, 0, len(audio) - mix_len)
        from_noise, ratio_db = self._draw_source(len(audio_rows), rng)
        source = noise_of(i) if from_noise else audio_rows[_other(i, len(audio_rows), rng)]
        if len(source) <= mix_len:
            source = clip = repeat_to(source, mix_len)
        else:
            start = draw_integer(rng, 0, len(source) - mix_len)
            clip = source[start : start + mix_len]
        return Added(gain_for_ratio(power(audio), power(source), ratio_db), [Segment(mix_start, clip)])

    def _mix_len(self, num_samples: int, rng: np.random.Generator) -> int:
        least, most = int(num_samples * self.min_mix_rate), int(num_samples * self.max_mix_rate)
        return draw_integer(rng, least, most) if least < most else max(1, least)

    def _draw_source(self, batch_size: int, rng: np.random.Generator) -> tuple[bool, float]:
        """Draw whether to add noise (or speech), and the energy ratio in dB."""
        if rng.random() < self.noise_ratio or batch_size == 1:
            return True, rng.uniform(self.min_r_noise, self.max_r_noise)
        return False, rng.uniform(self.min_r_speech, self.max_r_speech)


@dataclass(frozen=True, kw_only=True)
class MultiSpeakerNoiseAugmentation(SpeakerNoiseAugmentation):
    """With probability `prob`, add several segments of noise or of several other utterances of the batch.

    Energy ratios are in dB: the utterance over the added signal, both over the whole utterance.
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
            pieces = speech_in_turns([others[j] for j in speakers], lengths, rng)
        starts = place_in_order(len(audio), lengths, rng)
        # Segments do not overlap, so the energy of the added signal is the sum of theirs.
        added_power = sum(power(piece) * len(piece) for piece in pieces) / len(audio)
        gain = gain_for_ratio(power(audio), added_power, ratio_db)
        return Added(gain, [Segment(start, piece) for start, piece in zip(starts, pieces, strict=True)])


def _rows(signal: Tensor, lengths: Tensor) -> list[Samples]:
    """Return the valid samples of each row, as views."""
    return [row[:length] for row, length in zip(signal.numpy(), lengths.tolist(), strict=True)]


def _other(i: int, num: int, rng: np.random.Generator) -> int:
    """Draw uniformly from [0, num) without `i`."""
    j = int(rng.integers(num - 1))
    return j + (j >= i)


# ---- drawing noise ----


def load_noise_audio(
    sample: NoiseSample,
    sample_rate: int,
    max_audio_len: int | None = None,
    pad_to_max: bool = True,
    min_white_noise_db: int = MIN_WHITE_NOISE_DB,
    max_white_noise_db: int = MAX_WHITE_NOISE_DB,
    max_trial: int = MAX_SEGMENT_TRIALS,
    *,
    generator: np.random.Generator | torch.Generator | None = None,
) -> tuple[Tensor, Tensor]:
    """Return (N,) noise and its length: a random segment of `max_audio_len` samples, or the whole of a shorter file.

    A silent segment is drawn again, up to `max_trial` times; a file that stays silent is replaced by white noise
    between the two levels (dB). `pad_to_max` appends zeros, which the length does not count. Raises AudioError if the
    file cannot be read.
    """
    noise = _load_segment(
        _utterance(sample),
        sample_rate,
        max_audio_len,
        one_generator(generator),
        white_noise_db=(min_white_noise_db, max_white_noise_db),
        max_trial=max_trial,
    )
    length = torch.tensor(len(noise))
    if max_audio_len is not None and pad_to_max:
        noise = np.pad(noise, (0, max_audio_len - len(noise)))
    return torch.from_numpy(noise), length


def sample_noise(
    noise_data: Sequence[NoiseSample],
    sample_rate: int,
    max_audio_len: int | None = None,
    max_trial: int = MAX_NOISE_TRIALS,
    *,
    generator: np.random.Generator | torch.Generator | None = None,
    on_error: Callable[[AudioError], None] | None = None,
) -> tuple[Tensor, Tensor]:
    """Return (N,) noise of a random entry of `noise_data`, zero-padded to `max_audio_len`, and its length.

    An entry that cannot be read is reported to `on_error` and another one is drawn; after `max_trial` of them, or
    without `noise_data`, the noise is silence.
    """
    num_samples = max_audio_len or 0
    noise = None
    if len(noise_data):
        source = NoiseSource(noise_data, sample_rate)
        noise = source.sample(max_audio_len, one_generator(generator), on_error, max_trial=max_trial)
    if noise is None:
        return torch.zeros(num_samples), torch.tensor(num_samples)
    padded = np.pad(noise, (0, max(0, num_samples - len(noise))))
    return torch.from_numpy(padded), torch.tensor(len(noise))


class NoiseSource:
    """Draws noise of a given length from a manifest; up to `bank_bytes` of it are kept decoded in memory."""

    def __init__(
        self,
        noise_data: Sequence[NoiseSample],
        sample_rate: int,
        *,
        bank_bytes: int = 0,
        on_read: Callable[[str], None] | None = None,
    ) -> None:
        self.noise_data = noise_data
        self.sample_rate = sample_rate
        self.on_read = on_read
        self.bank = NoiseBank.load(noise_data, sample_rate, bank_bytes) if bank_bytes else None

    def sample(
        self,
        max_samples: int | None,
        generator: np.random.Generator,
        on_error: Callable[[AudioError], None] | None = None,
        *,
        max_trial: int = MAX_NOISE_TRIALS,
    ) -> Samples | None:
        """Return at most `max_samples` of a random entry; None if `max_trial` entries in a row cannot be read."""
        for _ in range(max_trial):
            index = int(generator.integers(len(self.noise_data)))
            entry = _utterance(self.noise_data[index])
            decoded = None if self.bank is None else self.bank.get(index)
            if self.on_read is not None and decoded is None:
                self.on_read(entry.audio_filepath)
            try:
                return _load_segment(entry, self.sample_rate, max_samples, generator, decoded=decoded)
            except AudioError as error:
                if on_error is not None:
                    on_error(error)
        return None


class NoiseBank:
    """Decoded noise in one block of shared memory, which the workers do not copy."""

    def __init__(self, samples: Tensor, bounds: dict[int, tuple[int, int]]) -> None:
        self._samples = samples
        self._bounds = bounds

    def __len__(self) -> int:
        return len(self._bounds)

    def get(self, index: int) -> Samples | None:
        """Return all samples of entry `index`, or None if it is not in the bank."""
        bounds = self._bounds.get(index)
        return None if bounds is None else self._samples[slice(*bounds)].numpy()

    @classmethod
    def load(cls, noise_data: Sequence[NoiseSample], sample_rate: int, max_bytes: int) -> NoiseBank:
        """Load entries of `noise_data` in order, up to `max_bytes`; those that cannot be read are left out."""
        parts: list[Samples] = []
        bounds: dict[int, tuple[int, int]] = {}
        end = 0
        for index, entry in enumerate(map(_utterance, noise_data)):
            try:
                samples = _read(entry, sample_rate, entry.offset_s, entry.duration_s)
            except AudioError:
                continue  # reported when it is drawn, as without a bank
            if 4 * (end + len(samples)) > max_bytes:
                break
            parts.append(samples)
            bounds[index] = (end, end + len(samples))
            end += len(samples)
        block = torch.from_numpy(np.concatenate([np.empty(0, np.float32), *parts]))
        return cls(block.share_memory_(), bounds)


def _load_segment(
    entry: Utterance,
    sample_rate: int,
    max_samples: int | None,
    rng: np.random.Generator,
    *,
    white_noise_db: tuple[int, int] = (MIN_WHITE_NOISE_DB, MAX_WHITE_NOISE_DB),
    max_trial: int = MAX_SEGMENT_TRIALS,
    decoded: Samples | None = None,
) -> Samples:
    """Return at most `max_samples` of one noise file (`decoded`: all its samples), never silence."""
    duration_s = entry.duration_s
    if duration_s is None and decoded is not None:
        duration_s = len(decoded) / sample_rate
    elif duration_s is None and max_samples is not None:  # reading a header is cheaper than a whole recording
        duration_s = audio_info(entry.audio_filepath).duration_s - entry.offset_s
    if max_samples is not None and duration_s is not None and duration_s > max_samples / sample_rate:
        length_s = max_samples / sample_rate
        for _ in range(max_trial):
            start_s = rng.uniform(0, duration_s - length_s)
            if decoded is None:
                noise = _read(entry, sample_rate, entry.offset_s + start_s, length_s)[:max_samples]
            else:
                start = int(start_s * sample_rate)
                noise = decoded[start : start + max_samples]
            if noise.any():
                return noise
    else:
        whole = _read(entry, sample_rate, entry.offset_s, duration_s) if decoded is None else decoded
        noise = whole[:max_samples]
        if noise.any():
            return noise
    return white_noise(len(noise), int(rng.integers(*white_noise_db)), rng)


def _read(entry: Utterance, sample_rate: int, offset_s: float, duration_s: float | None) -> Samples:
    return read_audio(entry.audio_filepath, sample_rate=sample_rate, offset_s=offset_s, duration_s=duration_s)


def _utterance(sample: NoiseSample) -> Utterance:
    if isinstance(sample, Utterance):
        return sample
    duration = sample.get("duration")
    return Utterance(
        audio_filepath=str(sample.get("audio_filepath") or sample["audio_filename"]),
        duration_s=None if duration is None else float(duration),
        offset_s=float(sample.get("offset") or 0.0),
        extra={},
        manifest="",
        line=0,
    )
