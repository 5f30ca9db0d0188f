"""The lines of a JSON-lines manifest: checked values, where the audio is, or an error that names file and line."""

from __future__ import annotations

import contextlib
import json
import math
import os
import re
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, NoReturn

import msgspec
import numpy as np
from numpy.typing import NDArray

PREPARE_HINT = "Run 'nest-ssl prepare {manifest} --output NEW.jsonl' to write a good one, without unusable lines."
ONE_PER_LINE = (
    'Write one JSON object per line, such as {"audio_filepath": "a.wav", "duration": 3.2}; '
    "'nest-ssl prepare' makes that of a folder or a list of paths."
)
TARRED_MANIFEST = re.compile(r"(?:^|[/\\])(?:sharded_manifests[/\\]manifest_\d+\.json|tarred_audio_manifest\.json)$")
BLANK = b" \t\r\n"
"""White space in JSON; bytes.strip takes form feeds for white space too."""
MAX_SECONDS = 1e9
"""30 years: more is no duration, and would overflow what is computed from it."""


class ManifestError(ValueError):
    """A manifest cannot be used: where (file, line), what is wrong, and the way out."""

    def __init__(self, where: str, what: str, way_out: str) -> None:
        super().__init__(where, what, way_out)
        self.where, self.what, self.way_out = where, what, way_out

    def __str__(self) -> str:
        return f"{self.where}: {self.what}. {self.way_out}".replace("\n", "\\n")  # names may contain line breaks


class Line(msgspec.Struct, gc=False):
    """The keys that an index needs; msgspec skips the others without building objects."""

    audio_filepath: str | None = None
    audio_filename: str | None = None
    duration: float | None = None
    offset: float | None = None


_decode_lines = msgspec.json.Decoder(Line).decode_lines


@dataclass(frozen=True)
class Lines:
    """The utterances of a piece of a manifest."""

    starts: NDArray[np.int64]
    """Where each line starts, in bytes from the start of the piece."""
    line_numbers: NDArray[np.int64]
    """Counted from 0 within the piece, blank lines included."""
    durations_s: NDArray[np.float32]
    """NaN where unknown."""
    num_lines: int
    """Blank lines included."""


def parse_lines(piece: bytes, manifest: str, first_line: int) -> Lines:
    """Parse all lines of a piece that starts at the start of a line; 10 times faster than json.loads line by line."""
    newlines = np.flatnonzero(np.frombuffer(piece, dtype=np.uint8) == ord("\n"))
    starts = np.concatenate([[0], newlines + 1]).astype(np.int64)
    ends = np.append(newlines, len(piece))
    if starts[-1] == len(piece):  # the last line ended with a newline
        starts, ends = starts[:-1], ends[:-1]
    numbers = _filled(piece, starts, ends)
    try:
        if not piece.isascii():
            piece.decode()
        lines = _decode_lines(piece)
        if len(lines) != len(numbers) or not all(map(_path, lines)):
            raise ValueError("not one valid object per line")
        with np.errstate(over="ignore"):  # infinity, which is out of range
            durations_s = np.array([math.nan if x.duration is None else x.duration for x in lines], dtype=np.float32)
            offsets_s = np.array([x.offset or 0.0 for x in lines], dtype=np.float32)
        if any((seconds < 0).any() or (seconds > MAX_SECONDS).any() for seconds in (durations_s, offsets_s)):
            raise ValueError("a time out of range")
        if b"\\u0000" in piece:
            raise ValueError("NUL, which no path contains")
    except (msgspec.MsgspecError, ValueError, RecursionError):  # the slow way finds the line and what is wrong with it
        numbers = np.array([n for n in numbers if piece[starts[n] : ends[n]].strip(BLANK)], dtype=np.int64)
        durations_s = np.array(
            [_checked_duration(piece[starts[n] : ends[n]], manifest, first_line + int(n)) for n in numbers],
            dtype=np.float32,
        )
    return Lines(starts[numbers], numbers, durations_s, len(starts))


def _path(line: Line) -> str | None:
    return line.audio_filepath or line.audio_filename


def _filled(piece: bytes, starts: NDArray[np.int64], ends: NDArray[np.int64]) -> NDArray[np.int64]:
    """Return the numbers of the lines that are not blank; those of 20 bytes or more are assumed to be filled."""
    blank = [n for n in np.flatnonzero(ends - starts < 20) if not piece[starts[n] : ends[n]].strip(BLANK)]
    return np.delete(np.arange(len(starts)), blank)


