from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from nest_ssl.report.examples import Predictions
from nest_ssl.run_verdict import RunMetrics, judge, read_metrics, setback, summary_lines
from tests.unit.report.fake_run import rows, write_metrics


@pytest.mark.parametrize("field", ["9" * 2**20, '"' + "9\n" * 2**19 + '"'])
def test_a_field_of_a_megabyte_is_left_out_and_noted(tmp_path: Path, field: str) -> None:
    (tmp_path / "metrics.csv").write_text(f"step,time,x\n0,1,7\n1,2,{field}\n")
    metrics = read_metrics(tmp_path / "metrics.csv")
    assert metrics.num_rows == 2
    assert metrics.columns["x"][0] == 7
    assert metrics.notes == ["metrics.csv: 1 values are not numbers and were left out."]


def test_a_table_from_a_spreadsheet_is_read_with_its_mark_and_its_line_ends(tmp_path: Path) -> None:
    text = "\ufefftrain_loss,step\r4.0,0\r3.0,1\r"
    (tmp_path / "metrics.csv").write_text(text, newline="")
    metrics = read_metrics(tmp_path / "metrics.csv")
    assert (list(metrics.columns["train_loss"]), list(metrics.columns["step"])) == ([4.0, 3.0], [0.0, 1.0])
    assert metrics.notes == []


def test_a_pause_between_two_parts_of_a_run_counts_as_no_audio(tmp_path: Path) -> None:
    logged = rows(20)
    for row in logged[10:]:
        row["time"] += 86_400
    write_metrics(tmp_path / "metrics.csv", logged)
    assert read_metrics(tmp_path / "metrics.csv").audio_s() == pytest.approx(20 * 40)


@pytest.mark.parametrize(
    ("loss", "accuracy", "headline"),
    [
        (5.6, 0.0, "No better than uniform guessing so far"),
        (5.0, 0.03, "The model does not beat the most frequent code yet"),
        (4.0, 0.2, "The model has learned to predict masked tokens"),
    ],
)
def test_the_verdict_follows_the_numbers(tmp_path: Path, loss: float, accuracy: float, headline: str) -> None:
    write_metrics(
        tmp_path / "metrics.csv",
        [{"step": 0, "train_loss": loss, "accuracy": accuracy, "most_frequent_token": 0.05}],
    )
    verdict = judge(read_metrics(tmp_path / "metrics.csv"), 256, None)
    assert verdict.headline == headline
    assert verdict.sentences[-1].startswith("Next: ")


def test_with_many_codes_the_next_step_is_fewer_of_them(tmp_path: Path) -> None:
    row = {"step": 0, "train_loss": 5.0, "accuracy": 0.03, "most_frequent_token": 0.05}
    write_metrics(tmp_path / "metrics.csv", [row])
    assert "model.num_classes=256" in judge(read_metrics(tmp_path / "metrics.csv"), 8192, None).sentences[-1]


@pytest.mark.parametrize(
    ("train_loss_at_end", "advice"), [(4.4, "try a lower learning rate (model.optim.lr)."), (3.0, "More audio helps.")]
)
def test_a_validation_loss_that_rose_again_comes_with_advice(
    tmp_path: Path, train_loss_at_end: float, advice: str
) -> None:
    table: list[dict[str, Any]] = []
    for step in range(40):
        table.append({"step": step, "train_loss": (4.2 if step < 20 else train_loss_at_end) + 0.01 * (step % 2)})
    table.append({"step": 19, "val_loss": 4.2})
    table.append({"step": 39, "val_loss": 4.4})
    write_metrics(tmp_path / "metrics.csv", sorted(table, key=lambda row: int(row["step"])))
    text = setback(read_metrics(tmp_path / "metrics.csv"), 256)
    assert text is not None
    assert text.startswith("The validation loss was 4.200 at step 19 and is 4.400 now, ")
    assert text.endswith(advice)
    assert text in judge(read_metrics(tmp_path / "metrics.csv"), 256, None).sentences


def test_a_validation_loss_that_rose_by_little_is_no_setback(tmp_path: Path) -> None:
    write_metrics(tmp_path / "metrics.csv", [{"step": 9, "val_loss": 3.665}, {"step": 19, "val_loss": 3.692}])
    assert setback(read_metrics(tmp_path / "metrics.csv"), 256) is None


def test_an_accuracy_within_its_error_is_not_called_better() -> None:
    used = np.array([[60], [40]])
    few = Predictions(used, used, {"a": np.array([60, 50]), "b": np.array([5, 50])})
    assert few.accuracy == 0.65 > few.most_frequent
    assert few.accuracy_error == pytest.approx(np.hypot(60 - 32.5, 5 - 32.5) / 100)
    metrics = RunMetrics({}, {}, [])
    assert judge(metrics, 2, few).headline == "The model does not clearly beat the most frequent code yet"
    even = Predictions(used, used, {"a": np.array([35, 50]), "b": np.array([35, 50])})
    assert judge(metrics, 2, even).headline == "The model has learned to predict masked tokens"


def test_the_terminal_gets_the_figures_of_the_verdict(tmp_path: Path) -> None:
    path = tmp_path / "metrics.csv"
    assert summary_lines(read_metrics(path), judge(read_metrics(path), 64)) == []
    table = [{"step": step, "train_loss": 4.0 - step / 100, "accuracy": 0.5} for step in range(30)]
    write_metrics(path, [row | {"most_frequent_token": 0.25} for row in table])
    metrics = read_metrics(path)
    first, loss, accuracy, _ = summary_lines(metrics, judge(metrics, 64))
    assert first == "after 30 steps: The model has learned to predict masked tokens."
    mean = sum(row["train_loss"] for row in table[-10:]) / 10
    assert loss.startswith(f"The training loss is {mean:.3f} (mean of the last 10 logged steps; ")
    assert loss.endswith("uniform guessing among 64 codes gives ln 64 = 4.159.")
    assert accuracy.startswith("50.0% of the masked tokens in the last training batches are predicted correctly; ")
    write_metrics(path, rows(20))
    metrics = read_metrics(path)
    assert (
        f"The validation loss is {rows(20)[-1]['val_loss']:.3f} at step 19"
        in summary_lines(metrics, judge(metrics, 64))[1]
    )
