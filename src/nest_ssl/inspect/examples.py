"""Example batches, made with what training uses: the data loader, the preprocessor and the masking.

B batch, N samples, M mel bands, T frames.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from itertools import islice

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from nest_ssl.config import DatasetConfig, ModelConfig
from nest_ssl.data import AudioNoiseBatch, BadFile
from nest_ssl.data.batch.collate import needed
from nest_ssl.data.build import open_batches
from nest_ssl.drawing.draw import band_centres_hz
from nest_ssl.model import effective_sections
from nest_ssl.modules import AudioToMelSpectrogramPreprocessor, RandomBlockMasking
from nest_ssl.modules.subsampling import ConvSubsampling

Floats = NDArray[np.float32]


@dataclass(frozen=True)
class ExampleUtterance:
    """One utterance of a batch, without its padding."""

    name: str
    audio_N: Floats
    added_N: Floats
    """What the data loader added: noise, other speakers, or zeros."""
    noisy_N: Floats
    clean_MT: Floats
    """Log-mel features of the clean audio, from which the targets are computed."""
    noisy_MT: Floats
    masked_MT: Floats | None
    """The encoder's input; None for `mask_position: post_conv`, where masking comes after the subsampling."""
    mask_T: NDArray[np.bool_]

    @property
    def ratio_db(self) -> float | None:
        """Energy of the audio relative to what was added, over the whole utterance; None: nothing was added."""
        audio, added = (float(np.square(x, dtype=np.float64).sum()) for x in (self.audio_N, self.added_N))
        return 10 * float(np.log10(audio / added)) if audio > 0 and added > 0 else None

    @property
    def masked_share(self) -> float:
        return float(self.mask_T.mean()) if len(self.mask_T) else 0.0


@dataclass(frozen=True)
class ExampleBatch:
    """One batch of the epoch."""

    number: int
    utterances: list[ExampleUtterance]
    num_samples: int
    """Samples per row, padding included."""
    sample_rate: int
    band_hz: list[float]
    """Centre of each mel band."""
    bad_files: list[BadFile]
    """Files replaced by other utterances while this batch was made."""

    @property
    def padding_share(self) -> float:
        lengths = [len(utterance.audio_N) for utterance in self.utterances]
        return 1 - sum(lengths) / (len(lengths) * self.num_samples)


def example_batches(config: ModelConfig, dataset: DatasetConfig, *, num_batches: int, seed: int) -> list[ExampleBatch]:
    """The first batches of epoch 0, as training with this seed would get them.

    If `drop_last` would leave no batch at all, an incomplete one is made.
    """
    with torch.random.fork_rng(devices=[]):  # a DataLoader and the mask embedding draw from torch's own generator
        torch.manual_seed(seed)
        features = _Features(config, seed)
        batches = _first_batches(dataset, num_batches, seed)
    return [features.example(number, batch) for number, batch in enumerate(batches)]


def _first_batches(dataset: DatasetConfig, num_batches: int, seed: int) -> list[AudioNoiseBatch]:
    try:
        batches = list(islice(open_batches(dataset, seed), num_batches))
    except ValueError:  # if drop_last is not the cause, it is raised again below
        if not dataset.drop_last:
            raise
        batches = []
    if batches or not num_batches or not dataset.drop_last:
        return batches
    return _first_batches(replace(dataset, drop_last=False), num_batches, seed)


class _Features:
    """The part of the model between the audio and the encoder."""

    def __init__(self, config: ModelConfig, seed: int) -> None:
        sections = effective_sections(config)
        self.preprocessor = AudioToMelSpectrogramPreprocessor(**vars(sections.preprocessor))
        self.mask_processor = RandomBlockMasking(**vars(sections.masking))
        post_conv = config.mask_position == "post_conv"
        self.subsampling = ConvSubsampling(sections.encoder) if post_conv else None
        self.factor = sections.encoder.subsampling_factor
        self.sample_rate = sections.preprocessor.sample_rate
        self.generator = torch.Generator().manual_seed(seed)

    @torch.no_grad()
    def example(self, number: int, batch: AudioNoiseBatch) -> ExampleBatch:
        audio_BN, noisy_BN, added_BN = needed(batch.audio), needed(batch.noisy_audio), needed(batch.noise)
        length_B = needed(batch.audio_len)
        clean_BMT, frames_B = self.preprocessor(input_signal=audio_BN, length=length_B, generator=self.generator)
        noisy_BMT, _ = self.preprocessor(input_signal=noisy_BN, length=length_B, generator=self.generator)
        mask_BT, masked_BMT = self._mask(noisy_BMT, frames_B)
        utterances = []
        for b, (n, t) in enumerate(zip(length_B.tolist(), frames_B.tolist(), strict=True)):
            utterances.append(
                ExampleUtterance(
                    name=batch.audio_filepaths[b],
                    audio_N=audio_BN[b, :n].numpy(),
                    added_N=added_BN[b, :n].numpy(),
                    noisy_N=noisy_BN[b, :n].numpy(),
                    clean_MT=clean_BMT[b, :, :t].numpy(),
                    noisy_MT=noisy_BMT[b, :, :t].numpy(),
                    masked_MT=None if masked_BMT is None else masked_BMT[b, :, :t].numpy(),
                    mask_T=mask_BT[b, :t].numpy(),
                )
            )
        band_hz = band_centres_hz(self.preprocessor, self.sample_rate)
        return ExampleBatch(number, utterances, audio_BN.shape[1], self.sample_rate, band_hz, list(batch.bad_files))

    def _mask(self, noisy_BMT: Tensor, frames_B: Tensor) -> tuple[Tensor, Tensor | None]:
        """The mask (B, T) of the input, and the masked features if masking comes before the encoder."""
        if self.subsampling is None:
            masked_BMT, masks_BMT = self.mask_processor(
                input_feats=noisy_BMT, input_lengths=frames_B, generator=self.generator
            )
            return masks_BMT[:, 0] > 0, masked_BMT
        features_BSD, tokens_B = self.subsampling(noisy_BMT.transpose(1, 2), frames_B)
        _, masks_BDS = self.mask_processor(
            input_feats=features_BSD.transpose(1, 2), input_lengths=tokens_B, generator=self.generator
        )
        return masks_BDS[:, 0].repeat_interleave(self.factor, dim=1) > 0, None
