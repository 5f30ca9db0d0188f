"""Measure audio files in parallel; results come in order."""

from __future__ import annotations

import multiprocessing
import os
import signal
import sys
from collections import deque
from collections.abc import Iterable, Iterator
from concurrent.futures import Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass
from functools import partial
from itertools import islice
from typing import Any

from nest_ssl.audio import AudioError, audio_info, verify_audio
from nest_ssl.audio.read import NOT_UTF8
from nest_ssl.data.manifest.listing import Entry
from nest_ssl.watchdog.system import die_with_parent

FILES_PER_TASK = 32
TASKS_AHEAD = 4
"""Tasks in flight per worker: enough to keep it busy, few enough that memory does not grow with the corpus."""
CRASHED = "the decoder crashed on it"


@dataclass(frozen=True)
class Measured:
    """One entry: its line for the manifest, or the reason why there is none."""

    path: str
    line: dict[str, Any] | None
    reason: str | None = None


def measure(entry: Entry, *, decode: bool) -> Measured:
    """Measure one file, by decoding all of it or by reading its header."""
    if entry.error is not None:
        return Measured(entry.path, None, entry.error)
    if "\0" in entry.path:
        return Measured(entry.path, None, "its name contains a zero byte")
    try:
        entry.path.encode()  # it is written into the manifest, which is UTF-8
        duration_s = _duration(entry, decode)
    except UnicodeEncodeError:
        return Measured(entry.path, None, NOT_UTF8)
    except AudioError as error:
        return Measured(entry.path, None, error.reason)
    except OSError as error:
        return Measured(entry.path, None, error.strerror or str(error))
    rest = {key: value for key, value in entry.item.items() if key not in ("duration", "offset")}
    offset = {"offset": entry.item["offset"]} if entry.item.get("offset") else {}
    return Measured(entry.path, {"audio_filepath": entry.path, "duration": duration_s, **offset, **rest})


def _duration(entry: Entry, decode: bool) -> float:
    """Return the seconds of audio, at most those that the input manifest states."""
    offset_s, stated_s = entry.item.get("offset") or 0.0, entry.item.get("duration") or None
    if decode:
        measured_s = verify_audio(entry.path, offset_s=offset_s, duration_s=stated_s).duration_s
    else:
        measured_s = audio_info(entry.path).duration_s - offset_s
        if measured_s <= 0:
            raise AudioError(entry.path, f"no samples after the offset of {offset_s} s" if offset_s else "no samples")
    measured_s = round(measured_s, 6)
    return measured_s if stated_s is None else min(stated_s, measured_s)


def measure_all(entries: Iterable[Entry], *, decode: bool, num_workers: int) -> Iterator[Measured]:
    """Yield every entry's result, in order, from `num_workers` processes; 0: from this one."""
    if num_workers == 0:
        yield from map(partial(measure, decode=decode), entries)
        return
    waiting = iter(entries)
    tasks: deque[tuple[list[Entry], Future[list[Measured]]]] = deque()
    pool = Workers(num_workers)
    try:
        while True:
            while len(tasks) < TASKS_AHEAD * num_workers and (files := list(islice(waiting, FILES_PER_TASK))):
                tasks.append((files, _submit(pool, files, decode)))
            if not tasks:
                return
            files, future = tasks.popleft()
            try:
                results = future.result()
            except BrokenProcessPool:  # a file in flight killed its worker: measure each of them alone
                lost = [*files, *(entry for others, _ in tasks for entry in others)]
                tasks.clear()
                pool.shutdown(wait=False)
                yield from _measure_alone(lost, decode)
                pool = Workers(num_workers)
            else:
                yield from results
    finally:
        pool.shutdown(wait=False, cancel_futures=True)


class Workers(ProcessPoolExecutor):
    """Processes that Ctrl-C ends without a traceback; it waits while they import modules."""

    def __init__(self, num_workers: int) -> None:
        # Not fork: a progress bar draws from a thread, and a fork could copy its locks while they are held.
        context = multiprocessing.get_context("spawn")
        super().__init__(num_workers, mp_context=context, initializer=_start_worker, initargs=(os.getpid(),))

    def submit(self, *task: Any, **options: Any) -> Future[Any]:
        if not hasattr(signal, "pthread_sigmask"):
            return super().submit(*task, **options)
        before = signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGINT])  # a process started here inherits this
        try:
            return super().submit(*task, **options)
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, before)


def _start_worker(parent: int) -> None:
    """End with the parent, even if it is killed, and at Ctrl-C."""
    die_with_parent(parent)
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN or not hasattr(signal, "pthread_sigmask"):
        return
    signal.signal(signal.SIGINT, signal.SIG_DFL)  # the pool prints a traceback if this function raises
    signal.pthread_sigmask(signal.SIG_UNBLOCK, [signal.SIGINT])
    signal.signal(signal.SIGINT, lambda number, frame: sys.exit(128 + number))


def _submit(pool: Workers, files: list[Entry], decode: bool) -> Future[list[Measured]]:
    """Submit a task; a pool that is already broken reports it through the future, like one that breaks later."""
    try:
        return pool.submit(_measure_files, files, decode)
    except BrokenProcessPool as error:
        future: Future[list[Measured]] = Future()
        future.set_exception(error)
        return future


def _measure_files(files: list[Entry], decode: bool) -> list[Measured]:
    return [measure(entry, decode=decode) for entry in files]


def _measure_alone(entries: list[Entry], decode: bool) -> Iterator[Measured]:
    """Measure one after the other in one worker, which is replaced when a file kills it."""
    pool = Workers(1)
    for entry in entries:
        try:
            yield from _submit(pool, [entry], decode).result()
        except BrokenProcessPool:
            yield Measured(entry.path, None, CRASHED)
            pool = Workers(1)
    pool.shutdown()
