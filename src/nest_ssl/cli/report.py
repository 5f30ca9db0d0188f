"""`nest-ssl report`: one page about a pre-training run."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from nest_ssl.cli.console import quiet, say


def report(
    run_dir: Annotated[Path, typer.Argument(metavar="RUN_DIR", help="A run folder, finished or not.")],
    output: Annotated[Path | None, typer.Option(help="The page to write; default: RUN_DIR/report.html.")] = None,
) -> None:
    """Curves, codebook use, a verdict, and an utterance with its tokens: one HTML file that needs no network."""
    from nest_ssl.report.report import write_run_report

    with quiet("nest_ssl.data"):  # sizes of manifests and batches say nothing about the run
        say(write_run_report(run_dir, output=output))
