"""Signals and kills at all kinds of moments, and files that vanish under a running command.

After each of them the same command is given again: a training must end with the losses of an undisturbed run, bit for
bit, and every other command with the complete result that it would have had at once.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
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
    Setup,
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
    write_lines,
)

STOP, CONT, USR2, ALRM, PIPE, WINCH = (
    *(signal.SIGSTOP, signal.SIGCONT, signal.SIGUSR2),
    *(signal.SIGALRM, signal.SIGPIPE, signal.SIGWINCH),
)
Act = Callable[[Path, list[str]], "str | None"]

LONG = ("trainer.max_steps=60",)
SAVE_ALWAYS = ("exp_manager.checkpoint_callback_params.every_n_train_steps=1",)
WORKERS = ("model.train_ds.num_workers=2", "model.validation_ds.num_workers=1")
PATIENCE = 120.0
"""Seconds that a command may take to end after a signal, on a busy machine."""


# ------------------------------------------------------------------------------------------------- undisturbed results


def reference(folder: Path, name: str, *overrides: str) -> dict[int, str]:
    """The losses of an undisturbed run with these settings, made once."""
    run = Fixture.path / "runs" / name
    if not run.exists():
        box = folder.parent / f"undisturbed-{name}/folder"
        for path in (box, box.parent / "home", box.parent / "tmp"):
            path.mkdir(parents=True)
        Fixture.data(box)
        outcome = in_process(resume(*overrides), box, {}, 240)
        if outcome.code != 0:
            raise RuntimeError(f"no undisturbed run: {outcome.text[-500:]}")
        shutil.copytree(box / RUN, run)
        shutil.rmtree(box.parent)
    return losses(run)


def differs(folder: Path, expected: dict[int, str]) -> str | None:
    found = losses(folder / RUN)
    different = sorted(step for step in expected | found if expected.get(step) != found.get(step))
    return f"losses differ from the undisturbed run at steps {different}" if different else None


def complete(folder: Path) -> str | None:
    """The run's model is there, can be read, and nothing half-written is left."""
    left = [path.name for path in (folder / RUN / "checkpoints").iterdir() if "tmp" in path.name]
    if left:
        return f"half-written files are left: {left}"
    model = in_process(["info", f"{RUN}/checkpoints/run.nemo"], folder, {}, 60)
    if model.code != 0:
        return f"the model cannot be read: {model.message[-200:]}"
    torch.load(folder / RUN / "checkpoints/last.ckpt", weights_only=True)
    return None


# -------------------------------------------------------------------------------------------------- several in a row


def ended(process: subprocess.Popen[bytes], folder: Path, codes: tuple[int, ...]) -> str | None:
    """It ends in time, with one of these codes, and without a traceback."""
    try:
        code = process.wait(PATIENCE)
    except subprocess.TimeoutExpired:
        process.kill()
        return f"does not end within {PATIENCE:.0f} s"
    text = output_of(folder)
    if "Traceback (most recent call last)" in text:
        return f"a traceback (code {code}): {text[-300:]}"
    return None if code in codes else f"exit code {code}: {text[-300:]}"


def chain(*moments: tuple[str, signal.Signals], name: str, overrides: tuple[str, ...] = ()) -> Act:
    """Kill the same run again and again, each time it is resumed; then let it end."""

    def act(folder: Path, command: list[str]) -> str | None:
        expected = reference(folder, name, *overrides)
        for seen, number in moments:
            begin = time.monotonic()
            process = start(command, folder, {})
            while not is_seen(seen, folder / RUN, begin) and process.poll() is None:
                time.sleep(0.002)
            if process.poll() is None:
                process.send_signal(number)
            if wrong := ended(process, folder, (0, 75, -int(number))):
                return f"{number.name} at {seen}: {wrong}"
        again = in_process(command, folder, {}, PATIENCE)
        if again.code != 0:
            return f"cannot be resumed: {again.message[-300:]}"
        return differs(folder, expected) or complete(folder)

    return act


