"""What is kept of an exception."""

from __future__ import annotations

from pathlib import Path

import torch

from nest_ssl.watchdog.report.evidence import innermost_frames
from nest_ssl.watchdog.report.failure import read_failures, write_failure
from nest_ssl.watchdog.report.incident import newest_checkpoint


def raised(act: object) -> BaseException:
    try:
        act()  # type: ignore[operator]
    except Exception as error:
        return error
    raise AssertionError("it did not raise")


def test_the_first_failure_of_a_rank_counts(tmp_path: Path) -> None:
    write_failure(tmp_path, 1, raised(lambda: {"b": 1}["a"]), ["a batch"])
    write_failure(tmp_path, 1, raised(lambda: [][3]), [])
    failure = read_failures(tmp_path)[1]
    assert (failure.type, failure.message, failure.context) == ("KeyError", "'a'", ["a batch"])
    assert failure.innermost_frames[0].startswith("<lambda> (report/test_failure.py:")


def test_a_traceback_is_shown_without_the_frames_of_packages(tmp_path: Path) -> None:
    error = raised(lambda: torch.nn.Linear(3, 4)(torch.zeros(2, 2)))
    shown = write_failure(tmp_path, 0, error, []).short_traceback
    assert "test_failure.py" in shown
    assert "torch/nn" not in shown
    assert "calls of installed packages" in shown
    assert shown.endswith(str(error))


def test_the_frames_of_py_spy_and_of_faulthandler_read_alike() -> None:
    spied = (
        'Process 1: python\n\nThread 1: "MainThread"\n    f (a/b.py:3)\n    g (c.py:4)\nThread 2: "x"\n    h (d.py:1)'
    )
    handled = (
        "Thread 0x7f (most recent call first):\n"
        '  File "/x/d.py", line 1 in h\n\n'
        "Current thread 0x7e (most recent call first):\n"
        '  File "/x/a/b.py", line 3 in f\n'
        '  File "/x/c.py", line 4 in g\n'
    )
    assert innermost_frames(spied) == ["f (a/b.py:3)", "g (c.py:4)"]
    assert innermost_frames(handled) == ["f (a/b.py:3)", "g (x/c.py:4)"]
    assert innermost_frames("") == []


def test_a_checkpoint_that_leads_nowhere_is_none(tmp_path: Path) -> None:
    (tmp_path / "checkpoints").mkdir()
    (tmp_path / "checkpoints" / "gone.ckpt").symlink_to(tmp_path / "nowhere")
    assert newest_checkpoint(tmp_path) is None
    (tmp_path / "checkpoints" / "last.ckpt").write_bytes(b"")
    assert newest_checkpoint(tmp_path) == tmp_path / "checkpoints" / "last.ckpt"


def test_of_two_names_of_one_checkpoint_the_last_is_given(tmp_path: Path) -> None:
    folder = tmp_path / "checkpoints"
    folder.mkdir()
    (folder / "m--val_loss=1.ckpt").write_bytes(b"")
    for name in ("last.ckpt", "a.ckpt"):
        (folder / name).hardlink_to(folder / "m--val_loss=1.ckpt")
    assert newest_checkpoint(tmp_path) == folder / "last.ckpt"
