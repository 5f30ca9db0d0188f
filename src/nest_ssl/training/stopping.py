"""Why a run stops: early stopping, limits of time, and the names of what can be monitored."""

from __future__ import annotations

import logging
import math
import time
from dataclasses import dataclass
from typing import Annotated, TypedDict

import msgspec

from nest_ssl.config import ExperimentConfig, TrainerConfig
from nest_ssl.config.checks import duration_s, known_name
from nest_ssl.config.training import FIELD, CheckpointConfig, EarlyStoppingConfig
from nest_ssl.training.metrics import VALIDATION_METRICS

log = logging.getLogger(__name__)

OF_TRAINING = ("train_loss", "train_loss_epoch", "accuracy", "most_frequent_token", "mask_rate", "codebook_coverage")
AT_EPOCH_END = ("train_loss_epoch",)
"""Of those of training, what is known at the end of an epoch alone: after a validation that comes with it."""


def check_monitors(exp: ExperimentConfig, val_names: list[str], *, validates: bool) -> None:
    """Refuse what can never be monitored, before an epoch was spent on finding out."""
    of_sets = [f"{name}_{metric}" for name in val_names if name for metric in VALIDATION_METRICS]
    known = [*VALIDATION_METRICS, *of_sets, *OF_TRAINING]
    best, early = exp.checkpoint_callback_params, exp.early_stopping_callback_params
    ranks = exp.create_checkpoint_callback and (best.save_top_k > 0 or (best.save_top_k < 0 and best.save_best_model))
    _check_monitor("checkpoint_callback_params", best, known, ranks=ranks)
    if exp.create_early_stopping_callback:
        _check_monitor("early_stopping_callback_params", early, known, ranks=True)
        if not validates and early.monitor not in OF_TRAINING:
            raise ValueError(
                "exp_manager.early_stopping_callback_params.monitor: there is nothing to validate on. Set "
                "model.validation_ds.manifest_filepath and trainer.limit_val_batches=null, or a monitor of training "
                "such as train_loss_epoch."
            )
    for name, _ in FIELD.findall(exp.checkpoint_callback_params.filename or ""):
        known_name("exp_manager.checkpoint_callback_params.filename", name, ["epoch", "step", *known])


def _check_monitor(
    section: str, params: CheckpointConfig | EarlyStoppingConfig, known: list[str], *, ranks: bool
) -> None:
    """Refuse a name that is never logged; if its values are ranked, also a mode that prefers the worst."""
    known_name(f"exp_manager.{section}.monitor", params.monitor, known)
    for kind, right, worst in (("loss", "min", "highest"), ("accuracy", "max", "lowest")):
        if ranks and params.monitor.removesuffix("_epoch").endswith(kind) and params.mode != right:
            raise ValueError(
                f"exp_manager.{section}.mode: '{params.mode}' prefers the {worst} {params.monitor}, which is the "
                f"worst. Set mode={right}."
            )


Count = Annotated[int, msgspec.Meta(ge=0, lt=2**53)]


class StoppingState(TypedDict):
    best: float | None
    last: float | None
    wait_count: Count


