"""Manifests, noise, augmentation, datasets, the batch plan and its loaders."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from nest_ssl.data.batch.augmentation import (
        MultiSpeakerNoiseAugmentation,
        SpeakerNoiseAugmentation,
        build_augmentor,
    )
    from nest_ssl.data.batch.bad_data import BadDataError, BadDataLog, BadFile
    from nest_ssl.data.batch.batch import AudioNoiseBatch, AudioNoiseItem, collate
    from nest_ssl.data.batch.loader import PlannedLoader
    from nest_ssl.data.batch.noise import NoiseSource, load_noise_audio, sample_noise
    from nest_ssl.data.manifest.lines import ManifestError
    from nest_ssl.data.manifest.read import Manifest, Utterance, open_manifests, split_groups, split_paths
    from nest_ssl.data.sources.build import build_loader
    from nest_ssl.data.sources.files import AudioNoiseDataset
    from nest_ssl.data.sources.lhotse import LhotseAudioNoiseDataset
    from nest_ssl.data.sources.tar import TarredAudioNoiseDataset

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
    "AudioNoiseBatch": "batch.batch",
    "AudioNoiseDataset": "sources.files",
    "AudioNoiseItem": "batch.batch",
    "BadDataError": "batch.bad_data",
    "BadDataLog": "batch.bad_data",
    "BadFile": "batch.bad_data",
    "LhotseAudioNoiseDataset": "sources.lhotse",
    "Manifest": "manifest.read",
    "ManifestError": "manifest.lines",
    "MultiSpeakerNoiseAugmentation": "batch.augmentation",
    "NoiseSource": "batch.noise",
    "PlannedLoader": "batch.loader",
    "SpeakerNoiseAugmentation": "batch.augmentation",
    "TarredAudioNoiseDataset": "sources.tar",
    "Utterance": "manifest.read",
    "build_augmentor": "batch.augmentation",
    "build_loader": "sources.build",
    "collate": "batch.batch",
    "load_noise_audio": "batch.noise",
    "open_manifests": "manifest.read",
    "sample_noise": "batch.noise",
    "split_groups": "manifest.read",
    "split_paths": "manifest.read",
}


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"{__name__}.{_HOMES[name]}"), name)
