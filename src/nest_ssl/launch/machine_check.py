"""`nest-ssl doctor` without a run folder: is this machine ready to train on?"""

from __future__ import annotations

import importlib.metadata
import os
import shutil
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from nest_ssl.config import NestConfig
from nest_ssl.launch.launcher import free_port
from nest_ssl.launch.ranks import DEFAULT_PORT, number_in
from nest_ssl.watchdog.report.evidence import py_spy

GOOD, LOOK, BAD = "good", "look", "bad"
SHM_GB_PER_WORKER = 0.25
"""Two batches of 64 x 16 s of clean, noise and noisy audio, float32."""
FILES_PER_RANK = 1024
REDUCE_TIMEOUT_S = 60.0


@dataclass(frozen=True)
class Finding:
    """One line of the check."""

    state: str
    name: str
    what: str


def check_machine(cfg: NestConfig) -> Iterator[Finding]:
    """Check, one by one, everything that has kept a run from starting or continuing."""
    yield _sync(cfg)
    yield _versions()
    yield from _gpus()
    yield _shared_memory(cfg)
    yield _open_files()
    yield _port()
    yield _host_name()
    yield _stacks()
    yield _all_reduce()


def _sync(cfg: NestConfig) -> Finding:
    value = cfg.model.encoder.sync_max_audio_length
    what = f"model.encoder.sync_max_audio_length: {str(value).lower()}; "
    what += "it has no effect: positions are computed without a collective"
    if cfg.trainer.sync_batchnorm:
        what += ". trainer.sync_batchnorm: true makes all ranks wait for each other twice per conformer layer"
    return Finding(GOOD, "config", what)


def _versions() -> Finding:
    torch = importlib.metadata.version("torch")
    return Finding(GOOD, "versions", f"Python {sys.version.split()[0]}, torch {torch}")


def _gpus() -> Iterator[Finding]:
    import torch

    if not torch.cuda.is_available():
        backend = "gloo" if torch.distributed.is_gloo_available() else "none"
        yield Finding(LOOK, "GPU", f"none found; ranks run on the CPU, backend {backend}")
        return
    backend = "nccl" if torch.distributed.is_nccl_available() else "gloo"
    yield Finding(GOOD if backend == "nccl" else BAD, "backend", backend)
    for number in range(torch.cuda.device_count()):
        free, total = torch.cuda.mem_get_info(number)
        name = torch.cuda.get_device_name(number)
        state = GOOD if free > 0.9 * total else LOOK
        busy = "" if state == GOOD else "; another process is using it"
        yield Finding(state, f"GPU {number}", f"{name}, {free / 1e9:.1f} of {total / 1e9:.1f} GB free{busy}")


def _shared_memory(cfg: NestConfig) -> Finding:
    folder = Path("/dev/shm")
    if not folder.is_dir():
        return Finding(LOOK, "shared memory", "no /dev/shm: DataLoader workers copy their batches")
    free_gb = shutil.disk_usage(folder).free / 1e9
    workers = cfg.model.train_ds.num_workers if cfg.model.train_ds is not None else 0
    devices = cfg.trainer.devices if isinstance(cfg.trainer.devices, int) else 1
    wanted_gb = SHM_GB_PER_WORKER * workers * max(devices, 1)
    if free_gb < wanted_gb:
        what = f"{free_gb:.1f} GB free in /dev/shm, {wanted_gb:.1f} GB needed: raise docker's --shm-size"
        return Finding(BAD, "shared memory", what)
    return Finding(GOOD, "shared memory", f"{free_gb:.1f} GB free in /dev/shm")


def _open_files() -> Finding:
    try:
        import resource
    except ImportError:
        return Finding(LOOK, "open files", "unknown on this system")
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft < FILES_PER_RANK:
        return Finding(BAD, "open files", f"at most {soft} per process: 'ulimit -n {min(hard, 65_536)}'")
    return Finding(GOOD, "open files", f"at most {soft} per process")


def _port() -> Finding:
    try:
        port = number_in(os.environ, "MASTER_PORT", DEFAULT_PORT)
    except ValueError as error:
        return Finding(BAD, "port", str(error))
    with socket.socket() as sock:
        try:
            sock.bind(("", port))
        except OSError as error:
            return Finding(
                LOOK, "port", f"{port}: {error.strerror}; set MASTER_PORT for torchrun (we choose a free one)"
            )
    return Finding(GOOD, "port", f"{port} is free")


def _host_name() -> Finding:
    name = socket.gethostname()
    try:
        return Finding(GOOD, "host name", f"{name} is {socket.gethostbyname(name)}")
    except OSError as error:
        return Finding(LOOK, "host name", f"{name} has no address ({error.strerror}): add it to /etc/hosts for gloo")


def _stacks() -> Finding:
    program = py_spy()
    if program is None:
        return Finding(LOOK, "stacks", "py-spy is not installed; stacks come from faulthandler")
    done = subprocess.run(
        [program, "dump", "--nonblocking", "--pid", str(os.getpid())], capture_output=True, text=True, check=False
    )
    if done.returncode != 0:
        reason = (done.stderr.strip().splitlines() or ["no reason given"])[0]
        return Finding(LOOK, "stacks", f"py-spy may not inspect processes ({reason}); stacks come from faulthandler")
    return Finding(GOOD, "stacks", "py-spy may inspect processes")


_REDUCE = """
import sys, torch, torch.distributed as dist
from datetime import timedelta
rank, port, backend = int(sys.argv[1]), sys.argv[2], sys.argv[3]
dist.init_process_group(backend, f"tcp://127.0.0.1:{port}", timedelta(seconds=40), world_size=2, rank=rank)
device = torch.device("cuda", rank) if backend == "nccl" else torch.device("cpu")
x = torch.full((1000,), rank + 1.0, device=device)
dist.all_reduce(x)
assert x.eq(3).all()
dist.destroy_process_group()
"""


def _all_reduce() -> Finding:
    """Run one all_reduce between two processes."""
    import torch

    backend = "nccl" if torch.cuda.device_count() >= 2 else "gloo"
    port, started = free_port(), time.monotonic()
    command = [sys.executable, "-P", "-c", _REDUCE]
    ranks = [
        subprocess.Popen([*command, str(rank), str(port), backend], stderr=subprocess.PIPE, text=True)
        for rank in range(2)
    ]
    try:
        errors = [rank.communicate(timeout=REDUCE_TIMEOUT_S)[1] for rank in ranks]
    except subprocess.TimeoutExpired:
        return Finding(BAD, "all_reduce", f"two ranks over {backend} did not finish within {REDUCE_TIMEOUT_S:.0f} s")
    finally:
        for rank in ranks:
            rank.kill()
            rank.wait()
    if any(rank.returncode for rank in ranks):
        last = next((error.strip().splitlines()[-1] for error in errors if error.strip()), "no message")
        return Finding(BAD, "all_reduce", f"two ranks over {backend} failed: {last}")
    return Finding(GOOD, "all_reduce", f"two ranks over {backend}: {time.monotonic() - started:.1f} s, start included")
