from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

from nest_ssl import load
from nest_ssl.verify import verify
from nest_ssl.verify.compare import ask_nemo, compare

GOLDEN = Path(__file__).parents[2] / "parity" / "golden"


def run(*arguments: str | Path) -> subprocess.CompletedProcess[str]:
    program = "from nest_ssl.cli.main import main; main()"
    command = [sys.executable, "-c", program, *map(str, arguments)]
    env = {name: value for name, value in os.environ.items() if name != "NEST_SSL_NEMO_PYTHON"}
    return subprocess.run(command, capture_output=True, text=True, check=False, env=env)


def test_numbers_of_another_model_are_told_apart_from_wrong_ones() -> None:
    four = verify(GOLDEN / "four_books.nemo", GOLDEN / "pre_conv.npz")
    assert not four.passed
    nemo = dict(np.load(GOLDEN / "pre_conv.npz")) | {"layer_2": np.zeros(1)}
    batch = tuple(torch.from_numpy(np.load(GOLDEN / "batch.npz")[key]) for key in ("audio", "noisy", "audio_len"))
    with pytest.raises(ValueError, match="belong to another model: only one side has layer_2"):
        compare(load(GOLDEN / "pre_conv.nemo"), (batch[0], batch[1], batch[2]), nemo)


def test_an_interpreter_that_cannot_answer_is_named() -> None:
    with pytest.raises(ValueError, match="/nonexistent: cannot be run as an interpreter"):
        ask_nemo(GOLDEN / "pre_conv.nemo", "/nonexistent")
    with pytest.raises(RuntimeError, match=r"pre_conv\.nemo: NeMo could not run it \(exit code 1\)"):
        ask_nemo(GOLDEN / "pre_conv.nemo", sys.executable)
    with pytest.raises(RuntimeError, match=r"no output \(/bin/true\)"):
        ask_nemo(GOLDEN / "pre_conv.nemo", "/bin/true")


def test_an_interpreter_with_nemo_does_not_need_this_package() -> None:
    lines = [
        "import runpy, sys",
        "sys.modules['nest_ssl'] = sys.modules['nemo'] = None",
        "sys.argv = ['compare.py', 'model.nemo', 'out.npz']",
        f"runpy.run_path({sys.modules[compare.__module__].__file__!r}, run_name='__main__')",
    ]
    done = subprocess.run([sys.executable, "-c", "; ".join(lines)], capture_output=True, text=True, check=False)
    last_line = done.stderr.splitlines()[-1]
    assert "ModuleNotFoundError" in last_line
    assert "nemo" in last_line  # it came as far as NeMo itself


def test_verify_compares_with_recorded_numbers_and_writes_the_page(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    done = run("verify", GOLDEN / "streaming.nemo", "--report", page)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "recorded from NeMo in streaming.npz" in done.stdout
    text = page.read_text()
    assert "| decoder | log-probabilities |" in text
    for section in ("Training flow", "Forward", "Training step", "Data", "Ranks", "Loader", "Loss", "Config"):
        assert f"## {section}" in text


def test_verify_fails_on_a_file_that_differs(tmp_path: Path) -> None:
    for name in ("batch.npz", "pre_conv.npz"):
        shutil.copy(GOLDEN / name, tmp_path / name)
    model = load(GOLDEN / "pre_conv.nemo")
    model.get_parameter("decoder.decoder_layers.0.bias").data[3] += 0.5
    model.save_to(tmp_path / "pre_conv.nemo")
    done = run("verify", tmp_path / "pre_conv.nemo")
    assert done.returncode == 1
    differing = [line for line in done.stdout.splitlines() if "DIFFERS" in line]
    assert any("log-probabilities" in line for line in differing)
    assert not any("encoder" in line for line in differing)


def test_verify_without_nemo_checks_the_file_and_says_what_it_did_not_do(tmp_path: Path) -> None:
    shutil.copy(GOLDEN / "pre_conv.nemo", tmp_path / "alone.nemo")
    done = run("verify", tmp_path / "alone.nemo")
    assert done.returncode == 0, done.stdout + done.stderr
    assert "Not compared with NeMo" in done.stdout
    model = load(tmp_path / "alone.nemo")
    next(model.encoder.parameters()).data[0] = float("nan")
    model.save_to(tmp_path / "broken.nemo")
    assert run("verify", tmp_path / "broken.nemo").returncode == 1


def test_an_interpreter_that_was_given_is_asked_although_numbers_are_recorded() -> None:
    done = run("verify", GOLDEN / "pre_conv.nemo", "--nemo-python", sys.executable)
    assert done.returncode == 1
    assert "NeMo could not run it" in done.stderr
