"""Machines that are not as one's own: limits, users without a name, full and read-only disks, locales, closed outputs,
variables of schedulers, containers."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Mapping
from pathlib import Path

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
    both,
    in_fork,
    pretrain,
    resume,
    same_features,
    trained,
)

GROUP = "environment"
STRANGER = 4242
"""A user ID without a name, as `docker run --user` gives it."""
BECOME = f"setpriv --reuid {STRANGER} --regid {STRANGER} --clear-groups"
AS_STRANGER = f'{BECOME} "$@"'
AS_READER = f'{BECOME} --inh-caps +dac_read_search --ambient-caps +dac_read_search "$@"'
"""May read everything: ranks start Python again, which may be in root's home."""
WORKERS = "model.train_ds.num_workers=2"
RANKS = "trainer.devices=2"
IN_DATA = (
    "model.train_ds.manifest_filepath=data/train.jsonl",
    "model.validation_ds.manifest_filepath=data/valid.jsonl",
)
MEASURE = ["prepare", "audio", "--output", "m.jsonl", "--workers", "0"]
INSPECT = ["inspect", "train.jsonl", "--examples", "0"]
ASCII_ONLY = {"LC_ALL": "C", "LANG": None, "PYTHONCOERCECLOCALE": "0", "PYTHONUTF8": "0"}

# ----------------------------------------------------------------------------------------------------------- machines


def with_mounts(before: str, after: str = "true") -> str:
    """A bash line that mounts something for the command alone, and looks at it afterwards."""
    return f"""unshare -m bash -c '{before} || exit 99; "$@"; code=$?; {after}; exit $code' bash "$@\""""


def small_disk(options: str) -> str:
    """A file system of this size at `small`; what is in it at the end is copied to `kept`."""
    return with_mounts(f"mkdir -p small && mount -t tmpfs -o {options} tmpfs small", "cp -r small kept 2> /dev/null")


SMALL_MOUNT = "mkdir -p small && mount -t tmpfs -o size=60k tmpfs small"
READ_ONLY_DATA = "mount --bind data data && mount -o remount,bind,ro data"
NOTHING_LEFT = '[ -z "$(ls -A small)" ] || exit 9'
"""A half-written file would show as exit code 9."""
LONG_FOLDER = "export TMPDIR=$PWD/" + "long_name_of_a_scratch_folder_" * 4 + '; mkdir "$TMPDIR"; "$@"'


def in_data(folder: Path) -> None:
    (folder / "data").mkdir()
    for name in ("train.jsonl", "valid.jsonl", "audio"):
        shutil.move(folder / name, folder / "data" / name)


def owned(*kept_by_root: str) -> Setup:
    """Everything belongs to the stranger, except files that match one of these patterns."""

    def setup(folder: Path) -> None:
        box = folder.parent
        ours = {path for pattern in kept_by_root for path in folder.glob(pattern)}
        for path in (folder, box / "home", box / "tmp", *folder.rglob("*")):
            if path not in ours:
                os.chown(path, STRANGER, STRANGER)

    return setup


def mode(name: str, bits: int) -> Setup:
    """Root keeps this file or folder, with these permissions."""

    def setup(folder: Path) -> None:
        os.chown(folder / name, 0, 0)
        (folder / name).chmod(bits)

    return setup


def foreign_names(folder: Path) -> None:
    text = (folder / "train.jsonl").read_text(encoding="utf-8")
    for number, name in enumerate(("é.wav", "日本.wav", "ß ü.wav")):
        shutil.move(folder / f"audio/{number}.wav", folder / "audio" / name)
        text = text.replace(f"audio/{number}.wav", f"audio/{name}")
    (folder / "train.jsonl").write_text(text, encoding="utf-8")
    (folder / "valid.jsonl").write_text("".join(text.splitlines(keepends=True)[:4]), encoding="utf-8")


def twelve_jobs(folder: Path) -> None:
    for job in range(12):
        outcome = in_fork([*MEASURE, "--check", "header", "--job", f"{job}/12"], folder, {}, 60)
        if outcome.code != 0:
            raise RuntimeError(f"job {job} failed: {outcome.text[-300:]}")


