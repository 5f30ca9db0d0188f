"""Stacks, as they are read for the report."""

from __future__ import annotations

from nest_ssl.watchdog.report.evidence import innermost_frames


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
