"""Loggers, progress and profiles."""

from __future__ import annotations

import logging
import os
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from nest_ssl.config import ExperimentConfig
from nest_ssl.run_folder import RunFolder, read_rows
from nest_ssl.training.loggers import Loggers, Progress, _LogFile, check_loggers, log_to_file


def loggers(path: Path, *, enabled: bool = True) -> Loggers:
    return Loggers(RunFolder(path), ExperimentConfig(create_tensorboard_logger=False), enabled=enabled)


def test_a_run_that_fails_gives_the_terminal_back(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.stderr.isatty", lambda: True, raising=False)
    progress = Progress(loggers(tmp_path), enabled=True)
    progress.start(0, 8)
    bar = progress.bar
    assert bar.live.is_started
    progress.close()
    assert not bar.live.is_started


def test_every_rank_knows_the_latest_values_and_only_the_first_writes_them(tmp_path: Path) -> None:
    for enabled in (False, True):
        ours = loggers(tmp_path, enabled=enabled)
        ours.write({"val_loss": 1.5}, 3, 0)
        assert ours.latest == {"val_loss": 1.5}
        assert [row["step"] for row in read_rows(tmp_path / "metrics.csv")] == (["3"] if enabled else [])


def test_a_logger_that_is_not_installed_is_named_with_its_pip_command(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(
        ValueError, match=r"create_wandb_logger: wandb is not installed. pip install 'nest-ssl\[wandb\]'"
    ):
        check_loggers(ExperimentConfig(create_tensorboard_logger=False, create_wandb_logger=True))


def test_an_option_that_wandb_does_not_have_is_refused_by_its_key(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def init(*, resume: str, dir: str) -> None: ...

    errors = SimpleNamespace(Error=type("Error", (Exception,), {}))
    monkeypatch.setitem(sys.modules, "wandb", SimpleNamespace(errors=errors, init=init))
    exp = ExperimentConfig(
        create_tensorboard_logger=False, create_wandb_logger=True, wandb_logger_kwargs={"projekt": "x"}
    )
    with pytest.raises(ValueError, match=r"wandb_logger_kwargs: wandb.init does not take these: .*'projekt'"):
        Loggers(RunFolder(tmp_path), exp, enabled=True)


def test_wandb_without_a_login_is_one_line_with_the_way_out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    errors = SimpleNamespace(Error=type("Error", (Exception,), {}))

    def init(**given: Any) -> None:
        raise errors.Error("No API key configured.\nUse wandb login.")

    monkeypatch.setitem(sys.modules, "wandb", SimpleNamespace(errors=errors, init=init))
    exp = ExperimentConfig(create_tensorboard_logger=False, create_wandb_logger=True)
    with pytest.raises(
        ValueError, match=r"create_wandb_logger: No API key configured\. Use wandb login\. .*offline=true"
    ):
        Loggers(RunFolder(tmp_path), exp, enabled=True)


def test_a_log_that_cannot_be_written_is_one_warning(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    ours = loggers(tmp_path)
    (tmp_path / "metrics.csv").mkdir()
    for step in range(3):
        ours.write({"val_loss": 1.5}, step, 0)
    ours.close()
    assert ours.latest == {"val_loss": 1.5}
    assert caplog.text.count("metrics.csv: cannot be written: it is not a file") == 1
    assert "Training continues" in caplog.text


def test_another_logger_that_fails_is_given_up(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    class Failing:
        calls = 0

        def write(self, metrics: Mapping[str, float], step: int) -> None:
            self.calls += 1
            raise OSError("No space left on device.")

        def close(self) -> None:
            raise AssertionError("would wait for a thread that is dead")

    ours, failing = loggers(tmp_path), Failing()
    ours._all.insert(0, failing)
    for step in range(3):
        ours.write({"val_loss": 1.5}, step, 0)
    ours.close()
    assert failing.calls == 1
    assert "Failing: No space left on device. Training continues" in caplog.text
    assert len(read_rows(tmp_path / "metrics.csv")) == 3


def test_a_log_file_that_cannot_be_written_is_one_warning(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    exp = ExperimentConfig()
    with log_to_file(tmp_path / "run", exp, global_rank=0, local_rank=0):
        handler = next(one for one in logging.getLogger().handlers if isinstance(one, _LogFile))
        handler.setStream(Path("/dev/full").open("w"))  # noqa: SIM115 - the handler closes it
        for _ in range(3):
            logging.getLogger("x").warning("a line")
    assert caplog.text.count("cannot be written any more: [Errno 28] No space left on device") == 1
    (tmp_path / "file").touch()
    with log_to_file(tmp_path / "file", exp, global_rank=0, local_rank=0):
        assert "no log of this rank" in caplog.text


def test_a_locale_of_ascii_loses_no_line_of_the_log_and_refuses_a_name_that_it_cannot_write(tmp_path: Path) -> None:
    program = """if True:
        import logging, pathlib, sys
        from nest_ssl.config import ExperimentConfig
        from nest_ssl.training.loggers import log_to_file
        with log_to_file(pathlib.Path(sys.argv[1]), ExperimentConfig(), global_rank=0, local_rank=0):
            logging.getLogger().warning("6 \\u2192 10")
        try:
            ExperimentConfig(name="k\\xe4se")
        except ValueError as error:
            print(error)
    """
    ascii_only = {"LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0", "PYTHONIOENCODING": "utf-8"}
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path), **ascii_only}
    out = subprocess.run([sys.executable, "-c", program, str(tmp_path)], env=env, capture_output=True, check=True)
    assert "exp_manager.name: 'käse': the locale has no such letters. Set PYTHONUTF8=1." in out.stdout.decode()
    (path,) = tmp_path.glob("log_*.txt")
    assert "6 → 10" in path.read_text(encoding="utf-8")
