"""What loader processes report: the path they are about to read, and that a batch is made."""

from __future__ import annotations

import os
import signal
from pathlib import Path
from typing import Any, TypeVar

from torch.utils.data import get_worker_info

from nest_ssl.watchdog.agent import leave_to_the_rank, register_stack_dump
from nest_ssl.watchdog.beacon import Beacon
from nest_ssl.watchdog.mark import WorkerMark
from nest_ssl.watchdog.system import allow_inspection, die_with_parent, stop_signals

T = TypeVar("T")


class ReadReport:
    """Of one loader of one rank: `on_read` is called before each file, `batch_is_made` after each batch.

    It travels to loader processes by fork or by pickle, and opens the beacon anew in each. Loader process n has slot
    `first_slot` + 1 + n; the rank itself, when it reads without loader processes, has `first_slot`.
    """

    def __init__(self, beacon_path: Path, local_rank: int, first_slot: int) -> None:
        self.beacon_path, self.local_rank, self.first_slot = beacon_path, local_rank, first_slot
        self._rank_pid = os.getpid()
        self._pid = 0
        self._mark: WorkerMark | None = None
        self._stack_file: Any = None

    def on_read(self, path: str) -> None:
        self._own_mark().reads(path)

    def batch_is_made(self, batch: T) -> T:
        """To be used as a collate function: the last thing that a loader process does to a batch."""
        self._own_mark().rests()
        return batch

    def _own_mark(self) -> WorkerMark:
        if self._mark is None or self._pid != os.getpid():
            info = get_worker_info()
            number = -1 if info is None else info.id
            self._pid = os.getpid()
            beacon = Beacon(self.beacon_path)
            slot = min(self.first_slot + 1 + number, beacon.workers_per_rank - 1)
            self._mark = WorkerMark(beacon, self.local_rank, slot, number)
            if self._pid != self._rank_pid:
                self._become_loader(beacon)
        return self._mark

    def _become_loader(self, beacon: Beacon) -> None:
        # torch's loader processes look for their parent every 5 s; the kernel tells them at once.
        die_with_parent(os.getppid())
        allow_inspection()
        self._stack_file = register_stack_dump(beacon.folder)
        for number in stop_signals():  # torch has a handler of its own for SIGTERM
            signal.signal(number, lambda number, _: leave_to_the_rank(beacon, self.local_rank, number))

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_mark": None, "_pid": 0, "_stack_file": None}
