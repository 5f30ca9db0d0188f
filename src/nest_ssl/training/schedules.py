"""Learning rates over the steps, by NeMo's names and with NeMo's numbers.

Every rate is a function of the step alone (`rate`), so a run can be resumed, and its curve drawn, from any step. The
configuration decides the curve and a checkpoint only the position on it: a run resumed with another `max_steps`
follows the new curve.
"""

from __future__ import annotations

import logging
import math
from typing import Any

from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from nest_ssl.config import ScheduleConfig
from nest_ssl.config.checks import short
from nest_ssl.plugins import schedules

log = logging.getLogger(__name__)


class Schedule(LRScheduler):
    """A linear warm-up, then `after_warmup` until `max_steps`, then `min_lr`."""

    def __init__(
        self,
        optimizer: Optimizer,
        *,
        max_steps: int | None = None,
        warmup_steps: int | None = None,
        warmup_ratio: float | None = None,
        min_lr: float = 0.0,
        last_epoch: int = -1,
    ) -> None:
        self.max_steps = max_steps
        self.min_lr = min_lr
        self.warmup_steps = self._num_steps("warmup", warmup_steps, warmup_ratio)
        if last_epoch >= 0:
            for group in optimizer.param_groups:
                group.setdefault("initial_lr", group["lr"])
        super().__init__(optimizer, last_epoch)

    def step(self, epoch: int | None = None) -> None:
        """Go to the next step. Torch's own would warn where a float16 run skips its first updates."""
        self._step_count += 1
        self.last_epoch = self.last_epoch + 1 if epoch is None else epoch
        self._set_rates()

    def _set_rates(self) -> None:
        self._last_lr = self.get_lr()
        for group, rate in zip(self.optimizer.param_groups, self._last_lr, strict=True):
            group["lr"] = rate

    def rate(self, base_lr: float, step: int) -> float:
        """The learning rate after `step` optimizer steps for a group whose peak rate is `base_lr`."""
        if 0 < self.warmup_steps >= step:
            return base_lr * (step + 1) / (self.warmup_steps + 1)
        if self.max_steps is not None and step > self.max_steps:
            return self.min_lr
        return self.after_warmup(base_lr, step)

    def after_warmup(self, base_lr: float, step: int) -> float:
        raise NotImplementedError

    def get_lr(self) -> list[float | Any]:
        return [self.rate(float(base_lr), self.last_epoch) for base_lr in self.base_lrs]

    def state_dict(self) -> dict[str, Any]:
        return {
            "last_epoch": self.last_epoch,
            "_step_count": self._step_count,
            "_last_lr": list(self._last_lr),
            "settings": self.settings(),
        }

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Go to the saved position, and give the optimizer the rate that belongs there."""
        before, now = state_dict.get("settings", {}), self.settings()
        both = before.keys() & now.keys()
        changed = [f"{key} {short(before[key])} → {short(now[key])}" for key in both if before[key] != now[key]]
        if changed:
            log.warning("the schedule is not that of the checkpoint; the new one holds: %s", ", ".join(sorted(changed)))
        self.last_epoch = state_dict["last_epoch"]
        self._step_count = state_dict["_step_count"]
        self._set_rates()

    def settings(self) -> dict[str, Any]:
        """What decides the curve."""
        hidden = {"optimizer", "last_epoch", "verbose"}
        return {key: value for key, value in vars(self).items() if not key.startswith("_") and key not in hidden}

    @property
    def total_steps(self) -> int:
        if self.max_steps is None:
            raise ValueError(
                f"model.optim.sched.max_steps: {type(self).__name__} needs the number of steps. "
                f"Give model.optim.sched.max_steps or trainer.max_steps."
            )
        return self.max_steps

    def _num_steps(self, what: str, steps: int | None, ratio: float | None) -> int:
        if steps is not None and ratio is not None:
            raise ValueError(f"model.optim.sched: give {what}_steps or {what}_ratio, not both.")
        if steps is not None:
            return steps
        return 0 if ratio is None else int(ratio * self.total_steps)

    def _peak_above_min(self) -> None:
        low = min(self.base_lrs)
        if low < self.min_lr:
            raise ValueError(f"model.optim.sched.min_lr: {self.min_lr:g} is above model.optim.lr {low:g}.")


class NoamAnnealing(Schedule):
    """`base_lr · d_model^-½ · min(step^-½, step · warmup^-1½)`: up in a line, down with the root of the step.

    Steps 0 and 1 share a rate, and the warm-up may lie below `min_lr`. There is no end: `max_steps` counts for
    `warmup_ratio` alone.
    """

    def __init__(self, optimizer: Optimizer, *, d_model: int, **settings: Any) -> None:
        self.d_model = d_model
        super().__init__(optimizer, **settings)
        self._peak_above_min()

    def rate(self, base_lr: float, step: int) -> float:
        step = max(1, step)
        rising = step / math.sqrt(self.warmup_steps) ** 3 if self.warmup_steps else math.inf
        rate = base_lr / math.sqrt(self.d_model) * min(1 / math.sqrt(step), rising)
        return rate if step <= self.warmup_steps else max(rate, self.min_lr)


class WarmupAnnealing(Schedule):
    """After the warm-up, down in a line."""

    def __init__(self, optimizer: Optimizer, **settings: Any) -> None:
        super().__init__(optimizer, **settings)
        _ = self.total_steps

    def after_warmup(self, base_lr: float, step: int) -> float:
        base_lr = float(self.base_lrs[0])  # as NeMo: the first group's rate for all groups
        share = (step - self.warmup_steps) / (self.total_steps - self.warmup_steps)
        return self.min_lr + (1 - share) * (base_lr - self.min_lr)


class InverseSquareRootAnnealing(Schedule):
    """After the warm-up, down with the root of the step; `min_lr` counts after `max_steps` alone."""

    def after_warmup(self, base_lr: float, step: int) -> float:
        return base_lr / math.sqrt((step + 1) / (self.warmup_steps + 1))


class PolynomialDecayAnnealing(Schedule):
    """After the warm-up, down as `(1 - share of the steps)^power`."""

    def __init__(self, optimizer: Optimizer, *, power: float = 1.0, cycle: bool = False, **settings: Any) -> None:
        # NeMo lengthens the decay when it has ended, but its rate is min_lr from there on: `cycle` changes nothing.
        self.power = power
        super().__init__(optimizer, **settings)
        _ = self.total_steps

    def after_warmup(self, base_lr: float, step: int) -> float:
        share = (step - self.warmup_steps) / (self.total_steps - self.warmup_steps)
        return self.min_lr + (base_lr - self.min_lr) * math.pow(1 - share, self.power)


class CosineAnnealing(Schedule):
    """After the warm-up, down along half a cosine; with `constant_steps`, at `min_lr` for the last of them.

    With `constant_steps` NeMo has other rules: the warm-up starts from 0, and the first group's rate is for all groups.
    """

    def __init__(
        self,
        optimizer: Optimizer,
        *,
        max_steps: int | None = None,
        constant_steps: int | None = None,
        constant_ratio: float | None = None,
        **settings: Any,
    ) -> None:
        self.max_steps = max_steps
        self.constant_steps = self._num_steps("constant", constant_steps, constant_ratio)
        super().__init__(optimizer, max_steps=max_steps, **settings)
        self._peak_above_min()
        _ = self.total_steps
        if self.constant_steps and self.warmup_steps + self.constant_steps > self.total_steps:
            raise ValueError(
                f"model.optim.sched: {self.warmup_steps} steps of warm-up and {self.constant_steps} constant ones "
                f"are more than max_steps {self.total_steps}."
            )

    def rate(self, base_lr: float, step: int) -> float:
        if not self.constant_steps:
            return super().rate(base_lr, step)
        base_lr = float(self.base_lrs[0])
        if 0 < self.warmup_steps >= step:
            return base_lr * step / self.warmup_steps
        return self.after_warmup(base_lr, step) if step <= self.total_steps - self.constant_steps else self.min_lr

    def after_warmup(self, base_lr: float, step: int) -> float:
        num_decay_steps = max(1, self.total_steps - self.constant_steps - self.warmup_steps)
        share = (step - self.warmup_steps) / num_decay_steps
        return self.min_lr + (base_lr - self.min_lr) * 0.5 * (1 + math.cos(math.pi * share))


SCHEDULE_CLASSES: dict[str, type[Schedule]] = {
    kind.__name__: kind
    for kind in (
        NoamAnnealing,
        CosineAnnealing,
        WarmupAnnealing,
        InverseSquareRootAnnealing,
        PolynomialDecayAnnealing,
    )
}


def build_schedule(optimizer: Optimizer, cfg: ScheduleConfig, max_steps: int | None = None) -> Schedule:
    """The schedule of the `optim.sched:` section; `max_steps` is the trainer's, for where the section has none."""
    trainer_steps = max_steps if max_steps is not None and max_steps > 0 else None
    make = schedules.find(cfg.name, SCHEDULE_CLASSES) or SCHEDULE_CLASSES[cfg.name]
    try:
        schedule: Schedule = make(
            optimizer,
            max_steps=cfg.max_steps if cfg.max_steps is not None else trainer_steps,
            min_lr=cfg.min_lr,
            last_epoch=cfg.last_epoch,
            **cfg.options(),
        )
    except TypeError as error:
        raise ValueError(f"model.optim.sched.extra: '{cfg.name}' does not take these arguments: {error}.") from error
    return schedule
