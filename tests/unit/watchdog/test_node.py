"""What the monitor does to a node."""

from __future__ import annotations

from pathlib import Path

from nest_ssl.watchdog.beacon import Beacon
from nest_ssl.watchdog.node import Node, verdict_path
from tests.unit.watchdog.facts import monitor_settings


def test_a_verdict_that_cannot_be_written_still_ends_the_job(tmp_path: Path) -> None:
    beacon = Beacon.create(tmp_path / "beacon", local_ranks=1, first_rank=0, world_size=1, workers_per_rank=1)
    verdict_path(beacon.folder).mkdir()
    assert beacon.outcome is None
    Node(monitor_settings(tmp_path, str(beacon.path))).end({"exit_code": 75, "incident": None, "fault": None})
    assert beacon.outcome == 75
