"""The monitor: what it makes of ranks that change while it looks, and of reports that fail."""

from __future__ import annotations

import contextlib
import json
import math
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from nest_ssl.watchdog.agent import RankAgent
from nest_ssl.watchdog.beacon import Beacon, RankMark
from nest_ssl.watchdog.exchange import Follower, Leader, NodeReport, Orders
from nest_ssl.watchdog.judge.blame import Verdict, judge_stalled
from nest_ssl.watchdog.judge.flight import Flight
from nest_ssl.watchdog.monitor import Following, Monitor
from nest_ssl.watchdog.rank import InitPart, RankFacts, RankState, Stage
from nest_ssl.watchdog.rows import RankRow
from tests.unit.launch.test_launcher import FLOOR_S as JOB_FLOOR_S
from tests.unit.launch.test_launcher import incident, job
from tests.unit.launch.test_launcher import run as launched
from tests.unit.watchdog.facts import FLOOR_S, calls, monitor_settings, row

LONG = [row(rank, Stage.VALIDATION, 3.9) for rank in (0, 1)]
MOVED_ON = [row(rank, Stage.BACKWARD, 0.1) for rank in (0, 1)]


def looking_at(rows_later: list[RankRow], monkeypatch: pytest.MonkeyPatch) -> tuple[Monitor, list[Any]]:
    """Return a monitor whose ranks are in one barrier when asked for their collectives, then at `rows_later`."""
    monitor = Monitor.__new__(Monitor)
    monitor.settings = SimpleNamespace(judges=True, floor_s=FLOOR_S)  # type: ignore[assignment]
    monitor._dead_since, monitor._asked_at, monitor._reported = None, -1e9, set()
    verdicts: list[Any] = []
    open_barrier = calls(1, done=0, op="barrier")
    monkeypatch.setattr(monitor, "_flights", lambda rows: {0: open_barrier, 1: open_barrier})
    monkeypatch.setattr(monitor, "_rows", lambda: rows_later)
    monkeypatch.setattr(monitor, "_stalled", lambda verdict: verdicts.append(verdict))
    for name in ("_dead", "warn_early", "_warn_slow", "_stop"):
        monkeypatch.setattr(monitor, name, lambda *rows: None)
    return monitor, verdicts


def test_ranks_that_moved_on_while_they_were_asked_are_not_stalled(monkeypatch: pytest.MonkeyPatch) -> None:
    monitor, verdicts = looking_at(MOVED_ON, monkeypatch)
    monitor._look(LONG)
    assert verdicts == []


def test_ranks_that_did_not_move_on_are_stalled(monkeypatch: pytest.MonkeyPatch) -> None:
    monitor, verdicts = looking_at(LONG, monkeypatch)
    monitor._look(LONG)
    assert [verdict.kind for verdict in verdicts] == ["unfinished"]


def test_ranks_of_a_node_that_never_reported_are_those_that_never_joined(monkeypatch: pytest.MonkeyPatch) -> None:
    monitor = Monitor.__new__(Monitor)
    joining = row(0, Stage.INIT, 31.0, part=int(InitPart.JOIN), limit_s=30.0, step=0)
    beacon = SimpleNamespace(world_size=2)
    monitor.settings = SimpleNamespace(init_s=30.0)  # type: ignore[assignment]
    monitor.leader, monitor.leader_is_lost = None, False
    monitor._since = time.monotonic() - 31.0
    monitor.node = SimpleNamespace(rows=lambda: [joining], beacon=beacon)  # type: ignore[assignment]
    verdict = judge_stalled(monitor._rows(), {}, FLOOR_S)
    assert verdict is not None
    assert (verdict.kind, verdict.ranks) == ("never-joined", [1])
    training = row(0, Stage.BACKWARD, 1.0)
    monitor.node = SimpleNamespace(rows=lambda: [training], beacon=beacon)  # type: ignore[assignment]
    assert monitor._rows() == [training]


