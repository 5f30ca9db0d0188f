"""The numbers of every stage of a NEST model, through the interface that NeMo's model and ours share.

As a program in an interpreter with NeMo, this file computes NeMo's numbers: `python stages.py MODEL.nemo OUT.npz`.
Therefore it imports nothing from this package.
"""

from __future__ import annotations

import sys
from typing import Any

import numpy as np
import torch
from torch import nn

Numbers = dict[str, Any]

SAMPLES = (26_345, 24_000, 17_007)


def audio_batch(sample_rate: int = 16_000) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Clean and noisy audio (B, N) and lengths (B,): sweeps in noise, the same on every machine."""
    random = np.random.RandomState(11)
    lengths = np.array(SAMPLES)
    seconds = np.arange(lengths.max()) / sample_rate
    sweeps = np.stack([np.sin(2 * np.pi * f * seconds * (1 + 0.3 * seconds)) for f in (180.0, 320.0, 95.0)])
    clean = 0.2 * sweeps + 0.02 * random.randn(*sweeps.shape)
    clean *= np.arange(lengths.max()) < lengths[:, None]
    noisy = clean + 0.05 * random.randn(*sweeps.shape)
    return torch.tensor(clean).float(), torch.tensor(noisy).float(), torch.tensor(lengths)


def stage_numbers(model: Any, batch: tuple[torch.Tensor, torch.Tensor, torch.Tensor], denoising: bool) -> Numbers:
    """Features, tokens, every layer, log-probabilities, loss and gradients of `model`."""
    clean, noisy, lengths = batch
    inputs: dict[str, Any] = {"input_signal": clean, "input_signal_length": lengths}
    if denoising:
        inputs |= {"noisy_input_signal": noisy, "noisy_input_signal_length": lengths}
        inputs |= {"noise_signal": noisy, "noise_signal_length": lengths}
    out: Numbers = {}
    model.eval()
    with torch.no_grad():
        out["mel_clean"], out["mel_len"] = model.preprocessor(input_signal=clean, length=lengths)
        out["mel_noisy"], _ = model.preprocessor(input_signal=noisy, length=lengths)
        hooks = [
            layer.register_forward_hook(lambda _m, _i, o, i=i: out.__setitem__(f"layer_{i}", o))
            for i, layer in enumerate(model.encoder.layers)
        ]
        log_probs, encoded_len, masks, tokens = model(**inputs, apply_mask=False)
        for hook in hooks:
            hook.remove()
        out["encoded"], _ = model.encoder(audio_signal=out["mel_noisy"], length=out["mel_len"])
    out |= {"log_probs": log_probs, "encoded_len": encoded_len, "tokens": tokens}
    mask = fixed_mask(model, masks, tokens)
    with torch.no_grad():
        out["loss"] = masked_loss(model, mask, log_probs, tokens, encoded_len)
    silence_randomness(model)
    model.train()
    model.preprocessor.eval()  # no dither
    model.zero_grad()
    log_probs, encoded_len, _, tokens = model(**inputs, apply_mask=False)
    masked_loss(model, mask, log_probs, tokens, encoded_len).backward()
    out |= {f"grad/{name}": p.grad for name, p in model.named_parameters() if p.grad is not None}
    return {key: value.detach().cpu().numpy() for key, value in out.items()}


def fixed_mask(model: Any, masks: torch.Tensor, tokens: torch.Tensor) -> torch.Tensor:
    """A mask (B, 1, T) over six tokens of each row: all that the loss needs."""
    frames = masks.shape[2]
    if model.pre_encoder is not None:
        frames = tokens.shape[1]  # NeMo 2.7.3 returns (B, T, D) here, but its loss expects (B, D, T)
    per_token = max(1, frames // tokens.shape[1])
    mask = torch.zeros(masks.shape[0], 1, frames)
    for row, start in enumerate((1, 5, 2)):
        mask[row, :, start * per_token : (start + 6) * per_token] = 1.0
    return mask


def masked_loss(model: Any, mask: Any, log_probs: Any, tokens: Any, encoded_len: Any) -> Any:
    # Causal subsampling can give one frame more than there are tokens; NeMo 2.7.3's loss then raises.
    return model.loss(
        masks=mask, decoder_outputs=log_probs[:, : tokens.shape[1]], targets=tokens, decoder_lengths=encoded_len
    )


def silence_randomness(model: Any) -> None:
    """Disable dropout and stochastic depth, so that two programs can be compared in training mode."""
    for module in model.modules():
        if isinstance(module, nn.Dropout):
            module.p = 0.0
    model.encoder.layer_drop_probs = [0.0] * len(model.encoder.layers)


def ask_nemo(path: str, out: str) -> None:
    from nemo.collections.asr.models.ssl_models import EncDecDenoiseMaskedTokenPredModel, EncDecMaskedTokenPredModel
    from nemo.core.classes import ModelPT

    config = ModelPT.restore_from(path, return_config=True)
    denoising = str(config.target).endswith("EncDecDenoiseMaskedTokenPredModel")
    kind = EncDecDenoiseMaskedTokenPredModel if denoising else EncDecMaskedTokenPredModel
    model = kind.restore_from(path, map_location="cpu")
    if model.pre_encoder is not None:
        # NeMo 2.7.3 passes (B, D, T) to a module that expects (B, T, D) and raises; compare with what was intended.
        subsample, mels = model.pre_encoder.pre_encode, model.cfg.preprocessor.features
        forward = subsample.forward
        subsample.forward = lambda x, lengths: forward(x if x.shape[2] == mels else x.transpose(1, 2), lengths)
    np.savez(out, **stage_numbers(model, audio_batch(model.cfg.sample_rate), denoising))


if __name__ == "__main__":
    ask_nemo(sys.argv[1], sys.argv[2])
