"""The prediction head. B batch, D features, S frames, K codes per book, H books."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812

from nest_ssl.config import DecoderConfig
from nest_ssl.modules.inputs import check_tensor

_INITS: dict[str, Callable[[Tensor], Tensor]] = {
    "xavier_uniform": nn.init.xavier_uniform_,
    "xavier_normal": nn.init.xavier_normal_,
    "kaiming_uniform": lambda weight: nn.init.kaiming_uniform_(weight, nonlinearity="relu"),
    "kaiming_normal": lambda weight: nn.init.kaiming_normal_(weight, nonlinearity="relu"),
}


class MultiSoftmaxDecoder(nn.Module):
    """`decoder(encoder_output=(B, D, S))` gives log-probabilities (B, S, K, H), or (B, S, K) with `squeeze_single`.

    Takes the fields of `DecoderConfig` as keywords.
    """

    def __init__(self, **options: Any) -> None:
        super().__init__()
        self.cfg = cfg = DecoderConfig(**options)
        conv = nn.Conv1d(cfg.feat_in, cfg.num_classes * cfg.num_decoders, kernel_size=1, bias=cfg.use_bias)
        if cfg.init_mode is not None:
            _INITS[cfg.init_mode](conv.weight)
        self.decoder_layers = nn.Sequential(conv)

    def forward(self, encoder_output: Tensor) -> Tensor:
        check_tensor("encoder_output", encoder_output, "batch", self.cfg.feat_in, "frames", empty=True)
        conv = self.decoder_layers[0]
        assert isinstance(conv, nn.Conv1d)
        # A convolution of one frame is a matmul. Softmax runs over the last dimension, where it is fastest.
        logits_BSKH = F.linear(encoder_output.transpose(1, 2), conv.weight[:, :, 0], conv.bias).unflatten(
            2, (self.cfg.num_classes, self.cfg.num_decoders)
        )
        log_probs_BSKH = torch.log_softmax(logits_BSKH.transpose(2, 3), dim=3).transpose(2, 3)
        return log_probs_BSKH[..., 0] if self.cfg.num_decoders == 1 and self.cfg.squeeze_single else log_probs_BSKH
