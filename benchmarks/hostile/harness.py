"""How a trial with bad input is set up, run and judged; the same rules hold for all of them.

A trial is a row: a class, a name, how its folder is set up, a command, and what is acceptable. Acceptable is a result
that is right (`Right`), or a refusal that helps (`Refused`), or whichever of the two it is (`Either`). The rules that
hold for every trial are in `faults_of`: it ends in time, and leaves no process, no file outside its folder, no
traceback and no control code behind. Most trials call the command in a fork of this process, where torch is already
imported; those that need a program of their own (signals, limits, several ranks) start one.
"""

from __future__ import annotations

import argparse
import csv
import ctypes
import hashlib
import json
import math
import multiprocessing
import os
import pickle
import platform
import re
import resource
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")
sys.path[:0] = [str(Path(__file__).parents[2] / "src")]

import numpy as np
import soundfile
import torch

CLASSES = (
    *("configuration", "manifests", "audio", "kills"),
    *("checkpoints", "model files", "names", "environment"),
)
RATE = 16_000
MOST_LINES = 10
"""A refusal is read by a person: more lines than this are a dump."""
MEMORY = 12 << 30
"""Address space of a trial in a fork, so that a size that overflows memory ends that trial and not the machine."""

TINY = [
    *("trainer.accelerator=cpu", "trainer.max_steps=4", "trainer.log_every_n_steps=1", "trainer.devices=1"),
    *("model.encoder.d_model=32", "model.encoder.n_layers=2", "model.encoder.n_heads=4"),
    *("model.encoder.subsampling_conv_channels=8", "model.num_classes=64", "model.masking.mask_prob=0.04"),
    *("model.optim.lr=0.05", "model.optim.sched.warmup_steps=2", "exp_manager.create_tensorboard_logger=false"),
    *("model.train_ds.manifest_filepath=train.jsonl", "model.validation_ds.manifest_filepath=valid.jsonl"),
    *("exp_manager.exp_dir=runs", "exp_manager.name=run"),
]
RUN = Path("runs/run")
BASE_STEPS, ALL_STEPS = 6, 10
"""The run that is resumed has `BASE_STEPS`; after `ALL_STEPS` it is compared with one that was never interrupted."""


def pretrain(*overrides: str) -> list[str]:
    return ["pretrain", *TINY, *overrides]


def resume(*overrides: str) -> list[str]:
    return pretrain(f"trainer.max_steps={ALL_STEPS}", "trainer.check_val_every_n_epoch=1", *overrides)


# ----------------------------------------------------------------------------------------------------- what came of it


@dataclass
class Outcome:
    """What one command did."""

    code: int | None  # None: it did not end in time
    out: str
    err: str
    seconds: float
    changed: list[str] = field(default_factory=list)  # files of the trial's folder that are new or different
    outside: list[str] = field(default_factory=list)
    left_running: list[str] = field(default_factory=list)

    @property
    def text(self) -> str:
        return self.out + self.err

    @property
    def message(self) -> str:
        """The refusal: from the last line that starts with the program's name, or a usage error's box."""
        start = self.err.rfind("\nnest-ssl: ") + 1 if "\nnest-ssl: " in self.err else 0
        return self.err[start:].strip()


Check = Callable[[Path, Outcome], "str | None"]
"""Returns what is wrong with a result, or None. The path is the trial's folder."""


@dataclass(frozen=True)
class Refused:
    """Acceptable: exit code 1 (2 for wrong usage) and a short message with these words; nothing is changed.

    Several words in one, separated by `|`, are alternatives. `partial` results are those that the docs promise besides
    exit code 1, such as the features of the files that could be read.
    """

    words: tuple[str, ...] = ()
    partial: bool = False
    codes: tuple[int, ...] = (1, 2)

    def wrong(self, folder: Path, outcome: Outcome) -> str | None:
        if outcome.code not in self.codes:
            return f"exit code {outcome.code}, expected a refusal"
        if not outcome.message:
            return "refused without a word"
        lines = [line for line in outcome.message.splitlines() if line.strip()]
        if len(lines) > MOST_LINES:
            return f"a message of {len(lines)} lines"
        for word in self.words:
            if not any(choice.lower() in outcome.message.lower() for choice in word.split("|")):
                return f"the message does not have {word!r}"
        if outcome.changed and not self.partial:
            return f"refused, but changed {outcome.changed[:4]}"
        return None


