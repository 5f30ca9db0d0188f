"""A running average of the weights (`exp_manager.ema`): validated, and saved as the model's weights."""

from __future__ import annotations

import lightning.pytorch as pl
import torch
from lightning.pytorch.callbacks import WeightAveraging
from torch import Tensor

from nest_ssl.config import EmaConfig
from nest_ssl.training.watch import share_statistics


class ExponentialAverage(WeightAveraging):
    """average ← average + (1 − decay) · (weights − average), every few steps.

    Checkpoints and `.nemo` files hold the average; checkpoints also hold the weights that training goes on with.
    """

    def __init__(self, config: EmaConfig) -> None:
        # Written so that what does not change, the codebooks above all, stays the same to the bit.
        def toward(average: Tensor, current: Tensor, num_averaged: Tensor | int) -> Tensor:
            if not average.is_floating_point():
                return current
            # A skipped step may leave NaN in running statistics until they are mended: not here.
            return torch.where(current.isfinite(), average + (current - average) * (1 - config.decay), average)

        super().__init__(use_buffers=True, avg_fn=toward)
        self.config = config

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
