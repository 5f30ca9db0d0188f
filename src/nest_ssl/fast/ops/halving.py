"""The depthwise 3 × 3 convolution of stride 2 of the subsampling: Triton kernels, the custom op, its backward pass.

`modules.subsampling.HalvingConv` is the reference, with the ReLU and the zeroing past the end that
come before it. Channels are last here. In a step of 64 × 16 s on an H200 these convolutions took 29
ms when they were left to the compiler, and take 3.2 ms by these kernels. Only the input is kept for
the backward pass.

B batch, T frames and M bands of the input, U and V those of the output, C channels.
"""

# mypy: disable-error-code="no-untyped-def, untyped-decorator"
# Triton's kernels have no types: their arguments are pointers and numbers.

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

_PROGRAMS = 1056  # ranges of rows for the weight gradient: eight for each multiprocessor of an H200

# ---- kernels ----


@triton.jit
def halve_kernel(
    x, lengths, weight, bias, out,
    T, M, U, V, pad,
    C: tl.constexpr, BLOCK_V: tl.constexpr, BLOCK_C: tl.constexpr,
):  # fmt: skip
    """Write out[b, u, v] = bias + Σ_ij weight[i, j] · relu(x[b, 2u + i − pad, 2v + j − pad]); zeros past x's end.

    Grid: (B · U frames of the output, blocks of BLOCK_V bands, blocks of BLOCK_C channels).
    Channels are last, so neighbouring threads read neighbouring addresses. The mask of a load has
    three parts: frames before 0 or past the utterance's length, bands outside 0 … M − 1, channels
    past C. The ReLU is applied to what was loaded: neither it nor the length costs a pass over
    memory.
    """
    row_out = tl.program_id(0)
    b, u = row_out // U, row_out % U
    length = tl.load(lengths + b).to(tl.int32)
    v = tl.program_id(1) * BLOCK_V + tl.arange(0, BLOCK_V)
    c = tl.program_id(2) * BLOCK_C + tl.arange(0, BLOCK_C)
    inside_c = c < C
    total = tl.zeros((BLOCK_V, BLOCK_C), tl.float32)
    total += tl.load(bias + c, mask=inside_c, other=0.0).to(tl.float32)[None, :]
    for i in tl.static_range(3):
        t = 2 * u + i - pad
        row = x + (b.to(tl.int64) * T + t) * M * C
        num_bands = tl.where((t >= 0) & (t < length), M, 0)  # of a frame outside the utterance no band is read
        for j in tl.static_range(3):
            m = 2 * v + j - pad
            inside = (m >= 0) & (m < num_bands) & (v < V)
            tap = tl.load(weight + c * 9 + i * 3 + j, mask=inside_c, other=0.0).to(tl.float32)
            seen = tl.load(row + m[:, None] * C + c[None, :], mask=inside[:, None] & inside_c[None, :], other=0.0)
            total += tap[None, :] * tl.maximum(seen.to(tl.float32), 0.0)
    at = (row_out.to(tl.int64) * V + v[:, None]) * C + c[None, :]
    tl.store(out + at, total.to(out.dtype.element_ty), mask=(v < V)[:, None] & inside_c[None, :])


@triton.jit
def halve_input_gradient_kernel(
    x, lengths, weight, grad, grad_x,
    T, M, U, V, pad,
    C: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_C: tl.constexpr,
):  # fmt: skip
    """Write grad_x[b, t, m] = Σ weight[i, j] · grad[b, u, v] over the outputs that read it, where x is positive.

    Grid: (B · T frames of the input, blocks of BLOCK_M bands, blocks of BLOCK_C channels). With
    stride 2 an input is read by at most two frames and two bands of the output: of the nine taps
    only those count for which 2u + i − pad = t and 2v + j − pad = m, hence the tests for even
    numbers. A program gathers them, so nothing is added by atomics. Past the length the gradient is
    0.
    """
    row_in = tl.program_id(0)
    b, t = row_in // T, row_in % T
    length = tl.load(lengths + b).to(tl.int32)
    m = tl.program_id(1) * BLOCK_M + tl.arange(0, BLOCK_M)
    c = tl.program_id(2) * BLOCK_C + tl.arange(0, BLOCK_C)
    inside_c = c < C
    at = (row_in.to(tl.int64) * M + m[:, None]) * C + c[None, :]
    here = (m < M)[:, None] & inside_c[None, :]
    total = tl.zeros((BLOCK_M, BLOCK_C), tl.float32)
    if t < length:
        for i in tl.static_range(3):
            u = (t + pad - i) // 2
            if (t + pad - i >= 0) & ((t + pad - i) % 2 == 0) & (u < U):
                row = grad + (b.to(tl.int64) * U + u) * V * C
                for j in tl.static_range(3):
                    twice = m + pad - j
                    v = twice // 2
                    inside = (twice >= 0) & (twice % 2 == 0) & (v < V)
                    tap = tl.load(weight + c * 9 + i * 3 + j, mask=inside_c, other=0.0).to(tl.float32)
                    g = tl.load(row + v[:, None] * C + c[None, :], mask=inside[:, None] & inside_c[None, :], other=0.0)
                    total += tap[None, :] * g.to(tl.float32)
        total = tl.where(tl.load(x + at, mask=here, other=0.0).to(tl.float32) > 0, total, 0.0)
    tl.store(grad_x + at, total.to(grad_x.dtype.element_ty), mask=here)


