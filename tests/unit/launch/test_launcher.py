"""Launcher and monitor with ranks that need no torch: exit codes, reports, restarts, stopping together."""

from __future__ import annotations

import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest

from nest_ssl.launch import launcher as launch
from nest_ssl.launch.attach import _token
from nest_ssl.launch.launcher import Job, KeptMonitor, check_address, check_port, free_port
from nest_ssl.launch.ranks import ALONE
from nest_ssl.watchdog.beacon import INT, OWNER, Beacon, Hold
from nest_ssl.watchdog.rank import RankFacts
from nest_ssl.watchdog.report.status import Settings
from nest_ssl.watchdog.system import is_alive

pytestmark = pytest.mark.skipif(not sys.platform.startswith("linux"), reason="signals and /proc of Linux")

FLOOR_S = 1.0
FAKE = Path(__file__).with_name("fake_rank.py")
LAUNCHER = (
    "import json, sys; from nest_ssl.launch.launcher import Job, launch; "
    "sys.exit(launch(Job(**json.loads(sys.argv[1]))))"
)


def job(run_dir: Path, *behaviours: str, **other: Any) -> Job:
    run_dir.mkdir(exist_ok=True)
    settings = {
        "run_dir": str(run_dir),
        "floor_s": FLOOR_S,
        "init_s": 30.0,
        "judges": True,
        "ends": True,
        "saves": True,
        "resume_command": "nest-ssl pretrain again",
    }
    values: dict[str, Any] = {
        "command": [sys.executable, str(FAKE), *behaviours],
        "local_ranks": len(behaviours),
        "num_nodes": 1,
        "node": 0,
        "master_addr": "127.0.0.1",
        "master_port": None,
        "workers_per_rank": 1,
        "settings": settings,
        "resume_arguments": [],
    }
    return Job(**(values | other))


def start(job: Job) -> subprocess.Popen[str]:
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    return subprocess.Popen(
        [sys.executable, "-c", LAUNCHER, json.dumps(asdict(job))], env=env, stderr=subprocess.PIPE, text=True
    )


def wait_until_ranks_are_at_step(run_dir: Path, step: int) -> None:
    """Wait for the step in the monitor's status: how long a start takes depends on the machine."""
    path = run_dir / "watchdog" / "node0.json"
    for _ in range(300):
        if path.exists() and min(row["step"] for row in json.loads(path.read_text())["rows"]) >= step:
            return
        time.sleep(0.1)
    raise AssertionError(f"{path}: not at step {step} within 30 s")


def run(job: Job) -> tuple[int, str]:
    process = start(job)
    _, stderr = process.communicate(timeout=60)
    return process.returncode, stderr


def incident(run_dir: Path) -> dict[str, Any]:
    (path,) = (run_dir / "incidents").glob("*.json")
    content: dict[str, Any] = json.loads(path.read_text())
    return content


