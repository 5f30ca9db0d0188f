"""The encoder as transformers' ParakeetEncoder: the same FastConformer with different parameter names.

Settings that this class cannot express are refused by name: an export that loads but gives other numbers is worse than
none.
"""

from __future__ import annotations

import contextlib
import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from nest_ssl.config.encoder import EncoderConfig
from nest_ssl.config.model import PreprocessorConfig
from nest_ssl.files import replace_text, replacing_in
from nest_ssl.model import EncDecMaskedTokenPredModel

CTC_FOLDER = "ctc"
FEATURE_EXTRACTOR = "preprocessor_config.json"
LOG_GUARD = 2**-24
"""What ParakeetFeatureExtractor adds before the logarithm; a constant in its code."""
_RENAMED = (
    (r"^pre_encode\.(?:pre_encode\.)?conv\.", "subsampling.layers."),
    (r"^pre_encode\.(?:pre_encode\.)?out\.", "subsampling.linear."),
    (r"\.linear_([qkv])\.", r".\1_proj."),
    (r"\.linear_out\.", ".o_proj."),
    (r"\.linear_pos\.", ".relative_k_proj."),
    (r"\.pos_bias_([uv])$", r".bias_\1"),
    (r"\.conv\.batch_norm\.", ".conv.norm."),
)


def export_huggingface(model: EncDecMaskedTokenPredModel, folder: Path) -> None:
    """Write `folder` for `AutoModel.from_pretrained`, and `folder/ctc` for `ParakeetForCTC.from_pretrained`.

    The CTC model has this encoder and a new head for English characters; `examples/finetune_ctc.py` builds one
    for the subwords of its data.
    """
    parakeet = _parakeet()
    problems = inexpressible(model)
    if problems:
        listing = "\n".join(f"  {problem}" for problem in problems)
        raise ValueError(f"transformers' ParakeetEncoder cannot express this model:\n{listing}")
    config = encoder_config(model)
    settings = feature_extractor_settings(model.cfg.preprocessor)
    with replacing_in(folder, folder) as new, _saving(), torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)  # the head of the CTC model is random: the same in every export
        encoder = parakeet.ParakeetEncoder(parakeet.ParakeetEncoderConfig(**config))
        encoder.load_state_dict(encoder_weights(model))
        encoder.save_pretrained(new)
        ctc = parakeet.ParakeetForCTC(
            parakeet.ParakeetCTCConfig(
                vocab_size=len(CTC_CHARACTERS) + 1, pad_token_id=len(CTC_CHARACTERS), encoder_config=config
            )
        )
        ctc.encoder.load_state_dict(encoder.state_dict())
        ctc.save_pretrained(new / CTC_FOLDER)
        for where in (new, new / CTC_FOLDER):
            replace_text(where / FEATURE_EXTRACTOR, json.dumps(settings, indent=2) + "\n")


CTC_CHARACTERS = " abcdefghijklmnopqrstuvwxyz'"
"""Labels of the CTC model in the order of its outputs; the last output is the blank."""


def encoder_config(model: EncDecMaskedTokenPredModel) -> dict[str, Any]:
    """Keywords of `ParakeetEncoderConfig`."""
    cfg = model.cfg.encoder
    return {
        "hidden_size": cfg.d_model,
        "num_hidden_layers": cfg.n_layers,
        "num_attention_heads": cfg.n_heads,
        "intermediate_size": cfg.d_model * cfg.ff_expansion_factor,
        "hidden_act": "silu",
        "attention_bias": cfg.use_bias,
        "convolution_bias": cfg.use_bias,
        "conv_kernel_size": cfg.conv_kernel_size,
        "subsampling_factor": cfg.subsampling_factor,
        "subsampling_conv_channels": _channels(cfg),
        "num_mel_bins": cfg.feat_in,
        "scale_input": cfg.xscaling,
        "max_position_embeddings": cfg.pos_emb_max_len,
        "dropout": cfg.dropout_pre_encoder,
        "dropout_positions": cfg.dropout_emb,
        "activation_dropout": cfg.dropout,
        "attention_dropout": cfg.dropout_att,
        # Stochastic depth that grows with depth has no counterpart; it only acts in training.
        "layerdrop": cfg.stochastic_depth_drop_prob if cfg.stochastic_depth_mode == "uniform" else 0.0,
    }


