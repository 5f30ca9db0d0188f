"""Features from a pre-trained encoder, for many files.

>>> from nest_ssl.extract import FeatureExtractor
>>> features = FeatureExtractor("nest.nemo", layers="all")("speech.wav")
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from nest_ssl.extract.extract import extract_features
    from nest_ssl.layer_features import FeatureExtractor

__all__ = ["FeatureExtractor", "extract_features"]

# Importing torch takes seconds: wait until it is needed.
_HOMES = {"FeatureExtractor": "nest_ssl.layer_features", "extract_features": "nest_ssl.extract.extract"}


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(_HOMES[name]), name)
