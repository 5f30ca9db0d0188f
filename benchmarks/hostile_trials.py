"""What does the program do with bad input? Hundreds of trials in eight classes, each judged by the same rules.

    python benchmarks/hostile_trials.py [--only CLASS] [--jobs N] --output benchmarks/results/hostile_trials.json

A trial is a row: a class, a name, how its folder is set up, a command, and what is acceptable. Acceptable is a result
that is right (`Right`), or a refusal that helps (`Refused`), or whichever of the two it is (`Either`). The rules that
hold for every trial are in `faults_of`: it ends in time, and leaves no process, no file outside its folder, no
traceback and no control code behind. Most trials call the command in a fork of this process, where torch is already
imported; those that need a program of their own (signals, limits, several ranks) start one.

Linux only; some trials of the class `environment` mount small file systems and are left out without root.
"""

from __future__ import annotations

import argparse
import csv
import ctypes
import gzip
import hashlib
import io
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
import socket
import struct
import subprocess
import sys
import tarfile
import tempfile
import time
import traceback
import zipfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")
sys.path[:0] = [str(Path(__file__).parents[1] / "src")]

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
        "PYTHONPATH": str(Path(__file__).parents[1] / "src"),
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


# -------------------------------------------------------------------------------------------------------- configuration

BAD_VALUES: dict[str, str] = {
    "trainer.max_steps": "0 | 1.5 | nan | 99999999999999999999 | abc | [1,2] | true",
    "trainer.max_epochs": "0 | -2 | 0.5 | {a: 1}",
    "trainer.max_time": "00:00:00:00 | 1h | -1 | {hours: -1} | 99:99 | {minutes: nan}",
    "trainer.val_check_interval": "-1 | 1.5 | nan | 1000 | 0.0001 | true",
    "trainer.check_val_every_n_epoch": "0 | 1.5 | -3",
    "trainer.limit_train_batches": "-1 | 1.5 | nan | 0.00001 | abc",
    "trainer.limit_val_batches": "-0.1 | inf | 2.5",
    "trainer.accumulate_grad_batches": "0 | 1000 | 1.5 | {0: 2}",
    "trainer.gradient_clip_val": "nan | inf | -0.5 | 1e-30 | [1]",
    "trainer.gradient_clip_algorithm": "foo | value",
    "trainer.log_every_n_steps": "-1 | 1.5",
    "trainer.precision": "8 | fp8 | 64-true | bf16-mixed | 16 | null",
    "trainer.strategy": "foo | fsdp | ddp_spawn | deepspeed | {a: 1} | null",
    "trainer.num_nodes": "0 | -1 | 1.5",
    "trainer.devices": "0 | [] | 1.5 | '0,1,2' | auto | 99999 | null",
    "trainer.accelerator": "gpux | mps | tpu | null",
    "trainer.overfit_batches": "-1 | 2 | 0.5",
    "trainer.num_sanity_val_steps": "-2 | 1000000",
    "trainer.fast_dev_run": "-1 | 1.5",
    "trainer.min_steps": "-1 | 100",
    "trainer.profiler": "foo | simple",
    "trainer.deterministic": "maybe | warn",
    "trainer.callbacks": "[foo]",
    "trainer.plugins": "[x]",
    "model.optim.lr": "nan | -1 | inf | 0 | abc | null",
    "model.optim.betas": "[0.9] | [1.0,0.98] | [nan,0.5] | [0.9,0.98,0.99] | 0.9 | [-0.1,0.9]",
    "model.optim.weight_decay": "-1 | nan | 1e30",
    "model.optim.name": "novograd | '' | null | [adam]",
    "+model.optim.eps": "-1 | nan",
    "+model.optim.momentum": "0.9",
    "model.optim.sched.name": "foo | null | WarmupAnnealing",
    "model.optim.sched.warmup_steps": "-1 | 1.5 | nan",
    "model.optim.sched.warmup_ratio": "1.5 | -0.1",
    "model.optim.sched.min_lr": "-1 | nan | 100",
    "model.optim.sched.d_model": "0 | -4",
    "model.encoder.n_layers": "0 | -1 | 1.5 | 1000000000",
    "model.encoder.d_model": "0 | 33 | 10000000 | -32",
    "model.encoder.n_heads": "0 | 64 | -4",
    "model.encoder.subsampling": "foo | vggnet | null",
    "model.encoder.subsampling_factor": "0 | 3 | -8 | 1 | 1024",
    "model.encoder.subsampling_conv_channels": "0 | -1 | 100000000",
    "model.encoder.conv_kernel_size": "0 | 8 | -9 | 100001",
    "model.encoder.conv_norm_type": "foo | group_norm7 | group_norm0 | instance_norm | layer_norm",
    "model.encoder.conv_context_size": "foo | [1] | [100,100] | [-1,9] | causal",
    "model.encoder.att_context_size": "[5] | [0,0] | [-2,3] | [1.5,2] | foo | [[1,2],[3]] | []",
    "model.encoder.att_context_style": "foo | chunked_limited",
    "model.encoder.self_attention_model": "foo | abs_pos | rel_pos_local_attn",
    "model.encoder.dropout": "1.0 | 1.5 | -0.1 | nan",
    "model.encoder.dropout_att": "2 | 1.0",
    "model.encoder.stochastic_depth_drop_prob": "1.0 | 1.5 | -1",
    "model.encoder.stochastic_depth_mode": "foo",
    "model.encoder.ff_expansion_factor": "0 | -1 | 1000000000",
    "model.encoder.pos_emb_max_len": "0 | 1 | -5 | 1000000000000",
    "model.encoder.feat_in": "81 | 0 | -1",
    "model.encoder.feat_out": "0 | -2 | 7",
    "model.decoder.feat_in": "31",
    "model.decoder.num_classes": "63 | 0",
    "model.decoder.num_decoders": "2 | 0",
    "model.quantizer.num_classes": "65",
    "model.quantizer.code_dim": "0 | -1",
    "model.quantizer.num_books": "0 | 3",
    "model.quantizer.dist_fn": "foo | cosine",
    "model.quantizer.combine_time_steps": "4 | 0",
    "model.num_classes": "0 | -5 | 2 | 100000000000",
    "model.num_books": "0 | 1000000000 | 2",
    "model.sample_rate": "0 | -16000 | 16000.5 | 1 | nan | 8000",
    "model.mask_position": "foo | post_conv | null",
    "model.masking.block_size": "0 | -1 | 1000000 | 1.5",
    "model.masking.mask_prob": "-0.1 | 1.5 | nan | 1.0 | 1e-12",
    "model.masking.allow_overlap": "false | perhaps",
    "model.masking.feat_in": "79",
    "model.loss.mask_threshold": "-1 | nan | 1.0 | 1.01 | 0",
    "model.loss.combine_time_steps": "1 | 7",
    "model.preprocessor.features": "0 | -80 | 100000 | 513",
    "model.preprocessor.n_fft": "0 | 100 | 1000000000 | -512 | 513",
    "model.preprocessor.window": "foo | null | blackman",
    "model.preprocessor.window_size": "0 | -0.025 | nan | 100",
    "model.preprocessor.window_stride": "0 | -0.01 | nan | 0.000001 | 10",
    "model.preprocessor.normalize": "foo | all_features | null",
    "model.preprocessor.dither": "nan | -1 | 1e30",
    "model.preprocessor.pad_to": "-1 | 0 | 1000000000",
    "model.preprocessor.pad_value": "nan | inf",
    "model.preprocessor.frame_splicing": "0 | 2 | -1",
    "+model.preprocessor.lowfreq": "-1 | 8000 | 9000 | nan",
    "+model.preprocessor.highfreq": "0 | -1 | 1e9",
    "+model.preprocessor.mag_power": "nan | 0 | -2",
    "+model.preprocessor.log_zero_guard_value": "0 | -1 | nan",
    "+model.preprocessor.preemph": "nan | 5",
    "model.train_ds.batch_size": "0 | -1 | 1.5 | null | 1000000000000",
    "model.train_ds.num_workers": "-1 | 1.5 | abc",
    "model.train_ds.max_duration": "0 | -1 | nan | 0.1 | null",
    "model.train_ds.min_duration": "-1 | nan | 100 | inf",
    "model.train_ds.sample_rate": "8000 | 0 | 48000",
    "model.validation_ds.sample_rate": "22050",
    "model.validation_ds.batch_size": "0 | 1000",
    "model.train_ds.shuffle": "maybe | 2",
    "model.train_ds.manifest_filepath": "null | [] | '' | 3 | [[]] | {a: b}",
    "model.train_ds.bucketing_batch_size": "[1,2] | 0",
    "model.train_ds.concat_sampling_temperature": "0 | nan",
    "+model.train_ds.max_bad_fraction": "-1 | 2 | nan",
    "+model.train_ds.channel_selector": "7 | -1 | [0,9] | average",
    "+model.train_ds.noise_bank_gb": "-1 | nan",
    "+model.train_ds.prefetch_factor": "0 | 2",
    "+model.train_ds.prefetch_gb": "0 | nan",
    "+model.train_ds.pad_audio_mode": "foo",
    "+model.train_ds.min_audio_len_secs": "nan | -1",
    "+model.train_ds.seed": "-1 | 1.5",
    "+model.train_ds.source": "foo | os.system",
    "model.train_ds.batch_augmentor.prob": "-1 | 2 | nan",
    "model.train_ds.batch_augmentor.min_r_speech": "100 | nan | inf",
    "model.train_ds.batch_augmentor.max_mix_rate": "0.1 | 2",
    "model.train_ds.batch_augmentor.max_num_speakers": "0 | 1000",
    "model.train_ds.batch_augmentor.min_num_segments": "5 | 0",
    "model.train_ds.batch_augmentor._target_": "os.system | foo | null",
    "model.encoder._target_": "os.system | builtins.eval",
    "exp_manager.checkpoint_callback_params.monitor": "foo | null | train_loss",
    "exp_manager.checkpoint_callback_params.mode": "up | max",
    "exp_manager.checkpoint_callback_params.save_top_k": "-2 | 1.5 | 0 | -1",
    "+exp_manager.checkpoint_callback_params.filename": "'a/b' | '{foo}' | '{val_loss' | '../x' | ''",
    "+exp_manager.checkpoint_callback_params.dirpath": "/proc/x | train.jsonl",
    "+exp_manager.checkpoint_callback_params.every_n_train_steps": "0 | 2.5",
    "+exp_manager.checkpoint_callback_params.train_time_interval": "abc | 00:00:00:00 | -1",
    "+exp_manager.checkpoint_callback_params.postfix": "'' | .ckpt | /x",
    "+exp_manager.checkpoint_callback_params.prefix": "a/b | ../",
    "+exp_manager.version": "../v | 1",
    "+exp_manager.explicit_log_dir": "train.jsonl | /dev/null | ''",
    "+exp_manager.resume_from_checkpoint": "nowhere.ckpt | train.jsonl | /dev/zero | .",
    "+exp_manager.files_to_copy": "[nowhere.txt] | [/dev/zero]",
    "+exp_manager.ema.decay": "1.5 | nan | -1",
    "+exp_manager.max_time_per_run": "abc | 00:00:00:00",
    "exp_manager.exp_dir": "train.jsonl | /proc/nothing | ''",
    "+watchdog.floor_s": "0 | -1 | nan",
    "+watchdog.action": "foo",
    "+launch.max_restarts": "-1 | 1.5",
    "+init_from_nemo_model": "nowhere.nemo | train.jsonl | {a: {b: 1}} | [] | .",
    "+init_from_ptl_ckpt": "nowhere.ckpt | {x: {path: 3}}",
    "+init_from_pretrained_model": "no/such/name/here | '' | ../x",
    "+seed": "-1 | 1.5 | 99999999999999999999999 | abc | null",
    "name": "null | 3 | []",
}
"""Every value (they are separated by bars) is one trial: the run is right, or the key is named."""

