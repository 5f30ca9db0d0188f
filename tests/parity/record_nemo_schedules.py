"""Ask NeMo for the learning rates of every case of schedule_cases.py and write them next to this file.

    PYTHON_WITH_NEMO tests/parity/record_nemo_schedules.py

Needs nemo_toolkit[asr]==2.7.3 in an environment of its own.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import numpy as np
import torch
from nemo.core.optim.lr_scheduler import get_scheduler

sys.path.insert(0, str(Path(__file__).parents[2]))
from tests.parity import schedule_cases


def record(settings: dict[str, Any]) -> Any:
    """(steps, groups) rates, from before the first step on."""
    groups = [{"params": [torch.nn.Parameter(torch.zeros(1))], "lr": lr} for lr in schedule_cases.BASE_LRS]
    optimizer = torch.optim.SGD(groups, lr=1.0)
    settings = dict(settings)
    schedule = get_scheduler(settings.pop("name"), **settings)(optimizer)
    rates = []
    for _ in range(schedule_cases.NUM_STEPS):
        rates.append([group["lr"] for group in optimizer.param_groups])
        optimizer.step()
        schedule.step()
    return np.array(rates)


def main() -> None:
    recorded = {name: record(settings) for name, settings in schedule_cases.CASES.items()}
    np.savez_compressed(Path(__file__).parent / "nemo_schedules.npz", allow_pickle=False, **recorded)


if __name__ == "__main__":
    main()
