"""NEST speech pre-training: NeMo's numbers on its own feet.

>>> from nest_ssl import load
>>> model = load("nest.nemo")
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from nest_ssl._version import __version__

if TYPE_CHECKING:
    from nest_ssl.checkpoint import CheckpointError, load
    from nest_ssl.config import ConfigError
    from nest_ssl.model import EncDecDenoiseMaskedTokenPredModel, EncDecMaskedTokenPredModel

__all__ = [
    "CheckpointError",
    "ConfigError",
    "EncDecDenoiseMaskedTokenPredModel",
    "EncDecMaskedTokenPredModel",
    "__version__",
    "load",
]

# torch takes two seconds to import: wait until something needs it, so that `nest-ssl --help` and the workers of
# `nest-ssl prepare` start at once.
_HOMES = {
    "CheckpointError": "nest_ssl.checkpoint",
    "ConfigError": "nest_ssl.config",
    "EncDecDenoiseMaskedTokenPredModel": "nest_ssl.model",
    "EncDecMaskedTokenPredModel": "nest_ssl.model",
    "load": "nest_ssl.checkpoint",
}


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'nest_ssl' has no attribute '{name}'")
    return getattr(importlib.import_module(_HOMES[name]), name)
