"""Who this process is and which GPU it uses, as told by nest-ssl's own launcher, torchrun, or SLURM."""

from __future__ import annotations

import contextlib
import os
import re
import socket
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from nest_ssl.run_folder import listed_devices
from nest_ssl.watchdog.rank import RankFacts

BEACON_VARIABLE = "NEST_SSL_BEACON"
"""Set by nest-ssl's launcher for its ranks: the beacon's path."""
LAUNCHER_VARIABLE = "NEST_SSL_LAUNCHER"
"""The launcher's process id."""
LISTENER_VARIABLE = "NEST_SSL_LISTENER"
"""Set by nest-ssl's launcher for rank 0: the number of a file, a socket that listens on the port it has chosen."""
DEFAULT_PORT = 29500
ALONE = RankFacts(0, 0, 1, 1, 0, "nobody", "127.0.0.1", DEFAULT_PORT)
"""A process that nobody has launched as one of several ranks."""


def from_environment(env: Mapping[str, str], devices: int) -> RankFacts | None:
    """Return the facts if this process was launched as a rank, else None; `devices` is the config's number per node."""
    if "RANK" in env and "WORLD_SIZE" in env:
        return _from_torchrun(env, devices)
    if "SLURM_PROCID" in env and "SLURM_STEP_ID" in env and number_in(env, "SLURM_NTASKS", 1) > 1:
        return _from_slurm(env)
    return None


def number_in(env: Mapping[str, str], name: str, default: int = 0, *, least: int = 0) -> int:
    """Return the number in an environment variable; ports and ranks that cannot be are refused with its name."""
    text = env.get(name, str(default))
    least, most = (1, 65_534) if name == "MASTER_PORT" else (least, 10**7)  # the port after it is the monitors'
    if not (text.isascii() and text.strip().isdigit() and least <= int(text) <= most):
        raise ValueError(f"{name}={text!r}: not a number from {least} to {most}. Set it to one, or unset it.")
    return int(text)


def port_is_taken(port: int, why: str | None) -> ValueError:
    return ValueError(f"port {port}: {why}. Set MASTER_PORT to a free port, or unset it to have one chosen.")


def check_interfaces(backend: str, env: Mapping[str, str]) -> None:
    """Refuse network interfaces that gloo or NCCL is told to use and that this machine does not have.

    gloo needs all of the names that it is given. NCCL takes what begins with one of them; '=' is for whole names, and
    '^' for all other interfaces. A ':' begins an alias or a port.
    """
    variable = f"{backend.upper()}_SOCKET_IFNAME"
    names = [name.partition(":")[0] for name in env.get(variable, "").lstrip("^=").split(",") if name]
    there = _interfaces()
    if not names:
        return
    if backend == "gloo":
        is_good = set(names) <= set(there)
    else:
        excludes, exact = env[variable].startswith("^"), env[variable][:2].strip("^").startswith("=")
        found = [any(name == one if exact else name.startswith(one) for one in names) for name in there]
        is_good = any(is_named != excludes for is_named in found)
    if not is_good:
        raise _interface_error(backend, env)


def check_debug_level(env: Mapping[str, str]) -> None:
    """Refuse a level that torch does not know: its C++ code would abort."""
    level = env.get("TORCH_DISTRIBUTED_DEBUG", "OFF")
    if level.upper() not in ("OFF", "INFO", "DETAIL"):
        raise ValueError(f"TORCH_DISTRIBUTED_DEBUG={level}: is not OFF, INFO or DETAIL.")


def _interface_error(backend: str, env: Mapping[str, str]) -> ValueError:
    variable = f"{backend.upper()}_SOCKET_IFNAME"
    return ValueError(
        f"{variable}={env[variable]}: no such network interface. This machine has "
        f"{', '.join(_interfaces()) or 'none'}. Set {variable} to one of them, or unset it."
    )


def _interfaces() -> list[str]:
    return [name for _, name in socket.if_nameindex()]


