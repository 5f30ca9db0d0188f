"""Machines, shells, schedulers and users that are not as they should be."""

from __future__ import annotations

import os
import shutil
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks.hostile.harness import (
    RUN,
    Check,
    Either,
    Expected,
    Fixture,
    Outcome,
    Refused,
    Right,
    Trial,
    both,
    ended_well,
    losses,
    only_run,
    resume,
    resumed,
    trained,
)

CODES = (1, 2, 75)
WORKERS = ("model.train_ds.num_workers=2",)
TWO = ("trainer.devices=2",)
ABSOLUTE = (
    *(
        "model.train_ds.manifest_filepath={folder}/train.jsonl",
        "model.validation_ds.manifest_filepath={folder}/valid.jsonl",
    ),
    "exp_manager.exp_dir={folder}/runs",
)
NOBODY = "setpriv --reuid=65534 --regid=65534 --clear-groups --inh-caps=-all --ambient-caps=-all"
OWN = Path.home()
IN_OWN = Path(sys.base_prefix).is_relative_to(OWN)
PYTHONS = OWN / Path(sys.base_prefix).relative_to(OWN).parts[0] if IN_OWN else OWN
OPEN = f"mount --bind {PYTHONS} /mnt && mount -t tmpfs tmpfs {OWN} && mkdir {PYTHONS} && mount --bind /mnt {PYTHONS}"
"""For an interpreter in root's own folder, which others may not enter: in a namespace, it has nothing else in it."""
OWNED = "chown -R 65534:65534 ../folder ../home ../tmp"


# -------------------------------------------------------------------------------------------------------- what is right


def whole(ranks: int = 1, run: Path | None = None) -> Right:
    """All steps were trained, and have the losses of the run in a plain environment."""

    def check(folder: Path, outcome: Outcome) -> str | None:
        expected = losses(Fixture.path / ("runs/whole" if ranks == 1 else "runs/two_ranks"))
        found = losses(folder / run if run else only_run(folder))
        different = sorted(step for step in expected | found if expected.get(step) != found.get(step))
        return f"losses differ from those of a plain environment at steps {different}" if different else None

    return Right(check)


def either(words: str, right: Right | None = None) -> Either:
    """A training that is right, or one that ends with these words; what it had written before may stay."""
    return Either(Refused((words,), partial=True, codes=CODES), right or whole())


def ended_with(*words: str, codes: tuple[int, ...] = (1,), partial: bool = True) -> Refused:
    return Refused(words, partial=partial, codes=codes)


def page(name: str, *words: str) -> Check:
    def check(folder: Path, outcome: Outcome) -> str | None:
        text = (folder / name).read_text()
        return None if "</html>" in text and all(word in text for word in words) else f"{name} is not whole"

    return check


# ------------------------------------------------------------------------------------------------------- shells, setups


def space(before: str, after: str = ":", flags: str = "-m") -> str:
    """A namespace of its own, in which `before` is done; nothing of it is left outside."""
    return f"""unshare {flags} bash -c '{{ {before}; }} || exit 99; "$@"; code=$?; {after}; exit $code' bash "$@" """


def disk(where: str, options: str, then: str = ":") -> str:
    return f"mkdir -p {where} && mount -t tmpfs -o {options} tmpfs {where} && {then}"


def limit(option: str, value: object) -> str:
    return f'ulimit {option} {value}; exec "$@"'


def nobody(first: str = OWNED, then: str = 'exec "$@"') -> str:
    """Root may do everything; this user may not."""
    way = f"{OPEN} && " if IN_OWN else ""
    user = f"exec {NOBODY} bash -c '{then}' bash"
    return f"""{first}; exec unshare -m bash -c "{way}exec \\"\\$@\\"" bash {user[5:]} "$@" """


def many(folder: Path) -> None:
    (folder / "many").mkdir()
    for i in range(400):
        os.link(folder / f"audio/{i % 8}.wav", folder / f"many/{i:05d}.wav")


def model(folder: Path) -> None:
    shutil.copy(Fixture.path / "model.nemo", folder)


def in_a_data_folder(folder: Path) -> None:
    (folder / "data").mkdir()
    for name in ("audio", "train.jsonl", "valid.jsonl"):
        (folder / name).rename(folder / "data" / name)


