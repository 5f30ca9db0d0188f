"""What a run's numbers say, in words."""

from __future__ import annotations

import math
from dataclasses import dataclass
from enum import StrEnum

from nest_ssl.report.examples import TOP, Predictions
from nest_ssl.report.metrics import RunMetrics

NUM_LAST = 10
"""Rows of training whose mean stands for its end: one batch alone says little."""
SURE = 2
"""Standard errors that a difference must have to be called one."""

SETBACK = 0.05
"""Share of what was gained over a blind guess that a validation loss must lose again to be called a setback."""


class Outcome(StrEnum):
    """How a run stands; the page's style has a colour for each."""

    LEARNT = "learnt"
    UNDECIDED = "undecided"
    FAILED = "failed"


@dataclass(frozen=True)
class Verdict:
    outcome: Outcome
    headline: str
    sentences: list[str]


@dataclass(frozen=True)
class _Comparison:
    """Masked tokens predicted right, against always naming the most frequent code."""

    accuracy: float
    most_frequent: float
    error: float
    """Standard error of the accuracy."""
    sentences: list[str]

    @property
    def is_better(self) -> bool:
        return self.accuracy > self.most_frequent + SURE * self.error


def judge(
    metrics: RunMetrics, num_classes: int | None, predictions: Predictions | None, audio: str = "validation"
) -> Verdict:
    """`predictions` are those of the newest checkpoint on `audio` audio, if it could be asked."""
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
    compared = _asked(predictions, audio) if predictions and predictions.num_masked else _logged(metrics)
    sentences += compared.sentences if compared else []
    if loss is None and compared is None:
        return Verdict(Outcome.UNDECIDED, "Nothing to judge yet", ["No loss was logged."])
    if loss is not None and num_classes is not None and loss >= math.log(num_classes):
        return Verdict(Outcome.FAILED, "No better than a blind guess so far", sentences)
    if compared is None:
        return Verdict(Outcome.UNDECIDED, "The loss is below that of a blind guess", sentences)
    if compared.is_better:
        return Verdict(Outcome.LEARNT, "It has learnt to predict masked tokens", sentences)
    surely = "clearly " if compared.accuracy > compared.most_frequent else ""
    return Verdict(Outcome.UNDECIDED, f"It does not {surely}beat the most frequent code yet", sentences)


def _loss(metrics: RunMetrics, num_classes: int | None) -> tuple[list[str], float | None]:
    """The final loss, on validation if there is one, and what it is to be compared with."""
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
    blind = math.log(num_classes)
    return [f"{sentence}; guessing blindly among {num_classes:,} codes costs ln {num_classes:,} = {blind:.3f}."], loss


def setback(metrics: RunMetrics, num_classes: int) -> str | None:
    """What to do about a validation loss that was clearly lower before; None when it was not."""
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
        return f"{sentence}, while the training loss fell: it learns its training audio by heart. More audio helps."
    return f"{sentence}, and the training loss did not fall either: try a lower learning rate (model.optim.lr)."


def _asked(predictions: Predictions, audio: str) -> _Comparison:
    """The same tokens for both sides."""
    p = predictions
    passes = f" ({p.num_passes} draws of masks)" if p.num_passes > 1 else ""
    sentence = (
        f"Of {p.num_masked:,} masked tokens in {p.num_utterances:,} {audio} utterances{passes}, the newest checkpoint "
        f"predicts {p.accuracy:.1%} right (± {p.accuracy_error:.1%}); always naming their most frequent code gets "
        f"{p.most_frequent:.1%}. The true code is among the {TOP} most probable ones for {p.top_accuracy:.1%}."
    )
    return _Comparison(p.accuracy, p.most_frequent, p.accuracy_error, [sentence])


def _logged(metrics: RunMetrics) -> _Comparison | None:
    """Without a checkpoint: what was logged, of validation if its most frequent code was logged too."""
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
        f"{accuracy:.1%} of the masked tokens in {where} are predicted right; always naming the most frequent code "
        f"gets {most_frequent:.1%}."
    )
    return _Comparison(accuracy, most_frequent, 0.0, [sentence])