@triton.jit
def halve_weight_gradient_kernel(
    x, lengths, grad, partial,
    T, M, U, V, pad, num_rows, rows_per_program,
    C: tl.constexpr, BLOCK_V: tl.constexpr, BLOCK_C: tl.constexpr,
):  # fmt: skip
    """Write partial[program, 3i + j] = Σ grad[b, u, v] · relu(x[…]) over the program's rows (b, u); in place 9, Σ grad.

    Grid: (ranges of rows, blocks of BLOCK_C channels, 3). A program handles one row i of the 3 × 3
    kernel: three taps, whose BLOCK_V × BLOCK_C sums stay in registers (8.1 → 3.2 ms for the
    subsampling of 64 × 16 s on an H200). Partial sums are added by torch in a fixed order.
    """
    first, i = tl.program_id(0) * rows_per_program, tl.program_id(2)
    c = tl.program_id(1) * BLOCK_C + tl.arange(0, BLOCK_C)
    inside_c = (c < C)[None, :]
    left = tl.zeros((BLOCK_V, BLOCK_C), tl.float32)
    middle = tl.zeros((BLOCK_V, BLOCK_C), tl.float32)
    right = tl.zeros((BLOCK_V, BLOCK_C), tl.float32)
    of_bias = tl.zeros((BLOCK_V, BLOCK_C), tl.float32)
    for step in range(tl.minimum(rows_per_program, num_rows - first)):
        row_out = first + step
        b, t = row_out // U, 2 * (row_out % U) + i - pad
        num_bands = tl.where((t >= 0) & (t < tl.load(lengths + b).to(tl.int32)), M, 0)
        row = x + (b.to(tl.int64) * T + t) * M * C
        for begin in range(0, V, BLOCK_V):
            v = begin + tl.arange(0, BLOCK_V)
            inside = (v < V)[:, None] & inside_c
            at = (row_out.to(tl.int64) * V + v[:, None]) * C + c[None, :]
            g = tl.load(grad + at, mask=inside, other=0.0).to(tl.float32)
            of_bias += g
            m = (2 * v - pad)[:, None]
            place = row + m * C + c[None, :]
            seen = tl.load(place, mask=inside & (m >= 0) & (m < num_bands), other=0.0)
            left += g * tl.maximum(seen.to(tl.float32), 0.0)
            seen = tl.load(place + C, mask=inside & (m + 1 >= 0) & (m + 1 < num_bands), other=0.0)
            middle += g * tl.maximum(seen.to(tl.float32), 0.0)
            seen = tl.load(place + 2 * C, mask=inside & (m + 2 >= 0) & (m + 2 < num_bands), other=0.0)
            right += g * tl.maximum(seen.to(tl.float32), 0.0)
    at = partial + (tl.program_id(0) * 10 + i * 3) * C + c
    tl.store(at, tl.sum(left, 0), mask=c < C)
    tl.store(at + C, tl.sum(middle, 0), mask=c < C)
    tl.store(at + 2 * C, tl.sum(right, 0), mask=c < C)
    if i == 2:  # place 9; the programs of the other rows have seen the same gradients
        tl.store(at + 3 * C, tl.sum(of_bias, 0), mask=c < C)


# ---- the operation and its backward pass ----


@torch.library.custom_op("nest_ssl::halve", mutates_args=())
def halve(
    x_BTMC: Tensor, lengths_B: Tensor, weight_C33: Tensor, bias_C: Tensor, pad_before: int, pad_after: int
) -> Tensor:
    """Convolve the ReLU of `x_BTMC`, zero from each length on, to half as many frames and bands."""
    shape = _halved(x_BTMC, pad_before, pad_after)
    out = x_BTMC.new_empty(shape)
    batch, frames, bands, channels = shape
    block_v, block_c = _blocks(bands, channels)
    halve_kernel[(batch * frames, -(-bands // block_v), -(-channels // block_c))](
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
    """Return the gradients of input, weight and bias."""
    batch, frames, bands, channels = x_BTMC.shape
    _, half_frames, half_bands, _ = grad_BUVC.shape
    grad_BUVC = grad_BUVC.contiguous()
    sizes = (frames, bands, half_frames, half_bands, pad_before)
    grad_x = torch.empty_like(x_BTMC)
    block_m, block_c = _blocks(bands, channels)
    halve_input_gradient_kernel[(batch * frames, -(-bands // block_m), -(-channels // block_c))](
        *(x_BTMC, lengths_B, weight_C33, grad_BUVC, grad_x, *sizes),
        C=channels,
        BLOCK_M=block_m,
        BLOCK_C=block_c,
    )
    block_v, block_c = _blocks(half_bands, channels)
    num_rows = batch * half_frames
    programs = min(num_rows, _PROGRAMS)
    partial = torch.empty((programs, 10, channels), dtype=torch.float32, device=x_BTMC.device)
    halve_weight_gradient_kernel[(programs, -(-channels // block_c), 3)](
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
    """Return how many bands and channels a program works on: powers of two, as Triton wants them."""
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
