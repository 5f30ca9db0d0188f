"""What happens before a command has come to work."""

from __future__ import annotations

import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

from nest_ssl.cli.main import main

INTERRUPTED = """
import os, signal, sys, time
module = sys.argv[1]

class Finder:
    def find_spec(self, name, path, target=None):
        if name == module:
            os.kill(os.getpid(), signal.SIGINT)
            time.sleep(10)

signal.signal(signal.SIGINT, signal.default_int_handler)  # a test runner in the background has it ignored
sys.meta_path.insert(0, Finder())
from nest_ssl.__main__ import main
sys.argv = ["nest-ssl", "info", "nowhere.nemo"]
main()
"""


@pytest.mark.parametrize("module", ["typer", "nest_ssl.config", "torch"])
def test_an_interrupt_during_an_import_ends_the_program_without_a_traceback(module: str) -> None:
    done = subprocess.run([sys.executable, "-c", INTERRUPTED, module], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout, done.stderr) == (130, "", "")


def test_the_installed_command_starts_where_interrupts_are_handled() -> None:
    project = tomllib.loads((Path(__file__).parents[2] / "pyproject.toml").read_text())["project"]
    assert project["scripts"]["nest-ssl"] == "nest_ssl.__main__:main"


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs /dev/full")
@pytest.mark.parametrize("words", [["--version"], ["info", "nest_fast-conformer"]])
def test_words_that_cannot_be_printed_are_an_error_in_one_line(words: list[str]) -> None:
    with open("/dev/full", "w") as full:
        command = [sys.executable, "-m", "nest_ssl", *words]
        done = subprocess.run(command, stdout=full, stderr=subprocess.PIPE, text=True, check=False)
    assert done.returncode == 1
    assert done.stderr.startswith("nest-ssl: st")
    assert done.stderr.count("\n") == 1


@pytest.mark.parametrize("words", [["prepare", ""], ["extract", "x.nemo", "in", "out", "--layers", ""]])
def test_an_empty_argument_is_refused_and_placed(words: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main(words)
    assert ended.value.code == 1
    assert f"nest-ssl: the argument after '{words[-2]}' is empty" in capsys.readouterr().err


NO_MEMORY = """
import sys

class Finder:
    def find_spec(self, name, path, target=None):
        if name == "torch":
            raise ImportError("libtorch_cpu.so: failed to map segment from shared object")

sys.meta_path.insert(0, Finder())
from nest_ssl.__main__ import main
sys.argv = ["nest-ssl", "info", "nowhere.nemo"]
main()
"""


def test_too_little_memory_to_load_torch_is_one_line() -> None:
    done = subprocess.run([sys.executable, "-c", NO_MEMORY], capture_output=True, text=True, check=False)
    assert done.returncode == 1
    assert done.stderr.startswith("nest-ssl: libtorch_cpu.so: failed to map segment")
    assert "ulimit -v" in done.stderr
    assert done.stderr.count("\n") == 1


def test_a_carriage_return_at_the_end_of_an_argument_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["prepare", "corpus", "--output", "m.jsonl\r"])
    assert "nest-ssl: 'm.jsonl\\r' ends with a carriage return" in capsys.readouterr().err


def test_a_working_folder_that_was_deleted_is_said_to_be(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "gone").mkdir()
    monkeypatch.chdir(tmp_path / "gone")
    (tmp_path / "gone").rmdir()
    with pytest.raises(SystemExit):
        main(["info", "nest_fast-conformer"])
    assert capsys.readouterr().err == "nest-ssl: the working folder has been deleted. Change to one that exists: cd\n"
