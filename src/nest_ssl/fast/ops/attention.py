"""Relative-position attention as one operation: Triton kernels, the custom op, and its backward pass.

`modules.attention.RelPositionMultiHeadAttention` is the reference. It stores the weights (B, H, S,
S) and the scores by distance (B, H, S, 2S − 1) of every layer for the backward pass. Here neither
is kept: the kernels work on one block of queries or keys at a time (as flash attention does), and
the scores by distance are one GEMM, repeated in the backward pass. In a step of 64 × 16 s on an
H200 all attention took 11.5 ms before and 8.8 ms after.

The scores by distance stay in the layout of their GEMM, (H, B · S, R). The score of query q and key
k is in row q, column S − 1 − q + k: the kernels read it (and write its gradient) with a stride of R
− 1 per query, so the shift from distances to keys is an address computation instead of a copy.

Masks. Keys and queries past an utterance's length are loaded as zeros, get a score of −1e30 and a
weight of 0, and no block starts past the length: padding costs nothing. A limited context is a (S,
S) table of bytes, read only if there is one. Dropout is a hash of the place (see `dropout`), so it
is computed again in the backward pass instead of stored.

N = B · S frames of all utterances in a row, B batch, H heads, S frames, C channels of a head,
R distances (2S − 1, rounded up).
"""

# mypy: disable-error-code="no-untyped-def, untyped-decorator"
# Triton's kernels have no types: their arguments are pointers and numbers.

from __future__ import annotations

import math
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.nn import functional as F  # noqa: N812

from nest_ssl.fast.ops.dropout import threshold

_ALIGNED = 8  # a bf16 GEMM is fast only if rows are a multiple of 16 bytes
_PROGRAMS = 132  # times heads; one for each multiprocessor of an H200

# Queries and keys per block, warps, pipeline stages, as measured on an H200: with them the three
# kernels take 89, 112 and 85 µs per layer (64 × 16 s) instead of 146, 139 and 114.
TUNING = {"forward": (64, 32, 4, 2), "queries": (64, 64, 4, 1), "keys": (64, 64, 4, 1)}

# ---- kernels ----


@triton.jit
def _keep(seed, row, column, num_columns, threshold):
    """Which weights dropout keeps: `dropout.keep_mask` for the block at these rows and columns of (B · H · S, S)."""
    mixed = ((row[:, None] * num_columns + column[None, :]).to(tl.uint32) ^ seed.to(tl.uint32)) * 0x7FEB352D
    mixed = (mixed ^ (mixed >> 15)) * 0x846CA68B
    return (mixed ^ (mixed >> 16)) >= threshold.to(tl.uint32)


@triton.jit
def _visible(q, k, length, context, num_frames, HAS_CONTEXT: tl.constexpr):
    """Which keys each query of a block sees: those within the utterance and, if limited, within its context."""
    seen = (q[:, None] < length) & (k[None, :] < length)
    if HAS_CONTEXT:
        seen = seen & (tl.load(context + q[:, None] * num_frames + k[None, :], mask=seen, other=0) != 0)
    return seen


