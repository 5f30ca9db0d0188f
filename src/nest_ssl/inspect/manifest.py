"""The contents of a manifest: durations, and what the headers of its files say."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from nest_ssl.audio import AudioError, AudioInfo, audio_info
from nest_ssl.audio.read import MIN_SHARE
from nest_ssl.data.manifest.read import Utterance
from nest_ssl.data.sources.files import ManifestDataset
from nest_ssl.drawing.draw import round_step


@dataclass(frozen=True)
class UnusableFile:
    """A file that training would have to replace, and why."""

    name: str
    reason: str


@dataclass(frozen=True)
class Histogram:
    """Utterances by duration: `counts[i]` last from `edges_s[i]` up to `edges_s[i + 1]`; the last bin has no end."""

    edges_s: list[float]
    counts: list[int]
    open_end: bool
    """The last bin includes utterances beyond its end."""


@dataclass(frozen=True)
class ManifestFacts:
    """A manifest, or several taken together."""

    name: str
    paths: list[str]
    """Paths of the manifest files."""
    durations_s: NDArray[np.float64]
    """Duration of every utterance, from the manifest or else the header; NaN where neither is known."""
    num_stated: int
    """Utterances whose duration the manifest states."""
    num_looked_at: int
    """Files whose headers were read."""
    rates: Counter[int]
    """Files by sample rate in Hz; this and the next two count the files that could be opened."""
    formats: Counter[str]
    channels: Counter[int]
    unusable: list[UnusableFile]
    """Among the examined files."""

    @property
    def num_utterances(self) -> int:
        return len(self.durations_s)

    @property
    def known_s(self) -> NDArray[np.float64]:
        return self.durations_s[~np.isnan(self.durations_s)]

    @property
    def hours(self) -> float:
        """Hours of all utterances; those of unknown duration count with the mean of the others."""
        known_s = self.known_s
        return float(known_s.mean()) * self.num_utterances / 3600 if len(known_s) else 0.0

    @property
    def hours_are_estimated(self) -> bool:
        return len(self.known_s) < self.num_utterances

    @property
    def is_sample(self) -> bool:
        """Rates, formats and unusable files describe only a sample."""
        return self.num_looked_at < self.num_utterances

    def percentiles_s(self, percents: Sequence[float]) -> list[float]:
        known_s = self.known_s
        return [float(value) for value in np.percentile(known_s, percents)] if len(known_s) else []

    def between(self, least_s: float | None, most_s: float | None) -> NDArray[np.float64]:
        """Known durations that pass the filters of training; compared in float32, as the filters do."""
        known_s = self.known_s.astype(np.float32)
        low, high = np.float32(least_s or 0.0), np.float32(np.inf if most_s is None else most_s)
        inside: NDArray[np.bool_] = (known_s >= low) & (known_s <= high)
        return self.known_s[inside]


def look_at(sources: Sequence[ManifestDataset], *, max_files: int, seed: int = 0) -> ManifestFacts:
    """Facts about all utterances in `sources`; reads the headers of up to `max_files`, chosen by `seed`."""
    durations_s = np.concatenate([source.durations_s for source in sources]).astype(np.float64)
    num_stated = int(np.count_nonzero(~np.isnan(durations_s)))
    infos: list[AudioInfo] = []
    unusable: list[UnusableFile] = []
    chosen = choose(len(durations_s), max_files, seed)
    for index in chosen.tolist():
        source, within = find(sources, index)
        utterance = source.utterance(within)
        try:
            info = _header(source, within, utterance)
        except AudioError as error:
            unusable.append(UnusableFile(error.path, error.reason))
            continue
        infos.append(info)
        if np.isnan(durations_s[index]):
            durations_s[index] = info.duration_s - utterance.offset_s
    return ManifestFacts(
        name=", ".join(source.manifest.name for source in sources),
        paths=[path for source in sources for path in source.manifest.paths],
        durations_s=durations_s,
        num_stated=num_stated,
        num_looked_at=len(chosen),
        rates=Counter(info.sample_rate for info in infos),
        formats=Counter(info.format for info in infos),
        channels=Counter(info.num_channels for info in infos),
        unusable=unusable,
    )


def find(sources: Sequence[ManifestDataset], index: int) -> tuple[ManifestDataset, int]:
    """The dataset that contains utterance `index`, counted over all of them, and its number there."""
    for source in sources:
        if index < len(source):
            return source, index
        index -= len(source)
    raise IndexError(index)


def choose(num_all: int, num_wanted: int, seed: int) -> NDArray[np.int64]:
    """`num_wanted` random numbers below `num_all`, or all of them, in order."""
    if num_wanted >= num_all:
        return np.arange(num_all)
    return np.sort(np.random.default_rng(seed).choice(num_all, num_wanted, replace=False))


def _header(source: ManifestDataset, index: int, utterance: Utterance) -> AudioInfo:
    """The file's header; AudioError if it cannot be opened or is shorter than its line states."""
    audio, name = source.source(index, utterance)
    info = audio_info(audio, name=name)
    left_s = info.duration_s - utterance.offset_s
    if left_s <= 0:
        offset = f" after the offset of {utterance.offset_s:g} s" if utterance.offset_s else ""
        raise AudioError(name, f"no samples{offset}")
    if utterance.duration_s is not None and left_s < MIN_SHARE * utterance.duration_s:
        raise AudioError(name, f"{left_s:.2f} s of audio where the manifest states {utterance.duration_s:.2f} s")
    return info


def duration_histogram(known_s: NDArray[np.float64], *, max_bins: int = 24) -> Histogram:
    """Bins of a round width from 0 to the longest, or to the 99.5th percentile if a few are far longer."""
    longest_s, most_s = float(known_s.max()), float(np.percentile(known_s, 99.5))
    end_s = longest_s if longest_s <= 2 * most_s else most_s
    width_s = round_step(max(end_s, 1e-3) / max_bins)
    num_bins = max(1, int(np.floor(end_s / width_s)) + 1)
    bins = np.minimum((known_s / width_s).astype(np.int64), num_bins - 1)
    edges_s = [round(width_s * i, 9) for i in range(num_bins + 1)]
    counts = np.bincount(bins, minlength=num_bins).tolist()
    return Histogram(edges_s, counts, open_end=longest_s >= edges_s[-1])
