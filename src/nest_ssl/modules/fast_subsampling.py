"""Convolutional subsampling on a GPU, channels last: the same parameters and sums as `subsampling`.

The first convolution has one input channel: nine values per output, one matrix product, whose tenth value is the bias.
The depthwise ones apply the ReLU and the end of the utterance to what they read, so that neither is a pass over memory
(the first output is 1 GB for 64 × 16 s). The pointwise ones are matrix products.

B batch, T frames, M mel bands, C channels, D width of the encoder.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812
from torch.utils.checkpoint import checkpoint

from nest_ssl.modules.lengths import valid_frames
from nest_ssl.modules.subsampling import ConvSubsampling, HalvingConv

_ALIGNED_TAPS = 16  # of 10: a matrix product of bf16 wants rows of 16 bytes


def fast_subsampling(module: ConvSubsampling, x_BTM: Tensor, lengths: Tensor) -> tuple[Tensor, Tensor]:
    """(B, S, D) and the new lengths; for `dw_striding`."""
    one, *later = (layer for layer in module.conv if isinstance(layer, nn.Conv2d))
    assert isinstance(one, HalvingConv)
    x = torch.where(valid_frames(lengths, x_BTM.shape[1])[..., None], x_BTM, 0.0)
    lengths = one.out_length(lengths)
    if not later:
        x = first(one, x)
    else:
        two, *later = later
        assert isinstance(two, HalvingConv)
        # The first output is the largest tensor of the model, and cheap: made again in the backward pass.
        x = checkpoint(first_two, one, two, x, lengths, use_reentrant=False, preserve_rng_state=False)
        lengths = two.out_length(lengths)
    for layer in later:
        if isinstance(layer, HalvingConv):
            x = halved(layer, x, lengths)
            lengths = layer.out_length(lengths)
        else:
            x = F.linear(x, layer.weight[:, :, 0, 0], layer.bias)
    x_BTMC = torch.where(valid_frames(lengths, x.shape[1])[..., None, None], F.relu(x), 0.0)
    return module.project(x_BTMC), lengths


def first(conv: HalvingConv, x_BTM: Tensor) -> Tensor:
    """(B, T / 2, M / 2, C) by one matrix product."""
    taps, weight = conv.taps(x_BTM), conv.taps_weight()
    missing = (0, _ALIGNED_TAPS - taps.shape[-1])
    return F.linear(F.pad(taps, missing).to(weight.dtype), F.pad(weight, missing))


def first_two(one: HalvingConv, two: HalvingConv, x_BTM: Tensor, lengths: Tensor) -> Tensor:
    return halved(two, first(one, x_BTM), lengths)


def halved(conv: HalvingConv, x_BTMC: Tensor, lengths: Tensor) -> Tensor:
    """The depthwise convolution `conv` of the ReLU of `x_BTMC`, which ends at `lengths`."""
    from nest_ssl.modules.depthwise_ops import halve  # needs Triton

    assert conv.bias is not None
    out: Tensor = halve(x_BTMC, lengths, conv.weight[:, 0], conv.bias, conv.pad_before, conv.pad_after)
    return out
