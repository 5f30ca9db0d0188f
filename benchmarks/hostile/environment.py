"""Machines that are short of something, shells with odd variables, closed streams; the data and the command are good.

The result must be that of an undisturbed run, bit for bit, or a message must name what the machine lacks. Where the
docs name the case (troubleshooting.md, faults.md, prepare.md, several-gpus.md), theirs is what is expected. Trials that
mount small file systems are left out where that is not allowed.
"""

from __future__ import annotations

import json
import shutil
import subprocess
from collections.abc import Callable, Mapping
from pathlib import Path

import soundfile
from benchmarks.hostile.harness import (
    RUN,
    Check,
    Either,
    Expected,
    Fixture,
    Outcome,
    Refused,
    Right,
    Setup,
    Trial,
    ended_well,
    in_process,
    losses,
    resume,
    trained,
)

ONE, TWO = resume(), resume("trainer.devices=2")
FAILED = (1, 2, 75)
"""What a training may end with when the machine fails it after it has begun."""


# -------------------------------------------------------------------------------------------------------- what is right


def as_in(name: str) -> Check:
    """The losses are those of an undisturbed run, and the model was written."""

    def check(folder: Path, outcome: Outcome) -> str | None:
        expected, found = losses(Fixture.path / "runs" / name), losses(folder / RUN)
        if found != expected:
            return "losses differ from those of the undisturbed run"
        return None if (folder / RUN / "checkpoints/run.nemo").is_file() else "no run.nemo at the end"

    return check


SAME, SAME_TWO = Right(as_in("whole")), Right(as_in("two_ranks"))


def all_measured(folder: Path, outcome: Outcome) -> str | None:
    """The manifest is UTF-8, and has every file under its own name with its duration."""
    lines = [json.loads(line) for line in (folder / "m.jsonl").read_text(encoding="utf-8").splitlines()]
    if len(lines) != 8:
        return f"{len(lines)} of 8 files"
    for line in lines:
        path = folder / line["audio_filepath"]
        if not path.is_file() or abs(soundfile.info(path).duration - line["duration"]) > 0.01:
            return f"a wrong line: {line}"
    return None


def page(folder: Path, outcome: Outcome) -> str | None:
    if "</html>" not in (folder / "inspect.html").read_text(encoding="utf-8"):
        return "inspect.html is not complete"
    return None if "8 utterances" in outcome.text else "the table is not printed"


# --------------------------------------------------------------------------------------------------------------- set-up


def folders(*names: str) -> Setup:
    def setup(folder: Path) -> None:
        for name in names:
            (folder / name).mkdir()

    return setup


def data_in_corpus(folder: Path) -> None:
    (folder / "corpus").mkdir()
    for name in ("audio", "train.jsonl", "valid.jsonl"):
        shutil.move(folder / name, folder / "corpus" / name)


def foreign_names(folder: Path) -> None:
    (folder / "corpus").mkdir()
    for i in range(8):
        shutil.copy(folder / f"audio/{i}.wav", folder / f"corpus/Grüße_語_{i}.wav")


def old_run(folder: Path) -> None:
    Fixture.run(folder)


def model(folder: Path) -> None:
    shutil.copy(Fixture.path / "model.nemo", folder)


def mounted(*lines: str) -> str:
    """A shell line that mounts something which only the command sees, and which is gone with it."""
    return f'exec unshare -m bash -c \'{" && ".join(lines)} && exec "$@"\' bash "$@"'


def read_only(name: str) -> str:
    return mounted(f"mount --bind {name} {name}", f"mount -o remount,ro,bind {name}")


def tmpfs(path: str, options: str) -> str:
    return f"mount -t tmpfs -o {options} tmpfs {path}"


IGNORED_CHILDREN = """exec "$1" -c 'import os, signal, sys
signal.signal(signal.SIGCHLD, signal.SIG_IGN)
os.execv(sys.argv[1], sys.argv[1:])' "$@"
"""


