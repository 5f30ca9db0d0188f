"""Batch norm with the statistics of all ranks' batches (`trainer.sync_batchnorm`).

Torch's own refuses CPU tensors, and counts frames that were added to a batch for a graph. Ours reduces, over the frames
that count, their number, sum and squares, in one collective of a few kilobytes; torch gathers those of every rank. The
backward pass has one collective too, which autograd finds by itself: the gradient of a sum over ranks is the sum of the
ranks' gradients.

C channels, T frames, B batch, N = B · T.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, distributed, nn

num_collectives = 0
"""Calls so far, those of captured steps once."""

bring: Callable[[Tensor], Tensor] = Tensor.clone
"""Copies what this rank brings to a collective. The watchdog's also has the GPU note that it has come this far."""

_groups: dict[str, distributed.ProcessGroup] = {}
"""The ranks that share statistics, by the name under which a compiled layer knows them."""


class SynchronizedBatchNorm(nn.BatchNorm1d):
    """Takes the place of a batch norm: same names and values, statistics of all ranks in training."""

    group = ""

    def forward(self, x_BCT: Tensor) -> Tensor:
        if not self.training:
            return super().forward(x_BCT)
        x_NC = x_BCT.transpose(1, 2).flatten(0, 1)
        counted_N1 = torch.ones((), dtype=torch.bool, device=x_NC.device).expand(x_NC.shape[0], 1)
        count = torch.full((), float(x_NC.shape[0]), device=x_NC.device)
        y_NC = normalize_together(self, x_NC, counted_N1, count)
        y_BCT: Tensor = y_NC.unflatten(0, (x_BCT.shape[0], -1)).transpose(1, 2)
        return y_BCT


def normalize_together(norm: SynchronizedBatchNorm, x_NC: Tensor, counted_N1: Tensor, count: Tensor) -> Tensor:
    """Normalise frames by the statistics of all ranks' counted frames (`count` here); move the running statistics."""
    x, num_channels = x_NC.float(), x_NC.shape[1]
    own_mean_C = torch.where(counted_N1, x, 0.0).sum(0) / count
    own_squares_C = torch.where(counted_N1, x - own_mean_C, 0.0).square().sum(0)
    # In float64, where the squares of a mean may be taken away again without harm.
    num, mean = count.double(), own_mean_C.double()
    own = torch.cat((num.reshape(1), num * mean, own_squares_C.double() + num * mean.square()))
    total, sum_C, squares_C = sum_over_ranks(own, norm.group).split((1, num_channels, num_channels))
    mean_C = sum_C / total
    variance_C = (squares_C / total - mean_C.square()).clamp(min=0.0).float()
    mean_C = mean_C.float()
    total = total.float()
    move_statistics(norm, mean_C.detach(), (variance_C * total / (total - 1)).detach())
    scale_C = torch.rsqrt(variance_C + norm.eps) * norm.weight
    y_NC: Tensor = ((x - mean_C) * scale_C + norm.bias).to(x_NC.dtype)
    return y_NC


def move_statistics(norm: nn.BatchNorm1d, mean_C: Tensor, variance_C: Tensor) -> None:
    """Move the running statistics towards a batch's; the variance is the unbiased one, as torch's."""
    assert norm.momentum is not None
    assert norm.running_mean is not None
    assert norm.running_var is not None
    assert norm.num_batches_tracked is not None
    norm.running_mean.lerp_(mean_C, norm.momentum)
    norm.running_var.lerp_(variance_C, norm.momentum)
    norm.num_batches_tracked.add_(1)


@torch.library.custom_op("nest_ssl::sum_over_ranks", mutates_args=())
def sum_over_ranks(x: Tensor, group: str) -> Tensor:
    """The sum of all ranks' `x`: an operation of its own, so that a compiled layer and a CUDA graph can contain it."""
    global num_collectives
    num_collectives += 1
    total = bring(x.contiguous())
    distributed.all_reduce(total, group=_groups[group])
    return total


@sum_over_ranks.register_fake
def _(x: Tensor, group: str) -> Tensor:
    return torch.empty_like(x, memory_format=torch.contiguous_format)


def _keep_group(ctx: Any, inputs: tuple[Tensor, str], output: Tensor) -> None:
    ctx.group = inputs[1]


def _sum_gradients(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
    return sum_over_ranks(grad, ctx.group), None


sum_over_ranks.register_autograd(_sum_gradients, setup_context=_keep_group)


def synchronize_batch_norms(model: nn.Module, group: distributed.ProcessGroup | None = None) -> int:
    """Give every batch norm of `model` the statistics of all ranks of `group`; names and values stay. How many."""
    group = group or distributed.group.WORLD
    name = "none" if group is None else str(group.group_name)
    if group is not None:
        _groups[name] = group
    count = 0
    for parent in list(model.modules()):
        for child_name, child in parent.named_children():
            if type(child) is nn.BatchNorm1d:
                together = SynchronizedBatchNorm(child.num_features, child.eps, child.momentum)
                together._parameters, together._buffers = child._parameters, child._buffers
                together.training, together.group = child.training, name
                setattr(parent, child_name, together)
                count += 1
    return count
