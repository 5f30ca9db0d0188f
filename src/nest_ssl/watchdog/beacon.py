"""The beacon: a memory-mapped file, one per node, into which every rank writes where it is.

A rank writes (step, stage, part, time) into its slot, a DataLoader worker the path it is reading;
the monitor looks. No process waits for another: a write is a few machine words into shared memory,
measured at 0.5 µs. All times are CLOCK_MONOTONIC in nanoseconds, which all processes of a node share.

`Beacon` is the file and everything that is read from it, `RankMark` and `WorkerMark` are the writers
that ranks and workers call thousands of times a second. The durations of stages are counted in
quarter-octave buckets: a count costs one increment, and a quantile is right to 25 %.

A rank with a GPU has one more page, into which the GPU itself writes two words: batch << 8 | stage, and batch << 8 |
collectives of that batch to which it has come. `GpuLog` is the host's part of that page: which batches it has launched,
and of which steps. `training.watching.GpuMarks` is the GPU's.
"""

from __future__ import annotations

import contextlib
import mmap
import os
import struct
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from nest_ssl.watchdog.rank import RankState, Stage
from nest_ssl.watchdog.system import OomKiller, birthmark, is_alive, is_still

try:
    import fcntl
except ImportError:  # Windows
    fcntl = None  # type: ignore[assignment]

# ---- layout: header, GPU pages, rank slots, histograms, worker slots ----

LOCK = "lock"
MAGIC = b"nestbcn4"
PAGE_BYTES = mmap.PAGESIZE
"""At least 4 KiB. A GPU can only write to whole pages that are locked in memory."""
HEADER_BYTES = PAGE_BYTES
RANK_BYTES = 256
WORKER_BYTES = 1024
PATH_BYTES = 960
NUM_STAGES = len(Stage)
NUM_BUCKETS = 192
"""Four to an octave: up to 2^48 ns, three days."""
HISTOGRAM_BYTES = 4 * NUM_STAGES * NUM_BUCKETS

INT32 = struct.Struct("<i")
INT = struct.Struct("<q")
UINT = struct.Struct("<Q")
HEADER = struct.Struct("<8sIIII")  # magic, local ranks, first rank, workers per rank, world size
EVIDENCE_REQUEST, STOP_STEP, STOP_SIGNAL, MONITOR_BEAT, OWNER, OUTCOME, OOM_KILLS, STOP_AGREED = range(64, 128, 8)

RECORD = struct.Struct("<qiiQ")  # step, stage, part, since
FACTS = struct.Struct("<qiiQQqQi")  # pid, state, stop signal, heartbeat, evidence given, exit status, steps, slow
FACTS_AT = 64
PID_AT, STATE_AT, STOP_AT, BEAT_AT, GIVEN_AT, STATUS_AT, STEPS_AT, SLOW_AT = (
    FACTS_AT + at for at in (0, 8, 12, 16, 24, 32, 40, 48)
)

BUILDS, STARTS = 1, 2
"""Bits of the last of a rank's facts: why it may take longer than usual."""

WORD = struct.Struct("q")  # read and written as one machine word, never by halves: "<q" goes byte by byte
CAME_TO_AT, LAUNCHED_AT, BATCH_STEPS_AT, NUM_BATCH_STEPS = WORD.size, 64, 2048, 256
"""In the GPU's page, after its first word: its second, batches launched, and the steps of the last 256 batches."""
STAGE_BITS = 8

WORKER = struct.Struct("<qiiQQQI")  # pid, number, is reading, since, files read, birthmark, length of the path
IS_READING_AT = 12

NO_STEP = -1
NO_STATUS = -(2**31)


# ---- histograms of durations ----


def bucket_of(duration_ns: int) -> int:
    """Return the bucket of a duration; bucket b holds what is below upper_edge_ns(b) and not below that of b - 1."""
    octave = duration_ns.bit_length()
    if octave <= 3:
        return max(duration_ns, 0)
    return min(4 * octave + ((duration_ns >> (octave - 3)) & 3), NUM_BUCKETS - 1)


