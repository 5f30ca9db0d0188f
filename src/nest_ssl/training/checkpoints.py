"""Checkpoints that are whole or not there, and `.nemo` files beside them."""

from __future__ import annotations

import datetime
import logging
import shutil
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch
from lightning.fabric.plugins import TorchCheckpointIO
from lightning.pytorch.callbacks import Callback, ModelCheckpoint
from torch import Tensor

from nest_ssl.config import CheckpointConfig, ExperimentConfig
from nest_ssl.files import replacing
from nest_ssl.nemo_file import nemo_config, write_nemo
from nest_ssl.training.experiment import RunFolder
from nest_ssl.training.module import PretrainingModule, model_weights
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
    reason = error.strerror if isinstance(error, OSError) and error.strerror else str(error).splitlines()[0]
    return f"{reason}; {free_mb:.0f} MB are free. Earlier checkpoints are intact; the same command goes on from them."


def checkpoint_callbacks(exp: ExperimentConfig, folder: RunFolder, name: str) -> list[Callback]:
    """The best by `monitor`, the last, and, if asked for, one every n steps or minutes; and `.nemo` files."""
    if not exp.create_checkpoint_callback:
        return []
    params = exp.checkpoint_callback_params
    prefix = params.prefix or name
    best = ModelCheckpoint(
        dirpath=params.dirpath or folder.checkpoints,
        filename=params.filename or f"{prefix}--{{{params.monitor}:.4f}}-{{epoch}}-{{step}}",
        monitor=params.monitor,
        mode=params.mode,
        save_top_k=params.save_top_k,
        save_last=params.save_last,
        every_n_epochs=params.every_n_epochs,
        save_weights_only=params.save_weights_only,
        save_on_train_epoch_end=params.save_on_train_epoch_end,
        verbose=params.verbose,
        enable_version_counter=False,
    )
    return [best, *_periodic(params, folder, prefix), NemoFiles(folder, params, best)]


def _periodic(params: CheckpointConfig, folder: RunFolder, prefix: str) -> list[Callback]:
    """One checkpoint that a later one takes the place of, every n steps or every so often."""
    if params.every_n_train_steps is None and params.train_time_interval is None:
        return []
    return [
        ModelCheckpoint(
            dirpath=params.dirpath or folder.checkpoints,
            filename=f"{prefix}--{{step}}-periodic",
            every_n_train_steps=params.every_n_train_steps,
            train_time_interval=_duration(params.train_time_interval),
            save_top_k=1,
            monitor="step",
            mode="max",
            enable_version_counter=False,
        )
    ]


def _duration(text: str | None) -> datetime.timedelta | None:
    if text is None:
        return None
    days, hours, minutes, seconds = (int(part) for part in text.split(":"))
    return datetime.timedelta(days=days, hours=hours, minutes=minutes, seconds=seconds)


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

    def on_train_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        if not self.params.save_nemo_on_train_end:
            return
        # Every rank takes part: sharded weights have to be gathered.
        weights = model_weights(trainer.strategy.lightning_module_state_dict())
        if self.params.save_best_model and self.best.best_model_path:
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
