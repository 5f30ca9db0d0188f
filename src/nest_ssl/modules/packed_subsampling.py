"""Convolutional subsampling on a CPU: the frames that matter, of all utterances, in one row.

Frames are taken in groups, as many as give one frame of output. Two kinds of group are left out. Past the end of an
utterance all but one: it is silent, and keeps the next utterance apart. Inside masked blocks, where all that a group
hears is the same frame over and over, all but one of the batch: they give the same output. Four in ten groups of a
training batch are one or the other.

What the first convolution gives is by far the largest tensor of a small model. The second one takes it in pieces that
stay in the processor's cache, and none is kept: the backward pass makes them again.

B batch, T mel frames, M mel bands, S frames of output, G groups of a padded utterance, R rows of the groups kept,
C channels, K = 10 factors of each value of the first convolution, D width of the encoder. An image is (1, C, R, M), and
its channels lie side by side in memory.
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
    lengths = one.out_length(lengths)
    x_RM, silent = x_RM.to(one.weight.dtype), packing.silent_rows(lengths, len(x_RM) // 2)
    if later:
        two, *later = later
        assert isinstance(two, HalvingConv)
        image = first_two(one, two, factors(one, x_RM, silent, two.pad_before))
        lengths = two.out_length(lengths)
    else:
        image = relu(product(_image(factors(one, x_RM, silent)), one.taps_weight()))
    for layer in later:
        if isinstance(layer, HalvingConv):
            image, lengths = halved(layer, image), layer.out_length(lengths)
        elif isinstance(layer, nn.ReLU):
            silent = packing.silent_rows(lengths, image.shape[2])
            image = _SilencedReLU.apply(image, silent)  # type: ignore[no-untyped-call]
        else:
            assert isinstance(layer, nn.Conv2d)  # of one frame and band
            image = _Product.apply(*_cast(image, layer.weight[:, :, 0, 0], layer.bias))  # type: ignore[no-untyped-call]
    return packing.unpacked(module.project(_rows(image))), lengths


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

    def unpacked(self, x_ND: Tensor) -> Tensor:
        """(B, S, D) from the outputs of the groups kept.

        Gradients of hundreds of frames are summed for one group: not in half precision, nor in an order that changes
        from run to run, as those of an index.
        """
        sums = torch.promote_types(x_ND.dtype, torch.float32)
        return F.embedding(self.source_BS, x_ND.to(sums)).to(x_ND.dtype)

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
    own_BG = torch.arange(len(x_BTM) * num_groups, device=x_BTM.device).view(-1, num_groups)
    like_BG = own_BG
    if not x_BTM.requires_grad:  # each of the frames left out has a gradient of its own
        like_BG = first_alike(own_BG, x_BTM, lengths, reach=(group - 1) * convs[0].pad_before)
    keep_BG = valid_frames(out_lengths + 1, num_groups) & (like_BG == own_BG)
    place = keep_BG.flatten().cumsum(0) - 1
    packing = Packing(keep_BG, place[like_BG[:, :size]])
    return packing, packing.rows(x_BTM)


def first_alike(own_BG: Tensor, x_BTM: Tensor, lengths: Tensor, reach: int) -> Tensor:
    """(B, G) the group itself or, if it hears one frame over and over, the first of the batch that hears the same.

    A group hears its own frames and `reach` frames before them. All these are then equal and within the utterance. The
    group before ends with that frame too, so those that follow hear no difference when such groups are left out.
    """
    group = x_BTM.shape[1] // own_BG.shape[1]
    same_BT = x_BTM.diff(dim=1).abs_().sum(2) == 0  # frame t + 1 is that of t; `all` would take five times as long
    same_BT = F.pad(same_BT, (1, 0)) & valid_frames(lengths, x_BTM.shape[1])
    num_same_BT = F.pad(same_BT.cumsum(1), (1, 0))  # before frame t
    end_G = torch.arange(group, x_BTM.shape[1] + 1, group, device=x_BTM.device)
    begin_G = end_G - (group + reach) + 1
    num_heard_BG = num_same_BT[:, end_G] - num_same_BT[:, begin_G.clamp(min=0)]
    alike_BG = (num_heard_BG == group + reach - 1) & (begin_G > 0)
    frames, kind = x_BTM[:, end_G - 1][alike_BG].unique(dim=0, return_inverse=True)
    first = own_BG.new_full((len(frames),), own_BG.numel()).scatter_reduce_(0, kind, own_BG[alike_BG], "amin")
    return own_BG.masked_scatter(alike_BG, first[kind])


def factors(conv: HalvingConv, x_RM: Tensor, silent_rows: Tensor, num_before: int = 0) -> Tensor:
    """(R / 2, M / 2, K): nine values and 1 for the bias; all of them 0 in rows that are silent, or stand before."""
    num_rows, num_bands = len(x_RM) // 2, conv.out_length(x_RM.shape[1])
    x_RM = F.pad(x_RM, (conv.pad_before, conv.pad_after) * 2)
    x_RMK = x_RM.new_ones(num_before + num_rows, num_bands, 10)
    for row in range(3):  # written in place: in a third of the time that windows take that are put together
        x_RMK[num_before:, :, 3 * row : 3 * row + 3] = x_RM[row : row + 2 * num_rows : 2].unfold(1, 3, 2)
    x_RMK[:num_before] = 0.0
    return x_RMK.index_fill_(0, silent_rows + num_before, 0.0)


def product(image: Tensor, weight_CK: Tensor, bias: Tensor | None = None) -> Tensor:
    """From K channels to C, as a convolution.

    `@` is of another library, which divides the work among the cores in another way: what one core has just written,
    the other one reads. Measured on two cores: a product of 8 MB takes 0.3 ms by itself, and 2 ms among convolutions.
    """
    return F.conv2d(image, weight_CK[:, :, None, None], bias)


class _Product(torch.autograd.Function):
    """`product`, with gradients for which less is prepared: convolutions of a new size take up to 4 ms for that."""

    @staticmethod
    def forward(ctx: Any, image: Tensor, weight_CK: Tensor, bias: Tensor) -> Tensor:
        ctx.save_for_backward(image, weight_CK)
        return product(image, weight_CK, bias)

    @staticmethod
    @once_differentiable
    @torch.autocast("cpu", enabled=False)  # type: ignore[untyped-decorator]
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, ...]:  # type: ignore[override]
        image, weight_CK = ctx.saved_tensors
        grad_NC, x_NK = _rows(grad).flatten(0, 1), _rows(image).flatten(0, 1)
        return product(grad, weight_CK.T), grad_NC.T @ x_NK, grad_NC.sum(0)


def _cast(*tensors: Tensor | None) -> list[Tensor]:
    """As autocast does it for the operations of torch; none of them is missing: every convolution here has a bias."""
    given = [tensor for tensor in tensors if tensor is not None]
    assert len(given) == len(tensors)
    if not torch.is_autocast_enabled("cpu") or given[0].dtype == torch.float64:
        return given
    return [tensor.to(torch.get_autocast_dtype("cpu")) for tensor in given]


def first_two(one: HalvingConv, two: HalvingConv, x_RMK: Tensor) -> Tensor:
    """The first convolution, ReLU and the second convolution, from the factors of the first."""
    pad = two.pad_before
    if pad != two.pad_after:  # else the convolution pads by itself
        x_RMK, pad = F.pad(x_RMK, (0, 0, two.pad_before, two.pad_after)), 0
    tensors = _cast(x_RMK, one.taps_weight(), two.weight, two.bias)
    image: Tensor = _FirstTwo.apply(*tensors, pad, two.groups)  # type: ignore[no-untyped-call]
    return image


class _FirstTwo(torch.autograd.Function):
    """Rows of factors are padded for the second convolution; of bands, `pad` are missing on both sides."""

    @staticmethod
    def forward(ctx: Any, x_RMK: Tensor, one_CK: Tensor, two: Tensor, bias: Tensor, pad: int, groups: int) -> Tensor:
        ctx.save_for_backward(x_RMK, one_CK, two)
        ctx.pad, ctx.groups = pad, groups
        size = (1, len(two), (len(x_RMK) - 1) // 2, (x_RMK.shape[1] + 2 * pad - two.shape[3]) // 2 + 1)
        image = torch.empty(size, dtype=two.dtype, device=two.device, memory_format=torch.channels_last)
        for rows, out_rows in _pieces(x_RMK, one_CK):
            heard = product(_image(x_RMK[rows]), one_CK).relu_()
            image[:, :, out_rows] = F.conv2d(heard, two, bias, 2, (0, pad), 1, groups)
        return image

    @staticmethod
    @once_differentiable
    @torch.autocast("cpu", enabled=False)  # type: ignore[untyped-decorator]
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        x_RMK, one_CK, two = ctx.saved_tensors
        convolution_backward = torch.ops.aten.convolution_backward
        grad_x = _zero_sum(x_RMK) if ctx.needs_input_grad[0] else None
        grad_one, grad_two, grad_bias = map(_zero_sum, (one_CK, two, two[:, 0, 0, 0]))
        for rows, out_rows in _pieces(x_RMK, one_CK):
            heard = product(_image(x_RMK[rows]), one_CK).relu_()
            grad_heard, *of_two = convolution_backward(
                *(grad[:, :, out_rows], heard, two, [len(two)]),
                *((2, 2), (0, ctx.pad), (1, 1), False, (0, 0), ctx.groups, (True, True, True)),
            )
            torch.ops.aten.threshold_backward.grad_input(grad_heard, heard, 0, grad_input=grad_heard)
            of_x, of_one, _ = convolution_backward(
                *(grad_heard, _image(x_RMK[rows]), one_CK[:, :, None, None], None),
                *((1, 1), (0, 0), (1, 1), False, (0, 0), 1, (grad_x is not None, True, False)),
            )
            grad_one, grad_two, grad_bias = grad_one + of_one[:, :, 0, 0], grad_two + of_two[0], grad_bias + of_two[1]
            if grad_x is not None:
                grad_x[rows] += _rows(of_x)  # neighbours share a row
        grads = (grad_x, grad_one, grad_two, grad_bias)
        return *(None if grad is None else grad.to(two.dtype) for grad in grads), None, None


def _pieces(x_RMK: Tensor, one_CK: Tensor) -> Iterator[tuple[slice, slice]]:
    """Rows for the second convolution, and of what it gives."""
    row_bytes = x_RMK.shape[1] * one_CK.shape[0] * one_CK.element_size()
    size, end = max(1, _PIECE_BYTES // (2 * row_bytes)), (len(x_RMK) - 1) // 2
    for begin in range(0, end, size):
        stop = min(begin + size, end)
        yield slice(2 * begin, 2 * stop + 1), slice(begin, stop)


def _zero_sum(tensor: Tensor) -> Tensor:
    """For sums over many pieces: not of half precision."""
    return torch.zeros_like(tensor, dtype=torch.promote_types(tensor.dtype, torch.float32))


def _image(x_RMC: Tensor) -> Tensor:
    return x_RMC.unsqueeze(0).permute(0, 3, 1, 2)


def _rows(image: Tensor) -> Tensor:
    return image.permute(0, 2, 3, 1).squeeze(0)


class _SilencedReLU(InPlaceReLU):
    """ReLU, and 0 in the rows that are silent: in a sixth of the time that limits for every row would take."""

    @staticmethod
    def forward(ctx: Any, image: Tensor, silent_rows: Tensor) -> Tensor:
        image.index_fill_(2, silent_rows, 0.0).relu_()
        return InPlaceReLU.keep(ctx, image)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        (result,) = ctx.saved_tensors
        # In place: it was made by the one operation of `packed_subsampling` that follows, and nobody else has it.
        return torch.ops.aten.threshold_backward.grad_input(gradient, result, 0, grad_input=gradient), None


def halved(conv: HalvingConv, image: Tensor) -> Tensor:
    """Padding for causal convolutions gives a row too many."""
    image = conv(image)
    return image if conv.pad_before == conv.pad_after else image[:, :, :-1]
