"""`nest-ssl verify`: a model file against NeMo."""

from __future__ import annotations

from pathlib import Path

import typer
from rich.text import Text

from nest_ssl.cli.console import make_console, make_table


def verify(
    files: list[Path] = typer.Argument(metavar="FILE.nemo...", help="Model files to check."),
    recorded: Path | None = typer.Option(
        None, help="NeMo's recorded numbers (.npz, with batch.npz beside it); default: those beside the file, if any."
    ),
    nemo_python: str | None = typer.Option(
        None, envvar="NEST_SSL_NEMO_PYTHON", help="An interpreter that has nemo_toolkit[asr]; default: this one."
    ),
    report: Path | None = typer.Option(None, help="Write the outcome as a page (Markdown)."),
) -> None:
    """Check model files against recorded numbers, or against NeMo itself where it can be run."""
    from nest_ssl.verify import verify as verify_file
    from nest_ssl.verify import write_report

    console = make_console()
    results = [verify_file(path, recorded, nemo_python) for path in files]
    for result in results:
        against = f"against {result.against}" if result.against else "by itself"
        console.print(f"{result.file}, {against}", style="bold")
        table = make_table(["stage", "what"], ["largest difference", "allowed", ""])
        for check in result.checks:
            verdict = Text("ok", "green") if check.passed else Text("DIFFERS", "red")
            table.add_row(check.stage, check.what, f"{check.difference:.2g}", f"{check.allowed:g}", verdict)
        console.print(table)
        if not result.against:
            console.print(
                "Not compared with NeMo: there are no recorded numbers beside the file and NeMo cannot be imported. "
                "Give --recorded or --nemo-python to compare."
            )
    if report is not None:
        write_report(report, results)
        console.print(f"report: {report}")
    if not all(result.passed for result in results):
        raise typer.Exit(1)
