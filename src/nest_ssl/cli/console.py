"""How the program prints: tables that keep every column, on a terminal or in a pipe."""

from __future__ import annotations

import contextlib
import logging
import sys
from collections.abc import Iterator

from rich import box
from rich.console import Console
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
