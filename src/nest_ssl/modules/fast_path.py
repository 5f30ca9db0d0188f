"""The encoder in training on a GPU: fused kernels and compiled layers. `conformer` is the plain version.

One layer is compiled, and all layers run it; the number of frames is a symbol to the compiler, so that a new length or
batch compiles nothing.

B batch, T mel frames, S encoder frames, N = B · S, D width, L layers, R distances, H heads.
"""

from __future__ import annotations

import functools
import importlib.util
import logging
import types
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from nest_ssl.modules.attention import RelPositionMultiHeadAttention
from nest_ssl.modules.conformer import ConformerConvolution, ConformerEncoder, visible_context
from nest_ssl.modules.fast_dropout import draw_seeds
from nest_ssl.modules.fast_layer import NUM_SEEDS, Frames, fast_layer
from nest_ssl.modules.fast_subsampling import fast_subsampling
from nest_ssl.modules.lengths import valid_frames
from nest_ssl.modules.subsampling import ConvSubsampling, HalvingConv

log = logging.getLogger(__name__)


@functools.cache
def say_once(message: str) -> None:
    log.info(message)


def has_triton() -> bool:
    return importlib.util.find_spec("triton") is not None


@functools.cache
def compiled(function: types.FunctionType, budget: float) -> Callable[..., Any]:
    """`function`, compiled to keep this share of its activations."""
    from torch._functorch import config as autograd_config
    from torch._inductor import config

    options: dict[str, Any] = {}
    if hasattr(config.triton, "mix_order_reduction"):  # torch 2.10; a layer norm's backward takes twice as long with it
        options["triton.mix_order_reduction"] = False
    # torch keeps what it compiled with the code it compiled: another budget needs a code of its own.
    code = function.__code__.replace(co_name=f"{function.__name__}_keeping_{budget:g}")
    own = types.FunctionType(code, function.__globals__, code.co_name, function.__defaults__, function.__closure__)
    run = torch.compile(own, options=options)
    # What follows a matrix product and needs no other one is made again rather than kept: 16 % less memory for 1 % of
    # the time (64 × 16 s, H200).
    patch: dict[str, Any] = {"ban_recompute_materialized_backward": False, "activation_memory_budget": budget}

    def call(*args: Any) -> Any:
        with autograd_config.patch(patch):
            return run(*args)

    return call


def encode_fast(
    encoder: ConformerEncoder, x: Tensor, length: Tensor, num_frames: Tensor | None, bypass_pre_encode: bool
) -> tuple[Tensor, Tensor]:
    """(B, S, D) and lengths, from (B, mels, T) or, with `bypass_pre_encode`, (B, S, D).

    `num_frames`: a scalar tensor, frames of the batch without the padding added for the GPU's sake; None: all.
    """
    if num_frames is None:
        num_frames = torch.full((), x.shape[1 if bypass_pre_encode else 2], device=x.device)
    x_BSD = x
    if not bypass_pre_encode:
        module = encoder.pre_encode
        if isinstance(module, ConvSubsampling) and encoder.cfg.subsampling == "dw_striding" and x.is_cuda:
            x_BSD, length = fast_subsampling(module, x.transpose(1, 2), length)
        else:
            say_once(f"plain subsampling: no fast one for {encoder.cfg.subsampling} or post_conv.")
            x_BSD, length = module(x.transpose(1, 2), length)
        for layer in module.modules():
            if isinstance(layer, HalvingConv):
                num_frames = layer.out_length(num_frames)
    return run_layers(encoder, x_BSD, length, num_frames), length


def run_layers(encoder: ConformerEncoder, x_BSD: Tensor, length: Tensor, num_frames: Tensor) -> Tensor:
    batch, size, width = x_BSD.shape
    x_BSD, pos_emb_1RD = encoder.pos_enc(x_BSD)
    fused = x_BSD.is_cuda
    positions = layer_positions(encoder, pos_emb_1RD) if fused and pos_emb_1RD is not None else None
    frames = frames_of(encoder, length, num_frames, size, None if positions else pos_emb_1RD)
    if positions is None:
        say_once(f"plain attention: the fused one is for rel_pos on a GPU, not {encoder.cfg.self_attention_model}.")
    seeds = draw_seeds(len(encoder.layers), NUM_SEEDS, device=x_BSD.device).unbind()
    run = compiled(fast_layer, encoder.activation_budget)
    # Under autocast the layers' outputs are float32; the first input too, or the compiler would see two kinds of layer.
    x_ND = x_BSD.flatten(0, 1)
    x_ND = x_ND.float() if torch.is_autocast_enabled(x_BSD.device.type) else x_ND
    for index, layer in enumerate(encoder.layers):
        _any_size(x_ND, 0)
        out_ND = run(layer, x_ND, frames, None if positions is None else positions[index], seeds[index], fused)
        x_ND = encoder.skip_at_random(index, x_ND, out_ND)
    return x_ND.view(batch, size, width)


def layer_positions(encoder: ConformerEncoder, pos_emb_1RD: Tensor) -> list[Tensor]:
    """(R, H, C) projected distances for each layer."""
    out = []
    for layer in encoder.layers:
        assert isinstance(layer.self_attn, RelPositionMultiHeadAttention)
        positions_RHC = layer.self_attn.linear_pos(pos_emb_1RD[0]).unflatten(1, (encoder.cfg.n_heads, -1))
        _any_size(positions_RHC, 0)
        out.append(positions_RHC)
    return out


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


def padding_is_exact(encoder: ConformerEncoder) -> bool:
    """Whether frames may be added to a batch without a change of results: not if a norm counts them."""
    norms = {type(m.batch_norm) for m in encoder.modules() if isinstance(m, ConformerConvolution)}
    return norms <= {nn.BatchNorm1d, nn.LayerNorm}


def _any_size(x: Tensor, *dims: int) -> None:
    """Tell the compiler that these dimensions change from batch to batch."""
    torch._dynamo.maybe_mark_dynamic(x, dims)
