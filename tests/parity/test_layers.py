"""Layers and aggregations against NeMo's multi-layer feature extractor (record_nemo_layers.py)."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

from nest_ssl.extract import FeatureExtractor

HERE = Path(__file__).parent
WEIGHTS = (0.25, 0.75)
NEMO_NAMES = {"none": "none", "cat": "cat", "sum": "sum", "mean": "mean", "weighted": "weighted_sum"}


@pytest.mark.parametrize("name", ["pre_conv", "xlarge_style"])
@pytest.mark.parametrize("aggregation", list(NEMO_NAMES))
def test_layers_and_aggregations_equal_nemos(name: str, aggregation: str) -> None:
    with np.load(HERE / "golden" / "batch.npz") as batch:
        waveforms = [row[:length] for row, length in zip(batch["audio"], batch["audio_len"], strict=True)]
    with np.load(HERE / "nemo_layers.npz") as recorded:
        theirs, lengths = recorded[f"{name}/{NEMO_NAMES[aggregation]}"], recorded[f"{name}/length"]
    weights = WEIGHTS if aggregation == "weighted" else None
    extractor = FeatureExtractor(
        HERE / "golden" / f"{name}.nemo", "all", aggregation, weights, device="cpu", precision="fp32"
    )
    for ours, their_row, length in zip(extractor.batch(waveforms), theirs, lengths, strict=True):
        assert ours.shape == their_row[..., :length].shape
        torch.testing.assert_close(ours, torch.from_numpy(their_row[..., :length]), atol=1e-4, rtol=0)
