"""What is kept of an exception."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from nest_ssl.launch.ranks import tasks_per_node
from nest_ssl.watchdog.judge.failure import Failure, read_failures, write_failure


def raised(act: object) -> BaseException:
    try:
        act()  # type: ignore[operator]
    except Exception as error:
        return error
    raise AssertionError("it did not raise")


def test_the_first_failure_of_a_rank_is_kept(tmp_path: Path) -> None:
    write_failure(tmp_path, 1, raised(lambda: {"b": 1}["a"]), ["a batch"])
    write_failure(tmp_path, 1, raised(lambda: [][3]), [])
    failure = read_failures(tmp_path)[1]
    assert (failure.type, failure.message, failure.context) == ("KeyError", "'a'", ["a batch"])
    assert failure.innermost_frames[0].startswith("<lambda> (judge/test_failure.py:")


def test_a_traceback_is_shown_without_the_frames_of_packages(tmp_path: Path) -> None:
    error = raised(lambda: torch.nn.Linear(3, 4)(torch.zeros(2, 2)))
    shown = write_failure(tmp_path, 0, error, []).short_traceback
    assert "test_failure.py" in shown
    assert "torch/nn" not in shown
    assert "calls of installed packages" in shown
    assert shown.endswith(str(error))


def test_gloos_own_file_and_advice_are_left_out_of_the_first_line() -> None:
    message = (
        "[/__w/pytorch/pytorch/third_party/gloo/gloo/transport/tcp/pair.cc:553] Connection closed by peer "
        "[127.0.0.1]:19860. This is typically caused by a remote worker crashing. Check the logs.\nmore"
    )
    failure = Failure(rank=0, type="RuntimeError", message=message, traceback="", monotonic_ns=0)
    assert failure.first_line == "Connection closed by peer [127.0.0.1]:19860"


@pytest.mark.parametrize(
    ("act", "is_plain"),
    [
        (lambda: tasks_per_node("4x2"), True),  # nest-ssl's own ValueError
        (lambda: Path("/nowhere").read_text(), True),
        (lambda: int("a"), False),
    ],
)
def test_an_error_that_nest_ssl_raised_for_its_user_is_plain(tmp_path: Path, act: object, is_plain: bool) -> None:
    assert write_failure(tmp_path, 0, raised(act), []).is_plain is is_plain


@pytest.mark.parametrize(
    ("kind", "message", "is_lost"),
    [
        ("AcceleratorError", "CUDA error: unspecified launch failure\nSearch for `cudaErrorLaunchFailure' in …", True),
        ("RuntimeError", "CUDA error: uncorrectable ECC error encountered", True),
        ("DistBackendError", "NCCL error: Cuda failure 999 'unknown error'", True),
        ("AcceleratorError", "CUDA error: an illegal memory access was encountered", False),
        ("AcceleratorError", "CUDA error: device-side assert triggered", False),
        ("OutOfMemoryError", "CUDA out of memory. Tried to allocate 2 GiB", False),
        ("ValueError", "CUDA error: unknown error", False),
    ],
)
def test_a_gpu_that_failed_is_told_from_a_bug(kind: str, message: str, is_lost: bool) -> None:
    assert Failure(0, kind, message, "", 0).is_lost_gpu is is_lost
