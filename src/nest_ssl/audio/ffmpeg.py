"""The second decoder: FFmpeg through PyAV (the extra `decoders`), for what libsndfile does not read.

N samples, C channels.
"""

from __future__ import annotations

import io
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np

from nest_ssl.audio.signal import Samples
from nest_ssl.audio.types import AudioInfo

INSTALL_HINT = "not installed; it reads more formats: pip install 'nest-ssl[decoders]'"
CONTAINERS = (
    "aac,ac3,aiff,amr,ape,asf,avi,caf,dts,eac3,flac,flv,g722,gsm,"
    "matroska,mov,mp3,mp4,mpeg,mpegts,ogg,tta,w64,wav,webm,wv"
)
"""Formats that FFmpeg may guess. Playlists (hls, concat) are not among them: they open other files."""
SEEKABLE = ("matroska", "mov", "asf")
"""Containers with an index and time stamps; the others are decoded from their start."""
PREROLL_S = 0.5
"""Decoded and dropped before an offset: Opus and AAC need up to 80 ms to settle."""


class CannotDecodeError(Exception):
    """FFmpeg does not make audio of this, either."""


def decode(
    source: str | Path | bytes, name: str, *, offset_s: float = 0.0, duration_s: float | None = None
) -> tuple[Samples, int]:
    """(N, C) float32 from `offset_s` on, and the file's sample rate."""
    with open_stream(source, name) as (container, stream):
        blocks_NC = list(blocks(container, stream, offset_s=offset_s, duration_s=duration_s))
        rate = int(stream.rate)
    return (np.concatenate(blocks_NC) if blocks_NC else np.zeros((0, 1), dtype=np.float32)), rate


def measure(source: str | Path | bytes, name: str) -> AudioInfo:
    """Counts the samples by decoding: such containers state no length, or a rounded one."""
    with open_stream(source, name) as (container, stream):
        return stream_info(container, stream, sum(len(block_NC) for block_NC in blocks(container, stream)))


def stream_info(container: Any, stream: Any, num_samples: int) -> AudioInfo:
    label = f"{container.format.name.split(',')[0]}/{stream.codec_context.name}"
    return AudioInfo(int(stream.rate), num_samples, int(stream.channels), label)


def blocks(container: Any, stream: Any, *, offset_s: float = 0.0, duration_s: float | None = None) -> Iterator[Samples]:
    """Blocks (N, C), none empty, from `offset_s` on."""
    start = int(offset_s * stream.rate)
    stop = None if duration_s is None else start + int(duration_s * stream.rate)
    for position, block_NC in _decoded(container, stream, offset_s):
        if stop is not None and position >= stop:
            return
        inside_NC = block_NC[max(start - position, 0) : None if stop is None else stop - position]
        if len(inside_NC):
            yield inside_NC


@contextmanager
def open_stream(source: str | Path | bytes, name: str) -> Iterator[tuple[Any, Any]]:
    """The container and its first audio stream; FFmpeg's errors become CannotDecodeError."""
    try:
        import av
    except ModuleNotFoundError:
        raise CannotDecodeError(INSTALL_HINT) from None
    # A file object, never a path: FFmpeg must not take a name for a URL, nor a picture's name for a sequence.
    with io.BytesIO(source) if isinstance(source, bytes) else open(os.fspath(source), "rb") as file:
        extension = Path(name).suffix.lower()
        raw_format = "g722" if extension == ".g722" else None  # has no header to be recognised by
        try:
            # FFmpeg conceals damage unless told to report it: a broken FLAC became loud noise.
            options = {"format_whitelist": CONTAINERS, "err_detect": "crccheck+explode"}
            with av.open(file, format=raw_format, options=options, metadata_errors="replace") as container:
                stream = next(iter(container.streams.audio), None)
                if stream is None:
                    raise CannotDecodeError("no audio in it")
                if stream.codec_context is None:
                    raise CannotDecodeError("unknown encoding")
                yield container, stream
        except av.error.FFmpegError as error:
            raise CannotDecodeError(error.strerror) from None


def _decoded(container: Any, stream: Any, offset_s: float) -> Iterator[tuple[int, Samples]]:
    """Blocks (N, C) with the position of their first sample, beginning at or before the offset."""
    import av

    rate = int(stream.rate)
    position = 0
    seeks = offset_s > PREROLL_S and container.format.name.split(",")[0] in SEEKABLE and stream.time_base is not None
    if seeks:
        start_pts = stream.start_time or 0
        container.seek(start_pts + int((offset_s - PREROLL_S) / stream.time_base), stream=stream)
    # Interleaved: PyAV 18 reads past the end of planar frames of more than 8 channels, and the process dies.
    to_float = av.AudioResampler(format="flt")
    for number, frame in enumerate(container.decode(stream)):
        if seeks and number == 0 and frame.pts is not None:
            position = round(float((frame.pts - (stream.start_time or 0)) * stream.time_base) * rate)
        for converted in to_float.resample(frame):
            block_NC = converted.to_ndarray().reshape(-1, converted.layout.nb_channels)
            yield position, block_NC
            position += len(block_NC)
