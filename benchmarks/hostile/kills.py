"""Signals to the program, its ranks, loader workers and monitor; then the same command must give an undisturbed result.

Exit codes are those of docs/several-gpus.md ("Stopping and resuming") and docs/faults.md; that an interrupted command
continues is promised by docs/run-folder.md (pretrain), prepare.md and extract.md.
"""

from __future__ import annotations

import csv
import json
import os
import shutil
import signal
import subprocess
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from benchmarks.hostile.harness import (
    HUP,
    INT,
    KILL,
    RUN,
    TERM,
    USR1,
    Fixture,
    Kill,
    Right,
    Setup,
    Trial,
    both,
    descendants,
    ended_well,
    in_process,
    is_seen,
    killed,
    output_of,
    resume,
    start,
    write_lines,
)
from safetensors import safe_open

Act = Callable[[Path, list[str]], "str | None"]
Read = Callable[[Path], dict[str, Any]]
"""Reads the results of a command from the trial's folder, by name."""

STOP, CONT, SEGV = signal.SIGSTOP, signal.SIGCONT, signal.SIGSEGV
TRAINING = ("train_loss", "accuracy", "mask_rate", "learning_rate", "train_loss_epoch")
LONG = "model.validation_ds.manifest_filepath=long.jsonl"
SAVES = "exp_manager.checkpoint_callback_params.every_n_train_steps=1"
WORKERS = "model.train_ds.num_workers=2"


# ------------------------------------------------------------------------------------------------------------- training


def metrics(run: Path, columns: tuple[str, ...]) -> list[list[str]]:
    """The rows of metrics.csv that have one of these columns; a row that is there twice shows."""
    with (run / "metrics.csv").open(newline="") as file:
        found = [[row["step"], *(row.get(column) or "" for column in columns)] for row in csv.DictReader(file)]
    return [row for row in found if any(row[1:])]


def whole(act: Act, ranks: int, columns: tuple[str, ...]) -> Act:
    """After `act`, everything that the run leaves is what the undisturbed one left."""

    def check(folder: Path, command: list[str]) -> str | None:
        if wrong := act(folder, command):
            return wrong
        run, name = folder / RUN, "whole" if ranks == 1 else "two_ranks"
        reference = Fixture.path / "runs" / name
        if metrics(run, columns) != metrics(reference, columns):
            return "metrics.csv differs from that of the undisturbed run"
        weights, expected = (
            torch.load(path / "checkpoints/last.ckpt", weights_only=True)["state_dict"] for path in (run, reference)
        )
        if weights.keys() != expected.keys() or not all(torch.equal(weights[key], expected[key]) for key in expected):
            return "weights differ from those of the undisturbed run"
        missing = [name for name in ("checkpoints/run.nemo", "report.html") if not (run / name).is_file()]
        return f"not written at the end: {missing}" if missing else None

    return check


def long_validation(folder: Path) -> None:
    """A validation of many batches, to be killed in; it does not change what is trained."""
    write_lines(folder / "long.jsonl", [json.loads(line) for line in (folder / "valid.jsonl").open()] * 20)


def again_and_again(folder: Path, command: list[str]) -> str | None:
    """Stop it at steps 1, 3, 5 and 7, in turn by SIGKILL and SIGTERM; then let it end."""
    for step, number in ((1, TERM), (3, KILL), (5, TERM), (7, KILL)):
        process = start(command, folder, {})
        begin = time.monotonic()
        while not is_seen(f"step {step}", folder / RUN, begin) and process.poll() is None:
            time.sleep(0.002)
        if process.poll() is None:
            process.send_signal(number)
        if process.wait(60) not in {75, -KILL}:
            return f"exit code {process.returncode} at step {step}: {output_of(folder)[-300:]}"
    again = in_process(command, folder, {}, 60)
    return None if again.code == 0 else f"cannot be resumed, exit code {again.code}: {again.message[-300:]}"


