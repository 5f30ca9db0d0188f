"""How far a command is: a bar on a terminal, a plain line now and then elsewhere."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

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
