"""Steps whose gradient is not finite: skipped by every rank alike, named, and in the end given up on.

The decision is taken on the gradient after it was averaged over the ranks, so that all ranks take it together and need
not talk. Nothing is read back from a GPU before a step that is logged.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator
from typing import Any

import lightning.pytorch as pl
import torch
from lightning.pytorch.callbacks import Callback
from torch import Tensor, nn
from torch.optim import Adam, AdamW, Optimizer

from nest_ssl.training.module import PretrainingModule
from nest_ssl.training.moments import is_within_step

log = logging.getLogger(__name__)

MOST_IN_A_ROW = 20
"""Skipped steps in a row, at a step that is logged, after which a run ends: it has nothing left to learn from."""


class SkipNonFinite(Callback):
    """Leaves weights and optimizer as they are when the gradient is not finite; says on which rank and files."""

    def __init__(self, log_every_n_steps: int) -> None:
        self.log_every_n_steps = log_every_n_steps
        self.in_a_row: Tensor | None = None
        self._losses: list[Tensor] = []
        self._batches: list[tuple[int, list[str]]] = []
        """Of each loss, the step it belongs to and its files."""
        self._first_step = 0
        self._statistics: dict[str, Tensor] = {}

    def on_before_optimizer_step(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, optimizer: Optimizer
    ) -> None:
        assert isinstance(pl_module, PretrainingModule)
        skip = ~torch.isfinite(pl_module.gradient_norm())
        if getattr(trainer.precision_plugin, "scaler", None) is None:  # fp16: the scaler skips such steps itself
            skip_gradient(optimizer, skip)
        before = torch.zeros_like(skip, dtype=torch.long) if self.in_a_row is None else self.in_a_row
        self.in_a_row = torch.where(skip, before + 1, 0)

    def on_train_batch_end(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        self._losses.append(outputs["loss"].detach())
        step = trainer.global_step if is_within_step(trainer) else trainer.global_step - 1
        self._batches.append((step, list(batch.audio_filepaths)))
        if trainer.global_step - self._first_step >= self.log_every_n_steps:
            self._look_back(trainer, pl_module)

    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self._first_step = trainer.global_step
        self._statistics = {name: value.clone() for name, value in running_statistics(pl_module)}

    def on_validation_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self._look_back(trainer, pl_module)

    def on_train_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self._look_back(trainer, pl_module)

    def on_save_checkpoint(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, checkpoint: dict[str, Any]
    ) -> None:
        # The state was taken before this hook: it holds the very tensors that are mended here.
        self._look_back(trainer, pl_module)

    def _look_back(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Read what happened since the last time: the one place that waits for a GPU."""
        if not self._losses:
            return
        self._name_batches(trainer)
        self._mend_statistics(pl_module)
        self._give_up_on_divergence(trainer)
        self._losses, self._batches, self._first_step = [], [], trainer.global_step

    def _mend_statistics(self, pl_module: pl.LightningModule) -> None:
        """A forward pass with NaN leaves them in the running statistics for ever: put back the last good ones."""
        now = dict(running_statistics(pl_module))
        finite = {name: bool(value.isfinite().all()) for name, value in now.items()}
        for name, value in now.items():
            if finite[name]:
                self._statistics[name].copy_(value)
            else:
                value.copy_(self._statistics[name])

    def _name_batches(self, trainer: pl.Trainer) -> None:
        finite = torch.isfinite(torch.stack(self._losses)).tolist()
        for is_finite, (step, files) in zip(finite, self._batches, strict=True):
            if not is_finite:
                log.warning(
                    "rank %d, step %d: the loss is not finite; every rank skips this step. Files of the batch: %s",
                    *(trainer.global_rank, step, ", ".join(files)),
                )

    def _give_up_on_divergence(self, trainer: pl.Trainer) -> None:
        in_a_row = 0 if self.in_a_row is None else int(self.in_a_row)
        if in_a_row >= MOST_IN_A_ROW:
            raise RuntimeError(
                f"step {trainer.global_step}: no finite gradient for {in_a_row} steps in a row; training has diverged. "
                f"Lower model.optim.lr or lengthen model.optim.sched.warmup_steps, set trainer.gradient_clip_val, and "
                f"start again with the same command: it goes on from the last checkpoint."
            )


def running_statistics(module: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Means and variances that normalisation layers keep for evaluation."""
    return ((name, buffer) for name, buffer in module.named_buffers() if name.endswith(("running_mean", "running_var")))


def skip_gradient(optimizer: Optimizer, skip: Tensor) -> None:
    """Make the next `optimizer.step()` change nothing, weights nor state, if `skip`."""
    # Groups may come from a checkpoint of an optimizer that was not fused. SGD's kernel would leave its first momentum
    # as it found the memory.
    fused = isinstance(optimizer, (Adam, AdamW)) and all(group.get("fused") for group in optimizer.param_groups)
    if fused:  # the kernel itself looks at the flag
        optimizer.found_inf = skip.float()  # type: ignore[attr-defined]
        optimizer.grad_scale = None  # type: ignore[attr-defined]
    elif bool(skip):  # reads a value: free on a CPU, a wait on a GPU without a fused optimizer
        optimizer.zero_grad(set_to_none=True)


def check_finite_weights(weights: dict[str, Tensor], where: str) -> None:
    """Weights that are not finite must not take the place of good ones."""
    bad = [name for name, value in weights.items() if value.is_floating_point() and not bool(value.isfinite().all())]
    if bad:
        raise RuntimeError(
            f"{where}: not written, since {len(bad)} of {len(weights)} tensors are not finite ({bad[0]}, …); training "
            f"has diverged. Earlier checkpoints are intact. Lower model.optim.lr or set trainer.gradient_clip_val."
        )
