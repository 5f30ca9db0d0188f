"""Where features and targets are computed: outside autocast."""

from __future__ import annotations

import contextlib
from contextlib import AbstractContextManager

import torch


def full_precision(device: torch.device) -> AbstractContextManager[object]:
    """Switches autocast off; tensors without storage (`meta`) have no autocast to switch."""
    return contextlib.nullcontext() if device.type == "meta" else torch.autocast(device.type, enabled=False)
