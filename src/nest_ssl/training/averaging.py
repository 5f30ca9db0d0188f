"""A running average of the weights (`exp_manager.ema`): validated, and saved as the model's weights."""

from __future__ import annotations

from typing import Any

import lightning.pytorch as pl
import torch
from lightning.pytorch.callbacks import WeightAveraging
from torch import nn

from nest_ssl.config import EmaConfig
from nest_ssl.training.watch import share_statistics


class ExponentialAverage(WeightAveraging):
    """average ← average + (1 − decay) · (weights − average), every few steps.

    Checkpoints and `.nemo` files hold the average; checkpoints also hold the weights that training goes on with.
    """

    def __init__(self, config: EmaConfig) -> None:
        super().__init__(use_buffers=True)
        self.config = config

    def on_fit_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """The number of updates is asked for in every one of them: on a GPU that would mean to wait for it."""
        assert self._average_model is not None
        self._average_model.n_averaged = self._average_model.n_averaged.cpu()

    def on_train_batch_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule, *_: Any) -> None:
        """As torch's own update, but without a wait and some six kernels for each tensor."""
        if trainer.global_step > self._latest_update_step and self.should_update(trainer.global_step - 1):
            assert self._average_model is not None
            first = bool(self._average_model.n_averaged == 0)
            move_toward(self._average_model.module, pl_module, 1.0 if first else 1 - self.config.decay)
            self._average_model.n_averaged += 1
            self._latest_update_step = trainer.global_step

    def should_update(self, step_idx: int | None = None, epoch_idx: int | None = None) -> bool:
        return step_idx is not None and (step_idx + 1) % self.config.every_n_steps == 0

    def on_validation_epoch_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        if not self.config.validate_original_weights:
            super().on_validation_epoch_start(trainer, pl_module)
            if trainer.world_size > 1:
                share_statistics(pl_module)  # every rank has averaged its own

    def on_validation_epoch_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        if not self.config.validate_original_weights:
            super().on_validation_epoch_end(trainer, pl_module)

    def on_train_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Not yet: the last checkpoint is being written, with the weights that training would go on with."""

    def on_fit_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        super().on_train_end(trainer, pl_module)


@torch.no_grad()
def move_toward(average: nn.Module, model: nn.Module, share: float) -> None:
    """Move `average` by a `share` of the way to `model`; what does not change stays the same to the bit."""
    pairs = list(zip(average.parameters(), model.parameters(), strict=True))
    for dtype in {averaged.dtype for averaged, _ in pairs}:  # one launch is for one kind; the codebooks are float64
        alike = [pair for pair in pairs if pair[0].dtype == dtype]
        torch._foreach_lerp_([averaged for averaged, _ in alike], [current for _, current in alike], share)
    for averaged, current in zip(average.buffers(), model.buffers(), strict=True):
        if not averaged.is_floating_point():
            averaged.copy_(current)
        else:  # A skipped step may leave NaN in running statistics until they are mended: not here.
            averaged.copy_(torch.where(current.isfinite(), averaged.lerp(current, share), averaged))
