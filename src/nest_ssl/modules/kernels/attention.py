"""Triton kernels of relative-position attention: one row of weights at a time, never all of them.

The scores by distance come in as they leave their matrix product, (H, B · S, R): the kernels read, and in the backward
pass write, the score of query q and key k in column S − 1 − q + k. Dropout is `fast_dropout`'s hash of the place.

B batch, H heads, S frames, R distances (2S − 1, rounded up), C channels of a head.
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def _keep(seed, row, column, num_columns, threshold):
    mixed = ((row[:, None] * num_columns + column[None, :]).to(tl.uint32) ^ seed.to(tl.uint32)) * 0x7FEB352D
    mixed = (mixed ^ (mixed >> 15)) * 0x846CA68B
    return (mixed ^ (mixed >> 16)) >= threshold.to(tl.uint32)


@triton.jit
def _visible(q, k, length, context, num_frames, HAS_CONTEXT: tl.constexpr):
    seen = (q[:, None] < length) & (k[None, :] < length)
    if HAS_CONTEXT:
        seen = seen & (tl.load(context + q[:, None] * num_frames + k[None, :], mask=seen, other=0) != 0)
    return seen


@triton.jit
def _rows(base, frame, stride, channel, length, num_channels):
    """A block of frames × channels; zeros past the end."""
    inside = (frame[:, None] < length) & (channel[None, :] < num_channels)
    return tl.load(base + frame[:, None] * stride + channel[None, :], mask=inside, other=0.0)


@triton.jit
def forward_kernel(
    qkv, u, by_distance, lengths, context, seeds, out, lse,
    num_frames, num_distances, scale, threshold, keep_scale,
    B, H: tl.constexpr, C: tl.constexpr, CP: tl.constexpr,
    BLOCK_Q: tl.constexpr, BLOCK_K: tl.constexpr,
    HAS_CONTEXT: tl.constexpr, DROPS: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """out (B, S, H, C) and the logarithm of each row's sum (B, H, S)."""
    row_block, bh = tl.program_id(0), tl.program_id(1)
    b, h = bh // H, bh % H
    length = tl.load(lengths + b).to(tl.int32)
    q_at, channel = row_block * BLOCK_Q + tl.arange(0, BLOCK_Q), tl.arange(0, CP)
    stride = 3 * H * C
    base = qkv + b.to(tl.int64) * num_frames * stride + h * C
    q = _rows(base, q_at, stride, channel, length, C)
    q = (q.to(tl.float32) + tl.load(u + h * C + channel, mask=channel < C, other=0.0)[None, :]).to(q.dtype)
    distance = by_distance + (h * B + b).to(tl.int64) * num_frames * num_distances
    seed = tl.load(seeds)
    most = tl.full((BLOCK_Q,), -1e30, tl.float32)
    total = tl.zeros((BLOCK_Q,), tl.float32)
    sums = tl.zeros((BLOCK_Q, CP), tl.float32)
    last = tl.where(row_block * BLOCK_Q < length, length, 0)
    for first in range(0, last, BLOCK_K):
        k_at = first + tl.arange(0, BLOCK_K)
        k = _rows(base + H * C, k_at, stride, channel, length, C)
        seen = _visible(q_at, k_at, length, context, num_frames, HAS_CONTEXT)
        place = q_at[:, None] * (num_distances - 1) + k_at[None, :] + (num_frames - 1)
        score = tl.dot(q, tl.trans(k), input_precision=PRECISION)
        score += tl.load(distance + place, mask=seen, other=0.0).to(tl.float32)
        score = tl.where(seen, score * scale, -1e30)
        larger = tl.maximum(most, tl.max(score, 1))
        weight = tl.where(seen, tl.exp(score - larger[:, None]), 0.0)
        shrink = tl.exp(most - larger)
        total = total * shrink + tl.sum(weight, 1)
        if DROPS:
            kept = _keep(seed, bh * num_frames + q_at, k_at, num_frames, threshold)
            weight = tl.where(kept, weight * keep_scale, 0.0)
        v = _rows(base + 2 * H * C, k_at, stride, channel, length, C)
        sums = sums * shrink[:, None] + tl.dot(weight.to(v.dtype), v, input_precision=PRECISION)
        most = larger
    safe = tl.where(total > 0, total, 1.0)
    inside = (q_at[:, None] < num_frames) & (channel[None, :] < C)
    at = (b * num_frames + q_at[:, None]).to(tl.int64) * (H * C) + h * C + channel[None, :]
    tl.store(out + at, (sums / safe[:, None]).to(out.dtype.element_ty), mask=inside)
    tl.store(lse + bh * num_frames + q_at, most + tl.log(safe), mask=q_at < num_frames)


