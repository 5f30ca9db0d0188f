"""examples/slurm.sh, and one task per GPU, under a real SLURM: every way in which a job ends, and what follows.

`make slurm` runs these as root. Each job trains on two ranks, one per node.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.integration.runs import arguments, losses, make_corpus
from tests.slurm.cluster import NODES, Cluster, Job, cluster_in, command

pytestmark = pytest.mark.slurm

STEPS = 120
"""Of at least 0.2 s each: enough to outlast the 30 s between two looks of SLURM at its time limits."""
Submit = Callable[..., Job]


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    with cluster_in(tmp_path_factory.mktemp("slurm")) as cluster:
        yield cluster


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("corpus")
    make_corpus(folder)
    return folder


def submit_in(folder: Path, cluster: Cluster, corpus: Path, *more: str, options: tuple[str, ...] = ()) -> Job:
    given = arguments(corpus, folder, "run", f"trainer.max_steps={STEPS}", *more)
    nodes = ("--nodes=2", "--gpus-per-node=1", "--cpus-per-task=1")
    return cluster.submit(folder, *given, options=(*nodes, *options))


@pytest.fixture
def submit(cluster: Cluster, corpus: Path, tmp_path: Path) -> Submit:
    cluster.wait_until_idle()
    return lambda *more, options=(): submit_in(tmp_path, cluster, corpus, *more, options=options)


@pytest.fixture(scope="module")
def undisturbed(cluster: Cluster, corpus: Path, tmp_path_factory: pytest.TempPathFactory) -> Job:
    job = submit_in(tmp_path_factory.mktemp("undisturbed"), cluster, corpus)
    assert job.wait() == "COMPLETED 0:0", job.log
    return job


def check_same_losses(job: Job, undisturbed: Job) -> None:
    for column in ("train_loss", "val_loss"):
        expected = losses(undisturbed.run_dir / "metrics.csv", column)
        assert expected
        assert losses(job.run_dir / "metrics.csv", column) == expected


def test_a_job_on_two_nodes_starts_and_finishes(undisturbed: Job) -> None:
    assert len(losses(undisturbed.run_dir / "metrics.csv")) == STEPS
    assert undisturbed.requeues == 0
    assert not (undisturbed.run_dir / "incidents").exists()


def test_a_job_at_its_time_limit_is_saved_requeued_and_finished(submit: Submit, undisturbed: Job) -> None:
    job = submit(options=("--time=60", "--signal=USR1@90"))
    job.wait_for_step(8)
    job.set_time_limit(int(job.run_time_s / 60) + 1)  # SLURM looks every 30 s, and signals at its next look
    job.wait_for_requeue()
    job.set_time_limit(60)
    assert job.wait() == "COMPLETED 0:0", job.log
    assert job.requeues == 1, job.log
    assert "SIGUSR1: all ranks will save and exit by step" in job.log
    assert "slurm.sh: resumable (75): requeueing" in job.log
    check_same_losses(job, undisturbed)
    keep_transcript(job)


def test_a_rank_that_is_killed_is_named_and_the_job_requeued(submit: Submit, undisturbed: Job) -> None:
    job = submit()
    job.wait_for_step(8)
    os.kill(job.pids()[1], signal.SIGKILL)
    assert job.wait() == "COMPLETED 0:0", job.log
    assert job.requeues == 1, job.log
    assert "slurm.sh: resumable (75): requeueing" in job.log
    (incident,) = job.incidents()
    assert incident["ranks"] == [1], incident["text"]
    check_same_losses(job, undisturbed)


def test_a_node_that_is_lost_whole_is_replaced_and_the_job_finished(
    cluster: Cluster, submit: Submit, undisturbed: Job
) -> None:
    job = submit()
    job.wait_for_step(8)
    cluster.kill_node(NODES[1])
    job.wait_for_requeue()
    cluster.start_node(NODES[1])
    assert job.wait() == "COMPLETED 0:0", job.log
    assert "slurm.sh: resumable (75): requeueing" in job.log
    (incident,) = job.incidents()
    assert (incident["kind"], incident["ranks"], incident["exit_code"]) == ("lost-node", [1], 75), incident["text"]
    assert incident["text"].startswith("nest-ssl: node 1 is gone, with rank 1\n")
    check_same_losses(job, undisturbed)


def test_a_cancelled_job_saves_and_stays_cancelled(submit: Submit, undisturbed: Job) -> None:
    job = submit()
    job.wait_for_step(8)
    command("scancel", str(job.number))
    assert job.wait().startswith("CANCELLED"), job.log
    assert "SIGTERM: all ranks will save and exit by step" in job.log
    assert "saved and stopped after step" in job.log
    assert job.requeues == 0
    job = submit()
    assert job.wait() == "COMPLETED 0:0", job.log
    check_same_losses(job, undisturbed)


def test_a_job_that_needs_a_person_is_not_requeued(submit: Submit) -> None:
    job = submit("model.encoder.d_model=33")
    assert job.wait() == "FAILED 1:0", job.log
    assert job.requeues == 0
    assert "requeueing" not in job.log


# ---- one task per GPU ----

TASKS = """\
#!/bin/bash
srun nest-ssl pretrain trainer.devices=2 trainer.num_nodes=2 "$@"
echo "srun: code $?"
"""


@pytest.fixture
def submit_tasks(cluster: Cluster, corpus: Path, tmp_path: Path) -> Submit:
    cluster.wait_until_idle()
    (tmp_path / "tasks.sh").write_text(TASKS)
    options = ("--nodes=2", "--ntasks-per-node=2", "--gpus-per-node=2")

    def submit(*more: str) -> Job:
        given = arguments(corpus, tmp_path, "run", "trainer.max_steps=12", *more)
        return cluster.submit(tmp_path, *given, options=options, script=tmp_path / "tasks.sh")

    return submit


def test_with_one_task_per_gpu_a_killed_rank_gives_75_and_the_same_job_resumes(submit_tasks: Submit) -> None:
    """Four ranks: two nodes that share /dev/shm and process numbers, each with a beacon for two."""
    job = submit_tasks()
    job.wait_for_step(4)
    assert len(set(job.pids().values())) == 4
    os.kill(job.pids()[3], signal.SIGKILL)
    job.wait()
    assert "srun: code 75" in job.log, job.log
    (incident,) = job.incidents()
    assert incident["ranks"] == [3], incident["text"]
    job = submit_tasks()
    job.wait()
    assert "srun: code 0" in job.log, job.log
    assert len(losses(job.run_dir / "metrics.csv")) == 12


def test_with_one_task_per_gpu_a_signal_stops_all_ranks_with_75(submit_tasks: Submit) -> None:
    job = submit_tasks()
    job.wait_for_step(4)
    command("scancel", "--signal=USR1", str(job.number))
    job.wait()
    assert "SIGUSR1: all ranks will save and exit by step" in job.log
    assert "saved and stopped after step" in job.log
    assert "srun: code 75" in job.log, job.log


def test_with_one_task_per_gpu_a_wrong_configuration_gives_1(submit_tasks: Submit) -> None:
    job = submit_tasks("model.encoder.d_model=33")
    job.wait()
    assert "srun: code 1\n" in job.log, job.log


def keep_transcript(job: Job) -> None:
    """Keep what SLURM and the job said, for a person to read, where NEST_SLURM_TRANSCRIPT names a file."""
    if path := os.environ.get("NEST_SLURM_TRANSCRIPT"):
        Path(path).write_text(f"{job.log}\n$ scontrol show job\n{command('scontrol', 'show', 'job', str(job.number))}")
