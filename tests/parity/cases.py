"""Option cases that NeMo was asked about, and the fixed inputs they share. Imported by the recorder under NeMo too.

No weights are stored: both sides fill their parameters from a generator seeded by each parameter's name.
"""

from __future__ import annotations

import zlib
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor

SAMPLES = (20_005, 13_123, 16_000)

BASE: dict[str, Any] = {
    "num_classes": 32,
    "encoder.d_model": 16,
    "encoder.n_layers": 2,
    "encoder.n_heads": 2,
    "encoder.subsampling_conv_channels": 4,
    "encoder.dropout": 0.0,
    "encoder.dropout_pre_encoder": 0.0,
    "encoder.dropout_emb": 0.0,
    "encoder.dropout_att": 0.0,
    "preprocessor.dither": 0.0,
}

_STREAMING = {
    "encoder.causal_downsampling": True,
    "encoder.conv_context_size": "causal",
    "encoder.conv_norm_type": "layer_norm",
    "encoder.att_context_style": "chunked_limited",
}

CASES: dict[str, dict[str, Any]] = {
    "dw_striding_2": {"encoder.subsampling_factor": 2},
    "dw_striding_4": {"encoder.subsampling_factor": 4},
    "dw_striding_8": {},
    "striding_2": {"encoder.subsampling": "striding", "encoder.subsampling_factor": 2},
    "striding_8": {"encoder.subsampling": "striding"},
    "causal_dw_striding_4": {"encoder.causal_downsampling": True, "encoder.subsampling_factor": 4},
    "causal_striding_8": {"encoder.subsampling": "striding", "encoder.causal_downsampling": True},
    "channels_of_the_model": {"encoder.subsampling_conv_channels": -1},
    "chunked_subsampling": {"encoder.subsampling_conv_chunking_factor": 2},
    "abs_pos": {"encoder.self_attention_model": "abs_pos"},
    "abs_pos_unscaled": {"encoder.self_attention_model": "abs_pos", "encoder.xscaling": False},
    "abs_pos_limited": {"encoder.self_attention_model": "abs_pos", "encoder.att_context_size": [3, 1]},
    "tied_biases": {"encoder.untie_biases": False},
    "no_xscaling": {"encoder.xscaling": False},
    "no_bias": {"encoder.use_bias": False},
    "left_context": {"encoder.att_context_size": [4, -1]},
    "right_context": {"encoder.att_context_size": [-1, 2]},
    "both_contexts": {"encoder.att_context_size": [5, 0]},
    "chunked": {**_STREAMING, "encoder.att_context_size": [6, 2]},
    "chunked_unlimited_left": {**_STREAMING, "encoder.att_context_size": [-1, 3]},
    "chunked_no_left": {**_STREAMING, "encoder.att_context_size": [0, 3]},
    "first_of_several_contexts": {
        **_STREAMING,
        "encoder.att_context_size": [[6, 2], [-1, -1], [4, 1]],
        "encoder.att_context_probs": [1.0, 0.0, 0.0],
    },
    "layer_norm": {"encoder.conv_norm_type": "layer_norm"},
    "instance_norm": {"encoder.conv_norm_type": "instance_norm"},
    "group_norm4": {"encoder.conv_norm_type": "group_norm4"},
    "conv_causal": {"encoder.conv_context_size": "causal"},
    "conv_uneven": {"encoder.conv_context_size": [6, 2]},
    "conv_kernel_5": {"encoder.conv_kernel_size": 5},
    "feat_out": {"encoder.feat_out": 24, "decoder.feat_in": 24},
    "narrow_feed_forward": {"encoder.ff_expansion_factor": 2},
    "mels_128": {"preprocessor.features": 128},
    "mels_hamming_all_features": {"preprocessor.window": "hamming", "preprocessor.normalize": "all_features"},
    "mels_blackman_clamped": {
        "preprocessor.window": "blackman",
        "preprocessor.log_zero_guard_type": "clamp",
        "preprocessor.log_zero_guard_value": "eps",
    },
    "mels_bartlett_magnitude": {"preprocessor.window": "bartlett", "preprocessor.mag_power": 1.0},
    "mels_not_normalized": {"preprocessor.normalize": None, "preprocessor.preemph": None},
    "mels_band_limited": {"preprocessor.lowfreq": 80, "preprocessor.highfreq": 7000, "preprocessor.mel_norm": None},
    "mels_linear_padded": {"preprocessor.log": False, "preprocessor.pad_value": -1.0, "preprocessor.pad_to": 32},
    "mels_window_in_samples": {
        "preprocessor.window_size": None,
        "preprocessor.window_stride": None,
        "preprocessor.n_window_size": 320,
        "preprocessor.n_window_stride": 128,
        "preprocessor.n_fft": None,
    },
    "three_books": {"num_books": 3},
    "squeeze_single": {"squeeze_single": True},
    "decoder_without_bias": {"decoder.use_bias": False},
    "low_mask_threshold": {"loss.mask_threshold": 0.3},
    "post_conv": {"mask_position": "post_conv", "quantizer.combine_time_steps": 1},
    "post_conv_books": {"mask_position": "post_conv", "quantizer.combine_time_steps": 1, "num_books": 2},
}

