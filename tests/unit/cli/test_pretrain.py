"""The end of `nest-ssl pretrain`, after training."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

FINISHED_RUN = """
import os, sys
from pathlib import Path
from nest_ssl.cli import pretrain
from nest_ssl.cli.main import main
from nest_ssl.training import run

def train(cfg, main, command):
    with open(sys.argv[1] + "/opened", "w") as file:
        assert file.fileno() > 2  # what is printed must not end up in a file
    return run.Outcome(0, Path(sys.argv[1]), speaks=True)

run.run, pretrain._write_report = train, lambda run_dir: None
main(["pretrain"])
"""


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="no /dev/full")
@pytest.mark.parametrize("streams", [">/dev/full", ">&- 2>&- <&-"])
def test_a_closed_or_full_terminal_does_not_turn_a_finished_run_into_a_failed_one(tmp_path: Path, streams: str) -> None:
    command = f'"$0" -c "$1" "$2" {streams}'
    done = subprocess.run(
        ["sh", "-c", command, sys.executable, FINISHED_RUN, str(tmp_path)], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "opened").exists()
    assert ("stdout: No space left on device" in done.stderr) == (streams == ">/dev/full")


def test_a_reader_that_ends_early_does_not_turn_a_finished_run_into_a_failed_one(tmp_path: Path) -> None:
    command = [sys.executable, "-c", FINISHED_RUN, str(tmp_path)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        process.stdout.close()  # as 'head' does
        assert process.stderr is not None
        text = process.stderr.read()
    assert process.returncode == 0, text
    assert "stdout: Broken pipe" in text
