"""Mask statistics against NeMo's over 2,000 utterances, for both rules and for short utterances."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from nest_ssl.modules import RandomBlockMasking
from tests.parity import cases

NEMO: dict[str, dict[str, Any]] = json.loads((Path(__file__).parent / "options" / "masks.json").read_text())


def disagreement(rule: dict[str, Any], length: int, nemo: dict[str, Any], seed: int = 0) -> float:
    """The largest z-score between our masked counts, and their places, and NeMo's."""
    generator = torch.Generator().manual_seed(seed)
    masking = RandomBlockMasking(feat_in=2, **rule)
    draws = cases.MASK_DRAWS
    mask = masking.draw(torch.full((draws,), length), length + 16, generator=generator)
    assert not mask[:, length:].any()
    counts = mask.sum(1).double().numpy()
    spread = np.sqrt((nemo["std"] ** 2 + counts.var()) / draws) + 1e-9
    z_mean = abs(counts.mean() - nemo["mean"]) / spread
    parts = np.array_split(mask[:, :length].double().mean(0).numpy(), 8)
    # Frames of a block are masked together, so a part of the profile is no surer than one frame of it.
    z_profile = max(
        abs(part.mean() - share) / np.sqrt(max(share * (1 - share), 1e-9) * 2 / draws + 1e-9)
        for part, share in zip(parts, nemo["profile"], strict=True)
    )
    return float(max(z_mean, z_profile))


@pytest.mark.parametrize("length", cases.MASK_LENGTHS)
@pytest.mark.parametrize("rule", cases.MASK_RULES)
def test_masks_have_nemos_statistics(rule: str, length: int) -> None:
    nemo = NEMO[rule][str(length)]
    assert disagreement(cases.MASK_RULES[rule], length, nemo) < 4.5


@pytest.mark.parametrize("factor", [0.9, 1.1])
@pytest.mark.parametrize("rule", cases.MASK_RULES)
def test_the_statistics_notice_a_mask_prob_off_by_a_tenth(rule: str, factor: float) -> None:
    moved = {**cases.MASK_RULES[rule], "mask_prob": cases.MASK_RULES[rule]["mask_prob"] * factor}
    assert max(disagreement(moved, length, NEMO[rule][str(length)]) for length in (300, 1000)) > 4.5


@pytest.mark.parametrize("rule", cases.MASK_RULES)
def test_the_spread_of_masked_counts_is_nemos(rule: str) -> None:
    generator = torch.Generator().manual_seed(3)
    masking = RandomBlockMasking(feat_in=2, **cases.MASK_RULES[rule])
    for length in (120, 300, 1000):
        nemo = NEMO[rule][str(length)]
        counts = masking.draw(torch.full((cases.MASK_DRAWS,), length), length, generator=generator).sum(1).double()
        quantiles = torch.quantile(counts, torch.tensor([0.05, 0.25, 0.5, 0.75, 0.95], dtype=torch.float64))
        np.testing.assert_allclose(quantiles.numpy(), nemo["quantiles"], atol=0.25 * nemo["std"] + 1)
