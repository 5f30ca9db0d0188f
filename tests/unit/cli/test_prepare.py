"""`nest-ssl prepare` as a user calls it."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import soundfile
import typer
from typer.testing import CliRunner

from nest_ssl.cli.prepare import prepare
from nest_ssl.files import only_writer

app = typer.Typer()
app.command("prepare")(prepare)
runner = CliRunner()


@pytest.fixture
def corpus(tmp_path: Path) -> Path:
    for number in range(30):
        folder = tmp_path / f"corpus/speaker_{number % 10}"
        folder.mkdir(parents=True, exist_ok=True)
        soundfile.write(folder / f"{number}.wav", np.random.default_rng(0).uniform(-0.1, 0.1, 1600), 16000)
    (tmp_path / "corpus/bad.wav").write_text("no")
    return tmp_path / "corpus"


def run(*arguments: object, fails: bool = False) -> str:
    result = runner.invoke(app, [str(argument) for argument in arguments])
    assert result.exit_code == (1 if fails else 0), result.output
    assert result.exception is None or isinstance(result.exception, ValueError), result.exception
    return f"{result.output}{result.exception or ''}"


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs /dev/full")
def test_a_full_terminal_does_not_turn_a_finished_manifest_into_a_failure(corpus: Path, tmp_path: Path) -> None:
    with open("/dev/full", "w") as full:
        command = [sys.executable, "-m", "nest_ssl", "prepare", str(corpus), "--output", str(tmp_path / "m.jsonl")]
        done = subprocess.run([*command, "--workers", "0"], stdout=full, stderr=subprocess.PIPE, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert "stdout: No space left on device" in done.stderr
    assert len((tmp_path / "m.jsonl").read_text().splitlines()) == 30


def test_a_second_command_that_writes_the_same_manifest_is_refused(corpus: Path, tmp_path: Path) -> None:
    output = tmp_path / "m.jsonl"
    command = [sys.executable, "-m", "nest_ssl", "prepare", str(corpus), "--output", str(output), "--workers", "0"]
    with only_writer(output):
        second = subprocess.run(command, capture_output=True, text=True, check=False)
        job = subprocess.run([*command, "--job", "0/2"], capture_output=True, text=True, check=False)
    assert second.returncode == 1
    assert f"{output}: another command is writing it. Wait for it to end, or give another output." in second.stderr
    assert job.returncode == 0, job.stderr  # it writes a part of its own
    assert not output.exists()
    assert not list(tmp_path.glob(".*"))
    with only_writer(output):  # it is free again
        pass


def test_a_folder_becomes_a_manifest_a_split_and_shards(corpus: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    text = run(
        corpus, "--output", out / "m.jsonl", "--split", "folder", "--valid-share", 0.3, "--shards", 4, "--workers", 0
    )
    assert "m.jsonl: 30 utterances" in text
    assert "m.bad.jsonl: 1 bad files" in text
    assert "audio__OP_0..3_CL_.tar: 4 shards written" in text
    names = {path.name for path in out.iterdir()}
    assert {"m.jsonl", "m.bad.jsonl", "m.train.jsonl", "m.valid.jsonl", "audio_0.tar", "audio_3.tar"} <= names
    train = (out / "m.train.jsonl").read_text().splitlines()
    assert len((out / "tarred_audio_manifest.json").read_text().splitlines()) == len(train)
    again = run(
        corpus, "--output", out / "m.jsonl", "--split", "folder", "--valid-share", 0.3, "--shards", 4, "--workers", 0
    )
    assert "0 shards written, 4 existed" in again


def test_files_too_long_or_too_short_for_training_are_a_warning(corpus: Path, tmp_path: Path) -> None:
    text = run(corpus, "--output", tmp_path / "m.jsonl", "--workers", 0)  # 0.1 s each
    assert "m.jsonl: 0.00 of 0.00 h (100.0%) are in files outside the duration limits of training" in text


def test_jobs_merge_and_shards_on_a_cluster(corpus: Path, tmp_path: Path) -> None:
    arguments = (corpus, "--output", tmp_path / "m.jsonl", "--workers", 0)
    assert "not complete: 0, 1" in run(*arguments, "--merge", 2, fails=True)
    assert "does not exist yet" in run(*arguments, "--job", "0/2", "--shards", 4, fails=True)
    assert "job 0/2 of" in run(*arguments, "--job", "0/2")
    run(*arguments, "--job", "1/2")
    assert "m.jsonl: 30 utterances" in run(*arguments, "--merge", 2)
    assert "2 shards written" in run(*arguments, "--job", "0/2", "--shards", 4)
    assert not (tmp_path / "tarred_audio_manifest.json").exists()
    assert "their manifests" in run(*arguments, "--job", "1/2", "--shards", 4)
    assert len((tmp_path / "tarred_audio_manifest.json").read_text().splitlines()) == 30


def test_an_error_is_one_line(corpus: Path, tmp_path: Path) -> None:
    output = tmp_path / "m.jsonl"
    assert "no such folder" in run(tmp_path / "missing", "--output", output, fails=True)
    assert "such as 3/16" in run(corpus, "--output", output, "--job", "x", fails=True)
    assert "between 0 and 1" in run(corpus, "--output", output, "--split", "hash", "--valid-share", 2, fails=True)
    (tmp_path / "nothing").mkdir()
    assert "names no audio file" in run(tmp_path / "nothing", "--output", output, "--workers", 0, fails=True)


def test_a_list_and_a_manifest_are_inputs_too(corpus: Path, tmp_path: Path) -> None:
    (tmp_path / "list.lst").write_text("corpus/speaker_1/1.wav\ncorpus/speaker_0/0.wav\n")
    run(tmp_path / "list.lst", "--output", tmp_path / "a.jsonl", "--workers", 0, "--check", "header")
    run(tmp_path / "a.jsonl", "--output", tmp_path / "b.jsonl", "--workers", 0)
    items = [json.loads(line) for line in (tmp_path / "b.jsonl").read_text().splitlines()]
    assert items == [
        {"audio_filepath": "corpus/speaker_1/1.wav", "duration": 0.1},
        {"audio_filepath": "corpus/speaker_0/0.wav", "duration": 0.1},
    ]


@pytest.mark.parametrize(
    ("source", "output", "options"),
    [
        ("m.jsonl", "m.jsonl", ()),
        ("m.jsonl", "corpus/../m.jsonl", ()),
        ("m.jsonl", "link.jsonl", ()),
        ("m.train.jsonl", "m.jsonl", ("--split", "hash")),
        ("corpus", "corpus/bad.wav", ()),
        ("m.jsonl", "corpus/speaker_1/1.wav", ()),
    ],
)
def test_an_output_that_is_an_input_is_refused_and_left(
    corpus: Path, tmp_path: Path, source: str, output: str, options: tuple[str, ...]
) -> None:
    for name in ("m.jsonl", "m.train.jsonl"):
        (tmp_path / name).write_text('{"audio_filepath": "corpus/speaker_1/1.wav"}\n')
    (tmp_path / "link.jsonl").symlink_to("m.jsonl")
    before = {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()}
    text = run(tmp_path / source, "--output", tmp_path / output, *options, "--workers", 0, fails=True)
    assert "would overwrite the input" in text or f"{tmp_path / output}: is an audio file" in text
    assert {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()} == before


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (("--split", "folder", "--folder-level", 0), "--folder-level 0: give 1, 2, …, or -1"),
        (("--split", "folder", "--folder-level", -99), "--folder-level -99: give 1, 2, …, or -1"),
        (("--shards", 100), "corpus names 31 files. Give 1 to 31."),
        (("--valid-share", 0.5), "--valid-share 0.5: nothing is split. Give --split too."),
        (("--split", "hash", "--folder-level", 2), "--folder-level 2: nothing is split by folder."),
        (("--shards-folder", "x"), "--shards-folder x: there are no shards to write. Give --shards too."),
    ],
)
def test_a_split_or_shards_that_cannot_be_are_refused_before_anything_is_measured(
    corpus: Path, tmp_path: Path, options: tuple[object, ...], words: str
) -> None:
    assert words in run(corpus, "--output", tmp_path / "m.jsonl", *options, "--workers", 0, fails=True)
    assert list(tmp_path.iterdir()) == [corpus]


def test_a_folder_without_audio_is_refused_and_nothing_is_written(tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    (tmp_path / "empty" / "notes.txt").touch()
    assert "empty: names no audio file." in run(tmp_path / "empty", "--output", tmp_path / "m.jsonl", fails=True)
    assert list(tmp_path.iterdir()) == [tmp_path / "empty"]


@pytest.mark.parametrize("options", [("--split", "hash", "--valid-share", 1e-9), ("--shards", 31)])
def test_where_a_split_or_shards_fail_the_manifest_is_kept_and_the_message_says_so(
    corpus: Path, tmp_path: Path, options: tuple[object, ...]
) -> None:
    output = tmp_path / "m.jsonl"
    text = run(corpus, "--output", output, *options, "--workers", 0, fails=True)
    assert f"({output} is complete: the next run does not measure again.)" in text
    assert len(output.read_text().splitlines()) == 30
