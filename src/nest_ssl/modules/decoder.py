"""The prediction head. B batch, D features, S frames, K codes per book, H books."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812

from nest_ssl.config import DecoderConfig
from nest_ssl.modules.checks import check_tensor

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
        logits = self.logits(encoder_output.transpose(1, 2))
        if self.cfg.num_decoders > 1:
            return torch.log_softmax(logits, dim=2)
        log_probs = torch.log_softmax(logits[..., 0], dim=2)  # on a CPU ten times as fast as before another dimension
        return log_probs if self.cfg.squeeze_single else log_probs[..., None]

    def logits(self, x_D: Tensor) -> Tensor:
        """(…, K, H) logits of frames (…, D)."""
        conv = self.decoder_layers[0]
        assert isinstance(conv, nn.Conv1d)
        logits = F.linear(x_D, conv.weight[:, :, 0], conv.bias)
        return logits.view(*logits.shape[:-1], self.cfg.num_classes, self.cfg.num_decoders)
