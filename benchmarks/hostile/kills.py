"""Runs that a terminal, a scheduler, a container, a limit or a second command stops: the same command must go on.

Whatever started these trials may ignore INT, QUIT and HUP: restore their defaults first (`env --default-signal`).
"""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
from benchmarks.hostile.harness import (
    ALL_STEPS,
    HUP,
    INT,
    KILL,
    RUN,
    TERM,
    USR1,
    Fixture,
    Kill,
    Outcome,
    Refused,
    Setup,
    Trial,
    in_process,
    is_seen,
    killed,
    losses,
    output_of,
    resume,
    start,
    write_lines,
)

Act = Callable[[Path, list[str]], "str | None"]
STOP, CONT, XCPU = signal.SIGSTOP, signal.SIGCONT, signal.SIGXCPU
WORKERS = ("model.train_ds.num_workers=2",)
TWO = "trainer.devices=2"
LONG = ("trainer.max_steps=20000", "trainer.check_val_every_n_epoch=1000")
"""A run of some minutes, so that a second command meets it alive."""

SIGNALS: dict[str, tuple[Kill, tuple[str, ...]]] = {
    "Ctrl-C in a terminal, which the DataLoader workers get too": (Kill((INT,), "step 1", "group"), WORKERS),
    "Ctrl-C three times, by somebody impatient": (Kill((INT, INT, INT), "step 2", "group"), ()),
    "docker stop with a grace period that is too short": (Kill((TERM, KILL), "step 2", codes=(75, -9)), ()),
    "systemd ends the unit: every process gets TERM": (Kill((TERM,), "step 2", "group"), WORKERS),
    "scancel --full --signal=USR1: every process gets it": (Kill((USR1,), "step 2", "group"), WORKERS),
    "the terminal is closed": (Kill((HUP,), "step 2", "group", codes=(75, -1)), ()),
    "Ctrl-Z, then fg": (Kill((STOP, CONT), "step 2", "group", codes=(0,), continued=True), ()),
    "a suspended job is cancelled": (Kill((STOP, TERM, CONT), "step 2"), ()),
    "ulimit -t: the time of the CPU is over": (Kill((XCPU,), "step 2", codes=(75, -24)), ()),
    "a DataLoader worker is ended in htop": (Kill((TERM,), "step 1", "worker", continued=True), WORKERS),
    "preempted, create_preemption_callback=false": (
        Kill((TERM,), "step 2"),
        ("exp_manager.create_preemption_callback=false",),
    ),
    "out of memory while every step saves": (
        Kill((KILL,), "step 3", codes=(-9,)),
        ("exp_manager.checkpoint_callback_params.every_n_train_steps=1",),
    ),
    "Ctrl-C when the model is already written": (Kill((INT,), "file checkpoints/*.nemo", continued=True), ()),
    "two ranks: Ctrl-C in a terminal": (Kill((INT,), "step 2", "group", ranks=2), (TWO, *WORKERS)),
    "two ranks: TERM to one rank's process only": (Kill((TERM,), "step 2", "rank 1", ranks=2), (TWO,)),
    "two ranks: one dies, launch.max_restarts=2": (
        Kill((KILL,), "step 2", "rank 1", ranks=2, codes=(0,), continued=True),
        (TWO, "launch.max_restarts=2"),
    ),
}

OWN_REFERENCE: dict[str, tuple[Kill, tuple[str, ...]]] = {
    "average of the weights, accumulation, buckets: killed in an epoch": (
        Kill((KILL,), "step 3", codes=(-9,)),
        (
            *("exp_manager.ema={enable: true, decay: 0.9}", "trainer.accumulate_grad_batches=2"),
            *("model.train_ds.use_bucketing=true", "model.train_ds.num_buckets=2"),
            "exp_manager.checkpoint_callback_params.every_n_train_steps=2",
        ),
    ),
    "sharded weights: all killed when the folder appears": (
        Kill((KILL,), "file checkpoints/last.ckpt", "group", ranks=2, codes=(-9,)),
        (TWO, "trainer.strategy=fsdp", "exp_manager.checkpoint_callback_params.every_n_train_steps=1"),
    ),
}


