"""A rank dies or fails: the report names that rank, never the one that noticed."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import time
from pathlib import Path

import pytest
import torch

from tests.faults.harness import (
    Lab,
    Run,
    check_named,
    check_nothing_left,
    check_resumes,
    check_same_losses,
    check_stopped_as_agreed,
    keep_for_the_table,
    noise_s,
    said,
)
from tests.integration.runs import losses


@pytest.mark.parametrize("rank", [1, pytest.param(0, marks=pytest.mark.faults)])
def test_row_1_a_killed_rank_is_named(lab: Lab, whole: Path, rank: int) -> None:
    run = lab.start(f"encoder:kill {rank} 4").wait()
    incident = check_named(run, ranks=[rank], stage="encoder", within_s=3)
    assert "SIGKILL" in incident["cause"]
    assert "out of memory?" in incident["cause"]
    check_resumes(lab, run, whole)


def test_row_6_an_exception_on_one_rank_is_reported_once(lab: Lab) -> None:
    run = lab.start("encoder:fail 1 4").wait()
    incident = check_named(run, ranks=[1], stage="encoder", within_s=3, exit_code=1)
    assert "a bug in somebody's code" in incident["cause"]
    before_the_report = run.stderr.split("nest-ssl: rank 1 failed")[0]
    assert before_the_report.count("Traceback (most recent call last)") == 1
    assert "in fail" in before_the_report
    assert "Connection closed" not in run.stderr


@pytest.mark.faults
def test_row_6_the_run_resumes_once_the_exception_is_gone(lab: Lab, whole: Path) -> None:
    run = lab.start("encoder:fail 0 4").wait()
    check_named(run, ranks=[0], stage="encoder", within_s=3, exit_code=1)
    check_resumes(lab, run, whole)


def test_row_8_a_killed_worker_is_named_with_its_file(lab: Lab) -> None:
    run = lab.start("loader:kill 1 9", more=("model.train_ds.num_workers=1",)).wait()
    incident = check_named(run, ranks=[1], stage="data", within_s=6)
    assert incident["file"].endswith(".wav")
    assert "shared memory" in incident["cause"]
    assert "DataLoader worker 0" in incident["cause"]
    assert "Traceback" not in run.stderr  # of wherever the rank happened to be


@pytest.mark.faults
def test_row_8_the_run_resumes_after_a_killed_worker(lab: Lab, whole: Path) -> None:
    run = lab.start("loader:kill 0 9", more=("model.train_ds.num_workers=1",)).wait()
    check_named(run, ranks=[0], stage="data", within_s=6)
    check_resumes(lab, run, whole)


@pytest.mark.faults
@pytest.mark.parametrize("rank", [0, 1])
def test_row_13_a_collective_that_only_one_rank_calls_is_named(lab: Lab, whole: Path, rank: int) -> None:
    run = lab.start(f"encoder:extra_all_reduce {rank} 4").wait()
    incident = check_named(run, ranks=[rank], stage="encoder", within_s=5)
    assert incident["kind"] == "diverged"
    assert "all_reduce of [" in incident["collective"]
    assert "#" in incident["collective"]
    check_resumes(lab, run, whole)


@pytest.mark.faults
def test_row_27_out_of_memory_on_one_rank_is_reported_with_advice(lab: Lab, whole: Path) -> None:
    run = lab.start("encoder:run_out_of_memory 1 4").wait()
    incident = check_named(run, ranks=[1], stage="encoder", within_s=3)
    assert incident["kind"] == "out-of-memory"
    assert "Lower model.train_ds.batch_size" in incident["cause"]
    assert "the longest" in incident["text"]
    check_resumes(lab, run, whole)


@pytest.mark.faults
def test_a_rank_that_loses_its_gpu_is_named_and_the_run_resumes(lab: Lab, whole: Path) -> None:
    run = lab.start("encoder:lose_gpu 1 4").wait()
    incident = check_named(run, ranks=[1], stage="encoder", within_s=3)
    assert incident["kind"] == "lost-gpu"
    assert "nvidia-smi" in incident["advice"]
    check_resumes(lab, run, whole)


@pytest.mark.faults
def test_row_18_a_run_killed_while_saving_resumes(lab: Lab, whole: Path) -> None:
    run = lab.start("killed_while_saving 0 5").wait()
    stage = run.incident["stage"]
    assert stage in ("checkpoint", "data", "validation")  # a thread writes, and the rank may be further
    incident = check_named(run, ranks=[0], stage=stage, within_s=3)
    assert incident["checkpoint"] is not None
    check_resumes(lab, run, whole)


def test_row_22_all_processes_end_with_a_killed_launcher(lab: Lab) -> None:
    run = lab.start(more=("trainer.max_steps=100000", "model.train_ds.num_workers=1"))
    run.wait_for_step(1)
    deadline = time.monotonic() + 20
    while len(run.survivors()) < 6:  # launcher, monitor, two ranks, two workers; each epoch has new ones
        assert time.monotonic() < deadline
        time.sleep(0.01)
    run.process.kill()
    run.process.wait()
    check_nothing_left(run, within_s=2.0)
    keep_for_the_table(run, "nothing: ranks, workers and monitor die with it within 2 s")


@pytest.mark.faults
def test_row_23_training_continues_when_the_monitor_is_killed(lab: Lab, whole: Path) -> None:
    run = lab.start(env={"NEST_FAULT": "slow_rank all 0"})
    run.wait_for_step(0)
    os.kill(run.status()["monitor_pid"], signal.SIGKILL)
    run.wait()
    assert run.returncode == 0, run.stderr[-4000:]
    keep_for_the_table(run, said(run, ".*the monitor was killed; training continues.*"))
    check_same_losses(run, whole)


def test_row_21_preemption_saves_at_a_step_all_ranks_agree_on(lab: Lab) -> None:
    run = lab.start(more=("trainer.max_steps=100000",))
    run.wait_for_step(3)
    asked = time.time()
    run.process.send_signal(signal.SIGTERM)
    run.wait()
    assert run.ended_at - asked < 5 + noise_s()
    assert run.returncode == 75, run.stderr[-4000:]
    assert not run.incidents()
    check_nothing_left(run)
    saved = torch.load(run.run_dir / "checkpoints" / "last.ckpt", map_location="meta", weights_only=True)
    keep_for_the_table(run, check_stopped_as_agreed(run, saved), run.ended_at - asked)


@pytest.mark.faults
@pytest.mark.parametrize(("number", "to_rank"), [(signal.SIGTERM, 1), (signal.SIGUSR1, 0), (signal.SIGUSR1, None)])
def test_row_21_a_signal_to_any_process_stops_all_ranks_resumably(
    lab: Lab, whole: Path, number: signal.Signals, to_rank: int | None
) -> None:
    run = lab.start(env={"NEST_FAULT": "slow_rank all 0"})
    run.wait_for_step(1)
    pid = run.process.pid if to_rank is None else run.status()["rows"][to_rank]["pid"]
    os.kill(pid, number)
    run.wait()
    assert run.returncode == 75, run.stderr[-4000:]
    check_nothing_left(run)
    resumed = lab.start().wait()
    assert resumed.returncode == 0, resumed.stderr[-4000:]
    check_same_losses(run, whole)


@pytest.mark.faults
def test_row_21_a_signal_to_every_process_still_lets_the_ranks_save(lab: Lab, whole: Path) -> None:
    run = lab.start(env={"NEST_FAULT": "slow_rank all 0"}, more=("model.train_ds.num_workers=1",))
    run.wait_for_step(2)
    for line in run.survivors():  # as 'pkill -TERM' and systemd do
        with contextlib.suppress(ProcessLookupError):
            os.kill(int(line.split()[0]), signal.SIGTERM)
    run.wait()
    assert run.returncode == 75, run.stderr[-4000:]
    assert not run.incidents()
    said(run, r"nest-ssl: SIGTERM: all ranks will save and exit by step \d+")
    check_nothing_left(run)
    resumed = lab.start(more=("model.train_ds.num_workers=1",)).wait()
    assert resumed.returncode == 0, resumed.stderr[-4000:]
    check_same_losses(run, whole)


@pytest.mark.faults
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP])
def test_row_21_a_single_rank_saves_and_resumes_too(lab: Lab, number: signal.Signals) -> None:
    run = lab.start("slow_rank all 0", ranks=1)
    run.wait_for_step(2)
    run.process.send_signal(number)
    run.wait()
    assert run.returncode == 75, run.stderr[-4000:]
    saved = torch.load(run.run_dir / "checkpoints" / "last.ckpt", map_location="meta", weights_only=True)
    assert check_stopped_as_agreed(run, saved).startswith(f"nest-ssl: {number.name}: will")
    check_nothing_left(run)
    resumed = lab.start(ranks=1).wait()
    assert resumed.returncode == 0, resumed.stderr[-4000:]
    assert sorted(losses(run.run_dir / "metrics.csv")) == list(range(8))


@pytest.mark.faults
def test_row_21_a_single_rank_that_may_not_save_ends_at_once(lab: Lab) -> None:
    more = ("exp_manager.create_preemption_callback=false", "trainer.max_steps=100000", "model.train_ds.num_workers=1")
    run = lab.start("slow_rank all 0", ranks=1, more=more)
    run.wait_for_step(4)  # the first checkpoint exists
    check_ends_at_once(run, signal.SIGTERM, "without saving, as configured")
    saved = torch.load(run.run_dir / "checkpoints" / "last.ckpt", map_location="meta", weights_only=True)
    assert saved["global_step"] % 3 == 0  # like every checkpoint of these runs
    resumed = lab.start(ranks=1).wait()
    assert resumed.returncode == 0, resumed.stderr[-4000:]
    assert f"resumed at step {saved['global_step']}" in resumed.stderr


@pytest.mark.faults
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_row_21_a_single_rank_before_its_first_step_ends_at_once(lab: Lab, number: signal.Signals) -> None:
    run = lab.start("joins_late 0 0", ranks=1)
    deadline = time.monotonic() + 60
    while not run.note.is_file():
        assert time.monotonic() < deadline
        time.sleep(0.05)
    check_ends_at_once(run, number, "nothing to save before the first step")


def check_ends_at_once(run: Run, number: signal.Signals, why: str) -> None:
    asked = time.time()
    run.process.send_signal(number)
    run.wait()
    assert run.ended_at - asked < 1 + noise_s()
    assert run.returncode == 75, run.stderr[-4000:]
    said(run, rf"nest-ssl: {number.name}: stopped; {why}\n$")
    check_nothing_left(run)


@pytest.mark.faults
def test_max_restarts_resumes_until_the_same_fault_happens_again(lab: Lab) -> None:
    run = lab.start("encoder:kill 1 4", more=("launch.max_restarts=3",)).wait()
    assert run.returncode == 1, run.stderr[-4000:]  # every start has the fault
    assert "the same fault again" in run.stderr
    assert len(run.incidents()) == 2
    check_nothing_left(run)
    first, second = run.incidents()
    assert json.dumps(first["ranks"]) == json.dumps(second["ranks"])
