"""What lengths say about frames; no value ever leaves a GPU."""

from __future__ import annotations

import torch
from torch import Tensor


def valid_frames(lengths_B: Tensor, num_frames: int) -> Tensor:
    """(B, T) true where a frame lies before the end of its utterance."""
    return torch.arange(num_frames, device=lengths_B.device) < lengths_B[:, None]


def may_be_read(lengths_B: Tensor) -> bool:
    """Whether to compute by their values: on a CPU, unless it is recorded, to run later on other values."""
    recorded = torch.compiler.is_compiling() or bool(torch.jit.is_tracing())  # type: ignore[attr-defined, no-untyped-call]
    return lengths_B.device.type == "cpu" and type(lengths_B) is Tensor and not recorded
