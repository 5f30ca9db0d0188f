"""What lengths say about frames; no value ever leaves the device."""

from __future__ import annotations

import torch
from torch import Tensor


def valid_frames(lengths_B: Tensor, num_frames: int) -> Tensor:
    """(B, T) true where a frame lies before the end of its utterance."""
    return torch.arange(num_frames, device=lengths_B.device) < lengths_B[:, None]
