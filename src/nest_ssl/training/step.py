"""One update: loss → backward → exchange → non-finite guard → clip → optimizer → EMA. Any device, no synchronisation.

A step whose gradient is not finite changes nothing. The decision is taken on the gradient after it was averaged over
the ranks, so all ranks take it together without talking; nothing is read back from a GPU before a step that is logged.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn
from torch.optim import Adam, AdamW, Optimizer
from torch.optim.lr_scheduler import LRScheduler

from nest_ssl.training import sharding
from nest_ssl.training.parallel import GradientExchange, gradient_norm
from nest_ssl.watchdog.rank import Stage

if TYPE_CHECKING:
    from nest_ssl.data import AudioNoiseBatch
    from nest_ssl.fast.engine import Objective
    from nest_ssl.model import EncDecDenoiseMaskedTokenPredModel
    from nest_ssl.objective import MaskedPrediction
    from nest_ssl.training.ema import Average
    from nest_ssl.training.parallel import World
    from nest_ssl.training.watching import Watch

log = logging.getLogger(__name__)

MOST_IN_A_ROW = 20
"""Skipped steps in a row, at a step that is logged, after which a run ends: it has nothing left to learn from."""


@dataclass(frozen=True)
class Clipping:
    """`trainer.gradient_clip_val` and `gradient_clip_algorithm`."""

    most: float | None = None
    by_value: bool = False


class TrainStep:
    """Called once per batch; every `accumulate`-th call, and the last of an epoch, updates the weights."""

    def __init__(
        self,
        model: EncDecDenoiseMaskedTokenPredModel,
        objective: Objective,
        optimizer: Optimizer,
        schedule: LRScheduler | None,
        world: World,
        watch: Watch,
        *,
        accumulate: int = 1,
        clipping: Clipping | None = None,
        scaler: torch.amp.GradScaler | None = None,
        average: Average | None = None,
    ) -> None:
        self.objective, self.optimizer, self.schedule, self.watch = objective, optimizer, schedule, watch
        self.accumulate, self.clipping, self.scaler, self.average = accumulate, clipping or Clipping(), scaler, average
        self.parameters = [p for group in optimizer.param_groups for p in group["params"]]
        self._sharded = sharding.is_sharded(model)
        self._exchange = None if self._sharded else GradientExchange(_reached(model, self.parameters), world)
        self.in_a_row: Tensor | None = None
        """Skipped steps in a row, on the device."""

    def __call__(self, batch: AudioNoiseBatch, *, begins: bool, updates: bool, step: int) -> MaskedPrediction:
        """Train on one batch: the first (`begins`) or last (`updates`) of those that step number `step` is made of."""
        self.watch.forward_begins()
        predicted = self.objective.gradients(
            batch.tensors(), share=1 / self.accumulate, adds=not begins, scaler=self.scaler
        )
        if updates:
            if self._exchange is not None:
                self._exchange.average()
            self._update(step)
        return predicted

    def _update(self, step: int) -> None:
        self.watch.enter(Stage.OPTIMIZER)
        if self.scaler is not None:
            self.scaler.unscale_(self.optimizer)
        norm = (sharding.gradient_norm if self._sharded else gradient_norm)(self.parameters)
        skip = ~torch.isfinite(norm)
        self.watch.optimizer_begins(norm)
        before = torch.zeros_like(skip, dtype=torch.long) if self.in_a_row is None else self.in_a_row
        self.in_a_row = torch.where(skip, before + 1, 0)
        self._clip(norm)
        if self.scaler is None:
            skip_gradient(self.optimizer, skip)
            self.optimizer.step()
        else:  # the scaler itself skips steps that are not finite
            self.scaler.step(self.optimizer)
            self.scaler.update()
        if self.schedule is not None:
            self.schedule.step()
        if self.average is not None:
            self.average.update(step + 1)

    def _clip(self, norm: Tensor) -> None:
        if not self.clipping.most:
            return
        gradients = sharding.own_gradients(self.parameters)
        if self.clipping.by_value:
            torch._foreach_clamp_min_(gradients, -self.clipping.most)
            torch._foreach_clamp_max_(gradients, self.clipping.most)
        else:
            # Torch's own clip_grads_with_norm_, on this rank's parts.
            torch._foreach_mul_(gradients, (self.clipping.most / (norm + 1e-6)).clamp(max=1.0))


def _reached(model: EncDecDenoiseMaskedTokenPredModel, parameters: list[nn.Parameter]) -> list[nn.Parameter]:
    """Parameters that can have a gradient: the targets have none, even if the quantizer is not frozen.

    A gradient of zero in its place would let weight decay move the codebooks.
    """
    of_targets = {id(parameter) for parameter in model.quantizer.parameters()}
    return [parameter for parameter in parameters if id(parameter) not in of_targets]


def skip_gradient(optimizer: Optimizer, skip: Tensor) -> None:
    """Make the next `optimizer.step()` change nothing, neither weights nor state, if `skip`."""
    # Groups may come from a checkpoint of an optimizer that was not fused. SGD's kernel would leave its first momentum
    # as it found the memory.
    groups = optimizer.param_groups
    fused = isinstance(optimizer, (Adam, AdamW)) and all(group.get("fused") for group in groups)
    if fused:  # the kernel itself looks at the flag
        optimizer.found_inf = skip.float()  # type: ignore[attr-defined]
        optimizer.grad_scale = None  # type: ignore[attr-defined]
    elif bool(skip):  # reads a value: free on a CPU, a wait on a GPU without a fused optimizer
        optimizer.zero_grad(set_to_none=True)


def running_statistics(module: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Means and variances that normalisation layers keep for validation."""
    return ((name, buffer) for name, buffer in module.named_buffers() if name.endswith(("running_mean", "running_var")))


