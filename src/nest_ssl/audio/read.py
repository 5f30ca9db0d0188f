"""Read any audio file as mono float32 samples at one rate.

libsndfile (through soundfile) decodes what it can; FFmpeg (`ffmpeg.py`) tries the rest. N samples, C channels.
"""

from __future__ import annotations

import io
import os
import sys
import zlib
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import IO, Any

import numpy as np
import soundfile

from nest_ssl.audio import ffmpeg
from nest_ssl.audio.signal import ChannelSelector, Samples, resample, to_mono
from nest_ssl.audio.signal import trim_silence as without_silence

MIN_RATE, MAX_RATE = 1_000, 768_000
"""Rates outside this range come from broken headers; resampling from 1 Hz would fill the memory."""
MIN_SHARE = 0.9
"""A file with less than this share of the expected samples is truncated: durations are rounded, MP3 lengths guessed."""
FLOAT_SUBTYPES = ("FLOAT", "DOUBLE")
MAX_FRAMES_AT_ONCE = 1 << 26
"""70 minutes at 16 kHz. A header can claim any length, so longer files are read in pieces of this size."""
BLOCK_FRAMES = 1 << 20
NOT_UTF8 = "its name is not UTF-8" + (
    "" if sys.getfilesystemencoding() == "utf-8" else "; nor is the locale: PYTHONUTF8=1 may help"
)
MAX_SAMPLE = 2.0**31
"""No audio is louder, not even 32-bit integers taken for floats. The features of 1e30 would be infinite."""


class AudioError(ValueError):
    """One audio file cannot be used: which one, and why."""

    def __init__(self, path: str, reason: str) -> None:
        super().__init__(path, reason)  # both in args, so that the error survives pickling from a worker
        self.path = path
        self.reason = reason

    def __str__(self) -> str:
        return f"{self.path}: {self.reason}".replace("\n", "\\n")  # names may contain line breaks


class CannotOpenError(Exception):
    """libsndfile does not read this kind of file (it may still be good audio)."""


@dataclass(frozen=True)
class AudioInfo:
    """What an audio file says about itself."""

    sample_rate: int
    """Samples per second of the file."""
    num_samples: int
    """Samples per channel."""
    num_channels: int
    format: str
    """Container and encoding, such as 'WAV/PCM_16' or 'matroska/opus'."""

    @property
    def duration_s(self) -> float:
        return self.num_samples / self.sample_rate


def audio_info(source: str | Path | bytes, *, name: str | None = None) -> AudioInfo:
    """Return rate, length, channels and format, from the header where it states them."""
    name = _name(source, name)
    try:
        with _open_sound(source, name) as sound:
            info = _sound_info(sound)
    except CannotOpenError as error:
        with _second_decoder(source, name, str(error)), ffmpeg.open_stream(source, name) as (container, stream):
            # Decoded to be counted: such containers state no length, or a rounded one.
            num_samples = sum(len(block_NC) for block_NC in ffmpeg.blocks(container, stream))
            info = _stream_info(container, stream, num_samples)
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
    """Return (N,) float32 mono samples at `sample_rate`: `duration_s` from `offset_s` on (None or 0: to the end).

    `source` is a path, or the bytes of an encoded file, which messages then call `name`. Channels are averaged unless
    `channel_selector` picks some. Integer samples are scaled to [-1, 1] (`int_values`: read as 32-bit integers first,
    as NeMo does). A file that cannot be read, ends early, is empty or contains NaN, infinity or more than MAX_SAMPLE
    raises AudioError.
    """
    if offset_s < 0 or (duration_s is not None and duration_s < 0):
        raise ValueError(f"offset_s {offset_s} and duration_s {duration_s} must not be negative")
    name = _name(source, name)
    samples, file_rate = _decode(source, name, offset_s, duration_s or None, int_values)
    check_samples(samples, name)  # of all channels: in their mean 1e30 and -1e30 would be silence
    try:
        mono = to_mono(samples, channel_selector)
    except ValueError as error:
        raise AudioError(name, str(error)) from None
    mono = resample(mono, file_rate, sample_rate)
    return without_silence(mono) if trim_silence else mono


