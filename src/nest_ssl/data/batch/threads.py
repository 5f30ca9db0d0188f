"""Reading the files of a batch at once, where this process may use several cores; a loader process has one."""

from __future__ import annotations

import contextlib
import os
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from functools import cache
from typing import TypeVar

import torch

T = TypeVar("T")
R = TypeVar("R")

OnRead = Callable[[str], None] | None
"""Called with the path of a file just before it is read, in the process that reads it."""


class Readers:
    """As many threads as torch may use, and word of what they read.

    `on_read` hears last of the file that has been read for longest: should one never end, it is the one that is named.
    """

    def __init__(self, on_read: OnRead = None) -> None:
        self.on_read = on_read
        self._paths: dict[int, str] = {}
        """Of each thread that reads; the oldest first."""
        self._lock = threading.Lock()

    def map(self, function: Callable[[T], R], items: Sequence[T]) -> list[R]:
        """`function` of every item, in which `reading` is called; the first error is raised when all have ended."""
        if min(torch.get_num_threads(), len(items)) < 2:
            return [self._run(function, item) for item in items]
        pool = _pool(os.getpid(), torch.get_num_threads())
        tasks = [pool.submit(self._run, function, item) for item in items]
        try:
            wait(tasks)
        finally:  # Ctrl-C
            for task in tasks:
                task.cancel()
        return [task.result() for task in tasks]

    def reading(self, path: str) -> None:
        """This thread is about to read `path`."""
        if self.on_read is None:
            return
        with self._lock:
            self._paths.pop(threading.get_ident(), None)
            self.on_read(path)
            self._paths[threading.get_ident()] = path
            oldest = next(iter(self._paths.values()))
            if oldest != path:
                self.on_read(oldest)
        if threading.current_thread() is not threading.main_thread():
            _block_here_if_ever(path)

    def _run(self, function: Callable[[T], R], item: T) -> R:
        try:
            return function(item)
        finally:
            with self._lock:
                self._paths.pop(threading.get_ident(), None)
                if self.on_read is not None and self._paths:
                    self.on_read(next(iter(self._paths.values())))

    def __reduce__(self) -> tuple[type[Readers], tuple[OnRead]]:
        return Readers, (self.on_read,)


def _block_here_if_ever(path: str) -> None:
    """soundfile opens one file at a time: one that blocks would make threads wait that began before it."""
    with contextlib.suppress(OSError):  # said when it is read; or no file, but a name in a shard
        os.close(os.open(path, os.O_RDONLY))


@cache
def _pool(pid: int, num_threads: int) -> ThreadPoolExecutor:
    """One for each process: threads do not survive a fork."""
    return ThreadPoolExecutor(num_threads, thread_name_prefix="read")
