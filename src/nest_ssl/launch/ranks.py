"""Who this process is, as told by nest-ssl's own launcher, torchrun, or SLURM."""

from __future__ import annotations

import contextlib
import os
import re
from collections.abc import Iterator, Mapping

from nest_ssl.watchdog.rank import RankFacts

BEACON_VARIABLE = "NEST_SSL_BEACON"
"""Set by nest-ssl's launcher for its ranks: the beacon's path."""
LAUNCHER_VARIABLE = "NEST_SSL_LAUNCHER"
"""The launcher's process id."""
DEFAULT_PORT = 29500
ALONE = RankFacts(0, 0, 1, 1, 0, "nobody", "127.0.0.1", DEFAULT_PORT)
"""A process that nobody has launched as one of several ranks."""


def from_environment(env: Mapping[str, str], devices: int) -> RankFacts | None:
    """Return the facts if this process was launched as a rank, else None; `devices` is the config's number per node."""
    if "RANK" in env and "WORLD_SIZE" in env:
        return _from_torchrun(env, devices)
    if "SLURM_PROCID" in env and "SLURM_STEP_ID" in env and int(env.get("SLURM_NTASKS", "1")) > 1:
        return _from_slurm(env)
    return None


def _from_torchrun(env: Mapping[str, str], devices: int) -> RankFacts:
    rank, world_size = int(env["RANK"]), int(env["WORLD_SIZE"])
    local_world_size = int(env.get("LOCAL_WORLD_SIZE", min(devices, world_size)))
    launcher = "nest-ssl" if BEACON_VARIABLE in env else "torchrun" if "TORCHELASTIC_RUN_ID" in env else "environment"
    if world_size > 1 and "MASTER_PORT" not in env:
        raise ValueError("WORLD_SIZE is set and MASTER_PORT is not: set MASTER_ADDR and MASTER_PORT on every rank.")
    return RankFacts(
        rank=rank,
        local_rank=int(env.get("LOCAL_RANK", rank % local_world_size)),
        world_size=world_size,
        local_world_size=local_world_size,
        node=int(env.get("GROUP_RANK", env.get("NODE_RANK", rank // local_world_size))),
        launcher=launcher,
        master_addr=env.get("MASTER_ADDR", "127.0.0.1"),
        master_port=int(env.get("MASTER_PORT", DEFAULT_PORT)),
    )


def _from_slurm(env: Mapping[str, str]) -> RankFacts:
    node = int(env["SLURM_NODEID"])
    per_node = env.get("SLURM_STEP_TASKS_PER_NODE") or env.get("SLURM_TASKS_PER_NODE") or env["SLURM_NTASKS"]
    job = int(re.sub(r"\D", "", env.get("SLURM_JOB_ID", "0")) or 0)
    return RankFacts(
        rank=int(env["SLURM_PROCID"]),
        local_rank=int(env["SLURM_LOCALID"]),
        world_size=int(env["SLURM_NTASKS"]),
        local_world_size=tasks_per_node(per_node)[node],
        node=node,
        launcher="slurm",
        master_addr=env.get("MASTER_ADDR") or first_host(env.get("SLURM_STEP_NODELIST", env.get("SLURM_NODELIST", ""))),
        master_port=int(env.get("MASTER_PORT", 15_000 + job % 20_000)),  # the same on every node, rarely taken
    )


def tasks_per_node(text: str) -> list[int]:
    """Expand SLURM's '4(x2),3' to [4, 4, 3]."""
    counts: list[int] = []
    for part in text.split(","):
        match = re.fullmatch(r"(\d+)(?:\(x(\d+)\))?", part.strip())
        if match is None:
            raise ValueError(f"SLURM_TASKS_PER_NODE={text}: expected something like 4(x2),3.")
        counts += [int(match[1])] * int(match[2] or 1)
    return counts


def first_host(nodelist: str) -> str:
    """Return the first host of a SLURM node list: 'gpu03' for 'gpu[03-05,9],cpu1'."""
    match = re.match(r"([^,\[]+)(?:\[([^,\-\]]+)[^\]]*\])?([^,\[]*)", nodelist)
    return f"{match[1]}{match[2] or ''}{match[3]}" if match else "127.0.0.1"


@contextlib.contextmanager
def as_rank_zero() -> Iterator[None]:
    """Let the launcher, which is not a rank, read a configuration that refers to `${oc.env:RANK}`."""
    missing = {name: "0" for name in ("RANK", "LOCAL_RANK") if name not in os.environ}
    os.environ.update(missing)
    try:
        yield
    finally:
        for name in missing:
            del os.environ[name]
