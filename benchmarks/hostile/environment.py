"""What a program finds around it: limits, variables, full and read-only disks, closed outputs, locales, clocks.

Root may write anywhere, so what must not be writable is tried without root's capabilities. Small file systems are
mounted in a namespace of their own, which ends with the command; such trials are left out where that is not allowed.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

import numpy as np
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
    ended_well,
    finite_features,
    losses,
    only_run,
    pretrain,
    resume,
    resumed,
    said,
    trained,
    write_lines,
)

GROUP = "environment"
EXTRACT = ["extract", "model.nemo", "audio", "out", "--device", "cpu"]
PREPARE = ["prepare", "audio", "--output", "m.jsonl", "--workers", "2"]
ROOT = os.geteuid() == 0
PLAIN = "setpriv --bounding-set=-all" if ROOT else ""
"""Before a command: even root may write only where its mode bits allow it."""


LOADS = "\"$1\" -c \"import torch; torch.load('runs/run/checkpoints/last.ckpt', weights_only=True)['state_dict']\" || code=98"
"""After a command: the checkpoint that the run is resumed from is whole."""


def in_namespace(mounts: str, then: str = "", kind: str = "-m") -> str:
    """A bash line: mount, run the command, do something, and end with its exit code."""
    script = f'{mounts} || exit 99; "$@"; code=$?; {then or ":"}; exit $code'
    return f"unshare {kind} bash -c {quoted(script)} bash " + '"$@"'


def quoted(script: str) -> str:
    return "'" + script.replace("'", "'\\''") + "'"


def possible(shell: str) -> bool:
    """Whether this machine allows it."""
    try:
        return subprocess.run(["bash", "-c", shell, "bash", "true"], capture_output=True, timeout=20).returncode == 0
    except (OSError, subprocess.TimeoutExpired):
        return False


# --------------------------------------------------------------------------------------------------------------- checks


def undisturbed(folder: Path, outcome: Outcome) -> str | None:
    expected, found = losses(Fixture.path / "runs/whole"), losses(only_run(folder))
    if sorted(found) != [0, 1, 2, 3] or any(
        abs(float(expected[step]) - float(value)) > 1e-5 for step, value in found.items()
    ):  # another number of threads rounds otherwise
        return f"losses differ from those of a plain environment: {found}"
    return trained(folder, outcome)


def finished(folder: Path, outcome: Outcome) -> str | None:
    """Undisturbed, and everything is there that a run leaves."""
    run = only_run(folder)
    missing = [
        name
        for name in ("checkpoints/run.nemo", "checkpoints/last.ckpt", "report.html", "hparams.yaml")
        if not (run / name).exists()
    ]
    return f"not written: {missing}" if missing else undisturbed(folder, outcome)


def lines(name: str, number: int) -> Check:
    def check(folder: Path, outcome: Outcome) -> str | None:
        found = len((folder / name).read_text(encoding="utf-8").splitlines())
        return None if found == number else f"{found} lines in {name}"

    return check


def features(number: int) -> Check:
    def check(folder: Path, outcome: Outcome) -> str | None:
        found = [np.load(path).shape for path in (folder / "out").rglob("*.npy")]
        return finite_features(folder, outcome) if len(found) == number else f"{len(found)} feature files"

    return check


def unhurt(*names: str, then: Check = ended_well) -> Check:
    """These files are as they were in the fixture."""

    def check(folder: Path, outcome: Outcome) -> str | None:
        hurt = [name for name in names if (folder / name).read_bytes() != (Fixture.path / name).read_bytes()]
        return f"changed: {hurt}" if hurt else then(folder, outcome)

    return check


# --------------------------------------------------------------------------------------------------------------- set-up


def model(folder: Path) -> None:
    shutil.copy(Fixture.path / "model.nemo", folder / "model.nemo")


def folders(*names: str) -> Setup:
    def setup(folder: Path) -> None:
        for name in names:
            (folder / name).mkdir(parents=True)

    return setup


def mode(bits: int, *names: str) -> Setup:
    def setup(folder: Path) -> None:
        for name in names:
            (folder / name).chmod(bits)

    return setup


def dated(seconds: int) -> Setup:
    """All files have this time."""

    def setup(folder: Path) -> None:
        for path in [*folder.rglob("*"), folder]:
            os.utime(path, (seconds, seconds))

    return setup


def accents(folder: Path) -> None:
    model(folder)
    (folder / "in").mkdir()
    for i, name in enumerate(("über.wav", "語音.wav")):
        shutil.copy(folder / f"audio/{i}.wav", folder / "in" / name)
    write_lines(folder / "in.jsonl", [{"audio_filepath": "in/語音.wav", "duration": 1.7, "text": "é"}])


# --------------------------------------------------------------------------------------------------------------- trials


def around(
    name: str,
    expected: Expected,
    command: list[str] | None = None,
    *,
    shell: str = "",
    setup: Setup | None = None,
    environment: Mapping[str, str | None] | None = None,
) -> Trial:
    return Trial(GROUP, name, command or pretrain(), expected, setup, environment or {}, True, shell, limit_s=90.0)


def of_variables() -> list[Trial]:
    fine = Right(finished)

    def named(word: str) -> Expected:
        """Either it makes no difference, or the variable is named."""
        return Either(Refused((word,)), fine)

    plain = {"LC_ALL": "C", "LANG": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"}
    return [
        around("HOME is unset, and so is the user", fine, environment={"HOME": None, "USER": None, "LOGNAME": None}),
        around("HOME is a file", fine, environment={"HOME": "/dev/null"}),
        around(
            "HOME is nowhere, for two ranks",
            Right(trained),
            pretrain("trainer.devices=2"),
            environment={"HOME": "/nosuch/home"},
        ),
        around("TMPDIR is nowhere", fine, environment={"TMPDIR": "/nosuch/tmp"}),
        around(
            "TMPDIR is too long for a socket",
            Right(trained),
            pretrain("trainer.devices=2"),
            environment={"TMPDIR": "../tmp/" + "./" * 60},
        ),
        around("no variables at all", fine, shell='exec env -i PYTHONPATH="$PYTHONPATH" "$@"'),
        around(
            "the locale C, and names that are not ASCII",
            Right(lines("m.jsonl", 2)),
            ["prepare", "in", "--output", "m.jsonl"],
            setup=accents,
            environment={"LC_ALL": "C", "LANG": None},
        ),
        around(
            "a strict ASCII locale, and names that are not",
            Either(Refused(("UTF|ASCII",), partial=True), Right(lines("m.jsonl", 2))),
            ["prepare", "in", "--output", "m.jsonl"],
            setup=accents,
            environment=plain,
        ),
        around(
            "the locale C, a text that is not ASCII",
            Right(lines("out/manifest.jsonl", 1)),
            ["extract", "model.nemo", "in.jsonl", "out", "--device", "cpu"],
            setup=accents,
            environment={"LC_ALL": "C", "LANG": None},
        ),
        around(
            "a strict ASCII locale, a text that is not",
            Either(Refused(("UTF|ASCII",), partial=True), Right(lines("out/manifest.jsonl", 1))),
            ["extract", "model.nemo", "in.jsonl", "out", "--device", "cpu"],
            setup=accents,
            environment=plain,
        ),
        around(
            "an output in ASCII, a run that is not",
            Right(trained),
            pretrain("exp_manager.name='läuft'"),
            environment={"PYTHONIOENCODING": "ascii"},
        ),
        around("a locale that is not installed", fine, environment={"LC_ALL": "xx_YY.UTF-8"}),
        around(
            "a terminal of one column",
            Right(ended_well),
            ["info", "model.nemo"],
            setup=model,
            environment={"COLUMNS": "1", "LINES": "1"},
        ),
        around(
            "COLUMNS that is no number",
            Right(ended_well),
            ["inspect", "train.jsonl"],
            environment={"COLUMNS": "wide", "TERM": "nosuch-term"},
        ),
        around("OMP_NUM_THREADS=many", named("OMP_NUM_THREADS"), environment={"OMP_NUM_THREADS": "many"}),
        around("OMP_NUM_THREADS=0", named("OMP_NUM_THREADS"), environment={"OMP_NUM_THREADS": "0"}),
        around(
            "CUDA_VISIBLE_DEVICES is no number",
            named("CUDA_VISIBLE_DEVICES"),
            environment={"CUDA_VISIBLE_DEVICES": "first"},
        ),
        around(
            "MASTER_PORT is no number, for two ranks",
            Refused(("MASTER_PORT",)),
            pretrain("trainer.devices=2"),
            environment={"MASTER_PORT": "http"},
        ),
        around(
            "MASTER_ADDR is nowhere, for two ranks",
            Either(Refused(("MASTER_ADDR|nosuch.invalid",)), Right(trained)),  # the ranks of one machine need none
            pretrain("trainer.devices=2"),
            environment={"MASTER_ADDR": "nosuch.invalid"},
        ),
        around(
            "a rank that is left over from torchrun",
            Refused(("RANK|torchrun|WORLD_SIZE",)),
            environment={
                "RANK": "1",
                "WORLD_SIZE": "2",
                "LOCAL_RANK": "1",
                "MASTER_ADDR": "127.0.0.1",
                "MASTER_PORT": "1",
            },
        ),
        around(
            "a rank that is no number",
            Refused(("RANK",)),
            environment={"RANK": "first", "WORLD_SIZE": "1", "LOCAL_RANK": "0"},
        ),
        around(
            "SLURM's variables in a shell of one task",
            Either(Refused(("SLURM",)), Right(trained)),
            environment={
                "SLURM_JOB_ID": "17",
                "SLURM_NTASKS": "1",
                "SLURM_PROCID": "0",
                "SLURM_LOCALID": "0",
                "SLURM_NNODES": "1",
                "SLURM_JOB_NODELIST": "localhost",
                "SLURM_STEP_ID": "0",
            },
        ),
        around("a cache folder that is a file", fine, environment={"NEST_SSL_CACHE_DIR": "/dev/null"}),
        around("Python without docstrings and assertions", fine, environment={"PYTHONOPTIMIZE": "2"}),
        around("a time zone that is none", fine, environment={"TZ": "Mars/Olympus"}),
        around(
            "a proxy that is not there, and a model of the hub",
            Refused(("nosuch/model",)),
            ["info", "nosuch/model"],
            environment={"HTTPS_PROXY": "http://127.0.0.1:9", "HTTP_PROXY": "http://127.0.0.1:9"},
        ),
    ]


def of_outputs() -> list[Trial]:
    return [
        around("stdout is closed", Right(finished), shell='exec "$@" >&-'),
        around("stderr is closed", Right(finished), shell='exec "$@" 2>&-'),
        around("all three are closed", Right(finished), shell='exec "$@" <&- >&- 2>&-'),
        around("stdout and stderr are full", Right(finished), shell='exec "$@" >/dev/full 2>&1'),
        around("nobody reads", Right(finished), shell='"$@" 2>&1 | true; exit ${PIPESTATUS[0]}'),
        around(
            "info: only the head is read",
            Right(ended_well, codes=(0, 1, 141)),
            ["info", "model.nemo"],
            shell='"$@" | head -c 10; exit ${PIPESTATUS[0]}',
            setup=model,
        ),
        around("prepare: stdout is full", Right(lines("m.jsonl", 8)), PREPARE, shell='exec "$@" >/dev/full'),
        around(
            "inspect: stdout is closed",
            Right(lambda folder, outcome: None if (folder / "inspect.html").stat().st_size > 10_000 else "no page"),
            ["inspect", "train.jsonl"],
            shell='exec "$@" >&-',
        ),
        around("extract: stderr is full", Right(features(8)), EXTRACT, shell='exec "$@" 2>/dev/full', setup=model),
        around(
            "the folder that it is started in is gone",
            Refused(("folder|directory|train.jsonl",)),
            shell='mkdir gone && cd gone && rmdir ../gone && exec "$@"',
        ),
    ]


def of_limits() -> list[Trial]:
    files = Refused(("file",), partial=True)
    return [
        around(
            "16 open files",
            Either(Refused(("open files|files",), partial=True), Right(finished)),
            shell='ulimit -n 16; exec "$@"',
        ),
        around(
            "24 open files, for loader workers",
            Either(Refused(("open files|files|workers|worker",), partial=True, codes=(1, 75)), Right(trained)),
            pretrain("model.train_ds.num_workers=4"),
            shell='ulimit -n 24; exec "$@"',
        ),
        around(
            "24 open files, for two ranks",
            Either(Refused(("open files|files",), partial=True, codes=(1, 75)), Right(trained)),
            pretrain("trainer.devices=2"),
            shell='ulimit -n 24; exec "$@"',
        ),
        around(
            "20 open files, to prepare",
            Either(files, Right(lines("m.jsonl", 8))),
            PREPARE,
            shell='ulimit -n 20; exec "$@"',
        ),
        around(
            "files of 64 kB, for checkpoints",
            Refused(("too large|File|written",), partial=True, codes=(1, 75)),
            shell='ulimit -f 64; exec "$@"',
        ),
        around(
            "files of 1 kB, for features",
            Refused(("written|large",), partial=True),
            EXTRACT,
            shell='ulimit -f 1; exec "$@"',
            setup=model,
        ),
        around(
            "files of 8 kB, for a model",
            Refused(("too large|e.nemo",)),
            ["export", "model.nemo", "e.nemo", "--format", "nemo"],
            shell='ulimit -f 8; exec "$@"',
            setup=model,
        ),
        around(
            "files of 1 kB, for a page",
            Refused(("too large|p.html",)),
            ["inspect", "train.jsonl", "--output", "p.html"],
            shell='ulimit -f 1; exec "$@"',
        ),
        around(
            "10 s of processor time is enough",
            Right(ended_well),
            ["info", "model.nemo"],
            shell='ulimit -t 30; exec "$@"',
            setup=model,
        ),
        around(
            "a stack of 256 kB", Either(Refused((), partial=True), Right(finished)), shell='ulimit -s 256; exec "$@"'
        ),
        around("no file that others may read", Right(finished), shell='umask 077; exec "$@"'),
        around(
            "one processor, for two ranks",
            Right(trained),
            pretrain("trainer.devices=2"),
            shell='exec taskset -c "$(taskset -pc $$ | grep -o "[0-9]*$")" "$@"',
        ),
    ]


def of_modes() -> list[Trial]:
    """Without root's power over modes."""

    def plain(name: str, expected: Expected, command: list[str], setup: Setup, before: str = "") -> Trial:
        return around(name, expected, command, shell=f'{before} exec {PLAIN} "$@"', setup=setup)

    data = both(folders("rw"), mode(0o555, "audio", "."))
    return [
        plain(
            "a working folder that is read-only",
            Refused(("cannot be written|Permission|exp_dir",)),
            pretrain(),
            mode(0o555, "."),
        ),
        plain("data that is read-only, a run elsewhere", Right(trained), pretrain("exp_manager.exp_dir=rw"), data),
        plain(
            "a run folder that has become read-only",
            Refused(("cannot be written|Permission|exp_dir",)),
            resume(),
            both(Fixture.run, mode(0o555, str(RUN), f"{RUN}/checkpoints")),
        ),
        plain(
            "a checkpoint that may not be read",
            Either(Refused(("last.ckpt",)), Right(said("last.ckpt"))),
            resume(),
            both(Fixture.run, mode(0, f"{RUN}/checkpoints/last.ckpt")),
        ),
        plain(
            "a manifest that may not be read",
            Refused(("train.jsonl", "Permission|read")),
            pretrain(),
            mode(0, "train.jsonl"),
        ),
        plain("audio that may not be read", Right(said("3.wav", "Permission")), pretrain(), mode(0, "audio/3.wav")),
        plain(
            "a folder of audio that may not be entered",
            Either(
                Refused(("audio",), partial=True),
                Right(
                    lambda folder, outcome: (
                        "nothing was said of a folder that cannot be read"
                        if "audio/sub" not in outcome.text and not (folder / "m.bad.jsonl").exists()
                        else None
                    )
                ),
            ),
            PREPARE,
            both(
                folders("audio/sub"),
                lambda folder: shutil.copy(folder / "audio/0.wav", folder / "audio/sub"),
                mode(0, "audio/sub"),
            ),
        ),
        plain(
            "a report of a run that is read-only",
            Refused(("report.html|Permission|output",)),
            ["report", str(RUN)],
            both(Fixture.run, mode(0o444, f"{RUN}/report.html"), mode(0o555, str(RUN))),
        ),
        plain(
            "doctor, for a run that is read-only",
            Right(ended_well),
            ["doctor", str(RUN)],
            both(Fixture.run, mode(0o555, str(RUN), "runs")),
        ),
        plain(
            "features onto a read-only folder",
            Refused(("out",)),
            EXTRACT,
            both(model, folders("out"), mode(0o555, "out")),
        ),
        plain(
            "info in a read-only folder, with a read-only HOME",
            Right(ended_well),
            ["info", "model.nemo"],
            both(model, mode(0o555, ".", "../home", "../tmp")),
        ),
    ]


