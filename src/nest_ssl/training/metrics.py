"""What is worth logging of training. Tensors stay on the device: reading them is left to whoever logs.

G gathered tokens, K codes per book, H books.
"""

from __future__ import annotations

import copy
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

if TYPE_CHECKING:
    from nest_ssl.data import AudioNoiseBatch
    from nest_ssl.objective import MaskedPrediction


VALIDATION_METRICS = ("val_loss", "val_accuracy", "val_most_frequent_token")


@dataclass
class TokenCounts:
    """Sums over masked tokens; those of several batches or ranks can be added."""

    right_H: Tensor
    masked: Tensor
    valid: Tensor
    used_KH: Tensor
    """How often each code is the target."""

    def __add__(self, other: TokenCounts) -> TokenCounts:
        return TokenCounts(*(a + b for a, b in zip(vars(self).values(), vars(other).values(), strict=True)))

    def metrics(self) -> dict[str, Tensor]:
        """Accuracy on masked tokens, the share of the most frequent one, mask rate, and use of the codebooks."""
        masked = self.masked.clamp(min=1)
        share_KH = self.used_KH / masked
        return {
            "accuracy": (self.right_H / masked).mean(),
            "most_frequent_token": share_KH.max(0).values.mean(),
            "mask_rate": self.masked / self.valid.clamp(min=1),
            "codebook_coverage": (self.used_KH > 0).float().mean(),
            "codebook_entropy": -(share_KH * share_KH.clamp(min=1e-12).log()).sum(0).mean(),
        }


@torch.no_grad()
def count_tokens(predicted: MaskedPrediction) -> TokenCounts:
    log_probs_GKH, targets_GH = predicted.log_probs_GKH, predicted.targets_GH
    if targets_GH.ndim == 1:  # squeeze_single
        log_probs_GKH, targets_GH = log_probs_GKH[..., None], targets_GH[..., None]
    counts_G1 = predicted.counts_G[:, None]
    used_KH = torch.zeros(log_probs_GKH.shape[1:], device=targets_GH.device)
    used_KH.scatter_add_(0, targets_GH, counts_G1.expand_as(targets_GH).float())
    right_H = ((log_probs_GKH.argmax(1) == targets_GH) & counts_G1).sum(0)
    return TokenCounts(right_H, predicted.counts_G.sum(), predicted.num_valid, used_KH)


class EpochMeans:
    """Means over the epoch, weighted by the number of utterances; losses that are not finite do not count."""

    def __init__(self) -> None:
        self.epoch = -1
        self._sums: dict[str, Tensor] = {}
        self._weights: dict[str, Tensor] = {}

    def start(self, epoch: int) -> None:
        """What is added from now on belongs to `epoch`; what belongs to another is forgotten."""
        if epoch != self.epoch:
            self.epoch = epoch
            for tensor in self.tensors():
                tensor.zero_()

    def add(self, name: str, value: Tensor, weight: int) -> None:
        """Add the value of a batch, in place: a CUDA graph may contain this."""
        self.place(name, value.device)
        self._sums[name].add_(torch.where(value.isfinite(), value.float(), 0.0) * weight)
        self._weights[name].add_(value.isfinite().float() * weight)

    def place(self, name: str, device: torch.device) -> None:
        """Let the sum of these values be on this device."""
        if name not in self._sums or self._sums[name].device != device:
            kept = self._sums.get(name, torch.zeros(())), self._weights.get(name, torch.zeros(()))
            self._sums[name], self._weights[name] = (tensor.to(device, copy=True) for tensor in kept)

    def means(self) -> dict[str, Tensor]:
        """NaN where no value was finite."""
        return {name: total / self._weights[name] for name, total in self._sums.items()}

    def tensors(self) -> list[Tensor]:
        return [*self._sums.values(), *self._weights.values()]

    def state(self) -> dict[str, Any]:
        sums = {name: total.cpu().clone() for name, total in self._sums.items()}
        weights = {name: weight.cpu().clone() for name, weight in self._weights.items()}
        return {"epoch": self.epoch, "weights": weights, "sums": sums}

    def resume(self, state: Mapping[str, Any]) -> None:
        self.epoch, self._sums = state["epoch"], copy.deepcopy(dict(state["sums"]))
        if "weights" in state:
            self._weights = copy.deepcopy(dict(state["weights"]))
        else:  # the first edition had one weight for all
            self._weights = {name: torch.tensor(float(state["weight"])) for name in self._sums}


@dataclass
class Throughput:
    """Audio per second, padding and waiting since the last report, by the host's clock."""

    sample_rate: int
    _started: float = field(default_factory=time.perf_counter)
    _waiting_since: float | None = None
    _audio_s: float = 0.0
    _padded_s: float = 0.0
    _waited_s: float = 0.0
    _num_batches: int = 0

    def batch_arrives(self, batch: AudioNoiseBatch) -> None:
        """To be called with the batch still on the host, so that no length is read back from a GPU."""
        assert batch.audio is not None
        assert batch.audio_len is not None
        if self._waiting_since is not None:
            self._waited_s += time.perf_counter() - self._waiting_since
        self._num_batches += 1
        self._audio_s += float(batch.audio_len.sum()) / self.sample_rate
        self._padded_s += batch.audio.numel() / self.sample_rate

    def batch_is_done(self) -> None:
        self._waiting_since = time.perf_counter()

    def report(self) -> dict[str, float]:
        """The figures since the last report."""
        now = time.perf_counter()
        elapsed_s = max(now - self._started, 1e-9)
        out = {
            "audio_s_per_s": self._audio_s / elapsed_s,
            "train_step_timing": elapsed_s / max(self._num_batches, 1),
            "padding_share": 1 - self._audio_s / max(self._padded_s, 1e-9),
            "data_wait_share": min(self._waited_s / elapsed_s, 1.0),
        }
        self._started, self._audio_s, self._padded_s, self._waited_s, self._num_batches = now, 0.0, 0.0, 0.0, 0
        return out

    def pause(self) -> None:
        """Something other than training took place: start again from zero."""
        self.report()
        self._waiting_since = None