def against_own_run(kill: Kill) -> Act:
    """As `killed`, but the undisturbed run is made with the same overrides."""

    def act(folder: Path, command: list[str]) -> str | None:
        whole = in_process([*command, "exp_manager.name=whole"], folder, {}, 120)
        if whole.code != 0:
            return f"the undisturbed run ends with {whole.code}: {whole.message[-300:]}"
        return killed(replace(kill, reference=str(folder / "runs/whole")))(folder, command)

    return act


def ended(process: subprocess.Popen[bytes], limit_s: float = 60) -> int | None:
    try:
        return process.wait(limit_s)
    except subprocess.TimeoutExpired:
        process.kill()
        return None


def started(command: list[str], folder: Path, seen: str) -> subprocess.Popen[bytes]:
    """A run that has come this far, or has ended."""
    process, begin = start(command, folder, {}), time.monotonic()
    while not is_seen(seen, folder / RUN, begin) and process.poll() is None and time.monotonic() - begin < 90:
        time.sleep(0.005)
    return process


def as_whole(folder: Path, reference: str) -> str | None:
    expected, found = losses(Fixture.path / reference), losses(folder / RUN)
    different = sorted(step for step in expected | found if expected.get(step) != found.get(step))
    return f"losses differ from the undisturbed run at steps {different}" if different else None


def resumed_as_whole(again: Outcome, folder: Path, whole: str) -> str | None:
    """What is wrong with a run that was started again, next to one that was never interrupted."""
    if again.code != 0:
        return f"cannot be resumed, exit code {again.code}: {again.message[-300:]}"
    return as_whole(folder, whole)


def stopped_again_and_again(folder: Path, command: list[str]) -> str | None:
    """A queue with short slots: TERM in every start; what is done is never lost."""
    for step in (1, 4, 7):
        process = started(command, folder, f"step {step}")
        process.send_signal(TERM)
        if (code := ended(process)) != 75:
            return f"exit code {code} after TERM at step {step}: {output_of(folder)[-300:]}"
    again = in_process(command, folder, {}, 90)
    return resumed_as_whole(again, folder, "runs/whole")


def submitted_twice(folder: Path, command: list[str]) -> str | None:
    """The second is refused, the first goes on as if nothing had been, and can be stopped as ever."""
    first = started(command, folder, "step 1")
    second = subprocess.run(
        [sys.executable, "-m", "nest_ssl", *command],
        cwd=folder,
        capture_output=True,
        text=True,
        timeout=90,
        env=dict(line.split("=", 1) for line in Path(f"/proc/{first.pid}/environ").read_text().split("\0") if line),
    )
    if first.poll() is not None:
        return "the trial is too slow: the first run has already ended"
    first.send_signal(TERM)
    code = ended(first, 120)
    if second.returncode != 1 or "another run is using it" not in second.stderr:
        return f"the second command is not refused: {second.returncode}: {second.stderr[-300:]}"
    if "Traceback" in second.stderr + output_of(folder):
        return f"a traceback: {(second.stderr + output_of(folder))[-300:]}"
    found = sorted(losses(folder / RUN))
    return (
        None if code == 75 and found == list(range(len(found))) else f"the first run: exit code {code}, steps {found}"
    )


def started_again_at_once(folder: Path, command: list[str]) -> str | None:
    """The launcher is killed, and a supervisor starts the command in the same second."""
    process = started(command, folder, "step 2")
    process.kill()
    process.wait()
    again = in_process(command, folder, {}, 120)
    if "Traceback" in again.text:
        return f"a traceback: {again.text[-300:]}"
    if again.code == 1 and "another run is using it" in again.message:
        again = in_process(command, folder, {}, 120)
    return resumed_as_whole(again, folder, "runs/two_ranks")


def explained(folder: Path, command: list[str]) -> str | None:
    """`report` and `doctor` on a run that was killed, before anybody resumes it."""
    process = started(command, folder, "step 5")
    process.kill()
    process.wait()
    report = in_process(["report", str(RUN)], folder, {}, 60)
    if report.code != 0 or not (folder / RUN / "report.html").is_file() or "Traceback" in report.text:
        return f"report: exit code {report.code}: {report.text[-300:]}"
    doctor = in_process(["doctor", str(RUN)], folder, {}, 60)
    if doctor.code not in {0, 1} or "Traceback" in doctor.text:
        return f"doctor: exit code {doctor.code}: {doctor.text[-300:]}"
    if not any(word in doctor.text.lower() for word in ("killed", "died", "not running", "has ended", "resume")):
        return f"doctor does not say that the run is dead: {doctor.text[-300:]}"
    return None


