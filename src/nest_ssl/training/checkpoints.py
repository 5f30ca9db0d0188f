"""Checkpoints that are whole or not there, and `.nemo` files beside them."""

from __future__ import annotations

import errno
import logging
import os
import shutil
import time
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch
from lightning.fabric.plugins import TorchCheckpointIO
from lightning.pytorch.callbacks import Callback, Checkpoint, ModelCheckpoint
from torch import Tensor

from nest_ssl.config import CheckpointConfig, ExperimentConfig
from nest_ssl.files import give_second_name, replacing
from nest_ssl.nemo_file import nemo_config, write_nemo
from nest_ssl.run_folder import LAST
from nest_ssl.training.early_stopping import AT_EPOCH_END
from nest_ssl.training.experiment import RunFolder
from nest_ssl.training.module import PretrainingModule, model_weights
from nest_ssl.training.moments import asks_rank_0, is_within_step, validation_is_next
from nest_ssl.training.nonfinite import check_finite_weights

log = logging.getLogger(__name__)


class AtomicCheckpointIO(TorchCheckpointIO):
    """Checkpoints that appear whole or not at all, and only with finite weights."""

    def save_checkpoint(self, checkpoint: dict[str, Any], path: Any, storage_options: Any | None = None) -> None:
        path = Path(path)
        check_finite_weights(checkpoint["state_dict"], str(path))
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            with replacing(path) as file:
                torch.save(checkpoint, file)
        except (OSError, RuntimeError) as error:  # torch's zip writer says RuntimeError when a write fails
            raise OSError(f"{path}: the checkpoint could not be written: {_why(error, path.parent)}") from error


def _why(error: Exception, folder: Path) -> str:
    free_mb = shutil.disk_usage(folder).free / 1e6
    if isinstance(error, OSError) and error.strerror:
        reason = error.strerror
    elif free_mb < 1:  # torch's zip writer notices a full disk by its position in the file alone
        reason = os.strerror(errno.ENOSPC)
    else:
        reason = str(error).splitlines()[0]
    return f"{reason}; {free_mb:.0f} MB are free. Earlier checkpoints are intact; the same command goes on from them."


def checkpoint_callbacks(exp: ExperimentConfig, folder: RunFolder, name: str) -> list[Callback]:
    """The best by `monitor`, the latest, and `.nemo` files."""
    if not exp.create_checkpoint_callback:
        return []
    params = exp.checkpoint_callback_params
    best = ModelCheckpoint(
        dirpath=folder.checkpoints,
        filename=params.filename or f"{params.prefix or name}--{{{params.monitor}:.4f}}-{{epoch}}-{{step}}",
        monitor=params.monitor,
        mode=params.mode,
        save_top_k=params.save_top_k,
        save_last=False,  # Lightning's is a copy of the latest of the best: a run that stops improving falls behind
        every_n_epochs=params.every_n_epochs,
        save_weights_only=params.save_weights_only,
        save_on_train_epoch_end=params.save_on_train_epoch_end or params.monitor in AT_EPOCH_END,
        verbose=params.verbose,
        enable_version_counter=False,
    )
    callbacks: list[Callback] = [best]
    if params.save_last or params.every_n_train_steps or params.train_time_interval:
        callbacks.append(LatestCheckpoint(folder.checkpoints, params, best))
    return [*callbacks, NemoFiles(folder, params, best)]


