"""An incident: a verdict in words, as ten lines for a person and one JSON file for a program.

`headline`, `cause` and `advice` say what is wrong, why it probably is, and what to do about it.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import stat
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from nest_ssl.files import read_json, replace_text
from nest_ssl.run_folder import INCIDENTS, RunFolder
from nest_ssl.watchdog.judge.blame import ON_GPU, Verdict
from nest_ssl.watchdog.rank import NEEDS_A_PERSON, RESUMABLE, InitPart, Stage, part_label
from nest_ssl.watchdog.rows import GpuRow, RankRow, WorkerRow
from nest_ssl.watchdog.system import DISK_ANSWERS_S, LESS_MEMORY, PROCESS_STATES, signal_name, within


@dataclass(frozen=True)
class Incident:
    """What is kept of a verdict."""

    name: str
    """The name of its files."""
    time: str
    kind: str
    ranks: list[int]
    """The culprits."""
    stage: str
    part: str
    step: int
    stalled_s: float
    limit_s: float
    """How long it may take there; less than `stalled_s` unless nothing stalled."""
    file: str | None
    collective: str | None
    cause: str
    advice: str
    waiting: dict[str, str]
    """The other ranks, and where they wait."""
    stack: list[str]
    """The culprit's innermost frames."""
    exit_code: int
    checkpoint: str | None
    resume_command: str
    evidence: str
    text: str = ""
    """The ten lines."""


def exit_code_of(verdict: Verdict) -> int:
    """Return the job's exit code: an exception would recur; after anything else the same command resumes.

    Memory that ran out counts as the latter: the next batches are other ones, and the report says what to set.
    """
    if verdict.kind == "failed" and not _lost_peer(verdict):
        return NEEDS_A_PERSON
    if verdict.kind == "died" and (verdict.row.exit_status or 0) > 0:
        return NEEDS_A_PERSON
    return RESUMABLE


def _lost_peer(verdict: Verdict) -> bool:
    return verdict.failure is not None and verdict.failure.is_lost_peer


def make_incident(verdict: Verdict, stack: list[str], run_dir: Path, name: str, resume_command: str) -> Incident:
    subject = on_what(verdict)
    try:
        checkpoint = within(DISK_ANSWERS_S, lambda: RunFolder.open(run_dir).newest_checkpoint())
    except OSError:
        checkpoint = None
    values: dict[str, Any] = {
        "name": name,
        "time": time.strftime("%Y-%m-%dT%H:%M:%S%z"),
        "kind": verdict.kind,
        "ranks": verdict.ranks,
        "stage": verdict.stage.label,
        "part": "" if verdict.gpu is not None else part_label(verdict.stage, verdict.row.part),
        "step": verdict.step,
        "stalled_s": round(verdict.stalled_s, 2),
        "limit_s": round(verdict.limit_s, 2),
        "file": subject.removeprefix("file ") if subject.startswith("file ") else None,
        "collective": subject.removeprefix("collective ") if subject.startswith("collective ") else None,
        "cause": _cause_with_free_space(verdict, run_dir),
        "advice": advice(verdict),
        "waiting": {str(other.rank): verdict.place_of(other) for other in verdict.waiting},
        "stack": stack,
        "exit_code": exit_code_of(verdict),
        "checkpoint": None if checkpoint is None else str(checkpoint),
        "resume_command": resume_command,
        "evidence": str(run_dir / INCIDENTS / name),
    }
    incident = Incident(**values)
    return Incident(**values | {"text": "\n".join(_lines(verdict, incident))})


def _cause_with_free_space(verdict: Verdict, run_dir: Path) -> str:
    text = cause(verdict)
    if "No space left" in text and "free" not in text and run_dir.is_dir():
        text += f"; {run_dir}: {shutil.disk_usage(run_dir).free / 1e9:.1f} GB free"
    return text


def _lines(verdict: Verdict, incident: Incident) -> list[str]:
    row = verdict.row
    since = f"{incident.stalled_s:.1f} s ago (limit {verdict.limit_s:.0f} s)" if verdict.stalled_s else "now"
    place = row.place if verdict.gpu is None else f"{verdict.stage.label} on the GPU"
    checkpoint = (
        Path(incident.checkpoint).name if incident.checkpoint else "nothing yet: resuming starts from the beginning"
    )
    context = verdict.failure.context if verdict.failure is not None else []
    process = f"pid {row.pid}, node {row.node}" if row.pid else "never reported"
    return [
        f"nest-ssl: {headline(verdict)}",
        f"  where     {place}, step {verdict.step}, rank {row.rank} ({process})",
        f"  since     {since}",
        f"  on        {on_what(verdict) or '; '.join(context) or 'no file or collective'}",
        f"  others    {others_text(verdict)}",
        f"  cause     {incident.cause}",
        f"  to do     {incident.advice}",
        f"  stack     {' < '.join(incident.stack) or 'none could be read'}",
        f"  saved     {checkpoint}; evidence: {incident.evidence}",
        f"  resume    {incident.resume_command}",
    ]


