"""Signals, kills, suspensions and double starts at awkward moments, of one and two ranks and of other commands.

Whatever happens, the same command started again ends with what an undisturbed one has.
"""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from signal import SIGABRT, SIGCONT, SIGPIPE, SIGSEGV, SIGSTOP, SIGUSR2, SIGWINCH, SIGXCPU
from typing import Any

import numpy as np
import soundfile
from benchmarks.hostile.harness import (
    HUP,
    INT,
    KILL,
    QUIT,
    RATE,
    RUN,
    TERM,
    USR1,
    Fixture,
    Kill,
    Right,
    Trial,
    ended_well,
    in_process,
    is_seen,
    killed,
    losses,
    output_of,
    resume,
    speech,
    start,
    write_lines,
)

GROUP = "kills"
Act = Callable[[Path, list[str]], "str | None"]
JUDGED_BY_ACT = Right(ended_well)
OFTEN = "exp_manager.checkpoint_callback_params.every_n_train_steps=1"
WORKERS = "model.train_ds.num_workers=2"
SOON = "watchdog.floor_s=3"
RESUMABLE = (75,)


def or_by(*signals: signal.Signals) -> tuple[int, ...]:
    """It saved and ended, or the signal, of which the docs say nothing, ended it."""
    return (*RESUMABLE, *(-number for number in signals))


KILLS: dict[str, Kill] = {
    "the ssh connection is lost (HUP)": Kill((HUP,), "step 2", codes=or_by(HUP)),
    "Ctrl-\\ (QUIT)": Kill((QUIT,), "step 2", codes=or_by(QUIT)),
    "the limit of a queue (USR2)": Kill((SIGUSR2,), "step 2", codes=or_by(SIGUSR2), continued=True),
    "the limit of CPU time (XCPU)": Kill((SIGXCPU,), "step 3", codes=or_by(SIGXCPU)),
    "the window changes its size (WINCH)": Kill((SIGWINCH, SIGWINCH), "step 1", codes=(0,), continued=True),
    "a pipe breaks (PIPE)": Kill((SIGPIPE,), "step 2", codes=(0,), continued=True),
    "suspended and continued": Kill((SIGSTOP, SIGCONT), "step 2", to="group", codes=(0,), continued=True),
    "impatient: Ctrl-C three times": Kill((INT, INT, INT), "step 2"),
    "Ctrl-C while it starts": Kill((INT,), "second 1.5", codes=or_by(INT)),
    "timeout -k: TERM, then KILL": Kill((TERM, KILL), "step 3", codes=or_by(KILL)),
    "TERM in the first validation": Kill((TERM,), "file checkpoints/last.ckpt", overrides=(OFTEN,), continued=True),
    "KILL in the middle of a save": Kill(
        (KILL,), "file checkpoints/*tmp*", codes=(-9,), overrides=(OFTEN,), continued=True
    ),
    "TERM while the end is written": Kill((TERM,), "file checkpoints/run.nemo", continued=True),
    "KILL while the end is written": Kill((KILL,), "file checkpoints/run.nemo", codes=(-9,), continued=True),
    "preemption is switched off (TERM)": Kill(
        (TERM,), "step 2", overrides=("exp_manager.create_preemption_callback=false",)
    ),
    "a worker is ended with TERM": Kill((TERM,), "step 1", to="worker", overrides=(WORKERS,), continued=True),
    "a worker crashes (SEGV)": Kill((SIGSEGV,), "step 1", to="worker", overrides=(WORKERS,), continued=True),
    "two ranks: Ctrl-C for all": Kill((INT,), "step 2", to="group", ranks=2),
    "two ranks: USR1 for all, then TERM": Kill((USR1, TERM), "step 2", to="group", ranks=2),
    "two ranks: HUP for all": Kill((HUP,), "step 2", to="group", ranks=2, codes=or_by(HUP)),
    "two ranks: TERM for one of them": Kill((TERM,), "step 2", to="rank 1", ranks=2),
    "two ranks: one crashes (SEGV)": Kill((SIGSEGV,), "step 3", to="rank 1", ranks=2),
    "two ranks: one aborts (ABRT)": Kill((SIGABRT,), "step 3", to="rank 1", ranks=2, overrides=(OFTEN,)),
    "two ranks: one is frozen": Kill((SIGSTOP,), "step 2", to="rank 1", ranks=2, overrides=(SOON,)),
    "two ranks: the starter is killed": Kill((KILL,), "step 2", ranks=2, codes=(-9,)),
    "two ranks: the monitor gets TERM": Kill((TERM,), "step 1", to="monitor", ranks=2, continued=True),
    "two ranks: restarted by itself": Kill(
        (KILL,), "step 3", to="rank 1", ranks=2, codes=(0,), overrides=("launch.max_restarts=1",), continued=True
    ),
}


