from __future__ import annotations

import json
import logging
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import soundfile
import torch

from nest_ssl.data import AudioNoiseBatch, BadDataError, BadDataLog, BadFile, build_loader
from tests.unit.data.corpus import RATE, Corpus, make_corpus, write_manifest

pytestmark = pytest.mark.filterwarnings("ignore:This DataLoader will create:UserWarning")


def break_files(corpus: Corpus) -> dict[str, str]:
    """Four kinds of bad files, and a word of the reason that each must be given."""
    folder = corpus.folder
    (folder / "speech_1.wav").unlink()
    (folder / "speech_5.wav").write_bytes(b"")
    whole = (folder / "speech_9.wav").read_bytes()
    (folder / "speech_9.wav").write_bytes(whole[: len(whole) // 2])
    poisoned = np.full(RATE // 2, np.nan, np.float32)
    soundfile.write(folder / "speech_13.wav", poisoned, RATE, subtype="FLOAT")
    words = {1: "No such file", 5: "empty", 9: "truncated", 13: "NaN"}
    return {str(folder / f"speech_{i}.wav"): word for i, word in words.items()}


@pytest.fixture
def broken(tmp_path: Path) -> tuple[Corpus, dict[str, str]]:
    corpus = make_corpus(tmp_path / "data")
    return corpus, break_files(corpus)


def read(corpus: Corpus, path: Path | None = None, **changed: Any) -> tuple[list[AudioNoiseBatch], BadDataLog]:
    loader = build_loader(corpus.config(max_bad_fraction=0.5, **changed), seed=3, bad_files_path=path)
    return list(loader), loader.bad_data


def test_bad_files_are_named_with_the_reason_in_the_runs_file_and_in_the_log(
    broken: tuple[Corpus, dict[str, str]], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    corpus, reasons = broken
    path = tmp_path / "run" / "bad_files.jsonl"
    with caplog.at_level(logging.WARNING):
        _, log = read(corpus, path)
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    assert {line["audio_filepath"] for line in lines} == set(reasons)
    for line in lines:
        assert line["kind"] == "speech"
        assert reasons[line["audio_filepath"]] in line["reason"]
        assert line["audio_filepath"] in log.summary()
        assert line["audio_filepath"] in caplog.text
    assert "4 of 22 utterances of epoch 0 replaced" in log.summary()


@pytest.mark.parametrize("num_workers", [0, 2])
def test_bad_files_do_not_change_the_batches_around_them(tmp_path: Path, num_workers: int) -> None:
    corpus = make_corpus(tmp_path / "data")
    good, _ = read(corpus, batch_augmentor=None, num_workers=num_workers)
    bad_paths = break_files(corpus)
    found, _ = read(corpus, batch_augmentor=None, num_workers=num_workers)
    assert len(found) == len(good)
    num_replaced = 0
    for a, b in zip(good, found, strict=True):
        assert a.audio is not None
        assert b.audio is not None
        assert len(a.audio_filepaths) == len(b.audio_filepaths)
        for i, (name, new) in enumerate(zip(a.audio_filepaths, b.audio_filepaths, strict=True)):
            if name in bad_paths:
                assert new not in bad_paths
                num_replaced += 1
            else:
                assert new == name
                length = int(a.audio_len[i])  # type: ignore[index]
                assert torch.equal(a.noisy_audio[i, :length], b.noisy_audio[i, :length])  # type: ignore[index]
    assert num_replaced == 4


def test_replacements_are_the_next_of_the_plan_and_the_same_every_time(broken: tuple[Corpus, dict[str, str]]) -> None:
    corpus, bad_paths = broken
    loader = build_loader(corpus.config(max_bad_fraction=0.5), seed=3)
    planned = [(spec.indices.tolist(), spec.spares.tolist()) for spec in loader.batches]
    bad = {int(Path(path).stem.split("_")[1]) for path in bad_paths}
    for batch, (indices, spares) in zip(loader, planned, strict=True):
        good_spares = iter([i for i in spares if i not in bad])
        expected = [next(good_spares) if i in bad else i for i in indices]
        assert batch.sample_id == [str(i) for i in expected]


def test_the_number_of_batches_is_the_same_on_ranks_with_and_without_bad_files(tmp_path: Path) -> None:
    corpus = make_corpus(tmp_path / "data")
    for i in range(1, 22, 2):  # unshuffled batches of 1: rank 1 of 2 meets only bad files
        (corpus.folder / f"speech_{i}.wav").write_bytes(b"junk")
    config = corpus.config(shuffle=False, batch_size=1, max_bad_fraction=1.0)
    counts = [len(list(build_loader(config, rank=rank, world_size=2))) for rank in (0, 1)]
    assert counts == [11, 11]


def test_too_many_bad_files_stop_the_run_with_a_way_out(broken: tuple[Corpus, dict[str, str]], tmp_path: Path) -> None:
    corpus, _ = broken
    path = tmp_path / "bad.jsonl"
    loader = build_loader(corpus.config(), seed=3, bad_files_path=path)
    with pytest.raises(BadDataError) as error:
        list(loader)
    message = str(error.value)
    for part in ("1 of 22 utterances", "max_bad_fraction = 1.00%", "nest-ssl prepare", str(path), "speech_"):
        assert part in message


def test_exactly_the_allowed_share_goes_on(broken: tuple[Corpus, dict[str, str]]) -> None:
    corpus, _ = broken
    list(build_loader(corpus.config(max_bad_fraction=4 / 22), seed=3))
    with pytest.raises(BadDataError, match="4 of 22"):
        list(build_loader(corpus.config(max_bad_fraction=3.9 / 22), seed=3))


def test_a_share_is_counted_per_epoch_and_survives_a_restart(broken: tuple[Corpus, dict[str, str]]) -> None:
    corpus, _ = broken
    config = corpus.config(max_bad_fraction=4 / 22)
    loader = build_loader(config, seed=3)
    for epoch in range(3):
        loader.set_epoch(epoch)
        list(loader)
    stopped = build_loader(config, seed=3)
    iterator = iter(stopped)
    while stopped.bad_data.num_bad["speech"] < 2:
        next(iterator)
    resumed = build_loader(corpus.config(max_bad_fraction=3.9 / 22), seed=3)
    resumed.resume(stopped.position())
    with pytest.raises(BadDataError, match="4 of 22"):
        list(resumed)


def test_when_no_neighbour_can_be_read_the_error_names_them(tmp_path: Path) -> None:
    corpus = make_corpus(tmp_path / "data")
    for file in corpus.folder.glob("speech_*.wav"):
        file.write_bytes(b"junk")
    with pytest.raises(BadDataError, match="none of these neighbours"):
        list(build_loader(corpus.config(max_bad_fraction=1.0)))


def test_bad_noise_is_drawn_again_counted_and_named(tmp_path: Path) -> None:
    corpus = make_corpus(tmp_path / "data")
    (corpus.folder / "noise_0.wav").write_bytes(b"junk")
    loader = build_loader(corpus.config(), seed=3)
    batches = list(loader)
    assert all(batch.noise is not None and batch.noise.any() for batch in batches)
    assert loader.bad_data.num_bad["noise"] > 0
    assert loader.bad_data.num_bad["speech"] == 0
    assert str(corpus.folder / "noise_0.wav") in loader.bad_data.summary()


def test_utterances_without_any_noise_are_counted_and_too_many_of_them_stop_the_run(tmp_path: Path) -> None:
    corpus = make_corpus(tmp_path / "data")
    for file in corpus.folder.glob("noise_*.wav"):
        file.unlink()
    loader = build_loader(corpus.config(max_bad_fraction=1.0, batch_augmentor=None))
    batches = list(loader)
    assert loader.bad_data.num_bad["no-noise"] == 22
    assert not any(batch.noise is not None and batch.noise.any() for batch in batches)
    with pytest.raises(BadDataError, match="found no noise that could be read"):
        list(build_loader(corpus.config()))


def test_a_run_without_bad_files_says_nothing_and_writes_nothing(corpus: Corpus, tmp_path: Path) -> None:
    _, log = read(corpus, tmp_path / "bad.jsonl")
    assert log.summary() == ""
    assert not (tmp_path / "bad.jsonl").exists()


def test_without_a_known_epoch_the_share_is_of_what_was_read() -> None:
    log = BadDataLog(max_bad_fraction=0.01, utterances_per_epoch=None)
    bad = [BadFile("speech", f"{i}.wav", "junk", 0, 0, 0) for i in range(10)]
    log.record(10, bad)
    with pytest.raises(BadDataError, match="11 of 1,000"):
        log.record(1, [BadFile("speech", "x.wav", "junk", 0, 0, 0)])


def test_a_wrong_duration_in_the_manifest_is_a_bad_utterance(tmp_path: Path) -> None:
    corpus = make_corpus(tmp_path / "data")
    lines = [{"audio_filepath": f"speech_{i}.wav", "duration": 0.1} for i in range(5)]
    lines[2]["duration"] = 30.0
    manifest = write_manifest(corpus.folder / "wrong.jsonl", lines)
    _, log = read(corpus, manifest_filepath=str(manifest), batch_size=5)
    assert "truncated" in log.summary()
    assert list(log.files) == [str(corpus.folder / "speech_2.wav")]
