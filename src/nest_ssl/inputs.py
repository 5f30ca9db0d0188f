"""What the model is given, checked before anything is computed.

Shapes, dtypes and devices are always checked: that costs nothing. Values (NaN, lengths beyond the signal) are checked
in evaluation on the CPU. In training the loader has checked them, and a GPU would have to wait for the answer; there,
and in a compiled model, a length beyond the signal counts as the signal's, a negative one as 0, and a NaN shows as a
loss that is not finite. A length of 0 is allowed everywhere: no frames, no tokens.

B batch, N samples, M mel bands, T frames.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from nest_ssl.modules.checks import check_audio, check_features, checked_lengths


@dataclass(frozen=True)
class Signal:
    """Waveforms, (B, N), and their lengths in samples, (B,)."""

    name: str
    samples_BN: Tensor
    length: Tensor

    @classmethod
    def given(cls, name: str, samples_BN: Tensor | None, length: Tensor | None) -> Signal | None:
        return None if samples_BN is None or length is None else cls(name, samples_BN, length)

    def checked(self, device: torch.device, *, values: bool) -> Signal:
        """This signal with its lengths inside it; `values` asks for the checks that read values."""
        check_audio(self.name, self.samples_BN)
        length = _checked_length(self.name, self.length, self.samples_BN, device, values)
        return Signal(self.name, self.samples_BN, length)


@dataclass(frozen=True)
class Mels:
    """Log-mel features, (B, M, T), and their lengths in frames, (B,)."""

    name: str
    mels_BMT: Tensor
    length: Tensor

    @classmethod
    def given(cls, name: str, mels_BMT: Tensor | None, length: Tensor | None) -> Mels | None:
        return None if mels_BMT is None or length is None else cls(name, mels_BMT, length)

    def checked(self, num_mels: int, device: torch.device, *, values: bool) -> Mels:
        """These features with their lengths inside them; `values` asks for the checks that read values."""
        check_features(self.name, self.mels_BMT, "batch", num_mels, "frames")
        length = _checked_length(self.name, self.length, self.mels_BMT, device, values)
        return Mels(self.name, self.mels_BMT, length)


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


def check_same_batch(clean: Mels, noisy: Mels) -> None:
    """Clean and noisy are the same utterances."""
    rows, noisy_rows = clean.mels_BMT.shape[0], noisy.mels_BMT.shape[0]
    if rows != noisy_rows:
        raise ValueError(f"{clean.name} has {rows} rows and {noisy.name} has {noisy_rows}; they must be the same.")


def _checked_length(name: str, length: Tensor, x: Tensor, device: torch.device, values: bool) -> Tensor:
    if x.device != device:
        raise ValueError(f"{name}: is on {x.device}, but the model is on {device}; move one of them.")
    longest = x.shape[-1]
    inside = checked_lengths(f"{name}_length", length, x, longest)
    if values and x.device.type == "cpu":
        _check_values(name, length, x, longest)
    return inside


def _check_values(name: str, length: Tensor, x: Tensor, longest: int) -> None:
    for row, value in enumerate(length.tolist()):
        if not 0 <= value <= longest:
            raise ValueError(f"{name}_length[{row}] is {value}, but row {row} of {name} has {longest}.")
        if not torch.isfinite(x[row, ..., :value]).all():
            raise ValueError(f"{name}[{row}] holds NaN or infinite values. Repair or leave out that file.")
