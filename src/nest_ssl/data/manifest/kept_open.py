"""Files that are read again and again, kept open."""

from __future__ import annotations

import os
import threading
from collections import OrderedDict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Generic, Protocol, TypeVar

MAX_OPEN = 64


class Closable(Protocol):
    def close(self) -> None: ...


F = TypeVar("F", bound=Closable)


class KeptOpen(Generic[F]):
    """The files used last: of this process alone, and for one thread at a time, since a file has one position."""

    def __init__(self, open_file: Callable[[str], F]) -> None:
        self._open_file = open_file
        self._forget()

    @contextmanager
    def file(self, path: str) -> Iterator[F]:
        if self._pid != os.getpid():  # after a fork: the parent's handles share their position with it
            self._forget()
        with self._lock:
            if path not in self._files:
                if len(self._files) >= MAX_OPEN:
                    self._files.popitem(last=False)[1].close()
                self._files[path] = self._open_file(path)
            self._files.move_to_end(path)
            yield self._files[path]

    def _forget(self) -> None:
        self._files: OrderedDict[str, F] = OrderedDict()
        self._pid, self._lock = os.getpid(), threading.Lock()

    def __reduce__(self) -> tuple[type[KeptOpen[F]], tuple[Callable[[str], F]]]:
        return KeptOpen, (self._open_file,)
