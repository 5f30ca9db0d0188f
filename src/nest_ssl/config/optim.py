"""The `optim:` section."""

from __future__ import annotations

from dataclasses import dataclass, field

from nest_ssl.config.checks import at_least


@dataclass
class ScheduleConfig:
    """`optim.sched:`: the learning rate over the steps."""

    name: str = "NoamAnnealing"
    """NoamAnnealing, CosineAnnealing, WarmupAnnealing, InverseSquareRootAnnealing or PolynomialDecayAnnealing."""
    d_model: int | None = None
    """Width that NoamAnnealing scales by."""
    warmup_steps: int | None = None
    """Steps of the warm-up."""
    warmup_ratio: float | None = None
    """Length of the warm-up as a share of all steps, in place of `warmup_steps`."""
    min_lr: float = 0.0
    """Lowest rate after the warm-up."""
    max_steps: int | None = None
    """Length of the schedule; null: the trainer's."""
    constant_steps: int | None = None
    """Steps at the lowest rate at the end (CosineAnnealing)."""
    constant_ratio: float | None = None
    """The same as a share of all steps."""
    power: float = 1.0
    """Exponent of PolynomialDecayAnnealing."""
    cycle: bool = False
    """Start PolynomialDecayAnnealing again when it has ended."""
    last_epoch: int = -1
    """Step to start from, less one."""

    def __post_init__(self) -> None:
        if self.warmup_steps is not None and self.warmup_ratio is not None:
            raise ValueError("optim.sched: give warmup_steps or warmup_ratio, not both.")
        at_least("optim.sched.min_lr", self.min_lr, 0)


@dataclass
class OptimConfig:
    """Optimizer and schedule."""

    name: str = "adamw"
    """adamw, adam, sgd, ..."""
    lr: float = 1e-3
    """Peak rate; for NoamAnnealing a factor."""
    betas: list[float] = field(default_factory=lambda: [0.9, 0.98])
    """Decay of the moments."""
    eps: float = 1e-8
    """Term that keeps the division finite."""
    weight_decay: float = 0.0
    """Weight decay."""
    momentum: float = 0.0
    """Momentum (sgd)."""
    no_decay_on_norms_and_biases: bool = False
    """Leave norms and biases out of the weight decay."""
    sched: ScheduleConfig | None = None
    """null: a constant rate."""

    def __post_init__(self) -> None:
        at_least("optim.lr", self.lr, 0)
        if len(self.betas) != 2:
            raise ValueError(f"optim.betas: {self.betas} are not two numbers.")