def read_native(
    source: str | Path | bytes, *, offset_s: float = 0.0, duration_s: float | None = None, name: str | None = None
) -> tuple[Samples, int]:
    """Return (N, C) float32 samples as the file has them, and its sample rate."""
    samples, rate = _decode(source, _name(source, name), offset_s, duration_s or None, int_values=False)
    return samples.reshape(len(samples), -1), rate


def verify_audio(
    source: str | Path | bytes, *, offset_s: float = 0.0, duration_s: float | None = None, name: str | None = None
) -> AudioInfo:
    """Decode the whole file, or the given part, in little memory; raise whatever read_audio would raise.

    The returned length is counted while decoding, not taken from the header; for a part, it is the part's length.
    """
    name, duration_s = _name(source, name), duration_s or None
    promised: int | None = None
    try:
        with _open_sound(source, name) as sound:
            info = _sound_info(sound)
            _check_rate(info.sample_rate, name)
            start = int(offset_s * info.sample_rate)
            wanted = None if duration_s is None else int(duration_s * info.sample_rate)
            promised = max(info.num_samples - start, 0)
            if sound.format == "OGG" or _reads_to_end(sound, start, wanted):
                _check_whole(source, sound, name)
            num_samples = _count_finite(_blocks(sound, name, start=start, num_samples=wanted), name)
    except CannotOpenError as error:
        with _second_decoder(source, name, str(error)), ffmpeg.open_stream(source, name) as (container, stream):
            blocks = ffmpeg.blocks(container, stream, offset_s=offset_s, duration_s=duration_s)
            num_samples = _count_finite(blocks, name)
            info = _stream_info(container, stream, num_samples)
        _check_rate(info.sample_rate, name)
        wanted = None if duration_s is None else int(duration_s * info.sample_rate)
    _check_length(num_samples, promised if wanted is None else wanted, info.sample_rate, offset_s, name)
    return replace(info, num_samples=num_samples)


def _decode(
    source: str | Path | bytes, name: str, offset_s: float, duration_s: float | None, int_values: bool
) -> tuple[Samples, int]:
    """Return (N,) or (N, C) samples, and the file's rate."""
    promised: int | None = None
    try:
        with _open_sound(source, name) as sound:
            rate = sound.samplerate
            _check_rate(rate, name)
            start = int(offset_s * rate)
            wanted = None if duration_s is None else int(duration_s * rate)
            promised = max(sound.frames - start, 0)
            if _reads_to_end(sound, start, wanted):  # not for each part of a long file
                _check_whole(source, sound, name)
            samples = _read_samples(sound, name, start=start, num_samples=wanted, int_values=int_values)
    except CannotOpenError as error:
        with _second_decoder(source, name, str(error)):
            samples, rate = ffmpeg.decode(source, name, offset_s=offset_s, duration_s=duration_s)
        _check_rate(rate, name)
        wanted = None if duration_s is None else int(duration_s * rate)
    _check_length(len(samples), promised if wanted is None else wanted, rate, offset_s, name)
    return samples, rate


def _name(source: str | Path | bytes, name: str | None) -> str:
    return name or ("<bytes>" if isinstance(source, bytes) else os.fspath(source))


# ---- checks ----


def _count_finite(blocks: Iterable[Samples], name: str) -> int:
    num_samples = 0
    for block in blocks:
        check_samples(block, name)
        num_samples += len(block)
    return num_samples


def check_regular(path: str | Path, name: str) -> None:
    """Refuse a folder, a device, or a FIFO, which would block whoever opens it; a missing file is for the opener."""
    if not os.path.isfile(path) and os.path.exists(path):  # in this order: one look at the disk for a good file
        raise AudioError(name, "not a regular file")


