"""Preparing: measured, ordered, resumable, divisible into jobs; bad files are listed and never stop it."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import soundfile

from nest_ssl.audio import AudioInfo
from nest_ssl.data import open_manifests
from nest_ssl.files import temporary_name
from nest_ssl.prepare import ledger, measure
from nest_ssl.prepare.ledger import Progress
from nest_ssl.prepare.manifest import Job, Split, count_entries, merge_jobs, part_path, prepare_manifest, split_manifest

RATE = 16000


def sound(path: Path, duration_s: float = 0.5, channels: int = 1) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    samples = np.random.default_rng(0).uniform(-0.1, 0.1, (int(duration_s * RATE), channels))
    soundfile.write(path, samples, RATE)


@pytest.fixture
def corpus(tmp_path: Path) -> Path:
    """12 good files of three speakers, and one bad file of every kind."""
    folder = tmp_path / "corpus"
    for number in range(12):
        sound(folder / f"speaker_{number % 3}" / f"{number:02d}.wav", duration_s=0.1 * (number + 1))
    (folder / "broken.wav").write_bytes(b"RIFF not really")
    (folder / "empty.wav").touch()
    os.mkfifo(folder / "pipe.wav")
    soundfile.write(folder / "silent.wav", np.zeros(0), RATE)
    soundfile.write(folder / "nan.wav", np.full(100, np.nan), RATE, subtype="FLOAT")
    (folder / "dangling.wav").symlink_to(folder / "nowhere")
    (folder / "notes.txt").write_text("not audio")
    return folder


def lines(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_a_manifest_is_not_replaced_when_not_one_file_can_be_read_any_more(corpus: Path) -> None:
    listed, output = corpus.parent / "list.txt", corpus.parent / "m.jsonl"
    listed.write_text("".join(f"{path}\n" for path in sorted(corpus.glob("speaker_*/*.wav"))))
    prepare_manifest(listed, output)
    before = output.read_bytes()
    corpus.rename(corpus.with_name("not mounted"))
    with pytest.raises(ValueError, match=r"list.txt: contains no usable audio: .*\.wav: No such file.* all 12 reasons"):
        prepare_manifest(listed, output)
    assert output.read_bytes() == before
    assert len(lines(corpus.parent / "m.bad.jsonl")) == 12
    corpus.with_name("not mounted").rename(corpus)
    assert prepare_manifest(listed, output).num_good == 12


@pytest.mark.parametrize("num_workers", [0, 2])
def test_good_files_are_measured_and_bad_files_listed_with_the_reason(corpus: Path, num_workers: int) -> None:
    output = corpus.parent / "m.jsonl"
    progress = prepare_manifest(corpus, output, num_workers=num_workers)
    good = lines(output)
    assert [item["audio_filepath"] for item in good] == sorted(f"corpus/speaker_{n % 3}/{n:02d}.wav" for n in range(12))
    assert {item["audio_filepath"][-6:-4]: item["duration"] for item in good} == {
        f"{n:02d}": pytest.approx(0.1 * (n + 1)) for n in range(12)
    }
    bad = {Path(item["audio_filepath"]).name: item["reason"] for item in lines(corpus.parent / "m.bad.jsonl")}
    assert set(bad) == {"broken.wav", "empty.wav", "pipe.wav", "silent.wav", "nan.wav", "dangling.wav"}
    assert bad["pipe.wav"] == "not a regular file"
    assert bad["silent.wav"] == "no samples"
    assert bad["empty.wav"] == "empty file"
    assert bad["dangling.wav"] == "No such file or directory"
    assert "NaN" in bad["nan.wav"]
    assert (progress.num_good, progress.num_bad, progress.complete) == (12, 6, True)
    assert progress.duration_s == pytest.approx(7.8)
    assert Path(f"{output}.idx").exists()
    assert len(open_manifests(str(output), min_duration_s=0.55)) == 7


def test_paths_are_relative_below_the_manifest_and_absolute_elsewhere(corpus: Path, tmp_path: Path) -> None:
    (tmp_path / "lists").mkdir()
    prepare_manifest(corpus, tmp_path / "lists/m.jsonl")
    assert lines(tmp_path / "lists/m.jsonl")[0]["audio_filepath"] == str(corpus / "speaker_0/00.wav")


def test_reading_headers_only_misses_bad_samples_and_finds_the_same_durations(corpus: Path, tmp_path: Path) -> None:
    prepare_manifest(corpus, tmp_path / "decoded.jsonl")
    prepare_manifest(corpus, tmp_path / "headers.jsonl", decode=False)
    decoded, headers = lines(tmp_path / "decoded.jsonl"), lines(tmp_path / "headers.jsonl")
    assert [item for item in headers if "nan" not in item["audio_filepath"]] == decoded
    assert len(headers) == len(decoded) + 1


def test_a_manifest_is_measured_again_and_keeps_its_keys_and_segments(corpus: Path, tmp_path: Path) -> None:
    sound(corpus / "long.wav", duration_s=3.0)
    given = [
        {"audio_filepath": "corpus/long.wav", "text": "all of it"},
        {"audio_filepath": "corpus/long.wav", "duration": 1.0, "offset": 0.5, "speaker": "x"},
        {"audio_filepath": "corpus/long.wav", "duration": 3.05},
        {"audio_filepath": "corpus/long.wav", "offset": 2.0},
        {"audio_filepath": "corpus/long.wav", "offset": 3.5},
        {"audio_filepath": "corpus/long.wav", "duration": 30.0},
        {"no": "path"},
    ]
    source = tmp_path / "old.jsonl"
    source.write_text("".join(json.dumps(item) + "\n" for item in given))
    prepare_manifest(source, tmp_path / "new.jsonl")
    assert lines(tmp_path / "new.jsonl") == [
        {"audio_filepath": "corpus/long.wav", "duration": 3.0, "text": "all of it"},
        {"audio_filepath": "corpus/long.wav", "duration": 1.0, "offset": 0.5, "speaker": "x"},
        {"audio_filepath": "corpus/long.wav", "duration": 3.0},
        {"audio_filepath": "corpus/long.wav", "duration": 1.0, "offset": 2.0},
    ]
    assert [item["reason"] for item in lines(tmp_path / "new.bad.jsonl")] == [
        "no samples after the offset of 3.5 s",
        "truncated: 3.00 s of 30.00 s",
        "no 'audio_filepath'",
    ]


def test_a_name_that_is_not_utf8_is_a_bad_file(tmp_path: Path) -> None:
    folder = tmp_path / "corpus"
    sound(folder / "good.wav")
    os.rename(folder / "good.wav", os.fsencode(folder) + b"/\xff.wav")
    sound(folder / "é.wav")
    prepare_manifest(folder, tmp_path / "m.jsonl")
    assert [item["audio_filepath"] for item in lines(tmp_path / "m.jsonl")] == ["corpus/é.wav"]
    (bad,) = lines(tmp_path / "m.bad.jsonl")
    assert bad == {"audio_filepath": "corpus/\udcff.wav", "reason": "its name is not UTF-8"}
    assert os.fsencode(bad["audio_filepath"]) == b"corpus/\xff.wav"


SLOW_PREPARE = """
import sys, time
from pathlib import Path
from nest_ssl.prepare import ledger
from nest_ssl.prepare import manifest
ledger.SAVE_EVERY_S = 0.0
def wait(progress):
    print(progress.num_done, flush=True)
    time.sleep(0.02)