class EarlyStopping:
    """Ends a run whose `monitor` has stopped improving. A resumed run has the patience it is given now."""

    def __init__(self, config: EarlyStoppingConfig, *, has_validation: bool) -> None:
        self.config = config
        at_epoch_end = config.check_on_train_epoch_end
        self.looks_at_epoch_end = config.monitor in AT_EPOCH_END or bool(
            at_epoch_end if at_epoch_end is not None else not has_validation
        )
        self.best: float | None = None
        self.last: float | None = None
        self.wait_count = 0

    def _is_better(self, value: float, than: float) -> bool:
        return value < than if self.config.mode == "min" else value > than

    def look(self, value: float) -> str | None:
        """Take the next value of the monitor; why the run should stop, or None."""
        self.last = value
        delta = self.config.min_delta if self.config.mode == "min" else -self.config.min_delta
        if self.best is None or self._is_better(value + delta, self.best):
            self.best, self.wait_count = value, 0
        elif math.isfinite(value) or not self.config.check_finite:
            self.wait_count += 1
        return self.reason()

    def reason(self) -> str | None:
        """Why the run should stop, judged by the values so far and the configuration of now."""
        config, value = self.config, self.last
        if value is not None:
            if config.check_finite and not math.isfinite(value):
                return f"{config.monitor} is {value}"
            threshold = config.stopping_threshold
            if threshold is not None and self._is_better(value, threshold):
                return f"{config.monitor} {value:.4f} has reached stopping_threshold {threshold}"
            threshold = config.divergence_threshold
            if threshold is not None and self._is_better(threshold, value):
                return f"{config.monitor} {value:.4f} is beyond divergence_threshold {threshold}"
        if self.wait_count >= max(config.patience, 1):  # 0: at the first value that is no better, as Lightning does
            return f"{config.monitor} has not improved on {self.best} for {self.wait_count} checks (patience)"
        return None

    def state(self) -> StoppingState:
        return {"best": self.best, "last": self.last, "wait_count": self.wait_count}

    def resume(self, state: StoppingState) -> None:
        self.best, self.last, self.wait_count = state["best"], state["last"], state["wait_count"]


class MaskRate:
    """Ends a run in which nothing is masked: its loss of 0 would be the best for ever, and nothing is learned."""

    MOST_STEPS, MOST_ROWS = 50, 5
    """It ends after this many steps, and logged values, without a masked token."""
    FEWEST_ROWS = 3
    """A run of fewer logged values may just have had bad luck."""

    def __init__(self) -> None:
        self._since: int | None = None
        self._rows = 0
        self._masks = False

    def look(self, rate: float, step: int) -> None:
        """Take the share of masked tokens that was logged at `step`."""
        if rate > 0 or math.isnan(rate):
            self._since, self._rows, self._masks = None, 0, True
            return
        self._since = step if self._since is None else self._since
        self._rows += 1
        if step - self._since >= self.MOST_STEPS and self._rows >= self.MOST_ROWS:
            raise self._nothing_is_learned(step)

    def end(self, step: int) -> None:
        """The run is over after `step` steps: a short one must not pass for a success either."""
        if not self._masks and self._rows >= self.FEWEST_ROWS:
            raise self._nothing_is_learned(step)

    def _nothing_is_learned(self, step: int) -> ValueError:
        return ValueError(
            f"step {step}: no token was masked since step {self._since}, so nothing is learned. Raise "
            f"model.masking.mask_prob or block_size, lower model.loss.mask_threshold, or use longer utterances."
        )


@dataclass
class TimeLimits:
    """`trainer.max_time`, over all parts of a run, and `exp_manager.max_time_per_run`, over this one."""

    max_time_s: float | None
    max_time_per_run_s: float | None
    earlier_s: float = 0.0
    """Time that earlier parts of the run have trained."""

    def __post_init__(self) -> None:
        self._started = time.monotonic()

    @classmethod
    def of(cls, trainer: TrainerConfig, exp: ExperimentConfig) -> TimeLimits:
        whole, part = trainer.max_time, exp.max_time_per_run
        return cls(
            None if whole is None else duration_s("trainer.max_time", whole),
            None if part is None else duration_s("exp_manager.max_time_per_run", part),
        )

    def start(self) -> None:
        self._started = time.monotonic()

    @property
    def elapsed_s(self) -> float:
        """Seconds of training, earlier parts included."""
        return self.earlier_s + time.monotonic() - self._started

    def reason(self) -> str | None:
        if self.max_time_s is not None and self.elapsed_s >= self.max_time_s:
            return f"trainer.max_time of {self.max_time_s:.0f} s is over"
        if self.max_time_per_run_s is not None and self.elapsed_s - self.earlier_s >= self.max_time_per_run_s:
            return f"exp_manager.max_time_per_run of {self.max_time_per_run_s:.0f} s is over"
        return None
