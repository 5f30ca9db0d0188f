"""What surrounds a command: limits, small disks, missing homes, closed outputs, locales, schedulers' variables.

Mounts are made in a name space of the trial's own, which ends with it; without root those trials are left out.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np
import soundfile
import torch
from benchmarks.hostile.harness import (
    RATE,
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
    losses,
    pretrain,
    replaced,
    resume,
    resumed,
    rows,
    said,
    same_features,
    speech,
    trained,
    write_lines,
)
from safetensors.torch import load_file

GROUP = "environment"
EXTRACT = ["extract", "model.nemo", "audio/0.wav", "out", "--device", "cpu"]
PREPARE = ["prepare", "audio", "--output", "new.jsonl", "--workers", "1"]
PROBE = ["probe", "model.nemo", "--train", "l.jsonl", "--test", "l.jsonl", "--label", "label", "--output", "probe"]
TWO = pretrain("trainer.devices=2")
WORKERS = pretrain("model.train_ds.num_workers=2")
TRAINED = Right(trained)
FEATURES = Right(same_features)
STOPPED = (1, 75)
Environment = Mapping[str, str | None]


def model(folder: Path) -> None:
    shutil.copy(Fixture.path / "model.nemo", folder)
    lines = [{"audio_filepath": f"audio/{i}.wav", "duration": 1.6 + 0.1 * i, "label": "äb"[i % 2]} for i in range(8)]
    write_lines(folder / "l.jsonl", lines)


def model_and_run(folder: Path) -> None:
    model(folder)
    Fixture.run(folder)


def accented(folder: Path) -> None:
    """A corpus whose names need more than ASCII."""
    model(folder)
    (folder / "Müller – é").mkdir()
    for i in range(4):
        soundfile.write(folder / f"Müller – é/größe {i}.wav", speech(2 * RATE, i), RATE)
    lines = [{"audio_filepath": f"Müller – é/größe {i}.wav", "duration": 2.0, "text": "日本"} for i in range(4)]
    (folder / "Wörter.jsonl").write_text(
        "".join(json.dumps(line, ensure_ascii=False) + "\n" for line in lines), encoding="utf-8"
    )


# -------------------------------------------------------------------------------------------------------- what is right


def or_refused(right: Right, *words: str, partial: bool = False) -> Either:
    return Either(Refused(words, partial=partial, codes=(1, 2, 75)), right)


def four_lines(folder: Path, outcome: Outcome) -> str | None:
    lines = (folder / "new.jsonl").read_text(encoding="utf-8").splitlines()
    return None if len(lines) == 4 else f"{len(lines)} lines"


def eight_lines(folder: Path, outcome: Outcome) -> str | None:
    lines = [json.loads(line) for line in (folder / "new.jsonl").read_text().splitlines()]
    wrong = [line for line in lines if not (folder / line["audio_filepath"]).is_file()]
    return None if len(lines) == 8 and not wrong else f"{len(lines)} lines, {len(wrong)} without a file"


def four_features(folder: Path, outcome: Outcome) -> str | None:
    found = [np.load(path) for path in (folder / "out").rglob("*.npy")]
    return None if len(found) == 4 and all(np.isfinite(one).all() for one in found) else f"{len(found)} feature files"


def near_features(folder: Path, outcome: Outcome) -> str | None:
    """As `same_features`, where torch does not know the processor and rounds otherwise."""
    found = [np.load(path) for path in (folder / "out").rglob("*.npy")]
    same = len(found) == 1 and np.allclose(found[0], Fixture.feature(), atol=1e-5)
    return None if same else "features differ from those of an undisturbed run"


def page(name: str) -> Check:
    def check(folder: Path, outcome: Outcome) -> str | None:
        text = (folder / name).read_text(encoding="utf-8")
        return None if "</html>" in text else f"{name} is not whole"

    return check


def probed(folder: Path, outcome: Outcome) -> str | None:
    found = json.loads((folder / "probe/results.json").read_text())
    return None if 0 <= found["encoder"]["accuracy"] <= 1 else "no accuracy"


def exported(folder: Path, outcome: Outcome) -> str | None:
    found, expected = (
        load_file(path / name) for path, name in ((folder, "new.safetensors"), (Fixture.path, "model.safetensors"))
    )
    same = found.keys() == expected.keys() and all(torch.equal(found[key], expected[key]) for key in found)
    return None if same else "not the tensors that an undisturbed export writes"


def four_steps(folder: Path, outcome: Outcome) -> str | None:
    wrong = trained(folder, outcome)
    steps = len([row for row in rows(folder / RUN) if row["train_loss"]])
    if not (folder / RUN / "checkpoints/run.nemo").is_file():
        return "no model at the end"
    return wrong or (None if steps == 4 else f"{steps} steps in metrics.csv")


def went_on(folder: Path, outcome: Outcome) -> str | None:
    """As `resumed`, where nothing can be said."""
    return None if losses(Fixture.path / "runs/whole") == losses(folder / RUN) else "losses differ"


def stopped(*words: str, empty: Sequence[str] = ()) -> Right:
    """Ended for want of space: it says so, and `copy`, what there was on the small disk, has no half-written file."""

    def check(folder: Path, outcome: Outcome) -> str | None:
        missing = [word for word in words if not any(part in outcome.message.lower() for part in word.split("|"))]
        if missing or not outcome.message:
            return f"the message does not have {missing}: {outcome.message[-200:]}"
        there = [path for pattern in empty for path in (folder / "copy").rglob(pattern) if path.is_file()]
        return f"half-written: {[path.name for path in there]}" if there else None

    return Right(check, codes=STOPPED)


# ------------------------------------------------------------------------------------------------------ shells and mounts


def mounted(*mounts: str, then: str = 'exec "$@"', flags: str = "-m") -> str:
    """A bash line that mounts in a name space of its own, then runs the command."""
    script = " && ".join(mounts)
    return f"exec unshare {flags} bash -c '{script or 'true'} || exit 99\n{then}' bash \"$@\""


def small(size: str, options: str = "") -> str:
    """A small disk in the folder `small`; what is on it at the end is copied to `copy`."""
    mount = f"mkdir -p small && mount -t tmpfs -o size={size}{options} none small"
    return mounted(mount, then='"$@"; code=$?; cp -r small copy; exit $code')


READ_ONLY = "mount --bind {0} {0} && mount -o remount,bind,ro {0}"
NO_NAMES = "mount --bind /dev/null /etc/passwd"
NO_HOSTS = "mount --bind /dev/null /etc/hosts && mount --bind /dev/null /etc/resolv.conf"
EXEC = 'exec "$@"'
LIMITED = '(ulimit -f {}; "$@") 2>&1 | cat >&2; exit ${{PIPESTATUS[0]}}'
READ_ONLY_BUT_RUNS = (
    'mkdir -p runs && mount --bind "$PWD" "$PWD" && cd "$PWD" && mount --bind runs runs && '
    'mount -o remount,bind,ro "$PWD"'
)
IGNORING_CHILDREN = (
    'exec "$1" -c \'import os, signal, sys; signal.signal(signal.SIGCHLD, signal.SIG_IGN); '
    'os.execv(sys.argv[1], sys.argv[1:])\' "$@"'
)
BLOCKED_SIGNALS = (
    'exec "$1" -c \'import os, signal, sys; signal.pthread_sigmask(signal.SIG_BLOCK, [15, 10, 17]); '
    'os.execv(sys.argv[1], sys.argv[1:])\' "$@"'
)

Row = tuple[str, Sequence[str], Expected, str]

LIMITS: list[Row] = [
    ("64 open files, two workers", WORKERS, or_refused(TRAINED, "open files|ulimit", partial=True), f"ulimit -n 64; {EXEC}"),
    ("24 open files, two ranks", TWO, or_refused(TRAINED, "open files|ulimit", partial=True), f"ulimit -n 24; {EXEC}"),
    ("20 open files, extract", EXTRACT, or_refused(FEATURES, "open files|ulimit", partial=True), f"ulimit -n 20; {EXEC}"),
    ("16 open files, prepare", PREPARE, or_refused(Right(eight_lines), "open files|ulimit", partial=True), f"ulimit -n 16; {EXEC}"),
    ("files of 200 KB at most, pretrain", pretrain(), stopped("too large"), f"ulimit -f 200; {EXEC}"),
    ("files of 200 KB at most, export", ["export", "model.nemo", "new.safetensors", "--format", "safetensors"], Refused(("new.safetensors", "too large")), f"ulimit -f 200; {EXEC}"),
    ("files of 1 KB at most, extract", EXTRACT, Refused(("too large|ulimit -f",), partial=True), LIMITED.format(1)),
    ("files of 0 bytes, prepare", PREPARE, Refused(("too large",), partial=True), LIMITED.format(0)),
    ("a small stack", WORKERS, TRAINED, f"ulimit -s 512; {EXEC}"),
    ("an unlimited stack", WORKERS, TRAINED, f"ulimit -s unlimited; {EXEC}"),
    ("3 GB of addresses", WORKERS, or_refused(TRAINED, "memory", partial=True), f"ulimit -v 3000000; {EXEC}"),
    ("no locked memory, no message queues", TWO, TRAINED, f"ulimit -l 0 -q 0; {EXEC}"),
    ("one core", WORKERS, TRAINED, 'exec taskset -c 0 "$@"'),
    ("children ignored, as some daemons leave it, two ranks", TWO, TRAINED, IGNORING_CHILDREN),
    ("children ignored, two workers", WORKERS, TRAINED, IGNORING_CHILDREN),
    ("children ignored, prepare", PREPARE, Right(eight_lines), IGNORING_CHILDREN),
    ("signals blocked by the parent", TWO, TRAINED, BLOCKED_SIGNALS),
    ("TERM, INT and HUP ignored (nohup)", TWO, TRAINED, f"trap '' TERM INT HUP; {EXEC}"),
    ("mask 0777 for new files", pretrain(), or_refused(TRAINED, "umask|permission", partial=True), f"umask 0777; {EXEC}"),
]  # fmt: skip

DISKS: list[Row] = [
    ("400 KB for the run", pretrain("exp_manager.exp_dir=small"), stopped("no space", empty=("*.ckpt", "*.nemo")), small("400k")),
    ("1,100 KB for the run: one checkpoint", pretrain("exp_manager.exp_dir=small"), stopped("no space", empty=("*.nemo", "*tmp*")), small("1100k")),
    ("12 inodes for the run", pretrain("exp_manager.exp_dir=small"), or_refused(TRAINED, "no space|inode", partial=True), small("40m", ",nr_inodes=12")),
    ("4 KB for features", ["extract", "model.nemo", "train.jsonl", "small/out", "--device", "cpu"], stopped("no space", empty=("*.npy", "*tmp*")), small("4k")),
    ("a shard does not fit", ["extract", "model.nemo", "train.jsonl", "small/out", "--device", "cpu", "--format", "shards"], stopped("no space", empty=("*.safetensors", "*tmp*")), small("24k")),
    ("a model does not fit", ["export", "model.nemo", "small/new.nemo", "--format", "nemo"], stopped("no space", empty=("*",)), small("200k")),
    ("a folder for transformers does not fit", ["export", "model.nemo", "small/hf"], stopped("no space", empty=("*.safetensors",)), small("200k")),
    ("shards do not fit", ["prepare", "audio", "--output", "small/m.jsonl", "--shards", "2", "--workers", "1"], stopped("no space", empty=("*.tar", "*tmp*")), small("100k")),
    ("a page does not fit", ["inspect", "train.jsonl", "--output", "small/inspect.html"], stopped("no space|inspect.html", empty=("*.html",)), small("16k")),
    ("a report does not fit", ["report", str(RUN), "--output", "small/report.html"], stopped("no space|report.html", empty=("*.html",)), small("8k")),
    ("data on a disk without writing, no home", pretrain(), TRAINED, mounted(READ_ONLY_BUT_RUNS, "unset HOME")),
    ("run folder on a disk without writing", resume(), Refused((str(RUN.parent),)), mounted(READ_ONLY.format("runs"))),
    ("features to a disk without writing", [*EXTRACT[:3], "audio/out", "--device", "cpu"], Refused(("audio/out", "read-only")), mounted(READ_ONLY.format("audio"))),
    ("temporary folder full", WORKERS, or_refused(TRAINED, "space|tmp", partial=True), mounted('mount -t tmpfs -o size=4k none "$TMPDIR"', 'head -c 9000 /dev/zero > "$TMPDIR/x" 2>/dev/null; true')),
    ("temporary folder without writing, two ranks", TWO, or_refused(TRAINED, "tmp|read-only", partial=True), mounted('mount -t tmpfs -o ro none "$TMPDIR"')),
    ("shared memory of 64 KB, two workers", WORKERS, or_refused(TRAINED, "shm", partial=True), mounted("mount -t tmpfs -o size=64k none /dev/shm")),
    ("shared memory without writing, two ranks", TWO, or_refused(TRAINED, "shm", partial=True), mounted("mount -t tmpfs -o ro none /dev/shm")),
    ("no /proc, two ranks", TWO, or_refused(TRAINED, "proc", partial=True), mounted("mount -t tmpfs none /proc")),
    ("no /proc, extract", EXTRACT, or_refused(Right(near_features), "proc"), mounted("mount -t tmpfs none /proc")),
    ("no /sys", WORKERS, TRAINED, mounted("mount -t tmpfs none /sys")),
    ("first process of a container, two ranks", TWO, TRAINED, mounted(flags="-m -p -f --mount-proc")),
    ("first process of a container, two workers", WORKERS, TRAINED, mounted(flags="-m -p -f --mount-proc")),
    ("a user without a name", WORKERS, TRAINED, mounted(NO_NAMES, "unset USER LOGNAME HOME")),
    ("a user without a name, features", EXTRACT, FEATURES, mounted(NO_NAMES, "unset USER LOGNAME HOME")),
    ("no hosts file, two ranks", TWO, TRAINED, mounted(NO_HOSTS)),
    ("a host name nobody knows, two ranks", TWO, TRAINED, mounted("hostname node-0.of.nowhere", NO_HOSTS, flags="-m -u")),
    ("no network, one rank", pretrain(), TRAINED, mounted(flags="-n")),
    ("no network, a model of the hub", ["extract", "nvidia/ssl_en_nest_large_v1.0", "audio/0.wav", "out", "--device", "cpu"], Refused(("ssl_en_nest_large_v1.0",)), mounted(flags="-n")),
    ("run folder is a link to another disk", resume(), Right(resumed), mounted("mkdir far && mount -t tmpfs none far && mv runs far/ && ln -s far/runs runs", then='"$@"; code=$?; rm runs; cp -r far/runs runs; exit $code')),
]  # fmt: skip

GONE = f"mkdir gone; cd gone; rmdir ../gone; {EXEC}"
OUTPUTS: list[Row] = [
    ("working folder removed, info", ["info", "nest_fast-conformer"], or_refused(Right(said("encoder", then=ended_well)), "working|folder"), GONE),
    ("working folder removed, pretrain", pretrain(), Refused(("working|folder",)), GONE),
    ("working folder removed, doctor", ["doctor"], or_refused(Right(ended_well), "working|folder"), GONE),
    ("resumed with all outputs closed", resume(), Right(went_on), f"exec >&- 2>&- <&-; {EXEC}"),
    ("resumed with errors to a full disk", resume(), Right(went_on), f"exec 2>/dev/full; {EXEC}"),
    ("errors opened for reading (2< for 2>)", pretrain(), Right(four_steps), f"exec 2</dev/null; {EXEC}"),
    ("two ranks with all outputs closed", TWO, Right(four_steps), f"exec >&- 2>&- <&-; {EXEC}"),
    ("two ranks into a full disk", TWO, Right(four_steps), f"exec >/dev/full 2>&1; {EXEC}"),
    ("two ranks into head", TWO, Right(four_steps), '"$@" 2>&1 | head -n 1; exit ${PIPESTATUS[0]}'),
    ("extract into head -c 0", EXTRACT, FEATURES, '"$@" 2>&1 | head -c 0; exit ${PIPESTATUS[0]}'),
    ("extract with all outputs closed", EXTRACT, FEATURES, f"exec >&- 2>&- <&-; {EXEC}"),
    ("extract into a full disk", EXTRACT, FEATURES, f"exec >/dev/full 2>&1; {EXEC}"),
    ("prepare with outputs closed", PREPARE, Right(eight_lines), f"exec >&- 2>&-; {EXEC}"),
    ("prepare into a full disk", PREPARE, Right(eight_lines), f"exec >/dev/full; {EXEC}"),
    ("inspect into a full disk", ["inspect", "train.jsonl"], Right(page("inspect.html")), f"exec >/dev/full; {EXEC}"),
    ("report with outputs closed", ["report", str(RUN), "--output", "r.html"], Right(page("r.html")), f"exec >&- 2>&-; {EXEC}"),
    ("probe into a full disk", PROBE, Right(probed), f"exec >/dev/full; {EXEC}"),
    ("export with output closed", ["export", "model.nemo", "new.safetensors", "--format", "safetensors"], Right(exported), f"exec >&-; {EXEC}"),
    ("info into head", ["info", "model.nemo"], or_refused(Right(said("encoder", then=ended_well)), "pipe"), '"$@" | (read -r x; echo encoder $x); exit ${PIPESTATUS[0]}'),
    ("refused with output closed", pretrain("model.encoder.n_layers=-1"), Refused(("n_layers",)), f"exec >&-; {EXEC}"),
]  # fmt: skip

ASCII: Environment = {"LANG": "C", "LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"}
ACCENTED = pretrain("model.train_ds.manifest_filepath=Wörter.jsonl")
NEW = ["prepare", "Müller – é", "--output", "new.jsonl", "--workers", "1"]
VARIABLES: list[tuple[str, Sequence[str], Expected, Environment]] = [
    ("locale C, names with accents, pretrain", ACCENTED, TRAINED, {"LANG": "C", "LC_ALL": "C"}),
    ("ASCII locale, names with accents, pretrain", ACCENTED, or_refused(TRAINED, "PYTHONUTF8", partial=True), ASCII),
    ("locale C, names with accents, prepare", NEW, Right(four_lines), {"LANG": "C", "LC_ALL": "C"}),
    ("ASCII locale, names with accents, prepare", NEW, or_refused(Right(four_lines), "PYTHONUTF8", partial=True), ASCII),
    ("locale C, names with accents, extract", ["extract", "model.nemo", "Wörter.jsonl", "out", "--device", "cpu"], Right(four_features), {"LANG": "C", "LC_ALL": "C"}),
    ("ASCII locale, names with accents, extract", ["extract", "model.nemo", "Wörter.jsonl", "out", "--device", "cpu"], or_refused(Right(four_features), "PYTHONUTF8", partial=True), ASCII),
    ("ASCII locale, names with accents, inspect", ["inspect", "Wörter.jsonl"], Right(page("inspect.html")), ASCII),
    ("ASCII locale, names with accents, probe", PROBE, Right(probed), ASCII),
    ("a locale that is not installed", ACCENTED, TRAINED, {"LANG": "de_AT.ISO-8859-15", "LC_ALL": "de_AT.ISO-8859-15"}),
    ("output in ASCII, inspect", ["inspect", "Wörter.jsonl"], Right(page("inspect.html")), {"PYTHONIOENCODING": "ascii"}),
    ("output in ASCII, extract", EXTRACT, FEATURES, {"PYTHONIOENCODING": "ascii:strict"}),
    ("output in cp1252, pretrain", ACCENTED, TRAINED, {"PYTHONIOENCODING": "cp1252:strict"}),
    ("output in ASCII, a refusal", pretrain("model.train_ds.manifest_filepath=Wärter.jsonl"), Refused(("rter.jsonl",)), {"PYTHONIOENCODING": "ascii:strict"}),
    ("a terminal of no columns", ["inspect", "train.jsonl"], Right(page("inspect.html")), {"COLUMNS": "0", "LINES": "0"}),
    ("a terminal of one column", ["info", "model.nemo"], Right(said("encoder", then=ended_well)), {"COLUMNS": "1", "TERM": "dumb"}),
    ("COLUMNS is a word", ["info", "model.nemo"], Right(said("encoder", then=ended_well)), {"COLUMNS": "wide", "TERM": None}),
    ("home that does not exist", EXTRACT, FEATURES, {"HOME": "/nonexistent", "XDG_CACHE_HOME": None}),
    ("home is a file", pretrain(), TRAINED, {"HOME": "/etc/hostname"}),
    ("home is empty", pretrain(), TRAINED, {"HOME": "", "TMPDIR": ""}),
    ("temporary folder that does not exist, two ranks", TWO, TRAINED, {"TMPDIR": "/nonexistent/tmp"}),
    ("cache folder is a file", pretrain(), TRAINED, {"NEST_SSL_CACHE_DIR": "/etc/hostname/x"}),
    ("time zone that does not exist", pretrain(), TRAINED, {"TZ": ":Mars/Olympus"}),
    ("Python without asserts and docstrings", pretrain(), TRAINED, {"PYTHONOPTIMIZE": "2"}),
    ("Python without asserts, help", ["pretrain", "--help"], Right(said("KEY=VALUE", then=ended_well)), {"PYTHONOPTIMIZE": "2"}),
    ("Python without asserts, a refusal", pretrain("model.encoder.n_heads=5"), Refused(("n_heads",)), {"PYTHONOPTIMIZE": "2"}),
    ("a preloaded library that is not there", pretrain(), TRAINED, {"LD_PRELOAD": "/opt/gone/libjemalloc.so.2"}),
    ("OMP_NUM_THREADS of 0", WORKERS, TRAINED, {"OMP_NUM_THREADS": "0"}),
    ("OMP_NUM_THREADS for nested loops", TWO, TRAINED, {"OMP_NUM_THREADS": "2,4"}),
    ("OMP_NUM_THREADS is a word", TWO, or_refused(TRAINED, "OMP_NUM_THREADS"), {"OMP_NUM_THREADS": "auto"}),
    ("no GPUs visible, as a scheduler says it", pretrain("trainer.accelerator=auto"), TRAINED, {"CUDA_VISIBLE_DEVICES": "NoDevFiles"}),
    ("sbatch with four tasks, no srun", pretrain(), or_refused(TRAINED, "SLURM|srun|task|trainer.devices"), {"SLURM_JOB_ID": "4711", "SLURM_NTASKS": "4", "SLURM_PROCID": "0", "SLURM_LOCALID": "0", "SLURM_NODEID": "0", "SLURM_NNODES": "1", "SLURM_JOB_NUM_NODES": "1", "SLURM_JOB_NODELIST": "node0", "SLURM_TASKS_PER_NODE": "4"}),
    ("salloc with two nodes, on the login node", pretrain(), or_refused(TRAINED, "SLURM|srun|task|num_nodes"), {"SLURM_JOB_ID": "4711", "SLURM_NNODES": "2", "SLURM_JOB_NUM_NODES": "2", "SLURM_JOB_NODELIST": "node[0-1]", "SLURM_NTASKS": "2"}),
    ("a shell of srun --pty", TWO, or_refused(TRAINED, "SLURM|srun|task|trainer.devices"), {"SLURM_JOB_ID": "4711", "SLURM_STEP_ID": "0", "SLURM_NTASKS": "1", "SLURM_PROCID": "0", "SLURM_LOCALID": "0", "SLURM_NODEID": "0", "SLURM_NNODES": "1", "SLURM_STEP_NODELIST": "node0", "SLURM_PTY_PORT": "4"}),
    ("SLURM_NTASKS is a word", pretrain(), or_refused(TRAINED, "SLURM_NTASKS"), {"SLURM_JOB_ID": "4711", "SLURM_NTASKS": "4(x2)", "SLURM_PROCID": "0", "SLURM_LOCALID": "0", "SLURM_NODEID": "0"}),
    ("RANK beyond WORLD_SIZE", pretrain(), Refused(("RANK",)), {"RANK": "5", "WORLD_SIZE": "2", "LOCAL_RANK": "0", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29501"}),
    ("RANK without WORLD_SIZE", pretrain(), or_refused(TRAINED, "WORLD_SIZE"), {"RANK": "3"}),
    ("WORLD_SIZE without RANK", pretrain(), or_refused(TRAINED, "RANK"), {"WORLD_SIZE": "8"}),
    ("variables of torchrun left empty", TWO, or_refused(TRAINED, "RANK|WORLD_SIZE"), {"RANK": "", "WORLD_SIZE": "", "LOCAL_RANK": ""}),
    ("LOCAL_RANK is a word", pretrain(), Refused(("LOCAL_RANK",)), {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "$SLURM_LOCALID", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29502"}),
    ("LOCAL_RANK below 0", pretrain(), Refused(("LOCAL_RANK",)), {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "-1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29503"}),
    ("NODE_RANK of the second machine, one machine", TWO, Refused(("NODE_RANK",)), {"NODE_RANK": "1"}),
    ("NODE_RANK is a word", TWO, Refused(("NODE_RANK",)), {"NODE_RANK": "node0", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29504"}),
    ("the last port", TWO, or_refused(TRAINED, "MASTER_PORT"), {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "65535"}),
    ("port 0", TWO, or_refused(TRAINED, "MASTER_PORT"), {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "0"}),
    ("address and port are empty", TWO, or_refused(TRAINED, "MASTER_ADDR|MASTER_PORT"), {"MASTER_ADDR": "", "MASTER_PORT": ""}),
    ("address as a URL", TWO, or_refused(TRAINED, "MASTER_ADDR"), {"MASTER_ADDR": "tcp://127.0.0.1", "MASTER_PORT": "29505"}),
    ("address with its port", TWO, or_refused(TRAINED, "MASTER_ADDR"), {"MASTER_ADDR": "127.0.0.1:29500", "MASTER_PORT": "29506"}),
    ("a proxy that is not there, two ranks", TWO, TRAINED, {"http_proxy": "http://127.0.0.1:9", "https_proxy": "http://127.0.0.1:9", "ALL_PROXY": "socks5://127.0.0.1:9"}),
    ("a proxy that is not there, a model of the hub", ["info", "nvidia/ssl_en_nest_large_v1.0"], Refused(("ssl_en_nest_large_v1.0",)), {"https_proxy": "http://127.0.0.1:9"}),
    ("variables of mpirun", pretrain(), or_refused(TRAINED, "OMPI|mpirun"), {"OMPI_COMM_WORLD_SIZE": "2", "OMPI_COMM_WORLD_RANK": "1", "OMPI_COMM_WORLD_LOCAL_RANK": "1"}),
]  # fmt: skip


def folder_of(name: str) -> Setup:
    """A folder in the working folder that has the name of a package, as loggers make them."""
    return replaced(lambda path: (path / "run-4711").mkdir(parents=True), Path(name))


FOLDERS: list[tuple[str, Setup, Sequence[str], Expected]] = [
    ("a folder wandb, W&B is not installed", folder_of("wandb"), pretrain("exp_manager.create_wandb_logger=true", "++exp_manager.wandb_logger_kwargs={name: a, project: b}"), Refused(("wandb",))),
    ("folders tensorboard and lightning_logs", lambda folder: [folder_of(name)(folder) for name in ("tensorboard", "lightning_logs")], pretrain("exp_manager.create_tensorboard_logger=true"), TRAINED),
    ("a folder runs that is a file", replaced(lambda path: path.write_text("see /scratch"), Path("runs")), pretrain(), Refused(("runs",))),
]  # fmt: skip


def can_mount() -> bool:
    """Root may not be enough: containers often forbid it."""
    if os.geteuid():
        return False
    tried = subprocess.run(["unshare", "-m", "mount", "-t", "tmpfs", "none", "/mnt"], capture_output=True, check=False)
    return tried.returncode == 0


def trials() -> list[Trial]:
    disks = DISKS if can_mount() else []
    return [
        *(
            Trial(GROUP, name, command, expected, model_and_run if uses_run(command) else model, shell=shell)
            for name, command, expected, shell in [*LIMITS, *disks, *OUTPUTS]
        ),
        *(
            Trial(GROUP, name, command, expected, accented, variables, own_process=True)
            for name, command, expected, variables in VARIABLES
        ),
        *(Trial(GROUP, name, command, expected, setup, own_process=True) for name, setup, command, expected in FOLDERS),
    ]


def uses_run(command: Sequence[str]) -> bool:
    return command[0] == "report" or list(command) == resume()
