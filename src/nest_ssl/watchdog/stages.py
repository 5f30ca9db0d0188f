"""Where a rank can be in a training step, as the numbers that stand in the beacon."""

from __future__ import annotations

from enum import IntEnum


class Stage(IntEnum):
    """Stages in the order in which a step goes through them."""

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
    OPTIMIZER = 10
    CHECKPOINT = 11
    VALIDATION = 12
    END = 13
    """Training is over; what is left is to write and to leave."""

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


PRE_ENCODE, POSITIONS, FIRST_LAYER = 1, 2, 10
"""Parts of `Stage.ENCODER`; layer n is FIRST_LAYER + n."""

OF_STAGE = 100_000
"""In `Stage.VALIDATION` a part is OF_STAGE x the inner stage + the part of that stage."""

WAITING_PARTS = frozenset({InitPart.JOIN, InitPart.COMPARE})


def validation_part(stage: Stage, part: int = 0) -> int:
    return OF_STAGE * stage + part


def part_label(stage: Stage, part: int) -> str:
    """'layer 3', 'join', 'encoder layer 3' (in validation); empty for none."""
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
