from __future__ import annotations

import math
from typing import Any

import pytest

from nest_ssl.config.training import CheckpointConfig, EarlyStoppingConfig, ExperimentConfig
from nest_ssl.training.stopping import EarlyStopping, MaskRate, TimeLimits, check_monitors


@pytest.mark.parametrize(
    ("filename", "unknown"), [("{0}", "'0'"), ("{val_lss:.2f}", "'val_lss'"), ("{step}-{step!r}", "'step!r'")]
)
def test_a_value_in_the_name_of_checkpoints_that_is_never_logged_is_refused(filename: str, unknown: str) -> None:
    exp = ExperimentConfig(checkpoint_callback_params=CheckpointConfig(filename=filename))
    with pytest.raises(ValueError, match=f"checkpoint_callback_params.filename: there is no {unknown}"):
        check_monitors(exp, ["dev"], validates=True)


def test_metrics_epochs_and_steps_may_be_in_the_name_of_checkpoints() -> None:
    check_monitors(ExperimentConfig(), ["dev"], validates=True)
    named = CheckpointConfig(filename="{epoch:02d}-{step}-{val_loss:.4f}-{dev_val_loss}")
    check_monitors(ExperimentConfig(checkpoint_callback_params=named), ["dev"], validates=True)


@pytest.mark.parametrize(
    ("monitor", "mode", "right"),
    [
        ("val_accuracy", "min", "max"),
        ("loss_set_val_accuracy", "min", "max"),
        ("val_loss", "max", "min"),
        ("train_loss_epoch", "max", "min"),
    ],
)
def test_a_mode_that_takes_the_worst_for_the_best_is_refused(monitor: str, mode: str, right: str) -> None:
    best = ExperimentConfig(checkpoint_callback_params=CheckpointConfig(monitor=monitor, mode=mode))
    stop = ExperimentConfig(
        create_early_stopping_callback=True,
        early_stopping_callback_params=EarlyStoppingConfig(monitor=monitor, mode=mode),
    )
    for exp, section in ((best, "checkpoint_callback_params"), (stop, "early_stopping_callback_params")):
        with pytest.raises(ValueError, match=f"{section}.mode: '{mode}' prefers the .* {monitor}.* Set mode={right}"):
            check_monitors(exp, ["loss_set"], validates=True)
    kept_all = CheckpointConfig(monitor=monitor, mode=mode, save_top_k=-1)
    check_monitors(ExperimentConfig(checkpoint_callback_params=kept_all), ["loss_set"], validates=True)
    right_one = CheckpointConfig(monitor=monitor, mode=right)
    check_monitors(ExperimentConfig(checkpoint_callback_params=right_one), ["loss_set"], validates=True)


def test_early_stopping_by_a_validation_that_never_comes_is_refused() -> None:
    exp = ExperimentConfig(create_early_stopping_callback=True)
    with pytest.raises(ValueError, match="there is nothing to validate on"):
        check_monitors(exp, ["dev"], validates=False)
    misspelt = ExperimentConfig(
        create_early_stopping_callback=True, early_stopping_callback_params=EarlyStoppingConfig(monitor="val_los")
    )
    with pytest.raises(ValueError, match="there is no 'val_los'"):
        check_monitors(misspelt, ["dev"], validates=False)
    by_training = EarlyStoppingConfig(monitor="train_loss_epoch")
    check_monitors(
        ExperimentConfig(create_early_stopping_callback=True, early_stopping_callback_params=by_training),
        ["dev"],
        validates=False,
    )


def early(**options: Any) -> EarlyStopping:
    config = EarlyStoppingConfig(**{"min_delta": 0.1, "patience": 2, **options})
    return EarlyStopping(config, has_validation=True)


def reasons(stopping: EarlyStopping, values: list[float]) -> list[bool]:
    return [stopping.look(value) is not None for value in values]


def test_a_run_stops_when_its_patience_is_over() -> None:
    assert reasons(early(), [3.0, 2.0, 1.95, 1.85, 1.8, 1.79]) == [False, False, False, False, False, True]
    assert reasons(early(mode="max"), [1.0, 2.0, 2.05, 2.0]) == [False, False, False, True]


@pytest.mark.parametrize(
    ("options", "value", "words"),
    [
        ({}, math.nan, "val_loss is nan"),
        ({"stopping_threshold": 1.0}, 0.9, "has reached stopping_threshold 1.0"),
        ({"divergence_threshold": 9.0}, 9.5, "is beyond divergence_threshold 9.0"),
        ({"mode": "max", "stopping_threshold": 1.0}, 1.1, "has reached"),
    ],
)
def test_thresholds_and_values_that_are_not_finite_stop_a_run(
    options: dict[str, Any], value: float, words: str
) -> None:
    stopping = early(**options)
    assert stopping.look(5.0 if options.get("mode") != "max" else 0.5) is None
    assert words in (stopping.look(value) or "")
    resumed = early(**options)
    resumed.resume(stopping.state())
    assert words in (resumed.reason() or "")  # it stays stopped


def test_a_resumed_run_has_the_patience_it_is_given_now() -> None:
    stopping = early()
    assert reasons(stopping, [1.0, 1.0, 1.0]) == [False, False, True]
    patient = early(patience=3)
    patient.resume(stopping.state())
    assert patient.reason() is None
    assert reasons(patient, [1.0]) == [True]


def test_what_is_known_at_the_end_of_an_epoch_is_looked_at_there() -> None:
    for options, at_epoch_end in (
        ({"monitor": "train_loss_epoch"}, True),
        ({}, False),
        ({"check_on_train_epoch_end": True}, True),
    ):
        assert early(**options).looks_at_epoch_end is at_epoch_end
    assert EarlyStopping(EarlyStoppingConfig(monitor="train_loss"), has_validation=False).looks_at_epoch_end


def test_the_whole_time_counts_earlier_parts_and_the_time_per_run_does_not() -> None:
    limits = TimeLimits(max_time_s=100.0, max_time_per_run_s=50.0)
    assert limits.reason() is None
    limits.earlier_s = 99.0
    assert limits.reason() is None
    limits.earlier_s = 100.0
    assert "trainer.max_time of 100 s is over" in (limits.reason() or "")
    assert "max_time_per_run of 0 s is over" in (TimeLimits(None, 0.0).reason() or "")


def test_a_short_run_in_which_nothing_was_masked_is_no_success() -> None:
    lucky, few, none = MaskRate(), MaskRate(), MaskRate()
    for step, rate in enumerate([0.0, 0.3, 0.0, 0.0, 0.0]):
        lucky.look(rate, step)
        none.look(0.0, step)
    few.look(0.0, 0)
    lucky.end(5)
    few.end(1)
    with pytest.raises(ValueError, match="step 5: no token was masked since step 0, so nothing is learned"):
        none.end(5)


def test_a_run_in_which_nothing_is_masked_ends() -> None:
    rate = MaskRate()
    for step in range(10, 60, 10):
        rate.look(0.0, step)
    with pytest.raises(ValueError, match="step 60: no token was masked since step 10.*model.masking.mask_prob"):
        rate.look(0.0, 60)


def test_a_masked_token_now_and_then_is_enough() -> None:
    rate = MaskRate()
    for step in range(10, 1000, 10):
        rate.look(0.001 if step % 50 == 0 else 0.0, step)


def test_a_patience_of_0_ends_the_run_at_the_first_value_that_is_no_better() -> None:
    stopping = EarlyStopping(EarlyStoppingConfig(patience=0), has_validation=True)
    assert stopping.look(2.0) is None
    assert stopping.look(1.0) is None
    assert stopping.look(1.0) is not None
