"""A run explained from what it has left: its beacon if it is alive, the monitor's last word and incidents if not."""

from __future__ import annotations

import json
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from nest_ssl.watchdog.beacon import Beacon
from nest_ssl.watchdog.judge.limits import Limits
from nest_ssl.watchdog.report.incident import newest_checkpoint, read_incidents
from nest_ssl.watchdog.rows import RankRow, local_rows


@dataclass(frozen=True)
class NodeState:
    """One node of a run."""

    host: str
    is_alive: bool
    seen: float
    """When the rows are of, in seconds since 1970."""
    rows: list[RankRow]
    resume_command: str


@dataclass(frozen=True)
class RunState:
    """All that is known of a run."""

    run_dir: Path
    nodes: list[NodeState]
    incidents: list[dict[str, Any]] = field(default_factory=list)
    checkpoint: Path | None = None

    @property
    def is_alive(self) -> bool:
        return any(node.is_alive for node in self.nodes)

    @property
    def verdict(self) -> str:
        """In one line."""
        rows = [row for node in self.nodes for row in node.rows]
        if self.is_alive:
            late = [row for row in rows if row.is_active and row.in_stage_s > row.limit_s]
            if late:
                names = ", ".join(f"rank {row.rank} in {row.place} for {row.in_stage_s:.0f} s" for row in late)
                return f"alive, but these are longer in their stage than they may be: {names}"
            return f"alive, at step {max(row.step for row in rows)}"
        if rows and all(row.state.name == "FINISHED" for row in rows):
            return "finished"
        if rows and all(row.state.name in ("FINISHED", "STOPPED") for row in rows):
            return "stopped as asked, resumable"
        if self.incidents:
            return f"ended by an incident: {self.incidents[-1]['text'].splitlines()[0].removeprefix('nest-ssl: ')}"
        return "over; it left no incident: ended from outside, or it was not watched"


def explain_run(run_dir: Path) -> RunState:
    """The state of the run in `run_dir`; ValueError if it is no run folder."""
    if not (run_dir / "hparams.yaml").is_file() and not (run_dir / "watchdog").is_dir():
        raise ValueError(f"{run_dir}: no run folder: there is neither hparams.yaml nor watchdog/ in it.")
    statuses = [json.loads(path.read_text()) for path in sorted((run_dir / "watchdog").glob("node*.json"))]
    nodes = [_node(status) for status in _of_newest_start(statuses)]
    return RunState(run_dir, nodes, read_incidents(run_dir), newest_checkpoint(run_dir))


def _of_newest_start(statuses: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Without what an earlier start has left, of nodes that take no part any more or are not there again yet.

    Nodes start in any order: one that came first still writes when the last one comes, an earlier start does not.
    """
    last: dict[str, Any] = max((status["settings"] for status in statuses), key=_started_at, default={})
    return [
        status
        for status in statuses
        if status["settings"]["node"] < last["num_nodes"] and status["time"] >= _started_at(last)
    ]


def _started_at(settings: dict[str, Any]) -> float:
    return float(settings.get("started_at", 0.0))  # runs of earlier versions have none


def _node(status: dict[str, Any]) -> NodeState:
    settings = status["settings"]
    rows = _live_rows(Path(status["beacon"]), settings)
    if rows is None:
        rows_then = [RankRow.from_json(row) for row in status["rows"]]
        return NodeState(status["host"], False, status["time"], rows_then, settings["resume_command"])
    return NodeState(status["host"], True, time.time(), rows, settings["resume_command"])


def _live_rows(path: Path, settings: dict[str, Any]) -> list[RankRow] | None:
    """Straight from the beacon, if it is on this machine and its ranks live."""
    try:
        beacon = Beacon(path)
    except (OSError, ValueError):
        return None
    rows = local_rows(beacon, Limits(settings["floor_s"], settings["init_s"]), settings["node"])
    return rows if any(row.pid and not row.is_gone for row in rows) else None
