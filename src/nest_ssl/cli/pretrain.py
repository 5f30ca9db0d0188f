"""`nest-ssl pretrain`: NeMo's command line for NEST."""

from __future__ import annotations

import typer

from nest_ssl.config.compose import DEFAULT_CONFIG


def pretrain(
    overrides: list[str] = typer.Argument(None, metavar="[KEY=VALUE]...", help="Hydra overrides, as NeMo's."),
    config_path: str | None = typer.Option(None, "--config-path", "-cp", help="Folder of the yaml; default: ours."),
    config_name: str = typer.Option(DEFAULT_CONFIG, "--config-name", "-cn", help="Name of the yaml."),
) -> None:
    """Pre-train a NEST model, or go on with a run that was interrupted.

    Exit codes: 0 finished, 75 ended but resumable, 1 needs a person.
    """
    from nest_ssl.config import compose
    from nest_ssl.distributed.ranks import as_rank_zero
    from nest_ssl.training.start import start

    with as_rank_zero():
        cfg = compose(config_name, overrides or [], config_path)
    arguments = [f"--config-name={config_name}", *([f"--config-path={config_path}"] if config_path else [])]
    if config_name == DEFAULT_CONFIG:
        arguments = arguments[1:]
    raise typer.Exit(start(cfg, [*arguments, *(overrides or [])]))
