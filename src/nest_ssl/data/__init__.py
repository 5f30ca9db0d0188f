"""Manifests, datasets and loaders."""

from nest_ssl.data.manifest import Manifest, Utterance, open_manifests
from nest_ssl.data.manifest_parse import ManifestError
from nest_ssl.data.manifest_paths import split_groups, split_paths

__all__ = ["Manifest", "ManifestError", "Utterance", "open_manifests", "split_groups", "split_paths"]
