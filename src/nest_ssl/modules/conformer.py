"""FastConformer: subsampling, then layers of feed-forward, attention, convolution and feed-forward.

B batch, T mel frames, S encoder frames, D width.
"""

from __future__ import annotations

import functools
import logging
import random
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812

from nest_ssl.config import EncoderConfig
from nest_ssl.modules.attention import (
    MultiHeadAttention,
    PositionalEncoding,
    RelPositionMultiHeadAttention,
    position_biases,
)
from nest_ssl.modules.inputs import check_features, checked_lengths, valid_frames
from nest_ssl.modules.subsampling import ConvSubsampling

log = logging.getLogger(__name__)


@functools.cache
def _log_once(message: str) -> None:
    log.info(message)


class ConformerEncoder(nn.Module):
    """`encoder(audio_signal=(B, mels, T), length=(B,))` gives (B, D, S) and the new lengths.

    Takes the fields of `EncoderConfig` as keywords. Hooks on `layers[i]` see each layer's output,
    (B, S, D). No call reads a value back from the device or waits for another rank.
    """

    pre_encode: nn.Module

    def __init__(self, **options: Any) -> None:
        super().__init__()
        self.cfg = cfg = EncoderConfig(**options)
        self.d_model, self.n_layers, self.subsampling_factor = cfg.d_model, cfg.n_layers, cfg.subsampling_factor
        self.contexts, self.context_probs = cfg.attention_contexts, cfg.attention_context_probs
        self.att_context_size = list(self.contexts[0])
        self.sync_max_audio_length = cfg.sync_max_audio_length
        if cfg.sync_max_audio_length:
            _log_once("encoder.sync_max_audio_length: true changes nothing here; ranks need not agree on positions.")
        self.pre_encode = ConvSubsampling(cfg)
        relative = cfg.self_attention_model == "rel_pos"
        self.pos_enc = PositionalEncoding(
            cfg.d_model,
            relative=relative,
            xscaling=cfg.xscaling,
            dropout=cfg.dropout_pre_encoder,
            dropout_emb=cfg.dropout_emb if relative else 0.0,
        )
        shared = position_biases(cfg.d_model, cfg.n_heads) if relative and not cfg.untie_biases else None
        self.layers = nn.ModuleList(ConformerLayer(cfg, shared) for _ in range(cfg.n_layers))
        self.next_context: tuple[int, int] | None = None
        """Of several contexts, the one that training draws next; None: each call draws its own."""
        self.layer_drop_probs = layer_drop_probs(cfg)
        project = cfg.feat_out > 0 and cfg.feat_out != cfg.d_model
        self.out_proj = nn.Linear(cfg.d_model, cfg.feat_out) if project else None

    def forward(
        self, audio_signal: Tensor, length: Tensor | None = None, bypass_pre_encode: bool = False
    ) -> tuple[Tensor, Tensor]:
        """With `bypass_pre_encode` the input is (B, S, D): it has been subsampled already."""
        length = self.check_input(audio_signal, length, bypass_pre_encode)
        x_BSD = audio_signal
        if not bypass_pre_encode:
            x_BSD, length = self.pre_encode(audio_signal.transpose(1, 2), length)
        x_BSD = self._run_layers(x_BSD, length)
        if self.out_proj is not None:
            x_BSD = self.out_proj(x_BSD)
        return x_BSD.transpose(1, 2), length

    def check_input(self, audio_signal: Tensor, length: Tensor | None, bypass_pre_encode: bool) -> Tensor:
        """Check what `forward` is given, and return the lengths: without any, all frames count."""
        shape = ("batch", "frames", self.d_model) if bypass_pre_encode else ("batch", self.cfg.feat_in, "frames")
        check_features("audio_signal", audio_signal, *shape)
        size = audio_signal.shape[shape.index("frames")]
        if length is None:
            length = torch.full((audio_signal.shape[0],), size, device=audio_signal.device)
        return checked_lengths("length", length, audio_signal, size)

    def _run_layers(self, x_BSD: Tensor, length: Tensor) -> Tensor:
        x_BSD, pos_emb_1RD = self.pos_enc(x_BSD)
        valid_BS = valid_frames(length, x_BSD.shape[1])
        context_SS = visible_context(x_BSD.shape[1], self.draw_context(), self.cfg.att_context_style, x_BSD.device)
        visible_B1SS = (valid_BS[:, :, None] & valid_BS[:, None, :] & context_SS)[:, None]
        for index, layer in enumerate(self.layers):
            x_BSD = self.skip_at_random(index, x_BSD, layer(x_BSD, visible_B1SS, pos_emb_1RD, valid_BS))
        return x_BSD

    def skip_at_random(self, index: int, x_BSD: Tensor, out_BSD: Tensor) -> Tensor:
        """Stochastic depth: return the output of layer `index` or, in some training steps, its input."""
        drop_prob = self.layer_drop_probs[index]
        if not self.training or drop_prob == 0:
            return out_BSD
        # Every parameter gets a gradient whether the layer counts or not, so ranks cannot diverge.
        keeps = torch.rand((), device=out_BSD.device) >= drop_prob
        scale = torch.where(keeps, 1 / (1 - drop_prob), 0.0).to(out_BSD.dtype)
        return x_BSD + (out_BSD - x_BSD) * scale

    def draw_context(self) -> tuple[int, int]:
        """Return how many frames the attention sees to the left and right; of several, training draws one."""
        if self.training and self.next_context is not None:
            return self.next_context
        if self.training and len(self.contexts) > 1:
            return random.choices(self.contexts, weights=self.context_probs)[0]
        return self.att_context_size[0], self.att_context_size[1]