COPIES = 400


def many_files(folder: Path) -> None:
    """A corpus that takes some seconds; hard links, as they cost no space."""
    (folder / "corpus").mkdir()
    lines = []
    for number in range(COPIES):
        name = f"corpus/{number:03}.wav"
        (folder / name).hardlink_to(folder / f"audio/{number % 8}.wav")
        lines.append({"audio_filepath": name, "duration": 1.6 + 0.1 * (number % 8)})
    write_lines(folder / "corpus.jsonl", lines)


def interrupted(output: str, files: int, number: signal.Signals, same: Act) -> Act:
    """A command that continues: stop it once it has written so many files, start it again, look at the result."""

    def act(folder: Path, command: list[str]) -> str | None:
        process, begin = start(command, folder, {}), time.monotonic()
        while len(list(folder.glob(output))) < files and process.poll() is None and time.monotonic() - begin < 60:
            time.sleep(0.002)
        process.send_signal(number)
        code = ended(process)
        if code == 0:
            return "the trial is too slow: the command has already ended"
        if code is None or "Traceback" in output_of(folder):
            return f"exit code {code}: {output_of(folder)[-300:]}"
        again = in_process(command, folder, {}, 120)
        return same(folder, command) if again.code == 0 else f"exit code {again.code}: {again.message[-300:]}"

    return act


def same_arrays(folder: Path, command: list[str]) -> str | None:
    """All utterances have whole features, and those of copies are those of the original."""
    lines = [json.loads(line) for line in (folder / "out/manifest.jsonl").read_text().splitlines()]
    files = list((folder / "out").rglob("*.npy"))
    found = [np.load(folder / "out" / line["feature_filepath"]) for line in lines]
    if (len(lines), len(files)) != (COPIES, COPIES):
        return f"{len(lines)} lines and {len(files)} feature files instead of {COPIES}"
    if any(array.shape[-1] != line["num_frames"] for array, line in zip(found, lines, strict=True)):
        return "a feature file has other frames than the manifest says"
    names = [Path(line["audio_filepath"]).name for line in lines]
    if not np.allclose(found[names.index("000.wav")], Fixture.feature(), atol=1e-4):
        return "features differ from those of an undisturbed run"
    return None


def same_manifest(folder: Path, command: list[str]) -> str | None:
    whole = in_process(["prepare", "corpus", "--output", "whole.jsonl", "--workers", "2"], folder, {}, 120)
    if whole.code != 0:
        return f"the undisturbed command ends with {whole.code}"
    texts = [(folder / f"{name}.jsonl").read_bytes() for name in ("whole", "all")]
    return None if texts[0] == texts[1] and texts[0].count(b"\n") == COPIES else "the manifest differs"


def trials() -> list[Trial]:
    def trial(name: str, command: list[str], act: Act, setup: Setup | None = None) -> Trial:
        return Trial("kills", name, command, Refused(), setup=setup, act=act)

    resuming = Kill((KILL,), f"step {ALL_STEPS - 3}", codes=(-9,), continued=True)
    return [
        *(trial(name, resume(*overrides), killed(kill)) for name, (kill, overrides) in SIGNALS.items()),
        *(trial(name, resume(*more), against_own_run(kill)) for name, (kill, more) in OWN_REFERENCE.items()),
        trial("a run that was resumed is killed", resume(), killed(resuming), Fixture.run),
        trial("stopped in three starts, one after the other", resume(), stopped_again_and_again),
        trial("submitted twice", resume(*LONG), submitted_twice),
        trial("two ranks: launcher killed, started again at once", resume(TWO), started_again_at_once),
        trial("report and doctor on a killed run", resume(*LONG), explained),
        trial(
            "extract: Ctrl-C, then the same command",
            ["extract", str(Fixture.path / "model.nemo"), "corpus.jsonl", "out", "--device", "cpu"],
            interrupted("out/**/*.npy", 20, INT, same_arrays),
            many_files,
        ),
        trial(
            "prepare: killed, then the same command",
            ["prepare", "corpus", "--output", "all.jsonl", "--workers", "2"],
            interrupted("all.jsonl*", 1, KILL, same_manifest),
            many_files,
        ),
    ]
