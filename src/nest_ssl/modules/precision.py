"""Where features and targets are computed: in float32 or better, whatever the precision around them."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import Tensor, nn


def full_precision(device: torch.device) -> AbstractContextManager[object]:
    """Switches autocast off; tensors without storage (`meta`) have no autocast to switch."""
    return contextlib.nullcontext() if device.type == "meta" else torch.autocast(device.type, enabled=False)


class KeepsPrecision(nn.Module):
    """A module that moves as asked but keeps its precision: a model cast to bf16 must still see the same targets."""

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Any:
        def move(tensor: Tensor) -> Tensor:
            moved = fn(tensor)
            return moved if moved.dtype == tensor.dtype else tensor.to(moved.device)

        return super()._apply(move, recurse)  # type: ignore[no-untyped-call]
