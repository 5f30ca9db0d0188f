"""The command `nest-ssl`."""

from __future__ import annotations

import itertools
import logging
import os
import sys

import typer

from nest_ssl._version import __version__
from nest_ssl.cli.console import say
from nest_ssl.cli.demo import demo
from nest_ssl.cli.doctor import doctor
from nest_ssl.cli.export import export
from nest_ssl.cli.extract import extract
from nest_ssl.cli.fit import fit
from nest_ssl.cli.info import info
from nest_ssl.cli.inspect import inspect
from nest_ssl.cli.prepare import prepare
from nest_ssl.cli.pretrain import pretrain
from nest_ssl.cli.probe import probe
from nest_ssl.cli.report import report
from nest_ssl.cli.verify import verify
from nest_ssl.config.checks import local_paths, log_to_terminal
from nest_ssl.watchdog.system import drop_stdout, open_missing_streams

app = typer.Typer(no_args_is_help=True, add_completion=False, pretty_exceptions_enable=False)
app.command()(prepare)
app.command()(inspect)
app.command()(demo)
app.command()(pretrain)
app.command()(report)
app.command()(fit)
app.command()(doctor)
app.command()(extract)
app.command()(probe)
app.command()(export)
app.command()(info)
app.command()(verify)


def _print_version(asked: bool) -> None:
    if asked:
        say(f"nest-ssl {__version__}")
        raise typer.Exit


@app.callback()
def program(
    version: bool = typer.Option(False, "--version", callback=_print_version, is_eager=True, help="Print the version."),
    verbose: bool = typer.Option(False, "--verbose", "-v", help="Log more, and show tracebacks."),
) -> None:
    """NEST speech pre-training with NeMo's numbers, without NeMo."""
    log_to_terminal(logging.DEBUG if verbose else logging.INFO)


def _check_arguments(arguments: list[str]) -> None:
    local_paths("argument", arguments)
    for before, argument in itertools.pairwise(["nest-ssl", *arguments]):
        if not argument:
            raise ValueError(f"the argument after '{before}' is empty: perhaps a shell variable that is not set.")
        if argument.endswith("\r"):
            raise ValueError(f"{argument!r} ends with a carriage return: does a script have Windows line endings?")


def _check_working_folder() -> None:
    """Refuse to work in a folder that was deleted; torch's libraries would not even load."""
    try:
        os.getcwd()
    except FileNotFoundError as error:
        raise ValueError("the working folder has been deleted. Change to one that exists: cd") from error


def main(arguments: list[str] | None = None) -> None:
    """Run the command; errors that a user can fix are one line on stderr and exit code 1, not a traceback."""
    # Must be set before torch is loaded. Idle OpenMP threads spin; on shared cores they steal time from those that work
    # (measured on two cores: up to 4.4 s per step instead of 0.2 s; with this at most 0.5 s).
    os.environ.setdefault("GOMP_SPINCOUNT", "10000")
    open_missing_streams()
    try:
        _check_working_folder()
        _check_arguments(sys.argv[1:] if arguments is None else arguments)
        app(arguments)
    except (ValueError, OSError, RuntimeError) as error:
        if logging.getLogger().isEnabledFor(logging.DEBUG):
            raise
        say(f"nest-ssl: {_in_words(error)}", file=sys.stderr)
        _end(1)
    except SystemExit as end:
        _end(end.code)


def _end(code: int | str | None) -> None:
    """End with this code, or with 1 if what was printed is lost."""
    try:
        sys.stdout.flush()
    except OSError as error:
        drop_stdout()
        if not code:
            say(f"nest-ssl: stdout: {error.strerror}", file=sys.stderr)
            code = 1
    sys.exit(code)


def _in_words(error: Exception) -> str:
    """What an error says, as our own messages do: the file, then the reason; a stream has no name."""
    if "can't start new thread" in str(error):
        return f"{error}: the limit of processes is reached ('ulimit -u' prints it). Raise it, or use fewer workers."
    if not isinstance(error, OSError) or not error.strerror:
        return str(error)
    named = error.filename is not None and not isinstance(error.filename, int)
    return f"{os.fsdecode(error.filename) if named else 'standard output, or a file'}: {error.strerror}"
