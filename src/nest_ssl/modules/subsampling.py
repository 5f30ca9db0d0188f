"""Convolutional subsampling in time. B batch, T frames, M mel bands, S frames after it, D width of the encoder."""

from __future__ import annotations

from typing import TypeVar

import torch
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812

from nest_ssl.config import EncoderConfig
from nest_ssl.modules.inputs import valid_frames

_KERNEL, _STRIDE = 3, 2

Length = TypeVar("Length", int, Tensor)


class HalvingConv(nn.Conv2d):
    """A 3 × 3 convolution of stride 2 in time and frequency; the causal one sees only what came before."""

    def __init__(self, channels_in: int, channels_out: int, *, causal: bool, depthwise: bool = False) -> None:
        super().__init__(
            channels_in,
            channels_out,
            kernel_size=_KERNEL,
            stride=_STRIDE,
            padding=0 if causal else _KERNEL // 2,
            groups=channels_in if depthwise else 1,
        )
        self.causal = causal
        self.pad_before, self.pad_after = (_KERNEL - 1, _STRIDE - 1) if causal else (_KERNEL // 2, _KERNEL // 2)

    def forward(self, x_BCTM: Tensor) -> Tensor:
        return super().forward(F.pad(x_BCTM, (self.pad_before, self.pad_after) * 2) if self.causal else x_BCTM)

    def out_length(self, length: Length) -> Length:
        return (length + self.pad_before + self.pad_after - _KERNEL) // _STRIDE + 1


class ConvSubsampling(nn.Module):
    """`pre_encode((B, T, M), lengths)` gives (B, S, D) and the new lengths.

    Frames past the end are zeroed before every convolution over time, so an utterance does not see
    its padding.
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
        # Features are float32; a model cast to another precision computes in its own from here on.
        x_BCTM = zero_past_end(x[:, None].to(self.out.weight.dtype), lengths)
        for layer in self.conv:
            if isinstance(layer, nn.ReLU):  # before it, so that autograd keeps one tensor of this size, not two
                x_BCTM = zero_past_end(x_BCTM, lengths)
            x_BCTM = layer(x_BCTM)
            if isinstance(layer, HalvingConv):
                lengths = layer.out_length(lengths)
        return self.out(x_BCTM.transpose(1, 2).flatten(2)), lengths


def zero_past_end(x_BCTM: Tensor, lengths_B: Tensor) -> Tensor:
    return torch.where(valid_frames(lengths_B, x_BCTM.shape[2])[:, None, :, None], x_BCTM, 0.0)
