"""`nest-ssl inspect`: what training will see of the data, before any GPU is needed."""

from __future__ import annotations

import json
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from nest_ssl.config import DatasetConfig, ModelConfig, compose
from nest_ssl.data import AudioNoiseDataset, BadDataError, open_manifests
from nest_ssl.data.build import open_sources
from nest_ssl.data.manifest.read import split_paths
from nest_ssl.data.sources.files import ManifestDataset
from nest_ssl.inspect.examples import ExampleBatch, example_batches
from nest_ssl.inspect.manifest import ManifestFacts, find, look_at
from nest_ssl.inspect.padding import Batching, compare

MAX_BATCH_S = 3600.0
"""Larger batches are not drawn: an hour of audio and its features takes about 3 GB and half a minute."""
MUCH_LEFT_OUT = 0.1
"""A larger share of the utterances gets a note."""


@dataclass(frozen=True)
class InspectOptions:
    """What to inspect, and how much of it."""

    batch_sizes: list[int]
    """Utterances per batch to compare; the examples use the first one."""
    max_files: int = 1000
    """Headers to read, for speech and for noise."""
    num_examples: int = 2
    """Batches to draw."""
    seed: int = 0


@dataclass(frozen=True)
class Inspection:
    """Everything that was found."""

    dataset: DatasetConfig
    options: InspectOptions
    speech: ManifestFacts
    noise: ManifestFacts | None
    num_kept: int
    """Utterances that pass the duration filters of training."""
    batchings: dict[int, list[Batching]]
    """By batch size; empty if no utterance is left."""
    examples: list[ExampleBatch]
    normalized: bool
    """Features are in standard deviations of each band."""
    notes: list[str]
    """What a user should know or fix."""


def training_config(
    manifest: str, noise: str | None, overrides: Sequence[str], config_name: str, config_path: Path | None
) -> ModelConfig:
    """The model section of a configuration, with this manifest (and this noise, if given) in `train_ds`."""
    config = compose(config_name, overrides, config_path).model
    if config.train_ds is None:
        raise ValueError(f"{config_name}: has no model.train_ds.")
    noise_manifest = config.train_ds.noise_manifest if noise is None else noise
    dataset = replace(config.train_ds, manifest_filepath=manifest, noise_manifest=noise_manifest)
    return replace(config, train_ds=dataset)


def inspect_data(config: ModelConfig, options: InspectOptions) -> Inspection:
    """Inspect the manifests of `config.train_ds` as training would use them.

    Files that cannot be read are counted and named; only a manifest that is missing, damaged or empty raises.
    """
    dataset = config.train_ds
    if dataset is None or dataset.manifest_filepath is None:
        raise ValueError("train_ds: missing in the configuration, or without a manifest_filepath.")
    for paths in (dataset.manifest_filepath, dataset.noise_manifest):
        if paths is not None and len(open_manifests(paths)) == 0:
            name = ", ".join(split_paths(paths))
            raise ValueError(f"{name}: contains no utterances. Run 'nest-ssl prepare FOLDER --output NEW.jsonl'.")
    sources = open_sources(replace(dataset, min_duration=None, max_duration=None))
    speech = look_at(sources, max_files=options.max_files, seed=options.seed)
    noise = None
    if dataset.noise_manifest is not None:
        noises = [AudioNoiseDataset(manifest_filepath=dataset.noise_manifest, sample_rate=dataset.sample_rate)]
        noise = look_at(noises, max_files=options.max_files, seed=options.seed)
    notes = _duration_notes(dataset, speech) + _file_notes(dataset, speech, noise)
    num_kept = len(speech.between(dataset.min_duration, dataset.max_duration))
    batchings: dict[int, list[Batching]] = {}
    examples: list[ExampleBatch] = []
    if num_kept:
        with _with_durations(dataset, sources, speech, notes) as usable:
            if usable is not None:
                batchings = {size: compare(usable, size, seed=options.seed) for size in options.batch_sizes}
                examples = _examples(config, usable, options, speech, notes)
    notes += _batching_notes(dataset, batchings)
    normalized = config.preprocessor.normalize == "per_feature"
    return Inspection(dataset, options, speech, noise, num_kept, batchings, examples, normalized, notes)


def _examples(
    config: ModelConfig, dataset: DatasetConfig, options: InspectOptions, speech: ManifestFacts, notes: list[str]
) -> list[ExampleBatch]:
    """Example batches; if there can be none, a note says why."""
    batch_size = options.batch_sizes[0]
    longest_s = float(speech.between(dataset.min_duration, dataset.max_duration).max())
    if batch_size * longest_s > MAX_BATCH_S:
        notes.append(
            f"No example batches: {batch_size} utterances of up to {longest_s:,.0f} s would be "
            f"{batch_size * longest_s / 3600:.1f} h of audio. Set model.train_ds.max_duration or --batch-size."
        )
        return []
    try:
        return example_batches(
            config, replace(dataset, batch_size=batch_size), num_batches=options.num_examples, seed=options.seed
        )
    except BadDataError as error:
        notes.append(f"No example batches: {' '.join(str(error).split())[:300]} …")
        return []