manifest.prepare_manifest(Path(sys.argv[1]), Path(sys.argv[2]), report=wait)
"""


def test_a_killed_run_resumes_and_ends_like_one_that_was_not_killed(corpus: Path, tmp_path: Path) -> None:
    prepare_manifest(corpus, tmp_path / "undisturbed.jsonl")
    output = tmp_path / "m.jsonl"
    command = [sys.executable, "-c", SLOW_PREPARE, str(corpus), str(output)]
    for _ in range(2):
        process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
        assert process.stdout is not None
        for _ in range(5):
            process.stdout.readline()
        process.send_signal(signal.SIGKILL)
        process.wait()
        process.stdout.close()
        assert not output.exists()
    done_before = json.loads((tmp_path / "m.jsonl.state").read_text())["progress"]
    assert 8 <= done_before["num_good"] + done_before["num_bad"] < 18
    with open(tmp_path / "m.jsonl.partial", "a") as file:
        file.write('{"audio_filepath": "half a li')  # had not reached the state
    first: list[int] = []
    prepare_manifest(corpus, output, report=lambda progress: first.append(progress.num_done))
    assert first[0] == done_before["num_good"] + done_before["num_bad"] + 1
    assert output.read_bytes() == (tmp_path / "undisturbed.jsonl").read_bytes()
    assert (tmp_path / "m.bad.jsonl").read_bytes() == (tmp_path / "undisturbed.bad.jsonl").read_bytes()
    assert not list(tmp_path.glob("*.partial"))


class Killed(BaseException):
    pass


def run_until(corpus: Path, output: Path, num_done: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Stops as a kill would, after the state was saved."""
    monkeypatch.setattr(ledger, "SAVE_EVERY_S", 0.0)

    def stop(progress: ledger.Progress) -> None:
        if progress.num_done > num_done:
            raise Killed

    with pytest.raises(Killed):
        prepare_manifest(corpus, output, report=stop)


