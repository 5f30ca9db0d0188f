"""The kernel tests on a CPU: by Triton's interpreter, which must be chosen before Triton is imported."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
from pathlib import Path

import pytest

KERNEL_TESTS = Path(__file__).with_name("test_kernels.py")


@pytest.mark.skipif(sys.platform != "linux", reason="Triton is made for Linux")
def test_kernels_give_the_numbers_of_plain_torch_in_the_interpreter() -> None:
    assert importlib.util.find_spec("triton"), "Triton is missing: install the 'dev' extra"
    command = [sys.executable, "-m", "pytest", "-v", "-p", "no:cacheprovider", str(KERNEL_TESTS)]
    environment = {**os.environ, "TRITON_INTERPRET": "1", "CUDA_VISIBLE_DEVICES": ""}
    run = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=600)
    assert run.returncode == 0, run.stdout[-4000:]
    assert "passed" in run.stdout
    assert "skipped" not in run.stdout