def test_a_report_that_fails_does_not_prevent_the_job_from_being_ended(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    monitor = Monitor.__new__(Monitor)
    monitor.run_dir = tmp_path
    monkeypatch.setattr("nest_ssl.watchdog.monitor.REPORT_S", 0.2)
    for broken in (lambda *_: time.sleep(60), lambda *_: 1 / 0):
        monkeypatch.setattr(monitor, "_say_and_keep", broken)
        assert "rank1" in monitor._report(Verdict("died", [row(1)]))
    said = capsys.readouterr().err
    assert "no answer within 0.2 s" in said
    assert "division by zero" in said
    assert said.count("rank 1 died") == 2


def bare_monitor() -> Monitor:
    monitor = Monitor.__new__(Monitor)
    monitor.leader, monitor.leader_is_lost = None, False
    monitor._dead_since, monitor._asked_at, monitor._reported = None, -1e9, set()
    monitor._evidence = {}
    monitor.settings = SimpleNamespace(judges=True, ends=True, floor_s=FLOOR_S)  # type: ignore[assignment]
    monitor.node = SimpleNamespace(failures=dict)  # type: ignore[assignment]
    return monitor


def test_stalls_are_judged_again_after_a_rank_only_seemed_to_be_gone() -> None:
    monitor = bare_monitor()
    assert monitor._dead([row(0), row(1, process="")]) is None  # not yet settled
    assert monitor._dead_since is not None
    assert monitor._dead([row(0), row(1)]) is None
    assert monitor._dead_since is None


def test_late_ranks_are_asked_every_30_s_and_once_more_before_anybody_is_blamed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monitor = bare_monitor()
    asked: list[float] = []
    waits = [row(0, in_stage_s=4.0), row(1, Stage.CHECKPOINT, 4.0, limit_s=30.0, patience_s=30.0)]
    missing = {0: calls(1, 2, done=1), 1: calls(1)}
    now = [1000.0]
    monkeypatch.setattr("nest_ssl.watchdog.monitor.time.monotonic", lambda: now[0])

    def flights(rows: list[RankRow]) -> dict[int, Flight]:
        asked.append(now[0])
        return missing

    monkeypatch.setattr(monitor, "_flights", flights)
    monkeypatch.setattr(monitor, "_rows", lambda: waits)
    for _ in range(100):  # 25 s of a slow checkpoint
        assert monitor._judge(waits) is None
        now[0] += 0.25
    assert len(asked) == 1
    waits[1] = row(1, Stage.CHECKPOINT, 31.0, limit_s=30.0, patience_s=30.0)
    verdict = monitor._judge(waits)
    assert verdict is not None
    assert verdict.ranks == [1]
    assert asked == [1000.0, 1025.0]


def test_the_warning_at_half_the_limit_names_those_who_are_waited_for(capsys: pytest.CaptureFixture[str]) -> None:
    waiting = [row(rank, Stage.EXCHANGE, 35.0, limit_s=60.0) for rank in (0, 2)]
    bare_monitor().warn_early([*waiting, row(1, Stage.DATA, 35.0, limit_s=60.0)])
    assert capsys.readouterr().err.count("warning") == 1
    monitor = bare_monitor()
    monitor.warn_early([*waiting, row(1, Stage.EXCHANGE, 35.0, limit_s=60.0, process="T")])
    said = capsys.readouterr().err
    assert "rank 1 has been in exchange of step 7 for 35 s, stopped by a signal" in said
    assert "rank 0" not in said
    bare_monitor().warn_early(waiting)  # each waits for the other: nobody is named
    assert capsys.readouterr().err == ""


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="signals and /proc of Linux")
@pytest.mark.parametrize(
    ("behaviours", "kind", "ranks", "stage", "words"),
    [
        (["ok", "ok", "late"], "host-late", [2], "data", "the GPU is done with step 19 and waits for more"),
        (["ok", "stuck", "ok"], "gpu-stuck", [1], "backward", "the GPU has been in backward of step 19 for"),
        (["torn"] * 3, "gpu-unfinished", [0, 1, 2], "exchange", "all GPUs have been in exchange of step 19 for"),
    ],
)
def test_ranks_whose_gpus_report_are_judged_by_that(
    tmp_path: Path, behaviours: list[str], kind: str, ranks: list[int], stage: str, words: str
) -> None:
    """The launcher, the monitor and three ranks with fake GPUs, whose hosts wait for them in the same stage."""
    command = [sys.executable, str(Path(__file__).with_name("fake_gpu_rank.py")), *behaviours]
    code, said = launched(job(tmp_path, *behaviours, command=command))
    assert code == 75, said
    found = incident(tmp_path)
    assert (found["kind"], found["ranks"], found["stage"]) == (kind, ranks, stage), found["text"]
    assert words in found["cause"]
    others = set(range(3)) - set(ranks)
    assert found["waiting"] == {
        str(rank): f"exchange of step {20 if kind == 'host-late' else 19} on the GPU" for rank in others
    }
    assert JOB_FLOOR_S <= found["stalled_s"] < JOB_FLOOR_S + 2


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="/proc of Linux")
@pytest.mark.faults  # 17 s
def test_eight_simulated_nodes_survive_an_outage_and_name_a_stalled_rank() -> None:
    """benchmarks/watchdog_scale.py does the same for 64 and 512 nodes."""
    script = Path(__file__).parents[3] / "benchmarks" / "watchdog_scale.py"
    options = ["--nodes=8", "--seconds=10", "--floor-s=2", "--outage=6", "--processes=1"]
    done = subprocess.run([sys.executable, str(script), *options], capture_output=True, text=True, check=True)
    figures = json.loads(done.stdout)
    assert not figures["false_alarm"], done.stderr
    assert (figures["named"], figures["ended_by_leader"]) == ([figures["stalled_rank"]], 7)
    assert figures["named_after_floor_s"] < 3.0
    assert figures["message_bytes_largest"] < 60_000
    assert "node 7 is in contact with the monitor on node 0 again" in done.stderr


