"""How long a stage may last before the rank in it counts as stalled."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from nest_ssl.watchdog.beacon import RankSlot, RankState
from nest_ssl.watchdog.histogram import quantile_ns
from nest_ssl.watchdog.stages import Stage

TIMES_USUAL = 5.0
PATIENCE = 10.0
"""Checkpoints, and validation batches that nobody waits for, may take this many floors."""


@dataclass(frozen=True)
class Limits:
    """`watchdog.floor_s` and `watchdog.init_s`, applied to a stage."""

    floor_s: float
    init_s: float

    def of(self, slot: RankSlot, durations: Callable[[Stage], list[int]]) -> tuple[float, float]:
        """(limit, patience) in seconds for where the rank is now; `durations` counts what a stage took so far."""
        stage = slot.stage
        if stage in (Stage.INIT, Stage.END) or slot.state is RankState.ABSENT:
            return self.init_s, self.init_s
        if slot.steps_done == 0 and stage not in (Stage.VALIDATION, Stage.CHECKPOINT):
            slow_start_s = max(self.init_s, self.floor_s)  # compiling, warming up, filling the loaders
            return slow_start_s, slow_start_s
        p99_ns = quantile_ns(durations(stage), 0.99) or 0
        limit_s = max(self.floor_s, TIMES_USUAL * p99_ns / 1e9)
        patience_s = max(PATIENCE * self.floor_s, limit_s)
        if stage is Stage.CHECKPOINT:
            return patience_s, patience_s
        return limit_s, patience_s if stage is Stage.VALIDATION else limit_s
