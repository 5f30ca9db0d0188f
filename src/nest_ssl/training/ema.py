"""A running average of the weights (`exp_manager.ema`): validated, and saved as the model's weights."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from nest_ssl.config import EmaConfig
from nest_ssl.training.sharding import own_weights, part


class Average:
    """average ← average + (1 − decay) · (weights − average), every few steps, without waiting for a GPU.

    Checkpoints and `.nemo` files contain the average; checkpoints also contain the weights that training continues
    with. Of sharded weights every rank averages its own parts.
    """

    def __init__(self, config: EmaConfig, model: nn.Module) -> None:
        self.config, self.model = config, model
        self.weights: dict[str, Tensor] = {name: value.clone() for name, value in own_weights(model).items()}
        """The average, by the names of the model's weights; of sharded ones this rank's parts."""
        self.num_updates = 0
        self.last_step = 0
        """The step of the latest update."""
        self._graph: torch.cuda.CUDAGraph | None = None

    def update(self, step: int) -> None:
        """To be called once `step` steps are done."""
        if step % self.config.every_n_steps == 0:
            if self.num_updates == 0:
                move_toward(self.weights, self.model, 1.0)
            else:
                self._move()
            self.num_updates, self.last_step = self.num_updates + 1, step

    def _move(self) -> None:
        """One update; on a GPU it is a CUDA graph, so that hundreds of small launches cost the host nothing."""
        if next(iter(self.weights.values())).device.type != "cuda":
            move_toward(self.weights, self.model, 1 - self.config.decay)
            return
        if self._graph is None:
            self._graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(self._graph, capture_error_mode="thread_local"):
                move_toward(self.weights, self.model, 1 - self.config.decay)
        self._graph.replay()

    @contextlib.contextmanager
    def in_the_model(self) -> Iterator[None]:
        """Meanwhile the model has the averaged weights."""
        self._swap()
        try:
            yield
        finally:
            self._swap()

    @torch.no_grad()
    def _swap(self) -> None:
        for name, value in own_weights(self.model).items():
            kept = value.clone()
            value.copy_(self.weights[name])
            self.weights[name].copy_(kept)

    def state(self) -> dict[str, Any]:
        return {"num_updates": self.num_updates, "last_step": self.last_step}

    @torch.no_grad()
    def copy(self, weights: Mapping[str, Tensor]) -> None:
        """Let `weights` be the average."""
        for name, value in self.weights.items():
            value.copy_(weights[name])


@torch.no_grad()
def move_toward(average: Mapping[str, Tensor], model: nn.Module, share: float) -> None:
    """Move `average` by a `share` of the way to the weights of `model`; what does not change stays the same to the bit.

    Statistics that are not finite do not count: a skipped step may leave them so until they are repaired.
    """
    parameters = {name: part(value) for name, value in model.named_parameters(remove_duplicate=False)}
    for dtype in {value.dtype for value in parameters.values()}:  # one launch per dtype; the codebooks are float64
        names = [name for name, value in parameters.items() if value.dtype == dtype]
        torch._foreach_lerp_([average[name] for name in names], [parameters[name] for name in names], share)
    for name, current in model.named_buffers():
        averaged = average.get(name)
        if averaged is None:
            continue  # no checkpoint contains it
        if averaged.is_floating_point():
            averaged.copy_(torch.where(current.isfinite(), averaged.lerp(current, share), averaged))
        else:
            averaged.copy_(current)
