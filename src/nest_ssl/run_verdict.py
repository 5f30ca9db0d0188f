"""What a run's metrics say: `metrics.csv` as series over steps, and one verdict for terminal and report. R rows."""

from __future__ import annotations

import csv
import io
import math
from dataclasses import dataclass
from enum import StrEnum
from functools import cached_property
from pathlib import Path
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]

FLOAT32_MAX = float(np.finfo(np.float32).max)
"""No metric is larger: a larger value is damage, and counts as infinite."""
END_OF_TIME_S = 253_402_300_799
"""The last second of the year 9999."""
LONG_GAP = 5
"""A step that took this many times the usual time had a pause in it: the run was interrupted and resumed."""
NUM_LAST = 10
"""Training rows whose mean stands for the end of training: a single batch says little."""
SURE = 2
"""Standard errors that a difference must have to count as one."""
SETBACK = 0.05
"""Share of the gain over uniform guessing that the validation loss must lose again to count as a setback."""


@dataclass(frozen=True)
class Series:
    """The values of one column in order of steps, including those logged as NaN or infinity."""

    steps_R: Floats
    values_R: Floats

    def __len__(self) -> int:
        return len(self.values_R)

    @cached_property
    def is_finite(self) -> NDArray[np.bool_]:
        return np.isfinite(self.values_R)

    @property
    def finite(self) -> Series:
        return Series(self.steps_R[self.is_finite], self.values_R[self.is_finite])

    @property
    def num_bad(self) -> int:
        """Values that are NaN or infinite."""
        return int(np.count_nonzero(~self.is_finite))

    @property
    def first_bad_step(self) -> int:
        return int(self.steps_R[~self.is_finite][0])

    @property
    def last(self) -> float | None:
        return float(self.values_R[-1]) if len(self) else None

    def mean_of_last(self, count: int) -> float | None:
        values = self.finite.values_R[-count:]
        return float(values.mean()) if len(values) else None

    def best(self, *, lowest: bool) -> tuple[int, float] | None:
        """Step and value of the lowest or highest."""
        finite = self.finite
        if not len(finite):
            return None
        at = int(finite.values_R.argmin() if lowest else finite.values_R.argmax())
        return int(finite.steps_R[at]), float(finite.values_R[at])


@dataclass(frozen=True)
class RunMetrics:
    """All rows of a run, in order of steps."""

    columns: dict[str, Floats]
    """By name; NaN where a row has no value."""
    filled: dict[str, NDArray[np.bool_]]
    """Which rows have a value, even if it is only the text `nan`."""
    notes: list[str]
    """What could not be read."""

    def series(self, name: str) -> Series:
        """The column `name`; empty if nothing was logged under it."""
        if name not in self.columns:
            return Series(np.empty(0), np.empty(0))
        filled_R = self.filled[name]
        return Series(self.columns["step"][filled_R], self.columns[name][filled_R])

    @property
    def num_rows(self) -> int:
        return len(self.columns["step"]) if self.columns else 0

    @property
    def num_steps(self) -> int:
        """Steps up to the last row: they are numbered from 0."""
        return int(self.columns["step"][-1]) + 1 if self.num_rows else 0

    @property
    def times(self) -> tuple[float, float] | None:
        """When the first and the last row were logged, in seconds since 1970."""
        finite = self.series("time").finite.values_R
        finite = finite[(finite >= 0) & (finite <= END_OF_TIME_S)]
        return (float(finite.min()), float(finite.max())) if len(finite) else None

    def audio_s(self) -> float | None:
        """Seconds of audio that one rank has processed: the average per step times the number of steps.

        The average comes from speed × time over consecutive rows with no validation or pause between them. None
        without such rows.
        """
        if not self.num_rows or "audio_s_per_s" not in self.columns or "time" not in self.columns:
            return None
        step, at_s, speed = (self.columns[name] for name in ("step", "time", "audio_s_per_s"))
        num_steps, took_s = np.diff(step), np.diff(at_s)
        usable = np.isfinite(speed[1:]) & np.isfinite(speed[:-1]) & (num_steps > 0) & (took_s > 0)
        if not usable.any():
            return None
        usable &= took_s <= LONG_GAP * np.median(took_s[usable] / num_steps[usable]) * num_steps
        return float((speed[1:] * took_s)[usable].sum() / num_steps[usable].sum()) * self.num_steps


