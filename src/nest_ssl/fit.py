"""`nest-ssl fit`: the largest batches that fit on a GPU, found by trying; NeMo's counterpart is OOMptimizer.

A trial is two whole training steps (forward, backward, optimizer) on random audio of a bucket's longest duration.
Graphs keep a copy of the gradients, so that much memory is set aside. Validation and other shapes have to fit into
what `--memory-share` leaves free.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from nest_ssl.config import DatasetConfig, NestConfig
from nest_ssl.model import EncDecDenoiseMaskedTokenPredModel
from nest_ssl.training.optimizers import build_optimizer

log = logging.getLogger(__name__)

Fits = Callable[[int, float], bool]
"""Whether a batch of so many utterances of this duration, in seconds, fits."""

STEPS = 2  # the second one has the optimizer's state in memory
PRECISION = 16  # a batch size is found to 1 / 16 of itself


@dataclass(frozen=True)
class Bucket:
    """The most utterances of up to `longest_s` seconds that fit into a batch."""

    longest_s: float
    batch_size: int


def largest(fits: Callable[[int], bool], least: int, most: int) -> int:
    """The largest number from `least` to `most` that fits, to 1 / 16; 0 if not even `least` does."""
    if not fits(least):
        return 0
    size = least
    while size < most and fits(min(2 * size, most)):
        size = min(2 * size, most)
    too_large = min(2 * size, most + 1)
    while too_large - size > max(1, size // PRECISION):
        middle = (size + too_large) // 2
        size, too_large = (middle, too_large) if fits(middle) else (size, middle)
    return size


def fit_buckets(fits: Fits, longest_s: list[float], most: int) -> list[Bucket]:
    """A bucket for each duration, shortest first; the search of one starts at what fits of the next longer one."""
    found: list[Bucket] = []
    for duration_s in sorted(longest_s, reverse=True):
        least = found[-1].batch_size if found else 1
        size = largest(lambda batch, duration_s=duration_s: fits(batch, duration_s), least, max(most, least))  # type: ignore[misc]
        if size == 0 and not found:
            raise ValueError(
                f"not even one utterance of {duration_s:g} s fits. Lower model.train_ds.max_duration or "
                f"model.activation_budget, or take a smaller model."
            )
        found.append(Bucket(duration_s, max(size, least)))
        log.info("up to %g s: %d utterances, %g s of audio", duration_s, found[-1].batch_size, size * duration_s)
    return found[::-1]


def bucket_durations(dataset: DatasetConfig) -> list[float]:
    """The longest duration of each bucket: the configured ones, or halves of the longest utterance down to 4 s."""
    longest_s = dataset.max_duration
    if longest_s is None:
        raise ValueError("model.train_ds.max_duration: not set. Give the longest utterance to train on, in seconds.")
    if dataset.bucket_duration_bins is not None:
        return [*(edge for edge in dataset.bucket_duration_bins if edge < longest_s), longest_s]
    durations = [longest_s]
    while durations[-1] / 2 >= 4:
        durations.append(durations[-1] / 2)
    return durations[::-1]


def overrides_for(buckets: list[Bucket]) -> list[str]:
    """What `nest-ssl pretrain` is given to use these batches."""
    edges = ",".join(f"{bucket.longest_s:g}" for bucket in buckets[:-1])
    sizes = ",".join(str(bucket.batch_size) for bucket in buckets)
    if len(buckets) == 1:
        return [f"model.train_ds.batch_size={sizes}"]
    return [
        "model.train_ds.use_bucketing=true",
        f"model.train_ds.bucket_duration_bins=[{edges}]",
        f"model.train_ds.bucket_batch_size=[{sizes}]",
    ]


class TrainingTrial:
    """Trains a model of the configuration for two steps, and tells whether the memory was enough."""

    def __init__(self, cfg: NestConfig, device: torch.device) -> None:
        self.device, self.sample_rate = device, cfg.model.sample_rate
        self.model = EncDecDenoiseMaskedTokenPredModel(cfg.model).to(device).train()
        self.optimizer = build_optimizer(self.model, cfg.model.optim)
        self.autocast = _autocast(device, str(cfg.trainer.precision))
        graphs = device.type == "cuda"
        self.set_aside = [torch.empty_like(p) for p in self.model.parameters() if p.requires_grad and graphs]

    def __call__(self, batch_size: int, duration_s: float) -> bool:
        try:
            for _ in range(STEPS):
                self._step(batch_size, duration_s)
        except torch.OutOfMemoryError:
            fitted = False
        else:
            fitted = True
        self.optimizer.zero_grad(set_to_none=True)
        if self.device.type == "cuda":
            torch.cuda.empty_cache()
        log.info("  %d x %g s: %s", batch_size, duration_s, "fits" if fitted else "does not fit")
        return fitted

    def _step(self, batch_size: int, duration_s: float) -> None:
        size = (batch_size, int(duration_s * self.sample_rate))
        audio = 0.1 * torch.randn(size, device=self.device)
        length = torch.full(size[:1], size[1], device=self.device)
        with self.autocast:
            loss = self.model.masked_loss(audio, length, audio + 0.02 * torch.randn_like(audio), length).loss
        loss.backward()
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)


def _autocast(device: torch.device, precision: str) -> contextlib.AbstractContextManager[Any]:
    if precision.startswith("bf16"):
        return torch.autocast(device.type, torch.bfloat16)
    return torch.autocast(device.type, torch.float16) if precision.startswith("16") else contextlib.nullcontext()


def fit(cfg: NestConfig, *, memory_share: float, most: int) -> list[Bucket]:
    """The buckets of `cfg.model.train_ds` with the largest batches for `memory_share` of this machine's first GPU."""
    if not torch.cuda.is_available():
        raise ValueError("fit: no CUDA GPU was found; there is no card to fit the batches to.")
    if cfg.model.train_ds is None:
        raise ValueError("fit: the configuration has no model.train_ds.")
    if not 0 < memory_share <= 1:
        raise ValueError(f"fit: --memory-share {memory_share} is not above 0 and at most 1.")
    device = torch.device("cuda", 0)
    torch.cuda.set_per_process_memory_fraction(memory_share, device)
    return fit_buckets(TrainingTrial(cfg, device), bucket_durations(cfg.model.train_ds), most)
