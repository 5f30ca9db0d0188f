"""`nest-ssl inspect`: the data as training will see it, as tables and as a page of pictures."""

from __future__ import annotations

from collections import Counter
from collections.abc import Hashable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console
from rich.markup import escape

from nest_ssl.cli.console import keep_inputs, make_console, make_table, quiet
from nest_ssl.watchdog.system import while_stdout_lasts

if TYPE_CHECKING:
    from nest_ssl.inspect.inspect import Inspection
    from nest_ssl.inspect.manifest import ManifestFacts
    from nest_ssl.inspect.padding import Batching

BAR_WIDTH = 40
PADDING_LEGEND = """mean, largest: a batch with its padding. left out: utterances in incomplete batches (drop_last).
by duration: up to the seconds of the largest shuffled batch, so the same memory
(lhotse exceeds it when a long utterance comes last). ≈, –: from the first 100,000 utterances."""
MAX_NAMED = 10
DEFAULT_BATCH_SIZE = 16


def inspect(
    manifest: Annotated[
        str,
        typer.Argument(metavar="MANIFEST", help="Manifest(s) of speech, as in model.train_ds.manifest_filepath."),
    ],
    overrides: Annotated[
        list[str] | None,
        typer.Argument(metavar="KEY=VALUE", help="Training settings, such as model.train_ds.max_duration=30."),
    ] = None,
    noise: Annotated[str | None, typer.Option(help="Manifest(s) of the noise.")] = None,
    output: Annotated[Path, typer.Option(help="The page to write.")] = Path("inspect.html"),
    batch_size: Annotated[
        list[int] | None,
        typer.Option(
            min=1,
            help="Utterances per batch; repeat it to compare several, the first is used for the examples. "
            f"Default: from the configuration; {DEFAULT_BATCH_SIZE} with the built-in one.",
        ),
    ] = None,
    examples: Annotated[int, typer.Option(min=0, help="Batches to draw.")] = 2,
    files: Annotated[int, typer.Option(min=1, help="Read the headers of at most this many files.")] = 1000,
    seed: Annotated[
        int, typer.Option(min=0, max=2**32 - 1, help="Seed of order, noise, mixing, masks and the choice of files.")
    ] = 0,
    config_path: Annotated[Path | None, typer.Option(help="Folder of the configuration; default: ours.")] = None,
    config_name: Annotated[str | None, typer.Option(help="Training configuration; default: ours.")] = None,
) -> None:
    """Print hours, durations, formats and padding for each way to form batches; draw example batches on a page."""
    from nest_ssl.config.composing import DEFAULT_CONFIG
    from nest_ssl.data.manifest.read import split_paths
    from nest_ssl.inspect.inspect import InspectOptions, inspect_data, training_config
    from nest_ssl.inspect.page import write_page

    if not output.parent.is_dir():
        raise ValueError(f"--output {output}: there is no folder {output.parent}. Create it first.")
    given = list(overrides or [])
    if config_path is None and config_name is None:  # the built-in batch size is 2, which starts anywhere
        given.insert(0, f"model.train_ds.batch_size={DEFAULT_BATCH_SIZE}")
    config = training_config(manifest, noise, given, config_name or DEFAULT_CONFIG, config_path)
    assert config.train_ds is not None
    read = (manifest, config.train_ds.noise_manifest, config.train_ds.tarred_audio_filepaths)
    keep_inputs("--output", [output], [path for paths in read if paths for path in split_paths(paths)])
    sizes = batch_size or [config.train_ds.batch_size or DEFAULT_BATCH_SIZE]
    options = InspectOptions(batch_sizes=sizes, max_files=files, num_examples=examples, seed=seed)
    with quiet("nest_ssl.data.manifest.read"):  # the tables show the same
        inspection = inspect_data(config, options)
    write_page(inspection, output)
    with while_stdout_lasts():
        print_inspection(inspection, output)


def print_inspection(inspection: Inspection, output: Path) -> None:
    console = make_console()
    print_manifest(console, "speech", inspection.speech)
    if inspection.noise is not None:
        print_manifest(console, "noise", inspection.noise)
    print_padding(console, inspection.batchings)
    for note in inspection.notes:
        console.print(f"note: {note}", style="yellow", markup=False, highlight=False)
    console.print(f"{output}: {len(inspection.examples)} example batches drawn", markup=False, highlight=False)


