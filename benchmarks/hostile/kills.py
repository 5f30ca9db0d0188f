"""Signals and kills at odd moments, with one rank and with two; then the same command must give an undisturbed result.

Exit codes are those of docs/several-gpus.md and docs/faults.md: 75 where the same command resumes.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
from benchmarks.hostile.harness import (
    HUP,
    INT,
    KILL,
    QUIT,
    RUN,
    TERM,
    USR1,
    Fixture,
    Kill,
    Right,
    Trial,
    descendants,
    ended_well,
    in_process,
    is_seen,
    killed,
    losses,
    output_of,
    resume,
    start,
)

Act = Callable[[Path, list[str]], "str | None"]
STOP, CONT = signal.SIGSTOP, signal.SIGCONT
DEAD = (-9, 137)
MANY = 600
SAVES = "exp_manager.checkpoint_callback_params.every_n_train_steps=1"
WORKERS = "model.train_ds.num_workers=2"
RESTARTS = "launch.max_restarts=2"
TWO = "trainer.devices=2"


def training(name: str, kill: Kill) -> Trial:
    more = [TWO] if kill.ranks == 2 else []
    return Trial("kills", name, resume(*more, *kill.overrides), Right(ended_well), act=killed(kill), limit_s=240)


def compared(folder: Path, reference: str) -> str | None:
    expected, found = losses(Fixture.path / reference), losses(folder / RUN)
    different = sorted(step for step in expected | found if expected.get(step) != found.get(step))
    return f"losses differ from the undisturbed run at steps {different}" if different else None


def waits(process: subprocess.Popen[bytes], what: str, folder: Path, begin: float) -> None:
    while not is_seen(what, folder / RUN, begin) and process.poll() is None:
        time.sleep(0.002)


def ends(process: subprocess.Popen[bytes], seconds: float = 90) -> int | None:
    try:
        return process.wait(seconds)
    except subprocess.TimeoutExpired:
        for pid in [*descendants(process.pid), process.pid]:
            try:
                os.kill(pid, signal.SIGKILL)
            except ProcessLookupError:
                continue
        process.wait()
        return None


def again_and_again(number: signal.Signals, moments: tuple[str, ...], reference: str = "runs/whole") -> Act:
    """Ended at each of these moments, one start after another; the last start is left alone."""

    def act(folder: Path, command: list[str]) -> str | None:
        for moment in moments:
            begin = time.monotonic()
            process = start(command, folder, {})
            waits(process, moment, folder, begin)
            if process.poll() is None:
                process.send_signal(number)
            code = ends(process)
            if code not in {0, 75, -number, 128 + number}:
                return f"exit code {code} at {moment!r}: {output_of(folder)[-300:]}"
        last = in_process(command, folder, {}, 120)
        if last.code != 0:
            return f"cannot be resumed, exit code {last.code}: {last.message[-300:]}"
        return compared(folder, reference)

    return act


def paused(seconds: float, reference: str, everything: bool) -> Act:
    """Stopped with SIGSTOP, as a suspended laptop or job, and continued: it ends as if nothing had been."""

    def act(folder: Path, command: list[str]) -> str | None:
        begin = time.monotonic()
        process = start(command, folder, {})
        waits(process, "step 3", folder, begin)
        stopped = [process.pid, *descendants(process.pid)] if everything else [process.pid]
        for number in (STOP, CONT):
            for pid in stopped:
                try:
                    os.kill(pid, number)
                except ProcessLookupError:
                    continue
            if number == STOP:
                time.sleep(seconds)
        code = ends(process)
        if code not in {0, 75}:
            return f"exit code {code}: {output_of(folder)[-300:]}"
        if code == 75:
            code = in_process(command, folder, {}, 120).code
            if code != 0:
                return f"cannot be resumed, exit code {code}: {output_of(folder)[-300:]}"
        return compared(folder, reference)

    return act


def frozen_rank(folder: Path, command: list[str]) -> str | None:
    """Rank 1 is stopped for ever: the monitor must name it, end the job with 75, and the run resumes."""
    begin = time.monotonic()
    process = start([*command, "watchdog.floor_s=3"], folder, {})
    waits(process, "step 2", folder, begin)
    for pid in descendants(process.pid):
        try:
            if b"LOCAL_RANK=1\0" in Path(f"/proc/{pid}/environ").read_bytes():
                os.kill(pid, STOP)
                break
        except OSError:
            continue
    code = ends(process, 100)
    if code != 75:
        return f"exit code {code}, expected 75: {output_of(folder)[-300:]}"
    text = output_of(folder)
    if "rank 1" not in text or "stopped" not in text:
        return f"rank 1 is not named: {text[-400:]}"
    if (code := in_process(command, folder, {}, 120).code) != 0:
        return f"cannot be resumed, exit code {code}: {output_of(folder)[-300:]}"
    return compared(folder, "runs/two_ranks")


def other_ranks(first: int, second: int) -> Act:
    """Killed with one number of ranks, resumed with another: sound, every step once."""

    def act(folder: Path, command: list[str]) -> str | None:
        begin = time.monotonic()
        process = start([*command, SAVES, f"trainer.devices={first}"], folder, {})
        waits(process, "step 4", folder, begin)
        if process.poll() is None:
            process.send_signal(TERM)
        if (code := ends(process)) not in {0, 75}:
            return f"exit code {code}: {output_of(folder)[-300:]}"
        outcome = in_process([*command, f"trainer.devices={second}"], folder, {}, 120)
        if outcome.code != 0:
            return f"cannot be resumed, exit code {outcome.code}: {outcome.message[-300:]}"
        found = losses(folder / RUN)
        if sorted(found) != list(range(10)):
            return f"metrics.csv has the steps {sorted(found)}"
        return None if all(float(loss) > 0 for loss in found.values()) else f"losses: {found}"

    return act


def at_once(folder: Path, command: list[str]) -> str | None:
    """The same command twice at the same time: one is refused in words, the other is undisturbed."""
    begin = time.monotonic()
    first = start(command, folder, {})
    waits(first, "file .lock", folder, begin)
    (folder.parent / "stdout").rename(folder.parent / "tmp/first_out")
    (folder.parent / "stderr").rename(folder.parent / "tmp/first_err")
    second = in_process(command, folder, {}, 90)
    code = ends(first)
    if code != 0:
        return f"the first ended with {code}"
    if second.code == 0 and "resumed" in second.text:
        return compared(folder, "runs/whole")
    if second.code != 1 or "another run" not in second.text:
        return f"the second ended with {second.code}: {second.text[-300:]}"
    return compared(folder, "runs/whole")


def killed_with_damage(folder: Path, command: list[str]) -> str | None:
    """Killed in training, and the disk lost the end of last.ckpt: it continues from the one before."""
    begin = time.monotonic()
    process = start([*command, SAVES], folder, {})
    waits(process, "step 6", folder, begin)
    if process.poll() is None:
        process.send_signal(KILL)
    ends(process)
    last = folder / RUN / "checkpoints/last.ckpt"
    data = last.read_bytes()
    last.unlink()
    last.write_bytes(data[: len(data) * 2 // 3])
    outcome = in_process(command, folder, {}, 120)
    if outcome.code != 0:
        return f"cannot be resumed, exit code {outcome.code}: {outcome.message[-300:]}"
    return compared(folder, "runs/whole")


def other_command(
    arguments: list[str], number: signal.Signals, moment: Callable[[Path], bool], same: Callable[[Path], str | None]
) -> Act:
    """A command other than pretrain is ended at that moment, and given again; compared with one undisturbed."""

    def act(folder: Path, command: list[str]) -> str | None:
        shutil.copy(Fixture.path / "model.nemo", folder / "model.nemo")
        many(folder)
        process = start([*arguments, *OUT[arguments[0]]("out")], folder, {})
        while not moment(folder) and process.poll() is None:
            time.sleep(0.005)
        if process.poll() is None:
            process.send_signal(number)
        code = ends(process)
        text = output_of(folder)
        if "Traceback (most recent call last)" in text:
            return f"a traceback (code {code}): {text[-300:]}"
        if code not in {0, 1, 75, -number, 128 + number}:
            return f"exit code {code}: {text[-300:]}"
        for name in ("out", "undisturbed"):
            done = in_process([*arguments, *OUT[arguments[0]](name)], folder, {}, 120)
            if done.code != 0:
                return f"{name}: exit code {done.code}: {done.message[-300:]}"
        return same(folder)

    return act


def features(count: int) -> Callable[[Path], bool]:
    return lambda folder: sum(1 for _ in (folder / "out").rglob("*.npy")) >= count


def begun(folder: Path) -> bool:
    """Something of the output's name is there."""
    return any(path.name.removeprefix(".").startswith("out") for path in folder.iterdir())


