"""Fifty AdamW + Noam steps from a model that NeMo saved follow the losses that NeMo 2.7.3 recorded."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from nest_ssl import EncDecDenoiseMaskedTokenPredModel, load
from nest_ssl.config import OptimConfig, parse
from nest_ssl.training.optimizers import build_optimizer
from nest_ssl.training.schedules import build_schedule
from tests.parity import training_case


def train(
    optim: dict[str, Any], batch: Callable[[int], dict[str, Tensor]], monkeypatch: pytest.MonkeyPatch
) -> tuple[list[float], list[float]]:
    """Losses and rates of fifty steps with given batches and masks."""
    model = load(training_case.START).train()
    assert isinstance(model, EncDecDenoiseMaskedTokenPredModel)
    cfg = parse(OptimConfig, optim, "optim")
    assert cfg.sched is not None
    optimizer = build_optimizer(model, cfg)
    schedule = build_schedule(optimizer, cfg.sched)
    losses, rates = [], []
    for step in range(training_case.NUM_STEPS):

        def given(lengths_B: Tensor, num_frames: int, *, generator: object, step: int = step) -> Tensor:
            return training_case.mask(step, lengths_B, num_frames)

        monkeypatch.setattr(model.mask_processor, "draw", given)
        b = batch(step)
        loss = model.masked_loss(b["audio"], b["audio_len"], b["noisy_audio"], b["noisy_audio_len"]).loss
        rates.append(optimizer.param_groups[0]["lr"])
        losses.append(loss.item())
        optimizer.zero_grad()
        torch.autograd.backward(loss)
        optimizer.step()
        schedule.step()
    return losses, rates


def test_fifty_steps_follow_nemos_losses_and_rates(monkeypatch: pytest.MonkeyPatch) -> None:
    losses, rates = train(training_case.OPTIM, training_case.batch, monkeypatch)
    with np.load(training_case.RECORDED) as recorded:
        np.testing.assert_allclose(rates, recorded["rates"], rtol=1e-12)
        np.testing.assert_allclose(losses, recorded["losses"], rtol=1e-4)
        assert recorded["losses"][-5:].mean() < 0.95 * recorded["losses"][:5].mean()  # it was a training
