"""What lhotse's samplers draw from: NeMo's manifests (plain or tarred), lhotse's own, Shar folders, and mixtures."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from lhotse import AudioSource, CutSet, MonoCut, Recording

from nest_ssl.config import DatasetConfig, read_yaml
from nest_ssl.data.sources.files import ManifestDataset
from nest_ssl.data.sources.opening import open_sources

SOURCE = "nest_ssl_source"
"""Key of a cut's custom fields: number of the dataset that reads it; `index` is its number there."""

KEYS = {
    "nemo": {"manifest_filepath"},
    "nemo_tarred": {"manifest_filepath", "tarred_audio_filepaths"},
    "lhotse": {"cuts_path"},
    "lhotse_shar": {"shar_path"},
    "group": {"input_cfg"},
}


@dataclass(frozen=True)
class Input:
    """One of the things that are mixed."""

    weight: float
    cuts: Callable[[int], CutSet]
    """Cuts of an epoch."""


class LhotseInputs:
    """All inputs of a configuration, opened once; cuts are made anew for each epoch."""

    def __init__(self, config: DatasetConfig, seed: int) -> None:
        self.config, self.seed = config, seed
        self.sources: list[ManifestDataset] = []
        self._named: list[str] = []
        self._inputs = self._open(_entries(config), 1.0)

    def cuts(self, epoch: int) -> CutSet:
        """The inputs mixed by weight: without end if there are several, unless `force_finite`."""
        cut_sets = [given.cuts(epoch) for given in self._inputs]
        if len(cut_sets) == 1:
            cuts = cut_sets[0]
        else:
            if not self.config.force_finite:
                cut_sets = [cuts.repeat(preserve_id=True) for cuts in cut_sets]
            cuts = CutSet.mux(*cut_sets, weights=[given.weight for given in self._inputs], seed=self.seed + epoch)
        least_s, most_s = self.config.min_duration or 0.0, self.config.max_duration or float("inf")
        return cuts.filter(partial(_lasts_between, least_s, most_s))

    def fingerprint(self) -> str:
        """Of the manifests' contents; of lhotse's files by name and size."""
        parts = [source.manifest.fingerprint() for source in self.sources]
        parts += [f"{path} {os.stat(path).st_size}" for path in self._named]
        return hashlib.sha256("\n".join(parts).encode()).hexdigest()

    def _open(self, entries: list[dict[str, Any]], weight: float) -> list[Input]:
        inputs: list[Input] = []
        for entry in entries:
            kind, own_weight = _checked(entry), weight * float(entry.get("weight", 1.0))
            if kind == "group":
                members = self._open(_listed(entry["input_cfg"]), 1.0)
                total = sum(member.weight for member in members)
                inputs += [replace(member, weight=own_weight * member.weight / total) for member in members]
            elif kind in ("nemo", "nemo_tarred"):
                inputs.append(Input(own_weight, self._open_manifests(entry)))
            elif kind == "lhotse":
                inputs.append(Input(own_weight, self._open_cuts(str(entry["cuts_path"]))))
            else:
                inputs.append(Input(own_weight, self._open_shar(entry["shar_path"])))
        return inputs

    def _open_manifests(self, entry: dict[str, Any]) -> Callable[[int], CutSet]:
        tarred = entry.get("tarred_audio_filepaths")
        config = replace(
            self.config,
            manifest_filepath=entry["manifest_filepath"],
            tarred_audio_filepaths=tarred,
            is_tarred=tarred is not None,
            is_concat=False,
            endless=False,
            bucketing_batch_size=None,
        )
        (source,) = open_sources(config)
        number = len(self.sources)
        self.sources.append(source)
        return lambda epoch: CutSet(ManifestCuts(source, number, self._order_seed(number), config.shuffle, epoch))

    def _order_seed(self, number: int) -> int:
        return self.seed + number

    def _open_cuts(self, path: str) -> Callable[[int], CutSet]:
        self._named.append(path)
        return lambda epoch: CutSet.from_file(path)

    def _open_shar(self, folders: str | list[str]) -> Callable[[int], CutSet]:
        listed = [folders] if isinstance(folders, str) else list(folders)
        self._named += [os.path.join(folder, name) for folder in listed for name in sorted(os.listdir(folder))]
        shuffle, seed = self.config.shuffle, self.seed

        def cuts(epoch: int) -> CutSet:
            parts = [CutSet.from_shar(in_dir=f, shuffle_shards=shuffle, seed=seed + epoch) for f in listed]
            return parts[0] if len(parts) == 1 else CutSet.mux(*parts, seed=seed + epoch)

        return cuts


