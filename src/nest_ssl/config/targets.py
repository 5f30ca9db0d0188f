"""The closed table of `_target_` names. A name outside it is an error, never an import.

Other packages add augmentations by registering their names (`nest_ssl.plugins`).
"""

from __future__ import annotations

import difflib

from nest_ssl.config.checks import quoted
from nest_ssl.plugins import augmentations

_OURS = {
    "AudioToMelSpectrogramPreprocessor": "nest_ssl.modules",
    "RandomBlockMasking": "nest_ssl.modules",
    "RandomProjectionVectorQuantizer": "nest_ssl.modules",
    "ConformerEncoder": "nest_ssl.modules",
    "MultiSoftmaxDecoder": "nest_ssl.modules",
    "MultiMLMLoss": "nest_ssl.modules",
    "SpeakerNoiseAugmentation": "nest_ssl.data",
    "MultiSpeakerNoiseAugmentation": "nest_ssl.data",
    "EncDecMaskedTokenPredModel": "nest_ssl",
    "EncDecDenoiseMaskedTokenPredModel": "nest_ssl",
}

_NEMO_ASR = "nemo.collections.asr"
_NEMO = {
    "AudioToMelSpectrogramPreprocessor": ("modules", "modules.audio_preprocessing"),
    "SpectrogramAugmentation": ("modules", "modules.audio_preprocessing"),
    "RandomBlockMasking": ("modules", "modules.ssl_modules", "modules.ssl_modules.masking"),
    "RandomProjectionVectorQuantizer": ("modules", "modules.ssl_modules", "modules.ssl_modules.quantizers"),
    "ConformerEncoder": ("modules", "modules.conformer_encoder"),
    "MultiSoftmaxDecoder": ("modules", "modules.ssl_modules", "modules.ssl_modules.multi_softmax_decoder"),
    "MultiMLMLoss": ("losses", "losses.ssl_losses", "losses.ssl_losses.mlm"),
    "SpeakerNoiseAugmentation": ("modules", "modules.ssl_modules", "modules.ssl_modules.augmentation"),
    "MultiSpeakerNoiseAugmentation": ("modules", "modules.ssl_modules", "modules.ssl_modules.augmentation"),
    "EncDecMaskedTokenPredModel": ("models", "models.ssl_models"),
    "EncDecDenoiseMaskedTokenPredModel": ("models", "models.ssl_models"),
}

_LIGHTNING_STRATEGIES = ("DDPStrategy", "FSDPStrategy", "SingleDeviceStrategy")
_LIGHTNING_ROOTS = ("lightning.pytorch.strategies.", "pytorch_lightning.strategies.", "")

TARGETS: dict[str, str] = {
    **{f"{module}.{name}": name for name, module in _OURS.items()},
    **{f"{_NEMO_ASR}.{part}.{name}": name for name, parts in _NEMO.items() for part in parts},
    **{f"{root}{name}": name for root in _LIGHTNING_ROOTS for name in _LIGHTNING_STRATEGIES},
}
"""Every accepted `_target_` and the name of its class."""

SECTIONS = {
    "preprocessor": "AudioToMelSpectrogramPreprocessor",
    "masking": "RandomBlockMasking",
    "quantizer": "RandomProjectionVectorQuantizer",
    "encoder": "ConformerEncoder",
    "decoder": "MultiSoftmaxDecoder",
    "loss": "MultiMLMLoss",
}
"""The class of each section of a model."""


def resolve_target(target: object, where: str) -> str:
    """Return the class name for `_target_: target`."""
    if not isinstance(target, str) or target not in TARGETS:
        near = difflib.get_close_matches(str(target), [*TARGETS, *augmentations.names()], n=1, cutoff=0.6)
        hint = f" Did you mean '{near[0]}'?" if near else ""
        raise ValueError(f"{where}: {quoted(target)} is not a class that nest-ssl knows.{hint}")
    name, section = TARGETS[target], where.split(".")[-2] if "." in where else ""
    if SECTIONS.get(section, name) != name:
        raise ValueError(f"{where}: a {name} where a {SECTIONS[section]} belongs.")
    return name


def nemo_target(name: str) -> str:
    """Return the `_target_` that NeMo's own files use for a class name."""
    return f"{_NEMO_ASR}.{_NEMO[name][0]}.{name}"
