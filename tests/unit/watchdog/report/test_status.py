"""What `nest-ssl doctor RUN_DIR` reads about a run that was started more than once."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from nest_ssl.watchdog.beacon import Beacon, RankMark
from nest_ssl.watchdog.rank import RankState, Stage
from nest_ssl.watchdog.report.status import NodeState, RunState, Settings, explain_run, write_status
from nest_ssl.watchdog.rows import Limits, local_rows
from tests.unit.watchdog.facts import monitor_settings, row


def started(run_dir: Path, node: int, num_nodes: int, beacon: str = "/gone") -> Settings:
    """Return the settings of one node that starts now."""
    return monitor_settings(run_dir, beacon, node=node, num_nodes=num_nodes)


def write(settings: Settings, state: RankState) -> None:
    """Write the status of a node whose only rank is gone."""
    write_status(settings, [row(settings.node, node=settings.node, state=state, process="")], None)


def ranks_read(run_dir: Path) -> list[int]:
    return [row.rank for node in explain_run(run_dir).nodes for row in node.rows]


@pytest.fixture
def preempted(tmp_path: Path) -> Path:
    """The folder of a run on two nodes that has stopped as asked."""
    for settings in [started(tmp_path, node, 2) for node in range(2)]:
        write(settings, RankState.STOPPED)
    return tmp_path


def test_both_nodes_of_a_start_are_read(preempted: Path) -> None:
    assert ranks_read(preempted) == [0, 1]
    assert explain_run(preempted).verdict == "stopped as asked, resumable"


@pytest.mark.parametrize(
    "text", ["[1]", "{", '{"settings": 3}', '{"settings": {"node": "x"}, "time": 0}', '{"a":' * 100_000]
)
def test_a_damaged_status_is_named(preempted: Path, text: str) -> None:
    (preempted / "watchdog" / "node1.json").write_text(text)
    with pytest.raises(ValueError, match=r"watchdog/node1\.json: is damaged .* Delete it"):
        explain_run(preempted)


@pytest.mark.parametrize(("key", "value"), [("step", "two"), ("in_stage_s", "long"), ("workers", [3]), ("stage", 3)])
def test_a_status_with_words_for_numbers_is_named(preempted: Path, key: str, value: object) -> None:
    path = preempted / "watchdog" / "node1.json"
    content = json.loads(path.read_text())
    content["rows"][0][key] = value
    path.write_text(json.dumps(content))
    with pytest.raises(ValueError, match=r"watchdog/node1\.json: is damaged "):
        explain_run(preempted)


def test_a_pipe_in_place_of_a_status_is_passed_over(preempted: Path) -> None:
    (preempted / "watchdog" / "node1.json").unlink()
    os.mkfifo(preempted / "watchdog" / "node1.json")
    assert ranks_read(preempted) == [0]


def test_a_run_that_resumes_on_fewer_nodes_and_finishes_is_finished(preempted: Path) -> None:
    write(started(preempted, 0, 1), RankState.FINISHED)
    assert explain_run(preempted).verdict == "finished"
    assert ranks_read(preempted) == [0]


def test_a_node_that_no_longer_takes_part_is_not_read_even_if_it_writes_late(tmp_path: Path) -> None:
    earlier = started(tmp_path, 1, 2)
    write(started(tmp_path, 0, 1), RankState.FINISHED)
    write(earlier, RankState.RUNNING)  # its monitor has not noticed yet that node 0 is gone
    assert explain_run(tmp_path).verdict == "finished"


@pytest.mark.parametrize("first", [0, 1])
def test_nodes_of_a_start_are_read_in_whatever_order_they_start(preempted: Path, first: int) -> None:
    early = started(preempted, first, 2)
    write(early, RankState.RUNNING)
    assert ranks_read(preempted) == [first]  # what the other node left is from the earlier start
    late = started(preempted, 1 - first, 2)
    write(late, RankState.FINISHED)
    write(early, RankState.FINISHED)
    assert ranks_read(preempted) == [0, 1]
    assert explain_run(preempted).verdict == "finished"


def test_a_rank_of_an_earlier_start_is_not_late_in_a_run_that_is_alive(tmp_path: Path) -> None:
    stalled = row(1, node=1, in_stage_s=1000.0)
    write_status(started(tmp_path, 1, 2), [stalled], None)
    beacon = Beacon.create(tmp_path / "beacon", local_ranks=1, first_rank=0, world_size=1, workers_per_rank=1)
    mark = RankMark(beacon, 0)  # this process
    mark.take()
    mark.finish_step(3)
    mark.enter(Stage.ENCODER)
    settings = started(tmp_path, 0, 1, str(beacon.path))
    write_status(settings, local_rows(beacon, Limits(60.0, 900.0), 0), None)
    assert explain_run(tmp_path).verdict == "alive, at step 3"


def test_a_stopped_rank_is_shown_as_stopped(tmp_path: Path) -> None:
    rows = [row(0), row(1, process="T", in_stage_s=0.1, limit_s=60.0)]
    state = RunState(tmp_path, [NodeState("host", True, 0.0, rows, "")])
    assert state.verdict == "alive, but stopped by a signal or a debugger: rank 1"