def check_samples(samples: Samples, name: str) -> None:
    """Raise AudioError if a sample is NaN, infinite, or too large to be audio."""
    low, high = float(samples.min(initial=0)), float(samples.max(initial=0))  # both are NaN if any sample is
    if low >= -MAX_SAMPLE and high <= MAX_SAMPLE:
        return
    num_not_finite = int(np.count_nonzero(~np.isfinite(samples)))
    if num_not_finite:
        raise AudioError(name, f"{num_not_finite} samples are NaN or infinite")
    raise AudioError(name, f"samples of up to {max(-low, high):.0e} are not audio: a broken header or wrong format")


def _check_length(num_samples: int, expected: int | None, rate: int, offset_s: float, name: str) -> None:
    """Refuse audio that is empty, or much shorter than requested or promised."""
    if num_samples == 0:
        raise AudioError(name, f"no samples after the offset of {offset_s} s" if offset_s else "no samples")
    if expected is not None and num_samples < MIN_SHARE * expected:
        raise AudioError(name, f"truncated: {num_samples / rate:.2f} s of {expected / rate:.2f} s")


def _check_rate(rate: int, name: str) -> None:
    if not MIN_RATE <= rate <= MAX_RATE:
        raise AudioError(name, f"sample rate {rate} Hz is not between {MIN_RATE} and {MAX_RATE} Hz: a broken header")


# ---- libsndfile ----


def _open_sound(source: str | Path | bytes, name: str) -> Any:
    """Return an open soundfile.SoundFile of known length, or raise CannotOpenError."""
    if not isinstance(source, bytes):
        check_regular(source, name)
    try:
        sound = soundfile.SoundFile(io.BytesIO(source) if isinstance(source, bytes) else os.fspath(source))
    except soundfile.LibsndfileError as error:
        # Code 7 is about pipes, but mpg123 also gives it for a file named .mp3 that is not an MP3 file.
        reason = "format not recognised" if error.code in (1, 7) else error.error_string.rstrip(".")
        raise CannotOpenError(reason) from None
    except UnicodeEncodeError:
        raise AudioError(name, NOT_UTF8) from None
    except TypeError:  # soundfile's answer to a name in .raw: it requires rate and channels as arguments
        raise CannotOpenError("raw samples without a header") from None
    if sound.frames >= np.iinfo(np.int64).max:  # FLAC written to a pipe; libsndfile cannot read it to its end
        sound.close()
        raise CannotOpenError("the header does not state the length")
    return sound


def _sound_info(sound: Any) -> AudioInfo:
    return AudioInfo(sound.samplerate, sound.frames, sound.channels, f"{sound.format}/{sound.subtype}")


def _blocks(sound: Any, name: str, *, start: int, num_samples: int | None) -> Iterator[Samples]:
    """Yield blocks (N, C) from sample `start` on: audio of any length in 4 MB per channel."""
    left = sound.frames if num_samples is None else num_samples
    try:
        _skip(sound, start)
        while left > 0 and len(block_NC := sound.read(min(left, BLOCK_FRAMES), dtype="float32", always_2d=True)):
            left -= len(block_NC)
            yield block_NC
    except soundfile.LibsndfileError as error:
        raise _corrupt(name, error) from None


def _read_samples(sound: Any, name: str, *, start: int, num_samples: int | None, int_values: bool) -> Samples:
    """Return (N,) or (N, C) float32 from sample `start` on; at most `num_samples`, or all if None."""
    as_int = int_values and sound.subtype not in FLOAT_SUBTYPES  # libsndfile would round floats in [-1, 1] to 0 or 1
    available = max(sound.frames - start, 0)
    wanted = available if num_samples is None else min(num_samples, available)
    try:
        _skip(sound, start)
        samples = _read_in_pieces(sound, wanted, "int32" if as_int else "float32")
    except soundfile.LibsndfileError as error:
        raise _corrupt(name, error) from None
    scaled: Samples = samples.astype(np.float32) * np.float32(2.0**-31) if as_int else samples
    return scaled