@triton.jit
def _rows(base, frame, stride, channel, length, num_channels):
    """A block of frames × channels; zeros past the end of the utterance and past the head's channels."""
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
    """Write out (B, S, H, C) and the logarithm of each row's sum (B, H, S).

    Grid: (blocks of BLOCK_Q queries, B · H). A program keeps its queries, the running maximum and
    sum of each row, and BLOCK_Q × C sums in registers, and passes once over the keys and values in
    blocks of BLOCK_K. What it keeps for the backward pass is one float per row instead of S
    weights. C is rounded up to CP, a power of two, at least 16: the least that tl.dot multiplies.
    """
    row_block, bh = tl.program_id(0), tl.program_id(1)
    b, h = bh // H, bh % H
    length = tl.load(lengths + b).to(tl.int32)
    q_at, channel = row_block * BLOCK_Q + tl.arange(0, BLOCK_Q), tl.arange(0, CP)
    stride = 3 * H * C
    base = qkv + b.to(tl.int64) * num_frames * stride + h * C
    q = _rows(base, q_at, stride, channel, length, C)
    # The bias u is added in float32 and rounded to the precision of the GEMM, as torch's addition would be.
    q = (q.to(tl.float32) + tl.load(u + h * C + channel, mask=channel < C, other=0.0)[None, :]).to(q.dtype)
    distance = by_distance + (h * B + b).to(tl.int64) * num_frames * num_distances
    seed = tl.load(seeds)
    most = tl.full((BLOCK_Q,), -1e30, tl.float32)
    total = tl.zeros((BLOCK_Q,), tl.float32)
    sums = tl.zeros((BLOCK_Q, CP), tl.float32)
    last = tl.where(row_block * BLOCK_Q < length, length, 0)  # a block of nothing but padding sees no key
    for first in range(0, last, BLOCK_K):
        k_at = first + tl.arange(0, BLOCK_K)
        k = _rows(base + H * C, k_at, stride, channel, length, C)
        seen = _visible(q_at, k_at, length, context, num_frames, HAS_CONTEXT)
        # Row q of the distances starts at q · R, and the column is S − 1 − q + k.
        place = q_at[:, None] * (num_distances - 1) + k_at[None, :] + (num_frames - 1)
        score = tl.dot(q, tl.trans(k), input_precision=PRECISION)
        score += tl.load(distance + place, mask=seen, other=0.0).to(tl.float32)
        score = tl.where(seen, score * scale, -1e30)
        # Online softmax: sums so far are rescaled whenever a larger score is found.
        larger = tl.maximum(most, tl.max(score, 1))
        weight = tl.where(seen, tl.exp(score - larger[:, None]), 0.0)
        shrink = tl.exp(most - larger)
        total = total * shrink + tl.sum(weight, 1)
        if DROPS:  # after the sum: dropout comes after the softmax
            kept = _keep(seed, bh * num_frames + q_at, k_at, num_frames, threshold)
            weight = tl.where(kept, weight * keep_scale, 0.0)
        v = _rows(base + 2 * H * C, k_at, stride, channel, length, C)
        sums = sums * shrink[:, None] + tl.dot(weight.to(v.dtype), v, input_precision=PRECISION)
        most = larger
    safe = tl.where(total > 0, total, 1.0)  # a frame that sees nothing gets zeros
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
    """Write the gradients of the queries by content and of the scores by distance, and each row's ⟨grad_out, out⟩.

    Grid and loop are the forward kernel's: a program owns BLOCK_Q queries and passes over all keys,
    so its sums stay in registers and no two programs write the same place (no atomics: a step
    repeats to the bit). Weights are computed again from the scores and the logarithm of their sum.
    `grad_distance` starts as zeros, since only columns of visible pairs are written. `delta` is
    what the softmax's gradient subtracts; the keys' kernel, which runs next, reads it.
    """
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
    """Write the gradients of the keys and values.

    Grid: (blocks of BLOCK_K keys, B · H). The loop is turned around: a program owns BLOCK_K keys
    and passes over all queries, so the two sums over queries stay in registers. The price is that
    scores are computed a second time in the backward pass; sums by atomics would depend on their
    order.
    """
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
    """Add the queries' gradients by distance, (H, N, C), to those by content, and sum each: the gradients of v and u.

    Grid: (programs, H). A program sums a fixed range of rows in blocks of BLOCK_N and writes one
    partial sum; torch adds the partial sums. That saves two further passes over gradients of the
    size of the queries, and fixes the order of the sum.
    """
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


# ---- the operation and its backward pass ----


@torch.library.custom_op("nest_ssl::relative_attention", mutates_args=())
def relative_attention(
    qkv_N3HC: Tensor,
    positions_RHC: Tensor,
    u_HC: Tensor,
    v_HC: Tensor,
    lengths_B: Tensor,
    frames_BS: Tensor,
    context_SS: Tensor | None,
    seed: Tensor,
    dropout: float,
) -> tuple[Tensor, Tensor]:
    """Return attention (N, H, C) among each utterance's frames, and the logarithms of its sums (B, H, S).

    The shape of `frames_BS` tells where utterances begin; `context_SS` what each frame may see, if
    not all.
    """
    out_NHC = torch.empty_like(qkv_N3HC[:, 0], memory_format=torch.contiguous_format)
    batch, num_frames = frames_BS.shape
    lse_BHS = torch.empty((batch, qkv_N3HC.shape[2], num_frames), dtype=torch.float32, device=qkv_N3HC.device)
    positions_HRC = _padded(positions_RHC)
    run = _Launch(qkv_N3HC, frames_BS, context_SS, dropout, positions_HRC.shape[1])
    run(
        "forward",
        forward_kernel,
        *(qkv_N3HC, u_HC, _distance_queries(qkv_N3HC, v_HC) @ positions_HRC.transpose(1, 2)),
        *(lengths_B, run.context, seed, out_NHC, lse_BHS),
    )
    return out_NHC, lse_BHS


