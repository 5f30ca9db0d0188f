"""A model evaluated on its validation audio: targets, predictions, and one utterance to draw.

B batch, N samples, M mel bands, T frames, S tokens, K codes per book, H books.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field, replace

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from nest_ssl.config import DatasetConfig
from nest_ssl.data import AudioNoiseBatch
from nest_ssl.data.batch.collate import needed
from nest_ssl.data.build import open_batches
from nest_ssl.drawing.draw import band_centres_hz
from nest_ssl.model import EncDecDenoiseMaskedTokenPredModel
from nest_ssl.report.charts import TOP

MAX_AUDIO_S, MAX_UTTERANCE_S = 300.0, 30.0
"""Limits in all and per utterance: about a thousand masked tokens; 15 s on one core with 113 M parameters."""
MAX_PASSES = 20
"""Passes over a small dataset, with other masks each time: one mask over few utterances is a matter of luck."""
MAX_BATCH = 8
MAX_DRAWN_TOKENS = 112
"""Tokens of an utterance: more would leave no room for their numbers."""

Ints = NDArray[np.int64]


@dataclass(frozen=True)
class ExampleTokens:
    """The beginning of one utterance: its features, targets and predictions."""

    name: str
    clean_MT: NDArray[np.float32]
    noisy_MT: NDArray[np.float32]
    masked_MT: NDArray[np.float32] | None
    """The encoder's input; None for `mask_position: post_conv`, where masking comes after the subsampling."""
    mask_T: NDArray[np.bool_]
    masked_S: NDArray[np.bool_]
    """Tokens that count: enough of their frames are masked."""
    true_SH: Ints
    predicted_SH: Ints
    rank_SH: Ints
    """Rank of the true code by probability: 1 where the prediction is correct."""
    num_tokens: int
    """In the whole utterance."""
    frame_s: float
    band_hz: list[float]

    @property
    def num_drawn(self) -> int:
        return len(self.masked_S)

    @property
    def frames_per_token(self) -> int:
        return len(self.mask_T) // self.num_drawn

    @property
    def is_noisy(self) -> bool:
        return not np.array_equal(self.clean_MT, self.noisy_MT)


@dataclass
class Predictions:
    """Counts over all utterances examined; predictions are counted on masked tokens, summed over books."""

    used_KH: Ints
    """How often each code is the target of a token, masked or not."""
    masked_used_KH: Ints
    right_and_masked: dict[str, Ints] = field(default_factory=dict)
    """By utterance: tokens predicted correctly, and masked tokens."""
    num_in_top: int = 0
    loss_sum: float = 0.0
    audio_s: float = 0.0
    """In one pass."""
    num_passes: int = 0
    """Passes through the utterances, with other masks each time."""
    cut: bool = False
    """Some utterances were longer than MAX_UTTERANCE_S."""
    num_bad_files: int = 0

    @property
    def num_utterances(self) -> int:
        return len(self.right_and_masked)

    @property
    def num_masked(self) -> int:
        """Masked tokens, each counted once for every book and pass."""
        return int(self.masked_used_KH.sum())

    @property
    def accuracy(self) -> float:
        right, masked = sum(self.right_and_masked.values(), start=np.zeros(2, np.int64))
        return float(right / max(masked, 1))

    @property
    def accuracy_error(self) -> float:
        """Standard error of the accuracy between utterances: tokens within one are not independent."""
        counts = np.array(list(self.right_and_masked.values())).reshape(-1, 2)
        deviations = counts[:, 0] - self.accuracy * counts[:, 1]
        return float(np.sqrt(np.square(deviations).sum()) / max(counts[:, 1].sum(), 1))

    @property
    def top(self) -> int:
        return TOP

    @property
    def top_accuracy(self) -> float:
        return self.num_in_top / max(self.num_masked, 1)

    @property
    def loss(self) -> float:
        return self.loss_sum / max(self.num_masked, 1)

    @property
    def most_frequent(self) -> float:
        """Share of masked tokens that are the most frequent one in their book."""
        return float(self.masked_used_KH.max(0).sum()) / max(self.num_masked, 1)


@dataclass(frozen=True)
class Examined:
    """The model's predictions, and one utterance of them to draw."""

    predictions: Predictions
    example: ExampleTokens | None
    """The first utterance with a masked token in the part that is drawn; None if there is none."""


def examine(model: EncDecDenoiseMaskedTokenPredModel, dataset: DatasetConfig, *, seed: int) -> Examined:
    """Predictions for the first MAX_AUDIO_S of the dataset, noise and masks included, with the model in eval mode."""
    shape = (model.cfg.num_classes, model.cfg.num_books)
    predictions = Predictions(np.zeros(shape, np.int64), np.zeros(shape, np.int64))
    generator = torch.Generator().manual_seed(seed)
    example: ExampleTokens | None = None
    seen_s = 0.0
    while seen_s < MAX_AUDIO_S and predictions.num_passes < MAX_PASSES:
        for batch in _batches(dataset, seed):
            length_B = needed(batch.audio_len)
            seen_B = length_B.clamp(max=int(MAX_UTTERANCE_S * dataset.sample_rate))
            predicted = _predict(model, batch, seen_B, generator)
            seen_s += float(seen_B.sum()) / dataset.sample_rate
            if predictions.num_passes == 0:
                predictions.audio_s = seen_s
                predictions.cut |= bool((seen_B < length_B).any())
                predictions.num_bad_files += len(batch.bad_files)
            ids = batch.sample_id or batch.audio_filepaths
            for b, name in enumerate(batch.audio_filepaths):
                predicted.count(b, predictions, ids[b])
                if example is None and (drawn := predicted.example(b, name)).masked_S.any():
                    example = drawn
            if seen_s >= MAX_AUDIO_S:
                break
        predictions.num_passes += 1
    return Examined(predictions, example)


