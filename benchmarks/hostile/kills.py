"""Signals for running commands, and files that change under them; afterwards the same command must finish the work."""

from __future__ import annotations

import contextlib
import functools
import json
import os
import shutil
import signal
import subprocess
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from benchmarks.hostile.harness import (
    HUP,
    INT,
    KILL,
    RUN,
    TERM,
    USR1,
    Fixture,
    Right,
    Setup,
    Trial,
    _left_running,
    both,
    descendants,
    ended_well,
    in_process,
    is_seen,
    losses,
    output_of,
    resume,
    start,
    write_lines,
)

Process = subprocess.Popen[bytes]
Deed = Callable[[Path, Process], "str | None"]
Judge = Callable[[Path], "str | None"]
LAST = RUN / "checkpoints/last.ckpt"
STOP, CONT, SEGV, ABRT = signal.SIGSTOP, signal.SIGCONT, signal.SIGSEGV, signal.SIGABRT
HARMLESS = (signal.SIGWINCH, signal.SIGURG, signal.SIGCHLD, signal.SIGCONT)
BY_HAND = (1, 75, 130, 143, -2, -15)
"""How a short command may end when somebody stops it."""
NEVER = Right(ended_well)
"""Not used: each of these trials judges itself."""


@dataclass(frozen=True)
class Scene:
    """What is done to a running command once something is seen, how it may end, and what must be true afterwards."""

    seen: str  # as in `is_seen`, or "path PATTERN" in the trial's folder
    do: Deed
    codes: tuple[int, ...]
    words: str = ""  # one of these, separated by |, is in the output
    before: Setup | None = None
    repair: Setup | None = None  # before the command is given again
    judge: Judge | None = None  # after the command was given again; default: the losses are the undisturbed run's
    result: str = ""  # a folder whose content must in the end be that of an undisturbed command
    ranks: int = 1
    cleanup: Setup | None = None


def staged(scene: Scene) -> Callable[[Path, list[str]], str | None]:
    def act(folder: Path, command: list[str]) -> str | None:
        try:
            return play(scene, folder, command)
        finally:
            if scene.cleanup:
                scene.cleanup(folder)

    return act


def play(scene: Scene, folder: Path, command: list[str]) -> str | None:
    if scene.before:
        scene.before(folder)
    expected = {}
    if scene.result:
        first = in_process(command, folder, {}, 120)
        if first.code != 0:
            return f"the trial is wrong: undisturbed, it ends with {first.code}: {first.text[-300:]}"
        expected = contents(folder / scene.result)
        shutil.rmtree(folder / scene.result)
        (folder / scene.result).mkdir()
    begin = time.monotonic()
    process = start(command, folder, {})
    while not happened(scene.seen, folder, begin) and process.poll() is None:
        time.sleep(0.002)
    if process.poll() is not None:
        return f"the trial is wrong: ended with {process.returncode} before {scene.seen}: {output_of(folder)[-300:]}"
    fault = scene.do(folder, process)
    code = ended(process)
    if code is None:
        return f"does not end within 75 s: {output_of(folder)[-300:]}"
    text = output_of(folder)
    if left := _left_running(None):
        return f"left running: {left[:2]}"
    if "Traceback (most recent call last)" in text:
        return f"a traceback (code {code}): {text[-400:]}"
    if code not in scene.codes:
        return f"exit code {code}, expected {scene.codes}: {text[-400:]}"
    if scene.words and not any(word.lower() in text.lower() for word in scene.words.split("|")):
        return f"the output does not have {scene.words!r}: {text[-400:]}"
    if code > 0 and code != 130 and not text.strip():  # 130: somebody pressed Ctrl-C
        return f"ended with {code} without a word"
    if fault:
        return fault
    if scene.repair:
        scene.repair(folder)
    again = in_process(command, folder, {}, 120)
    if again.code != 0:
        return f"given again, it ends with {again.code}: {again.text[-400:]}"
    if "Traceback (most recent call last)" in again.text:
        return f"a traceback, given again: {again.text[-400:]}"
    if scene.result:
        found = contents(folder / scene.result)
        different = sorted(name for name in expected | found if expected.get(name) != found.get(name))
        return f"not the undisturbed result: {different[:4]} ({len(different)})" if different else None
    return scene.judge(folder) if scene.judge else as_undisturbed(folder, scene.ranks)


