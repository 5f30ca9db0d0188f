"""Who a process is, according to the variables of its launcher."""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import Any

import pytest
import torch

from nest_ssl.config import compose
from nest_ssl.launch import ranks
from nest_ssl.launch.ranks import as_rank_zero, first_host, from_environment, gpu_of_rank, tasks_per_node
from nest_ssl.training.run import Command, pretrain, run
from nest_ssl.watchdog.rank import RankFacts

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


def test_one_rank_for_two_devices_is_refused(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "1")
    cfg = compose("nest_demo", ["trainer.devices=2", "trainer.accelerator=cpu", f"exp_manager.exp_dir={tmp_path}"])
    with pytest.raises(ValueError, match=r"trainer\.devices=2 .* has started 1 rank .* Set trainer\.devices=1"):
        run(cfg, pretrain, Command([], []))


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


# ---- which GPU ----

FOUR_TASKS = {"SLURM_GPUS_ON_NODE": "4", "CUDA_VISIBLE_DEVICES": "0,1,2,3"}
ONE_EACH = {"SLURM_GPUS_PER_TASK": "1", "CUDA_VISIBLE_DEVICES": "0"}
BOUND = {"SLURM_GPUS_ON_NODE": "4", "CUDA_VISIBLE_DEVICES": "3"}


def gpus_of_node(
    devices: Any, num_ranks: int, count: int, launcher: str = "nest-ssl", env: dict[str, str] | None = None, **more: Any
) -> list[int]:
    """The GPU of each rank of one node that sees `count` of them."""
    facts = [RankFacts(rank, rank, num_ranks, num_ranks, 0, launcher, "127.0.0.1", 29500) for rank in range(num_ranks)]
    return [gpu_of_rank(devices, one, env or {}, count, **more) for one in facts]


@pytest.mark.parametrize(
    ("devices", "num_ranks", "count", "launcher", "env", "gpus"),
    [
        (4, 4, 8, "nest-ssl", {}, [0, 1, 2, 3]),
        (1, 1, 8, "nobody", {}, [0]),
        ([5], 1, 8, "nobody", {}, [5]),
        ([0, 2], 2, 4, "nest-ssl", {}, [0, 2]),
        ("3,1", 2, 4, "nest-ssl", {}, [3, 1]),
        (-1, 4, 4, "nest-ssl", {}, [0, 1, 2, 3]),
        ("auto", 2, 2, "nest-ssl", {}, [0, 1]),
        # numbers count what is visible: these are nvidia-smi's 4 and 6
        (2, 2, 2, "nest-ssl", {"CUDA_VISIBLE_DEVICES": "4,6"}, [0, 1]),
        ([1], 1, 2, "nobody", {"CUDA_VISIBLE_DEVICES": "4,6"}, [1]),
        (4, 4, 4, "torchrun", {}, [0, 1, 2, 3]),
        ("2,3", 2, 4, "torchrun", {}, [2, 3]),
        # SLURM: --gpus-per-node, --gpus-per-task=1 (in its own numbers or the cgroup's), --gpu-bind, two GPUs per task
        (4, 4, 4, "slurm", FOUR_TASKS, [0, 1, 2, 3]),
        (4, 4, 1, "slurm", ONE_EACH, [0, 0, 0, 0]),
        (-1, 4, 1, "slurm", BOUND, [0, 0, 0, 0]),
        (4, 4, 1, "slurm", {"SLURM_GPU_BIND": "single:1"}, [0, 0, 0, 0]),
        (4, 4, 1, "slurm", {"SLURM_TRES_PER_TASK": "cpu:8,gres/gpu:1"}, [0, 0, 0, 0]),
        (4, 4, 1, "slurm", {"SLURM_STEP_GPUS": "0,1,2,3"}, [0, 0, 0, 0]),
        (4, 4, 2, "slurm", {"SLURM_GPUS_PER_TASK": "2"}, [0, 1, 0, 1]),
        # started by hand, each with its own CUDA_VISIBLE_DEVICES
        (2, 2, 1, "environment", {"CUDA_VISIBLE_DEVICES": "1"}, [0, 0]),
    ],
)
def test_a_rank_gets_the_gpu_that_is_meant_for_it(
    devices: Any, num_ranks: int, count: int, launcher: str, env: dict[str, str], gpus: list[int]
) -> None:
    assert gpus_of_node(devices, num_ranks, count, launcher, env) == gpus


@pytest.mark.parametrize(
    ("devices", "num_ranks", "count", "gpus"),
    [(4, 4, 1, [0, 0, 0, 0]), (4, 4, 3, [0, 1, 2, 0]), ([0, 0], 2, 1, [0, 0]), (2, 2, 4, [0, 1])],
)
def test_ranks_share_gpus_only_with_the_switch(devices: Any, num_ranks: int, count: int, gpus: list[int]) -> None:
    assert gpus_of_node(devices, num_ranks, count, share_gpu=True) == gpus


