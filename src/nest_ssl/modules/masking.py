"""Random block masking, drawn on the device for all utterances at once.

B batch, D features, T frames.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812

from nest_ssl.config import MaskingConfig
from nest_ssl.modules.inputs import check_features, checked_lengths, valid_frames

SHORT_BLOCK = 8  # frames masked in an utterance that is too short for a block


class RandomBlockMasking(nn.Module):
    """`mask_processor(input_feats=(B, D, T), input_lengths=(B,))` gives masked features and masks, both (B, D, T).

    Takes the fields of `MaskingConfig` as keywords. Nothing is read back to the host, whatever the
    batch size.
    """

    def __init__(self, **options: Any) -> None:
        super().__init__()
        self.cfg = cfg = MaskingConfig(**options)
        embedding = torch.empty(cfg.feat_in).normal_(0, 0.1)
        if cfg.mask_value is not None:
            embedding = torch.full((cfg.feat_in,), cfg.mask_value)
        self.mask_embedding = nn.Parameter(embedding, requires_grad=not cfg.freeze and cfg.mask_value is None)

    def forward(
        self, input_feats: Tensor, input_lengths: Tensor, *, generator: torch.Generator | None = None
    ) -> tuple[Tensor, Tensor]:
        check_features("input_feats", input_feats, "batch", self.cfg.feat_in, "frames")
        input_lengths = checked_lengths("input_lengths", input_lengths, input_feats, input_feats.shape[2])
        mask_BT = self.draw(input_lengths, input_feats.shape[2], generator=generator)
        masks_BDT = mask_BT[:, None].expand_as(input_feats).to(input_feats.dtype)
        return self.fill(input_feats, mask_BT), masks_BDT

    def fill(self, feats_BDT: Tensor, mask_BT: Tensor) -> Tensor:
        """Return the features with the mask embedding in place of the masked frames."""
        return torch.where(mask_BT[:, None], self.mask_embedding.to(feats_BDT.dtype)[:, None], feats_BDT)

    def draw(self, lengths_B: Tensor, num_frames: int, *, generator: torch.Generator | None = None) -> Tensor:
        """(B, T) true where a frame is masked."""
        cfg = self.cfg
        length_B1 = lengths_B[:, None]
        draw = overlapping_blocks if cfg.allow_overlap else separate_blocks
        mask_BT = draw(length_B1, num_frames, cfg.mask_prob, cfg.block_size, generator)
        too_short_B1 = cfg.block_size >= length_B1 * cfg.max_mask_ratio
        first_BT = torch.arange(num_frames, device=lengths_B.device).expand_as(mask_BT) < SHORT_BLOCK
        return torch.where(too_short_B1, first_BT, mask_BT) & valid_frames(lengths_B, num_frames)


def overlapping_blocks(
    length_B1: Tensor, num_frames: int, start_prob: float, block_size: int, generator: torch.Generator | None
) -> Tensor:
    """(B, T) blocks that may overlap.

    NeMo draws Binomial(length − block, p) distinct starts below length − block: the same
    distribution as an independent coin of probability p for each of these frames.
    """
    frame_T = torch.arange(num_frames, device=length_B1.device)
    coin_BT = torch.rand(length_B1.shape[0], num_frames, device=length_B1.device, generator=generator) < start_prob
    starts_BT = (coin_BT & (frame_T < length_B1 - block_size)).float()
    # A frame is masked if one of the block_size frames up to it is a start: a running maximum.
    return F.max_pool1d(F.pad(starts_BT, (block_size - 1, 0))[:, None], block_size, stride=1)[:, 0] > 0


def separate_blocks(
    length_B1: Tensor, num_frames: int, share: float, block_size: int, generator: torch.Generator | None
) -> Tensor:
    """(B, T) blocks that do not overlap, about `share` of the frames: distinct cells of a grid with a random offset."""
    device, num_rows = length_B1.device, length_B1.shape[0]
    blocks_B1 = torch.ceil(length_B1 * share / block_size).long()
    # Too little room for that many blocks: shrink them.
    room = (blocks_B1 + 1) * block_size <= length_B1
    size_B1 = torch.where(room, block_size, length_B1 // (blocks_B1 + 1)).clamp(min=1)
    cells_B1 = length_B1 // size_B1 - 1
    cell_T = torch.arange(num_frames, device=device)
    key_BT = torch.rand(num_rows, num_frames, device=device, generator=generator)
    key_BT = torch.where(cell_T < cells_B1, key_BT, 2.0)  # cells past the end come last
    rank_BT = key_BT.argsort(dim=1).argsort(dim=1)
    chosen_BT = (rank_BT < blocks_B1) & (cell_T < cells_B1)
    offset_B1 = torch.randint(0, block_size, (num_rows, 1), device=device, generator=generator)
    own_cell_BT = (cell_T - offset_B1).div(size_B1, rounding_mode="floor")
    return chosen_BT.gather(1, own_cell_BT.clamp(0, num_frames - 1)) & (own_cell_BT >= 0)
