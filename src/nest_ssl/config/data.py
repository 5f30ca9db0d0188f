"""The `train_ds:` and `validation_ds:` sections: NeMo's keys, typed, documented and checked."""

from __future__ import annotations

from dataclasses import MISSING, dataclass, field, fields
from typing import Annotated, Any

from nest_ssl.config.checks import (
    AboveZero,
    Count,
    NotNegative,
    Positive,
    Range,
    Seed,
    Share,
    check_ranges,
    known_name,
    local_paths,
    one_of,
)
from nest_ssl.config.targets import TARGETS, resolve_target
from nest_ssl.plugins import augmentations, sources

Paths = str | list[str] | list[list[str]] | None
"""One path, a comma-separated list of them, a list, or a list of lists (buckets)."""
Decibels = Annotated[float, Range(-200, 200)]
Few = Annotated[int, Range(1, 10_000)]
Rate = Annotated[int, Range(1000, 1_000_000)]
"""A sample rate in Hz; 16 would be kHz."""
Channel = Annotated[int, Range(0, 10_000)]


@dataclass
class AugmentorConfig:
    """`batch_augmentor:`: which utterances get noise or other speakers, how much, and how loud."""

    _target_: str = "nest_ssl.data.MultiSpeakerNoiseAugmentation"
    """MultiSpeakerNoiseAugmentation, SpeakerNoiseAugmentation, or a registered name (docs/extending.md), which then
    gets all other keys of the section as arguments."""
    prob: Share = 0.0
    """Probability that an utterance is augmented."""
    noise_ratio: Share = 0.0
    """Share of these that gets noise; the others get speech from the same batch."""
    min_r_speech: Decibels = -5.0
    """Lowest energy ratio of speech to added speech, in dB."""
    max_r_speech: Decibels = 5.0
    """Highest energy ratio of speech to added speech, in dB."""
    min_r_noise: Decibels = -5.0
    """Lowest energy ratio of speech to noise, in dB."""
    max_r_noise: Decibels = 20.0
    """Highest energy ratio of speech to noise, in dB."""
    min_mix_rate: Share = 0.0
    """Smallest share of the utterance that is mixed."""
    max_mix_rate: Share = 1.0
    """Largest share of the utterance that is mixed."""
    min_num_segments: Few = 1
    """Fewest segments in the added audio."""
    max_num_segments: Few = 5
    """Most segments in the added audio."""
    min_num_speakers: Few = 1
    """Fewest speakers added."""
    max_num_speakers: Few = 4
    """Most speakers added."""
    keep_unselected_noise: bool = True
    """Add the sampled noise at its own level to utterances not selected, as NeMo does; false: leave them clean."""
    options: dict[str, Any] = field(default_factory=dict)
    """The arguments of a registered augmentation."""

    @classmethod
    def rearranged(cls, section: dict[str, Any]) -> dict[str, Any]:
        """Move the keys of a registered augmentation to `options`, unless they are there already (a saved config)."""
        target = section.get("_target_")
        if not isinstance(target, str) or "options" in section or _registered(target) is None:
            return section
        return {"_target_": target, "options": {key: value for key, value in section.items() if key != "_target_"}}

    def __post_init__(self) -> None:
        where = "batch_augmentor"
        if _registered(self._target_) is not None:
            self._check_nothing_else_is_set(where)
            return
        if self.options:
            raise ValueError(f"{where}.options: only for registered augmentations; '{self._target_}' is not one.")
        name = resolve_target(self._target_, f"{where}._target_")
        one_of(f"{where}._target_", name, ("SpeakerNoiseAugmentation", "MultiSpeakerNoiseAugmentation"))
        check_ranges(where, self)
        for key in ("r_speech", "r_noise", "mix_rate", "num_segments", "num_speakers"):
            Range(getattr(self, f"min_{key}")).check(f"{where}.max_{key}", getattr(self, f"max_{key}"))

    def _check_nothing_else_is_set(self, where: str) -> None:
        for key in fields(self):
            if key.default is not MISSING and key.name != "_target_" and getattr(self, key.name) != key.default:
                raise ValueError(f"{where}.{key.name}: set it in {where}.options, where '{self._target_}' gets it.")


