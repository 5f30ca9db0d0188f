"""Padded batches, and the shared memory of workers that is reused."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import pytest
import torch

from nest_ssl.data import AudioNoiseBatch, build_loader
from nest_ssl.data.batch.collate import MAX_BLOCKS, Blocks, Loan, keep_blocks
from nest_ssl.data.batch.loader import PlannedLoader
from tests.unit.data.corpus import Corpus

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
    loader.worker_init_fn = keep_blocks  # what loaders with pinned memory do, which need a GPU
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
