"""What can be had without an encoder: mean and standard deviation over time of log-mels.

B batch, N samples, M mel bands, T frames.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn

from nest_ssl.config.model import PreprocessorConfig
from nest_ssl.evaluation.probe_linear import statistics
from nest_ssl.modules import AudioToMelSpectrogramPreprocessor

_LOG_GUARD = 1e-10
LOUD_FRAMES_DB = 25.0
"""Frames softer than this below the loudest one are pauses, and left out."""
DEPTH_DB = 60.0
"""Bands softer than this below the loudest one count as this soft."""
_DB = math.log(10) / 10


class LogMelStatistics(nn.Module):
    """(B, N) samples and their lengths to (B, 2M) statistics of log-mels, relative to each utterance's loudest place.

    A baseline worth beating: with pauses and loudness it is weaker (measured on spoken digits of unseen speakers: 0.87
    instead of 0.90; with noise at 0 dB 0.30 instead of 0.35; from two labels a class 0.60 instead of 0.67).
    """

    def __init__(self, cfg: PreprocessorConfig, loud_frames_db: float = LOUD_FRAMES_DB) -> None:
        super().__init__()
        self.loud_frames_db = loud_frames_db
        plain = {"normalize": None, "dither": 0.0, "log": True, "pad_to": 0}
        guard = {"log_zero_guard_type": "add", "log_zero_guard_value": _LOG_GUARD}
        self.preprocessor = AudioToMelSpectrogramPreprocessor(**(vars(cfg) | plain | guard))

    def forward(self, samples_BN: Tensor, length: Tensor) -> Tensor:
        mels_BMT, num_frames = self.preprocessor(input_signal=samples_BN, length=length)
        valid_BT = torch.arange(mels_BMT.shape[2], device=mels_BMT.device) < num_frames[:, None]
        level_BT = mels_BMT.logsumexp(1).masked_fill(~valid_BT, -math.inf)
        loud_BT = valid_BT & (level_BT >= level_BT.amax(1, keepdim=True) - self.loud_frames_db * _DB)
        loudest_B11 = mels_BMT.masked_fill(~valid_BT[:, None], -math.inf).amax((1, 2), keepdim=True)
        return statistics((mels_BMT - loudest_B11).clamp(min=-DEPTH_DB * _DB), loud_BT)
