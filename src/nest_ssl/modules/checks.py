"""What a module is given: its shape, its kind and its lengths, checked in words. No value is read from a device."""

from __future__ import annotations

import torch
from torch import Tensor


def check_tensor(name: str, x: object, *shape: int | str, what: str = "a tensor", empty: bool = False) -> None:
    """`x` has this shape, whose words stand for any size; a size of 0 only with `empty`."""
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
    """`x_BN` is audio: rows of floating-point samples."""
    check_tensor(name, x_BN, "batch", "samples", what="audio")
    if not x_BN.is_floating_point():
        raise ValueError(
            f"{name}: expected floating-point audio in [-1, 1], got {x_BN.dtype}. "
            f"Divide integer samples by their full scale (int16: 32768) first."
        )


def check_features(name: str, x: Tensor, *shape: int | str) -> None:
    """`x` is features of this shape, in floating point."""
    check_tensor(name, x, *shape, what="features")
    if not x.is_floating_point():
        raise ValueError(f"{name}: expected floating-point features, got {x.dtype}.")


def checked_lengths(name: str, lengths: object, x: Tensor, longest: int) -> Tensor:
    """`lengths` of the rows of `x` as int64; those beyond `longest` count as `longest`, negative ones as 0."""
    if not isinstance(lengths, Tensor):
        raise ValueError(f"{name}: expected a tensor of integers, got {type(lengths).__name__}.")
    if lengths.ndim != 1 or lengths.shape[0] != x.shape[0]:
        raise ValueError(f"{name}: expected shape ({x.shape[0]},), a length per row, got {tuple(lengths.shape)}.")
    if lengths.is_floating_point() or lengths.is_complex() or lengths.dtype == torch.bool:
        raise ValueError(f"{name}: expected integers, got {lengths.dtype}.")
    if lengths.device != x.device:
        raise ValueError(f"{name}: is on {lengths.device}, but what it measures is on {x.device}; move one of them.")
    return lengths.long().clamp(0, longest)