# ------------------------------------------------------------------------------------------------------- what is right


def measured(folder: Path, outcome: Outcome) -> str | None:
    """Eight lines, each of which names a file that exists."""
    lines = [json.loads(text) for text in (folder / "m.jsonl").read_text(encoding="utf-8").splitlines()]
    missing = [line["audio_filepath"] for line in lines if not (folder / line["audio_filepath"]).is_file()]
    return f"{len(lines)} lines; not there: {missing}" if len(lines) != 8 or missing else None


def inspected(folder: Path, outcome: Outcome) -> str | None:
    if "8 utterances" not in outcome.text:
        return "not in the output: 8 utterances"
    return None if (folder / "inspect.html").is_file() else "no page"


def has(*words: str) -> Check:
    def check(folder: Path, outcome: Outcome) -> str | None:
        missing = [word for word in words if word not in outcome.text]
        return f"not in the output: {missing}" if missing else None

    return check


def reported(folder: Path, outcome: Outcome) -> str | None:
    page = folder / RUN / "report.html"
    return None if page.is_file() and "</html>" in page.read_text(encoding="utf-8") else "no whole page"


def trained_without(name: str) -> Check:
    """Trained, and this file is named with the reason."""

    def check(folder: Path, outcome: Outcome) -> str | None:
        if wrong := trained(folder, outcome):
            return wrong
        listed = "".join(path.read_text(encoding="utf-8") for path in (folder / RUN).glob("bad_files_*.jsonl"))
        return None if name in listed and "Permission denied" in listed else f"{name} is not listed: {listed[:200]}"

    return check


# -------------------------------------------------------------------------------------------------------------- tables

TRAINED = Right(trained)
FULL = Refused(("No space left|space on the disk",), partial=True)
TOO_LARGE = Refused(("too large|ulimit -f",), partial=True)
ENDED = (1, 2, 75)


def or_trained(*words: str) -> Expected:
    return Either(Refused(words, partial=True, codes=ENDED), TRAINED)


def row(
    name: str,
    command: list[str],
    expected: Expected,
    shell: str = '"$@"',
    setup: Setup | None = None,
    environment: Mapping[str, str | None] | None = None,
) -> Trial:
    return Trial(GROUP, name, command, expected, setup, environment or {}, shell=shell, limit_s=120)


def model() -> str:
    return str(Fixture.path / "model.nemo")


def extract(folder: str = "out", source: str = "") -> list[str]:
    return ["extract", source or model(), "audio/0.wav", folder, "--device", "cpu"]


def disks() -> list[Trial]:
    small = pretrain("exp_manager.exp_dir=small")
    safetensors = ["export", model(), "small/m.safetensors", "--format", "safetensors"]
    full_temporary = 'mount -t tmpfs -o size=4k tmpfs "$TMPDIR" && head -c 4096 /dev/zero > "$TMPDIR/x"'
    read_only_home = f'{READ_ONLY_DATA} && mount -t tmpfs -o ro tmpfs "$HOME"'
    read_only = Refused(("small", "Read-only|cannot be written", "exp_dir"))
    return [
        row("full disk: pretrain", small, FULL, small_disk("size=200k")),
        row("few inodes: pretrain", small, or_trained("No space left|inode"), small_disk("nr_inodes=12")),
        row("full disk: prepare", [*MEASURE[:3], "small/m.jsonl", *MEASURE[4:]], FULL, small_disk("size=4k")),
        row("full disk: extract", extract("small/out"), FULL, small_disk("size=8k")),
        row("full disk: export leaves nothing", safetensors, FULL, with_mounts(SMALL_MOUNT, NOTHING_LEFT)),
        row("full temporary folder", pretrain(RANKS, WORKERS), or_trained("space|TMPDIR"), with_mounts(full_temporary)),
        row(
            *("64 kB of shared memory", pretrain(WORKERS), or_trained("/dev/shm")),
            with_mounts("mount -t tmpfs -o size=64k tmpfs /dev/shm"),
        ),
        row(
            *("read-only shared memory", pretrain(WORKERS), or_trained("/dev/shm|shared memory")),
            with_mounts("mount -t tmpfs -o ro tmpfs /dev/shm"),
        ),
        row(
            "read-only data and home",
            pretrain(*IN_DATA),
            or_trained("NEST_SSL_CACHE_DIR"),
            with_mounts(read_only_home),
            in_data,
        ),
        row("read-only folder for runs", small, read_only, small_disk("ro")),
        row(
            *("runs is a link into a scratch folder that is gone", pretrain(), Refused(("runs",)), '"$@"'),
            lambda folder: (folder / "runs").symlink_to("/gone/scratch/runs"),
        ),
    ]


