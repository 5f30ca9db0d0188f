"""Files and folders that appear complete or not at all. Whatever writes a whole file does it through this module."""

from __future__ import annotations

import contextlib
import errno
import glob
import json
import logging
import os
import platform
import shutil
import time
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import IO, Any

try:
    import fcntl
except ImportError:  # Windows
    fcntl = None  # type: ignore[assignment]

log = logging.getLogger(__name__)

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
    with _temporary(path) as temporary:
        with temporary.open("xb") as file:  # permissions follow the user's umask
            yield file
            file.flush()
            if sync:
                os.fsync(file.fileno())
        os.replace(temporary, path)


@contextlib.contextmanager
def replacing_in(folder: Path, path: Path) -> Iterator[Path]:
    """An empty folder whose files, at the end, replace those of the same names in `folder`; other files there stay.

    `path` is what the user asked for: the temporary folder is next to it, and errors name it.
    """
    remove_left_over(path)
    with _temporary(path) as temporary:
        temporary.mkdir()
        yield temporary
        new = {part: folder / part.relative_to(temporary) for part in sorted(temporary.rglob("*"))}
        for part, target in new.items():  # before the first one is in place
            if target.exists() and target.is_dir() != part.is_dir():
                raise ValueError(f"{target}: is {'' if target.is_dir() else 'not '}a folder. Move it away.")
        for part, target in new.items():
            if part.is_file():
                target.parent.mkdir(parents=True, exist_ok=True)
                os.replace(part, target)
        remove(temporary)


@contextlib.contextmanager
def _temporary(path: Path) -> Iterator[Path]:
    """A new name next to `path`. If something goes wrong, what has it is removed, and errors name `path`."""
    temporary = temporary_name(path)
    try:
        yield temporary
    except BaseException as error:
        with contextlib.suppress(OSError):  # of two errors the first is the one to be told
            remove(temporary)
        if not isinstance(error, OSError):
            raise
        if error.errno is None:  # numpy's and safetensors', which have only words
            space = "Is there space on the disk, and may a file be so large (ulimit -f)?"
            raise OSError(f"{path}: cannot be written: {error}. {space}") from error
        if error.filename is None or str(error.filename).startswith(str(temporary)):
            error.filename = str(path)  # the file that the user knows; a write to a full disk names none
        raise


def temporary_name(path: Path) -> Path:
    """A new name next to `path`, with this host and process in it: `remove_left_over` finds what they have left."""
    return path.with_name(f".{path.name}.{_this_host()}-{os.getpid()}-{os.urandom(4).hex()}.tmp")


def remove_left_over(path: Path, *, inside: bool = False) -> None:
    """Delete what killed processes of this host have left of writing `path`, or files `inside` it.

    Another host may be writing there too, with process numbers of its own.
    """
    pattern = f".{'*' if inside else glob.escape(path.name)}.{_this_host()}-*-*.tmp"
    for left_over in path.rglob(pattern) if inside else path.parent.glob(pattern):
        pid = left_over.name.split("-")[-2]
        try:
            if os.name == "posix" and pid.isdecimal():
                os.kill(int(pid), 0)  # PermissionError: it lives, and is another user's
        except ProcessLookupError:
            remove(left_over)
        except (PermissionError, OverflowError):
            continue


def _this_host() -> str:
    return f"{zlib.crc32(platform.node().encode()) & 0xFFFF:04x}"


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


def read_json(path: Path, use: Callable[[Any], Any]) -> Any:
    """What `use` makes of the content of a JSON file; ValueError, which names the file, where it cannot."""
    try:
        return use(json.loads(path.read_bytes()))
    except (ValueError, LookupError, TypeError, AttributeError, RecursionError) as error:
        raise ValueError(
            f"{path}: is damaged ({type(error).__name__}: {error}). Delete it, or move it away."
        ) from error


def give_second_name(path: Path, second: Path, *, keeps_before: bool = False) -> bool:
    """Make `second` another name for the file `path`, atomically; of a folder, for each of its files.

    False, with nothing changed: it is impossible. `keeps_before` a folder that was called `second`.
    """
    temporary = temporary_name(second)
    try:
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
    nameless = path if path.suffix == ".tmp" else temporary_name(path)
    path.rename(nameless)
    shutil.rmtree(nameless)


def is_locked_by_another(file: IO[Any], what: Path) -> bool:
    """Lock an open file for this process, until it is closed or this process ends; True: another one has locked it."""
    if fcntl is None:
        return False
    try:
        fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except (BlockingIOError, PermissionError):
        return True
    except OSError as error:  # some network disks
        log.warning("%s: cannot be locked (%s): start no second command that writes there.", what, error.strerror)
    return False


@contextlib.contextmanager
def only_writer(path: Path) -> Iterator[None]:
    """Refuse to write the file or folder `path`, and what belongs to it, while another process does."""
    path = Path(os.path.abspath(path))
    lock = path.with_name(f".{path.name}.lock")
    file: IO[str] | None = None
    with contextlib.ExitStack() as stack:
        with contextlib.suppress(OSError):  # what is written next will say why it cannot be
            path.parent.mkdir(parents=True, exist_ok=True)
            while fcntl is not None and (file is None or not _is_called(lock, file)):
                file = stack.enter_context(lock.open("a+"))
                if is_locked_by_another(file, path):
                    raise ValueError(
                        f"{path}: another command is writing it. Wait for it to end, or give another output."
                    )
        try:
            yield
        finally:
            if file is not None:
                with contextlib.suppress(OSError):
                    lock.unlink()


def _is_called(path: Path, file: IO[Any]) -> bool:
    """Whether an open file still has this name; the command that created it deletes it when it ends."""
    try:
        return os.path.samestat(os.fstat(file.fileno()), path.stat())
    except FileNotFoundError:
        return False
