"""The writing side of the beacon: what a rank and its loader processes call, thousands of times a second."""

from __future__ import annotations

import os
import struct
import time

from nest_ssl.watchdog.beacon import (
    FACTS_AT,
    INT,
    NO_STATUS,
    NUM_STAGES,
    PATH_BYTES,
    RECORD,
    UINT,
    WORKER,
    Beacon,
    RankState,
)
from nest_ssl.watchdog.histogram import NUM_BUCKETS, bucket_of
from nest_ssl.watchdog.stages import Stage
from nest_ssl.watchdog.system import birthmark

_STATE_AT, _STOP_AT, _BEAT_AT, _GIVEN_AT, _STATUS_AT, _STEPS_AT = (FACTS_AT + at for at in (8, 12, 16, 24, 32, 40))
_INT32 = struct.Struct("<i")


class RankMark:
    """One rank's slot. Only that rank's main thread calls `enter`."""

    def __init__(self, beacon: Beacon, local_rank: int) -> None:
        self.beacon, self.local_rank = beacon, local_rank
        self.step = 0
        self._map, self._at = beacon.map, beacon.rank_at(local_rank)
        self._counts = memoryview(beacon.map)[
            beacon.histogram_at(local_rank) : beacon.histogram_at(local_rank) + 4 * NUM_STAGES * NUM_BUCKETS
        ].cast("I")
        self._spent_ns = [0] * NUM_STAGES
        self._stage = int(Stage.INIT)
        self._since_ns = time.monotonic_ns()
        self._steps_done = 0

    def take(self) -> None:
        """This process is the rank from now on."""
        INT.pack_into(self._map, self._at + FACTS_AT, os.getpid())
        INT.pack_into(self._map, self._at + _STATUS_AT, NO_STATUS)
        self.state = RankState.RUNNING
        self.beat()
        self.enter(Stage.INIT, 1)

    def enter(self, stage: int, part: int = 0) -> None:
        """The rank is in `stage` from now on."""
        now_ns = time.monotonic_ns()
        self._spent_ns[self._stage] += now_ns - self._since_ns
        self._stage, self._since_ns = stage, now_ns
        RECORD.pack_into(self._map, self._at, self.step, stage, part, now_ns)

    def finish_step(self, step: int, *, counts: bool = True) -> None:
        """A step, or a batch of validation, is over: count how long its stages took, unless it was a first one."""
        for stage, spent_ns in enumerate(self._spent_ns):
            if spent_ns and counts:
                self._counts[stage * NUM_BUCKETS + bucket_of(spent_ns)] += 1
            self._spent_ns[stage] = 0
        self.step = step
        if self._stage != Stage.VALIDATION:
            self._steps_done += 1
            UINT.pack_into(self._map, self._at + _STEPS_AT, self._steps_done)

    @property
    def state(self) -> RankState:
        return RankState(_INT32.unpack_from(self._map, self._at + _STATE_AT)[0])

    @state.setter
    def state(self, state: RankState) -> None:
        _INT32.pack_into(self._map, self._at + _STATE_AT, state)

    def ask_to_stop(self, signal_number: int) -> None:
        """Safe in a signal handler."""
        _INT32.pack_into(self._map, self._at + _STOP_AT, signal_number)

    def beat(self) -> None:
        UINT.pack_into(self._map, self._at + _BEAT_AT, time.monotonic_ns())

    def gave_evidence(self, number: int) -> None:
        UINT.pack_into(self._map, self._at + _GIVEN_AT, number)


class WorkerMark:
    """The slot of one process that reads files for a rank."""

    def __init__(self, beacon: Beacon, local_rank: int, slot: int, number: int) -> None:
        self._map, self._at = beacon.map, beacon.worker_at(local_rank, slot)
        self._pid, self._number, self._files = os.getpid(), number, 0
        self._birthmark = birthmark(self._pid)

    def reads(self, path: str) -> None:
        raw = path.encode(errors="replace")
        raw = raw if len(raw) <= PATH_BYTES else raw[-PATH_BYTES:]  # the end of a path tells more
        self._files += 1
        start = self._at + WORKER.size
        self._map[start : start + len(raw)] = raw
        facts = (self._pid, self._number, 1, time.monotonic_ns(), self._files, self._birthmark, len(raw))
        WORKER.pack_into(self._map, self._at, *facts)

    def rests(self) -> None:
        """The batch is made."""
        _INT32.pack_into(self._map, self._at + 12, 0)
