"""`nest-ssl export`: convert a checkpoint to other formats."""

from __future__ import annotations

from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer

from nest_ssl.cli.console import keep_inputs, say


class ExportFormat(StrEnum):
    huggingface = "huggingface"
    nemo = "nemo"
    safetensors = "safetensors"
    onnx = "onnx"


def export(
    checkpoint: Annotated[
        str, typer.Argument(metavar="CHECKPOINT", help="A .nemo, .ckpt or .safetensors file, or a name on the hub.")
    ],
    output: Annotated[Path, typer.Argument(metavar="OUT", help="A folder for huggingface, otherwise a file.")],
    format: Annotated[
        ExportFormat, typer.Option(help="huggingface and onnx: the encoder. nemo and safetensors: the whole model.")
    ] = ExportFormat.huggingface,
) -> None:
    """Write a model for transformers, NeMo, safetensors or ONNX; settings that a format cannot express are refused."""
    from nest_ssl.checkpoint.export import export_checkpoint

    keep_inputs("OUT", [output], [checkpoint])
    for path, words in export_checkpoint(checkpoint, output, format.value).files:
        say(f"{path}: {words}")