def after(seconds: float) -> Callable[[Path], bool]:
    begins: list[float] = []

    def moment(folder: Path) -> bool:
        begins.append(time.monotonic())
        return begins[-1] - begins[0] > seconds

    return moment


OUT: dict[str, Callable[[str], list[str]]] = {
    "extract": lambda name: [name],
    "prepare": lambda name: ["--output", f"{name}.jsonl"],
    "export": lambda name: [f"{name}.nemo", "--format", "nemo"],
}


def many(folder: Path) -> None:
    (folder / "many").mkdir()
    for i in range(MANY):
        (folder / f"many/{i:04}.wav").hardlink_to(folder / f"audio/{i % 8}.wav")


def same_folders(folder: Path) -> str | None:
    one, other = (
        {line["audio_filepath"]: line for line in lines_of(folder / name / "manifest.jsonl")}
        for name in ("out", "undisturbed")
    )
    if len(one) != MANY or one.keys() != other.keys():
        return f"{len(one)} utterances, undisturbed {len(other)}"
    for key, line in one.items():
        a, b = (
            np.load(folder / name / entry["feature_filepath"].removeprefix(f"{name}/"))
            for name, entry in (("out", line), ("undisturbed", other[key]))
        )
        if a.shape != b.shape or np.abs(a - b).max() > 1e-4:
            return f"{key}: features differ"
    left = [path.name for path in (folder / "out").rglob("*tmp*")]
    return f"half-written files are left: {left[:3]}" if left else None


