"""List the audio files that a folder, a list or a manifest names, in a fixed order."""

from __future__ import annotations

import heapq
import os
import re
import tempfile
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any

from nest_ssl.data.manifest.lines import ManifestError, is_tarred_manifest, parse_line, resolve_audio_path

# fmt: off
NOT_AUDIO = frozenset({
    ".txt", ".md", ".rst", ".json", ".jsonl", ".csv", ".tsv", ".xml", ".yaml", ".yml", ".html", ".pdf",
    ".lab", ".textgrid", ".stm", ".ctm", ".rttm", ".trn", ".srt", ".vtt", ".png", ".jpg", ".jpeg", ".gif",
    ".py", ".sh", ".m3u", ".m3u8", ".tar", ".gz", ".tgz", ".bz2", ".xz", ".zip", ".npy", ".npz",
    ".pt", ".idx", ".partial", ".log", ".state", ".new",
})
# fmt: on
"""Files of a folder that are skipped silently; everything else is tried."""
NAMES_IN_MEMORY = 500_000
"""A folder with more entries than this is sorted through temporary files."""


@dataclass(frozen=True)
class Entry:
    """One file to measure."""

    path: str
    """Where the audio is; if there is an error, only a name for messages."""
    item: dict[str, Any] = field(default_factory=dict)
    """What the input manifest says about it."""
    error: str | None = None
    """Why it cannot be measured."""


def file_version(path: str) -> str:
    """Return what changes when a file is replaced: its size and modification time; empty if there is no such file."""
    try:
        status = os.stat(path)
    except (OSError, ValueError):
        return ""
    return f"{status.st_size} {status.st_mtime_ns}"


def input_kind(source: Path) -> str:
    """Return 'folder', 'manifest' or 'list'."""
    if source.is_dir():
        return "folder"
    if not source.exists():
        raise ValueError(f"{source}: no such folder, list or manifest.")
    if not source.is_file():
        raise ValueError(f"{source}: neither a folder nor a regular file.")
    with open(source, "rb") as file:
        first = file.readline(1 << 20).removeprefix(b"\xef\xbb\xbf").lstrip()
    if b"\0" in first:
        raise ValueError(f"{source}: not text. Give a folder, a list of paths, or a JSON-lines manifest.")
    return "manifest" if first.startswith(b"{") or source.suffix in (".json", ".jsonl") else "list"


def list_entries(source: Path) -> Iterator[Entry]:
    """Yield everything that the input names, in a fixed order."""
    if is_tarred_manifest(str(source)):
        raise ValueError(f"{source}: its audio is in tar shards. Give the manifest that the shards were made from.")
    kind = input_kind(source)
    if kind == "folder":
        return _folder_entries(os.fspath(source), ())
    return _manifest_entries(source) if kind == "manifest" else _list_entries(source)


def _folder_entries(folder: str, above: tuple[tuple[int, int], ...]) -> Iterator[Entry]:
    """Yield the files below a folder, sorted by name at each level. Links are followed, except to a folder above.

    Hidden files and folders (snapshots, trash) are skipped.
    """
    try:
        status = os.stat(folder)
        identity = (status.st_dev, status.st_ino)
        if identity in above:
            return
        for name in _sorted_names(folder):
            path = os.path.join(folder, name)
            # Hidden names have one dot, such as .snapshot; '....wav' is only odd, and os.path finds no suffix in it.
            if re.match(r"\.[^.]", name):
                continue
            if os.path.isdir(path):
                yield from _folder_entries(path, (*above, identity))
            elif os.path.splitext(f"_{name}")[1].lower() not in NOT_AUDIO:
                yield Entry(path)
    except OSError as error:
        yield Entry(folder, error=error.strerror or str(error))


def _sorted_names(folder: str) -> Iterator[str]:
    """Yield the names in a folder, sorted by their bytes, in constant memory."""
    names: list[bytes] = []
    with ExitStack() as stack:
        runs: list[Iterator[bytes]] = []
        with os.scandir(folder) as scan:
            for entry in scan:
                names.append(os.fsencode(entry.name))
                if len(names) >= NAMES_IN_MEMORY:
                    runs.append(_spilled(sorted(names), stack.enter_context(tempfile.TemporaryFile())))
                    names = []
        for name in heapq.merge(*runs, sorted(names)):
            yield os.fsdecode(name)


def _spilled(names: list[bytes], file: IO[bytes]) -> Iterator[bytes]:
    """Write the names to a file and yield them from it. A zero byte, which no name contains, replaces a newline."""
    file.writelines(name.replace(b"\n", b"\0") + b"\n" for name in names)
    file.seek(0)
    return (line[:-1].replace(b"\0", b"\n") for line in file)


def _list_entries(source: Path) -> Iterator[Entry]:
    with open(source, "rb") as file:
        for line in file:
            name = os.fsdecode(line.removeprefix(b"\xef\xbb\xbf").strip())
            if name:
                yield Entry(resolve_audio_path(name, os.fspath(source)))


def _manifest_entries(source: Path) -> Iterator[Entry]:
    manifest = os.fspath(source)
    with open(source, "rb") as file:
        for number, line in enumerate(file, start=1):
            line = line.removeprefix(b"\xef\xbb\xbf").strip()
            if not line:
                continue
            try:
                item = parse_line(line, manifest, number, unquote=True)
            except ManifestError as error:
                yield Entry(f"{manifest}:{number}", error=error.what)
            else:
                yield Entry(resolve_audio_path(item.pop("audio_filepath"), manifest), item=item)
