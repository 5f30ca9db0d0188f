"""The masked-token objective: predict the codes of the masked tokens, and of no others.

Only the masked tokens, about a third by default, are projected to the codebook. They are gathered
to a fixed number of places, so that no count is read back from the device and the shapes in a step
depend only on the shape of its batch.

B batch, T frames of the features that are masked, D their width or the encoder's, S encoder frames
or tokens, K codes per book, H books, N = B · S tokens of the batch, G places for masked tokens.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from nest_ssl.config import LossConfig, MaskingConfig
from nest_ssl.modules import MultiMLMLoss, MultiSoftmaxDecoder
from nest_ssl.modules.masking import SHORT_BLOCK


@dataclass
class MaskedPrediction:
    """What the objective saw: the masked tokens, gathered to a fixed number of places."""

    loss: Tensor
    log_probs_GKH: Tensor
    """(G, K) with `squeeze_single`."""
    targets_GH: Tensor
    counts_G: Tensor
    """True for places that hold a masked token; the others are empty and do not count."""
    num_valid: Tensor
    """Encoder frames with audio in the batch, masked or not."""


def predict_masked(
    encoded_BDS: Tensor,
    encoded_len: Tensor,
    masks_BDT: Tensor,
    tokens_BSH: Tensor,
    *,
    decoder: MultiSoftmaxDecoder,
    loss: MultiMLMLoss,
    masking: MaskingConfig,
) -> MaskedPrediction:
    """Return `loss(decoder(encoded))`, with only the masked tokens projected."""
    masked_BS = loss.masked_tokens(masks_BDT[:, 0])
    # Causal subsampling can give one frame more than there are tokens: drop the surplus.
    num_tokens = min(masked_BS.shape[1], encoded_BDS.shape[2], tokens_BSH.shape[1])
    masked_BS = masked_BS[:, :num_tokens]
    places_G, counts_G = gather_places(masked_BS.flatten(), num_places(masking, loss.cfg, *masked_BS.shape))
    targets_GH = tokens_BSH[:, :num_tokens].flatten(0, 1)[places_G]
    frames_ND = encoded_BDS[:, :, :num_tokens].transpose(1, 2).flatten(0, 1)
    frames_GD: Tensor = TakePlaces.apply(frames_ND, places_G, counts_G)  # type: ignore[no-untyped-call]
    log_probs_GKH = decoder(encoder_output=frames_GD.T[None])[0]
    masks_11T = counts_G.float().repeat_interleave(loss.cfg.combine_time_steps)[None, None]
    value = loss(masks=masks_11T, decoder_outputs=log_probs_GKH[None], targets=targets_GH[None])
    return MaskedPrediction(value, log_probs_GKH, targets_GH, counts_G, encoded_len.sum())


def num_places(masking: MaskingConfig, loss: LossConfig, batch: int, num_tokens: int) -> int:
    """Return how many places the masked tokens of a batch need; the same number for every batch of this shape.

    Blocks that do not overlap touch a bounded number of tokens. Blocks that may overlap start by
    coin flips: the places are the expected share plus 12 standard deviations (a block masks its
    tokens together), so in 10⁹ steps no token is left out. An utterance too short for a block has
    its first frames masked. Small batches get a place for every token.
    """
    step, total = loss.combine_time_steps, batch * num_tokens
    of_short_row = math.ceil(SHORT_BLOCK / step)
    if not masking.allow_overlap:
        blocks = math.ceil((num_tokens + 1) * step * masking.mask_prob / masking.block_size)
        touched = (masking.block_size + step - 2) // step + 1  # tokens under a block, wherever it starts
        return min(total, batch * max(of_short_row, blocks * touched))
    least = math.floor(loss.mask_threshold * step) + 1  # masked frames that make a token count
    reach = max(masking.block_size, masking.block_size + step + 1 - 2 * least)  # starts that make a token count
    share = 1 - (1 - masking.mask_prob) ** reach
    spread = math.sqrt(total * 2 * math.ceil(reach / step) * share * (1 - share))
    return min(total, 64 * math.ceil((batch * of_short_row + share * total + 12 * spread) / 64))


def gather_places(selected_N: Tensor, num_places: int) -> tuple[Tensor, Tensor]:
    """Return indices (G,) of the selected entries, in order, and which of the G places are filled; the rest hold 0."""
    place_N = selected_N.cumsum(0) - 1
    place_N = torch.where(selected_N & (place_N < num_places), place_N, num_places)
    index_N = torch.arange(selected_N.shape[0], device=selected_N.device)
    places = torch.zeros(num_places + 1, dtype=torch.long, device=selected_N.device).scatter(0, place_N, index_N)
    filled_G = torch.arange(num_places, device=selected_N.device) < selected_N.sum()
    return places[:-1], filled_G


class TakePlaces(torch.autograd.Function):
    """`x_ND[places_G]`, where no filled place is taken twice: its gradient is then a gather too.

    torch's gradient of an index is a sum that sorts its places: 2.2 ms for 64 × 16 s on an H200,
    0.1 ms this way.
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