def test_ranks_that_finish_are_a_finished_job_without_output(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONWARNINGS", "error::ResourceWarning")  # of a file that nobody closes
    code, stderr = run(job(tmp_path, "ok", "ok"))
    assert (code, stderr) == (0, "")
    status = json.loads((tmp_path / "watchdog" / "node0.json").read_text())
    assert [row["state"] for row in status["rows"]] == ["finished", "finished"]


def test_a_killed_rank_is_named_and_the_job_resumable(tmp_path: Path) -> None:
    code, stderr = run(job(tmp_path, "long", "kill"))
    assert code == 75
    assert incident(tmp_path)["ranks"] == [1]
    assert incident(tmp_path)["text"] in stderr


@pytest.mark.parametrize(("behaviour", "kind"), [("sleep", "stalled"), ("freeze", "stopped")])
def test_a_stalled_rank_is_named(tmp_path: Path, behaviour: str, kind: str) -> None:
    code, _ = run(job(tmp_path, behaviour, "long"))
    assert code == 75
    found = incident(tmp_path)
    assert (found["ranks"], found["kind"], found["stage"]) == ([0], kind, "encoder")
    assert FLOOR_S <= found["stalled_s"] < FLOOR_S + 1
    assert Path(found["evidence"], "stacks", "rank0.txt").is_file()


FORKED = """
import os, signal, sys
from pathlib import Path
from nest_ssl.launch.launcher import fork_rank
from nest_ssl.watchdog.beacon import Beacon

path, outcome, end = Path(sys.argv[1]), sys.argv[2], sys.argv[3]
task = fork_rank()
beacon = Beacon.create(path, local_ranks=1, first_rank=0, world_size=2, workers_per_rank=1)
os.write(task, os.fsencode(path))
os.close(task)
beacon.outcome = int(outcome) if outcome else None
if end == "killed":
    os.kill(os.getpid(), signal.SIGKILL)
os._exit(int(end))
"""


@pytest.mark.parametrize(
    ("outcome", "end", "code"),
    [("75", "killed", 75), ("1", "killed", 1), ("75", "1", 75), ("", "0", 0), ("", "75", 75), ("", "1", 1)],
)
def test_a_task_of_slurm_exits_as_the_job_does_even_if_its_rank_is_killed(
    tmp_path: Path, outcome: str, end: str, code: int
) -> None:
    command = [sys.executable, "-c", FORKED, str(tmp_path / "beacon"), outcome, end]
    assert subprocess.run(command, check=False, timeout=60).returncode == code


def test_a_killed_rank_that_no_monitor_has_judged_counts_as_resumable() -> None:
    assert launch.exit_code_of_task(-9, None) == 75


def test_an_exception_needs_a_person(tmp_path: Path) -> None:
    code, stderr = run(job(tmp_path, "long", "fail"))
    assert code == 1
    assert incident(tmp_path)["cause"] == "KeyError: 'a bug'"
    assert "nest-ssl: rank 1 failed" in stderr


def test_a_rank_that_dies_before_it_can_report_is_named(tmp_path: Path) -> None:
    code, _ = run(job(tmp_path, "exit-3-early", "long"))
    assert code == 1
    assert incident(tmp_path)["ranks"] == [0]
    assert "exit code 3" in incident(tmp_path)["cause"]


def test_restarts_end_when_the_same_fault_recurs(tmp_path: Path) -> None:
    code, stderr = run(job(tmp_path, "long", "kill", max_restarts=5))
    assert code == 1
    assert stderr.count("nest-ssl: restart") == 1
    assert "the same fault again (died, ranks [1], encoder of step 20)" in stderr


@pytest.fixture
def stranger() -> Iterator[subprocess.Popen[bytes]]:
    """A process that has nothing to do with the job."""
    process = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(300)"], start_new_session=True)
    yield process
    process.kill()
    process.wait()


ENDED_BY_LAUNCHER, ENDED_BY_MONITOR = ("ok", 0), ("kill", 75)


@pytest.mark.parametrize(("behaviour", "code"), [ENDED_BY_LAUNCHER, ENDED_BY_MONITOR])
def test_a_process_that_reuses_the_pid_of_an_ended_worker_is_left_alone(
    tmp_path: Path, stranger: subprocess.Popen[bytes], behaviour: str, code: int
) -> None:
    assert run(job(tmp_path, f"had-a-worker-{stranger.pid}", behaviour))[0] == code
    assert stranger.poll() is None


@pytest.mark.parametrize(("behaviour", "code"), [ENDED_BY_LAUNCHER, ENDED_BY_MONITOR])
def test_a_worker_whose_rank_has_died_is_ended(tmp_path: Path, behaviour: str, code: int) -> None:
    ended_with, stderr = run(job(tmp_path, f"leave-a-worker-and-{behaviour}", "ok"))
    assert ended_with == code, stderr
    (worker,) = [int(line.split()[1]) for line in stderr.splitlines() if line.startswith("worker ")]
    assert not is_alive(worker)


def test_sigterm_stops_all_ranks_after_the_same_step(tmp_path: Path) -> None:
    process = start(job(tmp_path, "long", "long", "long"))
    wait_until_ranks_are_at_step(tmp_path, 10)
    process.send_signal(signal.SIGTERM)
    _, stderr = process.communicate(timeout=20)
    assert process.returncode == 75
    stopped = {line.rsplit(" ", 1)[1] for line in stderr.splitlines() if "stopped after step" in line}
    assert len(stopped) == 1, stderr
    assert f"all ranks will save and exit by step {stopped.pop()}\n" in stderr


def test_asked_twice_everything_ends_at_once(tmp_path: Path) -> None:
    patient = job(tmp_path, "long", "freeze")
    patient.settings["floor_s"] = 60.0  # nothing else may end it
    process = start(patient)
    wait_until_ranks_are_at_step(tmp_path, 20)  # where one of them freezes
    process.send_signal(signal.SIGTERM)
    time.sleep(0.3)
    assert process.poll() is None
    process.send_signal(signal.SIGTERM)
    process.communicate(timeout=5)
    assert process.returncode == 75


def test_a_port_in_use_is_refused_with_a_way_out() -> None:
    with socket.socket() as taken:
        taken.bind(("", 0))
        taken.listen()
        with pytest.raises(ValueError, match="MASTER_PORT"):
            check_port(taken.getsockname()[1])
    check_port(free_port())


def test_a_port_that_the_launcher_has_chosen_cannot_be_taken_before_rank_0_uses_it(tmp_path: Path) -> None:
    code, stderr = run(job(tmp_path, "ok", "take-port"))
    assert (code, stderr) == (0, "the port was taken\n")


def test_an_address_that_cannot_be_resolved_is_refused_with_a_way_out() -> None:
    with pytest.raises(ValueError, match="MASTER_ADDR=nowhere.invalid"):
        check_address("nowhere.invalid")
    check_address("127.0.0.1")


def test_a_loopback_that_is_down_is_refused_with_a_way_out() -> None:
    without_network = ["unshare", "--map-root-user", "--net"]
    if shutil.which("unshare") is None or subprocess.run([*without_network, "true"], check=False).returncode:
        pytest.skip("no network namespaces here")
    program = "from nest_ssl.launch.launcher import check_address; check_address('127.0.0.1')"
    command = [*without_network, sys.executable, "-c", program]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=60)
    assert "ValueError: 127.0.0.1: Network is unreachable: the loopback interface" in done.stderr
    assert "'ip link set lo up'" in done.stderr


