"""A rank that is slower than the others: nothing hangs, but everybody waits for it in every step."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass

from nest_ssl.watchdog.beacon import Beacon
from nest_ssl.watchdog.histogram import quantile_ns
from nest_ssl.watchdog.rows import RankRow
from nest_ssl.watchdog.stages import Stage

WINDOW_STEPS = 8
"""Two windows in a row make a finding: within 20 steps."""
LEAST_MS = 50.0
LEAST_SHARE = 0.3
COMPARED = [stage for stage in Stage if Stage.DATA <= stage <= Stage.OPTIMIZER and stage is not Stage.BACKWARD]
"""Not backward: there the quick ranks wait for the slow one."""


class RecentDurations:
    """Medians of the last window of steps, per local rank and stage, from the beacon's running counts."""

    def __init__(self, beacon: Beacon) -> None:
        self.beacon = beacon
        self.usual_ms: dict[int, dict[str, float]] = {}
        self.window = 0
        self._counts = self._read()
        self._steps = 0

    def update(self) -> bool:
        """Look again; True when a window has been completed."""
        steps = min(self.beacon.rank(i).steps_done for i in range(self.beacon.local_ranks))
        if steps < self._steps + WINDOW_STEPS:
            return False
        before, self._counts, self._steps = self._counts, self._read(), steps
        self.window += 1
        for local_rank, counts in self._counts.items():
            medians = {}
            for stage in COMPARED:
                new = [a - b for a, b in zip(counts[stage], before[local_rank][stage], strict=True)]
                median_ns = quantile_ns(new, 0.5)
                if median_ns is not None:
                    medians[stage.label] = median_ns / 1e6
            self.usual_ms[local_rank] = medians
        return True

    def _read(self) -> dict[int, dict[Stage, list[int]]]:
        return {i: {s: self.beacon.durations(i, s) for s in COMPARED} for i in range(self.beacon.local_ranks)}


@dataclass(frozen=True)
class Slow:
    rank: int
    stage: str
    own_ms: float
    others_ms: float

    def __str__(self) -> str:
        return (
            f"rank {self.rank} is slow in {self.stage}: {self.own_ms:.0f} ms a step, the others "
            f"{self.others_ms:.0f} ms; all ranks wait for it"
        )


def find_slow(rows: Sequence[RankRow]) -> Slow | None:
    """The rank and stage that cost the others most, if that is worth a line."""
    worst: Slow | None = None
    for row in rows:
        step_ms = sum(row.usual_ms.values())
        for stage, own_ms in row.usual_ms.items():
            others = [other.usual_ms[stage] for other in rows if other.rank != row.rank and stage in other.usual_ms]
            if not others:
                continue
            others_ms = statistics.median(others)
            excess_ms = own_ms - others_ms
            is_worse = worst is None or excess_ms > worst.own_ms - worst.others_ms
            if excess_ms > max(LEAST_MS, LEAST_SHARE * step_ms) and is_worse:
                worst = Slow(row.rank, stage, own_ms, others_ms)
    return worst
