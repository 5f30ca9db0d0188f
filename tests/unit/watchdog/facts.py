"""Rows, flight recorders and settings as the monitor would see them; a start for processes that hear signals."""

from __future__ import annotations

import signal
from pathlib import Path
from typing import Any

from nest_ssl.watchdog.judge.flight import Collective, Flight
from nest_ssl.watchdog.rank import RankState, Stage
from nest_ssl.watchdog.report.status import Settings
from nest_ssl.watchdog.rows import GpuRow, RankRow, WorkerRow

FLOOR_S = 3.0


def hear_all_signals() -> None:
    """Undo, as a `preexec_fn`, what nohup (SIGHUP) and a script's background jobs (SIGINT) ignore."""
    for number in (signal.SIGHUP, signal.SIGINT):
        signal.signal(number, signal.SIG_DFL)


def monitor_settings(run_dir: Path, beacon: str, **other: Any) -> Settings:
    values: dict[str, Any] = {
        "node": 0,
        "floor_s": 60.0,
        "init_s": 900.0,
        "judges": True,
        "ends": True,
        "saves": True,
        "parent": 0,
        "resume_command": "nest-ssl pretrain again",
    }
    return Settings(run_dir=str(run_dir), beacon=beacon, **(values | other))


def row(rank: int, stage: Stage = Stage.BACKWARD, in_stage_s: float = 4.0, **other: Any) -> RankRow:
    values: dict[str, Any] = {
        "node": 0,
        "pid": 100 + rank,
        "state": RankState.RUNNING,
        "process": "S",
        "part": 0,
        "step": 7,
        "heartbeat_s": 0.1,
        "steps_done": 7,
        "exit_status": None,
        "stop_signal": 0,
        "limit_s": FLOOR_S,
        "patience_s": FLOOR_S,
    }
    return RankRow(rank=rank, stage=stage, in_stage_s=in_stage_s, **(values | other))


def gpu(batch: int, stage: Stage, in_stage_s: float = 4.0, *, launched: int = 9, **other: Any) -> GpuRow:
    """Return a GPU in `stage` of batch number `batch`, which is step `batch` too; busy unless it has done them all."""
    is_busy = (batch, stage) != (launched, Stage.END)
    values: dict[str, Any] = {"step": batch, "launched": launched, "is_busy": is_busy, "limit_s": FLOOR_S}
    return GpuRow(batch, stage, in_stage_s=in_stage_s, **(values | other))


def worker(**other: Any) -> WorkerRow:
    values: dict[str, Any] = {
        "pid": 900,
        "number": 0,
        "process": "S",
        "is_reading": True,
        "since_s": 4.0,
        "path": "/a.wav",
    }
    return WorkerRow(**(values | other))


def calls(*sizes: int, done: int | None = None, op: str = "all_reduce") -> Flight:
    """Return all-reduces of these sizes, numbered from 1; the first `done` have returned (None: all)."""
    finished = len(sizes) if done is None else done
    return {"0": {n: Collective(n, op, ((size,),), n <= finished) for n, size in enumerate(sizes, 1)}}
