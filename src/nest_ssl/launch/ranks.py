"""Who this process is: rank facts from nest-ssl's own launcher, from torchrun, or from SLURM."""

from __future__ import annotations

import contextlib
import os
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

BEACON_VARIABLE = "NEST_SSL_BEACON"
"""Set by nest-ssl's launcher for its ranks: the path of the beacon."""
LAUNCHER_VARIABLE = "NEST_SSL_LAUNCHER"
"""The process id of that launcher."""
DEFAULT_PORT = 29500


@dataclass(frozen=True)
class RankFacts:
    """The place of one process in the job."""

    rank: int
    local_rank: int
    world_size: int
    local_world_size: int
    node: int
    launcher: str
    """nest-ssl, torchrun, slurm, or environment: someone set RANK and WORLD_SIZE by hand."""
    master_addr: str
    master_port: int

    def __post_init__(self) -> None:
        fits = 0 <= self.rank < self.world_size and 0 <= self.local_rank < self.local_world_size
        if not fits or self.local_rank > self.rank:
            raise ValueError(
                f"RANK={self.rank}, LOCAL_RANK={self.local_rank} do not fit WORLD_SIZE={self.world_size}, "
                f"LOCAL_WORLD_SIZE={self.local_world_size}."
            )

    @property
    def first_rank(self) -> int:
        """The lowest rank of this node."""
        return self.rank - self.local_rank

    @property
    def num_nodes(self) -> int:
        return -(-self.world_size // self.local_world_size)

    def check_against(self, devices: int, num_nodes: int) -> None:
        """Refuse a configuration for another number of ranks than were started."""
        if (devices, num_nodes) != (self.local_world_size, self.num_nodes):
            raise ValueError(
                f"trainer.devices={devices} and trainer.num_nodes={num_nodes}, but {self.launcher} has "
                f"started {self.local_world_size} ranks on this node and {self.world_size} in all. Set "
                f"trainer.devices={self.local_world_size} trainer.num_nodes={self.num_nodes}."
            )

    def variables(self) -> dict[str, str]:
        """As torch.distributed and the code of others expect them."""
        return {
            "RANK": str(self.rank),
            "LOCAL_RANK": str(self.local_rank),
            "WORLD_SIZE": str(self.world_size),
            "LOCAL_WORLD_SIZE": str(self.local_world_size),
            "GROUP_RANK": str(self.node),
            "NODE_RANK": str(self.node),
            "MASTER_ADDR": self.master_addr,
            "MASTER_PORT": str(self.master_port),
        }


def from_environment(env: Mapping[str, str], devices: int) -> RankFacts | None:
    """The facts, if somebody has launched this process as a rank; `devices` is what the config says per node."""
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
        master_port=int(env.get("MASTER_PORT", 15_000 + job % 20_000)),  # the same on every node, seldom taken
    )


def tasks_per_node(text: str) -> list[int]:
    """SLURM's '4(x2),3' as [4, 4, 3]."""
    counts: list[int] = []
    for part in text.split(","):
        match = re.fullmatch(r"(\d+)(?:\(x(\d+)\))?", part.strip())
        if match is None:
            raise ValueError(f"SLURM_TASKS_PER_NODE={text}: expected something like 4(x2),3.")
        counts += [int(match[1])] * int(match[2] or 1)
    return counts


def first_host(nodelist: str) -> str:
    """The first host of SLURM's 'gpu[03-05,9],cpu1' is 'gpu03'."""
    match = re.match(r"([^,\[]+)(?:\[([^,\-\]]+)[^\]]*\])?([^,\[]*)", nodelist)
    return f"{match[1]}{match[2] or ''}{match[3]}" if match else "127.0.0.1"


@contextlib.contextmanager
def as_rank_zero() -> Iterator[None]:
    """For the launcher, which is no rank, to read a configuration that refers to `${oc.env:RANK}`."""
    missing = {name: "0" for name in ("RANK", "LOCAL_RANK") if name not in os.environ}
    os.environ.update(missing)
    try:
        yield
    finally:
        for name in missing:
            del os.environ[name]
