"""The fused encoder: `modules.conformer` for training on a GPU, with the same parameters and the same sums.

What differs is how, not what. The frames of all utterances are one long row, (N, D): convolutions
over one frame are GEMMs, no tensor is transposed, and the compiler has one size to be general
about. One layer is compiled, and all layers run it; the number of frames is a symbol to the
compiler, so that another length or batch size compiles nothing (27 s once; a layer of (B, S, D)
took 127 s, and again for another batch). Queries, keys and values are one GEMM; dropout stores no
mask; the batch norm counts only the frames that the batch had before it was padded for a graph.

Sharded weights (FSDP2) exist only while their module is called: fused code then runs inside that
call (`inside_call`), one gathered layer at a time.

Without CUDA (`model.compile: on`) the same code runs without its Triton operations; tests use that.

B batch, T mel frames, S encoder frames, N = B · S, D width, R distances, H heads, C = D / H, K taps
of the convolution.
"""

from __future__ import annotations

import contextlib
import functools
import logging
import types
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812
from torch.utils.checkpoint import checkpoint

from nest_ssl.fast.ops.dropout import draw_seeds, dropout
from nest_ssl.modules import ConformerEncoder
from nest_ssl.modules.attention import MultiHeadAttention, RelPositionMultiHeadAttention
from nest_ssl.modules.batch_norm import SynchronizedBatchNorm, move_statistics, normalize_together
from nest_ssl.modules.conformer import ConformerConvolution, ConformerLayer, FeedForward, visible_context
from nest_ssl.modules.inputs import valid_frames
from nest_ssl.modules.subsampling import ConvSubsampling, HalvingConv

log = logging.getLogger(__name__)

NUM_SEEDS = 7  # one for each dropout of a layer
_ALIGNED_TAPS = 16  # of 10 in the first convolution: a bf16 GEMM is fast only if rows are a multiple of 16 bytes


@functools.cache
def log_once(message: str) -> None:
    log.info(message)


@contextlib.contextmanager
def fused(encoder: ConformerEncoder, activation_budget: float, num_frames: Tensor | None = None) -> Iterator[None]:
    """Let calls of `encoder` run fused layers; its hooks and state stay as they are.

    `activation_budget` is the share of activations kept for the backward pass. `num_frames` is a
    scalar tensor: the mel frames of the batch without those added for a graph; None: all.
    """

    def forward(
        audio_signal: Tensor, length: Tensor | None = None, bypass_pre_encode: bool = False
    ) -> tuple[Tensor, Tensor]:
        length = encoder.check_input(audio_signal, length, bypass_pre_encode)
        return encode(encoder, audio_signal, length, bypass_pre_encode, activation_budget, num_frames)

    encoder.forward = forward  # type: ignore[method-assign]
    try:
        yield
    finally:
        del encoder.forward


@functools.cache
def compiled(function: types.FunctionType, budget: float) -> Callable[..., Any]:
    """Return `function`, compiled to keep this share of its activations."""
    from torch._functorch import config as autograd_config
    from torch._inductor import config

    options: dict[str, Any] = {}
    if hasattr(config.triton, "mix_order_reduction"):  # torch 2.10; a layer norm's backward takes twice as long with it
        options["triton.mix_order_reduction"] = False
    # torch caches what it compiled by code object: another budget needs a code object of its own.
    code = function.__code__.replace(co_name=f"{function.__name__}_keeping_{budget:g}")
    own = types.FunctionType(code, function.__globals__, code.co_name, function.__defaults__, function.__closure__)
    run = torch.compile(own, options=options)
    # What follows a GEMM and needs no other one is recomputed rather than kept: 16 % less memory for 1 % of the time
    # (64 × 16 s, H200).
    patch: dict[str, Any] = {"ban_recompute_materialized_backward": False, "activation_memory_budget": budget}

    def call(*args: Any) -> Any:
        with autograd_config.patch(patch):
            return run(*args)

    return call


