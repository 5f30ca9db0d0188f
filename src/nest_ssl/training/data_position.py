"""Where a run stood in its data, so that it can go on from there."""

from __future__ import annotations

import logging
from dataclasses import dataclass

from nest_ssl.data.batch.loader import PlannedLoader

log = logging.getLogger(__name__)


@dataclass
class DataPosition:
    """Where a run stood in its data."""

    epoch: int
    batch: int
    """Batches of the epoch that every rank has trained on."""
    world_size: int
    plan_hash: str

    def batch_on(self, world_size: int) -> int:
        """`batch` for this number of ranks: the same share of the epoch."""
        return self.batch * self.world_size // world_size

    def apply(self, loader: PlannedLoader, world_size: int) -> None:
        """Let `loader` go on from here; says what changes if its plan is another one."""
        batch = self.batch_on(world_size)
        if world_size != self.world_size:
            log.warning(
                "resumed on %d ranks, was %d: the batches are other ones, and a step sees %.3g x as much audio; "
                "going on at batch %d of epoch %d, the same share of the epoch",
                *(world_size, self.world_size, world_size / self.world_size, batch, self.epoch),
            )
        elif loader.plan_hash != self.plan_hash:
            log.warning(
                "the data or its batches have changed since the checkpoint; going on at batch %d of epoch %d of the "
                "new plan, so some utterances of this epoch may be read twice or not at all",
                *(batch, self.epoch),
            )
        loader.start_at(self.epoch, batch)
