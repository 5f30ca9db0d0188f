"""The folder of a run, as NeMo's exp_manager lays it out, and what can be resumed from it."""

from __future__ import annotations

import contextlib
import dataclasses
import datetime
import itertools
import logging
import os
import platform
import shutil
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import yaml

from nest_ssl.config import CheckpointConfig, ExperimentConfig, NestConfig
from nest_ssl.run_folder import LAST
from nest_ssl.run_folder import RunFolder as AnyRunFolder

try:
    import fcntl
except ImportError:  # Windows
    fcntl = None  # type: ignore[assignment]

log = logging.getLogger(__name__)

DEFAULT_ROOT = "nest_experiments"
LOCK = ".lock"
VERSION_VARIABLE = "NEST_SSL_RUN_VERSION"
"""Set by the launcher for its ranks, so that all have one folder."""


@dataclass(frozen=True)
class RunFolder:
    """Where a run keeps its things."""

    path: Path
    dirpath: str | None = None
    """`checkpoint_callback_params.dirpath`: another folder for checkpoints."""

    @property
    def checkpoints(self) -> Path:
        return self.path / "checkpoints" if self.dirpath is None else Path(self.dirpath).expanduser().absolute()

    @property
    def metrics_csv(self) -> Path:
        return self.path / "metrics.csv"

    def nemo_file(self, params: CheckpointConfig) -> Path:
        return self.checkpoints / f"{params.prefix or self.path.name}{params.postfix}"


def run_folder(cfg: NestConfig) -> RunFolder:
    exp = cfg.exp_manager or ExperimentConfig()
    return RunFolder(_run_path(exp, cfg.name), exp.checkpoint_callback_params.dirpath)


def _run_path(exp: ExperimentConfig, name: str) -> Path:
    """exp_dir/name/version; without a version folder when resuming, so that the same command finds the run again."""
    if exp.explicit_log_dir is not None:
        return Path(exp.explicit_log_dir).expanduser().absolute()
    base = Path(exp.exp_dir or DEFAULT_ROOT).expanduser().absolute() / (exp.name or name)
    if exp.version is not None:
        return base / exp.version
    if exp.resume_if_exists:
        return base
    return base / (os.environ.get(VERSION_VARIABLE) or _new_version(base, exp.use_datetime_version))


def _new_version(base: Path, by_time: bool) -> str:
    if by_time:
        now = datetime.datetime.now().strftime("%Y-%m-%d_%H-%M-%S")
        names = (f"{now}_{number}" if number else now for number in itertools.count())
    else:
        names = (f"version_{number}" for number in itertools.count())
    return next(name for name in names if not (base / name).exists())


def saves_when_stopped(cfg: NestConfig) -> bool:
    """Whether a run that is asked to stop saves first; a try must leave nothing that a run would go on from."""
    exp = cfg.exp_manager or ExperimentConfig()
    return exp.create_preemption_callback and not cfg.trainer.fast_dev_run


def check_all_name_it_alike(cfg: NestConfig) -> None:
    """For processes that something else than our launcher has started: each would name a new run by its own clock."""
    exp = cfg.exp_manager or ExperimentConfig()
    if exp.explicit_log_dir or exp.version or exp.resume_if_exists or VERSION_VARIABLE in os.environ:
        return
    raise ValueError(
        "exp_manager: every rank would give a new run folder a name of its own. Set exp_manager.version=NAME, or "
        "exp_manager.resume_if_exists=true, which needs none."
    )


@contextlib.contextmanager
def named_for_ranks(folder: RunFolder) -> Iterator[None]:
    """Processes that are started meanwhile take `folder` for theirs."""
    os.environ[VERSION_VARIABLE] = folder.path.name
    try:
        yield
    finally:
        del os.environ[VERSION_VARIABLE]


@contextlib.contextmanager
def created(folder: RunFolder, cfg: NestConfig) -> Iterator[None]:
    """The folder, made and taken: a second run in it would overwrite checkpoints and metrics of the first.

    What the run is stands in it: its configuration, the commit it was started from, copies.
    """
    for name in (cfg.exp_manager.files_to_copy or []) if cfg.exp_manager else []:
        if not Path(name).is_file():
            raise ValueError(f"exp_manager.files_to_copy: {name}: no such file.")
    try:
        for path in (folder.path, folder.checkpoints):
            path.mkdir(parents=True, exist_ok=True)
        lock = (folder.path / LOCK).open("a+")
    except OSError as error:
        raise _cannot_be_written(folder, error) from error
    with lock:  # to be closed only at the end: the system gives it back, however this process ends
        if fcntl is not None:
            try:
                fcntl.lockf(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except (BlockingIOError, PermissionError) as error:
                lock.seek(0)
                raise ValueError(
                    f"{folder.path}: another run is using it ({lock.read().strip()}). Wait for it to end, or give this "
                    f"one another exp_manager.name."
                ) from error
            except OSError as error:  # some network disks
                log.warning("%s: cannot be locked (%s): start no second run in it.", folder.path, error.strerror)
        try:
            lock.truncate(0)
            lock.write(f"process {os.getpid()} on {platform.node()}\n")
            lock.flush()
            _describe(folder, cfg)
        except OSError as error:
            raise _cannot_be_written(folder, error) from error
        yield


def _describe(folder: RunFolder, cfg: NestConfig) -> None:
    for left_over in folder.checkpoints.glob(".*.tmp"):  # of a save that was killed
        left_over.unlink()
    (folder.path / "hparams.yaml").write_text(yaml.safe_dump(dataclasses.asdict(cfg), sort_keys=False))
    (folder.path / "git-commit.txt").write_text(git_commit())
    for name in (cfg.exp_manager.files_to_copy or []) if cfg.exp_manager else []:
        shutil.copy(name, folder.path)


def _cannot_be_written(folder: RunFolder, error: OSError) -> ValueError:
    reason = error.strerror or str(error)
    return ValueError(f"{folder.path}: cannot be written: {reason}. Set exp_manager.exp_dir to another folder.")


def git_commit() -> str:
    """The commit of the folder the run was started in, and whether it was changed since; empty outside of git."""
    try:
        commit = subprocess.run(["git", "rev-parse", "HEAD"], capture_output=True, text=True, timeout=10, check=True)
        changes = subprocess.run(
            ["git", "status", "--porcelain"], capture_output=True, text=True, timeout=10, check=True
        )
    except (OSError, subprocess.SubprocessError):
        return ""
    return commit.stdout.strip() + (" with changes\n" if changes.stdout.strip() else "\n")


def checkpoint_to_resume(folder: RunFolder, exp: ExperimentConfig) -> Path | None:
    """The newest checkpoint of the run, if it is to be resumed."""
    if exp.resume_from_checkpoint is not None:
        path = Path(exp.resume_from_checkpoint).expanduser()
        if not path.is_file():
            raise ValueError(f"exp_manager.resume_from_checkpoint: {path}: no such file.")
        return path
    if not exp.resume_if_exists:
        return None
    last = folder.checkpoints / LAST
    if exp.checkpoint_callback_params.save_last and last.is_file():
        return last  # the best may be newer, but written within a step, or hold weights alone
    if (newest := AnyRunFolder(folder.path, str(folder.checkpoints)).newest_checkpoint()) is not None:
        return newest
    if not exp.resume_ignore_no_checkpoint:
        raise ValueError(
            f"{folder.checkpoints}: there is no checkpoint to resume from. "
            f"Set exp_manager.resume_ignore_no_checkpoint=true to start from the beginning."
        )
    return None
