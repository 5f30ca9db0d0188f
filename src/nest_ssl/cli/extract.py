"""`nest-ssl extract`: features from a pre-trained encoder, for every utterance of an input."""

from __future__ import annotations

import json
import sys
import time
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from nest_ssl.cli.console import keep_inputs, layers_from_0, quiet, say, show_progress
from nest_ssl.config.checks import Range
from nest_ssl.files import only_writer
from nest_ssl.watchdog.system import while_stdout_lasts

if TYPE_CHECKING:
    from nest_ssl.extract.extract import Extracted

MAX_NAMED = 10


class Aggregation(StrEnum):
    none = "none"
    cat = "cat"
    sum = "sum"
    mean = "mean"
    weighted = "weighted"


class FeatureFormat(StrEnum):
    npy = "npy"
    safetensors = "safetensors"
    shards = "shards"


class Precision(StrEnum):
    auto = "auto"
    fp32 = "fp32"
    bf16 = "bf16"


class Dtype(StrEnum):
    float32 = "float32"
    float16 = "float16"


def extract(
    checkpoint: Annotated[
        str, typer.Argument(metavar="CHECKPOINT", help="A .nemo, .ckpt or .safetensors file, or a name on the hub.")
    ],
    source: Annotated[
        Path, typer.Argument(metavar="INPUT", help="A manifest, a folder, a list of paths, or one audio file.")
    ],
    output: Annotated[Path, typer.Argument(metavar="OUT", help="Folder for the features and their manifest.")],
    layers: Annotated[
        str, typer.Option(callback=layers_from_0, help="all, last, or numbers such as 0,5,11; 0 is the first layer.")
    ] = "all",
    aggregation: Annotated[Aggregation, typer.Option(help="How to combine the layers.")] = Aggregation.none,
    weights: Annotated[
        str | None, typer.Option(help="For weighted: numbers such as 0.2,0.8, or a probe's results.json.")
    ] = None,
    format: Annotated[
        FeatureFormat, typer.Option(help="One .npy or .safetensors file per utterance, or shards of many.")
    ] = FeatureFormat.npy,
    dtype: Annotated[Dtype, typer.Option(help="float16 takes half the space.")] = Dtype.float32,
    shard_mb: Annotated[float, typer.Option(help="Size of a shard.")] = 256.0,
    device: Annotated[str | None, typer.Option(help="cpu, cuda, cuda:1; default: a GPU if there is one.")] = None,
    precision: Annotated[Precision, typer.Option(help="auto: bf16 on a GPU, fp32 on a CPU.")] = Precision.auto,
    batch_seconds: Annotated[
        float | None, typer.Option(help="Seconds of audio per batch; changes speed and memory, not the features.")
    ] = None,
    max_duration: Annotated[float, typer.Option(help="Leave out and name utterances of more seconds.")] = 600.0,
    workers: Annotated[int, typer.Option(min=1, help="Threads that read and write.")] = 4,
) -> None:
    """Write features of chosen layers, as one file per utterance or as shards. The same command resumes."""
    from nest_ssl.extract.extract import BAD, INDEX, SETTINGS, ExtractOptions, extract_features
    from nest_ssl.layer_features import FeatureExtractor

    options = ExtractOptions(format.value, dtype.value, batch_seconds, max_duration, shard_mb, workers)
    if aggregation is Aggregation.weighted and weights is None:
        raise ValueError("--aggregation weighted: needs --weights. For equal weights use --aggregation mean.")
    keep_inputs("OUT", [output / name for name in (INDEX, BAD, SETTINGS)], [source, checkpoint, weights or ""])
    extractor = FeatureExtractor(
        checkpoint, layers, aggregation.value, read_weights(weights, layers), device=device, precision=precision.value
    )
    start = time.monotonic()
    with only_writer(output), show_progress("extract", "utterances") as show, quiet("nest_ssl.data.manifest.read"):
        result = extract_features(extractor, source, output, options, show)
    with while_stdout_lasts():
        print_result(output, result, time.monotonic() - start)
    if result.bad:
        raise typer.Exit(1)


def read_weights(text: str | None, layers: str) -> list[float] | None:
    """Numbers, or the `layer_weights` in the results of `nest-ssl probe`, which must be for the same layers."""
    if text is None:
        return None
    weights = _parse_weights(text, layers)
    for weight in weights:
        Range().check("--weights", weight)  # what float32 cannot hold would only show in the features
    if not any(weights):
        raise ValueError(f"--weights {text}: all are 0.")
    return weights


def _parse_weights(text: str, layers: str) -> list[float]:
    if text.endswith(".json"):
        try:
            results = json.loads(Path(text).read_text())
            weights, probed = [float(weight) for weight in results["layer_weights"]], list(results["layers"])
        except (ValueError, KeyError, TypeError, OverflowError, RecursionError) as error:
            raise ValueError(f"--weights {text}: has no 'layer_weights' as written by nest-ssl probe.") from error
        named = ",".join(map(str, probed))
        if layers != named and not (layers == "all" and probed == list(range(len(probed)))):
            raise ValueError(f"--weights {text}: these are for layers {named}. Add --layers {named}.")
        return weights
    try:
        return [float(part) for part in text.split(",")]
    except ValueError:
        raise ValueError(f"--weights {text}: not numbers such as 0.2,0.8, and not a .json file.") from None


def print_result(output: Path, result: Extracted, wall_s: float) -> None:
    from nest_ssl.extract.extract import BAD, INDEX

    speed = f", {result.audio_s / wall_s:,.0f} × real time" if result.num_new else ""
    say(f"{output / INDEX}: {result.num_new:,} utterances in {wall_s:.1f} s{speed}; {result.num_kept:,} existed")
    if not result.bad:
        return
    say(f"{output / BAD}: {len(result.bad):,} without features, with reasons", file=sys.stderr)
    for file in result.bad[:MAX_NAMED]:
        say(f"  {file.path}: {file.reason}", file=sys.stderr)
    if len(result.bad) > MAX_NAMED:
        say(f"  … and {len(result.bad) - MAX_NAMED:,} more", file=sys.stderr)
