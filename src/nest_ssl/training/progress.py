"""Progress: a bar on a terminal, plain lines elsewhere. It shows the values logged last, so it reads no GPU."""

from __future__ import annotations

import contextlib
import datetime
import sys
import time
from typing import Any

import lightning.pytorch as pl
from lightning.pytorch.callbacks import Callback
from rich.console import Console
from rich.progress import BarColumn, Progress, TaskID, TextColumn, TimeElapsedColumn, TimeRemainingColumn

from nest_ssl.training.metrics_csv import MetricsCsv
from nest_ssl.watchdog.system import say

LINE_EVERY_S = 10.0


class ProgressReport(Callback):
    """Step, loss, accuracy, speed and time left."""

    def __init__(self, metrics: MetricsCsv) -> None:
        self.metrics = metrics
        self.bar: Progress | None = None
        self.task: TaskID | None = None
        self._last_line = 0.0
        self._started = 0.0
        self._first_step = 0

    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self._started, self._first_step = time.monotonic(), trainer.global_step
        if not trainer.is_global_zero or not sys.stderr.isatty():
            return
        columns = (
            TextColumn("step {task.completed}/{task.total}"),
            BarColumn(),
            TextColumn("{task.fields[shown]}"),
            TimeElapsedColumn(),
            TimeRemainingColumn(),
        )
        self.bar = Progress(*columns, console=Console(stderr=True))
        self.task = self.bar.add_task("", total=_total_steps(trainer), completed=trainer.global_step, shown="")
        self.bar.start()

    def on_train_batch_end(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        if self.bar is not None and self.task is not None:
            self.bar.update(self.task, completed=trainer.global_step, shown=self._shown())
        elif trainer.is_global_zero and time.monotonic() - self._last_line > LINE_EVERY_S:
            self._line(trainer)

    def on_validation_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        if trainer.is_global_zero and "val_loss" in trainer.callback_metrics and not trainer.sanity_checking:
            self._say(f"step {trainer.global_step}: val_loss {float(trainer.callback_metrics['val_loss']):.4f}")

    def on_train_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        if trainer.is_global_zero and self.bar is None:
            self._line(trainer)
        self.teardown(trainer, pl_module, "fit")

    def on_exception(self, trainer: pl.Trainer, pl_module: pl.LightningModule, exception: BaseException) -> None:
        self.teardown(trainer, pl_module, "fit")  # else it is drawn over the message, and the cursor stays hidden

    def teardown(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        if self.bar is not None:
            with contextlib.suppress(OSError):  # the terminal was closed
                self.bar.stop()
            self.bar = None

    def _line(self, trainer: pl.Trainer) -> None:
        self._last_line = time.monotonic()
        total, done = _total_steps(trainer), trainer.global_step
        parts = [f"step {done}/{'?' if total is None else total}", self._shown()]
        if total is not None and done > self._first_step:
            seconds = (time.monotonic() - self._started) / (done - self._first_step) * (total - done)
            parts.append(f"{datetime.timedelta(seconds=round(seconds))} left")
        self._say(", ".join(part for part in parts if part))

    def _say(self, text: str) -> None:
        if self.bar is None:
            say(text)
            return
        with contextlib.suppress(OSError):
            self.bar.console.print(text)

    def _shown(self) -> str:
        latest = self.metrics.latest
        parts = (("train_loss", "loss {:.3f}"), ("accuracy", "accuracy {:.1%}"), ("audio_s_per_s", "{:.0f} audio-s/s"))
        return ", ".join(form.format(latest[name]) for name, form in parts if name in latest)


def _total_steps(trainer: pl.Trainer) -> int | None:
    steps = trainer.estimated_stepping_batches
    return None if steps == float("inf") else int(steps)
