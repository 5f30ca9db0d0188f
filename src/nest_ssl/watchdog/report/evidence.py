"""Evidence: stacks of every rank and worker, process states, memory and GPU figures, as files in one folder."""

from __future__ import annotations

import contextlib
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from nest_ssl.files import replace_text
from nest_ssl.watchdog.judge import flight
from nest_ssl.watchdog.judge.flight import Flight, read_flight
from nest_ssl.watchdog.rows import RankRow
from nest_ssl.watchdog.system import memory_facts, process_facts

STACK_TIMEOUT_S = 1.0
HANDLER_TIMEOUT_S = 0.3


def py_spy() -> str | None:
    """Return the program, next to our interpreter or on PATH."""
    own = Path(sys.executable).with_name("py-spy")
    return str(own) if own.is_file() else shutil.which("py-spy")


def fault_file(folder: Path, pid: int) -> Path:
    """Return the file in the beacon's folder to which a process's faulthandler writes on SIGUSR2."""
    return folder / f"stack_{pid}.txt"


def collect_flights(folder: Path, ranks: Iterable[int]) -> dict[int, Flight]:
    """Read what the ranks have written about their collectives."""
    found = {rank: read_flight(folder / flight.file_name(rank)) for rank in ranks}
    return {rank: calls for rank, calls in found.items() if calls is not None}


def write_stacks(processes: Mapping[str, int], folder: Path, beacon_folder: Path) -> None:
    """Write the stacks of all processes to `folder`, one file each."""
    folder.mkdir(parents=True, exist_ok=True)
    for name, text in read_stacks(processes, beacon_folder).items():
        replace_text(folder / f"{name}.txt", text, sync=False)


def read_stacks(processes: Mapping[str, int], beacon_folder: Path) -> dict[str, str]:
    """Return the stack of every process by name.

    py-spy needs no help from the process: it works while the GIL is held and on a stopped process. Where it is not
    permitted, faulthandler has the process write its own stack on SIGUSR2.
    """
    stacks = _py_spy_stacks(processes)
    missing = {name: pid for name, pid in processes.items() if name not in stacks}
    return stacks | _handler_stacks(missing, beacon_folder)


def _py_spy_stacks(processes: Mapping[str, int]) -> dict[str, str]:
    program = py_spy()
    if program is None:
        return {}
    running = {
        name: subprocess.Popen(
            [program, "dump", "--nonblocking", "--pid", str(pid)],
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
        )
        for name, pid in processes.items()
    }
    deadline = time.monotonic() + STACK_TIMEOUT_S
    stacks = {}
    for name, process in running.items():
        try:
            text, _ = process.communicate(timeout=max(deadline - time.monotonic(), 0.05))
        except subprocess.TimeoutExpired:
            process.kill()
            process.communicate()
            continue
        if process.returncode == 0 and "Thread" in text:
            stacks[name] = text
    return stacks


def _handler_stacks(processes: Mapping[str, int], beacon_folder: Path) -> dict[str, str]:
    asked = {}
    for name, pid in processes.items():
        path = fault_file(beacon_folder, pid)
        if path.is_file():  # it has a handler: without one the signal would kill it
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGUSR2)
                asked[name] = path
    if asked:
        time.sleep(HANDLER_TIMEOUT_S)
    return {name: text for name, path in asked.items() if (text := path.read_text(errors="replace"))}


def innermost_frames(stack: str, count: int = 3) -> list[str]:
    """Return the main thread's innermost frames, innermost first, from the text of py-spy or faulthandler."""
    lines = stack.splitlines()
    start = next((i for i, line in enumerate(lines) if "MainThread" in line), None)
    if start is None:  # faulthandler's: the main thread is the last
        start = max((i for i, line in enumerate(lines) if "(most recent call first)" in line), default=len(lines))
    frames = []
    for line in lines[start + 1 :]:
        if not line.startswith((" ", "\t")):
            break
        frames.append(_frame(line.strip()))
    return frames[:count]


def _frame(line: str) -> str:
    """Rewrite faulthandler's 'File "/a/b/c.py", line 3 in f' the way py-spy does: 'f (b/c.py:3)'."""
    match = re.match(r'File "([^"]+)", line (\d+) in (.+)', line)
    return line if match is None else f"{match[3]} ({'/'.join(Path(match[1]).parts[-2:])}:{match[2]})"


def processes_of(rows: Iterable[RankRow]) -> dict[str, int]:
    """Return the ranks and workers whose stacks can be read, by name."""
    found = {}
    for row in rows:
        if row.pid and not row.is_gone:
            found[f"rank{row.rank}"] = row.pid
        for worker in row.workers:
            if worker.number >= 0 and worker.process not in ("", "Z"):
                found[f"rank{row.rank}_loader{worker.number}_{worker.pid}"] = worker.pid
    return found


def write_facts(rows: list[RankRow], folder: Path, node: int = 0) -> None:
    """Write the rows, the states of the processes, the machine's memory, and its GPUs if it has any."""
    folder.mkdir(parents=True, exist_ok=True)
    of_node = f"_node{node}" if node else ""
    _write(folder / f"ranks{of_node}.json", [row.to_json() for row in rows])
    _write(folder / f"processes{of_node}.json", {name: process_facts(pid) for name, pid in processes_of(rows).items()})
    loadavg = os.getloadavg() if hasattr(os, "getloadavg") else None  # Windows has none
    _write(folder / f"memory{of_node}.json", {**memory_facts(), "/dev/shm": _disk("/dev/shm"), "loadavg": loadavg})
    gpus = gpu_text()
    if gpus:
        replace_text(folder / f"gpus{of_node}.txt", gpus, sync=False)


def gpu_text() -> str:
    """Return nvidia-smi's table of memory and utilization; empty without a GPU."""
    program = shutil.which("nvidia-smi")
    if program is None:
        return ""
    query = "index,name,utilization.gpu,memory.used,memory.total,temperature.gpu,pstate"
    try:
        done = subprocess.run(
            [program, f"--query-gpu={query}", "--format=csv"], capture_output=True, text=True, timeout=2, check=False
        )
    except subprocess.TimeoutExpired:
        return "nvidia-smi did not respond within 2 s\n"
    return done.stdout


def _disk(path: str) -> str:
    try:
        usage = shutil.disk_usage(path)
    except OSError:
        return "none"
    return f"{usage.free / 1e9:.2f} of {usage.total / 1e9:.2f} GB free"


def _write(path: Path, content: Any) -> None:
    replace_text(path, json.dumps(content, indent=1), sync=False)
