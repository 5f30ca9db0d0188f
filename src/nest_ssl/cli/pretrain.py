"""`nest-ssl pretrain`: NeMo's command line for NEST."""

from __future__ import annotations

import logging
import shlex
from pathlib import Path
from typing import TYPE_CHECKING

import typer

from nest_ssl.cli.console import make_console, quiet
from nest_ssl.config.composing import DEFAULT_CONFIG
from nest_ssl.watchdog.system import end_before_training, on_stop_signals, while_stdout_lasts

if TYPE_CHECKING:
    from nest_ssl.config import NestConfig

log = logging.getLogger(__name__)


def pretrain(
    overrides: list[str] = typer.Argument(None, metavar="[KEY=VALUE]...", help="Hydra overrides, as NeMo's."),
    config_path: str | None = typer.Option(None, "--config-path", "-cp", help="Folder of the yaml; default: ours."),
    config_name: str = typer.Option(DEFAULT_CONFIG, "--config-name", "-cn", help="Name of the yaml."),
) -> None:
    """Pre-train a NEST model, or resume a run that was interrupted.

    Exit codes: 0 finished, 75 ended but resumable, 1 needs a person.
    """
    on_stop_signals(end_before_training)  # before the slow imports
    from nest_ssl.config import compose
    from nest_ssl.launch.ranks import as_rank_zero
    from nest_ssl.training import run
    from nest_ssl.watchdog.rank import FINISHED

    with as_rank_zero():
        cfg = compose(config_name, overrides or [], config_path)
    arguments = [f"--config-name={config_name}"] if config_name != DEFAULT_CONFIG else []
    arguments += [f"--config-path={config_path}"] if config_path else []
    verbose = logging.getLogger().isEnabledFor(logging.DEBUG)
    command = run.pretrain_command([*arguments, *(overrides or [])], verbose=verbose)
    outcome = run.run(cfg, run.pretrain, command)
    if outcome.exit_code == FINISHED and outcome.speaks:
        with while_stdout_lasts():
            if cfg.trainer.fast_dev_run:
                make_console().print("the dry run (trainer.fast_dev_run) is finished; nothing was saved")
            else:
                show_result(cfg, outcome.run_dir)
    raise typer.Exit(outcome.exit_code)


def show_result(cfg: NestConfig, run_dir: Path) -> None:
    """Write the report of a finished run; print what came out, where it is, and what to do next."""
    from nest_ssl.config import ExperimentConfig
    from nest_ssl.run_folder import RunFolder
    from nest_ssl.run_verdict import judge, read_metrics, summary_lines

    _write_report(run_dir)
    exp = cfg.exp_manager or ExperimentConfig()
    folder, console = RunFolder(run_dir, exp.checkpoint_callback_params.dirpath), make_console()
    metrics = read_metrics(folder.metrics_csv)
    found = folder.results(exp)
    console.print()
    for line in summary_lines(metrics, judge(metrics, cfg.model.num_classes)):
        console.print(line)
    for name, place in found.items():
        console.print(f"{name:>12}: {place}", soft_wrap=True)
    if "model" in found:
        console.print("next:")
        for command in _next_commands(cfg, run_dir, found["model"]):
            console.print(f"    {command}", soft_wrap=True)


def _next_commands(cfg: NestConfig, run_dir: Path, model: str) -> list[str]:
    from nest_ssl.training.run import resume_overrides

    steps, epochs = cfg.trainer.max_steps, cfg.trainer.max_epochs or 1
    longer = [f"trainer.max_steps={2 * steps}" if steps > 0 else f"trainer.max_epochs={2 * epochs}"]
    if cfg.trainer.max_time is not None:  # it counts what was trained already
        longer.append("trainer.max_time=null")
    longer += resume_overrides(cfg, run_dir)
    return [
        f"nest-ssl info {shlex.quote(model)}    # what is in it",
        f"nest-ssl pretrain … {shlex.join(longer)}    # the same command with this resumes the run",
        "nest-ssl prepare FOLDER --output train.jsonl    # then the same with your own audio",
    ]


def _write_report(run_dir: Path) -> None:
    from nest_ssl.report.report import write_run_report

    try:
        with quiet("nest_ssl.data", logging.ERROR):  # which says again how many utterances there are, and which are bad
            write_run_report(run_dir)
    except (ValueError, OSError, RuntimeError) as error:  # a page about the run must not make it fail
        log.warning("the report could not be written: %s", error)
