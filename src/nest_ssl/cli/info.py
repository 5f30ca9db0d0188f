"""`nest-ssl info`: what a model contains, or how two models differ."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import typer
from rich.console import Console

from nest_ssl.cli.console import make_console, make_table

if TYPE_CHECKING:
    from nest_ssl.checkpoint.summary import Source, Summary


def info(
    sources: list[str] = typer.Argument(
        metavar="FILE|CONFIG [OTHER] [KEY=VALUE]...",
        help="A .nemo, .ckpt or .safetensors file, a yaml, or a built-in configuration; two of them are compared. "
        "KEY=VALUE overrides configurations, such as size=xlarge.",
    ),
) -> None:
    """Print modules, shapes, parameters and memory of a model; for two, every difference."""
    from nest_ssl.checkpoint.summary import is_checkpoint, open_source, summarize

    overrides = [text for text in sources if "=" in text and not is_checkpoint(text) and not Path(text).exists()]
    names = [text for text in sources if text not in overrides]
    if not 1 <= len(names) <= 2:
        raise typer.BadParameter(f"expected one or two models, got {len(names)}.")
    if overrides and all(map(is_checkpoint, names)):
        raise typer.BadParameter(f"{overrides[0]}: overrides change configurations; a checkpoint has its own.")
    console = make_console()
    opened = [open_source(name, overrides) for name in names]
    if len(opened) == 1:
        print_summary(console, opened[0], summarize(opened[0]))
    else:
        print_differences(console, *opened)


def print_summary(console: Console, source: Source, summary: Summary) -> None:
    console.print(f"{source.name}: {source.kind.__name__}", style="bold")
    table = make_table(["module", "class", f"output for {summary.seconds:g} s"], ["parameters", "trainable"])
    for row in summary.rows:
        table.add_row(row.module, row.kind, row.output, f"{row.parameters:,}", f"{row.trainable:,}")
    table.add_section()
    table.add_row("encoder", "", "", f"{summary.encoder_parameters:,}", "")
    table.add_row("total", "", "", f"{summary.parameters:,}", f"{summary.trainable:,}")
    console.print(table)
    console.print(f"weights {_size(summary.weight_bytes)}; with gradients and AdamW {_size(summary.training_bytes)}")
    per_s = summary.encoder_frames_per_s
    console.print(
        f"{summary.mel_frames_per_s:g} mel frames and {per_s:g} encoder frames per second ({1000 / per_s:g} ms each)"
    )


def print_differences(console: Console, a: Source, b: Source) -> None:
    from nest_ssl.checkpoint.summary import config_differences, parameter_differences

    for title, rows in (("config", config_differences(a, b)), ("parameters", parameter_differences(a, b))):
        if not rows:
            console.print(f"{title}: no difference")
            continue
        console.print(f"{title}: {len(rows)} differences", style="bold")
        table = make_table(["key", a.name, b.name], [])
        for row in rows:
            table.add_row(*row)
        console.print(table)


def _size(num_bytes: float) -> str:
    for unit in ("B", "KB", "MB"):
        if num_bytes < 1000:
            return f"{num_bytes:.3g} {unit}"
        num_bytes /= 1000
    return f"{num_bytes:.3g} GB"
