"""Random numbers for a CPU, in less time than torch takes: its generators give the seeds."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import numpy as np
import torch
from torch import Tensor

_PART = 1 << 18  # the same on every machine: numbers do not depend on how many cores it has


def standard_normal(size: int, generator: torch.Generator | None = None) -> Tensor:
    """(size,) float32; torch draws them on one core."""
    numbers = torch.empty(size)
    parts = numbers.split(_PART)
    seeds = torch.empty(len(parts), dtype=torch.int64).random_(generator=generator).tolist()
    generators = [torch.Generator().manual_seed(seed) for seed in seeds]
    with ThreadPoolExecutor(torch.get_num_threads()) as pool:
        list(pool.map(lambda part, its: part.normal_(generator=its), parts, generators))
    return numbers


def random_chances(size: int, chance: float) -> Tensor:
    """(size,) uint8, 1 with this chance, to one in 65536, else 0: of 16 random bits each, not of a random number."""
    seed = int(torch.empty((), dtype=torch.int64).random_())
    words = np.random.SFC64(seed).random_raw((size + 3) // 4)
    return torch.from_numpy((words.view(np.uint16)[:size] < round(chance * 2**16)).view(np.uint8))
