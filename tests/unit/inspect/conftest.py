from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import soundfile

from nest_ssl.config import ModelConfig
from nest_ssl.inspect.inspect import training_config

RATE = 16000


@dataclass(frozen=True)
class Speech:
    """A few utterances of 1.2 to 2.4 s, and two noise files, with manifests."""

    folder: Path
    durations_s: list[float]

    @property
    def manifest(self) -> Path:
        return self.folder / "speech.jsonl"

    @property
    def noise(self) -> Path:
        return self.folder / "noise.jsonl"

    def config(self, overrides: Sequence[str] = (), manifest: Path | None = None) -> ModelConfig:
        sizes = ["model.train_ds.num_buckets=3", "model.train_ds.batch_size=4"]
        path = str(manifest or self.manifest)
        return training_config(path, str(self.noise), [*sizes, *overrides], "nest_fast-conformer", None)

    def other(self, name: str, lines: list[dict[str, Any]]) -> Path:
        """Another manifest next to the files."""
        return write_lines(self.folder / name, lines)


def write_lines(path: Path, lines: list[dict[str, Any]]) -> Path:
    path.write_text("".join(json.dumps(line) + "\n" for line in lines), encoding="utf-8")
    return path


@pytest.fixture
def speech(tmp_path: Path) -> Speech:
    rng = np.random.default_rng(0)
    durations_s = [round(float(value), 2) for value in rng.uniform(1.2, 2.4, 14)]
    lines, noises = [], []
    for i, duration_s in enumerate(durations_s):
        rate, extension = (8000, "flac") if i % 7 == 0 else (RATE, "wav")
        soundfile.write(tmp_path / f"{i}.{extension}", rng.uniform(-0.2, 0.2, round(duration_s * rate)), rate)
        lines.append({"audio_filepath": f"{i}.{extension}", "duration": duration_s})
    for i in range(2):
        soundfile.write(tmp_path / f"noise_{i}.wav", rng.uniform(-0.1, 0.1, 3 * RATE), RATE)
        noises.append({"audio_filepath": f"noise_{i}.wav", "duration": 3.0})
    write_lines(tmp_path / "speech.jsonl", lines)
    write_lines(tmp_path / "noise.jsonl", noises)
    return Speech(tmp_path, durations_s)