def restarts(folder: Path, command: list[str]) -> str | None:
    """A rank dies, and the launcher resumes by itself."""
    expected = losses(Fixture.path / "runs/two_ranks")
    process = start(command, folder, {})
    while not is_seen("step 3", folder / RUN, 0) and process.poll() is None:
        time.sleep(0.002)
    for child in descendants(process.pid):
        try:
            if b"LOCAL_RANK=1\0" in Path(f"/proc/{child}/environ").read_bytes():
                os.kill(child, KILL)
                break
        except OSError:
            continue
    return ended(process, folder, (0,)) or differs(folder, expected)


def paused(seconds: float) -> Act:
    """Everything is stopped for a while, as by a laptop's lid, and goes on."""

    def act(folder: Path, command: list[str]) -> str | None:
        expected = losses(Fixture.path / "runs/two_ranks")
        process = start(command, folder, {})
        while not is_seen("step 2", folder / RUN, 0) and process.poll() is None:
            time.sleep(0.002)
        os.killpg(process.pid, STOP)
        time.sleep(seconds)
        os.killpg(process.pid, CONT)
        return ended(process, folder, (0,)) or differs(folder, expected)

    return act


def two_at_once(delay: float) -> Act:
    """The same command twice at the same time: one is refused, and the other is not disturbed."""

    def act(folder: Path, command: list[str]) -> str | None:
        expected = reference(folder, "long", *LONG)
        first = start(command, folder, {}, 'exec "$@" > ../first 2>&1')
        time.sleep(delay)
        second = start(command, folder, {}, 'exec "$@" > ../second 2>&1')
        codes = sorted((first.wait(PATIENCE), second.wait(PATIENCE)))
        text = "".join((folder.parent / name).read_text() for name in ("first", "second"))
        if codes != [0, 1]:
            return f"exit codes {codes}: {text[-300:]}"
        if "another run is using it" not in text:
            return f"it does not say why: {text[-300:]}"
        return differs(folder, expected)

    return act


# -------------------------------------------------------------------------------------- files that change while it runs


def without(path: Path) -> None:
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)


def remove(*paths: str) -> Setup:
    def setup(folder: Path) -> None:
        for path in paths:
            without(folder / path)

    return setup


def replace(path: str, content: bytes | None) -> Setup:
    """Put other bytes, or a folder, in a file's place."""

    def setup(folder: Path) -> None:
        without(folder / path)
        if content is None:
            (folder / path).mkdir()
        else:
            (folder / path).write_bytes(content)

    return setup


def garble(pattern: str) -> Setup:
    """Overwrite files where they are, as a failing disk does."""

    def setup(folder: Path) -> None:
        for path in folder.glob(pattern):
            with path.open("r+b") as file:
                file.write(b"garbage" * 100)

    return setup


def move_back(folder: Path) -> None:
    shutil.rmtree(folder / RUN, ignore_errors=True)
    (folder / "moved").rename(folder / RUN)


def beacon_gone(folder: Path) -> None:
    """Remove the shared memory of this run, as a cleaning job of a cluster might."""
    path = folder / RUN / "watchdog/node0.json"
    while not path.exists():  # the monitor writes it some time after the start
        time.sleep(0.01)
    state = json.loads(path.read_text())
    without(Path(state["beacon"]).parent)


@dataclass(frozen=True)
class Upset:
    """Something is changed at step 8 of a run of 60 steps; then the command is given again."""

    change: Setup
    codes: tuple[int, ...] = (0,)
    same: bool = True  # the losses must be those of the undisturbed run, bit for bit
    restore: Setup | None = None  # before the second start
    words: tuple[str, ...] = ()
    overrides: tuple[str, ...] = ()
    ranks: int = 1
    steps: int = 60


