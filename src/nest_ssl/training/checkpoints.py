"""Checkpoints that are whole or not there, and `.nemo` files beside them."""

from __future__ import annotations

import os
import shutil
import tempfile
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch
from lightning.fabric.plugins import TorchCheckpointIO
from lightning.pytorch.callbacks import Callback, ModelCheckpoint

from nest_ssl.config import ExperimentConfig
from nest_ssl.training.experiment import RunFolder
from nest_ssl.training.module import PretrainingModule


class AtomicCheckpointIO(TorchCheckpointIO):
    """Writes to a temporary file beside the target, syncs it, and renames it."""

    def save_checkpoint(self, checkpoint: dict[str, Any], path: Any, storage_options: Any | None = None) -> None:
        path = Path(path)
        path.parent.mkdir(parents=True, exist_ok=True)
        handle, temporary = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.", suffix=".tmp")
        try:
            with os.fdopen(handle, "wb") as file:
                torch.save(checkpoint, file)
                file.flush()
                os.fsync(file.fileno())
            os.chmod(temporary, 0o644)
            os.replace(temporary, path)
        except OSError as error:
            Path(temporary).unlink(missing_ok=True)
            free_mb = shutil.disk_usage(path.parent).free / 1e6
            raise OSError(
                error.errno,
                f"{path}: the checkpoint could not be written ({error.strerror}); {free_mb:.0f} MB are free. "
                f"Earlier checkpoints are intact.",
            ) from error
        except BaseException:
            Path(temporary).unlink(missing_ok=True)
            raise


def checkpoint_callbacks(exp: ExperimentConfig, folder: RunFolder, name: str) -> list[Callback]:
    """The best by `monitor`, the last, and, if asked for, one every n steps; and `.nemo` files."""
    if not exp.create_checkpoint_callback:
        return []
    params = exp.checkpoint_callback_params
    best = ModelCheckpoint(
        dirpath=params.dirpath or folder.checkpoints,
        filename=params.filename or f"{params.prefix or name}--{{{params.monitor}:.4f}}-{{epoch}}-{{step}}",
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
    callbacks: list[Callback] = [best]
    if params.every_n_train_steps is not None:
        callbacks.append(
            ModelCheckpoint(
                dirpath=params.dirpath or folder.checkpoints,
                filename=f"{params.prefix or name}--{{step}}-periodic",
                every_n_train_steps=params.every_n_train_steps,
                save_top_k=1,
                monitor="step",
                mode="max",
                enable_version_counter=False,
            )
        )
    callbacks.append(NemoFiles(folder, always=params.always_save_nemo, at_end=params.save_nemo_on_train_end))
    return callbacks


class NemoFiles(Callback):
    """Writes the model as `.nemo`: with every validation that `always` asks for, and at the end of training."""

    def __init__(self, folder: RunFolder, *, always: bool, at_end: bool) -> None:
        self.folder, self.always, self.at_end = folder, always, at_end

    def on_validation_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        if self.always and not trainer.sanity_checking:
            self._save(trainer, pl_module)

    def on_train_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        if self.at_end:
            self._save(trainer, pl_module)

    def _save(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        assert isinstance(pl_module, PretrainingModule)
        if trainer.is_global_zero:
            pl_module.model.save_to(self.folder.final_nemo)
