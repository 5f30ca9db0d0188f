"""Sinusoidal positions, computed for the length at hand: no table to extend, nothing for ranks to agree on.

B batch, S frames, D width.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn

from nest_ssl.modules.dropout import Dropout

_LONGEST_WAVE = 10000.0


class PositionalEncoding(nn.Module):
    """Scales the input, adds absolute positions (or gives relative ones to the attention), and applies dropout."""

    def __init__(self, d_model: int, *, relative: bool, xscaling: bool, dropout: float, dropout_emb: float) -> None:
        super().__init__()
        self.relative = relative
        self.scale = math.sqrt(d_model) if xscaling else 1.0
        self.dropout = Dropout(dropout)
        self.dropout_emb = Dropout(dropout_emb)

    def forward(self, x_BSD: Tensor) -> tuple[Tensor, Tensor | None]:
        """The layers' input, and (1, 2S − 1, D) embeddings of the distances S − 1 … −(S − 1) if relative."""
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
