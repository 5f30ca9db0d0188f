"""What a run leaves in `RUN_DIR/watchdog/` for `nest-ssl doctor`: where its beacon is, and what stood in it last."""

from __future__ import annotations

import json
import os
import platform
import time
from dataclasses import asdict, dataclass, field
from pathlib import Path

from nest_ssl.watchdog.rows import RankRow

FOLDER = "watchdog"


@dataclass(frozen=True)
class Settings:
    """What the launcher tells the monitor, as JSON."""

    beacon: str
    run_dir: str
    node: int
    floor_s: float
    init_s: float
    judges: bool
    """False: only stopping is agreed."""
    ends: bool
    """False: `watchdog.action=report`."""
    saves: bool
    """False: `exp_manager.create_preemption_callback=false`, ranks that are asked to stop do not save first."""
    parent: int
    """Dies with this process; 0: outlives the one that started it."""
    resume_command: str
    num_nodes: int = 1
    leader_address: str = "127.0.0.1"
    leader_port: int = 0
    """Where the monitor of node 0 listens, if there are several nodes."""
    started_at: float = field(default_factory=time.time)
    """When this node's ranks were started, in seconds since 1970."""

    def write(self, path: Path) -> None:
        path.write_text(json.dumps(asdict(self)))

    @classmethod
    def read(cls, path: Path) -> Settings:
        return cls(**json.loads(path.read_text()))


def write_status(settings: Settings, rows: list[RankRow], monitor_pid: int | None) -> None:
    """Replace `watchdog/nodeN.json`; nothing, as long as the run has no folder."""
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
    (run_dir / FOLDER).mkdir(exist_ok=True)
    path = run_dir / FOLDER / f"node{settings.node}.json"
    path.with_suffix(".tmp").write_text(json.dumps(status))
    os.replace(path.with_suffix(".tmp"), path)
