"""Who a process is, according to the variables of its launcher."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from nest_ssl.training.start import start

from nest_ssl.config import compose
from nest_ssl.launch.ranks import as_rank_zero, first_host, from_environment, tasks_per_node

TORCHRUN = {
    "RANK": "5",
    "LOCAL_RANK": "1",
    "WORLD_SIZE": "8",
    "LOCAL_WORLD_SIZE": "4",
    "GROUP_RANK": "1",
    "MASTER_ADDR": "node0",
    "MASTER_PORT": "1234",
    "TORCHELASTIC_RUN_ID": "none",
}
SLURM = {
    "SLURM_PROCID": "6",
    "SLURM_LOCALID": "2",
    "SLURM_NODEID": "1",
    "SLURM_NTASKS": "7",
    "SLURM_STEP_ID": "0",
    "SLURM_JOB_ID": "4711",
    "SLURM_STEP_TASKS_PER_NODE": "4,3",
    "SLURM_STEP_NODELIST": "gpu[07-08]",
}


def test_a_process_that_was_not_launched_is_not_a_rank() -> None:
    assert from_environment({}, 4) is None


def test_ranks_of_torchrun_are_read_from_its_variables() -> None:
    facts = from_environment(TORCHRUN, 4)
    assert facts is not None
    assert (facts.rank, facts.local_rank, facts.first_rank, facts.node) == (5, 1, 4, 1)
    assert (facts.launcher, facts.num_nodes, facts.master_port) == ("torchrun", 2, 1234)


def test_slurm_tasks_are_ranks_with_the_usual_variables() -> None:
    facts = from_environment(SLURM, 4)
    assert facts is not None
    assert (facts.rank, facts.local_rank, facts.world_size, facts.local_world_size) == (6, 2, 7, 3)
    assert (facts.master_addr, facts.launcher) == ("gpu07", "slurm")
    variables = facts.variables()
    assert (variables["RANK"], variables["LOCAL_RANK"], variables["WORLD_SIZE"]) == ("6", "2", "7")
    other = from_environment({**SLURM, "SLURM_PROCID": "0", "SLURM_LOCALID": "0", "SLURM_NODEID": "0"}, 4)
    assert other is not None
    assert other.master_port == facts.master_port


def test_a_slurm_job_of_one_task_launches_its_own_ranks() -> None:
    assert from_environment({**SLURM, "SLURM_NTASKS": "1"}, 4) is None
    assert from_environment({key: value for key, value in SLURM.items() if key != "SLURM_STEP_ID"}, 4) is None


def test_ranks_set_by_hand_need_a_port() -> None:
    with pytest.raises(ValueError, match="MASTER_PORT"):
        from_environment({"RANK": "0", "WORLD_SIZE": "2"}, 2)


def test_numbers_that_do_not_fit_are_refused() -> None:
    with pytest.raises(ValueError, match="RANK=9"):
        from_environment({**TORCHRUN, "RANK": "9"}, 4)
    with pytest.raises(ValueError, match="LOCAL_RANK=1"):
        from_environment({**TORCHRUN, "RANK": "0"}, 4)


def test_one_rank_for_two_devices_is_refused_before_lightning_starts_the_other(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "1")
    cfg = compose("nest_demo", ["trainer.devices=2", "trainer.accelerator=cpu", f"exp_manager.exp_dir={tmp_path}"])
    with pytest.raises(ValueError, match=r"trainer\.devices=2 .* has started 1 rank .* Set trainer\.devices=1"):
        start(cfg, [])


@pytest.mark.parametrize(("text", "counts"), [("4", [4]), ("4(x2)", [4, 4]), ("2(x2),1", [2, 2, 1])])
def test_slurm_tasks_per_node_are_expanded(text: str, counts: list[int]) -> None:
    assert tasks_per_node(text) == counts


@pytest.mark.parametrize(
    ("nodes", "host"),
    [("gpu[03-05,9],cpu1", "gpu03"), ("a,b", "a"), ("node7", "node7"), ("n[1,3]-ib", "n1-ib"), ("", "127.0.0.1")],
)
def test_the_first_host_of_a_slurm_node_list_is_found(nodes: str, host: str) -> None:
    assert first_host(nodes) == host


def test_the_launcher_reads_a_configuration_as_rank_zero_would(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("RANK", raising=False)
    with as_rank_zero():
        assert os.environ["RANK"] == "0"
    assert "RANK" not in os.environ
