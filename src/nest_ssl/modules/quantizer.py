"""Targets: the nearest of fixed random codes to a fixed random projection of the features (BEST-RQ).

B batch, D features, T frames, S codes in time, H books, C code dimension, K codes per book.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812

from nest_ssl.config import QuantizerConfig
from nest_ssl.modules.inputs import KeepsPrecision, check_tensor, full_precision

_CHUNK_BYTES = 32 * 2**20  # similarities held at once: NeMo's take 6.3 GB for 8 × 60 s


class RandomProjectionVectorQuantizer(KeepsPrecision):
    """`quantizer(input_signal=(B, D, T))` gives the quantized vectors (B, C, S, H) and their tokens (B, S, H).

    Takes the fields of `QuantizerConfig` as keywords. With one book and `squeeze_single` the last
    dimension is dropped.
    """

    def __init__(self, **options: Any) -> None:
        super().__init__()
        self.cfg = cfg = QuantizerConfig(**options)
        self.proj = nn.Linear(cfg.feat_in * cfg.combine_time_steps, cfg.num_books * cfg.code_dim, bias=False)
        nn.init.xavier_normal_(self.proj.weight)
        codebooks_HKC = torch.randn(cfg.num_books, cfg.num_classes, cfg.code_dim, dtype=torch.float64)
        self.codebooks = nn.Parameter(F.normalize(codebooks_HKC, dim=-1))
        if cfg.freeze:
            self.requires_grad_(False)

    @torch.no_grad()
    def forward(self, input_signal: Tensor) -> tuple[Tensor, Tensor]:
        cfg = self.cfg
        shape = ("batch", "frames", cfg.feat_in) if cfg.time_ahead else ("batch", cfg.feat_in, "frames")
        check_tensor("input_signal", input_signal, *shape, what="features", empty=True)
        # bf16 flips about 2 % of the codes (measured): stay in fp32, whatever the autocast around us.
        with full_precision(input_signal.device):
            x_BTD = input_signal.float() if cfg.time_ahead else input_signal.float().transpose(1, 2)
            x_BSHC = self._project(x_BTD)
            tokens_BSH = torch.stack(
                [nearest_code(x_BSHC[:, :, h], self.codebooks[h]) for h in range(cfg.num_books)], 2
            )
        quantized_BSHC = torch.stack([self.codebooks[h][tokens_BSH[..., h]] for h in range(cfg.num_books)], 2)
        quantized = quantized_BSHC.permute(0, 1, 3, 2) if cfg.time_ahead else quantized_BSHC.permute(0, 3, 1, 2)
        if cfg.num_books == 1 and cfg.squeeze_single:
            return quantized[..., 0], tokens_BSH[..., 0]
        return quantized, tokens_BSH

    def _project(self, x_BTD: Tensor) -> Tensor:
        """(B, S, H, C) unit vectors, one for `combine_time_steps` frames; an incomplete last group is left out."""
        cfg = self.cfg
        num_tokens, stacked_size = x_BTD.shape[1] // cfg.combine_time_steps, cfg.feat_in * cfg.combine_time_steps
        stacked = x_BTD[:, : num_tokens * cfg.combine_time_steps].reshape(x_BTD.shape[0], num_tokens, stacked_size)
        projected = F.linear(stacked, self.proj.weight.float())
        return F.normalize(projected.view(*projected.shape[:2], cfg.num_books, cfg.code_dim), dim=-1)


def nearest_code(x_BSC: Tensor, codebook_KC: Tensor) -> Tensor:
    """(B, S) nearest code; both sides are unit vectors, so least L2 and least angle are the largest dot product."""
    rows = max(1, _CHUNK_BYTES // (codebook_KC.shape[0] * codebook_KC.element_size()))
    flat = x_BSC.reshape(-1, x_BSC.shape[-1]).to(codebook_KC.dtype)
    codes = [(chunk @ codebook_KC.T).argmax(dim=-1) for chunk in torch.split(flat, rows)]
    return torch.cat(codes).view(x_BSC.shape[:-1]) if codes else flat.new_zeros(x_BSC.shape[:-1], dtype=torch.long)
