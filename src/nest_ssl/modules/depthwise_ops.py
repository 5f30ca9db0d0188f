"""The depthwise convolutions of the fast path as operations with their own backward passes.

Both keep only their input for the backward pass. Gradients of weights are summed in a fixed order, so a step repeats to
the bit.

N = B · S frames in a row, D channels, K taps; B batch, T frames, M bands, C channels.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from nest_ssl.modules.kernels import depthwise as over_time
from nest_ssl.modules.kernels import halving

_PROGRAMS = 264  # two for each multiprocessor of an H200


@torch.library.custom_op("nest_ssl::convolve", mutates_args=())
def convolve(x_ND: Tensor, weight_DK: Tensor, bias_D: Tensor | None, frames_BS: Tensor, left: int) -> Tensor:
    """Each channel's kernel over the frames of each utterance; `frames_BS` says by its shape where they begin."""
    return _convolve(x_ND, weight_DK, bias_D, frames_BS.shape[1], left, flip=False)


@torch.library.custom_op("nest_ssl::convolve_backward", mutates_args=())
def convolve_backward(
    grad_ND: Tensor, x_ND: Tensor, weight_DK: Tensor, frames_BS: Tensor, left: int
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of input, weight and bias."""
    num_rows, width = x_ND.shape
    taps, num_frames = weight_DK.shape[1], frames_BS.shape[1]
    grad_ND = grad_ND.contiguous()
    grad_x_ND = _convolve(grad_ND, weight_DK, None, num_frames, taps - 1 - left, flip=True)
    block_d = 64
    programs = max(1, min(_PROGRAMS * block_d // width + 1, num_rows // 32))
    partial = torch.empty((programs, taps + 1, width), dtype=torch.float32, device=x_ND.device)
    over_time.weight_gradient_kernel[(programs, -(-width // block_d), -(-taps // 3))](
        *(x_ND, grad_ND, partial, num_rows, num_frames, left, -(-num_rows // programs)),
        D=width,
        K=taps,
        BLOCK_N=32,
        BLOCK_D=block_d,
    )
    sums_KD = partial.sum(0)
    return grad_x_ND, sums_KD[:taps].T.contiguous(), sums_KD[taps].clone()


def _convolve(
    x_ND: Tensor, weight_DK: Tensor, bias_D: Tensor | None, num_frames: int, left: int, *, flip: bool
) -> Tensor:
    num_rows, width = x_ND.shape
    out_ND = torch.empty_like(x_ND)
    block_n, block_d = 32, 128
    over_time.convolve_kernel[(-(-num_rows // block_n), -(-width // block_d))](
        *(x_ND, weight_DK, weight_DK if bias_D is None else bias_D, out_ND, num_rows, num_frames, left),
        D=width,
        K=weight_DK.shape[1],
        FLIP=flip,
        HAS_BIAS=bias_D is not None,
        BLOCK_N=block_n,
        BLOCK_D=block_d,
    )
    return out_ND


@convolve.register_fake
def _(x_ND: Tensor, weight_DK: Tensor, bias_D: Tensor | None, frames_BS: Tensor, left: int) -> Tensor:
    return torch.empty_like(x_ND)


@convolve_backward.register_fake
def _(grad_ND: Tensor, x_ND: Tensor, weight_DK: Tensor, *rest: Any) -> tuple[Tensor, Tensor, Tensor]:
    grad_weight = torch.empty_like(weight_DK, dtype=torch.float32, memory_format=torch.contiguous_format)
    return torch.empty_like(x_ND), grad_weight, grad_weight.new_empty(weight_DK.shape[0])


def _save_convolve(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    x_ND, weight_DK, bias_D, frames_BS, ctx.left = inputs
    ctx.has_bias = bias_D is not None
    ctx.save_for_backward(x_ND, weight_DK, frames_BS)


def _differentiate_convolve(ctx: Any, grad_ND: Tensor) -> tuple[Tensor | None, ...]:
    grad_x, grad_weight, grad_bias = convolve_backward(grad_ND, *ctx.saved_tensors, ctx.left)
    return grad_x, grad_weight, grad_bias if ctx.has_bias else None, None, None


convolve.register_autograd(_differentiate_convolve, setup_context=_save_convolve)


@torch.library.custom_op("nest_ssl::halve", mutates_args=())
def halve(
    x_BTMC: Tensor, lengths_B: Tensor, weight_C33: Tensor, bias_C: Tensor, pad_before: int, pad_after: int
) -> Tensor:
    """The ReLU of `x_BTMC`, zero from each length on, convolved to half as many frames and bands."""
    shape = _halved(x_BTMC, pad_before, pad_after)
    out = x_BTMC.new_empty(shape)
    batch, frames, bands, channels = shape
    block_v, block_c = _blocks(bands, channels)
    halving.halve_kernel[(batch * frames, -(-bands // block_v), -(-channels // block_c))](
        *(x_BTMC, lengths_B, weight_C33, bias_C, out, *x_BTMC.shape[1:3], frames, bands, pad_before),
        C=channels,
        BLOCK_V=block_v,
        BLOCK_C=block_c,
    )
    return out


@torch.library.custom_op("nest_ssl::halve_backward", mutates_args=())
def halve_backward(
    grad_BUVC: Tensor, x_BTMC: Tensor, lengths_B: Tensor, weight_C33: Tensor, pad_before: int
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of input, weight and bias."""
    batch, frames, bands, channels = x_BTMC.shape
    _, half_frames, half_bands, _ = grad_BUVC.shape
    grad_BUVC = grad_BUVC.contiguous()
    sizes = (frames, bands, half_frames, half_bands, pad_before)
    grad_x = torch.empty_like(x_BTMC)
    block_m, block_c = _blocks(bands, channels)
    halving.halve_input_gradient_kernel[(batch * frames, -(-bands // block_m), -(-channels // block_c))](
        *(x_BTMC, lengths_B, weight_C33, grad_BUVC, grad_x, *sizes),
        C=channels,
        BLOCK_M=block_m,
        BLOCK_C=block_c,
    )
    block_v, block_c = _blocks(half_bands, channels)
    num_rows = batch * half_frames
    programs = min(num_rows, 4 * _PROGRAMS)
    partial = torch.empty((programs, 10, channels), dtype=torch.float32, device=x_BTMC.device)
    halving.halve_weight_gradient_kernel[(programs, -(-channels // block_c), 3)](
        *(x_BTMC, lengths_B, grad_BUVC, partial, *sizes, num_rows, -(-num_rows // programs)),
        C=channels,
        BLOCK_V=block_v,
        BLOCK_C=block_c,
    )
    sums_KC = partial.sum(0)
    return grad_x, sums_KC[:9].T.reshape(weight_C33.shape), sums_KC[9].clone()


def _halved(x_BTMC: Tensor, pad_before: int, pad_after: int) -> tuple[int, int, int, int]:
    frames, bands = ((size + pad_before + pad_after - 3) // 2 + 1 for size in x_BTMC.shape[1:3])
    return x_BTMC.shape[0], frames, bands, x_BTMC.shape[3]


def _blocks(bands: int, channels: int) -> tuple[int, int]:
    """Bands and channels that a program works on."""
    return min(16, 1 << (bands - 1).bit_length()), min(128, 1 << (channels - 1).bit_length())


@halve.register_fake
def _(x_BTMC: Tensor, lengths_B: Tensor, weight: Tensor, bias: Tensor, pad_before: int, pad_after: int) -> Tensor:
    return x_BTMC.new_empty(_halved(x_BTMC, pad_before, pad_after))


@halve_backward.register_fake
def _(grad: Tensor, x_BTMC: Tensor, lengths_B: Tensor, weight: Tensor, pad: int) -> tuple[Tensor, Tensor, Tensor]:
    grad_weight = torch.empty_like(weight, dtype=torch.float32)
    return torch.empty_like(x_BTMC), grad_weight, grad_weight.new_empty(weight.shape[0])


def _save_halve(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    x_BTMC, lengths_B, weight_C33, _, ctx.pad_before, _ = inputs
    ctx.save_for_backward(x_BTMC, lengths_B, weight_C33)


def _differentiate_halve(ctx: Any, grad_BUVC: Tensor) -> tuple[Tensor | None, ...]:
    x_BTMC, lengths_B, weight_C33 = ctx.saved_tensors
    grad_x, grad_weight, grad_bias = halve_backward(grad_BUVC, x_BTMC, lengths_B, weight_C33, ctx.pad_before)
    return grad_x, None, grad_weight, grad_bias, None, None


halve.register_autograd(_differentiate_halve, setup_context=_save_halve)
