"""The second decoder: FFmpeg through PyAV (extra `decoders`), for files that libsndfile cannot read.

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

INSTALL_HINT = "not installed; it reads more formats: pip install 'nest-ssl[decoders]'"
CONTAINERS = (
    "aac,ac3,aiff,amr,ape,asf,avi,caf,dts,eac3,flac,flv,g722,gsm,"
    "matroska,mov,mp3,mp4,mpeg,mpegts,ogg,tta,w64,wav,webm,wv"
)
"""Formats that FFmpeg may detect. Playlists (hls, concat) are left out because they open other files."""
SEEKABLE = ("matroska", "mov", "asf")
"""Containers with an index and timestamps; the others are decoded from the start."""
LOSSLESS = ("alac", "ape", "flac", "tta", "wavpack")
"""Codecs in which every error is damage. FFmpeg decodes a WavPack block that fails its CRC to loud noise."""
PREROLL_S = 0.5
"""Decoded and discarded before an offset: Opus and AAC need up to 80 ms to settle."""


class CannotDecodeError(Exception):
    """FFmpeg cannot decode this either."""


def decode(
    source: str | Path | bytes, name: str, *, offset_s: float = 0.0, duration_s: float | None = None
) -> tuple[Samples, int]:
    """Return (N, C) float32 from `offset_s` on, and the file's sample rate."""
    with open_stream(source, name) as (container, stream):
        blocks_NC = list(blocks(container, stream, offset_s=offset_s, duration_s=duration_s))
        rate = int(stream.rate)
    return (np.concatenate(blocks_NC) if blocks_NC else np.zeros((0, 1), dtype=np.float32)), rate


def blocks(container: Any, stream: Any, *, offset_s: float = 0.0, duration_s: float | None = None) -> Iterator[Samples]:
    """Yield non-empty blocks (N, C) from `offset_s` on."""
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
    """Open the container and its first audio stream; FFmpeg's errors become CannotDecodeError."""
    try:
        import av
    except ModuleNotFoundError:
        raise CannotDecodeError(INSTALL_HINT) from None
    # A file object, never a path: FFmpeg could mistake a name for a URL, or for a sequence of pictures.
    with io.BytesIO(source) if isinstance(source, bytes) else open(os.fspath(source), "rb") as file:
        extension = Path(name).suffix.lower()
        raw_format = "g722" if extension == ".g722" else None  # has no header to recognise it by
        try:
            # FFmpeg conceals damage unless told to report it: it decoded a broken FLAC file to loud noise.
            strict = {"err_detect": "crccheck+explode"}
            options = {"format_whitelist": CONTAINERS, **strict}
            with av.open(file, format=raw_format, options=options, metadata_errors="replace") as container:
                stream = next(iter(container.streams.audio), None)
                if stream is None:
                    raise CannotDecodeError("no audio stream")
                if stream.codec_context is None:
                    raise CannotDecodeError("unknown encoding")
                if stream.codec_context.name in LOSSLESS:
                    stream.codec_context.options = strict
                yield container, stream
        except (av.error.FFmpegError, OSError) as error:  # OSError: a seek to where a broken header points
            raise CannotDecodeError(error.strerror) from None


def _decoded(container: Any, stream: Any, offset_s: float) -> Iterator[tuple[int, Samples]]:
    """Yield blocks (N, C) with the position of their first sample, starting at or before the offset."""
    import av

    rate = int(stream.rate)
    position = 0
    seeks = offset_s > PREROLL_S and container.format.name.split(",")[0] in SEEKABLE and stream.time_base is not None
    if seeks:
        start_pts = stream.start_time or 0
        container.seek(start_pts + int((offset_s - PREROLL_S) / stream.time_base), stream=stream)
    # Interleaved: PyAV 18 reads past the end of planar frames of more than 8 channels, and the process crashes.
    to_float = av.AudioResampler(format="flt")
    for number, frame in enumerate(container.decode(stream)):
        if seeks and number == 0 and frame.pts is not None:
            position = round(float((frame.pts - (stream.start_time or 0)) * stream.time_base) * rate)
        try:
            all_converted = to_float.resample(frame)
        except ValueError:  # a broadcast that was recorded, or files that were joined
            raise CannotDecodeError("its sample rate or channels change in the middle") from None
        for converted in all_converted:
            block_NC = converted.to_ndarray().reshape(-1, converted.layout.nb_channels)
            yield position, block_NC
            position += len(block_NC)
    stated_s = 0.0 if seeks else _stated_s(container)
    if position / rate < 0.9 * stated_s - 0.1:  # encoders and decoders disagree by some tens of milliseconds
        raise CannotDecodeError(f"is cut or damaged: it has {position / rate:.1f} of {stated_s:.1f} s")


def _stated_s(container: Any) -> float:
    """Return the length that the header states; 0 where it is not known to be that of the audio.

    A cut file of the other containers is noticed, or FFmpeg guesses their length from what is there.
    """
    is_alone = len(container.streams) == 1  # a video may be longer than its sound
    states = container.format.name.split(",")[0] in ("matroska", "asf")
    return float(container.duration / 1e6) if states and is_alone and container.duration is not None else 0.0
