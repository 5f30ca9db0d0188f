"""Open manifests (NeMo's JSON lines) as one sequence of utterances that needs no memory per line."""

from __future__ import annotations

import hashlib
import logging
import math
import os
import re
import threading
from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, Generic, Protocol, TypeVar, overload

import numpy as np
from braceexpand import braceexpand
from numpy.typing import NDArray

from nest_ssl.data.manifest.index import ManifestIndex, open_index
from nest_ssl.data.manifest.lines import ManifestError, parse_line, resolve_audio_path

logger = logging.getLogger(__name__)

Paths = str | Sequence[str] | Sequence[Sequence[str]]

NUMBER_RANGE = re.compile(r"(?:_OP_|[{(\[<])(\d+\.\.\d+)(?:_CL_|[})\]>])")
BRACES = re.compile(r"([{},])|(-?\d+)\.\.(-?\d+)|(\w)\.\.(\w)")
MAX_FILES = 1_000_000
"""Files that one pattern may stand for; {0..99999999999} would fill the memory with names."""

BLOCK = 4096
"""Utterances per entry of the table that finds the n-th kept one."""
MAX_OPEN = 64
"""Files that stay open at a time."""


@dataclass(frozen=True)
class Utterance:
    """One line of a manifest."""

    audio_filepath: str
    """An absolute path, or a name inside a tar shard."""
    duration_s: float | None
    offset_s: float
    extra: dict[str, Any]
    """All other keys of the line."""
    manifest: str
    line: int
    """Counted from 1."""


MOST_OUTSIDE = 0.05
"""Share of the audio that duration limits may leave out without a warning."""


