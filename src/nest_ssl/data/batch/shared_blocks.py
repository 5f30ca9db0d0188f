"""Memory that a loader process shares with the trainer and uses again.

Fresh shared memory costs more than what is written into it: its pages are made, mapped on both sides, and freed. So a
loader process keeps blocks, a batch borrows two of them, and the trainer gives them back when it has copied the batch
into page-locked memory. Without such a copy nobody knows when a batch is done with, and every batch is in fresh memory.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.utils.data import get_worker_info

MAX_BLOCKS = 16
"""Of a loader process: for the batch being made, those waiting (`prefetch_factor`) and the one being copied."""


@dataclass
class Loan:
    """The blocks that a batch lies in."""

    lent: Tensor
    """(MAX_BLOCKS,) of the loader process: 1 while the trainer may still read the block."""
    numbers: list[int]

    def give_back(self) -> None:
        self.lent[self.numbers] = 0


class Blocks:
    """The blocks of one loader process."""

    def __init__(self) -> None:
        self.lent = torch.zeros(MAX_BLOCKS, dtype=torch.uint8).share_memory_()
        self.blocks: list[torch.UntypedStorage] = []
        self.taken: list[int] = []
        """For the batch that is being made."""

    def take(self, num_bytes: int) -> torch.UntypedStorage:
        """A block of at least this size that nobody reads; a fresh one when there is none."""
        free = [number for number in range(len(self.blocks)) if not self.lent[number]]
        number = next((number for number in free if self.blocks[number].nbytes() >= num_bytes), None)
        if number is None:
            block = _fresh(_with_room(num_bytes))
            if free:
                number = free[0]
                self.blocks[number] = block
            elif len(self.blocks) < MAX_BLOCKS:
                number = len(self.blocks)
                self.blocks.append(block)
            else:
                return block
        self.lent[number] = 1
        self.taken.append(number)
        return self.blocks[number]

    def loan(self) -> Loan:
        """What was taken since the last time."""
        numbers, self.taken = self.taken, []
        return Loan(self.lent, numbers)


_of_this_process: Blocks | None = None


def keep_blocks(worker_id: int = 0) -> None:
    """From now on this loader process uses its memory again; every batch then has a loan that must be given back."""
    global _of_this_process
    _of_this_process = Blocks()


def empty(num_rows: int, num_samples: int) -> Tensor:
    """(B, N) float32, uninitialised; inside a loader process in shared memory, which saves a copy to the trainer."""
    if get_worker_info() is None:
        return torch.empty(num_rows, num_samples)
    num_bytes = 4 * num_rows * num_samples
    block = _fresh(num_bytes) if _of_this_process is None else _of_this_process.take(num_bytes)
    return torch.tensor([], dtype=torch.float32).set_(block, 0, (num_rows, num_samples))  # type: ignore[call-overload,no-any-return]


def loan() -> Loan | None:
    """Of what `empty` gave since the last time; None where memory is not used again."""
    return None if _of_this_process is None else _of_this_process.loan()


def _with_room(num_bytes: int) -> int:
    """Rounded up by at most an eighth: the next batches are a little longer or shorter."""
    step = max(4096, 1 << max(num_bytes.bit_length() - 4, 0))
    return -(-num_bytes // step) * step


def _fresh(num_bytes: int) -> torch.UntypedStorage:
    block: torch.UntypedStorage = torch.UntypedStorage._new_shared(num_bytes)
    return block
