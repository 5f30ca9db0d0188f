"""`examples/train_lightning.py` as users run it: its losses are those of `nest-ssl pretrain`."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from tests.integration.runs import arguments, losses, run

SCRIPT = Path(__file__).parents[2] / "examples" / "train_lightning.py"


@pytest.mark.parametrize(("ranks", "tolerance"), [(1, 1e-6), (2, 1e-5)])
def test_losses_with_lightnings_trainer_equal_those_of_the_command(
    corpus: Path, tmp_path: Path, ranks: int, tolerance: float
) -> None:
    def options(name: str) -> list[str]:
        """Return the options of both runs: over two epochs, with clipping, accumulation and validation."""
        more = [f"trainer.devices={ranks}", "trainer.gradient_clip_val=1.0", "trainer.accumulate_grad_batches=2"]
        more += [f"trainer.strategy={'ddp' if ranks > 1 else 'auto'}", "trainer.sync_batchnorm=false"]
        return arguments(corpus, tmp_path, name, *more, "trainer.max_steps=7")

    command = [sys.executable, str(SCRIPT), *options("lightning")]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=300)
    assert done.returncode == 0, done.stderr[-3000:]
    done = run(options("command"))
    assert done.returncode == 0, done.stderr[-3000:]

    found, wanted = tmp_path / "lightning" / "metrics.csv", next((tmp_path / "command").rglob("metrics.csv"))
    for column, num_steps in (("train_loss", 7), ("val_loss", 2)):
        expected = {step: float(loss) for step, loss in losses(wanted, column).items()}
        assert len(expected) >= num_steps
        actual = {step: float(loss) for step, loss in losses(found, column).items()}
        assert actual == pytest.approx(expected, rel=0, abs=tolerance), column
