"""Where every random number of the data side comes from: generators seeded by what they are for, never by history.

A draw that depends only on the seed and the place in the plan is the same with any number of workers, and after any
restart.
"""

from __future__ import annotations

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


RandomSource = np.random.Generator | torch.Generator | Sequence[np.random.Generator] | None
"""One generator for a batch, one for each of its utterances, or none: fresh entropy."""


def generator_for(seed: int, stream: Stream, *key: int) -> np.random.Generator:
    """The generator of one use of one run; `key` says which epoch, position, dataset, …"""
    return np.random.Generator(np.random.PCG64(np.random.SeedSequence(seed, spawn_key=(int(stream), *key))))


def utterance_generators(seed: int, epoch: int, step: int, rank: int, num: int) -> list[np.random.Generator]:
    """For the noise and mixing of each utterance of one batch of the plan."""
    return [generator_for(seed, Stream.UTTERANCE, epoch, step, rank, slot) for slot in range(num)]


def one_generator(source: np.random.Generator | torch.Generator | None) -> np.random.Generator:
    """`source` as a numpy generator; a torch generator gives it one seed."""
    if isinstance(source, torch.Generator):
        return np.random.default_rng(int(torch.randint(2**62, (), generator=source)))
    return np.random.default_rng() if source is None else source


def per_utterance(source: RandomSource, num_utterances: int) -> Sequence[np.random.Generator]:
    """One generator for each utterance of a batch."""
    if isinstance(source, Sequence):
        if len(source) != num_utterances:
            raise ValueError(f"{len(source)} generators for {num_utterances} utterances")
        return source
    return [one_generator(source)] * num_utterances
