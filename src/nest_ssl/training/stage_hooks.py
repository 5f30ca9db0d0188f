"""Hooks that tell which stage of the model runs. The model knows nothing of them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import nn

from nest_ssl.fast.as_built import may_be_skipped
from nest_ssl.model import EncDecMaskedTokenPredModel
from nest_ssl.watchdog.stages import FIRST_LAYER, POSITIONS, PRE_ENCODE, Stage

Enter = Callable[[Stage, int], None]


def staged_modules(model: EncDecMaskedTokenPredModel) -> Iterator[tuple[nn.Module, Stage, int]]:
    """Every module that is a stage or a part of one."""
    yield model.preprocessor, Stage.PREPROCESSOR, 0
    yield model.quantizer, Stage.QUANTIZER, 0
    yield model.mask_processor, Stage.MASKING, 0
    yield model.encoder, Stage.ENCODER, 0
    yield model.encoder.pre_encode, Stage.ENCODER, PRE_ENCODE
    yield model.encoder.pos_enc, Stage.ENCODER, POSITIONS
    for number, layer in enumerate(model.encoder.layers):
        yield layer, Stage.ENCODER, FIRST_LAYER + number
    yield model.decoder, Stage.DECODER, 0
    yield model.loss, Stage.LOSS, 0


def attach_stage_hooks(model: EncDecMaskedTokenPredModel, enter: Enter) -> list[torch.utils.hooks.RemovableHandle]:
    """Call `enter` whenever a stage begins."""
    return [
        module.register_forward_pre_hook(_hook(enter, stage, part)) for module, stage, part in staged_modules(model)
    ]


def _hook(enter: Enter, stage: Stage, part: int) -> Callable[[nn.Module, Any], None]:
    def before(module: nn.Module, args: Any) -> None:
        # Inside a compiled graph a write to the beacon would break the graph; the stage around it is marked.
        if not torch.compiler.is_compiling():
            enter(stage, part)

    return may_be_skipped(before)  # the stage around a replayed step is marked
