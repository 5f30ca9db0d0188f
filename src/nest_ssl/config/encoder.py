"""The `model.encoder:` section: NeMo's keys and NeMo's defaults, typed, documented and checked."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Annotated, Any

from nest_ssl.config.checks import (
    Count,
    Range,
    ShareBelowOne,
    Size,
    check_ranges,
    not_supported,
    one_of,
    quoted,
)

Context = Annotated[int, Range(-1, 1_000_000)]
MAX_LAYERS = 1000  # the largest NEST has 42; a damaged or hostile file could ask for any number


@dataclass
class EncoderConfig:
    """FastConformer: convolutional subsampling, then conformer layers."""

    feat_in: Size
    """Mel bands of the input."""
    n_layers: Annotated[int, Range(1, MAX_LAYERS)]
    """Number of conformer layers."""
    d_model: Size
    """Width of the encoder."""
    feat_out: Annotated[int, Range(-1, 1_000_000)] = -1
    """Size of the output; -1: d_model, without a projection."""
    causal_downsampling: bool = False
    """Subsample without looking ahead (streaming)."""
    subsampling: str = "striding"
    """striding (full 2-d convolutions) or dw_striding (depthwise separable after the first)."""
    subsampling_factor: Annotated[int, Range(2, 1024)] = 4
    """2, 4, 8, or any other power of two."""
    subsampling_conv_chunking_factor: Annotated[int, Range(-1)] = 1
    """NeMo splits its convolution by this factor to save memory. Not needed here; the result does not depend on it."""
    subsampling_conv_channels: Annotated[int, Range(-1_000_000, 1_000_000)] = -1
    """Channels of the subsampling; -1: d_model."""
    reduction: str | None = None
    """Only null is supported."""
    reduction_position: Annotated[int, Range()] | None = None
    """Part of `reduction`."""
    reduction_factor: Annotated[int, Range(1)] = 1
    """Only 1 is supported."""
    ff_expansion_factor: Annotated[int, Range(1, 1000)] = 4
    """Width of the feed-forward modules, as a multiple of d_model."""
    self_attention_model: str = "rel_pos"
    """rel_pos (Transformer-XL positions) or abs_pos."""
    n_heads: Size = 4
    """Attention heads."""
    att_context_size: list[Context] | list[list[Context]] | None = None
    """[left, right] frames that attention sees, -1 for all; from a list of pairs, each training step draws one."""
    att_context_probs: list[Annotated[float, Range()]] | None = None
    """Probabilities of the contexts; null: equal."""
    att_context_style: str = "regular"
    """regular, or chunked_limited (the current chunk of right + 1 frames, and left // chunk chunks before it)."""
    xscaling: bool = True
    """Multiply the subsampled features by sqrt(d_model)."""
    untie_biases: bool = True
    """Each layer has its own position biases, rather than sharing them."""
    pos_emb_max_len: Count = 5000
    """Size of NeMo's initial position table. Here positions are computed for each batch, so any length works."""
    conv_kernel_size: Annotated[int, Range(1, 100_001)] = 31
    """Kernel of the depthwise convolution; odd."""
    conv_norm_type: str = "batch_norm"
    """batch_norm, layer_norm, instance_norm, or group_normN with N groups."""
    conv_context_size: list[Context] | str | None = None
    """[left, right] frames of the convolution, 'causal', or null for a centred one."""
    use_bias: bool = True
    """Use biases in feed-forward, attention and convolution."""
    dropout: ShareBelowOne = 0.1
    """Dropout in the layers."""
    dropout_pre_encoder: ShareBelowOne = 0.1
    """Dropout on the layers' input."""
    dropout_emb: ShareBelowOne = 0.1
    """Dropout on the position embeddings."""
    dropout_att: ShareBelowOne = 0.0
    """Dropout on the attention weights."""
    stochastic_depth_drop_prob: ShareBelowOne = 0.0
    """Probability that a layer is skipped in a training step."""
    stochastic_depth_mode: str = "linear"
    """linear (growing with depth) or uniform."""
    stochastic_depth_start_layer: Annotated[int, Range(1)] = 1
    """Layers before this one are never skipped."""
    global_tokens: Count = 0
    """Only 0 is supported (local attention with global tokens)."""
    global_tokens_spacing: Annotated[int, Range()] = 1
    """Part of `global_tokens`."""
    global_attn_separate: bool = False
    """Part of `global_tokens`."""
    use_pytorch_sdpa: bool = False
    """NeMo's switch between attention implementations. nest-ssl chooses by itself, with the same results."""
    use_pytorch_sdpa_backends: list[str] | None = None
    """Part of `use_pytorch_sdpa`."""
    sync_max_audio_length: bool = False
    """NeMo's collective in every forward pass. nest-ssl has none: true changes nothing, and is logged once."""

    def __post_init__(self) -> None:
        where = "encoder"
        check_ranges(where, self)
        if self.d_model % self.n_heads:
            raise ValueError(f"{where}.n_heads: {self.n_heads} does not divide d_model {self.d_model}.")
        if self.d_model % 2:
            raise ValueError(f"{where}.d_model: {self.d_model} is odd; positions need sine and cosine pairs.")
        if self.subsampling in ("vggnet", "stacking", "stacking_norm", "striding_conv1d", "dw_striding_conv1d"):
            not_supported(f"{where}.subsampling", self.subsampling, "use dw_striding or striding")
        one_of(f"{where}.subsampling", self.subsampling, ("dw_striding", "striding"))
        if self.subsampling_factor < 2 or self.subsampling_factor & (self.subsampling_factor - 1):
            raise ValueError(
                f"{where}.subsampling_factor: {self.subsampling_factor} is not a power of two (2 or more)."
            )
        chunking = self.subsampling_conv_chunking_factor
        if chunking not in (-1, 1) and chunking % 2:
            raise ValueError(f"{where}.subsampling_conv_chunking_factor: {chunking} is not -1, 1 or a power of two.")
        if self.subsampling_conv_channels != -1:
            Range(1).check(f"{where}.subsampling_conv_channels", self.subsampling_conv_channels)
        if self.reduction is not None:
            not_supported(f"{where}.reduction", self.reduction, "use null")
        if self.reduction_factor != 1:
            not_supported(f"{where}.reduction_factor", self.reduction_factor, "use 1")
        if self.global_tokens:
            not_supported(f"{where}.global_tokens", self.global_tokens, "use 0")
        if self.self_attention_model == "rel_pos_local_attn":
            not_supported(f"{where}.self_attention_model", "rel_pos_local_attn", "use rel_pos with att_context_size")
        one_of(f"{where}.self_attention_model", self.self_attention_model, ("rel_pos", "abs_pos"))
        one_of(f"{where}.att_context_style", self.att_context_style, ("regular", "chunked_limited"))
        one_of(f"{where}.stochastic_depth_mode", self.stochastic_depth_mode, ("linear", "uniform"))
        if self.conv_kernel_size % 2 == 0:
            raise ValueError(f"{where}.conv_kernel_size: {self.conv_kernel_size} is even; it must be odd.")
        start = self.stochastic_depth_start_layer
        if not 1 <= start <= self.n_layers:
            raise ValueError(f"{where}.stochastic_depth_start_layer: {start} is not in 1..{self.n_layers}.")
        _ = self.attention_contexts, self.attention_context_probs, self.conv_context, self.num_norm_groups

    @property
    def attention_contexts(self) -> list[tuple[int, int]]:
        """Every [left, right] that attention may use; evaluation uses the first."""
        given: list[Any] = list(self.att_context_size or [[-1, -1]])
        pairs = [given] if isinstance(given[0], int) else given
        for pair in pairs:
            if len(pair) != 2 or min(pair) < -1:
                raise ValueError(f"encoder.att_context_size: {pair} is not [left, right] with -1 for all.")
            left, right = pair
            if self.att_context_style == "chunked_limited":
                if right < 0 and len(pairs) == 1:
                    raise ValueError("encoder.att_context_size: chunked_limited needs a right context of 0 or more.")
                if left > 0 and right >= 0 and left % (right + 1):
                    raise ValueError(
                        f"encoder.att_context_size: the left context {left} is not a multiple of the chunk {right + 1}."
                    )
        return [(left, right) for left, right in pairs]

    @property
    def attention_context_probs(self) -> list[float]:
        """One probability for each of `attention_contexts`."""
        num = len(self.attention_contexts)
        if not self.att_context_probs:
            return [1.0 / num] * num
        total = sum(self.att_context_probs)
        if len(self.att_context_probs) != num or not abs(total - 1) <= 1e-6 or min(self.att_context_probs) < 0:
            raise ValueError(
                f"encoder.att_context_probs: {self.att_context_probs} are not {num} probabilities that sum to 1."
            )
        return self.att_context_probs

    @property
    def conv_context(self) -> tuple[int, int]:
        """Left and right frames of the depthwise convolution."""
        kernel, given = self.conv_kernel_size, self.conv_context_size
        if given is None:
            return (kernel - 1) // 2, (kernel - 1) // 2
        if given == "causal":
            return kernel - 1, 0
        if isinstance(given, str) or len(given) != 2 or sum(given) + 1 != kernel or min(given) < 0:
            raise ValueError(
                f"encoder.conv_context_size: {quoted(given)} is not null, 'causal' or [left, right] "
                f"with left + right + 1 = {kernel}."
            )
        return given[0], given[1]

    @property
    def num_norm_groups(self) -> int | None:
        """N in group_normN; None for the other norms."""
        norm = self.conv_norm_type
        if norm == "fused_batch_norm":
            not_supported("encoder.conv_norm_type", norm, "use batch_norm")
        if norm in ("batch_norm", "layer_norm", "instance_norm"):
            return None
        digits = norm.removeprefix("group_norm")
        if (
            digits == norm
            or not re.fullmatch(r"\d{1,9}", digits, re.ASCII)
            or int(digits) < 1
            or self.d_model % int(digits)
        ):
            raise ValueError(
                f"encoder.conv_norm_type: {quoted(norm)} is not batch_norm, layer_norm, instance_norm or group_normN "
                f"with N a divisor of d_model {self.d_model}."
            )
        return int(digits)
