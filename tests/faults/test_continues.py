"""What must not end a run (bad files, a non-finite batch, a slow rank, nothing wrong at all), and what must."""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import time
from pathlib import Path

import pytest

from tests.faults.harness import FLOOR_S, Lab, check_named, check_nothing_left, keep_for_the_table, said
from tests.integration.runs import losses


@pytest.mark.faults
def test_row_10_bad_audio_is_counted_named_and_replaced(lab: Lab) -> None:
    lines = [json.loads(line) for line in (lab.corpus / "train.jsonl").read_text().splitlines()]
    whole_file = (lab.corpus / lines[3]["audio_filepath"]).read_bytes()
    bad = {1: b"", 2: b"not audio at all", 3: whole_file[: len(whole_file) // 2]}
    for number, line in enumerate(lines):
        line["audio_filepath"] = str(lab.corpus / line["audio_filepath"])
        if number in bad:
            path = lab.folder / f"bad{number}.wav"
            path.write_bytes(bad[number])
            line["audio_filepath"] = str(path)
    manifest = lab.folder / "train.jsonl"
    manifest.write_text("".join(json.dumps(line) + "\n" for line in lines))
    run = lab.start(more=(f"model.train_ds.manifest_filepath={manifest}", "model.train_ds.max_bad_fraction=0.5")).wait()
    assert run.returncode == 0, run.stderr[-4000:]
    assert len(losses(run.run_dir / "metrics.csv")) == 8
    named = "".join(path.read_text() for path in run.run_dir.glob("bad_files_train_ds_rank*.jsonl"))
    for number in bad:
        assert f"bad{number}.wav" in named
    assert not run.incidents()
    keep_for_the_table(run, f"in bad_files_train_ds_rank0.jsonl: {named.splitlines()[0]}")


@pytest.mark.faults
def test_row_12_all_ranks_skip_a_batch_that_is_not_finite(lab: Lab) -> None:
    run = lab.start("nan_batch 1 4").wait()
    assert run.returncode == 0, run.stderr[-4000:]
    told = said(run, r"rank 1, step 4: the loss is not finite; every rank skips this step.*")
    assert ".wav" in told
    keep_for_the_table(run, told)
    values = [float(loss) for loss in losses(run.run_dir / "metrics.csv").values()]  # rank 0's
    assert len(values) == 8
    assert all(value == value for value in values)
    assert not run.incidents()


@pytest.mark.faults
def test_row_14_a_slow_rank_is_named_and_keeps_running(lab: Lab) -> None:
    run = lab.start("slow_rank 1 0", more=("trainer.max_steps=24", "trainer.check_val_every_n_epoch=100")).wait()
    assert run.returncode == 0, run.stderr[-4000:]
    told = said(run, r"nest-ssl: warning: rank 1 is slow in encoder.*")
    own_ms, others_ms = map(int, re.findall(r"(\d+) ms", told))
    assert own_ms >= 200 > others_ms
    keep_for_the_table(run, told)
    assert "rank 0 is slow" not in run.stderr
    assert not run.incidents()


@pytest.mark.faults
def test_row_17_a_full_disk_ends_the_run_and_is_named(lab: Lab, small_disk: Path, whole: Path) -> None:
    more = (f"exp_manager.checkpoint_callback_params.dirpath={small_disk}/checkpoints",)
    (small_disk / "ballast").write_bytes(b"x")
    run = lab.start(more=more)
    run.wait_for_step(3)  # the first checkpoint exists
    free = shutil.disk_usage(small_disk).free
    (small_disk / "ballast").write_bytes(b"x" * (free - 4096))
    run.wait()
    assert run.returncode == 1, run.stderr[-4000:]
    incident = run.incident
    assert incident["ranks"] == [0]
    assert incident["stage"] == "checkpoint"
    assert str(small_disk) in incident["cause"]
    assert "MB are free" in incident["cause"]
    check_nothing_left(run)
    keep_for_the_table(run, incident["text"].replace(str(small_disk), "/small"))


@pytest.mark.faults
def test_row_28_the_original_hang(lab: Lab) -> None:
    more = ("trainer.max_epochs=1", "trainer.max_steps=-1", "~model.validation_ds")
    run = lab.start("the_original_hang all 0", more=more).wait()
    incident = check_named(run, ranks=[1], stage="end", within_s=FLOOR_S + 2)
    assert incident["kind"] == "left-early"
    assert "all_reduce of [1]" in incident["cause"]
    assert "batch counts" in incident["cause"]
    assert incident["waiting"] == {"0": "encoder"}


@pytest.mark.faults
def test_row_24_a_slow_but_healthy_run_raises_no_alarm(lab: Lab) -> None:
    run = lab.start(
        "slow_but_well all 0",
        more=("trainer.max_steps=1000", "trainer.check_val_every_n_epoch=150", "trainer.log_every_n_steps=50"),
    ).wait(timeout_s=600)
    assert run.returncode == 0, run.stderr[-4000:]
    assert not run.incidents()
    assert "warning: rank" not in run.stderr
    check_nothing_left(run)
    keep_for_the_table(run, "no alarm, no warning")


@pytest.mark.faults
def test_action_report_reports_once_and_does_not_end_the_job(lab: Lab, whole: Path) -> None:
    run = lab.start("encoder:freeze 1 4", more=("watchdog.action=report",))

    deadline = time.monotonic() + 60
    while not run.incidents():
        assert time.monotonic() < deadline
        time.sleep(0.1)
    time.sleep(2)
    assert len(run.incidents()) == 1
    pid = next(row["pid"] for row in run.status()["rows"] if row["rank"] == 1)
    os.kill(pid, signal.SIGCONT)
    run.wait()
    assert run.returncode == 0, run.stderr[-4000:]
    assert losses(run.run_dir / "metrics.csv") == losses(whole / "metrics.csv")
