"""One row per rank: what the beacon and the system say of it at one look. Ages, not times, so that nodes can share."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from nest_ssl.watchdog.beacon import Beacon, RankSlot, RankState, WorkerSlot
from nest_ssl.watchdog.judge.limits import Limits
from nest_ssl.watchdog.stages import WAITING_PARTS, Stage, part_label
from nest_ssl.watchdog.system import process_state

GONE = ("", "Z", "X")


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
    """Since the rank's own thread last ran; it cannot while something holds the GIL."""
    steps_done: int
    exit_status: int | None
    stop_signal: int
    limit_s: float
    """In this stage the rank counts as stalled after this long, if others wait for it."""
    patience_s: float
    """The same, if nobody waits for it."""
    workers: list[WorkerRow] = field(default_factory=list)
    stopped_s: float = 0.0
    is_lost: bool = False
    """Its whole node is not heard of any more."""
    usual_ms: dict[str, float] = field(default_factory=dict)
    """What a step spent in each stage lately: the median."""

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
        """Waits, before the first step, for the other ranks."""
        return self.stage is Stage.INIT and self.part in WAITING_PARTS

    @property
    def waits_for_data(self) -> bool:
        in_validation = self.stage is Stage.VALIDATION and part_label(self.stage, self.part) == Stage.DATA.label
        return self.stage is Stage.DATA or in_validation

    @property
    def place(self) -> str:
        """'encoder layer 3'."""
        return f"{self.stage.label} {part_label(self.stage, self.part)}".strip()

    def to_json(self) -> dict[str, Any]:
        out = dataclasses.asdict(self)
        return out | {"state": self.state.name.lower(), "stage": self.stage.label, "place": self.place}

    @classmethod
    def from_json(cls, row: dict[str, Any]) -> RankRow:
        values = {name: row[name] for name in cls.__dataclass_fields__}
        values |= {"state": RankState[row["state"].upper()], "stage": Stage[row["stage"].upper()]}
        return cls(**values | {"workers": [WorkerRow(**worker) for worker in row["workers"]]})


def local_rows(
    beacon: Beacon, limits: Limits, node: int, usual_ms: Mapping[int, dict[str, float]] | None = None
) -> list[RankRow]:
    """The rows of this node's ranks; `usual_ms` is known by local rank to whoever has looked for a while."""
    rows = [_row(beacon, local_rank, limits, node) for local_rank in range(beacon.local_ranks)]
    return [dataclasses.replace(row, usual_ms=(usual_ms or {}).get(i, {})) for i, row in enumerate(rows)]


def absent_row(rank: int, waited_s: float, limit_s: float) -> RankRow:
    """Of a rank that nobody has heard of, on a node of which nothing is known."""
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
    slot = beacon.rank(local_rank)
    now_ns = time.monotonic_ns()
    workers = [_worker_row(worker, now_ns) for worker in beacon.workers(local_rank)]
    limit_s, patience_s = limits.of(slot, lambda stage: beacon.durations(local_rank, stage))
    return RankRow(
        rank=slot.rank,
        node=node,
        pid=slot.pid,
        state=slot.state,
        process=process_state(slot.pid) if slot.pid else "",
        stage=slot.stage,
        part=slot.part,
        step=slot.step,
        in_stage_s=_age_s(slot, now_ns),
        heartbeat_s=(now_ns - slot.heartbeat_ns) / 1e9 if slot.heartbeat_ns else 0.0,
        steps_done=slot.steps_done,
        exit_status=slot.exit_status,
        stop_signal=slot.stop_signal,
        limit_s=limit_s,
        patience_s=patience_s,
        workers=[worker for worker in workers if worker.number >= 0 or worker.pid == slot.pid],
    )


def _worker_row(worker: WorkerSlot, now_ns: int) -> WorkerRow:
    since_s = max(now_ns - worker.since_ns, 0) / 1e9
    is_known = worker.number < 0 or worker.is_there  # the rank itself is known by its own slot
    process = process_state(worker.pid) if is_known else ""
    return WorkerRow(worker.pid, worker.number, process, worker.is_reading, since_s, worker.path)


def _age_s(slot: RankSlot, now_ns: int) -> float:
    return max(now_ns - slot.since_ns, 0) / 1e9 if slot.since_ns else 0.0