def test_the_monitor_needs_no_torch() -> None:
    code = "import sys, nest_ssl.watchdog.monitor; print('torch' in sys.modules, 'hydra' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["False", "False"]


# ---- stopping together ----


class DeafFollower(Follower):
    """Has no contact with the leader from `deaf_from` on, for `deaf_s`."""

    deaf_from, deaf_s = math.inf, 0.0

    def send(self, report: NodeReport) -> Orders | None:
        if self.deaf_from <= time.monotonic() < self.deaf_from + self.deaf_s:
            return None
        return super().send(report)


class TwoNodes:
    """Two monitors, and two ranks that wait for each other in every step of 5 ms until they are told to stop."""

    def __init__(self, folder: Path) -> None:
        self.stopped_after: dict[int, int] = {}
        self.over = threading.Event()
        self._exchange = threading.Barrier(2)
        self.leader = Leader("127.0.0.1", 0, b"secret", num_nodes=2, world_size=2)
        self.agents, settings = [], []
        for node in (0, 1):
            path = folder / f"node{node}"
            path.mkdir()
            beacon = Beacon.create(path / "beacon", local_ranks=1, first_rank=node, world_size=2, workers_per_rank=1)
            facts = RankFacts(node, 0, 2, 1, node, "nest-ssl", "127.0.0.1", 1)
            self.agents.append(RankAgent(facts, beacon, has_monitor=True))
            self.agents[-1].mark.take()
            settings.append(monitor_settings(folder, str(beacon.path), node=node, num_nodes=2))
        self.follower = DeafFollower("127.0.0.1", self.leader.port, b"secret", 1, 60.0)
        looks = [Monitor(settings[0], self.leader).look_alone, Following(settings[1], self.follower)._look]
        self._threads = [threading.Thread(target=self._monitor, args=(look,)) for look in looks]
        self._threads += [threading.Thread(target=self._train, args=(agent,)) for agent in self.agents]
        for thread in self._threads:
            thread.start()

    def _monitor(self, look: Callable[[], object]) -> None:
        while not self.over.wait(0.05):
            look()

    def _train(self, agent: RankAgent) -> None:
        step = 0
        with contextlib.suppress(threading.BrokenBarrierError):
            while not self.over.is_set():
                agent.mark.enter(Stage.BACKWARD)
                self._exchange.wait(timeout=10)
                step += 1
                agent.mark.finish_step(step)
                if agent.stop_is_due(step):
                    self.stopped_after[agent.facts.rank] = step
                    agent.mark.state = RankState.STOPPED
                    return
                agent.mark.enter(Stage.DATA)
                time.sleep(0.005)

    def wait_for(self, is_so: Callable[[], bool], seconds: float = 8.0) -> bool:
        deadline = time.monotonic() + seconds
        while not is_so() and time.monotonic() < deadline:
            time.sleep(0.01)
        return is_so()

    def end(self) -> None:
        self.over.set()
        self._exchange.abort()
        for thread in self._threads:
            thread.join(timeout=10)
        self.leader.close()