def read_metrics(path: Path) -> RunMetrics:
    """Read a `metrics.csv`. Damaged rows never raise: they are left out and noted."""
    notes: list[str] = []
    if not path.is_file():
        return RunMetrics({}, {}, [f"{path.name}: no such file, so nothing has been logged yet."])
    lines = io.StringIO(path.read_bytes().decode("utf-8-sig", errors="replace"), newline="").readlines()
    if lines and not lines[-1].endswith(("\n", "\r")):
        if len(lines) > 1:
            notes.append(f"{path.name}: the last line is cut off and was left out.")
        lines.pop()
    csv.field_size_limit(2**31 - 1)  # one damaged field would end the reading of all
    try:
        names, *rows = csv.reader(lines) if lines else [[]]
    except csv.Error as error:
        raise ValueError(f"{path}: not a readable csv file: {error}.") from error
    if not names:
        return RunMetrics({}, {}, [*notes, f"{path.name}: the file is empty so far."])
    if "step" not in names:
        raise ValueError(f"{path}: there is no column 'step', so these are not the metrics of a run.")
    columns, filled, num_unreadable = {}, {}, 0
    for place, name in enumerate(names):
        cells = [row[place] if place < len(row) else "" for row in rows]
        columns[name], filled[name], bad = _numbers(cells)
        num_unreadable += bad
    has_step_R = np.isfinite(columns["step"])
    num_unreadable += int(np.count_nonzero(~has_step_R & filled["step"]))
    if num_unreadable:
        notes.append(f"{path.name}: {num_unreadable:,} values are not numbers and were left out.")
    if not has_step_R.any():
        notes.append(f"{path.name}: no step has been logged yet.")
    order_R = np.flatnonzero(has_step_R)[np.argsort(columns["step"][has_step_R], kind="stable")]
    return RunMetrics(
        {name: values_R[order_R] for name, values_R in columns.items()},
        {name: filled_R[order_R] for name, filled_R in filled.items()},
        notes,
    )


def _numbers(cells: list[str]) -> tuple[Floats, NDArray[np.bool_], int]:
    """Values, which cells have one, and how many cells have something that is not a number."""
    values_R = np.full(len(cells), np.nan)
    filled_R = np.zeros(len(cells), bool)
    num_unreadable = 0
    for row, cell in enumerate(cells):
        if cell:
            try:
                values_R[row] = float(cell if len(cell) < 1000 else "damaged")  # not infinity
                filled_R[row] = True
            except ValueError:
                num_unreadable += 1
    values_R[np.abs(values_R) > FLOAT32_MAX] = np.inf
    return values_R, filled_R, num_unreadable


# --- the verdict


class Outcome(StrEnum):
    """How a run is doing; the report's style sheet has a colour for each."""

    LEARNED = "learned"
    UNDECIDED = "undecided"
    FAILED = "failed"


@dataclass(frozen=True)
class Verdict:
    outcome: Outcome
    headline: str
    sentences: list[str]


class Evaluated(Protocol):
    """The newest checkpoint's predictions for some utterances, as the report counts them."""

    @property
    def num_masked(self) -> int: ...
    @property
    def num_utterances(self) -> int: ...
    @property
    def num_passes(self) -> int:
        """Times that the utterances were seen, with other masks each time."""
        ...

    @property
    def accuracy(self) -> float: ...
    @property
    def accuracy_error(self) -> float:
        """Standard error of the accuracy."""
        ...

    @property
    def top(self) -> int:
        """How many of the most probable codes count for `top_accuracy`."""
        ...

    @property
    def top_accuracy(self) -> float: ...
    @property
    def most_frequent(self) -> float:
        """Accuracy of always predicting the most frequent code."""
        ...


@dataclass(frozen=True)
class _Comparison:
    """Accuracy on masked tokens, compared with always predicting the most frequent code."""

    accuracy: float
    most_frequent: float
    error: float
    """Standard error of the accuracy."""
    sentence: str

    @property
    def is_better(self) -> bool:
        return self.accuracy > self.most_frequent + SURE * self.error


def judge(
    metrics: RunMetrics, num_classes: int | None, evaluated: Evaluated | None = None, audio: str = "validation"
) -> Verdict:
    """How the run is doing. `evaluated`: the newest checkpoint on `audio` audio, if it could be evaluated."""
    trained = metrics.series("train_loss")
    if trained.num_bad and not trained.is_finite[-1]:
        where = f"at {trained.num_bad:,} of {len(trained):,} logged steps, first at step {trained.first_bad_step:,}"
        advice = "A lower learning rate (model.optim.lr) or trainer.gradient_clip_val=1.0 may keep it finite."
        return Verdict(Outcome.FAILED, "The loss is not a number", [f"It is NaN or infinite {where}.", advice])
    sentences, loss = _loss(metrics, num_classes)
    if trained.num_bad:
        sentences.append(f"At {trained.num_bad:,} of {len(trained):,} logged steps the loss was not a number.")
    if num_classes is not None and (lost := setback(metrics, num_classes)) is not None:
        sentences.append(lost)
    compared = _evaluated(evaluated, audio) if evaluated and evaluated.num_masked else _logged(metrics)
    sentences += [compared.sentence] if compared else []
    if loss is None and compared is None:
        longer = "Next: train longer, or lower trainer.log_every_n_steps."
        return Verdict(Outcome.UNDECIDED, "Nothing to judge yet", ["No loss has been logged.", longer])
    if loss is not None and num_classes is not None and loss >= math.log(num_classes):
        sentences.append("Next: train longer (trainer.max_steps); if it stays so, try another model.optim.lr.")
        return Verdict(Outcome.FAILED, "No better than uniform guessing so far", sentences)
    if compared is None:
        sentences.append("Next: train longer, and give a model.validation_ds to compare with.")
        return Verdict(Outcome.UNDECIDED, "The loss is lower than that of uniform guessing", sentences)
    if compared.is_better:
        sentences.append("Next: 'nest-ssl probe' tells what its features are good for; 'nest-ssl extract' writes them.")
        return Verdict(Outcome.LEARNED, "The model has learned to predict masked tokens", sentences)
    surely = "clearly " if compared.accuracy > compared.most_frequent else ""
    many_codes = num_classes is not None and num_classes > 1024
    fewer = ", or with few hours of audio use fewer codes (model.num_classes=256)" if many_codes else ""
    sentences.append(f"Next: train longer (trainer.max_steps){fewer}.")
    return Verdict(Outcome.UNDECIDED, f"The model does not {surely}beat the most frequent code yet", sentences)