@pytest.mark.parametrize(
    ("devices", "num_ranks", "count", "launcher", "env", "words"),
    [
        (
            4,
            4,
            1,
            "nest-ssl",
            {},
            r"trainer\.devices=4: this machine has 1 GPU\. Use trainer\.devices=1, or debug\.share_gpu=true to put "
            r"several ranks on one GPU, for tests\.",
        ),
        (8, 8, 2, "torchrun", {"CUDA_VISIBLE_DEVICES": "4,6"}, r"2 GPUs are visible \(CUDA_VISIBLE_DEVICES=4,6\)"),
        (4, 4, 1, "slurm", {"SLURM_GPUS_ON_NODE": "1"}, "this machine has 1 GPU"),
        (2, 2, 1, "environment", {}, "this machine has 1 GPU"),
        (-1, 4, 2, "torchrun", {}, r"trainer\.devices=-1, 4 ranks: this machine has 2 GPUs"),
        ([0, 4], 2, 4, "nest-ssl", {}, "there is no GPU 4; this machine has 4 GPUs. Use numbers from 0 to 3"),
        ([0, 0], 2, 4, "nest-ssl", {}, r"lists a GPU twice\. .* debug\.share_gpu=true"),
        ([0, 2], 2, 1, "slurm", ONE_EACH, r"slurm shows each rank only its own GPU\. Use trainer\.devices=2"),
        ([0], 2, 4, "torchrun", {}, "lists 1 GPU for 2 ranks on this node"),
    ],
)
def test_gpus_that_are_not_there_are_refused_by_every_rank(
    devices: Any, num_ranks: int, count: int, launcher: str, env: dict[str, str], words: str
) -> None:
    for rank in range(num_ranks):
        facts = RankFacts(rank, rank, num_ranks, num_ranks, 0, launcher, "127.0.0.1", 29500)
        with pytest.raises(ValueError, match=words):
            gpu_of_rank(devices, facts, env, count)


@pytest.mark.parametrize("launcher", ["nest-ssl", "torchrun"])
def test_more_ranks_than_gpus_are_refused_before_anything_is_written(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, launcher: str
) -> None:
    monkeypatch.setattr(ranks, "most_visible_gpus", lambda env: 1)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    if launcher == "torchrun":
        here = {"RANK": "1", "LOCAL_RANK": "1", "WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2", "GROUP_RANK": "0"}
        for name, value in {**TORCHRUN, **here}.items():
            monkeypatch.setenv(name, value)
    cfg = compose(
        "nest_demo", ["trainer.devices=2", "trainer.accelerator=gpu", f"exp_manager.explicit_log_dir={tmp_path}/run"]
    )
    with pytest.raises(ValueError, match=r"trainer\.devices=2: this machine has 1 GPU"):
        run(cfg, pretrain, Command([], []))
    assert not list(tmp_path.iterdir())


def test_a_debug_level_that_torch_does_not_know_is_refused() -> None:
    for env in ({}, {"TORCH_DISTRIBUTED_DEBUG": "detail"}):
        ranks.check_debug_level(env)
    with pytest.raises(ValueError, match="TORCH_DISTRIBUTED_DEBUG=yes: is not OFF, INFO or DETAIL"):
        ranks.check_debug_level({"TORCH_DISTRIBUTED_DEBUG": "yes"})


@pytest.mark.parametrize(
    ("backend", "value", "is_good"),
    [
        ("gloo", "", True),
        ("gloo", "eth0", True),
        ("gloo", "lo,eth1:2", True),
        ("gloo", "eth", False),
        ("gloo", "lo,ib0", False),
        ("nccl", "eth", True),
        ("nccl", "ib,eth1", True),
        ("nccl", "=eth0", True),
        ("nccl", "^lo,docker", True),
        ("nccl", "^=lo", True),
        ("nccl", "ib", False),
        ("nccl", "=eth", False),
        ("nccl", "^lo,eth", False),
    ],
)
def test_interfaces_that_are_not_there_are_refused_with_those_that_are(
    backend: str, value: str, is_good: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ranks, "_interfaces", lambda: ["lo", "eth0", "eth1"])
    env = {f"{backend.upper()}_SOCKET_IFNAME": value}
    if is_good:
        ranks.check_interfaces(backend, env)
    else:
        with pytest.raises(
            ValueError, match=rf"{backend.upper()}_SOCKET_IFNAME={re.escape(value)}: .*lo, eth0, eth1\."
        ):
            ranks.check_interfaces(backend, env)


