"""Padded batches: utterances with noise, what could not be read, and the memory that a batch lies in.

B batch, N samples.

A worker shares memory with the trainer. Fresh shared memory costs more than what is written into it: its pages are
created, mapped on both sides, and freed. So a worker keeps blocks of it, a batch borrows two of them, and the trainer
returns them once it has copied the batch into pinned memory. Without that copy nobody knows when a batch is no longer
needed, and every batch lies in fresh memory.

Audio of 16-bit files travels as int16: half the memory, half the copy to a GPU, and float32 again there, bit for bit.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, fields, replace
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.utils.data import get_worker_info

from nest_ssl.audio.signal import Samples

MAX_BLOCKS = 16
"""Blocks of a worker: for the batch being made, those waiting (`prefetch_factor`) and the one being copied."""
INT16_SCALE = 32768
"""Decoders return a 16-bit sample divided by this; a power of two, so that float32 is exact both ways."""
NUM_TRIED = 256
"""Samples of a row that tell most files that are not 16-bit."""


class BadDataError(RuntimeError):
    """Too much of the data cannot be read."""


@dataclass  # not frozen: Lightning, which walks through batches, refuses frozen ones
class BadFile:
    """One file that could not be read for one place in the plan."""

    kind: str
    """speech, noise, or no-noise: an utterance left without noise because none could be read."""
    audio_filepath: str
    reason: str
    epoch: int
    step: int
    rank: int
    """Place in the plan."""
    stand_in: bool = False
    """It was to replace another bad file, so the plan lost no further utterance."""


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
    """A padded batch: clean audio, what is added to it, and the sum."""

    sample_id: list[str] | None = None
    """Numbers of the utterances in their dataset."""
    audio: Tensor | None = None
    """(B, N) float32, zeros past `audio_len`; int16 between a worker and `to` or `mixed`, if the files are 16-bit."""
    audio_len: Tensor | None = None
    """(B,) int64 samples."""
    noise: Tensor | None = None
    """(B, N) float32: what is added to `audio`."""
    noise_len: Tensor | None = None
    noisy_audio: Tensor | None = None
    """(B, N) float32: audio + noise; None until they are mixed."""
    noisy_audio_len: Tensor | None = None
    """Always `audio_len`."""
    audio_filepaths: list[str] = field(default_factory=list)
    """The files, for messages."""
    bad_files: list[BadFile] = field(default_factory=list)
    """Files that could not be read while this batch was made."""
    loan: Loan | None = None
    """The shared memory that the batch lies in, if its worker wants it back."""
    planned_samples: int | None = None
    """What all ranks pad their batches of this step to, for CUDA graphs; None: not planned. At least N."""
    cropped_files: list[str] = field(default_factory=list)
    """Files whose audio was longer than that, and was cropped."""

    @property
    def num_cropped(self) -> int:
        return len(self.cropped_files)

    def pin_memory(self) -> AudioNoiseBatch:
        """Copy the batch into pinned memory; the DataLoader calls this if `pin_memory` is on."""
        pinned = replace(self._with_tensors(lambda tensor: tensor.pin_memory()), loan=None)
        if self.loan is not None:
            self.loan.give_back()
        return pinned

    def shared(self) -> AudioNoiseBatch:
        """In a worker, move all tensors to shared memory.

        Torch would do it in a thread: if /dev/shm is full, the batch is lost there, and the trainer waits forever.
        """
        return self if get_worker_info() is None else self._with_tensors(lambda tensor: tensor.share_memory_())

    def to(self, device: torch.device | str, non_blocking: bool = False) -> AudioNoiseBatch:
        """Return the batch on a device, in float32."""
        return self._with_tensors(lambda tensor: tensor.to(device, non_blocking=non_blocking))._in_float()

    def mixed(self) -> AudioNoiseBatch:
        """Return the batch with `noisy_audio`, made on the batch's device in the memory of `noise` if it is missing."""
        if self.noisy_audio is not None:
            return self
        if self.audio is None or self.noise is None:
            raise ValueError("a batch without audio or without noise cannot be mixed")
        audio = to_float(self.audio)
        return replace(self, audio=audio, noisy_audio=self.noise.add_(audio), noise=None, noise_len=None)

    def _in_float(self) -> AudioNoiseBatch:
        return self if self.audio is None else replace(self, audio=to_float(self.audio))

    def tensors(self) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Return what the training objective takes: audio, noisy audio, and the lengths of each."""
        if self.audio is None or self.audio_len is None or self.noisy_audio is None or self.noisy_audio_len is None:
            raise ValueError("a batch that is not mixed cannot be trained on")
        return self.audio, self.audio_len, self.noisy_audio, self.noisy_audio_len

    def _with_tensors(self, change: Callable[[Tensor], Tensor]) -> AudioNoiseBatch:
        tensors = {f.name: getattr(self, f.name) for f in fields(self) if isinstance(getattr(self, f.name), Tensor)}
        changed: dict[str, Any] = {name: change(tensor) for name, tensor in tensors.items()}
        return replace(self, **changed)


def random_batch(batch_size: int, num_samples: int) -> AudioNoiseBatch:
    """A batch as a worker makes it: 16-bit audio and noise, on the host. It is always the same."""
    random = torch.Generator().manual_seed(0)
    audio = torch.randint(-3000, 3000, (1, num_samples), dtype=torch.int16, generator=random)
    noise = 0.02 * torch.randn(1, num_samples, generator=random)
    length = torch.full((batch_size,), num_samples)
    return AudioNoiseBatch(
        audio=audio.repeat(batch_size, 1),
        audio_len=length,
        noise=noise.repeat(batch_size, 1),
        noise_len=length,
        noisy_audio_len=length,
        planned_samples=num_samples,
    )


def needed(tensor: Tensor | None) -> Tensor:
    """Return a tensor that every batch of a loader has."""
    assert tensor is not None, "the loader fills every field of a batch"
    return tensor


def lengths_of(rows: Sequence[Samples]) -> Tensor:
    return torch.tensor([len(row) for row in rows], dtype=torch.int64)


def with_noise(batch: AudioNoiseBatch, noise: Tensor, noise_len: Tensor, mix: bool) -> AudioNoiseBatch:
    """Return the batch with its noise and, with `mix`, the sum."""
    noised = replace(batch, noise=noise, noise_len=noise_len, noisy_audio_len=needed(batch.audio_len).clone())
    return replace(noised, noisy_audio=mixture(needed(batch.audio), noise)) if mix else noised


def mixture(audio: Tensor, noise: Tensor) -> Tensor:
    return torch.add(audio, noise, out=empty(*noise.shape))


def pad_rows(rows: Sequence[Samples], num_samples: int) -> Tensor:
    """Return (B, N): each row cut or zero-padded to `num_samples`."""
    out = empty(len(rows), num_samples)
    out_BN = out.numpy()
    for row, samples in zip(out_BN, rows, strict=True):
        length = min(len(samples), num_samples)
        row[:length] = samples[:length]
        row[length:] = 0
    return out


def pack_rows(rows: Sequence[Samples], num_samples: int) -> Tensor | None:
    """Return (B, N) int16: each row times INT16_SCALE, zero-padded; None if this changes a sample.

    The samples decide, not the file's format: whatever was done to a row, it comes back bit for bit.
    """
    if not all(_pack(row[:NUM_TRIED], np.empty(len(row[:NUM_TRIED]), np.int16)) for row in rows):
        return None
    out = empty(len(rows), num_samples, torch.int16)
    for row, samples in zip(out.numpy(), rows, strict=True):
        if not _pack(samples, row[: len(samples)]):
            return None
        row[len(samples) :] = 0
    return out


def _pack(samples: Samples, out: NDArray[np.int16]) -> bool:
    """Write samples times INT16_SCALE; tell whether that was exact.

    A second of audio takes 13 µs with its padding, 8 µs as float32; reading and mixing it takes 240 µs.
    """
    scaled = samples * np.float32(INT16_SCALE)
    with np.errstate(invalid="ignore"):  # far outside of 16 bits
        np.copyto(out, scaled, casting="unsafe")
    return np.array_equal(out, scaled)


def to_float(audio: Tensor) -> Tensor:
    """Return audio that travelled as int16 as float32, on its device: exactly what the decoder returned."""
    return audio if audio.is_floating_point() else audio.to(torch.float32).mul_(1 / INT16_SCALE)


def collate(items: Sequence[AudioNoiseItem]) -> AudioNoiseBatch:
    """Pad items to the longest audio; noisy = audio + noise."""
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
        noisy_audio=mixture(audio, noise),
        noisy_audio_len=audio_len.clone(),
    )


def _samples(tensor: Tensor | None) -> Samples:
    if tensor is None:
        raise ValueError("an item without audio or without noise cannot be batched")
    return np.asarray(tensor.numpy(), np.float32)


# ---- shared memory that is reused ----


@dataclass
class Loan:
    """The blocks that a batch lies in."""

    lent: Tensor
    """(MAX_BLOCKS,) of the worker: 1 while the trainer may still read the block."""
    numbers: list[int]

    def give_back(self) -> None:
        self.lent[self.numbers] = 0


class Blocks:
    """The shared memory of one worker."""

    def __init__(self) -> None:
        self.lent = torch.zeros(MAX_BLOCKS, dtype=torch.uint8).share_memory_()
        self.blocks: list[torch.UntypedStorage] = []
        self.taken: list[int] = []
        """Numbers of the blocks for the batch being made."""

    def take(self, num_bytes: int) -> torch.UntypedStorage:
        """Return a block of at least this size that nobody reads; a fresh one if there is none."""
        free = [number for number in range(len(self.blocks)) if not self.lent[number]]
        number = next((number for number in free if self.blocks[number].nbytes() >= num_bytes), None)
        if number is None:
            block = _fresh(_with_room(num_bytes))
            if free:
                number = free[0]
                self.blocks[number] = block
            elif len(self.blocks) < MAX_BLOCKS:
                number = len(self.blocks)
                self.blocks.append(block)
            else:
                return block
        self.lent[number] = 1
        self.taken.append(number)
        return self.blocks[number]

    def loan(self) -> Loan:
        """Return the blocks taken since the last call."""
        numbers, self.taken = self.taken, []
        return Loan(self.lent, numbers)


_of_this_process: Blocks | None = None


def keep_blocks() -> None:
    """Make this worker reuse its shared memory from now on; each of its batches then has a loan to be given back."""
    global _of_this_process
    _of_this_process = Blocks()


def empty(num_rows: int, num_samples: int, dtype: torch.dtype = torch.float32) -> Tensor:
    """Return (B, N) uninitialised; in a worker it lies in shared memory, which saves a copy to the trainer."""
    if get_worker_info() is None:
        return torch.empty(num_rows, num_samples, dtype=dtype)
    num_bytes = dtype.itemsize * num_rows * num_samples
    block = _fresh(num_bytes) if _of_this_process is None else _of_this_process.take(num_bytes)
    return torch.tensor([], dtype=dtype).set_(block, 0, (num_rows, num_samples))  # type: ignore[call-overload,no-any-return]


def loan() -> Loan | None:
    """Return the loan of what `empty` gave since the last call; None where memory is not reused."""
    return None if _of_this_process is None else _of_this_process.loan()


def _with_room(num_bytes: int) -> int:
    """Round up by at most an eighth: the next batches are slightly longer or shorter."""
    step = max(4096, 1 << max(num_bytes.bit_length() - 4, 0))
    return -(-num_bytes // step) * step


def _fresh(num_bytes: int) -> torch.UntypedStorage:
    block: torch.UntypedStorage = torch.UntypedStorage._new_shared(num_bytes)
    return block