def summary_lines(metrics: RunMetrics, verdict: Verdict) -> list[str]:
    """The verdict for a terminal, with the same figures as on the report's page; empty if nothing was logged."""
    if not metrics.num_rows:
        return []
    return [f"after {metrics.num_steps:,} steps: {verdict.headline}.", *verdict.sentences]


def _loss(metrics: RunMetrics, num_classes: int | None) -> tuple[list[str], float | None]:
    """The final loss, on validation data if there is any, compared with uniform guessing."""
    validated, trained = metrics.series("val_loss").finite, metrics.series("train_loss").finite
    if len(validated):
        loss = float(validated.values_R[-1])
        sentence = f"The validation loss is {loss:.3f} at step {int(validated.steps_R[-1]):,}"
    elif len(trained):
        loss = float(trained.values_R[-NUM_LAST:].mean())
        count = min(NUM_LAST, len(trained))
        sentence = f"The training loss is {loss:.3f} (mean of the last {count} logged steps; there was no validation)"
    else:
        return [], None
    if num_classes is None:
        return [f"{sentence}."], loss
    chance = math.log(num_classes)
    return [f"{sentence}; uniform guessing among {num_classes:,} codes gives ln {num_classes:,} = {chance:.3f}."], loss


def setback(metrics: RunMetrics, num_classes: int) -> str | None:
    """What to do about a validation loss that was clearly lower before; None if it was not."""
    validated, trained = metrics.series("val_loss"), metrics.series("train_loss").finite
    best, last = validated.best(lowest=True), validated.last
    if best is None or last is None or not last - best[1] > SETBACK * (math.log(num_classes) - best[1]) > 0:
        return None
    sentence = f"The validation loss was {best[1]:.3f} at step {best[0]:,} and is {last:.3f} now"
    then, now = trained.values_R[trained.steps_R <= best[0]][-NUM_LAST:], trained.values_R[-NUM_LAST:]
    if min(len(then), len(now)) < 2:
        return f"{sentence}."
    change, error = now.mean() - then.mean(), math.hypot(*(x.std(ddof=1) / math.sqrt(len(x)) for x in (then, now)))
    if change < -SURE * error:
        return f"{sentence}, while the training loss fell: the model is overfitting. More audio helps."
    return f"{sentence}, and the training loss did not fall either: try a lower learning rate (model.optim.lr)."


def _evaluated(evaluated: Evaluated, audio: str) -> _Comparison:
    """Both accuracies over the same tokens."""
    e = evaluated
    passes = f" ({e.num_passes} draws of masks)" if e.num_passes > 1 else ""
    sentence = (
        f"On {e.num_masked:,} masked tokens in {e.num_utterances:,} {audio} utterances{passes}, the newest checkpoint "
        f"predicts {e.accuracy:.1%} correctly (± {e.accuracy_error:.1%}); always predicting their most frequent code "
        f"gives {e.most_frequent:.1%}. The true code is among the {e.top} most probable for {e.top_accuracy:.1%}."
    )
    return _Comparison(e.accuracy, e.most_frequent, e.accuracy_error, sentence)


def _logged(metrics: RunMetrics) -> _Comparison | None:
    """Without a checkpoint: the logged accuracies, on validation data if its most frequent code was logged too."""
    validated, to_beat = metrics.series("val_accuracy").finite, metrics.series("val_most_frequent_token").finite
    if len(validated) and len(to_beat):
        accuracy, most_frequent, where = float(validated.values_R[-1]), float(to_beat.values_R[-1]), "validation"
    else:
        trained = metrics.series("accuracy").mean_of_last(NUM_LAST)
        share = metrics.series("most_frequent_token").mean_of_last(NUM_LAST)
        if trained is None or share is None:
            return None
        accuracy, most_frequent, where = trained, share, "the last training batches"
    sentence = (
        f"{accuracy:.1%} of the masked tokens in {where} are predicted correctly; always predicting the most frequent "
        f"code gives {most_frequent:.1%}."
    )
    return _Comparison(accuracy, most_frequent, 0.0, sentence)
