"""Triton kernels of the depthwise convolution over time.

N = B · S frames of all utterances in a row, S frames of one, D channels, K taps.
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def convolve_kernel(
    x, weight, bias, out,
    num_rows, num_frames, left,
    D: tl.constexpr, K: tl.constexpr, FLIP: tl.constexpr, HAS_BIAS: tl.constexpr,
    BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    """out[n] = bias + Σ_k weight[k] · x[n + k − left], within an utterance; FLIP takes the taps from the end."""
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
    """partial[program, k] = Σ_n grad[n] · x[n + k − left] over the program's rows; in place K, Σ_n grad[n].

    A program sees three taps: three sums that stay in registers.
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
    tl.store(at + D, tl.sum(two, 0), mask=(column < D) & (k + 1 < K))
    tl.store(at + 2 * D, tl.sum(three, 0), mask=(column < D) & (k + 2 < K))
    tl.store(at + (K - k) * D, tl.sum(of_bias, 0), mask=(column < D) & (k == 0))
