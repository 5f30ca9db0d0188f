"""From what a configuration names to files: lists of manifests, patterns, and the audio paths inside them."""

from __future__ import annotations

import os
import re
from collections.abc import Sequence
from functools import lru_cache

from braceexpand import braceexpand

Paths = str | Sequence[str] | Sequence[Sequence[str]]

NUMBER_RANGE = re.compile(r"(?:_OP_|[{(\[<])(\d+\.\.\d+)(?:_CL_|[})\]>])")
TARRED_MANIFEST = re.compile(r"(?:^|[/\\])(?:sharded_manifests[/\\]manifest_\d+\.json|tarred_audio_manifest\.json)$")


def split_groups(paths: Paths) -> list[list[str]]:
    """One list of files per dataset: per comma-separated or listed name; a nested list is one dataset.

    `_OP_0..3_CL_`, `{0..3}` (also with `(`, `[`, `<`, as NeMo allows) stand for the numbers, `{a,b}` for the names.
    """
    if isinstance(paths, str):
        groups = [_expand(path) for path in _split_at_commas(paths)]
    else:
        groups = [split_paths(item) for item in paths]
    if not groups or not all(groups):
        raise ValueError(f"no path in {paths!r}. Give a path, a comma-separated list, a list, or a list of lists.")
    return groups


def split_paths(paths: Paths) -> list[str]:
    """All files, in order, whatever the nesting."""
    return [path for group in split_groups(paths) for path in group]


def _split_at_commas(text: str) -> list[str]:
    """Parts between commas that stand outside of braces, without blanks around them and without empty ones."""
    parts = re.split(r",(?![^{]*})", text.replace("_OP_", "{").replace("_CL_", "}"))
    return [part.strip() for part in parts if part.strip()]


def _expand(pattern: str) -> list[str]:
    if os.path.exists(pattern):  # brackets are allowed in names
        return [pattern]
    return list(braceexpand(NUMBER_RANGE.sub(r"{\1}", pattern), escape=False))


def is_tarred_manifest(manifest: str) -> bool:
    """By its name, as NeMo: the audio paths in it are names inside tar shards."""
    return TARRED_MANIFEST.search(manifest) is not None


@lru_cache(maxsize=4096)
def _folder_of(manifest: str) -> str | None:
    """Where relative paths begin; None for manifests of tar shards."""
    return None if is_tarred_manifest(manifest) else os.path.dirname(os.path.abspath(manifest))


def resolve_audio_path(audio_path: str, manifest: str) -> str:
    """Absolute as it is; relative: in the manifest's folder, or where it exists from the working folder.

    Backslashes of a manifest made on Windows are taken for separators unless a file has that very name.
    """
    folder = _folder_of(manifest)
    if folder is None:
        return audio_path
    resolved = os.path.join(folder, os.path.expanduser(audio_path))
    if os.path.isabs(audio_path) and "\\" not in audio_path:
        return resolved
    if os.path.exists(resolved):
        return resolved
    if "\\" in audio_path and os.sep == "/":
        return resolve_audio_path(audio_path.replace("\\", "/"), manifest)
    return os.path.abspath(audio_path) if os.path.exists(audio_path) else resolved
