"""`metrics.csv`: one row for every logged step, on disk as soon as it is logged."""

from __future__ import annotations

import csv
import io
import time
from pathlib import Path
from typing import Any

from lightning.pytorch.loggers import Logger
from lightning.pytorch.utilities import rank_zero_only

from nest_ssl.files import replacing


class MetricsCsv(Logger):
    """Rows of `step`, `time` and whatever was logged. New columns appear as they come; earlier rows stay."""

    def __init__(self, path: Path) -> None:
        super().__init__()
        self.path = path
        self._columns: list[str] | None = None
        self.latest: dict[str, float] = {}
        """The values logged last, for whoever shows them."""

    @property
    def name(self) -> str:
        return "metrics"

    @property
    def version(self) -> str:
        return ""

    def log_hyperparams(self, *args: Any, **kwargs: Any) -> None:
        """The configuration is in hparams.yaml."""

    @rank_zero_only
    def log_metrics(self, metrics: dict[str, float], step: int | None = None) -> None:
        self.latest |= metrics
        row = {"step": step, "time": round(time.time(), 3), **metrics}
        row.pop("epoch", None)
        if self._columns is None:  # of an earlier part of the run, if there was one
            self._columns = read_columns(self.path)
        new = [name for name in row if name not in self._columns]
        if new:
            self._columns = self._columns + new
            rewrite(self.path, self._columns, read_rows(self.path))
        try:
            with self.path.open("a", newline="") as file:
                csv.DictWriter(file, self._columns).writerow(row)
        except OSError as error:
            raise OSError(f"{self.path}: cannot be written: {error.strerror}.") from error


def read_columns(path: Path) -> list[str]:
    if not path.is_file():
        return []
    with path.open(newline="") as file:
        return next(csv.reader(file), [])


def read_rows(path: Path) -> list[dict[str, str]]:
    if not path.is_file():
        return []
    with path.open(newline="") as file:
        return list(csv.DictReader(file))


def rewrite(path: Path, columns: list[str], rows: list[dict[str, str]]) -> None:
    """Replace the file at once, so that a kill leaves the old one or the new one."""
    text = io.StringIO(newline="")
    writer = csv.DictWriter(text, columns)
    writer.writeheader()
    writer.writerows(rows)
    with replacing(path) as file:
        file.write(text.getvalue().encode())


def forget_after(path: Path, step: int) -> None:
    """Remove the rows after `step`: the run goes on from there and will write them again."""
    rows = read_rows(path)
    kept = [row for row in rows if int(row["step"]) < step]
    if len(kept) < len(rows):
        rewrite(path, read_columns(path), kept)