@dataclass(frozen=True)
class Right:
    """Acceptable: exit code 0 and a result that passes the check."""

    check: Check
    codes: tuple[int, ...] = (0,)

    def wrong(self, folder: Path, outcome: Outcome) -> str | None:
        if outcome.code not in self.codes:
            return f"exit code {outcome.code}, expected {self.codes[0]}"
        return self.check(folder, outcome)


@dataclass(frozen=True)
class Either:
    """Acceptable: the one or the other."""

    refused: Refused
    right: Right

    def wrong(self, folder: Path, outcome: Outcome) -> str | None:
        return (self.right if outcome.code in self.right.codes else self.refused).wrong(folder, outcome)


Expected = Refused | Right | Either
Setup = Callable[[Path], object]


@dataclass(frozen=True)
class Trial:
    group: str
    name: str
    command: Sequence[str]
    expected: Expected
    setup: Setup | None = None
    environment: Mapping[str, str | None] = field(default_factory=dict)  # None: unset
    own_process: bool = False
    shell: str = ""  # a bash line that runs "$@", for limits and redirections; implies a process of its own
    act: Callable[[Path, list[str]], str | None] | None = None  # several commands, judged by itself
    limit_s: float = 60.0


# --------------------------------------------------------------------------------------------------------- the fixture


def speech(samples: int, seed: int) -> np.ndarray[Any, np.dtype[np.float32]]:
    noise = np.random.default_rng(seed).standard_normal(samples)
    t = np.arange(samples) / RATE
    voice = np.sin(2 * np.pi * (100 + 20 * seed) * t) * (1 + np.sin(2 * np.pi * 3 * t))
    return np.asarray(0.1 * voice + 0.02 * noise, dtype=np.float32)


def write_lines(path: Path, lines: Sequence[Mapping[str, Any]]) -> None:
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))


def make_fixture(folder: Path) -> None:
    """Audio and manifests; a run of six steps, one that was never interrupted, its model in all forms, features."""
    (folder / "audio").mkdir(parents=True)
    lines = []
    for i in range(8):
        samples = int(RATE * (1.6 + 0.1 * i))
        soundfile.write(folder / f"audio/{i}.wav", speech(samples, i), RATE)
        lines.append({"audio_filepath": f"audio/{i}.wav", "duration": samples / RATE})
    write_lines(folder / "train.jsonl", lines)
    write_lines(folder / "valid.jsonl", lines[:4])
    commands = [
        resume(f"trainer.max_steps={BASE_STEPS}"),
        resume("exp_manager.name=whole"),
        ["export", f"{RUN}/checkpoints/run.nemo", "model.safetensors", "--format", "safetensors"],
        ["extract", f"{RUN}/checkpoints/run.nemo", "audio/0.wav", "features", "--device", "cpu"],
    ]
    for command in commands:
        outcome = in_fork(command, folder, {}, 120)
        if outcome.code != 0:
            raise RuntimeError(f"the fixture cannot be made: {command}\n{outcome.text}")
    outcome = in_process(resume("exp_manager.name=two_ranks", "trainer.devices=2"), folder, {}, 120)
    if outcome.code != 0:
        raise RuntimeError(f"two ranks cannot be run:\n{outcome.text}")
    shutil.copy(folder / RUN / "checkpoints/run.nemo", folder / "model.nemo")
    shutil.copy(folder / RUN / "checkpoints/last.ckpt", folder / "model.ckpt")


