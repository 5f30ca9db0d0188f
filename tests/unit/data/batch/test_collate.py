"""Padded batches, and the shared memory of workers that is reused."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import soundfile
import torch

from nest_ssl.config import DatasetConfig
from nest_ssl.data import AudioNoiseBatch, build_loader
from nest_ssl.data.batch.collate import MAX_BLOCKS, Blocks, Loan, needed, pack_rows
from nest_ssl.data.batch.loader import PlannedLoader, _start_worker
from tests.unit.data.corpus import RATE, Corpus, write_manifest

pytestmark = pytest.mark.filterwarnings("ignore:This DataLoader will create:UserWarning")


def test_a_block_is_reused_only_after_it_was_given_back() -> None:
    blocks = Blocks()
    first, loan = blocks.take(1000), blocks.loan()
    assert loan.numbers == [0]
    second, other = blocks.take(1000), blocks.loan()
    assert second.data_ptr() != first.data_ptr()
    loan.give_back()
    assert blocks.take(900).data_ptr() == first.data_ptr()
    assert blocks.loan().numbers == [0]
    other.give_back()
    assert blocks.take(1024).data_ptr() == second.data_ptr(), "sizes are rounded up"


@pytest.mark.parametrize("num_bytes", [1, 4096, 4097, 64 * 256_000 * 4, 64 * 272_123 * 4])
def test_a_block_has_little_more_room_than_it_needs(num_bytes: int) -> None:
    assert num_bytes <= Blocks().take(num_bytes).nbytes() <= max(num_bytes + 4095, num_bytes * 9 / 8)


def test_a_block_that_is_too_small_makes_room_for_a_larger_one() -> None:
    blocks = Blocks()
    blocks.take(1000)
    blocks.loan().give_back()
    assert blocks.take(5000).nbytes() >= 5000
    assert blocks.loan().numbers == [0]
    assert len(blocks.blocks) == 1


def test_when_nothing_is_given_back_memory_is_fresh() -> None:
    blocks = Blocks()
    taken = [blocks.take(100) for _ in range(MAX_BLOCKS + 3)]
    assert len({block.data_ptr() for block in taken}) == len(taken)
    assert blocks.loan().numbers == list(range(MAX_BLOCKS))


def loader_that_keeps_blocks(corpus: Corpus, num_workers: int) -> PlannedLoader:
    loader = build_loader(corpus.config(num_workers=num_workers, persistent_workers=True), seed=3, mix=False)
    loader.worker_init_fn = partial(_start_worker, True)  # as with pinned memory, which needs a GPU
    return loader


def copied(batch: AudioNoiseBatch) -> AudioNoiseBatch:
    return batch._with_tensors(torch.Tensor.clone)


@pytest.fixture
def _pinning_is_copying(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.Tensor, "pin_memory", torch.Tensor.clone)


@pytest.mark.usefixtures("_pinning_is_copying")
def test_batches_in_reused_memory_are_the_same(corpus: Corpus) -> None:
    def epochs(loader: PlannedLoader) -> Iterator[AudioNoiseBatch]:
        for epoch in range(4):
            loader.set_epoch(epoch)
            yield from loader

    expected = list(map(copied, epochs(build_loader(corpus.config(), seed=3, mix=False))))
    numbers, pinned = set(), []
    for batch in epochs(loader_that_keeps_blocks(corpus, num_workers=1)):
        assert isinstance(batch.loan, Loan)
        numbers |= set(batch.loan.numbers)
        pinned.append(batch.pin_memory())
        assert pinned[-1].loan is None
    assert len(pinned) == len(expected) > 2 * len(numbers), "so blocks were used several times"
    for ours, theirs in zip(pinned, expected, strict=True):
        for name in ("audio", "audio_len", "noise", "noise_len"):
            assert torch.equal(getattr(ours, name), getattr(theirs, name)), name


def test_batches_that_are_kept_are_not_written_over(corpus: Corpus) -> None:
    expected = list(map(copied, build_loader(corpus.config(), seed=3, mix=False)))
    kept = list(loader_that_keeps_blocks(corpus, num_workers=2))
    for ours, theirs in zip(kept, expected, strict=True):
        assert ours.noise is not None
        assert theirs.noise is not None
        assert torch.equal(ours.noise, theirs.noise)


def test_without_pinned_memory_there_is_no_loan(corpus: Corpus) -> None:
    for num_workers in (0, 1):
        config = replace(corpus.config(num_workers=num_workers), pin_memory=False)
        assert next(iter(build_loader(config))).loan is None


# ---- 16-bit audio ----


def soft_steps(num_samples: int, seed: int = 0) -> np.ndarray[Any, np.dtype[np.int16]]:
    """16-bit samples with both ends of the range."""
    samples = np.random.default_rng(seed).integers(-32768, 32768, num_samples).astype(np.int16)
    samples[:2] = -32768, 32767
    return samples


@pytest.mark.parametrize("suffix", ["wav", "flac"])
def test_sixteen_bit_files_travel_as_int16_and_become_what_the_decoder_returns(tmp_path: Path, suffix: str) -> None:
    lines = []
    for number, num_samples in enumerate((4000, 2500, 800)):  # the last is repeated to 0.1 s
        soundfile.write(tmp_path / f"{number}.{suffix}", soft_steps(num_samples, number), RATE, subtype="PCM_16")
        lines.append({"audio_filepath": f"{number}.{suffix}", "duration": num_samples / RATE})
    manifest = write_manifest(tmp_path / "m.jsonl", lines)
    config = DatasetConfig(manifest_filepath=str(manifest), batch_size=3, min_audio_len_secs=0.1)
    (mixed,) = build_loader(config)
    assert needed(mixed.audio).dtype == torch.float32
    for num_workers in (0, 1):
        (batch,) = build_loader(replace(config, num_workers=num_workers), mix=False)
        assert needed(batch.audio).dtype == torch.int16
        assert needed(batch.noise).dtype == torch.float32
        expected, _ = soundfile.read(tmp_path / f"0.{suffix}", dtype="float32")
        for arrived in (batch.to("cpu"), batch.mixed()):
            assert torch.equal(needed(arrived.audio)[0], torch.from_numpy(expected))
            assert torch.equal(needed(arrived.audio), needed(mixed.audio))


def test_a_row_that_is_not_sixteen_bit_makes_the_batch_float32(tmp_path: Path) -> None:
    soundfile.write(tmp_path / "0.wav", soft_steps(3000), RATE, subtype="PCM_16")
    soundfile.write(tmp_path / "1.wav", 0.1 * np.random.default_rng(0).standard_normal(2000), RATE, subtype="PCM_24")
    lines = [{"audio_filepath": f"{i}.wav", "duration": n / RATE} for i, n in enumerate((3000, 2000))]
    manifest = write_manifest(tmp_path / "m.jsonl", lines)
    (batch,) = build_loader(
        DatasetConfig(manifest_filepath=str(manifest), batch_size=2, min_audio_len_secs=0.1), mix=False
    )
    assert needed(batch.audio).dtype == torch.float32
    for i in range(2):
        samples, _ = soundfile.read(tmp_path / f"{i}.wav", dtype="float32")
        assert torch.equal(needed(batch.audio)[i, : len(samples)], torch.from_numpy(samples))


@pytest.mark.parametrize("value", [1.0, 1e9, -1.5, 0.5 / 32768])
def test_samples_outside_of_sixteen_bits_are_never_packed(value: float) -> None:
    row = np.zeros(1000, np.float32)
    assert pack_rows([row], 1200) is not None
    row[-1] = value  # after what is tried first
    assert pack_rows([row], 1200) is None


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_int16_batches_in_pinned_memory_are_the_same_float32_on_the_gpu(corpus: Corpus) -> None:
    config = corpus.config(num_workers=2, pin_memory=True)
    expected = list(build_loader(corpus.config(), seed=3))
    for batch, mixed in zip(build_loader(config, seed=3, mix=False), expected, strict=True):
        assert needed(batch.audio).dtype == torch.int16
        assert needed(batch.audio).is_pinned()
        arrived = batch.to("cuda", non_blocking=True).mixed()
        assert torch.equal(needed(arrived.audio).cpu(), needed(mixed.audio))
        assert torch.equal(needed(arrived.noisy_audio).cpu(), needed(mixed.noisy_audio))
