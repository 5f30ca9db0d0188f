"""Randomness of a run as a function of (seed, place): nothing to save, and exact after any restart."""

from __future__ import annotations

import random
from enum import IntEnum

import numpy as np
import torch


class Stage(IntEnum):
    """Uses that must not share random numbers."""

    WEIGHTS = 0
    TRAIN = 1
    VALIDATION = 2


def seed_everything(seed: int, stage: Stage, *place: int) -> None:
    """Seed torch (all devices) and Python for one place of the run: a training batch of a rank, say.

    Masks, dither, dropout, stochastic depth and attention contexts of a batch then depend on its place alone.
    """
    words = np.random.SeedSequence(seed, spawn_key=(int(stage), *place)).generate_state(2, np.uint64)
    torch.manual_seed(int(words[0]) & 0x7FFFFFFFFFFFFFFF)
    random.seed(int(words[1]))