def happened(what: str, folder: Path, begin: float) -> bool:
    kind, _, pattern = what.partition(" ")
    return any(folder.glob(pattern)) if kind == "path" else is_seen(what, folder / RUN, begin)


def ended(process: Process) -> int | None:
    try:
        return process.wait(75)
    except subprocess.TimeoutExpired:
        for pid in [*descendants(process.pid), process.pid]:
            os.kill(pid, KILL)
        process.wait()
        return None


def contents(result: Path) -> dict[str, bytes]:
    """What counts: not the progress, the index of the manifest, or a description with times in it."""
    kept = {".jsonl", ".json", ".tar", ".npy", ".safetensors"}
    files = [path for path in result.rglob("*") if path.suffix in kept and path.name != "extract.json"]
    return {str(path.relative_to(result)): path.read_bytes() for path in files}


# --------------------------------------------------------------------------------------------------- what must be true


def as_undisturbed(folder: Path, ranks: int = 1) -> str | None:
    expected = losses(Fixture.path / ("runs/whole" if ranks == 1 else "runs/two_ranks"))
    found = losses(folder / RUN)
    different = sorted(step for step in expected | found if expected.get(step) != found.get(step))
    if different:
        return f"losses differ from the undisturbed run at steps {different}"
    return model_is_there(folder)


def model_is_there(folder: Path) -> str | None:
    names = {path.name for path in (folder / RUN / "checkpoints").iterdir()}
    if not {"last.ckpt", "run.nemo"} <= names:
        return f"finished without its model: {sorted(names)}"
    half = [name for name in names if "tmp" in name]
    return f"half-written files are left: {half}" if half else None


def no_wrong_loss(folder: Path) -> str | None:
    """Rows may have gone with the folder, but those that are there are right, and so is the last one."""
    expected, found = losses(Fixture.path / "runs/whole"), losses(folder / RUN)
    wrong = sorted(step for step, loss in found.items() if expected.get(step) != loss)
    if wrong or max(found, default=-1) != max(expected):
        return f"losses differ from the undisturbed run at steps {wrong}; the last is {max(found, default=-1)}"
    return model_is_there(folder)


def probe_is_whole(folder: Path) -> str | None:
    results = json.loads((folder / "out/results.json").read_text())
    return None if {"encoder", "log_mel", "random_encoder"} <= set(results) else f"results.json has {sorted(results)}"


# ------------------------------------------------------------------------------------------------------ what is done


def target(to: str, pid: int) -> list[int]:
    """The processes that a signal is for, of those that exist now."""
    if to in {"main", "group"}:
        return [pid]
    below = descendants(pid)
    if to in {"all", "children"}:
        return below if to == "children" else [pid, *below]
    found = []
    for child in below:
        folder = Path(f"/proc/{child}")
        try:
            command, surroundings = (folder / "cmdline").read_bytes(), (folder / "environ").read_bytes()
            name = (folder / "comm").read_text()
        except OSError:  # it has ended since
            continue
        is_worker, is_monitor = name.startswith("pt_data_worker"), b"monitor" in command
        of_rank = to.startswith("rank ") and f"LOCAL_RANK={to[5:]}\0".encode() in surroundings
        if {"worker": is_worker, "monitor": is_monitor}.get(to, of_rank and not is_worker and not is_monitor):
            found.append(child)
    return found[:1]


