"""`nest-ssl demo` as a user calls it."""

from __future__ import annotations

import shlex
import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner

from nest_ssl.cli import main
from nest_ssl.config import compose
from nest_ssl.data.manifest.read import open_manifests

SMALL = ["--num-train", "2", "--num-val", "1", "--num-noise", "1", "--duration", "0.5", "--synthesizer", "formants"]


def test_it_says_where_things_are_and_what_comes_next(tmp_path: Path) -> None:
    folder = tmp_path / "my 'data' (1)=$x"
    result = CliRunner().invoke(main.app, ["demo", "--data-dir", str(folder), *SMALL])
    assert result.exit_code == 0, result.output
    assert f"{folder}: made (voices: formants)" in result.output
    assert f"{folder}/train.jsonl: 2 utterances of 1 voices" in result.output
    command = shlex.split(result.output.split("nest-ssl pretrain", 1)[1].replace("\\\n", " "))  # as a shell does
    train_ds = compose(overrides=command).model.train_ds
    assert train_ds is not None
    assert train_ds.manifest_filepath == f"{folder}/train.jsonl"
    assert [Path(line.audio_filepath).is_file() for line in open_manifests(train_ds.manifest_filepath)] == [True, True]
    again = CliRunner().invoke(main.app, ["demo", "--data-dir", str(folder), *SMALL])
    assert "was there already" in again.output


def test_other_arguments_are_one_line_and_a_code_of_1(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = ["nest-ssl", "demo", "--data-dir", str(tmp_path / "data"), *SMALL]
    monkeypatch.setattr(sys, "argv", arguments)
    with pytest.raises(SystemExit) as made:
        main.main()
    assert made.value.code == 0
    monkeypatch.setattr(sys, "argv", [*arguments, "--seed", "3"])
    with pytest.raises(SystemExit) as refused:
        main.main()
    assert refused.value.code == 1
    error = capsys.readouterr().err
    assert "was made with seed 0, not 3. Give --overwrite" in error
    assert "Traceback" not in error
