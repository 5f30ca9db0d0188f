"""What a run has logged: `metrics.csv` as series over steps. R rows."""

from __future__ import annotations

import csv
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]

FLOAT32_MAX = float(np.finfo(np.float32).max)
"""No metric is larger: what is, is damage, and counts as infinite."""
END_OF_TIME_S = 253_402_300_799
"""The last second of the year 9999."""
LONG_GAP = 5
"""A step that took this many times the usual time had a pause in it: the run was interrupted and resumed."""


@dataclass(frozen=True)
class Series:
    """The values of one column, in the order of steps; what was logged as not a number is among them."""

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
    """All rows of a run, in the order of steps."""

    columns: dict[str, Floats]
    """By name; NaN where a row has no value."""
    filled: dict[str, NDArray[np.bool_]]
    """Which rows have a value, if only the text `nan`."""
    notes: list[str]
    """What could not be read."""

    def series(self, name: str) -> Series:
        """The column `name`; empty when nothing was logged under it."""
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
        """Of the first and the last row, in seconds since 1970."""
        finite = self.series("time").finite.values_R
        finite = finite[(finite >= 0) & (finite <= END_OF_TIME_S)]
        return (float(finite.min()), float(finite.max())) if len(finite) else None

    def audio_s(self) -> float | None:
        """Audio that one rank has heard: what a step held, on average, times the steps.

        Speed times time, where both are known of the same steps: rows that follow each other without a validation or
        a pause between them. None without such rows.
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
    """The rows of a `metrics.csv`; a last line that was cut off by a kill is left out."""
    notes: list[str] = []
    lines = path.read_bytes().decode("utf-8", errors="replace").splitlines(keepends=True)
    if lines and not lines[-1].endswith("\n"):
        if len(lines) > 1:
            notes.append(f"{path.name}: its last line was cut off, and is left out.")
        lines.pop()
    try:
        names, *rows = csv.reader(lines) if lines else [[]]
    except csv.Error as error:
        raise ValueError(f"{path}: not a readable csv file: {error}.") from error
    if not names:
        return RunMetrics({}, {}, [*notes, f"{path.name}: there is nothing in it yet."])
    if "step" not in names:
        raise ValueError(f"{path}: there is no column 'step' in it, so these are not the metrics of a run.")
    columns, filled, num_unreadable = {}, {}, 0
    for place, name in enumerate(names):
        cells = [row[place] if place < len(row) else "" for row in rows]
        columns[name], filled[name], bad = _numbers(cells)
        num_unreadable += bad
    has_step_R = np.isfinite(columns["step"])
    num_unreadable += int(np.count_nonzero(~has_step_R & filled["step"]))
    if num_unreadable:
        notes.append(f"{path.name}: {num_unreadable:,} values in it are no numbers, and are left out.")
    if not has_step_R.any():
        notes.append(f"{path.name}: no step was logged yet.")
    order_R = np.flatnonzero(has_step_R)[np.argsort(columns["step"][has_step_R], kind="stable")]
    return RunMetrics(
        {name: values_R[order_R] for name, values_R in columns.items()},
        {name: filled_R[order_R] for name, filled_R in filled.items()},
        notes,
    )


def _numbers(cells: list[str]) -> tuple[Floats, NDArray[np.bool_], int]:
    """Values, which of them were given, and how many of the given are no numbers."""
    values_R = np.full(len(cells), np.nan)
    filled_R = np.zeros(len(cells), bool)
    num_unreadable = 0
    for row, cell in enumerate(cells):
        if cell:
            try:
                values_R[row] = float(cell)
                filled_R[row] = True
            except ValueError:
                num_unreadable += 1
    values_R[np.abs(values_R) > FLOAT32_MAX] = np.inf
    return values_R, filled_R, num_unreadable
