"""The first decoder: libsndfile through soundfile. N samples, C channels."""

from __future__ import annotations

import io
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import soundfile

from nest_ssl.audio.signal import Samples
from nest_ssl.audio.types import AudioError, AudioInfo

FLOAT_SUBTYPES = ("FLOAT", "DOUBLE")
MAX_FRAMES_AT_ONCE = 1 << 26
"""A header may promise any number of samples: beyond 70 minutes of 16 kHz, memory follows what is decoded."""

BLOCK_FRAMES = 1 << 20


class CannotOpenError(Exception):
    """libsndfile does not read this kind of file (it may still be good audio)."""


def open_sound(source: str | Path | bytes) -> Any:
    """An open soundfile.SoundFile of known length; CannotOpenError otherwise."""
    try:
        sound = soundfile.SoundFile(io.BytesIO(source) if isinstance(source, bytes) else os.fspath(source))
    except soundfile.LibsndfileError as error:
        # Code 7 speaks of pipes, but is what mpg123 gives for a file named .mp3 that is none.
        reason = "format not recognised" if error.code in (1, 7) else error.error_string.rstrip(".")
        raise CannotOpenError(reason) from None
    except TypeError:  # soundfile's answer to names in .raw: it wants to be told rate and channels
        raise CannotOpenError("raw samples without a header") from None
    if sound.frames >= np.iinfo(np.int64).max:  # FLAC written to a pipe; libsndfile cannot read it to its end
        sound.close()
        raise CannotOpenError("the header does not say how long it is")
    return sound


def sound_info(sound: Any) -> AudioInfo:
    return AudioInfo(sound.samplerate, sound.frames, sound.channels, f"{sound.format}/{sound.subtype}")


def blocks(sound: Any, name: str, *, start: int, num_samples: int | None) -> Iterator[Samples]:
    """Blocks (N, C) from sample `start` on: any length of audio in 4 MB per channel."""
    left = sound.frames if num_samples is None else num_samples
    try:
        if start:
            sound.seek(min(start, sound.frames))
        while left > 0 and len(block_NC := sound.read(min(left, BLOCK_FRAMES), dtype="float32", always_2d=True)):
            left -= len(block_NC)
            yield block_NC
    except soundfile.LibsndfileError as error:
        raise _corrupt(name, error) from None


def read_samples(sound: Any, name: str, *, start: int, num_samples: int | None, int_values: bool) -> Samples:
    """(N,) or (N, C) float32 from sample `start` on; at most `num_samples`, None: to the end."""
    as_int = int_values and sound.subtype not in FLOAT_SUBTYPES  # libsndfile would round floats in [-1, 1] to 0 or 1
    available = max(sound.frames - start, 0)
    wanted = available if num_samples is None else min(num_samples, available)
    try:
        if start:
            sound.seek(min(start, sound.frames))
        samples = _read(sound, wanted, "int32" if as_int else "float32")
    except soundfile.LibsndfileError as error:
        raise _corrupt(name, error) from None
    scaled: Samples = samples.astype(np.float32) * np.float32(2.0**-31) if as_int else samples
    return scaled


def _corrupt(name: str, error: Any) -> AudioError:
    return AudioError(name, f"corrupt: {error.error_string.removeprefix('Error : ').rstrip('.')}")


def _read(sound: Any, num_samples: int, dtype: str) -> Any:
    if num_samples <= MAX_FRAMES_AT_ONCE:
        return sound.read(num_samples, dtype=dtype)
    blocks = []
    while num_samples > 0:
        blocks.append(sound.read(min(num_samples, MAX_FRAMES_AT_ONCE), dtype=dtype))
        num_samples -= len(blocks[-1])
        if len(blocks[-1]) < MAX_FRAMES_AT_ONCE:
            break
    return np.concatenate(blocks)
