"""Waveform to log-mel features, as NeMo computes them.

B batch, N samples, T frames, F Fourier bins, M mel bands; P samples or frames of all utterances in a row.
"""

from __future__ import annotations

import math
from itertools import accumulate, chain
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812

from nest_ssl.config import PreprocessorConfig
from nest_ssl.modules.checks import check_audio, checked_lengths
from nest_ssl.modules.lengths import may_be_read, valid_frames
from nest_ssl.modules.precision import KeepsPrecision, full_precision

_STD_FLOOR = 1e-5  # added to every standard deviation, so that a silent band stays finite

_WINDOWS = {
    "hann": torch.hann_window,
    "hamming": torch.hamming_window,
    "blackman": torch.blackman_window,
    "bartlett": torch.bartlett_window,
}


class AudioToMelSpectrogramPreprocessor(nn.Module):
    """`preprocessor(input_signal=(B, N), length=(B,))` gives mels (B, M, T) and their lengths (B,).

    Takes the fields of `PreprocessorConfig` as keywords. Runs in float32 and without gradients, in and out of autocast.
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
    """The computation behind the preprocessor; its buffers `window` and `fb` stand in every `.nemo` file."""

    def __init__(self, cfg: PreprocessorConfig) -> None:
        super().__init__()
        self.cfg = cfg
        make_window = _WINDOWS.get(cfg.window or "none")
        window = make_window(cfg.num_window_samples, periodic=False) if make_window else None
        self.window: Tensor | None
        self.register_buffer("window", window)
        self.fb: Tensor
        high_hz = cfg.highfreq or cfg.sample_rate / 2
        filters_MF = mel_filters(cfg.sample_rate, cfg.num_fft, cfg.features, cfg.lowfreq, high_hz, cfg.mel_norm)
        self.register_buffer("fb", filters_MF[None])

    def forward(self, signal_BN: Tensor, length: Tensor, generator: torch.Generator | None) -> tuple[Tensor, Tensor]:
        cfg = self.cfg
        num_frames = self.num_frames(length)
        compute = self.packed_mels if may_be_read(length) else self.padded_mels
        x_BMT = compute(signal_BN, length, generator)
        valid_B1T = valid_frames(num_frames, x_BMT.shape[2])[:, None]
        x_BMT = normalize(x_BMT, valid_B1T, cfg.normalize)
        x_BMT = torch.where(valid_B1T, x_BMT, cfg.pad_value)
        if cfg.pad_to > 0:
            x_BMT = F.pad(x_BMT, (0, -x_BMT.shape[2] % cfg.pad_to), value=cfg.pad_value)
        return x_BMT, num_frames

    def padded_mels(self, signal_BN: Tensor, length: Tensor, generator: torch.Generator | None) -> Tensor:
        """(B, M, T); what it holds past the ends means nothing."""
        signal_BN = self._dithered(signal_BN, generator)
        if self.cfg.preemph is not None:
            # The sample just past the end would hold an echo of the last one: pre-emphasis first, then the cut.
            emphasised_BN = signal_BN.clone()
            emphasised_BN[:, 1:].sub_(signal_BN[:, :-1], alpha=self.cfg.preemph)
            signal_BN = torch.where(valid_frames(length, signal_BN.shape[1]), emphasised_BN, 0.0)
        return self._mels(signal_BN)

    def packed_mels(self, signal_BN: Tensor, length: Tensor, generator: torch.Generator | None) -> Tensor:
        """(B, M, T), 0 past the ends: of one signal of all utterances, so that nothing is computed for the padding.

        8 utterances of 8 to 16 s on two cores: 20 ms in place of 25.
        """
        hop, reach = self.cfg.num_stride_samples, self.cfg.num_fft // 2
        past_end = reach if self.cfg.preemph is None else 0  # without pre-emphasis, what follows the end is heard
        rows = [row_N[: end + past_end] for row_N, end in zip(signal_BN, length.tolist(), strict=True)]
        sizes = [len(row) for row in rows]
        signal_P = self._dithered(torch.cat(rows), generator)
        if self.cfg.preemph is not None:
            before_P = F.pad(signal_P[:-1], (1, 0))
            for begin, size in zip(_begins(sizes), sizes, strict=True):
                before_P[begin : begin + min(size, 1)] = 0.0
            signal_P = signal_P.sub(before_P, alpha=self.cfg.preemph)
        # Silence keeps utterances apart: as far as a frame reaches, and on to where the next frame may begin.
        num_frames = [(size + reach) // hop + 1 for size in sizes]
        silence = signal_P.new_zeros(reach + hop)
        gaps = [silence[: frames * hop - size] for frames, size in zip(num_frames, sizes, strict=True)]
        apart = chain.from_iterable(zip(signal_P.split(sizes), gaps, strict=True))
        mels_MP = self._mels(torch.cat(list(apart))[None])[0]
        longest = int(self.num_frames(length.new_tensor(signal_BN.shape[1]))) + 1
        x_BMT = signal_P.new_zeros(len(rows), self.cfg.features, longest)
        for row, (begin, valid) in enumerate(zip(_begins(num_frames), self.num_frames(length).tolist(), strict=True)):
            x_BMT[row, :, :valid] = mels_MP[:, begin : begin + valid]
        return x_BMT

    def num_frames(self, num_samples: Tensor) -> Tensor:
        """Frames of an utterance: one per stride, the centred first one not counted at the end; none for no samples."""
        fft = self.cfg.num_fft
        frames = (num_samples + fft // 2 * 2 - fft).div(self.cfg.num_stride_samples, rounding_mode="floor")
        return frames.clamp(min=0).long()

    def num_padded_frames(self, num_samples: Tensor) -> Tensor:
        """Frames of a batch whose rows have this many samples, with those added by `pad_to`."""
        frames, multiple = self.num_frames(num_samples) + 1, max(1, self.cfg.pad_to)
        return (frames + multiple - 1) // multiple * multiple

    def _dithered(self, signal: Tensor, generator: torch.Generator | None) -> Tensor:
        if not self.training or self.cfg.dither <= 0:
            return signal
        return signal.add(torch.empty_like(signal).normal_(generator=generator), alpha=self.cfg.dither)

    def _mels(self, signal_BN: Tensor) -> Tensor:
        x_BMT = self.fb.float() @ self._spectrum(signal_BN)
        return self._log(x_BMT) if self.cfg.log else x_BMT

    def _spectrum(self, signal_BN: Tensor) -> Tensor:
        cfg = self.cfg
        window = None if self.window is None else self.window.float()
        if window is None:
            window = torch.ones(cfg.num_window_samples, device=signal_BN.device)
        spectrum_BFT = torch.stft(
            signal_BN,
            n_fft=cfg.num_fft,
            hop_length=cfg.num_stride_samples,
            win_length=cfg.num_window_samples,
            window=window,
            center=True,
            pad_mode="constant",
            return_complex=True,
        )
        real_BFT, imaginary_BFT = torch.view_as_real(spectrum_BFT).unbind(-1)
        power_BFT = real_BFT.square().addcmul_(imaginary_BFT, imaginary_BFT)
        return power_BFT if cfg.mag_power == 2.0 else power_BFT.pow(cfg.mag_power / 2)

    def _log(self, x_BMT: Tensor) -> Tensor:
        guard = self.cfg.log_zero_guard_value
        if isinstance(guard, str):
            guard = getattr(torch.finfo(x_BMT.dtype), guard)
        return torch.log(x_BMT + guard if self.cfg.log_zero_guard_type == "add" else x_BMT.clamp(min=guard))


def _begins(sizes: list[int]) -> list[int]:
    """Where parts of these sizes begin, one after the other."""
    return [0, *accumulate(sizes[:-1])]


def normalize(x_BMT: Tensor, valid_B1T: Tensor, kind: str | dict[str, Any] | None) -> Tensor:
    """Mean 0 and standard deviation 1 over the valid frames: per mel band, or of the utterance as a whole."""
    if kind not in ("per_feature", "all_features"):
        return x_BMT
    over = (2,) if kind == "per_feature" else (1, 2)
    count = valid_B1T.sum(2, keepdim=True) * (1 if kind == "per_feature" else x_BMT.shape[1])
    mean = torch.where(valid_B1T, x_BMT, 0.0).sum(over, keepdim=True) / count.clamp(min=1)
    centred_BMT = torch.where(valid_B1T, x_BMT - mean, 0.0)
    # A single frame has no spread: 0 / max(n - 1, 1) = 0, as NeMo's guard has it.
    std: Tensor = torch.linalg.vector_norm(centred_BMT, dim=over, keepdim=True) / (count - 1).clamp(min=1).sqrt()
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
