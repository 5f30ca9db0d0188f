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
    D: tl.constexpr, K: tl.constexpr, KP: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    """partial[program, k] = Σ_n grad[n] · x[n + k − left] over the program's rows; in place K, Σ_n grad[n]."""
    first = tl.program_id(0) * rows_per_program
    column = tl.program_id(1) * BLOCK_D + tl.arange(0, BLOCK_D)
    place, inside_d = tl.arange(0, KP), column < D
    sums = tl.zeros((KP, BLOCK_D), tl.float32)
    for begin in range(first, tl.minimum(first + rows_per_program, num_rows), BLOCK_N):
        row = begin + tl.arange(0, BLOCK_N)
        counts = (row < num_rows) & (row < first + rows_per_program)
        frame = row % num_frames
        at = row[:, None] * D + column[None, :]
        g = tl.load(grad + at, mask=counts[:, None] & inside_d[None, :], other=0.0).to(tl.float32)
        sums += tl.where(place[:, None] == K, tl.sum(g, 0)[None, :], 0.0)
        for k in tl.static_range(K):
            other = frame + (k - left)
            inside = counts & (other >= 0) & (other < num_frames)
            near = tl.load(x + at + (k - left) * D, mask=inside[:, None] & inside_d[None, :], other=0.0)
            sums += tl.where(place[:, None] == k, tl.sum(g * near.to(tl.float32), 0)[None, :], 0.0)
    at = (tl.program_id(0) * KP + place[:, None]) * D + column[None, :]
    tl.store(partial + at, sums, mask=inside_d[None, :] & (place[:, None] <= K))