def foreign_names(folder: Path) -> None:
    for name in ("train.jsonl", "valid.jsonl"):
        text = (folder / name).read_text().replace("audio/0.wav", "audio/Ärger 你好.wav")
        (folder / name).write_text(text)
    (folder / "audio/0.wav").rename(folder / "audio/Ärger 你好.wav")


def reversed_times(folder: Path) -> None:
    """As after a copy without times, or on a machine whose clock was wrong: the newest file looks oldest."""
    files = sorted((folder / RUN / "checkpoints").iterdir(), key=lambda path: path.name != "last.ckpt")
    for i, path in enumerate(files):
        os.utime(path, (i * 2_000_000_000, i * 2_000_000_000))


def shadows(folder: Path) -> None:
    for name in ("yaml", "numpy", "logging", "monitor"):
        (folder / f"{name}.py").write_text("raise SystemExit('the wrong module')\n")


LONG = "t" * 120
SLURM = {"SLURM_JOB_ID": "17", "SLURM_JOBID": "17", "SLURM_NNODES": "1", "SLURM_JOB_NODELIST": "node1"}
BATCH = {"SLURM_PROCID": "0", "SLURM_LOCALID": "0", "SLURM_NODEID": "0", "SLURM_TASKS_PER_NODE": "4"}
EXTRACT = ["extract", "model.nemo", "many", "out", "--device", "cpu"]
PREPARE = ["prepare", "many", "--output", "out/m.jsonl", "--workers", "2"]
RO = "mount --bind data data && mount -o remount,bind,ro data"
FILL = "head -c 90m /dev/zero"

Row = tuple[str, Sequence[str], Expected, dict[str, Any]]


def limits() -> list[Row]:
    export = ["export", "model.nemo", "out.nemo", "--format", "nemo"]
    return [
        (
            "24 open files for two workers",
            resume(*WORKERS),
            either("open files|ulimit|descriptor"),
            {"shell": limit("-n", 24)},
        ),
        (
            "files of 100 KB at most for a training",
            resume(),
            ended_with("too large|size|ckpt"),
            {"shell": limit("-f", 100)},
        ),
        (
            "files of 50 KB at most for an export",
            export,
            ended_with("out.nemo", partial=False),
            {"shell": limit("-f", 50), "setup": model},
        ),
        ("an address space of 2 GB", resume(), either("memory"), {"shell": limit("-v", 2_000_000)}),
        (
            "a user who may have 12 processes",
            resume(*WORKERS),
            either("process|thread|resource"),
            {"shell": nobody(then='ulimit -u 12; exec "$@"')},
        ),
    ]


def folders() -> list[Row]:
    data = (
        "model.train_ds.manifest_filepath=data/train.jsonl",
        "model.validation_ds.manifest_filepath=data/valid.jsonl",
    )
    strange = 'mkdir -p $\'a\\nb "c" $d\' && cd $\'a\\nb "c" $d\' && cp -r ../audio ../*.jsonl . && exec "$@"'
    return [
        (
            "no HOME, and a user without a name",
            resume(),
            whole(),
            {"shell": nobody().replace("65534", "54321"), "HOME": None},
        ),
        ("a HOME that cannot be written, two ranks", resume(*TWO), whole(2), {"HOME": "/proc"}),
        ("a TMPDIR that does not exist", resume(*WORKERS), either("TMPDIR|temporary"), {"TMPDIR": "/no/such/folder"}),
        (
            "a TMPDIR with a very long path",
            resume(*WORKERS),
            either("TMPDIR"),
            {"shell": f'mkdir {LONG}; TMPDIR=$PWD/{LONG} exec "$@"'},
        ),
        (
            "a TMPDIR on a disk that is full",
            resume(*TWO, *WORKERS),
            either("TMPDIR|space|temporary", whole(2)),
            {"shell": space(disk("../tmp", "size=64k,nr_inodes=2", "{ head -c 1m /dev/zero > ../tmp/f; true; }"))},
        ),
        (
            "a working folder that was deleted",
            resume(*ABSOLUTE),
            either("folder|directory"),
            {"shell": 'mkdir gone; cd gone; rmdir ../gone; exec "$@"'},
        ),
        ("a working folder with a line break in its name", resume(), whole(), {"shell": strange}),
        (
            "a working folder with modules of well-known names",
            resume(*TWO),
            whole(2),
            {"shell": 'python=$1; shift; exec "$python" -P "$@"', "setup": shadows},
        ),
        (
            "data and HOME that are both read-only",
            resume(*data),
            either("NEST_SSL_CACHE_DIR"),
            {"shell": space(RO), "setup": in_a_data_folder, "HOME": "/proc"},
        ),
    ]


