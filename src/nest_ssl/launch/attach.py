"""How a rank finds its beacon: nest-ssl's launcher made one, or the node's ranks, launched by others, share one."""

from __future__ import annotations

import contextlib
import hashlib
import logging
import os
import secrets
import shutil
import threading
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

from nest_ssl.launch.launcher import KeptMonitor, beacon_folder, check_folder, make_beacon_folder
from nest_ssl.launch.ranks import BEACON_VARIABLE, LAUNCHER_VARIABLE
from nest_ssl.watchdog.agent import RankAgent
from nest_ssl.watchdog.beacon import Beacon
from nest_ssl.watchdog.exchange import job_secret
from nest_ssl.watchdog.monitor import Monitor, watch_lone_rank
from nest_ssl.watchdog.rank import RankFacts
from nest_ssl.watchdog.report.status import SETTINGS, Settings, write_status
from nest_ssl.watchdog.rows import Limits, RankRow, local_rows
from nest_ssl.watchdog.system import is_alive

log = logging.getLogger(__name__)

JOB_VARIABLES = (
    "TORCHELASTIC_RUN_ID",
    "TORCHELASTIC_RESTART_COUNT",
    "SLURM_JOB_ID",
    "SLURM_RESTART_COUNT",  # a requeued job has the numbers of its first start, whose monitor may still be at work
    "SLURM_STEP_ID",
)


@contextlib.contextmanager
def attached(
    facts: RankFacts, settings: dict[str, Any], *, workers_per_rank: int, wants_monitor: bool
) -> Iterator[RankAgent]:
    """Make this process a visible rank. `settings` are the monitor's, for the rank that has to start it."""
    if BEACON_VARIABLE in os.environ:
        agent = RankAgent(facts, Beacon(Path(os.environ[BEACON_VARIABLE])), has_monitor=True)
        agent.start(parent=int(os.environ[LAUNCHER_VARIABLE]))
        yield agent
        return
    token = _token(facts)
    folder = beacon_folder(token)
    if facts.local_rank == 0:
        make_beacon_folder(token, settings["run_dir"])
        beacon = _create(folder, facts, workers_per_rank)
    else:
        beacon = _wait_for_beacon(folder / "beacon", settings["init_s"])
    agent = RankAgent(facts, beacon, has_monitor=wants_monitor, saves=settings["saves"])
    if wants_monitor and facts.local_rank == 0:
        monitor = KeptMonitor(
            Settings(
                **settings,
                beacon=str(beacon.path),
                node=facts.node,
                parent=0,
                num_nodes=facts.num_nodes,
                leader_address=facts.master_addr,
                leader_port=facts.master_port + 1,
            ),
            beacon,
        )
        monitor.start()
        agent.keep_monitor = monitor.keep
    agent.start(parent=os.getppid() if facts.launcher == "torchrun" else 0)
    if wants_monitor:
        yield agent
        return
    own = Settings(**settings, beacon=str(beacon.path), node=facts.node, parent=0)
    with contextlib.suppress(OSError):  # no room for it: only a kill could not be explained
        replace(own, run_dir=os.path.abspath(own.run_dir)).write(beacon.folder / SETTINGS)
    limits = Limits(own.floor_s, own.init_s)
    agent.show = lambda: _write_status(own, local_rows(beacon, limits, own.node))
    agent.close = lambda: _close(agent)
    over = threading.Event()
    if own.judges:
        watch = threading.Thread(
            target=watch_lone_rank, args=(Monitor(own), agent.leave_stalled, over), name="nest-ssl watch", daemon=True
        )
        watch.start()
    try:
        yield agent
    finally:
        over.set()
        agent.close()


def _write_status(settings: Settings, rows: list[RankRow]) -> None:
    try:
        write_status(settings, rows, None)
    except OSError as error:  # no inode is left, say: a checkpoint that cannot be written is another matter
        log.warning("%s: the status for 'nest-ssl doctor' could not be written: %s", settings.run_dir, error)


def _close(agent: RankAgent) -> None:
    agent.show()
    shutil.rmtree(agent.beacon.folder, ignore_errors=True)


def _token(facts: RankFacts) -> str:
    """Return a name that all ranks of one start of a job on this node share, and no others."""
    if facts.world_size == 1:
        return f"single-{secrets.token_hex(16)}"
    parts = [
        facts.master_addr,
        str(facts.master_port),
        str(facts.node),
        *(os.environ.get(v, "") for v in JOB_VARIABLES),
    ]
    job = "|".join(parts)
    try:
        return job_secret(f"beacon {job}").hex()[:32]  # others cannot guess it
    except ValueError:  # they can, and put a folder there: `check_folder` refuses it
        return hashlib.sha256(job.encode()).hexdigest()[:32]


def _create(folder: Path, facts: RankFacts, workers_per_rank: int) -> Beacon:
    owner = 0
    with contextlib.suppress(OSError, ValueError):
        owner = Beacon(folder / "beacon").owner
    if owner and is_alive(owner):
        raise ValueError(
            f"LOCAL_RANK=0: process {owner} also has it, on this node and port. Give every rank on a node its own "
            f"LOCAL_RANK, and every job its own MASTER_PORT."
        )
    for left_over in folder.iterdir():  # from an earlier start with the same port
        left_over.unlink()
    return Beacon.create(
        folder / "beacon",
        local_ranks=facts.local_world_size,
        first_rank=facts.first_rank,
        world_size=facts.world_size,
        workers_per_rank=workers_per_rank,
    )


def _wait_for_beacon(path: Path, timeout_s: float) -> Beacon:
    deadline = time.monotonic() + timeout_s
    while time.monotonic() < deadline:
        with contextlib.suppress(OSError, ValueError):
            check_folder(path.parent)
            beacon = Beacon(path)
            if is_alive(beacon.owner):
                return beacon
        time.sleep(0.05)
    raise ValueError(f"local rank 0 on this node did not start within {timeout_s:.0f} s (watchdog.init_s).")
