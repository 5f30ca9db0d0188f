"""Opening the datasets that a configuration names."""

from __future__ import annotations

from nest_ssl.config import DatasetConfig
from nest_ssl.data.manifest.read import split_groups
from nest_ssl.data.sources.files import AudioNoiseDataset, ManifestDataset
from nest_ssl.data.sources.tar import TarredAudioNoiseDataset


def open_sources(config: DatasetConfig) -> list[ManifestDataset]:
    """The datasets that are mixed (`is_concat`) or are buckets (`bucketing_batch_size`); otherwise one."""
    if config.manifest_filepath is None:
        raise ValueError("manifest_filepath: a value is needed and none was given.")
    in_groups = config.is_concat or config.bucketing_batch_size is not None
    manifests = _groups(config.manifest_filepath, in_groups)
    if config.is_tarred:
        sources: list[ManifestDataset] = _open_tarred(config, manifests, in_groups)
    else:
        sources = [
            AudioNoiseDataset(
                manifest_filepath=paths,
                sample_rate=config.sample_rate,
                int_values=config.int_values,
                max_duration=config.max_duration,
                min_duration=config.min_duration,
                max_utts=config.max_utts,
                trim=config.trim_silence,
                channel_selector=config.channel_selector,
            )
            for paths in manifests
        ]
    for source in sources:
        if len(source) == 0:
            empty = source.manifest.num_lines == 0
            reason = "is empty" if empty else "no utterance is left between min_duration and max_duration"
            raise ValueError(f"{source.manifest.name}: {reason}.")
    return sources


def _open_tarred(config: DatasetConfig, manifests: list[list[str]], in_groups: bool) -> list[ManifestDataset]:
    if config.tarred_audio_filepaths is None:
        raise ValueError("tarred_audio_filepaths: a value is needed with 'is_tarred: true' and none was given.")
    tars = _groups(config.tarred_audio_filepaths, in_groups)
    if len(tars) != len(manifests):
        raise ValueError(f"manifest_filepath has {len(manifests)} datasets, tarred_audio_filepaths has {len(tars)}.")
    return [
        TarredAudioNoiseDataset(
            audio_tar_filepaths=shards,
            manifest_filepath=paths,
            sample_rate=config.sample_rate,
            int_values=config.int_values,
            max_duration=config.max_duration,
            min_duration=config.min_duration,
            trim=config.trim_silence,
            channel_selector=config.channel_selector,
            shuffle_n=config.shuffle_n,
            shard_strategy=config.tarred_shard_strategy,
            shard_manifests=config.shard_manifests,
        )
        for shards, paths in zip(tars, manifests, strict=True)
    ]


def _groups(paths: str | list[str] | list[list[str]], in_groups: bool) -> list[list[str]]:
    """Files of each dataset; all in one unless the datasets are kept apart."""
    groups = split_groups(paths)
    if not in_groups:
        return [[path for group in groups for path in group]]
    if len(groups) == 1 and not isinstance(paths, str) and not isinstance(paths[0], str):
        return [[path] for path in groups[0]]  # NeMo's validation sections wrap the list once more
    return groups
