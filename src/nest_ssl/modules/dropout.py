"""Dropout of the plain version; `fast_dropout` is that of the fused layers on a GPU."""

from __future__ import annotations

import torch
from torch import Tensor, nn


class Dropout(nn.Dropout):
    """torch's, but on a CPU a value's fate takes 16 random bits rather than a random number: in a third of the time."""

    def forward(self, x: Tensor) -> Tensor:
        if not self.training or self.p in (0, 1) or x.device.type != "cpu" or torch.compiler.is_compiling():
            return super().forward(x)
        words = torch.empty((x.numel() + 3) // 4, dtype=torch.int64, device=x.device).random_(-(2**63), None)
        bits = words.view(torch.int16)[: x.numel()].view(x.shape)
        kept = bits >= int(self.p * 2**16) - 2**15
        factors = kept.to(torch.promote_types(x.dtype, torch.float32)).mul_(1 / (1 - self.p))
        return (x * factors).to(x.dtype)
