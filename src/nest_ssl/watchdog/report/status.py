"""The status of a run: `RUN_DIR/watchdog/nodeN.json`, written while it runs, and the run explained from it.

A live run is read from its beacon, a dead one from its last status and its incidents.
"""

from __future__ import annotations

import json
import platform
import time
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from nest_ssl.files import replace_text, replacing
from nest_ssl.run_folder import HPARAMS, WATCHDOG, RunFolder
from nest_ssl.watchdog.beacon import Beacon
from nest_ssl.watchdog.report.incident import read_incidents
from nest_ssl.watchdog.rows import Limits, RankRow, local_rows


@dataclass(frozen=True)
class Settings:
    """What the launcher tells the monitor, as JSON."""

    beacon: str
    run_dir: str
    node: int
    floor_s: float
    init_s: float
    judges: bool
    """False: the monitor only agrees on the step to stop at."""
    ends: bool
    """False: `watchdog.action=report`."""
    saves: bool
    """False: `exp_manager.create_preemption_callback=false`, ranks that are asked to stop do not save first."""
    parent: int
    """The monitor dies with this process; 0: it outlives the process that started it."""
    resume_command: str
    num_nodes: int = 1
    leader_address: str = "127.0.0.1"
    leader_port: int = 0
    """Where the monitor of node 0 listens, if there are several nodes."""
    started_at: float = field(default_factory=time.time)
    """When this node's ranks were started, in seconds since 1970."""

    def write(self, path: Path) -> None:
        replace_text(path, json.dumps(asdict(self)), sync=False)

    @classmethod
    def read(cls, path: Path) -> Settings:
        return cls(**json.loads(path.read_text()))


def write_status(settings: Settings, rows: list[RankRow], monitor_pid: int | None) -> None:
    """Replace `watchdog/nodeN.json`; do nothing while the run has no folder."""
    run_dir = Path(settings.run_dir)
    if not run_dir.is_dir():
        return
    status = {
        "time": time.time(),
        "host": platform.node(),
        "beacon": settings.beacon,
        "monitor_pid": monitor_pid,
        "settings": asdict(settings),
        "rows": [row.to_json() for row in rows],
    }
    (run_dir / WATCHDOG).mkdir(exist_ok=True)
    with replacing(run_dir / WATCHDOG / f"node{settings.node}.json", sync=False) as file:
        file.write(json.dumps(status).encode())


@dataclass(frozen=True)
class NodeState:
    """One node of a run."""

    host: str
    is_alive: bool
    seen: float
    """When the rows were read, in seconds since 1970."""
    rows: list[RankRow]
    resume_command: str


@dataclass(frozen=True)
class RunState:
    """Everything that is known about a run."""

    run_dir: Path
    nodes: list[NodeState]
    incidents: list[dict[str, Any]] = field(default_factory=list)
    checkpoint: Path | None = None

    @property
    def is_alive(self) -> bool:
        return any(node.is_alive for node in self.nodes)

    @property
    def verdict(self) -> str:
        """The state in one line."""
        rows = [row for node in self.nodes for row in node.rows]
        if self.is_alive:
            stopped = [str(row.rank) for row in rows if row.is_stopped]
            if stopped:
                return f"alive, but stopped by a signal or a debugger: rank {', '.join(stopped)}"
            late = [row for row in rows if row.is_active and row.in_stage_s > row.limit_s]
            if late:
                names = ", ".join(f"rank {row.rank} in {row.place} for {row.in_stage_s:.0f} s" for row in late)
                return f"alive, but over the time limit of their stage: {names}"
            return f"alive, at step {max(row.step for row in rows)}"
        if rows and all(row.state.name == "FINISHED" for row in rows):
            return "finished"
        if rows and all(row.state.name in ("FINISHED", "STOPPED") for row in rows):
            return "stopped as asked, resumable"
        if self.incidents:
            return f"ended by an incident: {self.incidents[-1]['text'].splitlines()[0].removeprefix('nest-ssl: ')}"
        return "over, without an incident: it was ended from outside, or it was not monitored"


def explain_run(run_dir: Path) -> RunState:
    """Return the state of the run in `run_dir`; ValueError if that is not a run folder."""
    if not (run_dir / HPARAMS).is_file() and not (run_dir / WATCHDOG).is_dir():
        raise ValueError(f"{run_dir}: not a run folder: it contains neither hparams.yaml nor watchdog/.")
    found = [path for path in sorted((run_dir / WATCHDOG).glob("node*.json")) if path.is_file()]
    try:
        nodes = [_node(status) for status in _of_newest_start([json.loads(path.read_text()) for path in found])]
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise ValueError(
            f"{run_dir / WATCHDOG}: one of {', '.join(path.name for path in found)} is damaged. Delete it; a monitor "
            "writes a new one."
        ) from error
    return RunState(run_dir, nodes, read_incidents(run_dir), RunFolder.open(run_dir).newest_checkpoint())


def _of_newest_start(statuses: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Drop what an earlier start left, on nodes that no longer take part or have not started again yet.

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
    """Return the rows straight from the beacon, if it is on this machine and its ranks are alive."""
    try:
        beacon = Beacon(path)
    except (OSError, ValueError):
        return None
    rows = local_rows(beacon, Limits(settings["floor_s"], settings["init_s"]), settings["node"])
    return rows if any(row.pid and not row.is_gone for row in rows) else None
