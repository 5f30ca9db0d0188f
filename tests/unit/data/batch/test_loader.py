from __future__ import annotations

import errno
import json
import logging
import multiprocessing.process
import os
import pickle
import re
import shutil
import subprocess
import sys
import tempfile
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import soundfile
import torch

from nest_ssl.audio import AudioError
from nest_ssl.config import DatasetConfig
from nest_ssl.data import AudioNoiseBatch, BadDataError, BadDataLog, BadFile, Source, Speech, build_loader
from nest_ssl.data.batch import collate
from nest_ssl.data.batch import loader as loader_module
from nest_ssl.data.batch.collate import needed
from nest_ssl.data.batch.loader import IN_SUMMARY, PlannedLoader, Prefetch
from nest_ssl.data.manifest.lines import parse_lines
from tests.unit.data.corpus import NEEDS_LHOTSE, RATE, Corpus, assert_same, make_corpus, write_manifest

pytestmark = pytest.mark.filterwarnings("ignore:This DataLoader will create:UserWarning")


def two_epochs(config: DatasetConfig, **more: Any) -> list[AudioNoiseBatch]:
    loader = build_loader(config, seed=3, **more)
    out = []
    for epoch in range(2):
        loader.set_epoch(epoch)
        out += list(loader)
    return out


KINDS: dict[str, dict[str, Any]] = {
    "plain": {},
    "buckets": {"use_bucketing": True, "num_buckets": 3, "batch_duration": 1.0},
    "lhotse": {"use_lhotse": True, "use_bucketing": True, "num_buckets": 2, "batch_duration": 1.0},
}
PARAMS = ["plain", "buckets", pytest.param("lhotse", marks=NEEDS_LHOTSE)]


@pytest.mark.parametrize("kind", PARAMS)
@pytest.mark.parametrize("augmentor", [None, "default"])
def test_noise_that_is_added_later_makes_the_same_noisy_audio(corpus: Corpus, kind: str, augmentor: str | None) -> None:
    config = corpus.config(**KINDS[kind])
    config = replace(config, batch_augmentor=None) if augmentor is None else config
    for num_workers in (0, 1):
        config = replace(config, num_workers=num_workers)
        for a, b in zip(two_epochs(config), two_epochs(config, mix=False), strict=True):
            assert b.noisy_audio is None
            later = b.mixed()
            assert later.noise is later.noise_len is None
            assert_same(a, replace(later, noise=a.noise, noise_len=a.noise_len))
            assert a.mixed() is a