def same_manifests(folder: Path) -> str | None:
    if (folder / "out.jsonl").read_bytes() != (folder / "undisturbed.jsonl").read_bytes():
        return "the manifest differs from the undisturbed one"
    return None if len(lines_of(folder / "out.jsonl")) == MANY else "not all files"


def same_exports(folder: Path) -> str | None:
    same = (folder / "out.nemo").read_bytes() == (folder / "undisturbed.nemo").read_bytes()
    return None if same else "the file differs from the undisturbed one"


def lines_of(path: Path) -> list[dict[str, str]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def trials() -> list[Trial]:
    def own(name: str, act: Act, *overrides: str) -> Trial:
        return Trial("kills", name, resume(*overrides), Right(ended_well), act=act, limit_s=400)

    def other(name: str, act: Act) -> Trial:
        return Trial("kills", name, [], Right(ended_well), act=act, limit_s=400)

    extract = ["extract", "model.nemo", "many", "--device", "cpu", "--batch-seconds", "4"]
    return [
        training("TERM while it imports", Kill((TERM,), "second 0.4", codes=(75, -15, 143))),
        training("INT as the run folder appears", Kill((INT,), "start", codes=(75, -2, 130))),
        training("TERM at step 0, long before anything is saved", Kill((TERM,), "step 0")),
        training("USR1, as SLURM sends, in the first epoch", Kill((USR1,), "step 1")),
        training("INT twice, half a second between", Kill((INT, INT), "step 3", continued=True)),
        training("TERM, then KILL half a second later, as Kubernetes", Kill((TERM, KILL), "step 4", codes=(75, -9), continued=True)),
        training("TERM to the whole group, as a shell does, with workers", Kill((TERM,), "step 2", to="group", overrides=(WORKERS,))),
        training("INT to the whole group: Ctrl-C, with workers and two ranks", Kill((INT,), "step 3", to="group", ranks=2, overrides=(WORKERS,))),
        training("KILL while last.ckpt is written at every step", Kill((KILL,), "step 5", codes=(-9,), overrides=(SAVES,))),
        training("KILL as the first checkpoint appears", Kill((KILL,), "file checkpoints/*", codes=(-9,))),
        training("KILL as the model file appears", Kill((KILL,), "file checkpoints/*.nemo", codes=(-9,), continued=True)),
        training("TERM as the best checkpoint appears", Kill((TERM,), "file checkpoints/run--*.ckpt", continued=True)),
        training("TERM while the report is written", Kill((TERM,), "file report.html", continued=True)),
        training("HUP: the terminal is closed", Kill((HUP,), "step 3", codes=(75, -1, 129), continued=True)),
        training("QUIT: Ctrl-backslash", Kill((QUIT,), "step 3", codes=(75, -3, 131))),
        training("KILL of a data worker, one rank", Kill((KILL,), "step 2", to="worker", overrides=(WORKERS,), continued=True)),
        training("KILL of a data worker, two ranks", Kill((KILL,), "step 2", to="worker", ranks=2, overrides=(WORKERS,), continued=True)),
        training("KILL of rank 1 while it starts", Kill((KILL,), "second 3", to="rank 1", ranks=2)),
        training("KILL of rank 1 in the last steps", Kill((KILL,), "step 8", to="rank 1", ranks=2, continued=True)),
        training("TERM to rank 1 alone: all stop together", Kill((TERM,), "step 3", to="rank 1", ranks=2, continued=True)),
        training("KILL of the launcher, two ranks die with it", Kill((KILL,), "step 4", ranks=2, codes=(-9,))),
        training("KILL of the monitor: training continues", Kill((KILL,), "step 2", to="monitor", ranks=2, codes=(0, 75), continued=True)),
        training("rank 1 is killed, restarts by itself", Kill((KILL,), "step 4", to="rank 1", ranks=2, codes=(0,), overrides=(RESTARTS,), continued=True)),
        training("TERM although restarts are allowed: it stays ended", Kill((TERM,), "step 4", ranks=2, overrides=(RESTARTS,))),
        training("TERM with preemption switched off", Kill((TERM,), "step 5", codes=(75, -15, 143), overrides=("exp_manager.create_preemption_callback=false",))),
        own("killed five times, a step or two each", again_and_again(KILL, ("second 4", "step 1", "step 3", "step 5", "step 8")), SAVES),
        own("TERM five times", again_and_again(TERM, ("step 0", "step 2", "step 4", "step 6", "step 8"))),
        own("USR1 three times, two ranks", again_and_again(USR1, ("step 1", "step 4", "step 7"), "runs/two_ranks"), TWO),
        own("all processes sleep for 6 s, two ranks", paused(6, "runs/two_ranks", everything=True), TWO),
        own("the launcher sleeps for 6 s", paused(6, "runs/two_ranks", everything=False), TWO),
        own("rank 1 sleeps for ever", frozen_rank, TWO),
        own("two ranks, resumed on one", other_ranks(2, 1)),
        own("one rank, resumed on two", other_ranks(1, 2)),
        own("the same command twice at once", at_once),
        own("killed, and the end of last.ckpt is lost", killed_with_damage),
        other("extract: KILL after 20 utterances", other_command(extract, KILL, features(20), same_folders)),
        other("extract: TERM after 300 utterances", other_command(extract, TERM, features(300), same_folders)),
        other("prepare: INT as its first file appears", other_command(["prepare", "many", "--workers", "2"], INT, begun, same_manifests)),
        other("prepare: KILL as its first file appears", other_command(["prepare", "many", "--workers", "0"], KILL, begun, same_manifests)),
        other("export: KILL as its file appears", other_command(["export", "model.nemo"], KILL, begun, same_exports)),
        other("extract: TERM while it imports", other_command(extract, TERM, after(1.0), same_folders)),
    ]  # fmt: skip