class LookBack:
    """Reads, from time to time, what happened in the steps since: the one place where training waits for a GPU.

    It names the files of batches whose loss was not finite, repairs running statistics that such a batch has spoilt,
    and ends a run that does not recover.
    """

    def __init__(self, model: nn.Module, rank: int) -> None:
        self.model, self.rank = model, rank
        self._losses: list[Tensor] = []
        self._batches: list[tuple[int, list[str]]] = []
        self._statistics = {name: value.clone() for name, value in running_statistics(model)}

    def note(self, step: int, loss: Tensor, files: list[str]) -> None:
        """Remember the loss of a batch of step number `step`."""
        self._losses.append(loss.clone())
        self._batches.append((step, files))

    def look(self, step: int, in_a_row: Tensor | None) -> None:
        if not self._losses:
            return
        self._name_batches()
        self._repair_statistics()
        self._losses, self._batches = [], []
        skipped = 0 if in_a_row is None else int(in_a_row)
        if skipped >= MOST_IN_A_ROW:
            raise RuntimeError(
                f"step {step}: no finite gradient for {skipped} steps in a row; training has diverged. Lower "
                f"model.optim.lr or lengthen model.optim.sched.warmup_steps, set trainer.gradient_clip_val, and start "
                f"again with the same command: it resumes from the last checkpoint."
            )

    def _name_batches(self) -> None:
        finite = torch.isfinite(torch.stack(self._losses)).tolist()
        for is_finite, (step, files) in zip(finite, self._batches, strict=True):
            if not is_finite:
                log.warning(
                    "rank %d, step %d: the loss is not finite; every rank skips this step. Files of the batch: %s",
                    *(self.rank, step, ", ".join(files)),
                )

    def _repair_statistics(self) -> None:
        """A forward pass with NaN leaves them in the running statistics for ever: put back the last good ones."""
        now = dict(running_statistics(self.model))
        finite = torch.stack([value.isfinite().all() for value in now.values()]).tolist() if now else []
        for (name, value), is_finite in zip(now.items(), finite, strict=True):
            if is_finite:
                self._statistics[name].copy_(value)
            else:
                value.copy_(self._statistics[name])