def of_disks() -> list[Trial]:
    full = "No space left|full|space"

    def small(
        name: str,
        size: str,
        expected: Expected,
        command: list[str],
        *,
        setup: Setup | None = None,
        at: str = "runs",
        prepare: str = ":",
        then: str = "",
    ) -> Trial:
        mounts = f"mkdir -p {at} && mount -t tmpfs -o {size} t {at} && {prepare}"
        return around(f"disk: {name}", expected, command, shell=in_namespace(mounts, then), setup=setup)

    both(model, lambda folder: shutil.copy(Fixture.path / "model.safetensors", folder))
    unchanged = "cmp model.nemo e/m.nemo || code=98; ls e | grep -v '^m.nemo$' && code=97"
    return [
        small("200 kB for a run", "size=200k", Refused((full,), partial=True), pretrain(), setup=folders("runs")),
        small("20 kB for a run", "size=20k", Refused((full,), partial=True), pretrain(), setup=folders("runs")),
        small("4 files for a run", "nr_inodes=4", Refused((full,), partial=True), pretrain(), setup=folders("runs")),
        small(
            "a disk that is full already",
            "size=16k",
            Refused((full + "|cannot be written",), partial=True),
            pretrain(),
            setup=folders("runs"),
            prepare="{ head -c 99999 /dev/zero > runs/x; true; } 2>/dev/null",
        ),
        small(
            "read-only",
            "ro",
            Refused(("Read-only|cannot be written|exp_dir",), partial=True),
            pretrain(),
            setup=folders("runs"),
        ),
        small(
            "a small one for features",
            "size=24k",
            Refused((full,), partial=True),
            EXTRACT,
            setup=both(model, folders("out")),
            at="out",
        ),
        small(
            "a small one for features in shards",
            "size=24k",
            Refused((full,), partial=True),
            [*EXTRACT, "--format", "shards"],
            setup=both(model, folders("out")),
            at="out",
        ),
        small(
            "a full one for a model that is replaced",
            "size=400k",
            Refused((full,), partial=True),
            ["export", "model.nemo", "e/m.nemo", "--format", "nemo"],
            setup=both(model, folders("e")),
            at="e",
            prepare="cp model.nemo e/m.nemo && mount -o remount,size=$(( $(stat -c %s model.nemo) / 1024 + 12 ))k e",
            then=unchanged,
        ),
        small(
            "a small one for safetensors",
            "size=40k",
            Refused((full,), partial=True),
            ["export", "model.nemo", "e/m.safetensors", "--format", "safetensors"],
            setup=both(model, folders("e")),
            at="e",
        ),
        small(
            "a small one for shards",
            "size=100k",
            Refused((full,), partial=True),
            [*PREPARE, "--shards", "2", "--shards-folder", "s"],
            setup=folders("s"),
            at="s",
        ),
        small(
            "a full one for a manifest",
            "size=8k",
            Refused((full,), partial=True),
            ["prepare", "audio", "--output", "d/m.jsonl"],
            setup=folders("d"),
            at="d",
            prepare="{ head -c 99999 /dev/zero > d/x; true; } 2>/dev/null",
        ),
        small(
            "a small one for a demo",
            "size=100k",
            Refused((full,), partial=True),
            [
                "demo",
                "--data-dir",
                "d/demo",
                "--num-train",
                "8",
                "--num-val",
                "2",
                "--num-noise",
                "2",
                "--synthesizer",
                "formants",
                "--duration",
                "2",
            ],
            setup=folders("d"),
            at="d",
        ),
        small(
            "a small one for a page",
            "size=8k",
            Refused((full,), partial=True),
            ["inspect", "train.jsonl", "--output", "d/p.html"],
            setup=folders("d"),
            at="d",
        ),
        small(
            "a full one for temporary files",
            "size=4k",
            Right(finished),
            pretrain(),
            at="../tmp",
            prepare="{ head -c 99999 /dev/zero > ../tmp/x; true; } 2>/dev/null",
        ),
        small(
            "a full one for HOME",
            "size=4k",
            Right(finished),
            pretrain(),
            at="../home",
            prepare="{ head -c 99999 /dev/zero > ../home/x; true; } 2>/dev/null",
        ),
        around(
            "disk: no shared memory for loader workers",
            Either(Refused(("/dev/shm|shared memory",), partial=True, codes=(1, 75)), Right(trained)),
            pretrain("model.train_ds.num_workers=2"),
            shell=in_namespace("mount -t tmpfs -o size=16k t /dev/shm"),
        ),
        around(
            "disk: no /proc",
            Either(Refused(("/proc",), partial=True), Right(finished)),
            shell=in_namespace("mount -t tmpfs t /proc"),
        ),
        around(
            "a network without anything, for two ranks",
            Either(Refused(("loopback|Network",), partial=True), Right(trained)),
            pretrain("trainer.devices=2"),
            shell=in_namespace("true", kind="-n"),
        ),
        around(
            "disk: an index on a full one",
            Right(finished),
            pretrain("model.train_ds.manifest_filepath=d/t.jsonl"),
            setup=folders("d"),
            shell=in_namespace(
                "mount -t tmpfs -o size=12k t d && sed s#audio/#../audio/# train.jsonl > d/t.jsonl && "
                "{ head -c 99999 /dev/zero > d/x; true; } 2>/dev/null"
            ),
        ),
        small(
            "a resumed run on a full one",
            "size=$(( $(du -sk saved/run | cut -f1) + 80 ))k",
            Either(Refused((full,), partial=True), Right(said("resumed at step", then=ended_well))),
            resume(),
            setup=both(lambda folder: shutil.copytree(Fixture.path / RUN, folder / "saved/run"), folders("runs")),
            prepare="cp -a saved/run runs/ && { head -c 9999999 /dev/zero > runs/x; true; } 2>/dev/null",
            then=LOADS,
        ),
    ]


