"""The ranks of a run: who this one is, its device, and everything they say to each other.

Only this file and sharding.py call collectives. A training step has one per 25 MB of gradients (two more per conformer
layer with `trainer.sync_batchnorm`), a validation has one. Decisions by the clock are rank 0's alone and travel through
the process group's store.

C channels, T frames, B batch.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, distributed, nn

from nest_ssl.config import TrainerConfig
from nest_ssl.run_folder import listed_devices
from nest_ssl.watchdog.rank import RankFacts

log = logging.getLogger(__name__)

BUCKET_BYTES = 25 * 2**20
"""Gradients per collective: large enough for the bandwidth of a network, small enough to copy while another travels."""
ASK_EVERY_N_STEPS = 10
"""How often several ranks look what rank 0's clock says."""
KEEP_ANSWERS = 100
"""Old answers in the store: a rank whose host is behind, by as many steps as a GPU can queue, still finds its own."""


# ---- who and where ----


def uses_gpu(config: TrainerConfig) -> bool:
    if config.accelerator in ("gpu", "cuda") and not torch.cuda.is_available():
        raise ValueError("trainer.accelerator=gpu: no CUDA GPU was found. Use trainer.accelerator=cpu or auto.")
    if config.accelerator not in ("auto", "cpu", "gpu", "cuda"):
        is_mps = config.accelerator == "mps"
        reason = "; the codebooks are float64, like NeMo's, which Apple's GPUs lack" if is_mps else ""
        raise ValueError(f"trainer.accelerator={config.accelerator}: not supported{reason}. Use auto, cpu or gpu.")
    return config.accelerator != "cpu" and torch.cuda.is_available()


def device_for(config: TrainerConfig, local_rank: int) -> torch.device:
    """The device of a rank: the GPU that `trainer.devices` lists at its place, or the one with its number."""
    if not uses_gpu(config):
        return torch.device("cpu")
    listed = listed_devices(config.devices)
    count = torch.cuda.device_count()
    wanted = listed if listed is not None else list(range(local_rank + 1))
    if str(config.devices).isdigit():
        wanted = list(range(int(str(config.devices))))
    if max(wanted) >= count:
        raise ValueError(
            f"trainer.devices={config.devices}: this machine has {count} GPUs. Use trainer.devices=-1 for all of them."
        )
    return torch.device("cuda", wanted[local_rank])


@dataclass(frozen=True)
class World:
    """One rank among all ranks of a run."""

    rank: int = 0
    local_rank: int = 0
    size: int = 1
    device: torch.device = field(default_factory=lambda: torch.device("cpu"))

    @property
    def is_first(self) -> bool:
        return self.rank == 0

    def sum(self, values: Tensor) -> Tensor:
        """The sum over all ranks, the same on each to the bit."""
        if self.size > 1:
            values = values.clone()
            distributed.all_reduce(values)
        return values

    def copy_from_first(self, tensors: Iterable[Tensor]) -> None:
        """Give every rank the values of rank 0."""
        if self.size > 1:
            for tensor in tensors:
                distributed.broadcast(tensor, src=0)

    def decision_of_first(self, decision: bool) -> bool:
        """What rank 0 has decided, for decisions that all ranks must share."""
        flag = torch.tensor([int(decision)], device=self.device)
        self.copy_from_first([flag])
        return bool(flag.item())


@contextlib.contextmanager
def joined(config: TrainerConfig, facts: RankFacts) -> Iterator[World]:
    """Join the other ranks; `facts` are this rank's, and its environment is set (`RankFacts.variables`)."""
    device = device_for(config, facts.local_rank)
    if device.type == "cuda":
        torch.cuda.set_device(device)
    world = World(facts.rank, facts.local_rank, facts.world_size, device)
    if world.size == 1:
        yield world
        return
    options = config.strategy if isinstance(config.strategy, dict) else {}
    backend = options.get("process_group_backend") or ("nccl" if device.type == "cuda" else "gloo")
    distributed.init_process_group(backend, device_id=device if backend == "nccl" else None)
    yield world  # a rank that fails just ends: to leave the group, it would have to wait for the others
    distributed.destroy_process_group()


class FirstRanksClock:
    """Answers of rank 0's clock, given to all ranks at the same step without a collective.

    Rank 0 writes its answer into the store after every tenth step; all ranks read it ten steps later, and wait for it
    where their hosts are ahead of rank 0's.
    """

    def __init__(self, world: World) -> None:
        self.world = world
        self._asked = False
        self._answered = False

    def answer(self, step: int, now: int) -> int:
        """`now` where one rank runs alone; otherwise rank 0's answer of ten steps before, 0 between such steps.

        After an answer other than 0 the next one is dropped: rank 0 gave it before it acted on the first.
        """
        if self.world.size == 1:
            return now
        if step % ASK_EVERY_N_STEPS:
            return 0
        store = distributed.distributed_c10d._get_default_store()
        if self.world.is_first:
            store.set(f"nest-ssl/clock/{step}", str(now))
            store.delete_key(f"nest-ssl/clock/{step - KEEP_ANSWERS * ASK_EVERY_N_STEPS}")
        if not self._asked:
            self._asked = True
            return 0
        answer = int(store.get(f"nest-ssl/clock/{step - ASK_EVERY_N_STEPS}"))
        self._answered, answer = answer != 0 and not self._answered, 0 if self._answered else answer
        return answer


# ---- gradients ----


