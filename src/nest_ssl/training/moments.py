"""Questions to Lightning's loops: is this a moment to save, to stop, to ask?"""

from __future__ import annotations

import lightning.pytorch as pl

ASK_EVERY_N_STEPS = 10
"""The clocks of ranks differ; so several ranks ask rank 0, but not in every step, as Lightning does."""


def validation_is_next(trainer: pl.Trainer) -> bool:
    """Whether a validation follows the batch that is being finished."""
    fetcher = trainer.fit_loop._data_fetcher
    assert fetcher is not None
    return trainer.fit_loop.epoch_loop._should_check_val_fx(fetcher)


def is_within_step(trainer: pl.Trainer) -> bool:
    """Whether gradients of an unfinished step are held (`accumulate_grad_batches`), which no checkpoint keeps."""
    return trainer.fit_loop.epoch_loop._should_accumulate()


def asks_rank_0(trainer: pl.Trainer) -> bool:
    """Whether all ranks ask rank 0 for the time after this step."""
    return trainer.world_size == 1 or trainer.global_step % ASK_EVERY_N_STEPS == 0
