"""Manifests: JSON lines as NeMo's, opened as one sequence of utterances that costs no memory per line."""

from __future__ import annotations

import hashlib
import logging
import os
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, overload

import numpy as np
from numpy.typing import NDArray

from nest_ssl.data.manifest.index import ManifestIndex, open_index
from nest_ssl.data.manifest.kept_open import KeptOpen
from nest_ssl.data.manifest.lines import ManifestError, parse_line
from nest_ssl.data.manifest.paths import Paths, resolve_audio_path, split_paths

logger = logging.getLogger(__name__)

BLOCK = 4096
"""Utterances per entry of the table that finds the n-th kept one."""


@dataclass(frozen=True)
class Utterance:
    """One line of a manifest."""

    audio_filepath: str
    """Resolved: absolute, or a name inside a tar shard."""
    duration_s: float | None
    offset_s: float
    extra: dict[str, Any]
    """All other keys of the line."""
    manifest: str
    line: int
    """Counted from 1."""


class Manifest(Sequence[Utterance]):
    """The utterances of one or several manifest files, in order, after the duration filters.

    Lines are read when asked for; starts and durations are memory-mapped and shared by all processes. A pickled
    Manifest holds its paths and filters only, and opens the index again.
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

    def _filter(self) -> NDArray[np.bool_] | None:
        """Which lines are kept; None: all. A byte per line, since each spawned worker has its own."""
        no_filter = self.min_duration_s is None and self.max_duration_s is None
        total = int(self._file_starts[-1])
        if no_filter and (self.max_utterances is None or self.max_utterances >= total):
            return None
        kept = np.ones(total, dtype=bool)
        if not no_filter:
            for path, index, start in zip(self.paths, self._indexes, self._file_starts, strict=False):
                unknown = np.isnan(index.durations_s)
                if unknown.any():
                    line = index.line_number(int(unknown.argmax()))
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

    @property
    def num_lines(self) -> int:
        """Before the filters."""
        return int(self._file_starts[-1])

    @cached_property
    def _block_ends(self) -> NDArray[np.int64]:
        """How many utterances are kept up to the end of each block of lines."""
        assert self._kept is not None
        return np.cumsum(np.add.reduceat(self._kept, np.arange(0, len(self._kept), BLOCK), dtype=np.int64))

    def __len__(self) -> int:
        if self._kept is None:
            return int(self._file_starts[-1])
        return int(self._block_ends[-1]) if len(self._kept) else 0

    def _position(self, index: int) -> int:
        """The line, over all files and blank lines left out, of the index-th kept utterance."""
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
        line_number = index_of_file.line_number(within)
        item = parse_line(self._lines.read(path, index_of_file, within), path, line_number)
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
        """Of every kept utterance; NaN where the manifest does not say. Read-only."""
        durations_s = self.all_durations_s()
        if self._kept is not None:
            durations_s = durations_s[self._kept]
            durations_s.flags.writeable = False
        return durations_s

    def all_durations_s(self) -> NDArray[np.float32]:
        """Before the filters. Read-only."""
        parts = [index.durations_s for index in self._indexes]
        durations_s = parts[0] if len(parts) == 1 else np.concatenate(parts)
        durations_s.flags.writeable = False
        return durations_s

    @property
    def num_per_file(self) -> list[int]:
        """How many utterances are kept of each of `paths`."""
        bounds = zip(self._file_starts[:-1].tolist(), self._file_starts[1:].tolist(), strict=True)
        if self._kept is None:
            return [stop - start for start, stop in bounds]
        return [int(np.count_nonzero(self._kept[start:stop])) for start, stop in bounds]

    @property
    def name(self) -> str:
        """For messages: the file's name, and how many more there are."""
        more = f" (+{len(self.paths) - 1})" if len(self.paths) > 1 else ""
        return Path(self.paths[0]).name + more

    def fingerprint(self) -> str:
        """Hash of the manifests' contents and of which lines are kept: equal on every machine with the same data."""
        digest = hashlib.sha256()
        for index in self._indexes:
            digest.update(index.digest)
        digest.update(b"all" if self._kept is None or self._kept.all() else np.packbits(self._kept).tobytes())
        return digest.hexdigest()

    def __reduce__(self) -> tuple[Any, ...]:
        return _reopen, (self.paths, self.min_duration_s, self.max_duration_s, self.max_utterances)


def _reopen(paths: list[str], min_s: float | None, max_s: float | None, max_utterances: int | None) -> Manifest:
    return Manifest(paths, min_duration_s=min_s, max_duration_s=max_s, max_utterances=max_utterances)


def open_manifests(
    paths: Paths,
    *,
    min_duration_s: float | None = None,
    max_duration_s: float | None = None,
    max_utterances: int | None = None,
) -> Manifest:
    """One sequence over all manifests named (see `split_paths`); what the filters leave out is said in one log line."""
    files = [os.path.expanduser(path) for path in split_paths(paths)]
    manifest = Manifest(
        files, min_duration_s=min_duration_s, max_duration_s=max_duration_s, max_utterances=max_utterances or None
    )
    logger.info("%s", describe(manifest))
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


class _LineReader:
    """Reads lines by position, in any thread.

    Not memory-mapped: in an epoch every page would be touched, and count as memory of every worker.
    """

    def __init__(self) -> None:
        self._files = KeptOpen(lambda path: open(path, "rb", buffering=0))  # noqa: SIM115

    def read(self, path: str, index: ManifestIndex, number: int) -> bytes:
        start = int(index.starts[number])
        stop = int(index.starts[number + 1]) if number + 1 < len(index.starts) else index.size_bytes
        with self._files.file(path) as file:
            file.seek(start)
            return file.read(stop - start)
