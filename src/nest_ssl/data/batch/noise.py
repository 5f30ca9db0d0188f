"""Drawing noise: by segment from disk, or from a bank in memory; what cannot be read is reported and drawn again."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from nest_ssl.audio import AudioError, audio_info, read_audio
from nest_ssl.audio.signal import Samples, white_noise
from nest_ssl.data.batch.randomness import one_generator
from nest_ssl.data.manifest.read import Utterance

NoiseSample = Utterance | Mapping[str, Any]
"""A line of a noise manifest, read or as a plain mapping with NeMo's keys."""

MIN_WHITE_NOISE_DB, MAX_WHITE_NOISE_DB = -90, -46
MAX_SEGMENT_TRIALS = 100
MAX_NOISE_TRIALS = 20


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
    """(N,) noise and its length: a random segment of `max_audio_len` samples, or the whole of a shorter file.

    Segments that are silent throughout are drawn again, up to `max_trial` times; a file that stays silent becomes
    white noise between the two levels (dB). `pad_to_max` fills up with zeros, which the length does not count.
    Raises AudioError when the file cannot be read.
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
    """(N,) noise of a random entry of `noise_data` and its length, zero-padded to `max_audio_len`.

    An entry that cannot be read is given to `on_error` and another one is drawn; after `max_trial` of them, or with
    no `noise_data`, the noise is silence.
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
    """Noise of a manifest for utterances of a given length, with up to `bank_bytes` of it kept decoded in memory."""

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
        """At most `max_samples` of a random entry; None when `max_trial` entries in a row could not be read."""
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
    """Decoded noise in one block of shared memory, so that loader processes do not copy it."""

    def __init__(self, samples: Tensor, bounds: dict[int, tuple[int, int]]) -> None:
        self._samples = samples
        self._bounds = bounds

    def __len__(self) -> int:
        return len(self._bounds)

    def get(self, index: int) -> Samples | None:
        """All samples of entry `index`, or None when it is not in the bank."""
        bounds = self._bounds.get(index)
        return None if bounds is None else self._samples[slice(*bounds)].numpy()

    @classmethod
    def load(cls, noise_data: Sequence[NoiseSample], sample_rate: int, max_bytes: int) -> NoiseBank:
        """Entries of `noise_data` in order, until `max_bytes` are full. What cannot be read stays out."""
        parts: list[Samples] = []
        bounds: dict[int, tuple[int, int]] = {}
        end = 0
        for index, entry in enumerate(map(_utterance, noise_data)):
            try:
                samples = _read(entry, sample_rate, entry.offset_s, entry.duration_s)
            except AudioError:
                continue  # named when it is drawn, as without a bank
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
    """At most `max_samples` of one noise file (`decoded`: all of it), never silent."""
    duration_s = entry.duration_s
    if duration_s is None and decoded is not None:
        duration_s = len(decoded) / sample_rate
    elif duration_s is None and max_samples is not None:  # a header costs less than a whole recording
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
