"""Datasets over manifests: files on disk. Tar shards are in `tarred.py`, lhotse in `lhotse_dataset.py`."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
from torch.utils.data import Dataset

from nest_ssl.audio import read_audio
from nest_ssl.audio.signal import ChannelSelector, Samples
from nest_ssl.data.batch.augmentation import SpeakerNoiseAugmentation
from nest_ssl.data.batch.batch import AudioNoiseBatch, AudioNoiseItem, collate
from nest_ssl.data.batch.maker import BatchMaker, Place
from nest_ssl.data.batch.noise import NoiseSource
from nest_ssl.data.batch.randomness import RandomSource, Stream, generator_for
from nest_ssl.data.batch.threads import OnRead
from nest_ssl.data.manifest.read import Manifest, Paths, Utterance, open_manifests
from nest_ssl.data.plan.order import Order, PlainOrder
from nest_ssl.data.plan.plan import BatchSpec


def open_noise(
    noise_manifest: Paths | None, sample_rate: int, *, bank_gb: float = 0.0, on_read: OnRead = None
) -> NoiseSource | None:
    """The noise of `noise_manifest`, if there is one."""
    if noise_manifest is None:
        return None
    manifest = open_manifests(noise_manifest)
    if len(manifest) == 0:
        raise ValueError(f"noise_manifest: {manifest.name} is empty. Leave the key out to train without noise.")
    return NoiseSource(manifest, sample_rate, bank_bytes=int(bank_gb * 1e9), on_read=on_read)


class ManifestDataset(ABC):
    """Utterances of manifests with noise: one by one, or as batches of a plan."""

    def __init__(
        self,
        manifest: Manifest,
        *,
        sample_rate: int,
        noise_manifest: Paths | None = None,
        batch_augmentor: SpeakerNoiseAugmentation | None = None,
        min_audio_len_secs: float = 1.0,
        pad_audio_mode: str = "repeat",
        trim: bool = False,
        int_values: bool = False,
        channel_selector: ChannelSelector = None,
        seed: int = 0,
        noise_bank_gb: float = 0.0,
    ) -> None:
        self.manifest = manifest
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
    def source(self, index: int, utterance: Utterance) -> tuple[str | bytes, str]:
        """What to decode for utterance `index`, and its name in messages. Raises AudioError."""

    def utterance(self, index: int) -> Utterance:
        return self.manifest[index]

    def read(self, index: int, on_read: OnRead = None) -> Samples:
        """Clean samples of utterance `index`; AudioError when it cannot be read."""
        utterance = self.utterance(index)
        if on_read is not None:
            on_read(utterance.audio_filepath)
        source, name = self.source(index, utterance)
        return read_audio(
            source,
            sample_rate=self.sample_rate,
            offset_s=utterance.offset_s,
            duration_s=utterance.duration_s,
            channel_selector=self.channel_selector,
            trim_silence=self.trim,
            int_values=self.int_values,
            name=name,
        )

    @property
    def durations_s(self) -> npt.NDArray[np.float32]:
        """Of every utterance, as the manifest says; NaN where it does not."""
        return self.manifest.durations_s

    def order(self, *, seed: int, shuffle: bool, stream: int = 0) -> Order:
        """The order in which an epoch goes through the dataset."""
        return PlainOrder(len(self), seed, shuffle, stream)

    def item(self, index: int) -> AudioNoiseItem:
        """Utterance `index` with noise that depends on the seed and `index` alone."""
        return self.maker.item(str(index), self.read(index), generator_for(self.maker.seed, Stream.UTTERANCE, index))

    def collate_fn(self, items: Sequence[AudioNoiseItem], *, generator: RandomSource = None) -> AudioNoiseBatch:
        """A batch of items, augmented."""
        batch = collate(items)
        return batch if self.batch_augmentor is None else self.batch_augmentor(batch, generator=generator)


class PlannedBatches(Dataset[AudioNoiseBatch]):
    """What loader processes run: from a batch's description in the plan to the batch.

    Utterances of the plan are numbered through all `sources`.
    """

    def __init__(self, sources: Sequence[ManifestDataset], maker: BatchMaker) -> None:
        self.sources, self.maker = sources, maker
        self._starts = np.cumsum([0] + [len(source) for source in sources])

    def __getitem__(self, spec: BatchSpec) -> AudioNoiseBatch:
        place = Place(spec.epoch, spec.step, spec.rank)
        batch, used = self.maker.make(spec.indices.tolist(), spec.spares.tolist(), self._read, place)
        batch.sample_id = [str(index) for index in used]
        batch.audio_filepaths = [source.utterance(index).audio_filepath for source, index in map(self._find, used)]
        return batch

    def _find(self, index: int) -> tuple[ManifestDataset, int]:
        number = int(np.searchsorted(self._starts, index, side="right")) - 1
        return self.sources[number], index - int(self._starts[number])

    def _read(self, index: int) -> Samples:
        source, index = self._find(index)
        return source.read(index, self.maker.readers.reading)


class AudioNoiseDataset(ManifestDataset, Dataset[AudioNoiseItem]):
    """Audio files of a manifest, each with noise of another manifest; by number."""

    def __init__(
        self,
        noise_manifest: Paths | None = None,
        batch_augmentor: SpeakerNoiseAugmentation | None = None,
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

    def source(self, index: int, utterance: Utterance) -> tuple[str | bytes, str]:
        return utterance.audio_filepath, utterance.audio_filepath
