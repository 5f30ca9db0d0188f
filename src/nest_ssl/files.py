"""Files that appear whole or not at all."""

from __future__ import annotations

import contextlib
import os
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import IO


@contextlib.contextmanager
def replacing(path: str | Path, *, sync: bool = True) -> Iterator[IO[bytes]]:
    """A file to write that takes the place of `path` at the end: a temporary one beside it, synced, then renamed.

    Whatever goes wrong before that, a kill included, leaves `path` as it was. Without `sync` that holds for all but a
    power cut: for many small files that are easily made again.
    """
    path = Path(path)
    handle, temporary = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.", suffix=".tmp")
    try:
        with os.fdopen(handle, "wb") as file:
            yield file
            file.flush()
            if sync:
                os.fsync(file.fileno())
        os.chmod(temporary, 0o644)  # mkstemp's files are their owner's alone
        os.replace(temporary, path)
    except BaseException:
        Path(temporary).unlink(missing_ok=True)
        raise


def give_second_name(path: Path, second: Path) -> bool:
    """Make `second` another name of the file `path`, in one moment; false, and nothing done, where that cannot be."""
    temporary = second.with_name(f".{second.name}.{os.getpid()}.tmp")
    try:
        temporary.unlink(missing_ok=True)
        os.link(path, temporary)
        os.replace(temporary, second)
    except OSError:
        return False
    finally:
        temporary.unlink(missing_ok=True)  # still there, too, if `second` was that file already
    return True
