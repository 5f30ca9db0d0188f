"""Manifests, noise, augmentation, datasets, the batch plan and its loaders."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from nest_ssl.data.augmentation import MultiSpeakerNoiseAugmentation, SpeakerNoiseAugmentation, build_augmentor
from nest_ssl.data.bad_data import BadDataError, BadDataLog, BadFile
from nest_ssl.data.batch import AudioNoiseBatch, AudioNoiseItem, collate
from nest_ssl.data.build import build_loader
from nest_ssl.data.dataset import AudioNoiseDataset
from nest_ssl.data.loader import PlannedLoader
from nest_ssl.data.manifest import Manifest, Utterance, open_manifests
from nest_ssl.data.manifest_parse import ManifestError
from nest_ssl.data.manifest_paths import split_groups, split_paths
from nest_ssl.data.noise import NoiseSource, load_noise_audio, sample_noise
from nest_ssl.data.tarred import TarredAudioNoiseDataset

if TYPE_CHECKING:
    from nest_ssl.data.lhotse_dataset import LhotseAudioNoiseDataset

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


def __getattr__(name: str) -> Any:
    if name == "LhotseAudioNoiseDataset":  # lhotse takes 0.3 s to import, and few need it
        from nest_ssl.data.lhotse_dataset import LhotseAudioNoiseDataset

        return LhotseAudioNoiseDataset
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
