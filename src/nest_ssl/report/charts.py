"""The charts of a run's report. R rows, K codes per book, H books."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

from nest_ssl.drawing.charts import Chart, Curve
from nest_ssl.report.examples import Ints, Predictions
from nest_ssl.report.metrics import RunMetrics


@dataclass(frozen=True)
class BookUse:
    """How evenly the targets use the codes of one book."""

    num_codes: int
    num_used: int
    most_frequent: float
    """Share of all tokens."""
    perplexity: float
    """As many codes, equally frequent, would be as hard to guess."""


def metric_charts(metrics: RunMetrics, num_classes: int | None, num_ranks: int | None) -> list[Chart]:
    """What training logged, over steps."""
    blind = [] if num_classes is None else [(f"blind guess: ln {num_classes:,}", math.log(num_classes))]
    most_frequent = metrics.series("val_most_frequent_token").finite.last
    to_beat = [] if most_frequent is None else [("validation’s most frequent code", 100 * most_frequent)]
    rank = "" if num_ranks == 1 else ", first rank"
    return [
        Chart(
            "Loss",
            "nats per masked token",
            [_curve(metrics, "train_loss", "training"), _curve(metrics, "val_loss", "validation", "dotted")],
            limits=blind,
        ),
        Chart(
            "Masked tokens predicted right",
            "%",
            [
                _curve(metrics, "accuracy", "training", factor=100),
                _curve(metrics, "val_accuracy", "validation", "dotted", factor=100),
                _curve(metrics, "most_frequent_token", "to beat: the batch’s most frequent code", "dashed", factor=100),
            ],
            limits=to_beat,
            from_zero=True,
        ),
        Chart("Learning rate", "", [_curve(metrics, "learning_rate", "at each step", smoothed=False)], from_zero=True),
        Chart(
            "Speed", f"seconds of audio per second{rank}", [_curve(metrics, "audio_s_per_s", "speed")], from_zero=True
        ),
        Chart(
            "Time and work lost",
            "%",
            [
                _curve(metrics, "data_wait_share", "waiting for data, of the time", factor=100),
                _curve(metrics, "padding_share", "padding, of the audio", "dashed", factor=100),
            ],
            from_zero=True,
        ),
        Chart("Masked tokens", "% of all", [_curve(metrics, "mask_rate", "mask rate", factor=100)], from_zero=True),
        Chart(
            "Codes used by a batch",
            "% of the codebook",
            [_curve(metrics, "codebook_coverage", "coverage by the masked tokens", factor=100)],
            from_zero=True,
        ),
        Chart("Entropy of a batch’s codes", "nats", [_curve(metrics, "codebook_entropy", "entropy of masked tokens")]),
    ]


def usage_chart(predictions: Predictions, audio: str) -> Chart:
    """Codes of the targets from the most to the least frequent; the mean over books where there are several."""
    used_KH = predictions.used_KH
    shares_KH = -np.sort(-used_KH / np.maximum(used_KH.sum(0), 1), axis=0)
    num_codes, num_books = used_KH.shape
    rank_K = np.arange(1, num_codes + 1, dtype=np.float64)
    name = f"targets of {audio} audio" + (f", mean of {num_books} books" if num_books > 1 else "")
    return Chart(
        "Use of each code",
        "% of tokens",
        [Curve(name, "solid", rank_K, 100 * shares_KH.mean(1), smoothed=False)],
        limits=[("all equal", 100 / num_codes)],
        from_zero=True,
        x_title="codes, most frequent first",
    )


def book_uses(used_KH: Ints) -> list[BookUse]:
    uses = []
    for used_K in used_KH.T:
        shares = used_K[used_K > 0] / max(used_K.sum(), 1)
        entropy = float(-(shares * np.log(shares)).sum())
        uses.append(BookUse(len(used_K), len(shares), float(shares.max(initial=0.0)), math.exp(entropy)))
    return uses


def _curve(
    metrics: RunMetrics,
    column: str,
    name: str,
    kind: str = "solid",
    *,
    factor: float = 1.0,
    smoothed: bool = True,
) -> Curve:
    series = metrics.series(column)
    return Curve(name, kind, series.steps_R, factor * series.values_R, smoothed and kind != "dotted")
