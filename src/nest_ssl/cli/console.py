"""What the commands print: tables that keep every column, and progress; on a terminal or in a pipe."""

from __future__ import annotations

import contextlib
import logging
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from rich import box
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from rich.table import Table

PIPE_WIDTH = 200  # a pipe has no width of its own, and rich would cut columns at 80


def make_console() -> Console:
    # What is printed are names and values: '[/data]' is a path, not a style, and ':x:' no picture.
    return Console(width=None if sys.stdout.isatty() else PIPE_WIDTH, markup=False, emoji=False)


@contextlib.contextmanager
def quiet(logger_name: str) -> Iterator[None]:
    """Only warnings of this logger, for a while."""
    logger = logging.getLogger(logger_name)
    level = logger.level
    logger.setLevel(logging.WARNING)
    try:
        yield
    finally:
        logger.setLevel(level)


def make_table(left: list[str], right: list[str]) -> Table:
    """A table with text columns `left`, then number columns `right`."""
    table = Table(box=box.SIMPLE_HEAD)
    for name in left:
        table.add_column(name, overflow="fold")
    for name in right:
        table.add_column(name, justify="right", no_wrap=True)  # a number broken in two is misread
    return table


PLAIN_LINE_EVERY_S = 10.0


@contextmanager
def show_progress(command: str, unit: str) -> Iterator[Callable[[int, int], None]]:
    """A function to call with how many are done, and of how many."""
    console = Console(stderr=True)
    if not console.is_terminal:
        yield _plain_lines(command, unit)
        return
    columns = (TextColumn(unit), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn(), TimeRemainingColumn())
    with Progress(*columns, console=console) as bar:
        task = bar.add_task(unit, total=None)
        yield lambda done, total: bar.update(task, completed=done, total=total)


def _plain_lines(command: str, unit: str) -> Callable[[int, int], None]:
    last = time.monotonic()

    def show(done: int, total: int) -> None:
        nonlocal last
        if time.monotonic() - last >= PLAIN_LINE_EVERY_S:
            last = time.monotonic()
            print(f"{command}: {done:,} of {total:,} {unit}", file=sys.stderr, flush=True)

    return show
