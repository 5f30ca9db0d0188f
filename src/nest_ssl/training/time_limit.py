"""`exp_manager.max_time_per_run`."""

from __future__ import annotations

from typing import Any

from lightning.pytorch.callbacks import Timer


class TimePerRun(Timer):
    """Lightning's timer, but one that starts anew when a run is resumed; `trainer.max_time` counts all of them."""

    def state_dict(self) -> dict[str, Any]:
        return {}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """There is nothing to go on from."""
