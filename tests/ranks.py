"""Functions run on several processes that form a process group, for tests of what ranks do together.

gloo on CPUs; NCCL with all ranks on one GPU, where each pretends to be a host of its own.
"""

from __future__ import annotations

import faulthandler
import os
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import distributed
from torch.multiprocessing.spawn import spawn

from nest_ssl.training.parallel import World

OnRank = Callable[..., Any]


def on_ranks(function: OnRank, size: int, *arguments: Any, device: str = "cpu") -> list[Any]:
    """What `function(world, *arguments)` returns on each of `size` ranks; it must be importable."""
    with tempfile.TemporaryDirectory() as folder:
        spawn(_rank, (function, size, arguments, folder, device), nprocs=size)
        return [torch.load(Path(folder, f"{rank}.pt"), weights_only=False) for rank in range(size)]


def _rank(rank: int, function: OnRank, size: int, arguments: tuple[Any, ...], folder: str, device_type: str) -> None:
    faulthandler.enable()  # a rank that crashes shows where
    torch.set_num_threads(1)
    on_gpu = device_type == "cuda"
    device = torch.device("cuda", 0) if on_gpu else torch.device("cpu")
    if on_gpu:
        os.environ.update(NCCL_HOSTID=f"rank{rank}", NCCL_SOCKET_IFNAME="lo", NCCL_IB_DISABLE="1")
        torch.cuda.set_device(device)
    distributed.init_process_group(
        "nccl" if on_gpu else "gloo",
        init_method=f"file://{folder}/store",
        rank=rank,
        world_size=size,
        device_id=device if on_gpu else None,
    )
    world = World(rank, rank, size, device, gradient_group=distributed.new_group())
    result = function(world, *arguments)
    torch.save(result, Path(folder, f"{rank}.pt"))
    distributed.barrier()
    distributed.destroy_process_group()