class Fixture:
    """The folder that every trial gets a copy of, in parts."""

    path: Path

    @classmethod
    def data(cls, folder: Path) -> None:
        for name in ("train.jsonl", "valid.jsonl"):
            shutil.copy(cls.path / name, folder)
        shutil.copytree(cls.path / "audio", folder / "audio")

    @classmethod
    def run(cls, folder: Path) -> None:
        shutil.copytree(cls.path / RUN, folder / RUN)

    @classmethod
    def feature(cls) -> np.ndarray[Any, Any]:
        found: np.ndarray[Any, Any] = np.load(next((cls.path / "features").rglob("*.npy")))
        return found


# -------------------------------------------------------------------------------------------------------- what is right


def rows(run: Path) -> list[dict[str, str]]:
    with (run / "metrics.csv").open(newline="") as file:
        return list(csv.DictReader(file))


def losses(run: Path) -> dict[int, str]:
    return {int(row["step"]): row["train_loss"] for row in rows(run) if row["train_loss"]}


def only_run(folder: Path) -> Path:
    found = [path.parent for path in folder.rglob("metrics.csv")]
    if len(found) != 1:
        raise ValueError(f"{len(found)} runs")
    return found[0]


def trained(folder: Path, outcome: Outcome) -> str | None:
    """Losses are finite and more than 0, something was masked, and the model that was saved is finite."""
    run = only_run(folder)
    steps = [row for row in rows(run) if row["train_loss"]]
    if not steps:
        return "no training row in metrics.csv"
    if not all(math.isfinite(float(row["train_loss"])) for row in steps):
        return "a loss that is not finite"
    if not any(float(row["mask_rate"]) > 0 for row in steps):
        return "nothing was masked"
    if any(float(row["train_loss"]) <= 0 < float(row["mask_rate"]) for row in steps):
        return "a loss of 0"
    for path in run.glob("checkpoints/last.ckpt"):
        weights = torch.load(path, weights_only=True)["state_dict"]
        if not all(bool(torch.isfinite(value).all()) for value in weights.values() if value.is_floating_point()):
            return "weights that are not finite were saved"
    return None


def said(*words: str, then: Check = trained) -> Check:
    """The output has all of these words, and the result is right."""

    def check(folder: Path, outcome: Outcome) -> str | None:
        missing = [word for word in words if word.lower() not in outcome.text.lower()]
        return f"not in the output: {missing}" if missing else then(folder, outcome)

    return check


def ended_well(folder: Path, outcome: Outcome) -> str | None:
    """Nothing but exit code 0 is asked for; only for commands that have no result, such as `info`."""
    return None


def resumed(folder: Path, outcome: Outcome) -> str | None:
    """The losses are bit for bit those of the run that was never interrupted."""
    expected, found = losses(Fixture.path / "runs/whole"), losses(folder / RUN)
    if found != expected:
        different = sorted(step for step in expected | found if expected.get(step) != found.get(step))
        return f"losses differ from the undisturbed run at steps {different}"
    if "resumed at step" not in outcome.text:
        return "it does not say that it resumed"
    return None


def same_features(folder: Path, outcome: Outcome) -> str | None:
    files = sorted((folder / "out").rglob("*.npy"))
    if len(files) != 1:
        return f"{len(files)} feature files"
    if not np.array_equal(np.load(files[0]), Fixture.feature()):
        return "features differ from those of the undamaged model"
    return None


def finite_features(folder: Path, outcome: Outcome) -> str | None:
    for path in (folder / "out").rglob("*.npy"):
        if not np.isfinite(np.load(path)).all():
            return f"{path.name}: features are not finite"
    return None


# ------------------------------------------------------------------------------------------------------ running a trial


def in_fork(command: Sequence[str], folder: Path, environment: Mapping[str, str | None], limit_s: float) -> Outcome:
    """Call `nest-ssl` in a child process of this one."""
    box = folder.parent
    begin = time.monotonic()
    pid = os.fork()
    if pid == 0:
        code = 1
        try:
            code = _in_child(command, folder, environment)
        finally:
            os._exit(code)
    return _wait(pid, box, begin, limit_s)


