"""The folder of a run: its name, as NeMo's exp_manager chooses it, its lock, and what describes the run in it."""

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
from pathlib import Path
from typing import TextIO

import yaml

from nest_ssl.config import ExperimentConfig, NestConfig
from nest_ssl.files import is_locked_by_another, remove, replace_text
from nest_ssl.run_folder import DEFAULT_ROOT, OWN_NAMES, RunFolder

log = logging.getLogger(__name__)

VERSION_VARIABLE = "NEST_SSL_RUN_VERSION"
"""Set by the launcher for its ranks, so that all have one folder."""


def run_folder(exp: ExperimentConfig, name: str) -> RunFolder:
    """The folder that `exp_manager:` gives a run of this name."""
    return RunFolder(_run_path(exp, name), exp.checkpoint_callback_params.dirpath)


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
    """Whether a run that is asked to stop saves first; a dry run must leave nothing that a run would resume from."""
    exp = cfg.exp_manager or ExperimentConfig()
    return exp.create_preemption_callback and not cfg.trainer.fast_dev_run


def check_all_name_it_alike(exp: ExperimentConfig) -> None:
    """For ranks that our launcher did not start: each would name a new run by its own clock."""
    if exp.explicit_log_dir or exp.version or exp.resume_if_exists or VERSION_VARIABLE in os.environ:
        return
    raise ValueError(
        "exp_manager: every rank would give a new run folder a name of its own. Set exp_manager.version=NAME, or "
        "exp_manager.resume_if_exists=true, which needs none."
    )


@contextlib.contextmanager
def named_for_ranks(folder: RunFolder) -> Iterator[None]:
    """Processes that are started meanwhile use `folder`."""
    os.environ[VERSION_VARIABLE] = folder.path.name
    try:
        yield
    finally:
        del os.environ[VERSION_VARIABLE]


@contextlib.contextmanager
def created(folder: RunFolder, cfg: NestConfig) -> Iterator[None]:
    """The folder, created and locked: a second run in it would overwrite checkpoints and metrics of the first.

    Nothing else in it changes before `describe`: the command may still be refused, and the folder that of a good run.
    """
    taken = {*OWN_NAMES}
    for name in (cfg.exp_manager.files_to_copy or []) if cfg.exp_manager else []:
        if not Path(name).is_file():
            raise ValueError(f"exp_manager.files_to_copy: {name}: no such file.")
        if Path(name).name in taken:
            raise ValueError(
                f"exp_manager.files_to_copy: {name}: the run folder has another file of that name. Rename it."
            )
        taken.add(Path(name).name)
    folder.check_kinds()
    try:
        for path in (folder.path, folder.checkpoints):
            path.mkdir(parents=True, exist_ok=True)
        lock = folder.lock.open("a+", encoding="utf-8", errors="replace")
    except OSError as error:
        raise _cannot_be_written(folder, error) from error
    with lock:  # closed only at the end: the system releases it, however this process ends
        is_in_use = is_locked_by_another(lock, folder.path)
        lock.seek(0)
        before = lock.read()
        if is_in_use:
            raise ValueError(
                f"{folder.path}: another run is using it ({before.strip()}). Wait for it to end, or give this one "
                "another exp_manager.name."
            )
        try:
            _fill(lock, f"process {os.getpid()} on {platform.node()}\n")
        except OSError as error:
            raise _cannot_be_written(folder, error) from error
        try:
            yield
        except BaseException:
            with contextlib.suppress(OSError):  # of two errors the first is the one to be told
                _fill(lock, before)
            raise


def _fill(lock: TextIO, text: str) -> None:
    lock.truncate(0)
    os.write(lock.fileno(), text.encode())  # past the buffer: its rest would fail again when the file is closed


def describe(folder: RunFolder, cfg: NestConfig) -> None:
    """Write down in its folder what is run: the configuration, the commit it was started from, copies of files.

    To be called when nothing can be refused any more, and not in a dry run, whose folder may be that of a real run.
    """
    try:
        for left_over in (*folder.path.glob(".*.tmp"), *folder.checkpoints.glob(".*.tmp")):  # of a killed run
            remove(left_over)
        for path, text in (
            (folder.hparams, yaml.safe_dump(dataclasses.asdict(cfg), sort_keys=False)),
            (folder.commit, git_commit()),
        ):
            replace_text(path, text)
        for name in (cfg.exp_manager.files_to_copy or []) if cfg.exp_manager else []:
            shutil.copy(name, folder.path)
    except OSError as error:
        raise _cannot_be_written(folder, error) from error


def _cannot_be_written(folder: RunFolder, error: OSError) -> ValueError:
    reason = error.strerror or str(error)
    of_checkpoints = folder.dirpath is not None and str(error.filename or "").startswith(str(folder.checkpoints))
    place, key = folder.path, "exp_dir"
    if of_checkpoints:
        place, key = folder.checkpoints, "checkpoint_callback_params.dirpath"
    elif error.filename == str(folder.lock):
        place = folder.lock
    return ValueError(f"{place}: cannot be written: {reason}. Set exp_manager.{key} to another folder.")


def git_commit() -> str:
    """The commit of the folder the run was started in, and whether it was changed since; empty outside of git."""

    def ask(*words: str) -> bytes:
        command = ["git", "-c", "core.fsmonitor=false", *words]  # a folder's settings run no command
        return subprocess.run(command, capture_output=True, timeout=10, check=True).stdout.strip()

    try:
        commit, changes = ask("rev-parse", "HEAD"), ask("status", "--porcelain")
    except (OSError, subprocess.SubprocessError):
        return ""
    return commit.decode(errors="replace") + (" with changes\n" if changes else "\n")
