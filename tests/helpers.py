"""Small models and inputs that tests share."""

from __future__ import annotations

from typing import Any

import torch
from omegaconf import OmegaConf
from torch import Tensor

from nest_ssl import EncDecDenoiseMaskedTokenPredModel
from nest_ssl.config.composing import yaml_folder

TINY: dict[str, Any] = {
    "num_classes": 64,
    "encoder.d_model": 32,
    "encoder.n_layers": 2,
    "encoder.n_heads": 4,
    "encoder.subsampling_conv_channels": 16,
}
NO_DROPOUT: dict[str, Any] = {
    "preprocessor.dither": 0.0,
    **{f"encoder.{name}": 0.0 for name in ("dropout", "dropout_pre_encoder", "dropout_emb", "dropout_att")},
}


def model_section(overrides: dict[str, Any] | None = None, *, tiny: bool = True) -> dict[str, Any]:
    """The model section of our yaml, small unless told, as a plain dict."""
    cfg = OmegaConf.load(yaml_folder() / "nest_fast-conformer.yaml")
    cfg.model.train_ds = cfg.model.validation_ds = None
    for key, value in {**(TINY if tiny else {}), **(overrides or {})}.items():
        OmegaConf.update(cfg, f"model.{key}", value, force_add=True)
    section = OmegaConf.to_container(cfg.model, resolve=True)
    assert isinstance(section, dict)
    return {str(key): value for key, value in section.items()}


def tiny_model(overrides: dict[str, Any] | None = None, seed: int = 0) -> EncDecDenoiseMaskedTokenPredModel:
    torch.manual_seed(seed)
    return EncDecDenoiseMaskedTokenPredModel(model_section(overrides))


def noise_batch(lengths: list[int], seed: int = 0) -> dict[str, Tensor]:
    """Keyword arguments of NEST's forward: random audio, and the same with noise."""
    generator = torch.Generator().manual_seed(seed)
    length = torch.tensor(lengths)
    audio = 0.1 * torch.randn(len(lengths), max(lengths), generator=generator)
    audio *= torch.arange(max(lengths)) < length[:, None]
    noisy = audio + 0.02 * torch.randn(audio.shape, generator=generator)
    return {
        "input_signal": audio,
        "input_signal_length": length,
        "noisy_input_signal": noisy,
        "noisy_input_signal_length": length,
    }
