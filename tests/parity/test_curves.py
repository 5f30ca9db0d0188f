"""Mels, and fifty training steps at two rates with one thread and two, equal those of NeMo 2.7.3 to 1e-5."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest
import torch
from torch import Tensor

from nest_ssl import EncDecDenoiseMaskedTokenPredModel, load
from nest_ssl.config import OptimConfig, parse
from nest_ssl.training.optimizers import build_optimizer
from nest_ssl.training.schedules import build_schedule
from tests.parity import curve_cases, training_case


@pytest.fixture
def num_threads(request: pytest.FixtureRequest) -> Iterator[int]:
    before = torch.get_num_threads()
    torch.set_num_threads(request.param)
    yield request.param
    torch.set_num_threads(before)


@pytest.mark.parametrize(("warmup_steps", "num_threads"), curve_cases.CURVES, indirect=["num_threads"])
def test_fifty_steps_follow_nemos_losses_to_1e_5(
    warmup_steps: int, num_threads: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = load(training_case.START).train()
    assert isinstance(model, EncDecDenoiseMaskedTokenPredModel)
    cfg = parse(OptimConfig, curve_cases.optim(warmup_steps), "optim")
    assert cfg.sched is not None
    optimizer = build_optimizer(model, cfg)
    schedule = build_schedule(optimizer, cfg.sched)
    losses, rates = [], []
    for step in range(training_case.NUM_STEPS):

        def given(lengths_B: Tensor, num_frames: int, *, generator: object, step: int = step) -> Tensor:
            return training_case.mask(step, lengths_B, num_frames)

        monkeypatch.setattr(model.mask_processor, "draw", given)
        b = curve_cases.batch(step)
        loss = model.masked_loss(b["audio"], b["audio_len"], b["noisy_audio"], b["noisy_audio_len"]).loss
        rates.append(optimizer.param_groups[0]["lr"])
        losses.append(loss.item())
        optimizer.zero_grad()
        torch.autograd.backward(loss)
        optimizer.step()
        schedule.step()
    with np.load(curve_cases.RECORDED) as recorded:
        np.testing.assert_allclose(rates, recorded[f"rates_{warmup_steps}"], rtol=1e-12)
        nemo = recorded[f"losses_{warmup_steps}_{num_threads}"]
    np.testing.assert_allclose(losses, nemo, rtol=0, atol=1e-5)
    assert nemo[-5:].mean() < 0.95 * nemo[:5].mean()  # it was a training


@pytest.mark.parametrize(("model_name", "signal_name"), curve_cases.MELS)
def test_mels_equal_nemos_to_1e_5(model_name: str, signal_name: str) -> None:
    preprocessor = load(curve_cases.GOLDEN / f"{model_name}.nemo").preprocessor
    audio_BN, lengths_B = curve_cases.signal(signal_name)
    mels_BMT, _ = preprocessor(input_signal=audio_BN, length=lengths_B)
    with np.load(curve_cases.RECORDED) as recorded:
        nemo_BMT = recorded[f"mels_{model_name}_{signal_name}"]
    ours_BMT = mels_BMT[:, :, :: curve_cases.EVERY_NTH_FRAME].numpy()
    np.testing.assert_allclose(ours_BMT, nemo_BMT, rtol=0, atol=1e-5)
