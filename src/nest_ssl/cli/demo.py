"""`nest-ssl demo`: a small dataset of synthetic speech and noise, to try everything with."""

from __future__ import annotations

import os
import shlex
from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.progress import Progress

from nest_ssl.cli.console import say
from nest_ssl.config.checks import as_override
from nest_ssl.demo.dataset import DemoConfig, DemoFolder, make_demo

_DEFAULT = DemoConfig()
_FOLDER = Path("demo_data")
"""The folder that nest_demo.yaml trains on."""
_BATCH_SIZE = 8
"""The batch size in nest_demo.yaml, which drops an incomplete batch."""


class SynthesizerName(StrEnum):
    auto = "auto"
    nanotts = "nanotts"
    formants = "formants"


def demo(
    data_dir: Annotated[Path, typer.Option(help="The folder to create.")] = _FOLDER,
    num_train: Annotated[int, typer.Option(help="Utterances to train on.")] = _DEFAULT.num_train,
    num_val: Annotated[int, typer.Option(help="Utterances, with other voices, to validate on.")] = _DEFAULT.num_val,
    num_noise: Annotated[int, typer.Option(help="Noises.")] = _DEFAULT.num_noise,
    duration: Annotated[float, typer.Option(help="Seconds per utterance; they vary by a quarter.")] = (
        _DEFAULT.duration
    ),
    sample_rate: Annotated[int, typer.Option(help="Samples per second.")] = _DEFAULT.sample_rate,
    seed: Annotated[int, typer.Option(help="Another seed gives other voices, texts and noises.")] = _DEFAULT.seed,
    synthesizer: Annotated[
        SynthesizerName, typer.Option(help="py-nanotts or our own formants; auto: py-nanotts if it is installed.")
    ] = SynthesizerName.auto,
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Replace what an earlier demo made.")] = False,
) -> None:
    """Synthesise speech with many voices, noises and manifests, offline; the same arguments give the same bytes."""
    config = DemoConfig(num_train, num_val, num_noise, duration, sample_rate, seed)
    console = Console(stderr=True)
    with Progress(console=console, disable=not console.is_terminal, transient=True) as bar:
        task = bar.add_task("files", total=None)
        made = make_demo(
            data_dir,
            config,
            synthesizer=synthesizer.value,
            overwrite=overwrite,
            num_threads=os.cpu_count() or 1,
            report=lambda done, total: bar.update(task, completed=done, total=total),
        )
    _print_summary(made)


def _print_summary(made: DemoFolder) -> None:
    config = made.config
    say(f"{made.folder}: {'made' if made.is_new else 'was there already'} (voices: {made.synthesizer})")
    for part, count in (("train", config.num_train), ("valid", config.num_val)):
        minutes = made.duration_s[part] / 60
        say(f"{made.manifest(part)}: {count} utterances of {made.num_voices[part]} voices, {minutes:.1f} min")
    say(f"{made.manifest('noise')}: {config.num_noise} noises, {made.duration_s['noise'] / 60:.1f} min")
    say("Next:", _next_command(made), sep="\n")


def _next_command(made: DemoFolder) -> str:
    """A run of a few minutes: the one of `make pretrain` if its configuration fits the data."""
    config = made.config
    at_16_khz = config.sample_rate == 16_000
    if made.folder == _FOLDER and at_16_khz and config.num_train >= _BATCH_SIZE:
        return "nest-ssl pretrain --config-name nest_demo"
    overrides: dict[str, Path | int] = {
        "model.train_ds.manifest_filepath": made.manifest("train"),
        "model.train_ds.noise_manifest": made.manifest("noise"),
        "model.validation_ds.manifest_filepath": made.manifest("valid"),
        "model.validation_ds.noise_manifest": made.manifest("noise"),
    }
    if not at_16_khz:
        overrides["model.sample_rate"] = config.sample_rate
    first = "nest-ssl pretrain size=small trainer.max_steps=800"  # without it, 1,000 epochs as in NeMo's file
    return " \\\n".join([first, *(f"    {shlex.quote(as_override(*item))}" for item in overrides.items())])
