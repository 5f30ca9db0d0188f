"""`nest-ssl verify`: compare a model file with NeMo."""

from __future__ import annotations

from pathlib import Path

import typer
from rich.text import Text

from nest_ssl.cli.console import keep_inputs, make_console, make_table


def verify(
    files: list[Path] = typer.Argument(metavar="FILE.nemo...", help="Model files to check."),
    recorded: Path | None = typer.Option(
        None, help="NeMo's recorded numbers (.npz, with batch.npz next to it); default: those next to the file, if any."
    ),
    nemo_python: str | None = typer.Option(
        None, envvar="NEST_SSL_NEMO_PYTHON", help="A Python interpreter with nemo_toolkit[asr]; default: this one."
    ),
    report: Path | None = typer.Option(None, help="Write the result as a Markdown page."),
) -> None:
    """Compare model files with recorded numbers, or with NeMo itself if it can be run."""
    from nest_ssl.verify import verify as verify_file
    from nest_ssl.verify import write_report

    if report is not None:
        read = [*files, *filter(None, [recorded])]
        numbers = [other for path in read for other in (path.with_suffix(".npz"), path.with_name("batch.npz"))]
        keep_inputs("--report", [report], read + numbers)
        if report.is_file() and report.suffix != ".md":
            raise ValueError(f"--report {report}: is no Markdown page, and would be overwritten. Name another file.")
    console = make_console()
    results = [verify_file(path, recorded, nemo_python) for path in files]
    for result in results:
        against = f"compared with {result.against}" if result.against else "checked without NeMo"
        console.print(f"{result.file}, {against}", style="bold")
        table = make_table(["stage", "what"], ["largest difference", "allowed", ""])
        for check in result.checks:
            verdict = Text("ok", "green") if check.passed else Text("DIFFERS", "red")
            table.add_row(check.stage, check.what, f"{check.difference:.2g}", f"{check.allowed:g}", verdict)
        console.print(table)
        if not result.against:
            console.print(
                "Not compared with NeMo: there are no recorded numbers next to the file and NeMo cannot be imported. "
                "Give --recorded or --nemo-python to compare."
            )
    if report is not None:
        write_report(report, results)
        console.print(f"report: {report}")
    if not all(result.passed for result in results):
        raise typer.Exit(1)