def encoder_weights(model: EncDecMaskedTokenPredModel) -> dict[str, Tensor]:
    """Our encoder's weights under ParakeetEncoder's names."""
    weights: dict[str, Tensor] = {}
    for name, tensor in model.encoder.state_dict().items():
        if ".masking." in name:  # part of the encoder in a post_conv model
            continue
        for pattern, replacement in _RENAMED:
            name = re.sub(pattern, replacement, name)
        weights[name] = tensor.detach().clone()
    return weights


def feature_extractor_settings(cfg: PreprocessorConfig) -> dict[str, Any]:
    """The file that `AutoFeatureExtractor` reads."""
    return {
        "feature_extractor_type": "ParakeetFeatureExtractor",
        "feature_size": cfg.features,
        "sampling_rate": cfg.sample_rate,
        "hop_length": cfg.num_stride_samples,
        "n_fft": cfg.num_fft,
        "win_length": cfg.num_window_samples,
        "preemphasis": cfg.preemph,
        "padding_side": "right",
        "padding_value": 0.0,
        "return_attention_mask": True,
    }


def inexpressible(model: EncDecMaskedTokenPredModel) -> list[str]:
    """What transformers' classes cannot express, by the key of our configuration and its value."""
    return _of_encoder(model.cfg.encoder) + _of_preprocessor(model.cfg.preprocessor)


def _of_encoder(cfg: EncoderConfig) -> list[str]:
    contexts = cfg.attention_contexts
    allowed = {
        "self_attention_model": (cfg.self_attention_model, cfg.self_attention_model == "rel_pos", "rel_pos"),
        "att_context_size": (cfg.att_context_size, contexts == [(-1, -1)], "[-1, -1]: unlimited attention"),
        "conv_norm_type": (cfg.conv_norm_type, cfg.conv_norm_type == "batch_norm", "batch_norm"),
        "conv_context_size": (cfg.conv_context_size, len(set(cfg.conv_context)) == 1, "null: a centred convolution"),
        "subsampling": (
            cfg.subsampling,
            cfg.subsampling == "dw_striding" or cfg.subsampling_factor == 2,
            "dw_striding",
        ),
        "causal_downsampling": (cfg.causal_downsampling, not cfg.causal_downsampling, "false"),
        "feat_out": (cfg.feat_out, cfg.feat_out in (-1, 0, cfg.d_model), "-1: no projection"),
        "feat_in": (cfg.feat_in, cfg.feat_in % cfg.subsampling_factor == 0, "a multiple of the subsampling factor"),
    }
    return _problems("model.encoder", allowed)


def _of_preprocessor(cfg: PreprocessorConfig) -> list[str]:
    half = cfg.sample_rate / 2
    guard = cfg.log_zero_guard_type == "add" and cfg.log_zero_guard_value == LOG_GUARD
    allowed = {
        "window": (cfg.window, cfg.window == "hann", "hann"),
        "normalize": (cfg.normalize, cfg.normalize == "per_feature", "per_feature"),
        "log": (cfg.log, cfg.log, "true"),
        "log_zero_guard_value": (cfg.log_zero_guard_value, guard, "2**-24, added"),
        "mag_power": (cfg.mag_power, cfg.mag_power == 2.0, "2"),
        "mel_norm": (cfg.mel_norm, cfg.mel_norm == "slaney", "slaney"),
        "lowfreq": (cfg.lowfreq, cfg.lowfreq == 0, "0"),
        "highfreq": (cfg.highfreq, cfg.highfreq in (None, 0, half), "null"),
    }
    return _problems("model.preprocessor", allowed)


def _problems(section: str, allowed: dict[str, tuple[Any, bool, str]]) -> list[str]:
    return [
        f"{section}.{key} is {value}; it allows only {only}" for key, (value, fine, only) in allowed.items() if not fine
    ]


def _channels(cfg: EncoderConfig) -> int:
    return cfg.d_model if cfg.subsampling_conv_channels == -1 else cfg.subsampling_conv_channels


def _parakeet() -> Any:
    try:
        from transformers.models import parakeet
    except ImportError as error:
        raise ValueError("--format huggingface: needs transformers 4.57 or newer. Install nest-ssl[hf].") from error
    return parakeet


@contextlib.contextmanager
def _saving() -> Iterator[None]:
    """Hide transformers' progress bars; make safetensors' own error, for a full disk, one of the system."""
    from safetensors import SafetensorError
    from transformers.utils import logging

    was_on = logging.is_progress_bar_enabled()
    logging.disable_progress_bar()
    try:
        yield
    except SafetensorError as error:
        raise OSError(str(error)) from error
    finally:
        if was_on:
            logging.enable_progress_bar()
