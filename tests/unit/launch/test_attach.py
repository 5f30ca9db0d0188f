"""How a rank that another program launched finds its beacon."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from nest_ssl.launch.attach import _exit_code_of_task, _token, attached
from nest_ssl.launch.launcher import make_beacon_folder
from nest_ssl.watchdog.beacon import Beacon
from nest_ssl.watchdog.rank import RankFacts


def test_a_local_rank_that_another_process_has_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("nest_ssl.launch.launcher.shared_memory_folder", lambda: tmp_path)
    facts = RankFacts(1, 0, 2, 2, 0, "environment", "127.0.0.1", 1234)
    folder = make_beacon_folder(_token(facts))
    Beacon.create(folder / "beacon", local_ranks=2, first_rank=0, world_size=2, workers_per_rank=1)
    with (
        pytest.raises(ValueError, match="LOCAL_RANK=0: process"),
        attached(facts, {}, workers_per_rank=1, wants_monitor=True),
    ):
        pass


FORKED = """
import os, signal, sys
from pathlib import Path
from nest_ssl.launch.attach import _fork_rank
from nest_ssl.watchdog.beacon import Beacon

path, outcome, end = Path(sys.argv[1]), sys.argv[2], sys.argv[3]
task = _fork_rank()
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
    assert _exit_code_of_task(-9, None) == 75


def test_a_requeued_job_has_a_beacon_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    facts = RankFacts(0, 0, 4, 2, 0, "slurm", "127.0.0.1", 1234)
    other_node = RankFacts(2, 0, 4, 2, 1, "slurm", "127.0.0.1", 1234)
    first = _token(facts)
    assert _token(other_node) != first
    monkeypatch.setenv("SLURM_RESTART_COUNT", "1")
    assert _token(facts) != first
