"""One row per rank: what the beacon and the operating system know about it at one look, and its time limits.

Rows hold ages, not times, so that monitors on several nodes can exchange them.
"""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from nest_ssl.watchdog.beacon import Beacon, GpuSlot, RankSlot, WorkerSlot, quantile_ns
from nest_ssl.watchdog.rank import WAITING_PARTS, RankState, Stage, part_label
from nest_ssl.watchdog.system import process_state

GONE = ("", "Z", "X")
CONTACT_LOST_S = 5.0
"""Contact with a node that has been silent for longer than this is lost. That says nothing about its ranks."""
TIMES_USUAL = 5.0
PATIENCE = 10.0
"""Checkpoints, and validation batches that nobody waits for, may take this many floors."""
WINDOW_STEPS = 8
"""Usual durations are medians over this many steps; two windows in a row name a slow rank, within 20 steps."""
WAITS = (Stage.BACKWARD, Stage.EXCHANGE)
COMPARED = [stage for stage in Stage if Stage.DATA <= stage <= Stage.OPTIMIZER and stage not in WAITS]
"""Stages whose durations are compared between ranks; not those where the fast ranks wait for the slow one."""

ON_GPU = [stage for stage in Stage if Stage.TRANSFER <= stage <= Stage.OPTIMIZER]


@dataclass(frozen=True)
class GpuRow:
    """A rank's GPU at one look, by its own marks."""

    batch: int
    """Counted from 1 since the ranks were started, so that ranks can be compared."""
    stage: Stage
    """`Stage.END`: the batch is done."""
    step: int
    launched: int
    """Batches that the host has handed over completely."""
    is_busy: bool
    """It has not done all that the host gave it."""
    limit_s: float
    in_stage_s: float = 0.0
    """How long the monitor has seen it there; doctor, which looks once, does not know."""
    came_to: int = 0
    """Collectives of the batch's norms that it has come to."""

    @property
    def position(self) -> tuple[int, Stage, int]:
        return self.batch, self.stage, self.came_to

    @property
    def place(self) -> str:
        """Where it is: 'backward of step 12'."""
        if self.stage is Stage.END:
            return f"front of the batch after step {self.step}"
        return f"{self.stage.label} of step {self.step}"

    def __str__(self) -> str:
        """Return where it is, or that it has nothing to do."""
        if self.is_busy:
            return f"in {self.place}"
        return f"done with {'' if self.stage is Stage.END else 'all it was given of '}step {self.step}"

    @classmethod
    def of(cls, gpu: GpuSlot, host: RankSlot, limit_s: float) -> GpuRow:
        is_launching = gpu.batch == gpu.launched + 1  # a step that is not captured is launched bit by bit
        if is_launching:
            # It stays in the last stage that it was given, done or not: only if the host is elsewhere is there more.
            is_busy = gpu.stage is not Stage.END and gpu.stage is not host.stage
        else:
            is_busy = gpu.batch < gpu.launched or gpu.stage is not Stage.END
        return cls(gpu.batch, gpu.stage, gpu.step, gpu.launched, is_busy, limit_s, came_to=gpu.came_to)


@dataclass(frozen=True)
class WorkerRow:
    """A process that reads files for a rank; number -1 is the rank itself."""

    pid: int
    number: int
    process: str
    is_reading: bool
    since_s: float
    path: str
    stopped_s: float = 0.0
    """For how long the monitor has seen the process stopped."""


def is_data(stage: Stage, part: int) -> bool:
    """Return whether a rank waits for a batch there, of training or of validation."""
    return stage is Stage.DATA or (stage is Stage.VALIDATION and part_label(stage, part) == Stage.DATA.label)


