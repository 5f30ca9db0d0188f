"""Draws of NeMo 2.7.3 for the tests of mixing and noise: run it with NeMo's interpreter.

    python -m tests.parity.record_nemo_mixing

Writes data/nemo_mixing.npz: for each augmentation what was added to 6,000 utterances (see mixing_draws.py), and for
noise the level of white noise in place of silence, the start of segments, and the chosen files.
"""

from __future__ import annotations

import random
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import soundfile
from nemo.collections.asr.data.ssl_dataset import AudioNoiseBatch, load_noise_audio, sample_noise
from nemo.collections.asr.modules.ssl_modules import augmentation

from tests.parity.mixing_draws import CONFIGS, RECORDED, measure, tensors

NUM_BATCHES = 1000
NUM_NOISE_DRAWS = 1500
RATE = 16000


def batches() -> Iterator[Any]:
    while True:
        yield AudioNoiseBatch(**tensors())


def noise_draws(folder: Path) -> dict[str, Any]:
    """Files of 1 s whose samples count up, so that the first one tells where a segment of 0.1 s starts."""
    ramp = (np.arange(1, RATE + 1) / (2 * RATE)).astype(np.float32)
    files = [{"audio_filepath": str(folder / f"{k}.wav"), "duration": 1.0} for k in range(4)]
    for k, file in enumerate(files):
        soundfile.write(file["audio_filepath"], ramp * 2.0**-k, RATE, subtype="FLOAT")
    silent = {"audio_filepath": str(folder / "silent.wav"), "duration": 0.1}
    soundfile.write(silent["audio_filepath"], np.zeros(RATE // 10, np.float32), RATE)

    white = [load_noise_audio(silent, RATE, RATE // 10)[0].numpy() for _ in range(NUM_NOISE_DRAWS)]
    ramps = [sample_noise(files, RATE, RATE // 10)[0].numpy() for _ in range(NUM_NOISE_DRAWS)]
    scale = np.array([(row[-1] - row[0]) / (len(row) - 1) * 2 * RATE for row in ramps])
    return {
        "noise/white_db": np.array([20 * np.log10(row.std()) for row in white], np.float32),
        "noise/start_s": np.array([row[0] * 2 / s for row, s in zip(ramps, scale, strict=True)], np.float32),
        "noise/file": np.round(-np.log2(scale)).astype(np.uint8),
    }


def main() -> None:
    random.seed(0)
    np.random.seed(0)  # noqa: NPY002 - NeMo draws from the global state
    recorded: dict[str, Any] = {}
    for name, arguments in CONFIGS.items():
        draws = measure(getattr(augmentation, name)(**arguments), batches(), NUM_BATCHES)
        recorded.update({f"{name}/{column}": values.astype(np.float32) for column, values in draws.items()})
    with tempfile.TemporaryDirectory() as folder:
        recorded.update(noise_draws(Path(folder)))
    RECORDED.parent.mkdir(exist_ok=True)
    np.savez_compressed(RECORDED, **recorded)
    print(RECORDED, RECORDED.stat().st_size, "bytes")


if __name__ == "__main__":
    main()
