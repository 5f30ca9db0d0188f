"""`nest-ssl probe`: how well an encoder predicts a label, next to log-mel statistics and random weights."""

from __future__ import annotations

from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from nest_ssl.cli.console import keep_inputs, layers_from_0, make_console, make_table, quiet, say, show_progress
from nest_ssl.watchdog.system import while_stdout_lasts

if TYPE_CHECKING:
    from nest_ssl.probe.probe import ProbeResult


class Head(StrEnum):
    linear = "linear"
    attentive = "attentive"


def probe(
    checkpoint: Annotated[
        str, typer.Argument(metavar="CHECKPOINT", help="A .nemo, .ckpt or .safetensors file, or a name on the hub.")
    ],
    train: Annotated[str, typer.Option(metavar="MANIFEST", help="Utterances to train on.")],
    test: Annotated[str, typer.Option(metavar="MANIFEST", help="Utterances to test on.")],
    output: Annotated[Path, typer.Option(metavar="DIR", help="Folder for results.json and the pictures.")],
    label: Annotated[str | None, typer.Option(metavar="KEY", help="Key of the manifests that has the label.")] = None,
    task: Annotated[
        str | None, typer.Option(metavar="NAME", help="A registered task (docs/extending.md), instead of --label.")
    ] = None,
    layers: Annotated[str, typer.Option(callback=layers_from_0, help="all, last, or numbers such as 0,5,11.")] = "all",
    head: Annotated[
        Head | None, typer.Option(help="linear on mean and std over time, or attentive statistics. Default: linear.")
    ] = None,
    finetune: Annotated[
        bool, typer.Option("--finetune", help="Train the encoder too, with an attentive head.")
    ] = False,
    snr: Annotated[float | None, typer.Option(help="Add noise to the test audio at this ratio, in dB.")] = None,
    noise: Annotated[str | None, typer.Option(metavar="MANIFEST", help="The noise to add.")] = None,
    labels_per_class: Annotated[int | None, typer.Option(min=1, help="Train on this many of each class.")] = None,
    epochs: Annotated[int, typer.Option(min=1, help="Attentive head: passes over the training set.")] = 20,
    lr: Annotated[float, typer.Option(help="Attentive head: learning rate.")] = 1e-3,
    encoder_lr: Annotated[float, typer.Option(help="--finetune: learning rate of the encoder.")] = 1e-4,
    device: Annotated[str | None, typer.Option(help="cpu, cuda, cuda:1; default: a GPU if there is one.")] = None,
    seed: Annotated[
        int, typer.Option(min=0, max=2**32 - 1, help="Seed of noise, choice of labels, random weights, resampling.")
    ] = 0,
) -> None:
    """Train a small classifier on frozen features; compare it with log-mel statistics and with random weights."""
    from nest_ssl.data.manifest.read import split_paths
    from nest_ssl.files import make_folder
    from nest_ssl.probe.attentive import TrainingOptions
    from nest_ssl.probe.probe import RESULTS, ProbeOptions, write_results
    from nest_ssl.probe.probe import probe as run_probe

    chosen = head.value if head is not None else "attentive" if finetune else "linear"
    training = TrainingOptions(finetune=finetune, epochs=epochs, lr=lr, encoder_lr=encoder_lr)
    options = ProbeOptions(label, layers, chosen, snr, noise, labels_per_class, training, seed, task)
    unit = "utterances" if chosen == "linear" else "steps"
    manifests = [path for text in (train, test, noise) if text for path in split_paths(text)]
    keep_inputs("--output", [output / name for name in RESULTS], [checkpoint, *manifests])
    if output.exists():
        make_folder(output)  # a file is refused now, not after the work is done
    with show_progress("probe", unit) as show, quiet("nest_ssl.data.manifest.read"):
        result = run_probe(checkpoint, train, test, options, device=device, report=show)
    write_results(result, options, output, {"checkpoint": checkpoint, "train": train, "test": test})
    with while_stdout_lasts():
        print_result(result, options.name)
        say(f"{output}: {', '.join(RESULTS)}")


def print_result(result: ProbeResult, name: str) -> None:
    console = make_console()
    console.print(
        f"{name}: {len(result.classes)} classes, {result.num_train:,} training utterances, "
        f"{result.num_test:,} test utterances; always the most frequent class: {result.most_frequent:.3f}",
        highlight=False,
    )
    table = make_table(["system"], ["accuracy", "95 % interval", "encoder is better by", "95 % interval"])
    for system, score in result.scores.items():
        row = [system, f"{score.accuracy:.3f}", f"{score.low:.3f} to {score.high:.3f}"]
        gap = result.differences.get(system)
        row += ["", ""] if gap is None else [f"{gap.accuracy:+.3f}", f"{gap.low:+.3f} to {gap.high:+.3f}"]
        table.add_row(*row)
    console.print(table)