def limits() -> list[Trial]:
    merge = [*MEASURE, "--check", "header", "--merge", "12"]
    few_files = Either(Refused(("open files|ulimit -n",), partial=True), Right(measured))
    return [
        row("file size limit: pretrain", pretrain(), TOO_LARGE, 'ulimit -f 100; "$@"'),
        row("file size limit: extract", extract(), TOO_LARGE, 'ulimit -f 4; "$@"'),
        row("24 open files", pretrain(WORKERS), or_trained("open files|ulimit -n"), 'ulimit -n 24; "$@"'),
        row("20 open files for 12 jobs", merge, few_files, 'ulimit -n 20; "$@"', twelve_jobs),
        row("3 GB of addresses", pretrain(WORKERS), or_trained("memory"), 'ulimit -v 3000000; "$@"'),
    ]


def users() -> list[Trial]:
    no_home: dict[str, str | None] = {"HOME": None}
    gone = {"HOME": "/gone/home", "TMPDIR": "/gone/tmp", "XDG_CACHE_HOME": "/gone/cache"}
    run_of_root = both(Fixture.run, owned("runs/**/*", "runs"))
    half_of_root = both(Fixture.run, owned("runs/run/*.csv", "runs/run/*.txt", "runs/run/*.html", "runs/run/**/*.ckpt"))
    denied = Refused(("Permission denied|cannot be written",))
    return [
        row("no name, no home", pretrain(), TRAINED, AS_READER, owned(), no_home),
        row("no name, no home: two ranks, workers", pretrain(RANKS, WORKERS), TRAINED, AS_READER, owned(), no_home),
        row(
            *("a manifest that may not be read", pretrain(), Refused(("train.jsonl", "Permission denied"))),
            *(AS_STRANGER, both(owned(), mode("train.jsonl", 0o600))),
        ),
        row(
            *("one file that may not be read", pretrain(), Right(trained_without("3.wav"))),
            *(AS_STRANGER, both(owned(), mode("audio/3.wav", 0o600))),
        ),
        row("resumed by another user", resume(), denied, AS_STRANGER, run_of_root),
        row(
            "resumed, some files belong to root",
            resume(),
            Either(denied, Right(trained)),
            AS_STRANGER,
            half_of_root,
        ),
        row(
            "prepare into a folder of root",
            [*MEASURE[:3], "audio/m.jsonl", *MEASURE[4:]],
            Refused(("audio", "Permission denied")),
            AS_STRANGER,
            both(owned(), mode("audio", 0o755)),
        ),
        row("home, temporary and cache folder are gone", pretrain(RANKS), TRAINED, environment=gone),
        row("a temporary folder with a long name", pretrain(RANKS, WORKERS), TRAINED, LONG_FOLDER),
    ]


def locales() -> list[Trial]:
    ascii_output = {"PYTHONIOENCODING": "ascii:strict"}
    page = ["report", str(RUN)]
    return [
        row("plain C: pretrain", pretrain(), TRAINED, setup=foreign_names, environment=ASCII_ONLY),
        row(
            "plain C: prepare", MEASURE, Right(measured), setup=foreign_names, environment={"LC_ALL": "C", "LANG": None}
        ),
        row("ASCII output: inspect", INSPECT, Right(inspected), environment=ascii_output),
        row("ASCII output: report", page, Right(reported), setup=Fixture.run, environment=ascii_output),
        row("ASCII output: help", ["prepare", "--help"], Right(has("--output")), environment=ascii_output),
    ]


