"""Files and folders that appear complete or not at all. Whatever writes a whole file does it through this module."""

from __future__ import annotations

import contextlib
import errno
import os
import shutil
import time
from collections.abc import Iterator
from pathlib import Path
from typing import IO

SHARDS_INDEX, SHARDS_REST = ".metadata", "rest.pt"
"""A checkpoint of sharded weights (`trainer.strategy=fsdp`) is a folder of shards, with torch's index of the tensors in
them, and a file with the rest."""

READER_S = 2.0
"""How long a pipe may have no reader."""


@contextlib.contextmanager
def replacing(path: str | Path, *, sync: bool = True) -> Iterator[IO[bytes]]:
    """Open a file that replaces `path` at the end: a temporary file next to it, synced, then renamed.

    Whatever goes wrong before that, even a kill, leaves `path` as it was. Without `sync` this holds except for a power
    cut: for many small files that are easily made again. A pipe or a device (/dev/stdout) is written to directly; a
    pipe that nobody reads is an error.
    """
    path = Path(path)
    if path.exists() and not path.is_file():
        with open(path, "wb", opener=_open_at_once) as file:
            yield file
        return
    temporary = path.with_name(f".{path.name}.{os.urandom(4).hex()}.tmp")
    try:
        with temporary.open("xb") as file:  # permissions follow the user's umask
            yield file
            file.flush()
            if sync:
                os.fsync(file.fileno())
        os.replace(temporary, path)
    except BaseException as error:
        temporary.unlink(missing_ok=True)
        if not isinstance(error, OSError):
            raise
        if error.errno is None:  # numpy's, which only counts what was written
            raise OSError(f"{path}: cannot be written: {error}. Is there space on the disk?") from error
        if error.filename in (None, str(temporary)):
            error.filename = str(path)  # the file that the user knows; a write to a full disk names none
        raise


def _open_at_once(path: str, flags: int) -> int:
    """Open a pipe whose reader comes soon, instead of waiting for one forever."""
    until = time.monotonic() + READER_S
    while True:
        try:
            descriptor = os.open(path, flags | getattr(os, "O_NONBLOCK", 0))
        except OSError as error:
            if error.errno != errno.ENXIO:
                raise
            if time.monotonic() > until:
                raise OSError(errno.ENXIO, "a pipe that nobody reads", path) from error
            time.sleep(0.05)
        else:
            os.set_blocking(descriptor, True)
            return descriptor


def make_folder(path: Path) -> None:
    """Create a folder for output, unless it is there."""
    try:
        path.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        what = "is not a folder" if path.exists() else f"cannot be created: {error.strerror}"
        raise ValueError(f"{path}: {what}. Give another output folder.") from error


def replace_text(path: str | Path, text: str, *, sync: bool = True) -> None:
    """Write `text` as the whole content of `path`, in UTF-8; what cannot be encoded, of odd file names, as escapes."""
    with replacing(path, sync=sync) as file:
        file.write(text.encode(errors="backslashreplace"))


def give_second_name(path: Path, second: Path, *, keeps_before: bool = False) -> bool:
    """Make `second` another name for the file `path`, atomically; of a folder, for each of its files.

    False, with nothing changed: it is impossible. `keeps_before` a folder that was called `second`.
    """
    temporary = second.with_name(f".{second.name}.{os.getpid()}.tmp")
    try:
        remove(temporary)
        if path.is_dir():
            temporary.mkdir()
            for file in path.iterdir():
                os.link(file, temporary / file.name)
            put_in_place(temporary, second, keeps_before=keeps_before)
        else:
            os.link(path, temporary)
            os.replace(temporary, second)
    except OSError:
        return False
    finally:
        remove(temporary)  # renaming does nothing if both names belong to the same file already
    return True


def predecessor(path: Path) -> Path:
    """What `path` is called once another takes its place: NAME-before.SUFFIX."""
    return path.with_name(f"{path.stem}-before{path.suffix}")


def put_in_place(new: Path, path: Path, *, keeps_before: bool = False) -> None:
    """Let `new` take the place of `path`, where either is a folder: the system replaces only files by files.

    What was there is renamed to its `predecessor`, and then deleted unless `keeps_before`. A kill between two renames
    leaves it, complete, under that name.
    """
    before = predecessor(path)
    if path.exists():
        remove(before)
        path.rename(before)
    new.rename(path)
    if not keeps_before:
        remove(before)


def remove(path: Path) -> None:
    """Delete a file, or a folder with its content, if it exists. A folder loses its name first: no half is left."""
    if not path.is_dir() or path.is_symlink():
        path.unlink(missing_ok=True)
        return
    nameless = path if path.suffix == ".tmp" else path.with_name(f".{path.name}.{os.urandom(4).hex()}.tmp")
    path.rename(nameless)
    shutil.rmtree(nameless)
