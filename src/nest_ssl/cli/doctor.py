"""`nest-ssl doctor`: check the machine, or explain a run."""

from __future__ import annotations

import time
import zipfile
from pathlib import Path

import typer
from rich.live import Live
from rich.table import Table

from nest_ssl.cli.console import make_console, make_table
from nest_ssl.config.composing import DEFAULT_CONFIG, compose
from nest_ssl.launch.machine_check import BAD, check_machine
from nest_ssl.watchdog.report.status import RunState, explain_run

REFRESH_S = 0.5


def doctor(
    run_dir: Path | None = typer.Argument(None, help="Explain this run; without it, check the machine."),
    config_path: str | None = typer.Option(None, "--config-path", "-cp", help="Folder of the yaml; default: ours."),
    config_name: str = typer.Option(DEFAULT_CONFIG, "--config-name", "-cn", help="Name of the yaml to check."),
    follow: bool = typer.Option(False, "--follow", "-f", help="Show the ranks of a live run until it ends."),
) -> None:
    """Check this machine before training on it, or explain a run, alive or dead.

    Exit code 1: something must be fixed.
    """
    if run_dir is None:
        _machine(config_path, config_name)
    else:
        _run(run_dir, follow)


def _machine(config_path: str | None, config_name: str) -> None:
    console, failed = make_console(), False
    for finding in check_machine(compose(config_name, [], config_path)):
        console.print(f"{finding.state:5} {finding.name:14} {finding.what}")
        failed |= finding.state == BAD
    raise typer.Exit(1 if failed else 0)


def _run(run_dir: Path, follow: bool) -> None:
    console = make_console()
    state = explain_run(run_dir)
    if follow and state.is_alive:
        with Live(_ranks(state), console=console) as live:
            while state.is_alive:
                time.sleep(REFRESH_S)
                state = explain_run(run_dir)
                live.update(_ranks(state))
    console.print(f"{run_dir}: {state.verdict}")
    if state.nodes:
        console.print(_ranks(state))
    for incident in state.incidents:
        console.print(f"{incident['time']}\n{incident['text']}\n")
    path = state.checkpoint
    is_cut = path is not None and path.is_file() and not zipfile.is_zipfile(path)
    console.print(f"newest checkpoint: {path or 'none'}{', damaged: a resume takes an older one' if is_cut else ''}")
    if state.nodes and not state.is_alive and state.verdict != "finished":
        console.print(f"to resume: {state.nodes[0].resume_command}", soft_wrap=True)


def _ranks(state: RunState) -> Table:
    table = make_table(["rank", "node", "process", "stage", "reading"], ["step", "in stage", "limit"])
    for node in state.nodes:
        for row in node.rows:
            process = f"{row.pid} {row.state.name.lower()}{', ' + row.process if row.process else ', gone'}"
            reading = next((worker.path for worker in row.workers if worker.is_reading), "")
            seconds = (f"{row.in_stage_s:.1f} s", f"{row.limit_s:.0f} s")
            place = row.place if row.gpu is None else f"{row.place}; GPU {row.gpu}"
            table.add_row(str(row.rank), node.host, process, place, reading, str(row.step), *seconds)
    return table
