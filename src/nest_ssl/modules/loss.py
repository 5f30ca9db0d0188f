"""Negative log-likelihood of the masked tokens. B batch, D features, T frames, S tokens, K codes, H books."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from nest_ssl.config import LossConfig
from nest_ssl.modules.inputs import check_tensor


class MultiMLMLoss(nn.Module):
    """`loss(masks=(B, D, T), decoder_outputs=(B, S, K, H), targets=(B, S, H))`: mean over masked tokens and books.

    Takes the fields of `LossConfig` as keywords. Without any masked token the loss is 0, with
    gradients of 0.
    """

    def __init__(self, **options: Any) -> None:
        super().__init__()
        self.cfg = LossConfig(**options)

    def forward(
        self,
        masks: Tensor,
        decoder_outputs: Tensor,
        targets: Tensor,
        decoder_lengths: Tensor | None = None,
        target_lengths: Tensor | None = None,
    ) -> Tensor:
        """The lengths are accepted, as in NeMo, and not needed: a mask lies within its utterance."""
        books: tuple[int, ...] = (self.cfg.num_decoders,)
        if self.cfg.squeeze_single and self.cfg.num_decoders == 1:
            books = ()
        check_tensor("masks", masks, "batch", "features", "frames", empty=True)
        check_tensor("decoder_outputs", decoder_outputs, masks.shape[0], "frames", "codes", *books, empty=True)
        check_tensor("targets", targets, masks.shape[0], "tokens", *books, empty=True)
        if not books:
            decoder_outputs, targets = decoder_outputs[..., None], targets[..., None]
        masked_BS = self.masked_tokens(masks.float().mean(1))
        num_tokens = min(masked_BS.shape[1], decoder_outputs.shape[1], targets.shape[1])
        masked_BS1 = masked_BS[:, :num_tokens, None]
        if targets.device.type == "cpu":  # elsewhere `ModelConfig` must do, which compares quantizer and decoder
            num_codes = decoder_outputs.shape[2]
            torch._assert_async(
                ((targets >= 0) & (targets < num_codes)).all(),
                f"targets: contains a code that the decoder does not have: it has 0 to {num_codes - 1}. "
                "quantizer.num_classes and decoder.num_classes must be equal.",
            )
        nll_BSH = -decoder_outputs[:, :num_tokens].gather(2, targets[:, :num_tokens, None])[:, :, 0]
        count = masked_BS1.sum().clamp(min=1) * targets.shape[2]
        return torch.where(masked_BS1, nll_BSH, 0.0).sum() / count

    def masked_tokens(self, mask_BT: Tensor) -> Tensor:
        """(B, S) true where more than `mask_threshold` of a token's frames are masked."""
        step = self.cfg.combine_time_steps
        num_tokens = mask_BT.shape[1] // step
        shape = (mask_BT.shape[0], num_tokens, step)
        shares_BS = mask_BT[:, : num_tokens * step].float().reshape(shape).mean(2)
        return shares_BS > self.cfg.mask_threshold
