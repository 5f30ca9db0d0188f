"""What ends a run before its first step: ranks that do not match, a port in use, a rank that never joins."""

from __future__ import annotations

import json
import socket
import time
from pathlib import Path

import pytest

from tests.faults.harness import Lab, check_named, check_nothing_left, keep_for_the_table, noise_s, said


def test_row_11_unequal_batch_counts_are_refused(lab: Lab) -> None:
    run = lab.start("one_batch_short 1 0").wait()
    assert run.returncode == 1
    told = said(run, r"nest-ssl: rank \d: the ranks do not match[^\0]*train_ds.batches\n    rank 0: 3\n    rank 1: 2")
    keep_for_the_table(run, told)
    assert "Traceback" not in run.stderr
    assert not (run.run_dir / "metrics.csv").exists()
    check_nothing_left(run)


@pytest.mark.faults
def test_row_11_different_manifests_on_the_ranks_are_refused(lab: Lab) -> None:
    for rank in range(2):
        text = (lab.corpus / "train.jsonl").read_text().replace('"audio/', f'"{lab.corpus}/audio/')
        lines = text.splitlines(keepends=True)
        (lab.folder / f"train{rank}.jsonl").write_text("".join(lines if rank == 0 else reversed(lines)))
    manifest = f"model.train_ds.manifest_filepath={lab.folder}/train${{oc.env:RANK}}.jsonl"
    run = lab.start(more=(manifest,)).wait()
    assert run.returncode == 1
    assert f"rank 1: {lab.folder}/train1.jsonl" in run.stderr
    check_nothing_left(run)


@pytest.mark.faults
def test_a_user_error_is_one_line_on_many_ranks_too(lab: Lab) -> None:
    run = lab.start(more=("model.train_ds.manifest_filepath=/nowhere.jsonl",)).wait()
    assert run.returncode == 1
    assert "/nowhere.jsonl: no such manifest" in run.stderr
    assert "Traceback" not in run.stderr
    check_nothing_left(run)


def test_row_19_a_port_in_use_is_reported_at_once(lab: Lab) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        started = time.time()
        run = lab.start(env={"MASTER_PORT": str(port)}).wait()
    assert run.returncode == 1
    told = said(run, rf"nest-ssl: port {port}: Address already in use.*MASTER_PORT.*")
    assert run.ended_at - started < 5 + noise_s()
    keep_for_the_table(run, told.replace(str(port), "29500"), run.ended_at - started)
    check_nothing_left(run)


@pytest.mark.faults
def test_row_20_a_rank_that_never_joins_is_named(lab: Lab) -> None:
    init_s = 8 * noise_s()  # imports take 5 s, and longer on a busy machine
    run = lab.start("joins_late 1 0", more=(f"watchdog.init_s={init_s}",)).wait()
    incident = check_named(run, ranks=[1], stage="init", within_s=init_s + 6)  # rank 0 has to get there first
    assert incident["kind"] == "never-joined"
    assert "rank 0 waited" in incident["cause"]


@pytest.mark.faults
def test_an_unreadable_run_folder_is_reported(lab: Lab) -> None:
    run = lab.start(more=("exp_manager.exp_dir=/proc/nowhere",)).wait()
    assert run.returncode == 1
    assert "/proc/nowhere" in run.stderr
    check_nothing_left(run)


def test_the_gradient_exchange_is_a_steps_only_collective(lab: Lab) -> None:
    """Fail when the forward pass or the loop gains a collective."""
    run = lab.start("list_collectives 0 0").wait()
    assert run.returncode == 0, run.stderr[-4000:]

    steps = [json.loads(line) for line in Path(run.note).read_text().splitlines()]
    assert len(steps) == 8
    # Every rank takes rank 0's weights before the first step; validation follows the third and the sixth.
    assert [steps[number] for number in (1, 2, 4, 5, 7)] == [["gloo:all_reduce"]] * 5
    validation = steps[3][:-1]
    assert validation.count("gloo:all_reduce") == 1
    assert set(validation) == {"gloo:all_reduce", "gloo:broadcast"}
