"""What the model and its modules are given: shapes, lengths and precision.

Shapes, dtypes and devices are always checked: that costs nothing. Values (NaN, lengths beyond the
signal) are checked in evaluation on the CPU. In training the loader has checked them, and a GPU
would have to wait for the answer; there, and in a compiled model, a length beyond the signal counts
as the signal's length, a negative one as 0, and a NaN shows up as a loss that is not finite. A
length of 0 is allowed everywhere: no frames, no tokens.

B batch, N samples, M mel bands, T frames.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

# ---- what a module checks ----


def check_tensor(name: str, x: object, *shape: int | str, what: str = "a tensor", empty: bool = False) -> None:
    """Check that `x` has this shape. Words stand for any size; a size of 0 is allowed only with `empty`."""
    wanted = f"{name}: expected {what} of shape ({', '.join(map(str, shape))})"
    if not isinstance(x, Tensor):
        raise ValueError(f"{wanted}, got {type(x).__name__}; convert it with torch.as_tensor.")
    fits = x.ndim == len(shape) and all(isinstance(w, str) or w == n for w, n in zip(shape, x.shape, strict=True))
    if not fits:
        raise ValueError(f"{wanted}, got {tuple(x.shape)}.")
    if 0 in x.shape and not empty:
        raise ValueError(f"{wanted}, got {tuple(x.shape)}: it is empty.")
    if x.layout != torch.strided:
        raise ValueError(f"{wanted}, got layout {x.layout}; convert it with to_dense().")


def check_audio(name: str, x_BN: Tensor) -> None:
    """Check that `x_BN` is audio: rows of floating-point samples."""
    check_tensor(name, x_BN, "batch", "samples", what="audio")
    if not x_BN.is_floating_point():
        raise ValueError(
            f"{name}: expected floating-point audio in [-1, 1], got {x_BN.dtype}. "
            f"Divide integer samples by their full scale (int16: 32768) first."
        )


def check_features(name: str, x: Tensor, *shape: int | str) -> None:
    """Check that `x` is floating-point features of this shape."""
    check_tensor(name, x, *shape, what="features")
    if not x.is_floating_point():
        raise ValueError(f"{name}: expected floating-point features, got {x.dtype}.")


def checked_lengths(name: str, lengths: object, x: Tensor, longest: int) -> Tensor:
    """Return `lengths` of the rows of `x` as int64, clamped to 0 … `longest`. No value is read from a device."""
    if not isinstance(lengths, Tensor):
        raise ValueError(f"{name}: expected a tensor of integers, got {type(lengths).__name__}.")
    if lengths.ndim != 1 or lengths.shape[0] != x.shape[0]:
        raise ValueError(f"{name}: expected shape ({x.shape[0]},), a length per row, got {tuple(lengths.shape)}.")
    if lengths.is_floating_point() or lengths.is_complex() or lengths.dtype == torch.bool:
        raise ValueError(f"{name}: expected integers, got {lengths.dtype}.")
    if lengths.device != x.device:
        raise ValueError(f"{name}: is on {lengths.device}, but what it measures is on {x.device}; move one of them.")
    return lengths.long().clamp(0, longest)


def valid_frames(lengths_B: Tensor, num_frames: int) -> Tensor:
    """(B, T) true where a frame lies before the end of its utterance."""
    return torch.arange(num_frames, device=lengths_B.device) < lengths_B[:, None]


# ---- precision: features and targets are computed in float32 or better ----


def full_precision(device: torch.device) -> AbstractContextManager[object]:
    """Switch autocast off. Tensors without storage (`meta`) have no autocast to switch off."""
    return contextlib.nullcontext() if device.type == "meta" else torch.autocast(device.type, enabled=False)


class KeepsPrecision(nn.Module):
    """A module that moves between devices but keeps its dtype: a model cast to bf16 must see the same targets."""

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Any:
        def move(tensor: Tensor) -> Tensor:
            moved = fn(tensor)
            return moved if moved.dtype == tensor.dtype else tensor.to(moved.device)

        return super()._apply(move, recurse)  # type: ignore[no-untyped-call]


# ---- what the model is given: audio, or features in its place ----


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
        """Return this signal with lengths that lie inside it; `values` also checks the samples."""
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
        """Return these features with lengths that lie inside them; `values` also checks the values."""
        check_features(self.name, self.mels_BMT, "batch", num_mels, "frames")
        length = _checked_length(self.name, self.length, self.mels_BMT, device, values)
        return Mels(self.name, self.mels_BMT, length)


def either(signal: Signal | None, mels: Mels | None, signal_name: str, mels_name: str) -> Signal | Mels:
    """Return the one of the two that was given."""
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
    """Check that clean and noisy features have the same number of rows."""
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
