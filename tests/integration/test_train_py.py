"""`train.py`, NeMo's five steps: the losses of `nest-ssl pretrain`, fresh, resumed, with starting weights, on ranks."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from tests.integration.runs import arguments, losses, run

TRAIN_PY = Path(__file__).parents[2] / "train.py"
TWO = ("trainer.devices=2", "trainer.strategy=ddp")


def train_py(args: list[str]) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, str(TRAIN_PY), *args], capture_output=True, text=True, timeout=300)


@pytest.mark.parametrize("ranks", [(), TWO], ids=["one rank", "two ranks"])
def test_fresh_and_resumed_it_has_the_losses_of_the_command(
    corpus: Path, tmp_path: Path, ranks: tuple[str, ...]
) -> None:
    for name, program in (("command", run), ("train_py", train_py)):
        for steps in (3, 7):
            done = program(arguments(corpus, tmp_path, name, *ranks, f"trainer.max_steps={steps}"))
            assert done.returncode == 0, done.stderr[-3000:]
    for column in ("train_loss", "val_loss", "learning_rate"):
        ours, commands = (losses(tmp_path / name / "metrics.csv", column) for name in ("train_py", "command"))
        assert ours == commands
        assert ours


def test_starting_weights_are_loaded_once_and_not_on_resume(corpus: Path, tmp_path: Path) -> None:
    short = ("trainer.max_steps=2", "~model.validation_ds")
    assert run(arguments(corpus, tmp_path, "start", *short, "seed=5")).returncode == 0
    init = f"init_from_nemo_model={tmp_path / 'start' / 'checkpoints' / 'start.nemo'}"
    for name, program in (("command", run), ("train_py", train_py)):
        fresh = program(arguments(corpus, tmp_path, name, *short, init))
        assert fresh.returncode == 0, fresh.stderr[-3000:]
        assert "starting weights from" in fresh.stderr
    assert losses(tmp_path / "train_py" / "metrics.csv") == losses(tmp_path / "command" / "metrics.csv")
    resumed = train_py(arguments(corpus, tmp_path, "train_py", "trainer.max_steps=3", "~model.validation_ds", init))
    assert resumed.returncode == 0, resumed.stderr[-3000:]
    assert "init_from_nemo_model: not used, since the run resumes from last.ckpt" in resumed.stderr
    assert "starting weights from" not in resumed.stderr


@pytest.mark.parametrize(
    ("more", "words"),
    [
        (["model.encoder.n_layer=1"], "train.py: model.encoder.n_layer: no such key. Did you mean"),
        (["--config-nam", "x"], "train.py: --config-nam: no such option"),
        (["trainer.callbacks=[1]"], "the training loop calls no callbacks"),
    ],
)
def test_mistakes_are_one_line(corpus: Path, tmp_path: Path, more: list[str], words: str) -> None:
    done = train_py([*arguments(corpus, tmp_path, "run"), *more])
    assert done.returncode == 1
    assert words in done.stderr
    assert "Traceback" not in done.stderr
    assert not (tmp_path / "run").exists()