def encode(
    encoder: ConformerEncoder,
    x: Tensor,
    length: Tensor,
    bypass_pre_encode: bool,
    activation_budget: float,
    num_frames: Tensor | None,
) -> tuple[Tensor, Tensor]:
    """Return (B, D, S) and lengths, from (B, mels, T) or, with `bypass_pre_encode`, (B, S, D)."""
    if num_frames is None or bypass_pre_encode:
        num_frames = torch.full((), x.shape[1 if bypass_pre_encode else 2], device=x.device)
    x_BSD = x
    if not bypass_pre_encode:
        module = encoder.pre_encode
        if isinstance(module, ConvSubsampling) and encoder.cfg.subsampling == "dw_striding" and x.is_cuda:
            x_BSD, length = inside_call(module, fused_subsampling, x.transpose(1, 2), length)
        else:
            log_once("Plain subsampling: the fused one needs dw_striding, pre_conv and a GPU.")
            x_BSD, length = module(x.transpose(1, 2), length)
        for layer in module.modules():
            if isinstance(layer, HalvingConv):
                num_frames = layer.out_length(num_frames)
    x_BSD = run_layers(encoder, x_BSD, length, num_frames, activation_budget)
    if encoder.out_proj is not None:
        x_BSD = encoder.out_proj(x_BSD)
    return x_BSD.transpose(1, 2), length


def run_layers(
    encoder: ConformerEncoder, x_BSD: Tensor, length: Tensor, num_frames: Tensor, activation_budget: float
) -> Tensor:
    batch, size, width = x_BSD.shape
    x_BSD, pos_emb_1RD = encoder.pos_enc(x_BSD)
    on_gpu = x_BSD.is_cuda
    fuses_attention = on_gpu and pos_emb_1RD is not None
    frames = frames_of(encoder, length, num_frames, size, None if fuses_attention else pos_emb_1RD)
    if not fuses_attention:
        log_once("Plain attention: the fused one needs rel_pos and a GPU.")
    seeds = draw_seeds(len(encoder.layers), NUM_SEEDS, device=x_BSD.device).unbind()
    run = compiled(fused_layer, activation_budget)
    # Under autocast the layers' outputs are float32; the first input too, or the compiler would see two kinds of layer.
    x_ND = x_BSD.flatten(0, 1)
    x_ND = x_ND.float() if torch.is_autocast_enabled(x_BSD.device.type) else x_ND

    def run_one(layer: ConformerLayer, x_ND: Tensor, seeds: Tensor) -> Tensor:
        _any_size(x_ND, 0)
        # Right before its layer: so its gradient comes right after the layer's, and can travel with them.
        positions_RHC = layer_positions(layer, pos_emb_1RD) if fuses_attention else None
        out_ND: Tensor = run(layer, x_ND, frames, positions_RHC, seeds, on_gpu)
        return out_ND

    for index, layer in enumerate(encoder.layers):
        x_ND = encoder.skip_at_random(index, x_ND, inside_call(layer, run_one, x_ND, seeds[index]))
    return x_ND.view(batch, size, width)


def inside_call(module: nn.Module, function: Callable[..., Any], *args: Any) -> Any:
    """Return `function(module, *args)`; of a sharded module from inside a call, for which its weights are gathered.

    The backward pass gathers them again.
    """
    if not hasattr(module, "unshard"):  # a method of torch's FSDPModule
        return function(module, *args)
    module.forward = functools.partial(function, module)
    try:
        return module(*args)
    finally:
        del module.forward


def layer_positions(layer: ConformerLayer, pos_emb_1RD: Tensor | None) -> Tensor:
    """Return (R, H, C) projected distances for a layer."""
    assert isinstance(layer.self_attn, RelPositionMultiHeadAttention)
    assert pos_emb_1RD is not None
    positions_RHC: Tensor = layer.self_attn.linear_pos(pos_emb_1RD[0]).unflatten(1, (layer.self_attn.n_heads, -1))
    _any_size(positions_RHC, 0)
    return positions_RHC


def frames_of(
    encoder: ConformerEncoder, length: Tensor, num_frames: Tensor, size: int, pos_emb_1RD: Tensor | None
) -> Frames:
    context = encoder.draw_context()
    context_SS = None
    if context != (-1, -1):
        context_SS = visible_context(size, context, encoder.cfg.att_context_style, length.device)
        _any_size(context_SS, 0, 1)
    valid_BS = valid_frames(length, size)
    counted_BS = (torch.arange(size, device=length.device) < num_frames).expand_as(valid_BS)
    valid_N1, counted_N1 = valid_BS.flatten()[:, None], counted_BS.flatten()[:, None]
    for tensor, dims in ((length, (0,)), (valid_BS, (0, 1)), (valid_N1, (0,)), (counted_N1, (0,))):
        _any_size(tensor, *dims)
    if pos_emb_1RD is not None:
        _any_size(pos_emb_1RD, 1)
    num_counted = (num_frames * length.shape[0]).float()
    return Frames(length, valid_BS, valid_N1, counted_N1, num_counted, context_SS, pos_emb_1RD)