DROPOUTS = ("dropout", "dropout_pre_encoder", "dropout_emb", "dropout_att")
DROPOUT_DRAWS = 400

STOCHASTIC_DEPTH: dict[str, Any] = {"encoder.n_layers": 4, "encoder.conv_norm_type": "layer_norm"}
DEPTHS: dict[str, dict[str, Any]] = {
    "depth_linear": {"encoder.stochastic_depth_drop_prob": 0.6},
    "depth_uniform_from_2": {
        "encoder.stochastic_depth_drop_prob": 0.3,
        "encoder.stochastic_depth_mode": "uniform",
        "encoder.stochastic_depth_start_layer": 2,
    },
}
CONTEXTS: dict[str, Any] = {
    **_STREAMING,
    "encoder.att_context_size": [[6, 2], [-1, -1], [4, 1]],
    "encoder.att_context_probs": [0.5, 0.3, 0.2],
}
OUTCOME_DRAWS = 600

MASK_LENGTHS = (20, 40, 50, 51, 75, 120, 300, 1000)
MASK_DRAWS = 2_000
MASK_RULES: dict[str, dict[str, Any]] = {
    "overlap": {"mask_prob": 0.01, "block_size": 40, "allow_overlap": True},
    "separate": {"mask_prob": 0.4, "block_size": 40, "allow_overlap": False},
}


def audio() -> tuple[Tensor, Tensor, Tensor]:
    """Clean and noisy waveforms (B, N) and their lengths (B,)."""
    random = np.random.RandomState(7)
    lengths = np.array(SAMPLES)
    seconds = np.arange(lengths.max()) / 16_000
    sweeps = np.stack([np.sin(2 * np.pi * f * seconds * (1 + 0.4 * seconds)) for f in (170.0, 290.0, 120.0)])
    clean = 0.2 * sweeps + 0.02 * random.randn(*sweeps.shape)
    clean *= np.arange(lengths.max()) < lengths[:, None]
    noisy = clean + 0.05 * random.randn(*sweeps.shape)
    return torch.tensor(clean).float(), torch.tensor(noisy).float(), torch.tensor(lengths)


def fill_parameters(state: Mapping[str, Tensor]) -> None:
    """Give every parameter and statistic a value that depends on its name alone, far from any default."""
    for name, tensor in state.items():
        # What is shared stands under several names; the last one wins, on both sides.
        random = np.random.RandomState(zlib.crc32(name.encode()) & 0x7FFFFFFF)
        values = random.randn(*tensor.shape)
        if "featurizer" in name or name.endswith("num_batches_tracked"):
            continue
        if name.endswith("codebooks"):
            values /= np.linalg.norm(values, axis=-1, keepdims=True)
        elif name.endswith("running_var"):
            values = 0.5 + random.rand(*tensor.shape)
        elif ".norm_" in name or "batch_norm" in name:
            values = 0.2 * values + (1.0 if name.endswith("weight") else 0.0)
        elif tensor.ndim >= 2 and "pos_bias" not in name:
            values /= np.sqrt(np.prod(tensor.shape[1:]))
        else:
            values *= 0.2
        with torch.no_grad():
            tensor.copy_(torch.tensor(values))


def token_mask(num_rows: int, num_features: int, num_frames: int, frames_per_token: int) -> Tensor:
    """(B, D, T) a fixed mask: some tokens whole, some in part."""
    mask = torch.zeros(num_rows, num_features, num_frames)
    for row, start in enumerate((1, 4, 2)[:num_rows]):
        end = (start + 3) * frames_per_token + frames_per_token // 2
        mask[row, :, start * frames_per_token : end] = 1.0
    return mask


def gradient_marks(name: str, gradient: Tensor) -> list[float]:
    """The norm of a gradient and its product with a fixed random direction of norm 1."""
    random = np.random.RandomState(zlib.crc32(f"direction {name}".encode()) & 0x7FFFFFFF)
    direction = random.randn(gradient.numel())
    values = gradient.detach().double().flatten().numpy()
    return [float(np.linalg.norm(values)), float(values @ direction / np.linalg.norm(direction))]