def _in_child(command: Sequence[str], folder: Path, environment: Mapping[str, str | None]) -> int:
    os.setsid()
    resource.setrlimit(resource.RLIMIT_AS, (MEMORY, MEMORY))
    for descriptor, name in ((1, "stdout"), (2, "stderr")):
        os.dup2(os.open(folder.parent / name, os.O_CREAT | os.O_WRONLY | os.O_TRUNC), descriptor)
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    changed_environment = _environment(folder, environment)
    os.environ.clear()
    os.environ.update(changed_environment)
    os.chdir(folder)
    tempfile.tempdir = None
    sys.argv = ["nest-ssl", *command]
    from nest_ssl.cli.main import main

    try:
        main()
        code: object = 0
    except SystemExit as error:
        code = error.code
    except BaseException:
        traceback.print_exc()
        code = 1
    sys.stdout.flush()
    sys.stderr.flush()
    return code if isinstance(code, int) else int(code is not None)


def in_process(
    command: Sequence[str], folder: Path, environment: Mapping[str, str | None], limit_s: float, shell: str = ""
) -> Outcome:
    """Start `nest-ssl` as a program; `shell` is a bash line around it, which calls it as "$@"."""
    begin = time.monotonic()
    pid = start(command, folder, environment, shell).pid
    return _wait(pid, folder.parent, begin, limit_s)


def start(
    command: Sequence[str], folder: Path, environment: Mapping[str, str | None], shell: str = ""
) -> subprocess.Popen[bytes]:
    whole = [sys.executable, "-m", "nest_ssl", *command]
    with (folder.parent / "stdout").open("wb") as out, (folder.parent / "stderr").open("wb") as err:
        return subprocess.Popen(
            ["bash", "-c", shell, "bash", *whole] if shell else whole,
            cwd=folder,
            env=_environment(folder, environment),
            stdin=subprocess.DEVNULL,
            stdout=out,
            stderr=err,
            start_new_session=True,
        )


def _environment(folder: Path, changes: Mapping[str, str | None]) -> dict[str, str]:
    box = folder.parent
    kept = {name: os.environ[name] for name in ("PATH", "VIRTUAL_ENV") if name in os.environ}
    plain = {
        "OMP_NUM_THREADS": "1",
        "PYTHONPATH": str(Path(__file__).parents[2] / "src"),
        "LANG": "C.UTF-8",
        "HOME": str(box / "home"),
        "TMPDIR": str(box / "tmp"),
        "PYTHONDONTWRITEBYTECODE": "1",
    }
    return {name: value for name, value in {**kept, **plain, **changes}.items() if value is not None}


def _wait(pid: int, box: Path, begin: float, limit_s: float) -> Outcome:
    code: int | None = None
    while time.monotonic() - begin < limit_s:
        done, status = os.waitpid(pid, os.WNOHANG)
        if done:
            code = os.waitstatus_to_exitcode(status)
            break
        time.sleep(0.01)
    seconds = time.monotonic() - begin
    left = _left_running(pid if code is None else None)
    out, err = ((box / name).read_bytes().decode(errors="replace") for name in ("stdout", "stderr"))
    return Outcome(code, out, err, seconds, left_running=left)


def _left_running(hung: int | None) -> list[str]:
    """End what a command has left behind, and say what it was. Orphans are children of this process, a subreaper."""
    deadline = time.monotonic() + 3
    while hung is None and time.monotonic() < deadline and _children():
        _reap()
        time.sleep(0.05)
    left = []
    while children := _children():
        for pid in children:
            if pid != hung:
                left.append(
                    Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")[:80]
                )
            os.kill(pid, signal.SIGKILL)
        time.sleep(0.05)
        _reap()
    return left