class LatestCheckpoint(Checkpoint):
    """`last.ckpt`: after every validation (without one, every epoch), every n steps or so often, and at the end.

    When a validation is due at the same step, it comes first: a run that is killed in it goes on from before it. Where
    the validation gave one of the best, `last.ckpt` is another name of that file: large ones are written once.
    """

    def __init__(self, folder: Path, params: CheckpointConfig, best: ModelCheckpoint) -> None:
        self.path, self.best = folder / LAST, best
        self.every_n_steps = params.every_n_train_steps
        self.every_s = _seconds(params.train_time_interval)
        self._saved_at_s = time.monotonic()
        self._saved_step = 0
        self._is_owed = False
        """A validation came in the middle of a step."""

    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self._saved_at_s, self._saved_step = time.monotonic(), trainer.global_step

    def on_train_batch_end(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        if self._is_due(trainer) and not validation_is_next(trainer):
            self._save(trainer)

    def on_validation_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self._is_owed = is_within_step(trainer)
        if not trainer.sanity_checking and not self._is_owed:
            self._save(trainer)

    def _is_due(self, trainer: pl.Trainer) -> bool:
        step = trainer.global_step
        if step == self._saved_step or is_within_step(trainer):
            return False
        if self._is_owed or trainer.should_stop or step == trainer.max_steps:
            return True
        if trainer.is_last_batch and (not trainer.enable_validation or trainer.current_epoch + 1 == trainer.max_epochs):
            return True
        if self.every_n_steps and step % self.every_n_steps == 0:
            return True
        if self.every_s is None or not asks_rank_0(trainer):
            return False
        return trainer.strategy.broadcast(time.monotonic() - self._saved_at_s >= self.every_s)

    def _save(self, trainer: pl.Trainer) -> None:
        self._is_owed = False
        if trainer.global_step > self._saved_step:
            self._saved_at_s, self._saved_step = time.monotonic(), trainer.global_step
            if not self._names_the_best(trainer):
                trainer.save_checkpoint(self.path)  # whole, whatever `save_weights_only` says: a run goes on from it

    def _names_the_best(self, trainer: pl.Trainer) -> bool:
        """Whether one of the best, written at this step, now has this name too: rank 0 says so for all."""
        best = self.best
        is_whole = best._last_global_step_saved == trainer.global_step and not best.save_weights_only
        is_named = (
            is_whole and trainer.is_global_zero and give_second_name(Path(best._last_checkpoint_saved), self.path)
        )
        return trainer.strategy.broadcast(is_named)


def _seconds(interval: str | None) -> float | None:
    """DD:HH:MM:SS in seconds."""
    if interval is None:
        return None
    days, hours, minutes, seconds = (int(part) for part in interval.split(":"))
    return ((days * 24 + hours) * 60 + minutes) * 60 + seconds


class NemoFiles(Callback):
    """Writes the model as `.nemo`: with every checkpoint if `always_save_nemo`, and at the end of training."""

    def __init__(self, folder: RunFolder, params: CheckpointConfig, best: ModelCheckpoint) -> None:
        self.path = folder.nemo_file(params)
        self.params, self.best = params, best
        self._saved_at: int | None = None

    def on_save_checkpoint(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, checkpoint: dict[str, Any]
    ) -> None:
        if self.params.always_save_nemo and self._saved_at != trainer.global_step:
            self._saved_at = trainer.global_step
            self._write(trainer, pl_module, model_weights(checkpoint["state_dict"]))

    def on_fit_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        if not self.params.save_nemo_on_train_end:
            return
        # Every rank takes part: sharded weights have to be gathered.
        weights = model_weights(trainer.strategy.lightning_module_state_dict())
        if self.params.save_best_model and self.best.best_model_path and trainer.is_global_zero:
            log.info("the best checkpoint becomes the .nemo file: %s", self.best.best_model_path)
            weights = torch.load(self.best.best_model_path, map_location="cpu", weights_only=True)["state_dict"]
        self._write(trainer, pl_module, weights)

    def _write(self, trainer: pl.Trainer, pl_module: pl.LightningModule, weights: dict[str, Tensor]) -> None:
        if not trainer.is_global_zero:
            return
        assert isinstance(pl_module, PretrainingModule)
        check_finite_weights(weights, str(self.path))
        try:
            write_nemo(self.path, nemo_config(pl_module.model.cfg, type(pl_module.model).__name__), weights)
        except (OSError, RuntimeError) as error:
            raise OSError(f"{self.path}: could not be written: {_why(error, self.path.parent)}") from error