KILLS: tuple[tuple[str, Kill], ...] = (
    ("SIGTERM in a step", Kill((TERM,), "step 2")),
    ("Ctrl-C in a step, with loader workers", Kill((INT,), "step 2", "group", overrides=(WORKERS,))),
    ("Ctrl-C twice, two ranks", Kill((INT, INT), "step 2", "group", ranks=2)),
    ("SIGUSR1 to the launcher of two ranks", Kill((USR1,), "step 2", ranks=2)),
    ("SIGTERM while Python starts", Kill((TERM,), "second 0.5", codes=(75, -TERM))),
    ("Ctrl-C while torch is imported", Kill((INT,), "second 1.2", "group", codes=(75, 130, -INT))),
    ("SIGTERM before the first step, two ranks", Kill((TERM,), "start", ranks=2)),
    ("SIGKILL while it saves", Kill((KILL,), "file checkpoints/*tmp*", codes=(-KILL,), overrides=(SAVES,))),
    ("SIGTERM in a validation", Kill((TERM,), "file checkpoints/last.ckpt", overrides=(LONG,))),
    (
        "SIGKILL to a rank in a validation",
        Kill((KILL,), "file checkpoints/last.ckpt", "rank 1", ranks=2, overrides=(LONG,)),
    ),
    ("SIGKILL at the end", Kill((KILL,), "file checkpoints/run.nemo", codes=(-KILL,), continued=True)),
    ("SIGTERM at the end", Kill((TERM,), "file checkpoints/run.nemo", codes=(0,))),
    ("a rank is stopped", Kill((STOP,), "step 2", "rank 1", ranks=2, overrides=("watchdog.floor_s=3",))),
    (
        "a rank crashes, and is restarted",
        Kill((SEGV,), "step 2", "rank 1", ranks=2, codes=(0,), overrides=("launch.max_restarts=1",)),
    ),
    ("SIGKILL to a loader worker", Kill((KILL,), "step 1", "worker", overrides=("model.train_ds.num_workers=1",))),
    ("SIGKILL to the monitor", Kill((KILL,), "step 1", "monitor", ranks=2, codes=(0,))),
    ("SIGKILL to the launcher of two ranks", Kill((KILL,), "step 2", ranks=2, codes=(-KILL,))),
    ("the terminal is closed, two ranks", Kill((HUP,), "step 2", "group", ranks=2, codes=(75, -HUP, 128 + HUP))),
    ("suspended and continued, two ranks", Kill((STOP, CONT), "step 2", "group", ranks=2, codes=(0,))),
)


def of_training() -> list[Trial]:
    found = []
    for name, kill in KILLS:
        is_long = LONG in kill.overrides
        columns = TRAINING if is_long else (*TRAINING, "val_loss", "val_accuracy")
        command = resume(*kill.overrides, f"trainer.devices={kill.ranks}")
        act = whole(killed(kill), kill.ranks, columns)
        setup = long_validation if is_long else None
        found.append(Trial("kills", name, command, Right(ended_well), setup, act=act))
    act = whole(again_and_again, 1, (*TRAINING, "val_loss", "val_accuracy"))
    return [*found, Trial("kills", "stopped again and again", resume(), Right(ended_well), act=act)]


# ------------------------------------------------------------------------------------------------------- other commands


@dataclass(frozen=True)
class Stop:
    """A signal for a command other than pretrain, once something is seen; and how its results are read."""

    number: signal.Signals
    seen: str  # as in `Kill`; patterns start at the trial's folder
    read: Read
    to: str = "main"  # main, group, child: the youngest process below it
    whole_files: bool = False  # a file that is there after the signal must be complete


def same(one: object, other: object) -> bool:
    if isinstance(one, np.ndarray) and isinstance(other, np.ndarray):
        return one.shape == other.shape and np.allclose(one, other, atol=1e-4)
    return one == other


def different(found: dict[str, Any], expected: dict[str, Any]) -> list[str]:
    names = sorted(found.keys() | expected.keys())
    return [
        name for name in names if name not in found or name not in expected or not same(found[name], expected[name])
    ]


def stopped(stop: Stop) -> Act:
    """Start, send the signal, start again; compare with the same command in a folder without its results."""

    def act(folder: Path, command: list[str]) -> str | None:
        before = {path.name for path in folder.iterdir()}
        process = start(command, folder, {})
        begin = time.monotonic()
        while not is_seen(stop.seen, folder, begin) and process.poll() is None:
            time.sleep(0.001)
        below = descendants(process.pid)
        while stop.to == "child" and not below and process.poll() is None:
            below = descendants(process.pid)
        reached = process.poll() is None
        if reached and stop.to == "group":
            os.killpg(process.pid, stop.number)
        elif reached:
            os.kill(below[-1] if stop.to == "child" else process.pid, stop.number)
        try:
            code = process.wait(30)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, KILL)
            process.wait()
            return "does not end within 30 s of the signal"
        text = output_of(folder)
        if "Traceback (most recent call last)" in text:
            return f"a traceback after the signal (code {code}): {text[-300:]}"
        if not reached:
            return f"ended before the signal, exit code {code}: {text[-300:]}"
        if stop.to == "child" and code and "nest-ssl: " not in text:
            return f"exit code {code} without a word: {text[-300:]}"
        half = stop.read(folder) if stop.whole_files else {}
        again = in_process(command, folder, {}, 60)
        if again.left_running:
            return f"left running: {again.left_running[:2]}"
        if again.code != 0:
            return f"the same command ends with {again.code}: {again.text[-300:]}"
        found = stop.read(folder)
        left = [path.name for path in folder.rglob("*") if "tmp" in path.name or "partial" in path.name]
        for path in folder.iterdir():
            if path.name not in before:
                shutil.rmtree(path) if path.is_dir() else path.unlink()
        undisturbed = in_process(command, folder, {}, 60)
        if undisturbed.code != 0:
            return f"undisturbed, it ends with {undisturbed.code}: {undisturbed.text[-300:]}"
        expected = stop.read(folder)
        if cut := [name for name in half if name in expected and not same(half[name], expected[name])]:
            return f"half-written after the signal: {cut[:3]}"
        if wrong := different(found, expected):
            return f"differs from an undisturbed result: {wrong[:3]}"
        return f"half-written files are left: {left[:3]}" if left else None

    return act


