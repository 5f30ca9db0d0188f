"""Run the real program with a fault in it, and check what must hold for every run that ends."""

from __future__ import annotations

import contextlib
import json
import os
import re
import shlex
import signal
import subprocess
import sys
import time
import uuid
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tests.integration.runs import PROGRAM, arguments, losses
from tests.unit.watchdog.facts import hear_all_signals

INJECT = Path(__file__).parent / "inject"
FLOOR_S = 3.0


def noise_s() -> float:
    """The seconds a busy machine adds to every limit, by its load. The limits in docs/faults.md do not include it."""
    return 1.5 * max(1.0, os.getloadavg()[0] / (os.cpu_count() or 1))


@dataclass
class Run:
    """A run of the program, in progress or finished."""

    process: subprocess.Popen[bytes]
    run_dir: Path
    note: Path
    output: Path
    token: str
    corpus: Path
    ended_at: float = 0.0
    struck_at: float | None = None
    """Set by a test that injects the fault from outside; otherwise the fault's own note counts."""

    @property
    def stderr(self) -> str:
        return self.output.read_text(errors="replace")

    @property
    def returncode(self) -> int:
        code = self.process.poll()
        assert code is not None
        return code

    def wait(self, timeout_s: float = 120.0) -> Run:
        self.process.wait(timeout=timeout_s)
        self.ended_at = time.time()
        return self

    def incidents(self) -> list[dict[str, Any]]:
        return [json.loads(path.read_text()) for path in sorted((self.run_dir / "incidents").glob("*.json"))]

    @property
    def incident(self) -> dict[str, Any]:
        found = self.incidents()
        assert len(found) == 1, f"{len(found)} incidents\n{self.stderr[-4000:]}"
        return found[0]

    @property
    def struck(self) -> float:
        """Wall-clock time of the fault."""
        return self.struck_at if self.struck_at is not None else float(self.note.read_text())

    @property
    def reported_s(self) -> float:
        """Seconds from the fault to the report."""
        (path,) = (self.run_dir / "incidents").glob("*.json")
        return path.stat().st_mtime - self.struck

    def status(self, node: int = 0) -> dict[str, Any]:
        """The latest status of its ranks from a node's monitor, once it has seen all of them."""
        path = self.run_dir / "watchdog" / f"node{node}.json"
        deadline = time.monotonic() + 20
        while time.monotonic() < deadline:
            if path.is_file():
                content: dict[str, Any] = json.loads(path.read_text())
                if all(row["pid"] for row in content["rows"]):
                    return content
            time.sleep(0.05)
        raise AssertionError("the monitor wrote no status within 20 s")

    def wait_for_step(self, step: int, timeout_s: float = 90.0) -> None:
        deadline = time.monotonic() + timeout_s
        while not any(done >= step for done in losses(self.run_dir / "metrics.csv")):
            assert self.process.poll() is None, self.stderr[-4000:]
            assert time.monotonic() < deadline, self.stderr[-4000:]
            time.sleep(0.02)

    def survivors(self) -> list[str]:
        """Processes of this run that are still alive, found by the token in their environment."""
        found = []
        for entry in Path("/proc").iterdir():
            if entry.name.isdigit():
                with contextlib.suppress(OSError):
                    state = (entry / "stat").read_text().rsplit(")", 1)[1].split()[0]
                    if state != "Z" and self.token.encode() in (entry / "environ").read_bytes():
                        found.append(f"{entry.name} {(entry / 'cmdline').read_bytes()[:200]!r}")
        return found


@dataclass
class Lab:
    """The folder and the runs of one test."""

    corpus: Path
    folder: Path
    runs: list[Run] = field(default_factory=list)

    def start(
        self,
        fault: str = "",
        *,
        ranks: int = 2,
        more: tuple[str, ...] = (),
        program: list[str] | None = None,
        env: dict[str, str] | None = None,
        name: str = "run",
    ) -> Run:
        """Start a run with the given fault, 'NAME RANK STEP'."""
        token = f"nest-test-{uuid.uuid4().hex}"
        variables = {
            **os.environ,
            "PYTHONPATH": os.pathsep.join([str(INJECT), *sys.path]),
            "NEST_FAULT": fault,
            "NEST_FAULT_NOTE": str(self.folder / f"{token}.note"),
            "NEST_FAULT_TOKEN": token,
            "OMP_NUM_THREADS": "1",
            **(env or {}),
        }
        args = arguments(
            self.corpus,
            self.folder,
            name,
            f"trainer.devices={ranks}",
            "trainer.max_steps=8",
            f"watchdog.floor_s={FLOOR_S}",
            *more,
        )
        output = self.folder / f"{token}.stderr"
        with output.open("wb") as file:
            process = subprocess.Popen(
                [*(program or PROGRAM), *args],
                env=variables,
                stdout=subprocess.DEVNULL,
                stderr=file,
                preexec_fn=hear_all_signals,
            )
        run = Run(process, self.folder / name, Path(variables["NEST_FAULT_NOTE"]), output, token, self.corpus)
        self.runs.append(run)
        return run

    def resume(self, run: Run) -> Run:
        """Resume a run with the command from its report, without the fault."""
        command = shlex.split(run.incident["resume_command"])
        assert command[1:4] == PROGRAM[1:]
        token = f"nest-test-{uuid.uuid4().hex}"
        output = self.folder / f"{token}.stderr"
        env = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path), "NEST_FAULT_TOKEN": token, "OMP_NUM_THREADS": "1"}
        with output.open("wb") as file:
            process = subprocess.Popen(command, env=env, stdout=subprocess.DEVNULL, stderr=file)
        resumed = Run(process, run.run_dir, run.note, output, token, self.corpus)
        self.runs.append(resumed)
        return resumed.wait()

    def clean_up(self) -> None:
        for run in self.runs:
            if run.process.poll() is None:
                run.process.kill()
                run.process.wait()
            for line in run.survivors():
                with contextlib.suppress(ProcessLookupError):
                    os.kill(int(line.split()[0]), signal.SIGKILL)