@dataclass(frozen=True)
class RankRow:
    """A rank at one look."""

    rank: int
    node: int
    pid: int
    state: RankState
    process: str
    """A letter of `system.PROCESS_STATES`."""
    stage: Stage
    part: int
    step: int
    in_stage_s: float
    heartbeat_s: float
    """Time since the rank's own thread last ran; it cannot run while something holds the GIL."""
    steps_done: int
    exit_status: int | None
    stop_signal: int
    limit_s: float
    """After this long in this stage the rank counts as stalled, if others wait for it. Where it waits for data, the
    time counts from when the last file was begun: many slow files are progress."""
    patience_s: float
    """After this long in this stage it counts as stalled even if nobody waits for it."""
    workers: list[WorkerRow] = field(default_factory=list)
    stopped_s: float = 0.0
    silent_s: float = 0.0
    """How long its node has not reported; the row is that old."""
    usual_ms: dict[str, float] = field(default_factory=dict)
    """The median time that recent steps spent in each stage."""
    gpu: GpuRow | None = None
    """None: its GPU does not report, or there is none."""
    oom_killer: str = ""
    """What the kernel's OOM killer did on its node; looked up only when a process is gone."""

    @property
    def is_lost(self) -> bool:
        """Whether contact with its node is lost: where it is now is unknown."""
        return self.silent_s > CONTACT_LOST_S

    @property
    def is_gone(self) -> bool:
        return self.pid > 0 and self.process in GONE

    @property
    def is_active(self) -> bool:
        return self.state in (RankState.ABSENT, RankState.RUNNING)

    @property
    def is_stopped(self) -> bool:
        return self.process in ("T", "t")

    @property
    def is_joining(self) -> bool:
        """Whether it waits for the other ranks before the first step."""
        return self.stage is Stage.INIT and self.part in WAITING_PARTS

    @property
    def waits_for_data(self) -> bool:
        return is_data(self.stage, self.part)

    @property
    def place(self) -> str:
        """The stage and its part: 'encoder layer 3'."""
        return f"{self.stage.label} {part_label(self.stage, self.part)}".strip()

    def to_json(self) -> dict[str, Any]:
        out = dataclasses.asdict(self)
        if self.gpu is not None:
            out["gpu"] |= {"stage": self.gpu.stage.label, "place": str(self.gpu)}
        return out | {"state": self.state.name.lower(), "stage": self.stage.label, "place": self.place}

    @classmethod
    def from_json(cls, row: dict[str, Any]) -> RankRow:
        """Return the row, with every value checked: ValueError, KeyError, TypeError or AttributeError if one is odd."""
        import msgspec  # here, since the monitor has to start fast

        values = row | {"state": RankState[row["state"].upper()].value, "stage": Stage[row["stage"].upper()].value}
        if (gpu := row.get("gpu")) is not None:
            values["gpu"] = gpu | {"stage": Stage[gpu["stage"].upper()].value}
        return msgspec.convert(values, cls)


@dataclass(frozen=True)
class Limits:
    """How long a stage may last before the rank in it counts as stalled: `watchdog.floor_s` and `watchdog.init_s`."""

    floor_s: float
    init_s: float

    def of(self, slot: RankSlot, durations: Callable[[Stage], list[int]]) -> tuple[float, float]:
        """Return (limit, patience) in seconds for where the rank is now.

        `durations` returns the histogram of a stage's durations so far.
        """
        stage = slot.stage
        if stage in (Stage.INIT, Stage.END) or slot.state is RankState.ABSENT:
            return self.init_s, self.init_s
        starts = slot.starts and is_data(stage, slot.part)  # workers start, indexes are read, queues are filled
        if slot.builds or starts or (slot.steps_done == 0 and stage not in (Stage.VALIDATION, Stage.CHECKPOINT)):
            slow_start_s = max(self.init_s, self.floor_s)  # compiling, warming up, filling the prefetch queues
            return slow_start_s, slow_start_s
        p99_ns = quantile_ns(durations(stage), 0.99) or 0
        limit_s = max(self.floor_s, TIMES_USUAL * p99_ns / 1e9)
        patience_s = max(PATIENCE * self.floor_s, limit_s)
        if stage is Stage.CHECKPOINT:
            return patience_s, patience_s
        return limit_s, patience_s if stage is Stage.VALIDATION else limit_s

    def of_gpu(self, slot: RankSlot, durations: Callable[[Stage], list[int]]) -> float:
        """Return how long the rank's GPU may stay in one stage.

        What is known are the host's stages. It waits for its GPU in one of them, at most two steps ahead: the longest
        of a step stands for all.
        """
        if slot.builds or slot.steps_done == 0:
            return max(self.init_s, self.floor_s)
        p99_ns = max(quantile_ns(durations(stage), 0.99) or 0 for stage in ON_GPU)
        return max(self.floor_s, TIMES_USUAL * p99_ns / 1e9)


