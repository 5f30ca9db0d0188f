"""Run folders with damaged, foreign, edited or missing files; then the run is resumed, reported on or explained.

What is promised (docs/run-folder.md): a damaged `last.ckpt` is passed over with a warning, the run resumes from the
newest good checkpoint, and its losses are those of a run that was never interrupted. A run that has saved before never
starts at step 0 by itself. What a tool has edited, so that its checksums are right, may be refused or passed over.
"""

from __future__ import annotations

import math
import os
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from benchmarks.hostile.harness import (
    ALL_STEPS,
    BASE_STEPS,
    EVIL,
    RUN,
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
    ended_well,
    flipped,
    in_process,
    link,
    losses,
    nothing,
    on_bytes,
    replaced,
    resume,
    resumed,
    said,
    zeros,
)
from omegaconf import OmegaConf

GROUP = "checkpoints"
LAST, BEFORE = RUN / "checkpoints/last.ckpt", RUN / "checkpoints/last-before.ckpt"
METRICS, HPARAMS, NODE = RUN / "metrics.csv", RUN / "hparams.yaml", RUN / "watchdog/node0.json"
WEIGHT = "encoder.layers.0.self_attn.linear_q.weight"

Change = Callable[[Any], Any]

RESUME = resume()
EVERY = "checkpoints/*.ckpt"
REPORT, DOCTOR = ["report", str(RUN)], ["doctor", str(RUN)]
PASSED_OVER = Right(said("last.ckpt", then=resumed))
EDITED = Either(Refused(("last.ckpt",)), PASSED_OVER)


# -------------------------------------------------------------------------------------------------------- what is right


def continued(folder: Path, outcome: Outcome) -> str | None:
    """The steps after the checkpoint have the losses of the undisturbed run; earlier rows may be lost, not wrong."""
    expected, found = losses(Fixture.path / "runs/whole"), losses(folder / RUN)
    missing = [step for step in range(BASE_STEPS, ALL_STEPS) if step not in found]
    wrong = [step for step in found if found[step] != expected.get(step)]
    return f"losses are missing at steps {missing}, wrong at {wrong}" if missing or wrong else None


def begun_again(folder: Path, outcome: Outcome) -> str | None:
    """A whole new run, whose rows are not mixed with those of the old one."""
    expected, found = losses(Fixture.path / "runs/whole"), losses(folder / RUN)
    rows = len((folder / METRICS).read_text().splitlines())
    usual = len((Fixture.path / "runs/whole/metrics.csv").read_text().splitlines())
    return None if found == expected and rows == usual else "not the rows of one whole run"


def ended_at_10(folder: Path, outcome: Outcome) -> str | None:
    found = torch.load(folder / LAST, weights_only=True)["global_step"]
    return None if found == ALL_STEPS else f"the last checkpoint is of step {found}"


def shards_continued(folder: Path, outcome: Outcome) -> str | None:
    """The losses are those of two whole ranks that were never interrupted, but for rounding."""
    expected, found = losses(Fixture.path / "runs/two_ranks"), losses(folder / RUN)
    close = all(
        math.isclose(float(expected[step]), float(found[step]), rel_tol=1e-3) for step in expected.keys() & found.keys()
    )
    return None if expected.keys() == found.keys() and close else "losses differ from the undisturbed run"


def kept_as_before(folder: Path, outcome: Outcome) -> str | None:
    if not (folder / RUN / "metrics-before.csv").is_file():
        return "metrics-before.csv is not there"
    return continued(folder, outcome)


def audio_is_there(folder: Path, outcome: Outcome) -> str | None:
    """Nothing outside the run folder was deleted."""
    return resumed(folder, outcome) if (folder / "audio/0.wav").is_file() else "audio/0.wav was deleted"


def moved(folder: Path, outcome: Outcome) -> str | None:
    found = losses(folder / "moved/run")
    return None if found == losses(Fixture.path / "runs/whole") else "losses differ from the undisturbed run"


def page(*words: str, not_words: tuple[str, ...] = ()) -> Right:
    """There is a page with curves that has these words (patterns), and none of the others."""

    def check(folder: Path, outcome: Outcome) -> str | None:
        text = (folder / RUN / "report.html").read_text()
        missing = [word for word in ("<svg", *words) if not re.search(word, text, re.IGNORECASE)]
        extra = [word for word in not_words if word in text]
        return f"the page lacks {missing}, has {extra}" if missing or extra else None

    return Right(check)


