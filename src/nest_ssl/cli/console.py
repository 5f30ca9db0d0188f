"""What the commands print: tables that keep every column, and progress; on a terminal or in a pipe."""

from __future__ import annotations

import contextlib
import itertools
import logging
import os
import re
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any, Protocol

from rich import box
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from rich.table import Table
from rich.text import Text

from nest_ssl.config.checks import printable, shortened

PIPE_WIDTH = 200  # a pipe has no width, and rich would cut columns at 80


def make_console() -> Console:
    # Names and values are printed as they are: '[/data]' is a path, not a style, and ':x:' is not an emoji.
    return PlainConsole(width=None if sys.stdout.isatty() else PIPE_WIDTH, markup=False, emoji=False)


class PlainConsole(Console):
    """A console that writes out escape codes in names; its own colours stay."""

    def render_str(self, text: str, **options: Any) -> Text:
        return super().render_str(printable(text), **options)

    def on_broken_pipe(self) -> None:
        raise  # rich would end the program with 1, whatever it has done


def say(*texts: object, **options: Any) -> None:
    """Print, with escape codes in names written out."""
    print(*(shortened(str(text)) for text in texts), **options)


def keep_inputs(option: str, outputs: Iterable[Path], inputs: Iterable[str | Path]) -> None:
    """Refuse to write over a file that is read, by whatever path it is called, or over audio."""
    there = [output for output in outputs if output.is_file()]
    for output, source in itertools.product(there, filter(os.path.exists, inputs)):
        if os.path.samefile(output, source):
            raise ValueError(f"{option} {output}: would overwrite the input {source}. Give another path.")
    for output in there:
        if _is_audio(output):
            raise ValueError(f"{option} {output}: is an audio file, and would be overwritten. Give another path.")


def _is_audio(path: Path) -> bool:
    from nest_ssl.audio import AudioError, audio_info

    try:
        audio_info(path)
    except AudioError:
        return False
    return True


def layers_from_0(layers: str) -> str:
    """Check --layers of a command."""
    if re.search(r"(^|,)\s*-\s*\d", layers):
        raise ValueError(f"--layers {layers}: layers are numbered from 0. Use 'last' for the last one.")
    return layers


@contextlib.contextmanager
def quiet(logger_name: str, least: int = logging.WARNING) -> Iterator[None]:
    """Let only warnings of this logger through, or what `least` says."""
    logger = logging.getLogger(logger_name)
    level = logger.level
    logger.setLevel(least)
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
        table.add_column(name, justify="right", no_wrap=True)  # a number broken over two lines is misread
    return table


PLAIN_LINE_EVERY_S = 10.0


class Show(Protocol):
    """Shows how many are done, of how many, with a few words."""

    def __call__(self, done: int, total: int | None = None, text: str = "") -> None: ...


@contextlib.contextmanager
def show_progress(command: str, unit: str, count: Callable[[], int] | None = None) -> Iterator[Show]:
    """A bar on a terminal, a plain line now and then elsewhere; `count` finds the total while the work runs."""
    console = PlainConsole(stderr=True)
    if not console.is_terminal:
        yield _plain_lines(command, unit)
        return
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        TimeRemainingColumn(),
    )
    with Progress(*columns, console=console) as bar:
        task = bar.add_task(unit, total=None)
        if count is not None:
            threading.Thread(target=lambda: bar.update(task, total=count()), daemon=True).start()

        def show(done: int, total: int | None = None, text: str = "") -> None:
            bar.update(task, completed=done, total=total, description=f"{unit} {text}".strip())

        yield show


def _plain_lines(command: str, unit: str) -> Show:
    last = time.monotonic()

    def show(done: int, total: int | None = None, text: str = "") -> None:
        nonlocal last
        if time.monotonic() - last >= PLAIN_LINE_EVERY_S:
            last = time.monotonic()
            of_total = "" if total is None else f" of {total:,}"
            say(f"{command}: {done:,}{of_total} {unit} {text}".rstrip(), file=sys.stderr, flush=True)

    return show
