"""Reports of runs of the real program."""

from __future__ import annotations

import html
from pathlib import Path

from nest_ssl.report.report import write_run_report
from tests.integration.runs import arguments, losses, make_corpus, run, run_and_kill


def test_killed_and_finished_runs_both_have_a_report(tmp_path: Path) -> None:
    make_corpus(tmp_path / "corpus")
    args = arguments(tmp_path / "corpus", tmp_path, "reported", "exp_manager.resume_if_exists=true")
    args += ["exp_manager.resume_ignore_no_checkpoint=true"]
    folder = tmp_path / "reported"
    run_and_kill(args, folder / "metrics.csv", at_step=7)
    text = html.unescape(write_run_report(folder).read_text(encoding="utf-8"))
    assert "of 10 steps" in text
    assert "No picture" not in text
    assert "Weights from <code>" in text
    assert run(args).returncode == 0
    text = html.unescape(write_run_report(folder).read_text(encoding="utf-8"))
    assert "<b>10</b><span>of 10 steps" in text
    assert "No picture" not in text
    ((step, val_loss),) = losses(folder / "metrics.csv", "val_loss").items()  # one epoch has ended
    assert f"The validation loss is {float(val_loss):.3f} at step {step}" in text
