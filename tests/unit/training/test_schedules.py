"""Schedules: position, resuming, and what is refused."""

from __future__ import annotations

import logging
from typing import Any

import pytest
import torch
from torch.optim import Optimizer

from nest_ssl.config import ScheduleConfig
from nest_ssl.config.optim import SCHEDULES
from nest_ssl.training.schedules import SCHEDULE_CLASSES, Schedule, build_schedule

SETTINGS: dict[str, dict[str, Any]] = {
    "NoamAnnealing": {"d_model": 16, "warmup_steps": 7},
    "CosineAnnealing": {"warmup_steps": 7, "constant_steps": 5, "min_lr": 1e-5},
    "WarmupAnnealing": {"warmup_ratio": 0.2},
    "InverseSquareRootAnnealing": {"warmup_steps": 3},
    "PolynomialDecayAnnealing": {"power": 2.0},
}


def make(name: str, trainer_steps: int | None = 40, /, **settings: Any) -> tuple[Optimizer, Schedule]:
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=0.1)
    return optimizer, build_schedule(optimizer, ScheduleConfig(name=name, **settings), trainer_steps)


def follow(optimizer: Optimizer, schedule: Schedule, num_steps: int) -> list[float]:
    rates = []
    for _ in range(num_steps):
        rates.append(optimizer.param_groups[0]["lr"])
        optimizer.step()
        schedule.step()
    return rates


def test_the_tables_of_names_agree() -> None:
    assert SCHEDULE_CLASSES.keys() == SCHEDULES.keys() == SETTINGS.keys()


@pytest.mark.parametrize("name", SETTINGS)
def test_a_resumed_schedule_continues_exactly(name: str) -> None:
    whole = follow(*make(name, **SETTINGS[name]), 50)
    optimizer, schedule = make(name, **SETTINGS[name])
    first = follow(optimizer, schedule, 17)
    saved_optimizer, saved = optimizer.state_dict(), schedule.state_dict()
    optimizer, schedule = make(name, **SETTINGS[name])
    optimizer.load_state_dict(saved_optimizer)
    schedule.load_state_dict(saved)
    assert schedule.get_last_lr() == [optimizer.param_groups[0]["lr"]]
    assert first + follow(optimizer, schedule, 33) == whole


def test_the_state_holds_plain_values_only() -> None:
    _, schedule = make("NoamAnnealing", **SETTINGS["NoamAnnealing"])
    state = schedule.state_dict()
    assert set(state) == {"last_epoch", "_step_count", "_last_lr", "settings"}
    assert all(isinstance(value, (int, float, list)) for value in state["settings"].values())


def test_a_longer_run_follows_its_own_curve_and_logs_it(caplog: pytest.LogCaptureFixture) -> None:
    optimizer, schedule = make("CosineAnnealing", 40)
    follow(optimizer, schedule, 20)
    longer, resumed = make("CosineAnnealing", 80)
    resumed.load_state_dict(schedule.state_dict())
    assert "max_steps 40 → 80" in caplog.text
    assert longer.param_groups[0]["lr"] == resumed.rate(0.1, 20) > schedule.rate(0.1, 20)


@pytest.mark.parametrize("name", SETTINGS)
def test_last_epoch_starts_in_the_middle(name: str) -> None:
    whole = follow(*make(name, **SETTINGS[name]), 30)
    assert follow(*make(name, last_epoch=9, **SETTINGS[name]), 20) == whole[10:]


def test_the_sections_max_steps_takes_precedence_over_the_trainers() -> None:
    assert make("CosineAnnealing", 40, max_steps=30)[1].max_steps == 30
    assert make("CosineAnnealing", 40, max_steps=-1)[1].max_steps == 40


@pytest.mark.parametrize("trainer_steps", [None, -1])
def test_a_schedule_with_an_end_needs_the_number_of_steps(trainer_steps: int | None) -> None:
    for name in ("CosineAnnealing", "WarmupAnnealing", "PolynomialDecayAnnealing"):
        for warmup_steps in (0, 5):
            with pytest.raises(ValueError, match=f"max_steps: {name} needs the number of steps"):
                make(name, trainer_steps, warmup_steps=warmup_steps)
    with pytest.raises(ValueError, match="Give model.optim.sched.max_steps or trainer.max_steps"):
        make("NoamAnnealing", trainer_steps, d_model=16, warmup_ratio=0.1)
    assert make("NoamAnnealing", trainer_steps, d_model=16)[1].rate(1.0, 4) == 0.125


@pytest.mark.parametrize("name", ["NoamAnnealing", "CosineAnnealing"])
def test_a_floor_above_the_peak_is_refused(name: str) -> None:
    settings = {key: value for key, value in SETTINGS[name].items() if key != "min_lr"}
    with pytest.raises(ValueError, match="min_lr: 0.2 is above model.optim.lr 0.1"):
        make(name, min_lr=0.2, **settings)


def test_warmup_and_constant_steps_must_fit() -> None:
    with pytest.raises(ValueError, match="30 steps of warm-up and 20 constant ones are more than max_steps 40"):
        make("CosineAnnealing", warmup_steps=30, constant_steps=20)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"name": "CosineAnealing"}, "Did you mean 'CosineAnnealing'"),
        ({"name": "StepLR"}, "exists in NeMo but not in nest-ssl"),
        ({"name": "NoamAnnealing"}, "optim.sched.d_model: NoamAnnealing needs it"),
        ({"name": "CosineAnnealing", "d_model": 8}, "Remove it with '~model.optim.sched.d_model'"),
        ({"name": "WarmupAnnealing", "power": 2.0}, "WarmupAnnealing does not take it"),
        ({"name": "CosineAnnealing", "constant_steps": 3, "constant_ratio": 0.1}, "not both"),
        ({"name": "CosineAnnealing", "warmup_ratio": 1.5}, "1.5 is not a probability"),
        ({"name": "CosineAnnealing", "max_steps": 0}, "max_steps: 0 is less than 1"),
        ({"name": "CosineAnnealing", "warmup_steps": -3}, "warmup_steps: -3 is less than 0"),
    ],
)
def test_invalid_settings_are_refused(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        ScheduleConfig(**settings)


def test_cycle_logs_that_it_has_no_effect(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.WARNING)
    ScheduleConfig(name="PolynomialDecayAnnealing", cycle=True)
    assert "has no effect" in caplog.text