def upper_edge_ns(bucket: int) -> int:
    if bucket < 8:
        return bucket + 1
    octave, quarter = divmod(bucket, 4)
    return (5 + quarter) << max(octave - 3, 0)


def quantile_ns(counts: Sequence[int], share: float) -> int | None:
    """Return a duration that at least `share` of the counted ones do not exceed; None if there are none."""
    total = sum(counts)
    if total == 0:
        return None
    seen = 0
    for bucket, count in enumerate(counts):
        seen += count
        if seen >= share * total:
            return upper_edge_ns(bucket)
    raise AssertionError("the counts of all buckets add up to the total")


# ---- who uses it ----


class Hold:
    """Shows, as long as it exists and is not closed, that somebody uses the beacon in `folder`.

    Process numbers do not: containers that share /dev/shm have their own. Windows has no such locks.
    """

    def __init__(self, folder: Path) -> None:
        self._descriptor: int | None = None
        if fcntl is None:
            return
        self._descriptor = os.open(folder / LOCK, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC)
        with contextlib.suppress(OSError):  # some network disks have none
            fcntl.flock(self._descriptor, fcntl.LOCK_SH)  # at most a moment: nobody keeps the other kind

    def close(self) -> None:
        if self._descriptor is not None:
            os.close(self._descriptor)
        self._descriptor = None

    __del__ = close


def is_in_use(folder: Path) -> bool:
    """Return whether a process uses the beacon in `folder`, in whatever container."""
    path = folder / LOCK
    if fcntl is None or not path.exists():
        return is_alive(Beacon(folder / "beacon").owner)
    with path.open("rb") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return True
    return False


# ---- reading ----


@dataclass(frozen=True)
class RankSlot:
    """The content of a rank's slot."""

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
    """The exit status its parent saw: a code, or minus the number of a signal."""
    steps_done: int
    builds: bool
    """It compiles or captures, which may take as long as a start."""
    starts: bool
    """It waits for the first batch of an epoch, or of a validation, or for the first one after it."""


@dataclass(frozen=True)
class GpuSlot:
    """How far a rank's GPU has come, and what it was given. Batches are counted from 1 since the process started."""

    batch: int
    stage: Stage
    """`Stage.END`: the batch is done."""
    step: int
    """The step that the batch is a part of."""
    launched: int
    """Batches that the host has handed over completely; one that it is still launching is not counted."""
    came_to: int = 0
    """Collectives of the batch's norms that it has come to; 0 as well if the GPU has not been asked since."""

    @property
    def word(self) -> int:
        return self.batch << STAGE_BITS | self.stage


@dataclass(frozen=True)
class WorkerSlot:
    """The content of a DataLoader worker's slot. Number -1: the rank itself reads, without workers.

    Slots are not cleared: the process may have ended long ago, and its pid may belong to another one now.
    """

    pid: int
    number: int
    is_reading: bool
    since_ns: int
    birthmark: int
    """What `system.birthmark` returned for the process."""
    path: str

    @property
    def is_there(self) -> bool:
        """Whether the process that wrote this has not been reaped yet, even if its rank has died."""
        return is_still(self.pid, self.birthmark)


