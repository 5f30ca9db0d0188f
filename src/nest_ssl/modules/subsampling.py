"""Convolutional subsampling in time. B batch, T frames, M mel bands, S frames after it, D width of the encoder."""

from __future__ import annotations

from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812

from nest_ssl.config import EncoderConfig
from nest_ssl.modules.as_built import is_as_built
from nest_ssl.modules.lengths import may_be_read, valid_frames

_KERNEL, _STRIDE = 3, 2

Length = TypeVar("Length", int, Tensor)


class HalvingConv(nn.Conv2d):
    """A 3 × 3 convolution of stride 2 in time and frequency; the causal one sees only what came before."""

    def __init__(self, channels_in: int, channels_out: int, *, causal: bool, depthwise: bool = False) -> None:
        super().__init__(channels_in, channels_out, _KERNEL, _STRIDE, groups=channels_in if depthwise else 1)
        self.pad_before, self.pad_after = (_KERNEL - 1, _STRIDE - 1) if causal else (_KERNEL // 2, _KERNEL // 2)

    def forward(self, x: Tensor) -> Tensor:
        if self.pad_before == self.pad_after:
            return F.conv2d(x, self.weight, self.bias, self.stride, self.pad_before, 1, self.groups)
        pads = (self.pad_before, self.pad_after) * 2
        return F.conv2d(F.pad(x, pads), self.weight, self.bias, self.stride, 0, 1, self.groups)

    def taps(self, x_TM: Tensor) -> Tensor:
        """(…, T / 2, M / 2, 10): what `taps_weight` is multiplied with, for one channel, and 1 for the bias."""
        pads = (self.pad_before, self.pad_after)
        windows = F.pad(x_TM, (*pads, *pads)).unfold(-2, _KERNEL, _STRIDE).unfold(-2, _KERNEL, _STRIDE)
        return F.pad(windows.flatten(-2), (0, 1), value=1.0)

    def taps_weight(self) -> Tensor:
        """(C, 10): the weight, and the bias as the tenth value."""
        assert self.bias is not None
        return torch.cat((self.weight.flatten(1), self.bias[:, None]), dim=1)

    def out_length(self, length: Length) -> Length:
        return (length + self.pad_before + self.pad_after - _KERNEL) // _STRIDE + 1


class ConvSubsampling(nn.Module):
    """`pre_encode((B, T, M), lengths)` gives (B, S, D) and the new lengths.

    Frames past the end are zeroed before every convolution over time, so an utterance does not see its padding.
    """

    def __init__(self, cfg: EncoderConfig) -> None:
        super().__init__()
        channels = cfg.d_model if cfg.subsampling_conv_channels == -1 else cfg.subsampling_conv_channels
        separable = cfg.subsampling == "dw_striding"
        layers: list[nn.Module] = []
        num_bands = cfg.feat_in
        for stage in range(cfg.subsampling_factor.bit_length() - 1):
            first = stage == 0
            conv = HalvingConv(
                1 if first else channels, channels, causal=cfg.causal_downsampling, depthwise=separable and not first
            )
            layers.append(conv)
            if separable and not first:
                layers.append(nn.Conv2d(channels, channels, kernel_size=1))
            layers.append(nn.ReLU())
            num_bands = conv.out_length(num_bands)
        self.conv = nn.Sequential(*layers)
        self.out = nn.Linear(channels * num_bands, cfg.d_model)

    def forward(self, x: Tensor, lengths: Tensor) -> tuple[Tensor, Tensor]:
        if may_be_read(lengths) and is_as_built(self):
            from nest_ssl.modules.packed_subsampling import packed_subsampling  # it builds on this file

            return packed_subsampling(self, x, lengths)
        return self.padded(x, lengths)

    def project(self, x_TMC: Tensor) -> Tensor:
        """(…, T, D) from channels that are last; the weight has them first."""
        num_bands, channels = x_TMC.shape[-2:]
        weight = self.out.weight.view(-1, channels, num_bands).transpose(1, 2).flatten(1)
        return F.linear(x_TMC.flatten(-2), weight, self.out.bias)

    def padded(self, x: Tensor, lengths: Tensor) -> tuple[Tensor, Tensor]:
        """The plain version, on all frames of the batch."""
        # Features are float32; a model cast to another precision computes in its own from here on.
        valid_BT = valid_frames(lengths, x.shape[1])
        x = torch.where(valid_BT[:, None, :, None], x[:, None].to(self.out.weight.dtype), 0.0)
        for layer in self.conv:
            if isinstance(layer, HalvingConv):
                x, lengths = layer(x), layer.out_length(lengths)
            elif isinstance(layer, nn.ReLU):
                x = relu_and_zero_past_end(x, lengths)
            else:
                x = layer(x)  # one frame at a time: what is past the end stays there
        return self.out(x.transpose(1, 2).flatten(2)), lengths


def relu_and_zero_past_end(x_BCTF: Tensor, lengths: Tensor) -> Tensor:
    """In one pass over the largest tensors of the model: values are kept between 0 and, past the end, 0."""
    valid_BT = valid_frames(lengths, x_BCTF.shape[2])
    most_B1T1 = torch.where(valid_BT, torch.inf, 0.0).to(x_BCTF.dtype)[:, None, :, None]
    trains = x_BCTF.requires_grad and torch.is_grad_enabled() and not torch.compiler.is_compiling()
    if trains and not x_BCTF._is_view():  # a module with a hook of its backward pass gives a view, which must stay
        limited: Tensor = _Between0And.apply(x_BCTF, most_B1T1)  # type: ignore[no-untyped-call]
        return limited
    return torch.clamp(x_BCTF, torch.zeros_like(most_B1T1), most_B1T1)


class InPlaceReLU(torch.autograd.Function):
    """ReLU, and 0 in some places more, in place: a convolution does not need what it gave.

    The gradient of a place that became 0 is 0, whatever made it so; no pass over the gradient is needed for it.
    """

    @staticmethod
    def keep(ctx: Any, x: Tensor) -> Tensor:
        """What `forward` returns: `x`, changed already."""
        ctx.mark_dirty(x)
        ctx.save_for_backward(x)
        return x

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        (result,) = ctx.saved_tensors
        return torch.ops.aten.threshold_backward(gradient, result, 0), None


class _Between0And(InPlaceReLU):
    """clamp(x, 0, most) for a `most` of 0 or infinity.

    autograd's own clamp keeps the input beside the output and reads both, with their limits, several times.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, most: Tensor) -> Tensor:
        torch.clamp(x, torch.zeros_like(most), most, out=x)
        return InPlaceReLU.keep(ctx, x)
