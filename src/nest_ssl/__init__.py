"""NEST speech pre-training: NeMo's numbers on its own feet.

>>> from nest_ssl import load
>>> model = load("nest.nemo")
"""

from nest_ssl._version import __version__
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