def local_rows(
    beacon: Beacon, limits: Limits, node: int, usual_ms: Mapping[int, dict[str, float]] | None = None
) -> list[RankRow]:
    """Return the rows of this node's ranks; `usual_ms`, by local rank, comes from `RecentDurations`."""
    rows = [_row(beacon, local_rank, limits, node) for local_rank in range(beacon.local_ranks)]
    return [dataclasses.replace(row, usual_ms=(usual_ms or {}).get(i, {})) for i, row in enumerate(rows)]


def absent_row(rank: int, waited_s: float, limit_s: float) -> RankRow:
    """Return the row of a rank that never reported, on a node of which nothing is known."""
    return RankRow(
        rank=rank,
        node=-1,
        pid=0,
        state=RankState.ABSENT,
        process="",
        stage=Stage.INIT,
        part=0,
        step=0,
        in_stage_s=waited_s,
        heartbeat_s=0.0,
        steps_done=0,
        exit_status=None,
        stop_signal=0,
        limit_s=limit_s,
        patience_s=limit_s,
    )


def _row(beacon: Beacon, local_rank: int, limits: Limits, node: int) -> RankRow:
    gpu, slot = beacon.gpu(local_rank), beacon.rank(local_rank)
    now_ns = time.monotonic_ns()
    workers = [_worker_row(worker, now_ns) for worker in beacon.workers(local_rank)]

    def durations(stage: Stage) -> list[int]:
        return beacon.durations(local_rank, stage)

    limit_s, patience_s = limits.of(slot, durations)
    in_stage_s = _age_s(slot.since_ns, now_ns)
    workers = [worker for worker in workers if worker.number >= 0 or worker.pid == slot.pid]
    if is_data(slot.stage, slot.part):
        moved_s = in_stage_s - min([in_stage_s, *(worker.since_s for worker in workers if worker.process not in GONE)])
        limit_s, patience_s = limit_s + moved_s, patience_s + moved_s
    return RankRow(
        rank=slot.rank,
        node=node,
        pid=slot.pid,
        state=slot.state,
        process=process_state(slot.pid) if slot.pid else "",
        stage=slot.stage,
        part=slot.part,
        step=slot.step,
        in_stage_s=in_stage_s,
        heartbeat_s=(now_ns - slot.heartbeat_ns) / 1e9 if slot.heartbeat_ns else 0.0,
        steps_done=slot.steps_done,
        exit_status=slot.exit_status,
        stop_signal=slot.stop_signal,
        limit_s=limit_s,
        patience_s=patience_s,
        workers=workers,
        gpu=None if gpu is None else GpuRow.of(gpu, slot, limits.of_gpu(slot, durations)),
    )


def _worker_row(worker: WorkerSlot, now_ns: int) -> WorkerRow:
    is_known = worker.number < 0 or worker.is_there  # the rank itself is known by its own slot
    process = process_state(worker.pid) if is_known else ""
    since_s = _age_s(worker.since_ns, now_ns)
    return WorkerRow(worker.pid, worker.number, process, worker.is_reading, since_s, worker.path)


def _age_s(since_ns: int, now_ns: int) -> float:
    return max(now_ns - since_ns, 0) / 1e9 if since_ns else 0.0


class RecentDurations:
    """Medians over the last window of steps, per local rank and stage, from the beacon's running counts."""

    def __init__(self, beacon: Beacon) -> None:
        self.beacon = beacon
        self.usual_ms: dict[int, dict[str, float]] = {}
        self._counts = self._read()
        self._steps = 0

    def update(self) -> bool:
        """Look again; return True when a window has been completed."""
        steps = min(self.beacon.rank(i).steps_done for i in range(self.beacon.local_ranks))
        if steps < self._steps + WINDOW_STEPS:
            return False
        before, self._counts, self._steps = self._counts, self._read(), steps
        for local_rank, counts in self._counts.items():
            medians = {}
            for stage in COMPARED:
                new = [a - b for a, b in zip(counts[stage], before[local_rank][stage], strict=True)]
                median_ns = quantile_ns(new, 0.5)
                if median_ns is not None:
                    medians[stage.label] = median_ns / 1e6
            self.usual_ms[local_rank] = medians
        return True

    def _read(self) -> dict[int, dict[Stage, list[int]]]:
        return {i: {s: self.beacon.durations(i, s) for s in COMPARED} for i in range(self.beacon.local_ranks)}
