"""Convolutional subsampling on a CPU: the frames that matter, of all utterances, in one row.

Frames are taken in groups, as many as give one frame of output. Two kinds of group are left out. Past the end of an
utterance all but one: it is silent, and keeps the next utterance apart. Inside a masked block, where all that a group
hears is the same frame over and over, its output is that of the group before it. A third of a training batch is one or
the other.

B batch, T mel frames, M mel bands, S frames of output, G groups of a padded utterance, R rows of the groups kept,
C channels, D width of the encoder.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812

from nest_ssl.modules.lengths import valid_frames
from nest_ssl.modules.subsampling import ConvSubsampling, HalvingConv


def packed_subsampling(module: ConvSubsampling, x_BTM: Tensor, lengths: Tensor) -> tuple[Tensor, Tensor]:
    """(B, S, D) and the new lengths: the same parameters and sums as `module`'s own."""
    one, _, *later = module.conv
    assert isinstance(one, HalvingConv)
    packing, x_RM = pack(module, x_BTM, lengths)
    lengths, num_rows = one.out_length(lengths), len(x_RM) // 2
    x = first(one, x_RM.to(one.weight.dtype), packing.silent_rows(lengths, num_rows)).relu_()
    # (R · M, C) from here on: what is done in place to a view of a tensor costs a copy in the backward pass.
    for layer in later:
        if isinstance(layer, HalvingConv):
            x = halved(layer, x.unflatten(0, (num_rows, -1)))
            lengths, num_rows = layer.out_length(lengths), num_rows // 2
        elif isinstance(layer, nn.ReLU):
            bands = torch.arange(len(x) // num_rows, device=x.device)
            silent = packing.silent_rows(lengths, num_rows)[:, None] * len(bands) + bands
            x = x.index_fill_(0, silent.flatten(), 0.0).relu_()
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


def first(conv: HalvingConv, x_RM: Tensor, silent_rows: Tensor) -> Tensor:
    """(R / 2 · M / 2, C): nine values and the bias, one matrix product. What is silent is 0, bias and all."""
    taps = conv.taps(x_RM)[: len(x_RM) // 2].index_fill_(0, silent_rows, 0.0)
    # Not F.linear: the gradient of its weight takes twice as long.
    return taps.flatten(0, 1) @ conv.taps_weight().T.contiguous()


def halved(conv: HalvingConv, x_RMC: Tensor) -> Tensor:
    """(R / 2 · M / 2, C); padding for causal convolutions gives a row too many."""
    x_1RMC: Tensor = conv(x_RMC.unsqueeze(0).permute(0, 3, 1, 2)).permute(0, 2, 3, 1)
    return (x_1RMC if conv.pad_before == conv.pad_after else x_1RMC[:, :-1]).flatten(0, 2)