# ---- words ----


def ranks_text(ranks: list[int]) -> str:
    """Return 'rank 1' or 'ranks 1, 2 and 5'; more than eight are counted."""
    if len(ranks) == 1:
        return f"rank {ranks[0]}"
    return f"ranks {', '.join(map(str, ranks[:-1]))} and {ranks[-1]}" if len(ranks) <= 8 else f"{len(ranks)} ranks"


def headline(verdict: Verdict) -> str:
    if verdict.kind == "lost-node":
        return f"{_nodes_text(verdict)} gone, with {ranks_text(verdict.ranks)}"
    if verdict.kind == "failed" and _lost_peer(verdict):
        return f"{ranks_text(verdict.ranks)} lost {'its' if len(verdict.ranks) == 1 else 'their'} connection"
    what = {
        "died": "died",
        "failed": "failed",
        "out-of-memory": "ran out of memory",
        "host-memory": "ran out of host memory",
        "lost-gpu": "lost its GPU",
        "worker-died": "lost a DataLoader worker",
        "stopped": "were stopped by a signal" if len(verdict.ranks) > 1 else "was stopped by a signal",
        "worker-stopped": "is waiting for a DataLoader worker that was stopped",
        "file": "is waiting for a file",
        "never-joined": "never joined",
        "left-early": "left before the others",
        "diverged": "called a different collective than the others",
        "unfinished": "called the same collective, which does not finish",
        "host-late": "stalled on the host",
        "gpu-stuck": "stalled on the GPU",
        "gpu-ahead": "left a collective in which the others wait",
        "gpu-unfinished": "wait on the GPU in the same collective, which does not finish",
    }.get(verdict.kind, "stalled")
    return f"{ranks_text(verdict.ranks)} {what}"


def _nodes_text(verdict: Verdict) -> str:
    nodes = sorted({row.node for row in verdict.culprits})
    return f"node {nodes[0]} is" if len(nodes) == 1 else f"nodes {', '.join(map(str, nodes))} are"


def cause(verdict: Verdict) -> str:
    """Return the probable cause in one line."""
    row, failure = verdict.row, verdict.failure
    kind = verdict.kind
    if kind == "died":
        return _why_it_died(row)
    if kind == "lost-node":
        since = f"{_nodes_text(verdict)} silent: did it crash or lose its network?"
        losers = sorted(other.rank for other in verdict.waiting)
        return f"{since} {ranks_text(losers)} lost contact with {ranks_text(verdict.ranks)}" if losers else since
    if kind == "host-memory":
        killed = f"process {row.pid}" if failure is None else "a DataLoader worker"
        return f"{killed if verdict.worker is None else _name_of(verdict.worker)} was killed: {row.oom_killer}"
    if failure is not None and kind == "lost-gpu":
        return failure.lost_gpu_cause
    if failure is not None and kind == "out-of-memory":
        return f"{failure.type}: {' '.join(failure.message.split())[:800]}"
    if failure is not None and kind == "failed":
        if failure.is_lost_peer:
            return f"the connection to another rank was lost ({failure.first_line[:200]})"
        return f"{failure.type}: {failure.first_line[:400]}"
    if kind in ("worker-died", "worker-stopped", "file"):
        return _why_no_data(verdict)
    if kind == "stopped":
        return f"process {row.pid} is stopped (SIGSTOP, a debugger, or a suspended job)"
    if kind == "never-joined":
        return _why_it_never_joined(verdict)
    if kind == "left-early":
        lost = f"; rank {failure.rank} then had: {failure.first_line[:200]}" if failure is not None else ""
        return f"it ran out of batches before the others: the ranks' batch counts differ{_missing_call(verdict)}{lost}"
    if kind == "gil":
        return f"a call into C code holds the GIL and does not return (process {PROCESS_STATES.get(row.process, '?')})"
    if kind == "diverged" and verdict.fault is not None:
        calls = [f"rank {rank} called {call}" for rank, call in sorted(verdict.fault.calls.items())]
        silent = [row.rank for row in (*verdict.culprits, *verdict.waiting) if row.rank not in verdict.fault.calls]
        calls += [f"rank {rank} called something else and was aborted" for rank in silent]
        return f"the ranks run different code or have different data: {'; '.join(calls)}"
    if kind == "unfinished":
        return "all ranks are waiting in the same collective: the network or a GPU is stuck"
    if row.gpu is not None and kind in ("host-late", *ON_GPU):
        return _why_by_gpu(verdict, row.gpu)
    return f"the code of this stage does not return (process {PROCESS_STATES.get(row.process, '?')})"


