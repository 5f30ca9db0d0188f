"""A run of one rank without a monitor is asked to stop: it announces what it does, and does it."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from nest_ssl.launch.launcher import make_beacon_folder
from nest_ssl.launch.ranks import ALONE
from nest_ssl.watchdog.agent import RankAgent
from nest_ssl.watchdog.beacon import INT, OWNER, Beacon, RankMark
from nest_ssl.watchdog.rank import Stage
from nest_ssl.watchdog.report.status import SETTINGS, explain_run, write_status
from nest_ssl.watchdog.rows import Limits, local_rows
from nest_ssl.watchdog.system import OomKiller
from tests.unit.watchdog.facts import hear_all_signals, monitor_settings

pytestmark = pytest.mark.skipif(not sys.platform.startswith("linux"), reason="signals and /proc of Linux")

LONE = Path(__file__).with_name("lone_rank.py")


def start(run_dir: Path, saves: str, moment: str) -> subprocess.Popen[str]:
    """Start a run and wait until it reaches `moment`."""
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    command = [sys.executable, str(LONE), str(run_dir), saves, moment]
    process = subprocess.Popen(command, env=env, stderr=subprocess.PIPE, text=True, preexec_fn=hear_all_signals)
    assert process.stderr is not None
    assert process.stderr.readline() == "ready\n"
    return process


def ask_to_stop(process: subprocess.Popen[str], number: signal.Signals) -> str:
    """Signal the process; return what it prints until it ends."""
    process.send_signal(number)
    return process.communicate(timeout=10)[1]


def check_only_the_status_is_left(run_dir: Path) -> None:
    assert explain_run(run_dir).verdict == "stopped as asked, resumable"
    status = json.loads((run_dir / "watchdog" / "node0.json").read_text())
    assert not Path(status["beacon"]).parent.exists()


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
@pytest.mark.parametrize(
    ("saves", "moment", "why"),
    [
        ("saves", "init", "nothing to save before the first step"),
        ("does-not-save", "init", "without saving, as configured"),
        ("does-not-save", "stuck-step", "without saving, as configured"),
    ],
)
def test_where_nothing_will_be_saved_the_run_ends_at_once(
    tmp_path: Path, number: signal.Signals, saves: str, moment: str, why: str
) -> None:
    process = start(tmp_path, saves, moment)
    assert ask_to_stop(process, number) == f"nest-ssl: {number.name}: stopped; {why}\n"
    assert process.returncode == 75
    check_only_the_status_is_left(tmp_path)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_run_that_trains_announces_the_step_after_which_it_saves(tmp_path: Path, number: signal.Signals) -> None:
    process = start(tmp_path, "saves", "step")
    told = re.fullmatch(
        rf"nest-ssl: {number.name}: will save and exit by step (\d+)\nsaved after step (\d+)\n",
        ask_to_stop(process, number),
    )
    assert told is not None
    assert told[1] == told[2]
    assert process.returncode == 75
    check_only_the_status_is_left(tmp_path)


def test_a_run_that_is_asked_twice_does_not_wait_for_the_step(tmp_path: Path) -> None:
    process = start(tmp_path, "saves", "stuck-step")
    process.send_signal(signal.SIGTERM)
    assert process.stderr is not None
    assert process.stderr.readline() == "nest-ssl: SIGTERM: will save and exit by step 1\n"
    assert (
        ask_to_stop(process, signal.SIGTERM) == "nest-ssl: SIGTERM: stopped; asked twice, so it did not wait to save\n"
    )
    assert process.returncode == 75
    check_only_the_status_is_left(tmp_path)


def test_a_finished_run_stays_finished_if_a_signal_comes_while_it_reports(tmp_path: Path) -> None:
    process = start(tmp_path, "saves", "finished")
    assert ask_to_stop(process, signal.SIGINT) == "nest-ssl: SIGINT: stopped; the run had finished\n"
    assert process.returncode == 0
    assert explain_run(tmp_path).verdict == "finished"


@pytest.mark.parametrize(
    ("moment", "kind", "stage", "words"),
    [
        ("blocks", "file", "data", "the rank itself is blocked reading {}/fifo: a FIFO"),
        ("hangs", "stalled", "encoder", "the code of this stage does not return"),
    ],
)
def test_a_lone_rank_that_hangs_is_named_and_the_run_resumable(
    tmp_path: Path, moment: str, kind: str, stage: str, words: str
) -> None:
    process = start(tmp_path, "saves", moment)
    said = process.communicate(timeout=30)[1]
    assert process.returncode == 75, said
    (path,) = (tmp_path / "incidents").glob("*.json")
    incident = json.loads(path.read_text())
    assert (incident["kind"], incident["ranks"], incident["stage"]) == (kind, [0], stage)
    assert words.format(tmp_path) in incident["cause"]
    assert 1.0 <= incident["stalled_s"] < 3.0
    assert incident["text"] in said
    assert explain_run(tmp_path).verdict.startswith("ended by an incident")


def test_a_lone_rank_that_was_suspended_for_a_while_is_not_stalled(tmp_path: Path) -> None:
    """Ctrl-Z stops the thread that watches as well: the time counts again from when both continue."""
    process = start(tmp_path, "saves", "hangs")
    process.send_signal(signal.SIGSTOP)
    time.sleep(2.5)
    process.send_signal(signal.SIGCONT)
    time.sleep(0.6)  # in the stage for 3 s, and watched for less than its limit of 1 s
    assert process.poll() is None
    assert process.wait(timeout=30) == 75


def test_a_worker_that_the_oom_killer_has_ended_is_explained_without_a_monitor_too(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    beacon = Beacon.create(tmp_path / "beacon", local_ranks=1, first_rank=0, world_size=1, workers_per_rank=1)
    agent = RankAgent(ALONE, beacon, has_monitor=False)
    killed = RuntimeError("DataLoader worker (pid 12) is killed by signal: Killed. ")
    assert "(pid 12) is killed by signal: Killed: out of shared memory (/dev/shm) or memory?" in agent.why_killed(
        killed
    )
    monkeypatch.setattr(agent.oom_killer, "text", lambda: "the kernel's OOM killer has ended 1 process")
    assert agent.why_killed(ValueError("a bug")) == ""
    assert agent.why_killed(killed) == (
        "DataLoader worker (pid 12) is killed by signal: Killed: the kernel's OOM killer has ended 1 process. Lower "
        "model.train_ds.num_workers, prefetch_factor or prefetch_gb, or give the job more memory."
    )


@pytest.mark.parametrize("cleaned_up_by_another", [False, True])
def test_a_lone_run_that_the_oom_killer_has_ended_is_reported_by_the_next_command_in_its_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], cleaned_up_by_another: bool
) -> None:
    run_dir, other = tmp_path / "run", tmp_path / "other"
    for path in (run_dir, other):
        (path / "watchdog").mkdir(parents=True)
    monkeypatch.setattr("nest_ssl.launch.launcher.shared_memory_folder", lambda: tmp_path)
    monkeypatch.setattr(OomKiller, "kills", lambda self: 3)
    folder = make_beacon_folder("single-1", str(run_dir))
    beacon = Beacon.create(folder / "beacon", local_ranks=1, first_rank=0, world_size=1, workers_per_rank=1)
    settings = monitor_settings(run_dir, str(beacon.path))
    settings.write(folder / SETTINGS)
    mark = RankMark(beacon, 0)
    mark.take()
    write_status(settings, local_rows(beacon, Limits(60.0, 900.0), 0), None)
    mark.finish_step(12)
    mark.enter(Stage.DATA)
    INT.pack_into(beacon.map, OWNER, 2**22 + 1)  # no process has such a pid
    monkeypatch.setattr(OomKiller, "kills", lambda self: 4)
    if cleaned_up_by_another:
        make_beacon_folder("single-2", str(other))
        assert not folder.exists()
        assert capsys.readouterr().err == ""
        monkeypatch.setattr(OomKiller, "kills", lambda self: 9)  # of other processes, later
    how = "killed in data of step 12: the kernel's OOM killer has ended 1 process on this host"
    assert how in explain_run(run_dir).verdict
    make_beacon_folder("single-3", str(run_dir))
    said = capsys.readouterr().err
    assert f"{run_dir}: the last start was {how}" in said
    assert "Lower model.train_ds.num_workers" in said
    assert not folder.exists()