MUST_REFUSE: dict[str, str] = {
    "model=3": "model",
    "model=null": "model",
    "trainer=null": "trainer",
    "trainer=[1]": "trainer",
    "exp_manager=7": "exp_manager",
    "~model.encoder": "encoder",
    "~model.train_ds": "train_ds",
    "model.train_ds=null": "train_ds",
    "model.train_ds=[]": "train_ds",
    "model.masking=null": "masking",
    "model.optim=null": "optim",
    "+model.encoder.foo.bar=1": "foo",
    "model.encodr.d_model=3": "encodr",
    "trainer.max_step=3": "max_step",
    "=3": "=3",
    "model.encoder.d_model": "d_model",
    "model.encoder.d_model=": "d_model",
    "model..encoder=1": "model..encoder",
    "a b c": "a b c",
    "model.encoder.d_model=[": "d_model",
    "model.encoder.d_model='": "d_model",
    "model.encoder.d_model=${nowhere}": "nowhere",
    "model.encoder.d_model=${model.encoder.d_model}": "d_model",
    "model.encoder.d_model=${oc.env:NOT_SET}": "NOT_SET",
    "model.encoder.d_model=${foo:1}": "foo",
    "size=gigantic": "gigantic",
    "size=../../x": "size|x",
    "--config-name & nowhere": "nowhere",
    "--config-path & nowhere": "nowhere",
    "--config-name & ../x": "x",
    "--no-such-option": "no-such-option",
    "exp_manager.resume_if_exists=true & exp_manager.resume_ignore_no_checkpoint=false": "resume_ignore_no_check",
    "+model.train_ds.batch_duration=10": "batch_duration",
    "+model.train_ds.use_bucketing=true & +model.train_ds.num_buckets=0": "num_buckets",
    "+model.train_ds.use_bucketing=true & +model.train_ds.bucket_duration_bins=[3,2,1]": "bucket_duration_bins",
    "+model.train_ds.bucket_batch_size=[1,2]": "bucket_batch_size",
    "model.train_ds.is_tarred=true": "tarred_audio_filepaths",
    "model.train_ds.is_concat=true & model.train_ds.concat_sampling_technique=foo": "concat_sampling_technique",
    "model.train_ds.is_concat=true & +model.train_ds.concat_sampling_probabilities=[0,0]": "probabilities",
    "+model.train_ds.use_lhotse=true & model.train_ds.is_tarred=true": "lhotse|tarred",
    "+model.train_ds.use_lhotse=true & +model.train_ds.cuts_path=nowhere.jsonl.gz": "nowhere",
    "+model.train_ds.endless=true & trainer.max_steps=-1 & trainer.max_epochs=null": "endless|max_steps",
    "model.train_ds.min_duration=5 & model.train_ds.max_duration=2": "min_duration",
    "model.preprocessor.sample_rate=8000": "sample_rate",
    "model.train_ds.sample_rate=8000 & model.validation_ds.sample_rate=8000": "sample_rate",
    "model.masking.block_size=3": "block_size|masked|mask",
    "model.masking.mask_prob=0": "mask_prob|masked",
    "model.num_classes=1": "num_classes",
    "exp_manager.create_wandb_logger=true": "wandb",
    "+exp_manager.create_early_stopping_callback=true & ~model.validation_ds": "validation|early_stopping",
    "+exp_manager.create_early_stopping_callback=true & +exp_manager.early_stopping_callback_params.monitor=foo": "foo",
    "+exp_manager.early_stopping_callback_params.patience=-3": "patience",
    "trainer.accelerator=gpu": "accelerator",
    "trainer.strategy=fsdp & trainer.precision=16 & trainer.devices=2": "precision|strategy",
    "+init_from_nemo_model=a.nemo & +init_from_ptl_ckpt=b.ckpt": "init_from",
    "+trainer.min_epochs=50 & trainer.max_epochs=2 & trainer.max_steps=-1": "min_epochs",
}
"""Overrides, separated by "&", that must be refused, and a word of the message."""

OTHER_WORDS: dict[str, str] = {
    "model.encoder.subsampling_factor=1024": "block_size",
    "model.encoder.att_context_style=chunked_limited": "att_context_size",
    "model.encoder.feat_out=7": "feat_in",
    "model.optim.sched.name=WarmupAnnealing": "d_model",
    "model.train_ds.batch_augmentor.min_r_speech=100": "max_r_speech",
    "model.train_ds.batch_augmentor.min_num_segments=5": "max_num_segments",
}
"""Where a good message names another key, with which the value does not go."""

ANCHORS = b"a: &a [x,x,x,x,x,x,x,x,x]\n" + b"".join(
    b"%c: &%c [%s]\n" % (c, c, b",".join([b"*%c" % (c - 1)] * 9)) for c in range(ord("b"), ord("j"))
)
"""Small to read, 9^9 items to build."""

YAMLS: list[tuple[str, bytes, str]] = [
    ("empty", b"", "my|needed"),
    ("binary", bytes(range(256)), "my"),
    ("tabs", b"model:\n\tencoder: 3\n", "my"),
    ("a list", b"- 1\n- 2\n", "my"),
    ("a number", b"7\n", "my"),
    ("duplicate keys", b"defaults: [nest_fast-conformer, _self_]\nseed: 1\nseed: 2\n", "my|seed"),
    ("its own default", b"defaults: [my, _self_]\n", "my"),
    ("an unknown default", b"defaults: [nowhere, _self_]\n", "nowhere"),
    ("anchors that multiply", b"defaults: [nest_fast-conformer, _self_]\n" + ANCHORS, "my"),
    (
        "a Python object",
        b"defaults: [nest_fast-conformer, _self_]\nseed: !!python/object/apply:os.system ['touch ../pwned']\n",
        "my",
    ),
    ("UTF-16", "defaults: [nest_fast-conformer, _self_]\nseed: 1\n".encode("utf-16"), "my"),
    ("deep nesting", b"a: " + b"[" * 5000 + b"]" * 5000, "my"),
    ("an escape code in a key", b'defaults: [nest_fast-conformer, _self_]\n"se\\e[31med": 1\n', "se"),
    ("an escape code in a value", b'defaults: [nest_fast-conformer, _self_]\nseed: "\\e[31mx"\n', "seed"),
    ("no model", b"name: x\ntrainer: {max_steps: 1}\n", "model"),
]


def _short_validation(folder: Path) -> None:
    write_lines(folder / "valid.jsonl", [{"audio_filepath": "audio/0.wav", "duration": 1.0}])


def validated(folder: Path, outcome: Outcome) -> str | None:
    """No loss of 0 is taken for the best there can be."""
    best = [path.name for path in only_run(folder).glob("checkpoints/*val_loss=0.0000*")]
    return f"the best checkpoint is {best[0]}" if best else trained(folder, outcome)


def configurations() -> Iterator[Trial]:
    group = "configuration"
    for key, values in BAD_VALUES.items():
        for value in values.split(" | "):
            name = f"{key.lstrip('+')}={value}"
            named = (key.rpartition(".")[2].lstrip("+"), OTHER_WORDS.get(name), value[3:] and value)
            refused = Refused(("|".join(filter(None, named)),))
            yield Trial(group, name, pretrain(f"{key}={value}"), Either(refused, Right(trained)))
    for overrides, word in MUST_REFUSE.items():
        yield Trial(group, overrides, pretrain(*overrides.split(" & ")), Refused((word,)))
    diverged = Either(Refused(("diverged",), partial=True), Right(said("not finite", then=ended_well)))
    for override in ("model.optim.lr=1e30", "+model.optim.eps=0"):
        yield Trial(group, override, pretrain(override), diverged)
    command = pretrain("model.masking.mask_prob=0.008", "trainer.limit_val_batches=1", "trainer.max_steps=8")
    yield Trial(group, "a validation that masks nothing", command, Right(validated), _short_validation)
    for name, content, word in YAMLS:

        def write(folder: Path, content: bytes = content) -> None:
            (folder / "my.yaml").write_bytes(content)

        command = pretrain("--config-path", "{folder}", "--config-name", "my")
        yield Trial(group, f"yaml: {name}", command, Either(Refused((word,)), Right(trained)), write)


# ------------------------------------------------------------------------------------------------------------ manifests


def line(**changes: Any) -> bytes:
    return json.dumps({"audio_filepath": "audio/0.wav", "duration": 1.6} | changes).encode() + b"\n"


GOOD = b"".join(line(audio_filepath=f"audio/{i}.wav", duration=1.6 + 0.1 * i) for i in range(8))

MANIFESTS: list[tuple[str, bytes, Expected]] = []
"""What `train.jsonl` holds."""


def _manifest(name: str, content: bytes, expected: Expected) -> None:
    MANIFESTS.append((name, content, expected))


NAMED = Refused(("train.jsonl",))
NAMED_OR_TRAINED = Either(NAMED, Right(trained))
for _name, _content in {
    "empty": b"",
    "one newline": b"\n",
    "blanks": b" \n\t\n",
    "a JSON array": json.dumps([{"audio_filepath": "audio/0.wav", "duration": 1.6}]).encode(),
    "a number per line": b"1\n2\n",
    "a string": b'"audio/0.wav"\n',
    "a list of paths": b"audio/0.wav\naudio/1.wav\n",
    "csv": b"audio_filepath,duration\naudio/0.wav,1.6\n",
    "single quotes": GOOD.replace(b'"', b"'"),
    "cut off in the last line": GOOD[:-20],
    "a comma at the end": GOOD.replace(b"}\n", b"},\n"),
    "binary": bytes(range(256)) * 4,
    "invalid UTF-8 in a path": GOOD + b'{"audio_filepath": "\xff\xfe.wav", "duration": 2}\n',
    "UTF-16": GOOD.decode().encode("utf-16"),
    "gzip": gzip.compress(GOOD),
    "zeros": bytes(4096),
    "two objects in a line": GOOD.replace(b"}\n{", b"} {", 1),
    "deep nesting": GOOD + b'{"audio_filepath": "audio/0.wav", "duration": 2, "x": ' + b"[" * 200_000 + b"\n",
    "no audio_filepath": GOOD + b'{"duration": 2}\n',
    "a path that is a number": GOOD + line(audio_filepath=7),
    "a path that is null": GOOD + line(audio_filepath=None),
    "a path that is a list": GOOD + line(audio_filepath=["audio/0.wav"]),
    "an empty path": GOOD + line(audio_filepath=""),
    "a NUL in a path": GOOD + line(audio_filepath="audio/0\0.wav"),
    "a lone surrogate in a path": GOOD + b'{"audio_filepath": "a\\ud800.wav", "duration": 2}\n',
    "no duration": GOOD + b'{"audio_filepath": "audio/0.wav"}\n',
    "a duration in words": GOOD + line(duration="two"),
    "a duration as a string": GOOD + line(duration="1.6"),
    "a duration of null": GOOD + line(duration=None),
    "a duration of true": GOOD + line(duration=True),
    "a duration of NaN": GOOD + line(duration=math.nan),
    "a duration of Infinity": GOOD + line(duration=math.inf),
    "a duration of 1e999": GOOD + b'{"audio_filepath": "audio/0.wav", "duration": 1e999}\n',
    "a duration of 400 digits": GOOD + b'{"audio_filepath": "audio/0.wav", "duration": 1' + b"0" * 400 + b"}\n",
    "a duration of 5000 digits": GOOD + b'{"audio_filepath": "audio/0.wav", "duration": 1' + b"0" * 5000 + b"}\n",
    "a negative duration": GOOD + line(duration=-1.6),
    "a duration of 0": GOOD + line(duration=0),
    "an offset in words": GOOD + line(offset="x"),
    "a negative offset": GOOD + line(offset=-1.0),
    "an offset of NaN": GOOD + line(offset=math.nan),
    "an offset of 1e300": GOOD + line(offset=1e300),
    "escape codes in a bad line": GOOD + b'{"audio_filepath": "\x1b[31mred", "duration": \n',
    "escape codes in a key": GOOD + b'{"audio\\u001b[31m": 1, "duration": 2}\n',
    "an escape code as duration": GOOD + line(duration="\x1b]0;title\x07"),
}.items():
    _manifest(_name, _content, NAMED_OR_TRAINED)
for _name, _content in {
    "BOM": b"\xef\xbb\xbf" + GOOD,
    "CRLF": GOOD.replace(b"\n", b"\r\n"),
    "CR alone in a string": GOOD + line(text="a\rb"),
    "no newline at the end": GOOD[:-1],
    "blank lines between": GOOD.replace(b"\n", b"\n\n  \n"),
    "duplicate lines": GOOD + GOOD,
    "duplicate keys": GOOD + b'{"audio_filepath": "x", "audio_filepath": "audio/0.wav", "duration": 1.6}\n',
    "a line of 5 MB": GOOD + line(text="x" * 5_000_000),
    "unicode separators in a text": GOOD + line(text="a\u2028b\u2029c\x85d"),
    "audio_filename": GOOD.replace(b"audio_filepath", b"audio_filename"),
    "backslashes": GOOD.replace(b"audio/", b"audio\\\\"),
    "a very short line": GOOD + line(duration=0.0001),
    "a duration of an integer": GOOD + line(duration=1),
    "an integer of 30 digits elsewhere": GOOD + line(id=10**30),
    "an emoji key": GOOD + line(**{"😀": "😀"}),
    "spaces around": GOOD.replace(b"{", b"   {").replace(b"}", b"}   "),
}.items():
    _manifest(_name, _content, Right(trained))
for _name, _path in {
    "a missing file": "audio/nowhere.wav",
    "a folder": "audio",
    "/dev/null": "/dev/null",
    "/dev/zero": "/dev/zero",
    "/dev/stdin": "/dev/stdin",
    "/proc/self/mem": "/proc/self/mem",
    "/etc/passwd": "/etc/passwd",
    "a URL": "http://localhost:9/a.wav",
    "an s3 URL": "s3://bucket/a.wav",
    "a pipe command": "sox audio/0.wav -t wav - |",
    "a path of 5000 characters": "a" * 5000 + ".wav",
    "a path with a newline": "audio/\n0.wav",
    "a path with an escape code": "audio/\x1b[31mred.wav",
    "a path with a bell and a title": "\x1b]0;evil\x07.wav",
    "a path with right-to-left override": "audio/\u202egpj.wav",
    "a link in a circle": "audio/loop.wav",
    "a home path": "~/a.wav",
    "a path through a file": "audio/0.wav/x.wav",
    "another manifest": "valid.jsonl",
}.items():
    _manifest(f"path: {_name}", GOOD + line(audio_filepath=_path), Right(said("bad")))
for _name, _changes in {
    "an offset after the end": {"offset": 100.0},
    "a duration far too long": {"duration": 50.0},
    "a duration far too short": {"duration": 1.01},
    "an offset close to the end": {"offset": 1.59, "duration": 1.6},
}.items():
    _manifest(f"segment: {_name}", GOOD + line(**_changes), Right(trained))

INDEX = Path("train.jsonl.idx")


def _index_of_another(folder: Path) -> None:
    in_fork(["inspect", "valid.jsonl", "--examples", "0"], folder, {}, 60)
    shutil.copy(folder / "valid.jsonl.idx", folder / INDEX)


