"""The `optim:` section: NeMo's names and keys. Each option is checked against the chosen optimizer or schedule."""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Annotated, Any

from nest_ssl.config.checks import (
    AboveZero,
    Count,
    NotNegative,
    Range,
    Share,
    ShareBelowOne,
    Size,
    check_ranges,
    known_name,
    not_supported,
)
from nest_ssl.plugins import optimizers, schedules

log = logging.getLogger(__name__)

_ADAM = frozenset({"betas", "eps", "weight_decay", "amsgrad", "fused"})
OPTIMIZERS: dict[str, frozenset[str]] = {
    "adamw": _ADAM,
    "adam": _ADAM,
    "sgd": frozenset({"momentum", "dampening", "nesterov", "weight_decay", "fused"}),
    "adamax": frozenset({"betas", "eps", "weight_decay"}),
    "adadelta": frozenset({"rho", "eps", "weight_decay"}),
    "adagrad": frozenset({"lr_decay", "initial_accumulator_value", "eps", "weight_decay"}),
    "rmsprop": frozenset({"alpha", "centered", "momentum", "eps", "weight_decay"}),
    "rprop": frozenset({"etas", "step_sizes"}),
}
"""Optimizers by NeMo's names, and the options that each takes in addition to `lr`."""

_WARMUP = frozenset({"warmup_steps", "warmup_ratio"})
SCHEDULES: dict[str, frozenset[str]] = {
    "NoamAnnealing": _WARMUP | {"d_model"},
    "CosineAnnealing": _WARMUP | {"constant_steps", "constant_ratio"},
    "WarmupAnnealing": _WARMUP,
    "InverseSquareRootAnnealing": _WARMUP,
    "PolynomialDecayAnnealing": _WARMUP | {"power", "cycle"},
}
"""Schedules by NeMo's names, and their options in addition to `max_steps`, `min_lr` and `last_epoch`."""

_NEMO_OPTIMIZERS = [
    *("novograd", "adafactor", "adan", "lamb", "fused_adam", "distributed_fused_adam", "megatron_fused_adam"),
]
_NEMO_SCHEDULES = [
    *("WarmupPolicy", "WarmupHoldPolicy", "WarmupHoldAnnealLinear", "WarmupHoldAnnealOneMinusSquareRoot"),
    *("SquareAnnealing", "SquareRootAnnealing", "NoamHoldAnnealing", "PolynomialHoldDecayAnnealing"),
    *("T5InverseSquareRootAnnealing", "StepLR", "ExponentialLR", "ReduceLROnPlateau", "CyclicLR"),
]


@dataclass
class ScheduleConfig:
    """`optim.sched:`: the learning rate at each step."""

    name: str = "NoamAnnealing"
    """NoamAnnealing, CosineAnnealing, WarmupAnnealing, InverseSquareRootAnnealing or PolynomialDecayAnnealing."""
    d_model: Size | None = None
    """Width that NoamAnnealing scales by."""
    warmup_steps: Count | None = None
    """Number of warm-up steps."""
    warmup_ratio: Share | None = None
    """Length of the warm-up as a share of all steps; replaces `warmup_steps`."""
    min_lr: Annotated[float, Range(0, 1000)] = 0.0
    """Lowest learning rate after the warm-up."""
    max_steps: Annotated[int, Range(1)] | None = None
    """Length of the schedule; null or -1: the trainer's."""
    constant_steps: Count | None = None
    """Steps at the lowest learning rate at the end (CosineAnnealing)."""
    constant_ratio: Share | None = None
    """`constant_steps` as a share of all steps."""
    power: Annotated[float, Range(0, 1000)] | None = None
    """Exponent of PolynomialDecayAnnealing; null: 1."""
    cycle: bool | None = None
    """Accepted for PolynomialDecayAnnealing; no effect, as in NeMo: the rate stays at `min_lr` after `max_steps`."""
    last_epoch: Annotated[int, Range(-1)] = -1
    """The step before the first one."""
    extra: dict[str, Any] | None = None
    """More arguments for a schedule registered by another package."""

    @staticmethod
    def rearranged(data: dict[str, Any]) -> dict[str, Any]:
        """Refuse a name that only NeMo has before the options that only it takes."""
        if (name := data.get("name")) in _NEMO_SCHEDULES and schedules.find(name, SCHEDULES) is None:
            not_supported("optim.sched.name", name, f"use one of {', '.join(SCHEDULES)}")
        return data

    def __post_init__(self) -> None:
        where = "optim.sched"
        if schedules.find(self.name, SCHEDULES) is None:
            self.rearranged({"name": self.name})
            known_name(f"{where}.name", self.name, [*SCHEDULES, *schedules.names()])
            _only_options_of(where, self.name, self.options(), SCHEDULES)
        for what in ("warmup", "constant"):
            steps, ratio = getattr(self, f"{what}_steps"), getattr(self, f"{what}_ratio")
            if steps is not None and ratio is not None:
                raise ValueError(f"{where}: give {what}_steps or {what}_ratio, not both.")
        if self.max_steps == -1:
            self.max_steps = None
        check_ranges(where, self)
        if self.name == "NoamAnnealing" and self.d_model is None:
            raise ValueError(f"{where}.d_model: NoamAnnealing needs it. Give the encoder's d_model.")
        if self.cycle:
            log.warning("%s.cycle: has no effect, as in NeMo: after max_steps the rate stays at min_lr.", where)

    def options(self) -> dict[str, Any]:
        """Return the given options, without the keys that every schedule has."""
        return _given(self, leave_out={"name", "min_lr", "max_steps", "last_epoch", "extra"}) | (self.extra or {})