@triton.jit
def backward_queries_kernel(
    qkv, u, by_distance, lengths, context, seeds, out, lse, grad_out, grad_qkv, grad_distance, delta,
    num_frames, num_distances, scale, threshold, keep_scale,
    B, H: tl.constexpr, C: tl.constexpr, CP: tl.constexpr,
    BLOCK_Q: tl.constexpr, BLOCK_K: tl.constexpr,
    HAS_CONTEXT: tl.constexpr, DROPS: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Gradients of the queries by content and of the scores by distance (zeros before); each row's ⟨grad_out, out⟩."""
    row_block, bh = tl.program_id(0), tl.program_id(1)
    b, h = bh // H, bh % H
    length = tl.load(lengths + b).to(tl.int32)
    q_at, channel = row_block * BLOCK_Q + tl.arange(0, BLOCK_Q), tl.arange(0, CP)
    stride = 3 * H * C
    base = qkv + b.to(tl.int64) * num_frames * stride + h * C
    q = _rows(base, q_at, stride, channel, length, C)
    q = (q.to(tl.float32) + tl.load(u + h * C + channel, mask=channel < C, other=0.0)[None, :]).to(q.dtype)
    rows = b.to(tl.int64) * num_frames * H * C + h * C
    grad = _rows(grad_out + rows, q_at, H * C, channel, length, C)
    value = _rows(out + rows, q_at, H * C, channel, length, C)
    dot = tl.sum(grad.to(tl.float32) * value.to(tl.float32), 1)
    inside_q = q_at < num_frames
    tl.store(delta + bh * num_frames + q_at, dot, mask=inside_q)
    log_sum = tl.load(lse + bh * num_frames + q_at, mask=inside_q, other=0.0)
    block = (h * B + b).to(tl.int64) * num_frames * num_distances
    seed = tl.load(seeds)
    grad_q = tl.zeros((BLOCK_Q, CP), tl.float32)
    last = tl.where(row_block * BLOCK_Q < length, length, 0)
    for first in range(0, last, BLOCK_K):
        k_at = first + tl.arange(0, BLOCK_K)
        k = _rows(base + H * C, k_at, stride, channel, length, C)
        v = _rows(base + 2 * H * C, k_at, stride, channel, length, C)
        seen = _visible(q_at, k_at, length, context, num_frames, HAS_CONTEXT)
        place = q_at[:, None] * (num_distances - 1) + k_at[None, :] + (num_frames - 1)
        score = tl.dot(q, tl.trans(k), input_precision=PRECISION)
        score += tl.load(by_distance + block + place, mask=seen, other=0.0).to(tl.float32)
        weight = tl.where(seen, tl.exp(score * scale - log_sum[:, None]), 0.0)
        grad_weight = tl.dot(grad, tl.trans(v), input_precision=PRECISION)
        if DROPS:
            kept = _keep(seed, bh * num_frames + q_at, k_at, num_frames, threshold)
            grad_weight = tl.where(kept, grad_weight * keep_scale, 0.0)
        grad_score = (weight * (grad_weight - dot[:, None]) * scale).to(q.dtype)
        pair = (q_at[:, None] < length) & (k_at[None, :] < length)
        tl.store(grad_distance + block + place, grad_score, mask=pair)
        grad_q += tl.dot(grad_score, k, input_precision=PRECISION)
    at = (b * num_frames + q_at[:, None]).to(tl.int64) * stride + h * C + channel[None, :]
    inside = inside_q[:, None] & (channel[None, :] < C)
    tl.store(grad_qkv + at, grad_q.to(grad_qkv.dtype.element_ty), mask=inside)


@triton.jit
def backward_keys_kernel(
    qkv, u, by_distance, lengths, context, seeds, lse, grad_out, grad_qkv, delta,
    num_frames, num_distances, scale, threshold, keep_scale,
    B, H: tl.constexpr, C: tl.constexpr, CP: tl.constexpr,
    BLOCK_Q: tl.constexpr, BLOCK_K: tl.constexpr,
    HAS_CONTEXT: tl.constexpr, DROPS: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Gradients of the keys and values."""
    column_block, bh = tl.program_id(0), tl.program_id(1)
    b, h = bh // H, bh % H
    length = tl.load(lengths + b).to(tl.int32)
    k_at, channel = column_block * BLOCK_K + tl.arange(0, BLOCK_K), tl.arange(0, CP)
    stride = 3 * H * C
    base = qkv + b.to(tl.int64) * num_frames * stride + h * C
    k = _rows(base + H * C, k_at, stride, channel, length, C)
    v = _rows(base + 2 * H * C, k_at, stride, channel, length, C)
    u_row = tl.load(u + h * C + channel, mask=channel < C, other=0.0)[None, :]
    distance = by_distance + (h * B + b).to(tl.int64) * num_frames * num_distances
    rows = b.to(tl.int64) * num_frames * H * C + h * C
    seed = tl.load(seeds)
    grad_k = tl.zeros((BLOCK_K, CP), tl.float32)
    grad_v = tl.zeros((BLOCK_K, CP), tl.float32)
    last = tl.where(column_block * BLOCK_K < length, length, 0)
    for first in range(0, last, BLOCK_Q):
        q_at = first + tl.arange(0, BLOCK_Q)
        q = _rows(base, q_at, stride, channel, length, C)
        q = (q.to(tl.float32) + u_row).to(q.dtype)
        grad = _rows(grad_out + rows, q_at, H * C, channel, length, C)
        inside_q = q_at < num_frames
        log_sum = tl.load(lse + bh * num_frames + q_at, mask=inside_q, other=0.0)
        dot = tl.load(delta + bh * num_frames + q_at, mask=inside_q, other=0.0)
        seen = _visible(q_at, k_at, length, context, num_frames, HAS_CONTEXT)
        place = q_at[:, None] * (num_distances - 1) + k_at[None, :] + (num_frames - 1)
        score = tl.dot(q, tl.trans(k), input_precision=PRECISION)
        score += tl.load(distance + place, mask=seen, other=0.0).to(tl.float32)
        weight = tl.where(seen, tl.exp(score * scale - log_sum[:, None]), 0.0)
        grad_weight = tl.dot(grad, tl.trans(v), input_precision=PRECISION)
        dropped = weight
        if DROPS:
            kept = _keep(seed, bh * num_frames + q_at, k_at, num_frames, threshold)
            grad_weight = tl.where(kept, grad_weight * keep_scale, 0.0)
            dropped = tl.where(kept, weight * keep_scale, 0.0)
        grad_v += tl.dot(tl.trans(dropped.to(v.dtype)), grad, input_precision=PRECISION)
        grad_score = (weight * (grad_weight - dot[:, None]) * scale).to(q.dtype)
        grad_k += tl.dot(tl.trans(grad_score), q, input_precision=PRECISION)
    at = (b * num_frames + k_at[:, None]).to(tl.int64) * stride + h * C + channel[None, :]
    inside = (k_at[:, None] < num_frames) & (channel[None, :] < C)
    tl.store(grad_qkv + at + H * C, grad_k.to(grad_qkv.dtype.element_ty), mask=inside)
    tl.store(grad_qkv + at + 2 * H * C, grad_v.to(grad_qkv.dtype.element_ty), mask=inside)


@triton.jit
def add_queries_kernel(
    grad_qkv, by_distance, partial, num_rows, rows_per_program,
    H: tl.constexpr, C: tl.constexpr, CP: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """Adds the queries' gradients by distance, (H, N, C), to those by content; partial sums of each: of v and of u."""
    first, h = tl.program_id(0) * rows_per_program, tl.program_id(1)
    channel = tl.arange(0, CP)
    inside_c = (channel < C)[None, :]
    of_u = tl.zeros((CP,), tl.float32)
    of_v = tl.zeros((CP,), tl.float32)
    for begin in range(0, rows_per_program, BLOCK_N):
        row = first + begin + tl.arange(0, BLOCK_N)
        inside = ((row < num_rows) & (begin + tl.arange(0, BLOCK_N) < rows_per_program))[:, None] & inside_c
        at = row[:, None].to(tl.int64) * (3 * H * C) + h * C + channel[None, :]
        content = tl.load(grad_qkv + at, mask=inside, other=0.0).to(tl.float32)
        other = (h.to(tl.int64) * num_rows + row[:, None]) * C + channel[None, :]
        distance = tl.load(by_distance + other, mask=inside, other=0.0).to(tl.float32)
        of_u += tl.sum(content, 0)
        of_v += tl.sum(distance, 0)
        tl.store(grad_qkv + at, (content + distance).to(grad_qkv.dtype.element_ty), mask=inside)
    at = (tl.program_id(0) * 2 * H + h) * C + channel
    tl.store(partial + at, of_u, mask=channel < C)
    tl.store(partial + at + H * C, of_v, mask=channel < C)
