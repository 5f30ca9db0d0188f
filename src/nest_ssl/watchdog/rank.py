"""The vocabulary of a rank: its place in the job, the stage it is in, its state, and its exit code.

This file imports nothing, so that launcher, monitor and ranks share one set of words.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import IntEnum

# ---- exit codes of `nest-ssl pretrain`; docs/faults.md explains them ----

FINISHED = 0
NEEDS_A_PERSON = 1
"""Running the same command again would end the same way."""
RESUMABLE = 75
"""The job ended and the same command resumes it: a stall, a dead rank, a preemption. BSD's EX_TEMPFAIL."""


# ---- place in the job ----


@dataclass(frozen=True)
class RankFacts:
    """The place of one process in the job."""

    rank: int
    local_rank: int
    world_size: int
    local_world_size: int
    node: int
    launcher: str
    """nest-ssl, torchrun, slurm, or environment (RANK and WORLD_SIZE were set by hand)."""
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
        """The lowest rank on this node."""
        return self.rank - self.local_rank

    @property
    def num_nodes(self) -> int:
        return -(-self.world_size // self.local_world_size)

    def check_against(self, devices: int, num_nodes: int) -> None:
        """Refuse a configuration for a different number of ranks than were started."""
        if (devices, num_nodes) != (self.local_world_size, self.num_nodes):
            here = f"{self.local_world_size} rank{'' if self.local_world_size == 1 else 's'}"
            raise ValueError(
                f"trainer.devices={devices} and trainer.num_nodes={num_nodes}, but {self.launcher} has "
                f"started {here} on this node and {self.world_size} in all. Set "
                f"trainer.devices={self.local_world_size} trainer.num_nodes={self.num_nodes}."
            )

    def variables(self) -> dict[str, str]:
        """The environment variables that torch.distributed and other people's code expect."""
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


# ---- what it is doing ----


class RankState(IntEnum):
    """What a rank reports about itself."""

    ABSENT = 0
    RUNNING = 1
    FAILED = 2
    """An exception ended it; its traceback is in the beacon's folder."""
    FINISHED = 3
    STOPPED = 4
    """It left at the agreed step."""


class Stage(IntEnum):
    """Where a rank can be, in the order in which a step passes through the stages."""

    INIT = 0
    DATA = 1
    TRANSFER = 2
    PREPROCESSOR = 3
    QUANTIZER = 4
    MASKING = 5
    ENCODER = 6
    DECODER = 7
    LOSS = 8
    BACKWARD = 9
    EXCHANGE = 10
    """The gradient is complete and waits for that of the other ranks."""
    OPTIMIZER = 11
    CHECKPOINT = 12
    VALIDATION = 13
    END = 14
    """Training is over; only writing the results and exiting remain. On a GPU: the batch is done."""

    @property
    def label(self) -> str:
        return self.name.lower()


class InitPart(IntEnum):
    """Parts of `Stage.INIT`. A rank in JOIN or COMPARE waits for the others."""

    IMPORT = 1
    JOIN = 2
    MODEL = 3
    COMPARE = 4
    LOADERS = 5


WAITING_PARTS = frozenset({InitPart.JOIN, InitPart.COMPARE})

PRE_ENCODE, POSITIONS, FIRST_LAYER = 1, 2, 10
"""Parts of `Stage.ENCODER`; layer n is FIRST_LAYER + n."""

OF_STAGE = 100_000
"""In `Stage.VALIDATION` a part is OF_STAGE x the inner stage + the part of that stage."""


def validation_part(stage: Stage, part: int = 0) -> int:
    return OF_STAGE * stage + part


def part_label(stage: Stage, part: int) -> str:
    """Return 'layer 3', 'join' or, in validation, 'encoder layer 3'; an empty string for no part."""
    if part <= 0:
        return ""
    if stage is Stage.INIT:
        return InitPart(part).name.lower()
    if stage is Stage.ENCODER:
        return {PRE_ENCODE: "pre_encode", POSITIONS: "positions"}.get(part, f"layer {part - FIRST_LAYER}")
    if stage is Stage.VALIDATION:
        inner = Stage(part // OF_STAGE)
        return f"{inner.label} {part_label(inner, part % OF_STAGE)}".strip()
    return str(part)
