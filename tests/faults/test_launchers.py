"""The watchdog under torchrun, under SLURM (ranks started by hand), and across nodes."""

from __future__ import annotations

import os
import signal
import sys
from pathlib import Path

import pytest
import torch

from nest_ssl.launch.launcher import free_port
from tests.faults.harness import (
    FLOOR_S,
    Lab,
    Run,
    check_nothing_left,
    check_same_losses,
    check_stopped_as_agreed,
    noise_s,
)

TORCHRUN = [
    sys.executable,
    "-m",
    "torch.distributed.run",
    "--standalone",
    "--nproc-per-node=2",
    "-m",
    "nest_ssl",
    "pretrain",
]


@pytest.mark.faults
def test_under_torchrun_the_stalled_rank_is_named(lab: Lab, whole: Path) -> None:
    run = lab.start("encoder:sleep 0 4", program=TORCHRUN).wait()
    assert run.returncode != 0
    incident = run.incident
    assert incident["ranks"] == [0]
    assert incident["stage"] == "encoder"
    assert incident["resume_command"].startswith("torchrun --nnodes=1 --nproc-per-node=2 -m nest_ssl pretrain")
    assert run.reported_s < FLOOR_S + 2 + noise_s()
    check_nothing_left(run, within_s=5)
    resumed = lab.start(program=TORCHRUN).wait()
    assert resumed.returncode == 0, resumed.stderr[-4000:]
    check_same_losses(resumed, whole)


def start_both(lab: Lab, fault: str, variables: list[dict[str, str]], *more: str) -> list[Run]:
    return [lab.start(fault, env=env, more=more, ranks=1 if "NODE_RANK" in env else 2) for env in variables]


@pytest.mark.faults
def test_slurm_ranks_are_monitored_and_stop_together(lab: Lab, whole: Path) -> None:
    job = {
        "SLURM_NTASKS": "2",
        "SLURM_STEP_ID": "0",
        "SLURM_JOB_ID": "77",
        "SLURM_NODEID": "0",
        "SLURM_STEP_TASKS_PER_NODE": "2",
        "SLURM_STEP_NODELIST": "127.0.0.1",
        "MASTER_PORT": str(free_port()),
    }
    tasks = [{**job, "SLURM_PROCID": str(i), "SLURM_LOCALID": str(i)} for i in range(2)]
    runs = start_both(lab, "slow_rank all 0", tasks)
    runs[0].wait_for_step(1)
    for run in runs:
        os.kill(run.process.pid, signal.SIGUSR1)  # 'sbatch --signal' signals every task
    for run in runs:
        run.wait()
        assert run.returncode == 75, run.stderr[-4000:]
    for run in runs:  # a monitor stays until the last rank has ended
        check_nothing_left(run)
    resumed = lab.start().wait()
    assert resumed.returncode == 0, resumed.stderr[-4000:]
    check_same_losses(resumed, whole)


def two_nodes() -> list[dict[str, str]]:
    shared = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
    return [{**shared, "NODE_RANK": str(node)} for node in range(2)]


@pytest.mark.faults
@pytest.mark.parametrize("rank", [0, 1])
def test_the_first_of_two_nodes_names_the_stalled_rank(lab: Lab, whole: Path, rank: int) -> None:
    runs = start_both(lab, f"encoder:sleep {rank} 4", two_nodes(), "trainer.num_nodes=2")
    for run in runs:
        run.wait()
        assert run.returncode == 75, run.stderr[-4000:]
    for run in runs:  # a monitor stays until the last rank has ended
        check_nothing_left(run)
    incident = runs[0].incident
    assert incident["ranks"] == [rank]
    assert incident["stage"] == "encoder"
    assert incident["waiting"] == {str(1 - rank): "exchange"}
    assert "all_reduce" in incident["collective"]
    assert incident["text"] in runs[0].stderr
    assert incident["text"] not in runs[1].stderr
    stacks = {path.name for path in Path(incident["evidence"], "stacks").iterdir()}
    assert {"rank0.txt", "rank1.txt"} <= stacks


@pytest.mark.faults
def test_two_nodes_stop_together(lab: Lab, whole: Path) -> None:
    runs = start_both(lab, "slow_rank all 0", two_nodes(), "trainer.num_nodes=2", "trainer.max_steps=1000")
    runs[0].wait_for_step(2)
    os.kill(runs[1].process.pid, signal.SIGTERM)
    for run in runs:
        run.wait()
        assert run.returncode == 75, run.stderr[-4000:]
    for run in runs:  # a monitor stays until the last rank has ended
        check_nothing_left(run)
    saved = torch.load(runs[0].run_dir / "checkpoints" / "last.ckpt", map_location="meta", weights_only=True)
    check_stopped_as_agreed(runs[0], saved)
