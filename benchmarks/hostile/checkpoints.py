"""Run folders with files that are damaged, missing, foreign, mixed up, linked or edited, then resumed or looked at."""

from __future__ import annotations

import csv
import gzip
import json
import os
import re
import shutil
import socket
import sys
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from benchmarks.hostile.harness import (
    ALL_STEPS,
    BASE_STEPS,
    EVIL,
    RUN,
    Check,
    Either,
    Evil,
    Expected,
    Fixture,
    Outcome,
    Refused,
    Right,
    Setup,
    Trial,
    always,
    both,
    cut,
    in_process,
    link,
    losses,
    nothing,
    on_bytes,
    patched,
    replaced,
    resume,
    resumed,
    trained,
)

GROUP = "checkpoints"
CHECKPOINTS = RUN / "checkpoints"
LAST, BEFORE = CHECKPOINTS / "last.ckpt", CHECKPOINTS / "last-before.ckpt"
METRICS, HPARAMS, LOCK, NODE = RUN / "metrics.csv", RUN / "hparams.yaml", RUN / ".lock", RUN / "watchdog/node0.json"
HTML_PAGE = (
    b"<!DOCTYPE html>\n<html><head><title>503 Service Unavailable</title></head><body>Try later.</body></html>\n"
)
LFS = b"version https://git-lfs.github.com/spec/v1\noid sha256:" + b"4d7a" * 16 + b"\nsize 926369\n"
YAML_BOMB = "a: &a [x, x, x, x, x, x, x, x, x]\n" + "".join(
    f"{name}: &{name} [{', '.join(['*' + before] * 9)}]\n" for before, name in zip("abcdefgh", "bcdefghi", strict=True)
)
YAML_EVIL = "model: !!python/object/apply:os.system ['touch ../pwned']\n"
SCRIPT = "<script>alert(1)</script>"


# ----------------------------------------------------------------------------------------------------------- other runs


def other(name: str, *overrides: str) -> Path:
    """The folder of a run with other settings, made once."""
    folder = Fixture.path.parent.parent / f"other-{name}" / "folder"
    if not folder.exists():
        for part in ("folder", "home", "tmp"):
            (folder.parent / part).mkdir(parents=True, exist_ok=True)
        Fixture.data(folder)
        outcome = in_process(resume(f"trainer.max_steps={BASE_STEPS}", *overrides), folder, {}, 120)
        if outcome.code != 0:
            shutil.rmtree(folder)
            raise RuntimeError(f"the other run {name} cannot be made:\n{outcome.text}")
    return folder


def wide() -> Path:
    return other("wide", "model.encoder.d_model=16")


def sharded() -> Path:
    return other("sharded", "trainer.devices=2", "trainer.strategy=fsdp")


def run_of(make: Callable[[], Path]) -> Setup:
    return lambda folder: shutil.copytree(make() / RUN, folder / RUN)


# ------------------------------------------------------------------------------------------------------ ways to damage


def edited(change: Callable[[dict[str, Any]], object], path: Path = LAST) -> Setup:
    """Load a checkpoint, change its dict, and save it whole, with right checksums."""

    def setup(folder: Path) -> None:
        content = torch.load(folder / path, weights_only=True)
        change(content)
        (folder / path).unlink()
        usual = sys.getrecursionlimit()
        sys.setrecursionlimit(100_000)
        torch.save(content, folder / path)
        sys.setrecursionlimit(usual)

    return setup


def value(*keys: Any, to: Any) -> Setup:
    """Set one value of last.ckpt; the keys lead to it."""

    def change(content: dict[str, Any]) -> None:
        inner: Any = content
        for key in keys[:-1]:
            inner = inner[key]
        inner[keys[-1]] = to

    return edited(change)


def rezipped(change: Callable[[dict[str, bytes]], object]) -> Callable[[bytes], bytes]:
    """Change the records of a torch archive by name, and write it again as torch does, with right checksums."""

    def apply(data: bytes) -> bytes:
        import io

        with zipfile.ZipFile(io.BytesIO(data)) as archive:
            records = {name.split("/", 1)[1]: archive.read(name) for name in archive.namelist()}
        change(records)
        buffer = io.BytesIO()
        writer = torch._C.PyTorchFileWriter(buffer)
        for name, content in records.items():
            if name not in {"version", ".data/serialization_id"}:
                writer.write_record(name, content, len(content))
        writer.write_end_of_file()
        return buffer.getvalue()

    return apply