def _registered(target: str) -> Any:
    """Return the augmentation registered as `target`, if there is one."""
    return augmentations.find(target, built_in=TARGETS)


@dataclass
class DatasetConfig:
    """One dataset and its loader."""

    manifest_filepath: Paths = None
    """JSON-lines manifest(s) of the speech."""
    source: str | None = None
    """A registered data source that replaces the manifests (docs/extending.md)."""
    source_options: dict[str, Any] = field(default_factory=dict)
    """Arguments of `source`."""
    noise_manifest: Paths = None
    """JSON-lines manifest(s) of the noise; null: no noise."""
    noise_bank_gb: NotNegative = 0.0
    """Keep up to this many gigabytes of decoded noise in memory per rank; 0: read each segment from disk."""
    sample_rate: Rate = 16000
    """Audio is resampled to this rate, in Hz."""
    batch_size: Positive | None = None
    """Utterances per batch and rank; with `batch_duration`, the upper limit."""
    batch_duration: Annotated[float, Range(1)] | None = None
    """Seconds of audio per batch and rank, padding included; needs `use_bucketing` or `use_lhotse`."""
    quadratic_duration: AboveZero | None = None
    """Count d seconds as d + d² / quadratic_duration in `batch_duration`, because attention grows that way."""
    use_bucketing: bool = False
    """Put utterances of similar duration into a batch, by `num_buckets` or `bucket_duration_bins`."""
    num_buckets: Positive = 30
    """Number of buckets, each with an equal share of the audio."""
    bucket_duration_bins: list[AboveZero] | None = None
    """Boundaries between buckets, in seconds; null: estimated from the durations."""
    bucket_batch_size: list[Positive] | None = None
    """Utterances per batch in each bucket."""
    shuffle: bool = False
    """Draw utterances in random order."""
    seed: Seed | None = None
    """Seed of order, noise and mixing; null: the run's."""
    num_workers: Annotated[int, Range(0, 4096)] = 0
    """DataLoader workers; 0: load in the training process. The batches do not depend on it."""
    pin_memory: bool = False
    """Put batches in pinned memory, for faster copies to a GPU."""
    persistent_workers: bool = False
    """Keep the workers between epochs."""
    prefetch_factor: Annotated[int, Range(1, 100_000)] | None = None
    """Batches that each worker prepares ahead; null: 2."""
    prefetch_gb: AboveZero = 4.0
    """Prepare at most this many gigabytes of batches ahead on each rank: first `prefetch_factor` is lowered, then
    `num_workers`. At least one batch is prepared."""
    drop_last: bool = False
    """Drop the last, incomplete batch; otherwise its utterances are divided equally among the ranks."""
    max_duration: AboveZero | None = None
    """Drop utterances longer than this, in seconds."""
    min_duration: NotNegative | None = None
    """Drop utterances shorter than this, in seconds."""
    min_audio_len_secs: Annotated[float, Range(0, 100_000)] = 1.0
    """Pad shorter audio to this, in seconds."""
    pad_audio_mode: str = "repeat"
    """Pad short audio by repeating it (repeat) or with silence (zero)."""
    trim_silence: bool = False
    """Cut silence at both ends."""
    int_values: bool = False
    """Read integer samples as 32-bit integers before scaling to [-1, 1]."""
    channel_selector: Channel | str | list[Channel] | None = None
    """Channel number(s) to average; 'average' or null: all channels."""
    max_utts: Count = 0
    """Read at most this many utterances; 0: all."""
    max_bad_fraction: Share = 0.01
    """Stop when more than this share of an epoch's utterances, on all ranks, cannot be read; validation only warns."""
    batch_augmentor: AugmentorConfig | None = None
    """How noise and other speakers are mixed in; null: noisy = audio + noise."""
    is_concat: bool = False
    """Treat each manifest as its own dataset and mix them by `concat_sampling_technique`."""
    concat_sampling_technique: str | None = "temperature"
    """temperature, random or round-robin; null: round-robin."""
    concat_sampling_temperature: Annotated[float, Range(0.1)] = 5.0
    """Sampling weight of a dataset is its size to the power 1 / temperature."""
    concat_sampling_scale: AboveZero = 1.0
    """Length of an epoch, as a multiple of the total size of the datasets."""
    concat_sampling_probabilities: list[NotNegative] | None = None
    """Weights for random sampling; null: equal."""
    concat_sampling_seed: Seed | None = None
    """Seed of the mixing; null: the run's."""
    concat_shuffle: bool = True
    """Shuffle within each dataset."""
    endless: bool = False
    """With `is_concat`: the epoch never ends; `trainer.max_steps` ends the run."""
    is_tarred: bool = False
    """The audio is in tar shards."""
    tarred_audio_filepaths: Paths = None
    """The shards, with _OP_0..N-1_CL_ patterns."""
    tarred_shard_strategy: str = "scatter"
    """scatter (each rank reads its own range of shards) or replicate (each rank reads all)."""
    shard_manifests: bool = False
    """One manifest per shard: the manifest path is also a pattern. A pattern in the path implies this."""
    shuffle_n: Count = 0
    """Tar shards: move each utterance by up to this many places within the shuffled shards; 0: not at all."""
    bucketing_strategy: str = "synced_randomized"
    """Order of buckets: fixed_order, synced_randomized (same bucket on all ranks) or fully_randomized."""
    bucketing_batch_size: Positive | list[Positive] | None = None
    """Treat the manifests as buckets with these batch sizes; one number: × N for the first of N, down to × 1."""
    bucketing_weights: list[Positive] | None = None
    """How many times each bucket occurs in an epoch."""
    use_lhotse: bool = False
    """Read metadata and form batches with lhotse."""
    cuts_path: str | None = None
    """lhotse: a CutSet manifest."""
    shar_path: str | list[str] | None = None
    """lhotse: one or more folders of Shar data."""
    input_cfg: str | list[dict[str, Any]] | None = None
    """lhotse: weighted inputs, as a list or a yaml file; `type` is nemo, nemo_tarred, lhotse, lhotse_shar or group."""
    force_finite: bool = False
    """lhotse: read `input_cfg` once per epoch; otherwise it is mixed endlessly."""
    num_cuts_for_bins_estimate: Positive = 10000
    """lhotse: number of utterances used to estimate the buckets."""
    bucket_buffer_size: Positive = 10000
    """lhotse: number of utterances in the bucketing buffer."""
    shuffle_buffer_size: Count = 10000
    """lhotse without buckets: number of utterances in the shuffling buffer."""
    concurrent_bucketing: bool = False
    """lhotse: fill the buckets in a thread."""

    def __post_init__(self) -> None:
        check_ranges("", self)
        for key in ("manifest_filepath", "noise_manifest", "tarred_audio_filepaths"):
            local_paths(key, getattr(self, key))
        for key in ("noise_manifest", "tarred_audio_filepaths"):
            if getattr(self, key) in ("", []):
                raise ValueError(f"{key}: contains no path. Use null for none.")
        if isinstance(self.channel_selector, str):
            one_of("channel_selector", self.channel_selector, ("average",))
        if self.channel_selector == []:
            raise ValueError("channel_selector: [] chooses no channel. Use null for all of them.")
        techniques = ("temperature", "random", "round-robin", None)
        one_of("concat_sampling_technique", self.concat_sampling_technique, techniques)
        one_of("tarred_shard_strategy", self.tarred_shard_strategy, ("scatter", "replicate"))
        strategies = ("fixed_order", "synced_randomized", "fully_randomized")
        one_of("bucketing_strategy", self.bucketing_strategy, strategies)
        one_of("pad_audio_mode", self.pad_audio_mode, ("repeat", "zero"))
        self._check_source()
        self._check_combinations()

    def _check_source(self) -> None:
        if self.source is None:
            if self.source_options:
                raise ValueError("source_options: needs 'source', the name of a registered data source.")
            return
        if sources.find(self.source) is None:
            known_name("source", self.source, sources.names())
        for key in ("use_lhotse", "is_tarred", "is_concat", "bucketing_batch_size"):
            if getattr(self, key):
                raise ValueError(f"{key}: cannot be combined with source: '{self.source}', which is one dataset.")

    def _check_combinations(self) -> None:
        if self.batch_duration is not None and not (self.use_bucketing or self.use_lhotse):
            raise ValueError("batch_duration: needs 'use_bucketing: true' (or 'use_lhotse: true').")
        for key in ("input_cfg", "cuts_path", "shar_path"):
            if getattr(self, key) is not None and not self.use_lhotse:
                raise ValueError(f"{key}: needs 'use_lhotse: true'.")
        if self.endless and not self.is_concat:
            raise ValueError("endless: mixes several datasets, so it needs 'is_concat: true'.")
        bins, sizes = self.bucket_duration_bins, self.bucket_batch_size
        if bins is not None and sorted(set(bins)) != bins:
            raise ValueError(f"bucket_duration_bins: {bins} is not in increasing order.")
        if sizes is not None and (bins is None or len(sizes) != len(bins) + 1):
            raise ValueError("bucket_batch_size: needs one more entry than bucket_duration_bins.")
        if sizes is not None and self.use_lhotse and not self.use_bucketing:
            raise ValueError("bucket_batch_size: needs 'use_bucketing: true'.")
        if self.use_lhotse and self.is_tarred and self.tarred_audio_filepaths is None:
            raise ValueError("is_tarred: with 'use_lhotse: true' it needs tarred_audio_filepaths, or leave it out.")
        if self.max_utts and self.is_tarred:
            raise ValueError("max_utts: has no effect on tar shards, which are read whole. Shorten the manifest.")
        if self.use_lhotse and (self.cuts_path or self.shar_path):
            one_channel = self.channel_selector not in (None, "average")
            given = {"channel_selector": one_channel, "trim_silence": self.trim_silence, "max_utts": self.max_utts}
            if any(given.values()):
                key = next(key for key, is_given in given.items() if is_given)
                raise ValueError(f"{key}: is not applied to cuts_path and shar_path. Prepare the cuts with lhotse.")
        low, high = self.min_duration, self.max_duration
        if low is not None and high is not None and low > high:
            raise ValueError(f"min_duration: {low:g} s is above max_duration {high:g} s, so nothing would be left.")
        weights = self.concat_sampling_probabilities
        if weights is not None and not sum(weights) > 0:
            raise ValueError(f"concat_sampling_probabilities: {weights} have no weight above 0.")

    def without_effect(self) -> list[str]:
        """Return one line for each key that is set, but not used without another."""
        random = self.is_concat and self.concat_sampling_technique == "random"
        needs = {
            "tarred_audio_filepaths": ("is_tarred=true", self.is_tarred or self.use_lhotse),
            "concat_sampling_probabilities": ("is_concat=true and concat_sampling_technique=random", random),
            "bucketing_weights": ("bucketing_batch_size", self.bucketing_batch_size),
            "bucket_duration_bins": ("use_bucketing=true", self.use_bucketing),
            "quadratic_duration": ("batch_duration", self.batch_duration),
        }
        unused = [key for key, (_, is_met) in needs.items() if getattr(self, key) is not None and not is_met]
        return [f"{key}: has no effect without {needs[key][0]}." for key in unused]


UNUSED_DATASET_KEYS: dict[str, str] = {
    "use_start_end_token": "there are no transcripts in pre-training",
    "labels": "there are no transcripts in pre-training",
    "parser": "there are no transcripts in pre-training",
    "bos_id": "there are no transcripts in pre-training",
    "eos_id": "there are no transcripts in pre-training",
    "pad_id": "there are no transcripts in pre-training",
    "text_field": "there are no transcripts in pre-training",
    "lang_field": "there are no transcripts in pre-training",
    "shard_seed": "the order of shards follows `seed`",
    "cuda_expandable_segments": "set PYTORCH_CUDA_ALLOC_CONF instead",
    "bucketing_2d_strict_mode": "buckets are by duration only",
}
"""Dataset keys of NeMo that NEST does not use, with the reason."""
