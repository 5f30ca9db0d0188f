"""`nest-ssl pretrain`: NeMo's command line for NEST."""

from __future__ import annotations

import typer

from nest_ssl.config.compose import DEFAULT_CONFIG


def pretrain(
    overrides: list[str] = typer.Argument(None, metavar="[KEY=VALUE]...", help="Hydra overrides, as NeMo's."),
    config_path: str | None = typer.Option(None, "--config-path", "-cp", help="Folder of the yaml; default: ours."),
    config_name: str = typer.Option(DEFAULT_CONFIG, "--config-name", "-cn", help="Name of the yaml."),
) -> None:
    """Pre-train a NEST model, or go on with a run that was interrupted."""
    from nest_ssl.config import compose

    cfg = compose(config_name, overrides or [], config_path)

    from nest_ssl.training.pretrain import pretrain as run

    folder = run(cfg)
    typer.echo(f"finished; the run is in {folder.path}", err=True)