class Manifest(Sequence[Utterance]):
    """The utterances of one or several manifest files, in order, after the duration filters.

    Lines are read on demand; starts and durations are memory-mapped and shared by all processes. A pickled Manifest
    contains only its paths and filters; unpickling opens the index again.
    """

    def __init__(
        self,
        paths: list[str],
        *,
        min_duration_s: float | None = None,
        max_duration_s: float | None = None,
        max_utterances: int | None = None,
    ) -> None:
        self.paths = paths
        self.min_duration_s = min_duration_s
        self.max_duration_s = max_duration_s
        self.max_utterances = max_utterances
        self._indexes = [open_index(path) for path in paths]
        self._file_starts = np.cumsum([0] + [len(index.starts) for index in self._indexes])
        self._kept = self._filter()
        self._lines = _LineReader()

    @property
    def file_bounds(self) -> tuple[list[int], list[int]]:
        """The number of each file's first line, and of the line after its last."""
        return self._file_starts[:-1].tolist(), self._file_starts[1:].tolist()

    def _filter(self) -> NDArray[np.bool_] | None:
        """Return which lines are kept, None for all. One byte per line: each spawned worker has its own copy."""
        no_filter = self.min_duration_s is None and self.max_duration_s is None
        total = int(self._file_starts[-1])
        if no_filter and (self.max_utterances is None or self.max_utterances >= total):
            return None
        kept = np.ones(total, dtype=bool)
        if not no_filter:
            for path, index, start in zip(self.paths, self._indexes, self._file_starts, strict=False):
                unknown = np.isnan(index.durations_s)
                if unknown.any():
                    line = _line_number(index, int(unknown.argmax()))
                    hint = f"Run 'nest-ssl prepare {path} --output NEW.jsonl' to measure it."
                    raise ManifestError(
                        f"{path}:{line}", "no 'duration', which min_duration and max_duration need", hint
                    )
                part = kept[start : start + len(unknown)]
                if self.min_duration_s is not None:
                    part &= index.durations_s >= np.float32(self.min_duration_s)
                if self.max_duration_s is not None:
                    part &= index.durations_s <= np.float32(self.max_duration_s)
        if self.max_utterances is not None:
            kept[np.flatnonzero(kept)[self.max_utterances :]] = False
        return kept

    def outside_limits(self) -> str:
        """Return what to say when the duration limits leave out more than 5 % of the audio; else nothing."""
        total_s = lost_s = 0.0
        longest = np.inf if self.max_duration_s is None else self.max_duration_s
        for index in self._indexes:
            durations_s = np.nan_to_num(index.durations_s.astype(np.float64))
            outside = (durations_s < (self.min_duration_s or 0.0)) | (durations_s > longest)
            total_s += float(durations_s.sum())
            lost_s += float(durations_s[outside].sum())
        if lost_s <= MOST_OUTSIDE * total_s:
            return ""
        limits = f"{self.min_duration_s or 0:g} to {longest:g} s"
        return (
            f"{lost_s / 3600:,.2f} of {total_s / 3600:,.2f} h ({lost_s / total_s:.1%}) are in files outside the "
            f"duration limits of training ({limits}) and left out. Cut long files into pieces, give lines "
            f"an 'offset' and a 'duration', or change model.train_ds.min_duration and max_duration."
        )

    @property
    def num_lines(self) -> int:
        """The number of utterances before the filters."""
        return int(self._file_starts[-1])

    @cached_property
    def _block_ends(self) -> NDArray[np.int64]:
        """The number of kept utterances up to the end of each block of lines."""
        assert self._kept is not None
        return np.cumsum(np.add.reduceat(self._kept, np.arange(0, len(self._kept), BLOCK), dtype=np.int64))

    def __len__(self) -> int:
        if self._kept is None:
            return int(self._file_starts[-1])
        return int(self._block_ends[-1]) if len(self._kept) else 0

    def _position(self, index: int) -> int:
        """Return the position, counted over all files without blank lines, of the index-th kept utterance."""
        if self._kept is None:
            return index
        block = int(np.searchsorted(self._block_ends, index, side="right"))
        before = int(self._block_ends[block - 1]) if block else 0
        first = block * BLOCK
        return first + int(np.flatnonzero(self._kept[first : first + BLOCK])[index - before])

    @overload
    def __getitem__(self, index: int) -> Utterance: ...
    @overload
    def __getitem__(self, index: slice) -> list[Utterance]: ...
    def __getitem__(self, index: int | slice) -> Utterance | list[Utterance]:
        if isinstance(index, slice):
            return [self[i] for i in range(*index.indices(len(self)))]
        index = int(index)
        if not -len(self) <= index < len(self):
            raise IndexError(f"{self.name} has {len(self)} utterances; there is no number {index}")
        position = self._position(index % len(self))
        file_number = int(np.searchsorted(self._file_starts, position, side="right")) - 1
        path, index_of_file = self.paths[file_number], self._indexes[file_number]
        within = position - int(self._file_starts[file_number])
        line_number = _line_number(index_of_file, within)
        line = self._lines.read(path, index_of_file, within)
        try:
            item = parse_line(line, path, line_number)
        except ManifestError as error:
            raise _blamed(path, index_of_file, error) from None
        if not _same_seconds(item["duration"], float(index_of_file.durations_s[within])):
            raise _blamed(path, index_of_file, None)
        return Utterance(
            audio_filepath=resolve_audio_path(item.pop("audio_filepath"), path),
            duration_s=item.pop("duration"),
            offset_s=item.pop("offset") or 0.0,
            extra=item,
            manifest=path,
            line=line_number,
        )

    @cached_property
    def durations_s(self) -> NDArray[np.float32]:
        """The duration of every kept utterance; NaN where the manifest has none. Read-only."""
        durations_s = self.all_durations_s()
        if self._kept is not None:
            durations_s = durations_s[self._kept]
            durations_s.flags.writeable = False
        return durations_s

    def all_durations_s(self) -> NDArray[np.float32]:
        """Return the durations before the filters. Read-only."""
        parts = [index.durations_s for index in self._indexes]
        durations_s = parts[0] if len(parts) == 1 else np.concatenate(parts)
        durations_s.flags.writeable = False
        return durations_s

    @property
    def num_per_file(self) -> list[int]:
        """The number of kept utterances in each of `paths`."""
        bounds = zip(self._file_starts[:-1].tolist(), self._file_starts[1:].tolist(), strict=True)
        if self._kept is None:
            return [stop - start for start, stop in bounds]
        return [int(np.count_nonzero(self._kept[start:stop])) for start, stop in bounds]

    @property
    def name(self) -> str:
        """The first file's name and the number of further files, for messages."""
        more = f" (+{len(self.paths) - 1})" if len(self.paths) > 1 else ""
        return Path(self.paths[0]).name + more

    def fingerprint(self) -> str:
        """Hash the manifests' contents and which lines are kept: equal on every machine with the same data."""
        digest = hashlib.sha256()
        for index in self._indexes:
            digest.update(index.digest)
        digest.update(b"all" if self._kept is None or self._kept.all() else np.packbits(self._kept).tobytes())
        return digest.hexdigest()

    def __reduce__(self) -> tuple[Any, ...]:
        return _reopen, (self.paths, self.min_duration_s, self.max_duration_s, self.max_utterances)


