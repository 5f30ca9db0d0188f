"""Limits of time: `trainer.max_time` and `exp_manager.max_time_per_run`."""

from __future__ import annotations

from typing import Any

import lightning.pytorch as pl
from lightning.pytorch.callbacks import Timer

ASK_EVERY_N_STEPS = 10
"""The clocks of ranks differ; so several ranks ask rank 0, but not in every step, as Lightning's timer does."""


def is_within_step(trainer: pl.Trainer) -> bool:
    """Whether gradients of an unfinished step are held (`accumulate_grad_batches`), which no checkpoint keeps."""
    return trainer.fit_loop.epoch_loop._should_accumulate()


def asks_rank_0(trainer: pl.Trainer) -> bool:
    """Whether all ranks ask rank 0 for the time after this step."""
    return trainer.world_size == 1 or trainer.global_step % ASK_EVERY_N_STEPS == 0


class TimeLimit(Timer):
    """Ends training after this time, all earlier parts of a resumed run included."""

    def on_train_batch_end(self, trainer: pl.Trainer, *args: Any, **kwargs: Any) -> None:
        if asks_rank_0(trainer) and not is_within_step(trainer):
            super().on_train_batch_end(trainer, *args, **kwargs)


class TimePerRun(TimeLimit):
    """Starts anew when a run is resumed."""

    def state_dict(self) -> dict[str, Any]:
        return {}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """There is nothing to go on from."""
