"""Memory that was freed is kept for what comes next, where the C library can be told so (glibc)."""

from __future__ import annotations

import ctypes
import sys

_TRIM_THRESHOLD, _MMAP_MAX = -1, -4  # malloc.h
_NEVER = 2**31 - 1


def keep_freed_memory() -> None:
    """Take large blocks from the heap, and do not give them back when they are freed.

    A training step on a CPU allocates and frees tensors of 100 MB; by default every one is asked of the system, and
    cleared page by page, anew: a third of the step's time.
    """
    _call("mallopt", _MMAP_MAX, 0)
    _call("mallopt", _TRIM_THRESHOLD, _NEVER)


def give_back_freed_memory() -> None:
    """To be called before processes are forked: what they share with this one is copied, page by page, when it is used.

    That takes ten times as long as asking the system for memory again.
    """
    _call("malloc_trim", 0)


def _call(name: str, *arguments: int) -> None:
    if sys.platform.startswith("linux"):
        function = getattr(ctypes.CDLL(None), name, None)
        if function is not None:  # musl has none of them
            function(*arguments)