INDEXES: dict[str, Setup] = {
    "empty": on_bytes(cut(0), INDEX),
    "one byte": on_bytes(always(b"x"), INDEX),
    "half": on_bytes(cut(0.5), INDEX),
    "one byte short": on_bytes(lambda data: data[:-1], INDEX),
    "zeros": on_bytes(zeros, INDEX),
    "twice": on_bytes(lambda data: data * 2, INDEX),
    "text": on_bytes(always(b"hello\n" * 100), INDEX),
    "a pickle": on_bytes(always(EVIL), INDEX),
    "of another manifest": _index_of_another,
    "a folder": replaced(Path.mkdir, INDEX),
    "a FIFO": replaced(os.mkfifo, INDEX),
    "a dangling link": replaced(link("nowhere"), INDEX),
    "a link to /dev/zero": replaced(link("/dev/zero"), INDEX),
    "a link to a precious file": replaced(link("audio/0.wav"), INDEX),
    "sparse, 8 GB": lambda folder: os.truncate(folder / INDEX, 8 << 30),
    **{f"bit flipped at {share:.0%}": on_bytes(flipped(share), INDEX) for share in (0, 0.02, 0.1, 0.25, 0.5, 0.75, 1)},
}


def _whole_index(folder: Path) -> None:
    shutil.copy2(Fixture.path / "train.jsonl", folder)
    shutil.copy2(Fixture.path / INDEX, folder)


def same_as_whole(folder: Path, outcome: Outcome) -> str | None:
    """The first losses are those of the run on the undamaged index: the same utterances in the same order."""
    expected, found = losses(Fixture.path / "runs/whole"), losses(only_run(folder))
    if any(expected[step] != loss for step, loss in found.items()):
        return "other losses than with an undamaged index"
    return None if (folder / "audio/0.wav").stat().st_size > 10_000 else "audio/0.wav was overwritten"


TAR = Path("audio_0.tar")


def tar(*names: str) -> Setup:
    """A shard with the eight files under these names, and its manifest."""

    def setup(folder: Path) -> None:
        with tarfile.open(folder / TAR, "w") as file:
            for i, name in enumerate(names):
                file.add(folder / f"audio/{i % 8}.wav", arcname=name)
        lines = [{"audio_filepath": f"{i}.wav", "duration": 1.6 + 0.1 * i, "shard_id": 0} for i in range(8)]
        write_lines(folder / "tarred.json", lines)

    return setup


EIGHT = tuple(f"{i}.wav" for i in range(8))
GOOD_TAR = tar(*EIGHT)


def tar_with(kind: bytes, target: str = "") -> Setup:
    """The shard has a second member of a name, which is no file."""

    def append(folder: Path) -> None:
        with tarfile.open(folder / TAR, "a") as file:
            file.addfile(special("3.wav", kind, target))

    return both(GOOD_TAR, append)


def tar_bytes(change: Callable[[bytes], bytes]) -> Setup:
    return both(GOOD_TAR, on_bytes(change, TAR))


def tar_size(size: bytes) -> Setup:
    """The first member claims another size, under a checksum that is right."""

    def change(data: bytes) -> bytes:
        header = patched(patched(data[:512], 124, size), 148, b" " * 8)
        return patched(header, 148, b"%06o\0 " % sum(header)) + data[512:]

    return tar_bytes(change)


def special(name: str, kind: bytes, target: str = "") -> tarfile.TarInfo:
    member = tarfile.TarInfo(name)
    member.type, member.linkname = kind, target
    return member


TARS: dict[str, Setup] = {
    "as it should be": GOOD_TAR,
    "missing": both(GOOD_TAR, replaced(nothing, TAR)),
    "empty": tar_bytes(cut(0)),
    "cut in a header": tar_bytes(lambda data: data[:300]),
    "cut in the middle": tar_bytes(cut(0.5)),
    "gzip": tar_bytes(gzip.compress),
    "zeros": tar_bytes(zeros),
    "a wav": tar_bytes(lambda data: data[512:]),
    "a flipped bit in a header": tar_bytes(lambda data: patched(data, 130, bytes([data[130] ^ 1]))),
    "a size of 8 GB": tar_size(b"77777777777\0"),
    "a size of 0": tar_size(b"00000000000\0"),
    "a size that is text": tar_size(b"12345hello \0"),
    "a negative size": tar_size(b"\xff" * 11 + b"\xf0"),
    "members that the manifest lacks": tar(*EIGHT, "99.wav"),
    "half of the members": tar(*EIGHT[:4]),
    "every member twice": tar(*EIGHT, *EIGHT),
    "paths that leave it": tar(*(f"../../{name}" for name in EIGHT)),
    "a symbolic link": tar_with(tarfile.SYMTYPE, "/etc/passwd"),
    "a hard link": tar_with(tarfile.LNKTYPE, "0.wav"),
    "a FIFO in it": tar_with(tarfile.FIFOTYPE),
    "a device in it": tar_with(tarfile.CHRTYPE),
    "a FIFO": both(GOOD_TAR, replaced(os.mkfifo, TAR)),
    "a folder": both(GOOD_TAR, replaced(Path.mkdir, TAR)),
}

MANIFEST_VALUES: dict[str, str] = {
    "a folder": "audio",
    "/dev/null": "/dev/null",
    "/dev/zero": "/dev/zero",
    "a FIFO": "fifo",
    "a link in a circle": "loop.jsonl",
    "a range without files": "m__OP_0..3_CL_.json",
    "a range of 10^9": "'m_{0..1000000000}.json'",
    "a range without quotes": "m_{0..7}.json",
    "a broken range": "m__OP_3..",
    "a glob": "*.jsonl",
    "a list with a missing one": "[train.jsonl,nowhere.jsonl]",
    "the same twice": "[train.jsonl,train.jsonl]",
    "a comma at the end": "'train.jsonl,'",
    "a URL": "https://localhost:9/train.jsonl",
    "an empty name in a list": "[train.jsonl,'']",
    "a name with an escape code": "'\x1b[31mred.jsonl'",
    "a name of 5000 characters": "x" * 5000,
    "a socket": "socket",
}


def _odd_files(folder: Path) -> None:
    os.mkfifo(folder / "fifo")
    (folder / "loop.jsonl").symlink_to("loop.jsonl")
    (folder / "audio/loop.wav").symlink_to("loop.wav")
    with socket.socket(socket.AF_UNIX) as listener:
        here = Path.cwd()
        os.chdir(folder)  # the name of a socket has at most 107 characters
        listener.bind("socket")
        os.chdir(here)


def manifests() -> Iterator[Trial]:
    group = "manifests"
    for name, content, expected in MANIFESTS:

        def write(folder: Path, content: bytes = content) -> None:
            _odd_files(folder)
            (folder / "train.jsonl").write_bytes(content)

        yield Trial(group, name, pretrain("trainer.max_steps=5", "trainer.limit_val_batches=1"), expected, write)
    for name, value in MANIFEST_VALUES.items():
        words = "manifest|train.jsonl|json|socket|fifo|audio|/dev|loop|red"
        expected = Either(Refused((words,)), Right(trained))
        command = pretrain(f"model.train_ds.manifest_filepath={value}")
        yield Trial(group, f"manifest_filepath is {name}", command, expected, _odd_files)
    for name in ("a missing file", "/dev/zero", "text", "one silent file"):

        def noise(folder: Path, name: str = name) -> None:
            soundfile.write(folder / "audio/silent.wav", np.zeros(RATE), RATE)
            (folder / "audio/text.wav").write_text("no audio\n")
            files = {"a missing file": "audio/no.wav", "/dev/zero": "/dev/zero", "text": "audio/text.wav"}
            (folder / "noise.jsonl").write_bytes(line(audio_filepath=files.get(name, "audio/silent.wav")))

        command = pretrain("model.train_ds.noise_manifest=noise.jsonl", "model.train_ds.batch_augmentor.noise_ratio=1")
        expected = Either(Refused(("noise",), partial=True), Right(trained))
        yield Trial(group, f"noise: {name}", command, expected, noise)
    missing = GOOD.replace(b"audio/", b"nowhere/")
    for name, content, overrides in (
        ("all files missing, two workers", missing, ()),
        ("every other file missing, two workers", GOOD + missing, ("+model.train_ds.max_bad_fraction=0.001",)),
        ("a channel that no file has, two workers", GOOD, ("+model.train_ds.channel_selector=7",)),
        ("too short for the mask, two workers", GOOD.replace(b"1.6", b"1.01"), ("model.masking.block_size=400",)),
    ):

        def lines(folder: Path, content: bytes = content) -> None:
            (folder / "train.jsonl").write_bytes(content)

        command = pretrain("model.train_ds.num_workers=2", *overrides)
        expected = Either(Refused(("file|channel_selector|masked",), partial=True), Right(trained))
        yield Trial(group, name, command, expected, lines, own_process=True)
    for name, damage in INDEXES.items():

        def damaged(folder: Path, damage: Setup = damage) -> None:
            _whole_index(folder)
            damage(folder)

        yield Trial(group, f"index: {name}", pretrain(), Right(same_as_whole), damaged)
    for name, setup in TARS.items():
        command = pretrain(
            *("model.train_ds.is_tarred=true", "model.train_ds.tarred_audio_filepaths=audio_0.tar"),
            "model.train_ds.manifest_filepath=tarred.json",
        )
        expected = Either(Refused(("audio_0.tar|tarred.json",), partial=True), Right(trained))
        yield Trial(group, f"tar: {name}", command, expected, setup)


# ---------------------------------------------------------------------------------------------------------------- audio


def riff(*chunks: tuple[bytes, bytes], size: int | None = None, magic: bytes = b"RIFF") -> bytes:
    body = b"".join(name + struct.pack("<I", len(data)) + data + b"\0" * (len(data) % 2) for name, data in chunks)
    return magic + struct.pack("<I", len(body) + 4 if size is None else size) + b"WAVE" + body


def fmt(
    tag: int = 1, channels: int = 1, rate: int = RATE, bits: int = 16, block: int | None = None
) -> tuple[bytes, bytes]:
    block = channels * bits // 8 if block is None else block
    return b"fmt ", struct.pack("<HHIIHH", tag, channels, rate, rate * block & 0xFFFFFFFF, block & 0xFFFF, bits)


PCM = (speech(RATE * 2, 3) * 32767).astype("<i2").tobytes()
FLOATS = speech(RATE * 2, 3)


def encoded(name: str, samples: np.ndarray[Any, Any] = FLOATS, rate: int = RATE, subtype: str | None = None) -> bytes:
    file = io.BytesIO()
    soundfile.write(file, samples, rate, format=name, subtype=subtype)
    return file.getvalue()


def floats(values: np.ndarray[Any, Any], bits: int = 32) -> bytes:
    return riff(fmt(3, bits=bits), (b"data", values.astype(f"<f{bits // 8}").tobytes()))


def spoiled(value: float) -> np.ndarray[Any, Any]:
    samples = FLOATS.astype(np.float64)
    samples[5000] = value
    return samples


PLAYLIST = "#EXTM3U\n#EXT-X-TARGETDURATION:2\n#EXTINF:2,\n{}\n#EXT-X-ENDLIST\n"


