"""Thirty steps against recorded losses: any change in training's numbers shows here.

To record them again: `MKL_CBWR=COMPATIBLE ONEDNN_MAX_CPU_ISA=AVX2 python -m tests.integration.test_golden_curve`
(the settings of tests/conftest.py).
"""

from __future__ import annotations

import json
import tempfile
from pathlib import Path

import pytest

from tests.integration.runs import arguments, losses, make_corpus, run_here

GOLDEN = Path(__file__).with_name("golden_curve.json")


def thirty_steps(corpus: Path, exp_dir: Path) -> dict[str, dict[int, float]]:
    run = run_here(arguments(corpus, exp_dir, "run", "trainer.max_steps=30", "trainer.enable_progress_bar=false"))
    return {
        name: {step: float(value) for step, value in losses(run / "metrics.csv", name).items()}
        for name in ("train_loss", "val_loss", "learning_rate")
    }


def test_thirty_steps_follow_the_recorded_losses(corpus: Path, tmp_path: Path) -> None:
    curves = thirty_steps(corpus, tmp_path)
    # Rounding alone moves training losses by 1e-6 to 1e-5 and validation losses by 1e-4: the gradient of a bias before
    # a batch norm is pure rounding error, which AdamW scales up to full steps. Only validation sees the effect.
    tolerances = {"train_loss": 1e-4, "val_loss": 1e-3, "learning_rate": 1e-6}
    for name, recorded in json.loads(GOLDEN.read_text()).items():
        expected = {int(step): value for step, value in recorded.items()}
        assert curves[name] == pytest.approx(expected, rel=tolerances[name]), name
    in_order = list(curves["train_loss"].values())
    assert sum(in_order[20:]) < 0.97 * sum(in_order[:10])  # it learns


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as folder:
        make_corpus(Path(folder, "corpus"))
        GOLDEN.write_text(json.dumps(thirty_steps(Path(folder, "corpus"), Path(folder)), indent=0) + "\n")