class ConformerLayer(nn.Module):
    """Half a feed-forward, attention, convolution, half a feed-forward, each with a residual; then a norm."""

    def __init__(self, cfg: EncoderConfig, shared_biases: tuple[nn.Parameter, nn.Parameter] | None) -> None:
        super().__init__()
        self.norm_feed_forward1 = nn.LayerNorm(cfg.d_model)
        self.feed_forward1 = FeedForward(cfg)
        self.norm_conv = nn.LayerNorm(cfg.d_model)
        self.conv = ConformerConvolution(cfg)
        self.norm_self_att = nn.LayerNorm(cfg.d_model)
        self.self_attn: MultiHeadAttention
        if cfg.self_attention_model == "rel_pos":
            self.self_attn = RelPositionMultiHeadAttention(
                cfg.d_model, cfg.n_heads, dropout=cfg.dropout_att, use_bias=cfg.use_bias, shared_biases=shared_biases
            )
        else:
            self.self_attn = MultiHeadAttention(
                cfg.d_model, cfg.n_heads, dropout=cfg.dropout_att, use_bias=cfg.use_bias
            )
        self.norm_feed_forward2 = nn.LayerNorm(cfg.d_model)
        self.feed_forward2 = FeedForward(cfg)
        self.dropout = nn.Dropout(cfg.dropout)
        self.norm_out = nn.LayerNorm(cfg.d_model)

    def forward(self, x_BSD: Tensor, visible_B1SS: Tensor, pos_emb_1RD: Tensor | None, valid_BS: Tensor) -> Tensor:
        x_BSD = x_BSD + 0.5 * self.dropout(self.feed_forward1(self.norm_feed_forward1(x_BSD)))
        x_BSD = x_BSD + self.dropout(self.self_attn(self.norm_self_att(x_BSD), visible_B1SS, pos_emb_1RD))
        x_BSD = x_BSD + self.dropout(self.conv(self.norm_conv(x_BSD), valid_BS))
        x_BSD = x_BSD + 0.5 * self.dropout(self.feed_forward2(self.norm_feed_forward2(x_BSD)))
        out_BSD: Tensor = self.norm_out(x_BSD)
        return out_BSD