@torch.library.custom_op("nest_ssl::relative_attention_backward", mutates_args=())
def relative_attention_backward(
    grad_NHC: Tensor,
    out_NHC: Tensor,
    lse_BHS: Tensor,
    qkv_N3HC: Tensor,
    positions_RHC: Tensor,
    u_HC: Tensor,
    v_HC: Tensor,
    lengths_B: Tensor,
    frames_BS: Tensor,
    context_SS: Tensor | None,
    seed: Tensor,
    dropout: float,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return the gradients of the queries, keys and values, of the positions, and of the two biases."""
    num_rows, _, heads, channels = qkv_N3HC.shape
    grad_NHC = grad_NHC.contiguous()
    positions_HRC = _padded(positions_RHC)
    queries_HNC = _distance_queries(qkv_N3HC, v_HC)
    by_distance_HNR = queries_HNC @ positions_HRC.transpose(1, 2)
    grad_qkv_N3HC, delta_BHS = torch.empty_like(qkv_N3HC), torch.empty_like(lse_BHS)
    grad_distance_HNR = torch.zeros_like(by_distance_HNR)
    run = _Launch(qkv_N3HC, frames_BS, context_SS, dropout, positions_HRC.shape[1])
    run(
        "queries",
        backward_queries_kernel,
        *(qkv_N3HC, u_HC, by_distance_HNR, lengths_B, run.context, seed, out_NHC, lse_BHS),
        *(grad_NHC, grad_qkv_N3HC, grad_distance_HNR, delta_BHS),
    )
    run(
        "keys",
        backward_keys_kernel,
        *(qkv_N3HC, u_HC, by_distance_HNR, lengths_B, run.context, seed, lse_BHS),
        *(grad_NHC, grad_qkv_N3HC, delta_BHS),
    )
    grad_positions_HRC = grad_distance_HNR.transpose(1, 2) @ queries_HNC
    rows = -(-num_rows // _PROGRAMS)
    partial = torch.empty((_PROGRAMS, 2, heads, channels), dtype=torch.float32, device=qkv_N3HC.device)
    add_queries_kernel[(_PROGRAMS, heads)](
        *(grad_qkv_N3HC, grad_distance_HNR @ positions_HRC, partial, num_rows, rows),
        H=heads,
        C=channels,
        CP=run.options["CP"],
        BLOCK_N=32,
    )
    grad_u_HC, grad_v_HC = partial.sum(0).unbind()
    grad_positions_RHC = grad_positions_HRC[:, : positions_RHC.shape[0]].transpose(0, 1).contiguous()
    return grad_qkv_N3HC, grad_positions_RHC, grad_u_HC.clone(), grad_v_HC.clone()


class _Launch:
    """Launches a kernel for all utterances and heads."""

    def __init__(
        self, qkv_N3HC: Tensor, frames_BS: Tensor, context_SS: Tensor | None, dropout: float, num_distances: int
    ) -> None:
        self.batch, self.num_frames = frames_BS.shape
        heads, channels = qkv_N3HC.shape[2:]
        self.rows = self.batch * heads
        self.context = qkv_N3HC if context_SS is None else context_SS.view(torch.uint8)
        scale, keep_scale = 1 / math.sqrt(channels), 1 / (1 - dropout)
        self.numbers = (self.num_frames, num_distances, scale, threshold(dropout), keep_scale, self.batch)
        self.options: dict[str, Any] = {
            "H": heads,
            "C": channels,
            "CP": 1 << max(4, (channels - 1).bit_length()),
            "HAS_CONTEXT": context_SS is not None,
            "DROPS": dropout > 0,
            "PRECISION": "ieee" if qkv_N3HC.dtype == torch.float32 else "tf32",
        }

    def __call__(self, name: str, kernel: Any, *tensors: Tensor) -> None:
        block_q, block_k, warps, stages = TUNING[name]
        blocks = -(-self.num_frames // (block_k if name == "keys" else block_q))
        sizes = {"BLOCK_Q": block_q, "BLOCK_K": block_k, "num_warps": warps, "num_stages": stages}
        kernel[(blocks, self.rows)](*tensors, *self.numbers, **self.options, **sizes)


def _padded(positions_RHC: Tensor) -> Tensor:
    """(H, R, C), R rounded up with zeros."""
    return F.pad(positions_RHC.transpose(0, 1), (0, 0, 0, -positions_RHC.shape[0] % _ALIGNED))


def _distance_queries(qkv_N3HC: Tensor, v_HC: Tensor) -> Tensor:
    """(H, N, C) queries with the bias of the distances."""
    q_NHC = qkv_N3HC[:, 0]
    return (q_NHC + v_HC.to(q_NHC.dtype)).transpose(0, 1)


@relative_attention.register_fake
def _(
    qkv_N3HC: Tensor, positions: Tensor, u: Tensor, v: Tensor, lengths: Tensor, frames_BS: Tensor, *rest: Any
) -> tuple[Tensor, Tensor]:
    rows, _, heads, channels = qkv_N3HC.shape
    batch, num_frames = frames_BS.shape
    lse = torch.empty((batch, heads, num_frames), dtype=torch.float32, device=qkv_N3HC.device)
    return qkv_N3HC.new_empty((rows, heads, channels)), lse


@relative_attention_backward.register_fake
def _(
    grad: Tensor, out: Tensor, lse: Tensor, qkv: Tensor, positions: Tensor, u: Tensor, v: Tensor, *rest: Any
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    grad_u, grad_v = (torch.empty_like(bias, dtype=torch.float32) for bias in (u, v))
    return torch.empty_like(qkv), positions.new_empty(positions.shape), grad_u, grad_v


def _save(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    *tensors, ctx.dropout = inputs
    ctx.save_for_backward(*output, *tensors)
    ctx.mark_non_differentiable(output[1])
    ctx.set_materialize_grads(False)


def _differentiate(ctx: Any, grad_NHC: Tensor | None, _: Tensor | None) -> tuple[Tensor | None, ...]:
    if grad_NHC is None:
        return (None,) * 9
    gradients = relative_attention_backward(grad_NHC, *ctx.saved_tensors, ctx.dropout)
    return *gradients, None, None, None, None, None


relative_attention.register_autograd(_differentiate, setup_context=_save)
