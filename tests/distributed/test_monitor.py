"""The monitor's look, on rows and flights that change under its eyes."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from nest_ssl.distributed.monitor import Monitor
from nest_ssl.distributed.rows import RankRow
from nest_ssl.distributed.stages import Stage
from tests.distributed.facts import FLOOR_S, calls, row

LONG = [row(rank, Stage.VALIDATION, 3.9) for rank in (0, 1)]
MOVED_ON = [row(rank, Stage.BACKWARD, 0.1) for rank in (0, 1)]


def looking_at(rows_later: list[RankRow], monkeypatch: pytest.MonkeyPatch) -> tuple[Monitor, list[Any]]:
    """A monitor whose ranks are in one barrier when asked for their collectives, and then at `rows_later`."""
    monitor = Monitor.__new__(Monitor)
    monitor.settings = SimpleNamespace(judges=True, floor_s=FLOOR_S)  # type: ignore[assignment]
    monitor._dead_since = None
    verdicts: list[Any] = []
    open_barrier = calls(1, done=0, op="barrier")
    monkeypatch.setattr(monitor, "_flights", lambda rows: {0: open_barrier, 1: open_barrier})
    monkeypatch.setattr(monitor, "_rows", lambda: rows_later)
    monkeypatch.setattr(monitor, "_stalled", lambda verdict: verdicts.append(verdict))
    for name in ("_dead", "_warn_early", "_warn_slow", "_stop"):
        monkeypatch.setattr(monitor, name, lambda *rows: None)
    return monitor, verdicts


def test_ranks_that_moved_on_while_they_were_asked_are_not_stalled(monkeypatch: pytest.MonkeyPatch) -> None:
    monitor, verdicts = looking_at(MOVED_ON, monkeypatch)
    monitor._look(LONG)
    assert verdicts == []


def test_ranks_that_did_not_are(monkeypatch: pytest.MonkeyPatch) -> None:
    monitor, verdicts = looking_at(LONG, monkeypatch)
    monitor._look(LONG)
    assert [verdict.kind for verdict in verdicts] == ["unfinished"]
