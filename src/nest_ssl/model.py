"""NEST: hear noisy, masked speech; predict the codes of the clean speech (arXiv 2408.13106).

Start reading here. `forward` gives NeMo's outputs; `masked_loss` is the training objective, computed on masked tokens
alone. Both are the same five steps: features, targets, mask, encode, predict.

B batch, N samples, M mel bands, T mel frames, D width, S encoder frames, K codes per book, H books,
G tokens gathered for the loss.
"""

from __future__ import annotations

import dataclasses
import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from nest_ssl.config import ModelConfig, model_config
from nest_ssl.inputs import Mels, Signal, check_same_batch, either
from nest_ssl.modules import (
    AudioToMelSpectrogramPreprocessor,
    ConformerEncoder,
    MultiMLMLoss,
    MultiSoftmaxDecoder,
    RandomBlockMasking,
    RandomProjectionVectorQuantizer,
)
from nest_ssl.modules.masking import SHORT_BLOCK
from nest_ssl.nemo_file import nemo_config, write_nemo


@dataclass
class MaskedPrediction:
    """What the training objective saw: the masked tokens, gathered to a fixed number of places."""

    loss: Tensor
    log_probs_GKH: Tensor
    """(G, K) with `squeeze_single`."""
    targets_GH: Tensor
    counts_G: Tensor
    """True for places that hold a masked token; the others are empty and do not count."""
    num_valid: Tensor
    """Encoder frames with audio in the batch, masked or not."""