def _any_size(x: Tensor, *dims: int) -> None:
    """Tell the compiler that these dimensions change from batch to batch."""
    torch._dynamo.maybe_mark_dynamic(x, dims)


@dataclass
class Frames:
    """What the layers need to know about the frames they work on."""

    lengths_B: Tensor
    """Frames of each utterance."""
    frames_BS: Tensor
    """True within an utterance; its shape tells where utterances begin."""
    valid_N1: Tensor
    """The same, one long row."""
    counted_N1: Tensor
    """True for the frames that the batch norm counts: all but those added for a graph."""
    num_counted: Tensor
    """How many those are, in float32."""
    context_SS: Tensor | None
    """True where a frame may see another; None: all."""
    pos_emb_1RD: Tensor | None
    """Embeddings of the distances, for the plain attention."""


def fused_layer(
    layer: ConformerLayer, x_ND: Tensor, frames: Frames, positions_RHC: Tensor | None, seeds: Tensor, on_gpu: bool
) -> Tensor:
    """Return the layer's output; `on_gpu` uses the Triton operations, `positions_RHC` are for the attention's."""
    rate = layer.dropout.p
    half = feed_forward(layer.feed_forward1, layer.norm_feed_forward1(x_ND), seeds[0])
    x_ND = x_ND + 0.5 * dropout(half, rate, seeds[1])
    normed = layer.norm_self_att(x_ND)
    if on_gpu and positions_RHC is not None:
        attended = fused_attention(layer.self_attn, normed, frames, positions_RHC, seeds[2])
    else:
        attended = plain_attention(layer.self_attn, normed, frames)
    x_ND = x_ND + dropout(attended, rate, seeds[3])
    x_ND = x_ND + dropout(convolution(layer.conv, layer.norm_conv(x_ND), frames, on_gpu), rate, seeds[4])
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
    from nest_ssl.fast.ops.attention import relative_attention  # needs Triton

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


def convolution(module: ConformerConvolution, x_ND: Tensor, frames: Frames, on_gpu: bool) -> Tensor:
    """Gated pointwise convolution, depthwise over time, norm, SiLU, pointwise."""
    x_ND = F.glu(per_frame(module.pointwise_conv1, x_ND), dim=-1)
    x_ND = torch.where(frames.valid_N1, x_ND, 0.0)
    x_ND = depthwise(module, x_ND, frames.frames_BS, on_gpu)
    norm = module.batch_norm
    if isinstance(norm, SynchronizedBatchNorm):
        x_ND = normalize_together(norm, x_ND, frames.counted_N1, frames.num_counted)
    elif type(norm) is nn.BatchNorm1d:
        x_ND = batch_norm(norm, x_ND, frames)
    elif isinstance(norm, nn.LayerNorm):
        x_ND = norm(x_ND)
    else:
        x_ND = _other_norm(norm, x_ND, frames.frames_BS)
    return per_frame(module.pointwise_conv2, F.silu(x_ND))


def depthwise(module: ConformerConvolution, x_ND: Tensor, frames_BS: Tensor, on_gpu: bool) -> Tensor:
    conv, (left, right) = module.depthwise_conv, module.context
    if on_gpu:
        from nest_ssl.fast.ops.convolution import convolve  # needs Triton

        convolved: Tensor = convolve(x_ND, conv.weight[:, 0], conv.bias, frames_BS, left)
        return convolved
    x_BDS = F.pad(x_ND.view(*frames_BS.shape, -1).transpose(1, 2), (left, right))
    return F.conv1d(x_BDS, conv.weight, conv.bias, groups=conv.groups).transpose(1, 2).flatten(0, 1)


def per_frame(conv: nn.Conv1d, x_ND: Tensor) -> Tensor:
    """A convolution of one frame is a GEMM on frames (N, D)."""
    return F.linear(x_ND, conv.weight[:, :, 0], conv.bias)


