"""A run folder without a run: a tiny model, audio, and made-up metrics."""

from __future__ import annotations

import csv
import dataclasses
import math
import shutil
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch
import yaml

from nest_ssl import EncDecDenoiseMaskedTokenPredModel
from nest_ssl.config import NestConfig, compose
from tests.integration.runs import arguments, make_corpus

STARTED_S = 1_700_000_000.0
COMMIT = "0123456789abcdef0123456789abcdef01234567"


def make_run(folder: Path, *overrides: str, num_steps: int = 20, checkpoint: str | None = "fake.nemo") -> Path:
    """Make a run folder in `folder`, with its corpus next to it."""
    corpus, run = folder / "corpus", folder / "fake"
    if not corpus.exists():
        make_corpus(corpus, num_train=8, num_val=6)
    cfg = compose(overrides=[*arguments(corpus, folder, "fake"), f"trainer.max_steps={num_steps}", *overrides])
    (run / "checkpoints").mkdir(parents=True)
    (run / "hparams.yaml").write_text(yaml.safe_dump(dataclasses.asdict(cfg), sort_keys=False))
    (run / "git-commit.txt").write_text(f"{COMMIT} with changes\n")
    write_metrics(run / "metrics.csv", rows(num_steps))
    if checkpoint is not None:
        save_checkpoint(run / "checkpoints" / checkpoint, cfg)
    return run


def save_checkpoint(path: Path, cfg: NestConfig) -> None:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        EncDecDenoiseMaskedTokenPredModel(cfg.model).save_to(path)


def rows(num_steps: int, validate_every: int = 5) -> list[dict[str, Any]]:
    """Training rows one second apart, 40 s of audio each, and validation rows between them."""
    out: list[dict[str, Any]] = []
    for step in range(num_steps):
        train: dict[str, Any] = {"step": step, "time": STARTED_S + len(out)}
        train |= {"train_loss": 5 - step / num_steps, "accuracy": 0.01 + 0.1 * step / num_steps}
        train |= {"most_frequent_token": 0.05, "mask_rate": 0.3, "codebook_coverage": 0.25, "codebook_entropy": 3.5}
        train |= {"learning_rate": 1e-3 * (step + 1), "audio_s_per_s": 40.0, "padding_share": 0.125}
        out.append({**train, "data_wait_share": 0.0625 if math.fmod(step, 2) else 0.03125})
        if (step + 1) % validate_every == 0:
            val = {"val_loss": 4.9 - step / num_steps, "val_accuracy": 0.02 + 0.1 * step / num_steps}
            val |= {"val_most_frequent_token": 0.0789, "other_val_loss": 4.2345}
            out.append({"step": step, "time": STARTED_S + len(out), **val})
    return out


def write_metrics(path: Path, rows: Iterable[dict[str, Any]]) -> None:
    rows = list(rows)
    names = list(dict.fromkeys(name for row in rows for name in row))
    with path.open("w", newline="") as file:
        writer = csv.DictWriter(file, names)
        writer.writeheader()
        writer.writerows(rows)


def remove_audio(run: Path) -> None:
    shutil.rmtree(run.parent / "corpus" / "audio")