def test_ranks_save_even_if_the_terminal_goes_away(tmp_path: Path) -> None:
    process = start(job(tmp_path, "long", "long"))
    wait_until_ranks_are_at_step(tmp_path, 10)
    assert process.stderr is not None
    process.stderr.close()  # as Ctrl-C does with '2>&1 | tee log'
    process.send_signal(signal.SIGTERM)
    assert process.wait(timeout=20) == 75
    status = json.loads((tmp_path / "watchdog" / "node0.json").read_text())
    assert [row["state"] for row in status["rows"]] == ["stopped", "stopped"]


def test_an_incident_is_written_even_without_a_terminal(tmp_path: Path) -> None:
    process = start(job(tmp_path, "long", "kill"))
    assert process.stderr is not None
    process.stderr.close()
    assert process.wait(timeout=30) == 75
    assert incident(tmp_path)["ranks"] == [1]


def test_a_rank_that_freezes_while_it_exits_is_named(tmp_path: Path) -> None:
    code, _ = run(job(tmp_path, "ok", "freeze-at-the-end"))
    assert code == 75
    assert (incident(tmp_path)["ranks"], incident(tmp_path)["kind"]) == ([1], "stopped")


@pytest.fixture
def one_rank(tmp_path: Path) -> tuple[Settings, Beacon]:
    beacon = Beacon.create(tmp_path / "beacon", local_ranks=1, first_rank=0, world_size=1, workers_per_rank=1)
    settings = job(tmp_path).settings
    return Settings(**settings, beacon=str(beacon.path), node=0, parent=os.getpid()), beacon