def upset(what: Upset) -> Act:
    def act(folder: Path, command: list[str]) -> str | None:
        name, overrides = ("long", LONG) if what.ranks == 1 else ("long_two", (*LONG, "trainer.devices=2"))
        expected = reference(folder, name, *overrides)
        process = start(command, folder, {})
        while not is_seen("step 8", folder / RUN, 0) and process.poll() is None:
            time.sleep(0.002)
        what.change(folder)
        if wrong := ended(process, folder, what.codes):
            return wrong
        text = output_of(folder)
        missing = [word for word in what.words if word.lower() not in text.lower()]
        if missing:
            return f"it does not say {missing}: {text[-300:]}"
        if what.restore:
            what.restore(folder)
        again = in_process(command, folder, {}, PATIENCE)
        if again.code != 0:
            return f"cannot be started again, code {again.code}: {again.message[-300:]}"
        kept = (folder / RUN / "metrics.csv").read_text().partition("\n")[0]
        found = losses(folder / RUN) if "train_loss," in kept else {}  # it was removed, and nothing is left to train
        wrong_steps = [step for step, loss in found.items() if loss != expected.get(step)]
        if what.same and wrong_steps:
            return f"losses differ from the undisturbed run at steps {wrong_steps}"
        return complete(folder)

    return act


# --------------------------------------------------------------------------------------------------- the other commands


def many(folder: Path) -> None:
    """Six hundred utterances in folders, so that there is time for a signal."""
    (folder / "corpus").mkdir()
    lines = []
    for i in range(600):
        path = folder / f"corpus/{i % 20}/{i}.wav"
        path.parent.mkdir(exist_ok=True)
        os.link(folder / f"audio/{i % 8}.wav", path)
        line = {"audio_filepath": str(path), "duration": 1.6 + 0.1 * (i % 8), "label": "ab"[i % 2], "speaker": i}
        lines.append(line)
    write_lines(folder / "many.jsonl", lines)
    shutil.copy(Fixture.path / "model.nemo", folder)


def interrupted(
    number: signal.Signals, seen: Callable[[Path], bool], right: Callable[[Path], str | None], times: int = 1
) -> Act:
    """Start, send a signal when something is seen, and start again until it ends by itself."""

    def act(folder: Path, command: list[str]) -> str | None:
        for _ in range(times):
            process = start(command, folder, {})
            while not seen(folder) and process.poll() is None:
                time.sleep(0.001)
            if process.poll() is None:
                process.send_signal(number)
            if wrong := ended(process, folder, (0, 1, 75, 130, 143, -int(number))):
                return wrong
        again = in_process(command, folder, {}, PATIENCE)
        if again.code != 0:
            return f"the second time: code {again.code}: {again.message[-300:]}"
        left = [path.name for path in folder.rglob("*") if ".tmp" in path.name or path.name.startswith("tmp")]
        return f"half-written files are left: {left[:3]}" if left else right(folder)

    return act


def exists(*patterns: str) -> Callable[[Path], bool]:
    return lambda folder: any(any(folder.glob(pattern)) for pattern in patterns)


def after(seconds: float) -> Callable[[Path], bool]:
    begin: list[float] = []

    def seen(folder: Path) -> bool:
        begin[:] = begin or [time.monotonic()]
        return time.monotonic() - begin[0] > seconds

    return seen


def number_of(pattern: str, number: int) -> Callable[[Path], bool]:
    return lambda folder: sum(1 for _ in folder.glob(pattern)) >= number


def all_measured(folder: Path) -> str | None:
    """The manifest is byte for byte that of a command that was not disturbed."""
    fresh = folder / "fresh.jsonl"
    outcome = in_process(["prepare", "corpus", "--output", fresh.name], folder, {}, PATIENCE)
    if outcome.code != 0:
        return f"cannot be compared: {outcome.message}"
    found, expected = (folder / "m.jsonl").read_bytes(), fresh.read_bytes()
    if len(expected.splitlines()) != 600:
        return f"{len(expected.splitlines())} lines"
    return None if found == expected else "the manifest differs from that of an undisturbed command"