def then_room(small: str, large: str, words: tuple[str, ...]) -> Callable[[Path, list[str]], str | None]:
    """Train on a disk that is too small, then give it room: the same command must end as if nothing had been."""

    def act(folder: Path, command: list[str]) -> str | None:
        disk = folder / "runs"
        disk.mkdir()
        subprocess.run(["mount", "-t", "tmpfs", "-o", small, "tmpfs", disk], check=True)
        try:
            first = in_process(command, folder, {}, 60)
            if "Traceback (most recent call last)" in first.text:
                return f"a traceback: {first.text[-300:]}"
            refused = Refused(words, partial=True, codes=FAILED)
            if wrong := None if first.code == 0 else refused.wrong(folder, first):
                return f"without room: {wrong}: {first.err[-300:]}"
            subprocess.run(["mount", "-o", f"remount,{large}", disk], check=True)
            again = in_process(command, folder, {}, 60)
            wrong = SAME.wrong(folder, again)
            return f"with room: {wrong}: {again.err[-300:]}" if wrong else None
        finally:
            subprocess.run(["umount", "-l", disk], check=False)

    return act


def can_mount() -> bool:
    try:
        return subprocess.run(["unshare", "-m", "mount", "-t", "tmpfs", "tmpfs", "/mnt"], check=False).returncode == 0
    except OSError:
        return False


# ------------------------------------------------------------------------------------------------------------- the rows

CORPUS = resume(
    "model.train_ds.manifest_filepath=corpus/train.jsonl", "model.validation_ds.manifest_filepath=corpus/valid.jsonl"
)
NO_SPACE = Refused(("space", "out"), partial=True)
NO_LOCALE = {"LANG": "C", "LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"}
TORCHRUN = {"RANK": "0", "WORLD_SIZE": "2", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "2"}
TORCHRUN |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29561"}
SLURM = {f"SLURM_{name}": "0" for name in ("PROCID", "LOCALID", "NODEID")}
SLURM |= {"SLURM_JOB_ID": "4711", "SLURM_NTASKS": "4", "SLURM_NNODES": "1", "SLURM_JOB_NODELIST": "node1"}
INSPECT = ["inspect", "train.jsonl", "--batch-size", "2"]