def evil_index(records: dict[str, bytes]) -> None:
    records["data.pkl"] = EVIL


def cuda_places(records: dict[str, bytes]) -> None:
    records["data.pkl"] = records["data.pkl"].replace(b"X\x03\x00\x00\x00cpu", b"X\x06\x00\x00\x00cuda:3")


def claims_a_terabyte(data: bytes) -> bytes:
    """The size of the first record, in the list at the end of the archive, becomes 0xfffffff0."""
    at = data.rfind(b"PK\x01\x02", 0, data.rfind(b"PK\x05\x06"))
    at = data.find(b"PK\x01\x02")
    return patched(data, at + 20, b"\xf0\xff\xff\xff" * 2)


def name_of_best(folder: Path) -> Path:
    return next((folder / CHECKPOINTS).glob("NEST*.ckpt"))


def all_checkpoints(change: Callable[[bytes], bytes]) -> Setup:
    def setup(folder: Path) -> None:
        for path in (folder / CHECKPOINTS).glob("*.ckpt"):
            data = path.read_bytes()
            path.unlink()
            path.write_bytes(change(data))

    return setup


def hole(data: bytes) -> bytes:
    return patched(data, len(data) // 2, bytes(4096))


def written(path: Path, text: str | bytes) -> Setup:
    def setup(folder: Path) -> None:
        (folder / path).parent.mkdir(parents=True, exist_ok=True)
        (folder / path).write_bytes(text.encode() if isinstance(text, str) else text)

    return setup


def swapped(folder: Path) -> None:
    for old, new in ((LAST, "x"), (BEFORE, LAST), ("x", BEFORE)):
        (folder / old).rename(folder / new)


def transposed(content: dict[str, Any]) -> None:
    weights = content["state_dict"]
    name = "encoder.layers.0.feed_forward1.linear1.weight"
    weights[name] = weights[name].t().contiguous()


def with_nan(content: dict[str, Any]) -> None:
    content["state_dict"]["encoder.layers.1.norm_out.weight"][3] = float("nan")


def halved(content: dict[str, Any]) -> None:
    content["state_dict"] = {k: v.half() if v.is_floating_point() else v for k, v in content["state_dict"].items()}


def moments(name: str, number: float) -> Callable[[dict[str, Any]], None]:
    return lambda content: content["optimizer_states"][0]["state"][40][name].fill_(number)


def nested(depth: int) -> dict[str, Any]:
    inner: dict[str, Any] = {}
    for _ in range(depth):
        inner = {"a": inner}
    return inner


def lines_of(change: Callable[[list[str]], list[str]]) -> Setup:
    return on_bytes(lambda data: "".join(change(data.decode().splitlines(keepends=True))).encode(), METRICS)


def column_added(data: bytes) -> bytes:
    rows = list(csv.reader(data.decode().splitlines()))
    lines = ["my notes,with comma," + ",".join(rows[0])] + ['"looks\ngood","x,y",' + ",".join(row) for row in rows[1:]]
    return ("\n".join(lines) + "\n").encode()


def by_pandas(data: bytes) -> bytes:
    rows = [line.split(",") for line in data.decode().splitlines()]
    rows = [["", *rows[0]]] + [[str(i), f"{row[0]}.0", *row[1:]] for i, row in enumerate(rows[1:])]
    return ("\n".join(map(",".join, rows)) + "\n").encode()


def with_step_of_400_digits(lines: list[str]) -> list[str]:
    return [*lines, "9" * 400 + lines[-1][lines[-1].index(",") :]]


def node(change: Callable[[dict[str, Any]], object]) -> Setup:
    def setup(folder: Path) -> None:
        content = json.loads((folder / NODE).read_text())
        change(content)
        (folder / NODE).write_text(json.dumps(content))

    return setup


def coloured(content: dict[str, Any]) -> None:
    content["host"] = "\x1b[2J\x1b]0;owned\x07node"
    content["rows"][0]["stage"] = "\x1b[31mdone\x1b[0m \u202egnp"
    content["settings"]["resume_command"] = "\x1b[1A rm -rf ~"


def other_process(content: dict[str, Any]) -> None:
    content["rows"][0].update(pid=1, state="running", stage="encoder")
    content["settings"]["beacon"] = content["beacon"] = "/etc/hostname"


def archived(folder: Path) -> None:
    (folder / "archive").mkdir()
    (folder / LAST).rename(folder / "archive/step6.ckpt")


def mounted_elsewhere(folder: Path) -> None:
    (folder / "scratch").mkdir()
    (folder / CHECKPOINTS).rename(folder / "scratch/checkpoints")
    (folder / CHECKPOINTS).symlink_to("../../scratch/checkpoints")


def precious(path: str) -> Setup:
    """The list of the best in last.ckpt names a file outside the run, with a bad score."""

    def setup(folder: Path) -> None:
        shutil.copy(folder / LAST, folder / "precious.ckpt")
        best = {path.replace("{folder}", str(folder)): 99.0}
        value("progress", "memory", "best", to=best)(folder)

    return setup


def clutter(*names: str) -> Setup:
    def setup(folder: Path) -> None:
        for name in names:
            (folder / CHECKPOINTS / name).write_bytes((folder / LAST).read_bytes()[:5000])

    return setup


def all_of_1970(folder: Path) -> None:
    for path in (folder / RUN).rglob("*"):
        os.utime(path, (0, 0))


def liar(folder: Path) -> None:
    """The name says step 99999, the content is of step 4; the others are gone."""
    name_of_best(folder).rename(
        folder / CHECKPOINTS / "NEST-FastConformer-SSL--val_loss=0.0001-epoch=9-step=99999.ckpt"
    )
    (folder / LAST).unlink()
    (folder / BEFORE).unlink()


def a_socket(path: Path) -> None:
    here = os.getcwd()
    os.chdir(path.parent)
    socket.socket(socket.AF_UNIX).bind(path.name)
    os.chdir(here)


# -------------------------------------------------------------------------------------------------------- what is right


def resumed_from(*names: str, then: Check = resumed) -> Check:
    """It says that it resumed from one of these files, and the losses are those of the undisturbed run."""

    def check(folder: Path, outcome: Outcome) -> str | None:
        found = re.search(r"resumed at step \d+ from (\S+)", " ".join(outcome.text.split()))
        if not found or not any(name in found[1] for name in names):
            return f"resumed from {found and found[1]}, not from {names}"
        return then(folder, outcome)

    return check


def unchanged(*names: str, then: Check) -> Check:
    """These files are as they were: the same bytes as last.ckpt of the fixture, or as the fixture's own file."""

    def check(folder: Path, outcome: Outcome) -> str | None:
        for name in names:
            original = Fixture.path / name
            original = original if original.exists() else Fixture.path / LAST
            if not (folder / name).is_file() or (folder / name).read_bytes() != original.read_bytes():
                return f"{name} was changed"
        return then(folder, outcome)

    return check


def steps(first: int, then: Check | None = None) -> Check:
    """The losses from this step on are those of the undisturbed run; the earlier rows are lost, as the trial says."""

    def check(folder: Path, outcome: Outcome) -> str | None:
        expected = {step: loss for step, loss in losses(Fixture.path / "runs/whole").items() if step >= first}
        with (folder / METRICS).open(newline="", encoding="utf-8-sig") as file:
            found = {int(float(r["step"])): r["train_loss"] for r in csv.DictReader(file) if r.get("train_loss")}
        late = {step: loss for step, loss in found.items() if step >= first}
        if late != expected:
            return f"losses from step {first} differ: {sorted(late)}"
        return then(folder, outcome) if then else None

    return check


def kept(name: str, first: int = BASE_STEPS) -> Check:
    def check(folder: Path, outcome: Outcome) -> str | None:
        return steps(first)(folder, outcome) if (folder / RUN / name).exists() else f"{name} is not there"

    return check


def page(*words: str, absent: tuple[str, ...] = (), size: int = 2_000_000) -> Check:
    """There is a whole page with these words, and without those."""

    def check(folder: Path, outcome: Outcome) -> str | None:
        path = folder / RUN / "report.html"
        text = path.read_text()
        if text == (Fixture.path / RUN / "report.html").read_text():
            return "report.html is the old one"
        if "</html>" not in text or len(text) > size:
            return f"the page is not whole, or has {len(text)} characters"
        if missing := [word for word in words if word not in text]:
            return f"not on the page: {missing}"
        present = [word for word in absent if word in text]
        return f"on the page: {present}" if present else None

    return check


def explained(*words: str) -> Check:
    def check(folder: Path, outcome: Outcome) -> str | None:
        missing = [word for word in words if word.lower() not in " ".join(outcome.text.lower().split())]
        return f"not in the output: {missing}" if missing else None

    return check


def trained_on(steps_in_all: int, *words: str) -> Check:
    """It resumed, says these words, and went to this step with finite losses."""

    def check(folder: Path, outcome: Outcome) -> str | None:
        if "resumed at step" not in outcome.text:
            return "it does not say that it resumed"
        if wrong := explained(*words)(folder, outcome):
            return wrong
        if max(losses(folder / RUN)) != steps_in_all - 1:
            return "it did not train to the end"
        return trained(folder, outcome)

    return check


# --------------------------------------------------------------------------------------------------------------- trials

OLDER = Right(resumed_from("last-before.ckpt", "NEST-"))
SAME = Right(resumed)
OLDER_OR_REFUSED = Either(Refused(("last.ckpt",)), OLDER)
SAME_OR_REFUSED = Either(Refused(("last.ckpt",)), SAME)
NEVER_FROM_0 = Refused(("checkpoint",))
ROW = tuple[str, Setup, Expected]


def damaged() -> list[ROW]:
    """What disks, copies and attackers do to the bytes of last.ckpt; the run goes on from its predecessor."""

    def on(change: Callable[[bytes], bytes]) -> Setup:
        return on_bytes(change, LAST)

    def instead(make: Callable[[Path], object]) -> Setup:
        return replaced(make, LAST)

    return [
        ("last.ckpt was cut when the quota was reached", on(cut(0.6)), OLDER),
        ("last.ckpt is empty after a power failure", on(always(b"")), OLDER),
        ("last.ckpt was moved away", instead(nothing), OLDER),
        ("a page of last.ckpt is zeros", on(hole), OLDER),
        ("a bit of the index of last.ckpt is flipped", on(lambda d: patched(d, 3000, bytes([d[3000] ^ 1]))), OLDER),
        ("last.ckpt went through a transfer in text mode", on(lambda d: d.replace(b"\n", b"\r\n")), OLDER),
        ("last.ckpt has a shell's message at its end", on(lambda d: d + b"logout\r\n" * 20), SAME_OR_REFUSED),
        ("last.ckpt has a login banner before it", on(lambda d: b"Welcome to node07!\n" + d), SAME_OR_REFUSED),
        ("last.ckpt is an error page of a web server", on(always(HTML_PAGE)), OLDER),
        ("last.ckpt was compressed and keeps its name", on(gzip.compress), OLDER_OR_REFUSED),
        ("last.ckpt is a named pipe", instead(os.mkfifo), OLDER_OR_REFUSED),
        ("last.ckpt is a link to endless zeros", instead(link("/dev/zero")), OLDER_OR_REFUSED),
        ("last.ckpt is an archive that runs a command", on(rezipped(evil_index)), OLDER_OR_REFUSED),
        ("last.ckpt has an object that runs a command in it", value("progress", "x", to=Evil()), OLDER_OR_REFUSED),
        ("last.ckpt claims a record of 4 GB", on(claims_a_terabyte), OLDER_OR_REFUSED),
        ("last.ckpt has tensors of a fourth GPU", on(rezipped(cuda_places)), SAME),
    ]


def changed() -> list[ROW]:
    """Checkpoints that are whole, but whose content is not what training can go on with."""
    return [
        ("last.ckpt has only weights", edited(lambda c: [c.pop(k) for k in set(c) - {"state_dict"}]), OLDER_OR_REFUSED),
        ("last.ckpt has a NaN in a weight", edited(with_nan), OLDER_OR_REFUSED),
        ("last.ckpt has a NaN in the optimizer's moments", edited(moments("exp_avg", float("nan"))), OLDER_OR_REFUSED),
        ("last.ckpt has negative squares of gradients", edited(moments("exp_avg_sq", -1.0)), OLDER_OR_REFUSED),
        (
            "last.ckpt lacks the moments of a parameter",
            edited(lambda c: c["optimizer_states"][0]["state"].pop(11)),
            OLDER_OR_REFUSED,
        ),
        (
            "last.ckpt has moments of another shape",
            value("optimizer_states", 0, "state", 3, "exp_avg", to=torch.zeros(5)),
            OLDER_OR_REFUSED,
        ),
        ("last.ckpt has no optimizer state in its list", value("optimizer_states", to=[]), OLDER_OR_REFUSED),
        ("last.ckpt is at step -3", value("global_step", to=-3), OLDER_OR_REFUSED),
        ("last.ckpt is at a step of 31 digits", value("global_step", to=10**30), OLDER_OR_REFUSED),
        ("last.ckpt is at batch 400 of an epoch of 4", value("data_position", "batch", to=400), OLDER_OR_REFUSED),
        ("last.ckpt was written by a world of 0 ranks", value("data_position", "world_size", to=0), OLDER_OR_REFUSED),
        ("last.ckpt has a list of best that is a number", value("progress", "memory", "best", to=3), SAME_OR_REFUSED),
        ("last.ckpt has a transposed weight", edited(transposed), OLDER_OR_REFUSED),
        (
            "last.ckpt was halved to save space",
            edited(halved),
            Either(Refused(("last.ckpt",)), Right(trained_on(ALL_STEPS))),
        ),
        (
            "last.ckpt has a tensor of 4 TB in 4 bytes",
            value("optimizer_states", 0, "state", 0, "exp_avg", to=torch.zeros(1).expand(10**12)),
            OLDER_OR_REFUSED,
        ),
        ("last.ckpt has settings nested 3000 deep", value("hyper_parameters", "cfg", to=nested(3000)), SAME_OR_REFUSED),
        ("last.ckpt is a tensor and not a dict", lambda f: torch.save(torch.zeros(3), f / LAST), OLDER_OR_REFUSED),
        (
            "last.ckpt is the .nemo file under another name",
            lambda f: shutil.copy(f / CHECKPOINTS / "run.nemo", f / LAST),
            OLDER_OR_REFUSED,
        ),
        (
            "last.ckpt is of a run with a narrower encoder",
            lambda f: shutil.copy(wide() / LAST, f / LAST),
            OLDER_OR_REFUSED,
        ),
        (
            "the list of the best names a file of somebody else",
            precious("{folder}/precious.ckpt"),
            Either(Refused(("last.ckpt",)), Right(unchanged("precious.ckpt", then=resumed))),
        ),
    ]


def arranged() -> list[ROW]:
    """Several files of the run at once: mixed up, linked, gone."""
    gone = replaced(nothing, CHECKPOINTS)
    return [
        ("last.ckpt and its predecessor were swapped", swapped, SAME),
        (
            "last.ckpt and its predecessor are both cut",
            both(on_bytes(cut(0.5), LAST), on_bytes(cut(0.9), BEFORE)),
            Right(resumed_from("NEST-")),
        ),
        ("all checkpoints are cut", all_checkpoints(cut(0.5)), NEVER_FROM_0),
        (
            "all checkpoints are empty, and .saved is gone",
            both(all_checkpoints(always(b"")), replaced(nothing, RUN / ".saved")),
            NEVER_FROM_0,
        ),
        ("the folder of checkpoints was deleted to free space", gone, NEVER_FROM_0),
        (
            "the folder of checkpoints is on a disk that is gone",
            replaced(link("/mnt/gone/checkpoints"), CHECKPOINTS),
            NEVER_FROM_0,
        ),
        ("the folder of checkpoints is a link to scratch", mounted_elsewhere, SAME),
        ("the file .saved is empty, the checkpoints are good", on_bytes(always(b""), RUN / ".saved"), SAME),
        (
            "last.ckpt is a link to an archive",
            both(archived, replaced(link("../../../archive/step6.ckpt"), LAST)),
            Right(unchanged("archive/step6.ckpt", then=resumed)),
        ),
        (
            "last.ckpt is also in a backup made of hard links",
            lambda f: os.link(f / LAST, f / "backup.ckpt"),
            Right(unchanged("backup.ckpt", then=resumed)),
        ),
        (
            "temporary files of killed programs are left",
            clutter("last.ckpt.tmp", ".last.ckpt.tmp-4711", "last.ckpt.part", ".last.ckpt.Xa81Qp"),
            SAME,
        ),
        (
            "files of desktops and editors lie among checkpoints",
            clutter("._last.ckpt", "last (1).ckpt", "last.ckpt~", ".DS_Store", ".nfs000000001"),
            SAME,
        ),
        ("the only checkpoint has a step in its name that is wrong", liar, SAME),
        ("all files of the run are of 1970", all_of_1970, SAME),
        (
            "the lock names a process that has its number now",
            written(LOCK, f"process 1 on {socket.gethostname()}\n"),
            SAME,
        ),
        (
            "the lock is a link to the manifest",
            replaced(link("../../train.jsonl"), LOCK),
            Either(Refused((".lock",)), Right(unchanged("train.jsonl", then=resumed))),
        ),
        (
            "the log is a folder",
            replaced(Path.mkdir, RUN / "log_globalrank-0_localrank-0.txt"),
            Either(Refused(("log_globalrank",)), SAME),
        ),
    ]


def logs() -> list[ROW]:
    """metrics.csv and hparams.yaml, before a resume."""

    def log(change: Callable[[bytes], bytes]) -> Setup:
        return on_bytes(change, METRICS)

    return [
        ("metrics.csv ends in the middle of a row", log(lambda d: d[:-25]), SAME),
        ("metrics.csv ends with zero bytes", log(lambda d: d + bytes(300)), SAME),
        (
            "metrics.csv was saved by Excel with a byte order mark",
            log(lambda d: b"\xef\xbb\xbf" + d.replace(b"\n", b"\r\n")),
            Right(steps(BASE_STEPS, explained("resumed at step 6"))),
        ),
        (
            "metrics.csv was saved with semicolons",
            log(lambda d: d.replace(b",", b";")),
            Right(kept("metrics-before.csv")),
        ),
        ("metrics.csv has lost its first line", lines_of(lambda lines: lines[1:]), Right(kept("metrics-before.csv"))),
        ("metrics.csv has a column of notes with line breaks", log(column_added), Right(steps(0))),
        ("metrics.csv was written by pandas", log(by_pandas), Right(steps(0))),
        ("metrics.csv has rows of a later, lost run", lines_of(lambda lines: [*lines, "500" + lines[-3][1:]]), SAME),
        ("metrics.csv has a step of 400 digits", lines_of(with_step_of_400_digits), Right(steps(BASE_STEPS))),
        ("metrics.csv was deleted", replaced(nothing, METRICS), Right(steps(BASE_STEPS))),
        (
            "metrics.csv is a folder",
            replaced(Path.mkdir, METRICS),
            Either(Refused(("metrics.csv",)), Right(explained("resumed at step 6", "metrics.csv"))),
        ),
        ("hparams.yaml is cut", on_bytes(cut(0.31), HPARAMS), SAME),
        ("hparams.yaml runs a command", written(HPARAMS, YAML_EVIL), SAME),
        ("hparams.yaml multiplies itself", written(HPARAMS, YAML_BOMB), SAME),
    ]


def emptied_runs(folder: Path) -> None:
    (folder / "runs").rename(folder / "old")
    (folder / "runs").mkdir()


def looked_at() -> list[tuple[str, list[str], Setup, Expected]]:
    """`report` and `doctor` of such runs."""
    report, doctor = ["report", str(RUN)], ["doctor", str(RUN)]
    any_words = Either(Refused(("runs/run|node0",)), Right(explained("run")))
    return [
        ("a report of a run whose checkpoints run commands", report, all_checkpoints(always(EVIL)), Right(page())),
        (
            "a report of a run with NaN in its weights",
            report,
            edited(with_nan),
            Either(Refused(("last.ckpt",)), Right(page())),
        ),
        (
            "a report of a run with markup in its metrics",
            report,
            on_bytes(lambda d: d.replace(b"accuracy", b'"' + SCRIPT.encode() + b'"', 1), METRICS),
            Right(page(absent=(SCRIPT,))),
        ),
        (
            "a report of a run with markup in its settings",
            report,
            on_bytes(lambda d: d.replace(b"window: hann", f"window: '</pre></script>{SCRIPT}'".encode()), HPARAMS),
            Right(page(absent=(SCRIPT,))),
        ),
        (
            "a report of a run with damaged metrics",
            report,
            lines_of(lambda lines: [*with_step_of_400_digits(lines[:4]), "-7,x,nan,1e999\n", "\x00\x00\n", *lines[4:]]),
            Right(page()),
        ),
        (
            "a report of a run with settings of another model",
            report,
            on_bytes(lambda d: d.replace(b"num_classes: 64", b"num_classes: 8192"), HPARAMS),
            Either(Refused(("num_classes|hparams|last.ckpt",)), Right(page())),
        ),
        (
            "a report of an empty folder",
            ["report", "runs"],
            emptied_runs,
            Refused(("runs",)),
        ),
        (
            "a report that shall replace a folder",
            report,
            replaced(Path.mkdir, RUN / "report.html"),
            Refused(("report.html",)),
        ),
        ("a doctor for a run whose state is cut", doctor, on_bytes(cut(0.5), NODE), any_words),
        ("a doctor for a run whose state is a list of numbers", doctor, written(NODE, "[1, 2, null]"), any_words),
        ("a doctor for a run whose state colours the terminal", doctor, node(coloured), any_words),
        (
            "a doctor for a run whose process is somebody else's",
            doctor,
            node(other_process),
            Either(Refused(("runs/run",), codes=(1,)), Right(explained("run"))),
        ),
        (
            "a doctor for a run whose incidents are files and bytes",
            doctor,
            both(written(RUN / "incidents", b"\xff\x1b[31m")),
            any_words,
        ),
        (
            "a doctor for a run whose newest checkpoint is cut",
            doctor,
            on_bytes(cut(0.4), LAST),
            Right(explained("checkpoint"), codes=(0, 1)),
        ),
    ]


def other_commands() -> list[tuple[str, list[str], Setup, Expected]]:
    """A resume with a file that is named, on another number of ranks, or from shards."""
    named = resume("exp_manager.resume_from_checkpoint=given.ckpt", "exp_manager.name=run")

    def given(change: Callable[[bytes], bytes]) -> Setup:
        return lambda f: written(Path("given.ckpt"), change((Fixture.path / LAST).read_bytes()))(f)

    shards = resume()
    part = LAST / "__1_0.distcp"
    older = Right(resumed_from("last-before.ckpt", "NEST-", then=trained_on(ALL_STEPS)))
    older_or_refused = Either(Refused(("last.ckpt",)), older)
    return [
        ("the file to resume from is cut", named, given(cut(0.5)), Refused(("given.ckpt",))),
        (
            "the file to resume from is a model for NeMo",
            named,
            lambda f: shutil.copy(Fixture.path / "model.nemo", f / "given.ckpt"),
            Refused(("given.ckpt",)),
        ),
        (
            "last.ckpt is of a run on two ranks",
            resume("trainer.max_steps=14"),
            lambda f: shutil.copy(Fixture.path / "runs/two_ranks/checkpoints/last.ckpt", f / LAST),
            Right(trained_on(14, "was 2")),
        ),
        ("a shard of last.ckpt has a page of zeros", shards, on_bytes(hole, part), older_or_refused),
        (
            "two shards of last.ckpt were swapped",
            shards,
            lambda f: [
                (f / LAST / a).rename(f / LAST / b)
                for a, b in (("__0_0.distcp", "x"), ("__1_0.distcp", "__0_0.distcp"), ("x", "__1_0.distcp"))
            ],
            older_or_refused,
        ),
        (
            "a shard of last.ckpt is of the save before",
            shards,
            lambda f: shutil.copy(f / BEFORE / part.name, f / part),
            older_or_refused,
        ),
        (
            "the index of the shards runs a command",
            shards,
            on_bytes(always(EVIL), LAST / ".metadata"),
            older_or_refused,
        ),
        (
            "hidden files were not copied with the shards",
            shards,
            replaced(nothing, LAST / ".metadata"),
            older_or_refused,
        ),
        ("the rest of the shards runs a command", shards, on_bytes(always(EVIL), LAST / "rest.pt"), older_or_refused),
    ]


def trials() -> list[Trial]:
    for make in (wide, sharded):  # before two trials at a time need them
        make()
    from_shards = run_of(sharded)
    found = [
        Trial(GROUP, name, resume(), expected, both(Fixture.run, setup))
        for name, setup, expected in [*damaged(), *changed(), *arranged(), *logs()]
    ]
    found += [
        Trial(GROUP, name, command, expected, both(Fixture.run, setup))
        for name, command, setup, expected in looked_at()
    ]
    for name, command, setup, expected in other_commands():
        is_sharded = "shard" in name
        found.append(Trial(GROUP, name, command, expected, both(from_shards if is_sharded else Fixture.run, setup)))
    return found
