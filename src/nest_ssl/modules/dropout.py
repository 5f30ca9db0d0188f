"""Dropout of the plain version; `fast_dropout` is that of the fused layers on a GPU."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from nest_ssl.modules.random_numbers import random_chances


class Dropout(nn.Dropout):
    """torch's, but on a CPU in a quarter of its time."""

    def forward(self, x: Tensor) -> Tensor:
        if not self.training or self.p in (0, 1) or x.device.type != "cpu" or torch.compiler.is_compiling():
            return super().forward(x)
        scale = torch.tensor(1 / (1 - self.p), dtype=torch.promote_types(x.dtype, torch.float32))
        factors = random_chances(x.numel(), 1 - self.p).view(x.shape) * scale
        return (x * factors).to(x.dtype)
