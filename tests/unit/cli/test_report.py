"""`nest-ssl report` as a user calls it."""

from __future__ import annotations

from pathlib import Path

import pytest
from typer.testing import CliRunner

from nest_ssl.cli.main import app, main
from tests.unit.report.fake_run import make_run

runner = CliRunner()


def test_the_page_is_written_where_the_command_says(tmp_path: Path) -> None:
    run = make_run(tmp_path, checkpoint=None)
    result = runner.invoke(app, ["report", str(run)])
    assert result.exit_code == 0, result.output
    assert result.output == f"{run / 'report.html'}\n"
    assert (run / "report.html").read_text(encoding="utf-8").startswith("<!DOCTYPE html>")
    other = tmp_path / "other.html"
    assert runner.invoke(app, ["report", str(run), "--output", str(other)]).output == f"{other}\n"
    assert other.read_bytes() == (run / "report.html").read_bytes()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["gone"], "gone: no such folder. Give the folder that 'nest-ssl pretrain' names when it starts."),
        (["."], "contains neither metrics.csv nor hparams.yaml, so it is not a run folder."),
        (["fake", "--output", "fake/metrics.csv"], "fake/metrics.csv: is no page, and would be overwritten."),
        (["fake", "--output", "no/report.html"], "no/report.html: cannot be written: No such file or directory."),
    ],
)
def test_what_a_user_can_fix_is_one_line(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    arguments: list[str],
    message: str,
) -> None:
    make_run(tmp_path, checkpoint=None)
    monkeypatch.chdir(tmp_path)
    with pytest.raises(SystemExit) as stopped:
        main(["report", *arguments])
    assert stopped.value.code == 1
    printed = capsys.readouterr().err
    assert message in printed
    assert printed.count("\n") == 1