def _same_seconds(stated_s: float | None, indexed_s: float) -> bool:
    """Tell whether a line's duration is the index's, which is rounded to float32."""
    if stated_s is None:
        return math.isnan(indexed_s)
    return math.isclose(stated_s, indexed_s, rel_tol=1e-6, abs_tol=1e-30)


def _blamed(path: str, index: ManifestIndex, error: ManifestError | None) -> ManifestError:
    """Return whose fault it is that a line is not what the index says: the manifest's only if a new index agrees.

    Building it raises the manifest's own error, if it has one.
    """
    new = open_index(path, rebuild=True)
    if error is not None and new.digest == index.digest:
        return error
    what = "was changed since it was opened, or before, without a new modification time"
    return ManifestError(path, what, "Its index has been built again: repeat the command.")


def _reopen(paths: list[str], min_s: float | None, max_s: float | None, max_utterances: int | None) -> Manifest:
    return Manifest(paths, min_duration_s=min_s, max_duration_s=max_s, max_utterances=max_utterances)


def open_manifests(
    paths: Paths,
    *,
    min_duration_s: float | None = None,
    max_duration_s: float | None = None,
    max_utterances: int | None = None,
) -> Manifest:
    """Open all named manifests (see `split_paths`) as one sequence, and log what the filters leave out."""
    files = [os.path.expanduser(path) for path in split_paths(paths)]
    manifest = Manifest(
        files, min_duration_s=min_duration_s, max_duration_s=max_duration_s, max_utterances=max_utterances or None
    )
    logger.info("%s", describe(manifest))
    empty = [path for path, start, end in zip(files, *manifest.file_bounds, strict=True) if start == end]
    if empty and len(empty) < len(files):
        logger.warning("%s: is empty%s.", empty[0], f", and so are {len(empty) - 1} more" if empty[1:] else "")
    return manifest


def describe(manifest: Manifest) -> str:
    """`train.jsonl: 9,998 utterances, 31.2 h; left out: 2 longer than 20.0 s (0.1 h)`"""
    all_s = manifest.all_durations_s()
    parts = []
    for limit_s, word, outside in (
        (manifest.min_duration_s, "shorter", np.less),
        (manifest.max_duration_s, "longer", np.greater),
    ):
        left_out_s = all_s[outside(all_s, np.float32(limit_s))] if limit_s is not None else all_s[:0]
        if len(left_out_s):
            parts.append(f"{len(left_out_s):,} {word} than {limit_s} s ({_total(left_out_s)})")
    if manifest.max_utterances is not None:
        parts.append(f"all after the first {manifest.max_utterances:,}")
    left_out = f"; left out: {', '.join(parts)}" if parts else ""
    return f"{manifest.name}: {len(manifest):,} utterances, {_total(manifest.durations_s)}{left_out}"


def _total(durations_s: NDArray[np.float32]) -> str:
    known_s = float(np.nansum(durations_s, dtype=np.float64))
    num_unknown = int(np.count_nonzero(np.isnan(durations_s)))
    known = f"{known_s / 3600:,.1f} h" if known_s >= 3600 else f"{known_s / 60:.1f} min"
    return known + (f" and {num_unknown:,} of unknown duration" if num_unknown else "")


def _line_number(index: ManifestIndex, number: int) -> int:
    """Return the line of utterance `number`, counted from 1 as editors do."""
    gap = int(np.searchsorted(index.gaps[:, 0], number, side="right")) - 1
    return number + 1 if gap < 0 else int(index.gaps[gap, 1]) + number - int(index.gaps[gap, 0])