def _batches(dataset: DatasetConfig, seed: int) -> Iterator[AudioNoiseBatch]:
    """Batches as in validation, but small, so that they fit into the memory of any machine."""
    size = None if dataset.batch_size is None else min(dataset.batch_size, MAX_BATCH)
    small = replace(dataset, batch_size=size, drop_last=False, noise_bank_gb=0.0)
    yield from open_batches(small, seed, same_every_epoch=True)


@dataclass(frozen=True)
class _PredictedBatch:
    model: EncDecDenoiseMaskedTokenPredModel
    clean_BMT: Tensor
    noisy_BMT: Tensor
    mask_BT: Tensor
    masked_BS: Tensor
    tokens_BSH: Tensor
    log_probs_BSKH: Tensor
    num_tokens_B: list[int]
    """Without padding."""
    factor: int
    """Frames per token."""

    def count(self, b: int, into: Predictions, utterance: str) -> None:
        valid, (num_codes, num_books) = self.num_tokens_B[b], into.used_KH.shape
        masked_S, true_SH = self.masked_BS[b, :valid], self.tokens_BSH[b, :valid]
        rank_GH = self._ranks(b, valid)[masked_S]
        counts = into.right_and_masked.setdefault(utterance, np.zeros(2, np.int64))
        counts += [int((rank_GH == 1).sum()), rank_GH.numel()]
        into.num_in_top += int((rank_GH <= TOP).sum())
        nll_SH = -self.log_probs_BSKH[b, :valid].gather(1, true_SH[:, None])[:, 0]
        into.loss_sum += float(nll_SH[masked_S].double().sum())
        for h in range(num_books):
            if into.num_passes == 0:
                into.used_KH[:, h] += np.bincount(true_SH[:, h], minlength=num_codes)
            into.masked_used_KH[:, h] += np.bincount(true_SH[masked_S, h], minlength=num_codes)

    def example(self, b: int, name: str) -> ExampleTokens:
        drawn = min(self.num_tokens_B[b], MAX_DRAWN_TOKENS)
        frames = drawn * self.factor
        preprocessor, masking = self.model.cfg.preprocessor, self.model.mask_processor
        noisy_MT, mask_T = self.noisy_BMT[b, :, :frames], self.mask_BT[b, :frames]
        pre_conv = self.model.pre_encoder is None
        return ExampleTokens(
            name=name,
            clean_MT=self.clean_BMT[b, :, :frames].numpy(),
            noisy_MT=noisy_MT.numpy(),
            masked_MT=masking.fill(noisy_MT[None], mask_T[None])[0].numpy() if pre_conv else None,
            mask_T=mask_T.numpy(),
            masked_S=self.masked_BS[b, :drawn].numpy(),
            true_SH=self.tokens_BSH[b, :drawn].numpy(),
            predicted_SH=self.log_probs_BSKH[b, :drawn].argmax(1).numpy(),
            rank_SH=self._ranks(b, drawn).numpy(),
            num_tokens=self.num_tokens_B[b],
            frame_s=preprocessor.num_stride_samples / preprocessor.sample_rate,
            band_hz=band_centres_hz(self.model.preprocessor, preprocessor.sample_rate),
        )

    def _ranks(self, b: int, num_tokens: int) -> Tensor:
        """(S, H) rank of the true code; ties are ordered as argmax orders them."""
        log_probs_SKH = self.log_probs_BSKH[b, :num_tokens]
        true_S1H = self.tokens_BSH[b, :num_tokens, None]
        true_log_probs_S1H = log_probs_SKH.gather(1, true_S1H)
        code_1K1 = torch.arange(log_probs_SKH.shape[1])[None, :, None]
        before_SKH = (log_probs_SKH == true_log_probs_S1H) & (code_1K1 < true_S1H)
        return 1 + ((log_probs_SKH > true_log_probs_S1H) | before_SKH).sum(1)


@torch.no_grad()
def _predict(
    model: EncDecDenoiseMaskedTokenPredModel, batch: AudioNoiseBatch, length_B: Tensor, generator: torch.Generator
) -> _PredictedBatch:
    num_samples = int(length_B.max())
    audio_BN, noisy_BN = needed(batch.audio)[:, :num_samples], needed(batch.noisy_audio)[:, :num_samples]
    clean_BMT, frames_B = model.preprocessor(input_signal=audio_BN, length=length_B)
    noisy_BMT, _ = model.preprocessor(input_signal=noisy_BN, length=length_B)
    log_probs, encoded_len_B, masks_BDT, tokens = model(
        processed_signal=clean_BMT,
        processed_signal_length=frames_B,
        processed_noisy_input_signal=noisy_BMT,
        processed_noisy_input_signal_length=frames_B,
        apply_mask=True,
        generator=generator,
    )
    if tokens.ndim == 2:  # squeeze_single
        log_probs, tokens = log_probs[..., None], tokens[..., None]
    factor = model.cfg.encoder.subsampling_factor
    masked_BS = model.loss.masked_tokens(masks_BDT[:, 0])
    num = min(masked_BS.shape[1], log_probs.shape[1], tokens.shape[1])
    mask_BT = masks_BDT[:, 0] > 0
    return _PredictedBatch(
        model=model,
        clean_BMT=clean_BMT,
        noisy_BMT=noisy_BMT,
        mask_BT=mask_BT if model.pre_encoder is None else mask_BT.repeat_interleave(factor, dim=1),
        masked_BS=masked_BS[:, :num],
        tokens_BSH=tokens[:, :num],
        log_probs_BSKH=log_probs[:, :num],
        num_tokens_B=torch.minimum(encoded_len_B, frames_B // factor).clamp(max=num).tolist(),
        factor=factor,
    )
