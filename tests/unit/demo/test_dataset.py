"""The demo's data set: complete or not there, the same bytes for the same arguments, and what is refused."""

from __future__ import annotations

import dataclasses
import json
import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import soundfile

from nest_ssl.demo.dataset import NOISES, DemoConfig, DemoFolder, coloured, make_demo
from nest_ssl.files import temporary_name
from tests.unit.demo.spectra import energy_share

SMALL = DemoConfig(num_train=5, num_val=2, num_noise=8, duration=1.0)


def make(folder: Path, config: DemoConfig = SMALL, **options: Any) -> DemoFolder:
    return make_demo(folder, config, synthesizer="formants", **options)


def contents(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def entries(folder: Path, part: str) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / f"{part}.jsonl").read_text(encoding="utf-8").splitlines()]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("demo") / "data"
    assert make(path).is_new
    return path


def test_manifests_name_every_file_with_its_duration(folder: Path) -> None:
    for part, count in (("train", 5), ("valid", 2), ("noise", 8)):
        listed = entries(folder, part)
        assert len(listed) == count
        assert {entry["audio_filepath"] for entry in listed} == {
            path.relative_to(folder).as_posix() for path in (folder / part).iterdir()
        }
        for entry in listed:
            info = soundfile.info(folder / entry["audio_filepath"])
            assert (info.samplerate, info.channels) == (16_000, 1)
            assert entry["duration"] == info.frames / 16_000
            assert part == "noise" or 0.5 <= entry["duration"] <= 1.25


def test_voices_of_validation_are_not_those_of_training(folder: Path) -> None:
    speakers = {part: {entry["speaker"] for entry in entries(folder, part)} for part in ("train", "valid")}
    assert len(speakers["train"]) == 3
    assert not speakers["train"] & speakers["valid"]


def test_there_is_a_noise_of_every_kind(folder: Path) -> None:
    assert [entry["label"] for entry in entries(folder, "noise")] == list(NOISES)


def test_audio_is_neither_silent_nor_clipped_nor_the_same_twice(folder: Path) -> None:
    seen = set()
    for path in folder.rglob("*.flac"):
        samples, _ = soundfile.read(path)
        assert 0.005 < np.sqrt(np.mean(samples**2)) < 0.2, path
        assert np.abs(samples).max() < 0.99, path
        seen.add(samples.tobytes())
    assert len(seen) == 15


def test_the_same_arguments_give_the_same_bytes_with_any_number_of_threads(folder: Path, tmp_path: Path) -> None:
    make(tmp_path / "again", num_threads=1)
    assert contents(tmp_path / "again") == contents(folder)


def test_a_file_does_not_depend_on_how_many_there_are(folder: Path, tmp_path: Path) -> None:
    make(tmp_path / "fewer", dataclasses.replace(SMALL, num_train=2, num_val=1, num_noise=1))
    fewer, more = contents(tmp_path / "fewer"), contents(folder)
    audio = [name for name in fewer if name.endswith(".flac")]
    assert len(audio) == 4
    assert all(fewer[name] == more[name] for name in audio)


def test_another_seed_gives_other_audio(folder: Path, tmp_path: Path) -> None:
    make(tmp_path / "other", dataclasses.replace(SMALL, seed=1))
    other, first = contents(tmp_path / "other"), contents(folder)
    assert all(other[name] != first[name] for name in other if name.endswith(".flac"))


def test_a_second_call_does_nothing(folder: Path) -> None:
    before = {path: path.stat().st_mtime_ns for path in folder.rglob("*")}
    again = make(folder)
    assert not again.is_new
    assert {path: path.stat().st_mtime_ns for path in folder.rglob("*")} == before
    assert again.num_voices == {"train": 3, "valid": 1}
    assert again.duration_s["noise"] == 8.0


def test_other_arguments_need_overwrite(tmp_path: Path) -> None:
    path = tmp_path / "data"
    small = DemoConfig(num_train=1, num_val=1, num_noise=1, duration=0.5)
    make(path, small)
    other = dataclasses.replace(small, sample_rate=8000, num_train=2)
    with pytest.raises(ValueError, match="made with num_train 1, not 2; sample_rate 16000, not 8000. Give --overwrite"):
        make(path, other)
    assert make(path, other, overwrite=True).is_new
    assert soundfile.info(path / "train/00001.flac").samplerate == 8000
    assert [entry.name for entry in tmp_path.iterdir()] == ["data"]