class Beacon:
    """The mapped file. Any process of the node may open it."""

    def __init__(self, path: Path) -> None:
        self.path = path
        with path.open("r+b") as file:
            self.map = mmap.mmap(file.fileno(), 0)
        if len(self.map) < HEADER_BYTES:
            raise ValueError(f"{path}: not a beacon: {len(self.map)} bytes.")
        magic, *numbers = HEADER.unpack_from(self.map)
        self.local_ranks, self.first_rank, self.workers_per_rank, self.world_size = map(int, numbers)
        if magic != MAGIC:
            raise ValueError(f"{path}: not a beacon of this version of nest-ssl.")

    @classmethod
    def create(cls, path: Path, *, local_ranks: int, first_rank: int, world_size: int, workers_per_rank: int) -> Beacon:
        """Make a new file with empty slots."""
        of_rank = PAGE_BYTES + RANK_BYTES + HISTOGRAM_BYTES + workers_per_rank * WORKER_BYTES
        size = HEADER_BYTES + local_ranks * of_rank
        temporary = path.with_suffix(".tmp")
        try:
            with temporary.open("wb") as file:
                file.write(HEADER.pack(MAGIC, local_ranks, first_rank, workers_per_rank, world_size))
                file.flush()
                if hasattr(os, "posix_fallocate"):
                    os.posix_fallocate(file.fileno(), 0, size)  # a full /dev/shm is an error now, not a SIGBUS later
                else:
                    file.truncate(size)
        except OSError as error:
            temporary.unlink(missing_ok=True)
            raise OSError(
                f"{path}: {error.strerror}. The watchdog needs {size / 1e3:.0f} kB there. Free them, or set TMPDIR, "
                "which is used if /dev/shm is full, to a folder with room."
            ) from error
        os.replace(temporary, path)  # whoever finds the file finds all of it
        beacon = cls(path)
        INT.pack_into(beacon.map, OWNER, os.getpid())
        INT.pack_into(beacon.map, OOM_KILLS, OomKiller(whole_host=True).kills())
        beacon.stop_step = beacon.stop_agreed = NO_STEP
        beacon.outcome = None
        for local_rank in range(local_ranks):
            beacon.set_exit_status(local_rank, NO_STATUS)
        return beacon

    @property
    def folder(self) -> Path:
        """The folder of the beacon and of the files that ranks write next to it."""
        return self.path.parent

    # ---- offsets ----

    def gpu_at(self, local_rank: int) -> int:
        return HEADER_BYTES + local_rank * PAGE_BYTES

    def rank_at(self, local_rank: int) -> int:
        return HEADER_BYTES + self.local_ranks * PAGE_BYTES + local_rank * RANK_BYTES

    def histogram_at(self, local_rank: int) -> int:
        return self.rank_at(self.local_ranks) + local_rank * HISTOGRAM_BYTES

    def worker_at(self, local_rank: int, number: int) -> int:
        first = self.histogram_at(self.local_ranks)
        return first + (local_rank * self.workers_per_rank + number) * WORKER_BYTES

    # ---- what concerns all ranks ----

    @property
    def stop_step(self) -> int:
        """The step after which every rank is to save and leave, once that is agreed; NO_STEP: none."""
        return int(INT.unpack_from(self.map, STOP_STEP)[0])

    @stop_step.setter
    def stop_step(self, step: int) -> None:
        INT.pack_into(self.map, STOP_STEP, step)

    @property
    def stop_agreed(self) -> int:
        """The stop step that every rank of the job knows of; a rank that reaches another one waits for a decision."""
        return int(INT.unpack_from(self.map, STOP_AGREED)[0])

    @stop_agreed.setter
    def stop_agreed(self, step: int) -> None:
        INT.pack_into(self.map, STOP_AGREED, step)

    @property
    def stop_signal(self) -> int:
        """The signal that asked the launcher to stop; 0: none."""
        return int(INT.unpack_from(self.map, STOP_SIGNAL)[0])

    @stop_signal.setter
    def stop_signal(self, number: int) -> None:
        INT.pack_into(self.map, STOP_SIGNAL, number)

    @property
    def outcome(self) -> int | None:
        """The exit code with which the monitor ended the job; None: it has not."""
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
    def oom_kills_before(self) -> int:
        """The kernel's count of processes on this host that it had ended for lack of memory when the file was made."""
        return int(INT.unpack_from(self.map, OOM_KILLS)[0])

    @property
    def monitor_beat_ns(self) -> int:
        return int(UINT.unpack_from(self.map, MONITOR_BEAT)[0])

    def beat_monitor(self) -> None:
        UINT.pack_into(self.map, MONITOR_BEAT, time.monotonic_ns())

    @property
    def evidence_request(self) -> int:
        return int(UINT.unpack_from(self.map, EVIDENCE_REQUEST)[0])

    def request_evidence(self) -> int:
        """Ask every rank to write what only it knows into the beacon's folder; return the number of the request."""
        number = self.evidence_request + 1
        UINT.pack_into(self.map, EVIDENCE_REQUEST, number)
        return number

    # ---- one rank, as its launcher and the monitor see it ----

    def set_pid(self, local_rank: int, pid: int) -> None:
        """Note a rank that was just started and has not written anything yet."""
        RECORD.pack_into(self.map, self.rank_at(local_rank), 0, Stage.INIT, 0, time.monotonic_ns())
        INT.pack_into(self.map, self.rank_at(local_rank) + PID_AT, pid)

    def set_exit_status(self, local_rank: int, status: int) -> None:
        INT.pack_into(self.map, self.rank_at(local_rank) + STATUS_AT, status)

    def rank(self, local_rank: int) -> RankSlot:
        at = self.rank_at(local_rank)
        record = RECORD.unpack_from(self.map, at)
        while record != (again := RECORD.unpack_from(self.map, at)):  # written between two looks
            record = again
        step, stage, part, since_ns = record
        pid, state, stop, heartbeat_ns, given, status, steps, slow = FACTS.unpack_from(self.map, at + FACTS_AT)
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
            builds=bool(slow & BUILDS),
            starts=bool(slow & STARTS),
        )

    def gpu(self, local_rank: int) -> GpuSlot | None:
        """Return where the rank's GPU is; None: it does not report, or has not begun its first batch."""
        at = self.gpu_at(local_rank)
        launched = int(WORD.unpack_from(self.map, at + LAUNCHED_AT)[0])
        word = int(WORD.unpack_from(self.map, at)[0])
        batch, stage = word >> STAGE_BITS, word & ((1 << STAGE_BITS) - 1)
        if batch == 0:
            return None
        step_at = at + BATCH_STEPS_AT + WORD.size * (batch % NUM_BATCH_STEPS)
        came_to = int(WORD.unpack_from(self.map, at + CAME_TO_AT)[0]) - (batch << STAGE_BITS)
        came_to = came_to if 0 <= came_to < 1 << STAGE_BITS else 0
        return GpuSlot(batch, Stage(stage), int(WORD.unpack_from(self.map, step_at)[0]), launched, came_to)

    def workers(self, local_rank: int) -> list[WorkerSlot]:
        """Return the workers that have begun to read, in the order of their slots."""
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
        """Return how often a step spent how long in `stage`, by bucket."""
        at = self.histogram_at(local_rank) + 4 * stage * NUM_BUCKETS
        return list(struct.unpack_from(f"<{NUM_BUCKETS}I", self.map, at))


