"""The pictures of the report: charts of what was logged, and one utterance with its tokens.

S tokens, T frames, M mel bands, K codes per book, H books.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from html import escape
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from nest_ssl.drawing.charts import Chart, Curve
from nest_ssl.drawing.draw import (
    GAP,
    LEFT,
    MEL_HEIGHT,
    PLOT,
    WIDTH,
    line,
    mask_lane,
    mel_lane,
    mel_range,
    rect,
    svg,
    text,
    time_axis,
)
from nest_ssl.run_verdict import RunMetrics

if TYPE_CHECKING:
    from nest_ssl.report.examples import ExampleTokens, Ints, Predictions

MAX_BOOKS = 4
TOP = 5
"""A prediction counts as near if the target is among this many of the most probable codes."""
"""Books whose tokens are drawn."""
TOKEN_HEIGHT = 32
HATCH = (
    '<defs><pattern id="hatch" width="4" height="4" patternUnits="userSpaceOnUse" patternTransform="rotate(45)">'
    '<rect class="hatch-ground" width="4" height="4"/><rect class="hatch-line" width="1.6" height="4"/>'
    "</pattern></defs>"
)
"""Readable without colours: correct is filled, among the most probable is hatched, wrong is empty."""


@dataclass(frozen=True)
class BookUse:
    """How evenly the targets use the codes of one book."""

    num_codes: int
    num_used: int
    most_frequent: float
    """Share of all tokens."""
    perplexity: float
    """The number of equally frequent codes that would be as hard to guess."""


def metric_charts(metrics: RunMetrics, num_classes: int | None, num_ranks: int | None) -> list[Chart]:
    """What was logged during training, over steps."""
    chance = [] if num_classes is None else [(f"uniform guessing: ln {num_classes:,}", math.log(num_classes))]
    most_frequent = metrics.series("val_most_frequent_token").finite.last
    to_beat = [] if most_frequent is None else [("validation’s most frequent code", 100 * most_frequent)]
    rank = "" if num_ranks == 1 else ", first rank"
    return [
        Chart(
            "Loss",
            "nats per masked token",
            [_curve(metrics, "train_loss", "training"), _curve(metrics, "val_loss", "validation", "dotted")],
            limits=chance,
        ),
        Chart(
            "Masked tokens predicted correctly",
            "%",
            [
                _curve(metrics, "accuracy", "training", factor=100),
                _curve(metrics, "val_accuracy", "validation", "dotted", factor=100),
                _curve(metrics, "most_frequent_token", "baseline: batch’s most frequent code", "dashed", factor=100),
            ],
            limits=to_beat,
            from_zero=True,
        ),
        Chart("Learning rate", "", [_curve(metrics, "learning_rate", "at each step", smoothed=False)], from_zero=True),
        Chart(
            "Speed", f"seconds of audio per second{rank}", [_curve(metrics, "audio_s_per_s", "speed")], from_zero=True
        ),
        Chart(
            "Time and compute lost",
            "%",
            [
                _curve(metrics, "data_wait_share", "waiting for data, share of time", factor=100),
                _curve(metrics, "padding_share", "padding, share of audio", "dashed", factor=100),
            ],
            from_zero=True,
        ),
        Chart("Masked tokens", "% of tokens", [_curve(metrics, "mask_rate", "mask rate", factor=100)], from_zero=True),
        Chart(
            "Codes used in a batch",
            "% of the codebook",
            [_curve(metrics, "codebook_coverage", "coverage by the masked tokens", factor=100)],
            from_zero=True,
        ),
        Chart("Entropy of a batch’s codes", "nats", [_curve(metrics, "codebook_entropy", "entropy of masked tokens")]),
    ]


def usage_chart(predictions: Predictions, audio: str) -> Chart:
    """Target codes from the most to the least frequent; the mean over books if there are several."""
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


def tokens_picture(example: ExampleTokens) -> str:
    """Features, mask and tokens on one time axis; codes are printed for the tokens that count."""
    colours = mel_range((example.clean_MT, example.noisy_MT))
    lanes = (
        (["clean mel", "source of", "targets"], example.clean_MT),
        (["noisy mel", "" if example.is_noisy else "(no noise)"], example.noisy_MT),
        (["masked mel", "encoder", "input"], example.masked_MT),
    )
    parts, y = [HATCH], 8.0
    for words, mels_MT in lanes:
        if mels_MT is not None:
            parts += mel_lane(y, list(filter(None, words)), mels_MT, colours, example.band_hz)
            y += MEL_HEIGHT + GAP
    parts += mask_lane(y, example.mask_T)
    y += 9 + GAP
    num_books = example.true_SH.shape[1]
    for book in range(min(num_books, MAX_BOOKS)):
        parts += _book(y, example, book, f" {book + 1}" if num_books > 1 else "")
        y += 2 * TOKEN_HEIGHT + GAP + 4
    parts += time_axis(len(example.mask_T) * example.frame_s, y - GAP + 4, "seconds")
    return svg(WIDTH, y + 36, parts, escape(f"Tokens of {Path(example.name).name}"))


def _book(y: float, example: ExampleTokens, book: int, number: str) -> list[str]:
    """Two rows: true codes, predicted codes."""
    width = PLOT / example.num_drawn
    parts = [
        rect(LEFT, y, PLOT, 2 * TOKEN_HEIGHT, "lane"),
        text(LEFT - 8, y + TOKEN_HEIGHT / 2 + 4, f"true{number}", "name", "end"),
        text(LEFT - 8, y + 1.5 * TOKEN_HEIGHT + 4, f"predicted{number}", "name", "end"),
    ]
    for s in example.masked_S.nonzero()[0].tolist():
        x = LEFT + s * width
        true, predicted, rank = (int(a[s, book]) for a in (example.true_SH, example.predicted_SH, example.rank_SH))
        kind = "right" if rank == 1 else "near" if rank <= TOP else "wrong"
        at_s = s * example.frames_per_token * example.frame_s
        title = f"{at_s:.2f} s: true {true}, predicted {predicted}; the true code ranks {rank:,}"
        parts.append(rect(x + 0.5, y + TOKEN_HEIGHT + 1, width - 1, TOKEN_HEIGHT - 2, kind, title))
        parts.append(_upright(x + width / 2, y + TOKEN_HEIGHT - 3, true, "code"))
        parts.append(_upright(x + width / 2, y + 2 * TOKEN_HEIGHT - 4, predicted, f"code on-{kind}"))
    parts.append(line(LEFT, y + TOKEN_HEIGHT, LEFT + PLOT, y + TOKEN_HEIGHT, "grid"))
    return parts


def _upright(x: float, y: float, number: int, kind: str) -> str:
    """A number written upwards, beginning at `y`."""
    return f'<text class="{kind}" transform="translate({x + 3:.1f} {y:.1f}) rotate(-90)">{number}</text>'
