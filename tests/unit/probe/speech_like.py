"""Audio and checkpoints for tests of features and probes: synthetic, small, and distinguished by their pitch."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import soundfile

from tests.helpers import tiny_model

RATE = 16_000


def tone(duration_s: float, pitch_hz: float, seed: int) -> npt.NDArray[np.float32]:
    """Harmonics of a pitch that falls and rises, and some noise."""
    rng = np.random.default_rng(seed)
    seconds = np.arange(int(duration_s * RATE)) / RATE
    phase = 2 * np.pi * np.cumsum(pitch_hz * (1 + 0.05 * np.sin(2 * np.pi * 2 * seconds + rng.uniform(0, 6)))) / RATE
    signal = sum(np.sin(k * phase) / k for k in range(1, 6))
    out: npt.NDArray[np.float32] = (0.1 * signal + 0.01 * rng.standard_normal(len(seconds))).astype(np.float32)
    return out


def write_corpus(folder: Path, durations_s: list[float], **extra: list[Any]) -> Path:
    """Write wave files, and a manifest that lists them with their `extra` keys."""
    folder.mkdir(parents=True, exist_ok=True)
    lines = []
    for number, duration_s in enumerate(durations_s):
        soundfile.write(folder / f"{number}.wav", tone(duration_s, 100 + 25 * (number % 8), number), RATE)
        line = {"audio_filepath": f"{number}.wav", "duration": duration_s}
        lines.append(line | {name: values[number] for name, values in extra.items()})
    manifest = folder / "manifest.jsonl"
    manifest.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return manifest


def write_checkpoint(path: Path, overrides: dict[str, Any] | None = None, seed: int = 0) -> Path:
    tiny_model(overrides, seed).save_to(path)
    return path


def read_lines(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]