def disks() -> list[Row]:
    page_disk = disk("small", "size=24m", f"cp -r runs/run small/ && {{ {FILL} > small/fill 2> /dev/null; true; }}")
    return [
        (
            "a run folder on a disk of 300 KB",
            resume(),
            ended_with("space"),
            {"shell": space(disk("runs", "size=300k"))},
        ),
        (
            "a disk with six inodes",
            resume(),
            ended_with("space|inode"),
            {"shell": space(disk("runs", "size=50m,nr_inodes=6"))},
        ),
        (
            "a run folder on a read-only disk",
            resume(),
            ended_with("runs", partial=False),
            {"shell": space(disk("runs", "ro"))},
        ),
        (
            "a full disk for features",
            EXTRACT,
            ended_with("space"),
            {"shell": space(disk("out", "size=64k")), "setup": both(many, model)},
        ),
        (
            "a full disk for a prepared manifest",
            PREPARE,
            ended_with("space"),
            {"shell": space(disk("out", "size=16k")), "setup": many},
        ),
        (
            "a full disk for shards",
            [*PREPARE, "--shards", "2"],
            ended_with("space"),
            {"shell": space(disk("out", "size=1m")), "setup": many},
        ),
        (
            "a full disk for a report that is there already",
            ["report", "small/run"],
            Either(ended_with("space", partial=False), Right(page("runs/run/report.html"))),
            {
                "shell": space(page_disk, "rm runs/run/report.html; cp small/run/report.html runs/run"),
                "setup": Fixture.run,
            },
        ),
        (
            "64 KB of shared memory",
            resume(*WORKERS),
            either("/dev/shm|shared memory"),
            {"shell": space(disk("/dev/shm", "size=64k"))},
        ),
        (
            "read-only shared memory",
            resume(*TWO, *WORKERS),
            either("/dev/shm|shared memory", whole(2)),
            {"shell": space(disk("/dev/shm", "ro"))},
        ),
        (
            "a container without /proc and /sys",
            resume(*TWO),
            either("/proc", whole(2)),
            {"shell": space(disk("/sys", "ro") + " && " + disk("/proc", "ro"))},
        ),
    ]


def streams() -> list[Row]:
    return [
        ("a closed standard output", resume(), whole(), {"shell": 'exec "$@" >&-'}),
        ("three closed standard streams, two ranks", resume(*TWO), whole(2), {"shell": 'exec "$@" <&- >&- 2>&-'}),
        ("a standard output on a full disk", resume(), either(""), {"shell": 'exec "$@" > /dev/full'}),
        ("an error output on a full disk, two ranks", resume(*TWO), whole(2), {"shell": 'exec "$@" 2> /dev/full'}),
        (
            "a log reader that ends after a line",
            resume(),
            whole(),
            {"shell": '"$@" 2>&1 | head -1 > /dev/null; exit ${PIPESTATUS[0]}'},
        ),
        (
            "a table that is cut by head",
            ["info", "model.nemo"],
            Right(ended_well, codes=(0, 1, 141)),
            {"shell": '"$@" | head -1; exit ${PIPESTATUS[0]}', "setup": model},
        ),
    ]


def languages() -> list[Row]:
    ascii_only = {"LANG": None, "LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"}
    return [
        (
            "an ASCII locale, and audio with other names",
            resume(),
            either("utf|locale|encod"),
            {"setup": foreign_names, **ascii_only},
        ),
        (
            "an ASCII locale for a page with pictures",
            ["inspect", "train.jsonl"],
            Right(page("inspect.html", "×")),
            ascii_only,
        ),
        (
            "an output encoding that has no boxes",
            ["info", "model.nemo"],
            Right(ended_well),
            {"setup": model, "PYTHONIOENCODING": "ascii:strict"},
        ),
        (
            "a locale and a terminal that do not exist",
            resume(),
            whole(),
            {"LC_ALL": "xx_YY.odd", "TERM": "none", "COLUMNS": "-3"},
        ),
    ]