def _from_torchrun(env: Mapping[str, str], devices: int) -> RankFacts:
    rank, world_size = number_in(env, "RANK"), number_in(env, "WORLD_SIZE", least=1)
    local_world_size = number_in(env, "LOCAL_WORLD_SIZE", min(devices, world_size), least=1)
    launcher = "nest-ssl" if BEACON_VARIABLE in env else "torchrun" if "TORCHELASTIC_RUN_ID" in env else "environment"
    if world_size > 1 and "MASTER_PORT" not in env:
        raise ValueError("WORLD_SIZE is set and MASTER_PORT is not: set MASTER_ADDR and MASTER_PORT on every rank.")
    return RankFacts(
        rank=rank,
        local_rank=number_in(env, "LOCAL_RANK", rank % local_world_size),
        world_size=world_size,
        local_world_size=local_world_size,
        node=number_in(env, "GROUP_RANK" if "GROUP_RANK" in env else "NODE_RANK", rank // local_world_size),
        launcher=launcher,
        master_addr=env.get("MASTER_ADDR", "127.0.0.1"),
        master_port=number_in(env, "MASTER_PORT", DEFAULT_PORT),
    )


def _from_slurm(env: Mapping[str, str]) -> RankFacts:
    node = number_in(env, "SLURM_NODEID")
    per_node = env.get("SLURM_STEP_TASKS_PER_NODE") or env.get("SLURM_TASKS_PER_NODE") or env["SLURM_NTASKS"]
    job = int(re.sub(r"[^0-9]", "", env.get("SLURM_JOB_ID", "0")) or 0)
    counts = tasks_per_node(per_node)
    if node >= len(counts):
        raise ValueError(f"SLURM_NODEID={node}: SLURM_TASKS_PER_NODE={per_node} has only {len(counts)} nodes.")
    return RankFacts(
        rank=number_in(env, "SLURM_PROCID"),
        local_rank=number_in(env, "SLURM_LOCALID"),
        world_size=number_in(env, "SLURM_NTASKS", 1),
        local_world_size=counts[node],
        node=node,
        launcher="slurm",
        master_addr=env.get("MASTER_ADDR") or first_host(env.get("SLURM_STEP_NODELIST", env.get("SLURM_NODELIST", ""))),
        # The same on every node; monitors use the next.
        master_port=number_in(env, "MASTER_PORT", 15_000 + 2 * (job % 10_000)),
    )


def tasks_per_node(text: str) -> list[int]:
    """Expand SLURM's '4(x2),3' to [4, 4, 3]."""
    counts: list[int] = []
    for part in text.split(","):
        match = re.fullmatch(r"(\d+)(?:\(x(\d+)\))?", part.strip())
        if match is None:
            raise ValueError(f"SLURM_TASKS_PER_NODE={text}: expected something like 4(x2),3.")
        counts += [int(match[1])] * int(match[2] or 1)
    return counts


def first_host(nodelist: str) -> str:
    """Return the first host of a SLURM node list: 'gpu03' for 'gpu[03-05,9],cpu1'."""
    match = re.match(r"([^,\[]+)(?:\[([^,\-\]]+)[^\]]*\])?([^,\[]*)", nodelist)
    return f"{match[1]}{match[2] or ''}{match[3]}" if match else "127.0.0.1"


# ---- which GPU ----


def gpu_of_rank(devices: Any, facts: RankFacts, env: Mapping[str, str], count: int, *, share_gpu: bool = False) -> int:
    """Return the number of a rank's GPU among the `count` GPUs that this process sees.

    `devices` is `trainer.devices`. Numbers count what is visible: with CUDA_VISIBLE_DEVICES=4,5, GPU 1 is the card
    that nvidia-smi calls 5. All ranks of a node refuse together: one that joined would wait for the others.
    """
    ranks, listed = facts.local_world_size, listed_devices(devices)
    sharing = "debug.share_gpu=true to put several ranks on one GPU, for tests"
    if listed is None:
        if ranks <= count:
            return facts.local_rank
        if share_gpu or sees_only_its_own(facts, env, count):
            return facts.local_rank % count
        given = f"trainer.devices={devices}" + ("" if ranks == 1 or str(devices) == str(ranks) else f", {ranks} ranks")
        raise ValueError(f"{given}: {_what_is_here(env, count)}. Use trainer.devices={count}, or {sharing}.")
    if len(listed) != ranks:
        raise ValueError(f"trainer.devices={devices}: lists {_gpus(len(listed))} for {ranks} ranks on this node.")
    if len(set(listed)) < ranks and not share_gpu:
        raise ValueError(f"trainer.devices={devices}: lists a GPU twice. Give every rank its own, or use {sharing}.")
    if max(listed) < count:
        return listed[facts.local_rank]
    if sees_only_its_own(facts, env, count):
        raise ValueError(
            f"trainer.devices={devices}: {facts.launcher} shows each rank only its own GPU. "
            f"Use trainer.devices={ranks}."
        )
    raise ValueError(
        f"trainer.devices={devices}: there is no GPU {max(listed)}; {_what_is_here(env, count)}. Use numbers from 0 "
        f"to {count - 1}."
    )


def sees_only_its_own(facts: RankFacts, env: Mapping[str, str], count: int) -> bool:
    """Return whether this process sees fewer GPUs than its node has ranks because each rank has GPUs of its own.

    nest-ssl and torchrun start ranks that all see the same GPUs. SLURM hides the others' with `--gpus-per-task` and
    `--gpu-bind`, and says how many there are on the node; ranks that are started by hand have CUDA_VISIBLE_DEVICES.
    """
    if facts.local_world_size <= count:
        return False
    if facts.launcher == "environment":
        return "CUDA_VISIBLE_DEVICES" in env
    if facts.launcher != "slurm":
        return False
    is_bound = env.get("SLURM_GPU_BIND", "none") != "none" or "gpu" in env.get("SLURM_TRES_PER_TASK", "")
    on_node = env.get("SLURM_GPUS_ON_NODE", "")
    counts = [int(on_node) if on_node.isdigit() else 0]
    counts += [len(env[name].split(",")) for name in ("SLURM_STEP_GPUS", "SLURM_JOB_GPUS") if env.get(name)]
    return is_bound or "SLURM_GPUS_PER_TASK" in env or max(counts) >= facts.local_world_size


def most_visible_gpus(env: Mapping[str, str]) -> int:
    """Return an upper bound of the GPUs that this process can see, without torch, which takes 2 s to import."""
    count = len([path for path in Path("/dev").glob("nvidia*") if path.name.removeprefix("nvidia").isdigit()])
    visible = env.get("CUDA_VISIBLE_DEVICES")
    return count if visible is None else min(count, len([entry for entry in visible.split(",") if entry.strip()]))


def shared_gpu_variables(facts: RankFacts) -> dict[str, str]:
    """Return what lets several NCCL ranks use one GPU (`debug.share_gpu`); they talk over sockets.

    NCCL refuses two ranks on one GPU of one host. It tells hosts apart by NCCL_HOSTID.
    """
    variables = {"NCCL_HOSTID": f"rank{facts.rank}"}
    if facts.num_nodes == 1:
        variables |= {"NCCL_SOCKET_IFNAME": "lo", "NCCL_IB_DISABLE": "1"}
    return variables


def gpu_label(number: int, env: Mapping[str, str], uuid: str, host: str) -> str:
    """Return 'GPU 5 (GPU-8a41…) of gpu07': visible GPU `number`, as nvidia-smi on that host calls it."""
    visible = [entry.strip() for entry in env.get("CUDA_VISIBLE_DEVICES", "").split(",")]
    name = visible[number] if number < len(visible) and visible[number].isdigit() else str(number)
    return f"GPU {name} ({uuid}) of {host}"


def _what_is_here(env: Mapping[str, str], count: int) -> str:
    visible = env.get("CUDA_VISIBLE_DEVICES")
    if visible is None:
        return f"this machine has {_gpus(count)}"
    return f"{_gpus(count)} {'is' if count == 1 else 'are'} visible (CUDA_VISIBLE_DEVICES={visible})"


def _gpus(count: int) -> str:
    return f"{count} GPU{'' if count == 1 else 's'}"


@contextlib.contextmanager
def as_rank_zero() -> Iterator[None]:
    """Let the launcher, which is not a rank, read a configuration that refers to `${oc.env:RANK}`."""
    missing = {name: "0" for name in ("RANK", "LOCAL_RANK") if name not in os.environ}
    os.environ.update(missing)
    try:
        yield
    finally:
        for name in missing:
            del os.environ[name]
