"""The status of a run: `RUN_DIR/watchdog/nodeN.json`, written while it runs, and the run explained from it.

A live run is read from its beacon, a dead one from its last status and its incidents.
"""

from __future__ import annotations

import json
import platform
import time
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from nest_ssl.files import read_json, replace_text, replacing
from nest_ssl.run_folder import HPARAMS, WATCHDOG, RunFolder
from nest_ssl.watchdog.beacon import Beacon, is_in_use
from nest_ssl.watchdog.rank import RankState
from nest_ssl.watchdog.report.incident import read_incidents
from nest_ssl.watchdog.rows import Limits, RankRow, local_rows
from nest_ssl.watchdog.system import LESS_MEMORY, OomKiller

SETTINGS = "monitor.json"
"""The settings' file in the beacon's folder."""


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
    node: int = 0
    num_nodes: int = 1
    started_at: float = 0.0


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
    def how_killed(self) -> str:
        """What ended a run of one process, which nobody watched and which could not say it itself; "": not that."""
        rows = [row for node in self.nodes for row in node.rows]
        if self.is_alive or len(rows) != 1 or not rows[0].oom_killer:
            return ""
        return f"killed in {rows[0].place} of step {rows[0].step}: {rows[0].oom_killer}. {LESS_MEMORY.capitalize()}."

    @property
    def verdict(self) -> str:
        """The state in one line."""
        rows = [row for node in self.nodes for row in node.rows]
        if self.how_killed:  # an incident, if there is one, is of an earlier start
            return self.how_killed
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
            return f"ended by an incident: {self.incidents[-1]['text'].removeprefix('nest-ssl: ')}".partition("\n")[0]
        return "over, without an incident: it was ended from outside, or it was not monitored"


def record_kill(beacon: Beacon) -> None:
    """Record in the folder of a run that was killed, before its beacon is removed, how that came about."""
    settings = Settings.read(beacon.folder / SETTINGS)
    rows = _rows(beacon, asdict(settings))
    path = Path(settings.run_dir) / WATCHDOG / f"node{settings.node}.json"
    is_newest = not path.exists() or read_json(path, _node).started_at <= settings.started_at
    if is_newest and any(row.oom_killer for row in rows):
        write_status(settings, rows, None)


def explain_run(run_dir: Path) -> RunState:
    """Return the state of the run in `run_dir`; ValueError if that is not a run folder."""
    if not (run_dir / HPARAMS).is_file() and not (run_dir / WATCHDOG).is_dir():
        raise ValueError(f"{run_dir}: not a run folder: it contains neither hparams.yaml nor watchdog/.")
    found = [path for path in sorted((run_dir / WATCHDOG).glob("node*.json")) if path.is_file()]
    nodes = _of_newest_start([read_json(path, _node) for path in found])
    return RunState(run_dir, nodes, read_incidents(run_dir), RunFolder.open(run_dir).newest_checkpoint())


def _of_newest_start(nodes: list[NodeState]) -> list[NodeState]:
    """Drop what an earlier start left, on nodes that no longer take part or have not started again yet.

    Nodes start in any order: one that came first still writes when the last one comes, an earlier start does not.
    """
    last = max(nodes, key=lambda node: node.started_at, default=None)
    return [node for node in nodes if last and node.node < last.num_nodes and node.seen >= last.started_at]


def _node(status: dict[str, Any]) -> NodeState:
    settings = status["settings"]
    try:
        rows = _rows(Beacon(Path(status["beacon"])), settings)
    except (OSError, ValueError):  # it is gone, or on another machine
        rows = []
    is_alive = any(row.pid and not row.is_gone for row in rows)
    if not is_alive and not any(row.oom_killer for row in rows):
        rows = [RankRow.from_json(row) for row in status["rows"]]
    return NodeState(
        host=str(status["host"]),
        is_alive=is_alive,
        seen=time.time() if is_alive else float(status["time"]),
        rows=rows,
        resume_command=str(settings["resume_command"]),
        node=int(settings["node"]),
        num_nodes=int(settings["num_nodes"]),
        started_at=float(settings.get("started_at", 0.0)),  # runs of earlier versions have none
    )


def _rows(beacon: Beacon, settings: dict[str, Any]) -> list[RankRow]:
    """Return the rows straight from the beacon; that of a lone rank that was killed with what the OOM killer did."""
    rows = local_rows(beacon, Limits(settings["floor_s"], settings["init_s"]), settings["node"])
    if beacon.world_size > 1 or rows[0].state is not RankState.RUNNING or is_in_use(beacon.folder):
        return rows
    oom_killer = OomKiller(whole_host=True)
    oom_killer.before = beacon.oom_kills_before
    return [replace(rows[0], process="", oom_killer=oom_killer.text())]  # its pid may be another process's by now