class EncDecMaskedTokenPredModel(nn.Module):
    """Masked token prediction without noise: the clean audio is also the input."""

    def __init__(self, cfg: Any, trainer: Any = None) -> None:
        """`cfg` is NeMo's `model:` section as a dict, DictConfig or dataclass; `trainer` is kept for its user."""
        super().__init__()
        self.cfg: ModelConfig = model_config(cfg)
        self.trainer = trainer
        sections = effective_sections(self.cfg)
        self.preprocessor = AudioToMelSpectrogramPreprocessor(**vars(sections.preprocessor))
        self.encoder = ConformerEncoder(**vars(sections.encoder))
        self.encoder.compile_mode, self.encoder.activation_budget = str(self.cfg.compile), self.cfg.activation_budget
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
        clean = self._features(either(audio, mels, "input_signal", "processed_signal"), generator)
        return self._forward(clean, clean, apply_mask, generator)

    def masked_loss(
        self, audio: Tensor, audio_len: Tensor, *, generator: torch.Generator | None = None
    ) -> MaskedPrediction:
        """The training objective: `loss(forward(…, apply_mask=True))`, with only the masked tokens projected."""
        clean = self._features(Signal("audio", audio, audio_len), generator)
        return self._masked_loss(clean, clean, generator)

    def save_to(self, path: str | Path) -> None:
        """Write a `.nemo` file that NeMo reads too; the file appears whole or not at all."""
        write_nemo(path, nemo_config(self.cfg, type(self).__name__), self.state_dict())

    def num_places(self, batch: int, num_tokens: int) -> int:
        """Places for masked tokens: a fixed number, so that no count is read back from the device.

        Blocks that do not overlap touch a bounded number of tokens. Blocks that may overlap start by coins: the places
        are the masked share plus 12 standard deviations (a block masks its tokens together), so in 10⁹ steps no token
        is left out. An utterance too short for a block has its first frames masked. Small batches get a place for
        every token.
        """
        masking, step, total = self.mask_processor.cfg, self.loss.cfg.combine_time_steps, batch * num_tokens
        of_short_row = math.ceil(SHORT_BLOCK / step)
        if not masking.allow_overlap:
            blocks = math.ceil((num_tokens + 1) * step * masking.mask_prob / masking.block_size)
            touched = (masking.block_size + step - 2) // step + 1  # tokens under a block, wherever it starts
            return min(total, batch * max(of_short_row, blocks * touched))
        least = math.floor(self.loss.cfg.mask_threshold * step) + 1  # masked frames that make a token count
        reach = max(masking.block_size, masking.block_size + step + 1 - 2 * least)  # starts that make a token count
        share = 1 - (1 - masking.mask_prob) ** reach
        spread = math.sqrt(total * 2 * math.ceil(reach / step) * share * (1 - share))
        return min(total, 64 * math.ceil((batch * of_short_row + share * total + 12 * spread) / 64))

    def _forward(
        self, clean: Mels, noisy: Mels, apply_mask: bool, generator: torch.Generator | None
    ) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        check_same_batch(clean, noisy)
        tokens_BSH = self._targets(clean)
        encoded_BDS, encoded_len, masks_BDT = self._mask_and_encode(noisy, apply_mask, generator)
        log_probs_BSKH = self.decoder(encoder_output=encoded_BDS)
        return log_probs_BSKH, encoded_len, masks_BDT, tokens_BSH

    def _masked_loss(
        self, clean: Mels, noisy: Mels, generator: torch.Generator | None, num_samples: Tensor | None = None
    ) -> MaskedPrediction:
        check_same_batch(clean, noisy)
        tokens_BSH = self._targets(clean)
        num_frames = None if num_samples is None else self.preprocessor.featurizer.num_padded_frames(num_samples)
        encoded_BDS, encoded_len, masks_BDT = self._mask_and_encode(noisy, True, generator, num_frames)
        masked_BS = self.loss.masked_tokens(masks_BDT[:, 0])
        # Causal subsampling can give one frame more than there are tokens: drop the surplus.
        num_tokens = min(masked_BS.shape[1], encoded_BDS.shape[2], tokens_BSH.shape[1])
        masked_BS = masked_BS[:, :num_tokens]
        places_G, counts_G = gather_places(masked_BS.flatten(), self.num_places(*masked_BS.shape))
        targets_GH = tokens_BSH[:, :num_tokens].flatten(0, 1)[places_G]
        frames_ND = encoded_BDS[:, :, :num_tokens].transpose(1, 2).flatten(0, 1)
        frames_GD: Tensor = TakePlaces.apply(frames_ND, places_G, counts_G)  # type: ignore[no-untyped-call]
        log_probs_GKH = self.decoder(encoder_output=frames_GD.T[None])[0]
        masks_11T = counts_G.float().repeat_interleave(self.loss.cfg.combine_time_steps)[None, None]
        loss = self.loss(masks=masks_11T, decoder_outputs=log_probs_GKH[None], targets=targets_GH[None])
        return MaskedPrediction(loss, log_probs_GKH, targets_GH, counts_G, encoded_len.sum())

    def _features(self, source: Signal | Mels, generator: torch.Generator | None) -> Mels:
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

    def _mask_and_encode(
        self, noisy: Mels, apply_mask: bool, generator: torch.Generator | None, num_frames: Tensor | None = None
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Encoded frames (B, D, S), their lengths, and masks (B, M, T) of mel frames or (B, D, S) for post_conv."""
        features_BDT, length = noisy.mels_BMT, noisy.length
        post_conv = self.pre_encoder is not None
        if post_conv:
            features_BSD, length = self.encoder.pre_encode(features_BDT.transpose(1, 2), length)
            features_BDT = features_BSD.transpose(1, 2)
        masks_BDT = torch.zeros_like(features_BDT)
        if apply_mask:
            features_BDT, masks_BDT = self.mask_processor(
                input_feats=features_BDT, input_lengths=length, generator=generator
            )
        if post_conv:
            features_BDT = features_BDT.transpose(1, 2)
        encoded_BDS, length = self.encoder(
            audio_signal=features_BDT,
            length=length,
            bypass_pre_encode=post_conv,
            num_frames=None if post_conv else num_frames,
        )
        return encoded_BDS, length, masks_BDT


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

        The noise by itself is accepted, as in NeMo, and not used: what counts is the noisy input.
        """
        audio = Signal.given("input_signal", input_signal, input_signal_length)
        mels = Mels.given("processed_signal", processed_signal, processed_signal_length)
        noisy_audio = Signal.given("noisy_input_signal", noisy_input_signal, noisy_input_signal_length)
        noisy_mels = Mels.given(
            "processed_noisy_input_signal", processed_noisy_input_signal, processed_noisy_input_signal_length
        )
        clean = either(audio, mels, "input_signal", "processed_signal")
        noisy = either(noisy_audio, noisy_mels, "noisy_input_signal", "processed_noisy_input_signal")
        return self._forward(self._features(clean, generator), self._features(noisy, generator), apply_mask, generator)

    def masked_loss(  # type: ignore[override]
        self,
        audio: Tensor,
        audio_len: Tensor,
        noisy_audio: Tensor,
        noisy_audio_len: Tensor,
        *,
        generator: torch.Generator | None = None,
        num_samples: Tensor | None = None,
    ) -> MaskedPrediction:
        """The training objective: codes of `audio` at the masked tokens, predicted from `noisy_audio`.

        `num_samples`: a scalar tensor, the batch's size without padding that was added for a GPU's sake; None: all.
        """
        clean_signal, noisy_signal = (
            Signal("audio", audio, audio_len),
            Signal("noisy_audio", noisy_audio, noisy_audio_len),
        )
        if audio.is_cuda and audio.shape == noisy_audio.shape and audio_len.shape == noisy_audio_len.shape:
            clean, noisy = self._both_features(clean_signal, noisy_signal, generator)
        else:
            clean, noisy = self._features(clean_signal, generator), self._features(noisy_signal, generator)
        return self._masked_loss(clean, noisy, generator, num_samples)

    def _both_features(self, clean: Signal, noisy: Signal, generator: torch.Generator | None) -> tuple[Mels, Mels]:
        """The features of two signals of one size in one pass."""
        samples, length = torch.cat((clean.samples_BN, noisy.samples_BN)), torch.cat((clean.length, noisy.length))
        both = self._features(Signal(f"{clean.name} and {noisy.name}", samples, length), generator)
        (clean_BMT, noisy_BMT), (clean_len, noisy_len) = both.mels_BMT.chunk(2), both.length.chunk(2)
        return Mels(clean.name, clean_BMT, clean_len), Mels(noisy.name, noisy_BMT, noisy_len)


class MaskedSubsampling(nn.Module):
    """The encoder's subsampling beside the masking that follows it, as NeMo names them in post_conv files."""

    def __init__(self, pre_encode: nn.Module, masking: nn.Module) -> None:
        super().__init__()
        self.pre_encode = pre_encode
        self.masking = masking

    def forward(self, x: Tensor, lengths: Tensor) -> tuple[Tensor, Tensor]:
        subsampled: tuple[Tensor, Tensor] = self.pre_encode(x, lengths)
        return subsampled


def effective_sections(cfg: ModelConfig) -> ModelConfig:
    """The sections as the modules need them: post_conv works on subsampled frames. `cfg` stays as the user wrote it."""
    if cfg.mask_position != "post_conv":
        return cfg
    width, factor = cfg.encoder.d_model, cfg.encoder.subsampling_factor
    return dataclasses.replace(
        cfg,
        masking=dataclasses.replace(cfg.masking, feat_in=width, block_size=max(1, cfg.masking.block_size // factor)),
        quantizer=dataclasses.replace(cfg.quantizer, feat_in=width, combine_time_steps=1),
        loss=dataclasses.replace(cfg.loss, combine_time_steps=1),
    )


def gather_places(selected_N: Tensor, num_places: int) -> tuple[Tensor, Tensor]:
    """Indices (G,) of the selected entries, in order, and which of the G places are filled; the rest hold 0."""
    place_N = selected_N.cumsum(0) - 1
    place_N = torch.where(selected_N & (place_N < num_places), place_N, num_places)
    index_N = torch.arange(selected_N.shape[0], device=selected_N.device)
    places = torch.zeros(num_places + 1, dtype=torch.long, device=selected_N.device).scatter(0, place_N, index_N)
    filled_G = torch.arange(num_places, device=selected_N.device) < selected_N.sum()
    return places[:-1], filled_G


class TakePlaces(torch.autograd.Function):
    """`x_ND[places_G]` where no filled place is taken twice: its gradient is then a gather too.

    torch's gradient of an index is a sum that sorts its places: 2.2 ms for 64 × 16 s on an H200.
    """

    @staticmethod
    def forward(ctx: Any, x_ND: Tensor, places_G: Tensor, filled_G: Tensor) -> Tensor:
        ctx.save_for_backward(places_G, filled_G)
        ctx.num_rows = x_ND.shape[0]
        return x_ND[places_G]

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        places_G, filled_G = ctx.saved_tensors
        size, empty = places_G.shape[0], ctx.num_rows
        place_N = torch.full((ctx.num_rows + 1,), size, device=places_G.device)
        place_N = place_N.scatter(0, torch.where(filled_G, places_G, empty), torch.arange(size, device=places_G.device))
        return torch.cat((grads[0], torch.zeros_like(grads[0][:1])))[place_N[:-1]], None, None