def print_manifest(console: Console, kind: str, facts: ManifestFacts) -> None:
    about = "about " if facts.hours_are_estimated else ""
    title = f"{kind}: {facts.name}: {facts.num_utterances:,} utterances, {about}{facts.hours:,.2f} h"
    console.print(title, style="bold", markup=False, highlight=False)
    if len(facts.known_s):
        print_durations(console, facts)
    sample = f"a sample: {facts.num_looked_at:,} of {facts.num_utterances:,} files"
    console.print(f"headers of {sample if facts.is_sample else 'all files'}", highlight=False)
    table = make_table(["what", "value"], ["files", "share"])
    for name, counts in (("sample rate", facts.rates), ("format", facts.formats), ("channels", facts.channels)):
        for value, count in _most_frequent(counts):
            shown = f"{value} Hz" if name == "sample rate" else str(value)
            table.add_row(name, escape(shown), f"{count:,}", f"{count / counts.total():.1%}")
    if facts.unusable:
        table.add_row("unusable", "", f"{len(facts.unusable):,}", f"{len(facts.unusable) / facts.num_looked_at:.1%}")
    console.print(table)
    for bad in facts.unusable[:MAX_NAMED]:
        console.print(f"  {bad.name}: {bad.reason}", markup=False, highlight=False)
    if len(facts.unusable) > MAX_NAMED:
        console.print(f"  … and {len(facts.unusable) - MAX_NAMED:,} more; the page lists all")


def print_durations(console: Console, facts: ManifestFacts) -> None:
    from nest_ssl.inspect.manifest import duration_histogram

    names = ("shortest", "5 %", "median", "95 %", "longest")
    percentiles = zip(names, facts.percentiles_s((0, 5, 50, 95, 100)), strict=True)
    console.print(", ".join(f"{name} {value:.2f} s" for name, value in percentiles), highlight=False)
    histogram = duration_histogram(facts.known_s)
    table = make_table(["seconds", ""], ["utterances"])
    most, num_bins, empty_from_s = max(histogram.counts), len(histogram.counts), None
    for i, count in enumerate(histogram.counts):
        low_s, high_s = histogram.edges_s[i : i + 2]
        start_s = low_s if empty_from_s is None else empty_from_s
        if count == 0 and i + 1 < num_bins and histogram.counts[i + 1] == 0:
            empty_from_s = start_s  # adjacent empty bins share a row
            continue
        start_s, empty_from_s = (low_s if count else start_s), None
        bar = "█" * round(BAR_WIDTH * count / most) or ("▏" if count else "")
        end = "" if histogram.open_end and i + 1 == num_bins else f" {high_s:g}"
        table.add_row(f"{start_s:g} –{end}", bar, f"{count:,}")
    console.print(table)


def print_padding(console: Console, batchings: Mapping[int, list[Batching]]) -> None:
    if not batchings:
        return
    figures = ["per epoch", "mean", "largest", "left out", "padding"]
    console.print("padding for each way to form batches", style="bold")
    table = make_table(["batches", "keys of model.train_ds"], figures)
    problems = []
    for rows in batchings.values():
        for row in rows:
            if row.problem:
                problems.append(f"{row.name}: {row.problem}")
                continue
            left_out = "–" if row.left_out_share is None else f"{row.left_out_share:.1%}"
            padding = f"{row.filling.padding_share:.1%}" if row.num_batches else "–"
            number = f"{'' if row.complete else '≈ '}{row.num_batches:,}"
            seconds = (f"{row.filling.mean_s:,.1f} s", f"{row.filling.largest_s:,.1f} s")
            table.add_row(row.name, row.keys, number, *seconds, left_out, padding)
        table.add_section()
    console.print(table)
    console.print(PADDING_LEGEND, highlight=False)
    for problem in problems:
        console.print(problem, markup=False, highlight=False)


def _most_frequent(counts: Counter[str] | Counter[int]) -> list[tuple[Hashable, int]]:
    """Ties by value, so that the order does not depend on that of the files."""
    return sorted(counts.items(), key=lambda item: (-item[1], str(item[0])))