Row = tuple[str, list[str], Expected, Setup | None, Mapping[str, str | None], str]
ROWS: tuple[Row, ...] = (
    ("no HOME", ONE, SAME, None, {"HOME": None}, ""),
    ("a HOME that cannot be made, two ranks", TWO, SAME_TWO, None, {"HOME": "/proc/nobody"}, ""),
    ("no git or any other program on the PATH", ONE, SAME, None, {"PATH": "/nowhere"}, ""),
    (
        "40 open files, two ranks",
        TWO,
        Either(Refused(("open files|ulimit -n",), partial=True, codes=FAILED), SAME_TWO),
        None,
        {},
        'ulimit -n 40; exec "$@"',
    ),
    (
        "files of at most 50 kB",
        ONE,
        Refused(("last.ckpt|checkpoint", "large"), partial=True),
        None,
        {},
        'ulimit -f 50; exec "$@"',
    ),
    (
        "2 GB of address space",
        ONE,
        Either(Refused(("memory",), partial=True, codes=FAILED), SAME),
        None,
        {},
        'ulimit -v 2000000; exec "$@"',
    ),
    ("stdin, stdout and stderr are closed", ONE, SAME, None, {}, 'exec "$@" <&- >&- 2>&-'),
    ("a full disk behind stdout and stderr", ONE, SAME, None, {}, 'exec "$@" > /dev/full 2>&1'),
    ("the reader of the output goes away", ONE, SAME, None, {}, '"$@" 2>&1 | head -n 1; exit ${PIPESTATUS[0]}'),
    (
        "info: a full disk behind stdout",
        ["info", "model.nemo"],
        Refused(("space|stdout|output",)),
        model,
        {},
        'exec "$@" > /dev/full',
    ),
    (
        "prepare: names that the locale has no letters for",
        ["prepare", "corpus", "--output", "m.jsonl"],
        Either(Refused(("PYTHONUTF8",), partial=True), Right(all_measured)),
        foreign_names,
        NO_LOCALE,
        "",
    ),
    ("inspect: ASCII output", INSPECT, Right(page), None, {"PYTHONIOENCODING": "ascii"}, ""),
    ("inspect: a terminal of one column", INSPECT, Right(page), None, {"COLUMNS": "1", "TERM": "nonsense"}, ""),
    ("PYTHONOPTIMIZE=2", ONE, SAME, None, {"PYTHONOPTIMIZE": "2"}, ""),
    (
        "OMP_NUM_THREADS is a word",
        ONE,
        Either(Refused(("OMP_NUM_THREADS",)), Right(trained)),
        None,
        {"OMP_NUM_THREADS": "four"},
        "",
    ),
    ("MASTER_PORT is a word", TWO, Refused(("MASTER_PORT",)), None, {"MASTER_PORT": "abc"}, ""),
    (
        "MASTER_ADDR is nobody's name",
        resume("trainer.num_nodes=2"),
        Refused(("MASTER_ADDR",)),
        None,
        {"MASTER_ADDR": "nowhere.invalid", "MASTER_PORT": "29562", "NODE_RANK": "1"},
        "",
    ),
    (
        "a shell with torchrun's variables",
        resume("trainer.devices=1"),
        Refused(("trainer.devices",)),
        old_run,
        TORCHRUN,
        "",
    ),
    ("a shell with SLURM's variables", ONE, Either(Refused(("SLURM|trainer.devices",)), SAME), None, SLURM, ""),
    (
        "GLOO_SOCKET_IFNAME of another machine",
        TWO,
        Refused(("GLOO_SOCKET_IFNAME",), partial=True, codes=FAILED),
        None,
        {"GLOO_SOCKET_IFNAME": "ib9"},
        "",
    ),
    (
        "the working folder was removed",
        ONE,
        Refused(("folder|directory",)),
        None,
        {},
        'mkdir gone && cd gone && rmdir ../gone && exec "$@"',
    ),
    ("SIGCHLD is ignored, two ranks", TWO, SAME_TWO, None, {}, IGNORED_CHILDREN),
)
MOUNTS: tuple[Row, ...] = (
    (
        "the run folder is read-only",
        ONE,
        Refused(("runs", "cannot be written", "exp_manager.exp_dir")),
        folders("runs"),
        {},
        read_only("runs"),
    ),
    (
        "read-only data, and no place for its indexes",
        CORPUS,
        Either(Refused(("train.jsonl", "index", "NEST_SSL_CACHE_DIR")), SAME),
        data_in_corpus,
        {"NEST_SSL_CACHE_DIR": "/proc/nothing", "HOME": "/proc/nobody"},
        read_only("corpus"),
    ),
    (
        "TMPDIR is full, two ranks",
        TWO,
        SAME_TWO,
        folders("full"),
        {},
        mounted(tmpfs("full", "size=4k"), "head -c 4096 /dev/zero > full/x", "export TMPDIR=$PWD/full"),
    ),
    (
        "/dev/shm of 64 kB, loader workers",
        resume("model.train_ds.num_workers=2"),
        Either(Refused(("/dev/shm",), partial=True, codes=FAILED), SAME),
        None,
        {},
        mounted(tmpfs("/dev/shm", "size=64k")),
    ),
    (
        "no loopback interface, two ranks",
        TWO,
        Refused(("loopback",), partial=True, codes=FAILED),
        None,
        {},
        'exec unshare -n "$@"',
    ),
    (
        "prepare: the disk is full",
        ["prepare", "audio", "--output", "out/m.jsonl"],
        NO_SPACE,
        folders("out"),
        {},
        mounted(tmpfs("out", "size=4k")),
    ),
)


def trials() -> list[Trial]:
    rows = [*ROWS, *(MOUNTS if can_mount() else ())]
    found = [
        Trial("environment", name, command, expected, setup, variables, own_process=True, shell=shell)
        for name, command, expected, setup, variables, shell in rows
    ]
    if can_mount():
        full = then_room("size=2500k", "size=64m", ("space",))
        no_inodes = then_room("size=64m,nr_inodes=12", "nr_inodes=1000", ("space|inode",))
        found += [
            Trial("environment", "the disk fills up, and is emptied", ONE, Right(ended_well), act=full),
            Trial("environment", "no inodes are left, then there are", ONE, Right(ended_well), act=no_inodes),
        ]
    return found