def split_groups(paths: Paths) -> list[list[str]]:
    """Return one list of files per dataset: per comma-separated or listed name; a nested list is one dataset.

    `_OP_0..3_CL_` and `{0..3}` (also with `(`, `[`, `<`, as NeMo allows) stand for the numbers, `{a,b}` for the names.
    """
    if isinstance(paths, str):
        groups = [_expand(path) for path in _split_at_commas(paths)]
    else:
        groups = [split_paths(item) for item in paths]
    if not groups or not all(groups):
        raise ValueError(
            f"manifest_filepath: no path in {paths!r}. Give a path, a comma-separated list, a list, or a list of lists."
        )
    return groups


def split_paths(paths: Paths) -> list[str]:
    """Return all files in order, whatever the nesting."""
    return [path for group in split_groups(paths) for path in group]


def _split_at_commas(text: str) -> list[str]:
    """Split at commas outside of braces; strip the parts and drop empty ones."""
    parts = re.split(r",(?![^{]*})", text.replace("_OP_", "{").replace("_CL_", "}"))
    return [part.strip() for part in parts if part.strip()]


def _expand(pattern: str) -> list[str]:
    if os.path.exists(pattern):  # names may contain brackets
        return [pattern]
    pattern = NUMBER_RANGE.sub(r"{\1}", pattern)
    if _most_files(pattern) > MAX_FILES:
        raise ValueError(f"{pattern[:200]}: stands for more than {MAX_FILES:,} files.")
    try:
        return list(braceexpand(pattern, escape=False))
    except ValueError as error:
        raise ValueError(
            f"manifest_filepath or tarred_audio_filepaths: {pattern}: {error}. Write {{0..9}}, or _OP_0..9_CL_."
        ) from error


def _most_files(pattern: str) -> float:
    """Return how many files a pattern stands for, or more where braces contain braces."""
    total, open_braces = 1.0, []
    for mark, first, last, low, high in BRACES.findall(pattern):
        if low:
            total *= abs(ord(high) - ord(low)) + 1
        elif first:
            total *= abs(float(last) - float(first)) + 1
        elif mark == "{":
            open_braces.append(1)
        elif open_braces and mark == ",":
            open_braces[-1] += 1
        elif open_braces:
            total *= open_braces.pop()
    return total


class _LineReader:
    """Reads lines by position, from any thread.

    Not memory-mapped: an epoch touches every page, and each would count as memory of every worker.
    """

    def __init__(self) -> None:
        self._files = KeptOpen(lambda path: open(path, "rb", buffering=0))  # noqa: SIM115

    def read(self, path: str, index: ManifestIndex, number: int) -> bytes:
        start = int(index.starts[number])
        stop = int(index.starts[number + 1]) if number + 1 < len(index.starts) else index.size_bytes
        with self._files.file(path) as file:
            file.seek(start)
            return file.read(stop - start)


class Closable(Protocol):
    def close(self) -> None: ...


F = TypeVar("F", bound=Closable)


class KeptOpen(Generic[F]):
    """The most recently used files, kept open: per process, and for one thread at a time (a file has one position)."""

    def __init__(self, open_file: Callable[..., F]) -> None:
        self._open_file = open_file
        self._forget()

    @contextmanager
    def file(self, path: str, **options: Any) -> Iterator[F]:
        """The open file; `options` for whoever opens it, if that is to be done now."""
        if self._pid != os.getpid():  # after a fork, which shares the positions of the parent's files
            self._forget()
        with self._lock:
            if path not in self._files:
                if len(self._files) >= MAX_OPEN:
                    self._files.popitem(last=False)[1].close()
                self._files[path] = self._open_file(path, **options)
            self._files.move_to_end(path)
            yield self._files[path]

    def _forget(self) -> None:
        self._files: OrderedDict[str, F] = OrderedDict()
        self._pid, self._lock = os.getpid(), threading.Lock()

    def __del__(self) -> None:
        for file in self._files.values():
            file.close()

    def __reduce__(self) -> tuple[type[KeptOpen[F]], tuple[Callable[..., F]]]:
        return KeptOpen, (self._open_file,)
