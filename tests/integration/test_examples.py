"""The examples, run as they are. `train_lightning.py` has a test of its own; unit/test_extending.py runs the others."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from nest_ssl import load
from tests.integration.runs import TINY, losses

EXAMPLES = Path(__file__).parents[2] / "examples"


def test_fifteen_lines_of_python_train_a_model(corpus: Path, tmp_path: Path) -> None:
    script = EXAMPLES / "train_from_python.py"
    assert len([line for line in script.read_text().splitlines() if line.strip()]) <= 15
    more = [f"model.train_ds.noise_manifest={corpus / 'noise.jsonl'}", f"exp_manager.exp_dir={tmp_path}"]
    options = [option for option in TINY if "validation_ds" not in option and "d_model" not in option]
    command = [sys.executable, str(script), str(corpus / "train.jsonl"), *options, *more, "trainer.max_steps=3"]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=300)
    assert done.returncode == 0, done.stderr[-3000:]
    assert "3 steps; the model is in" in done.stdout
    (folder,) = tmp_path.iterdir()
    assert losses(folder / "metrics.csv").keys() == {0, 1, 2}
    load(next((folder / "checkpoints").glob("*.nemo")))