@pytest.fixture
def two_nodes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[TwoNodes]:
    monkeypatch.setattr("nest_ssl.watchdog.monitor.OTHER_NODES_S", 0.1)
    monkeypatch.setattr("nest_ssl.watchdog.monitor.AGREE_WITHIN_S", 1.0)
    nodes = TwoNodes(tmp_path)
    assert nodes.wait_for(lambda: len(nodes.leader.rows()) == 1 and nodes.agents[0].mark.step > 20)
    yield nodes
    nodes.end()


def test_ranks_that_train_on_while_their_monitor_is_late_are_told_one_stop_step(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    beacon = Beacon.create(tmp_path / "beacon", local_ranks=1, first_rank=0, world_size=1, workers_per_rank=1)
    mark = RankMark(beacon, 0)
    mark.take()
    mark.finish_step(7)
    mark.enter(Stage.DATA)
    mark.ask_to_stop(signal.SIGTERM)
    monitor = Monitor(monitor_settings(tmp_path, str(beacon.path)))
    rows, stop_at = monitor.node.rows(), monitor.node.stop_at

    def stop_late(step: int) -> None:
        mark.finish_step(12)
        mark.enter(Stage.DATA)
        stop_at(step)

    monkeypatch.setattr(monitor.node, "stop_at", stop_late)
    assert monitor._stop(rows) is None
    assert beacon.stop_step == beacon.stop_agreed > 13
    assert capsys.readouterr().err == f"nest-ssl: SIGTERM: all ranks will save and exit by step {beacon.stop_step}\n"


@pytest.mark.parametrize("deaf_s", [0.0, 0.8])
def test_nodes_stop_after_the_same_step_even_if_one_hears_of_it_late(
    two_nodes: TwoNodes, deaf_s: float, capsys: pytest.CaptureFixture[str]
) -> None:
    two_nodes.follower.deaf_s, two_nodes.follower.deaf_from = deaf_s, time.monotonic()
    two_nodes.agents[0].mark.ask_to_stop(signal.SIGTERM)
    assert two_nodes.wait_for(lambda: len(two_nodes.stopped_after) == 2), "a rank waits for one that has left"
    assert len(set(two_nodes.stopped_after.values())) == 1
    said = capsys.readouterr().err.strip().splitlines()
    assert said[-1].endswith(f"all ranks will save and exit by step {two_nodes.stopped_after[0]}")
    assert ("node 1 did not confirm in time" in said[-1]) == (deaf_s > 0)


def test_a_node_that_never_confirms_a_stop_does_not_keep_the_others_from_saving(
    two_nodes: TwoNodes, capsys: pytest.CaptureFixture[str]
) -> None:
    two_nodes.follower.deaf_s, two_nodes.follower.deaf_from = math.inf, time.monotonic()
    two_nodes.agents[0].mark.ask_to_stop(signal.SIGTERM)
    assert two_nodes.wait_for(lambda: 0 in two_nodes.stopped_after)
    assert "node 1 did not confirm the stop; the others save and exit now" in capsys.readouterr().err


def test_a_new_monitor_of_the_first_node_repeats_the_stop_step_that_it_finds(two_nodes: TwoNodes) -> None:
    two_nodes.agents[0].beacon.stop_step = 10_000_000
    assert two_nodes.wait_for(lambda: two_nodes.agents[1].beacon.stop_step == 10_000_000)
