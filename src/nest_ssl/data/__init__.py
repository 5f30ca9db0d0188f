"""Manifests, noise, augmentation, datasets, the batch plan and its loaders."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from nest_ssl.data.augmentation import MultiSpeakerNoiseAugmentation, SpeakerNoiseAugmentation, build_augmentor
    from nest_ssl.data.bad_data import BadDataError, BadDataLog, BadFile
    from nest_ssl.data.batch import AudioNoiseBatch, AudioNoiseItem, collate
    from nest_ssl.data.build import build_loader
    from nest_ssl.data.dataset import AudioNoiseDataset
    from nest_ssl.data.lhotse_dataset import LhotseAudioNoiseDataset
    from nest_ssl.data.loader import PlannedLoader
    from nest_ssl.data.manifest import Manifest, Utterance, open_manifests
    from nest_ssl.data.manifest_parse import ManifestError
    from nest_ssl.data.manifest_paths import split_groups, split_paths
    from nest_ssl.data.noise import NoiseSource, load_noise_audio, sample_noise
    from nest_ssl.data.tarred import TarredAudioNoiseDataset

__all__ = [
    "AudioNoiseBatch",
    "AudioNoiseDataset",
    "AudioNoiseItem",
    "BadDataError",
    "BadDataLog",
    "BadFile",
    "LhotseAudioNoiseDataset",
    "Manifest",
    "ManifestError",
    "MultiSpeakerNoiseAugmentation",
    "NoiseSource",
    "PlannedLoader",
    "SpeakerNoiseAugmentation",
    "TarredAudioNoiseDataset",
    "Utterance",
    "build_augmentor",
    "build_loader",
    "collate",
    "load_noise_audio",
    "open_manifests",
    "sample_noise",
    "split_groups",
    "split_paths",
]

# torch and lhotse take seconds to import: wait until something needs them, so that the command line and the workers of
# `nest-ssl prepare` start at once.
_HOMES = {
    "AudioNoiseBatch": "batch",
    "AudioNoiseDataset": "dataset",
    "AudioNoiseItem": "batch",
    "BadDataError": "bad_data",
    "BadDataLog": "bad_data",
    "BadFile": "bad_data",
    "LhotseAudioNoiseDataset": "lhotse_dataset",
    "Manifest": "manifest",
    "ManifestError": "manifest_parse",
    "MultiSpeakerNoiseAugmentation": "augmentation",
    "NoiseSource": "noise",
    "PlannedLoader": "loader",
    "SpeakerNoiseAugmentation": "augmentation",
    "TarredAudioNoiseDataset": "tarred",
    "Utterance": "manifest",
    "build_augmentor": "augmentation",
    "build_loader": "build",
    "collate": "batch",
    "load_noise_audio": "noise",
    "open_manifests": "manifest",
    "sample_noise": "noise",
    "split_groups": "manifest_paths",
    "split_paths": "manifest_paths",
}


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"{__name__}.{_HOMES[name]}"), name)
