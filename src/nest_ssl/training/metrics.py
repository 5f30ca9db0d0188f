"""What is worth logging of a training step. Tensors stay on the device: reading them is left to the logger.

G gathered tokens, K codes per book, H books.
"""

from __future__ import annotations

import time
from dataclasses import dataclass, field

import torch
from torch import Tensor

from nest_ssl.data import AudioNoiseBatch
from nest_ssl.model import MaskedPrediction


@torch.no_grad()
def token_metrics(predicted: MaskedPrediction) -> dict[str, Tensor]:
    """Accuracy on masked tokens, mask rate, and how much of the codebooks the targets use."""
    log_probs_GKH, targets_GH = predicted.log_probs_GKH, predicted.targets_GH
    if targets_GH.ndim == 1:  # squeeze_single
        log_probs_GKH, targets_GH = log_probs_GKH[..., None], targets_GH[..., None]
    counts_G1 = predicted.counts_G[:, None]
    num_masked = predicted.counts_G.sum().clamp(min=1)
    right_GH = (log_probs_GKH.argmax(1) == targets_GH) & counts_G1
    used_KH = torch.zeros(log_probs_GKH.shape[1:], device=targets_GH.device)
    used_KH.scatter_add_(0, targets_GH, counts_G1.expand_as(targets_GH).float())
    share_KH = used_KH / num_masked
    return {
        "accuracy": right_GH.sum() / (num_masked * targets_GH.shape[1]),
        "most_frequent_token": share_KH.max(0).values.mean(),
        "mask_rate": predicted.counts_G.sum() / predicted.num_valid.clamp(min=1),
        "codebook_coverage": (used_KH > 0).float().mean(),
        "codebook_entropy": -(share_KH * share_KH.clamp(min=1e-12).log()).sum(0).mean(),
    }


@dataclass
class Throughput:
    """Audio per second, padding and waiting since the last report, by the host's clock."""

    sample_rate: int
    _started: float = field(default_factory=time.perf_counter)
    _waiting_since: float | None = None
    _audio_s: float = 0.0
    _padded_s: float = 0.0
    _waited_s: float = 0.0

    def batch_arrives(self, batch: AudioNoiseBatch) -> None:
        """To be called with the batch still on the host, so that no length is read back from a GPU."""
        assert batch.audio is not None
        assert batch.audio_len is not None
        if self._waiting_since is not None:
            self._waited_s += time.perf_counter() - self._waiting_since
        self._audio_s += float(batch.audio_len.sum()) / self.sample_rate
        self._padded_s += batch.audio.numel() / self.sample_rate

    def batch_done(self) -> None:
        self._waiting_since = time.perf_counter()

    def report(self) -> dict[str, float]:
        """The figures since the last report."""
        now = time.perf_counter()
        elapsed_s = max(now - self._started, 1e-9)
        out = {
            "audio_s_per_s": self._audio_s / elapsed_s,
            "padding_share": 1 - self._audio_s / max(self._padded_s, 1e-9),
            "data_wait_share": min(self._waited_s / elapsed_s, 1.0),
        }
        self._started, self._audio_s, self._padded_s, self._waited_s = now, 0.0, 0.0, 0.0
        return out

    def pause(self) -> None:
        """Something else than training took place: start anew."""
        self.report()
        self._waiting_since = None