def variables() -> list[Row]:
    left_over = {"RANK": "1", "WORLD_SIZE": "2", "LOCAL_RANK": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29871"}
    proxy = {"https_proxy": "http://127.0.0.1:9", "http_proxy": "http://127.0.0.1:9", "HF_HOME": "/proc/nowhere"}
    return [
        (
            "GPUs in a variable that are not there",
            resume("trainer.accelerator=auto"),
            whole(),
            {"CUDA_VISIBLE_DEVICES": "7,GPU-no"},
        ),
        (
            "a port that is a word",
            resume(*TWO),
            either("MASTER_PORT", whole(2)),
            {"MASTER_ADDR": "localhost", "MASTER_PORT": "http"},
        ),
        (
            "the address of another job's machine",
            resume(*TWO),
            either("MASTER_ADDR|192.0.2.1", whole(2)),
            {"MASTER_ADDR": "192.0.2.1"},
        ),
        (
            "variables of a torchrun that is over",
            resume(),
            ended_with("RANK|torchrun|WORLD_SIZE", partial=False),
            left_over,
        ),
        (
            "a shell that salloc has opened for eight tasks",
            resume(),
            whole(),
            {**SLURM, "SLURM_NTASKS": "8", "SLURM_NPROCS": "8"},
        ),
        (
            "a batch script for four tasks, without srun",
            resume(),
            either("SLURM|srun|task"),
            {**SLURM, **BATCH, "SLURM_NTASKS": "4"},
        ),
        (
            "SLURM variables that are not numbers",
            resume(),
            either("SLURM"),
            {**SLURM, **BATCH, "SLURM_NTASKS": "many", "SLURM_JOB_NODELIST": "node[1-"},
        ),
        (
            "a number of threads that is a word",
            resume(),
            Right(trained),
            {"OMP_NUM_THREADS": "all", "MKL_NUM_THREADS": "-1"},
        ),
        (
            "a resumed run without asserts and docstrings",
            resume(),
            Right(resumed),
            {"PYTHONOPTIMIZE": "2", "setup": Fixture.run},
        ),
        ("Python in its development mode", resume(*WORKERS), whole(), {"PYTHONDEVMODE": "1"}),
        (
            "a dead proxy, and a model from the hub",
            ["extract", "nvidia/no_such_model", "audio/0.wav", "out", "--device", "cpu"],
            ended_with("nvidia/no_such_model", partial=False),
            proxy,
        ),
    ]


def permissions() -> list[Row]:
    others = "chown -R 65534:65534 ../home ../tmp audio *.jsonl; mkdir -p runs; chown root runs . ; chmod 755 runs ."
    checkpoint = f"{OWNED}; chown root:root {RUN}/checkpoints/last.ckpt; chmod 600 {RUN}/checkpoints/last.ckpt"
    return [
        (
            "a run folder that belongs to somebody else",
            resume(),
            ended_with("runs", partial=False),
            {"shell": nobody(others)},
        ),
        (
            "a last.ckpt that this user may not read",
            resume(),
            either("last.ckpt", Right(resumed)),
            {"shell": nobody(checkpoint), "setup": Fixture.run},
        ),
        (
            "a umask that takes every right away",
            resume(),
            either("runs|permission"),
            {"shell": nobody(then='umask 777; exec "$@"')},
        ),
    ]


def clocks() -> list[Row]:
    odd = "unshare -T --monotonic 300000000 --boottime 300000000"
    return [
        (
            "checkpoints dated in reverse, some in 2096",
            resume(),
            Right(resumed),
            {"setup": both(Fixture.run, reversed_times)},
        ),
        (
            "a host that has been up for ten years",
            resume(*TWO),
            whole(2),
            {"shell": f'exec {odd} "$@"', "TZ": "Nowhere/Odd:99"},
        ),
    ]


def trials() -> list[Trial]:
    found = []
    for part in (limits, folders, disks, streams, languages, variables, permissions, clocks):
        for name, command, expected, more in part():
            environment = {key: value for key, value in more.items() if key not in {"shell", "setup"}}
            found.append(
                Trial(
                    *("environment", name, command, expected, more.get("setup"), environment),
                    own_process=True,
                    shell=more.get("shell", ""),
                    limit_s=120,
                )
            )
    return found
