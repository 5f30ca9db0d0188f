"""Pre-training. loop.py shows what a run does; train.py how to start one.

>>> from nest_ssl.training import Trainer, exp_manager, hydra_runner, maybe_init_from_pretrained_checkpoint
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from nest_ssl.training.run import hydra_runner
    from nest_ssl.training.trainer import Trainer, exp_manager, maybe_init_from_pretrained_checkpoint

__all__ = ["Trainer", "exp_manager", "hydra_runner", "maybe_init_from_pretrained_checkpoint"]

# torch takes two seconds to import: a launcher, which starts the ranks, does without it.
_HOMES = {
    "Trainer": "nest_ssl.training.trainer",
    "exp_manager": "nest_ssl.training.trainer",
    "hydra_runner": "nest_ssl.training.run",
    "maybe_init_from_pretrained_checkpoint": "nest_ssl.training.trainer",
}


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(_HOMES[name]), name)