def send(*signals: signal.Signals, to: str = "main", pause: float = 0.0) -> Deed:
    def deed(folder: Path, process: Process) -> str | None:
        while not (pids := target(to, process.pid)) and process.poll() is None:
            time.sleep(0.005)
        if not pids:
            return f"the trial is wrong: there was no {to}"
        for number in signals:
            for pid in pids:
                with contextlib.suppress(ProcessLookupError):
                    (os.killpg if to == "group" else os.kill)(pid, number)
            time.sleep(pause)
        return None

    return deed


def on_files(change: Setup) -> Deed:
    def deed(folder: Path, process: Process) -> str | None:
        change(folder)
        return None

    return deed


def start_again(folder: Path, process: Process) -> str | None:
    """The same command, while it is running: refused, with the name of the folder."""
    box = folder.parent
    kept = {name: (box / name) for name in ("stdout", "stderr")}
    other = box / "home/second"
    other.mkdir()
    os.kill(process.pid, STOP)  # or the first may be done before the second has begun
    try:
        with (other / "out").open("wb") as out:
            code = subprocess.call(
                Path(f"/proc/{process.pid}/cmdline").read_bytes().decode().strip("\0").split("\0"),
                cwd=folder,
                env=dict(
                    pair.split("=", 1)
                    for pair in Path(f"/proc/{process.pid}/environ").read_bytes().decode().strip("\0").split("\0")
                ),
                stdout=out,
                stderr=out,
                timeout=60,
            )
    except subprocess.TimeoutExpired:
        return "the second start does not end"
    finally:
        os.kill(process.pid, CONT)
    text = (other / "out").read_text()
    if code != 1 or "Traceback" in text or "run" not in text:
        return f"the second start ends with {code}: {text[-300:]}"
    return None if all(path.exists() for path in kept.values()) else "lost its output"


def move(old: str | Path, new: str | Path) -> Setup:
    return lambda folder: (folder / old).rename(folder / new)


def remove(name: str | Path) -> Setup:
    def setup(folder: Path) -> None:
        while (folder / name).exists():
            shutil.rmtree(folder / name, ignore_errors=True)

    return setup


def immutable(sign: str, name: Path) -> Setup:
    """What `chattr` sets binds root too."""
    return lambda folder: subprocess.run(["chattr", f"{sign}i", folder / name], check=bool(sign == "+"))


def small_disk(folder: Path) -> None:
    (folder / "runs").mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=24m", "tmpfs", folder / "runs"], check=True)


def fill(folder: Path) -> None:
    with (folder / "runs/somebody-elses-file").open("wb", buffering=0) as file:
        try:
            while True:
                file.write(bytes(4096))
        except OSError:
            pass


def unmount(folder: Path) -> None:
    subprocess.run(["umount", "-l", folder / "runs"], check=False)


def pipes(folder: Path) -> None:
    """A disk that does not answer: whoever opens a file waits for ever."""
    (folder / "audio").rename(folder / "elsewhere")
    (folder / "audio").mkdir()
    for path in (folder / "elsewhere").iterdir():
        os.mkfifo(folder / "audio" / path.name)


def answers(folder: Path) -> None:
    shutil.rmtree(folder / "audio")
    (folder / "elsewhere").rename(folder / "audio")


def many(number: int) -> Setup:
    def setup(folder: Path) -> None:
        (folder / "many").mkdir()
        (folder / "out").mkdir(exist_ok=True)
        for i in range(number):
            os.link(folder / f"audio/{i % 8}.wav", folder / f"many/{i:05d}.wav")
        shutil.copy(Fixture.path / "model.nemo", folder)

    return setup


def labels(folder: Path) -> None:
    lines = [json.loads(line) for line in (folder / "train.jsonl").read_text().splitlines()]
    for i, line in enumerate(lines):
        line["label"] = "ab"[i % 2]
    write_lines(folder / "train.jsonl", lines)
    shutil.copy(Fixture.path / "model.nemo", folder)


def old_export(folder: Path) -> None:
    (folder / "out").mkdir()
    shutil.copy(Fixture.path / "model.nemo", folder)