@contextmanager
def _with_durations(
    dataset: DatasetConfig, sources: list[ManifestDataset], speech: ManifestFacts, notes: list[str]
) -> Iterator[DatasetConfig | None]:
    """The dataset, if it states every duration; otherwise a manifest of the files whose headers were read."""
    if speech.num_stated == speech.num_utterances:
        yield dataset
        return
    if dataset.is_tarred:
        notes.append("No padding and no example batches: tar shards need a 'duration' on every line.")
        yield None
        return
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "measured.jsonl"
        with path.open("w", encoding="utf-8") as file:
            for index in np.flatnonzero(~np.isnan(speech.durations_s)).tolist():
                source, within = find(sources, index)
                utterance = source.utterance(within)
                line = {"audio_filepath": utterance.audio_filepath, "duration": float(speech.durations_s[index])}
                file.write(json.dumps({**line, "offset": utterance.offset_s}) + "\n")
        yield replace(dataset, manifest_filepath=str(path), is_concat=False, endless=False, bucketing_batch_size=None)


def _duration_notes(dataset: DatasetConfig, speech: ManifestFacts) -> list[str]:
    notes = []
    num_known, num_unstated = len(speech.known_s), speech.num_utterances - speech.num_stated
    if num_unstated:
        notes.append(
            f"{num_unstated:,} of {speech.num_utterances:,} utterances have no 'duration'; where headers were read, "
            "their durations are used here. Buckets and duration filters need durations in the manifest: "
            f"run 'nest-ssl prepare {speech.paths[0]} --output NEW.jsonl'."
        )
    for key, limit_s, inside_s in (
        ("min_duration", dataset.min_duration, speech.between(dataset.min_duration, None)),
        ("max_duration", dataset.max_duration, speech.between(None, dataset.max_duration)),
    ):
        num_outside = num_known - len(inside_s)
        if num_outside:
            limit = f"model.train_ds.{key}={limit_s:g}"
            notes.append(f"{num_outside:,} of {num_known:,} utterances are left out by {limit} (seconds).")
    kept_s = speech.between(dataset.min_duration, dataset.max_duration)
    if num_known and not len(kept_s):
        notes.append("Nothing is left to train on. Adapt these limits to the data, or set them to null.")
    missing_s = np.maximum(dataset.min_audio_len_secs - kept_s, 0)
    if missing_s.any():
        share = missing_s.sum() / (kept_s + missing_s).sum()
        limit = f"model.train_ds.min_audio_len_secs={dataset.min_audio_len_secs:g}"
        notes.append(
            f"{np.count_nonzero(missing_s):,} utterances are shorter than {limit} and are padded "
            f"({dataset.pad_audio_mode}): {share:.0%} of what the model sees. Tables and pictures count this as audio."
        )
    return notes


def _file_notes(dataset: DatasetConfig, speech: ManifestFacts, noise: ManifestFacts | None) -> list[str]:
    notes = []
    for facts in filter(None, (speech, noise)):
        if facts.unusable:
            notes.append(
                f"{facts.name}: {len(facts.unusable):,} of {facts.num_looked_at:,} examined files cannot be used. "
                f"Run 'nest-ssl prepare {facts.paths[0]} --output NEW.jsonl' to leave them out."
            )
    others = sum(count for rate, count in speech.rates.items() if rate != dataset.sample_rate)
    if others:
        share = others / speech.rates.total()
        notes.append(f"{share:.0%} of the files are resampled to {dataset.sample_rate:,} Hz every time they are read.")
    if noise is None:
        notes.append("No noise manifest (--noise): only other speakers from the batch are mixed in.")
    return notes


def _batching_notes(dataset: DatasetConfig, batchings: dict[int, list[Batching]]) -> list[str]:
    """Warn of what the configured way to form batches leaves out; the others are only offered."""
    in_buckets = dataset.use_bucketing or dataset.use_lhotse
    kind = "lhotse" if dataset.use_lhotse else "buckets" if in_buckets else "shuffled"
    chosen = [row for rows in batchings.values() for row in rows if row.name.startswith(kind)]
    worst = max((row.left_out_share or 0.0 for row in chosen), default=0.0)
    if worst <= MUCH_LEFT_OUT:
        return []
    why, way_out = "the incomplete batch", "Smaller batches"
    if in_buckets:
        why, way_out = "one incomplete batch per bucket", "Fewer buckets (model.train_ds.num_buckets), smaller batches"
    return [
        f"drop_last=true leaves out up to {worst:.0%} of the utterances: {why}. "
        f"{way_out} or model.train_ds.drop_last=false keep them."
    ]