def _children() -> list[int]:
    _reap()
    found = []
    for stat in Path("/proc").glob("[0-9]*/stat"):
        try:
            parent = int(stat.read_text().rpartition(")")[2].split()[1])
        except OSError:
            continue
        if parent == os.getpid():
            found.append(int(stat.parent.name))
    return found


def _reap() -> None:
    try:
        while os.waitpid(-1, os.WNOHANG)[0]:
            pass
    except ChildProcessError:
        pass


UNCOUNTED = re.compile(r"(^|/)(\.lock|log_globalrank-.*|watchdog(/.*)?|[^/]*\.idx)$")
"""Files that a refused command may write: its log, its lock, and the indexes of manifests."""


def snapshot(folder: Path) -> dict[str, str]:
    """What is in a folder: a hash of each file, `->` and the target of each link."""
    found = {}
    for path in sorted(folder.rglob("*")):
        name = os.fsencode(path.relative_to(folder)).decode(errors="replace")
        if path.is_symlink():
            found[name] = "-> " + os.fsencode(os.readlink(path)).decode(errors="replace")
        elif path.is_file():
            large = path.stat().st_size > 1 << 26
            found[name] = str(path.stat().st_size) if large else hashlib.sha256(path.read_bytes()).hexdigest()
    return found


CONTROL = re.compile(r"[\x00-\x08\x0b\x0c\x0e-\x1f\x7f-\x9f\u202a-\u202e\u2066-\u2069]")
"""Codes that move the cursor, ring the bell or turn the direction of writing."""


def faults_of(trial: Trial, folder: Path, outcome: Outcome) -> list[str]:
    """Everything that is wrong with an outcome, in words; an empty list means fine."""
    if outcome.code is None:
        return [f"does not end within {trial.limit_s:.0f} s"]
    faults = []
    if "Traceback (most recent call last)" in outcome.text:
        faults.append("a traceback")
    if outcome.code < 0:
        faults.append(f"ended by {signal.Signals(-outcome.code).name}")
    if CONTROL.search(outcome.text):
        faults.append("control codes in the output")
    for log in folder.rglob("log_globalrank*"):
        if log.is_file() and CONTROL.search(log.read_text(errors="replace")):
            faults.append("control codes in the log")
    if outcome.left_running:
        faults.append(f"left running: {outcome.left_running[:2]}")
    if outcome.outside:
        faults.append(f"files outside its folder: {outcome.outside[:3]}")
    try:
        wrong = trial.expected.wrong(folder, outcome)
    except Exception as error:
        wrong = f"the result cannot be checked: {type(error).__name__}: {error}"
    return [*faults, wrong] if wrong else faults


def attempt(trial: Trial, number: int, work: Path) -> dict[str, Any]:
    """Set up, run and judge one trial in a folder of its own."""
    box = work / (re.sub(r"\W+", "-", f"{trial.group}-{trial.name}", flags=re.ASCII)[:80] + f"-{number}")
    shutil.rmtree(box, ignore_errors=True)
    folder = box / "folder"
    for path in (folder, box / "home", box / "tmp"):
        path.mkdir(parents=True)
    Fixture.data(folder)
    begin = time.monotonic()
    if trial.setup:
        trial.setup(folder)
    command = [argument.replace("{folder}", str(folder)) for argument in trial.command]
    if trial.act:
        wrong = trial.act(folder, command)
        left = _left_running(None)
        faults = [*([wrong] if wrong else []), *([f"left running: {left[:2]}"] if left else [])]
        outcome = Outcome(0, "", "", time.monotonic() - begin)
    else:
        before = snapshot(folder)
        if trial.own_process or trial.shell:
            outcome = in_process(command, folder, trial.environment, trial.limit_s, trial.shell)
        else:
            outcome = in_fork(command, folder, trial.environment, trial.limit_s)
        after = snapshot(folder)
        outcome.changed = sorted(name for name in before | after if before.get(name) != after.get(name))
        outcome.changed = [name for name in outcome.changed if not UNCOUNTED.search(name)]
        inside = {"folder", "home", "tmp", "stdout", "stderr"}
        outcome.outside = [path.name for path in box.iterdir() if path.name not in inside]
        outcome.outside += [f"tmp/{path.name}" for path in (box / "tmp").iterdir() if "torchinductor" not in path.name]
        faults = faults_of(trial, folder, outcome)
    (box / "command").write_text(repr(command), errors="replace")
    if not faults:
        for name in ("folder", "home", "tmp"):
            shutil.rmtree(box / name, ignore_errors=True)
    return {
        "class": trial.group,
        "name": trial.name,
        "fine": not faults,
        "faults": faults,
        "code": outcome.code,
        "seconds": round(outcome.seconds, 1),
        "message": outcome.message[-1000:],
    }


