"""Waveform to log-mel features, as NeMo computes them.

B batch, N samples, T frames, F Fourier bins, M mel bands.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812

from nest_ssl.config import PreprocessorConfig
from nest_ssl.modules.inputs import KeepsPrecision, check_audio, checked_lengths, full_precision, valid_frames

_STD_FLOOR = 1e-5  # added to every standard deviation, so that a silent band stays finite

_WINDOWS = {
    "hann": torch.hann_window,
    "hamming": torch.hamming_window,
    "blackman": torch.blackman_window,
    "bartlett": torch.bartlett_window,
}


class AudioToMelSpectrogramPreprocessor(nn.Module):
    """`preprocessor(input_signal=(B, N), length=(B,))` gives mels (B, M, T) and their lengths (B,).

    Takes the fields of `PreprocessorConfig` as keywords. Runs in float32 and without gradients, in
    and out of autocast.
    """

    def __init__(self, **options: Any) -> None:
        super().__init__()
        self.featurizer = MelFeaturizer(PreprocessorConfig(**options))

    @torch.no_grad()
    def forward(
        self, input_signal: Tensor, length: Tensor, *, generator: torch.Generator | None = None
    ) -> tuple[Tensor, Tensor]:
        check_audio("input_signal", input_signal)
        length = checked_lengths("length", length, input_signal, input_signal.shape[1])
        with full_precision(input_signal.device):
            mels: tuple[Tensor, Tensor] = self.featurizer(input_signal.float(), length, generator)
        return mels


class MelFeaturizer(KeepsPrecision):
    """The computation behind the preprocessor; every `.nemo` file contains its buffers `window` and `fb`."""

    def __init__(self, cfg: PreprocessorConfig) -> None:
        super().__init__()
        self.cfg = cfg
        self.num_fft, self.window_samples, self.stride_samples = (
            cfg.num_fft,
            cfg.num_window_samples,
            cfg.num_stride_samples,
        )
        make_window = _WINDOWS.get(cfg.window or "none")
        window = make_window(self.window_samples, periodic=False) if make_window else None
        self.window: Tensor | None
        self.register_buffer("window", window)
        self.fb: Tensor
        high_hz = cfg.highfreq or cfg.sample_rate / 2
        filters_MF = mel_filters(cfg.sample_rate, self.num_fft, cfg.features, cfg.lowfreq, high_hz, cfg.mel_norm)
        self.register_buffer("fb", filters_MF[None])

    def forward(self, signal_BN: Tensor, length: Tensor, generator: torch.Generator | None) -> tuple[Tensor, Tensor]:
        cfg, num_frames = self.cfg, self.num_frames(length)
        if self.training and cfg.dither > 0:
            noise_BN = torch.randn(signal_BN.shape, dtype=signal_BN.dtype, device=signal_BN.device, generator=generator)
            signal_BN = signal_BN + cfg.dither * noise_BN
        if cfg.preemph is not None:
            # The sample just past the end would hold an echo of the last one: pre-emphasis first, then the cut.
            emphasised_BN = pre_emphasised(signal_BN, cfg.preemph)
            signal_BN = torch.where(valid_frames(length, signal_BN.shape[1]), emphasised_BN, 0.0)
        x_BMT = self._log(self.fb.float() @ self._power(signal_BN))
        x_BMT = F.pad(x_BMT, (0, -x_BMT.shape[2] % max(1, cfg.pad_to)))
        valid_B1T = valid_frames(num_frames, x_BMT.shape[2])[:, None]
        x_BMT = normalize(torch.where(valid_B1T, x_BMT, 0.0), valid_B1T, cfg.normalize)
        return torch.where(valid_B1T, x_BMT, cfg.pad_value) if cfg.pad_value else x_BMT, num_frames

    def num_frames(self, num_samples: Tensor) -> Tensor:
        """Frames of an utterance: one per stride, without the extra centred one at the end; none for no samples."""
        fft = self.num_fft
        frames = (num_samples + fft // 2 * 2 - fft).div(self.stride_samples, rounding_mode="floor")
        return frames.clamp(min=0).long()

    def num_padded_frames(self, num_samples: Tensor) -> Tensor:
        """Frames in the tensor of a batch whose rows have this many samples, including those added by `pad_to`."""
        frames, multiple = self.num_frames(num_samples) + 1, max(1, self.cfg.pad_to)
        return (frames + multiple - 1) // multiple * multiple

    def _power(self, signal_BN: Tensor) -> Tensor:
        """(B, F, T); the first frame is centred on the first sample, the last one near the last."""
        cfg, reach = self.cfg, self.num_fft // 2
        window = None if self.window is None else self.window.float()
        if window is None:
            window = torch.ones(self.window_samples, device=signal_BN.device)
        spectrum_BFT = torch.stft(
            F.pad(signal_BN, (reach, reach)),
            n_fft=self.num_fft,
            hop_length=self.stride_samples,
            win_length=self.window_samples,
            window=window,
            center=False,
            return_complex=True,
        )
        power_BFT = spectrum_BFT.real.square() + spectrum_BFT.imag.square()
        return power_BFT if cfg.mag_power == 2.0 else power_BFT.pow(cfg.mag_power / 2)

    def _log(self, mels: Tensor) -> Tensor:
        if not self.cfg.log:
            return mels
        guard = self.cfg.log_zero_guard_value
        if isinstance(guard, str):
            guard = getattr(torch.finfo(mels.dtype), guard)
        return torch.log(mels + guard if self.cfg.log_zero_guard_type == "add" else mels.clamp(min=guard))


def pre_emphasised(signal_BN: Tensor, share: float) -> Tensor:
    """x[n] − share · x[n − 1], rounded after the product and after the difference.

    Neighbouring samples nearly cancel, so the rounding counts: one fused multiply-add (as by
    `sub(alpha=)`, or by a compiler that contracts the two) moves the lowest mel bands by 6e-5 from
    NeMo's and a training curve by 6e-4. Two operations of torch stay two kernels, on a GPU too.
    """
    return torch.cat((signal_BN[:, :1], signal_BN[:, 1:] - share * signal_BN[:, :-1]), dim=1)


def normalize(x_BMT: Tensor, valid_B1T: Tensor, kind: str | dict[str, Any] | None) -> Tensor:
    """Shift and scale to mean 0 and standard deviation 1 over the valid frames: per mel band, or per utterance.

    Expects and returns 0 in all other frames.
    """
    if kind not in ("per_feature", "all_features"):
        return x_BMT
    over = (2,) if kind == "per_feature" else (1, 2)
    count = valid_B1T.sum(2, keepdim=True) * (1 if kind == "per_feature" else x_BMT.shape[1])
    mean = x_BMT.sum(over, keepdim=True) / count.clamp(min=1)
    centred_BMT = torch.where(valid_B1T, x_BMT - mean, 0.0)
    # A single frame has no spread: 0 / max(n - 1, 1) = 0, as NeMo's guard has it.
    std = (centred_BMT.square().sum(over, keepdim=True) / (count - 1).clamp(min=1)).sqrt()
    return centred_BMT / (std + _STD_FLOOR)


def mel_filters(
    sample_rate: int, num_fft: int, num_mels: int, low_hz: float, high_hz: float, norm: str | None = "slaney"
) -> Tensor:
    """(M, F) triangular filters, evenly spaced on Slaney's mel scale; norm 'slaney' gives them equal area."""
    bins_hz = torch.linspace(0, sample_rate / 2, num_fft // 2 + 1, dtype=torch.float64)
    corners_mel = torch.linspace(_hz_to_mel(low_hz), _hz_to_mel(high_hz), num_mels + 2, dtype=torch.float64)
    corners_hz = _mel_to_hz(corners_mel)
    left, centre, right = corners_hz[:-2, None], corners_hz[1:-1, None], corners_hz[2:, None]
    rising, falling = (bins_hz - left) / (centre - left), (right - bins_hz) / (right - centre)
    filters_MF = torch.minimum(rising, falling).clamp(min=0)
    if norm == "slaney":
        filters_MF = filters_MF * 2 / (right - left)
    return filters_MF.float()


# Slaney's scale: linear up to 1 kHz (15 mel), then 27 mel for every factor of 6.4.
_HZ_PER_MEL, _BREAK_HZ, _LOG_STEP = 200 / 3, 1000.0, math.log(6.4) / 27


def _hz_to_mel(hz: float) -> float:
    if hz < _BREAK_HZ:
        return hz / _HZ_PER_MEL
    return _BREAK_HZ / _HZ_PER_MEL + math.log(hz / _BREAK_HZ) / _LOG_STEP


def _mel_to_hz(mel: Tensor) -> Tensor:
    break_mel = _BREAK_HZ / _HZ_PER_MEL
    return torch.where(mel < break_mel, mel * _HZ_PER_MEL, _BREAK_HZ * torch.exp(_LOG_STEP * (mel - break_mel)))