def again_and_again(number: signal.Signals, codes: tuple[int, ...]) -> Callable[[Path, list[str]], str | None]:
    """Stopped soon after every start, at another place each time; then left alone."""

    def act(folder: Path, command: list[str]) -> str | None:
        for turn in range(4):
            process = start(command, folder, {})
            begin, size = time.monotonic(), 0
            log = folder / RUN / "metrics.csv"
            while process.poll() is None:
                size = size or (log.stat().st_size if log.exists() else 0)
                if time.monotonic() - begin > 2 and log.exists() and log.stat().st_size != size:
                    break
                time.sleep(0.002)
            time.sleep(0.03 * turn)
            if process.poll() is None:
                process.send_signal(number)
            code = ended(process)
            if left := _left_running(None):
                return f"left running in turn {turn}: {left[:2]}"
            if code not in (*codes, 0) or "Traceback (most" in output_of(folder):
                return f"exit code {code} in turn {turn}: {output_of(folder)[-300:]}"
        last = in_process(command, folder, {}, 90)
        return as_undisturbed(folder) if last.code == 0 else f"ends with {last.code}: {last.message[-300:]}"

    return act


# ---------------------------------------------------------------------------------------------------------- the trials

WORKERS = ("model.train_ds.num_workers=1",)
QUICK = ("watchdog.floor_s=3",)
PREPARE = ("prepare", "many", "--output", "out/m.jsonl", "--workers", "2")
EXTRACT = ("extract", "model.nemo", "many", "out", "--device", "cpu", "--batch-seconds", "4")
PROBE = (
    "probe",
    "model.nemo",
    "--train",
    "train.jsonl",
    "--test",
    "train.jsonl",
    "--label",
    "label",
    "--output",
    "out",
)


