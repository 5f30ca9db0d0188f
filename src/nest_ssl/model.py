"""NEST: hear noisy, masked speech; predict the codes of the clean speech (arXiv 2408.13106).

Start reading here. `forward` gives NeMo's outputs; `masked_loss` is the training objective, which
projects only the masked tokens. Both are the same five steps: features, targets, mask, encode,
predict.

B batch, N samples, M mel bands, T mel frames, D width, S encoder frames, K codes per book, H books.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from nest_ssl.config import ModelConfig, model_config
from nest_ssl.modules import (
    AudioToMelSpectrogramPreprocessor,
    ConformerEncoder,
    MultiMLMLoss,
    MultiSoftmaxDecoder,
    RandomBlockMasking,
    RandomProjectionVectorQuantizer,
)
from nest_ssl.modules.inputs import Mels, Signal, check_same_batch, either
from nest_ssl.nemo_file import nemo_config, write_nemo
from nest_ssl.objective import MaskedPrediction, num_places, predict_masked


@dataclass
class Masked:
    """Features with the mask embedding in the masked frames, (B, D, T), their lengths (B,), and 1 where masked."""

    features_BDT: Tensor
    length: Tensor
    masks_BDT: Tensor


class EncDecMaskedTokenPredModel(nn.Module):
    """Masked token prediction without noise: the clean audio is also the input."""

    def __init__(self, cfg: Any, trainer: Any = None) -> None:
        """`cfg` is NeMo's `model:` section as a dict, DictConfig or dataclass; `trainer` is kept as an attribute."""
        super().__init__()
        self.cfg: ModelConfig = model_config(cfg)
        self.trainer = trainer
        sections = effective_sections(self.cfg)
        self.preprocessor = AudioToMelSpectrogramPreprocessor(**vars(sections.preprocessor))
        self.encoder = ConformerEncoder(**vars(sections.encoder))
        self.quantizer = RandomProjectionVectorQuantizer(**vars(sections.quantizer))
        self.mask_processor = RandomBlockMasking(**vars(sections.masking))
        self.decoder = MultiSoftmaxDecoder(**vars(sections.decoder))
        self.loss = MultiMLMLoss(**vars(sections.loss))
        self.pre_encoder: MaskedSubsampling | None = None
        if self.cfg.mask_position == "post_conv":
            self.pre_encoder = MaskedSubsampling(self.encoder.pre_encode, self.mask_processor)
            self.encoder.pre_encode = self.pre_encoder

    def forward(
        self,
        input_signal: Tensor | None = None,
        input_signal_length: Tensor | None = None,
        processed_signal: Tensor | None = None,
        processed_signal_length: Tensor | None = None,
        apply_mask: bool = False,
        *,
        generator: torch.Generator | None = None,
    ) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Log-probabilities (B, S, K, H), their lengths (B,), masks (B, M, T) and tokens (B, S, H)."""
        audio = Signal.given("input_signal", input_signal, input_signal_length)
        mels = Mels.given("processed_signal", processed_signal, processed_signal_length)
        clean = self.features(either(audio, mels, "input_signal", "processed_signal"), generator)
        return self._forward(clean, clean, apply_mask, generator)

    def masked_loss(
        self, audio: Tensor, audio_len: Tensor, *, generator: torch.Generator | None = None
    ) -> MaskedPrediction:
        """The training objective: `loss(forward(…, apply_mask=True))`, with only the masked tokens projected."""
        clean = self.features(Signal("audio", audio, audio_len), generator)
        return self.predict_masked(clean, clean, generator)

    def save_to(self, path: str | Path) -> None:
        """Write a `.nemo` file that NeMo reads too; the file appears whole or not at all."""
        write_nemo(path, nemo_config(self.cfg, type(self).__name__), self.state_dict())

    def num_places(self, batch: int, num_tokens: int) -> int:
        """Return how many places `masked_loss` keeps for the masked tokens of a batch of this shape."""
        return num_places(self.mask_processor.cfg, self.loss.cfg, batch, num_tokens)

    def _forward(
        self, clean: Mels, noisy: Mels, apply_mask: bool, generator: torch.Generator | None
    ) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        check_same_batch(clean, noisy)
        tokens_BSH = self._targets(clean)
        masked = self._mask(noisy, apply_mask, generator)
        encoded_BDS, encoded_len = self._encode(masked)
        log_probs_BSKH = self.decoder(encoder_output=encoded_BDS)
        return log_probs_BSKH, encoded_len, masked.masks_BDT, tokens_BSH

    def predict_masked(self, clean: Mels, noisy: Mels, generator: torch.Generator | None = None) -> MaskedPrediction:
        """The training objective, from features on."""
        check_same_batch(clean, noisy)
        tokens_BSH = self._targets(clean)
        masked = self._mask(noisy, True, generator)
        encoded_BDS, encoded_len = self._encode(masked)
        return predict_masked(
            encoded_BDS,
            encoded_len,
            masked.masks_BDT,
            tokens_BSH,
            decoder=self.decoder,
            loss=self.loss,
            masking=self.mask_processor.cfg,
        )

    def features(self, source: Signal | Mels, generator: torch.Generator | None = None) -> Mels:
        """Return the log-mel features of a signal; features that were given are only checked."""
        device, values = self.mask_processor.mask_embedding.device, not (self.training or torch.compiler.is_compiling())
        if isinstance(source, Mels):
            return source.checked(self.cfg.preprocessor.features, device, values=values)
        source = source.checked(device, values=values)
        mels_BMT, length = self.preprocessor(input_signal=source.samples_BN, length=source.length, generator=generator)
        return Mels(source.name, mels_BMT, length)

    @torch.no_grad()
    def _targets(self, clean: Mels) -> Tensor:
        """(B, S, H) codes of the clean features: mel frames, or subsampled ones for post_conv."""
        features_BDT = clean.mels_BMT
        if self.pre_encoder is not None:
            features_BDT = self.encoder.pre_encode(features_BDT.transpose(1, 2), clean.length)[0].transpose(1, 2)
        tokens_BSH: Tensor = self.quantizer(input_signal=features_BDT)[1]
        return tokens_BSH

    def _mask(self, noisy: Mels, apply_mask: bool, generator: torch.Generator | None) -> Masked:
        """Mask mel frames, or subsampled ones for post_conv."""
        features_BDT, length = noisy.mels_BMT, noisy.length
        if self.pre_encoder is not None:
            features_BSD, length = self.encoder.pre_encode(features_BDT.transpose(1, 2), length)
            features_BDT = features_BSD.transpose(1, 2)
        if not apply_mask:
            return Masked(features_BDT, length, torch.zeros_like(features_BDT))
        features_BDT, masks_BDT = self.mask_processor(
            input_feats=features_BDT, input_lengths=length, generator=generator
        )
        return Masked(features_BDT, length, masks_BDT)

    def _encode(self, masked: Masked) -> tuple[Tensor, Tensor]:
        """Encoded frames (B, D, S) and their lengths."""
        subsampled = self.pre_encoder is not None
        features = masked.features_BDT.transpose(1, 2) if subsampled else masked.features_BDT
        encoded: tuple[Tensor, Tensor] = self.encoder(
            audio_signal=features, length=masked.length, bypass_pre_encode=subsampled
        )
        return encoded


class EncDecDenoiseMaskedTokenPredModel(EncDecMaskedTokenPredModel):
    """NEST: the input is noisy and masked, the targets are the codes of the clean audio."""

    def forward(  # type: ignore[override]
        self,
        input_signal: Tensor | None = None,
        input_signal_length: Tensor | None = None,
        processed_signal: Tensor | None = None,
        processed_signal_length: Tensor | None = None,
        noise_signal: Tensor | None = None,
        noise_signal_length: Tensor | None = None,
        processed_noise_signal: Tensor | None = None,
        processed_noise_signal_length: Tensor | None = None,
        noisy_input_signal: Tensor | None = None,
        noisy_input_signal_length: Tensor | None = None,
        processed_noisy_input_signal: Tensor | None = None,
        processed_noisy_input_signal_length: Tensor | None = None,
        apply_mask: bool = False,
        *,
        generator: torch.Generator | None = None,
    ) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Log-probabilities (B, S, K, H), their lengths (B,), masks (B, M, T) and tokens (B, S, H).

        The noise alone is accepted, as in NeMo, and not used: only the noisy input counts.
        """
        audio = Signal.given("input_signal", input_signal, input_signal_length)
        mels = Mels.given("processed_signal", processed_signal, processed_signal_length)
        noisy_audio = Signal.given("noisy_input_signal", noisy_input_signal, noisy_input_signal_length)
        noisy_mels = Mels.given(
            "processed_noisy_input_signal", processed_noisy_input_signal, processed_noisy_input_signal_length
        )
        clean = either(audio, mels, "input_signal", "processed_signal")
        noisy = either(noisy_audio, noisy_mels, "noisy_input_signal", "processed_noisy_input_signal")
        return self._forward(self.features(clean, generator), self.features(noisy, generator), apply_mask, generator)

    def masked_loss(  # type: ignore[override]
        self,
        audio: Tensor,
        audio_len: Tensor,
        noisy_audio: Tensor,
        noisy_audio_len: Tensor,
        *,
        generator: torch.Generator | None = None,
    ) -> MaskedPrediction:
        """The training objective: the codes of `audio` at the masked tokens, predicted from `noisy_audio`."""
        clean = self.features(Signal("audio", audio, audio_len), generator)
        noisy = self.features(Signal("noisy_audio", noisy_audio, noisy_audio_len), generator)
        return self.predict_masked(clean, noisy, generator)


class MaskedSubsampling(nn.Module):
    """The encoder's subsampling together with the masking that follows it, under NeMo's names for post_conv files."""

    def __init__(self, pre_encode: nn.Module, masking: nn.Module) -> None:
        super().__init__()
        self.pre_encode = pre_encode
        self.masking = masking

    def forward(self, x: Tensor, lengths: Tensor) -> tuple[Tensor, Tensor]:
        subsampled: tuple[Tensor, Tensor] = self.pre_encode(x, lengths)
        return subsampled


def effective_sections(cfg: ModelConfig) -> ModelConfig:
    """Return the sections as the modules need them: post_conv works on subsampled frames. `cfg` is not changed."""
    if cfg.mask_position != "post_conv":
        return cfg
    width, factor = cfg.encoder.d_model, cfg.encoder.subsampling_factor
    return dataclasses.replace(
        cfg,
        masking=dataclasses.replace(cfg.masking, feat_in=width, block_size=max(1, cfg.masking.block_size // factor)),
        quantizer=dataclasses.replace(cfg.quantizer, feat_in=width, combine_time_steps=1),
        loss=dataclasses.replace(cfg.loss, combine_time_steps=1),
    )
