"""How a rank that another program launched finds its beacon."""

from __future__ import annotations

from pathlib import Path

import pytest

from nest_ssl.launch.attach import _token, _write_status, attached
from nest_ssl.launch.launcher import make_beacon_folder
from nest_ssl.watchdog.beacon import Beacon
from nest_ssl.watchdog.rank import RankFacts
from tests.unit.watchdog.facts import monitor_settings


def test_a_local_rank_that_another_process_has_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("nest_ssl.launch.launcher.shared_memory_folder", lambda: tmp_path)
    facts = RankFacts(1, 0, 2, 2, 0, "environment", "127.0.0.1", 1234)
    folder = make_beacon_folder(_token(facts), "")
    Beacon.create(folder / "beacon", local_ranks=2, first_rank=0, world_size=2, workers_per_rank=1)
    with (
        pytest.raises(ValueError, match="LOCAL_RANK=0: process"),
        attached(facts, {"run_dir": ""}, workers_per_rank=1, wants_monitor=True),
    ):
        pass


def test_a_requeued_job_has_a_beacon_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    facts = RankFacts(0, 0, 4, 2, 0, "slurm", "127.0.0.1", 1234)
    other_node = RankFacts(2, 0, 4, 2, 1, "slurm", "127.0.0.1", 1234)
    first = _token(facts)
    assert _token(other_node) != first
    monkeypatch.setenv("SLURM_RESTART_COUNT", "1")
    assert _token(facts) != first


def test_a_status_that_cannot_be_written_is_a_warning(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    (tmp_path / "watchdog").touch()  # as little can be made there as where no inode is left
    _write_status(monitor_settings(tmp_path, ""), [])
    assert f"{tmp_path}: the status for 'nest-ssl doctor' could not be written: " in caplog.text
