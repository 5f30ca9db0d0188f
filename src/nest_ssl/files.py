"""Files that appear complete or not at all. Whatever writes a whole file does it through this module."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from pathlib import Path
from typing import IO


@contextlib.contextmanager
def replacing(path: str | Path, *, sync: bool = True) -> Iterator[IO[bytes]]:
    """Open a file that replaces `path` at the end: a temporary file next to it, synced, then renamed.

    Whatever goes wrong before that, even a kill, leaves `path` as it was. Without `sync` this holds except for a power
    cut: for many small files that are easily made again. A pipe or a device (/dev/stdout) is written to directly.
    """
    path = Path(path)
    if path.exists() and not path.is_file():
        with path.open("wb") as file:
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
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise


def replace_text(path: str | Path, text: str, *, sync: bool = True) -> None:
    """Write `text` as the whole content of `path`, in UTF-8."""
    with replacing(path, sync=sync) as file:
        file.write(text.encode())


def give_second_name(path: Path, second: Path) -> bool:
    """Make `second` another name for the file `path`, atomically. False, with nothing changed: it is impossible."""
    temporary = second.with_name(f".{second.name}.{os.getpid()}.tmp")
    try:
        temporary.unlink(missing_ok=True)
        os.link(path, temporary)
        os.replace(temporary, second)
    except OSError:
        return False
    finally:
        temporary.unlink(missing_ok=True)  # renaming does nothing if both names belong to the same file already
    return True