# ------------------------------------------------------------------------------------------------------- ways to damage


class Evil:
    """An object whose pickle runs a command when it is loaded."""

    def __reduce__(self) -> tuple[Any, ...]:
        return os.system, ("touch ../pwned",)


EVIL = pickle.dumps(Evil())


def patched(data: bytes, at: int, new: bytes) -> bytes:
    return data[:at] + new + data[at + len(new) :]


def flipped(share: float) -> Callable[[bytes], bytes]:
    """Flip a bit, this far into the file."""

    def change(data: bytes) -> bytes:
        at = int(share * (len(data) - 1))
        return patched(data, at, bytes([data[at] ^ 4]))

    return change


def cut(share: float) -> Callable[[bytes], bytes]:
    return lambda data: data[: int(len(data) * share)]


def always(content: bytes) -> Callable[[bytes], bytes]:
    return lambda data: content


def zeros(data: bytes) -> bytes:
    return bytes(len(data))


def on_bytes(change: Callable[[bytes], bytes], path: Path) -> Setup:
    """Change a file's bytes; its other names (hard links) keep the old ones."""

    def setup(folder: Path) -> None:
        data = (folder / path).read_bytes()
        (folder / path).unlink()
        (folder / path).write_bytes(change(data))

    return setup


def replaced(make: Callable[[Path], object], path: Path) -> Setup:
    """Remove the file or folder, and call `make` with its path."""

    def setup(folder: Path) -> None:
        target = folder / path
        if target.is_dir():
            shutil.rmtree(target)
        else:
            target.unlink(missing_ok=True)
        make(target)

    return setup


def link(target: str) -> Callable[[Path], None]:
    return lambda path: path.symlink_to(target)


def nothing(path: Path) -> None:
    """Make nothing: the file is missing."""


def both(*setups: Setup) -> Setup:
    def setup(folder: Path) -> None:
        for one in setups:
            one(folder)

    return setup


# ---------------------------------------------------------------------------------------------------------------- kills


@dataclass(frozen=True)
class Kill:
    """A signal for a process of a running training, once something is seen."""

    signals: tuple[signal.Signals, ...]
    seen: str  # "start", "step N", "file PATTERN" in the run folder, "second N"
    to: str = "main"  # main, group, rank 1, worker, monitor
    ranks: int = 1
    codes: tuple[int, ...] = (75,)
    overrides: tuple[str, ...] = ()
    continued: bool = False  # it may also be left unharmed: exit code 0
    reference: str = ""  # the undisturbed run; default: by the number of ranks


TERM, INT, KILL, USR1, HUP, QUIT = (
    *(signal.SIGTERM, signal.SIGINT, signal.SIGKILL),
    *(signal.SIGUSR1, signal.SIGHUP, signal.SIGQUIT),
)


def descendants(pid: int) -> list[int]:
    children: dict[int, list[int]] = {}
    for stat in Path("/proc").glob("[0-9]*/stat"):
        try:
            parent = int(stat.read_text().rpartition(")")[2].split()[1])
        except OSError:
            continue
        children.setdefault(parent, []).append(int(stat.parent.name))
    found: list[int] = []
    todo = [pid]
    while todo:
        below = children.get(todo.pop(), [])
        found += below
        todo += below
    return sorted(found)