# ---- writing ----


class RankMark:
    """The writer of one rank's slot. Only that rank's main thread calls `enter`."""

    def __init__(self, beacon: Beacon, local_rank: int) -> None:
        self.beacon, self.local_rank = beacon, local_rank
        self.step = 0
        self._map, self._at = beacon.map, beacon.rank_at(local_rank)
        histogram_at = beacon.histogram_at(local_rank)
        self._counts = memoryview(beacon.map)[histogram_at : histogram_at + HISTOGRAM_BYTES].cast("I")
        self._spent_ns = [0] * NUM_STAGES
        self._stage = int(Stage.INIT)
        self._since_ns = time.monotonic_ns()
        self._steps_done = 0
        self._slow = 0

    def take(self) -> None:
        """Make this process the rank from now on."""
        INT.pack_into(self._map, self._at + PID_AT, os.getpid())
        INT.pack_into(self._map, self._at + STATUS_AT, NO_STATUS)
        self.state = RankState.RUNNING
        self.beat()
        self.enter(Stage.INIT, 1)

    def enter(self, stage: int, part: int = 0) -> None:
        """Note that the rank is in `stage` from now on."""
        now_ns = time.monotonic_ns()
        self._spent_ns[self._stage] += now_ns - self._since_ns
        self._stage, self._since_ns = stage, now_ns
        RECORD.pack_into(self._map, self._at, self.step, stage, part, now_ns)

    def finish_step(self, step: int, *, counts: bool = True) -> None:
        """End a step or a validation batch: count how long its stages took, unless `counts` is false (a first one)."""
        for stage, spent_ns in enumerate(self._spent_ns):
            if spent_ns and counts:
                self._counts[stage * NUM_BUCKETS + bucket_of(spent_ns)] += 1
            self._spent_ns[stage] = 0
        self.step = step
        if self._stage != Stage.VALIDATION:
            self._steps_done += 1
            UINT.pack_into(self._map, self._at + STEPS_AT, self._steps_done)

    @property
    def state(self) -> RankState:
        return RankState(INT32.unpack_from(self._map, self._at + STATE_AT)[0])

    @state.setter
    def state(self, state: RankState) -> None:
        INT32.pack_into(self._map, self._at + STATE_AT, state)

    @property
    def builds(self) -> bool:
        return bool(self._slow & BUILDS)

    @builds.setter
    def builds(self, builds: bool) -> None:
        self._set_slow(BUILDS, builds)

    @property
    def starts(self) -> bool:
        return bool(self._slow & STARTS)

    @starts.setter
    def starts(self, starts: bool) -> None:
        self._set_slow(STARTS, starts)

    def _set_slow(self, bit: int, is_set: bool) -> None:
        self._slow = self._slow | bit if is_set else self._slow & ~bit
        INT32.pack_into(self._map, self._at + SLOW_AT, self._slow)

    def ask_to_stop(self, signal_number: int) -> None:
        """Note the signal that asked this rank to stop; safe in a signal handler."""
        INT32.pack_into(self._map, self._at + STOP_AT, signal_number)

    def beat(self) -> None:
        UINT.pack_into(self._map, self._at + BEAT_AT, time.monotonic_ns())

    def gave_evidence(self, number: int) -> None:
        UINT.pack_into(self._map, self._at + GIVEN_AT, number)