def _skip(sound: Any, num_samples: int) -> None:
    if num_samples and sound.seekable():  # even to 0, MP3 is decoded to slightly other samples after it
        sound.seek(min(num_samples, sound.frames))
        return
    while num_samples > 0 and (num_read := len(sound.read(min(num_samples, BLOCK_FRAMES), dtype="float32"))):
        num_samples -= num_read  # GSM and G.721 can only be read from the start


def _read_in_pieces(sound: Any, num_samples: int, dtype: str) -> Any:
    if num_samples <= MAX_FRAMES_AT_ONCE:
        return sound.read(num_samples, dtype=dtype)
    pieces = []
    while num_samples > 0:
        pieces.append(sound.read(min(num_samples, MAX_FRAMES_AT_ONCE), dtype=dtype))
        num_samples -= len(pieces[-1])
        if len(pieces[-1]) < MAX_FRAMES_AT_ONCE:
            break
    return np.concatenate(pieces)


def _reads_to_end(sound: Any, start: int, wanted: int | None) -> bool:
    """Whether the whole file is read, or all after `start`, or more than there seems to be."""
    return wanted is None or start + wanted > sound.frames or (start == 0 and wanted >= MIN_SHARE * sound.frames)


def _check_whole(source: str | Path | bytes, sound: Any, name: str) -> None:
    """Refuse audio of which libsndfile would silently leave out a part."""
    if sound.format not in ("OGG", "MP3"):
        return
    with io.BytesIO(source) if isinstance(source, bytes) else open(source, "rb") as file:
        if sound.format == "OGG":
            _check_pages(file, name)
            return
        num_samples = _samples_of_mp3(file)
    # Encoders add a few frames of silence, of which the first frame says how many to drop.
    if num_samples > sound.frames + 8 * 1152:
        length_s, read_s = num_samples / sound.samplerate, sound.frames / sound.samplerate
        raise CannotOpenError(f"MP3 that does not begin with its length: {read_s:.2f} s of {length_s:.2f} s")


_MP3_KBPS = {  # by MPEG version 1, or 2 and 2.5
    True: (0, 32, 40, 48, 56, 64, 80, 96, 112, 128, 160, 192, 224, 256, 320),
    False: (0, 8, 16, 24, 32, 40, 48, 56, 64, 80, 96, 112, 128, 144, 160),
}


def _samples_of_mp3(file: IO[bytes]) -> int:
    """Return the samples in all frames of an MP3, by their headers. libsndfile estimates the length from the first
    frame, and so reads only a part if bit rates vary and a first frame with the length is missing, or of joined files.
    """
    tag = file.read(10)
    tag_bytes = 0
    for byte in tag[6:]:  # seven bits each
        tag_bytes = tag_bytes << 7 | byte & 127
    file.seek(10 + tag_bytes if tag.startswith(b"ID3") else 0)
    num_samples = in_a_row = samples = 0
    kind: int | None = None
    while len(header := file.read(4)) == 4:
        length, found = _mp3_frame(header)
        if length and kind in (None, header[1] & 0xFE):
            kind, samples = header[1] & 0xFE, found
            num_samples, in_a_row = num_samples + samples, in_a_row + 1
            file.seek(length - 4, os.SEEK_CUR)
            continue
        if in_a_row == 1:  # some bytes of a tag or a picture that look like a header
            num_samples -= samples
            kind = kind if num_samples else None
        in_a_row = 0
        rest = header[1:] + file.read(1024)
        place = rest.find(b"\xff")
        file.seek(place - len(rest) if place >= 0 else 0, os.SEEK_CUR)
    return num_samples