def test_a_stalled_monitor_is_replaced(
    one_rank: tuple[Settings, Beacon], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(launch, "SILENT_S", 1.0)
    monitor = KeptMonitor(*one_rank)
    monitor.start()
    first = monitor.process
    assert first is not None
    deadline = time.monotonic() + 10
    while not one_rank[1].monitor_beat_ns and time.monotonic() < deadline:
        time.sleep(0.05)
    first.send_signal(signal.SIGUSR1)  # as a cluster sends it to every process
    time.sleep(0.2)
    monitor.keep()
    assert monitor.process is first
    first.send_signal(signal.SIGSTOP)
    time.sleep(1.5)
    monitor.keep()
    assert first.poll() == -signal.SIGKILL
    assert "the monitor stalled for" in capsys.readouterr().err
    second = monitor.process
    assert second is not None
    assert second.poll() is None
    second.kill()
    second.wait()


def test_after_three_monitors_a_new_one_comes_once_a_minute(
    one_rank: tuple[Settings, Beacon], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monitor, clock = KeptMonitor(*one_rank), [1e9]
    monkeypatch.setattr(time, "monotonic_ns", lambda: int(1e9 * clock[0]))
    monkeypatch.setattr(KeptMonitor, "start", lambda self: start(self))
    started: list[float] = []

    def start(self: KeptMonitor) -> None:
        started.append(clock[0])
        self._num_started, self._started_ns = len(started), time.monotonic_ns()
        self.process = subprocess.Popen([sys.executable, "-c", "import os; os.kill(os.getpid(), 9)"])
        self.process.wait()

    monitor.start()
    for _ in range(200):
        clock[0] += 1
        monitor.keep()
    assert [at - started[0] for at in started] == [0, 1, 2, 62, 122, 182]
    assert capsys.readouterr().err.count("the monitor was killed; training continues with a new monitor") == 5


# ---- the beacon's folder ----


def beacon_in(folder: Path) -> Beacon:
    return Beacon.create(folder / "beacon", local_ranks=1, first_rank=0, world_size=2, workers_per_rank=1)


def test_a_beacon_is_kept_while_anybody_uses_it_even_in_another_container(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(launch, "shared_memory_folder", lambda: tmp_path)
    folder = launch.make_beacon_folder("a", "")
    INT.pack_into(beacon_in(folder).map, OWNER, 2**22 + 1)  # a number that means nothing in this container
    lock = Hold(folder)
    launch.make_beacon_folder("b", "")
    assert folder.is_dir()
    lock.close()
    launch.make_beacon_folder("c", "")
    assert not folder.exists()


def test_a_folder_of_somebody_else_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(launch, "shared_memory_folder", lambda: tmp_path / "shm")
    elsewhere = tmp_path / "elsewhere"
    for folder in (tmp_path / "shm", elsewhere):
        folder.mkdir(mode=0o700)
    launch.beacon_folder("link").symlink_to(elsewhere)
    launch.beacon_folder("file").touch()
    launch.beacon_folder("open").mkdir()
    launch.beacon_folder("open").chmod(0o777)
    for token in ("link", "file", "open"):
        with pytest.raises((ValueError, FileExistsError)):
            launch.make_beacon_folder(token, "")
    launch.beacon_folder("foreign").mkdir(mode=0o700)
    monkeypatch.setattr(os, "getuid", lambda: 54321)
    with pytest.raises(ValueError, match="belongs to you alone"):
        launch.check_folder(tmp_path / "shm")
    assert list(elsewhere.iterdir()) == []


def test_beacons_of_a_stranger_are_not_removed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(launch, "shared_memory_folder", lambda: tmp_path)
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    INT.pack_into(beacon_in(elsewhere).map, OWNER, 2**22 + 1)
    launch.beacon_folder("link").symlink_to(elsewhere)
    launch.make_beacon_folder("a", "")
    assert (elsewhere / "beacon").is_file()


def test_the_names_of_beacons_cannot_be_guessed(monkeypatch: pytest.MonkeyPatch) -> None:
    assert _token(ALONE) != _token(ALONE)
    facts = RankFacts(0, 0, 2, 2, 0, "torchrun", "127.0.0.1", 1234)
    names = []
    for secret in ("x", "y"):
        monkeypatch.setenv("NEST_SSL_SECRET", secret)
        assert _token(facts) == _token(facts)
        names.append(_token(facts))
    assert names[0] != names[1]
