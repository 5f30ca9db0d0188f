"""A verdict in words: what is wrong, why it probably is, and what to do about it."""

from __future__ import annotations

import os
import re
import shutil
import signal
import stat
from pathlib import Path

from nest_ssl.watchdog.judge.blame import Verdict
from nest_ssl.watchdog.rows import RankRow, WorkerRow
from nest_ssl.watchdog.stages import InitPart, Stage
from nest_ssl.watchdog.system import DISK_ANSWERS_S, PROCESS_STATES, within


def ranks_text(ranks: list[int]) -> str:
    """'rank 1', 'ranks 1, 2 and 5'."""
    if len(ranks) == 1:
        return f"rank {ranks[0]}"
    return f"ranks {', '.join(map(str, ranks[:-1]))} and {ranks[-1]}" if len(ranks) <= 8 else f"{len(ranks)} ranks"


def signal_name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"


def headline(verdict: Verdict) -> str:
    who = ranks_text(verdict.ranks)
    many = len(verdict.ranks) > 1
    what = {
        "died": "died",
        "failed": "failed",
        "out-of-memory": "ran out of memory",
        "worker-died": "lost a loader process",
        "stopped": "were stopped by a signal" if many else "was stopped by a signal",
        "worker-stopped": "waits for a loader process that was stopped",
        "file": "waits for a file",
        "never-joined": "never joined",
        "left-early": "left before the others",
        "diverged": "called another collective than the others",
        "unfinished": "called the same collective, and it does not end",
    }.get(verdict.kind, "stand still" if many else "stands still")
    return f"{who} {what}"


def cause(verdict: Verdict) -> str:
    """The probable cause, in one line."""
    row, failure = verdict.row, verdict.failure
    kind = verdict.kind
    if kind == "died":
        return _why_it_died(row)
    if failure is not None and kind in ("failed", "out-of-memory"):
        first_line = failure.message.strip().splitlines()[0] if failure.message.strip() else "no message"
        if failure.is_lost_peer:
            return f"the connection to another rank was lost ({first_line[:200]})"
        return f"{failure.type}: {first_line[:400]}"
    if kind in ("worker-died", "worker-stopped", "file"):
        return _why_no_data(verdict)
    if kind == "stopped":
        return f"process {row.pid} is stopped (SIGSTOP, a debugger, or a suspended job)"
    if kind == "never-joined":
        return _why_it_never_joined(verdict)
    if kind == "left-early":
        return f"it has no more batches while others have: the batch counts of the ranks differ{_missing_call(verdict)}"
    if kind == "gil":
        return f"a call into C code holds the GIL and does not return (process {PROCESS_STATES.get(row.process, '?')})"
    if kind == "diverged" and verdict.parting is not None:
        calls = [f"rank {rank} called {call}" for rank, call in sorted(verdict.parting.calls.items())]
        silent = [row.rank for row in (*verdict.culprits, *verdict.waiting) if row.rank not in verdict.parting.calls]
        calls += [f"rank {rank} called something else, and died of it" for rank in silent]
        return f"the ranks run different code or different data: {'; '.join(calls)}"
    if kind == "unfinished":
        return "all ranks wait in the same collective: the network or a GPU does not move"
    return f"the code of this stage does not return (process {PROCESS_STATES.get(row.process, '?')})"


def _missing_call(verdict: Verdict) -> str:
    if verdict.parting is None or not verdict.parting.calls:
        return ""
    return f"; it is missing at collective {next(iter(verdict.parting.calls.values()))}"


def _why_it_died(row: RankRow) -> str:
    status = row.exit_status
    if row.is_lost:
        return f"nothing is heard of node {row.node}: did it crash, or lose its network?"
    if status is None:
        return "its process is gone; out of memory?"
    if status >= 0:
        return f"its process left with exit code {status} before it could report; what it said stands above"
    name = signal_name(-status)
    if name == "SIGKILL":
        return f"killed by {name}: out of memory? (the kernel's killer uses this signal; 'dmesg' would say so)"
    return f"killed by {name}"


def _why_no_data(verdict: Verdict) -> str:
    worker = verdict.worker
    if worker is None:
        return "a loader process was killed: shared memory or memory?"
    name = f"loader process {worker.number} (pid {worker.pid})" if worker.number >= 0 else "the rank itself"
    path = f"; it was reading {worker.path}" if worker.path else ""
    if verdict.kind == "worker-died":
        return f"{name} {_how_it_ended(verdict)}{path}"
    if verdict.kind == "worker-stopped":
        return f"{name} is stopped (SIGSTOP or a debugger){path}"
    return f"{name} does not get {worker.path}: {_kind_of_file(worker)}"