# ------------------------------------------------------------------------------------------------------- how it is made


def damaged(change: Callable[[bytes], bytes], *paths: Path) -> Setup:
    return both(Fixture.run, *(on_bytes(change, path) for path in paths or (LAST,)))


def instead(make: Callable[[Path], object], *paths: Path) -> Setup:
    return both(Fixture.run, *(replaced(make, path) for path in paths or (LAST,)))


def removed(*patterns: str) -> Setup:
    """Remove files of the run folder."""

    def setup(folder: Path) -> None:
        Fixture.run(folder)
        for pattern in patterns:
            for path in (folder / RUN).glob(pattern):
                path.unlink()

    return setup


def edited(change: Change) -> Setup:
    """`last.ckpt` loaded, changed and saved by torch, so that its checksums are right."""

    def setup(folder: Path) -> None:
        Fixture.run(folder)
        content = torch.load(folder / LAST, weights_only=True)
        new = change(content)
        torch.save(content if new is None else new, folder / LAST)

    return setup


def put(path: str, value: object) -> Change:
    """Set a key of nested dicts and lists."""

    def change(content: Any) -> None:
        *parents, last = path.split("/")
        for name in parents:
            content = content[int(name) if name.isdigit() else name]
        content[int(last) if last.isdigit() else last] = value

    return change


def drop(name: str) -> Change:
    def change(content: Any) -> None:
        del content[name]

    return change


def first_moment(content: Any) -> Any:
    return content["optimizer_states"][0]["state"][0]


def reversed_moments(content: Any) -> None:
    state = content["optimizer_states"][0]["state"]
    content["optimizer_states"][0]["state"] = dict(zip(state, reversed(list(state.values())), strict=True))


def negative_moment(content: Any) -> None:
    first_moment(content)["exp_avg_sq"].fill_(-1.0)


def nan_weight(content: Any) -> None:
    content["state_dict"][WEIGHT][0, 0] = float("nan")


def narrow_weight(content: Any) -> None:
    content["state_dict"][WEIGHT] = content["state_dict"][WEIGHT][:16]


def of_nemo(content: Any) -> dict[str, Any]:
    """What NeMo's trainer saves: Lightning's keys, and the configuration as an OmegaConf object."""
    kept = ("epoch", "global_step", "state_dict", "optimizer_states", "lr_schedulers")
    theirs = {"pytorch-lightning_version": "2.4.0", "loops": {}, "callbacks": {}}
    config = OmegaConf.create(content["hyper_parameters"]["cfg"])
    return {**{name: content[name] for name in kept}, **theirs, "hyper_parameters": {"cfg": config}}


def best_is_audio(folder: Path) -> None:
    """The checkpoint says that the best, and by far the worst, is a file of the user's: save_top_k would delete it."""
    best = {str((folder / "audio/0.wav").resolve()): 999.0}
    edited(put("progress/memory/best", best))(folder)


def other_run(folder: Path) -> None:
    """The last checkpoint of a run with two ranks, copied over this one's."""
    Fixture.run(folder)
    shutil.copy(Fixture.path / "runs/two_ranks/checkpoints/last.ckpt", folder / LAST)


def elsewhere(folder: Path) -> None:
    Fixture.run(folder)
    (folder / "runs").rename(folder / "moved")


def sharded(pattern: str, change: Callable[[bytes], bytes]) -> Setup:
    """A run of two sharded ranks, whose checkpoints are folders; then files of `last.ckpt` are changed."""

    def setup(folder: Path) -> None:
        shards = ("trainer.devices=2", "trainer.strategy=fsdp", f"trainer.max_steps={BASE_STEPS}")
        outcome = in_process(resume(*shards), folder, {}, 120)
        if outcome.code != 0:
            raise RuntimeError(f"no sharded run: {outcome.text[-500:]}")
        found = list((folder / LAST).glob(pattern))
        if not found:
            raise RuntimeError(f"no {pattern} in last.ckpt")
        for path in found:
            on_bytes(change, path.relative_to(folder))(folder)

    return setup


def foreign_lock(path: Path) -> None:
    path.write_text('{"pid": 4194303, "host": "gpu-node"}')


def nemo_as_last(folder: Path) -> None:
    Fixture.run(folder)
    shutil.copy(folder / RUN / "checkpoints/run.nemo", folder / LAST)


