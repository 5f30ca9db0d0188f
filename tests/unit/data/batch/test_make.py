from __future__ import annotations

import pickle
import tarfile
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from nest_ssl.data import build_loader
from nest_ssl.data.batch.collate import AudioNoiseBatch
from nest_ssl.data.batch.make import Readers
from tests.helpers import blocking, fifo_that_is_not_opened
from tests.unit.data.corpus import NEEDS_LHOTSE, Corpus, make_corpus, write_manifest

FIELDS = ("audio", "audio_len", "noise", "noise_len", "noisy_audio")


@pytest.fixture
def threads() -> Iterator[Callable[[int], None]]:
    before = torch.get_num_threads()
    yield torch.set_num_threads
    torch.set_num_threads(before)


@pytest.mark.parametrize("num_threads", [1, 3])
def test_results_come_in_order_and_threads_are_used(threads: Callable[[int], None], num_threads: int) -> None:
    threads(num_threads)
    meet = threading.Barrier(num_threads, timeout=20)

    def work(item: int) -> tuple[int, str]:
        meet.wait()  # as many at once as there may be
        return item, threading.current_thread().name

    results = Readers().map(work, range(6))
    assert [item for item, _ in results] == list(range(6))
    assert len({name for _, name in results}) == num_threads


def test_an_error_is_raised_when_all_have_ended(threads: Callable[[int], None]) -> None:
    threads(2)
    first_failed, ended = threading.Event(), []

    def work(item: int) -> None:
        if item == 0:
            first_failed.set()
            raise KeyError("item 0")
        first_failed.wait(20)
        ended.append(item)

    with pytest.raises(KeyError, match="item 0"):
        Readers().map(work, range(5))
    assert sorted(ended) == [1, 2, 3, 4]


def test_the_file_that_does_not_end_is_the_one_named(threads: Callable[[int], None]) -> None:
    threads(3)
    named: list[str] = []
    readers = Readers(named.append)
    others_are_done = threading.Event()
    left = list(range(1, 8))

    def work(item: int) -> str:
        readers.reading(f"file {item}")
        if item == 0:
            assert others_are_done.wait(20)
            return named[-1]
        left.remove(item)
        if not left:
            threading.Timer(0.2, others_are_done.set).start()
        return ""

    assert readers.map(work, range(8))[0] == "file 0"
    assert set(named) == {f"file {item}" for item in range(8)}
    readers.map(readers.reading, ["later"])
    assert named[-1] == "later", "what was read before is forgotten"


def test_a_file_that_blocks_does_so_before_soundfile_locks_the_others_out(
    tmp_path: Path, threads: Callable[[int], None]
) -> None:
    threads(2)
    blocks = tmp_path / "blocks.wav"
    blocks.touch()
    readers, begun, seen = Readers(lambda path: None), [], []

    def work(path: str) -> None:
        readers.reading(path)
        begun.append(path)

    def read_all() -> None:
        readers.map(work, [str(blocks), "no file"])

    with blocking(blocks):
        reads = threading.Thread(target=read_all)
        reads.start()
        reads.join(0.3)
        seen.extend(begun)
    reads.join()
    assert seen == ["no file"]
    assert begun == ["no file", str(blocks)]


@pytest.mark.parametrize("num_threads", [1, 3])
def test_a_fifo_is_a_bad_file_and_does_not_block(
    tmp_path: Path, threads: Callable[[int], None], num_threads: int
) -> None:
    threads(num_threads)
    corpus = make_corpus(tmp_path / "data", num_speech=6)
    fifo = corpus.folder / "speech_3.wav"
    fifo.unlink()
    loader = build_loader(corpus.config(num_workers=0, max_bad_fraction=1.0), on_read=lambda path: None)
    with fifo_that_is_not_opened(fifo):
        assert len(list(loader)) > 0
    assert list(loader.bad_data.files) == [str(fifo)]


def test_what_may_not_be_read_is_not_taken_for_being_read(threads: Callable[[int], None]) -> None:
    threads(1)
    named: list[str] = []

    def on_read(path: str) -> None:
        if path == "bad":
            raise ValueError(path)
        named.append(path)

    readers = Readers(on_read)
    with pytest.raises(ValueError, match="bad"):
        readers.map(readers.reading, ["bad"])
    readers.map(readers.reading, ["good"])
    assert named == ["good"]


def test_readers_travel_to_other_processes() -> None:
    copy = pickle.loads(pickle.dumps(Readers(print)))
    assert copy.on_read is print


def in_shards(corpus: Corpus, folder: Path) -> dict[str, Any]:
    """The corpus in two tar files."""
    lines = [{"audio_filepath": f"speech_{i}.wav", "duration": s} for i, s in enumerate(corpus.durations_s)]
    tars, manifests = [], []
    for shard in range(2):
        tars.append(str(folder / f"audio_{shard}.tar"))
        with tarfile.open(tars[-1], "w") as tar:
            for line in lines[shard::2]:
                tar.add(corpus.folder / str(line["audio_filepath"]), str(line["audio_filepath"]))
        manifests.append(str(write_manifest(folder / f"shard_{shard}.json", lines[shard::2])))
    return {"is_tarred": True, "manifest_filepath": manifests, "tarred_audio_filepaths": tars}


def batches(corpus: Corpus, **settings: Any) -> list[AudioNoiseBatch]:
    return list(build_loader(corpus.config(**settings, max_bad_fraction=1.0), seed=3))


@pytest.mark.parametrize("kind", ["files", "shards", pytest.param("lhotse", marks=NEEDS_LHOTSE)])
@pytest.mark.parametrize("broken", [False, True])
def test_batches_do_not_depend_on_the_number_of_threads(
    tmp_path: Path, threads: Callable[[int], None], kind: str, broken: bool
) -> None:
    corpus = make_corpus(tmp_path)
    if broken:
        for name in ("speech_2.wav", "speech_5.wav", "speech_11.wav", "noise_1.wav"):
            (corpus.folder / name).write_bytes(b"not audio")
    settings: dict[str, Any] = {"batch_size": 8}
    if kind == "shards":
        settings |= in_shards(corpus, tmp_path)
    if kind == "lhotse":
        settings = {"use_lhotse": True, "batch_duration": 2.0}
    threads(1)
    expected = batches(corpus, **settings)
    threads(4)
    found = batches(corpus, **settings)
    assert len(found) == len(expected)
    for one, other in zip(found, expected, strict=True):
        assert one.sample_id == other.sample_id
        assert one.bad_files == other.bad_files
        for name in FIELDS:
            assert torch.equal(getattr(one, name), getattr(other, name)), name
    assert any(batch.bad_files for batch in found) == broken