def outputs() -> list[Trial]:
    closed, full = '"$@" <&- >&- 2>&-', '"$@" > /dev/full 2> /dev/full'
    not_written = Refused(("No space left|could not be written|cannot be written|output",))
    return [
        row("all closed: two ranks", pretrain(RANKS), TRAINED, closed),
        row("full: two ranks", pretrain(RANKS), TRAINED, full),
        row("read by head", pretrain(), TRAINED, '"$@" 2>&1 | head -n 1; exit ${PIPESTATUS[0]}'),
        row("full: extract", extract(), Right(same_features), full),
        row("full: info", ["info", model()], not_written, '"$@" > /dev/full'),
        row(
            *("working folder removed", ["info", model()]),
            Either(Refused(("folder|directory",)), Right(has("parameters"))),
            'mkdir gone; cd gone; rmdir ../gone; "$@"',
        ),
    ]


def schedulers() -> list[Trial]:
    job: dict[str, str | None] = {"SLURM_JOB_ID": "7", "SLURM_JOBID": "7", "SLURM_NNODES": "1", "SLURM_NODEID": "0"}
    rank = {**job, "SLURM_PROCID": "0", "SLURM_LOCALID": "0", "SLURM_GTIDS": "0"}
    batch = {**rank, "SLURM_NTASKS": "2", "SLURM_NPROCS": "2", "SLURM_TASKS_PER_NODE": "2"}
    hub = extract(source="nvidia/ssl_en_nest_large_v1.0")
    named = Refused(("nvidia/ssl_en_nest_large_v1.0",))
    alone = with_mounts("true").replace("unshare -m", "unshare -n")
    unnamed = with_mounts("hostname node17.nowhere.invalid").replace("unshare -m", "unshare -u")
    variables: list[tuple[str, list[str], Expected, Mapping[str, str | None]]] = [
        ("a shell of srun --pty", pretrain(), TRAINED, {**rank, "SLURM_NTASKS": "1", "SLURM_STEP_ID": "0"}),
        ("a shell of salloc -n 8", pretrain(), TRAINED, {**job, "SLURM_NTASKS": "8", "SLURM_NPROCS": "8"}),
        ("sbatch -n 2 without srun", pretrain(RANKS, "watchdog.init_s=30"), or_trained("srun|SLURM|joined"), batch),
        ("RANK and WORLD_SIZE left over", pretrain(), or_trained("WORLD_SIZE"), {"RANK": "0", "WORLD_SIZE": "2"}),
        ("LOCAL_RANK left over", pretrain(), or_trained("LOCAL_RANK"), {"LOCAL_RANK": "3"}),
        ("threads in SLURM's form", pretrain(), or_trained("OMP_NUM_THREADS"), {"OMP_NUM_THREADS": "4(x2)"}),
        ("no GPU granted", pretrain("trainer.accelerator=auto"), TRAINED, {"CUDA_VISIBLE_DEVICES": "NoDevFiles"}),
        ("optimised Python", pretrain(), TRAINED, {"PYTHONOPTIMIZE": "2"}),
        ("offline hub", hub, named, {"HF_HUB_OFFLINE": "1"}),
        ("hub behind a dead proxy", hub, named, {"https_proxy": "http://127.0.0.1:9"}),
    ]
    return [
        *(row(name, command, expected, environment=values) for name, command, expected, values in variables),
        row("no network: one rank", pretrain(), TRAINED, alone),
        row("no network: two ranks", pretrain(RANKS), or_trained("loopback", "lo up"), alone),
        row("a host name that nobody knows", pretrain(RANKS), TRAINED, unnamed),
        row("no /proc", pretrain(WORKERS), TRAINED, with_mounts("mount -t tmpfs tmpfs /proc")),
    ]


def trials() -> list[Trial]:
    if os.geteuid() != 0:
        return [*locales(), *outputs()]
    return [*disks(), *limits(), *users(), *locales(), *outputs(), *schedulers()]