def all_checkpoints(content: bytes) -> Setup:
    """All checkpoints have this content."""

    def setup(folder: Path) -> None:
        Fixture.run(folder)
        for path in (folder / RUN).glob(EVERY):
            path.write_bytes(content)

    return setup


# ------------------------------------------------------------------------------------------------------------- the rows

SHARDS = Right(said("last.ckpt", "resumed at step", then=shards_continued))
Row = tuple[str, list[str], Expected, Setup]

DAMAGED: list[Row] = [
    ("last.ckpt: half of it is there", RESUME, PASSED_OVER, damaged(cut(0.5))),
    ("last.ckpt: empty", RESUME, PASSED_OVER, damaged(always(b""))),
    ("last.ckpt: zeros", RESUME, PASSED_OVER, damaged(zeros)),
    ("last.ckpt: a flipped bit", RESUME, PASSED_OVER, damaged(flipped(0.5))),
    ("last.ckpt: not there", RESUME, PASSED_OVER, removed("checkpoints/last.ckpt")),
    ("last.ckpt: a link that leads nowhere", RESUME, PASSED_OVER, instead(link("/nowhere/last.ckpt"))),
    ("last.ckpt: a pipe", RESUME, PASSED_OVER, instead(os.mkfifo)),
    ("last.ckpt: an empty folder", RESUME, PASSED_OVER, instead(Path.mkdir)),
    ("last.ckpt and last-before.ckpt: cut off", RESUME, PASSED_OVER, damaged(cut(0.9), LAST, BEFORE)),
    (
        "all checkpoints are empty",
        *(RESUME, Refused(("checkpoint",)), all_checkpoints(b"")),
    ),
    ("all checkpoints are gone", RESUME, Refused(("checkpoint", f"step {BASE_STEPS}")), removed(EVERY)),
    (
        "all checkpoints are gone, and .saved",
        *(RESUME, Either(Refused(("checkpoint|metrics",)), Right(begun_again)), removed(EVERY, ".saved")),
    ),
    (".saved: garbage", RESUME, Right(resumed), damaged(always(b"\xff\0step nan"), RUN / ".saved")),
    ("last.ckpt: the model's .nemo file", RESUME, EDITED, nemo_as_last),
    (
        "last.ckpt: of a run with two ranks",
        RESUME,
        Either(Refused(("last.ckpt|rank",)), Right(said("rank"))),
        other_run,
    ),
]

EDITS: list[Row] = [
    ("edited: a weight has another shape", RESUME, EDITED, edited(narrow_weight)),
    ("edited: a weight is NaN", RESUME, EDITED, edited(nan_weight)),
    ("edited: the optimizer's states are in another order", RESUME, EDITED, edited(reversed_moments)),
    ("edited: a negative second moment", RESUME, EDITED, edited(negative_moment)),
    ("edited: no optimizer state", RESUME, EDITED, edited(put("optimizer_states/0/state", {}))),
    ("edited: global_step is -1", RESUME, EDITED, edited(put("global_step", -1))),
    ("edited: global_step is 10^30", RESUME, EDITED, edited(put("global_step", 10**30))),
    ("edited: global_step is a text", RESUME, EDITED, edited(put("global_step", "6"))),
    ("edited: batch 10^9 of the epoch", RESUME, EDITED, edited(put("data_position/batch", 10**9))),
    ("edited: without progress", RESUME, EDITED, edited(drop("progress"))),
    ("edited: progress is a list", RESUME, EDITED, edited(put("progress", [1, 2]))),
    ("edited: the time trained is NaN", RESUME, EDITED, edited(put("progress/memory/elapsed_s", float("nan")))),
    (
        "edited: the best checkpoint is a file of the user's",
        RESUME,
        Either(EDITED.refused, Right(audio_is_there)),
        best_is_audio,
    ),
    ("edited: runs a command when loaded carelessly", RESUME, EDITED, edited(put("progress/scaler", Evil()))),
    (
        "edited: as NeMo's trainer saves it",
        RESUME,
        Either(Refused(("init_from_ptl_ckpt",)), PASSED_OVER),
        edited(of_nemo),
    ),
    ("edited: only the weights", RESUME, EDITED, edited(lambda content: {"state_dict": content["state_dict"]})),
]

