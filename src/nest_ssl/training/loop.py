"""The training loop. Read this after model.py: it is the recipe, from the first batch to the last checkpoint.

    for each epoch
        for each batch
            step                  step.py: loss, backward, exchange, guard, clip, optimizer, EMA
            log                   every n steps
            save                  before validating, so that nothing is lost in a validation
            validate              when due; then keep the best, and maybe stop early
            stop?                 max_steps, max_epochs, time, early stopping, or a signal
        log the epoch's means

Every rank runs this same loop and takes every decision from the same numbers: the plan's batch counts, the step, the
reduced metrics, rank 0's clock.
"""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from enum import IntFlag
from typing import Any

import numpy as np
import torch
from torch import Tensor

from nest_ssl.config import ExperimentConfig, TrainerConfig
from nest_ssl.config.checks import duration_s
from nest_ssl.data import AudioNoiseBatch, PlannedLoader, random_batch
from nest_ssl.data.randomness import Stream, Use, generator_for, seed_everything
from nest_ssl.training.loggers import Loggers, Progress
from nest_ssl.training.metrics import Throughput
from nest_ssl.training.parallel import FirstRanksClock, World, batch_statistics
from nest_ssl.training.saving import Saver
from nest_ssl.training.state import Trained, TrainState
from nest_ssl.training.step import LookBack, TrainStep
from nest_ssl.training.stopping import OF_TRAINING, EarlyStopping, MaskRate, TimeLimits
from nest_ssl.training.validation import LeftEarlyError, Validation
from nest_ssl.training.watching import Stopped, Watch
from nest_ssl.watchdog.rank import Stage

log = logging.getLogger(__name__)

DEFAULT_MAX_EPOCHS = 1000
"""Where nothing limits a run; Lightning's number."""


class Due(IntFlag):
    """What rank 0's clock asks for."""

    NOTHING = 0
    STOP = 1
    SAVE = 2
    VALIDATE = 4


@dataclass
class Limits:
    """How long training lasts, and when it validates, in batches and steps."""

    config: TrainerConfig
    num_batches: int | None
    """Batches of an epoch; None: unknown before its end."""
    validates: bool

    max_epochs: int | None = field(init=False)
    max_steps: int | None = field(init=False)
    validate_every: int | None = field(init=False)
    """Batches between validations; None: at the end of an epoch."""
    validate_every_s: float | None = field(init=False)

    def __post_init__(self) -> None:
        config = self.config
        self.max_steps = config.max_steps if config.max_steps >= 0 else None
        self.max_epochs = config.max_epochs if config.max_epochs != -1 else None
        if config.max_epochs is None and self.max_steps is None and config.max_time is None:
            self.max_epochs = DEFAULT_MAX_EPOCHS
        if config.fast_dev_run:
            self.max_epochs, self.max_steps = 1, int(config.fast_dev_run)
        self.validate_every, self.validate_every_s = self._interval()

    def _interval(self) -> tuple[int | None, float | None]:
        interval, num_batches = self.config.val_check_interval, self.num_batches
        if self.config.fast_dev_run or not self.validates or interval is None:
            return None, None
        if isinstance(interval, (str, dict)):
            return None, duration_s("trainer.val_check_interval", interval)
        if isinstance(interval, int):
            if num_batches is not None and interval > num_batches and self.config.check_val_every_n_epoch is not None:
                raise ValueError(
                    f"trainer.val_check_interval={interval}: an epoch has only {num_batches} batches. Lower it, or set "
                    f"trainer.check_val_every_n_epoch=null to count batches across epochs."
                )
            return interval, None
        if interval == 1.0:
            return None, None
        if num_batches is None:
            raise ValueError(
                f"trainer.val_check_interval={interval}: the length of an epoch is unknown, so it has no share. Give a "
                f"number of batches."
            )
        return max(1, int(interval * num_batches)), None

    def total_steps(self, accumulate: int) -> int | None:
        """Steps of the whole run, for the schedule and the progress bar; None if unknown."""
        if self.num_batches is None or self.max_epochs is None:
            return self.max_steps
        steps = math.ceil(self.num_batches / accumulate) * self.max_epochs
        return steps if self.max_steps is None else min(steps, self.max_steps)


