"""Fused subsampling for CUDA, channels last: the parameters and sums of `modules.subsampling`.

The first convolution has one input channel: nine values per output, one GEMM, with the bias as a
tenth value. The depthwise ones apply the ReLU and the end of the utterance to what they read, so
that neither is a pass over memory (the first output is 1 GB for 64 × 16 s). The pointwise ones are
GEMMs.

B batch, T frames, M mel bands, C channels, D width of the encoder.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812
from torch.utils.checkpoint import checkpoint

from nest_ssl.modules.inputs import valid_frames
from nest_ssl.modules.subsampling import ConvSubsampling, HalvingConv

_ALIGNED_TAPS = 16  # of 10: a bf16 GEMM is fast only if rows are a multiple of 16 bytes


def fused_subsampling(module: ConvSubsampling, x_BTM: Tensor, lengths: Tensor) -> tuple[Tensor, Tensor]:
    """Return (B, S, D) and the new lengths; for `dw_striding`."""
    one, *later = (layer for layer in module.conv if isinstance(layer, nn.Conv2d))
    assert isinstance(one, HalvingConv)
    x = torch.where(valid_frames(lengths, x_BTM.shape[1])[..., None], x_BTM, 0.0)
    lengths = one.out_length(lengths)
    if not later:
        x = first(one, x)
    else:
        two, *later = later
        assert isinstance(two, HalvingConv)
        # The first output is the largest tensor of the model, and cheap: it is recomputed in the backward pass.
        x = checkpoint(first_two, one, two, x, lengths, use_reentrant=False, preserve_rng_state=False)
        lengths = two.out_length(lengths)
    for layer in later:
        if isinstance(layer, HalvingConv):
            x = halved(layer, x, lengths)
            lengths = layer.out_length(lengths)
        else:
            x = F.linear(x, layer.weight[:, :, 0, 0], layer.bias)
    x_BTMC = torch.where(valid_frames(lengths, x.shape[1])[..., None, None], F.relu(x), 0.0)
    return projected(module.out, x_BTMC), lengths


def first(conv: HalvingConv, x_BTM: Tensor) -> Tensor:
    """Return (B, T / 2, M / 2, C) by one GEMM of windows of nine values, and 1 for the bias."""
    assert conv.bias is not None
    pads = (conv.pad_before, conv.pad_after) * 2
    size, stride = conv.kernel_size[0], conv.stride[0]
    windows = F.pad(x_BTM, pads).unfold(-2, size, stride).unfold(-2, size, stride).flatten(-2)
    taps = F.pad(windows, (0, 1), value=1.0)
    weight = torch.cat((conv.weight.flatten(1), conv.bias[:, None]), dim=1)
    missing = (0, _ALIGNED_TAPS - taps.shape[-1])
    return F.linear(F.pad(taps, missing).to(weight.dtype), F.pad(weight, missing))


def first_two(one: HalvingConv, two: HalvingConv, x_BTM: Tensor, lengths: Tensor) -> Tensor:
    return halved(two, first(one, x_BTM), lengths)


def halved(conv: HalvingConv, x_BTMC: Tensor, lengths: Tensor) -> Tensor:
    """Return the depthwise convolution of the ReLU of `x_BTMC`, which ends at `lengths`."""
    from nest_ssl.fast.ops.halving import halve  # needs Triton, which installations without CUDA lack

    assert conv.bias is not None
    out: Tensor = halve(x_BTMC, lengths, conv.weight[:, 0], conv.bias, conv.pad_before, conv.pad_after)
    return out


def projected(linear: nn.Linear, x_TMC: Tensor) -> Tensor:
    """Return (…, T, D) from channels that are last; the weight has them first."""
    num_bands, channels = x_TMC.shape[-2:]
    weight = linear.weight.view(-1, channels, num_bands).transpose(1, 2).flatten(1)
    return F.linear(x_TMC.flatten(-2), weight, linear.bias)
