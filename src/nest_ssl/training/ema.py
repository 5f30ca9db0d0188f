"""A running average of the weights (`exp_manager.ema`): validated, and saved as the model's weights."""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn

from nest_ssl.config import EmaConfig


class Average:
    """average ← average + (1 − decay) · (weights − average), every few steps, without waiting for a GPU.

    Checkpoints and `.nemo` files contain the average; checkpoints also contain the weights that training continues
    with.
    """

    def __init__(self, config: EmaConfig, model: nn.Module) -> None:
        self.config, self.model = config, model
        self.averaged = copy.deepcopy(model).requires_grad_(False)
        self.num_updates = 0
        self.last_step = 0
        """The step of the latest update."""

    def update(self, step: int) -> None:
        """To be called once `step` steps are done."""
        if step % self.config.every_n_steps == 0:
            move_toward(self.averaged, self.model, 1.0 if self.num_updates == 0 else 1 - self.config.decay)
            self.num_updates, self.last_step = self.num_updates + 1, step

    @contextlib.contextmanager
    def in_the_model(self) -> Iterator[None]:
        """Meanwhile the model has the averaged weights."""
        self._swap()
        try:
            yield
        finally:
            self._swap()

    def _swap(self) -> None:
        ours, theirs = self.averaged.state_dict(), self.model.state_dict()
        with torch.no_grad():
            for name, value in theirs.items():
                kept = value.clone()
                value.copy_(ours[name])
                ours[name].copy_(kept)

    def state(self) -> dict[str, Any]:
        return {"num_updates": self.num_updates, "last_step": self.last_step}

    def resume(self, state: dict[str, Any], weights: dict[str, Tensor]) -> None:
        self.num_updates, self.last_step = int(state["num_updates"]), int(state["last_step"])
        self.averaged.load_state_dict(weights)


@torch.no_grad()
def move_toward(average: nn.Module, model: nn.Module, share: float) -> None:
    """Move `average` by a `share` of the way to `model`; what does not change stays the same to the bit."""
    pairs = list(zip(average.parameters(), model.parameters(), strict=True))
    for dtype in {averaged.dtype for averaged, _ in pairs}:  # one launch per dtype; the codebooks are float64
        alike = [pair for pair in pairs if pair[0].dtype == dtype]
        torch._foreach_lerp_([averaged for averaged, _ in alike], [current for _, current in alike], share)
    for averaged, current in zip(average.buffers(), model.buffers(), strict=True):
        if not averaged.is_floating_point():
            averaged.copy_(current)
        else:  # A skipped step may leave NaN in running statistics until they are repaired: not here.
            averaged.copy_(torch.where(current.isfinite(), averaged.lerp(current, share), averaged))
