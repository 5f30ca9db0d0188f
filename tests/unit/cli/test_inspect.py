"""`nest-ssl inspect` as a user calls it."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import soundfile
from typer.testing import CliRunner

from nest_ssl.cli.main import app, main

runner = CliRunner()


@pytest.fixture
def manifest(tmp_path: Path) -> Path:
    rng = np.random.default_rng(0)
    lines = []
    for number in range(12):
        duration_s = 1.1 + 0.1 * number
        soundfile.write(tmp_path / f"{number}.wav", rng.uniform(-0.1, 0.1, round(16000 * duration_s)), 16000)
        lines.append({"audio_filepath": f"{number}.wav", "duration": duration_s})
    lines.append({"audio_filepath": "[bold]gone.wav", "duration": 1.5})
    path = tmp_path / "m.jsonl"
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return path


def run(*arguments: object) -> str:
    result = runner.invoke(app, ["inspect", *(str(argument) for argument in arguments)])
    assert result.exit_code == 0, result.output
    return result.output


def test_tables_and_a_page(manifest: Path, tmp_path: Path) -> None:
    output = tmp_path / "report.html"
    keys = ("model.train_ds.num_buckets=2", "model.train_ds.drop_last=false")
    text = run(manifest, *keys, "--noise", manifest, "--output", output, "--batch-size", 4, "--batch-size", 2)
    assert "speech: m.jsonl: 13 utterances, 0.01 h" in text
    assert "headers of all files" in text
    assert "16000 Hz" in text
    assert "WAV/PCM_16" in text
    assert "[bold]gone.wav: No such file or directory" in text
    assert text.count("lower bound") == 2
    assert "batch_size=2" in text
    assert f"{output}: 2 example batches drawn" in text
    assert output.read_text(encoding="utf-8").startswith("<!DOCTYPE html>")
    assert run(manifest, "--files", 5, "--examples", 0, "--output", output).count("a sample: 5 of 13 files") == 1


def test_the_same_command_prints_the_same(manifest: Path, tmp_path: Path) -> None:
    arguments = (manifest, "--output", tmp_path / "a.html", "--examples", 0)
    assert run(*arguments) == run(*arguments)


def test_a_missing_folder_is_an_error_before_any_work(manifest: Path, tmp_path: Path) -> None:
    result = runner.invoke(app, ["inspect", str(manifest), "--output", str(tmp_path / "no" / "x.html")])
    assert result.exit_code == 1
    assert f"there is no folder {tmp_path / 'no'}. Create it first." in str(result.exception)


def test_the_batch_size_of_the_configuration_counts_unless_it_is_the_packages(manifest: Path, tmp_path: Path) -> None:
    arguments = (manifest, "--output", tmp_path / "a.html", "--examples", 0)
    assert "sorted, 16 each" in run(*arguments)
    assert "sorted, 3 each" in run(*arguments, "model.train_ds.batch_size=3")
    assert "sorted, 5 each" in run(*arguments, "model.train_ds.batch_size=3", "--batch-size", 5)


@pytest.mark.parametrize("as_noise", [False, True])
def test_a_page_does_not_overwrite_a_manifest(manifest: Path, tmp_path: Path, as_noise: bool) -> None:
    other = tmp_path / "other.jsonl"
    before = manifest.read_bytes()
    other.write_bytes(before)
    arguments = [str(other), "--noise", str(manifest)] if as_noise else [f"{other},{manifest}"]
    (tmp_path / "x").mkdir()
    result = runner.invoke(app, ["inspect", *arguments, "--output", str(tmp_path / "x" / ".." / "m.jsonl")])
    assert result.exit_code == 1
    assert f"would overwrite the input {manifest}. Give another path." in str(result.exception)
    assert manifest.read_bytes() == before


def test_a_page_does_not_overwrite_audio(manifest: Path) -> None:
    audio = next(manifest.parent.rglob("*.wav"))
    before = audio.read_bytes()
    result = runner.invoke(app, ["inspect", str(manifest), "--output", str(audio)])
    assert f"--output {audio}: is an audio file" in str(result.exception)
    assert audio.read_bytes() == before


@pytest.mark.parametrize("seed", ["-1", "99999999999999999999999"])
def test_a_seed_out_of_range_is_refused_by_its_name(manifest: Path, seed: str) -> None:
    result = runner.invoke(app, ["inspect", str(manifest), "--seed", seed])
    assert result.exit_code == 2
    assert "--seed" in result.output


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs /dev/full")
def test_a_full_terminal_does_not_turn_a_page_into_a_failure(
    manifest: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with open("/dev/full", "w") as full:
        monkeypatch.setattr("sys.stdout", full)
        with pytest.raises(SystemExit) as ended:
            main(["inspect", str(manifest), "--output", str(tmp_path / "page.html")])
    assert ended.value.code == 0
    assert (tmp_path / "page.html").read_text(encoding="utf-8").rstrip().endswith("</html>")
