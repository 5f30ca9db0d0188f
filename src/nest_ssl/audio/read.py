"""Reading any audio file as mono float32 samples of one rate."""

from __future__ import annotations

import os
import stat
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import numpy as np

from nest_ssl.audio import ffmpeg, sndfile
from nest_ssl.audio.signal import ChannelSelector, Samples, resample, to_mono
from nest_ssl.audio.signal import trim_silence as without_silence
from nest_ssl.audio.types import AudioError, AudioInfo

MIN_RATE, MAX_RATE = 1_000, 768_000
"""Rates outside these come from broken headers; resampling from 1 Hz would fill the memory."""
MIN_SHARE = 0.9
"""A file that gives less of what was promised is truncated. Stated durations are rounded, lengths of MP3 estimated."""


def audio_info(source: str | Path | bytes, *, name: str | None = None) -> AudioInfo:
    """Rate, length, channels and format, from the header where it tells them."""
    name = _name(source, name)
    # Opening a FIFO would block for ever. Training does not look: its watch names a file that blocks.
    if not isinstance(source, bytes) and os.path.exists(source) and not os.path.isfile(source):
        raise AudioError(name, "not a regular file")
    try:
        with sndfile.open_sound(source) as sound:
            info = sndfile.sound_info(sound)
    except sndfile.CannotOpenError as error:
        with _second_decoder(source, name, str(error)):
            info = ffmpeg.measure(source, name)
    _check_rate(info.sample_rate, name)
    return info


def read_audio(
    source: str | Path | bytes,
    *,
    sample_rate: int,
    offset_s: float = 0.0,
    duration_s: float | None = None,
    channel_selector: ChannelSelector = None,
    trim_silence: bool = False,
    int_values: bool = False,
    name: str | None = None,
) -> Samples:
    """(N,) float32 mono samples at `sample_rate`, from `offset_s` on for `duration_s` (None or 0: to the end).

    `source` is a path, or the bytes of an encoded file, whose `name` then stands in messages. Channels are averaged
    unless `channel_selector` names some. Integer samples are scaled to [-1, 1] (`int_values`: read as 32-bit integers
    first, as NeMo does). What cannot be read, ends early, is empty or holds NaN or infinity raises AudioError.
    """
    if offset_s < 0 or (duration_s is not None and duration_s < 0):
        raise ValueError(f"offset_s {offset_s} and duration_s {duration_s} must not be negative")
    name = _name(source, name)
    samples, file_rate = _decode(source, name, offset_s, duration_s or None, int_values)
    try:
        mono = to_mono(samples, channel_selector)
    except ValueError as error:
        raise AudioError(name, str(error)) from None
    _check_finite(mono, name)
    mono = resample(mono, file_rate, sample_rate)
    return without_silence(mono) if trim_silence else mono


def read_native(
    source: str | Path | bytes, *, offset_s: float = 0.0, duration_s: float | None = None, name: str | None = None
) -> tuple[Samples, int]:
    """(N, C) float32 samples as the file has them, and its sample rate."""
    samples, rate = _decode(source, _name(source, name), offset_s, duration_s or None, int_values=False)
    return samples.reshape(len(samples), -1), rate


def verify_audio(
    source: str | Path | bytes, *, offset_s: float = 0.0, duration_s: float | None = None, name: str | None = None
) -> AudioInfo:
    """Decodes all of it, or the given part, in little memory, and raises what read_audio would raise.

    The length is the one found by decoding, not the header's; of a part, the length of that part.
    """
    name, duration_s = _name(source, name), duration_s or None
    promised: int | None = None
    try:
        with sndfile.open_sound(source) as sound:
            info = sndfile.sound_info(sound)
            _check_rate(info.sample_rate, name)
            start = int(offset_s * info.sample_rate)
            wanted = None if duration_s is None else int(duration_s * info.sample_rate)
            promised = max(info.num_samples - start, 0)
            num_samples = _count_finite(sndfile.blocks(sound, name, start=start, num_samples=wanted), name)
    except sndfile.CannotOpenError as error:
        with _second_decoder(source, name, str(error)), ffmpeg.open_stream(source, name) as (container, stream):
            blocks = ffmpeg.blocks(container, stream, offset_s=offset_s, duration_s=duration_s)
            num_samples = _count_finite(blocks, name)
            info = ffmpeg.stream_info(container, stream, num_samples)
        _check_rate(info.sample_rate, name)
        wanted = None if duration_s is None else int(duration_s * info.sample_rate)
    _check_length(num_samples, promised if wanted is None else wanted, info.sample_rate, offset_s, name)
    return replace(info, num_samples=num_samples)


