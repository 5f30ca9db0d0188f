"""`nest-ssl fit`: the largest batches for this card, and what the host needs for them."""

from __future__ import annotations

from pathlib import Path

import typer

from nest_ssl.config.composing import DEFAULT_CONFIG


def fit(
    overrides: list[str] = typer.Argument(None, metavar="[KEY=VALUE]...", help="Hydra overrides, as for pretrain."),
    config_path: str | None = typer.Option(None, "--config-path", "-cp", help="Folder of the yaml; default: ours."),
    config_name: str = typer.Option(DEFAULT_CONFIG, "--config-name", "-cn", help="Name of the yaml."),
    memory_share: float = typer.Option(0.95, help="Share of the card's memory that training may take."),
    most: int = typer.Option(1024, help="Utterances per batch to stop at."),
    output: Path | None = typer.Option(None, "--output", "-o", help="File for the overrides, one per line."),
) -> None:
    """Find the largest batch for each bucket of durations by trying, and print the overrides for pretrain."""
    from nest_ssl.config import compose

    cfg = compose(config_name, overrides or [], config_path)

    from nest_ssl.files import replace_text
    from nest_ssl.fit import fit as run

    lines = run(cfg, memory_share=memory_share, most=most).overrides
    typer.echo("\n".join(lines))
    if output is not None:
        replace_text(output, "".join(f"{line}\n" for line in lines))