def batch_norm(norm: nn.BatchNorm1d, x_ND: Tensor, frames: Frames) -> Tensor:
    """Batch norm in training, over the counted frames; updates the running statistics."""
    counted_N1, count = frames.counted_N1, frames.num_counted
    x = x_ND.float()
    mean_D = torch.where(counted_N1, x, 0.0).sum(0) / count
    variance_D = torch.where(counted_N1, x - mean_D, 0.0).square().sum(0) / count
    move_statistics(norm, mean_D.detach(), (variance_D * count / (count - 1)).detach())
    scale_D = torch.rsqrt(variance_D + norm.eps) * norm.weight
    return ((x - mean_D) * scale_D + norm.bias).to(x_ND.dtype)


@torch.compiler.disable  # type: ignore[untyped-decorator]
def _other_norm(norm: nn.Module, x_ND: Tensor, frames_BS: Tensor) -> Tensor:
    """A norm over the frames of each utterance."""
    out_BDS: Tensor = norm(x_ND.view(*frames_BS.shape, -1).transpose(1, 2))
    return out_BDS.transpose(1, 2).flatten(0, 1)


# ---- subsampling for CUDA, channels last: M mel bands, and here C channels ----


def fused_subsampling(module: ConvSubsampling, x_BTM: Tensor, lengths: Tensor) -> tuple[Tensor, Tensor]:
    """Return (B, S, D) and the new lengths: `modules.subsampling` for `dw_striding`, with its parameters and its sums.

    The first convolution has one input channel: nine values per output, one GEMM, with the bias as
    a tenth value. The depthwise ones apply the ReLU and the end of the utterance to what they read,
    so that neither is a pass over memory (the first output is 1 GB for 64 × 16 s). The pointwise
    ones are GEMMs.
    """
    one, *later = (layer for layer in module.conv if isinstance(layer, nn.Conv2d))
    assert isinstance(one, HalvingConv)
    x = torch.where(valid_frames(lengths, x_BTM.shape[1])[..., None], x_BTM, 0.0)
    lengths = one.out_length(lengths)
    if not later:
        x = first_conv(one, x)
    else:
        two, *later = later
        assert isinstance(two, HalvingConv)
        # The first output is the largest tensor of the model, and cheap: it is recomputed in the backward pass.
        x = checkpoint(first_two_convs, one, two, x, lengths, use_reentrant=False, preserve_rng_state=False)
        lengths = two.out_length(lengths)
    for layer in later:
        if isinstance(layer, HalvingConv):
            x = halving_conv(layer, x, lengths)
            lengths = layer.out_length(lengths)
        else:
            x = F.linear(x, layer.weight[:, :, 0, 0], layer.bias)
    x_BTMC = torch.where(valid_frames(lengths, x.shape[1])[..., None, None], F.relu(x), 0.0)
    return project_bands(module.out, x_BTMC), lengths


def first_conv(conv: HalvingConv, x_BTM: Tensor) -> Tensor:
    """Return (B, T / 2, M / 2, C) by one GEMM of windows of nine values, and 1 for the bias."""
    assert conv.bias is not None
    pads = (conv.pad_before, conv.pad_after) * 2
    size, stride = conv.kernel_size[0], conv.stride[0]
    windows = F.pad(x_BTM, pads).unfold(-2, size, stride).unfold(-2, size, stride).flatten(-2)
    taps = F.pad(windows, (0, 1), value=1.0)
    weight = torch.cat((conv.weight.flatten(1), conv.bias[:, None]), dim=1)
    missing = (0, _ALIGNED_TAPS - taps.shape[-1])
    return F.linear(F.pad(taps, missing).to(weight.dtype), F.pad(weight, missing))


def first_two_convs(one: HalvingConv, two: HalvingConv, x_BTM: Tensor, lengths: Tensor) -> Tensor:
    return halving_conv(two, first_conv(one, x_BTM), lengths)


def halving_conv(conv: HalvingConv, x_BTMC: Tensor, lengths: Tensor) -> Tensor:
    """Return the depthwise convolution of the ReLU of `x_BTMC`, which ends at `lengths`."""
    from nest_ssl.fast.ops.halving import halve  # needs Triton, which installations without CUDA lack

    assert conv.bias is not None
    out: Tensor = halve(x_BTMC, lengths, conv.weight[:, 0], conv.bias, conv.pad_before, conv.pad_after)
    return out


def project_bands(linear: nn.Linear, x_TMC: Tensor) -> Tensor:
    """Return (…, T, D) from channels that are last; the weight has them first."""
    num_bands, channels = x_TMC.shape[-2:]
    weight = linear.weight.view(-1, channels, num_bands).transpose(1, 2).flatten(1)
    return F.linear(x_TMC.flatten(-2), weight, linear.bias)