@pytest.mark.parametrize("kind", PARAMS)
def test_two_epochs_with_0_1_and_4_workers_give_the_same_batches(corpus: Corpus, kind: str) -> None:
    config = corpus.config(**KINDS[kind])
    reference = two_epochs(config)
    first, second = reference[: len(reference) // 2], reference[len(reference) // 2 :]
    assert [batch.sample_id for batch in first] != [batch.sample_id for batch in second], "epochs differ"
    for num_workers in (1, 4):
        found = two_epochs(replace(config, num_workers=num_workers, persistent_workers=True, prefetch_factor=3))
        assert len(found) == len(reference)
        for a, b in zip(reference, found, strict=True):
            assert_same(a, b)


@pytest.mark.parametrize("num_workers", [0, 2])
@pytest.mark.parametrize("kind", PARAMS)
def test_restarting_at_batch_k_gives_batch_k(corpus: Corpus, kind: str, num_workers: int) -> None:
    config = corpus.config(**KINDS[kind], num_workers=num_workers)
    loader = build_loader(config, seed=3)
    loader.set_epoch(1)
    whole = list(loader)
    for k in (1, 3):
        stopped = build_loader(config, seed=3)
        stopped.set_epoch(1)
        for _, _batch in zip(range(k), stopped, strict=False):
            pass
        state = pickle.loads(pickle.dumps(stopped.position()))
        resumed = build_loader(config, seed=3)
        resumed.resume(state)
        resumed.set_epoch(1)  # as Lightning does when it resumes
        rest = list(resumed)
        assert len(rest) == len(whole) - k
        for a, b in zip(whole[k:], rest, strict=True):
            assert_same(a, b)
        assert len(list(resumed)) == len(whole), "the next iteration starts from the beginning"


def test_the_state_of_another_plan_is_refused(corpus: Corpus) -> None:
    state = build_loader(corpus.config(), seed=3).position()
    for other in (build_loader(corpus.config(), seed=4), build_loader(corpus.config(), seed=3, world_size=2)):
        with pytest.raises(ValueError, match="another batch plan"):
            other.resume(state)


@pytest.mark.parametrize("drop_last", [True, False])
@pytest.mark.parametrize("kind", ["plain", "buckets"])
def test_the_ranks_together_read_what_one_rank_reads(corpus: Corpus, kind: str, drop_last: bool) -> None:
    config = corpus.config(**KINDS[kind], drop_last=drop_last)
    loaders = [build_loader(config, rank=rank, world_size=3, seed=3) for rank in range(3)]
    assert len({len(loader) for loader in loaders}) == 1
    assert len({loader.plan_hash for loader in loaders}) == 1
    batches = [list(loader) for loader in loaders]
    ids = [i for rank in batches for batch in rank for i in batch.sample_id or []]
    if drop_last:
        assert len(ids) == len(set(ids))
    else:
        assert {int(i) for i in ids} == set(range(22))


def test_a_batch_is_padded_with_zeros_and_noisy_is_audio_plus_noise(corpus: Corpus) -> None:
    (batch, *_) = build_loader(corpus.config(batch_size=22, batch_augmentor=None))
    assert batch.audio is not None
    assert batch.audio_len is not None
    assert batch.noise is not None
    assert batch.audio.shape == (22, int(batch.audio_len.max()))
    for name, row, length in zip(batch.audio_filepaths, batch.audio, batch.audio_len, strict=True):
        expected, _ = soundfile.read(name, dtype="float32")
        assert torch.equal(row[:length], torch.from_numpy(expected))
        assert not row[length:].any()
    assert batch.noise.any(dim=1).all()
    assert torch.equal(batch.noisy_audio, batch.audio + batch.noise)  # type: ignore[arg-type]


def test_without_a_noise_manifest_the_noise_is_zeros(corpus: Corpus) -> None:
    (batch, *_) = build_loader(corpus.config(noise_manifest=None, batch_augmentor=None))
    assert batch.noise is not None
    assert not batch.noise.any()
    assert torch.equal(batch.noise_len, batch.audio_len)  # type: ignore[arg-type]


def test_epochs_differ_but_validation_can_repeat_itself(corpus: Corpus) -> None:
    for same in (False, True):
        loader = build_loader(corpus.config(shuffle=False), seed=3, same_every_epoch=same)
        first = list(loader)
        loader.set_epoch(1)
        second = list(loader)
        assert [b.sample_id for b in first] == [b.sample_id for b in second]
        pairs = zip(first, second, strict=True)
        equal = all(torch.equal(a.noisy_audio, b.noisy_audio) for a, b in pairs)  # type: ignore[arg-type]
        assert equal == same


def test_the_bank_does_not_change_the_batches(corpus: Corpus) -> None:
    for a, b in zip(two_epochs(corpus.config()), two_epochs(corpus.config(noise_bank_gb=0.1)), strict=True):
        assert_same(a, b)


def test_short_audio_is_padded_to_the_least_length(corpus: Corpus) -> None:
    (batch, *_) = build_loader(corpus.config(min_audio_len_secs=0.5, pad_audio_mode="zero"))
    assert batch.audio_len is not None
    assert batch.audio_len.tolist() == [RATE // 2] * 4


@pytest.mark.parametrize("kind", PARAMS)
def test_what_workers_run_can_be_sent_to_a_new_interpreter(corpus: Corpus, kind: str) -> None:
    loader = build_loader(corpus.config(**KINDS[kind]), seed=3)
    (spec, *_) = loader.batches
    sent, spec_sent = pickle.loads(pickle.dumps((loader.dataset, spec)))
    assert_same(sent[spec_sent], loader.dataset[spec])


def test_a_caller_that_reads_ahead_can_say_where_to_resume(corpus: Corpus) -> None:
    loader = build_loader(corpus.config(), seed=3)
    whole = list(loader)
    resumed = build_loader(corpus.config(), seed=3)
    resumed.resume(loader.position(next_batch=2))
    for a, b in zip(whole[2:], resumed, strict=True):
        assert_same(a, b)


@pytest.mark.parametrize("kind", PARAMS[::2])
def test_every_file_is_announced_before_it_is_read(corpus: Corpus, kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch, "get_num_threads", lambda: 1)  # several: test_threads.py
    announced: list[str] = []
    loader = build_loader(corpus.config(**KINDS[kind], batch_augmentor=None), on_read=announced.append)
    read = [name for batch in loader for name in batch.audio_filepaths]
    speech = [name for name in announced if "speech_" in name]
    assert speech == read
    assert len(announced) == 2 * len(read), "each utterance and its noise"


def test_importing_the_package_does_not_import_lhotse_or_webdataset() -> None:
    code = "import sys, nest_ssl.data; print([m for m in ('lhotse', 'webdataset', 'lightning') if m in sys.modules])"
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert result.stdout.strip() == "[]"


def resident_bytes() -> int:
    """Of this process and its children, memory shared between them counted once.

    Without pages of files: libraries count for less while other programs use them, and for more when these end.
    """
    total = 0
    own = os.getpid()
    for process in [own, *_children(own)]:
        for line in Path(f"/proc/{process}/smaps_rollup").read_text().splitlines():
            if line.startswith(("Pss_Anon:", "Pss_Shmem:")):
                total += 1024 * int(line.split()[1])
    return total


def _children(process: int) -> list[int]:
    text = Path(f"/proc/{process}/task/{process}/children").read_text()
    return [int(child) for child in text.split()]


@pytest.mark.skipif(not Path("/proc/self/smaps_rollup").exists(), reason="needs Linux 5.9's /proc")
def test_memory_stays_flat_over_twenty_epochs_with_workers(corpus: Corpus) -> None:
    config = corpus.config(num_workers=2, persistent_workers=True, batch_size=2, noise_bank_gb=0.001)
    loader = build_loader(config)
    after_epoch = []
    for epoch in range(23):
        loader.set_epoch(epoch)
        for _ in loader:
            pass
        after_epoch.append(resident_bytes())
    growth = np.polyfit(np.arange(20), after_epoch[3:], 1)[0]  # single epochs differ by 3 MB
    # Per epoch, after three in which allocators and imports settle. An epoch's batches hold 1.2 MB.
    assert growth < 4e5, [f"{size / 1e6:.1f} MB" for size in after_epoch]


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
        assert line["audio_filepath"] in caplog.text
    assert sum(line["audio_filepath"] in log.summary() for line in lines) == IN_SUMMARY < len(lines)
    assert f"all of them: {path}" in log.summary()
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


@pytest.fixture
def none_are_few(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(loader_module, "FEW", 0)


@pytest.mark.usefixtures("none_are_few")
def test_too_many_bad_files_stop_the_run_with_a_way_out(broken: tuple[Corpus, dict[str, str]], tmp_path: Path) -> None:
    corpus, _ = broken
    path = tmp_path / "bad.jsonl"
    loader = build_loader(corpus.config(), seed=3, bad_files_path=path)
    with pytest.raises(BadDataError) as error:
        list(loader)
    message = str(error.value)
    for part in ("1 of 22 utterances", "max_bad_fraction = 1.00%", "nest-ssl prepare", str(path), "speech_"):
        assert part in message
    assert "speech_" in message.splitlines()[0]  # which incident reports quote


@pytest.mark.usefixtures("none_are_few")
def test_exactly_the_allowed_share_does_not_stop_the_run(broken: tuple[Corpus, dict[str, str]]) -> None:
    corpus, _ = broken
    list(build_loader(corpus.config(max_bad_fraction=4 / 22), seed=3))
    with pytest.raises(BadDataError, match="4 of 22"):
        list(build_loader(corpus.config(max_bad_fraction=3.9 / 22), seed=3))


@pytest.mark.usefixtures("none_are_few")
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


def bad_files(num: int) -> list[BadFile]:
    return [BadFile("speech", f"{i}.wav", "junk", 0, 0, 0) for i in range(num)]


def test_a_few_bad_files_never_end_a_run_unless_none_is_allowed(broken: tuple[Corpus, dict[str, str]]) -> None:
    corpus, reasons = broken
    loader = build_loader(corpus.config(), seed=3)  # 4 of 22 are 18 %, and 1 % is allowed
    list(loader)
    assert set(loader.bad_data.files) == set(reasons)
    with pytest.raises(BadDataError, match="more than max_bad_fraction"):
        list(build_loader(corpus.config(max_bad_fraction=0.0), seed=3))


def test_bad_files_of_a_validation_are_replaced_and_reported_but_never_end_the_run(
    broken: tuple[Corpus, dict[str, str]], caplog: pytest.LogCaptureFixture
) -> None:
    corpus, _ = broken
    loader = build_loader(corpus.config(max_bad_fraction=0.0), seed=3, same_every_epoch=True)
    assert [len(list(loader)) for _ in range(2)] == [6, 6]
    warnings = [text for text in caplog.messages if "validation continues with other utterances" in text]
    assert len(warnings) == 1
    assert "more than max_bad_fraction" in warnings[0]


def logs_of_ranks(world_size: int, utterances_per_epoch: int) -> list[BadDataLog]:
    """Logs that share counters, as those of ranks do through their store."""
    shared: Counter[str] = Counter()

    def count(name: str, number: int) -> int:
        shared[name] += number
        return shared[name]

    logs = []
    for rank in range(world_size):
        log = BadDataLog(
            max_bad_fraction=0.01, utterances_per_epoch=utterances_per_epoch, rank=rank, world_size=world_size
        )
        log.count = count
        log.start_epoch(0)
        logs.append(log)
    return logs


def test_the_share_of_bad_files_is_that_of_all_ranks() -> None:
    logs = logs_of_ranks(64, 30)  # 1,920 utterances: 19 may be bad, on whichever rank
    logs[5].record(30, bad_files(15))
    for log in logs[6:10]:
        log.record(30, bad_files(1))
    with pytest.raises(BadDataError, match=r"20 of 1,920 utterances of epoch 0, on 64 ranks, could not be read"):
        logs[63].record(30, bad_files(1))
    for log in logs:
        log.start_epoch(1)
    logs[63].record(30, bad_files(1))  # every epoch counts from 0


def test_the_bad_files_of_all_ranks_survive_a_restart() -> None:
    before = logs_of_ranks(4, 500)
    for log in before[1:]:
        log.record(100, bad_files(6))
    state = before[0].state_dict()  # rank 0 writes the checkpoint
    after = logs_of_ranks(4, 500)
    for log in after:
        log.load_state_dict(state, 0)
    after[2].record(100, bad_files(2))
    with pytest.raises(BadDataError, match="21 of 2,000"):
        after[3].record(100, bad_files(1))


def test_when_no_neighbour_can_be_read_the_error_names_them(tmp_path: Path) -> None:
    corpus = make_corpus(tmp_path / "data")
    for file in corpus.folder.glob("speech_*.wav"):
        file.write_bytes(b"junk")
    with pytest.raises(BadDataError, match="none of these neighbours") as error:
        list(build_loader(corpus.config(max_bad_fraction=1.0)))
    assert len(str(error.value).splitlines()) == 6
    assert re.search(r"read: .*/speech_\d+\.wav: ", str(error.value).splitlines()[0])  # which incident reports quote
    assert re.fullmatch(r"  … and \d+ more", str(error.value).splitlines()[-1])


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


# ---- cropping and prefetching ----


class Longer(Source):
    """Utterances that last longer than stated, from number 6 on."""

    name = "longer"

    def __len__(self) -> int:
        return 8

    def read(self, index: int, on_read: Any = None) -> Speech:
        if index == 2:
            raise AudioError("2.raw", "broken")
        return Speech(str(index), f"{index}.raw", np.full(RATE + (2000 if index >= 6 else 0), 0.1, np.float32))

    def fingerprint(self) -> str:
        return "longer"

    @property
    def durations_s(self) -> Any:
        return np.ones(8, np.float32)


def test_audio_that_is_longer_than_planned_is_cropped_counted_and_named_once(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("nest_ssl.data.build._open_source", lambda config: [Longer()])
    config = DatasetConfig(batch_size=2, max_bad_fraction=1.0)
    config.source = "longer"
    for mix in (True, False):
        caplog.clear()
        loader = build_loader(config, mix=mix)
        batches = list(loader)
        planned = 16_160
        assert [batch.planned_samples for batch in batches] == [planned] * 4
        assert [batch.num_cropped for batch in batches] == [0, 0, 0, 2]
        last = batches[-1]
        assert needed(last.audio).shape == needed(last.noise).shape == (2, planned)
        assert needed(last.audio_len).tolist() == [planned, planned]
        assert needed(batches[0].audio).shape == (2, RATE), "padded to its own longest row only"
        assert "2 of 8 utterances of epoch 0 cropped, 6.raw first" in loader.bad_data.summary()
        assert sum("6.raw: longer than" in message for message in caplog.messages) == 1
    assert loader.bad_data.state_dict()["num_bad"] == {"speech": 1, "cropped": 2}


def test_a_stand_in_that_is_longer_than_its_step_is_cropped_and_not_blamed(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    corpus = make_corpus(tmp_path / "data")
    shortest = int(np.argmin(corpus.durations_s))
    (corpus.folder / f"speech_{shortest}.wav").write_bytes(b"junk")
    batches, _ = read(corpus, batch_size=1)
    (cropped,) = [batch for batch in batches if batch.num_cropped]
    assert needed(cropped.audio).shape[1] == cropped.planned_samples
    assert all(needed(batch.audio).shape[1] <= (batch.planned_samples or 0) for batch in batches)
    assert "longer than" not in caplog.text


@pytest.mark.parametrize(
    ("workers", "factor", "batch_gb", "bounded"),
    [
        (8, None, 0.25, (8, None)),  # 16 batches fit
        (8, None, 0.3, (8, 1)),
        (8, 4, 0.2, (8, 2)),
        (8, 4, 1.0, (4, 1)),
        (8, 1, 0.5, (8, 1)),
        (8, 2, 3.0, (1, 1)),
        (2, 3, 9.0, (1, 1)),  # one batch at least
    ],
)
def test_prefetching_is_bounded_by_fewer_batches_per_worker_and_then_by_fewer_workers(
    workers: int, factor: int | None, batch_gb: float, bounded: tuple[int, int | None]
) -> None:
    assert Prefetch(workers, factor).bounded(int(batch_gb * 1e9), 4e9) == Prefetch(*bounded)


@pytest.mark.parametrize("kind", PARAMS)
def test_a_loader_prefetches_no_more_than_its_share_of_memory_and_logs_what_it_lowered(
    corpus: Corpus, kind: str, caplog: pytest.LogCaptureFixture
) -> None:
    config = corpus.config(**KINDS[kind], num_workers=3, prefetch_factor=4)
    assert (build_loader(config).num_workers, build_loader(config).prefetch_factor) == (3, 4)
    with caplog.at_level(logging.INFO):
        loader = build_loader(replace(config, prefetch_gb=0.0008), mix=False)  # 4 to 8 batches of up to 0.2 MB
    assert loader.num_workers * (loader.prefetch_factor or 0) < 9
    assert sum("prefetch_factor" in message for message in caplog.messages) == 1
    with pytest.raises(ValueError, match="prefetch_gb: 0 is not greater than 0"):
        corpus.config(prefetch_gb=0)


class Refuses(torch.utils.data.Dataset[AudioNoiseBatch]):
    """Raises the error that it is made with, from nest_ssl's own code or from a foreign package's."""

    def __init__(self, path: str) -> None:
        self.path = path

    def __getitem__(self, _: Any) -> AudioNoiseBatch:
        if self.path == "foreign":
            json.loads("{")
        parse_lines(b"[]\n", self.path, 1)
        raise AssertionError


@pytest.mark.parametrize("num_workers", [0, 1])
def test_an_error_of_a_worker_arrives_as_its_message(corpus: Corpus, num_workers: int) -> None:
    sampler = build_loader(corpus.config(), seed=3).batches
    loader = PlannedLoader(Refuses("m.jsonl"), sampler, max_bad_fraction=0.0, num_workers=num_workers)
    with pytest.raises(ValueError, match=r"^m.jsonl:1: a JSON list instead of an object") as raised:
        next(iter(loader))
    assert "Traceback" not in str(raised.value)
    assert num_workers == 0 or "Traceback" in str(raised.value.__cause__)  # for --verbose


class CannotBeSent:
    """A value that fails where a worker's queue sends it: in a thread."""

    def __init__(self, error: Exception) -> None:
        self.error = error

    def __reduce__(self) -> Any:
        raise self.error


class Unsendable(torch.utils.data.Dataset[Any]):
    def __init__(self, error: Exception) -> None:
        self.error = error

    def __getitem__(self, _: Any) -> Any:
        return CannotBeSent(self.error)


@pytest.mark.parametrize(
    ("error", "message"),
    [
        (OSError(errno.EACCES, "Permission denied", "/tmp/pymp-1"), r"^\[Errno 13\] Permission denied: '/tmp/pymp-1'$"),
        (OSError(errno.EMFILE, os.strerror(errno.EMFILE)), "^too many open files: .* 'ulimit -n 4096'"),
    ],
)
def test_a_batch_that_a_worker_cannot_pass_on_arrives_as_its_error(
    corpus: Corpus, error: Exception, message: str
) -> None:
    sampler = build_loader(corpus.config(), seed=3).batches
    loader = PlannedLoader(Unsendable(error), sampler, max_bad_fraction=0.0, num_workers=1)
    loader.timeout = 30  # where its error is only printed
    with pytest.raises(OSError, match=message):
        next(iter(loader))


def test_an_error_of_another_package_in_a_worker_keeps_its_traceback(corpus: Corpus) -> None:
    sampler = build_loader(corpus.config(), seed=3).batches
    loader = PlannedLoader(Refuses("foreign"), sampler, max_bad_fraction=0.0, num_workers=1)
    with pytest.raises(Exception, match="Traceback"):
        next(iter(loader))


WITH_LITTLE_SHARED_MEMORY = """
import json, sys
from nest_ssl.config import DatasetConfig
from nest_ssl.data import build_loader
for batch in build_loader(DatasetConfig(**json.loads(sys.argv[1]))):
    pass
"""


@pytest.mark.parametrize("size_kb", [8, 128])
def test_a_full_shared_memory_is_named_with_its_size_and_a_way_out(corpus: Corpus, size_kb: int) -> None:
    """The first has no room for the semaphores of a worker, the second none for a batch."""
    shell = ["unshare", "--map-root-user", "--mount", "sh", "-c"]
    mount = f"mount -t tmpfs -o size={size_kb}k tmpfs /dev/shm"
    if shutil.which("unshare") is None or subprocess.run([*shell, mount], check=False, capture_output=True).returncode:
        pytest.skip("no mount namespaces here")
    config = {"manifest_filepath": str(corpus.speech), "batch_size": 22, "num_workers": 1, "min_audio_len_secs": 0.1}
    program = [sys.executable, "-c", WITH_LITTLE_SHARED_MEMORY, json.dumps(config)]
    command = [*shell, f'{mount} && exec "$@"', "sh", *program]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=60)
    said = (
        f"OSError: /dev/shm is full (0.{round(size_kb / 100)} MB in all): DataLoader workers pass batches through it."
    )
    assert said in done.stderr
    assert "num_workers, prefetch_factor or prefetch_gb" in done.stderr
    assert "--shm-size" in done.stderr
    assert "Exception ignored" not in done.stderr


def test_a_worker_leaves_no_tensor_to_the_thread_that_sends_batches(
    corpus: Corpus, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The thread would lose the batch if shared memory were full."""
    monkeypatch.setattr(collate, "get_worker_info", lambda: "a worker")
    (batch, *_) = build_loader(corpus.config())
    tensors = {name: value for name, value in vars(batch).items() if isinstance(value, torch.Tensor)}
    assert {"audio", "audio_len", "noise_len"} <= tensors.keys()
    assert all(tensor.is_shared() for tensor in tensors.values())


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="sockets without a file")
def test_batches_do_not_pass_through_the_temporary_folder(
    corpus: Corpus, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Its path may be too long for a socket, and a cleaner may empty it or remove it."""
    with monkeypatch.context() as patch:
        patch.setattr(tempfile, "tempdir", str(tmp_path / ("x" * 200)))
        patch.setitem(multiprocessing.process.current_process()._config, "tempdir", None)  # type: ignore[attr-defined]
        assert len(list(build_loader(corpus.config(num_workers=2)))) > 0


def test_shared_memory_that_cannot_be_written_to_is_named(corpus: Corpus, monkeypatch: pytest.MonkeyPatch) -> None:
    loader = build_loader(corpus.config(num_workers=1), seed=3)
    monkeypatch.setattr("os.access", lambda *_: False)
    with pytest.raises(OSError, match="^/dev/shm cannot be written to, .* Set num_workers=0"):
        next(iter(loader))
