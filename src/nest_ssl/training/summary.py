"""What a run has come to, in a few figures."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass

from nest_ssl.config import ExperimentConfig, NestConfig
from nest_ssl.training.experiment import RunFolder
from nest_ssl.training.metrics_csv import read_rows

RECENT_ROWS = 20
"""Logged steps that a figure of training is the mean of."""


@dataclass
class Summary:
    """The last validation, or the last logged steps of a run without one."""

    num_steps: int
    where: str
    loss: float
    """Mean negative log-likelihood of a masked token."""
    chance_loss: float
    """Of guessing every code alike."""
    accuracy: float
    most_frequent_token: float
    """Accuracy of always guessing the most frequent token."""


def summarize(folder: RunFolder, cfg: NestConfig) -> Summary | None:
    """None when nothing was logged yet."""
    rows = read_rows(folder.metrics_csv)
    validated = [row for row in rows if row.get("val_loss") and row.get("val_most_frequent_token")][-1:]
    trained = [row for row in rows if row.get("train_loss")][-RECENT_ROWS:]
    if not trained and not validated:
        return None
    recent, prefix = (validated, "val_") if validated else (trained, "")
    return Summary(
        num_steps=1 + max(int(row["step"]) for row in rows),
        where="validation" if validated else "training",
        loss=_mean(row["val_loss" if validated else "train_loss"] for row in recent),
        chance_loss=math.log(cfg.model.num_classes),
        accuracy=_mean(row[f"{prefix}accuracy"] for row in recent),
        most_frequent_token=_mean(row[f"{prefix}most_frequent_token"] for row in recent),
    )


def describe(summary: Summary) -> str:
    ratio = summary.accuracy / max(summary.most_frequent_token, 1e-9)
    return (
        f"after {summary.num_steps} steps, on {summary.where}: loss {summary.loss:.3f} "
        f"(guessing every code alike: {summary.chance_loss:.3f})\n"
        f"masked-token accuracy {summary.accuracy:.1%}, {ratio:.1f} x that of always guessing the most frequent token "
        f"({summary.most_frequent_token:.1%})"
    )


def places(folder: RunFolder, cfg: NestConfig) -> dict[str, str]:
    """Where to find what a run leaves."""
    exp = cfg.exp_manager or ExperimentConfig()
    found = {
        "model": folder.nemo_file(exp.checkpoint_callback_params),
        "metrics": folder.metrics_csv,
        "report": folder.path / "report.html",
    }
    shown = {name: str(path) for name, path in found.items() if path.is_file()}
    if exp.create_tensorboard_logger:
        shown["TensorBoard"] = f"tensorboard --logdir {folder.path}"
    return shown


def _mean(values: Iterable[str]) -> float:
    numbers = [float(value) for value in values]
    return sum(numbers) / len(numbers)
