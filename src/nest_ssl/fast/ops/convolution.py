"""The depthwise convolution over time: Triton kernels, the custom op, and its backward pass.

`modules.conformer.ConformerConvolution` is the reference. It transposes to (B, D, S) and back; this
one reads frames as the layers have them, (N, D), and keeps only its input for the backward pass.
Sums are in float32 and in a fixed order, so a step repeats to the bit.

N = B · S frames of all utterances in a row, S frames of one, D channels, K taps.
"""

# mypy: disable-error-code="no-untyped-def, untyped-decorator"
# Triton's kernels have no types: their arguments are pointers and numbers.

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

_PROGRAMS = 264  # two for each multiprocessor of an H200

# ---- kernels ----


@triton.jit
def convolve_kernel(
    x, weight, bias, out,
    num_rows, num_frames, left,
    D: tl.constexpr, K: tl.constexpr, FLIP: tl.constexpr, HAS_BIAS: tl.constexpr,
    BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    """Write out[n] = bias + Σ_k weight[k] · x[n + k − left], within an utterance; FLIP takes the taps from the end.

    Grid: (blocks of BLOCK_N rows, blocks of BLOCK_D channels). Frames of all utterances are one
    long row, so a block may cover the end of one and the start of the next: `frame` is each row's
    place in its own utterance, and a tap that would reach into a neighbour is masked. The K loads
    of a row hit the cache after the first. FLIP makes the same kernel compute the gradient of the
    input.
    """
    row = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    column = tl.program_id(1) * BLOCK_D + tl.arange(0, BLOCK_D)
    frame, inside_d = row % num_frames, column < D
    total = tl.zeros((BLOCK_N, BLOCK_D), tl.float32)
    if HAS_BIAS:
        total += tl.load(bias + column, mask=inside_d, other=0.0).to(tl.float32)[None, :]
    for k in tl.static_range(K):
        tap = tl.load(weight + column * K + (K - 1 - k if FLIP else k), mask=inside_d, other=0.0).to(tl.float32)
        other = frame + (k - left)
        inside = (row < num_rows) & (other >= 0) & (other < num_frames)
        at = (row + (k - left))[:, None] * D + column[None, :]
        total += tap[None, :] * tl.load(x + at, mask=inside[:, None] & inside_d[None, :], other=0.0).to(tl.float32)
    at = row[:, None] * D + column[None, :]
    tl.store(out + at, total.to(out.dtype.element_ty), mask=(row < num_rows)[:, None] & inside_d[None, :])


@triton.jit
def weight_gradient_kernel(
    x, grad, partial,
    num_rows, num_frames, left, rows_per_program,
    D: tl.constexpr, K: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    """Write partial[program, k] = Σ_n grad[n] · x[n + k − left] over the program's rows; in place K, Σ_n grad[n].

    Grid: (ranges of rows, blocks of BLOCK_D channels, K / 3). A program handles three taps, whose
    BLOCK_N × BLOCK_D sums stay in registers until the end; all K taps at once would spill. Partial
    sums are added by torch in a fixed order. With the kernel above this took the convolutions of a
    step (64 × 16 s, H200) from 2.8 to 1.1 ms. Masks are those of the forward pass: rows of this
    program, channels below D, taps within the utterance.
    """
    first, k = tl.program_id(0) * rows_per_program, tl.program_id(2) * 3
    column = tl.program_id(1) * BLOCK_D + tl.arange(0, BLOCK_D)
    inside_d = (column < D)[None, :]
    one = tl.zeros((BLOCK_N, BLOCK_D), tl.float32)
    two = tl.zeros((BLOCK_N, BLOCK_D), tl.float32)
    three = tl.zeros((BLOCK_N, BLOCK_D), tl.float32)
    of_bias = tl.zeros((BLOCK_N, BLOCK_D), tl.float32)
    for begin in range(0, rows_per_program, BLOCK_N):
        row = first + begin + tl.arange(0, BLOCK_N)
        inside = ((row < num_rows) & (begin + tl.arange(0, BLOCK_N) < rows_per_program))[:, None] & inside_d
        at = row[:, None] * D + column[None, :]
        g = tl.load(grad + at, mask=inside, other=0.0).to(tl.float32)
        of_bias += g
        other = (row % num_frames + k - left)[:, None]
        place = x + at + (k - left) * D
        one += g * tl.load(place, mask=inside & (other >= 0) & (other < num_frames), other=0.0).to(tl.float32)
        near = tl.load(place + D, mask=inside & (other + 1 >= 0) & (other + 1 < num_frames), other=0.0)
        two += g * near.to(tl.float32)
        near = tl.load(place + 2 * D, mask=inside & (other + 2 >= 0) & (other + 2 < num_frames), other=0.0)
        three += g * near.to(tl.float32)
    at = partial + (tl.program_id(0) * (K + 1) + k) * D + column
    tl.store(at, tl.sum(one, 0), mask=column < D)
    if k + 1 < K:  # the last program has fewer taps if K is no multiple of three
        tl.store(at + D, tl.sum(two, 0), mask=column < D)
    if k + 2 < K:
        tl.store(at + 2 * D, tl.sum(three, 0), mask=column < D)
    if k == 0:  # every program of the third dimension has seen the same gradients; one writes their sum
        tl.store(at + K * D, tl.sum(of_bias, 0), mask=column < D)


# ---- the operation and its backward pass ----


@torch.library.custom_op("nest_ssl::convolve", mutates_args=())
def convolve(x_ND: Tensor, weight_DK: Tensor, bias_D: Tensor | None, frames_BS: Tensor, left: int) -> Tensor:
    """Convolve each channel over the frames of each utterance; the shape of `frames_BS` tells where they begin."""
    return _convolve(x_ND, weight_DK, bias_D, frames_BS.shape[1], left, flip=False)


@torch.library.custom_op("nest_ssl::convolve_backward", mutates_args=())
def convolve_backward(
    grad_ND: Tensor, x_ND: Tensor, weight_DK: Tensor, frames_BS: Tensor, left: int
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the gradients of input, weight and bias."""
    num_rows, width = x_ND.shape
    taps, num_frames = weight_DK.shape[1], frames_BS.shape[1]
    grad_ND = grad_ND.contiguous()
    grad_x_ND = _convolve(grad_ND, weight_DK, None, num_frames, taps - 1 - left, flip=True)
    block_d = 64
    programs = max(1, min(_PROGRAMS * block_d // width + 1, num_rows // 32))
    partial = torch.empty((programs, taps + 1, width), dtype=torch.float32, device=x_ND.device)
    weight_gradient_kernel[(programs, -(-width // block_d), -(-taps // 3))](
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
    convolve_kernel[(-(-num_rows // block_n), -(-width // block_d))](
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