@pytest.mark.parametrize(("accelerator", "backend"), [("cpu", "GLOO"), ("gpu", "NCCL")])
def test_ranks_do_not_start_without_the_interface_of_their_backend(
    accelerator: str, backend: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(ranks, "most_visible_gpus", lambda env: 2)
    monkeypatch.setenv(f"{backend}_SOCKET_IFNAME", "nowhere0")
    folder = f"exp_manager.explicit_log_dir={tmp_path}/run"
    cfg = compose("nest_demo", ["trainer.devices=2", f"trainer.accelerator={accelerator}", folder])
    with pytest.raises(ValueError, match=rf"{backend}_SOCKET_IFNAME=nowhere0: no such network interface"):
        run(cfg, pretrain, Command([], []))
    assert not list(tmp_path.iterdir())


def test_ranks_on_one_gpu_look_like_hosts_to_nccl() -> None:
    facts = RankFacts(3, 1, 4, 2, 1, "torchrun", "node0", 1)
    assert ranks.shared_gpu_variables(facts) == {"NCCL_HOSTID": "rank3"}  # two machines: not over loopback
    alone = RankFacts(1, 1, 2, 2, 0, "nest-ssl", "127.0.0.1", 1)
    assert ranks.shared_gpu_variables(alone) == {
        "NCCL_HOSTID": "rank1",
        "NCCL_SOCKET_IFNAME": "lo",
        "NCCL_IB_DISABLE": "1",
    }


def test_a_gpu_is_called_what_nvidia_smi_calls_it() -> None:
    assert ranks.gpu_label(1, {"CUDA_VISIBLE_DEVICES": "4,6"}, "GPU-8a", "gpu07") == "GPU 6 (GPU-8a) of gpu07"
    assert ranks.gpu_label(1, {}, "GPU-8a", "gpu07") == "GPU 1 (GPU-8a) of gpu07"
    assert ranks.gpu_label(0, {"CUDA_VISIBLE_DEVICES": "GPU-8a"}, "GPU-8a", "gpu07") == "GPU 0 (GPU-8a) of gpu07"


@pytest.mark.parametrize("port", ["abc", "99999", "-1", "", "0"])
def test_a_port_that_is_none_is_refused_by_its_name(port: str) -> None:
    env = {"RANK": "0", "WORLD_SIZE": "2", "MASTER_PORT": port}
    with pytest.raises(ValueError, match="^MASTER_PORT=.*: not a number from 1 to 65534"):
        from_environment(env, 2)


def test_the_ports_of_one_slurm_job_are_not_those_of_the_next() -> None:
    """The ranks use one, the monitors the next."""
    ports = []
    for job in ("4711", "4712"):
        facts = from_environment({**SLURM, "SLURM_JOB_ID": job}, 4)
        assert facts is not None
        ports += [facts.master_port, facts.master_port + 1]
    assert len(set(ports)) == 4


@pytest.mark.parametrize(
    ("launcher", "name"),
    [(TORCHRUN, name) for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "GROUP_RANK")]
    + [(SLURM, name) for name in ("SLURM_PROCID", "SLURM_LOCALID", "SLURM_NODEID", "SLURM_NTASKS")],
)
def test_a_variable_that_is_no_number_is_refused_by_its_name(launcher: dict[str, str], name: str) -> None:
    with pytest.raises(ValueError, match=f"^{name}='abc': not a number from "):
        from_environment({**launcher, name: "abc"}, 4)


@pytest.mark.parametrize("name", ["WORLD_SIZE", "LOCAL_WORLD_SIZE"])
def test_no_ranks_at_all_are_refused_by_the_name_of_the_variable(name: str) -> None:
    with pytest.raises(ValueError, match=f"^{name}='0': not a number from 1 to "):
        from_environment({**TORCHRUN, name: "0"}, 4)


def test_the_number_of_a_node_is_read_from_either_variable() -> None:
    by_hand = {"RANK": "5", "WORLD_SIZE": "8", "MASTER_PORT": "1", "NODE_RANK": "abc"}
    with pytest.raises(ValueError, match="^NODE_RANK='abc': not a number"):
        from_environment(by_hand, 4)
    facts = from_environment({**by_hand, "NODE_RANK": "1"}, 4)
    assert facts is not None
    assert facts.node == 1


def test_a_slurm_node_that_has_no_tasks_is_refused() -> None:
    with pytest.raises(ValueError, match="^SLURM_NODEID=2: SLURM_TASKS_PER_NODE=4,3 has only 2 nodes"):
        from_environment({**SLURM, "SLURM_NODEID": "2"}, 4)
