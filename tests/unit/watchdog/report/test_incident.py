"""Incidents: which checkpoint they name."""

from __future__ import annotations

from pathlib import Path

from nest_ssl.watchdog.report.incident import newest_checkpoint


def test_a_checkpoint_that_leads_nowhere_is_none(tmp_path: Path) -> None:
    (tmp_path / "checkpoints").mkdir()
    (tmp_path / "checkpoints" / "gone.ckpt").symlink_to(tmp_path / "nowhere")
    assert newest_checkpoint(tmp_path) is None
    (tmp_path / "checkpoints" / "last.ckpt").write_bytes(b"")
    assert newest_checkpoint(tmp_path) == tmp_path / "checkpoints" / "last.ckpt"


def test_of_two_names_of_one_checkpoint_the_last_is_given(tmp_path: Path) -> None:
    folder = tmp_path / "checkpoints"
    folder.mkdir()
    (folder / "m--val_loss=1.ckpt").write_bytes(b"")
    for name in ("last.ckpt", "a.ckpt"):
        (folder / name).hardlink_to(folder / "m--val_loss=1.ckpt")
    assert newest_checkpoint(tmp_path) == folder / "last.ckpt"
