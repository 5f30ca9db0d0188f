"""The loader: a torch DataLoader over a plan, which can start at any batch and keeps count of bad files."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch.utils.data import DataLoader, Dataset, Sampler

from nest_ssl.data.batch.bad_data import BadDataLog
from nest_ssl.data.batch.batch import AudioNoiseBatch
from nest_ssl.data.batch.shared_blocks import keep_blocks
from nest_ssl.data.plan.plan import BatchSpec, Plan
from nest_ssl.freed_memory import give_back_freed_memory


class BatchSampler(Sampler[Any], ABC):
    """Hands out what each batch is made of; knows the epoch and where to start in it."""

    epoch = 0
    start = 0
    """First batch of the next iteration; used up by it."""
    same_every_epoch = False

    def set_epoch(self, epoch: int) -> None:
        """Lightning calls this at the start of every epoch, also of one that is being resumed."""
        if epoch != self.epoch and not self.same_every_epoch:
            self.epoch, self.start = epoch, 0

    def take_start(self) -> int:
        start, self.start = self.start, 0
        return start

    @abstractmethod
    def plan_hash(self) -> str: ...

    @abstractmethod
    def utterances_per_epoch(self) -> int | None: ...


class PlanSampler(BatchSampler):
    """One rank's batches of a plan."""

    def __init__(self, plan: Plan, rank: int, *, same_every_epoch: bool = False) -> None:
        if not 0 <= rank < plan.world_size:
            raise ValueError(f"rank {rank} is not in [0, {plan.world_size})")
        self.plan, self.rank, self.same_every_epoch = plan, rank, same_every_epoch

    def __iter__(self) -> Iterator[BatchSpec]:
        step, end = self.take_start(), self.plan.num_batches()
        while end is None or step < end:
            yield self.plan.batch(self.epoch, step, self.rank)
            step += 1

    def __len__(self) -> int:
        num_batches = self.plan.num_batches()
        if num_batches is None:
            raise TypeError("an endless plan has no length")
        return num_batches

    def plan_hash(self) -> str:
        return self.plan.hash()

    def utterances_per_epoch(self) -> int | None:
        return self.plan.utterances_per_epoch


class PlannedLoader(DataLoader[AudioNoiseBatch]):
    """Batches of one rank. `set_epoch` chooses the epoch; `position` and `resume` go on after batch k."""

    def __init__(
        self,
        dataset: Dataset[AudioNoiseBatch],
        sampler: BatchSampler,
        *,
        max_bad_fraction: float,
        bad_files_path: Path | None = None,
        num_workers: int = 0,
        pin_memory: bool = False,
        persistent_workers: bool = False,
        prefetch_factor: int | None = None,
    ) -> None:
        pinned = pin_memory and torch.cuda.is_available()  # torch warns otherwise
        super().__init__(
            dataset,
            batch_size=None,
            sampler=sampler,
            collate_fn=_unchanged,
            num_workers=num_workers,
            pin_memory=pinned,
            worker_init_fn=keep_blocks if pinned else None,
            # torch refuses these two without loader processes
            persistent_workers=persistent_workers and num_workers > 0,
            prefetch_factor=prefetch_factor if num_workers > 0 else None,
        )
        self.batches: BatchSampler = sampler
        self.bad_data = BadDataLog(
            max_bad_fraction=max_bad_fraction,
            utterances_per_epoch=sampler.utterances_per_epoch(),
            path=bad_files_path,
        )
        self._next_batch = 0

    @property
    def plan_hash(self) -> str:
        """To be compared between ranks before the first step."""
        return self.batches.plan_hash()

    def set_epoch(self, epoch: int) -> None:
        self.batches.set_epoch(epoch)

    def __iter__(self) -> Iterator[AudioNoiseBatch]:  # type: ignore[override]
        self._next_batch = self.batches.start
        if self._next_batch == 0 or self.bad_data.epoch != self.batches.epoch:
            self.bad_data.start_epoch(self.batches.epoch)
        if self.num_workers > 0 and self._iterator is None:
            give_back_freed_memory()
        for batch in super().__iter__():
            self._next_batch += 1
            assert batch.audio is not None
            self.bad_data.record(len(batch.audio), batch.bad_files)
            yield batch
        self._next_batch = 0

    def start_at(self, epoch: int, batch: int) -> None:
        """Let the next iteration begin with batch `batch` of `epoch`, or with the next epoch if there is none."""
        num_batches = None if self.batches.utterances_per_epoch() is None else len(self)
        if num_batches is not None and batch >= num_batches:
            epoch, batch = epoch + 1, 0
        self.batches.epoch, self.batches.start = epoch, batch
        self._next_batch = batch

    def position(self, next_batch: int | None = None) -> dict[str, Any]:
        """Taken after batch k was received, it makes the next iteration start with batch k + 1.

        A caller that reads ahead gives the number of the `next_batch` it has not used yet.
        """
        return {
            "epoch": self.batches.epoch,
            "next_batch": self._next_batch if next_batch is None else next_batch,
            "plan_hash": self.plan_hash,
            "bad_data": self.bad_data.state_dict(),
        }

    def resume(self, state: dict[str, Any]) -> None:
        if state["plan_hash"] != self.plan_hash:
            raise ValueError(
                "the checkpoint was written with another batch plan: seed, data, batch size or number of ranks have "
                "changed, so training cannot go on at the same batch. Restore them, or start a new epoch without the "
                "loader's state."
            )
        self.batches.epoch, self.batches.start = state["epoch"], state["next_batch"]
        self._next_batch = state["next_batch"]
        self.bad_data.load_state_dict(state["bad_data"], state["epoch"])


def _unchanged(batch: Any) -> Any:
    return batch
