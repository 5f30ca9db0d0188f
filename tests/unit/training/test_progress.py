from __future__ import annotations

from types import SimpleNamespace
from typing import Any, cast

import pytest

from nest_ssl.training.metrics_csv import MetricsCsv
from nest_ssl.training.progress import ProgressReport


def test_a_run_that_fails_gives_the_terminal_back(tmp_path: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.stderr.isatty", lambda: True, raising=False)
    report = ProgressReport(MetricsCsv(tmp_path / "metrics.csv"))
    trainer = cast(Any, SimpleNamespace(global_step=0, is_global_zero=True, estimated_stepping_batches=8))
    report.on_train_start(trainer, cast(Any, None))
    bar = report.bar
    assert bar is not None
    assert bar.live.is_started
    report.on_exception(trainer, cast(Any, None), KeyboardInterrupt())
    assert not bar.live.is_started
