"""`nest-ssl extract` as a user calls it."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from nest_ssl.cli.main import main
from nest_ssl.files import only_writer
from tests.unit.probe.speech_like import read_lines, write_checkpoint, write_corpus


@pytest.fixture
def corpus(tmp_path: Path) -> Path:
    return write_corpus(tmp_path / "corpus", [0.5, 1.2, 0.9])


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_checkpoint(tmp_path_factory.mktemp("model") / "tiny.nemo")


def run(*arguments: object, code: int = 0) -> None:
    with pytest.raises(SystemExit) as ended:
        main([str(argument) for argument in arguments])
    assert ended.value.code == code


def test_features_are_written_and_the_same_command_resumes(
    checkpoint: Path, corpus: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    command = ("extract", checkpoint, corpus, tmp_path / "out", "--layers", "last", "--device", "cpu")
    run(*command)
    assert "3 utterances" in (out := capsys.readouterr().out)
    assert "0 existed" in out
    (line, *_) = read_lines(tmp_path / "out" / "manifest.jsonl")
    assert np.load(tmp_path / "out" / line["feature_filepath"]).shape == (1, 32, line["num_frames"])
    run(*command)
    assert "0 utterances" in (out := capsys.readouterr().out)
    assert "3 existed" in out


def test_unreadable_audio_is_named_and_ends_in_1(
    checkpoint: Path, corpus: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (corpus.parent / "1.wav").write_bytes(b"")
    run("extract", checkpoint, corpus, tmp_path / "out", "--device", "cpu", code=1)
    captured = capsys.readouterr()
    assert "2 utterances" in captured.out
    assert "1.wav: empty file" in captured.err
    assert len(read_lines(tmp_path / "out" / "manifest.jsonl")) == 2


def test_weights_of_layers_come_from_numbers_or_a_probe(checkpoint: Path, corpus: Path, tmp_path: Path) -> None:
    (tmp_path / "results.json").write_text(json.dumps({"layer_weights": [0.25, 0.75], "layers": [0, 1]}))
    outputs = []
    for number, weights in enumerate(("0.25,0.75", tmp_path / "results.json")):
        out = tmp_path / f"out_{number}"
        run("extract", checkpoint, corpus, out, "--aggregation", "weighted", "--weights", weights, "--device", "cpu")
        outputs.append([np.load(out / line["feature_filepath"]) for line in read_lines(out / "manifest.jsonl")])
    for one, other in zip(*outputs, strict=True):
        np.testing.assert_array_equal(one, other)


def test_weights_of_other_layers_are_refused(
    checkpoint: Path, corpus: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "results.json").write_text(json.dumps({"layer_weights": [0.25, 0.75], "layers": [1, 0]}))
    weighted = ("--aggregation", "weighted", "--weights", tmp_path / "results.json", "--device", "cpu")
    run("extract", checkpoint, corpus, tmp_path / "out", *weighted, code=1)
    assert "these are for layers 1,0. Add --layers 1,0." in capsys.readouterr().err
    run("extract", checkpoint, corpus, tmp_path / "out", *weighted, "--layers", "1,0")


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("{checkpoint}", "{corpus}", "{out}", "--layers", "7"), "there is no layer 7; the encoder has layers 0 to 1"),
        (("{corpus}", "{corpus}", "{out}"), "not a readable .nemo file"),
        (("/nowhere.nemo", "{corpus}", "{out}"), "/nowhere.nemo: no such file"),
        (("{checkpoint}", "/nowhere", "{out}"), "/nowhere: no such folder, list or manifest"),
        (
            ("{checkpoint}", "{corpus}", "{out}", "--aggregation", "weighted", "--weights", "x"),
            "--weights x: not numbers",
        ),
        (("{checkpoint}", "{corpus}", "{corpus}"), "is not a folder. Give another output folder."),
        (
            ("{checkpoint}", "{corpus}", "{out}", "--layers", "-1"),
            "--layers -1: layers are numbered from 0. Use 'last'",
        ),
        (("{checkpoint}", "{corpus}", "{out}", "--layers", "0, -2"), "--layers 0, -2: layers are numbered from 0"),
        (("{checkpoint}", "{corpus}", "{out}", "--aggregation", "weighted"), "--aggregation weighted: needs --weights"),
        (
            ("{checkpoint}", "{corpus}", "{out}", "--aggregation", "weighted", "--weights", "1e39,1"),
            "--weights: 1e+39 is more than 1e+12",
        ),
        (("{checkpoint}", "{corpus}", "{out}", "--max-duration", "nan"), "--max-duration: nan is not a finite number"),
    ],
)
def test_arguments_that_make_no_sense_are_one_clear_line_and_nothing_is_written(
    checkpoint: Path,
    corpus: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    arguments: tuple[str, ...],
    words: str,
) -> None:
    names = {"checkpoint": checkpoint, "corpus": corpus, "out": tmp_path / "out"}
    run("extract", *(text.format(**names) for text in arguments), code=1)
    error = capsys.readouterr().err
    assert words in error
    assert "Traceback" not in error
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("results", [{"layer_weights": [10**400], "layers": [0]}, {"layer_weights": [1], "layers": 0}])
def test_results_that_no_probe_wrote_are_one_clear_line(
    checkpoint: Path, corpus: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], results: dict[str, object]
) -> None:
    (tmp_path / "results.json").write_text(json.dumps(results))
    weighted = ("--aggregation", "weighted", "--weights", tmp_path / "results.json")
    run("extract", checkpoint, corpus, tmp_path / "out", *weighted, code=1)
    assert "results.json: has no 'layer_weights' as written by nest-ssl probe" in capsys.readouterr().err


def test_the_manifest_of_features_is_not_overwritten_when_it_is_the_input(
    checkpoint: Path, corpus: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "out"
    run("extract", checkpoint, corpus, out, "--device", "cpu")
    before = (out / "manifest.jsonl").read_bytes()
    run("extract", checkpoint, out / "manifest.jsonl", out, "--device", "cpu", code=1)
    assert f"OUT {out / 'manifest.jsonl'}: would overwrite the input" in capsys.readouterr().err
    assert (out / "manifest.jsonl").read_bytes() == before


def test_a_second_command_that_writes_into_the_same_folder_is_refused(
    checkpoint: Path, corpus: Path, tmp_path: Path
) -> None:
    output = tmp_path / "out"
    command = [sys.executable, "-m", "nest_ssl", "extract", str(checkpoint), str(corpus), str(output)]
    with only_writer(output):
        second = subprocess.run([*command, "--device", "cpu"], capture_output=True, text=True, check=False)
    assert second.returncode == 1
    assert f"{output}: another command is writing it. Wait for it to end, or give another output." in second.stderr
    assert not output.exists()


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs /dev/full")
def test_a_full_terminal_does_not_turn_features_into_a_failure(
    checkpoint: Path, corpus: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    with open("/dev/full", "w") as full:
        monkeypatch.setattr("sys.stdout", full)
        run("extract", checkpoint, corpus, tmp_path / "out", "--device", "cpu")
    assert "stdout: No space left on device" in capsys.readouterr().err
    assert len(read_lines(tmp_path / "out" / "manifest.jsonl")) == 3