def all_sharded(folder: Path) -> str | None:
    import tarfile

    names: list[str] = []
    for path in sorted(folder.glob("audio_*.tar")):
        with tarfile.open(path) as tar:
            names += tar.getnames()
    if len(names) != 600 or len(set(names)) != 600:
        return f"{len(names)} utterances in the shards, {len(set(names))} of them different"
    return all_measured(folder)


def all_extracted(folder: Path) -> str | None:
    """Every utterance has features, and equal audio has equal ones."""
    lines = [json.loads(line) for line in (folder / "out/manifest.jsonl").read_text().splitlines()]
    if len(lines) != 600 or len({line["feature_filepath"] for line in lines}) != 600:
        return f"{len(lines)} lines"
    first: dict[int, np.ndarray[tuple[int, ...], np.dtype[np.float32]]] = {}
    for line in lines:
        features = np.load(folder / "out" / line["feature_filepath"])
        same = first.setdefault(int(Path(line["audio_filepath"]).stem) % 8, features)
        if not np.allclose(features, same, atol=1e-5):
            return f"{line['audio_filepath']}: other features than its copy"
    return None


def all_in_shards(folder: Path) -> str | None:
    from safetensors import safe_open

    names: set[str] = set()
    for path in sorted((folder / "out").glob("shard-*.safetensors")):
        with safe_open(path, "np") as file:
            names |= set(file.keys())
    lines = (folder / "out/manifest.jsonl").read_text().splitlines()
    return None if len(names) == len(lines) == 600 else f"{len(names)} features, {len(lines)} lines"


def good_export(name: str) -> Callable[[Path], str | None]:
    def right(folder: Path) -> str | None:
        if name == "out":
            return None if (folder / "out/model.safetensors").is_file() else "no model.safetensors"
        outcome = in_process(["info", "model.nemo", name], folder, {}, 60) if "onnx" not in name else None
        if outcome and outcome.code:
            return f"the export cannot be read: {outcome.message[-200:]}"
        return None if (folder / name).stat().st_size > 100_000 else "the export is too small"

    return right


def probed(folder: Path) -> str | None:
    results = json.loads((folder / "out/results.json").read_text())
    drawn = all((folder / "out" / name).is_file() for name in ("layer_weights.svg", "confusion.svg"))
    return None if drawn and 0 <= results["encoder"]["accuracy"] <= 1 else "incomplete"


def reported(folder: Path) -> str | None:
    text = (folder / RUN / "report.html").read_text()
    return None if text.rstrip().endswith("</html>") else "half a report"


PREPARE = ("prepare", "corpus", "--output", "m.jsonl")
EXTRACT = ("extract", "model.nemo", "many.jsonl", "out", "--device", "cpu", "--batch-seconds", "6")
PROBE = (
    *("probe", "model.nemo", "--train", "many.jsonl", "--test", "many.jsonl", "--label", "label"),
    *("--output", "out", "--device", "cpu"),
)

# ----------------------------------------------------------------------------------------------------------- the trials