def differs(folder: Path, ranks: int = 1) -> str | None:
    expected = losses(Fixture.path / ("runs/whole" if ranks == 1 else "runs/two_ranks"))
    found = losses(folder / RUN)
    different = sorted(step for step in expected | found if expected.get(step) != found.get(step))
    return f"losses differ from the undisturbed run at steps {different}" if different else None


def ended(process: subprocess.Popen[bytes], limit_s: float = 90) -> int | None:
    """The exit code; None if it had to be killed."""
    try:
        return process.wait(limit_s)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, KILL)
        process.wait()
        return None


def wait_for(what: str, folder: Path, process: subprocess.Popen[bytes]) -> None:
    begin = time.monotonic()
    while not is_seen(what, folder / RUN, begin) and process.poll() is None:
        time.sleep(0.002)


def suspended(seconds: float, ranks: int) -> Act:
    """A laptop's lid is closed, or a scheduler suspends the job, for longer than a stall may take."""

    def act(folder: Path, command: list[str]) -> str | None:
        process = start(command, folder, {})
        wait_for("step 2", folder, process)
        os.killpg(process.pid, SIGSTOP)
        time.sleep(seconds)
        os.killpg(process.pid, SIGCONT)
        code = ended(process)
        if code == 75:  # it may call this a stall, if the same command resumes
            code = in_process(command, folder, {}, 90).code
        return f"exit code {code}: {output_of(folder)[-300:]}" if code else differs(folder, ranks)

    return act


def again_and_again(signals: Sequence[signal.Signals]) -> Act:
    """Killed at every second step, in each of its lives."""

    def act(folder: Path, command: list[str]) -> str | None:
        for number, step in zip(signals, (1, 3, 5, 7), strict=True):
            process = start(command, folder, {})
            wait_for(f"step {step}", folder, process)
            process.send_signal(number)
            if (code := ended(process)) not in {75, -number, 0}:
                return f"exit code {code} after {number.name} at step {step}: {output_of(folder)[-300:]}"
        again = in_process(command, folder, {}, 90)
        if again.code != 0:
            return f"cannot be resumed, exit code {again.code}: {again.message[-300:]}"
        return differs(folder)

    return act


def twice(pause_s: float, ranks: int = 1) -> Act:
    """Two windows, one command: one of them trains, the other one is refused."""

    def act(folder: Path, command: list[str]) -> str | None:
        other = folder.parent / "home/other"
        for name in ("home", "tmp"):
            (other / name).mkdir(parents=True)
        (other / "folder").symlink_to(folder)
        processes = [start(command, folder, {})]
        time.sleep(pause_s)
        processes.append(start(command, other / "folder", {}))
        codes = [ended(process) for process in processes]
        texts = [output_of(folder), output_of(other / "folder")]
        if sorted(str(code) for code in codes) != ["0", "1"]:
            return f"exit codes {codes}: {[text[-300:] for text in texts]}"
        if "another run is using it" not in texts[codes.index(1)]:
            return f"refused without the reason: {texts[codes.index(1)][-300:]}"
        if any("Traceback" in text for text in texts):
            return "a traceback"
        return differs(folder, ranks)

    return act


def many(folder: Path, count: int) -> None:
    """A corpus that takes a while, and its manifest."""
    (folder / "corpus").mkdir()
    lines = []
    for i in range(count):
        samples = RATE * (1 + i % 4)
        soundfile.write(folder / f"corpus/{i:04}.flac", speech(samples, i % 7), RATE)
        lines.append({"audio_filepath": f"corpus/{i:04}.flac", "duration": samples / RATE})
    write_lines(folder / "corpus.jsonl", lines)


