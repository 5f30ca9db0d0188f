"""Fifty training steps that NeMo was asked to do: batches, masks and settings. Imported by the recorder under NeMo too.

B batch, N samples, T frames.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

START = Path(__file__).parent / "golden" / "pre_conv.nemo"
RECORDED = Path(__file__).parent / "nemo_training.npz"

NUM_STEPS = 50
NUM_BATCHES = 5
"""Different batches; the run goes through them again and again."""
BLOCK_FRAMES = 40

# A warm-up of 20 steps reaches a rate of 0.04, where rounding grows: NeMo with 1 thread and with 2 then differs from
# itself by 1.3e-3. With 1000 steps the two programs agree to 3e-7.
OPTIM: dict[str, Any] = {
    "name": "adamw",
    "lr": 1.0,
    "betas": [0.9, 0.98],
    "weight_decay": 1e-3,
    "sched": {"name": "NoamAnnealing", "d_model": 32, "warmup_steps": 1000, "min_lr": 1e-6, "max_steps": NUM_STEPS},
}


def batch(step: int) -> dict[str, Tensor]:
    """Clean and noisy waveforms (B, N) and lengths (B,): gliding harmonic tones, and noise over them."""
    random = np.random.RandomState(100 + step % NUM_BATCHES)
    lengths = random.randint(20_000, 40_000, size=4)
    seconds = np.arange(lengths.max()) / 16_000
    pitch_hz = random.uniform(80, 250, size=(4, 1)) * (1 + 0.3 * np.sin(2 * np.pi * random.rand(4, 1) * 4 * seconds))
    phase = 2 * np.pi * np.cumsum(pitch_hz, axis=1) / 16_000
    clean = sum(random.uniform(0, 0.1, size=(4, 1)) * np.sin(k * phase) for k in range(1, 12))
    clean = (clean + 0.003 * random.randn(*phase.shape)) * (np.arange(lengths.max()) < lengths[:, None])
    noisy = clean + 0.03 * random.randn(*phase.shape)
    return {
        "audio": torch.tensor(clean).float(),
        "audio_len": torch.tensor(lengths),
        "noisy_audio": torch.tensor(noisy).float(),
        "noisy_audio_len": torch.tensor(lengths),
    }


def mask(step: int, lengths_B: Tensor, num_frames: int) -> Tensor:
    """(B, T) three blocks of masked frames in every utterance, inside its length."""
    random = np.random.RandomState(1000 + step)
    mask_BT = torch.zeros(len(lengths_B), num_frames, dtype=torch.bool)
    for row, length in enumerate(lengths_B.tolist()):
        for start in random.randint(0, int(length) - BLOCK_FRAMES, size=3):
            mask_BT[row, start : start + BLOCK_FRAMES] = True
    return mask_BT