def check_named(run: Run, *, ranks: list[int], stage: str, within_s: float, exit_code: int = 75) -> dict[str, Any]:
    """Check that the report names rank and stage in time, on the terminal and on disk, and nothing is left running."""
    incident = run.incident
    assert incident["ranks"] == ranks, incident["text"]
    assert incident["stage"] == stage, incident["text"]
    assert incident["cause"]
    assert incident["resume_command"]
    assert isinstance(incident["step"], int)
    assert len(incident["text"].splitlines()) == 10
    assert incident["text"] in run.stderr
    assert run.returncode == exit_code == incident["exit_code"], run.stderr[-4000:]
    assert run.reported_s < within_s + noise_s(), f"reported after {run.reported_s:.1f} s"
    assert run.ended_at - run.struck < within_s + 2 + noise_s()
    evidence = Path(incident["evidence"])
    assert (evidence / "ranks.json").is_file()
    assert (evidence / "processes.json").is_file()
    check_nothing_left(run)
    keep_for_the_table(run, incident["text"], run.reported_s)
    return incident


def check_nothing_left(run: Run, within_s: float = 2.0) -> None:
    deadline = time.monotonic() + within_s
    while (left := run.survivors()) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not left, left


def check_resumes(lab: Lab, run: Run, whole: Path) -> None:
    """Check that the report's command resumes to exactly the losses of an undisturbed run."""
    resumed = lab.resume(run)
    assert resumed.returncode == 0, resumed.stderr[-4000:]
    check_same_losses(run, whole)


def check_same_losses(run: Run, whole: Path) -> None:
    for column in ("train_loss", "val_loss"):
        assert losses(run.run_dir / "metrics.csv", column) == losses(whole / "metrics.csv", column)


@contextlib.contextmanager
def lab_in(corpus: Path, folder: Path) -> Iterator[Lab]:
    lab = Lab(corpus, folder)
    try:
        yield lab
    finally:
        lab.clean_up()


def keep_for_the_table(run: Run, text: str, after_s: float | None = None) -> None:
    """Save the output for `make faults`, which writes docs/faults.md from real output."""
    folder = os.environ.get("NEST_FAULT_TABLE")
    if not folder:
        return
    name = os.environ["PYTEST_CURRENT_TEST"].split("::")[-1].split(" ")[0]
    for path, short in ((run.run_dir, "RUN_DIR"), (run.corpus, "/data"), (run.run_dir.parent, "/runs")):
        text = text.replace(str(path), short)
    text = re.sub(r"(?m)^(  resume    ).*", r"\1nest-ssl pretrain … trainer.devices=2", text)
    content = {"test": name, "text": text, "after_s": after_s, "exit": run.returncode}
    (Path(folder) / f"{re.sub('[^a-zA-Z0-9_]+', '-', name)}.json").write_text(json.dumps(content, indent=1))


def said(run: Run, pattern: str) -> str:
    """Return what the pattern matches on the terminal; fail if nothing does."""
    found = re.search(pattern, run.stderr)
    assert found is not None, run.stderr[-4000:]
    return found[0]


def check_stopped_as_agreed(run: Run, saved: dict[str, Any]) -> str:
    """The ranks saved at the step they agreed on, or before it, in the validation that they left; what was said."""
    at_step = r"(?:all ranks )?will save and exit by step \d+"
    told = said(run, rf"nest-ssl: \w+: {at_step}")
    for put_off in re.finditer(rf"nest-ssl: nodes? .* did not confirm in time: {at_step}", run.stderr):
        told = put_off[0]
    agreed, step = int(told.rpartition(" ")[2]), int(saved["global_step"])
    assert step == agreed or (step < agreed and saved["progress"]["validation_is_due"]), f"{told}, saved after {step}"
    assert f"saved and stopped after step {step}" in run.stderr
    return told