def test_a_folder_of_someone_else_is_never_replaced(tmp_path: Path) -> None:
    (tmp_path / "mine.txt").write_text("precious")
    for overwrite in (False, True):
        with pytest.raises(ValueError, match="the demo did not make it. Give another --data-dir"):
            make(tmp_path, overwrite=overwrite)
    assert [path.name for path in tmp_path.iterdir()] == ["mine.txt"]


def test_files_of_others_in_the_folder_are_not_removed(tmp_path: Path) -> None:
    path, small = tmp_path / "data", DemoConfig(num_train=1, num_val=1, num_noise=1, duration=0.5)
    make(path, small)
    (path / "notes.txt").write_text("precious")
    with pytest.raises(ValueError, match="contains 'notes.txt', which the demo did not make"):
        make(path, small, overwrite=True)


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    path, small = tmp_path / "data", DemoConfig(num_train=1, num_val=1, num_noise=1, duration=0.5)
    make(path, small)
    (path / "valid/00000.flac").unlink()
    with pytest.raises(ValueError, match="valid/00000.flac is missing"):
        make(path, small)


def test_a_failure_leaves_nothing_behind(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    written = []

    def write_until_full(path: Path, data: bytes) -> int:
        written.append(path)
        if len(written) == 3:
            raise OSError(28, "No space left on device")
        return len(data)

    monkeypatch.setattr(Path, "write_bytes", write_until_full)
    with pytest.raises(OSError, match="data: cannot be written \\(No space left on device\\). Give another --data-dir"):
        make(tmp_path / "data")
    assert list(tmp_path.iterdir()) == []


def test_what_a_killed_call_has_left_is_removed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "getpid", lambda: 2**22 + 1)  # more than Linux numbers processes
    (temporary_name(tmp_path / "data") / "train").mkdir(parents=True)
    monkeypatch.undo()
    make(tmp_path / "data")
    assert [path.name for path in tmp_path.iterdir()] == ["data"]


def test_the_working_folder_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ValueError, match="is the working folder"):
        make(Path(os.curdir))


@pytest.mark.parametrize(
    ("key", "value", "message"),
    [
        ("num_train", 0, "--num-train: 0 is less than 1"),
        ("num_val", -3, "--num-val: -3 is less than 1"),
        ("num_noise", -1, "--num-noise: -1 is less than 1"),
        ("duration", 0.1, "--duration: 0.1 is less than 0.5"),
        ("duration", float("nan"), "--duration: nan is not a finite number"),
        ("sample_rate", 100, "--sample-rate: 100 is less than 8000"),
        ("seed", -1, "--seed: -1 is less than 0"),
        ("seed", 2**32, "--seed: 4294967296 is more than 4294967295"),
    ],
)
def test_arguments_that_cannot_be_meant_are_refused(key: str, value: float, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        dataclasses.replace(SMALL, **{key: value})  # type: ignore[arg-type]


# ---- noises ----


@pytest.mark.parametrize("name", NOISES)
def test_a_noise_is_finite_has_its_length_and_repeats(name: str) -> None:
    first, again, other = (NOISES[name](12_345, 16_000, np.random.default_rng(seed)) for seed in (1, 1, 2))
    assert first.shape == (12_345,)
    assert np.isfinite(first).all()
    assert first.std() > 0
    assert np.array_equal(first, again)
    assert not np.array_equal(first, other)


@pytest.mark.parametrize(("exponent", "fall_db"), [(0, 0.0), (1, 3.0), (2, 6.0)])
def test_coloured_noise_falls_by_so_many_decibels_per_octave(exponent: float, fall_db: float) -> None:
    power = np.abs(np.fft.rfft(coloured(2**18, exponent, np.random.default_rng(0)))) ** 2
    octaves_db = [10 * np.log10(power[2**k : 2 ** (k + 1)].mean()) for k in range(8, 16)]
    assert -np.diff(octaves_db).mean() == pytest.approx(fall_db, abs=0.3)


def test_hum_is_that_of_the_mains() -> None:
    hum = NOISES["hum"](160_000, 16_000, np.random.default_rng(0))
    assert energy_share(hum, 45, 500) > 0.95
