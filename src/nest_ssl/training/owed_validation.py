"""A validation that was due when a checkpoint was written, and that the run did not live to make."""

from __future__ import annotations

from typing import Any

import lightning.pytorch as pl
from lightning.pytorch.callbacks import Callback

_KEY = "validation_is_owed"


class OwedValidation(Callback):
    """Makes up for it before the first step of the resumed run.

    A checkpoint that is written at the end of a batch comes before the validation that is due after that batch.
    Lightning takes the validation for done when it resumes from there, so its metrics would be missing for good.
    """

    def __init__(self) -> None:
        self._owed = False
        self._validated_at: int | None = None

    def on_save_checkpoint(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, checkpoint: dict[str, Any]
    ) -> None:
        loop = trainer.fit_loop
        due = loop._data_fetcher is not None and loop.epoch_loop._should_check_val_fx(loop._data_fetcher)
        checkpoint[_KEY] = bool(due) and trainer.training and self._validated_at != trainer.global_step

    def on_load_checkpoint(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, checkpoint: dict[str, Any]
    ) -> None:
        self._owed = bool(checkpoint.get(_KEY, False))

    def on_validation_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        if not trainer.sanity_checking:
            self._validated_at = trainer.global_step

    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        if not self._owed or not trainer.val_dataloaders:
            return
        self._owed = False
        trainer.validating = True
        trainer.fit_loop.epoch_loop.val_loop.run()
        trainer.training = True
