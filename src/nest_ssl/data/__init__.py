"""Manifests, data sources, the batch plan, noise and augmentation, and the loader."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from nest_ssl.data.batch.augmentation import (
        Augmentation,
        MultiSpeakerNoiseAugmentation,
        NoiseSource,
        SpeakerNoiseAugmentation,
        build_augmentor,
        load_noise_audio,
        sample_noise,
    )
    from nest_ssl.data.batch.collate import (
        AudioNoiseBatch,
        AudioNoiseItem,
        BadDataError,
        BadFile,
        collate,
        random_batch,
    )
    from nest_ssl.data.batch.loader import BadDataLog, PlannedLoader
    from nest_ssl.data.batch.make import Speech
    from nest_ssl.data.build import build_loader
    from nest_ssl.data.manifest.lines import ManifestError
    from nest_ssl.data.manifest.read import Manifest, Utterance, open_manifests, split_groups, split_paths
    from nest_ssl.data.sources.files import AudioNoiseDataset, Source
    from nest_ssl.data.sources.lhotse import LhotseAudioNoiseDataset
    from nest_ssl.data.sources.tar import TarredAudioNoiseDataset

__all__ = [
    "AudioNoiseBatch",
    "AudioNoiseDataset",
    "AudioNoiseItem",
    "Augmentation",
    "BadDataError",
    "BadDataLog",
    "BadFile",
    "LhotseAudioNoiseDataset",
    "Manifest",
    "ManifestError",
    "MultiSpeakerNoiseAugmentation",
    "NoiseSource",
    "PlannedLoader",
    "Source",
    "SpeakerNoiseAugmentation",
    "Speech",
    "TarredAudioNoiseDataset",
    "Utterance",
    "build_augmentor",
    "build_loader",
    "collate",
    "load_noise_audio",
    "open_manifests",
    "random_batch",
    "sample_noise",
    "split_groups",
    "split_paths",
]

# torch takes seconds to import: it is not loaded before something needs it, so that the command line and the workers of
# `nest-ssl prepare` start at once.
_HOMES = {
    "AudioNoiseBatch": "batch.collate",
    "AudioNoiseDataset": "sources.files",
    "AudioNoiseItem": "batch.collate",
    "Augmentation": "batch.augmentation",
    "BadDataError": "batch.collate",
    "BadDataLog": "batch.loader",
    "BadFile": "batch.collate",
    "LhotseAudioNoiseDataset": "sources.lhotse",
    "Manifest": "manifest.read",
    "ManifestError": "manifest.lines",
    "MultiSpeakerNoiseAugmentation": "batch.augmentation",
    "NoiseSource": "batch.augmentation",
    "PlannedLoader": "batch.loader",
    "Source": "sources.files",
    "SpeakerNoiseAugmentation": "batch.augmentation",
    "Speech": "batch.make",
    "TarredAudioNoiseDataset": "sources.tar",
    "Utterance": "manifest.read",
    "build_augmentor": "batch.augmentation",
    "build_loader": "build",
    "collate": "batch.collate",
    "load_noise_audio": "batch.augmentation",
    "open_manifests": "manifest.read",
    "random_batch": "batch.collate",
    "sample_noise": "batch.augmentation",
    "split_groups": "manifest.read",
    "split_paths": "manifest.read",
}


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"{__name__}.{_HOMES[name]}"), name)
