"""Keep freed memory for the next allocation, where the C library has an option for it (glibc)."""

from __future__ import annotations

import ctypes
import sys

_TRIM_THRESHOLD, _MMAP_MAX = -1, -4  # malloc.h
_NEVER = 2**31 - 1


def keep_freed_memory() -> None:
    """Allocate large blocks on the heap, and do not return them to the system when they are freed.

    A training step on a CPU allocates and frees tensors of 100 MB; by default the system provides each of them and
    clears it page by page, every time: a third of the step's time.
    """
    _call("mallopt", _MMAP_MAX, 0)
    _call("mallopt", _TRIM_THRESHOLD, _NEVER)


def give_back_freed_memory() -> None:
    """Return freed memory to the system; call this before forking.

    A forked process copies shared pages one by one when it writes to them, which takes ten times as long as new memory.
    """
    _call("malloc_trim", 0)


def _call(name: str, *arguments: int) -> None:
    if sys.platform.startswith("linux"):
        function = getattr(ctypes.CDLL(None), name, None)
        if function is not None:  # musl has none of them
            function(*arguments)
