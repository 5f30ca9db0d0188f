"""The beacon: a memory-mapped file of a node in which every rank keeps where it is.

A rank writes (step, stage, part, time) into its slot, a loader process the path it is reading; the monitor looks.
Nobody waits for anybody: a write is a few machine words into shared memory, measured at 0.5 µs. All times are
CLOCK_MONOTONIC in nanoseconds, which the processes of a node share.
"""

from __future__ import annotations

import mmap
import os
import struct
import time
from dataclasses import dataclass
from enum import IntEnum
from pathlib import Path

from nest_ssl.watchdog.histogram import NUM_BUCKETS
from nest_ssl.watchdog.stages import Stage
from nest_ssl.watchdog.system import is_still

MAGIC = b"nestbcn2"
HEADER_BYTES = 4096
RANK_BYTES = 256
WORKER_BYTES = 1024
PATH_BYTES = 960
NUM_STAGES = len(Stage)
HISTOGRAM_BYTES = 4 * NUM_STAGES * NUM_BUCKETS

HEADER = struct.Struct("<8sIIII")  # magic, local ranks, first rank, workers per rank, world size
EVIDENCE_REQUEST, STOP_STEP, STOP_SIGNAL, MONITOR_BEAT, OWNER, OUTCOME = 64, 72, 80, 88, 96, 104
RECORD = struct.Struct("<qiiQ")  # step, stage, part, since
FACTS = struct.Struct("<qiiQQqQ")  # pid, state, stop signal, heartbeat, evidence given, exit status, steps done
FACTS_AT = 64
WORKER = struct.Struct("<qiiQQQI")  # pid, number, is reading, since, files read, birthmark, length of the path

NO_STEP = -1
NO_STATUS = -(2**31)
INT = struct.Struct("<q")
UINT = struct.Struct("<Q")


class RankState(IntEnum):
    """What a rank says of itself."""

    ABSENT = 0
    RUNNING = 1
    FAILED = 2
    """An exception ended it; the folder of the beacon has its traceback."""
    FINISHED = 3
    STOPPED = 4
    """It left at the agreed step."""


@dataclass(frozen=True)
class RankSlot:
    """What stands in a rank's slot."""

    rank: int
    step: int
    stage: Stage
    part: int
    since_ns: int
    pid: int
    state: RankState
    stop_signal: int
    heartbeat_ns: int
    evidence_given: int
    exit_status: int | None
    """Of the process, as its parent saw it: a code, or minus the number of a signal."""
    steps_done: int


@dataclass(frozen=True)
class WorkerSlot:
    """What stands in a loader process's slot. Number -1: the rank itself reads, without loader processes.

    Slots are not cleared: the process may have ended long ago, and its number may be another's by now.
    """

    pid: int
    number: int
    is_reading: bool
    since_ns: int
    birthmark: int
    """Of the process, as `system.birthmark` has it."""
    path: str

    @property
    def is_there(self) -> bool:
        """Whether the process that wrote this has not been reaped yet, even if its rank has died."""
        return is_still(self.pid, self.birthmark)


