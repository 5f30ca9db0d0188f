"""Measuring in parallel."""

from __future__ import annotations

import os
import sys
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
