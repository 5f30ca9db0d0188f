"""`trainer.strategy: fsdp`: the encoder's weights, gradients and optimizer state shared out over the GPUs."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import lightning.pytorch as pl
from lightning.pytorch.strategies import FSDPStrategy
from torch import Tensor
from torch.distributed.fsdp import FullyShardedDataParallel, MixedPrecision

from nest_ssl.modules.conformer import ConformerLayer

if TYPE_CHECKING:
    from nest_ssl.training.module import PretrainingModule


def fsdp(**options: Any) -> FSDPStrategy:
    """One shard group per conformer layer; numbers as without sharding.

    FSDP's own mixed precision would cast the audio and the mel filters to bf16: the weights stay in float32, and
    autocast works as on one GPU.
    """
    return FSDPStrategy(**{"auto_wrap_policy": {ConformerLayer}, "mixed_precision": MixedPrecision(), **options})


def prepare(module: PretrainingModule, trainer: pl.Trainer) -> None:
    """Keep what is not trained, the float64 codebooks among it, whole on every GPU. To be called before wrapping."""
    if not isinstance(trainer.strategy, FSDPStrategy):
        return
    model = module.model
    whole = [model.preprocessor, model.quantizer, model.mask_processor]
    for part in whole:
        part.to(trainer.strategy.root_device)
    trainer.strategy.kwargs["ignored_modules"] = whole


def clip_gradient(trainer: pl.Trainer, most: float) -> Tensor:
    """The norm of the whole gradient, which no GPU holds; the gradient is scaled down to `most`."""
    assert isinstance(trainer.strategy.model, FullyShardedDataParallel)
    return trainer.strategy.model.clip_grad_norm_(most)
