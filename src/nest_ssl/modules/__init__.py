"""The parts of the model, under NeMo's names."""

from nest_ssl.modules.conformer import ConformerEncoder
from nest_ssl.modules.decoder import MultiSoftmaxDecoder
from nest_ssl.modules.features import AudioToMelSpectrogramPreprocessor
from nest_ssl.modules.loss import MultiMLMLoss
from nest_ssl.modules.masking import RandomBlockMasking
from nest_ssl.modules.quantizer import RandomProjectionVectorQuantizer

__all__ = [
    "AudioToMelSpectrogramPreprocessor",
    "ConformerEncoder",
    "MultiMLMLoss",
    "MultiSoftmaxDecoder",
    "RandomBlockMasking",
    "RandomProjectionVectorQuantizer",
]
