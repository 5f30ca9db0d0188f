"""What train_step.py compares with: NeMo's model, and transformers' encoder of the same shape."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from importlib import util
from typing import Any

import torch
from torch import Tensor

SHAPES = {"large": (512, 17, 8), "xlarge": (1024, 24, 8)}
"""Width, layers and heads."""


def nemo_model(size: str) -> Any:
    """Return NeMo's NEST with our configuration, as NeMo would read it from our `.nemo` file."""
    from nemo.collections.asr.models.ssl_models import EncDecDenoiseMaskedTokenPredModel
    from omegaconf import OmegaConf

    from nest_ssl.config.composing import compose
    from nest_ssl.nemo_file import nemo_config

    cfg = compose(overrides=[f"size={size}"]).model
    cfg.train_ds = cfg.validation_ds = None
    section = OmegaConf.create(nemo_config(cfg, EncDecDenoiseMaskedTokenPredModel.__name__))
    torch.manual_seed(0)
    return EncDecDenoiseMaskedTokenPredModel(cfg=section).cuda().train()


def nemo_step(model: Any, batch: tuple[Tensor, Tensor, Tensor, Tensor]) -> Tensor:
    audio, audio_len, noisy, noisy_len = batch
    with torch.autocast("cuda", torch.bfloat16):
        log_probs, lengths, masks, tokens = model(
            input_signal=audio,
            input_signal_length=audio_len,
            noisy_input_signal=noisy,
            noisy_input_signal_length=noisy_len,
            noise_signal=noisy,
            noise_signal_length=noisy_len,
            apply_mask=True,
        )
        loss: Tensor = model.loss(masks=masks, decoder_outputs=log_probs, targets=tokens, decoder_lengths=lengths)
    return loss


def parakeet_encoder(
    size: str, batch_size: int, seconds: float, timed: Callable[..., dict[str, Any]], options: argparse.Namespace
) -> dict[str, Any]:
    """Time the forward and backward pass of transformers' ParakeetEncoder, compiled."""
    if util.find_spec("transformers") is None:
        return {"error": "transformers is not installed here"}
    from transformers import ParakeetEncoder, ParakeetEncoderConfig

    width, layers, heads = SHAPES[size]
    config = ParakeetEncoderConfig(
        hidden_size=width,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        intermediate_size=4 * width,
        num_mel_bins=80,
        layerdrop=0.0,
    )
    torch.manual_seed(0)
    model = ParakeetEncoder(config).cuda().train()
    compiled: Any = torch.compile(model)
    frames = int(seconds * 100) + 16
    mels = torch.randn(batch_size, frames, 80, device="cuda")
    lengths = torch.linspace(0.7 * frames, frames, batch_size, device="cuda").long()
    mask = torch.arange(frames, device="cuda")[None] < lengths[:, None]

    def step() -> None:
        with torch.autocast("cuda", torch.bfloat16):
            encoded: Any = compiled(input_features=mels, attention_mask=mask)
            loss: Tensor = encoded.last_hidden_state.float().square().mean()
        loss.backward()
        model.zero_grad(set_to_none=True)

    return timed(step, options.steps, options.warm_up)
