"""How one process of a run ends."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from nest_ssl.config import NestConfig, compose
from nest_ssl.launch import attach
from nest_ssl.training import run as running


@pytest.fixture
def unwatched(monkeypatch: pytest.MonkeyPatch) -> None:
    """This process stays the test's: no handlers of signals, no heartbeat."""
    agent = SimpleNamespace(
        has_monitor=False,
        gpu="GPU 5 (GPU-8a) of gpu07",
        mark=SimpleNamespace(),
        fail=lambda error: None,
        why_killed=lambda error: "",
    )

    @contextlib.contextmanager
    def attached(*args: Any, **options: Any) -> Iterator[SimpleNamespace]:
        yield agent

    monkeypatch.setattr(attach, "attached", attached)
    monkeypatch.setattr(running, "keep_freed_memory", lambda: None)


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


@pytest.mark.usefixtures("unwatched")
def test_a_lone_rank_raises_what_would_recur(tmp_path: Path) -> None:
    with pytest.raises(RuntimeError, match="illegal memory access"):
        end_with(RuntimeError("CUDA error: an illegal memory access was encountered"), tmp_path)