class GradientExchange:
    """Averages gradients over the ranks, flattened into a few buckets."""

    def __init__(self, parameters: Sequence[nn.Parameter], world: World) -> None:
        self.parameters, self.world = parameters, world
        self._buckets = list(_buckets(parameters))

    def average(self) -> None:
        if self.world.size == 1:
            return
        pending = []
        for bucket in self._buckets:
            grads = [p.grad if p.grad is not None else _zero_grad(p) for p in bucket]
            flat = torch.cat([grad.reshape(-1) for grad in grads]).div_(self.world.size)
            pending.append((grads, flat, distributed.all_reduce(flat, async_op=True)))
        for grads, flat, work in pending:
            work.wait()
            parts = flat.split([grad.numel() for grad in grads])
            torch._foreach_copy_(grads, [part.view_as(grad) for part, grad in zip(parts, grads, strict=True)])


def _zero_grad(parameter: nn.Parameter) -> Tensor:
    """A parameter that this rank's batch did not use has no gradient; other ranks' batches may have used it."""
    parameter.grad = torch.zeros_like(parameter)
    return parameter.grad


def _buckets(parameters: Sequence[nn.Parameter]) -> Iterator[list[nn.Parameter]]:
    bucket: list[nn.Parameter] = []
    for parameter in parameters:
        is_full = sum(p.nbytes for p in bucket) + parameter.nbytes > BUCKET_BYTES
        if bucket and (is_full or parameter.dtype != bucket[0].dtype):
            yield bucket
            bucket = []
        bucket.append(parameter)
    yield bucket


def gradient_norm(parameters: Sequence[nn.Parameter]) -> Tensor:
    """The norm of the whole gradient; stays on the device."""
    return torch.nn.utils.get_total_norm([p.grad for p in parameters if p.grad is not None])


# ---- batch norm ----


class SynchronizedBatchNorm(nn.BatchNorm1d):
    """Batch norm with the statistics of all ranks' batches.

    Torch's own refuses CPU tensors. Each direction has one collective: forward, the ranks gather count, mean and
    squared deviation; backward, they add up two sums per channel.
    """

    def forward(self, x_BCT: Tensor) -> Tensor:
        if not self.training:
            return super().forward(x_BCT)
        y_BCT, mean_C, variance_C, count = _NormalizeTogether.apply(x_BCT, self.weight, self.bias, self.eps)  # type: ignore[no-untyped-call]
        if self.track_running_stats:
            assert self.running_mean is not None
            assert self.running_var is not None
            assert self.num_batches_tracked is not None
            assert self.momentum is not None
            with torch.no_grad():
                self.num_batches_tracked.add_(1)
                self.running_mean.lerp_(mean_C, self.momentum)
                self.running_var.lerp_(variance_C * (count / (count - 1)), self.momentum)  # unbiased, as torch's
        return y_BCT  # type: ignore[no-any-return]


class _NormalizeTogether(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x_BCT: Tensor, weight_C: Tensor, bias_C: Tensor, eps: float
    ) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        x = x_BCT.float()
        num = torch.full((1,), float(x.numel() // x.shape[1]), device=x.device)
        mean_C = x.mean((0, 2))
        deviation_C = (x - mean_C[:, None]).square().sum((0, 2))
        own = torch.cat((num, mean_C, deviation_C))
        gathered = [torch.empty_like(own) for _ in range(distributed.get_world_size())]
        distributed.all_gather(gathered, own)
        stats_R = torch.stack(gathered)
        num_R1, mean_RC, deviation_RC = stats_R.split((1, len(mean_C), len(mean_C)), dim=1)
        count = num_R1.sum()
        mean_C = (num_R1 * mean_RC).sum(0) / count
        variance_C = (deviation_RC + num_R1 * (mean_RC - mean_C).square()).sum(0) / count
        scale_C = (variance_C + eps).rsqrt()
        normal_BCT = (x - mean_C[:, None]) * scale_C[:, None]
        ctx.save_for_backward(normal_BCT, weight_C, scale_C, count)
        ctx.mark_non_differentiable(mean_C, variance_C, count)
        y_BCT = (normal_BCT * weight_C[:, None] + bias_C[:, None]).to(x_BCT.dtype)
        return y_BCT, mean_C, variance_C, count

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        normal_BCT, weight_C, scale_C, count = ctx.saved_tensors
        grad_BCT = grads[0].float()
        bias_grad_C, weight_grad_C = grad_BCT.sum((0, 2)), (grad_BCT * normal_BCT).sum((0, 2))
        sums = torch.stack((bias_grad_C, weight_grad_C))
        distributed.all_reduce(sums)
        mean_C, mean_normal_C = sums / count
        inner = grad_BCT - mean_C[:, None] - normal_BCT * mean_normal_C[:, None]
        x_grad_BCT = (inner * (weight_C * scale_C)[:, None]).to(grads[0].dtype)
        return x_grad_BCT, weight_grad_C, bias_grad_C, None


def synchronize_batch_norms(model: nn.Module) -> int:
    """Give every batch norm of `model` the statistics of all ranks; names and values stay. How many there are."""
    count = 0
    for parent in list(model.modules()):
        for name, child in parent.named_children():
            if type(child) is nn.BatchNorm1d:
                together = SynchronizedBatchNorm(child.num_features, child.eps, child.momentum)
                together._parameters, together._buffers, together.training = (
                    child._parameters,
                    child._buffers,
                    child.training,
                )
                setattr(parent, name, together)
                count += 1
    return count


def batch_statistics(model: nn.Module) -> Iterator[Tensor]:
    """The running statistics of batch norms: the only buffers that training changes."""
    for module in model.modules():
        if isinstance(module, nn.modules.batchnorm._NormBase):
            yield from module.buffers(recurse=False)
