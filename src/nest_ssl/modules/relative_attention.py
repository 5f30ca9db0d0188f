"""Relative-position attention as one operation, with its own backward pass.

Neither the weights (B, H, S, S) nor the scores by distance (B, H, S, 2S − 1) are kept for the backward pass: the latter
are one matrix product, made again there. `attention.RelPositionMultiHeadAttention` is the plain version.

N = B · S frames of all utterances in a row, H heads, C channels of a head, R = 2S − 1 distances.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F  # noqa: N812

from nest_ssl.modules.fast_dropout import threshold
from nest_ssl.modules.kernels import attention as kernels

_ALIGNED = 8  # a matrix product of bf16 wants rows of 16 bytes
_PROGRAMS = 132  # times heads; one for each multiprocessor of an H200

# Queries and keys of a block, warps, pipeline stages: measured on an H200 (docs/performance.md).
TUNING = {"forward": (64, 32, 4, 2), "queries": (64, 64, 4, 1), "keys": (64, 64, 4, 1)}


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
    """Attention (N, H, C) among each utterance's frames up to its length, and the logarithms of its sums (B, H, S).

    `frames_BS` says by its shape where utterances begin; `context_SS` what each frame may see, if not all.
    """
    out_NHC = torch.empty_like(qkv_N3HC[:, 0], memory_format=torch.contiguous_format)
    batch, num_frames = frames_BS.shape
    lse_BHS = torch.empty((batch, qkv_N3HC.shape[2], num_frames), dtype=torch.float32, device=qkv_N3HC.device)
    positions_HRC = _padded(positions_RHC)
    run = _Launch(qkv_N3HC, frames_BS, context_SS, dropout, positions_HRC.shape[1])
    run(
        "forward",
        kernels.forward_kernel,
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
    """Gradients of the queries, keys and values, of the positions, and of the two biases."""
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
        kernels.backward_queries_kernel,
        *(qkv_N3HC, u_HC, by_distance_HNR, lengths_B, run.context, seed, out_NHC, lse_BHS),
        *(grad_NHC, grad_qkv_N3HC, grad_distance_HNR, delta_BHS),
    )
    run(
        "keys",
        kernels.backward_keys_kernel,
        *(qkv_N3HC, u_HC, by_distance_HNR, lengths_B, run.context, seed, lse_BHS),
        *(grad_NHC, grad_qkv_N3HC, delta_BHS),
    )
    grad_positions_HRC = grad_distance_HNR.transpose(1, 2) @ queries_HNC
    rows = -(-num_rows // _PROGRAMS)
    partial = torch.empty((_PROGRAMS, 2, heads, channels), dtype=torch.float32, device=qkv_N3HC.device)
    kernels.add_queries_kernel[(_PROGRAMS, heads)](
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
    """Launches a kernel on all utterances and heads."""

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