def scenes() -> list[tuple[str, tuple[str, ...], Scene]]:
    two = functools.partial(Scene, ranks=2)
    last, state = f"path {LAST}", "path out/m.jsonl.state*"
    disk_away, disk_back = move("audio", "elsewhere"), move("elsewhere", "audio")
    return [
        ("two ranks whose terminal is closed", (), two("step 1", send(HUP, to="group"), (75, -1, 129))),
        ("Ctrl-C that reaches ranks and workers", WORKERS, two("step 1", send(INT, to="group"), (75,))),
        ("a launcher that is killed in a validation", (), two(last, send(KILL), (-9,))),
        ("a rank 0 with a segmentation fault", (), two("step 1", send(SEGV, to="rank 0"), (75,), "rank 0")),
        ("a rank 1 that aborts while rank 0 saves", (), two(last, send(ABRT, to="rank 1"), (75,), "rank 1")),
        ("a warning signal that only rank 1 gets", (), two("step 1", send(USR1, to="rank 1"), (75,))),
        ("Ctrl-Z for four seconds, then fg", WORKERS, two("step 2", send(STOP, CONT, to="group", pause=4), (0,))),
        ("a monitor that is frozen and never woken", (), two("step 1", send(STOP, to="monitor"), (0, 75))),
        (
            "a frozen worker of a single rank",
            (*WORKERS, *QUICK),
            Scene("step 4", send(STOP, to="worker"), (0, 75)),
        ),
        ("signals that mean nothing", WORKERS, two("step 1", send(*HARMLESS, to="all"), (0,))),
        ("a stop while Python is still importing", (), Scene("second 0.6", send(TERM), (75, -15))),
        (
            "a power cut that empties the newest checkpoint",
            ("exp_manager.checkpoint_callback_params.every_n_train_steps=1",),
            Scene("step 5", send(KILL), (-9,), repair=lambda folder: os.truncate(folder / LAST, 0)),
        ),
        ("a second start of the same command", (), Scene("step 2", start_again, (0,))),
        (
            "a run folder that is deleted under the run",
            (),
            Scene("step 2", on_files(remove(RUN)), (0, 1, 75), judge=no_wrong_loss),
        ),
        (
            "a run folder that is renamed and renamed back",
            (),
            Scene("step 2", on_files(move(RUN, "kept")), (0, 1, 75), repair=both(remove(RUN), move("kept", RUN))),
        ),
        (
            "a checkpoint folder that becomes immutable",
            (),
            Scene(
                *("step 2", on_files(immutable("+", LAST.parent)), (1,), "checkpoint"),
                repair=immutable("-", LAST.parent),
                cleanup=immutable("-", LAST.parent),
            ),
        ),
        (
            "a disk that somebody else fills up",
            (),
            Scene(
                *("step 2", on_files(fill), (0, 1), "space"),
                before=small_disk,
                repair=lambda folder: (folder / "runs/somebody-elses-file").unlink(),
                cleanup=unmount,
            ),
        ),
        ("a data disk that is unmounted", (), Scene("step 2", on_files(disk_away), (1,), ".wav", repair=disk_back)),
        ("a data disk that hangs", QUICK, Scene("step 2", on_files(pipes), (1, 75), ".wav", repair=answers)),
        (
            "a TMPDIR that a cleaner removes",
            WORKERS,
            two(
                "step 1",
                on_files(remove("../tmp")),
                (0, 1, 75),
                repair=lambda folder: (folder / "../tmp").mkdir(exist_ok=True),
            ),
        ),
        (
            "a prepare whose main process is killed",
            PREPARE,
            Scene(state, send(KILL), (-9,), before=many(3000), result="out"),
        ),
        ("Ctrl-C in a prepare", PREPARE, Scene(state, send(INT, to="group"), BY_HAND, before=many(3000), result="out")),
        (
            "a prepare whose worker is ended for its memory",
            PREPARE,
            Scene(state, lambda folder, process: kill_newest(process), (0, 1, 75), before=many(3000), result="out"),
        ),
        (
            "a prepare that is killed between two shards",
            (*PREPARE, "--shards", "4"),
            Scene("path out/*audio_1.tar*", send(KILL, to="group"), (-9,), before=many(2000), result="out"),
        ),
        (
            "an extract that is killed with features in hand",
            EXTRACT,
            Scene("path out/**/*.npy", send(KILL), (-9,), before=many(400), result="out"),
        ),
        (
            "an extract whose audio disappears",
            EXTRACT,
            Scene(
                *("path out/**/*.npy", on_files(move("many", "elsewhere")), (1,), ".wav"),
                before=many(400),
                repair=move("elsewhere", "many"),
                result="out",
            ),
        ),
        (
            "an export that is killed as its file appears",
            ("export", "model.nemo", "out/model.safetensors", "--format", "safetensors"),
            Scene("path out/*", send(KILL), (-9, 0), before=old_export, result="out"),
        ),
        (
            "Ctrl-C in a probe",
            PROBE,
            Scene("second 5", send(INT, to="group"), (*BY_HAND, 0), before=labels, judge=probe_is_whole),
        ),
    ]


def kill_newest(process: Process) -> str | None:
    """The kernel's choice: a worker, not the process that started it."""
    while not (below := descendants(process.pid)) and process.poll() is None:
        time.sleep(0.005)
    if not below:
        return "the trial is wrong: there was no worker"
    os.kill(below[-1], KILL)
    return None


def trials() -> list[Trial]:
    found = []
    for name, words, scene in scenes():
        is_training = not words or "=" in words[0]
        devices = ("trainer.devices=2",) if scene.ranks == 2 else ()
        command = resume(*devices, *words) if is_training else list(words)
        found.append(Trial("kills", name, command, NEVER, act=staged(scene)))
    for name, number, codes in (
        ("a run that is preempted after every few steps", TERM, (75,)),
        ("a run that is killed after every few steps", KILL, (-9,)),
    ):
        found.append(Trial("kills", name, resume(), NEVER, act=again_and_again(number, codes)))
    return found