def _count_finite(blocks: Iterable[Samples], name: str) -> int:
    num_samples = 0
    for block in blocks:
        _check_finite(block, name)
        num_samples += len(block)
    return num_samples


def _check_finite(samples: Samples, name: str) -> None:
    # The sum is not finite when a sample is not, and takes a third of the time of looking at each.
    if not np.isfinite(samples.sum()) and not np.isfinite(samples).all():
        raise AudioError(name, f"{np.count_nonzero(~np.isfinite(samples))} samples are NaN or infinite")


def _check_length(num_samples: int, expected: int | None, rate: int, offset_s: float, name: str) -> None:
    """Never empty, never much shorter than asked for or promised."""
    if num_samples == 0:
        raise AudioError(name, f"no samples after the offset of {offset_s} s" if offset_s else "no samples")
    if expected is not None and num_samples < MIN_SHARE * expected:
        raise AudioError(name, f"truncated: {num_samples / rate:.2f} s of {expected / rate:.2f} s")


def _decode(
    source: str | Path | bytes, name: str, offset_s: float, duration_s: float | None, int_values: bool
) -> tuple[Samples, int]:
    """(N,) or (N, C), and the file's rate."""
    promised: int | None = None
    try:
        with sndfile.open_sound(source) as sound:
            rate = sound.samplerate
            _check_rate(rate, name)
            start = int(offset_s * rate)
            wanted = None if duration_s is None else int(duration_s * rate)
            promised = max(sound.frames - start, 0)
            samples = sndfile.read_samples(sound, name, start=start, num_samples=wanted, int_values=int_values)
    except sndfile.CannotOpenError as error:
        with _second_decoder(source, name, str(error)):
            samples, rate = ffmpeg.decode(source, name, offset_s=offset_s, duration_s=duration_s)
        _check_rate(rate, name)
        wanted = None if duration_s is None else int(duration_s * rate)
    _check_length(len(samples), promised if wanted is None else wanted, rate, offset_s, name)
    return samples, rate


def _name(source: str | Path | bytes, name: str | None) -> str:
    return name or ("<bytes>" if isinstance(source, bytes) else os.fspath(source))


def _check_rate(rate: int, name: str) -> None:
    if not MIN_RATE <= rate <= MAX_RATE:
        raise AudioError(name, f"sample rate {rate} Hz is not between {MIN_RATE} and {MAX_RATE} Hz: a broken header")


@contextmanager
def _second_decoder(source: str | Path | bytes, name: str, first_reason: str) -> Iterator[None]:
    """Lets FFmpeg try what libsndfile did not open; if it fails too, both reasons are given."""
    _check_second_decoder_may_try(source, name, first_reason)
    try:
        yield
    except ffmpeg.CannotDecodeError as error:
        raise AudioError(name, f"libsndfile: {first_reason}; FFmpeg: {error}") from None


def _check_second_decoder_may_try(source: str | Path | bytes, name: str, reason: str) -> None:
    """AudioError for what is certain not to be audio, or what FFmpeg would read wrongly."""
    if isinstance(source, bytes):
        size, head = len(source), source[:40]
    else:
        try:
            status = os.stat(source)
            if not stat.S_ISREG(status.st_mode):
                raise AudioError(name, "not a regular file")
            with open(source, "rb") as file:
                size, head = status.st_size, file.read(40)
        except OSError as error:
            raise AudioError(name, error.strerror or str(error)) from None
    if size == 0:
        raise AudioError(name, "empty file")
    if head.startswith(b"version https://git-lfs"):
        raise AudioError(name, "a Git LFS pointer, not the audio. Run 'git lfs pull'.")
    if head.startswith(b"RIFX"):  # FFmpeg takes its samples for little endian: full-scale noise
        raise AudioError(name, reason)
