"""Self-attention with absolute or relative (Transformer-XL) positions, and the positions themselves.

B batch, H heads, S frames, R = 2S − 1 distances, D width, C = D / H.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn

_LONGEST_WAVE = 10000.0


class PositionalEncoding(nn.Module):
    """Scale the input, add absolute positions (or return relative ones for the attention), and apply dropout.

    Positions are computed for the length at hand: there is no table to extend, and nothing that
    ranks would have to agree on.
    """

    def __init__(self, d_model: int, *, relative: bool, xscaling: bool, dropout: float, dropout_emb: float) -> None:
        super().__init__()
        self.relative = relative
        self.scale = math.sqrt(d_model) if xscaling else 1.0
        self.dropout = nn.Dropout(dropout)
        self.dropout_emb = nn.Dropout(dropout_emb)

    def forward(self, x_BSD: Tensor) -> tuple[Tensor, Tensor | None]:
        """Return the layers' input and, if relative, (1, 2S − 1, D) embeddings of the distances S − 1 … −(S − 1)."""
        num_frames = x_BSD.shape[1]
        x_BSD = x_BSD * self.scale
        first, last = (num_frames - 1, -num_frames) if self.relative else (0, num_frames)
        positions = torch.arange(first, last, -1 if self.relative else 1, dtype=torch.float32, device=x_BSD.device)
        embedding_1RD = sinusoids(positions, x_BSD.shape[2])[None].to(x_BSD.dtype)
        if self.relative:
            return self.dropout(x_BSD), self.dropout_emb(embedding_1RD)
        return self.dropout(x_BSD + embedding_1RD), None


def sinusoids(positions_R: Tensor, dim: int) -> Tensor:
    """(R, D) sine in the even and cosine in the odd places, wavelengths from 2π to 10000 · 2π."""
    evens = torch.arange(0, dim, 2, dtype=torch.float32, device=positions_R.device)
    angles = positions_R[:, None] * torch.exp(evens * -(math.log(_LONGEST_WAVE) / dim))
    return torch.stack((angles.sin(), angles.cos()), dim=-1).flatten(1)


class MultiHeadAttention(nn.Module):
    """Attention over the frames that `visible` allows; a frame that sees nothing gets zeros."""

    def __init__(self, d_model: int, n_heads: int, *, dropout: float, use_bias: bool) -> None:
        super().__init__()
        self.n_heads = n_heads
        self.linear_q = nn.Linear(d_model, d_model, bias=use_bias)
        self.linear_k = nn.Linear(d_model, d_model, bias=use_bias)
        self.linear_v = nn.Linear(d_model, d_model, bias=use_bias)
        self.linear_out = nn.Linear(d_model, d_model, bias=use_bias)
        self.dropout = nn.Dropout(dropout)

    def forward(self, x_BSD: Tensor, visible_B1SS: Tensor, pos_emb_1RD: Tensor | None) -> Tensor:
        q_BHSC, k_BHSC, v_BHSC = (
            self._split(linear(x_BSD)) for linear in (self.linear_q, self.linear_k, self.linear_v)
        )
        scores_BHSS = self._scores(q_BHSC, k_BHSC, pos_emb_1RD) / math.sqrt(q_BHSC.shape[-1])
        scores_BHSS = scores_BHSS.masked_fill(~visible_B1SS, torch.finfo(scores_BHSS.dtype).min)
        weights_BHSS = self.dropout(torch.softmax(scores_BHSS, dim=-1))
        heard_BHSC = torch.where(visible_B1SS.any(-1, keepdim=True), weights_BHSS @ v_BHSC, 0.0)
        out_BSD: Tensor = self.linear_out(heard_BHSC.transpose(1, 2).flatten(2))
        return out_BSD

    def _scores(self, q_BHSC: Tensor, k_BHSC: Tensor, pos_emb_1RD: Tensor | None) -> Tensor:
        return q_BHSC @ k_BHSC.transpose(2, 3)

    def _split(self, x_BSD: Tensor) -> Tensor:
        """(B, S, D) -> (B, H, S, C)"""
        return x_BSD.view(*x_BSD.shape[:2], self.n_heads, -1).transpose(1, 2)


class RelPositionMultiHeadAttention(MultiHeadAttention):
    """Scores by content and by distance, each with a learned bias of the query."""

    def __init__(
        self,
        d_model: int,
        n_heads: int,
        *,
        dropout: float,
        use_bias: bool,
        shared_biases: tuple[nn.Parameter, nn.Parameter] | None = None,
    ) -> None:
        super().__init__(d_model, n_heads, dropout=dropout, use_bias=use_bias)
        self.linear_pos = nn.Linear(d_model, d_model, bias=False)
        self.pos_bias_u, self.pos_bias_v = shared_biases or position_biases(d_model, n_heads)

    def _scores(self, q_BHSC: Tensor, k_BHSC: Tensor, pos_emb_1RD: Tensor | None) -> Tensor:
        assert pos_emb_1RD is not None
        p_1HRC = self._split(self.linear_pos(pos_emb_1RD))
        by_content_BHSS = (q_BHSC + self.pos_bias_u[:, None]) @ k_BHSC.transpose(2, 3)
        by_distance_BHSR = (q_BHSC + self.pos_bias_v[:, None]) @ p_1HRC.transpose(2, 3)
        return by_content_BHSS + distances_to_keys(by_distance_BHSR)


def position_biases(d_model: int, n_heads: int) -> tuple[nn.Parameter, nn.Parameter]:
    """The biases u (content) and v (distance), (H, C) each."""
    shape = (n_heads, d_model // n_heads)
    return nn.Parameter(torch.zeros(shape)), nn.Parameter(torch.zeros(shape))


def distances_to_keys(scores_BHSR: Tensor) -> Tensor:
    """(B, H, S, S) whose [q, k] is the score of distance q − k, taken from column S − 1 − (q − k).

    In the flattened rows that is place q · (2S − 2) + (S − 1) + k: rows of length 2S − 2 after an
    offset of S − 1.
    """
    num_frames = scores_BHSR.shape[2]
    if num_frames == 1:
        return scores_BHSR
    rows = 2 * num_frames - 2
    flat = scores_BHSR.flatten(2)[..., num_frames - 1 : num_frames - 1 + num_frames * rows]
    return flat.view(*flat.shape[:2], num_frames, rows)[..., :num_frames]