class Beacon:
    """The file, mapped. Any process of the node may open it."""

    def __init__(self, path: Path) -> None:
        self.path = path
        with path.open("r+b") as file:
            self.map = mmap.mmap(file.fileno(), 0)
        magic, *numbers = HEADER.unpack_from(self.map)
        self.local_ranks, self.first_rank, self.workers_per_rank, self.world_size = map(int, numbers)
        if magic != MAGIC:
            raise ValueError(f"{path}: not a beacon of this version of nest-ssl.")

    @classmethod
    def create(cls, path: Path, *, local_ranks: int, first_rank: int, world_size: int, workers_per_rank: int) -> Beacon:
        """A new file; every slot is empty."""
        size = HEADER_BYTES + local_ranks * (RANK_BYTES + HISTOGRAM_BYTES + workers_per_rank * WORKER_BYTES)
        temporary = path.with_suffix(".tmp")
        with temporary.open("wb") as file:
            file.write(HEADER.pack(MAGIC, local_ranks, first_rank, workers_per_rank, world_size))
            file.flush()
            if hasattr(os, "posix_fallocate"):
                os.posix_fallocate(file.fileno(), 0, size)  # a full /dev/shm is an error now, not a SIGBUS later
            else:
                file.truncate(size)
        os.replace(temporary, path)  # whoever finds the file finds it whole
        beacon = cls(path)
        INT.pack_into(beacon.map, OWNER, os.getpid())
        beacon.stop_step = NO_STEP
        beacon.outcome = None
        for local_rank in range(local_ranks):
            beacon.set_exit_status(local_rank, NO_STATUS)
        return beacon

    # ---- places ----

    def rank_at(self, local_rank: int) -> int:
        return HEADER_BYTES + local_rank * RANK_BYTES

    def histogram_at(self, local_rank: int) -> int:
        return HEADER_BYTES + self.local_ranks * RANK_BYTES + local_rank * HISTOGRAM_BYTES

    def worker_at(self, local_rank: int, number: int) -> int:
        first = HEADER_BYTES + self.local_ranks * (RANK_BYTES + HISTOGRAM_BYTES)
        return first + (local_rank * self.workers_per_rank + number) * WORKER_BYTES

    # ---- what is said to all ranks ----

    @property
    def stop_step(self) -> int:
        """Every rank saves and leaves after this step; NO_STEP: none is agreed."""
        return int(INT.unpack_from(self.map, STOP_STEP)[0])

    @stop_step.setter
    def stop_step(self, step: int) -> None:
        INT.pack_into(self.map, STOP_STEP, step)

    @property
    def stop_signal(self) -> int:
        """The signal with which the launcher was asked to stop; 0: none."""
        return int(INT.unpack_from(self.map, STOP_SIGNAL)[0])

    @stop_signal.setter
    def stop_signal(self, number: int) -> None:
        INT.pack_into(self.map, STOP_SIGNAL, number)

    @property
    def outcome(self) -> int | None:
        """The exit code with which the monitor has ended the job; None: it has not."""
        code = int(INT.unpack_from(self.map, OUTCOME)[0])
        return None if code == NO_STATUS else code

    @outcome.setter
    def outcome(self, code: int | None) -> None:
        INT.pack_into(self.map, OUTCOME, NO_STATUS if code is None else code)

    @property
    def owner(self) -> int:
        """The process that made the file."""
        return int(INT.unpack_from(self.map, OWNER)[0])

    @property
    def monitor_beat_ns(self) -> int:
        return int(UINT.unpack_from(self.map, MONITOR_BEAT)[0])

    def beat_monitor(self) -> None:
        UINT.pack_into(self.map, MONITOR_BEAT, time.monotonic_ns())

    @property
    def folder(self) -> Path:
        """Of the beacon and of what ranks write beside it."""
        return self.path.parent

    @property
    def evidence_request(self) -> int:
        return int(UINT.unpack_from(self.map, EVIDENCE_REQUEST)[0])

    def request_evidence(self) -> int:
        """Ask every rank to write what it alone knows into the beacon's folder; the number of the request."""
        number = self.evidence_request + 1
        UINT.pack_into(self.map, EVIDENCE_REQUEST, number)
        return number

    def set_pid(self, local_rank: int, pid: int) -> None:
        """Of a rank that was started now and has not said anything yet."""
        RECORD.pack_into(self.map, self.rank_at(local_rank), 0, Stage.INIT, 0, time.monotonic_ns())
        INT.pack_into(self.map, self.rank_at(local_rank) + FACTS_AT, pid)

    def set_exit_status(self, local_rank: int, status: int) -> None:
        INT.pack_into(self.map, self.rank_at(local_rank) + FACTS_AT + 32, status)

    # ---- what ranks say ----

    def rank(self, local_rank: int) -> RankSlot:
        at = self.rank_at(local_rank)
        record = RECORD.unpack_from(self.map, at)
        while record != (again := RECORD.unpack_from(self.map, at)):  # written between two looks
            record = again
        step, stage, part, since_ns = record
        pid, state, stop, heartbeat_ns, given, status, steps = FACTS.unpack_from(self.map, at + FACTS_AT)
        return RankSlot(
            rank=self.first_rank + local_rank,
            step=step,
            stage=Stage(stage),
            part=part,
            since_ns=since_ns,
            pid=pid,
            state=RankState(state),
            stop_signal=stop,
            heartbeat_ns=heartbeat_ns,
            evidence_given=given,
            exit_status=None if status == NO_STATUS else status,
            steps_done=steps,
        )

    def workers(self, local_rank: int) -> list[WorkerSlot]:
        """Loader processes that have begun to read, in the order of their slots."""
        found = []
        for number in range(self.workers_per_rank):
            at = self.worker_at(local_rank, number)
            pid, own_number, is_reading, since_ns, _, born, length = WORKER.unpack_from(self.map, at)
            if pid:
                raw = self.map[at + WORKER.size : at + WORKER.size + min(length, PATH_BYTES)]
                path = raw.decode(errors="replace")
                found.append(WorkerSlot(pid, own_number, bool(is_reading), since_ns, born, path))
        return found

    def durations(self, local_rank: int, stage: Stage) -> list[int]:
        """Counts of the times a step spent in `stage`, by bucket."""
        at = self.histogram_at(local_rank) + 4 * stage * NUM_BUCKETS
        return list(struct.unpack_from(f"<{NUM_BUCKETS}I", self.map, at))
