"""How one process of a run ends."""

from __future__ import annotations

import contextlib
import logging
import signal
import subprocess
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from typer.testing import CliRunner

from nest_ssl.cli.main import app
from nest_ssl.config import NestConfig, compose
from nest_ssl.launch import attach
from nest_ssl.training import run as running
from nest_ssl.watchdog.rank import RankFacts
from nest_ssl.watchdog.system import stop_signals


@pytest.fixture(autouse=True)
def same_handlers() -> Iterator[None]:
    """The handlers of signals are afterwards what they were."""
    before = {number: signal.getsignal(number) for number in (*stop_signals(), signal.SIGCHLD)}
    yield
    for number, handler in before.items():
        signal.signal(number, handler)


@pytest.fixture
def unwatched(monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    """This process stays the test's: no handlers of signals, no heartbeat."""
    agent = SimpleNamespace(
        has_monitor=False,
        gpu="GPU 5 (GPU-8a) of gpu07",
        mark=SimpleNamespace(),
        fail=lambda error: None,
        why_killed=lambda error: str(error) if "killed by signal" in str(error) else "",
    )

    @contextlib.contextmanager
    def attached(*args: Any, **options: Any) -> Iterator[SimpleNamespace]:
        yield agent

    monkeypatch.setattr(attach, "attached", attached)
    monkeypatch.setattr(running, "keep_freed_memory", lambda: None)
    return agent


def end_with(error: Exception, run_dir: Path) -> int:
    def main(cfg: NestConfig) -> None:
        raise error

    cfg = compose("nest_demo", ["trainer.accelerator=cpu", f"exp_manager.explicit_log_dir={run_dir}"])
    return running.run(cfg, main, running.Command(["nest-ssl"], ["pretrain"])).exit_code


@pytest.mark.usefixtures("unwatched")
def test_a_lone_rank_that_loses_its_gpu_names_it_and_can_be_resumed(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.ERROR)
    assert end_with(RuntimeError("CUDA error: uncorrectable ECC error encountered\nmore"), tmp_path) == 75
    assert "rank 0: GPU 5 (GPU-8a) of gpu07 no longer works: CUDA error: uncorrectable ECC error" in caplog.text
    assert "nvidia-smi" in caplog.text
    assert "--exclude=gpu07" in caplog.text
    assert "to resume: nest-ssl pretrain" in caplog.text


def test_a_lone_rank_that_lost_a_worker_can_be_resumed_though_torch_raises_for_every_child_that_ends_after_it(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, unwatched: SimpleNamespace
) -> None:
    def raise_again(*_: object) -> None:
        raise RuntimeError("DataLoader worker (pid 12) is killed by signal: Killed.")

    unwatched.fail = lambda error: subprocess.run(["true"], check=True)  # another child ends
    signal.signal(signal.SIGCHLD, raise_again)
    assert end_with(RuntimeError("DataLoader worker (pid 12) is killed by signal: Killed."), tmp_path) == 75
    assert "(pid 12) is killed by signal: Killed. To resume: nest-ssl pretrain" in caplog.text


@pytest.mark.usefixtures("unwatched")
def test_a_lone_rank_raises_what_would_recur(tmp_path: Path) -> None:
    with pytest.raises(RuntimeError, match="illegal memory access"):
        end_with(RuntimeError("CUDA error: an illegal memory access was encountered"), tmp_path)


def test_a_signal_to_stop_before_training_ends_with_75_and_one_after_it_changes_nothing(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """SLURM signals at its own time: a finished run that dies of SIGUSR1 is a failed job."""
    codes: list[int] = []

    def train(*args: Any) -> running.Outcome:
        signal.raise_signal(signal.SIGUSR1)  # the configuration has been read, and no rank is there yet
        return running.Outcome(0, Path(), speaks=False)

    monkeypatch.setattr(running, "_run", train)
    monkeypatch.setattr("os._exit", codes.append)
    result = CliRunner().invoke(app, ["pretrain", "--config-name", "nest_demo"])
    assert result.exit_code == 0
    assert codes == [75]
    assert "SIGUSR1: stopped; nothing to save before the first step" in result.output
    signal.raise_signal(signal.SIGTERM)
    assert codes == [75]


def test_a_node_that_does_not_exist_is_refused_by_its_variable(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("NODE_RANK", "1")
    cfg = compose(overrides=["trainer.accelerator=cpu", "trainer.devices=2", f"exp_manager.exp_dir={tmp_path}"])
    with pytest.raises(ValueError, match=r"^NODE_RANK=1: nodes count from 0, and trainer\.num_nodes=1\."):
        running.run(cfg, running.pretrain, running.Command(["nest-ssl"], []))
    assert not list(tmp_path.iterdir())


def test_too_few_open_files_are_refused_before_anything_starts(tmp_path: Path) -> None:
    resource = pytest.importorskip("resource")
    cfg = compose(overrides=["trainer.accelerator=cpu", "trainer.devices=2", f"exp_manager.exp_dir={tmp_path}"])
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (24, limits[1]))
    try:
        with pytest.raises(ValueError, match="only 24 files may be open at a time.*'ulimit -n 4096'"):
            running.run(cfg, running.pretrain, running.Command(["nest-ssl"], []))
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, limits)
    assert not list(tmp_path.iterdir())


def test_a_run_of_torchrun_is_resumed_by_torchrun(tmp_path: Path) -> None:
    cfg, facts = compose(overrides=[]), RankFacts(0, 0, 8, 4, 0, "torchrun", "localhost", 1)
    command = running.resume_command(
        cfg, running.pretrain_command(["trainer.devices=4"], verbose=False), tmp_path, facts
    )
    assert command.startswith("torchrun --nnodes=2 --nproc-per-node=4 -m nest_ssl pretrain trainer.devices=4")
