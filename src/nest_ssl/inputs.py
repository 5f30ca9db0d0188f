"""What the model is given, checked before anything is computed.

Shapes and dtypes are always checked: that costs nothing. Values (NaN, lengths beyond the signal) are checked in
evaluation on the CPU. In training the loader has checked them, and a GPU would have to wait for the answer; there, a
length beyond the signal counts as the signal's, a negative one as 0, and a NaN shows as a loss that is not finite.
A length of 0 is allowed everywhere: no frames, no tokens.

B batch, N samples, M mel bands, T frames.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class Signal:
    """Waveforms, (B, N), and their lengths in samples, (B,)."""

    name: str
    samples_BN: Tensor
    length: Tensor

    @classmethod
    def given(cls, name: str, samples_BN: Tensor | None, length: Tensor | None) -> Signal | None:
        return None if samples_BN is None or length is None else cls(name, samples_BN, length)

    def checked(self, *, values: bool) -> Signal:
        """This signal with its lengths inside it; `values` asks for the checks that read values."""
        x_BN = self.samples_BN
        if x_BN.ndim != 2 or 0 in x_BN.shape:
            raise ValueError(f"{self.name}: expected audio of shape (batch, samples), got {tuple(x_BN.shape)}.")
        if not x_BN.is_floating_point():
            raise ValueError(
                f"{self.name}: expected floating-point audio in [-1, 1], got {x_BN.dtype}. "
                f"Divide integer samples by their full scale (int16: 32768) first."
            )
        return Signal(self.name, x_BN, _checked_length(self.name, self.length, x_BN, x_BN.shape[1], values))


@dataclass(frozen=True)
class Mels:
    """Log-mel features, (B, M, T), and their lengths in frames, (B,)."""

    name: str
    mels_BMT: Tensor
    length: Tensor

    @classmethod
    def given(cls, name: str, mels_BMT: Tensor | None, length: Tensor | None) -> Mels | None:
        return None if mels_BMT is None or length is None else cls(name, mels_BMT, length)

    def checked(self, num_mels: int, *, values: bool) -> Mels:
        x_BMT = self.mels_BMT
        if x_BMT.ndim != 3 or x_BMT.shape[1] != num_mels or 0 in x_BMT.shape:
            raise ValueError(
                f"{self.name}: expected features of shape (batch, {num_mels}, frames), got {tuple(x_BMT.shape)}."
            )
        if not x_BMT.is_floating_point():
            raise ValueError(f"{self.name}: expected floating-point features, got {x_BMT.dtype}.")
        return Mels(self.name, x_BMT, _checked_length(self.name, self.length, x_BMT, x_BMT.shape[2], values))


def either(signal: Signal | None, mels: Mels | None, signal_name: str, mels_name: str) -> Signal | Mels:
    """The one of two that was given."""
    if signal is not None and mels is not None:
        raise ValueError(f"both {signal_name} and {mels_name} are given; give one of them.")
    source = signal or mels
    if source is None:
        raise ValueError(
            f"neither {signal_name} nor {mels_name} is given; give one of them, "
            f"together with {signal_name}_length or {mels_name}_length."
        )
    return source


def _checked_length(name: str, length: Tensor, x: Tensor, longest: int, values: bool) -> Tensor:
    if length.ndim != 1 or length.shape[0] != x.shape[0]:
        raise ValueError(
            f"{name}_length: expected {x.shape[0]} lengths, one a row of {name}, got shape {tuple(length.shape)}."
        )
    if length.is_floating_point() or length.dtype == torch.bool or length.is_complex():
        raise ValueError(f"{name}_length: expected integers, got {length.dtype}.")
    if values and x.device.type == "cpu":
        _check_values(name, length, x, longest)
    return length.clamp(0, longest)


def _check_values(name: str, length: Tensor, x: Tensor, longest: int) -> None:
    for row, value in enumerate(length.tolist()):
        if not 0 <= value <= longest:
            raise ValueError(f"{name}_length[{row}] is {value}, but row {row} of {name} has {longest}.")
        if not torch.isfinite(x[row, ..., :value]).all():
            raise ValueError(f"{name}[{row}] holds NaN or infinite values. Repair or leave out that file.")
