"""Batches in which every added sample tells where it comes from, and what can be measured in an augmented batch.

Shared by the recorder, which runs under NeMo's interpreter, and by the tests: imports neither NeMo nor nest_ssl.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

RECORDED = Path(__file__).parent / "data" / "nemo_mixing.npz"
BATCH_SIZE = 6
LENGTHS = (800, 880, 1000, 1120, 1280, 1600)
NOISE = -1
"""Source number of the noise; utterances are numbered from 0."""

COMMON = {
    "prob": 0.6,
    "noise_ratio": 0.4,
    "min_r_speech": -5.0,
    "max_r_speech": 5.0,
    "min_r_noise": -5.0,
    "max_r_noise": 20.0,
    "min_mix_rate": 0.2,
    "max_mix_rate": 0.8,
}
CONFIGS: dict[str, dict[str, Any]] = {
    "SpeakerNoiseAugmentation": COMMON,
    "MultiSpeakerNoiseAugmentation": {
        **COMMON,
        "min_num_segments": 1,
        "max_num_segments": 5,
        "min_num_speakers": 1,
        "max_num_speakers": 4,
    },
}

Draws = dict[str, npt.NDArray[Any]]


def tensors() -> dict[str, torch.Tensor]:
    """Fields of a batch. In utterance j every second sample is 1 and the others 1.2 + 0.2 j; in the noise 1 and -1."""
    audio = torch.zeros(BATCH_SIZE, max(LENGTHS))
    noise = torch.zeros(BATCH_SIZE, max(LENGTHS))
    for j, length in enumerate(LENGTHS):
        audio[j, :length] = 1.0
        audio[j, 1:length:2] = 1.2 + 0.2 * j
        noise[j, :length] = 1.0
        noise[j, 1:length:2] = -1.0
    lengths = torch.tensor(LENGTHS)
    return {"audio": audio, "audio_len": lengths, "noise": noise, "noise_len": lengths.clone()}


def source_of(samples: npt.NDArray[np.float32]) -> npt.NDArray[np.int64]:
    """Which source each sample (but the last) belongs to, whatever the gain; -9 at the border of two."""
    with np.errstate(divide="ignore", invalid="ignore"):
        ratio = samples[1:] / samples[:-1]
    ratio = np.where((ratio > 0) & (ratio < 1), 1 / ratio, ratio)
    number = np.where(ratio < 0, NOISE, np.round((ratio - 1.2) / 0.2))
    exact = np.abs(ratio - np.where(ratio < 0, -1, 1.2 + 0.2 * number)) < 1e-3
    return np.where(exact & ((ratio < 0) | (number >= 0)), number, -9).astype(np.int64)


def measure(augment: Callable[[Any], Any], batches: Iterator[Any], num_batches: int) -> Draws:
    """What was added to each utterance: `source` -1 noise, 0 speech, 1 not selected; NaN where that has no meaning."""
    columns: dict[str, list[float]] = {
        name: [] for name in ("source", "ratio_db", "mix_share", "start_share", "num_speakers", "longest_share")
    }
    raw = tensors()["noise"].numpy()
    for _, batch in zip(range(num_batches), batches, strict=False):
        out = augment(batch)
        for j, length in enumerate(LENGTHS):
            row = _measure_row(out.audio[j, :length].numpy(), out.noise[j, :length].numpy(), raw[j, :length])
            for name, value in row.items():
                columns[name].append(value)
    return {name: np.array(values, dtype=np.float32) for name, values in columns.items()}


def _measure_row(
    audio: npt.NDArray[np.float32], added: npt.NDArray[np.float32], raw: npt.NDArray[np.float32]
) -> dict[str, float]:
    nan = float("nan")
    row = dict.fromkeys(("ratio_db", "mix_share", "start_share", "num_speakers", "longest_share"), nan)
    if np.array_equal(added, raw):
        return {"source": 1.0, **row}
    where = np.flatnonzero(added)
    sources = source_of(added[where])
    found, counts = np.unique(sources[sources != -9], return_counts=True)
    runs = np.split(where, np.flatnonzero(np.diff(where) > 1) + 1)
    return {
        "source": -1.0 if found[0] == NOISE else 0.0,
        "ratio_db": 10 * np.log10(np.square(audio).sum() / np.square(added).sum()),
        "mix_share": len(where) / len(audio),
        "start_share": where[0] / len(audio),
        "num_speakers": nan if found[0] == NOISE else float(np.count_nonzero(counts > 2)),
        "longest_share": max(map(len, runs)) / len(where),
    }
