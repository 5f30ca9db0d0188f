"""Every random number of a run: generators seeded by what they are used for, never by history.

A draw that depends only on the seed and the place in the plan is the same with any number of workers, and after a
resume.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from enum import IntEnum

import numpy as np
import torch


class Stream(IntEnum):
    """Uses that must not share random numbers."""

    ORDER = 0
    MIXTURE = 1
    SCHEDULE = 2
    UTTERANCE = 3
    SHARDS = 4
    CONTEXT = 5


RandomSource = np.random.Generator | torch.Generator | Sequence[np.random.Generator] | None
"""One generator for a batch, one for each of its utterances, or None for fresh entropy."""


def generator_for(seed: int, stream: Stream, *key: int) -> np.random.Generator:
    """Return the generator for one use in one run; `key` is the epoch, position, dataset, …"""
    return np.random.Generator(np.random.PCG64(np.random.SeedSequence(seed, spawn_key=(int(stream), *key))))


def utterance_generators(seed: int, epoch: int, step: int, rank: int, num: int) -> list[np.random.Generator]:
    """Return one generator for the noise and mixing of each utterance of one batch of the plan."""
    return [generator_for(seed, Stream.UTTERANCE, epoch, step, rank, slot) for slot in range(num)]


def one_generator(source: np.random.Generator | torch.Generator | None) -> np.random.Generator:
    """Return `source` as a numpy generator; a torch generator provides its seed."""
    if isinstance(source, torch.Generator):
        return np.random.default_rng(int(torch.randint(2**62, (), generator=source)))
    return np.random.default_rng() if source is None else source


def per_utterance(source: RandomSource, num_utterances: int) -> Sequence[np.random.Generator]:
    """Return one generator for each utterance of a batch."""
    if isinstance(source, Sequence):
        if len(source) != num_utterances:
            raise ValueError(f"{len(source)} generators for {num_utterances} utterances")
        return source
    return [one_generator(source)] * num_utterances


# ---- training and validation ----


class Use(IntEnum):
    """Uses of random numbers that must not share them."""

    WEIGHTS = 0
    TRAIN = 1
    VALIDATION = 2


def seed_everything(seed: int, use: Use, *place: int) -> None:
    """Seed torch (all devices) and Python for one place of the run, for example a training batch of a rank.

    Masks, dither, dropout, stochastic depth and attention contexts of a batch then depend on its place alone: there is
    no state to save, and a resumed run repeats them exactly.
    """
    words = np.random.SeedSequence(seed, spawn_key=(int(use), *place)).generate_state(2, np.uint64)
    torch.manual_seed(int(words[0]) & 0x7FFFFFFFFFFFFFFF)
    random.seed(int(words[1]))