def _why_by_gpu(verdict: Verdict, gpu: GpuRow) -> str:
    row = verdict.row
    host = f"its host is in {row.place} (process {PROCESS_STATES.get(row.process, '?')})"
    if verdict.kind == "host-late":
        return f"the GPU is {gpu} and waits for more; {host}"
    if verdict.kind == "gpu-unfinished":
        where = f"all GPUs have been in {gpu.place} for {gpu.in_stage_s:.0f} s, and none is behind"
        return f"{where}: the network is stuck, or one GPU, in a stage in which ranks wait for each other"
    if verdict.kind == "gpu-ahead":
        others = next(other.gpu for other in verdict.waiting if other.gpu is not None)
        return f"its GPU is in {gpu.place}, and has left the {others.place}, in which the others wait: another graph?"
    more = gpu.launched - gpu.batch
    launched = f" and has launched {more} more batch{'' if more == 1 else 'es'}" if more > 0 else ""
    beside = [other.gpu for other in verdict.waiting if other.gpu is not None and other.gpu.place == gpu.place]
    before = f", before collective {gpu.came_to + 1} of its batch norms," if beside else ""
    return f"the GPU has been in {gpu.place}{before} for {gpu.in_stage_s:.0f} s; {host}{launched}"


def _missing_call(verdict: Verdict) -> str:
    if verdict.fault is None or not verdict.fault.calls:
        return ""
    return f"; it is missing at collective {next(iter(verdict.fault.calls.values()))}"


def _why_it_died(row: RankRow) -> str:
    status = row.exit_status
    if status is None:
        return "its process is gone; out of memory?"
    if status >= 0:
        return f"its process ended with exit code {status} before it could report; see its output above"
    name = signal_name(-status)
    if name == "SIGKILL":
        return f"killed by {name}: out of memory? (the kernel's OOM killer uses this signal; check 'dmesg')"
    return f"killed by {name}"


def _why_no_data(verdict: Verdict) -> str:
    worker = verdict.worker
    if worker is None:
        return "a DataLoader worker was killed: out of shared memory or memory?"
    name = _name_of(worker)
    path = f"; it was reading {worker.path}" if worker.path else ""
    if verdict.kind == "worker-died":
        return f"{name} {_how_it_ended(verdict)}{path}"
    if verdict.kind == "worker-stopped":
        return f"{name} is stopped (SIGSTOP or a debugger){path}"
    return f"{name} is blocked reading {worker.path}: {_kind_of_file(worker)}"


def _name_of(worker: WorkerRow) -> str:
    return f"DataLoader worker {worker.number} (pid {worker.pid})" if worker.number >= 0 else "the rank itself"


def _how_it_ended(verdict: Verdict) -> str:
    message = "" if verdict.failure is None else verdict.failure.message
    killed_by = re.search(r"killed by signal: (\w+(?: \w+)?)", message)
    if killed_by is not None and killed_by[1] not in ("Killed", "Bus error"):
        return f"was ended by a signal: {killed_by[1]}"
    what = "was killed" if not message or "killed by signal" in message else "is gone"
    return f"{what}: out of shared memory (/dev/shm) or memory?"


def _kind_of_file(worker: WorkerRow) -> str:
    try:
        mode = within(DISK_ANSWERS_S, lambda: os.stat(worker.path)).st_mode
    except TimeoutError:
        return "the disk or network disk does not respond"
    except OSError as error:
        return f"it cannot be accessed ({error.strerror})"
    if stat.S_ISFIFO(mode):
        return "a FIFO, not a regular file, and nobody writes to it"
    if not stat.S_ISREG(mode):
        return "not a regular file"
    return "the disk or network disk does not respond" if worker.process == "D" else "a slow or dead network disk?"


