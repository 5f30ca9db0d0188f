"""Data sources: utterances by number. Here: audio files that manifests name. `tar.py` reads tar shards."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
from torch.utils.data import Dataset

from nest_ssl.audio import read_audio
from nest_ssl.audio.signal import ChannelSelector
from nest_ssl.data.batch.augmentation import Augmentation, NoiseSource
from nest_ssl.data.batch.collate import AudioNoiseBatch, AudioNoiseItem, collate
from nest_ssl.data.batch.make import BatchMaker, OnRead, Place, Speech
from nest_ssl.data.manifest.lines import is_tarred_manifest
from nest_ssl.data.manifest.read import Manifest, Paths, Utterance, open_manifests, split_paths
from nest_ssl.data.plan.batches import BatchSpec
from nest_ssl.data.plan.order import Order, PlainOrder
from nest_ssl.data.randomness import RandomSource, Stream, generator_for, per_utterance


class Source(ABC):
    """Utterances by number. `nest_ssl.plugins.register_source` adds one for `model.train_ds.source`."""

    name: str
    """For messages."""

    @abstractmethod
    def __len__(self) -> int:
        """Return the number of utterances."""

    @abstractmethod
    def read(self, index: int, on_read: OnRead = None) -> Speech:
        """Read utterance `index`; raise AudioError if it cannot be read.

        Call `on_read`, if given, with the path just before reading: the watchdog then names a file that blocks.
        Several threads may read at the same time.
        """

    @abstractmethod
    def fingerprint(self) -> str:
        """Return a hash of what is read: equal on all ranks, and different for different data."""

    @property
    def durations_s(self) -> npt.NDArray[np.float32]:
        """(len,) seconds, NaN where unknown; buckets, and CUDA graphs on several GPUs, need all of them.

        Audio that turns out to be longer is cropped to what its batch is padded to.
        """
        return np.full(len(self), np.nan, dtype=np.float32)

    def order(self, *, seed: int, shuffle: bool, stream: int = 0) -> Order:
        """Return the order in which an epoch visits the utterances."""
        return PlainOrder(len(self), seed, shuffle, stream)


def open_noise(
    noise_manifest: Paths | None, sample_rate: int, *, bank_gb: float = 0.0, on_read: OnRead = None
) -> NoiseSource | None:
    """Return the noise of `noise_manifest`, if there is one."""
    if noise_manifest is None:
        return None
    manifest = open_manifests(noise_manifest)
    if len(manifest) == 0:
        raise ValueError(f"noise_manifest: {manifest.name} is empty. Leave the key out to train without noise.")
    return NoiseSource(manifest, sample_rate, bank_bytes=int(bank_gb * 1e9), on_read=on_read)


class ManifestDataset(Source):
    """Utterances of manifests with noise: one by one, or as batches of a plan."""

    def __init__(
        self,
        manifest: Manifest,
        *,
        sample_rate: int,
        noise_manifest: Paths | None = None,
        batch_augmentor: Augmentation | None = None,
        min_audio_len_secs: float = 1.0,
        pad_audio_mode: str = "repeat",
        trim: bool = False,
        int_values: bool = False,
        channel_selector: ChannelSelector = None,
        seed: int = 0,
        noise_bank_gb: float = 0.0,
    ) -> None:
        self.manifest, self.name = manifest, manifest.name
        self.sample_rate = sample_rate
        self.batch_augmentor = batch_augmentor
        self.trim, self.int_values, self.channel_selector = trim, int_values, channel_selector
        self.maker = BatchMaker(
            sample_rate=sample_rate,
            noise=open_noise(noise_manifest, sample_rate, bank_gb=noise_bank_gb),
            augmentor=batch_augmentor,
            seed=seed,
            min_audio_len_secs=min_audio_len_secs,
            pad_audio_mode=pad_audio_mode,
        )

    def __len__(self) -> int:
        return len(self.manifest)

    @abstractmethod
    def source(self, index: int, utterance: Utterance, on_read: OnRead = None) -> tuple[str | bytes, str]:
        """Return what to decode for utterance `index`, and its name in messages; raise AudioError.

        Call `on_read` again where that takes long: the watchdog then sees progress.
        """

    def utterance(self, index: int) -> Utterance:
        return self.manifest[index]

    def read(self, index: int, on_read: OnRead = None) -> Speech:
        utterance = self.utterance(index)
        if on_read is not None:
            on_read(utterance.audio_filepath)
        source, name = self.source(index, utterance, on_read)
        samples = read_audio(
            source,
            sample_rate=self.sample_rate,
            offset_s=utterance.offset_s,
            duration_s=utterance.duration_s,
            channel_selector=self.channel_selector,
            trim_silence=self.trim,
            int_values=self.int_values,
            name=name,
        )
        return Speech(str(index), utterance.audio_filepath, samples)

    def fingerprint(self) -> str:
        return self.manifest.fingerprint()

    @property
    def durations_s(self) -> npt.NDArray[np.float32]:
        """The duration of every utterance as the manifest states it; NaN where it does not."""
        return self.manifest.durations_s

    def item(self, index: int) -> AudioNoiseItem:
        """Return utterance `index` with noise that depends only on the seed and `index`."""
        return self.maker.item(self.read(index), generator_for(self.maker.seed, Stream.UTTERANCE, index))

    def collate_fn(self, items: Sequence[AudioNoiseItem], *, generator: RandomSource = None) -> AudioNoiseBatch:
        """Return an augmented batch of items."""
        batch = collate(items)
        if self.batch_augmentor is None:
            return batch
        return self.batch_augmentor(batch, generator=per_utterance(generator, len(items)))


class AudioNoiseDataset(ManifestDataset, Dataset[AudioNoiseItem]):
    """Audio files of a manifest, each with noise of another manifest; by number."""

    def __init__(
        self,
        noise_manifest: Paths | None = None,
        batch_augmentor: Augmentation | None = None,
        min_audio_len_secs: float = 1.0,
        pad_audio_mode: str = "repeat",
        *,
        manifest_filepath: Paths,
        sample_rate: int,
        int_values: bool = False,
        max_duration: float | None = None,
        min_duration: float | None = None,
        max_utts: int = 0,
        trim: bool = False,
        channel_selector: ChannelSelector = None,
        seed: int = 0,
        noise_bank_gb: float = 0.0,
    ) -> None:
        tarred = [path for path in split_paths(manifest_filepath) if is_tarred_manifest(path)]
        if tarred:
            raise ValueError(f"{tarred[0]}: its audio is in tar shards. Set is_tarred=true and tarred_audio_filepaths.")
        manifest = open_manifests(
            manifest_filepath, min_duration_s=min_duration, max_duration_s=max_duration, max_utterances=max_utts or None
        )
        super().__init__(
            manifest,
            sample_rate=sample_rate,
            noise_manifest=noise_manifest,
            batch_augmentor=batch_augmentor,
            min_audio_len_secs=min_audio_len_secs,
            pad_audio_mode=pad_audio_mode,
            trim=trim,
            int_values=int_values,
            channel_selector=channel_selector,
            seed=seed,
            noise_bank_gb=noise_bank_gb,
        )

    def __getitem__(self, index: int) -> AudioNoiseItem:
        return self.item(index)

    def source(self, index: int, utterance: Utterance, on_read: OnRead = None) -> tuple[str | bytes, str]:
        return utterance.audio_filepath, utterance.audio_filepath


class PlannedBatches(Dataset[AudioNoiseBatch]):
    """What workers run: from a batch's description in the plan to the batch.

    The plan numbers utterances through all `sources`.
    """

    def __init__(self, sources: Sequence[Source], maker: BatchMaker) -> None:
        self.sources, self.maker = sources, maker
        self._starts = np.cumsum([0] + [len(source) for source in sources])

    def __getitem__(self, spec: BatchSpec) -> AudioNoiseBatch:
        place = Place(spec.epoch, spec.step, spec.rank)
        return self.maker.make(spec.indices.tolist(), spec.spares.tolist(), self._read, place, spec.num_samples)

    def _read(self, index: int) -> Speech:
        number = int(np.searchsorted(self._starts, index, side="right")) - 1
        speech = self.sources[number].read(index - int(self._starts[number]), self.maker.readers.reading)
        return Speech(str(index), speech.audio_filepath, speech.samples)