KILLS: list[tuple[str, Kill]] = [
    ("TERM while Python starts", Kill((TERM,), "second 0.2", codes=(75, -15, 143))),
    ("TERM while torch is imported", Kill((TERM,), "second 2.5", codes=(75, -15, 143))),
    ("INT while torch is imported", Kill((INT,), "second 2.5", codes=(75, -2, 130))),
    ("TERM as the run folder appears", Kill((TERM,), "start")),
    ("KILL as the run folder appears", Kill((KILL,), "start", codes=(-9,))),
    ("TERM at the first step", Kill((TERM,), "step 0")),
    ("TERM at the last step", Kill((TERM,), "step 9", continued=True)),
    ("INT at the first checkpoint", Kill((INT,), "file checkpoints/last.ckpt")),
    ("KILL as a checkpoint is written", Kill((KILL,), "file checkpoints/*", codes=(-9,), overrides=SAVE_ALWAYS)),
    ("KILL between two checkpoints", Kill((KILL,), "file checkpoints/last-before.ckpt", codes=(-9,))),
    ("KILL as the model file appears", Kill((KILL,), "file checkpoints/*nemo*", codes=(-9, 0))),
    ("TERM as the model file appears", Kill((TERM,), "file checkpoints/*nemo*", continued=True)),
    ("KILL as the report appears", Kill((KILL,), "file report.html", codes=(-9, 0))),
    ("HUP, as when the terminal is closed", Kill((HUP,), "step 2", codes=(75, -1))),
    ("QUIT", Kill((QUIT,), "step 2", codes=(75, -3))),
    ("USR2, which means nothing", Kill((USR2,), "step 2", codes=(75, 0, -12))),
    ("ALRM", Kill((ALRM,), "step 2", codes=(75, 0, -14))),
    ("PIPE and WINCH, which are harmless", Kill((PIPE, WINCH), "step 2", codes=(0,))),
    ("STOP and CONT", Kill((STOP, CONT), "step 2", codes=(0,))),
    ("TERM three times", Kill((TERM, TERM, TERM), "step 2", codes=(75, -15))),
    ("USR1, then KILL", Kill((USR1, KILL), "step 1", codes=(75, -9))),
    ("INT, then TERM, then HUP", Kill((INT, TERM, HUP), "step 2", codes=(75, -1))),
    ("TERM without saving", Kill((TERM,), "step 2", overrides=("exp_manager.create_preemption_callback=false",))),
    ("TERM to the group, with workers", Kill((TERM,), "step 2", "group", overrides=WORKERS)),
    ("KILL to the launcher, with workers", Kill((KILL,), "step 2", codes=(-9,), overrides=WORKERS)),
    ("KILL to a worker", Kill((KILL,), "step 1", "worker", overrides=WORKERS, continued=True)),
    ("TERM to a worker", Kill((TERM,), "step 1", "worker", overrides=WORKERS, continued=True)),
    ("two ranks: TERM to the group", Kill((TERM,), "step 2", "group", 2)),
    ("two ranks: INT twice to the group", Kill((INT, INT), "step 2", "group", 2)),
    ("two ranks: HUP to the group", Kill((HUP,), "step 2", "group", 2, codes=(75, -1))),
    ("two ranks: KILL to the group", Kill((KILL,), "step 2", "group", 2, codes=(-9,))),
    ("two ranks: KILL to the launcher at the start", Kill((KILL,), "start", "main", 2, codes=(-9,))),
    ("two ranks: KILL to the launcher while saving", Kill((KILL,), "file checkpoints/*", "main", 2, codes=(-9,))),
    ("two ranks: QUIT to the launcher", Kill((QUIT,), "step 2", "main", 2, codes=(75, -3))),
    ("two ranks: TERM to rank 1 alone", Kill((TERM,), "step 2", "rank 1", 2)),
    ("two ranks: INT to rank 1 alone", Kill((INT,), "step 2", "rank 1", 2, codes=(75, 0))),
    ("two ranks: KILL to rank 1 at the start", Kill((KILL,), "second 3", "rank 1", 2)),
    ("two ranks: KILL to rank 1 at the model file", Kill((KILL,), "file checkpoints/*nemo*", "rank 1", 2,
                                                         continued=True)),
    ("two ranks: STOP to rank 1", Kill((STOP,), "step 2", "rank 1", 2, overrides=("watchdog.floor_s=3",))),
    ("two ranks: STOP to the monitor", Kill((STOP,), "step 2", "monitor", 2, codes=(0, 75))),
    ("two ranks: TERM to the monitor", Kill((TERM,), "step 2", "monitor", 2, codes=(0, 75))),
]  # fmt: skip

