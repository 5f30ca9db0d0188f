"""Odd surroundings: variables, limits, full and read-only disks, closed outputs, folders that vanish, strange hosts.

What has nothing to do with the command must not change its result; what prevents it is named in a short message. File
systems are mounted in a name space of their own, so nothing has to be unmounted; without root these are left out.
"""

from __future__ import annotations

import json
import os
import shutil
import socket
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

from benchmarks.hostile.harness import (
    BASE_STEPS,
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
    only_run,
    pretrain,
    resume,
    resumed,
    same_features,
    start,
    trained,
)

INFO = ("info", "model.nemo")
EXTRACT = ("extract", "model.nemo", "audio/0.wav", "out", "--device", "cpu")
PREPARE = ("prepare", "audio", "--output", "m.jsonl")
TRAIN = tuple(resume())
TWO = tuple(resume("trainer.devices=2"))
WORKERS = tuple(resume("model.train_ds.num_workers=2"))


def model(folder: Path) -> None:
    shutil.copy(Fixture.path / "model.nemo", folder)


# ------------------------------------------------------------------------------------------------------- what is right


def as_ever(run: str) -> Check:
    """The losses are bit for bit those of the fixture's run."""

    def check(folder: Path, outcome: Outcome) -> str | None:
        same = losses(only_run(folder)) == losses(Fixture.path / "runs" / run)
        return None if same else "losses differ from those in plain surroundings"

    return check


def measured(folder: Path, outcome: Outcome) -> str | None:
    lines = [json.loads(line) for line in (folder / "m.jsonl").read_text().splitlines()]
    wrong = [line for line in lines if abs(line["duration"] - 1.6) > 0.8]
    return None if len(lines) == 8 and not wrong else f"{len(lines)} lines, {len(wrong)} of them wrong"


def named(*words: str) -> Check:
    def check(folder: Path, outcome: Outcome) -> str | None:
        missing = [word for word in words if word not in outcome.text]
        return f"not in the output: {missing}" if missing else None

    return check


def kept(folder: Path, outcome: Outcome) -> str | None:
    """What was copied from a disk of its own before that disk went away."""
    return None if losses(folder / "kept/run") == losses(Fixture.path / "runs/whole") else "losses differ"


ONE, BOTH = Right(as_ever("whole")), Right(as_ever("two_ranks"))
SAME, MEASURED = Right(same_features), Right(measured)
SHOWN = Right(named("encoder", "decoder"))


def no(*words: str, partial: bool = False, codes: tuple[int, ...] = (1, 2)) -> Refused:
    return Refused(words, partial, codes)


# ---------------------------------------------------------------------------------------------------------- variables

Variables = Mapping[str, str | None]