class ManifestCuts:
    """Utterances of one of our datasets as cuts, in its order for an epoch; made while iterating."""

    def __init__(self, source: ManifestDataset, number: int, seed: int, shuffle: bool, epoch: int) -> None:
        self._source, self._number = source, number
        self._order, self._epoch = source.order(seed=seed, shuffle=shuffle), epoch

    def __iter__(self) -> Iterator[MonoCut]:
        for index in self._order.indices(self._epoch).tolist():
            yield self._cut(index)

    def _cut(self, index: int) -> MonoCut:
        utterance = self._source.utterance(index)
        if utterance.duration_s is None:
            where = f"{utterance.manifest}:{utterance.line}"
            raise ValueError(f"{where}: no 'duration', which lhotse needs. Run 'nest-ssl prepare' to measure it.")
        name, rate = f"{self._number}-{index}", self._source.sample_rate
        end_s = utterance.offset_s + utterance.duration_s
        recording = Recording(
            id=name,
            sources=[AudioSource("file", [0], utterance.audio_filepath)],
            sampling_rate=rate,
            num_samples=round(end_s * rate),
            duration=end_s,
        )
        custom = {SOURCE: self._number, "index": index}
        return MonoCut(name, utterance.offset_s, utterance.duration_s, 0, recording=recording, custom=custom)


def _lasts_between(least_s: float, most_s: float, cut: Any) -> bool:
    return least_s <= float(cut.duration) <= most_s


def is_endless(config: DatasetConfig) -> bool:
    """Whether an epoch never ends: several inputs are mixed without end, unless `force_finite`."""

    def num_inputs(entries: list[dict[str, Any]]) -> int:
        return sum(num_inputs(_listed(e["input_cfg"])) if _checked(e) == "group" else 1 for e in entries)

    return not config.force_finite and num_inputs(_entries(config)) > 1


def _entries(config: DatasetConfig) -> list[dict[str, Any]]:
    """The inputs that a configuration names, in the form of `input_cfg`."""
    if config.input_cfg is not None:
        return _listed(config.input_cfg)
    entries: list[dict[str, Any]] = []
    if config.manifest_filepath is not None:
        entry = {"type": "nemo", "manifest_filepath": config.manifest_filepath}
        if config.tarred_audio_filepaths is not None:
            entry |= {"type": "nemo_tarred", "tarred_audio_filepaths": config.tarred_audio_filepaths}
        entries.append(entry)
    if config.cuts_path is not None:
        entries.append({"type": "lhotse", "cuts_path": config.cuts_path})
    if config.shar_path is not None:
        entries.append({"type": "lhotse_shar", "shar_path": config.shar_path})
    if not entries:
        raise ValueError("use_lhotse: needs one of manifest_filepath, cuts_path, shar_path and input_cfg.")
    return entries


def _listed(input_cfg: str | list[dict[str, Any]]) -> list[dict[str, Any]]:
    if isinstance(input_cfg, str):
        loaded = read_yaml(input_cfg)
        if not isinstance(loaded, list):
            raise ValueError(f"input_cfg: {input_cfg} does not hold a list.")
        return loaded
    return input_cfg


def _checked(entry: dict[str, Any]) -> str:
    """The type of an entry that has what it needs and nothing that is not understood."""
    kind = entry.get("type")
    if kind not in KEYS:
        raise ValueError(f"input_cfg: type {kind!r} is not one of {', '.join(map(repr, KEYS))}.")
    missing = KEYS[kind] - set(entry)
    unknown = set(entry) - KEYS[kind] - {"type", "weight", "tags"}
    if missing or unknown:
        what = f"needs {sorted(missing)}" if missing else f"does not take {sorted(unknown)}"
        raise ValueError(f"input_cfg: type {kind!r} {what}.")
    if float(entry.get("weight", 1.0)) <= 0:
        raise ValueError(f"input_cfg: weight {entry['weight']} is not above 0.")
    return str(kind)
