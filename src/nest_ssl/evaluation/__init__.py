"""Looking at data and runs, and using a pre-trained encoder: features and probes.

>>> from nest_ssl.evaluation import FeatureExtractor
>>> features = FeatureExtractor("nest.nemo", layers="all")("speech.wav")
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from nest_ssl.evaluation.extract import extract_features
    from nest_ssl.evaluation.features import FeatureExtractor

__all__ = ["FeatureExtractor", "extract_features"]

# Pages of data need no model: wait with torch until something asks for one.
_HOMES = {"FeatureExtractor": "features", "extract_features": "extract"}


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"{__name__}.{_HOMES[name]}"), name)