def test_an_input_that_changed_is_measured_from_the_start(
    corpus: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    run_until(corpus, tmp_path / "m.jsonl", 10, monkeypatch)
    sound(corpus / "aaa.wav")
    prepare_manifest(corpus, tmp_path / "m.jsonl")
    assert "the input has changed" in caplog.text
    assert len(lines(tmp_path / "m.jsonl")) == 13


def test_other_settings_start_over(corpus: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    prepare_manifest(corpus, tmp_path / "m.jsonl")
    progress = prepare_manifest(corpus, tmp_path / "m.jsonl", decode=False)
    assert "other settings" in caplog.text
    assert progress.num_good == 13


@pytest.mark.parametrize("content", ["{", "[]", '{"settings": {}, "progress": {"num_done": 3}}', "[" * 100_000])
def test_a_damaged_state_starts_over(
    corpus: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture, content: str
) -> None:
    (tmp_path / "m.jsonl.state").write_text(content)
    assert prepare_manifest(corpus, tmp_path / "m.jsonl").num_good == 12
    assert "m.jsonl.state: is damaged; measuring from the start" in caplog.text


def test_a_complete_run_does_nothing_unless_told_to_restart(corpus: Path, tmp_path: Path) -> None:
    output = tmp_path / "m.jsonl"
    prepare_manifest(corpus, output)
    written = output.stat().st_mtime_ns
    assert prepare_manifest(corpus, output).num_good == 12
    assert output.stat().st_mtime_ns == written
    assert prepare_manifest(corpus, output, restart=True).num_good == 12
    assert output.stat().st_mtime_ns > written
    output.unlink()
    assert prepare_manifest(corpus, output).num_good == 12


@pytest.mark.parametrize("num_jobs", [0, 2])
def test_a_complete_run_measures_files_that_were_added_or_replaced(
    corpus: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture, num_jobs: int
) -> None:
    output = tmp_path / "m.jsonl"

    def prepare() -> Progress:
        if not num_jobs:
            return prepare_manifest(corpus, output)
        for number in range(num_jobs):
            prepare_manifest(corpus, output, job=Job(number, num_jobs))
        return merge_jobs(corpus, output, num_jobs)

    before = prepare()
    assert prepare() == before
    assert not caplog.messages
    sound(corpus / "added.wav")
    assert prepare().num_good == before.num_good + 1
    assert "files were added, removed or replaced" in caplog.text
    sound(corpus / "added.wav", duration_s=2.0)
    after = prepare()
    assert after.duration_s == pytest.approx(before.duration_s + 2.0)
    assert sum(line["duration"] for line in lines(output)) == pytest.approx(after.duration_s)


@pytest.mark.parametrize("num_jobs", [0, 2])
def test_a_manifest_that_was_changed_is_neither_taken_for_complete_nor_replaced_unasked(
    corpus: Path, tmp_path: Path, num_jobs: int
) -> None:
    output = tmp_path / "m.jsonl"
    for number in range(num_jobs):
        prepare_manifest(corpus, output, job=Job(number, num_jobs))
    if num_jobs:
        merge_jobs(corpus, output, num_jobs)
    else:
        prepare_manifest(corpus, output)
    whole = output.read_bytes()
    output.write_bytes(whole[: len(whole) // 2])
    with pytest.raises(
        ValueError, match=r"m\.jsonl: was changed since it was made \(.* bytes, then .*\)\. Give --restart"
    ):
        prepare_manifest(corpus, output)
    assert output.read_bytes() == whole[: len(whole) // 2]
    prepare_manifest(corpus, output, restart=True)
    assert output.read_bytes() == whole


def test_a_manifest_of_something_else_is_not_replaced_unasked(corpus: Path, tmp_path: Path) -> None:
    output = tmp_path / "m.jsonl"
    output.write_text('{"audio_filepath": "mine.wav", "duration": 1.0}\n')
    before = output.read_bytes()
    with pytest.raises(ValueError, match=r"m\.jsonl: exists, and 'prepare' has not written it.*Give --restart"):
        prepare_manifest(corpus, output)
    assert output.read_bytes() == before
    prepare_manifest(corpus, output, restart=True)
    assert len(output.read_text().splitlines()) == 12


def test_a_manifest_outlives_a_disk_that_is_not_mounted_and_is_made_again_later(corpus: Path, tmp_path: Path) -> None:
    paths, output = tmp_path / "list.txt", tmp_path / "m.jsonl"
    files = sorted(str(path) for path in corpus.rglob("speaker*/*.wav"))
    paths.write_text("\n".join(files[:10]))
    prepare_manifest(paths, output)
    before = output.read_bytes()
    paths.write_text("\n".join(f"{file}.gone" for file in files))
    with pytest.raises(ValueError, match="contains no usable audio"):
        prepare_manifest(paths, output)
    assert output.read_bytes() == before
    paths.write_text("\n".join(files))
    prepare_manifest(paths, output)
    assert len(output.read_text().splitlines()) == 12


def test_what_a_killed_run_has_left_of_its_state_is_removed(
    corpus: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    nobody = 2**22 + 1  # more than Linux numbers processes
    monkeypatch.setattr(os, "getpid", lambda: nobody)
    left_over = temporary_name(tmp_path / "m.jsonl.state")
    monkeypatch.undo()
    left_over.touch()
    prepare_manifest(corpus, tmp_path / "m.jsonl")
    assert not left_over.exists()


def test_killed_between_the_renames_it_only_repeats_the_rename(corpus: Path, tmp_path: Path) -> None:
    prepare_manifest(corpus, tmp_path / "m.jsonl")
    expected = (tmp_path / "m.jsonl").read_bytes()
    state = json.loads((tmp_path / "m.jsonl.state").read_text())
    state["progress"]["complete"] = False
    (tmp_path / "m.jsonl.state").write_text(json.dumps(state))
    os.replace(tmp_path / "m.jsonl", tmp_path / "m.jsonl.partial")
    seen: list[int] = []
    prepare_manifest(corpus, tmp_path / "m.jsonl", report=lambda progress: seen.append(1))
    assert not seen
    assert (tmp_path / "m.jsonl").read_bytes() == expected


@pytest.mark.parametrize("num_jobs", [1, 3, 40])
def test_jobs_together_give_what_one_run_gives(corpus: Path, tmp_path: Path, num_jobs: int) -> None:
    prepare_manifest(corpus, tmp_path / "one.jsonl")
    output = tmp_path / "m.jsonl"
    for number in reversed(range(num_jobs)):
        if number == 0 and num_jobs > 1:
            with pytest.raises(ValueError, match=f"of {num_jobs} jobs, not complete: 0"):
                merge_jobs(corpus, output, num_jobs)
        prepare_manifest(corpus, output, job=Job(number, num_jobs))
    assert count_entries(corpus) == 18
    assert sum(count_entries(corpus, Job(number, num_jobs)) for number in range(num_jobs)) == 18
    progress = merge_jobs(corpus, output, num_jobs)
    assert output.read_bytes() == (tmp_path / "one.jsonl").read_bytes()
    assert (tmp_path / "m.bad.jsonl").read_bytes() == (tmp_path / "one.bad.jsonl").read_bytes()
    assert (progress.num_good, progress.num_bad) == (12, 6)
    assert not (tmp_path / "m.jobs").exists()
    assert prepare_manifest(corpus, output, job=Job(0, num_jobs)).num_good == 12  # merged: nothing left to do


def test_jobs_that_saw_different_inputs_are_not_merged(corpus: Path, tmp_path: Path) -> None:
    prepare_manifest(corpus, tmp_path / "m.jsonl", job=Job(0, 2))
    for name in ("aaa.wav", "aab.wav"):
        sound(corpus / name)
    prepare_manifest(corpus, tmp_path / "m.jsonl", job=Job(1, 2))
    with pytest.raises(ValueError, match="changed between the jobs"):
        merge_jobs(corpus, tmp_path / "m.jsonl", 2)


@pytest.mark.parametrize("text", ["3", "3/3", "a/b", "-1/4", "1/0", "/4"])
def test_jobs_that_make_no_sense_are_refused(text: str) -> None:
    with pytest.raises(ValueError, match="job"):
        Job.parse(text)


def test_a_split_by_folder_keeps_speakers_apart_and_by_hash_is_stable(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(measure, "verify_audio", lambda *_, **__: AudioInfo(RATE, RATE, 1, "WAV/PCM_16"))
    folder = tmp_path / "corpus"
    for speaker in range(40):
        (folder / f"s{speaker}").mkdir(parents=True)
        for number in range(20):
            (folder / f"s{speaker}/{number}.wav").touch()
    output = tmp_path / "m.jsonl"
    prepare_manifest(folder, output)
    counts = split_manifest(folder, output, Split("folder", valid_share=0.2))
    train, valid = (
        {Path(u.audio_filepath).parent.name for u in open_manifests(str(part_path(output, part)))} for part in counts
    )
    assert not train & valid
    assert len(train | valid) == 40
    assert 2 <= len(valid) <= 14

    counts = split_manifest(folder, output, Split("hash", valid_share=0.2))
    assert sum(counts.values()) == 800
    assert 100 < counts["valid"] < 220
    first = part_path(output, "valid").read_text()
    (folder / "s0/new.wav").touch()
    prepare_manifest(folder, output, restart=True)
    split_manifest(folder, output, Split("hash", valid_share=0.2))
    assert set(first.splitlines()) <= set(part_path(output, "valid").read_text().splitlines())
    with pytest.raises(ValueError, match="nothing falls into 'valid'"):
        split_manifest(folder, output, Split("hash", valid_share=1e-9))
    assert not list(tmp_path.glob("*.partial"))


def test_a_split_by_folder_uses_the_speaker_key_and_the_level(tmp_path: Path) -> None:
    source = tmp_path / "m.jsonl"
    items = [{"audio_filepath": f"/x/{n}.wav", "duration": 1.0, "speaker": n % 10} for n in range(100)]
    source.write_text("".join(json.dumps(item) + "\n" for item in items))
    split_manifest(source, source, Split("folder", valid_share=0.3))
    train, valid = ({item["speaker"] for item in lines(part_path(source, part))} for part in ("train", "valid"))
    assert not train & valid

    items = [{"audio_filepath": f"set/s{n % 10}/c{n}/a.wav", "duration": 1.0} for n in range(100)]
    source.write_text("".join(json.dumps(item) + "\n" for item in items))
    with pytest.raises(ValueError, match="--folder-level"):
        split_manifest(source, source, Split("folder", valid_share=0.3, folder_level=1))
    split_manifest(source, source, Split("folder", valid_share=0.3, folder_level=2))
    train, valid = (
        {item["audio_filepath"].split("/")[1] for item in lines(part_path(source, part))} for part in ("train", "valid")
    )
    assert not train & valid


def test_progress_is_reported_while_it_runs(corpus: Path, tmp_path: Path) -> None:
    seen: list[int] = []
    started = time.monotonic()
    prepare_manifest(corpus, tmp_path / "m.jsonl", report=lambda progress: seen.append(progress.num_done))
    assert seen == list(range(1, 19))
    assert time.monotonic() - started < 60


def test_an_output_that_is_a_folder_is_refused_before_anything_is_measured(corpus: Path, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"corpus: is not a file\. Give the manifest to write"):
        prepare_manifest(corpus, corpus)
    assert not list(tmp_path.glob("*.partial"))
