"""The name of a run's folder."""

from __future__ import annotations

import contextlib
import errno
import os
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from nest_ssl.config import ExperimentConfig, NestConfig
from nest_ssl.run_folder import RunFolder
from nest_ssl.training.experiment import (
    VERSION_VARIABLE,
    _cannot_be_written,
    check_all_name_it_alike,
    created,
    describe,
    git_commit,
    named_for_ranks,
    run_folder,
    saves_when_stopped,
)
from tests.helpers import tiny_model


def config(exp_dir: Path, **options: object) -> NestConfig:
    exp = ExperimentConfig(exp_dir=str(exp_dir), name="run", **options)  # type: ignore[arg-type]
    return NestConfig(tiny_model().cfg, exp_manager=exp)


def exp_of(cfg: NestConfig) -> ExperimentConfig:
    assert cfg.exp_manager is not None
    return cfg.exp_manager


def folder_of(cfg: NestConfig) -> RunFolder:
    return run_folder(exp_of(cfg), cfg.name)


@pytest.mark.parametrize("by_time", [True, False])
def test_every_new_run_has_its_own_folder(tmp_path: Path, by_time: bool) -> None:
    paths = []
    for _ in range(3):  # within a second
        paths.append(folder_of(config(tmp_path, use_datetime_version=by_time)).path)
        paths[-1].mkdir(parents=True)
    assert len(set(paths)) == 3


def test_ranks_have_the_folder_of_their_launcher(tmp_path: Path) -> None:
    cfg = config(tmp_path)
    folder = folder_of(cfg)
    with named_for_ranks(folder):
        folder.path.mkdir(parents=True)
        assert folder_of(cfg) == folder
        check_all_name_it_alike(exp_of(cfg))
    assert VERSION_VARIABLE not in os.environ
    assert folder_of(cfg) != folder


def test_ranks_of_another_launcher_must_be_told_a_name(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"exp_manager\.version=NAME, or exp_manager\.resume_if_exists=true"):
        check_all_name_it_alike(exp_of(config(tmp_path)))
    for told in ({"version": "a"}, {"resume_if_exists": True}, {"explicit_log_dir": str(tmp_path)}):
        check_all_name_it_alike(exp_of(config(tmp_path, **told)))


def test_a_dry_run_saves_nothing_when_it_is_stopped(tmp_path: Path) -> None:
    cfg = config(tmp_path)
    assert saves_when_stopped(cfg)
    assert not saves_when_stopped(config(tmp_path, create_preemption_callback=False))
    cfg.trainer.fast_dev_run = True
    assert not saves_when_stopped(cfg)


def test_a_lock_that_cannot_be_opened_is_named(tmp_path: Path) -> None:
    error = OSError(errno.EACCES, os.strerror(errno.EACCES), str(tmp_path / ".lock"))
    assert str(_cannot_be_written(RunFolder(tmp_path), error)).startswith(f"{tmp_path / '.lock'}: cannot be written: P")


@contextlib.contextmanager
def files_of_no_byte() -> Iterator[None]:
    """Whatever is written to a file fails, as on a full disk."""
    resource = pytest.importorskip("resource")
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (0, limits[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)


def test_a_lock_without_room_for_a_line_is_named(tmp_path: Path) -> None:
    cfg = config(tmp_path)
    with (
        pytest.raises(ValueError, match="cannot be written: File too large. Set exp_manager.exp_dir"),
        files_of_no_byte(),
        created(folder_of(cfg), cfg),
    ):
        pass


def test_a_folder_for_checkpoints_that_cannot_be_written_is_named_with_its_key(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    folder = RunFolder(tmp_path / "run", dirpath=str(tmp_path / "file" / "checkpoints"))
    error = OSError(errno.ENOTDIR, os.strerror(errno.ENOTDIR), str(folder.checkpoints))
    message = str(_cannot_be_written(folder, error))
    assert message.startswith(f"{folder.checkpoints}: cannot be written: Not a directory.")
    assert "exp_manager.checkpoint_callback_params.dirpath" in message


@pytest.mark.parametrize("name", ["metrics.csv", "hparams.yaml", "checkpoints", "notes.txt"])
def test_a_file_to_copy_that_would_replace_another_is_refused_before_anything_is_written(
    tmp_path: Path, name: str
) -> None:
    for part in ("a", "b"):
        (tmp_path / part).mkdir()
        (tmp_path / part / name).touch()
    cfg = config(tmp_path / "runs", files_to_copy=[str(tmp_path / part / name) for part in ("a", "b")])
    refused = pytest.raises(ValueError, match=f"files_to_copy: .*{name}: the run folder has another file of that name")
    with refused, created(folder_of(cfg), cfg):
        pass
    assert not (tmp_path / "runs").exists()


def test_a_run_removes_what_a_killed_one_was_writing(tmp_path: Path) -> None:
    cfg = config(tmp_path)
    folder = folder_of(cfg)
    for place in (folder.path, folder.checkpoints):
        place.mkdir(parents=True, exist_ok=True)
        (place / ".last.ckpt.4711-0123abcd.tmp").touch()
    describe(folder, cfg)
    assert not list(folder.path.rglob("*.tmp"))


def test_git_runs_no_command_of_the_folder_and_a_broken_one_ends_no_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    git = ["git", "-c", "user.name=a", "-c", "user.email=a@b"]
    for command in (["init", "-q"], ["commit", "-q", "--allow-empty", "-m", "x"]):
        subprocess.run([*git, *command], check=True)
    (tmp_path / "file").touch()
    subprocess.run([*git, "config", "core.fsmonitor", "touch pwned; false"], check=True)
    assert git_commit().endswith(" with changes\n")
    assert not (tmp_path / "pwned").exists()
    (tmp_path / "git").write_text("#!/bin/sh\nprintf '\\224\\377'\n")
    (tmp_path / "git").chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    assert "\ufffd" in git_commit()
