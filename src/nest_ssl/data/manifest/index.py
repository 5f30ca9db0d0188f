"""The index of a manifest: where each line starts and how long each utterance is, in a memory-mapped file next to it.

Built once, in one pass (10 million lines: see benchmarks/manifest_index.py), and rebuilt when the manifest's size or
modification time changes, or the index is damaged. Layout, little endian: a header of 128 bytes, then N starts (int64),
N durations (float32), and for each run of blank lines the number of the next utterance and of its line (2 x int64).
The header ends with a checksum of all that, so a damaged index is never taken for a bad manifest.
"""

from __future__ import annotations

import hashlib
import logging
import os
import struct
import tempfile
import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
from numpy.typing import NDArray

from nest_ssl.config.checks import short
from nest_ssl.data.manifest.lines import ManifestError, parse_lines
from nest_ssl.files import replacing

logger = logging.getLogger(__name__)

MAGIC = b"NESTIDX2"
HEADER = struct.Struct("<8s qqqq 32s 52x I")  # magic, size, mtime_ns, utterances, gaps, digest of the manifest, CRC
CRC_BYTES = 4
PIECE_BYTES = 4 << 20
SMALL_INDEX_BYTES = 1 << 20
"""Smaller indexes are read, not mapped: a mapping keeps a file descriptor open, and there may be 1000s of shards."""
BOM = b"\xef\xbb\xbf"


@dataclass(frozen=True)
class ManifestIndex:
    """Where the utterances of one manifest file are."""

    starts: NDArray[np.int64]
    durations_s: NDArray[np.float32]
    gaps: NDArray[np.int64]
    """(number of runs of blank lines, 2): the next utterance, and its line number, counted from 1."""
    digest: bytes
    """Hash of the manifest's content."""
    size_bytes: int


def open_index(manifest: str, *, rebuild: bool = False) -> ManifestIndex:
    """Open the stored index of a manifest; build a new one if there is no good one or the manifest has changed."""
    try:
        status = os.stat(manifest)
        if not os.path.isfile(manifest):
            raise ManifestError(manifest, "not a regular file", "Give a JSON-lines manifest.")
    except FileNotFoundError:
        way_out = f"'nest-ssl prepare FOLDER --output {manifest}' writes one."
        raise ManifestError(manifest, "no such manifest", way_out) from None
    except OSError as error:
        way_out = "Check model.*.manifest_filepath."
        raise ManifestError(short(manifest), f"cannot be opened: {error.strerror}", way_out) from error
    places = [Path(f"{manifest}.idx"), _cache_path(manifest)]
    for place in [] if rebuild else places:
        index = _load(place, status)
        if index is not None:
            return index
    failures = []
    for place in places:
        try:
            place.parent.mkdir(parents=True, exist_ok=True)
            _build(manifest, place, status)
        except OSError as error:
            failures.append(f"{place}: {error.strerror or error}")
            continue
        if place is not places[0]:
            logger.warning("%s: its folder cannot be written (%s); the index is %s", manifest, failures[0], place)
        index = _load(place, status)
        if index is None:
            raise ManifestError(manifest, "changed while being read", "Wait until it is complete, and start again.")
        return index
    raise ManifestError(manifest, f"no place for its index ({'; '.join(failures)})", "Set NEST_SSL_CACHE_DIR.")


def _cache_path(manifest: str) -> Path:
    home = os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache")
    folder = Path(os.environ.get("NEST_SSL_CACHE_DIR") or Path(home, "nest-ssl"))
    key = hashlib.sha256(os.path.abspath(manifest).encode(errors="surrogateescape")).hexdigest()[:16]
    return folder / f"{Path(manifest).name}.{key}.idx"


