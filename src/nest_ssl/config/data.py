"""The `train_ds:` and `validation_ds:` sections: NeMo's keys, typed, documented and checked."""

from __future__ import annotations

from dataclasses import dataclass

from nest_ssl.config.checks import at_least, one_of, probability
from nest_ssl.config.targets import resolve_target

Paths = str | list[str] | list[list[str]] | None
"""One path, a comma-separated list of them, a list, or a list of lists (buckets)."""


@dataclass
class AugmentorConfig:
    """`batch_augmentor:`: which utterances get noise or other speakers, how much and how loud."""

    _target_: str = "nest_ssl.data.MultiSpeakerNoiseAugmentation"
    """MultiSpeakerNoiseAugmentation or SpeakerNoiseAugmentation."""
    prob: float = 0.0
    """Probability that an utterance is augmented."""
    noise_ratio: float = 0.0
    """Of those, the share that gets noise; the others get speech of the same batch."""
    min_r_speech: float = -5.0
    """Lowest energy ratio of speech to added speech, in dB."""
    max_r_speech: float = 5.0
    """Highest energy ratio of speech to added speech, in dB."""
    min_r_noise: float = -5.0
    """Lowest energy ratio of speech to noise, in dB."""
    max_r_noise: float = 20.0
    """Highest energy ratio of speech to noise, in dB."""
    min_mix_rate: float = 0.0
    """Smallest share of the utterance that is mixed."""
    max_mix_rate: float = 1.0
    """Largest share of the utterance that is mixed."""
    min_num_segments: int = 1
    """Fewest segments that the added audio is made of."""
    max_num_segments: int = 5
    """Most segments that the added audio is made of."""
    min_num_speakers: int = 1
    """Fewest speakers added."""
    max_num_speakers: int = 4
    """Most speakers added."""
    keep_unselected_noise: bool = True
    """Add the sampled noise at its own level to utterances that were not selected, as NeMo does; false: stay clean."""

    def __post_init__(self) -> None:
        where = "batch_augmentor"
        name = resolve_target(self._target_, f"{where}._target_")
        one_of(f"{where}._target_", name, ("SpeakerNoiseAugmentation", "MultiSpeakerNoiseAugmentation"))
        for key in ("prob", "noise_ratio", "min_mix_rate", "max_mix_rate"):
            probability(f"{where}.{key}", getattr(self, key))
        for key in ("num_segments", "num_speakers"):
            at_least(f"{where}.min_{key}", getattr(self, f"min_{key}"), 1)
        for key in ("r_speech", "r_noise", "mix_rate", "num_segments", "num_speakers"):
            at_least(f"{where}.max_{key}", getattr(self, f"max_{key}"), getattr(self, f"min_{key}"))


@dataclass
class DatasetConfig:
    """One dataset and the loader around it."""

    manifest_filepath: Paths = None
    """JSON-lines manifest(s) of the speech."""
    noise_manifest: Paths = None
    """JSON-lines manifest(s) of the noise; null: none."""
    sample_rate: int = 16000
    """Audio is resampled to this."""
    batch_size: int | None = None
    """Utterances per batch."""
    shuffle: bool = False
    """Draw utterances in random order."""
    num_workers: int = 0
    """Loader processes; 0: load in the training process."""
    pin_memory: bool = False
    """Page-locked batches, for faster copies to a GPU."""
    persistent_workers: bool = False
    """Keep the loader processes between epochs."""
    prefetch_factor: int | None = None
    """Batches that each loader process prepares ahead."""
    drop_last: bool = False
    """Leave out the last, incomplete batch; otherwise it is filled up equally on all ranks."""
    max_duration: float | None = None
    """Longer utterances are left out, in seconds."""
    min_duration: float | None = None
    """Shorter utterances are left out, in seconds."""
    trim_silence: bool = False
    """Cut silence at both ends."""
    int_values: bool = False
    """Read integer samples without scaling to [-1, 1]."""
    channel_selector: int | str | list[int] | None = None
    """Channel number(s) to average, 'average', or null for a mono file or the average."""
    max_utts: int = 0
    """Read at most this many utterances; 0: all."""
    batch_augmentor: AugmentorConfig | None = None
    """How noise and other speakers are mixed in; null: noisy = audio + noise."""
    is_concat: bool = False
    """Each manifest is a dataset of its own, mixed by `concat_sampling_technique`."""
    concat_sampling_technique: str | None = "temperature"
    """temperature, random or round-robin."""
    concat_sampling_temperature: float = 5.0
    """Sampling weight of a dataset is its size to the power 1 / temperature."""
    concat_sampling_scale: float = 1.0
    """Length of an epoch, in sizes of the datasets together."""
    concat_sampling_probabilities: list[float] | None = None
    """Weights for random sampling; null: equal."""
    concat_sampling_seed: int | None = None
    """Seed of the mixing; null: the run's."""
    concat_shuffle: bool = True
    """Shuffle within each dataset."""
    is_tarred: bool = False
    """Audio lies in tar shards."""
    tarred_audio_filepaths: Paths = None
    """The shards, with _OP_0..N-1_CL_ patterns."""
    tarred_shard_strategy: str = "scatter"
    """scatter (each rank reads its own shards) or replicate (each rank reads all)."""
    shard_manifests: bool = False
    """The manifest path is a pattern too: one manifest per shard."""
    shuffle_n: int = 0
    """Size of the shuffling buffer of tar shards."""
    bucketing_strategy: str = "synced_randomized"
    """NeMo's order of buckets: fixed_order, synced_randomized or fully_randomized."""
    bucketing_batch_size: int | list[int] | None = None
    """Batch size per bucket."""
    bucketing_weights: list[int] | None = None
    """How often each bucket is repeated."""
    use_lhotse: bool = False
    """Read and batch with lhotse."""

    def __post_init__(self) -> None:
        at_least("sample_rate", self.sample_rate, 1)
        at_least("num_workers", self.num_workers, 0)
        if self.batch_size is not None:
            at_least("batch_size", self.batch_size, 1)
        techniques = ("temperature", "random", "round-robin", None)
        one_of("concat_sampling_technique", self.concat_sampling_technique, techniques)
        one_of("tarred_shard_strategy", self.tarred_shard_strategy, ("scatter", "replicate"))
        strategies = ("fixed_order", "synced_randomized", "fully_randomized")
        one_of("bucketing_strategy", self.bucketing_strategy, strategies)


UNUSED_DATASET_KEYS: dict[str, str] = {
    "use_start_end_token": "there are no transcripts in pre-training",
    "labels": "there are no transcripts in pre-training",
    "parser": "there are no transcripts in pre-training",
    "bos_id": "there are no transcripts in pre-training",
    "eos_id": "there are no transcripts in pre-training",
    "pad_id": "there are no transcripts in pre-training",
}
"""NeMo's keys of a dataset section that NEST does not use, with the reason."""