def _why_it_never_joined(verdict: Verdict) -> str:
    row = verdict.row
    joined = ranks_text(sorted(other.rank for other in verdict.waiting))
    if row.pid == 0:
        return f"its process was never started, or died before it could report; {joined} waited"
    part = InitPart(row.part).name.lower() if row.stage is Stage.INIT and row.part else row.place
    state = PROCESS_STATES.get(row.process, "?")
    return f"it is still in '{part}', before joining the process group (process {state}); {joined} waited"


def advice(verdict: Verdict) -> str:
    """Return what to do, in one line."""
    kind, failure = verdict.kind, verdict.failure
    if kind == "out-of-memory" and failure is not None and "model." in failure.message:
        return "set what the message says, then resume"
    if kind == "out-of-memory":
        return "lower model.train_ds.batch_size or max_duration (or batch_duration), or use trainer.precision=bf16"
    if failure is not None and kind == "lost-gpu":
        return failure.lost_gpu_advice
    if failure is not None and kind == "failed":
        return (
            "check the other nodes, then resume" if failure.is_lost_peer else "fix what the message says, then resume"
        )
    return {
        "lost-node": "check that node and its network (SLURM: --exclude leaves it out), then resume",
        "host-memory": f"{LESS_MEMORY}; then resume",
        "died": "check the machine's memory (evidence: memory.json), then resume",
        "worker-died": "enlarge /dev/shm, or lower model.train_ds.num_workers or prefetch_factor; then resume",
        "stopped": "find out who stopped it ('kill -CONT' lets it continue), then resume",
        "worker-stopped": "find out who stopped it, then resume",
        "file": "check the disk; 'nest-ssl prepare' refuses anything but regular files; then resume",
        "never-joined": "check that rank's node and log; raise watchdog.init_s if starting really takes longer",
        "left-early": "use nest-ssl's batch plan on every rank; see docs/why-it-hung.md",
        "diverged": "start every rank with the same code and configuration; see docs/why-it-hung.md",
        "unfinished": "check the network and the GPUs of all nodes ('nest-ssl doctor'), then resume",
        "gpu-unfinished": "check the network and the GPUs of all nodes ('nest-ssl doctor'), then resume",
        "gpu-stuck": "check that GPU (nvidia-smi, Xid errors in dmesg), then resume; model.compile=off uses no graphs",
        "gpu-ahead": "resume; if it happens again, model.compile=off trains without graphs",
    }.get(kind, "read the stack below and in the evidence, then resume")


def on_what(verdict: Verdict) -> str:
    """Return the file or the collective it is about; an empty string for neither."""
    if verdict.worker is not None and verdict.worker.path:
        return f"file {verdict.worker.path}"
    if verdict.fault is not None and verdict.fault.calls:
        calls = verdict.fault.calls
        if verdict.kind == "diverged":
            return "collective " + "; ".join(f"rank {rank}: {call}" for rank, call in sorted(calls.items()))
        return f"collective {next(iter(calls.values()))}"
    return ""


def others_text(verdict: Verdict) -> str:
    """Return where the other ranks wait, and for whom."""
    if not verdict.waiting:
        return "nobody is waiting for it"
    places: dict[str, list[int]] = {}
    for row in verdict.waiting:
        call = verdict.calls.get(row.rank)
        places.setdefault(f"{verdict.place_of(row)}{f', at collective {call}' if call else ''}", []).append(row.rank)
    parts = [f"{ranks_text(sorted(ranks))} in {place}" for place, ranks in places.items()]
    return f"waiting for {ranks_text(verdict.ranks)}: {'; '.join(parts)}"


# ---- files ----


def write_incident(incident: Incident, run_dir: Path) -> Path:
    """Write `incidents/NAME.json` and `NAME.txt`; return the path of the JSON, which appears whole."""
    folder = run_dir / INCIDENTS
    folder.mkdir(parents=True, exist_ok=True)
    replace_text(folder / f"{incident.name}.txt", incident.text + "\n", sync=False)
    path = folder / f"{incident.name}.json"
    replace_text(path, json.dumps(asdict(incident), indent=1), sync=False)
    return path


def incident_name(verdict: Verdict) -> str:
    ranks = "-".join(f"rank{rank}" for rank in verdict.ranks[:4])
    return f"{time.strftime('%Y%m%d-%H%M%S')}-{ranks}-{verdict.kind}"


def read_incidents(run_dir: Path) -> list[dict[str, Any]]:
    """Return all incidents of a run, oldest first."""
    found = [path for path in sorted((run_dir / INCIDENTS).glob("*.json")) if path.is_file()]
    return [read_json(path, lambda it: {**it, "time": str(it["time"]), "text": str(it["text"])}) for path in found]