UPSETS: list[tuple[str, Upset]] = [
    ("the training manifest is deleted", Upset(remove("train.jsonl"), restore=lambda f: shutil.copy(
        Fixture.path / "train.jsonl", f))),
    ("the manifests' indexes are deleted", Upset(remove("train.jsonl.idx", "valid.jsonl.idx"))),
    ("the training manifest is replaced by garbage", Upset(replace("train.jsonl", b"{{{\n" * 400),
     codes=(0, 1), restore=lambda f: shutil.copy(Fixture.path / "train.jsonl", f))),
    ("all audio is deleted", Upset(remove("audio"), codes=(1, 75), words=("audio/",), restore=lambda f: shutil.copytree(
        Fixture.path / "audio", f / "audio"))),
    ("one audio file is deleted", Upset(remove("audio/3.wav"), same=False, words=("3.wav",))),
    ("the run folder is deleted", Upset(remove("runs/run"), codes=(0, 1, 75))),
    ("the folder of checkpoints is deleted", Upset(remove("runs/run/checkpoints"), codes=(0, 1, 75))),
    ("the last checkpoint becomes a folder", Upset(replace("runs/run/checkpoints/last.ckpt", None), codes=(0, 1))),
    ("metrics are deleted", Upset(remove("runs/run/metrics.csv"))),
    ("metrics become a folder", Upset(replace("runs/run/metrics.csv", None), codes=(0, 1), restore=remove(
        "runs/run/metrics.csv"))),
    ("the lock is deleted", Upset(remove("runs/run/.lock"))),
    ("the log becomes a folder", Upset(replace("runs/run/log_globalrank-0_localrank-0.txt", None))),
    ("the checkpoints are overwritten in place", Upset(garble("runs/run/checkpoints/*.ckpt"))),
    ("the temporary folder is deleted", Upset(remove("../tmp"), overrides=WORKERS)),
    ("the home folder is deleted", Upset(remove("../home"))),
    ("the run is moved away", Upset(lambda f: (f / RUN).rename(f / "moved"), codes=(0, 1, 75), restore=move_back)),
    ("two ranks: the shared memory is deleted", Upset(beacon_gone, codes=(0, 75), ranks=2)),
    ("two ranks: the run folder is deleted", Upset(remove("runs/run"), codes=(0, 1, 75), ranks=2)),
]  # fmt: skip

COMMANDS: list[tuple[str, tuple[str, ...], Act]] = [
    ("prepare: TERM as it measures", PREPARE, interrupted(TERM, exists("m.jsonl.state*"), all_measured)),
    ("prepare: KILL as it measures, three times", PREPARE, interrupted(
        KILL, exists("m.jsonl.state*"), all_measured, 3)),
    ("prepare: INT as it measures", PREPARE, interrupted(INT, exists("m.jsonl.state*"), all_measured)),
    ("prepare: KILL as the manifest appears", PREPARE, interrupted(KILL, exists("m.jsonl"), all_measured)),
    ("prepare: KILL as it writes shards", (*PREPARE, "--shards", "6"), interrupted(
        KILL, exists("audio_*", "*.tar*"), all_sharded)),
    ("extract: KILL after some features", EXTRACT, interrupted(KILL, number_of("out/**/*.npy", 40), all_extracted)),
    ("extract: TERM after some features, twice", EXTRACT, interrupted(
        TERM, number_of("out/**/*.npy", 40), all_extracted, 2)),
    ("extract: INT after the first feature", EXTRACT, interrupted(INT, number_of("out/**/*.npy", 1), all_extracted)),
    ("extract: KILL while it writes shards", (*EXTRACT, "--format", "shards", "--shard-mb", "0.1"), interrupted(
        KILL, number_of("out/shard*", 5), all_in_shards)),
    ("export: KILL as the file appears", ("export", "model.nemo", "o.nemo", "--format", "nemo"), interrupted(
        KILL, exists("o.nemo*", ".o.nemo*"), good_export("o.nemo"))),
    ("export: KILL before the folder is complete", ("export", "model.nemo", "out"), interrupted(
        KILL, exists("out*", ".out*"), good_export("out"))),
    ("export: INT while it imports", ("export", "model.nemo", "o.safetensors", "--format", "safetensors"), interrupted(
        INT, after(3), good_export("o.safetensors"))),
    ("probe: KILL in its middle", PROBE, interrupted(KILL, after(9), probed)),
    ("probe: INT in its middle", PROBE, interrupted(INT, after(9), probed)),
    ("report: KILL in its middle", ("report", str(RUN)), interrupted(KILL, after(6), reported)),
    ("inspect: INT in its middle", ("inspect", "many.jsonl"), interrupted(INT, after(6), lambda f: None)),
]  # fmt: skip


