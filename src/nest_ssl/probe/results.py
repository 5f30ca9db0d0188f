"""The results of a probe: accuracies with intervals, and pictures as SVG files.

N utterances, R resamples, C classes.
"""

from __future__ import annotations

import html
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from nest_ssl.config.checks import printable
from nest_ssl.drawing.draw import line, rect, svg, text, ticks
from nest_ssl.files import replace_text

NUM_RESAMPLES = 5000
CONFIDENCE = 0.95


@dataclass(frozen=True)
class Score:
    """An accuracy, or a difference of two, with its 95 % interval (percentile bootstrap over utterances)."""

    accuracy: float
    low: float
    high: float


def score(correct_N: NDArray[np.bool_], seed: int) -> Score:
    """The accuracy of one system."""
    return _interval(correct_N.astype(np.float64), seed)


def difference(correct_N: NDArray[np.bool_], other_N: NDArray[np.bool_], seed: int) -> Score:
    """The paired difference of two systems: each resample has the same utterances for both."""
    return _interval(correct_N.astype(np.float64) - other_N, seed)


def _interval(values_N: NDArray[np.float64], seed: int) -> Score:
    rng = np.random.default_rng(seed)
    count = len(values_N)
    # In parts, so that 5,000 resamples of 100,000 utterances fit into memory.
    parts = np.array_split(np.arange(NUM_RESAMPLES), max(1, NUM_RESAMPLES * count // 10_000_000))
    means_R = np.concatenate([values_N[rng.integers(count, size=(len(part), count))].mean(axis=1) for part in parts])
    tail = (1 - CONFIDENCE) / 2
    low, high = np.quantile(means_R, (tail, 1 - tail))
    return Score(float(values_N.mean()), float(low), float(high))


def confusion(true_N: NDArray[np.int64], predicted_N: NDArray[np.int64], num_classes: int) -> NDArray[np.int64]:
    """Counts (C, C): a row for each true class, a column for each predicted class."""
    counts = np.zeros((num_classes, num_classes), np.int64)
    np.add.at(counts, (true_N, predicted_N), 1)
    return counts


# Separate files cannot use a page's style sheet; these follow the reader's light or dark scheme too.
_STYLE = """<style>
text { font: 12px system-ui, "Segoe UI", Roboto, Arial, sans-serif; fill: #5d6b7a; }
.title { font-weight: 600; fill: #1c2733; } .bar { fill: #2b6ca3; }
.axis { stroke: #8a97a5; } .grid { stroke: #e8ecf0; }
.cell { fill: #2b6ca3; stroke: #dde3e9; stroke-width: 0.5; } .light { fill: #ffffff; } .dark { fill: #1c2733; }
@media (prefers-color-scheme: dark) { text { fill: #9ba8b5; } .title, .dark { fill: #e4e9ee; }
  .bar, .cell { fill: #62a8e0; }  .grid { stroke: #28313a; } .cell { stroke: #2d3843; } .light { fill: #11161b; } }
</style>"""
_BAR, _CELL, _HEIGHT, _LEFT, _TOP = 26, 34, 180, 56, 34
_MAX_NAME = 14


def write_layer_weights(weights: Sequence[float], layers: Sequence[int], path: Path) -> None:
    """Draw a bar for each layer."""
    width = _LEFT + _BAR * len(weights) + 16
    bottom = _TOP + _HEIGHT
    top = max(max(weights), 1e-9) * 1.05
    parts = [text(4, 18, "weight of each layer", "title")]
    for tick in ticks(top, 5):
        y = bottom - tick / top * _HEIGHT
        parts += [line(_LEFT, y, width - 8, y, "grid"), text(_LEFT - 6, y + 4, f"{tick:g}", anchor="end")]
    for place, (layer, weight) in enumerate(zip(layers, weights, strict=True)):
        x, height = _LEFT + _BAR * place + 4, weight / top * _HEIGHT
        parts.append(rect(x, bottom - height, _BAR - 8, height, "bar", f"layer {layer}: {weight:.3f}"))
        parts.append(text(x + _BAR / 2 - 4, bottom + 16, str(layer), anchor="middle"))
    parts.append(line(_LEFT, bottom, width - 8, bottom))
    _write(path, max(width, 220), bottom + 28, parts, "layer weights")


def write_confusion(counts_CC: NDArray[np.int64], classes: Sequence[str], path: Path) -> None:
    """Draw a row for each true class and a column for each predicted class, in percent of the row."""
    shares_CC = counts_CC / np.maximum(counts_CC.sum(1, keepdims=True), 1)
    names = [html.escape(name if len(name) <= _MAX_NAME else f"{name[: _MAX_NAME - 1]}…") for name in classes]
    left, top = 24 + 8 * max(map(len, names)), 78
    parts = [text(4, 18, "true class (rows) and predicted class (columns), % of the row", "title")]
    for column, name in enumerate(names):
        x = left + _CELL * (column + 0.5)
        parts.append(f'<text transform="translate({x + 4:.1f} {top - 6}) rotate(-45)">{name}</text>')
    for row, name in enumerate(names):
        y = top + _CELL * row
        parts.append(text(left - 6, y + _CELL / 2 + 4, name, anchor="end"))
        for column in range(len(names)):
            share, x = float(shares_CC[row, column]), left + _CELL * column
            title = f"{name} predicted as {names[column]}: {counts_CC[row, column]}"
            cell = rect(x, y, _CELL, _CELL, "cell", title).replace("<rect ", f'<rect fill-opacity="{share:.3f}" ')
            parts.append(cell)
            if share >= 0.005:
                kind = "light" if share > 0.5 else "dark"
                parts.append(text(x + _CELL / 2, y + _CELL / 2 + 4, f"{100 * share:.0f}", kind, "middle"))
    size = _CELL * len(names)
    _write(path, max(left + size + 60, 380), top + size + 12, parts, "confusion matrix")


def _write(path: Path, width: float, height: float, parts: list[str], label: str) -> None:
    picture = svg(width, height, [_STYLE, *parts], label)
    head = f'<svg xmlns="http://www.w3.org/2000/svg" width="{width:g}" height="{height:g}" '
    replace_text(path, printable(picture.replace("<svg ", head, 1)) + "\n")
