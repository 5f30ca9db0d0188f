"""`nest-ssl doctor`: the machine, and runs alive and dead."""

from __future__ import annotations

import importlib.metadata
import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from nest_ssl.cli.main import app
from nest_ssl.config import compose
from nest_ssl.launch import machine_check
from nest_ssl.launch.machine_check import BAD, GOOD, Finding, check_machine
from nest_ssl.watchdog.beacon import WORD, Beacon, GpuLog, RankMark, WorkerMark
from nest_ssl.watchdog.rank import FIRST_LAYER, RankState, Stage
from nest_ssl.watchdog.report.status import explain_run, write_status
from nest_ssl.watchdog.rows import Limits, local_rows
from tests.unit.watchdog.facts import monitor_settings


@pytest.fixture
def run_dir(tmp_path: Path) -> Path:
    """A run whose rank 0 is this very process, in layer 1 of step 7."""
    (tmp_path / "run").mkdir()
    beacon = Beacon.create(tmp_path / "beacon", local_ranks=1, first_rank=0, world_size=1, workers_per_rank=1)
    mark = RankMark(beacon, 0)
    mark.take()
    mark.finish_step(7)
    mark.enter(Stage.ENCODER, FIRST_LAYER + 1)
    WorkerMark(beacon, 0, 0, -1).reads("/data/7.wav")
    settings = monitor_settings(tmp_path / "run", str(beacon.path))
    write_status(settings, local_rows(beacon, Limits(60, 900), 0), None)
    return tmp_path / "run"


@pytest.mark.parametrize(("content", "words"), [(b"", "last.ckpt, damaged"), (b"PK\5\6" + bytes(18), "last.ckpt\n")])
def test_a_newest_checkpoint_that_was_cut_is_called_damaged(run_dir: Path, content: bytes, words: str) -> None:
    (run_dir / "checkpoints").mkdir()
    (run_dir / "checkpoints" / "last.ckpt").write_bytes(content)
    result = CliRunner().invoke(app, ["doctor", str(run_dir)])
    assert result.exit_code == 0
    assert words in result.output.replace("\nlast", "last")


def test_a_live_run_is_read_from_its_beacon(run_dir: Path) -> None:
    result = CliRunner().invoke(app, ["doctor", str(run_dir)])
    assert result.exit_code == 0, result.output
    assert "alive, at step 7" in result.output
    assert "encoder layer 1" in result.output
    assert "/data/7.wav" in result.output


def test_the_stage_of_the_gpu_is_shown_next_to_its_hosts(run_dir: Path) -> None:
    beacon = Beacon(run_dir.parent / "beacon")
    log = GpuLog(beacon, 0)
    log.begins(5)
    log.is_launched()
    for stage, words in (
        (Stage.EXCHANGE, "encoder layer 1; GPU in exchange of step 5"),
        (Stage.END, "GPU done with step 5"),
    ):
        WORD.pack_into(beacon.map, beacon.gpu_at(0), log.batch << 8 | stage)
        result = CliRunner().invoke(app, ["doctor", str(run_dir)], env={"COLUMNS": "200"})
        assert words in result.output


def test_a_rank_that_is_late_is_reported_before_anything_is_ended(run_dir: Path) -> None:
    path = run_dir / "watchdog" / "node0.json"
    status = json.loads(path.read_text())
    status["settings"]["floor_s"] = 1e-9
    path.write_text(json.dumps(status))
    assert "over the time limit of their stage: rank 0 in encoder layer 1" in explain_run(run_dir).verdict


def test_a_dead_run_is_explained_by_its_last_words(run_dir: Path) -> None:
    (run_dir.parent / "beacon").unlink()
    (run_dir / "incidents").mkdir()
    incident = {"time": "now", "text": "nest-ssl: rank 0 died\n  where     encoder"}
    (run_dir / "incidents" / "x.json").write_text(json.dumps(incident))
    result = CliRunner().invoke(app, ["doctor", str(run_dir)])
    assert "ended by an incident: rank 0 died" in result.output
    assert "to resume: nest-ssl pretrain again" in result.output


def test_a_finished_run_is_finished(run_dir: Path) -> None:
    path = run_dir / "watchdog" / "node0.json"
    status = json.loads(path.read_text())
    status["rows"][0]["state"] = RankState.FINISHED.name.lower()
    path.write_text(json.dumps(status))
    (run_dir.parent / "beacon").unlink()
    assert explain_run(run_dir).verdict == "finished"


def test_another_folder_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="not a run folder"):
        explain_run(tmp_path)


def test_the_machine_is_checked_line_by_line(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(machine_check, "_all_reduce", lambda: Finding(GOOD, "all_reduce", "left out"))
    names = [finding.name for finding in check_machine(compose())]
    for name in ("config", "versions", "shared memory", "open files", "port", "stacks", "all_reduce"):
        assert name in names


def test_the_check_needs_no_optional_package(monkeypatch: pytest.MonkeyPatch) -> None:
    def version(name: str) -> str:
        if name == "torch":
            return "2.13.0"
        raise importlib.metadata.PackageNotFoundError(name)

    monkeypatch.setattr(importlib.metadata, "version", version)
    finding = machine_check._versions()
    assert finding.state == GOOD
    assert finding.what.endswith("torch 2.13.0")


def test_something_bad_is_exit_code_1(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(machine_check, "_all_reduce", lambda: Finding(BAD, "all_reduce", "two ranks did not finish"))
    result = CliRunner().invoke(app, ["doctor"])
    assert result.exit_code == 1
    assert "sync_max_audio_length" in result.output


def test_two_ranks_meet_on_this_machine() -> None:
    finding = machine_check._all_reduce()
    assert finding.state == GOOD, finding.what
