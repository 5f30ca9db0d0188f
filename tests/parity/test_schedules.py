"""Every schedule against the rates that NeMo 2.7.3 gives, step by step and group by group."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

from nest_ssl.config import ScheduleConfig
from nest_ssl.training.schedules import build_schedule
from tests.parity.schedule_cases import BASE_LRS, CASES, NUM_STEPS

RECORDED = Path(__file__).parent / "nemo_schedules.npz"


@pytest.mark.parametrize("name", CASES)
def test_every_rate_equals_nemos(name: str) -> None:
    groups = [{"params": [torch.nn.Parameter(torch.zeros(1))], "lr": lr} for lr in BASE_LRS]
    optimizer = torch.optim.SGD(groups, lr=1.0)
    schedule = build_schedule(optimizer, ScheduleConfig(**CASES[name]))
    rates = []
    for _ in range(NUM_STEPS):
        rates.append([group["lr"] for group in optimizer.param_groups])
        optimizer.step()
        schedule.step()
    with np.load(RECORDED) as recorded:
        np.testing.assert_allclose(rates, recorded[name], rtol=1e-12, atol=0)


def test_the_recording_has_every_case() -> None:
    with np.load(RECORDED) as recorded:
        assert set(recorded) == set(CASES)
