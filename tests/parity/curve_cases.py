"""Training curves and mels that are compared with NeMo's to 1e-5. Imported by the recorder under NeMo too.

Model, optimizer and masks are those of training_case.py; the batches are twice as large. With its smaller ones and a
warm-up of 200 steps rounding grows tenfold every ten steps: a change of all weights by 1e-7 moves the loss of step 50
by 6e-4, and NeMo with 1 thread and with 2 differs from itself by 8e-4. With these, such a change moves no loss by more
than 5e-6 (six draws), and NeMo agrees with itself to 1e-6.

B batch, N samples.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from tests.parity import training_case

RECORDED = Path(__file__).parent / "nemo_curves.npz"
GOLDEN = Path(__file__).parent / "golden"

BATCH_SIZE = 8
CURVES = [(warmup_steps, num_threads) for warmup_steps in (200, 1000) for num_threads in (1, 2)]

MELS = [(model, signal) for model in ("pre_conv", "xlarge_style") for signal in ("clean", "noisy", "voiced", "low")]
"""80 and 128 mels, each of four signals."""
EVERY_NTH_FRAME = 5
"""Of the mels, every fifth frame is recorded; they are normalised over all of them."""


def optim(warmup_steps: int) -> dict[str, Any]:
    """The `optim:` section of training_case.py with another warm-up."""
    return {**training_case.OPTIM, "sched": {**training_case.OPTIM["sched"], "warmup_steps": warmup_steps}}


def batch(step: int) -> dict[str, Tensor]:
    """Clean and noisy waveforms (B, N) and lengths (B,), made as those of training_case.py; five batches in turn."""
    random = np.random.RandomState(100 + step % training_case.NUM_BATCHES)
    lengths = random.randint(30_000, 50_000, size=BATCH_SIZE)
    seconds = np.arange(lengths.max()) / 16_000
    each = (BATCH_SIZE, 1)
    pitch_hz = random.uniform(80, 250, size=each) * (1 + 0.3 * np.sin(2 * np.pi * random.rand(*each) * 4 * seconds))
    phase = 2 * np.pi * np.cumsum(pitch_hz, axis=1) / 16_000
    clean = sum(random.uniform(0, 0.1, size=each) * np.sin(k * phase) for k in range(1, 12))
    clean = (clean + 0.003 * random.randn(*phase.shape)) * (np.arange(lengths.max()) < lengths[:, None])
    noisy = clean + 0.03 * random.randn(*phase.shape)
    return {
        "audio": torch.tensor(clean).float(),
        "audio_len": torch.tensor(lengths),
        "noisy_audio": torch.tensor(noisy).float(),
        "noisy_audio_len": torch.tensor(lengths),
    }


def signal(name: str) -> tuple[Tensor, Tensor]:
    """Waveforms (B, N) and lengths (B,): `clean` and `noisy` are sweeps, `voiced` has the harmonics of a voice.

    Pre-emphasis subtracts neighbouring samples, which nearly cancel where low tones are strong, as in `voiced` and
    `low`: what it leaves there shows how often the product was rounded.
    """
    if name in ("clean", "noisy"):
        with np.load(GOLDEN / "batch.npz") as arrays:
            return torch.from_numpy(arrays[{"clean": "audio"}.get(name, name)]), torch.from_numpy(arrays["audio_len"])
    if name == "voiced":
        given = training_case.batch(0)
        return given["audio"], given["audio_len"]
    random = np.random.RandomState(3)
    lengths = np.array([32_000, 25_417])
    seconds = np.arange(lengths.max()) / 16_000
    tones = np.stack([np.sin(2 * np.pi * hz * seconds * (1 + 0.1 * seconds)) for hz in (60.0, 110.0)])
    audio = (0.5 * tones + 1e-4 * random.randn(*tones.shape)) * (np.arange(lengths.max()) < lengths[:, None])
    return torch.tensor(audio).float(), torch.tensor(lengths)
