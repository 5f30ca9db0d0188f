"""Batches of a run's data in this process, to be looked at. B batch, N samples."""

from __future__ import annotations

import os
from dataclasses import replace

from torch import Tensor

from nest_ssl.audio import AudioError
from nest_ssl.config import DatasetConfig
from nest_ssl.data import build_loader
from nest_ssl.data.batch.loader import PlannedLoader


def open_batches(dataset: DatasetConfig, seed: int, *, same_every_epoch: bool = False) -> PlannedLoader:
    """The batches that training with this seed gets, on one rank; bad files stop nothing, and stand in each batch."""
    # One process and no page-locked memory give the same batches.
    here = replace(dataset, num_workers=0, pin_memory=False, max_bad_fraction=1.0)
    return build_loader(here, seed=seed, same_every_epoch=same_every_epoch, on_read=_refuse_what_would_block)


def needed(tensor: Tensor | None) -> Tensor:
    assert tensor is not None, "the loader fills every field of a batch"
    return tensor


def _refuse_what_would_block(path: str) -> None:
    """A FIFO would keep the reader for ever; here it is one more bad file."""
    if os.path.exists(path) and not os.path.isfile(path):
        raise AudioError(path, "not a regular file")
