"""Triton kernels of the depthwise 3 × 3 convolution of stride 2 that reads the ReLU of its input, channels last.

B batch, T frames and M bands of the input, U and V those of the output, C channels.
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def halve_kernel(
    x, lengths, weight, bias, out,
    T, M, U, V, pad,
    C: tl.constexpr, BLOCK_V: tl.constexpr, BLOCK_C: tl.constexpr,
):  # fmt: skip
    """out[b, u, v] = bias + Σ_ij weight[i, j] · relu(x[b, 2u + i − pad, 2v + j − pad]); zeros past the end of x."""
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
        for j in tl.static_range(3):
            m = 2 * v + j - pad
            inside = (t >= 0) & (t < length) & (m >= 0) & (m < M) & (v < V)
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
    """grad_x[b, t, m] = Σ weight[i, j] · grad[b, u, v] over the outputs that read it, where x is positive."""
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
    """partial[program, i · 3 + j] = Σ grad[b, u, v] · relu(x[…]) over the program's rows (b, u); in place 9, Σ grad.

    A program sees one row i of the kernel: three sums that stay in registers.
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
        heard = (t >= 0) & (t < tl.load(lengths + b).to(tl.int32))
        row = x + (b.to(tl.int64) * T + t) * M * C
        for begin in range(0, V, BLOCK_V):
            v = begin + tl.arange(0, BLOCK_V)
            inside = (v < V)[:, None] & inside_c
            at = (row_out.to(tl.int64) * V + v[:, None]) * C + c[None, :]
            g = tl.load(grad + at, mask=inside, other=0.0).to(tl.float32)
            of_bias += g
            m = (2 * v - pad)[:, None]
            place = row + m * C + c[None, :]
            seen = tl.load(place, mask=inside & heard & (m >= 0) & (m < M), other=0.0)
            left += g * tl.maximum(seen.to(tl.float32), 0.0)
            seen = tl.load(place + C, mask=inside & heard & (m + 1 >= 0) & (m + 1 < M), other=0.0)
            middle += g * tl.maximum(seen.to(tl.float32), 0.0)
            seen = tl.load(place + 2 * C, mask=inside & heard & (m + 2 >= 0) & (m + 2 < M), other=0.0)
            right += g * tl.maximum(seen.to(tl.float32), 0.0)
    at = partial + (tl.program_id(0) * 10 + i * 3) * C + c
    tl.store(at, tl.sum(left, 0), mask=c < C)
    tl.store(at + C, tl.sum(middle, 0), mask=c < C)
    tl.store(at + 2 * C, tl.sum(right, 0), mask=c < C)
    tl.store(at + 3 * C, tl.sum(of_bias, 0), mask=(c < C) & (i == 2))
