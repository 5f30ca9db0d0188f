"""Runs that the first edition saved continue with its losses, rates, best checkpoints and patience."""

from __future__ import annotations

import csv
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.first_edition import cases


@dataclass(frozen=True)
class Resumed:
    """A recorded run that the current program has continued."""

    name: str
    case: cases.Case
    record: dict[str, Any]
    folder: Path
    rows_before: list[dict[str, str]]

    def recorded(self, column: str) -> dict[int, float]:
        return {int(step): value for step, value in self.record["continued"][column].items()}

    def continued(self, column: str) -> dict[int, float]:
        curve = cases.curve(self.folder / "metrics.csv", column)
        return {step: value for step, value in curve.items() if step >= self.case.saved_at}


def record_of(name: str) -> dict[str, Any]:
    record: dict[str, Any] = json.loads((cases.RECORDED / name / "record.json").read_text())
    return record


def rows_of(metrics_csv: Path) -> list[dict[str, str]]:
    with metrics_csv.open(newline="") as file:
        return list(csv.DictReader(file))


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("corpus")
    assert cases.make_corpus(folder) == (cases.RECORDED / "corpus.sha256").read_text().strip()
    return folder


@pytest.fixture(scope="module", params=list(cases.CASES))
def resumed(request: pytest.FixtureRequest, corpus: Path, tmp_path_factory: pytest.TempPathFactory) -> Resumed:
    name, exp_dir = request.param, tmp_path_factory.mktemp("runs")
    folder = cases.restore(name, exp_dir)
    rows = rows_of(folder / "metrics.csv")
    case = cases.CASES[name]
    cases.run(name, case.max_steps, corpus=corpus, exp_dir=exp_dir)
    return Resumed(name, case, record_of(name), folder, rows)


@pytest.mark.parametrize("name", list(cases.CASES))
def test_recorded_checkpoints_hold_what_their_record_says(name: str) -> None:
    checkpoint = cases.load(cases.RECORDED / name / "checkpoints" / cases.LAST)
    assert json.loads(json.dumps(cases.describe(checkpoint))) == record_of(name)["saved"]


def test_the_losses_after_a_resume_are_those_of_the_first_edition(resumed: Resumed) -> None:
    assert len(resumed.recorded("train_loss")) >= 10
    assert resumed.continued("train_loss") == pytest.approx(resumed.recorded("train_loss"), abs=1e-4)


def test_the_learning_rates_after_a_resume_are_those_of_the_first_edition(resumed: Resumed) -> None:
    # The first edition logged rates in float32, but its checkpoints keep all digits.
    expected = {step: np.float32(rate) for step, rate in resumed.recorded("learning_rate").items()}
    assert {step: np.float32(rate) for step, rate in resumed.continued("learning_rate").items()} == expected
    last = cases.load(resumed.folder / "checkpoints" / cases.LAST)
    rate = float(last["optimizer_states"][0]["param_groups"][0]["lr"])
    assert rate == pytest.approx(resumed.record["continued"]["end"]["learning_rate"], rel=1e-12, abs=0)


def test_steps_continue_after_the_saved_one_and_rows_before_it_stay(resumed: Resumed) -> None:
    rows = rows_of(resumed.folder / "metrics.csv")
    columns = resumed.rows_before[0].keys()
    assert [{name: row[name] for name in columns} for row in rows[: len(resumed.rows_before)]] == resumed.rows_before
    assert [int(row["step"]) for row in rows if row["train_loss"]] == list(range(resumed.case.ends_at))
    last = cases.load(resumed.folder / "checkpoints" / cases.LAST)
    assert last["global_step"] == resumed.case.ends_at


def test_epochs_end_and_are_validated_where_they_were(resumed: Resumed) -> None:
    """With an average of the weights, the average is validated; the mean of a resumed epoch covers all its steps."""
    # Rounding moves the loss of validation more than that of training: see tests/integration/test_golden_curve.py.
    assert resumed.continued("val_loss") == pytest.approx(resumed.recorded("val_loss"), rel=1e-3)
    expected = resumed.recorded("train_loss_epoch")
    assert resumed.continued("train_loss_epoch") == pytest.approx(expected, abs=1e-4)


def test_the_list_of_the_best_checkpoints_is_carried_over(resumed: Resumed) -> None:
    """What is worse than the best of the list is not kept; what a better one pushes out is deleted."""
    assert cases.best_steps(resumed.folder) == resumed.record["continued"]["best_steps"]


def test_the_batch_plan_is_that_of_the_checkpoint(resumed: Resumed) -> None:
    saved = resumed.record["saved"]["data_position"]
    last = cases.load(resumed.folder / "checkpoints" / cases.LAST)
    assert last["data_position"]["plan_hash"] == saved["plan_hash"]
    assert last["data_position"]["world_size"] == saved["world_size"]