def audio_files() -> dict[str, tuple[bytes, str]]:
    """The content of a file, and what it is: good (2 s of speech), bad, or a matter of opinion."""
    wav, flac = riff(fmt(), (b"data", PCM)), encoded("FLAC")
    ogg, mp3 = encoded("OGG", subtype="VORBIS"), encoded("MP3")
    data = (b"data", PCM)
    return {
        "plain.wav": (wav, "good"),
        "stereo.wav": (encoded("WAV", np.stack([FLOATS, FLOATS], 1)), "good"),
        "channels_255.wav": (riff(fmt(channels=255), (b"data", PCM[:510] * 200)), "any"),
        "float_1e30.wav": (floats(spoiled(1e30)), "bad"),
        "float_1e5.wav": (floats(spoiled(1e5)), "any"),
        "float_nan.wav": (floats(spoiled(math.nan)), "bad"),
        "float_minus_inf.wav": (floats(spoiled(-math.inf)), "bad"),
        "double_1e300.wav": (floats(spoiled(1e300), 64), "bad"),
        "float_denormal.wav": (floats(FLOATS * 1e-40), "any"),
        "all_nan.wav": (floats(FLOATS * math.nan), "bad"),
        "one_sample.wav": (riff(fmt(), (b"data", b"\1\1")), "any"),
        "no_samples.wav": (riff(fmt(), (b"data", b"")), "bad"),
        "no_data_chunk.wav": (riff(fmt()), "bad"),
        "data_before_fmt.wav": (riff(data, fmt()), "any"),
        "two_data_chunks.wav": (riff(fmt(), data, data), "any"),
        "two_fmt_chunks.wav": (riff(fmt(), fmt(rate=8000), data), "any"),
        "odd_byte.wav": (riff(fmt(), (b"data", PCM + b"\1")), "good"),
        "rate_0.wav": (riff(fmt(rate=0), data), "bad"),
        "rate_1.wav": (riff(fmt(rate=1), data), "bad"),
        "rate_999.wav": (riff(fmt(rate=999), data), "bad"),
        "rate_768001.wav": (riff(fmt(rate=768_001), data), "bad"),
        "rate_2147483647.wav": (riff(fmt(rate=2**31 - 1), data), "bad"),
        "rate_4294967295.wav": (riff(fmt(rate=2**32 - 1), data), "bad"),
        "bits_0.wav": (riff(fmt(bits=0), data), "bad"),
        "bits_7.wav": (riff(fmt(bits=7), data), "any"),
        "bits_64.wav": (riff(fmt(bits=64), data), "any"),
        "channels_0.wav": (riff(fmt(channels=0), data), "bad"),
        "channels_65535.wav": (riff(fmt(channels=65535), data), "bad"),
        "block_align_0.wav": (riff(fmt(block=0), data), "any"),
        "unknown_codec.wav": (riff(fmt(tag=0x7777), data), "bad"),
        "riff_size_0.wav": (riff(fmt(), data, size=0), "any"),
        "riff_size_max.wav": (riff(fmt(), data, size=2**32 - 1), "any"),
        "data_size_max.wav": (patched(wav, 40, b"\xff\xff\xff\xff"), "any"),
        "data_size_2gb.wav": (patched(wav, 40, b"\0\0\0\x80"), "any"),
        "list_chunk_4gb.wav": (patched(riff(fmt(), (b"LIST", b"INFO"), data), 40, b"\xf0\xff\xff\xff"), "any"),
        "trailing_garbage.wav": (wav + bytes(range(256)) * 20, "any"),
        "cut_in_header.wav": (wav[:30], "bad"),
        "cut_at_44.wav": (wav[:44], "bad"),
        "wav_in_wav.wav": (riff(fmt(), (b"data", wav)), "good"),
        "rf64_huge.wav": (
            riff((b"ds64", struct.pack("<QQQI", 2**62, 2**62, 2**61, 0)), fmt(), data, magic=b"RF64", size=2**32 - 1),
            "any",
        ),
        "plain.flac": (flac, "good"),
        "cut.flac": (flac[: len(flac) // 2], "bad"),
        "flipped.flac": (patched(flac, len(flac) // 2, bytes([flac[len(flac) // 2] ^ 255])), "bad"),
        "many_samples.flac": (patched(flac, 21, bytes([flac[21] | 0x0F]) + b"\xff\xff\xff\xff"), "bad"),
        "wrong_md5.flac": (patched(flac, 26, bytes(16)), "any"),
        "header_only.flac": (flac[:42], "bad"),
        "plain.ogg": (ogg, "good"),
        "cut.ogg": (ogg[: len(ogg) // 2], "any"),
        "chained.ogg": (ogg + ogg, "any"),
        "pages_swapped.ogg": (ogg[:4000] + ogg[8000:] + ogg[4000:8000], "any"),
        "plain.mp3": (mp3, "any"),
        "cut.mp3": (mp3[: len(mp3) // 2], "any"),
        "big_id3_claim.mp3": (b"ID3\x04\0\0\x7f\x7f\x7f\x7f" + mp3, "any"),
        "garbage_first.mp3": (bytes(range(1, 256)) * 40 + mp3, "any"),
        "plain.aiff": (encoded("AIFF"), "good"),
        "many_frames.aiff": (patched(encoded("AIFF"), 22, b"\x7f\xff\xff\xff"), "any"),
        "plain.au": (encoded("AU"), "good"),
        "au_size_max.au": (patched(encoded("AU"), 8, b"\xff\xff\xff\xff"), "any"),
        "plain.w64": (encoded("W64"), "good"),
        "plain.caf": (encoded("CAF"), "good"),
        "plain.sph": (encoded("NIST"), "good"),
        "nist_claims.sph": (encoded("NIST").replace(b"sample_count -i 32000", b"sample_count -i 99999"), "any"),
        "empty.wav": (b"", "bad"),
        "one_byte.wav": (b"R", "bad"),
        "text.wav": (b"this is not audio\n" * 500, "bad"),
        "html.wav": (b"<html><body>404</body></html>", "bad"),
        "zeros.wav": (bytes(100_000), "bad"),
        "zip.wav": (b"PK\3\4" + bytes(500), "bad"),
        "elf.wav": (b"\x7fELF" + bytes(500), "bad"),
        "gzip.wav": (gzip.compress(wav), "bad"),
        "png.wav": (b"\x89PNG\r\n\x1a\n" + bytes(500), "bad"),
        "playlist.m3u8.wav": (PLAYLIST.format("audio/0.wav").encode(), "bad"),
        "playlist.wav": (PLAYLIST.format("file:///etc/passwd").encode(), "bad"),
        "concat.wav": (b"ffconcat version 1.0\nfile 'audio/0.wav'\nfile '0.wav'\n", "bad"),
        "session.wav": (
            b"v=0\no=- 0 0 IN IP4 127.0.0.1\ns=x\nc=IN IP4 127.0.0.1\nt=0 0\nm=audio 5004 RTP/AVP 0\n",
            "bad",
        ),
        "silence.wav": (riff(fmt(), (b"data", bytes(RATE * 4))), "any"),
        "full_scale.wav": (riff(fmt(), (b"data", b"\xff\x7f\x00\x80" * RATE)), "any"),
        "eight_bit.wav": (encoded("WAV", subtype="PCM_U8"), "good"),
        "adpcm.wav": (encoded("WAV", subtype="IMA_ADPCM"), "any"),
        "float64.wav": (encoded("WAV", subtype="DOUBLE"), "good"),
        "rate_15999.wav": (encoded("WAV", rate=15_999), "good"),
        "rate_192000.flac": (encoded("FLAC", np.repeat(FLOATS, 12), rate=192_000), "good"),
    }


IN_TRAINING = (
    *("float_1e30.wav", "float_nan.wav", "double_1e300.wav", "no_samples.wav", "one_sample.wav", "rate_1.wav"),
    *("channels_65535.wav", "data_size_max.wav", "list_chunk_4gb.wav", "rf64_huge.wav", "cut.flac", "flipped.flac"),
    *("many_samples.flac", "pages_swapped.ogg", "big_id3_claim.mp3", "playlist.wav", "concat.wav", "session.wav"),
    *("silence.wav", "float_denormal.wav", "empty.wav", "zeros.wav"),
)
"""Files that are also put into a training set, with a wrong duration where they have none."""


def prepared(name: str, kind: str) -> Check:
    def check(folder: Path, outcome: Outcome) -> str | None:
        good = [json.loads(text) for text in (folder / "m.jsonl").read_text().splitlines()]
        found = [entry for entry in good if Path(entry["audio_filepath"]).name == name]
        rest = folder / "m.bad.jsonl"
        bad = [json.loads(text) for text in rest.read_text().splitlines()] if rest.exists() else []
        reasons = [entry["reason"] for entry in bad if Path(entry["audio_filepath"]).name == name]
        if len(found) + len(reasons) != 1:
            return f"{len(found)} lines and {len(reasons)} reasons for the file"
        if kind == "good" and (not found or abs(found[0]["duration"] - 2) > 0.05):
            return f"good audio of 2 s: {found or reasons}"
        if kind == "bad" and found:
            return f"bad audio counts as good: {found}"
        if reasons and (not reasons[0] or CONTROL.search(reasons[0]) or len(reasons[0]) > 300):
            return f"a poor reason: {reasons[0]!r}"
        return None

    return check


def extracted(kind: str) -> Expected:
    refused = Refused(("bad.jsonl|without features|no audio",), partial=True)

    def one_finite(folder: Path, outcome: Outcome) -> str | None:
        files = list((folder / "out").rglob("*.npy"))
        return f"{len(files)} feature files" if len(files) != 1 else finite_features(folder, outcome)

    if kind == "bad":
        return refused
    return Right(one_finite) if kind == "good" else Either(refused, Right(one_finite))


def also(name: str, content: bytes | None = None) -> Setup:
    """The folder has one more file: with this content, or good audio."""

    def setup(folder: Path) -> None:
        data = (folder / "audio/0.wav").read_bytes() if content is None else content
        (folder / "audio" / name).write_bytes(data)

    return setup


def _only_bad(folder: Path) -> None:
    for path in (folder / "audio").iterdir():
        path.write_text("no")


ODD_FOLDERS: dict[str, Setup] = {
    "a FIFO": replaced(os.mkfifo, Path("audio/fifo.wav")),
    "a link in a circle": replaced(link("loop.wav"), Path("audio/loop.wav")),
    "a folder in a circle": replaced(link("."), Path("audio/again")),
    "a folder named x.wav": replaced(Path.mkdir, Path("audio/x.wav")),
    "a link to /dev/zero": replaced(link("/dev/zero"), Path("audio/zero.wav")),
    "a sparse file of 2 GB": lambda folder: _sparse(folder / "audio/sparse.wav", 2 << 30),
    "names that are not UTF-8": also(os.fsdecode(b"\xff\xfe.wav")),
    "names with escape codes": also("\x1b[31mred.wav"),
    "names with newlines": also("a\nb.wav"),
    "a bad file with escape codes": also("\x1b[2J\x07.wav", b"no"),
    "nothing in it": replaced(Path.mkdir, Path("audio")),
    "only bad files": _only_bad,
}


def _sparse(path: Path, size: int) -> None:
    path.write_bytes(riff(fmt(), (b"data", PCM)))
    os.truncate(path, size)


def audio() -> Iterator[Trial]:
    group = "audio"
    for name, (content, kind) in audio_files().items():

        def write(folder: Path, name: str = name, content: bytes = content) -> None:
            (folder / "odd").mkdir()
            (folder / "odd" / name).write_bytes(content)
            shutil.copy(folder / "audio/0.wav", folder / "odd/0.wav")
            with (folder / "train.jsonl").open("ab") as file:
                file.write(line(audio_filepath=f"odd/{name}", duration=2.0))

        command = ["prepare", "odd", "--output", "m.jsonl", "--workers", "0"]
        yield Trial(group, f"prepare {name}", command, Right(prepared(name, kind)), write)
        command = ["extract", f"{Fixture.path}/model.nemo", f"odd/{name}", "out", "--device", "cpu"]
        yield Trial(group, f"extract {name}", command, extracted(kind), write)
        if name in IN_TRAINING:
            check = said("bad") if kind == "bad" else trained
            yield Trial(group, f"pretrain {name}", pretrain("trainer.max_steps=5"), Right(check), write)
    for name, setup in ODD_FOLDERS.items():
        command = ["prepare", "audio", "--output", "m.jsonl", "--workers", "0"]
        expected = Either(Refused(("audio|m.jsonl",), partial=True), Right(ended_well))
        yield Trial(group, f"prepare a folder with {name}", command, expected, setup)
        command = ["extract", f"{Fixture.path}/model.nemo", "audio", "out", "--device", "cpu"]
        expected = Either(Refused(("audio|out",), partial=True), Right(finite_features))
        yield Trial(group, f"extract a folder with {name}", command, expected, setup)
        command = ["inspect", "train.jsonl", "--examples", "1", "--batch-size", "2"]
        probe = ["probe", f"{Fixture.path}/model.nemo", "--train", "train.jsonl", "--test", "valid.jsonl"]
        if "FIFO" in name or "zero" in name or "bad" in name:

            def listed(folder: Path, setup: Setup = setup) -> None:
                setup(folder)
                for path in sorted((folder / "audio").iterdir()):
                    if path.name not in {f"{i}.wav" for i in range(8)}:
                        with (folder / "train.jsonl").open("ab") as file:
                            file.write(line(audio_filepath=f"audio/{path.name}"))

            told = Either(Refused((), partial=True), Right(ended_well))
            yield Trial(group, f"inspect with {name}", command, told, listed)
            command = [*probe, "--label", "label", "--output", "probed", "--device", "cpu"]
            yield Trial(group, f"probe with {name}", command, told, both(listed, _labelled))


def _labelled(folder: Path) -> None:
    for name in ("train.jsonl", "valid.jsonl"):
        lines = [json.loads(text) for text in (folder / name).read_text().splitlines()]
        write_lines(folder / name, [{**entry, "label": str(i % 2)} for i, entry in enumerate(lines)])


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
WORKERS = ("model.train_ds.num_workers=2",)
DIED = (-9, 137)
KILLS = [
    Kill((TERM,), "step 3"),
    Kill((INT,), "step 3", codes=(75, 130, 1)),
    Kill((USR1,), "step 3"),
    Kill((HUP,), "step 3", codes=(75, -1, 129)),
    Kill((QUIT,), "step 3", codes=(75, -3, 131)),
    Kill((KILL,), "step 1", codes=DIED),
    Kill((KILL,), "step 3", codes=DIED),
    Kill((KILL,), "step 5", codes=DIED),
    Kill((KILL,), "step 9", codes=DIED),
    Kill((KILL,), "file checkpoints/*", codes=DIED),
    Kill((KILL,), "file checkpoints/.*", codes=DIED),
    Kill((KILL,), "file checkpoints/*val_loss*", codes=DIED),
    Kill((KILL,), "file checkpoints/*.nemo*", codes=DIED, continued=True),
    Kill((KILL,), "file hparams.yaml", codes=DIED),
    Kill((KILL,), "second 1", codes=DIED),
    Kill((TERM,), "second 1", codes=(75, -15, 143, 1)),
    Kill((INT,), "second 1", codes=(75, -2, 130, 1)),
    Kill((TERM,), "start", codes=(75, -15, 143, 1)),
    Kill((TERM, TERM), "step 3"),
    Kill((INT, INT), "step 3", codes=(75, 130, 1)),
    Kill((TERM, KILL), "step 3", codes=(75, *DIED)),
    Kill((signal.SIGPIPE,), "step 3", codes=(0, 75, -13), continued=True),
    Kill((TERM,), "step 3", to="group"),
    Kill((signal.SIGSTOP, signal.SIGCONT), "step 3", codes=(0,), continued=True),
    Kill((KILL,), "step 3", to="worker", overrides=WORKERS),
    Kill((TERM,), "step 3", to="worker", overrides=WORKERS, codes=(75, 0)),
    Kill((TERM,), "step 3", overrides=WORKERS),
    Kill((KILL,), "step 3", overrides=WORKERS, codes=DIED),
    Kill((TERM,), "step 2", ranks=2),
    Kill((INT,), "step 2", ranks=2, codes=(75, 130, 1)),
    Kill((KILL,), "step 2", ranks=2, codes=DIED),
    Kill((KILL,), "step 2", ranks=2, to="rank 1"),
    Kill((TERM,), "step 2", ranks=2, to="rank 1"),
    Kill((KILL,), "file checkpoints/*", ranks=2, codes=DIED),
    Kill((TERM,), "step 2", ranks=2, to="group"),
    Kill((KILL,), "step 2", ranks=2, to="monitor", codes=(0, 75), continued=True),
    Kill((TERM, TERM), "step 2", ranks=2),
    Kill((signal.SIGSTOP,), "step 2", ranks=2, to="rank 1", overrides=("+watchdog.floor_s=2",)),
    Kill((KILL,), "second 2", ranks=2, to="rank 1", codes=(75, 1)),
]


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


def _is_seen(what: str, run: Path, begin: float) -> bool:
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
        while not _is_seen(kill.seen, folder / RUN, begin) and process.poll() is None:
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
        text = _output(folder)
        if left := _left_running(None):
            return f"left running after the signal: {left[:2]}"
        if "Traceback (most recent call last)" in text and "Exception ignored in: " not in text:
            return f"a traceback after the signal (code {code}): {text[-300:]}"
        if code not in kill.codes and not (code == 0 and (target is None or kill.continued)):
            return f"exit code {code} after the signal, expected {kill.codes[0]}: {text[-300:]}"
        return _resumes_as_whole(folder, command, kill)

    return act


def _output(folder: Path) -> str:
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


DISTURBANCES: dict[str, Setup] = {
    "metrics.csv is removed": replaced(nothing, RUN / "metrics.csv"),
    "metrics.csv becomes a folder": replaced(Path.mkdir, RUN / "metrics.csv"),
    "the log is removed": replaced(nothing, RUN / "log_globalrank-0_localrank-0.txt"),
    "hparams.yaml is removed": replaced(nothing, RUN / "hparams.yaml"),
    "checkpoints is removed": replaced(nothing, RUN / "checkpoints"),
    "checkpoints becomes a file": replaced(Path.touch, RUN / "checkpoints"),
    "watchdog is removed": replaced(nothing, RUN / "watchdog"),
    "the run folder is removed": replaced(nothing, RUN),
    "the audio is removed": replaced(nothing, Path("audio")),
    "the manifest is removed": replaced(nothing, Path("train.jsonl")),
    "the manifest is emptied": lambda folder: os.truncate(folder / "train.jsonl", 0),
    "an audio file is cut": lambda folder: os.truncate(folder / "audio/3.wav", 5000),
}
"""What somebody does to the files while training runs."""


def disturbed(disturb: Setup) -> Callable[[Path, list[str]], str | None]:
    """Start, disturb at step 2, and start again: right results, or words instead of a traceback."""

    def act(folder: Path, command: list[str]) -> str | None:
        process = start(command, folder, {})
        begin = time.monotonic()
        while not _is_seen("step 2", folder / RUN, begin) and process.poll() is None:
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
            text = _output(folder)
            if "Traceback (most recent call last)" in text:
                return f"a traceback, {'resumed' if again else 'disturbed'}: {text[-300:]}"
            if code not in {0, 1, 75} or (code and "nest-ssl: " not in text):
                return f"exit code {code}: {text[-300:]}"
        metrics = folder / RUN / "metrics.csv"
        if metrics.is_file() and not metrics.read_text().startswith("step,"):
            return "metrics.csv has no header"
        return None

    return act


def kills() -> Iterator[Trial]:
    for name, disturb in DISTURBANCES.items():
        command = resume("trainer.max_steps=40", "+exp_manager.checkpoint_callback_params.every_n_train_steps=5")
        yield Trial("kills", f"while it runs, {name}", command, Right(ended_well), act=disturbed(disturb), limit_s=200)
    for kill in KILLS:
        names = " then ".join(number.name for number in kill.signals)
        extra = ", two workers" if kill.overrides == WORKERS else ""
        name = f"{names} to {kill.to} at {kill.seen}, {kill.ranks} rank{'s' * (kill.ranks > 1)}{extra}"
        every = "+exp_manager.checkpoint_callback_params.every_n_train_steps=2"
        command = resume(f"trainer.devices={kill.ranks}", every, *kill.overrides)
        yield Trial("kills", name, command, Right(ended_well), act=killed(kill), limit_s=200)


# ---------------------------------------------------------------------------------------------------------- checkpoints


LAST = RUN / "checkpoints/last.ckpt"
BEFORE = RUN / "checkpoints/last-before.ckpt"


def changed(change: Callable[[dict[str, Any]], Any], path: Path = LAST) -> Setup:
    """Load a checkpoint, change it and save it again, with checksums that are right."""

    def setup(folder: Path) -> None:
        content = torch.load(folder / path, weights_only=True)
        _alone(folder / path)
        new = change(content)
        torch.save(content if new is None else new, folder / path)

    return setup


def _alone(path: Path) -> None:
    """Make a copy of a file that has several names."""
    data = path.read_bytes()
    path.unlink()
    path.write_bytes(data)


def _set(section: str, key: Any, value: Any) -> Callable[[dict[str, Any]], None]:
    def change(content: dict[str, Any]) -> None:
        content[section][key] = value

    return change


def _weights(change: Callable[[torch.Tensor], object]) -> Callable[[dict[str, Any]], None]:
    def apply(content: dict[str, Any]) -> None:
        name = next(name for name in content["state_dict"] if name.endswith("feed_forward1.linear1.weight"))
        content["state_dict"][name] = change(content["state_dict"][name])

    return apply


def _moments(change: Callable[[torch.Tensor], object]) -> Callable[[dict[str, Any]], None]:
    def apply(content: dict[str, Any]) -> None:
        first = next(iter(content["optimizer_states"][0]["state"].values()))
        first["exp_avg"] = change(first["exp_avg"])

    return apply


def _drop(*keys: str) -> Callable[[dict[str, Any]], None]:
    def apply(content: dict[str, Any]) -> None:
        for key in keys:
            content.pop(key, None)

    return apply


def _store(key: str, value: Any) -> Callable[[dict[str, Any]], None]:
    def apply(content: dict[str, Any]) -> None:
        content[key] = value

    return apply


def _moved(source: str) -> Setup:
    """last.ckpt is another of the model's files."""

    def setup(folder: Path) -> None:
        (folder / LAST).unlink()
        shutil.copy(Fixture.path / source, folder / LAST)

    return setup


def _all_empty(folder: Path) -> None:
    for path in (folder / RUN / "checkpoints").iterdir():
        os.truncate(path, 0)


OTHER_MODEL = {
    "state_dict": {"layer.weight": torch.zeros(2, 2)},
    "global_step": 5,
    "epoch": 0,
    "loops": {},
    "callbacks": {},
    "optimizer_states": [],
    "lr_schedulers": [],
    "pytorch-lightning_version": "2.5",
}
POOLED = RUN / "checkpoints"
METRICS, PARAMETERS, SAVED = RUN / "metrics.csv", RUN / "hparams.yaml", RUN / ".saved"

MUST_RESUME: dict[str, Setup] = {
    "undamaged": nothing,
    **{f"cut to {share:.1%}": on_bytes(cut(share), LAST) for share in (0, 0.001, 0.2, 0.5, 0.9, 0.999)},
    **{
        f"bit flipped at {share:.0%}": on_bytes(flipped(share), LAST)
        for share in (0, 0.05, 0.15, 0.3, 0.45, 0.6, 0.75, 0.9, 0.97, 1)
    },
    "zeros": on_bytes(zeros, LAST),
    "a git-lfs pointer": on_bytes(always(b"version https://git-lfs.github.com/spec/v1\n"), LAST),
    "gzip": on_bytes(gzip.compress, LAST),
    "missing": replaced(nothing, LAST),
    "a FIFO": replaced(os.mkfifo, LAST),
    "a dangling link": replaced(link("nowhere"), LAST),
    "a link in a circle": replaced(link("last.ckpt"), LAST),
    "a link to /dev/zero": replaced(link("/dev/zero"), LAST),
    "a pickle that runs a command": on_bytes(always(EVIL), LAST),
    "metrics.csv cut in a row": on_bytes(lambda data: data[:-7], METRICS),
    "metrics.csv with rows too many": on_bytes(lambda data: data + b"6,1,9.9\r\n7,1,9.9\n", METRICS),
    "hparams.yaml missing": replaced(nothing, PARAMETERS),
    "hparams.yaml is binary": on_bytes(always(bytes(range(256))), PARAMETERS),
    "hparams.yaml has an object": on_bytes(
        always(b"a: !!python/object/apply:os.system ['touch ../pwned']\n"), PARAMETERS
    ),
    ".saved missing": replaced(nothing, SAVED),
    ".saved is binary": on_bytes(always(b"\xff\xfe\0"), SAVED),
    "report.html is a folder": replaced(Path.mkdir, RUN / "report.html"),
}
"""Resumes from last.ckpt or from the one before, with the losses of the undisturbed run."""

MUST_NOT_START_AGAIN: dict[str, Setup] = {
    "all missing": replaced(Path.mkdir, POOLED),
    "all empty": _all_empty,
    "checkpoints is a file": replaced(Path.touch, POOLED),
    "checkpoints is a dangling link": replaced(link("nowhere"), POOLED),
}

RESUME_OR_REFUSE: dict[str, Setup] = {
    "trailing garbage": on_bytes(lambda data: data + b"garbage" * 99, LAST),
    "a folder": replaced(Path.mkdir, LAST),
    "an archive with a pickle that runs a command": changed(_store("extra", Evil())),
    "both damaged": both(on_bytes(flipped(0.5), LAST), on_bytes(flipped(0.5), BEFORE)),
    "a NaN weight": changed(_weights(lambda x: x * math.nan)),
    "an infinite weight": changed(_weights(lambda x: x / 0)),
    "an int8 weight": changed(_weights(lambda x: x.to(torch.int8))),
    "a bool weight": changed(_weights(lambda x: x > 0)),
    "a complex weight": changed(_weights(lambda x: x.to(torch.complex64))),
    "a weight of another shape": changed(_weights(lambda x: x[:-1])),
    "a transposed weight": changed(_weights(lambda x: x.T)),
    "a weight of one element": changed(_weights(lambda x: x[:1, :1])),
    "NaN moments": changed(_moments(lambda x: x * math.nan)),
    "moments that are too small": changed(_moments(lambda x: x.flatten()[:3].clone())),
    "integer moments": changed(_moments(lambda x: x.to(torch.int32))),
    "moments as text": changed(_moments(lambda x: "x")),
    **{
        f"without {key}": changed(_drop(key))
        for key in (
            *("state_dict", "optimizer_states", "lr_schedulers", "global_step", "epoch", "data_position"),
            *("hyper_parameters", "progress"),
        )
    },
    **{
        f"global_step is {value!r}": changed(_store("global_step", value))
        for value in (-1, 10**12, "six", math.nan, None, 6.5, 3)
    },
    **{f"epoch is {value!r}": changed(_store("epoch", value)) for value in (-1, "x", 10**9)},
    **{f"data_position is {value!r}": changed(_store("data_position", value)) for value in (None, [1], {"a": 1}, 7)},
    "a batch far behind the epoch": changed(lambda content: content["data_position"].update(batch=10**9)),
    "optimizer_states is empty": changed(_store("optimizer_states", [])),
    "state_dict is a list": changed(_store("state_dict", [1])),
    "progress is text": changed(_store("progress", "x")),
    "a list": changed(lambda content: [1, 2]),
    "one tensor": changed(lambda content: torch.zeros(3)),
    "an empty dict": changed(lambda content: content.clear()),
    "weights alone": changed(lambda content: content["state_dict"]),
    "of Lightning, another model": changed(lambda content: OTHER_MODEL),
    "a .nemo file": _moved("model.nemo"),
    "a .safetensors file": _moved("model.safetensors"),
    "hparams.yaml is a folder": replaced(Path.mkdir, PARAMETERS),
    ".saved is a folder": replaced(Path.mkdir, SAVED),
    ".saved is ahead, last.ckpt missing": both(replaced(nothing, LAST), on_bytes(always(b"999999"), SAVED)),
    ".lock is a folder": replaced(Path.mkdir, RUN / ".lock"),
    ".lock is a FIFO": replaced(os.mkfifo, RUN / ".lock"),
    "watchdog is a file": replaced(Path.touch, RUN / "watchdog"),
    "the log is a folder": replaced(Path.mkdir, RUN / "log_globalrank-0_localrank-0.txt"),
}

NEW_METRICS: dict[str, Setup] = {
    "metrics.csv missing": replaced(nothing, METRICS),
    "metrics.csv empty": on_bytes(cut(0), METRICS),
    "metrics.csv is binary": on_bytes(always(bytes(range(256))), METRICS),
    "metrics.csv is a folder": replaced(Path.mkdir, METRICS),
    "metrics.csv is a FIFO": replaced(os.mkfifo, METRICS),
}
"""Earlier rows are lost; those of the resumed steps are right, or it is said that there are none."""


def _tail(folder: Path, outcome: Outcome) -> str | None:
    """The rows after the checkpoint are those of the undisturbed run, under a header."""
    if "metrics.csv: cannot be written" in outcome.text:
        return None
    expected = {step: loss for step, loss in losses(Fixture.path / "runs/whole").items() if step >= BASE_STEPS}
    found = {step: loss for step, loss in losses(folder / RUN).items() if step >= BASE_STEPS}
    return None if found == expected else f"rows after the checkpoint: {found}, expected {expected}"


def takes_effect(key: str) -> Right:
    """The log says that the new value takes effect, and from then on the losses are different ones."""

    def check(folder: Path, outcome: Outcome) -> str | None:
        if f"{key}: " not in outcome.text or "takes effect" not in outcome.text:
            return f"it does not say that {key} takes effect"
        same = losses(folder / RUN) == losses(Fixture.path / "runs/whole")
        return f"{key} has no effect: the losses are the same" if same else trained(folder, outcome)

    return Right(check)


OTHER_SETTINGS: dict[str, tuple[tuple[str, ...], Expected]] = {
    "another d_model": (("model.encoder.d_model=64",), Refused(("d_model|shape",))),
    "another n_layers": (("model.encoder.n_layers=3",), Refused(("n_layers|layers",))),
    "another num_classes": (("model.num_classes=32",), Refused(("num_classes|shape",))),
    "another optimizer": (("model.optim.name=sgd",), Refused(("optim",))),
    "another mel number": (("model.preprocessor.features=64",), Refused(("features|shape",))),
    "another sample rate": (("model.sample_rate=8000",), Either(Refused(("sample_rate",)), Right(said("sample_rate")))),
    "another seed": (("+seed=5",), Either(Refused(("seed",)), Right(said("seed")))),
    "another weight_decay": (("model.optim.weight_decay=0.5",), takes_effect("model.optim.weight_decay")),
    "another beta": (("model.optim.betas=[0.5,0.6]",), takes_effect("model.optim.betas")),
    "another eps": (("+model.optim.eps=0.1",), takes_effect("model.optim.eps")),
    "another learning rate": (("model.optim.lr=0.5",), takes_effect("model.optim.lr")),
    "clipping": (("trainer.gradient_clip_val=0.01",), takes_effect("trainer.gradient_clip_val")),
    "another dropout": (("model.encoder.dropout=0.5",), takes_effect("model.encoder.dropout")),
    "another mask": (("model.masking.mask_prob=0.1",), takes_effect("model.masking.mask_prob")),
    "another batch size": (("model.train_ds.batch_size=3",), Right(said("batch_size"))),
    "fewer steps than done": (
        ("trainer.max_steps=2",),
        Either(Refused(("max_steps",)), Right(said("resumed at step"))),
    ),
    "another manifest": (("model.train_ds.manifest_filepath=valid.jsonl",), Right(said("manifest_filepath"))),
    "a missing manifest": (("model.train_ds.manifest_filepath=no.jsonl",), Refused(("no.jsonl",))),
    "averaged weights": (("+exp_manager.ema.enable=true",), Either(Refused(("ema",)), Right(said("ema")))),
    "another precision": (("trainer.precision=bf16",), Right(said("precision"))),
    "half the layers frozen by name": (("+model.encoder.frozen=true",), Refused(("frozen",))),
}


def checkpoints() -> Iterator[Trial]:
    group = "checkpoints"
    refused = Refused(("last.ckpt|checkpoint|.saved|hparams|.lock|watchdog",))
    for table, expected in (
        (MUST_RESUME, Right(resumed)),
        (MUST_NOT_START_AGAIN, Refused(("checkpoints",))),
        (RESUME_OR_REFUSE, Either(refused, Right(resumed))),
        (NEW_METRICS, Either(Refused(("metrics.csv",)), Right(_tail))),
    ):
        for name, damage in table.items():
            yield Trial(group, name, resume(), expected, both(Fixture.run, damage))
    for name, (overrides, expected) in OTHER_SETTINGS.items():
        yield Trial(group, f"resumed with {name}", resume(*overrides), expected, Fixture.run)


# ---------------------------------------------------------------------------------------------------------- model files


def nemo_members(path: Path | None = None) -> dict[str, bytes]:
    with tarfile.open(path or Fixture.path / "model.nemo") as tar:
        files = [(member.name, tar.extractfile(member)) for member in tar if member.isfile()]
        return {Path(name).name: file.read() for name, file in files if file}


def nemo(members: Mapping[str, bytes], *special: tarfile.TarInfo, mode: str = "w") -> Setup:
    def setup(folder: Path) -> None:
        with tarfile.open(folder / "x.nemo", mode) as tar:  # type: ignore[call-overload]
            for member in special:
                tar.addfile(member)
            for name, data in members.items():
                info = tarfile.TarInfo(name)
                info.size = len(data)
                tar.addfile(info, io.BytesIO(data))

    return setup


def copied(source: str, change: Callable[[bytes], bytes]) -> Setup:
    """`x` with the suffix of `source`: its bytes, changed."""

    def setup(folder: Path) -> None:
        data = (Fixture.path / source).read_bytes()
        (folder / f"x{Path(source).suffix}").write_bytes(change(data))

    return setup


def saved(content: Callable[[dict[str, Any]], Any], name: str = "x.ckpt") -> Setup:
    def setup(folder: Path) -> None:
        original = torch.load(Fixture.path / "model.ckpt", weights_only=True)
        new = content(original)
        torch.save(original if new is None else new, folder / name)

    return setup


def safetensors(header: Callable[[dict[str, Any]], Any], data: Callable[[bytes], bytes] = bytes) -> Setup:
    """`x.safetensors` with another header and other bytes after it, both written by hand."""

    def setup(folder: Path) -> None:
        whole = (Fixture.path / "model.safetensors").read_bytes()
        length = struct.unpack("<Q", whole[:8])[0]
        content = json.loads(whole[8 : 8 + length])
        new = header(content)
        text = new if isinstance(new, bytes) else json.dumps(content if new is None else new).encode()
        (folder / "x.safetensors").write_bytes(struct.pack("<Q", len(text)) + text + data(whole[8 + length :]))

    return setup


def _entry(content: dict[str, Any]) -> dict[str, Any]:
    found: dict[str, Any] = next(value for name, value in content.items() if name.endswith("linear1.weight"))
    return found


def _no_checksum(content: dict[str, Any]) -> None:
    """Keep the configuration; what others write has no checksum."""
    content["__metadata__"] = {
        key: value
        for key, value in content["__metadata__"].items()
        if "sum" not in key.lower() and "sha" not in key.lower() and "crc" not in key.lower()
    }


def yaml(old: str, new: str) -> Setup:
    """The configuration of a .nemo file with one pattern replaced."""

    def setup(folder: Path) -> None:
        members = nemo_members()
        text = members["model_config.yaml"].decode()
        changed_text = re.sub(old, new, text, count=1, flags=re.MULTILINE)
        if changed_text == text:
            raise ValueError(f"the configuration has no {old}")
        nemo({**members, "model_config.yaml": changed_text.encode()})(folder)

    return setup


def weights_file(change: Callable[[bytes], bytes]) -> Setup:
    def setup(folder: Path) -> None:
        members = nemo_members()
        nemo({**members, "model_weights.ckpt": change(members["model_weights.ckpt"])})(folder)

    return setup


def _recompressed(data: bytes, *, bomb: bool = False) -> bytes:
    """The same archive, deflated; with a member of 1 GB of zeros, if asked for."""
    out = io.BytesIO()
    with zipfile.ZipFile(io.BytesIO(data)) as old, zipfile.ZipFile(out, "w", zipfile.ZIP_DEFLATED) as new:
        for info in old.infolist():
            name = info.filename
            if bomb and name.endswith("/data/0"):
                with new.open(name, "w", force_zip64=True) as file:
                    for _ in range(1024):
                        file.write(bytes(1 << 20))
            else:
                new.writestr(name, old.read(info))
    return out.getvalue()


def _with_pickle(data: bytes, pickled: bytes) -> bytes:
    out = io.BytesIO()
    with zipfile.ZipFile(io.BytesIO(data)) as old, zipfile.ZipFile(out, "w") as new:
        for info in old.infolist():
            new.writestr(info.filename, pickled if info.filename.endswith("data.pkl") else old.read(info))
    return out.getvalue()


def _claim(data: bytes) -> bytes:
    """The archive's directory claims members of 4 GB."""
    at = data.rfind(b"PK\1\2")
    return patched(data, at + 20, b"\xf0\xff\xff\xff\xf0\xff\xff\xff")


LFS = always(b"version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 7\n")
COMMAND = b"a: !!python/object/apply:os.system ['touch ../pwned']"


def any_file(suffix: str) -> tuple[dict[str, Setup], dict[str, Setup]]:
    """Damage to any kind of file: what must be refused, and what may turn out to be harmless."""
    source = f"model.{suffix}"
    bad = {
        "a git-lfs pointer": copied(source, LFS),
        "a pickle that runs a command": copied(source, always(EVIL)),
        "zeros": copied(source, zeros),
        **{f"cut to {share:.0%}": copied(source, cut(share)) for share in (0, 0.01, 0.3, 0.6, 0.9)},
    }
    harmless = {
        "undamaged": copied(source, bytes),
        "one byte short": copied(source, lambda data: data[:-1]),
        "gzip": copied(source, gzip.compress),
        "trailing garbage": copied(source, lambda data: data + b"x" * 999),
        **{
            f"bit flipped at {share:.0%}": copied(source, flipped(share))
            for share in (0, 0.02, 0.1, 0.3, 0.5, 0.7, 0.9, 0.98, 1)
        },
    }
    return bad, harmless


def nemo_files() -> tuple[dict[str, Setup], dict[str, Setup]]:
    whole = nemo_members()
    weights, config = ({name: whole[name]} for name in ("model_weights.ckpt", "model_config.yaml"))
    weights_name, config_name = "model_weights.ckpt", "model_config.yaml"
    outside = str(Fixture.path / "model.ckpt")
    bad = {
        "without a configuration": nemo(weights),
        "without weights": nemo(config),
        "nothing in it": nemo({}),
        "a link as configuration": nemo(weights, special(config_name, tarfile.SYMTYPE, "/etc/passwd")),
        "a link as weights": nemo(config, special(weights_name, tarfile.SYMTYPE, outside)),
        "a hard link as weights": nemo(config, special(weights_name, tarfile.LNKTYPE, "/etc/passwd")),
        "a FIFO as weights": nemo(config, special(weights_name, tarfile.FIFOTYPE)),
        "a device as configuration": nemo(weights, special(config_name, tarfile.CHRTYPE)),
        "a folder as weights": nemo(config, special(weights_name, tarfile.DIRTYPE)),
        "an empty configuration": nemo({**weights, config_name: b""}),
        "a configuration in binary": nemo({**weights, config_name: bytes(range(256))}),
        "a configuration with an object": nemo({**weights, config_name: COMMAND}),
        "a configuration with anchors that multiply": nemo({**weights, config_name: ANCHORS}),
        "a configuration with 5,000 brackets": nemo({**weights, config_name: b"a: " + b"[" * 5000}),
        "an interpolation of the environment": yaml(r"num_classes: .*", "num_classes: ${oc.env:HOME}"),
        "a target that is a command": yaml(r"_target_: .*ConformerEncoder", "_target_: os.system"),
        "a d_model of 10^7": yaml(r"d_model: 32", "d_model: 10000000"),
        "a d_model of 33": yaml(r"d_model: 32", "d_model: 33"),
        "a d_model that is text": yaml(r"d_model: 32", 'd_model: "\\\\e[31mred"'),
        "a million layers": yaml(r"n_layers: 2", "n_layers: 1000000"),
        "three layers": yaml(r"n_layers: 2", "n_layers: 3"),
        "one layer": yaml(r"n_layers: 2", "n_layers: 1"),
        "a million books": yaml(r"num_books: 1", "num_books: 1000000"),
        "no sample rate": yaml(r"^  sample_rate: .*$", "  sample_rate: null"),
        "weights that run a command": weights_file(always(EVIL)),
        "an archive that runs a command": weights_file(lambda data: _with_pickle(data, EVIL)),
        "a pickle of garbage": weights_file(lambda data: _with_pickle(data, b"\x80\x02garbage")),
        "a pickle that never ends": weights_file(lambda data: _with_pickle(data, b"\x80\x02" + b"(" * 1_000_000)),
        "1 GB of zeros, deflated": weights_file(lambda data: _recompressed(data, bomb=True)),
        "members that claim 4 GB": weights_file(_claim),
        "weights cut off": weights_file(lambda data: data[:-500]),
    }
    harmless = {
        "paths that leave it": nemo({"../../pwned": b"x", "../pwned": b"x", **whole}),
        "an absolute path": nemo({"/tmp/nest-ssl-pwned": b"x", **whole}),
        "weights at a path that leaves it": nemo({f"../{weights_name}": whole[weights_name], **config}),
        "a thousand members": nemo({**{f"{i}.txt": b"x" for i in range(1000)}, **whole}),
        "names with escape codes": nemo({"\x1b[31mred\x07": b"x", **whole}),
        "gzip inside": nemo(whole, mode="w:gz"),
        "a configuration of 50 MB": nemo(
            {**weights, config_name: b"# " + b"x" * 50_000_000 + b"\n" + config[config_name]}
        ),
        "a deflated archive": weights_file(_recompressed),
    }
    return bad, harmless


def one_element(value: float) -> Callable[[torch.Tensor], torch.Tensor]:
    return lambda x: x.index_put((torch.tensor(0), torch.tensor(0)), torch.tensor(value))


def ckpt_files() -> tuple[dict[str, Setup], dict[str, Setup]]:
    bad: dict[str, Callable[[dict[str, Any]], object]] = {
        "a NaN": _weights(one_element(math.nan)),
        "an infinity": _weights(one_element(-math.inf)),
        "int8": _weights(lambda x: x.to(torch.int8)),
        "int64": _weights(lambda x: x.to(torch.int64)),
        "bool": _weights(lambda x: x > 0),
        "complex": _weights(lambda x: x.to(torch.complex64)),
        "sparse": _weights(lambda x: x.to_sparse()),
        "on the meta device": _weights(lambda x: x.to("meta")),
        "a scalar": _weights(lambda x: x.sum()),
        "another shape, same size": _weights(lambda x: x.T.contiguous()),
        "expanded from one number": _weights(lambda x: x[:1, :1].expand(x.shape[0], 10**9)),
        "a missing tensor": lambda content: content["state_dict"].popitem() and None,
        "a tensor too many": _set("state_dict", "encoder.extra", torch.zeros(3)),
        "a name with escape codes": _set("state_dict", "encoder.\x1b[31mred\x07", torch.zeros(3)),
        "a name that is a number": _set("state_dict", 7, torch.zeros(3)),
        "a tensor that is text": _set("state_dict", "encoder.layers.0.norm_out.bias", "x"),
        "no weights": _store("state_dict", {}),
        "weights as a list": _store("state_dict", [torch.zeros(3)]),
        "no configuration": _drop("hyper_parameters"),
        "a configuration that is text": _store("hyper_parameters", "x"),
        "a configuration of another class": _store("hyper_parameters", {"cfg": {"vocab_size": 3}}),
        "weights alone": lambda content: content["state_dict"],
        "a list": lambda content: [1],
        "None": lambda content: {"state_dict": None},
    }
    harmless = {"float64": _weights(lambda x: x.double())}
    return {name: saved(change) for name, change in bad.items()}, {
        name: saved(change) for name, change in harmless.items()
    }


def safetensors_files() -> tuple[dict[str, Setup], dict[str, Setup]]:
    def entry(**changes: Any) -> Setup:
        return safetensors(lambda content: _entry(content).update(changes))

    bad = {
        "a header of 2^63 bytes": copied("model.safetensors", lambda data: b"\xff" * 7 + b"\x7f" + data[8:]),
        "an empty header": safetensors(lambda content: {}),
        "a header that is a list": safetensors(lambda content: [1]),
        "a header that is not JSON": safetensors(lambda content: b"{" * 50),
        "deep nesting": safetensors(lambda content: b'{"a":' * 100_000),
        "no metadata": safetensors(lambda content: content.pop("__metadata__") and None),
        "metadata that is a number": safetensors(lambda content: content.update(__metadata__=3)),
        "metadata with a number": safetensors(lambda content: content["__metadata__"].update(x=3)),
        "offsets outside the file": entry(data_offsets=[0, 10**12]),
        "offsets that go back": entry(data_offsets=[100, 0]),
        "offsets that overlap": entry(data_offsets=[0, 16384]),
        "a negative offset": entry(data_offsets=[-4, 0]),
        "a negative shape": entry(shape=[-1, 32]),
        "a huge shape": entry(shape=[2**40, 2**40]),
        "an unknown dtype": entry(dtype="F128"),
        "another dtype of this size": entry(dtype="I32"),
        "no dtype": safetensors(lambda content: _entry(content).pop("dtype") and None),
        "bytes missing at the end": safetensors(lambda content: None, lambda data: data[:-4]),
        "bytes too many at the end": safetensors(lambda content: None, lambda data: data + bytes(4)),
        "NaN without a checksum": safetensors(_no_checksum, lambda data: b"\xff" * 64 + data[64:]),
    }
    return bad, {"no checksum": safetensors(_no_checksum)}


def renamed(source: str, target: str) -> Setup:
    return lambda folder: shutil.copy(Fixture.path / source, folder / target)


def model_files() -> Iterator[tuple[str, str, Setup, bool]]:
    """The trial's name, the file, how it is made, and whether the features may still be right."""
    kinds = {"nemo": nemo_files(), "ckpt": ckpt_files(), "safetensors": safetensors_files()}
    for suffix, of_kind in kinds.items():
        for bad, harmless in (any_file(suffix), of_kind):
            for may, table in ((False, bad), (True, harmless)):
                for name, setup in table.items():
                    yield f"{suffix}: {name}", f"x.{suffix}", setup, may
    yield "a nemo file named ckpt", "x.ckpt", renamed("model.nemo", "x.ckpt"), True
    yield "a ckpt file named nemo", "x.nemo", renamed("model.ckpt", "x.nemo"), True
    yield "a safetensors file named nemo", "x.nemo", renamed("model.safetensors", "x.nemo"), True


def hostile_models() -> Iterator[Trial]:
    group = "model files"
    for name, file, setup, may in model_files():
        refused = Refused((file,))
        expected: Expected = Either(refused, Right(same_features)) if may else refused
        command = ["extract", file, "audio/0.wav", "out", "--device", "cpu"]
        yield Trial(group, f"extract {name}", command, expected, setup)
    for i, (name, file, setup, may) in enumerate(model_files()):
        told: Expected = Either(Refused((file,)), Right(ended_well))
        others: list[tuple[str, list[str], Expected]] = [
            ("info", ["info", file], told),
            ("export", ["export", file, "new.nemo", "--format", "nemo"], told if may else Refused((file,))),
            (
                "start from",
                pretrain(f"+init_from_{'ptl_ckpt' if file.endswith('ckpt') else 'nemo_model'}={file}"),
                Either(Refused((file,)), Right(trained)),
            ),
        ]
        verb, command, expected = others[i % 3]
        yield Trial(group, f"{verb} {name}", command, expected, setup)


# ---------------------------------------------------------------------------------------------------------------- names

ODD_NAMES: dict[str, str] = {
    "spaces": "my own run",
    "a leading space": " run",
    "a trailing space": "run ",
    "a newline": "a\nb",
    "a tab": "a\tb",
    "an escape code": "\x1b[31mred\x1b[0m",
    "a title and a bell": "\x1b]0;evil\x07",
    "a C1 code": "a\x9b31mb",
    "right-to-left override": "a\u202etxt.exe",
    "emoji": "😀🎙️",
    "Chinese": "语音预训练",
    "combining marks": "e\u0301" * 20,
    "a lone surrogate": "a\udcffb",
    "quotes": 'it\'s "so"',
    "a backslash": "a\\b",
    "a dollar and braces": "${x}{val_loss}",
    "percent signs": "100%s%d",
    "an equals sign": "a=b",
    "a comma": "a,b",
    "brackets": "[a](b){c}",
    "a hash": "a#b",
    "a leading dash": "-rf",
    "HTML": "<script>alert(1)</script>",
    "an ampersand": "a&amp;b",
    "255 bytes": "x" * 255,
    "256 bytes": "x" * 256,
    "5000 bytes": "x" * 5000,
    "200 wide letters": "语" * 200,
    "a dot": ".",
    "two dots": "..",
    "a slash": "a/b",
    "up and out": "../../out",
    "a leading slash": "/abs",
    "a hidden name": ".hidden",
    "a reserved name": "checkpoints",
    "a tilde": "~",
    "a glob": "*?",
    "a number": "007",
    "null": "null",
    "true": "true",
}


def quoted(value: str) -> str:
    """A value as Hydra reads it."""
    return "'" + value.replace("\\", "\\\\").replace("'", "\\'") + "'"


def named_run(name: str) -> Check:
    """The run is in one folder below `runs`, and its pages have no markup from the name."""

    def check(folder: Path, outcome: Outcome) -> str | None:
        run = only_run(folder)
        if run.parent != folder / "runs" and "/" not in name:
            return f"the run is in {run.relative_to(folder)}"
        page = run / "report.html"
        if page.exists() and "<script>alert(1)" in page.read_text():
            return "the report has a script from the name"
        return trained(folder, outcome)

    return check


def _no_script(page: str) -> Check:
    def check(folder: Path, outcome: Outcome) -> str | None:
        if not (folder / page).exists():
            return f"no {page}"
        return "a script from a text" if "<script>alert(1)" in (folder / page).read_text() else None

    return check


def _named_data(name: str) -> Setup:
    def setup(folder: Path) -> None:
        place = folder / "data" / name
        place.mkdir(parents=True)
        shutil.copytree(folder / "audio", place / "audio")
        shutil.copy(folder / "train.jsonl", place / "m.jsonl")
        shutil.copy(Fixture.path / "model.nemo", place / "m.nemo")

    return setup


def names() -> Iterator[Trial]:
    group = "names"
    for what, name in ODD_NAMES.items():
        expected = Either(Refused(("exp_manager.name|name",)), Right(named_run(name)))
        yield Trial(group, f"a run named with {what}", pretrain(f"exp_manager.name={quoted(name)}"), expected)
        if "/" in name or len(os.fsencode(name)) > 255 or name in {".", "..", "~"}:
            continue
        place = f"data/{name}"
        expected = Either(Refused(("manifest_filepath|m.jsonl|data/a|character|name",)), Right(trained))
        command = pretrain(f"model.train_ds.manifest_filepath={quoted(place + '/m.jsonl')}")
        yield Trial(group, f"a manifest in a folder with {what}", command, expected, _named_data(name))
        command = ["extract", f"{place}/m.nemo", f"{place}/audio/0.wav", f"{place}/out", "--device", "cpu"]

        def there(folder: Path, outcome: Outcome, place: str = place) -> str | None:
            return None if list((folder / place / "out").rglob("*.npy")) else "no features"

        expected = Either(Refused(("m.nemo|0.wav|name|character",)), Right(there))
        yield Trial(group, f"extract in a folder with {what}", command, expected, _named_data(name))
        command = ["prepare", f"{place}/audio", "--output", f"{place}/new.jsonl", "--workers", "0"]

        def eight(folder: Path, outcome: Outcome, place: str = place) -> str | None:
            count = len((folder / place / "new.jsonl").read_bytes().splitlines())
            return None if count == 8 else f"{count} lines"

        expected = Either(Refused(("audio|name|character",)), Right(eight))
        yield Trial(group, f"prepare in a folder with {what}", command, expected, _named_data(name))
    texts = {"HTML": "<script>alert(1)</script>", "escape codes": "\x1b[31mred\x07", "10,000 letters": "x" * 10_000}
    for what, text in texts.items():

        def texted(folder: Path, text: str = text) -> None:
            lines = [json.loads(row) for row in (folder / "train.jsonl").read_text().splitlines()]
            write_lines(
                folder / "train.jsonl",
                [{**row, "text": text, "label": f"{text}{i % 2}", text: text} for i, row in enumerate(lines)],
            )

        command = ["inspect", "train.jsonl", "--batch-size", "2"]
        yield Trial(group, f"inspect texts with {what}", command, Right(_no_script("inspect.html")), texted)
        probe = ["probe", f"{Fixture.path}/model.nemo", "--train", "train.jsonl", "--test", "train.jsonl"]
        command = [*probe, "--label", "label", "--output", "probed", "--device", "cpu"]
        yield Trial(group, f"probe labels with {what}", command, Right(_no_script("probed/confusion.svg")), texted)
        command = [*probe, "--label", f"no {text}", "--output", "probed"]
        yield Trial(group, f"probe a label that is {what}", command, Refused(("label",)), texted)
        command = ["prepare", "train.jsonl", "--output", "new.jsonl", "--workers", "0"]
        yield Trial(group, f"prepare texts with {what}", command, Right(ended_well), texted)
    for command in (
        ["report", "\x1b[31mnowhere"],
        ["doctor", "\x1b[31mnowhere"],
        ["info", "\x1b[31mnowhere"],
        ["info", "x" * 5000],
        ["prepare", "\x1b[31mnowhere", "--output", "m.jsonl"],
        ["inspect", "\x1b[31mnowhere.jsonl"],
        ["extract", "\x1b[31mx.nemo", "audio/0.wav", "out"],
        ["export", "\x1b[31mx.nemo", "out"],
        ["verify", "\x1b[31mx.nemo"],
        ["\x1b[31mcommand"],
        ["pretrain", "\x1b[31mkey=1"],
        ["pretrain", "--config-name", "\x1b[31mname"],
        ["prepare", "audio", "--output", "audio"],
        ["prepare", "audio", "--output", "nowhere/deep/m.jsonl", "--workers", "0"],
        ["prepare", "audio", "--output", "m.jsonl", "--split", "\x1b[31mx"],
        ["prepare", "audio", "--output", "m.jsonl", "--job", "\x1b[31m1/x"],
        ["extract", f"{Fixture.path}/model.nemo", "audio/0.wav", "train.jsonl"],
        ["extract", f"{Fixture.path}/model.nemo", "audio/0.wav", "out", "--layers", "\x1b[31m9"],
        ["extract", f"{Fixture.path}/model.nemo", "audio/0.wav", "out", "--layers", "99"],
        ["extract", f"{Fixture.path}/model.nemo", "audio/0.wav", "out", "--device", "\x1b[31mx"],
        [
            "extract",
            f"{Fixture.path}/model.nemo",
            "audio/0.wav",
            "out",
            "--aggregation",
            "weighted",
            "--weights",
            "nan,1",
        ],
        ["export", f"{Fixture.path}/model.nemo", "train.jsonl/x", "--format", "nemo"],
    ):
        name = repr(" ".join(argument.replace(str(Fixture.path), "…") for argument in command))[:80]
        expected = Either(Refused(()), Right(ended_well))
        yield Trial(group, f"command {name}", command, expected)


# ---------------------------------------------------------------------------------------------------------- environment


def variables() -> dict[str, tuple[dict[str, str | None], Expected]]:
    fine = Right(trained)
    return {
        "no HOME": ({"HOME": None}, fine),
        "HOME is missing": ({"HOME": "/nonexistent"}, fine),
        "HOME is a file": ({"HOME": "/etc/passwd"}, fine),
        "HOME is empty": ({"HOME": ""}, fine),
        "TMPDIR is missing": ({"TMPDIR": "/nonexistent"}, fine),
        "LANG=C": ({"LANG": "C", "LC_ALL": "C"}, fine),
        "an unknown locale": ({"LC_ALL": "xx_YY.UTF-99"}, fine),
        "POSIX without UTF-8 mode": ({"LC_ALL": "POSIX", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"}, fine),
        "PYTHONIOENCODING=ascii": ({"PYTHONIOENCODING": "ascii"}, fine),
        "PYTHONIOENCODING=latin-1": ({"PYTHONIOENCODING": "latin-1"}, fine),
        "PYTHONWARNINGS=error": ({"PYTHONWARNINGS": "error"}, fine),
        "PYTHONOPTIMIZE=2": ({"PYTHONOPTIMIZE": "2"}, fine),
        "PYTHONHASHSEED=7": ({"PYTHONHASHSEED": "7"}, fine),
        "PYTHONUNBUFFERED": ({"PYTHONUNBUFFERED": "1"}, fine),
        "TZ is unknown": ({"TZ": "Nowhere/Land"}, fine),
        "COLUMNS=0": ({"COLUMNS": "0", "LINES": "0"}, fine),
        "COLUMNS=abc": ({"COLUMNS": "abc"}, fine),
        "COLUMNS=1": ({"COLUMNS": "1"}, fine),
        "TERM=dumb": ({"TERM": "dumb"}, fine),
        "no TERM": ({"TERM": None}, fine),
        "NO_COLOR": ({"NO_COLOR": "1"}, fine),
        "PATH is empty": ({"PATH": ""}, fine),
        "GIT_DIR is missing": ({"GIT_DIR": "/nonexistent"}, fine),
        "OMP_NUM_THREADS=abc": ({"OMP_NUM_THREADS": "abc"}, fine),
        "OMP_NUM_THREADS=0": ({"OMP_NUM_THREADS": "0"}, fine),
        "OMP_NUM_THREADS=-1": ({"OMP_NUM_THREADS": "-1"}, fine),
        "CUDA_VISIBLE_DEVICES=abc": ({"CUDA_VISIBLE_DEVICES": "abc"}, fine),
        "HYDRA_FULL_ERROR=1": ({"HYDRA_FULL_ERROR": "1"}, fine),
        "TORCH_LOGS=all": ({"TORCH_LOGS": "+dynamo"}, fine),
        "NEST_SSL_CACHE_DIR is a file": ({"NEST_SSL_CACHE_DIR": "/etc/passwd"}, fine),
        "RANK=abc": ({"RANK": "abc", "WORLD_SIZE": "1"}, Either(Refused(("RANK",)), fine)),
        "RANK=-1": ({"RANK": "-1", "WORLD_SIZE": "1", "LOCAL_RANK": "0"}, Either(Refused(("RANK",)), fine)),
        "RANK=5 of 2": ({"RANK": "5", "WORLD_SIZE": "2", "LOCAL_RANK": "0"}, Refused(("RANK|WORLD_SIZE|devices",))),
        "WORLD_SIZE=0": ({"RANK": "0", "WORLD_SIZE": "0", "LOCAL_RANK": "0"}, Either(Refused(("WORLD_SIZE",)), fine)),
        "WORLD_SIZE=abc": ({"RANK": "0", "WORLD_SIZE": "abc"}, Either(Refused(("WORLD_SIZE",)), fine)),
        "LOCAL_RANK=abc": ({"LOCAL_RANK": "abc"}, Either(Refused(("LOCAL_RANK",)), fine)),
        "MASTER_PORT=abc": ({"MASTER_PORT": "abc"}, Either(Refused(("MASTER_PORT",)), fine)),
        "SLURM_NTASKS=abc": ({"SLURM_JOB_ID": "1", "SLURM_NTASKS": "abc"}, Either(Refused(("SLURM",)), fine)),
        "SLURM half set": ({"SLURM_JOB_ID": "1", "SLURM_PROCID": "0"}, Either(Refused(("SLURM",)), fine)),
        "SLURM_PROCID=-3": (
            {"SLURM_JOB_ID": "1", "SLURM_NTASKS": "1", "SLURM_PROCID": "-3"},
            Either(Refused(("SLURM",)), fine),
        ),
    }


TWO_RANKS: dict[str, tuple[dict[str, str | None], Expected]] = {
    "MASTER_PORT=99999, two ranks": ({"MASTER_PORT": "99999"}, Either(Refused(("MASTER_PORT",)), Right(trained))),
    "MASTER_PORT=1.5, two ranks": ({"MASTER_PORT": "1.5"}, Either(Refused(("MASTER_PORT",)), Right(trained))),
    "MASTER_ADDR is empty, two ranks": ({"MASTER_ADDR": ""}, Either(Refused(("MASTER_ADDR",)), Right(trained))),
    "no HOME, two ranks": ({"HOME": None}, Right(trained)),
    "GLOO_SOCKET_IFNAME is unknown, two ranks": (
        {"GLOO_SOCKET_IFNAME": "nope0"},
        Either(Refused(("GLOO_SOCKET_IFNAME|nope0",), partial=True), Right(trained)),
    ),
}
PIPED = "exec > >(cat) 2> >(cat >&2)"
"""The files that hold the output of a trial are not what its limits are about."""

SHELLS: dict[str, tuple[str, Expected]] = {
    "stdin closed": ('"$@" <&-', Right(trained)),
    "stdout closed": ('"$@" >&-', Right(trained)),
    "stderr closed": ('"$@" 2>&-', Right(trained)),
    "all three closed": ('"$@" <&- >&- 2>&-', Right(trained)),
    "stdout is full": ('"$@" >/dev/full', Right(trained)),
    "stderr is full": ('"$@" 2>/dev/full', Right(trained)),
    "both are full": ('"$@" >/dev/full 2>&1', Right(trained)),
    "stdout is a pipe that closes": ('set -o pipefail; "$@" | head -c 1 >/dev/null', Right(trained)),
    "both are a pipe that closes": ('set -o pipefail; "$@" 2>&1 | head -c 1 >/dev/null', Right(trained)),
    "stdin is endless": ('"$@" </dev/zero', Right(trained)),
    "the folder is removed": (
        'mkdir gone; cd gone; rmdir ../gone; "$@"',
        Either(Refused(("folder|directory|manifest",)), Right(trained)),
    ),
    "umask 777": (
        'umask 777; "$@"; code=$?; chmod -R u+rwX runs; exit $code',
        Either(Refused(("runs|denied",), partial=True), Right(trained)),
    ),
    "umask 0": ('umask 0; "$@"', Right(trained)),
    "16 open files": (
        'ulimit -n 16; "$@"',
        Either(Refused(("open files|ulimit|Too many",), partial=True), Right(trained)),
    ),
    "24 open files": (
        'ulimit -n 24; "$@"',
        Either(Refused(("open files|ulimit|Too many",), partial=True), Right(trained)),
    ),
    "40 open files": ('ulimit -n 40; "$@"', Right(trained)),
    "files of 0 bytes": (f'{PIPED}; ulimit -f 0; "$@"', Refused(("large|ulimit|written|space",), partial=True)),
    "files of 10 kB": (f'{PIPED}; ulimit -f 10; "$@"', Refused(("large|ulimit|written|space",), partial=True)),
    "files of 300 kB": (
        f'{PIPED}; ulimit -f 300; "$@"',
        Either(Refused(("large|ulimit|written|space",), partial=True), Right(trained)),
    ),
    "memory of 3 GB": ('ulimit -v 3000000; "$@"', Right(trained)),
    "a stack of 256 kB": ('ulimit -s 256; "$@"', Right(trained)),
    "no core files": ('ulimit -c 0; "$@"', Right(trained)),
    "no locked memory": ('ulimit -l 0; "$@"', Right(trained)),
    "nice 19": ('nice -n 19 "$@"', Right(trained)),
    "SIGTERM ignored": ("trap '' TERM; \"$@\"", Right(trained)),
    "SIGINT and SIGHUP ignored": ("trap '' INT HUP; \"$@\"", Right(trained)),
    "SIGCHLD ignored": ("trap '' CHLD; \"$@\"", Right(trained)),
}
ROOT_SHELLS: dict[str, tuple[str, Expected]] = {
    "a disk of 100 kB": (
        'mkdir runs; mount -t tmpfs -o size=100k none runs; "$@"',
        Refused(("space|full",), partial=True),
    ),
    "a disk of 900 kB": (
        'mkdir runs; mount -t tmpfs -o size=900k none runs; "$@"',
        Either(Refused(("space|full",), partial=True), Right(ended_well)),
    ),
    "a disk of 4 inodes": (
        'mkdir runs; mount -t tmpfs -o nr_inodes=4 none runs; "$@"',
        Either(Refused(("space|full|written",), partial=True), Right(ended_well)),
    ),
    "a disk of 9 inodes": (
        'mkdir runs; mount -t tmpfs -o nr_inodes=9 none runs; "$@"',
        Either(Refused(("space|full|written",), partial=True), Right(ended_well)),
    ),
    "runs is read-only": ('mkdir runs; mount -t tmpfs -o ro none runs; "$@"', Refused(("read-only|written",))),
    "the data is read-only": (
        'mkdir runs; mount --bind . .; mount -o remount,ro,bind $PWD; mount -t tmpfs none $PWD/runs; cd "$PWD"; "$@"',
        Right(ended_well),
    ),
    "TMPDIR is full": (
        'mount -t tmpfs -o size=4k none $TMPDIR; head -c 9999 /dev/zero >$TMPDIR/x 2>/dev/null; "$@"',
        Right(trained),
    ),
    "no /dev/shm": ('mount -t tmpfs -o size=4k none /dev/shm; "$@"', Right(trained)),
    "no /dev/shm, two workers": (
        'mount -t tmpfs -o size=4k none /dev/shm; "$@" model.train_ds.num_workers=2',
        Either(Refused(("shm|shared memory",), partial=True, codes=(1, 75)), Right(trained)),
    ),
    "no /proc": ('mount -t tmpfs none /proc; "$@"', Right(trained)),
    "no network": ('unshare -n -- "$@"', Right(trained)),
    "no network, two ranks": (
        'unshare -n -- "$@" trainer.devices=2',
        Either(Refused(("network|address|interface|127",), partial=True), Right(trained)),
    ),
    "an unknown host name": ('unshare -u -- bash -c \'hostname nowhere.invalid; exec "$@"\' bash "$@"', Right(trained)),
    "an unknown host name, two ranks": (
        'unshare -u -- bash -c \'hostname nowhere.invalid; exec "$@"\' bash "$@" trainer.devices=2',
        Right(trained),
    ),
    "another user": (
        'chmod -R a+rwX .. ; setpriv --reuid 65534 --regid 65534 --clear-groups "$@"',
        Either(Refused(("denied|written",)), Right(trained)),
    ),
    "another user, data not writable": (
        'mkdir -m 777 runs; setpriv --reuid 65534 --regid 65534 --clear-groups "$@"',
        Either(Refused(("NEST_SSL_CACHE_DIR",)), Right(trained)),
    ),
    "another user, data not readable": (
        "chmod 0 audio/3.wav; mkdir -m 777 runs; export NEST_SSL_CACHE_DIR=$PWD/runs; "
        'setpriv --reuid 65534 --regid 65534 --clear-groups "$@"',
        Right(said("bad")),
    ),
    "another user, manifest not readable": (
        'chmod 0 train.jsonl; mkdir -m 777 runs; setpriv --reuid 65534 --regid 65534 --clear-groups "$@"',
        Refused(("train.jsonl",)),
    ),
}


def environments() -> Iterator[Trial]:
    group = "environment"
    for name, (changes, expected) in variables().items():
        yield Trial(group, name, pretrain(), expected, environment=changes, own_process=True)
    for name, (changes, expected) in TWO_RANKS.items():
        yield Trial(
            group, name, pretrain("trainer.devices=2"), expected, environment=changes, own_process=True, limit_s=120
        )
    for name, (shell, expected) in SHELLS.items():
        yield Trial(group, name, pretrain(), expected, shell=shell)
    if os.geteuid() == 0:
        for name, (shell, expected) in ROOT_SHELLS.items():
            # The mounts are seen by this program alone; what it wrote is copied out for the checks.
            private = f"{shell}; code=$?; cp -r runs runs_seen 2>/dev/null; exit $code"
            inner = "unshare -m -- bash -c " + _quote(private) + ' bash "$@"; code=$?; '
            inner += "[ -d runs_seen ] && rm -rf runs && mv runs_seen runs; exit $code"
            yield Trial(group, name, pretrain(), expected, shell=inner, limit_s=120)


def _quote(text: str) -> str:
    return "'" + text.replace("'", "'\\''") + "'"


# ----------------------------------------------------------------------------------------------------------------- main


def trials() -> list[Trial]:
    tables = (configurations, manifests, audio, kills, checkpoints, hostile_models, names, environments)
    return [trial for table in tables for trial in table()]


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


def main(make: Callable[[], list[Trial]] = trials, about: str | None = __doc__) -> None:
    """Run the trials that `make` returns; it is called when there is a fixture."""
    parser = argparse.ArgumentParser(description=about, formatter_class=argparse.RawDescriptionHelpFormatter)
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


if __name__ == "__main__":
    main()
