"""Several validation sets: a list of manifests is one set each, as in NeMo."""

from __future__ import annotations

import dataclasses
from pathlib import Path

from nest_ssl.config import DatasetConfig
from nest_ssl.config.parse import MISSING


def validation_sets(config: DatasetConfig | None) -> dict[str, DatasetConfig]:
    """The validation sets by name; empty when no manifest is given. A set alone has no name.

    Manifests joined by commas, or mixed by `is_concat`, are one set.
    """
    if config is None or (config.manifest_filepath in (None, MISSING) and not config.use_lhotse):
        return {}
    manifests = config.manifest_filepath
    if not isinstance(manifests, list) or len(manifests) == 1 or config.is_concat or config.bucketing_batch_size:
        return {"": config}
    tars = config.tarred_audio_filepaths
    if config.is_tarred and (not isinstance(tars, list) or len(tars) != len(manifests)):
        raise ValueError(
            f"validation_ds: {len(manifests)} manifests are as many validation sets, so tarred_audio_filepaths must be "
            f"a list of as many."
        )
    sets: dict[str, DatasetConfig] = {}
    for place, manifest in enumerate(manifests):
        first = manifest if isinstance(manifest, str) else manifest[0]
        name = Path(first.split(",")[0]).stem
        if name in sets:
            name = f"{name}_{place}"
        sets[name] = dataclasses.replace(
            config,
            manifest_filepath=manifest if isinstance(manifest, str) else list(manifest),
            tarred_audio_filepaths=tars[place] if config.is_tarred and isinstance(tars, list) else None,
        )
    return sets