def corpus(files: int) -> Setup:
    """A folder of many recordings, and labelled manifests of some of them."""

    def setup(folder: Path) -> None:
        (folder / "corpus").mkdir()
        for i in range(files):
            shutil.copy(folder / f"audio/{i % 8}.wav", folder / f"corpus/{i:03}.wav")
        lines = [
            {"audio_filepath": f"corpus/{i:03}.wav", "label": "low" if i % 8 < 4 else "high"} for i in range(files)
        ]
        write_lines(folder / "learn.jsonl", lines[: files // 2])
        write_lines(folder / "test.jsonl", lines[files // 2 :])

    return setup


def model(folder: Path) -> None:
    shutil.copy(Fixture.path / "model.nemo", folder)


def prepared(folder: Path) -> dict[str, Any]:
    """Manifests and shards, byte for byte."""
    files = [path for pattern in ("m*.jsonl", "*.tar", "**/*manifest*.json") for path in folder.glob(pattern)]
    return {str(path.relative_to(folder)): path.read_bytes() for path in files}


def extracted(folder: Path) -> dict[str, Any]:
    """The features of all utterances, and the keys of their lines."""
    from nest_ssl.extract.files import read_features

    found: dict[str, Any] = {}
    for text in (folder / "out/manifest.jsonl").open():
        line = json.loads(text)
        if line["audio_filepath"] in found:
            raise ValueError(f"{line['audio_filepath']} is there twice")
        found[line["audio_filepath"]] = np.asarray(read_features(folder / "out", line))
    return found


def arrays(folder: Path) -> dict[str, Any]:
    """What np.load reads from each file of features."""
    return {path.name: np.load(path) for path in (folder / "out").rglob("*.npy")}


def probed(folder: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((folder / "out/results.json").read_text())
    return found


def exported(folder: Path) -> dict[str, Any]:
    """Tensors and metadata, in whichever order they are written."""
    if not (folder / "out.safetensors").exists():
        return {}
    with safe_open(folder / "out.safetensors", "np") as file:
        names = file.keys()
        return {"metadata": file.metadata(), **{name: file.get_tensor(name) for name in names}}


PREPARE = ("prepare", "corpus", "--output", "m.jsonl", "--split", "hash", "--workers", "2")
EXTRACT = ("extract", "model.nemo", "corpus", "out", "--device", "cpu", "--batch-seconds", "4")
PROBE = ("probe", "model.nemo", "--train", "learn.jsonl", "--test", "test.jsonl", "--label", "label", "--output", "out")
EXPORT = ("export", "model.nemo", "out.safetensors", "--format", "safetensors")
OTHERS: tuple[tuple[str, tuple[str, ...], int, Stop], ...] = (
    ("prepare: SIGKILL while it measures", PREPARE, 600, Stop(KILL, "file m*.state", prepared)),
    ("prepare: Ctrl-C in its shards", (*PREPARE, "--shards", "40"), 400, Stop(INT, "file audio_*", prepared, "group")),
    ("prepare: SIGKILL to a worker", PREPARE, 600, Stop(KILL, "file m*.state", prepared, "child")),
    ("extract: SIGKILL", EXTRACT, 160, Stop(KILL, "file out/**/*.npy", arrays, whole_files=True)),
    (
        "extract: Ctrl-C in shards",
        (*EXTRACT, "--format", "shards", "--shard-mb", "0.1"),
        160,
        Stop(INT, "file out/**/shard-*", extracted, "group"),
    ),
    ("probe: SIGTERM", (*PROBE, "--device", "cpu"), 160, Stop(TERM, "second 4", probed)),
    ("export: SIGKILL while it writes", EXPORT, 8, Stop(KILL, "file *out.saf*", exported, whole_files=True)),
)


def trials() -> list[Trial]:
    others = [
        Trial("kills", name, command, Right(ended_well), both(corpus(files), model), act=stopped(stop))
        for name, command, files, stop in OTHERS
    ]
    return [*of_training(), *others]