COMMANDS: list[Row] = [
    ("another optimizer", resume("model.optim.name=adamax"), Refused(("optimizer|optim.name",)), Fixture.run),
    (
        "resume_from_checkpoint: does not exist",
        *(resume("exp_manager.resume_from_checkpoint=gone.ckpt"), Refused(("gone.ckpt",)), nothing),
    ),
    (
        "resume_from_checkpoint: cut off",
        resume("exp_manager.resume_from_checkpoint=model.ckpt"),
        Refused(("model.ckpt",)),
        lambda folder: (folder / "model.ckpt").write_bytes(cut(0.5)((Fixture.path / "model.ckpt").read_bytes())),
    ),
    (
        "the run folder was moved",
        *(resume("exp_manager.exp_dir=moved"), Right(said("resumed at step", then=moved)), elsewhere),
    ),
]

OTHERS: list[Row] = [
    ("metrics.csv: cut off in a line", RESUME, Right(continued), damaged(cut(0.9), METRICS)),
    (
        "metrics.csv: saved with semicolons by a spreadsheet",
        RESUME,
        Right(kept_as_before),
        damaged(lambda data: data.replace(b",", b";").replace(b"\n", b"\r\n"), METRICS),
    ),
    (
        "metrics.csv: a folder",
        RESUME,
        Either(Refused(("metrics.csv",)), Right(ended_at_10)),
        instead(Path.mkdir, METRICS),
    ),
    (
        "metrics.csv: NUL bytes after a crash",
        RESUME,
        Right(continued),
        damaged(lambda data: data + bytes(512), METRICS),
    ),
    ("hparams.yaml: not there", RESUME, Right(resumed), removed("hparams.yaml")),
    ("hparams.yaml: not yaml", RESUME, Right(resumed), damaged(always(b"model: [\xff\0{"), HPARAMS)),
    ("the lock of a process that is gone", RESUME, Right(resumed), instead(foreign_lock, RUN / ".lock")),
]

READERS: list[Row] = [
    ("report: last.ckpt is cut off", REPORT, page(r"last\.ckpt|checkpoint"), damaged(cut(0.5))),
    ("report: a pickled command as every checkpoint", REPORT, page("checkpoint"), all_checkpoints(EVIL)),
    (
        "report: metrics.csv is cut off, with text in it",
        REPORT,
        page("left out|damaged|skipped|cannot be read"),
        damaged(lambda data: cut(0.9)(data) + b"\nfive,x,NaN,\xff\n", METRICS),
    ),
    (
        "report: metrics.csv is not there",
        REPORT,
        Either(Refused(("metrics.csv|runs/run",)), page()),
        removed("metrics.csv"),
    ),
    (
        "report: a script in git-commit.txt and hparams.yaml",
        REPORT,
        page(not_words=("<script>alert(1)",)),
        both(
            damaged(always(b"<script>alert(1)</script>"), RUN / "git-commit.txt"),
            on_bytes(lambda data: data + b"name: '<script>alert(1)</script>'\n", HPARAMS),
        ),
    ),
    (
        "doctor: its status file is cut off",
        DOCTOR,
        Either(Refused(("runs/run|node0.json",)), Right(said("last.ckpt", then=ended_well))),
        damaged(cut(0.5), NODE),
    ),
    (
        "doctor: escape codes in its status file",
        DOCTOR,
        Either(Refused(("runs/run|node0.json",)), Right(ended_well)),
        damaged(
            lambda data: data.replace(b'"finished"', b'"\\u001b[2Jfinished"').replace(b'"vm"', b'"\\u001b]0;x"'), NODE
        ),
    ),
    ("doctor: a folder that is no run", ["doctor", "audio"], Refused(("audio",)), nothing),
]

SHARDED: list[tuple[str, Expected, Setup]] = [
    ("sharded: a shard of last.ckpt is cut off", SHARDS, sharded("__1_*.distcp", cut(0.5))),
    ("sharded: a flipped bit in a shard of last.ckpt", SHARDS, sharded("__0_*.distcp", flipped(0.5))),
    (
        "sharded: the index of last.ckpt runs a command",
        *(Either(Refused(("last.ckpt",)), SHARDS), sharded(".metadata", always(EVIL))),
    ),
]


def trials() -> list[Trial]:
    found = [Trial(GROUP, *row) for table in (DAMAGED, EDITS, COMMANDS, OTHERS, READERS) for row in table]
    command = resume("trainer.devices=2", "trainer.strategy=fsdp")
    return found + [Trial(GROUP, name, command, expected, setup, own_process=True) for name, expected, setup in SHARDED]
