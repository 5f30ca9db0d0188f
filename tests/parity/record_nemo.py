"""Ask NeMo about every case of cases.py and write its numbers next to this file.

    PYTHON_WITH_NEMO tests/parity/record_nemo.py NEMO_NEST_YAML

Needs nemo_toolkit[asr]==2.7.3 in an environment of its own; NEMO_NEST_YAML is its nest_fast-conformer.yaml.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import numpy as np
import torch
from nemo.collections.asr.models.ssl_models import EncDecDenoiseMaskedTokenPredModel, EncDecMaskedTokenPredModel
from nemo.collections.asr.modules import RandomBlockMasking
from omegaconf import OmegaConf

sys.path.insert(0, str(Path(__file__).parents[2]))
from tests.parity import cases

HERE = Path(__file__).parent / "options"


def build(overrides: dict[str, Any], kind: Any = EncDecDenoiseMaskedTokenPredModel) -> Any:
    cfg = OmegaConf.load(sys.argv[1]).model
    cfg.train_ds = cfg.validation_ds = None
    for key, value in {**cases.BASE, **overrides}.items():
        OmegaConf.update(cfg, key, value, force_add=True)
    model = kind(cfg=cfg)
    if model.pre_encoder is not None:
        # NeMo 2.7.3 hands (B, D, T) to a module that takes (B, T, D) and raises; the reference is what it meant.
        subsample, mels = model.pre_encoder.pre_encode, cfg.preprocessor.features
        forward = subsample.forward
        subsample.forward = lambda x, lengths: forward(x if x.shape[2] == mels else x.transpose(1, 2), lengths)
    cases.fill_parameters(model.state_dict())
    return model


def outputs(model: Any, noisy_too: bool) -> Any:
    clean, noisy, lengths = cases.audio()
    inputs = {"input_signal": clean, "input_signal_length": lengths}
    if noisy_too:
        inputs |= {"noisy_input_signal": noisy, "noisy_input_signal_length": lengths}
        inputs |= {"noise_signal": noisy, "noise_signal_length": lengths}
    return model(**inputs, apply_mask=False)


def record_case(overrides: dict[str, Any], kind: Any = EncDecDenoiseMaskedTokenPredModel) -> dict[str, Any]:
    model = build(overrides, kind).eval()
    noisy_too = kind is EncDecDenoiseMaskedTokenPredModel
    clean, _, lengths = cases.audio()
    with torch.no_grad():
        mels, mel_len = model.preprocessor(input_signal=clean, length=lengths)
        log_probs, encoded_len, _, tokens = outputs(model, noisy_too)
        encoded, _ = model.encoder(audio_signal=mels, length=mel_len)
    per_token = 1 if model.pre_encoder is not None else model.cfg.encoder.subsampling_factor
    frames = log_probs.shape[1] if model.pre_encoder is not None else mels.shape[2]
    mask = cases.token_mask(len(lengths), 4, frames, per_token)
    model.train()
    log_probs_train, _, _, tokens_train = outputs(model, noisy_too)
    loss = model.loss(
        masks=mask,
        decoder_outputs=log_probs_train[:, : tokens_train.shape[1]],
        targets=tokens_train,
        decoder_lengths=encoded_len,
    )
    loss.backward()
    marks = {k: cases.gradient_marks(k, p.grad) for k, p in model.named_parameters() if p.grad is not None}
    return {
        "mels": mels.numpy()[:, ::5, ::7],
        "mel_len": mel_len.numpy(),
        "tokens": tokens.numpy().astype(np.int16),
        "encoded": encoded.numpy(),
        "encoded_len": encoded_len.numpy(),
        "log_probs": log_probs.numpy(),
        "loss": loss.detach().numpy(),
        "gradients": np.array(json.dumps(marks)),
    }


def train_outputs(overrides: dict[str, Any], draws: int) -> np.ndarray:
    model = build(overrides).train()
    clean, _, lengths = cases.audio()
    with torch.no_grad():
        mels, mel_len = model.preprocessor(input_signal=clean, length=lengths)
        return np.stack([model.encoder(audio_signal=mels, length=mel_len)[0].numpy() for _ in range(draws)])


def outcomes(overrides: dict[str, Any]) -> dict[str, Any]:
    """The distinct results of a random choice, and how often each came."""
    drawn = train_outputs(overrides, cases.OUTCOME_DRAWS)
    distinct: list[np.ndarray] = []
    counts: list[int] = []
    for one in drawn:
        for index, known in enumerate(distinct):
            if np.allclose(one, known, atol=1e-4):
                counts[index] += 1
                break
        else:
            distinct.append(one)
            counts.append(1)
    return {"distinct": np.stack(distinct), "counts": np.array(counts)}


def mask_statistics(rule: dict[str, Any]) -> dict[str, Any]:
    masking = RandomBlockMasking(feat_in=2, **rule)
    out: dict[str, Any] = {}
    for length in cases.MASK_LENGTHS:
        room = 2 * length + 80  # NeMo runs past the length for some lengths: room for it, then the cut
        feats, lengths = torch.zeros(cases.MASK_DRAWS, 2, room), torch.full((cases.MASK_DRAWS,), length)
        inside = masking(input_feats=feats, input_lengths=lengths)[1][:, 0, :length].numpy()
        counts = inside.sum(1)
        out[str(length)] = {
            "mean": float(counts.mean()),
            "std": float(counts.std()),
            "quantiles": np.quantile(counts, [0.05, 0.25, 0.5, 0.75, 0.95]).tolist(),
            "profile": [float(part.mean()) for part in np.array_split(inside.mean(0), 8)],
        }
    return out


def main() -> None:
    torch.manual_seed(0)
    HERE.mkdir(exist_ok=True)
    for name, overrides in cases.CASES.items():
        np.savez_compressed(HERE / f"{name}.npz", **record_case(overrides))
        print(name, flush=True)
    for name in ("dw_striding_8", "post_conv"):
        recorded = record_case(cases.CASES[name], EncDecMaskedTokenPredModel)
        np.savez_compressed(HERE / f"without_noise_{name}.npz", **recorded)
    for name in cases.DROPOUTS:
        drawn = train_outputs({f"encoder.{name}": 0.3, "encoder.conv_norm_type": "layer_norm"}, cases.DROPOUT_DRAWS)
        np.savez_compressed(HERE / f"random_{name}.npz", mean=drawn.mean(0), var=drawn.var(0))
    for name, overrides in cases.DEPTHS.items():
        np.savez_compressed(HERE / f"random_{name}.npz", **outcomes({**cases.STOCHASTIC_DEPTH, **overrides}))
    np.savez_compressed(HERE / "random_contexts.npz", **outcomes(cases.CONTEXTS))
    statistics = {name: mask_statistics(rule) for name, rule in cases.MASK_RULES.items()}
    (HERE / "masks.json").write_text(json.dumps(statistics, indent=1))


if __name__ == "__main__":
    main()