def _target(kill: Kill, pid: int) -> int | None:
    """The process that the signal is for, if it exists yet."""
    if kill.to in {"main", "group"}:
        return pid
    for child in descendants(pid):
        try:
            folder = Path(f"/proc/{child}")
            is_it = {
                "worker": folder.joinpath("comm").read_text().startswith("pt_data_worker"),
                "monitor": b"monitor" in folder.joinpath("cmdline").read_bytes(),
                "rank 1": b"LOCAL_RANK=1\0" in folder.joinpath("environ").read_bytes(),
            }
        except OSError:  # it has ended since
            continue
        if is_it[kill.to]:
            return child
    return None


def is_seen(what: str, run: Path, begin: float) -> bool:
    kind, _, value = what.partition(" ")
    if kind == "start":
        return run.exists()
    if kind == "second":
        return time.monotonic() - begin > float(value)
    if kind == "file":
        return any(run.glob(value))
    try:
        return max(losses(run), default=-1) >= int(value)
    except (OSError, KeyError):
        return False


def killed(kill: Kill) -> Callable[[Path, list[str]], str | None]:
    """Start, send the signal, start again, and compare with the run that was not disturbed."""

    def act(folder: Path, command: list[str]) -> str | None:
        begin = time.monotonic()
        process = start(command, folder, {})
        while not is_seen(kill.seen, folder / RUN, begin) and process.poll() is None:
            time.sleep(0.002)
        while (target := _target(kill, process.pid)) is None and process.poll() is None:
            time.sleep(0.01)
        for number in kill.signals:
            if target is None:
                break
            try:
                (os.killpg if kill.to == "group" else os.kill)(target, number)
            except ProcessLookupError:
                break
            time.sleep(0.5 if len(kill.signals) > 1 else 0)
        try:
            code = process.wait(60)
        except subprocess.TimeoutExpired:
            process.kill()
            return "does not end within 60 s of the signal"
        text = output_of(folder)
        if left := _left_running(None):
            return f"left running after the signal: {left[:2]}"
        if "Traceback (most recent call last)" in text and "Exception ignored in: " not in text:
            return f"a traceback after the signal (code {code}): {text[-300:]}"
        if code not in kill.codes and not (code == 0 and (target is None or kill.continued)):
            return f"exit code {code} after the signal, expected {kill.codes[0]}: {text[-300:]}"
        return _resumes_as_whole(folder, command, kill)

    return act


def output_of(folder: Path) -> str:
    return "".join((folder.parent / name).read_text(errors="replace") for name in ("stdout", "stderr"))


def _resumes_as_whole(folder: Path, command: list[str], kill: Kill) -> str | None:
    again = in_process(command, folder, {}, 90)
    if again.code != 0:
        return f"cannot be resumed, exit code {again.code}: {again.message[-300:]}"
    reference = Fixture.path / (kill.reference or ("runs/whole" if kill.ranks == 1 else "runs/two_ranks"))
    expected, found = losses(reference), losses(folder / RUN)
    different = sorted(step for step in expected | found if expected.get(step) != found.get(step))
    if different:
        return f"losses differ from the undisturbed run at steps {different}"
    left_over = [path.name for path in (folder / RUN / "checkpoints").iterdir() if "tmp" in path.name]
    return f"half-written files are left: {left_over}" if left_over else None


