"""Functions run on several processes that form a gloo group, for tests of what ranks do together."""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import distributed
from torch.multiprocessing.spawn import spawn

from nest_ssl.training.parallel import World

OnRank = Callable[..., Any]


def on_ranks(function: OnRank, size: int, *arguments: Any) -> list[Any]:
    """What `function(world, *arguments)` returns on each of `size` ranks; it must be importable."""
    with tempfile.TemporaryDirectory() as folder:
        spawn(_rank, (function, size, arguments, folder), nprocs=size)
        return [torch.load(Path(folder, f"{rank}.pt"), weights_only=False) for rank in range(size)]


def _rank(rank: int, function: OnRank, size: int, arguments: tuple[Any, ...], folder: str) -> None:
    torch.set_num_threads(1)
    distributed.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=size)
    result = function(World(rank, rank, size, torch.device("cpu")), *arguments)
    torch.save(result, Path(folder, f"{rank}.pt"))
    distributed.barrier()
    distributed.destroy_process_group()
