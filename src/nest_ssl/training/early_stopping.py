"""When a run has stopped to improve; and the names of what can be watched for it."""

from __future__ import annotations

from typing import Any

import lightning.pytorch as pl
from lightning.pytorch.callbacks import EarlyStopping

from nest_ssl.config import ExperimentConfig
from nest_ssl.config.training import EarlyStoppingConfig

OF_TRAINING = ("train_loss", "train_loss_epoch", "accuracy", "most_frequent_token", "mask_rate", "codebook_coverage")
AT_EPOCH_END = ("train_loss_epoch",)
"""Of those of training, what is known at the end of an epoch alone: after a validation that comes with it."""
OF_VALIDATION = ("val_loss", "val_accuracy", "val_most_frequent_token")


class StopEarly(EarlyStopping):
    """Lightning's, made to go on: a resumed run has the patience it is given now, and stays stopped if it was."""

    def __init__(self, config: EarlyStoppingConfig, *, has_validation: bool) -> None:
        options = vars(config)
        if config.monitor in AT_EPOCH_END:
            options = {**options, "check_on_train_epoch_end": True}
        elif config.check_on_train_epoch_end is None and has_validation:
            # Lightning would look after the checkpoint of the validation was written, and again, at nothing, when the
            # run goes on from it.
            options = {**options, "check_on_train_epoch_end": False}
        super().__init__(**options)

    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        if self.wait_count >= self.patience:
            trainer.should_stop = True

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        super().load_state_dict({**state_dict, "patience": self.patience})


def check_monitors(exp: ExperimentConfig, val_names: list[str]) -> None:
    """Refuse names that will never be logged, before an epoch was spent on finding out."""
    of_sets = [f"{name}_{metric}" for name in val_names if name for metric in OF_VALIDATION]
    known = [*OF_VALIDATION, *of_sets, *OF_TRAINING]
    watched = {"checkpoint_callback_params": exp.checkpoint_callback_params.monitor}
    if exp.create_early_stopping_callback:
        watched["early_stopping_callback_params"] = exp.early_stopping_callback_params.monitor
        if not val_names and watched["early_stopping_callback_params"] in OF_VALIDATION:
            raise ValueError(
                "exp_manager.early_stopping_callback_params.monitor: there is nothing to validate on. Set "
                "model.validation_ds.manifest_filepath, or a monitor of training such as train_loss_epoch."
            )
    for section, name in watched.items():
        if name not in known:
            raise ValueError(f"exp_manager.{section}.monitor: there is no {name!r}. Known: {', '.join(known)}.")
