"""Record checkpoints of the first edition, and how it continues from them, next to this file.

    git worktree add FOLDER deb0617
    python -m tests.first_edition.record FOLDER/src

Run from the root of this repository, in an environment with Lightning 2.6. Each case of cases.py is trained to the step
it is saved at, and its checkpoint and metrics.csv are kept; then it is resumed, and what follows is written to
record.json. Recorded with Lightning 2.6.6 and torch 2.13.0; the same command gives the same numbers again.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from tests.first_edition import cases

KEPT = {"plain": [6]}
"""Steps of the best checkpoints that are kept too."""


def check_source(source: Path) -> None:
    """Exit if the runs would import nest_ssl from anywhere but `source`."""
    command = [sys.executable, "-c", "import lightning, nest_ssl; print(nest_ssl.__file__)"]
    environment = {**os.environ, "PYTHONPATH": str(source)}
    found = subprocess.run(command, capture_output=True, text=True, check=True, env=environment).stdout.strip()
    if source not in Path(found).parents:
        raise SystemExit(f"{source}: nest_ssl is imported from {found}. Give the src folder of the first edition.")


def record_case(name: str, source: Path, corpus: Path, exp_dir: Path) -> None:
    case, run, kept = cases.CASES[name], exp_dir / name, cases.RECORDED / name
    cases.run(name, case.saved_at, corpus=corpus, exp_dir=exp_dir, source=source)
    (kept / "checkpoints").mkdir(parents=True)
    shutil.copy(run / "metrics.csv", kept)
    shutil.copy(run / "checkpoints" / cases.LAST, kept / "checkpoints")
    for step in KEPT.get(name, []):
        shutil.copy(next((run / "checkpoints").glob(f"*step={step}.ckpt")), kept / "checkpoints")
    saved = cases.describe(cases.load(run / "checkpoints" / cases.LAST))
    assert saved["global_step"] == case.saved_at, saved
    cases.run(name, case.max_steps, corpus=corpus, exp_dir=exp_dir, source=source)
    record = {"saved": saved, "continued": continued(run, case)}
    (kept / "record.json").write_text(json.dumps(record, indent=1) + "\n")


def continued(run: Path, case: cases.Case) -> dict[str, Any]:
    columns = ("train_loss", "learning_rate", "val_loss", "train_loss_epoch")
    curves = {
        name: {step: value for step, value in cases.curve(run / "metrics.csv", name).items() if step >= case.saved_at}
        for name in columns
    }
    assert max(curves["train_loss"]) == case.ends_at - 1, curves["train_loss"]
    end = cases.describe(cases.load(run / "checkpoints" / cases.LAST))
    kept = ("global_step", "epoch", "data_position", "learning_rate", "top_k", "early_stopping", "ema")
    return {**curves, "best_steps": cases.best_steps(run), "end": {name: end[name] for name in kept}}


def main() -> None:
    source = Path(sys.argv[1]).absolute()
    check_source(source)
    shutil.rmtree(cases.RECORDED, ignore_errors=True)
    # Checkpoints hold paths: a folder of the same name gives the same files again.
    work = Path(tempfile.gettempdir(), "nest-ssl-recording")
    work.mkdir()
    try:
        digest = cases.make_corpus(work / "corpus")
        for name in cases.CASES:
            record_case(name, source, work / "corpus", work)
            print(name, flush=True)
    finally:
        shutil.rmtree(work)
    (cases.RECORDED / "corpus.sha256").write_text(digest + "\n")


if __name__ == "__main__":
    main()