class GpuLog:
    """The host's part of a rank's GPU page: which batches it gives to the GPU."""

    def __init__(self, beacon: Beacon, local_rank: int) -> None:
        self._map, self._at = beacon.map, beacon.gpu_at(local_rank)
        self.batch = 0
        """The batch that is being launched, counted from 1."""

    def begins(self, step: int) -> int:
        """A batch of `step` is about to be launched; return its number."""
        self.batch += 1
        WORD.pack_into(self._map, self._at + BATCH_STEPS_AT + WORD.size * (self.batch % NUM_BATCH_STEPS), step)
        return self.batch

    def is_launched(self) -> None:
        """The GPU has all of the batch."""
        WORD.pack_into(self._map, self._at + LAUNCHED_AT, self.batch)

    def forget(self) -> None:
        """The GPU does not report any more."""
        WORD.pack_into(self._map, self._at, 0)


class WorkerMark:
    """The writer of the slot of one process that reads files for a rank."""

    def __init__(self, beacon: Beacon, local_rank: int, slot: int, number: int) -> None:
        self._map, self._at = beacon.map, beacon.worker_at(local_rank, slot)
        self._pid, self._number, self._files = os.getpid(), number, 0
        self._birthmark = birthmark(self._pid)

    def reads(self, path: str) -> None:
        raw = path.encode(errors="replace")
        raw = raw if len(raw) <= PATH_BYTES else raw[-PATH_BYTES:]  # the end of a path says more than its start
        self._files += 1
        start = self._at + WORKER.size
        self._map[start : start + len(raw)] = raw
        facts = (self._pid, self._number, 1, time.monotonic_ns(), self._files, self._birthmark, len(raw))
        WORKER.pack_into(self._map, self._at, *facts)

    def rests(self) -> None:
        """Note that the batch is made and nothing is being read."""
        INT32.pack_into(self._map, self._at + IS_READING_AT, 0)
