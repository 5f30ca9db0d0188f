"""What the monitor sees on a node over time, and what it does to it."""

from __future__ import annotations

import subprocess
import sys
import time
from pathlib import Path

import pytest

from nest_ssl.watchdog.beacon import NO_STEP, WORD, Beacon, GpuLog, RankMark
from nest_ssl.watchdog.judge.blame import judge_dead
from nest_ssl.watchdog.node import Node, verdict_path
from nest_ssl.watchdog.rank import Stage
from nest_ssl.watchdog.report import incident
from nest_ssl.watchdog.system import KILLED, OomKiller
from tests.unit.watchdog.facts import monitor_settings
from tests.unit.watchdog.test_system import kernel


@pytest.fixture
def beacon(tmp_path: Path) -> Beacon:
    return Beacon.create(tmp_path / "beacon", local_ranks=1, first_rank=0, world_size=1, workers_per_rank=1)


def test_a_verdict_that_cannot_be_written_still_ends_the_job(tmp_path: Path, beacon: Beacon) -> None:
    verdict_path(beacon.folder).mkdir()
    assert beacon.outcome is None
    Node(monitor_settings(tmp_path, str(beacon.path))).end({"exit_code": 75, "incident": None, "fault": None})
    assert beacon.outcome == 75


def test_the_time_of_a_gpu_in_a_stage_counts_from_when_it_was_given_the_work(tmp_path: Path, beacon: Beacon) -> None:
    node, log = Node(monitor_settings(tmp_path, str(beacon.path))), GpuLog(beacon, 0)
    RankMark(beacon, 0).take()

    def seen_s(stage: Stage, batch: int = 1) -> float:
        WORD.pack_into(beacon.map, beacon.gpu_at(0), batch << 8 | stage)
        time.sleep(0.05)
        (row,) = node.rows()
        assert row.gpu is not None
        return row.gpu.in_stage_s

    log.begins(0)
    log.is_launched()
    assert seen_s(Stage.ENCODER) == 0.0
    assert seen_s(Stage.ENCODER) >= 0.05
    assert seen_s(Stage.END) == 0.0
    assert seen_s(Stage.END) >= 0.05
    log.begins(1)
    log.is_launched()  # it does not begin, and that is counted from here
    assert seen_s(Stage.END) == 0.0
    log.begins(2)
    log.is_launched()  # that its host runs ahead changes nothing
    assert seen_s(Stage.END) >= 0.05


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="/proc of Linux")
def test_the_kernels_counter_tells_why_a_rank_was_killed(tmp_path: Path, beacon: Beacon) -> None:
    kernel(tmp_path, version=2, kills=3)
    node = Node(monitor_settings(tmp_path, str(beacon.path)))
    node._oom_killer = OomKiller(str(tmp_path))
    process = subprocess.Popen(["sleep", "60"])
    RankMark(beacon, 0).take()
    beacon.set_pid(0, process.pid)
    assert node.rows()[0].oom_killer == ""
    process.kill()
    process.wait()
    beacon.set_exit_status(0, KILLED)
    for kills, kind in ((3, "died"), (4, "host-memory")):
        kernel(tmp_path, version=2, kills=kills)
        verdict = judge_dead(node.rows(), {})
        assert verdict is not None
        assert verdict.kind == kind
        told = "the kernel's OOM killer has ended 1 process of this job" in incident.cause(verdict)
        assert told == (kind == "host-memory")


def test_a_stop_step_that_a_rank_may_have_passed_is_not_acknowledged(tmp_path: Path, beacon: Beacon) -> None:
    node, mark = Node(monitor_settings(tmp_path, str(beacon.path))), RankMark(beacon, 0)
    mark.take()
    mark.finish_step(7)
    mark.enter(Stage.DATA)
    node.stop_at(8)  # it may have looked at the end of step 8 already, and shows that only afterwards
    assert node.stop_acknowledged == NO_STEP
    node.stop_at(9)
    assert (beacon.stop_step, node.stop_acknowledged) == (9, 9)
    node.stop_at(8)  # a late order
    assert (beacon.stop_step, node.stop_acknowledged) == (9, 9)
