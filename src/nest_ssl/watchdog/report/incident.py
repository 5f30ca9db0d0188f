"""An incident: ten lines for a person and one JSON for a program, from a verdict."""

from __future__ import annotations

import json
import os
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from nest_ssl.launch.exit_codes import NEEDS_A_PERSON, RESUMABLE
from nest_ssl.run_folder import INCIDENTS, RunFolder
from nest_ssl.run_folder import LAST as LAST
from nest_ssl.watchdog.judge.blame import Verdict
from nest_ssl.watchdog.report import words
from nest_ssl.watchdog.stages import part_label
from nest_ssl.watchdog.system import DISK_ANSWERS_S, within

FOLDER = INCIDENTS


@dataclass(frozen=True)
class Incident:
    """What is kept of a verdict."""

    name: str
    """Of its files."""
    time: str
    kind: str
    ranks: list[int]
    """The culprits."""
    stage: str
    part: str
    step: int
    stalled_s: float
    file: str | None
    collective: str | None
    cause: str
    advice: str
    waiting: dict[str, str]
    """Other ranks, and where they wait."""
    stack: list[str]
    """The culprit's innermost frames."""
    exit_code: int
    checkpoint: str | None
    resume_command: str
    evidence: str
    text: str = ""
    """The ten lines."""


def exit_code_of(verdict: Verdict) -> int:
    """An exception would come again; whatever else ended the job, the same command goes on."""
    if verdict.kind == "out-of-memory" or (verdict.kind == "failed" and not _lost_peer(verdict)):
        return NEEDS_A_PERSON
    if verdict.kind == "died" and (verdict.row.exit_status or 0) > 0:
        return NEEDS_A_PERSON
    return RESUMABLE


def _lost_peer(verdict: Verdict) -> bool:
    return verdict.failure is not None and verdict.failure.is_lost_peer


def make_incident(verdict: Verdict, stack: list[str], run_dir: Path, name: str, resume_command: str) -> Incident:
    row, on_what = verdict.row, words.on_what(verdict)
    try:
        checkpoint = within(DISK_ANSWERS_S, lambda: newest_checkpoint(run_dir))
    except OSError:
        checkpoint = None
    values: dict[str, Any] = {
        "name": name,
        "time": time.strftime("%Y-%m-%dT%H:%M:%S%z"),
        "kind": verdict.kind,
        "ranks": verdict.ranks,
        "stage": row.stage.label,
        "part": part_label(row.stage, row.part),
        "step": row.step,
        "stalled_s": round(verdict.stalled_s, 2),
        "file": on_what.removeprefix("file ") if on_what.startswith("file ") else None,
        "collective": on_what.removeprefix("collective ") if on_what.startswith("collective ") else None,
        "cause": _cause(verdict, run_dir),
        "advice": words.advice(verdict),
        "waiting": {str(other.rank): other.place for other in verdict.waiting},
        "stack": stack,
        "exit_code": exit_code_of(verdict),
        "checkpoint": None if checkpoint is None else str(checkpoint),
        "resume_command": resume_command,
        "evidence": str(run_dir / FOLDER / name),
    }
    incident = Incident(**values)
    return Incident(**values | {"text": "\n".join(_lines(verdict, incident))})


def _cause(verdict: Verdict, run_dir: Path) -> str:
    cause = words.cause(verdict)
    if "No space left" in cause and "free" not in cause and run_dir.is_dir():
        cause += f"; {run_dir}: {words.free_text(run_dir)}"
    return cause


def _lines(verdict: Verdict, incident: Incident) -> list[str]:
    row = verdict.row
    since = f"for {incident.stalled_s:.1f} s (limit {row.limit_s:.0f} s)" if verdict.stalled_s else "now"
    checkpoint = (
        Path(incident.checkpoint).name if incident.checkpoint else "none yet: resuming starts from the beginning"
    )
    context = verdict.failure.context if verdict.failure is not None else []
    process = f"pid {row.pid}, node {row.node}" if row.pid else "not heard of"
    return [
        f"nest-ssl: {words.headline(verdict)}",
        f"  where     {row.place}, step {row.step}, rank {row.rank} ({process})",
        f"  since     {since}",
        f"  on        {words.on_what(verdict) or '; '.join(context) or 'no file and no collective of its own'}",
        f"  others    {words.others_text(verdict)}",
        f"  cause     {incident.cause}",
        f"  to do     {incident.advice}",
        f"  stack     {' < '.join(incident.stack) or 'none could be read'}",
        f"  saved     {checkpoint}; evidence: {incident.evidence}",
        f"  resume    {incident.resume_command}",
    ]


def write_incident(incident: Incident, run_dir: Path) -> Path:
    """`incidents/NAME.json` and `NAME.txt`; the path of the JSON, which appears whole."""
    folder = run_dir / FOLDER
    folder.mkdir(parents=True, exist_ok=True)
    (folder / f"{incident.name}.txt").write_text(incident.text + "\n")
    path = folder / f"{incident.name}.json"
    temporary = path.with_suffix(".tmp")
    temporary.write_text(json.dumps(asdict(incident), indent=1))
    os.replace(temporary, path)
    return path


def incident_name(verdict: Verdict) -> str:
    ranks = "-".join(f"rank{rank}" for rank in verdict.ranks[:4])
    return f"{time.strftime('%Y%m%d-%H%M%S')}-{ranks}-{verdict.kind}"


def read_incidents(run_dir: Path) -> list[dict[str, Any]]:
    """All incidents of a run, oldest first."""
    return [json.loads(path.read_text()) for path in sorted((run_dir / FOLDER).glob("*.json"))]


def newest_checkpoint(run_dir: Path) -> Path | None:
    return RunFolder.open(run_dir).newest_checkpoint()


def newest_of(checkpoints: Path) -> Path | None:
    return RunFolder(checkpoints.parent, str(checkpoints)).newest_checkpoint()