def _mp3_frame(header: bytes) -> tuple[int, int]:
    """Return the length in bytes and in samples of an MP3 frame; 0 if this is no frame's header."""
    version, bit_rate, rate = header[1] >> 3 & 3, header[2] >> 4, header[2] >> 2 & 3
    is_layer_3 = header[0] == 0xFF and header[1] & 0xE6 == 0xE2
    if not is_layer_3 or version == 1 or rate == 3 or not 0 < bit_rate < 15:
        return 0, 0
    sample_rate = (44_100, 48_000, 32_000)[rate] >> {3: 0, 2: 1, 0: 2}[version]
    samples = 1152 if version == 3 else 576
    return samples // 8 * 1000 * _MP3_KBPS[version == 3][bit_rate] // sample_rate + (header[2] >> 1 & 1), samples


_BITS_REVERSED = bytes(int(f"{byte:08b}"[::-1], 2) for byte in range(256))


def _check_pages(file: IO[bytes], name: str) -> None:
    """Refuse an Ogg file with a damaged or missing page.

    Decoders leave such a page out without a word, so that what follows comes too early; libsndfile, read block by
    block, even repeats audio there. An incomplete last page is only the end of the file.
    """
    pages: dict[bytes, int] = {}
    while header := file.read(27):
        if not header.startswith(b"OggS"):
            if pages and b"OggS" in header + file.read():  # otherwise tags before or after the audio
                raise AudioError(name, "corrupt: a page of it is damaged")
            return
        page = header[:22] + bytes(4) + header[26:] + (table := file.read(header[-1]))
        body = file.read(sum(table))
        if len(header) + len(table) < 27 + header[-1] or len(body) < sum(table):
            return
        # Ogg's CRC is that of zlib with the bits of every byte, and of the result, in reverse.
        crc = zlib.crc32((page + body).translate(_BITS_REVERSED), 0xFFFFFFFF) ^ 0xFFFFFFFF
        is_sound = int(f"{crc:032b}"[::-1], 2) == int.from_bytes(header[22:26], "little")
        serial, number, begins = header[14:18], int.from_bytes(header[18:22], "little"), header[5] & 2
        if begins and any(pages.values()):
            raise AudioError(name, "several Ogg streams, one after the other: only the first would be read")
        if not is_sound or (not begins and number != pages.get(serial, -1) + 1):
            raise AudioError(name, f"corrupt: page {number} of it is damaged, or comes after a gap")
        pages[serial] = number


def _corrupt(name: str, error: Any) -> AudioError:
    return AudioError(name, f"corrupt: {error.error_string.removeprefix('Error : ').rstrip('.')}")


# ---- FFmpeg, if libsndfile cannot open the file ----


def _stream_info(container: Any, stream: Any, num_samples: int) -> AudioInfo:
    label = f"{container.format.name.split(',')[0]}/{stream.codec_context.name}"
    return AudioInfo(int(stream.rate), num_samples, int(stream.channels), label)


@contextmanager
def _second_decoder(source: str | Path | bytes, name: str, first_reason: str) -> Iterator[None]:
    """Let FFmpeg try what libsndfile did not open; if it fails too, the error gives both reasons."""
    _check_second_decoder_may_try(source, name, first_reason)
    try:
        yield
    except ffmpeg.CannotDecodeError as error:
        raise AudioError(name, f"libsndfile: {first_reason}; FFmpeg: {error}") from None


def _check_second_decoder_may_try(source: str | Path | bytes, name: str, reason: str) -> None:
    """Raise AudioError for what is certainly not audio, or what FFmpeg would read wrongly."""
    if isinstance(source, bytes):
        size, head = len(source), source[:40]
    else:
        try:
            with open(source, "rb") as file:
                size, head = os.fstat(file.fileno()).st_size, file.read(40)
        except OSError as error:
            raise AudioError(name, error.strerror or str(error)) from None
    if size == 0:
        raise AudioError(name, "empty file")
    if head.startswith(b"version https://git-lfs"):
        raise AudioError(name, "a Git LFS pointer, not the audio. Run 'git lfs pull'.")
    if head.startswith(b"RIFX"):  # FFmpeg reads its samples as little endian: full-scale noise
        raise AudioError(name, reason)