def disturbed(disturb: Setup) -> Callable[[Path, list[str]], str | None]:
    """Start, disturb at step 2, and start again: right results, or words instead of a traceback."""

    def act(folder: Path, command: list[str]) -> str | None:
        process = start(command, folder, {})
        begin = time.monotonic()
        while not is_seen("step 2", folder / RUN, begin) and process.poll() is None:
            time.sleep(0.002)
        disturb(folder)
        try:
            code = process.wait(60)
        except subprocess.TimeoutExpired:
            process.kill()
            return "does not end within 60 s"
        for again in (False, True):
            if again:
                code = in_process(command, folder, {}, 60).code or 0
            text = output_of(folder)
            if "Traceback (most recent call last)" in text:
                return f"a traceback, {'resumed' if again else 'disturbed'}: {text[-300:]}"
            if code not in {0, 1, 75} or (code and "nest-ssl: " not in text):
                return f"exit code {code}: {text[-300:]}"
        metrics = folder / RUN / "metrics.csv"
        if metrics.is_file() and not metrics.read_text().startswith("step,"):
            return "metrics.csv has no header"
        return None

    return act


# ----------------------------------------------------------------------------------------------------------------- main


def worker(work: Path) -> None:
    set_child_subreaper = 36
    ctypes.CDLL(None).prctl(set_child_subreaper, 1)
    worker.work = work  # type: ignore[attr-defined]


def numbered(number: int) -> dict[str, Any]:
    try:
        return attempt(ALL[number], number, worker.work)  # type: ignore[attr-defined]
    except Exception:
        trial = ALL[number]
        fault = f"the trial itself failed: {traceback.format_exc()[-600:]}"
        return {"class": trial.group, "name": trial.name, "fine": False, "faults": [fault], "code": None, "message": ""}


ALL: list[Trial] = []


def main(make: Callable[[], list[Trial]], about: str | None) -> None:
    """Run the trials that `make` returns; it is called when there is a fixture."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.hostile", description=about, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--only", choices=CLASSES, action="append", help="this class; may be repeated")
    parser.add_argument("--match", default="", help="only trials whose name has this pattern")
    parser.add_argument("--jobs", type=int, default=2)
    parser.add_argument("--work", type=Path, help="a folder to keep what failed in; default: a temporary one")
    parser.add_argument("--output", type=Path)
    options = parser.parse_args()
    torch.set_num_threads(1)
    import nest_ssl.cli.main
    import nest_ssl.report.report
    import nest_ssl.training.run
    import nest_ssl.training.trainer  # noqa: F401

    with tempfile.TemporaryDirectory() as temporary:
        work = (options.work or Path(temporary)).resolve()
        work.mkdir(parents=True, exist_ok=True)
        Fixture.path = work / "fixture/folder"
        if not Fixture.path.exists():
            for name in ("home", "tmp"):
                (work / "fixture" / name).mkdir(parents=True, exist_ok=True)
            make_fixture(Fixture.path)
        ALL.extend(
            trial
            for trial in make()
            if trial.group in (options.only or CLASSES) and re.search(options.match, trial.name)
        )
        results = []
        fork = multiprocessing.get_context("fork")
        with ProcessPoolExecutor(options.jobs, fork, worker, (work,)) as pool:
            for done in as_completed([pool.submit(numbered, number) for number in range(len(ALL))]):
                result = done.result()
                results.append(result)
                if not result["fine"]:
                    print(f"{result['class']}: {result['name']}: {'; '.join(result['faults'])}", flush=True)
    write(results, options.output)


def write(results: list[dict[str, Any]], output: Path | None) -> None:
    order = {(trial.group, trial.name): number for number, trial in enumerate(ALL)}
    results.sort(key=lambda result: order[result["class"], result["name"]])
    counts = {}
    for group in CLASSES:
        of_class = [result for result in results if result["class"] == group]
        if of_class:
            counts[group] = {"tried": len(of_class), "fine": sum(result["fine"] for result in of_class)}
            print(f"{group}: {counts[group]['tried']} tried, {counts[group]['fine']} fine")
    if output:
        verdicts = {
            group: {
                result["name"]: "fine" if result["fine"] else "; ".join(result["faults"])
                for result in results
                if result["class"] == group
            }
            for group in counts
        }
        content = {
            "python": platform.python_version(),
            "torch": torch.__version__,
            "counts": counts,
            "trials": verdicts,
        }
        output.write_text(json.dumps(content, indent=1, ensure_ascii=True) + "\n")
