"""Measuring in parallel."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import soundfile

from nest_ssl.data.manifest.listing import Entry
from nest_ssl.prepare import measure
from nest_ssl.prepare.measure import measure_all


def test_a_file_that_kills_the_decoder_is_listed_and_the_others_are_measured(tmp_path: Path) -> None:
    for number in range(4):
        soundfile.write(tmp_path / f"{number}.wav", np.full(8000, 0.1), 16000)
    entries = [Entry(str(tmp_path / f"{number}.wav"), item={"crash": number == 2}) for number in range(4)]
    results = list(measure_all(iter(entries), decode=CrashOn("2.wav"), num_workers=2))  # type: ignore[arg-type]
    assert [result.reason for result in results] == [None, None, measure.CRASHED, None]


class CrashOn:
    """Stands for `decode` and is asked in the worker, which it ends when the file's name is the given one."""

    def __init__(self, name: str) -> None:
        self.name = name

    def __bool__(self) -> bool:
        frame: Any = sys._getframe(1)
        if frame.f_locals.get("entry") is not None and frame.f_locals["entry"].path.endswith(self.name):
            os._exit(11)
        return True


def test_memory_does_not_hold_the_input(monkeypatch: pytest.MonkeyPatch) -> None:
    drawn = 0

    def endless() -> Iterator[Entry]:
        nonlocal drawn
        while True:
            drawn += 1
            yield Entry("x", error="bad")

    results = measure_all(endless(), decode=True, num_workers=1)
    for _ in range(50):
        next(results)
    results.close()  # type: ignore[attr-defined]
    assert drawn <= (measure.TASKS_AHEAD + 2) * measure.FILES_PER_TASK


SLOW_START = """
import os, sys, time
if "--multiprocessing-fork" in sys.orig_argv:
    open(os.path.join(os.path.dirname(__file__), f"{os.getpid()}.started"), "w").close()
    time.sleep(1)
"""
INTERRUPTED = """
import os, pathlib, signal, sys, time
from concurrent.futures.process import BrokenProcessPool
from nest_ssl.prepare.measure import Workers

signal.signal(signal.SIGINT, lambda number, frame: print("interrupted"))
with Workers(2) as pool:
    tasks = [pool.submit(abs, -1) for _ in range(2)]
    while len(list(pathlib.Path(sys.argv[1]).glob("*.started"))) < 2:
        time.sleep(0.01)
    os.killpg(0, signal.SIGINT)
    for task in tasks:
        try:
            task.result()
        except BrokenProcessPool:
            print("broken")
"""


def test_workers_that_are_interrupted_while_they_import_end_without_a_traceback(tmp_path: Path) -> None:
    (tmp_path / "sitecustomize.py").write_text(SLOW_START)
    env = {**os.environ, "PYTHONPATH": os.pathsep.join([str(tmp_path), *sys.path])}
    command = [sys.executable, "-c", INTERRUPTED, str(tmp_path)]
    done = subprocess.run(
        command, env=env, capture_output=True, text=True, check=False, start_new_session=True, timeout=60
    )
    assert (done.stdout, done.stderr) == ("interrupted\nbroken\nbroken\n", "")


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="prctl and /proc of Linux")
def test_workers_end_with_a_program_that_is_killed() -> None:
    code = (
        "from nest_ssl.prepare.measure import Workers\nimport os, time\n"
        "if __name__ == '__main__':\n"
        "    pool = Workers(1)\n    print(pool.submit(os.getpid).result(), flush=True)\n    time.sleep(60)\n"
    )
    with subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        worker = Path("/proc") / process.stdout.readline().strip()
        assert worker.exists()
        process.kill()
    deadline = time.monotonic() + 10
    while worker.exists() and "(zombie)" not in (worker / "status").read_text() and time.monotonic() < deadline:
        time.sleep(0.05)
    assert time.monotonic() < deadline