@dataclass
class OptimConfig:
    """Optimizer and schedule. An option that is null has torch's default (adamw: weight_decay 0.01)."""

    name: str = "adamw"
    """adamw, adam, sgd, adamax, adadelta, adagrad, rmsprop or rprop."""
    lr: Annotated[float, Range(0, 1000)] = 1e-3
    """Peak learning rate; for NoamAnnealing, a factor."""
    betas: list[ShareBelowOne] | None = None
    """Decay rates of the moments (adamw, adam, adamax)."""
    eps: AboveZero | None = None
    """Added to the denominator to keep it above 0."""
    weight_decay: NotNegative | None = None
    """Weight decay."""
    amsgrad: bool | None = None
    """Divide by the largest second moment so far (adamw, adam)."""
    momentum: NotNegative | None = None
    """Momentum (sgd, rmsprop)."""
    dampening: NotNegative | None = None
    """Damping of the momentum (sgd)."""
    nesterov: bool | None = None
    """Use Nesterov momentum (sgd)."""
    rho: Share | None = None
    """Decay of the squared gradients (adadelta)."""
    lr_decay: NotNegative | None = None
    """Decay of the learning rate (adagrad)."""
    initial_accumulator_value: NotNegative | None = None
    """Initial sum of squared gradients (adagrad)."""
    alpha: Share | None = None
    """Decay of the squared gradients (rmsprop)."""
    centered: bool | None = None
    """Divide by the standard deviation of the gradients (rmsprop)."""
    etas: list[AboveZero] | None = None
    """Factors that shrink and grow a step (rprop)."""
    step_sizes: list[NotNegative] | None = None
    """Smallest and largest step (rprop)."""
    fused: bool | None = None
    """Update all parameters in one kernel (adamw, adam, sgd); null: for adamw and adam, except at precision 16."""
    no_decay_on_norms_and_biases: bool = False
    """Exclude norms and biases from weight decay."""
    sched: ScheduleConfig | None = None
    """null: a constant learning rate."""
    extra: dict[str, Any] | None = None
    """More arguments for an optimizer registered by another package."""

    @staticmethod
    def rearranged(data: dict[str, Any]) -> dict[str, Any]:
        """Refuse a name that only NeMo has before the options that only it takes."""
        if (name := data.get("name")) in _NEMO_OPTIMIZERS and optimizers.find(name, OPTIMIZERS) is None:
            not_supported("optim.name", name, f"use one of {', '.join(OPTIMIZERS)}")
        return data

    def __post_init__(self) -> None:
        is_plugin = optimizers.find(self.name, OPTIMIZERS) is not None
        if not is_plugin:
            self.rearranged({"name": self.name})
            known_name("optim.name", self.name, [*OPTIMIZERS, *optimizers.names()])
            _only_options_of("optim", self.name, self.options(), OPTIMIZERS)
        check_ranges("optim", self)
        for key in ("betas", "etas", "step_sizes"):
            pair = getattr(self, key)
            if pair is not None and len(pair) != 2:
                raise ValueError(f"optim.{key}: {pair} is not a pair of numbers.")
        if self.etas is not None and not 0 < self.etas[0] < 1 < self.etas[1]:
            raise ValueError(f"optim.etas: {self.etas} is not a factor below 1 and one above 1.")
        if self.step_sizes is not None and self.step_sizes[0] > self.step_sizes[1]:
            raise ValueError(f"optim.step_sizes: {self.step_sizes} is not in increasing order.")
        if self.nesterov and (not self.momentum or self.dampening):
            raise ValueError("optim.nesterov: needs a momentum and no dampening.")
        if self.no_decay_on_norms_and_biases and not is_plugin and "weight_decay" not in OPTIMIZERS[self.name]:
            raise ValueError(f"optim.no_decay_on_norms_and_biases: {self.name} has no weight decay.")

    def options(self) -> dict[str, Any]:
        """Return the given options of the optimizer itself, with pairs as tuples, as torch expects them."""
        given = _given(self, leave_out={"name", "lr", "no_decay_on_norms_and_biases", "sched", "extra"})
        given |= self.extra or {}
        return {key: tuple(value) if isinstance(value, list) else value for key, value in given.items()}

    def as_nemo_writes_it(self) -> dict[str, Any]:
        """Return only the keys that NeMo's optimizer and schedule accept: NeMo passes on every key, including nulls."""
        section = {
            "name": self.name,
            "lr": self.lr,
            **_given(self, leave_out={"name", "lr", "sched", "fused", "extra"}),
        }
        del section["no_decay_on_norms_and_biases"]
        if self.sched is not None:
            section["sched"] = _given(self.sched, leave_out={"last_epoch", "extra"})
        return section


def _given(config: Any, leave_out: Collection[str]) -> dict[str, Any]:
    values = {f.name: getattr(config, f.name) for f in dataclasses.fields(config) if f.name not in leave_out}
    return {key: value for key, value in values.items() if value is not None}


def _only_options_of(where: str, name: str, given: Collection[str], table: Mapping[str, Collection[str]]) -> None:
    """Refuse an option that would be ignored: the user expects it to have an effect."""
    for key in given:
        if key not in table[name]:
            takers = ", ".join(other for other, options in table.items() if key in options)
            if not takers:
                raise ValueError(f"{where}.{key}: {name} does not take it. Only registered names take extra arguments.")
            raise ValueError(
                f"{where}.{key}: {name} does not take it ({takers} would). Remove it with '~model.{where}.{key}'."
            )
