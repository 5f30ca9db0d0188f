"""Rows 34 and 35: four NCCL ranks that share one GPU. The trials themselves are benchmarks/stalls_on_gpu.py."""

from __future__ import annotations

import argparse
from pathlib import Path

import pytest
import torch
from benchmarks.stalls_on_gpu import TRIALS, Lab

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.faults,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA GPU"),
]


@pytest.fixture(scope="module")
def lab(tmp_path_factory: pytest.TempPathFactory) -> Lab:
    options = argparse.Namespace(ranks=4, floor=5.0, accelerator="gpu")
    return Lab(tmp_path_factory.mktemp("gpu"), options)


@pytest.fixture(scope="module")
def undisturbed(lab: Lab) -> dict[bool, Path]:
    return {captured: lab.undisturbed(captured) for captured in (True, False)}


@pytest.mark.parametrize("name", TRIALS)
def test_rows_34_and_35_a_fault_on_gpus_is_named_and_the_run_resumes(
    lab: Lab, undisturbed: dict[bool, Path], name: str
) -> None:
    result = lab.try_it(name, undisturbed)
    assert result.ok, "\n".join([*result.wrong, result.said])
