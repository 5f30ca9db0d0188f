"""Line charts as SVG. P points."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from nest_ssl.drawing.draw import line, path, runs, svg, text, ticks

Floats = NDArray[np.float64]

WIDTH, HEIGHT = 460, 230
LEFT, RIGHT, TOP, BOTTOM = 52, 12, 24, 36
PLOT_WIDTH, PLOT_HEIGHT = WIDTH - LEFT - RIGHT, HEIGHT - TOP - BOTTOM
MAX_BUCKETS = 300
"""Above this many points, the lowest and highest of each of this many buckets are drawn: no peak is lost."""
MIN_SMOOTHED = 80
"""Fewer points are drawn as they are; more are smoothed over a fortieth of them."""
MAX_DOTS = 60


@dataclass(frozen=True)
class Curve:
    """Values over steps, or over whatever the horizontal axis shows."""

    name: str
    kind: str
    """Class of the style sheet: `solid`, `dotted` (a dot at each value) or `dashed`."""
    x_P: Floats
    y_P: Floats
    """Values that are not finite leave a gap, and a cross at the bottom of the chart."""
    smoothed: bool = True
    """Draw a running mean, with the values themselves in a pale colour."""

    @property
    def window(self) -> int:
        """Values per running mean; 1: no smoothing."""
        return len(self.y_P) // 40 if self.smoothed and len(self.y_P) >= MIN_SMOOTHED else 1

    @property
    def label(self) -> str:
        return self.name if self.window == 1 else f"{self.name} (mean of {self.window:,}; pale: single values)"

    @property
    def num_bad(self) -> int:
        return int(np.count_nonzero(~np.isfinite(self.y_P)))


@dataclass(frozen=True)
class Chart:
    """Curves on common axes."""

    title: str
    unit: str
    """Unit of the values."""
    curves: list[Curve]
    limits: list[tuple[str, float]] = field(default_factory=list)
    """Named values to compare with, drawn as dashed horizontal lines."""
    from_zero: bool = False
    x_title: str = "step"

    @property
    def drawn(self) -> list[Curve]:
        """Curves that have a value to draw."""
        return [curve for curve in self.curves if curve.num_bad < len(curve.y_P)]

    @property
    def num_bad(self) -> int:
        return sum(curve.num_bad for curve in self.curves)


def chart_picture(chart: Chart) -> str | None:
    """The chart; None if there is no value to draw."""
    if not chart.drawn:
        return None
    start_x, end_x = _span(curve.x_P for curve in chart.curves)
    low, high = _value_range(chart)
    scale = _Scale(start_x, end_x, low, high)
    parts = _axes(chart, scale)
    names = []
    for name, value in chart.limits:
        y = scale.y(value)
        parts.append(line(LEFT, y, LEFT + PLOT_WIDTH, y, "limit"))
        names.append(text(LEFT + PLOT_WIDTH, y - 5 if y > TOP + 20 else y + 14, name, "limit-name", "end"))
    for curve in chart.drawn:
        x_P, y_P = thinned(curve.x_P, curve.y_P)
        if curve.window > 1:
            parts.append(path(scale.polyline(x_P, y_P), f"curve {curve.kind} raw"))
            x_P, y_P = thinned(curve.x_P, running_mean(curve.y_P, curve.window))
        parts.append(path(scale.polyline(x_P, y_P), f"curve {curve.kind}"))
        if curve.kind == "dotted" and len(x_P) <= MAX_DOTS:
            parts += [f'<circle class="dot" cx="{x}" cy="{y}" r="3"/>' for x, y in scale.points(x_P, y_P)]
    bad_x = np.concatenate([curve.x_P[~np.isfinite(curve.y_P)] for curve in chart.curves])
    parts += [path(f"M{x} {TOP + PLOT_HEIGHT - 9}l6 6m0 -6l-6 6", "bad") for x in scale.columns(bad_x)]
    return svg(WIDTH, HEIGHT, [*parts, *names], chart.title)


def running_mean(y_P: Floats, window: int) -> Floats:
    """Mean of the finite values in a window around each value; NaN where the value itself is not finite."""
    finite_P = np.isfinite(y_P)
    sums = np.concatenate([[0.0], np.where(finite_P, y_P, 0.0).cumsum()])
    counts = np.concatenate([[0], finite_P.cumsum()])
    at_P = np.arange(len(y_P))
    start_P, stop_P = np.maximum(at_P - window // 2, 0), np.minimum(at_P + (window + 1) // 2, len(y_P))
    mean_P = (sums[stop_P] - sums[start_P]) / np.maximum(counts[stop_P] - counts[start_P], 1)
    return np.where(finite_P, mean_P, np.nan)


def thinned(x_P: Floats, y_P: Floats) -> tuple[Floats, Floats]:
    """At most 2 × MAX_BUCKETS points: the lowest and highest of each bucket; NaN for one without finite values."""
    if len(y_P) <= 2 * MAX_BUCKETS:
        return x_P, np.where(np.isfinite(y_P), y_P, np.nan)
    kept: list[int] = []
    for bucket in np.array_split(np.arange(len(y_P)), MAX_BUCKETS):
        finite = bucket[np.isfinite(y_P[bucket])]
        if len(finite):
            kept += sorted({int(finite[y_P[finite].argmin()]), int(finite[y_P[finite].argmax()])})
        else:
            kept.append(int(bucket[0]))
    y_kept = y_P[kept]
    return x_P[kept], np.where(np.isfinite(y_kept), y_kept, np.nan)


@dataclass(frozen=True)
class _Scale:
    """From values to positions in the picture."""

    start_x: float
    end_x: float
    low: float
    high: float

    def x(self, value: float) -> float:
        return LEFT + (value - self.start_x) / (self.end_x - self.start_x) * PLOT_WIDTH

    def y(self, value: float) -> float:
        return TOP + (self.high - value) / (self.high - self.low) * PLOT_HEIGHT

    def points(self, x_P: Floats, y_P: Floats) -> Iterator[tuple[str, str]]:
        for x, y in zip(x_P.tolist(), y_P.tolist(), strict=True):
            if np.isfinite(y):
                yield f"{self.x(x):.1f}", f"{self.y(y):.1f}"

    def polyline(self, x_P: Floats, y_P: Floats) -> str:
        """A line with a gap at each NaN; a single value between gaps is a dot (the line's ends are round)."""
        pieces = []
        for start, stop in runs(np.isfinite(y_P)):
            points = [f"{x} {y}" for x, y in self.points(x_P[start:stop], y_P[start:stop])]
            pieces.append("M" + "L".join(points if len(points) > 1 else points * 2))
        return "".join(pieces)

    def columns(self, x_P: Floats) -> list[float]:
        """Left edges of the crosses at these positions, without overlap."""
        return sorted({round((self.x(x) - 3) / 7) * 7.0 for x in x_P.tolist()})


def _span(values: Iterable[Floats]) -> tuple[float, float]:
    """The lowest and highest of all values; widened if they are equal."""
    joined = np.concatenate(list(values))
    low, high = float(joined.min()), float(joined.max())
    return (low, high) if high > low else (low - 0.5, high + 0.5)


def _value_range(chart: Chart) -> tuple[float, float]:
    joined = np.concatenate([curve.y_P[np.isfinite(curve.y_P)] for curve in chart.curves])
    joined = np.append(joined, [value for _, value in chart.limits])
    low, high = float(joined.min()), float(joined.max())
    low = min(low, 0.0) if chart.from_zero else low
    if high - low <= 1e-9 * max(abs(high), abs(low)):  # a single value, or all equal
        high = low + (0.1 * abs(low) or 1.0)
    margin = 0.06 * (high - low)
    return low - (0.0 if chart.from_zero and low == 0 else margin), high + margin


def _axes(chart: Chart, scale: _Scale) -> list[str]:
    parts = [text(4, 12, chart.unit)]
    for tick in ticks(scale.high, 6, scale.low):
        y = scale.y(tick)
        parts += [line(LEFT, y, LEFT + PLOT_WIDTH, y, "grid"), text(LEFT - 8, y + 4, _number(tick), anchor="end")]
    bottom = TOP + PLOT_HEIGHT
    parts.append(line(LEFT, bottom, LEFT + PLOT_WIDTH, bottom))
    for tick in ticks(scale.end_x, 5, scale.start_x):
        if tick == int(tick):
            x = scale.x(tick)
            parts += [line(x, bottom, x, bottom + 4), text(x, bottom + 17, _number(tick), anchor="middle")]
    parts.append(text(LEFT + PLOT_WIDTH, bottom + 33, chart.x_title, anchor="end"))
    return parts


def _number(value: float) -> str:
    return f"{value:,.0f}" if value == int(value) and abs(value) < 1e7 else f"{value:.4g}"