def of_times() -> list[Trial]:
    return [
        around("files from the year 2100", Right(finished), setup=dated(4_102_444_800)),
        around("files from 1969", Right(finished), setup=dated(-86_400)),
        around("a run from the year 2100", Right(resumed), resume(), setup=both(Fixture.run, dated(4_102_444_800))),
        around(
            "a run that was moved to another folder",
            Right(resumed),
            resume("exp_manager.exp_dir=moved"),
            setup=both(
                Fixture.run,
                lambda folder: (folder / "runs").rename(folder / "moved"),
                lambda folder: (folder / "runs").symlink_to("moved"),
            ),
        ),
        around(
            "another Python of the same name is asked for",
            Refused(("-nosuch",), partial=True),
            ["verify", "model.nemo", "--nemo-python", sys.executable + "-nosuch"],
            setup=model,
        ),
        around(
            "python -P, without the working folder",
            Right(trained),
            shell='shift 2; shift; exec "' + sys.executable.replace('"', "") + '" -P -m nest_ssl "$@"',
        ),
    ]


def trials() -> list[Trial]:
    disks = of_disks() if possible(in_namespace("mount -t tmpfs -o size=16k t /mnt")) else []
    modes = of_modes() if not ROOT or possible(f'{PLAIN} "$@"') else []
    return [*of_variables(), *of_outputs(), *of_limits(), *modes, *disks, *of_times()]