def _how_it_ended(verdict: Verdict) -> str:
    message = "" if verdict.failure is None else verdict.failure.message
    killed_by = re.search(r"killed by signal: (\w+(?: \w+)?)", message)
    if killed_by is not None and killed_by[1] not in ("Killed", "Bus error"):
        return f"was ended by a signal: {killed_by[1]}"
    what = "was killed" if not message or "killed by signal" in message else "is gone"
    return f"{what}: shared memory (/dev/shm) or memory?"


def _kind_of_file(worker: WorkerRow) -> str:
    try:
        mode = within(DISK_ANSWERS_S, lambda: os.stat(worker.path)).st_mode
    except TimeoutError:
        return "the disk or the network disk does not answer"
    except OSError as error:
        return f"it cannot be looked at ({error.strerror})"
    if stat.S_ISFIFO(mode):
        return "a FIFO, no regular file, and nobody writes to it"
    if not stat.S_ISREG(mode):
        return "no regular file"
    return "the disk or the network disk does not answer" if worker.process == "D" else "a slow or dead network disk?"


def _why_it_never_joined(verdict: Verdict) -> str:
    row = verdict.row
    joined = ranks_text(sorted(other.rank for other in verdict.waiting))
    if row.pid == 0:
        return f"its process was never started, or died before it could say anything; {joined} waited"
    part = InitPart(row.part).name.lower() if row.stage is Stage.INIT and row.part else row.place
    state = PROCESS_STATES.get(row.process, "?")
    return f"it is still at '{part}' before the process group (process {state}); {joined} waited"


def advice(verdict: Verdict) -> str:
    """What to do, in one line."""
    kind, failure = verdict.kind, verdict.failure
    if kind == "out-of-memory":
        return "lower model.train_ds.batch_size or max_duration (or batch_duration), or use trainer.precision=bf16"
    if failure is not None and kind == "failed":
        return (
            "mend what the message says, then resume" if not failure.is_lost_peer else "look at the other nodes, resume"
        )
    return {
        "died": "look at the memory of the machine (evidence: memory.json), then resume",
        "worker-died": "give /dev/shm more room, or lower model.train_ds.num_workers or prefetch_factor; then resume",
        "stopped": "find who stopped it ('kill -CONT' lets it go on), then resume",
        "worker-stopped": "find who stopped it, then resume",
        "file": "look at the disk; 'nest-ssl prepare' refuses what is not a regular file; then resume",
        "never-joined": "look at that rank's node and log; raise watchdog.init_s if starting really takes longer",
        "left-early": "use the batch plan of nest-ssl on every rank; see docs/why-it-hung.md",
        "diverged": "start every rank with the same code and configuration; see docs/why-it-hung.md",
        "unfinished": "check the network and the GPUs of all nodes ('nest-ssl doctor'), then resume",
    }.get(kind, "read the stack below and in the evidence, then resume")


def on_what(verdict: Verdict) -> str:
    """The file or the collective it is about; empty for neither."""
    if verdict.worker is not None and verdict.worker.path:
        return f"file {verdict.worker.path}"
    if verdict.parting is not None and verdict.parting.calls:
        calls = verdict.parting.calls
        if verdict.kind == "diverged":
            return "collective " + "; ".join(f"rank {rank}: {call}" for rank, call in sorted(calls.items()))
        return f"collective {next(iter(calls.values()))}"
    return ""


def others_text(verdict: Verdict) -> str:
    """What the other ranks wait for."""
    if not verdict.waiting:
        return "nobody waits for it"
    places: dict[str, list[int]] = {}
    for row in verdict.waiting:
        call = verdict.calls.get(row.rank)
        places.setdefault(f"{row.place}{f', at collective {call}' if call else ''}", []).append(row.rank)
    parts = [f"{ranks_text(sorted(ranks))} in {place}" for place, ranks in places.items()]
    return f"wait for {ranks_text(verdict.ranks)}: {'; '.join(parts)}"


def free_text(path: Path) -> str:
    return f"{shutil.disk_usage(path).free / 1e9:.1f} GB free"