def _load(place: Path, status: os.stat_result) -> ManifestIndex | None:
    """Load the index stored there; None if there is none, or it is stale, damaged or not an index."""
    try:
        if not os.path.isfile(place):  # opening a FIFO would block
            return None
        with open(place, "rb") as file:
            header = file.read(HEADER.size)
            if len(header) < HEADER.size:
                return None
            magic, size, mtime_ns, num_utterances, num_gaps, digest, crc = HEADER.unpack(header)
            num_bytes = HEADER.size + 12 * num_utterances + 16 * num_gaps
            if (magic, size, mtime_ns) != (MAGIC, status.st_size, status.st_mtime_ns):
                return None
            if os.fstat(file.fileno()).st_size != num_bytes:
                return None
            file.seek(0)
            small = num_bytes <= SMALL_INDEX_BYTES
            data = np.frombuffer(file.read(), dtype=np.uint8) if small else np.asarray(np.memmap(file, mode="r"))
    except OSError:
        return None
    # 120 MB, for 10 million lines, take 0.1 s.
    body: Any = data[HEADER.size :]
    if zlib.crc32(header[:-CRC_BYTES], zlib.crc32(body)) != crc:
        logger.warning("%s: damaged; it is built again", place)
        return None
    starts_end = HEADER.size + 8 * num_utterances
    durations_end = starts_end + 4 * num_utterances
    return ManifestIndex(
        starts=data[HEADER.size : starts_end].view(np.int64),
        durations_s=data[starts_end:durations_end].view(np.float32),
        gaps=np.frombuffer(data[durations_end:].tobytes(), dtype=np.int64).reshape(-1, 2),
        digest=digest,
        size_bytes=size,
    )


def _build(manifest: str, place: Path, status: os.stat_result) -> None:
    """Write the index atomically, so that no reader ever sees half of one."""
    if place.exists() and not place.is_file():
        place.unlink()  # a pipe: writing to it would wait for a reader
    digest = hashlib.sha256()
    num_utterances, next_line, expected_line = 0, 1, 1
    gaps: list[tuple[int, int]] = []
    crc = 0
    with (
        replacing(place) as out,
        tempfile.TemporaryFile(dir=place.parent) as durations,
        open(manifest, "rb") as file,
    ):

        def write(part: bytes) -> None:
            nonlocal crc
            crc = zlib.crc32(part, crc)
            out.write(part)

        out.write(bytes(HEADER.size))
        for start, piece in _pieces(file, digest):
            lines = parse_lines(piece, manifest, next_line)
            write((lines.starts + start).astype("<i8").tobytes())
            durations.write(lines.durations_s.astype("<f4").tobytes())
            line_numbers = next_line + lines.line_numbers
            jumps = np.flatnonzero(np.diff(line_numbers, prepend=expected_line - 1) != 1)
            gaps += [(num_utterances + int(i), int(line_numbers[i])) for i in jumps]
            if len(line_numbers):
                expected_line = int(line_numbers[-1]) + 1
            num_utterances += len(lines.starts)
            next_line += lines.num_lines
        durations.seek(0)
        while part := durations.read(1 << 20):
            write(part)
        write(np.array(gaps, dtype="<i8").tobytes())
        fields = (MAGIC, status.st_size, status.st_mtime_ns, num_utterances, len(gaps), digest.digest())
        crc = zlib.crc32(HEADER.pack(*fields, 0)[:-CRC_BYTES], crc)
        out.seek(0)
        out.write(HEADER.pack(*fields, crc))


def _pieces(file: BinaryIO, digest: Any) -> Iterator[tuple[int, bytes]]:
    """Yield pieces of about 4 MB that end at line ends, with their positions; a byte-order mark is left out."""
    start, rest = 0, b""
    while block := file.read(PIECE_BYTES):
        digest.update(block)
        if start == 0 and not rest and block.startswith(BOM):
            start, block = len(BOM), block[len(BOM) :]
        cut = block.rfind(b"\n") + 1
        if cut == 0:
            rest += block
            continue
        piece = rest + block[:cut]
        rest = block[cut:]
        yield start, piece
        start += len(piece)
    if rest:
        yield start, rest
