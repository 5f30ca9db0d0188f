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
from nest_ssl.audio.types import AudioError, AudioInfo

INSTALL_HINT = "Install the second decoder: pip install 'nest-ssl[decoders]'."
CONTAINERS = (
    "aac,ac3,aiff,amr,ape,asf,avi,caf,dts,eac3,flac,flv,g722,gsm,"
    "matroska,mov,mp3,mp4,mpeg,mpegts,ogg,tta,w64,wav,webm,wv"
)
"""Formats that FFmpeg may guess. Playlists (hls, concat) are not among them: they open other files."""
SEEKABLE = ("matroska", "mov", "asf")
"""Containers with an index and time stamps; the others are decoded from their start."""
PREROLL_S = 0.5
"""Decoded and dropped before an offset: Opus and AAC need up to 80 ms to settle."""


def decode(
    source: str | Path | bytes, name: str, *, offset_s: float = 0.0, duration_s: float | None = None
) -> tuple[Samples, int]:
    """(N, C) float32 from `offset_s` on, and the file's sample rate."""
    with _open_stream(source, name) as (container, stream):
        rate = int(stream.rate)
        start = int(offset_s * rate)
        stop = None if duration_s is None else start + int(duration_s * rate)
        blocks_NC = []
        for position, block_NC in _decoded(container, stream, offset_s):
            if stop is not None and position >= stop:
                break
            blocks_NC.append(block_NC[max(start - position, 0) : None if stop is None else stop - position])
        if not blocks_NC:
            return np.zeros((0, 1), dtype=np.float32), rate
        return np.concatenate(blocks_NC), rate


def measure(source: str | Path | bytes, name: str) -> AudioInfo:
    """Counts the samples by decoding: such containers state no length, or a rounded one."""
    with _open_stream(source, name) as (container, stream):
        num_samples = sum(len(block_NC) for _, block_NC in _decoded(container, stream, 0.0))
        label = f"{container.format.name.split(',')[0]}/{stream.codec_context.name}"
        return AudioInfo(int(stream.rate), num_samples, int(stream.channels), label)


@contextmanager
def _open_stream(source: str | Path | bytes, name: str) -> Iterator[tuple[Any, Any]]:
    """The container and its first audio stream; FFmpeg's errors become AudioError."""
    try:
        import av
    except ModuleNotFoundError:
        raise AudioError(name, f"libsndfile does not read this file. {INSTALL_HINT}") from None
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
                    raise AudioError(name, "no audio in it")
                if stream.codec_context is None:
                    raise AudioError(name, "no decoder knows its encoding")
                yield container, stream
        except av.error.FFmpegError as error:
            raise AudioError(name, f"not decodable as audio ({error.strerror})") from None


def _decoded(container: Any, stream: Any, offset_s: float) -> Iterator[tuple[int, Samples]]:
    """Blocks (N, C) with the position of their first sample, beginning at or before the offset."""
    import av

    rate = int(stream.rate)
    position = 0
    seeks = offset_s > PREROLL_S and container.format.name.split(",")[0] in SEEKABLE and stream.time_base is not None
    if seeks:
        start_pts = stream.start_time or 0
        container.seek(start_pts + int((offset_s - PREROLL_S) / stream.time_base), stream=stream)
    to_float = av.AudioResampler(format="fltp")
    for number, frame in enumerate(container.decode(stream)):
        if seeks and number == 0 and frame.pts is not None:
            position = round(float((frame.pts - (stream.start_time or 0)) * stream.time_base) * rate)
        for converted in to_float.resample(frame):
            block_NC = np.ascontiguousarray(converted.to_ndarray().T)
            yield position, block_NC
            position += len(block_NC)
