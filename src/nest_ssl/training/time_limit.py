"""Limits of time: `trainer.max_time` and `exp_manager.max_time_per_run`."""

from __future__ import annotations

from typing import Any

import lightning.pytorch as pl
from lightning.pytorch.callbacks import Timer

from nest_ssl.training.moments import asks_rank_0, is_within_step


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