def interrupted(number: signal.Signals, seen: str, compare: Callable[[Path, Path], str | None]) -> Act:
    """Interrupt a command as soon as `seen` exists, start it again, and compare with one that was not interrupted."""

    def act(folder: Path, command: list[str]) -> str | None:
        many(folder, 120)
        copy = folder.parent / "home/undisturbed/folder"
        for name in ("home", "tmp"):
            (copy.parent / name).mkdir(parents=True)
        shutil.copytree(folder, copy)
        if (outcome := in_process(command, copy, {}, 120)).code != 0:
            return f"fails undisturbed: {outcome.text[-300:]}"
        process = start(command, folder, {})
        while process.poll() is None and not any(folder.glob(seen)):
            time.sleep(0.001)
        process.send_signal(number)
        code = ended(process)
        text = output_of(folder)
        if code is None:
            return f"does not end within 90 s of {number.name}"
        if "Traceback" in text:
            return f"a traceback after {number.name}: {text[-300:]}"
        again = in_process(command, folder, {}, 120)
        if again.code != 0:
            return f"cannot be continued, exit code {again.code}: {again.text[-300:]}"
        if wrong := compare(folder, copy):
            return f"after {number.name} (code {code}): {wrong}"
        names = [path.name for path in folder.rglob("*tmp*") if path.is_file()]
        return f"half-written files are left: {names[:3]}" if names else None

    return act


def same_manifest(folder: Path, copy: Path) -> str | None:
    """Byte for byte, apart from where the folder is."""
    found, expected = ((path / "new.jsonl").read_text().replace(str(path), "") for path in (folder, copy))
    return None if found == expected else "another manifest than undisturbed"


def features(folder: Path) -> dict[str, Any]:
    return {path.name.partition("-")[2]: np.load(path) for path in (folder / "out").rglob("*.npy")}


def same_features(folder: Path, copy: Path) -> str | None:
    found, expected = features(folder), features(copy)
    if found.keys() != expected.keys():
        return f"features of {len(found)} files, undisturbed {len(expected)}"
    names = [name for name in found if not np.allclose(found[name], expected[name], atol=1e-4)]
    if names:
        return f"other features than undisturbed: {names[:3]}"
    lines = [len((path / "out/manifest.jsonl").read_text().splitlines()) for path in (folder, copy)]
    return None if lines[0] == lines[1] else f"a manifest of {lines[0]} lines, undisturbed {lines[1]}"


def in_foreground(act: Act) -> Act:
    """As in a terminal: what nohup and the shell's `&` make a process ignore, and its children, is not ignored."""

    def wrapped(folder: Path, command: list[str]) -> str | None:
        for number in (HUP, INT, QUIT):
            signal.signal(number, signal.SIG_DFL)
        return act(folder, command)

    return wrapped


def trials() -> list[Trial]:
    def row(name: str, command: Sequence[str], act: Act) -> Trial:
        return Trial(GROUP, name, command, JUDGED_BY_ACT, act=in_foreground(act), limit_s=300)

    two = "trainer.devices=2"
    extract = ["extract", str(Fixture.path / "model.nemo"), "corpus.jsonl", "out", "--device", "cpu"]
    prepare = ["prepare", "corpus", "--output", "new.jsonl"]
    return [
        *(
            row(name, resume(f"trainer.devices={kill.ranks}", *kill.overrides), killed(kill))
            for name, kill in KILLS.items()
        ),
        row("suspended for longer than a stall", resume(SOON), suspended(8, 1)),
        row("two ranks: suspended for longer than a stall", resume(SOON, two), suspended(8, 2)),
        row("killed in each of four lives", resume(OFTEN), again_and_again((KILL, KILL, KILL, KILL))),
        row("another signal in each of four lives", resume(OFTEN), again_and_again((TERM, KILL, INT, USR1))),
        row("the same command twice at once", resume(), twice(0)),
        row("two ranks: the same command twice", resume(two), twice(1, 2)),
        row("extract: Ctrl-C", extract, interrupted(INT, "out/*/*.npy", same_features)),
        row("extract: KILL", extract, interrupted(KILL, "out/*/*.npy", same_features)),
        row("prepare: Ctrl-C", prepare, interrupted(INT, "new*", same_manifest)),
        row("prepare: KILL", prepare, interrupted(KILL, "new*", same_manifest)),
    ]
