"""Ask NeMo's multi-layer feature extractor about two golden models and write its features to nemo_layers.npz.

    PYTHON_WITH_NEMO tests/parity/record_nemo_layers.py

Needs nemo_toolkit[asr]==2.7.3 in an environment of its own. Eval mode; what is recorded are float32 features (B, D, S).
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import torch
from nemo.collections.asr.models.ssl_models import EncDecDenoiseMaskedTokenPredModel
from nemo.collections.asr.modules.ssl_modules.multi_layer_feat import (
    Aggregator,
    ConformerMultiLayerFeatureExtractor,
)

HERE = Path(__file__).parent
MODELS = ("pre_conv", "xlarge_style")
LAYERS = (0, 1)
MODES = ("none", "cat", "sum", "mean", "weighted_sum")
WEIGHTS = (0.25, 0.75)


def main() -> None:
    with np.load(HERE / "golden" / "batch.npz") as batch:
        audio, length = torch.from_numpy(batch["audio"]), torch.from_numpy(batch["audio_len"])
    recorded = {}
    for name in MODELS:
        model = EncDecDenoiseMaskedTokenPredModel.restore_from(
            str(HERE / "golden" / f"{name}.nemo"), map_location="cpu"
        ).eval()
        for mode in MODES:
            weights = torch.tensor(WEIGHTS) if mode == "weighted_sum" else None
            extractor = ConformerMultiLayerFeatureExtractor(
                model.encoder, Aggregator(mode, weights, list(LAYERS)), list(LAYERS)
            )
            with torch.no_grad():
                mels, mel_len = model.preprocessor(input_signal=audio, length=length)
                features, feature_len = extractor(audio_signal=mels, length=mel_len)
            if mode == "none":
                features, feature_len = torch.stack(features, dim=1), feature_len[0]
            recorded[f"{name}/{mode}"] = features.numpy()
            recorded[f"{name}/length"] = feature_len.numpy()
    np.savez_compressed(HERE / "nemo_layers.npz", **recorded)


if __name__ == "__main__":
    main()
