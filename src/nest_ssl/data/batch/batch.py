"""What a dataset gives: single utterances with noise, and padded batches of them. B batch, N samples."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, fields, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from nest_ssl.audio.signal import Samples
from nest_ssl.data.batch.bad_data import BadFile
from nest_ssl.data.batch.shared_blocks import Loan, empty


@dataclass
class AudioNoiseItem:
    """One utterance and the noise drawn for it."""

    sample_id: str | None = None
    audio: Tensor | None = None
    audio_len: Tensor | None = None
    noise: Tensor | None = None
    noise_len: Tensor | None = None
    noisy_audio: Tensor | None = None
    noisy_audio_len: Tensor | None = None


@dataclass
class AudioNoiseBatch:
    """A padded batch: clean audio, what was added to it, and the sum."""

    sample_id: list[str] | None = None
    """Numbers of the utterances in their dataset."""
    audio: Tensor | None = None
    """(B, N) float32, zeros past `audio_len`."""
    audio_len: Tensor | None = None
    """(B,) int64 samples."""
    noise: Tensor | None = None
    """(B, N) float32: what is added to `audio`."""
    noise_len: Tensor | None = None
    noisy_audio: Tensor | None = None
    """(B, N) float32: audio + noise; None as long as nobody has mixed them."""
    noisy_audio_len: Tensor | None = None
    """Always `audio_len`."""
    audio_filepaths: list[str] = field(default_factory=list)
    """The files, for messages."""
    bad_files: list[BadFile] = field(default_factory=list)
    """What could not be read while this batch was made."""
    loan: Loan | None = None
    """The shared memory that the batch lies in, if its loader process wants it back."""

    def pin_memory(self) -> AudioNoiseBatch:
        """A copy in page-locked memory; called by the loader when `pin_memory` is on."""
        pinned = replace(self._with_tensors(lambda tensor: tensor.pin_memory()), loan=None)
        if self.loan is not None:
            self.loan.give_back()
        return pinned

    def to(self, device: torch.device | str, non_blocking: bool = False) -> AudioNoiseBatch:
        return self._with_tensors(lambda tensor: tensor.to(device, non_blocking=non_blocking))

    def mixed(self) -> AudioNoiseBatch:
        """With `noisy_audio`: where it is missing, made on the batch's device in the memory of `noise`, now gone."""
        if self.noisy_audio is not None:
            return self
        if self.audio is None or self.noise is None:
            raise ValueError("a batch without audio or without noise cannot be mixed")
        return replace(self, noisy_audio=self.noise.add_(self.audio), noise=None, noise_len=None)

    def _with_tensors(self, change: Any) -> AudioNoiseBatch:
        tensors = {f.name: getattr(self, f.name) for f in fields(self) if isinstance(getattr(self, f.name), Tensor)}
        return replace(self, **{name: change(tensor) for name, tensor in tensors.items()})


def lengths_of(rows: Sequence[Samples]) -> Tensor:
    return torch.tensor([len(row) for row in rows], dtype=torch.int64)


def with_noise(batch: AudioNoiseBatch, noise: Tensor, noise_len: Tensor, mix: bool) -> AudioNoiseBatch:
    """The batch with its noise and, if asked to `mix`, with the sum."""
    assert batch.audio is not None
    assert batch.audio_len is not None
    noised = replace(batch, noise=noise, noise_len=noise_len, noisy_audio_len=batch.audio_len.clone())
    return replace(noised, noisy_audio=torch.add(batch.audio, noise, out=empty(*noise.shape))) if mix else noised


def pad_rows(rows: Sequence[Samples], num_samples: int) -> Tensor:
    """(B, N): each row cut or filled up with zeros to `num_samples`."""
    out = empty(len(rows), num_samples)
    out_BN = out.numpy()
    for row, samples in zip(out_BN, rows, strict=True):
        length = min(len(samples), num_samples)
        row[:length] = samples[:length]
        row[length:] = 0
    return out


def collate(items: Sequence[AudioNoiseItem]) -> AudioNoiseBatch:
    """Items padded to the longest audio; noisy = audio + noise."""
    audio_rows = [_samples(item.audio) for item in items]
    num_samples = max(map(len, audio_rows))
    noise_len = [len(_samples(item.noise)) if item.noise_len is None else int(item.noise_len) for item in items]
    audio, noise = pad_rows(audio_rows, num_samples), pad_rows([_samples(item.noise) for item in items], num_samples)
    audio_len = lengths_of(audio_rows)
    return AudioNoiseBatch(
        sample_id=[str(item.sample_id) for item in items],
        audio=audio,
        audio_len=audio_len,
        noise=noise,
        noise_len=torch.tensor(noise_len, dtype=torch.int64).clamp(max=num_samples),
        noisy_audio=torch.add(audio, noise, out=empty(*audio.shape)),
        noisy_audio_len=audio_len.clone(),
    )


def _samples(tensor: Tensor | None) -> Samples:
    if tensor is None:
        raise ValueError("an item without audio or without noise cannot be batched")
    return np.asarray(tensor.numpy(), np.float32)
