"""A conformer layer for the compiler: the same parameters and the same sums as `conformer.ConformerLayer`.

What differs is how, not what. The frames of all utterances stand in a row, (N, D): convolutions over one frame are
matrix products, no tensor is transposed, and the compiler has one size to be general about. Queries, keys and values
are one product; dropout stores no mask; the batch norm counts the frames the batch had before it was padded.
Only for training.

B batch, S frames, N = B · S, D width, R distances, H heads, C = D / H, K taps of the convolution.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812

from nest_ssl.modules.attention import MultiHeadAttention, RelPositionMultiHeadAttention
from nest_ssl.modules.conformer import ConformerConvolution, ConformerLayer, FeedForward, per_frame
from nest_ssl.modules.fast_dropout import dropout

NUM_SEEDS = 7  # of a layer: its dropouts


@dataclass
class Frames:
    """What the layers know about the frames they work on."""

    lengths_B: Tensor
    """Frames of each utterance."""
    frames_BS: Tensor
    """True within an utterance; its shape says where utterances begin."""
    valid_N1: Tensor
    """The same in a row."""
    counted_N1: Tensor
    """True for the frames that the batch norm counts: all but those added to get a friendly size."""
    num_counted: Tensor
    """How many those are, in float32."""
    context_SS: Tensor | None
    """True where a frame may see another; None: all."""
    pos_emb_1RD: Tensor | None
    """Embeddings of the distances, for the plain attention."""


def fast_layer(
    layer: ConformerLayer, x_ND: Tensor, frames: Frames, positions_RHC: Tensor | None, seeds: Tensor, fused: bool
) -> Tensor:
    """The layer's output; `fused` takes the Triton kernels, `positions_RHC` are for its attention."""
    rate = layer.dropout.p
    half = feed_forward(layer.feed_forward1, layer.norm_feed_forward1(x_ND), seeds[0])
    x_ND = x_ND + 0.5 * dropout(half, rate, seeds[1])
    normed = layer.norm_self_att(x_ND)
    if fused and positions_RHC is not None:
        attended = fused_attention(layer.self_attn, normed, frames, positions_RHC, seeds[2])
    else:
        attended = plain_attention(layer.self_attn, normed, frames)
    x_ND = x_ND + dropout(attended, rate, seeds[3])
    x_ND = x_ND + dropout(convolution(layer.conv, layer.norm_conv(x_ND), frames, fused), rate, seeds[4])
    half = feed_forward(layer.feed_forward2, layer.norm_feed_forward2(x_ND), seeds[5])
    x_ND = x_ND + 0.5 * dropout(half, rate, seeds[6])
    out_ND: Tensor = layer.norm_out(x_ND)
    return out_ND


def feed_forward(module: FeedForward, x_ND: Tensor, seed: Tensor) -> Tensor:
    out_ND: Tensor = module.linear2(dropout(F.silu(module.linear1(x_ND)), module.dropout.p, seed))
    return out_ND


def fused_attention(
    module: MultiHeadAttention, x_ND: Tensor, frames: Frames, positions_RHC: Tensor, seed: Tensor
) -> Tensor:
    from nest_ssl.modules.relative_attention import relative_attention  # needs Triton

    assert isinstance(module, RelPositionMultiHeadAttention)
    linears = (module.linear_q, module.linear_k, module.linear_v)
    bias = None if module.linear_q.bias is None else torch.cat([linear.bias for linear in linears])
    qkv = F.linear(x_ND, torch.cat([linear.weight for linear in linears]), bias)
    qkv_N3HC = qkv.view(x_ND.shape[0], 3, module.n_heads, -1)
    rows = (frames.lengths_B, frames.frames_BS, frames.context_SS)
    out_NHC, _ = relative_attention(
        qkv_N3HC, positions_RHC, module.pos_bias_u, module.pos_bias_v, *rows, seed, module.dropout.p
    )
    out_ND: Tensor = module.linear_out(out_NHC.flatten(1))
    return out_ND


def plain_attention(module: MultiHeadAttention, x_ND: Tensor, frames: Frames) -> Tensor:
    valid_BS = frames.frames_BS
    visible_B1SS = (valid_BS[:, :, None] & valid_BS[:, None, :])[:, None]
    if frames.context_SS is not None:
        visible_B1SS = visible_B1SS & frames.context_SS
    out_BSD: Tensor = module(x_ND.view(*valid_BS.shape, -1), visible_B1SS, frames.pos_emb_1RD)
    return out_BSD.flatten(0, 1)


def convolution(module: ConformerConvolution, x_ND: Tensor, frames: Frames, fused: bool) -> Tensor:
    """Gated pointwise, depthwise over time, norm, SiLU, pointwise."""
    x_ND = F.glu(per_frame(module.pointwise_conv1, x_ND), dim=-1)
    x_ND = torch.where(frames.valid_N1, x_ND, 0.0)
    x_ND = depthwise(module, x_ND, frames.frames_BS, fused)
    norm = module.batch_norm
    if type(norm) is nn.BatchNorm1d:
        x_ND = batch_norm(norm, x_ND, frames)
    elif isinstance(norm, nn.LayerNorm):
        x_ND = norm(x_ND)
    else:
        x_ND = _other_norm(norm, x_ND, frames.frames_BS)
    return per_frame(module.pointwise_conv2, F.silu(x_ND))


def depthwise(module: ConformerConvolution, x_ND: Tensor, frames_BS: Tensor, fused: bool) -> Tensor:
    conv, (left, right) = module.depthwise_conv, module.context
    if fused:
        from nest_ssl.modules.depthwise_ops import convolve  # needs Triton

        convolved: Tensor = convolve(x_ND, conv.weight[:, 0], conv.bias, frames_BS, left)
        return convolved
    x_BDS = F.pad(x_ND.view(*frames_BS.shape, -1).transpose(1, 2), (left, right))
    return F.conv1d(x_BDS, conv.weight, conv.bias, groups=conv.groups).transpose(1, 2).flatten(0, 1)


def batch_norm(norm: nn.BatchNorm1d, x_ND: Tensor, frames: Frames) -> Tensor:
    """Batch norm in training, over the counted frames; the running statistics move."""
    counted_N1, count = frames.counted_N1, frames.num_counted
    x = x_ND.float()
    mean_D = torch.where(counted_N1, x, 0.0).sum(0) / count
    variance_D = torch.where(counted_N1, x - mean_D, 0.0).square().sum(0) / count
    _move(norm, mean_D.detach(), (variance_D * count / (count - 1)).detach())
    scale_D = torch.rsqrt(variance_D + norm.eps) * norm.weight
    return ((x - mean_D) * scale_D + norm.bias).to(x_ND.dtype)


def _move(norm: nn.BatchNorm1d, mean_D: Tensor, variance_D: Tensor) -> None:
    assert norm.momentum is not None
    assert norm.running_mean is not None
    assert norm.running_var is not None
    assert norm.num_batches_tracked is not None
    norm.running_mean.lerp_(mean_D, norm.momentum)
    norm.running_var.lerp_(variance_D, norm.momentum)
    norm.num_batches_tracked.add_(1)


@torch.compiler.disable  # type: ignore[untyped-decorator]
def _other_norm(norm: nn.Module, x_ND: Tensor, frames_BS: Tensor) -> Tensor:
    """A norm that the compiler does not see: a synchronised batch norm talks to other ranks."""
    out_BDS: Tensor = norm(x_ND.view(*frames_BS.shape, -1).transpose(1, 2))
    return out_BDS.transpose(1, 2).flatten(0, 1)