def num_batches(loader: PlannedLoader, limit: int | float | None, fast_dev_run: int | bool) -> int | None:
    """Batches of an epoch under `trainer.limit_train_batches`, at least one; None: unknown."""
    if fast_dev_run:
        limit = int(fast_dev_run)
    whole = loader.num_batches
    if whole is None:
        if isinstance(limit, float) and limit < 1:
            raise ValueError(
                "trainer.limit_train_batches: a share of data whose length is unknown. Give a number of batches."
            )
        return limit if isinstance(limit, int) and not isinstance(limit, bool) else None
    if limit is None:
        return whole
    return min(whole, limit) if isinstance(limit, int) else max(1, int(whole * limit))


@dataclass
class Loop:
    """Everything that takes part in training, and the loop over it."""

    config: TrainerConfig
    exp: ExperimentConfig
    seed: int
    world: World
    watch: Watch
    state: TrainState
    trained: Trained
    step: TrainStep
    loader: PlannedLoader
    validation: Validation | None
    limits: Limits
    saver: Saver | None
    loggers: Loggers
    progress: Progress
    early_stopping: EarlyStopping | None
    time_limits: TimeLimits
    resumed: bool

    begin_writing: Callable[[], set[str]] = set
    """Called once, when a batch is there and nothing can be refused any more: the run folder may change from now on.
    Returns the metrics of the last step before a resume that are in metrics.csv already."""
    stop_reason: str | None = None

    def __post_init__(self) -> None:
        self.throughput = Throughput(self.trained.model.cfg.sample_rate)
        self.clock = FirstRanksClock(self.world)
        self.mask_rate = MaskRate()
        self.look_back = LookBack(self.trained.model, self.step.results, self.world.rank)
        self.step.means = self.state.means
        self.log_every = self.config.log_every_n_steps or 50
        self._validated_at_s = time.monotonic()
        self._first_step = self.state.step
        self._logged_before: set[str] | None = None
        self._begins_step = True
        """The next batch is the first of a step."""
        self._owes_checkpoint = False
        """A validation came in the middle of a step, whose gradients no checkpoint keeps."""
        self._last: dict[str, Tensor] = {}
        """Metrics of the latest batch, on the device."""
        monitors = [self.exp.checkpoint_callback_params.monitor]
        if self.early_stopping is not None:
            monitors.append(self.early_stopping.config.monitor)
        self._monitors_training = any(name in OF_TRAINING for name in monitors)

    # ---- the loop ----

    def run(self) -> None:
        """Train until the run is done."""
        self.trained.model.train()
        self._warm_up()
        if self.validation is not None and not self.resumed:
            self._sanity_check(self.validation)
        self._restore_parts()
        self.time_limits.start()
        self.watch.training_begins(self.state.step)
        if self.state.validation_is_due and self.validation is not None:
            self._validate(self.validation)  # it was due when the checkpoint was written
        if self.state.epoch_is_over:
            self._end_epoch()
        while not self.is_done():
            self._run_epoch()
        self._look_back()
        self.mask_rate.end(self.state.step)
        self.watch.training_has_ended()
        if self.stop_reason is not None and self.world.is_first:
            log.info("stopped after step %d: %s", self.state.step, self.stop_reason)
        self.progress.end(self.state.step)

    def _warm_up(self) -> None:
        """Where steps are CUDA graphs, capture the largest one first."""
        shape = max(self.loader.shapes(), key=lambda one: one.batch_size * one.num_samples, default=None)
        if shape is None or not self.step.engine.uses_graphs:
            return
        batch = random_batch(shape.batch_size, shape.num_samples)
        for _ in range(2):
            self.step.warm_up(batch, self._context(0))

    def _run_epoch(self) -> None:
        """Train to the end of the epoch, or of the run."""
        for number, batch, is_last in self._batches():
            self._train_on(batch, number, is_last)
            if self.is_done():
                break
        if self.state.epoch_is_over:
            self._end_epoch()
        else:
            self._log_epoch()

    def _train_on(self, batch: AudioNoiseBatch, number: int, is_last: bool) -> None:
        """One batch, and whatever is due after it."""
        state, accumulate = self.state, self.step.accumulate
        self._may_write()
        self.watch.batch_arrives(batch)
        self.throughput.batch_arrives(batch)
        files, size = batch.audio_filepaths, len(batch.sample_id or ()) or 1
        batch = self.step.to_device(batch)
        begins, updates = self._begins_step, (number + 1) % accumulate == 0 or is_last
        self._begins_step = updates
        seed_everything(self.seed, Use.TRAIN, state.epoch, number, self.world.rank)
        rate = self.step.optimizer.param_groups[0]["lr"]
        state.means.start(state.epoch)
        self.step(batch, begins=begins, updates=updates, step=state.step, context=self._context(number))

        self.look_back.note(state.step, files)
        state.batch, state.batches_seen, state.epoch_is_over = number + 1, state.batches_seen + 1, is_last
        state.step += updates
        self._note_metrics(float(rate), size, is_logged=updates and state.step % self.log_every == 0)
        self.watch.step_is_done(state.step)
        self.throughput.batch_is_done()
        self.progress.step_is_done(state.step)

        due = self._due_by_clock() if updates else Due.NOTHING
        stops = self._should_stop(due)
        state.validation_is_due = self.validation is not None and self._validation_is_due(is_last, stops, due)
        if updates:
            self._save_before_going_on(due, is_last, stops)
        if state.validation_is_due and self.validation is not None:
            self._validate(self.validation)
        self.watch.enter(Stage.DATA)

    def _batches(self) -> Iterator[tuple[int, AudioNoiseBatch, bool]]:
        """The batches of the epoch from the current place on: number, batch, and whether it is the last."""
        state, end = self.state, self.limits.num_batches
        self.watch.epoch_begins()
        self.loader.start_at(state.epoch, state.batch)
        numbered = iter(enumerate(self.loader, start=state.batch))
        if end is not None:
            for number, batch in numbered:
                yield number, batch, number + 1 == end
                if number + 1 == end:
                    return
            log.warning("model.train_ds: epoch %d ended at batch %d of %d", state.epoch, state.batch, end)
            state.epoch_is_over = True
            return
        waiting = next(numbered, None)  # where the end is unknown, one batch is read ahead
        if waiting is None:
            raise ValueError(
                f"model.train_ds: there is no batch in epoch {state.epoch}. Are all utterances outside min_duration "
                f"and max_duration, or fewer than a batch (drop_last)?"
            )
        while waiting is not None:
            following = next(numbered, None)
            yield (*waiting, following is None)
            waiting = following

    def _context(self, number: int) -> tuple[int, int] | None:
        """What the attention sees in this batch, the same on all ranks; None where there is one context."""
        encoder = self.trained.model.encoder
        if len(encoder.contexts) == 1:
            return None
        draw = generator_for(self.seed, Stream.CONTEXT, self.state.epoch, number)
        chosen: tuple[int, int] = encoder.contexts[int(draw.choice(len(encoder.contexts), p=encoder.context_probs))]
        return chosen

    # ---- logging ----

    def _note_metrics(self, rate: float, size: int, *, is_logged: bool) -> None:
        """Keep what the epoch's means need; read and log the metrics of every n-th step."""
        rate_now = torch.tensor(rate)  # on the host: nothing to copy
        self.state.means.add("learning_rate_epoch", rate_now, size)
        if not (is_logged or self._monitors_training):
            return
        results = self.step.results
        self._last = {"train_loss": results.loss.clone(), **results.tokens.metrics()}
        if not is_logged:
            return
        metrics = {**_read(self._last), "learning_rate": float(rate_now)}
        self.mask_rate.look(metrics["mask_rate"], self.state.step)
        speed = {name: float(np.float32(value)) for name, value in self.throughput.report().items()}
        if not self.exp.log_step_timing:
            del speed["train_step_timing"]
        self._write({**metrics, **speed}, self.state.step - 1)
        self._look_back()

    def _log_epoch(self) -> None:
        means = _read(self.state.means.means())
        if means:
            self._write(means, self._row_step())

    def _row_step(self) -> int:
        """The number of the step that has just been taken, or in the middle of which we are: steps count from 0."""
        return self.state.step - 1 if self._begins_step else self.state.step

    def _write(self, metrics: dict[str, float], step: int) -> None:
        """Log `metrics`, unless the run did so before it was killed: a validation is repeated after a resume."""
        if metrics.keys() <= self._may_write() and step == self._first_step - 1:
            self.loggers.latest |= metrics
        else:
            self.loggers.write(metrics, step, self.state.epoch)

    def _may_write(self) -> set[str]:
        if self._logged_before is None:
            self._logged_before = self.begin_writing()
        return self._logged_before

    def _look_back(self) -> None:
        self.look_back.look(self.state.step)

    # ---- what is due ----

    def _due_by_clock(self) -> Due:
        due = Due.NOTHING
        if self.time_limits.reason() is not None:
            due |= Due.STOP
        if self.saver is not None and self.saver.is_due_by_clock():
            due |= Due.SAVE
        every_s = self.limits.validate_every_s
        if every_s is not None and time.monotonic() - self._validated_at_s >= every_s:
            due |= Due.VALIDATE
        return Due(self.clock.answer(self.state.step, int(due)))

    def _should_stop(self, due: Due) -> bool:
        """Whether training ends after this step before its steps and epochs are done."""
        if due & Due.STOP and self.stop_reason is None:
            self.stop_reason = self.time_limits.reason() or "rank 0's time is over"
        return self.stop_reason is not None and self._may_stop_early()

    def _may_stop_early(self) -> bool:
        """`min_steps` and `min_epochs` are reached."""
        epochs_done = self.state.epoch + self.state.epoch_is_over
        return self.state.step >= (self.config.min_steps or 0) and epochs_done >= (self.config.min_epochs or 0)

    def is_done(self) -> bool:
        """Whether there is nothing left to train."""
        limits, state = self.limits, self.state
        if limits.max_steps is not None and state.step >= limits.max_steps:
            return True
        if limits.max_epochs is not None and state.epoch >= limits.max_epochs:
            return True
        return self.stop_reason is not None and self._may_stop_early()

    def _validation_is_due(self, is_last: bool, stops: bool, due: Due) -> bool:
        every_n_epochs, state = self.config.check_val_every_n_epoch, self.state
        if every_n_epochs is not None and (state.epoch + 1) % every_n_epochs:
            return False
        if stops or due & Due.VALIDATE:
            return True
        if self.limits.validate_every_s is not None:
            return False
        every = self.limits.validate_every
        if every is None:
            return is_last
        if is_last and self.limits.num_batches is None:
            return True
        return (state.batches_seen if every_n_epochs is None else state.batch) % every == 0

    # ---- saving and stopping ----

    def _save_before_going_on(self, due: Due, is_last: bool, stops: bool) -> None:
        """Save what must not be lost, before a validation starts; and leave, if all ranks have agreed to."""
        state = self.state
        leaves = self.watch.stop_is_due(state.step)
        if self.saver is not None and self.saver.keeps_last:
            is_end = stops or self.is_done() or (is_last and self._is_last_epoch())
            epoch_ends_unvalidated = is_last and self.validation is None
            if (
                bool(due & Due.SAVE)
                or self._owes_checkpoint
                or self.saver.is_due_by_steps(state.step)
                or state.validation_is_due
                or is_end
                or epoch_ends_unvalidated
            ):
                self._owes_checkpoint = False
                self._save_last()
        if leaves:
            self._leave()

    def _is_last_epoch(self) -> bool:
        return self.limits.max_epochs is not None and self.state.epoch + 1 >= self.limits.max_epochs

    def _save_last(self) -> None:
        if self.saver is not None:
            self._look_back()
            self._remember()
            self.saver.save_last(self.state, self.trained)

    def _remember(self) -> None:
        memory = self.state.memory
        memory.elapsed_s = self.time_limits.elapsed_s
        memory.early_stopping = None if self.early_stopping is None else self.early_stopping.state()
        memory.best = {} if self.saver is None else dict(self.saver.best)

    def _leave(self) -> None:
        """Save and leave: the job was asked to stop."""
        if self.saver is not None and self.exp.create_preemption_callback:
            self._save_last()
        raise Stopped(f"saved and stopped after step {self.state.step}")

    def _restore_parts(self) -> None:
        memory = self.state.memory
        self.time_limits.earlier_s = memory.elapsed_s
        if self.early_stopping is not None and memory.early_stopping is not None:
            self.early_stopping.resume(memory.early_stopping)
            self.stop_reason = self.early_stopping.reason()
        if self.saver is not None:
            self.saver.start(self.state)

    # ---- validation ----

    def _sanity_check(self, validation: Validation) -> None:
        most = self.config.num_sanity_val_steps
        if most and not self.config.fast_dev_run:
            validation.run(None if most == -1 else most)

    def _validate(self, validation: Validation) -> None:
        if self.saver is not None:  # a death in validation, out of memory say, must not take the checkpoint with it
            self.watch.enter(Stage.CHECKPOINT)
            self.saver.wait()
        self._look_back()
        self._share_statistics()
        average = self.trained.average
        try:
            if average is None or average.config.validate_original_weights:
                metrics = validation.run()
            else:
                with average.in_the_model():
                    self._share_statistics()  # every rank has averaged its own
                    metrics = validation.run()
        except LeftEarlyError:
            self._leave()
        self.state.validation_is_due = False
        self._validated_at_s = time.monotonic()
        self.throughput.pause()
        self._write(metrics, self._row_step())
        self.progress.validation_is_done(self.state.step, metrics)
        known = {**_read(self._last), **metrics}
        if self.early_stopping is not None and not self.early_stopping.looks_at_epoch_end:
            self._look_at_monitor(self.early_stopping, known)
        params = self.exp.checkpoint_callback_params
        if self.saver is not None:
            self._remember()
            if not self._keeps_best_at_epoch_end(params):
                self.saver.save_best(self.state, self.trained, known)
            self._owes_checkpoint = self.saver.keeps_last and not self._begins_step
            if self.saver.keeps_last and self._begins_step:
                self._save_last()

    def _keeps_best_at_epoch_end(self, params: Any) -> bool:
        return bool(params.save_on_train_epoch_end) or params.monitor == "train_loss_epoch"

    def _share_statistics(self) -> None:
        """Validate one model: every rank takes rank 0's batch statistics."""
        self.world.copy_from_first(batch_statistics(self.trained.model))

    def _look_at_monitor(self, early_stopping: EarlyStopping, metrics: dict[str, float]) -> None:
        config = early_stopping.config
        if config.monitor not in metrics:
            if config.strict:
                raise ValueError(f"early_stopping_callback_params.monitor: {config.monitor} was not computed yet.")
            return
        reason = early_stopping.look(metrics[config.monitor])
        if reason is not None:
            self.stop_reason = reason

    def _end_epoch(self) -> None:
        """The epoch is over and validated: look at what is known only now, and turn to the next."""
        state = self.state
        self._log_epoch()
        known = {**_read(self._last), **self.loggers.latest, **_read(state.means.means())}
        looks = self.early_stopping is not None and self.early_stopping.looks_at_epoch_end
        if self.early_stopping is not None and looks:
            self._look_at_monitor(self.early_stopping, known)
        keeps = self.saver is not None and self._keeps_best_at_epoch_end(self.exp.checkpoint_callback_params)
        if self.saver is not None and keeps:
            self._remember()
            self.saver.save_best(state, self.trained, known)
        state.epoch, state.batch, state.epoch_is_over = state.epoch + 1, 0, False
        if (looks or keeps) and self.saver is not None and self.saver.keeps_last:
            self._save_last()


def _read(values: dict[str, Tensor]) -> dict[str, float]:
    """The values of scalars in one copy from the device."""
    if not values:
        return {}
    device = next(iter(values.values())).device
    return dict(zip(values, torch.stack([value.float().to(device) for value in values.values()]).tolist(), strict=True))