def _checked_duration(line: bytes, manifest: str, line_number: int) -> float:
    duration_s = parse_line(line, manifest, line_number)["duration"]
    return math.nan if duration_s is None else duration_s


def parse_line(line: bytes, manifest: str, line_number: int, *, unquote: bool = False) -> dict[str, Any]:
    """Parse one line into a dict in which `audio_filepath`, `duration` and `offset` are present and checked."""
    item: Any = None

    def fail(what: str) -> NoReturn:
        # A first line that is no object: all lines are of another format, and 'prepare' would leave them all out.
        is_format = line_number == 1 and not isinstance(item, dict)
        hint = ONE_PER_LINE if is_format else PREPARE_HINT.format(manifest=manifest)
        raise ManifestError(f"{manifest}:{line_number}", what, hint)

    try:
        item = msgspec.json.decode(line)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
        item = _parse_as_python_does(line, fail)
    if not isinstance(item, dict):
        fail(f"a JSON {type(item).__name__} instead of an object")
    name = item.pop("audio_filename", None)  # first, as in NeMo
    path = item.get("audio_filepath") if name is None else name
    if path is None:
        fail("no 'audio_filepath'")
    if not isinstance(path, str) or not path or "\0" in path or _has_lone_surrogate(path):
        fail(f"'audio_filepath' is {path!r:.200}, not a path")
    item["audio_filepath"] = path
    for key in ("duration", "offset"):
        seconds = item.setdefault(key, None)
        if seconds is None:
            continue
        if unquote and isinstance(seconds, str):  # for those who write a new manifest
            with contextlib.suppress(ValueError):
                seconds = item[key] = float(seconds or math.nan)
        if unquote and seconds != seconds:  # NaN: a value that is missing, as pandas writes it
            item[key] = None
            continue
        if isinstance(seconds, bool) or not isinstance(seconds, int | float) or not seconds <= MAX_SECONDS:
            fail(f"'{key}' is {_shown(seconds)}, not a number of seconds")
        if seconds < 0:
            fail(f"'{key}' is {seconds}, which is negative")
    return item


def _has_lone_surrogate(text: str) -> bool:
    return not text.isascii() and any("\ud800" <= character <= "\udfff" for character in text)


def _shown(value: Any) -> str:
    """Return a value for a message; Python refuses to print integers of more than 4,300 digits."""
    return f"{value!r:.80}" if not isinstance(value, int) or value < 10**80 else "a number of more than 80 digits"


def _parse_as_python_does(line: bytes, fail: Any) -> Any:
    """Parse with json.loads: slower, but it accepts NaN in other keys, as NeMo does, and its messages are better."""
    try:
        return json.loads(line.decode(), parse_int=_integer)
    except UnicodeDecodeError as error:
        fail(f"not UTF-8 (byte 0x{line[error.start]:02x} at column {error.start + 1})")
    except json.JSONDecodeError as error:
        fail(f"not JSON ({error.msg} at column {error.colno})")
    except RecursionError:
        fail("not JSON (nested too deeply)")


def _integer(digits: str) -> float:
    """Return an integer; Python refuses those of more than 4,300 digits, which an unused key may have."""
    return int(digits) if len(digits) < 1000 else math.copysign(math.inf, -1 if digits.startswith("-") else 1)


def is_tarred_manifest(manifest: str) -> bool:
    """Tell by the file name, as NeMo does, whether the audio paths in a manifest are names inside tar shards."""
    return TARRED_MANIFEST.search(manifest) is not None


@lru_cache(maxsize=4096)
def _folder_of(manifest: str) -> str | None:
    """Return the folder that relative paths start from; None for manifests of tar shards."""
    return None if is_tarred_manifest(manifest) else os.path.dirname(os.path.abspath(manifest))


def resolve_audio_path(audio_path: str, manifest: str) -> str:
    """Make a relative path absolute: in the manifest's folder, or else, if it exists there, in the working folder.

    Backslashes in a manifest made on Windows are separators, unless a file has exactly that name.
    """
    folder = _folder_of(manifest)
    if folder is None:
        return audio_path
    resolved = os.path.join(folder, os.path.expanduser(audio_path))
    if os.path.isabs(audio_path) and "\\" not in audio_path:
        return resolved
    if os.path.exists(resolved):
        return resolved
    if "\\" in audio_path and os.sep == "/":
        return resolve_audio_path(audio_path.replace("\\", "/"), manifest)
    return os.path.abspath(audio_path) if os.path.exists(audio_path) else resolved
