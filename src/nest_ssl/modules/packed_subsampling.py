"""Convolutional subsampling on a CPU: the frames that matter, of all utterances, in one row.

Frames are taken in groups, as many as give one frame of output. Two kinds of group are left out. Past the end of an
utterance all but one: it is silent, and keeps the next utterance apart. Inside a masked block, where all that a group
hears is the same frame over and over, its output is that of the group before it. A third of a training batch is one or
the other.

What the first convolution gives is by far the largest tensor of a small model. The second one takes it in pieces that
stay in the processor's cache, and none is kept: the backward pass makes them again.

B batch, T mel frames, M mel bands, S frames of output, G groups of a padded utterance, R rows of the groups kept,
C channels, K = 10 factors of each value of the first convolution, D width of the encoder.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.nn import functional as F  # noqa: N812

from nest_ssl.modules.lengths import valid_frames
from nest_ssl.modules.subsampling import ConvSubsampling, HalvingConv, InPlaceReLU

_PIECE_BYTES = 1 << 23  # measured: half or twice as much takes longer


def packed_subsampling(module: ConvSubsampling, x_BTM: Tensor, lengths: Tensor) -> tuple[Tensor, Tensor]:
    """(B, S, D) and the new lengths: the same parameters and sums as `module`'s own."""
    one, relu, *later = module.conv
    assert isinstance(one, HalvingConv)
    packing, x_RM = pack(module, x_BTM, lengths)
    lengths, num_rows = one.out_length(lengths), len(x_RM) // 2
    x_RM, silent = x_RM.to(one.weight.dtype), packing.silent_rows(lengths, num_rows)
    if later:
        two, *later = later
        assert isinstance(two, HalvingConv)
        x = first_two(one, two, x_RM, silent)
        lengths, num_rows = two.out_length(lengths), num_rows // 2
    else:
        x = relu(factors(one, x_RM, silent).flatten(0, 1) @ first_weight(one))
    # (R · M, C) from here on: what is done in place to a view of a tensor costs a copy in the backward pass.
    for layer in later:
        if isinstance(layer, HalvingConv):
            x = halved(layer, x.unflatten(0, (num_rows, -1)))
            lengths, num_rows = layer.out_length(lengths), num_rows // 2
        elif isinstance(layer, nn.ReLU):
            bands = torch.arange(len(x) // num_rows, device=x.device)
            silent = packing.silent_rows(lengths, num_rows)[:, None] * len(bands) + bands
            x = _SilencedReLU.apply(x, silent.flatten())  # type: ignore[no-untyped-call]
        else:
            assert isinstance(layer, nn.Conv2d)  # of one frame and band
            x = F.linear(x, layer.weight[:, :, 0, 0], layer.bias)
    return module.project(x.unflatten(0, (num_rows, -1)))[packing.source_BS], lengths


@dataclass
class Packing:
    keep_BG: Tensor
    """True for the groups that are kept."""
    source_BS: Tensor
    """Where among the kept groups a frame of output is found."""

    def rows(self, x_BT: Tensor) -> Tensor:
        """(R, …) the rows of the groups kept, from (B, T, …) at any stage."""
        groups_BG: Tensor = x_BT.unflatten(1, (self.keep_BG.shape[1], -1))
        return groups_BG[self.keep_BG].flatten(0, 1)

    def silent_rows(self, lengths: Tensor, num_rows: int) -> Tensor:
        """Which of the `num_rows` kept at this stage lie past the end of their utterance."""
        rows_per_group = num_rows // int(self.keep_BG.sum())
        valid_BT = valid_frames(lengths, self.keep_BG.shape[1] * rows_per_group)
        return self.rows(~valid_BT).nonzero()[:, 0]


def pack(module: ConvSubsampling, x_BTM: Tensor, lengths: Tensor) -> tuple[Packing, Tensor]:
    """What is kept of a batch, and the rows of it, (R, M)."""
    convs = [layer for layer in module.conv if isinstance(layer, HalvingConv)]
    group, size, out_lengths = 2 ** len(convs), x_BTM.shape[1], lengths
    for conv in convs:
        size, out_lengths = conv.out_length(size), conv.out_length(out_lengths)
    num_groups = size + 1
    x_BTM = F.pad(x_BTM, (0, 0, 0, num_groups * group - x_BTM.shape[1]))
    x_BTM = torch.where(valid_frames(lengths, x_BTM.shape[1])[..., None], x_BTM, 0.0)
    keep_BG = valid_frames(out_lengths + 1, num_groups)
    if not x_BTM.requires_grad:  # each of the frames left out has a gradient of its own
        reach = (group - 1) * convs[0].pad_before
        keep_BG = keep_BG & ~repeating_groups(x_BTM, lengths, group, reach)
    source_BG = (keep_BG.flatten().cumsum(0) - 1).view_as(keep_BG)
    packing = Packing(keep_BG, source_BG[:, :size])
    return packing, packing.rows(x_BTM)


def repeating_groups(x_BTM: Tensor, lengths: Tensor, group: int, reach: int) -> Tensor:
    """(B, G) true for groups that hear one frame over and over, as does the group before them.

    A group hears its own frames and `reach` frames before them. All these are then equal and within the utterance, so
    it does not matter which of them are left out.
    """
    same_BT = (x_BTM[:, 1:] == x_BTM[:, :-1]).all(2)  # frame t + 1 is that of t
    same_BT = F.pad(same_BT, (1, 0)) & valid_frames(lengths, x_BTM.shape[1])
    num_same_BT = F.pad(same_BT.cumsum(1), (1, 0))  # before frame t
    end_G = torch.arange(group, x_BTM.shape[1] + 1, group, device=x_BTM.device)
    num_heard = 2 * group + reach
    begin_G = end_G - num_heard + 1
    all_same_BG = num_same_BT[:, end_G] - num_same_BT[:, begin_G.clamp(min=0)] == num_heard - 1
    return all_same_BG & (begin_G > 0)


def factors(conv: HalvingConv, x_RM: Tensor, silent_rows: Tensor) -> Tensor:
    """(R / 2, M / 2, K): nine values and 1 for the bias; all of them 0 in rows that are silent."""
    return conv.taps(x_RM)[: len(x_RM) // 2].index_fill_(0, silent_rows, 0.0)


def first_weight(conv: HalvingConv) -> Tensor:
    """(K, C), to be multiplied from the right: with F.linear the gradient of the weight takes twice as long."""
    return conv.taps_weight().T.contiguous()


def first_two(one: HalvingConv, two: HalvingConv, x_RM: Tensor, silent_rows: Tensor) -> Tensor:
    """(R / 4 · M / 4, C): the first convolution, ReLU and the second convolution."""
    before, after = two.pad_before, two.pad_after
    bands = (0, 0) if before == after else (before, after)  # the same on both sides: the convolution pads by itself
    x_RMK = F.pad(factors(one, x_RM, silent_rows), (0, 0, *bands, before, 0))
    assert two.bias is not None
    tensors = [x_RMK, first_weight(one), two.weight, two.bias]
    if torch.is_autocast_enabled("cpu"):
        tensors = [tensor.to(torch.get_autocast_dtype("cpu")) for tensor in tensors]
    x: Tensor = _FirstTwo.apply(*tensors, 0 if any(bands) else before, two.groups)  # type: ignore[no-untyped-call]
    return x


class _FirstTwo(torch.autograd.Function):
    """Rows of factors are padded for the second convolution; of bands, `pad` are missing on both sides."""

    @staticmethod
    def forward(ctx: Any, x_RMK: Tensor, one_KC: Tensor, two: Tensor, bias: Tensor, pad: int, groups: int) -> Tensor:
        ctx.save_for_backward(x_RMK, one_KC, two)
        ctx.pad, ctx.groups = pad, groups
        outputs = []
        for rows, _ in _pieces(x_RMK, one_KC):
            heard_RMC = (x_RMK[rows] @ one_KC).relu_()
            outputs.append(F.conv2d(_image(heard_RMC), two, bias, 2, (0, pad), 1, groups))
        return torch.cat([_unimage(output).flatten(0, 1) for output in outputs])

    @staticmethod
    @once_differentiable
    @torch.autocast("cpu", enabled=False)  # type: ignore[untyped-decorator]
    def backward(ctx: Any, grad_NC: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        x_RMK, one_KC, two = ctx.saved_tensors
        grad_x = _zero_sum(x_RMK) if ctx.needs_input_grad[0] else None
        grad_one, grad_two, grad_bias = map(_zero_sum, (one_KC, two, two[:, 0, 0, 0]))
        pieces = list(_pieces(x_RMK, one_KC))
        grad_RMC = grad_NC.unflatten(0, (pieces[-1][1].stop, -1))
        for rows, out_rows in pieces:
            heard_RMC = (x_RMK[rows] @ one_KC).relu_()
            grad_image, *of_two = torch.ops.aten.convolution_backward(
                *(_image(grad_RMC[out_rows]), _image(heard_RMC), two, [len(two)]),
                *((2, 2), (0, ctx.pad), (1, 1), False, (0, 0), ctx.groups, (True, True, True)),
            )
            grad_two, grad_bias = grad_two + of_two[0], grad_bias + of_two[1]
            grad_heard_RMC = _unimage(grad_image)
            torch.ops.aten.threshold_backward.grad_input(grad_heard_RMC, heard_RMC, 0, grad_input=grad_heard_RMC)
            grad_one += x_RMK[rows].flatten(0, 1).T @ grad_heard_RMC.flatten(0, 1)
            if grad_x is not None:
                grad_x[rows] += grad_heard_RMC @ one_KC.T  # neighbours share a row
        grads = (grad_x, grad_one, grad_two, grad_bias)
        return *(None if grad is None else grad.to(two.dtype) for grad in grads), None, None


def _pieces(x_RMK: Tensor, one_KC: Tensor) -> Iterator[tuple[slice, slice]]:
    """Rows for the second convolution, and of what it gives."""
    row_bytes = x_RMK.shape[1] * one_KC.shape[1] * one_KC.element_size()
    size, end = max(1, _PIECE_BYTES // (2 * row_bytes)), (len(x_RMK) - 1) // 2
    for begin in range(0, end, size):
        stop = min(begin + size, end)
        yield slice(2 * begin, 2 * stop + 1), slice(begin, stop)


def _zero_sum(tensor: Tensor) -> Tensor:
    """For sums over many pieces: not of half precision."""
    return torch.zeros_like(tensor, dtype=torch.promote_types(tensor.dtype, torch.float32))


def _image(x_RMC: Tensor) -> Tensor:
    return x_RMC.unsqueeze(0).permute(0, 3, 1, 2)


def _unimage(x_1CRM: Tensor) -> Tensor:
    return x_1CRM.permute(0, 2, 3, 1).squeeze(0)


class _SilencedReLU(InPlaceReLU):
    """ReLU, and 0 in the rows that are silent: in a sixth of the time that limits for every row would take."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, silent_rows: Tensor) -> Tensor:
        x.index_fill_(0, silent_rows, 0.0).relu_()
        return InPlaceReLU.keep(ctx, x)


def halved(conv: HalvingConv, x_RMC: Tensor) -> Tensor:
    """(R / 2 · M / 2, C); padding for causal convolutions gives a row too many."""
    out_RMC = _unimage(conv(_image(x_RMC)))
    return (out_RMC if conv.pad_before == conv.pad_after else out_RMC[:-1]).flatten(0, 1)
