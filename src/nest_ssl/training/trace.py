"""`debug.trace` and `debug.barrier`: looking closer, by hooks alone, at what people used to print by hand."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator
from datetime import timedelta
from typing import Any

import lightning.pytorch as pl
import torch
from lightning.pytorch.callbacks import Callback
from torch import Tensor, nn

from nest_ssl.training.module import PretrainingModule
from nest_ssl.training.stage_hooks import staged_modules
from nest_ssl.watchdog.rank import part_label

BARRIER_SHARE = 0.8
"""Of `watchdog.floor_s`: the barrier speaks before the monitor would."""


class TraceStages(Callback):
    """Prints, on every rank, what goes into and comes out of every stage. It reads every tensor back: slow on a GPU."""

    def __init__(self) -> None:
        self._rank = 0
        self._step = 0
        self._since: dict[str, float] = {}

    def setup(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        assert isinstance(pl_module, PretrainingModule)
        self._rank = trainer.global_rank
        self._say_settings(pl_module)
        for module, of_stage, part in staged_modules(pl_module.model):
            name = f"{of_stage.label} {part_label(of_stage, part)}".strip()
            module.register_forward_pre_hook(self._before(name), with_kwargs=True)
            module.register_forward_hook(self._after(name), with_kwargs=True)

    def _say_settings(self, module: PretrainingModule) -> None:
        wanted = module.cfg.model.encoder.sync_max_audio_length
        actual = module.model.encoder.sync_max_audio_length
        self._say(f"encoder.sync_max_audio_length: {actual} (config: {wanted})")
        if actual != wanted:
            raise ValueError(
                f"encoder.sync_max_audio_length is {actual}, and the configuration says {wanted}: the model was built "
                f"from another one."
            )
        ready = torch.distributed.is_available() and torch.distributed.is_initialized()
        backend = f"initialised, backend {torch.distributed.get_backend()}" if ready else "not initialised"
        self._say(f"process group: {backend}")

    def on_train_batch_start(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, batch: Any, batch_idx: int
    ) -> None:
        self._step = trainer.global_step
        self._say(f"batch {batch_idx}: {describe(vars(batch))}")

    def on_before_backward(self, trainer: pl.Trainer, pl_module: pl.LightningModule, loss: Tensor) -> None:
        self._since["backward"] = time.perf_counter()
        self._say(f"before backward: {describe(loss)}")

    def on_after_backward(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self._say(f"after backward, {self._elapsed_ms('backward'):.1f} ms")

    def on_before_optimizer_step(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, optimizer: torch.optim.Optimizer
    ) -> None:
        gradients = [p.grad for p in pl_module.parameters() if p.grad is not None]
        self._say(f"before optimizer: gradient norm {float(torch.nn.utils.get_total_norm(gradients)):.4g}")

    def _before(self, name: str) -> Callable[..., None]:
        def hook(module: nn.Module, args: Any, kwargs: Any) -> None:
            self._since[name] = time.perf_counter()
            self._say(f"before {name}: {describe([*args, kwargs])}")

        return hook

    def _after(self, name: str) -> Callable[..., None]:
        def hook(module: nn.Module, args: Any, kwargs: Any, output: Any) -> None:
            self._say(f"after {name}, {self._elapsed_ms(name):.1f} ms: {describe(output)}")

        return hook

    def _elapsed_ms(self, name: str) -> float:
        return 1e3 * (time.perf_counter() - self._since[name])

    def _say(self, text: str) -> None:
        clock = time.strftime("%H:%M:%S")
        print(f"trace {clock} rank {self._rank} step {self._step}: {text}", file=sys.stderr, flush=True)


def describe(value: Any) -> str:
    """Every tensor in `value`: shape, dtype, device, NaN and Inf; short ones in full; batch sizes compared."""
    parts, sizes = [], set()
    for name, tensor in _tensors(value, ""):
        text = f"{name} {tuple(tensor.shape)} {str(tensor.dtype).removeprefix('torch.')} {tensor.device}".strip()
        if tensor.is_floating_point():
            text += f", {int(tensor.isnan().sum())} NaN, {int(tensor.isinf().sum())} Inf"
        if tensor.ndim <= 1 and tensor.numel() <= 64:
            text += f" {tensor.detach().tolist()}"
        if tensor.ndim >= 1:
            sizes.add(tensor.shape[0])
        parts.append(text)
    if len(sizes) > 1:
        parts.append(f"first dimensions differ: {sorted(sizes)}")
    return "; ".join(parts) or "no tensor"


def _tensors(value: Any, name: str) -> Iterator[tuple[str, Tensor]]:
    if isinstance(value, Tensor):
        yield name, value
    elif isinstance(value, dict):
        for key, inner in value.items():
            yield from _tensors(inner, str(key))
    elif isinstance(value, (list, tuple)):
        for inner in value:
            yield from _tensors(inner, name)


class BarrierBeforeEncoder(Callback):
    """Waits for all ranks before the encoder of every training step; rank 0 names those that do not arrive."""

    def __init__(self, floor_s: float) -> None:
        self.timeout = timedelta(seconds=BARRIER_SHARE * floor_s)

    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        assert isinstance(pl_module, PretrainingModule)
        if trainer.world_size == 1:
            return
        group = torch.distributed.new_group(backend="gloo")  # the only backend that has it

        def wait(module: nn.Module, args: Any) -> None:
            if module.training:
                torch.distributed.monitored_barrier(group, self.timeout, wait_all_ranks=True)

        pl_module.model.encoder.register_forward_pre_hook(wait, prepend=True)