def run_and_many(folder: Path) -> None:
    many(folder)
    Fixture.run(folder)


def long_validation(folder: Path) -> None:
    lines = [json.loads(line) for line in (folder / "valid.jsonl").read_text().splitlines()]
    write_lines(folder / "valid.jsonl", lines * 60)


def in_validation(folder: Path, command: list[str]) -> str | None:
    """KILL in the middle of a long validation, which is repeated: the losses of training are the same."""
    begin = time.monotonic()
    process = start(command, folder, {})
    while not is_seen("file checkpoints/last.ckpt", folder / RUN, begin) and process.poll() is None:
        time.sleep(0.002)
    time.sleep(0.3)
    process.kill()
    if wrong := ended(process, folder, (-9,)):
        return wrong
    again = in_process(command, folder, {}, PATIENCE)
    if again.code != 0 or "resumed at step 4" not in again.text:
        return f"code {again.code}, or not resumed at step 4: {again.message[-300:]}"
    return differs(folder, losses(Fixture.path / "runs/whole"))


RIGHT = Right(ended_well)


def trials() -> Iterator[Trial]:
    for name, kill in KILLS:
        command = resume(f"trainer.devices={kill.ranks}", *kill.overrides)
        yield Trial("kills", name, command, RIGHT, act=killed(kill))
    for name, what in UPSETS:
        command = resume(*LONG, f"trainer.devices={what.ranks}", *what.overrides)
        yield Trial("kills", f"while it runs, {name}", command, RIGHT, act=upset(what))
    for name, arguments, act in COMMANDS:
        yield Trial("kills", name, arguments, RIGHT, run_and_many, act=act)
    steps = [("step 3", KILL), ("step 9", TERM), ("step 14", KILL), ("step 22", INT), ("step 40", KILL)]
    yield Trial("kills", "five times in one run", resume(*LONG), RIGHT, act=chain(*steps, name="long", overrides=LONG))
    always = chain(
        *[("second 8", KILL)] * 2, ("step 1", KILL), ("step 20", KILL), ("step 50", KILL), name="long", overrides=LONG
    )
    yield Trial("kills", "KILL while every step saves", resume(*LONG, *SAVE_ALWAYS), RIGHT, act=always)
    ranks = ("trainer.devices=2",)
    yield Trial("kills", "a rank dies, and restarts are allowed", resume(*ranks, "launch.max_restarts=2"), RIGHT,
                act=restarts)  # fmt: skip
    yield Trial("kills", "all processes pause for 8 s", resume(*ranks, "watchdog.floor_s=3"), RIGHT, act=paused(8))
    yield Trial("kills", "the same command twice at once", resume(*LONG), RIGHT, act=two_at_once(0))
    yield Trial("kills", "the same command again while it starts", resume(*LONG), RIGHT, act=two_at_once(2))
    yield Trial("kills", "KILL in a validation", resume(), RIGHT, long_validation, act=in_validation)
