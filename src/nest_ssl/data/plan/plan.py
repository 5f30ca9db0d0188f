"""The batch plan: which utterances every rank reads in every step. Ranks need not talk: each computes its part.

A plan is a pure function of (seed, epoch, data, world size, settings). Every rank has the same number of batches.
The last, incomplete step of an epoch is dropped (`drop_last`), or its utterances are shared out equally, each rank
getting a smaller batch; what is missing to make that equal, fewer than `world_size` utterances, is taken from the
beginning of the epoch's order.
"""

from __future__ import annotations

import hashlib
import json
from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from nest_ssl.data.plan.order import Indices, Order

Positions = npt.NDArray[np.int64]

MIN_SPARES = 16
"""With 1 % of bad files, 16 in a row have a probability of 1e-32."""


@dataclass(frozen=True)
class BatchSpec:
    """One rank's batch: all that a loader process needs to make it."""

    epoch: int
    step: int
    rank: int
    indices: Indices
    """Utterances to read."""
    spares: Indices
    """The next utterances of the plan, which stand in, in order, for those that cannot be read."""


class Plan(ABC):
    """Batches of all ranks."""

    world_size: int
    seed: int

    @abstractmethod
    def num_batches(self) -> int | None:
        """Batches of an epoch for each rank; None: no end."""

    @abstractmethod
    def batch(self, epoch: int, step: int, rank: int) -> BatchSpec:
        """Batch number `step` of `rank`, without looking at those before."""

    @abstractmethod
    def settings(self) -> dict[str, Any]:
        """All that the batches depend on."""

    @property
    @abstractmethod
    def utterances_per_epoch(self) -> int | None:
        """Utterances that each rank reads in an epoch, padding included; None: no end."""

    def hash(self) -> str:
        """Equal on two ranks only if they will read by the same plan.

        The first batch of rank 0 goes in too: it would differ if the ranks' numpy shuffled differently.
        """
        first = self.batch(0, 0, 0).indices.tolist() if self.num_batches() != 0 else []
        text = json.dumps({**self.settings(), "first": first}, sort_keys=True)
        return hashlib.sha256(text.encode()).hexdigest()


@dataclass(frozen=True)
class Cut:
    """How positions [0, length) become steps of `world_size` batches."""

    length: int
    batch_size: int
    world_size: int
    drop_last: bool
    layout: str = "interleaved"
    """interleaved: a step takes the next world_size x batch_size positions. contiguous: each rank goes through its own
    stretch, so that it opens few shards. replicated: each rank goes through everything."""

    @property
    def share(self) -> int:
        """Positions of each rank, padding included."""
        if self.layout == "replicated":
            return self.length - (self.length % self.batch_size if self.drop_last else 0)
        if self.drop_last:
            return self.length // (self.world_size * self.batch_size) * self.batch_size
        return -(-self.length // self.world_size)

    @property
    def num_steps(self) -> int:
        return -(-self.share // self.batch_size)

    def positions(self, step: int, rank: int) -> Positions:
        """Those past `length` are padding: they stand for the positions from 0 on."""
        size = min(self.batch_size, self.share - step * self.batch_size)
        if self.layout == "interleaved":
            first = step * self.batch_size * self.world_size + rank * size
        elif self.layout == "contiguous":
            first = rank * self.share + step * self.batch_size
        else:
            first = step * self.batch_size
        return np.arange(first, first + size)


class _EpochCache:
    """The order of the epoch asked for last."""

    def __init__(self, order: Order) -> None:
        self._order = order
        self._epoch: int | None = None
        self._indices: Indices = np.empty(0, dtype=np.uint32)

    def __call__(self, epoch: int) -> Indices:
        if epoch != self._epoch:
            self._indices, self._epoch = self._order.indices(epoch), epoch
        return self._indices


class FixedSizePlan(Plan):
    """`batch_size` utterances per batch, in the order given."""

    def __init__(
        self,
        order: Order,
        *,
        batch_size: int,
        world_size: int,
        drop_last: bool,
        seed: int,
        fingerprint: str,
        layout: str = "interleaved",
        endless: bool = False,
    ) -> None:
        self.world_size, self.seed, self.fingerprint = world_size, seed, fingerprint
        self.order, self.endless = order, endless
        self.cut = Cut(len(order), batch_size, world_size, drop_last, layout)
        self._indices = _EpochCache(order)

    def num_batches(self) -> int | None:
        return None if self.endless else self.cut.num_steps

    @property
    def utterances_per_epoch(self) -> int | None:
        return None if self.endless else self.cut.share

    def batch(self, epoch: int, step: int, rank: int) -> BatchSpec:
        # Endless: one round of the order after another, whatever the trainer calls an epoch.
        round_number, step_in_round = divmod(step, self.cut.num_steps) if self.endless else (epoch, step)
        positions = self.cut.positions(step_in_round, rank)
        if self.cut.layout == "replicated":  # each rank has an order of its own
            round_number = round_number * self.world_size + rank
        indices = self._indices(round_number)
        spares = spares_after(indices, int(positions[-1]) + 1, len(positions))
        return BatchSpec(epoch, step, rank, indices[positions % len(indices)], spares)

    def settings(self) -> dict[str, Any]:
        return {
            "plan": "fixed size",
            "seed": self.seed,
            "data": self.fingerprint,
            "order": self.order.settings(),
            "cut": vars(self.cut),
            "endless": self.endless,
        }


def spares_after(indices: Indices, first: int, batch_size: int) -> Indices:
    """The utterances that follow, from the beginning again at the end."""
    return indices[np.arange(first, first + max(batch_size, MIN_SPARES)) % len(indices)]