class FeedForward(nn.Module):
    def __init__(self, cfg: EncoderConfig) -> None:
        super().__init__()
        self.linear1 = nn.Linear(cfg.d_model, cfg.d_model * cfg.ff_expansion_factor, bias=cfg.use_bias)
        self.dropout = nn.Dropout(cfg.dropout)
        self.linear2 = nn.Linear(cfg.d_model * cfg.ff_expansion_factor, cfg.d_model, bias=cfg.use_bias)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.linear2(self.dropout(F.silu(self.linear1(x))))
        return out


class ConformerConvolution(nn.Module):
    """Gated pointwise, depthwise over time, norm, SiLU, pointwise."""

    def __init__(self, cfg: EncoderConfig) -> None:
        super().__init__()
        width = cfg.d_model
        self.context = cfg.conv_context
        self.pointwise_conv1 = nn.Conv1d(width, 2 * width, kernel_size=1, bias=cfg.use_bias)
        self.depthwise_conv = nn.Conv1d(width, width, cfg.conv_kernel_size, groups=width, bias=cfg.use_bias)
        self.batch_norm = convolution_norm(cfg)  # NeMo's name, whatever the norm
        self.pointwise_conv2 = nn.Conv1d(width, width, kernel_size=1, bias=cfg.use_bias)

    def forward(self, x_BSD: Tensor, valid_BS: Tensor) -> Tensor:
        x_BDS = F.glu(self.pointwise_conv1(x_BSD.transpose(1, 2)), dim=1)
        x_BDS = torch.where(valid_BS[:, None], x_BDS, 0.0)
        x_BDS = self.depthwise_conv(F.pad(x_BDS, self.context))
        if isinstance(self.batch_norm, nn.LayerNorm):
            x_BDS = self.batch_norm(x_BDS.transpose(1, 2)).transpose(1, 2)
        else:
            x_BDS = self.batch_norm(x_BDS)
        out_BSD: Tensor = self.pointwise_conv2(F.silu(x_BDS)).transpose(1, 2)
        return out_BSD


def convolution_norm(cfg: EncoderConfig) -> nn.Module:
    if cfg.num_norm_groups is not None:
        return nn.GroupNorm(cfg.num_norm_groups, cfg.d_model)
    if cfg.conv_norm_type == "layer_norm":
        return nn.LayerNorm(cfg.d_model)
    return nn.BatchNorm1d(cfg.d_model) if cfg.conv_norm_type == "batch_norm" else nn.InstanceNorm1d(cfg.d_model)


def layer_drop_probs(cfg: EncoderConfig) -> list[float]:
    """Stochastic depth: the probability that each layer is skipped in a training step."""
    never = cfg.stochastic_depth_start_layer
    later = cfg.n_layers - never
    ramp = [i / later if cfg.stochastic_depth_mode == "linear" else 1.0 for i in range(1, later + 1)]
    return [0.0] * never + [share * cfg.stochastic_depth_drop_prob for share in ramp]


def visible_context(num_frames: int, context: tuple[int, int], style: str, device: torch.device) -> Tensor:
    """(S, S) true where frame q may see frame k."""
    left, right = context
    frame_S = torch.arange(num_frames, device=device)
    if style == "chunked_limited" and right >= 0:
        chunk_S = frame_S // (right + 1)
        back_SS = chunk_S[:, None] - chunk_S[None, :]
        visible_SS = back_SS >= 0
        return visible_SS & (back_SS <= left // (right + 1)) if left >= 0 else visible_SS
    back_SS = frame_S[:, None] - frame_S[None, :]
    visible_SS = torch.ones_like(back_SS, dtype=torch.bool)
    if left >= 0:
        visible_SS = visible_SS & (back_SS <= left)
    if right >= 0 and style == "regular":
        visible_SS = visible_SS & (-back_SS <= right)
    return visible_SS
