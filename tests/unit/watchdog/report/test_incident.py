"""Incidents: ten lines and a JSON file from a verdict."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from nest_ssl.run_folder import RunFolder
from nest_ssl.watchdog.judge.blame import Verdict
from nest_ssl.watchdog.judge.failure import Failure
from nest_ssl.watchdog.rank import Stage
from nest_ssl.watchdog.report.incident import (
    exit_code_of,
    headline,
    make_incident,
    read_incidents,
    write_incident,
)
from tests.unit.watchdog.facts import row, worker


def test_an_incident_is_ten_lines_and_a_file_that_reads_back(tmp_path: Path) -> None:
    blocked = row(1, Stage.DATA, workers=[worker(path="/dead/disk.wav")])
    verdict = Verdict("file", [blocked], 4.0, blocked.workers[0], waiting=[row(0)])
    incident = make_incident(verdict, ["read (a.py:3)"], tmp_path, "name", "nest-ssl pretrain again")
    lines = incident.text.splitlines()
    assert len(lines) == 10
    assert lines[0] == "nest-ssl: rank 1 is waiting for a file"
    assert lines[2:5] == [
        "  since     4.0 s ago (limit 3 s)",
        "  on        file /dead/disk.wav",
        "  others    waiting for rank 1: rank 0 in backward",
    ]
    assert "nothing yet: resuming starts from the beginning" in lines[8]
    path = write_incident(incident, tmp_path)
    assert json.loads(path.read_text())["file"] == "/dead/disk.wav"
    assert read_incidents(tmp_path)[0]["text"] == incident.text


def test_an_incident_names_the_checkpoint_that_a_resume_starts_from(tmp_path: Path) -> None:
    (tmp_path / "checkpoints").mkdir()
    (tmp_path / "checkpoints" / "last.ckpt").write_bytes(b"")
    incident = make_incident(Verdict("died", [row(1)]), [], tmp_path, "name", "again")
    assert incident.checkpoint == str(tmp_path / "checkpoints" / "last.ckpt")
    assert "  saved     last.ckpt; evidence:" in incident.text


@pytest.mark.parametrize(
    ("kind", "other", "code"),
    [
        ("stalled", {}, 75),
        ("died", {"exit_status": -9}, 75),
        ("died", {"exit_status": 3}, 1),
        ("out-of-memory", {}, 75),
        ("host-memory", {}, 75),
    ],
)
def test_what_would_recur_needs_a_person_and_the_rest_is_resumable(kind: str, other: dict[str, Any], code: int) -> None:
    assert exit_code_of(Verdict(kind, [row(1, **other)])) == code


def test_a_lost_connection_is_resumable_and_an_exception_is_not() -> None:
    lost, bug = (
        Failure(0, "RuntimeError", text, "", 0) for text in ("Connection reset by peer", "shapes do not match")
    )
    assert exit_code_of(Verdict("failed", [row(0)], failure=lost)) == 75
    assert exit_code_of(Verdict("failed", [row(0)], failure=bug)) == 1


def test_several_culprits_are_named_together() -> None:
    assert headline(Verdict("stopped", [row(5), row(1), row(2)])) == "ranks 1, 2 and 5 were stopped by a signal"
    assert headline(Verdict("missing", [row(rank) for rank in range(9)])) == "9 ranks stalled"


def test_a_dangling_link_is_not_a_checkpoint(tmp_path: Path) -> None:
    (tmp_path / "checkpoints").mkdir()
    (tmp_path / "checkpoints" / "gone.ckpt").symlink_to(tmp_path / "nowhere")
    assert RunFolder.open(tmp_path).newest_checkpoint() is None
    (tmp_path / "checkpoints" / "last.ckpt").write_bytes(b"")
    assert RunFolder.open(tmp_path).newest_checkpoint() == tmp_path / "checkpoints" / "last.ckpt"


def test_last_is_preferred_among_names_of_one_checkpoint(tmp_path: Path) -> None:
    folder = tmp_path / "checkpoints"
    folder.mkdir()
    (folder / "m--val_loss=1.ckpt").write_bytes(b"")
    for name in ("last.ckpt", "a.ckpt"):
        (folder / name).hardlink_to(folder / "m--val_loss=1.ckpt")
    assert RunFolder.open(tmp_path).newest_checkpoint() == folder / "last.ckpt"


@pytest.mark.parametrize("text", ["", '{"time": "x", "te', "[1]", '{"time": 3}', '{"a":' * 100_000])
def test_an_incident_that_was_cut_or_edited_is_named(tmp_path: Path, text: str) -> None:
    (tmp_path / "incidents").mkdir()
    (tmp_path / "incidents" / "one.json").write_text(text)
    with pytest.raises(ValueError, match=r"incidents/one\.json: is damaged "):
        read_incidents(tmp_path)