VARIABLES: list[tuple[str, tuple[str, ...], Variables, Expected]] = [
    ("MASTER_ADDR left over from another job", TRAIN, {"MASTER_ADDR": "nowhere.invalid", "MASTER_PORT": "29500"}, ONE),
    ("MASTER_ADDR of nowhere, two nodes", (*TRAIN, "trainer.num_nodes=2"),
     {"MASTER_ADDR": "nowhere.invalid", "MASTER_PORT": "29511", "NODE_RANK": "0"}, no("MASTER_ADDR")),
    ("MASTER_PORT that is no number", TWO, {"MASTER_PORT": "ssh"}, no("MASTER_PORT")),
    ("MASTER_PORT too large", TWO, {"MASTER_PORT": "99999"}, no("MASTER_PORT")),
    ("MASTER_PORT empty", TWO, {"MASTER_PORT": ""}, Either(no("MASTER_PORT"), BOTH)),
    ("RANK without WORLD_SIZE", TRAIN, {"RANK": "0"}, Either(no("WORLD_SIZE"), ONE)),
    ("RANK past WORLD_SIZE", TRAIN, {"RANK": "5", "LOCAL_RANK": "5", "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1",
     "MASTER_PORT": "29512"}, no("RANK")),
    ("RANK in words", TRAIN, {"RANK": "first", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1",
     "MASTER_PORT": "29513"}, no("RANK")),
    ("WORLD_SIZE of two, nobody else comes", TRAIN, {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "2",
     "LOCAL_WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29514"}, no("trainer.devices")),
    ("WORLD_SIZE of zero", TRAIN, {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "0", "MASTER_ADDR": "127.0.0.1",
     "MASTER_PORT": "29515"}, no("WORLD_SIZE")),
    ("WORLD_SIZE alone, left over", TRAIN, {"WORLD_SIZE": "8"}, Either(no("WORLD_SIZE"), ONE)),
    ("NODE_RANK past the nodes", (*TRAIN, "trainer.num_nodes=2"),
     {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29516", "NODE_RANK": "7"}, no("NODE_RANK")),
    ("two nodes, and nothing set", (*TRAIN, "trainer.num_nodes=2"), {}, no("MASTER_ADDR|NODE_RANK")),
    ("an interactive SLURM shell of four tasks", TRAIN, {"SLURM_JOB_ID": "7", "SLURM_NTASKS": "4", "SLURM_NNODES": "1",
     "SLURM_JOB_NODELIST": "gpu[01-02]"}, Either(no("SLURM|srun|trainer.devices"), ONE)),
    ("one SLURM task", TRAIN, {"SLURM_JOB_ID": "7", "SLURM_NTASKS": "1", "SLURM_PROCID": "0", "SLURM_LOCALID": "0",
     "SLURM_NODEID": "0", "SLURM_NNODES": "1", "SLURM_STEP_ID": "0", "SLURM_JOB_NODELIST": "localhost"}, ONE),
    ("SLURM variables that are garbage", TRAIN, {"SLURM_JOB_ID": "7", "SLURM_NTASKS": "many", "SLURM_PROCID": "x",
     "SLURM_LOCALID": "", "SLURM_STEP_ID": "0", "SLURM_JOB_NODELIST": "[[["}, Either(no("SLURM"), ONE)),
    ("OMP_NUM_THREADS=0", TRAIN, {"OMP_NUM_THREADS": "0"}, Either(no("OMP_NUM_THREADS"), Right(trained))),
    ("OMP_NUM_THREADS in words", TRAIN, {"OMP_NUM_THREADS": "all"}, Either(no("OMP_NUM_THREADS"), Right(trained))),
    ("OMP_NUM_THREADS of a million", EXTRACT, {"OMP_NUM_THREADS": "1000000"}, Either(no(), Right(ended_well))),
    ("CUDA_VISIBLE_DEVICES is garbage", TRAIN, {"CUDA_VISIBLE_DEVICES": "gpu7"}, ONE),
    ("CUDA_VISIBLE_DEVICES hides all, and a GPU is asked for", (*TRAIN, "trainer.accelerator=gpu"),
     {"CUDA_VISIBLE_DEVICES": ""}, no("GPU")),
    ("GLOO_SOCKET_IFNAME of nowhere", TWO, {"GLOO_SOCKET_IFNAME": "eth99"}, no("GLOO_SOCKET_IFNAME", "eth99")),
    ("no HOME", TWO, {"HOME": None, "USER": None, "LOGNAME": None}, BOTH),
    ("HOME is a file", TWO, {"HOME": "/etc/passwd"}, BOTH),
    ("HOME is not there, cannot be made", EXTRACT, {"HOME": "/proc/nowhere"}, SAME),
    ("NEST_SSL_CACHE_DIR is a file", TRAIN, {"NEST_SSL_CACHE_DIR": "/etc/passwd"}, ONE),
    ("NEST_SSL_SECRET is empty", TWO, {"NEST_SSL_SECRET": ""}, BOTH),
    ("TMPDIR is not there", WORKERS, {"TMPDIR": "/tmp/nowhere/at/all"}, ONE),
    ("TMPDIR is a file", TWO, {"TMPDIR": "/etc/passwd"}, BOTH),
    ("ASCII only", INFO, {"LANG": "C", "LC_ALL": "C", "PYTHONIOENCODING": "ascii", "PYTHONUTF8": "0"}, SHOWN),
    ("ASCII only, in training", TRAIN, {"LC_ALL": "POSIX", "PYTHONIOENCODING": "ascii", "PYTHONUTF8": "0",
     "PYTHONCOERCECLOCALE": "0"}, ONE),
    ("a locale that does not exist", EXTRACT, {"LANG": "xx_YY.UTF-9", "LC_ALL": "xx_YY.UTF-9"}, SAME),
    ("Latin-1 output", INFO, {"PYTHONIOENCODING": "latin-1"}, SHOWN),
    ("COLUMNS=1", INFO, {"COLUMNS": "1", "LINES": "1"}, Right(ended_well)),
    ("COLUMNS in words", INFO, {"COLUMNS": "wide", "TERM": "nonsense"}, SHOWN),
    ("COLUMNS of a billion", ("inspect", "train.jsonl"), {"COLUMNS": "1000000000"}, Right(ended_well)),
    ("COLUMNS below zero", ("--help",), {"COLUMNS": "-5"}, Right(ended_well)),
    ("no PATH", TRAIN, {"PATH": None}, ONE),
    ("asserts are switched off", TRAIN, {"PYTHONOPTIMIZE": "2"}, ONE),
    ("warnings are errors", EXTRACT, {"PYTHONWARNINGS": "error"}, Either(no(), SAME)),
    ("a hash seed", TWO, {"PYTHONHASHSEED": "12345"}, BOTH),
    ("a time zone that does not exist", TRAIN, {"TZ": "Mars/Olympus+99"}, ONE),
    ("a variable that is no text", TRAIN, {"NEST_NOTE": "\udcff\udcfe"}, ONE),
    ("a variable of 100 KB", TWO, {"NEST_NOTE": "x" * 100_000}, BOTH),
    ("a proxy that does not exist", EXTRACT, {"https_proxy": "http://127.0.0.1:9", "HTTP_PROXY": "::::"}, SAME),
    ("a hub name without a network", ("extract", "nobody/no-model", "audio/0.wav", "out"),
     {"HF_HUB_OFFLINE": "1"}, no("nobody/no-model")),
    ("torch's log settings are garbage", EXTRACT, {"TORCH_CPP_LOG_LEVEL": "LOUD", "GLOG_minloglevel": "x"}, SAME),
    ("deterministic and spawned", WORKERS, {"CUBLAS_WORKSPACE_CONFIG": "???", "PYTORCH_ALLOC_CONF": ""}, ONE),
]  # fmt: skip

# --------------------------------------------------------------------------------- limits, outputs, folders, by a shell

SHELLS: list[tuple[str, tuple[str, ...], str, Expected]] = [
    ("umask 077", TRAIN, 'umask 077; exec "$@"', ONE),
    ("umask 777", EXTRACT, 'umask 777; exec "$@"', Either(no(), SAME)),
    ("16 open files", INFO, 'ulimit -n 16; exec "$@"', Either(no("open files|many"), SHOWN)),
    ("40 open files, two ranks with workers", (*TWO, "model.train_ds.num_workers=2"), 'ulimit -n 40; exec "$@"',
     Either(no("open files", partial=True, codes=(1, 75)), BOTH)),
    ("files of at most 200 KB", TRAIN, 'ulimit -f 200; exec "$@"', no("last.ckpt", partial=True)),
    ("files of at most 4 KB, extract", ("extract", "model.nemo", "audio", "out", "--device", "cpu"),
     'ulimit -f 4; exec "$@"', no("large|size|space", partial=True)),
    ("files of at most 100 KB, export", ("export", "model.nemo", "out.nemo", "--format", "nemo"),
     'ulimit -f 100; exec "$@"', no("out.nemo")),
    ("2 GB of memory", TRAIN, 'ulimit -v 2000000; exec "$@"', Either(no("memory", partial=True), ONE)),
    ("a small stack", WORKERS, 'ulimit -c 0; ulimit -l 0; ulimit -s 256; exec "$@"',
     ONE),
    ("stdout is closed", TRAIN, 'exec "$@" >&-', ONE),
    ("stderr is closed", TRAIN, 'exec "$@" 2>&-', ONE),
    ("all three are closed", TWO, 'exec "$@" <&- >&- 2>&-', BOTH),
    ("stdout is closed, extract", EXTRACT, 'exec "$@" >&-', SAME),
    ("stdin is closed", WORKERS, 'exec "$@" <&-', ONE),
    ("stdin is endless", TRAIN, 'exec "$@" </dev/zero', ONE),
    ("stdin is a closed pipe", PREPARE, 'true | "$@"', MEASURED),
    ("stdout is a full disk, info", INFO, 'exec "$@" >/dev/full', no("space|stdout|output|written")),
    ("stdout is a full disk, training", TRAIN, 'exec "$@" >/dev/full', ONE),
    ("stderr is a full disk, training", TRAIN, 'exec "$@" 2>/dev/full', ONE),
    ("stderr is a full disk, two ranks", TWO, 'exec "$@" 2>/dev/full', BOTH),
    ("stdout is read by nobody, info", INFO, 'set -o pipefail; "$@" | true', Right(ended_well, (0, 1, 141))),
    ("the reader of all output goes away, training", TRAIN, '"$@" 2>&1 | head -n 2; exit 0', ONE),
    ("the reader of all output goes away, two ranks", TWO, '"$@" 2>&1 | head -n 1; exit 0', BOTH),
    ("hang-ups and pipes are ignored, as by nohup", TRAIN, 'trap "" HUP PIPE INT; exec "$@"', ONE),
    ("children are ignored", WORKERS, 'trap "" CHLD; exec "$@"', ONE),
    ("the working folder is deleted", ("info", "{folder}/model.nemo"),
     'mkdir gone; cd gone; rmdir ../gone; exec "$@"', Either(no(), SHOWN)),
    ("the working folder is deleted, training", tuple(pretrain(
        "model.train_ds.manifest_filepath={folder}/train.jsonl", "exp_manager.exp_dir={folder}/runs",
        "model.validation_ds.manifest_filepath={folder}/valid.jsonl")),
     'mkdir gone; cd gone; rmdir ../gone; exec "$@"', Either(no("folder"), Right(trained))),
    ("the working folder is reached by a link", TRAIN, 'ln -s . here; cd here/here; exec "$@"', ONE),
    ("the folder of runs is a link", TRAIN, 'mkdir big; ln -s big runs; exec "$@"', Right(trained)),
    ("the folder of runs is a link to nothing", TRAIN, 'ln -s nowhere/x runs; exec "$@"',
     Either(Refused(("runs",), partial=True), Right(trained))),
    ("the folder of runs is a link in a circle", TRAIN, 'ln -s runs runs; exec "$@"', no("runs", partial=True)),
    ("nice, in a session of its own", TWO, 'exec nice -n 5 setsid -w "$@"', BOTH),
    ("modules of the same names in the working folder", TWO,
     'for n in json csv queue random yaml typing_extensions; do echo "raise SystemExit(77)" > $n.py; done; '
     'shift 3; exec "$(dirname "$PYTHON")/nest-ssl" "$@"', BOTH),
    ("a git that never ends", TRAIN,
     'mkdir bin; printf "#!/bin/sh\\nexec sleep 1000\\n" > bin/git; chmod +x bin/git; PATH=$PWD/bin:$PATH exec "$@"',
     ONE),
    ("a git that fails loudly", TRAIN,
     'mkdir bin; printf "#!/bin/sh\\nhead -c 9999999 /dev/urandom; exit 3\\n" > bin/git; chmod +x bin/git; '
     'PATH=$PWD/bin:$PATH exec "$@"', ONE),
    ("a working folder whose git settings run a command", TRAIN,
     'git init -q . && git add audio && git config core.fsmonitor "touch ../pwned; false" && '
     'git config core.pager "touch ../pwned" && git config diff.external "touch ../pwned" && exec "$@"', ONE),
    ("a working folder in git, with changes that are not UTF-8", TRAIN,
     'git init -q . && printf "caf\\351\\n" > notes.txt && git add notes.txt && '
     'git -c user.name=me -c user.email=me@here commit -qm "caf$(printf "\\351")" && '
     'printf "na\\357ve\\n" >> notes.txt && exec "$@"', ONE),
]  # fmt: skip

INSIDE = 'unshare -m{flags} bash -c \'{first} && exec "$@"\' bash "$@"'
"""Run the command in name spaces of its own, after some mounts that nobody else sees."""


def space(first: str, flags: str = "") -> str:
    assert "'" not in first
    return INSIDE.replace("{flags}", flags).replace("{first}", first)


def tmpfs(options: str, place: str = "runs") -> str:
    return space(f"mkdir -p {place} && mount -t tmpfs -o {options} tmpfs {place}")


READ_ONLY = "mount --bind . . && cd . && mount -o remount,ro,bind . && cd $PWD"
KEEP = (
    'unshare -m bash -c \'mkdir runs && mount -t tmpfs -o {options} tmpfs runs && "$@"; code=$?; '
    'cp -a runs kept; exit $code\' bash "$@"'
)
MOUNTS: list[tuple[str, tuple[str, ...], str, Expected]] = [
    ("a disk of 600 KB for the run", TRAIN, tmpfs("size=600k"), no("space", partial=True)),
    ("a disk of 1.2 MB, for one checkpoint", TRAIN, tmpfs("size=1200k"), no("space", partial=True)),
    ("a disk of 16 KB for the run", TRAIN, tmpfs("size=16k"), no("space", partial=True)),
    ("a disk with six files left", TRAIN, tmpfs("nr_inodes=6"), no("space|inode", partial=True)),
    ("a disk that has just enough", TRAIN, KEEP.replace("{options}", "size=6m"), Right(kept)),
    ("a disk that fills up with features", ("extract", "model.nemo", "audio", "out", "--device", "cpu"),
     tmpfs("size=40k", "out"), no("space", "out", partial=True)),
    ("a full disk for features", EXTRACT, tmpfs("size=4k", "out"), no("space", "out", partial=True)),
    ("a full disk for an export", ("export", "model.nemo", "out/x.nemo", "--format", "nemo"),
     tmpfs("size=100k", "out"), no("space", "x.nemo")),
    ("a full disk for a manifest", ("prepare", "audio", "--output", "out/m.jsonl"), tmpfs("size=4k,nr_inodes=2", "out"),
     no("space", "out/m.", partial=True)),
    ("a full temporary folder", TWO, space("mount -t tmpfs -o size=4k,nr_inodes=1 tmpfs $TMPDIR"), BOTH),
    ("a read-only folder", TRAIN, space(READ_ONLY), no("runs", "exp_dir")),
    ("a read-only folder, extract", EXTRACT, space(READ_ONLY), no("out")),
    ("a read-only folder, prepare", PREPARE, space(READ_ONLY), no("m.jsonl")),
    ("a read-only folder, info", INFO, space(READ_ONLY), SHOWN),
    ("read-only data, and runs elsewhere", TRAIN, space(
        "mkdir runs && mount --bind . . && cd $PWD && mount --bind runs runs && mount -o remount,ro,bind . && cd $PWD"),
     Right(as_ever("whole"))),
    ("no shared memory, two ranks", TWO, space("mount -t tmpfs -o size=4k,nr_inodes=1 tmpfs /dev/shm"),
     Either(no("/dev/shm", partial=True), BOTH)),
    ("little shared memory, workers", WORKERS, space("mount -t tmpfs -o size=64k tmpfs /dev/shm"),
     Either(no("/dev/shm", partial=True, codes=(1, 75)), ONE)),
    ("read-only shared memory", TWO, space("mount -t tmpfs -o ro tmpfs /dev/shm"),
     Either(no("/dev/shm", partial=True), BOTH)),
    ("no /proc", TRAIN, space("mount -t tmpfs tmpfs /proc"), Either(no("/proc"), ONE)),
    ("no network, one rank", TRAIN, space("true", "n"), ONE),
    ("no network, two ranks", TWO, space("true", "n"), no("loopback")),
    ("a network with only loopback", TWO, space("ip link set lo up", "n"), BOTH),
    ("a host name that nobody knows", TWO, space("hostname not-in-any-dns.invalid", "u"), BOTH),
    ("process 1 of a container", TWO, space("mount -t proc proc /proc", "pf"), BOTH),
    ("a clock that starts at a million seconds", TWO, space("true", "Tf --monotonic 1000000 --boottime 1000000"), BOTH),
    ("root without power over other people's files", TRAIN,
     'chmod 555 .; exec setpriv --bounding-set -dac_override,-dac_read_search --inh-caps -dac_override,-dac_read_search'
     ' "$@"', no("runs", "exp_dir")),
    ("a manifest that may not be read", TRAIN,
     'chmod 000 train.jsonl; exec setpriv --bounding-set -dac_override,-dac_read_search '
     '--inh-caps -dac_override,-dac_read_search "$@"', no("train.jsonl")),
    ("a folder that may not be entered", EXTRACT,
     'mkdir out; chmod 000 out; exec setpriv --bounding-set -dac_override,-dac_read_search '
     '--inh-caps -dac_override,-dac_read_search "$@"', no("out")),
]  # fmt: skip


# ------------------------------------------------------------------------------------------------------------ the rest


def dated(seconds: float) -> Setup:
    """All files are from this time: before 1970, or far in the future."""

    def setup(folder: Path) -> None:
        model(folder)
        for path in [folder, *folder.rglob("*")]:
            os.utime(path, (seconds, seconds))

    return setup


def stale_index(folder: Path, command: list[str]) -> str | None:
    """A manifest is replaced by one of the same size and time: its old index must not decide what is read."""
    in_process([*command, f"trainer.max_steps={BASE_STEPS}", "exp_manager.name=first"], folder, {}, 90)
    manifest, index = folder / "train.jsonl", folder / "train.jsonl.idx"
    if not index.exists():
        return None
    damaged = bytearray(index.read_bytes())
    damaged[len(damaged) // 2] ^= 255
    index.write_bytes(bytes(damaged))
    os.utime(index, (time.time(), manifest.stat().st_mtime))
    shutil.rmtree(folder / "runs")
    outcome = in_process(command, folder, {}, 90)
    return f"exit code {outcome.code}: {outcome.message}" if outcome.code else as_ever("whole")(folder, outcome)


def port_in_use(folder: Path, command: list[str]) -> str | None:
    """A port that somebody listens on is named; with none given a free one is chosen."""
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        variables = {"MASTER_PORT": str(port), "MASTER_ADDR": "127.0.0.1"}
        outcome = in_process(command, folder, variables, 90)
    if outcome.code != 1 or str(port) not in outcome.message or "Traceback" in outcome.text:
        return f"exit code {outcome.code}: {outcome.message[-300:]}"
    return None


def slow_reader(folder: Path, command: list[str]) -> str | None:
    """The terminal is frozen (Ctrl-S) for a while: training waits or goes on, and ends well."""
    process = start(command, folder, {}, '"$@" 2>&1 | (sleep 15; cat > /dev/null); exit ${PIPESTATUS[0]}')
    code = process.wait(120)
    return f"exit code {code}" if code else as_ever("two_ranks")(folder, Outcome(0, "", "", 0))


def resumed_elsewhere(folder: Path, command: list[str]) -> str | None:
    """A run is moved to another folder with all its data, and resumed there."""
    Fixture.run(folder)
    other = folder.parent / "other/folder"
    for name in ("home", "tmp"):
        (other.parent / name).mkdir(parents=True)
    folder.rename(other)
    folder.mkdir()
    outcome = in_process(command, other, {}, 90)
    wrong = f"exit code {outcome.code}: {outcome.message}" if outcome.code else resumed(other, outcome)
    shutil.rmtree(other.parent)
    return wrong


def with_long_tmp(folder: Path, command: list[str]) -> str | None:
    path = folder.parent / "tmp" / ("x" * 120)
    path.mkdir()
    outcome = in_process(command, folder, {"TMPDIR": str(path)}, 120)
    if outcome.code != 0 or "Traceback" in outcome.text:
        return f"exit code {outcome.code}: {outcome.text[-300:]}"
    left = [found.name for found in path.iterdir()]
    return f"left in TMPDIR: {left}" if left else as_ever("two_ranks")(folder, outcome)


ACTS: list[tuple[str, tuple[str, ...], Callable[[Path, list[str]], str | None]]] = [
    ("a damaged index", TRAIN, stale_index),
    ("MASTER_PORT is in use", TWO, port_in_use),
    ("output that nobody reads for 15 s", (*TWO, "watchdog.floor_s=3"), slow_reader),
    ("a run that was moved", TRAIN, resumed_elsewhere),
    ("TMPDIR is very long", (*TWO, "model.train_ds.num_workers=1"), with_long_tmp),
]


def trials() -> Iterator[Trial]:
    for name, command, variables, expected in VARIABLES:
        yield Trial("environment", name, command, expected, model, variables, own_process=True, limit_s=90)
    for name, command, shell, expected in SHELLS:
        yield Trial("environment", name, command, expected, model, {"PYTHON": sys.executable}, shell=shell, limit_s=90)
    if os.geteuid() == 0:
        for name, command, shell, expected in MOUNTS:
            yield Trial("environment", name, command, expected, model, shell=shell, limit_s=120)
    for seconds, name in ((-86_400.0 * 3000, "1961"), (4_102_444_800.0, "2100")):
        yield Trial("environment", f"all files are from {name}, training", TRAIN, ONE, dated(seconds))
        yield Trial("environment", f"all files are from {name}, prepare", PREPARE, MEASURED, dated(seconds))
    for name, command, act in ACTS:
        yield Trial("environment", name, command, ONE, model, act=act)
