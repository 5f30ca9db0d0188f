"""A small synthetic corpus: speech-like and noise-like files with manifests."""

from __future__ import annotations

import importlib.util
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import soundfile
import torch

from nest_ssl.config import AugmentorConfig, DatasetConfig
from nest_ssl.data import AudioNoiseBatch

RATE = 16000
FIELDS = ("audio", "audio_len", "noise", "noise_len", "noisy_audio", "noisy_audio_len")
NEEDS_LHOTSE = pytest.mark.skipif(importlib.util.find_spec("lhotse") is None, reason="needs the extra 'lhotse'")


@dataclass(frozen=True)
class Corpus:
    folder: Path
    speech: Path
    noise: Path
    durations_s: list[float]

    def config(self, **changed: Any) -> DatasetConfig:
        """A configuration with noise and mixing that accepts files of 0.1 s."""
        settings: dict[str, Any] = {
            "manifest_filepath": str(self.speech),
            "noise_manifest": str(self.noise),
            "batch_size": 4,
            "shuffle": True,
            "min_audio_len_secs": 0.1,
            "batch_augmentor": AugmentorConfig(prob=0.6, noise_ratio=0.5),
        }
        return DatasetConfig(**{**settings, **changed})


def write_manifest(path: Path, lines: list[dict[str, Any]]) -> Path:
    path.write_text("".join(json.dumps(line) + "\n" for line in lines), encoding="utf-8")
    return path


def make_corpus(folder: Path, num_speech: int = 22, num_noise: int = 3) -> Corpus:
    """Utterance i is noise around the value 0.1 + i / 1000, of 0.1 to 0.4 s; noise files last 1 s."""
    rng = np.random.default_rng(0)
    folder.mkdir(parents=True, exist_ok=True)
    speech, noise, durations_s = [], [], []
    for i in range(num_speech):
        num_samples = int(rng.integers(RATE // 10, 4 * RATE // 10))
        samples = 0.1 + i / 1000 + 0.05 * rng.standard_normal(num_samples)
        soundfile.write(folder / f"speech_{i}.wav", samples, RATE)
        durations_s.append(num_samples / RATE)
        speech.append({"audio_filepath": f"speech_{i}.wav", "duration": durations_s[-1]})
    for i in range(num_noise):
        soundfile.write(folder / f"noise_{i}.wav", 0.05 * rng.standard_normal(RATE), RATE)
        noise.append({"audio_filepath": f"noise_{i}.wav", "duration": 1.0})
    return Corpus(
        folder,
        write_manifest(folder / "speech.jsonl", speech),
        write_manifest(folder / "noise.jsonl", noise),
        durations_s,
    )


def assert_same(a: AudioNoiseBatch, b: AudioNoiseBatch) -> None:
    assert a.sample_id == b.sample_id
    assert a.audio_filepaths == b.audio_filepaths
    for name in FIELDS:
        assert torch.equal(getattr(a, name), getattr(b, name)), name
