"""Runs whose files were damaged, swapped, edited or taken from elsewhere, and settings that changed, then resumed.

A run of six steps is prepared, something in its folder is changed, and it is resumed to step ten. Its losses must be
bit for bit those of a run that was left in peace, or the command is refused with the file's name and changes nothing.
"""

from __future__ import annotations

import io
import os
import shutil
import time
from collections.abc import Callable, Iterator
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
    ended_well,
    flipped,
    in_process,
    link,
    losses,
    nothing,
    on_bytes,
    patched,
    pretrain,
    replaced,
    resume,
    resumed,
    rows,
    said,
    snapshot,
    trained,
    write_lines,
    zeros,
)

SAVES = RUN / "checkpoints"
LAST, BEFORE = SAVES / "last.ckpt", SAVES / "last-before.ckpt"
METRICS, HPARAMS, SAVED = RUN / "metrics.csv", RUN / "hparams.yaml", RUN / ".saved"
LAYER = "encoder.layers.0.feed_forward1.linear1.weight"
VARIANCE = "encoder.layers.0.conv.batch_norm.running_var"


# ------------------------------------------------------------------------------------------------------ ways to damage


def best(folder: Path) -> Path:
    return next((folder / SAVES).glob("NEST*.ckpt"))


def loaded(path: Path) -> dict[str, Any]:
    content: dict[str, Any] = torch.load(path, weights_only=True)
    return content


def edit(change: Callable[[dict[str, Any]], object], path: Path = LAST) -> Setup:
    """Change the content of a checkpoint and save it as torch does; what `change` returns replaces it."""

    def setup(folder: Path) -> None:
        content = loaded(folder / path)
        returned = change(content)
        (folder / path).unlink()
        torch.save(content if returned is None else returned, folder / path)

    return setup


def everywhere(change: Callable[[bytes], bytes]) -> Setup:
    """Change the bytes of all checkpoints of the run."""

    def setup(folder: Path) -> None:
        for path in (folder / SAVES).glob("*.ckpt"):
            data = change(path.read_bytes())
            path.unlink()
            path.write_bytes(data)

    return setup


def no_checkpoints(folder: Path) -> None:
    for path in (folder / SAVES).glob("*.ckpt"):
        path.unlink()


def only_best(folder: Path) -> None:
    (folder / LAST).unlink()
    (folder / BEFORE).unlink()


def best_is_folder(folder: Path) -> None:
    path = best(folder)
    path.unlink()
    path.mkdir()
    (path / "notes.txt").write_text("mine")


def swap(folder: Path) -> None:
    one, other = (folder / LAST).read_bytes(), (folder / BEFORE).read_bytes()
    (folder / LAST).write_bytes(other)
    (folder / BEFORE).unlink()
    (folder / BEFORE).write_bytes(one)


def without(*keys: str) -> Callable[[dict[str, Any]], None]:
    def change(content: dict[str, Any]) -> None:
        for key in keys:
            del content[key]

    return change


def within(change: Callable[[dict[str, Any]], None], *path: object) -> Callable[[dict[str, Any]], None]:
    """Make a change to what is found under these keys."""

    def deeper(content: dict[str, Any]) -> None:
        place: Any = content
        for key in path:
            place = place[key]
        change(place)

    return deeper


def put(*path: object, to: object) -> Callable[[dict[str, Any]], None]:
    """Set what is found under these keys, or call `to` with it if it is a function."""

    def change(content: dict[str, Any]) -> None:
        place: Any = content
        for key in path[:-1]:
            place = place[key]
        place[path[-1]] = to(place[path[-1]]) if callable(to) else to

    return change


def moment(name: str, change: Callable[[torch.Tensor], torch.Tensor]) -> Callable[[dict[str, Any]], None]:
    """Change the optimizer's memory of one parameter."""
    return put("optimizer_states", 0, "state", 3, name, to=change)


def spoiled(number: float) -> Callable[[torch.Tensor], torch.Tensor]:
    def change(tensor: torch.Tensor) -> torch.Tensor:
        tensor = tensor.clone()
        tensor.view(-1)[0] = number
        return tensor

    return change


def lines(change: Callable[[list[str]], list[str]]) -> Callable[[bytes], bytes]:
    return lambda data: "".join(change(data.decode().splitlines(keepends=True))).encode()


def add(path: Path, content: bytes) -> Setup:
    def setup(folder: Path) -> None:
        (folder / path).parent.mkdir(parents=True, exist_ok=True)
        (folder / path).write_bytes(content)

    return setup


def move(old: Path, new: Path) -> Setup:
    return lambda folder: (folder / old).rename(folder / new)


def moved_and_linked(path: Path) -> Setup:
    """Move a file or folder elsewhere and leave a link, as people do when a disk is full."""

    def setup(folder: Path) -> None:
        (folder / "elsewhere").mkdir()
        (folder / path).rename(folder / "elsewhere" / path.name)
        (folder / path).symlink_to(folder / "elsewhere" / path.name)

    return setup


def foreign(*overrides: str, name: str, ranks: int = 1) -> Callable[[Path], Path]:
    """The run folder of another configuration, made once."""

    def make(folder: Path) -> Path:
        run = Fixture.path / "runs" / name
        if not run.exists():
            box = folder.parent / name / "folder"
            for path in (box, box.parent / "home", box.parent / "tmp"):
                path.mkdir(parents=True)
            Fixture.data(box)
            command = resume(f"trainer.max_steps={BASE_STEPS}", *overrides, f"trainer.devices={ranks}")
            outcome = in_process(command, box, {}, 120)
            if outcome.code != 0:
                raise RuntimeError(f"no {name} run: {outcome.text[-500:]}")
            shutil.copytree(box / RUN, run)
            shutil.rmtree(box.parent)
        return run

    return make


NARROW = foreign("model.encoder.d_model=16", name="narrow")
SGD = foreign("~model.optim.betas", "model.optim.name=sgd", name="sgd")
EMA = foreign("exp_manager.ema.enable=true", name="ema")
SHARDED = foreign("trainer.strategy=fsdp", name="in_shards", ranks=2)
LATER = foreign("trainer.strategy=fsdp", f"trainer.max_steps={ALL_STEPS}", name="in_shards_later", ranks=2)
TWO = foreign(name="two_of_six", ranks=2)


def taken(make: Callable[[Path], Path], *names: str) -> Setup:
    """Put checkpoints of another run under these names into this one."""

    def setup(folder: Path) -> None:
        for name in names:
            source, target = make(folder) / "checkpoints/last.ckpt", folder / SAVES / name
            target.unlink(missing_ok=True)
            (shutil.copytree if source.is_dir() else shutil.copy)(source, target)

    return setup


def whole_run(make: Callable[[Path], Path], *then: Setup) -> Setup:
    """Resume another run than the fixture's."""

    def setup(folder: Path) -> None:
        source = make(folder)
        if (folder / RUN).exists():
            shutil.rmtree(folder / RUN)
        shutil.copytree(source, folder / RUN)
        for one in then:
            one(folder)

    return setup


def in_shard(pattern: str, change: Callable[[bytes], bytes], where: Path = LAST) -> Setup:
    def setup(folder: Path) -> None:
        path = sorted((folder / where).glob(pattern))[0]
        path.write_bytes(change(path.read_bytes()))

    return setup


def mixed(folder: Path) -> None:
    """One shard is of a later save, as when a copy of the folder was interrupted."""
    name = "__0_0.distcp"
    shutil.copy(LATER(folder) / "checkpoints/last.ckpt" / name, folder / LAST / name)


def times(**seconds: float) -> Setup:
    """Set the modification times of checkpoints, in seconds from now."""

    def setup(folder: Path) -> None:
        for name, shift in seconds.items():
            path = folder / {"last": LAST, "before": BEFORE}[name]
            os.utime(path, (time.time() + shift,) * 2)

    return setup


PRECIOUS = b"do not touch"


def precious(folder: Path) -> None:
    (folder / "precious.ckpt").write_bytes(PRECIOUS)


def points_at_precious(folder: Path) -> None:
    precious(folder)
    edit(put("progress", "memory", "best", to={str(folder / "precious.ckpt"): 1e9}))(folder)


# ------------------------------------------------------------------------------------------------------- what is right


def tail_resumed(folder: Path, outcome: Outcome) -> str | None:
    """As `resumed`, but rows of steps before the checkpoint may be gone."""
    expected, found = losses(Fixture.path / "runs/whole"), losses(folder / RUN)
    different = [step for step in found if found[step] != expected.get(step)]
    missing = [step for step in range(BASE_STEPS, ALL_STEPS) if step not in found]
    if different or missing:
        return f"losses differ at {different}, and are missing at {missing}"
    return None if "resumed at step" in outcome.text else "it does not say that it resumed"


def kept_precious(check: Check = resumed) -> Check:
    def judge(folder: Path, outcome: Outcome) -> str | None:
        path = folder / "precious.ckpt"
        if not path.is_file() or path.read_bytes() != PRECIOUS:
            return "a file outside the run was changed or deleted"
        return check(folder, outcome)

    return judge


def kept_run(folder: Path, outcome: Outcome) -> str | None:
    """The run of before is still there: its last checkpoint and all rows of its metrics."""
    for name in ("checkpoints/last.ckpt", "metrics.csv"):
        if (folder / RUN / name).read_bytes() != (Fixture.path / RUN / name).read_bytes():
            return f"{name} of the earlier run was changed"
    return None


def elsewhere_or_kept(folder: Path, outcome: Outcome) -> str | None:
    """A fresh run was made next to the old one, which is complete."""
    steps = {path.read_bytes() for path in (folder / "runs").rglob("last.ckpt")}
    return None if (Fixture.path / LAST).read_bytes() in steps else "the earlier run's checkpoint is gone"


def still_six(folder: Path, outcome: Outcome) -> str | None:
    """Nothing was trained, and nothing was lost."""
    if loaded(folder / LAST)["global_step"] != BASE_STEPS:
        return "last.ckpt is of another step"
    return None if losses(folder / RUN) == losses(Fixture.path / RUN) else "metrics.csv has changed"


def continued(*words: str, steps: int = ALL_STEPS) -> Right:
    """It resumed where it was, said this, and trained on with good losses."""

    def check(folder: Path, outcome: Outcome) -> str | None:
        if max(losses(folder / RUN)) != steps - 1:
            return f"it ended at step {max(losses(folder / RUN)) + 1}"
        first = next(row for row in rows(folder / RUN) if row["train_loss"] and int(row["step"]) >= BASE_STEPS)
        if int(first["step"]) != BASE_STEPS:
            return "rows are missing"
        return trained(folder, outcome)

    return Right(said("resumed at step", *words, then=check))


def clean(check: Check = resumed) -> Check:
    """And no file is left that a save had not finished."""

    def judge(folder: Path, outcome: Outcome) -> str | None:
        left = [path.name for path in (folder / SAVES).iterdir() if "tmp" in path.name.lower()]
        return f"left: {left}" if left else check(folder, outcome)

    return judge


RESUMED = Right(resumed)
WARNED = Right(said("passed over", "last.ckpt", then=resumed))
TAIL = Right(tail_resumed)
STARTED = Right(trained)


def no(*words: str) -> Refused:
    return Refused(words)


def passed_over(*words: str) -> Either:
    """An edited checkpoint is refused by name, or passed over for the one before it; never used as it is."""
    return Either(Refused(("last.ckpt", *words)), RESUMED)


# ----------------------------------------------------------------------------------------------------------- the trials

Row = tuple[str, Setup, Expected]

DAMAGED: list[Row] = [
    ("last is cut off", on_bytes(cut(0.7), LAST), WARNED),
    ("last is empty", on_bytes(always(b""), LAST), WARNED),
    ("last is zeros of the same size", on_bytes(zeros, LAST), WARNED),
    ("last has a flipped bit", on_bytes(flipped(0.5), LAST), WARNED),
    ("last has a flipped bit in its pickle", on_bytes(flipped(0.02), LAST), WARNED),
    ("last has a flipped bit in the zip's directory", on_bytes(flipped(0.98), LAST), WARNED),
    ("last has a hole of zeros, as after a power cut", on_bytes(lambda d: patched(d, 400_000, bytes(4096)), LAST),
     WARNED),
    ("last has bytes added at its end", on_bytes(lambda d: d + bytes(70_000), LAST), RESUMED),
    ("last is twice itself", on_bytes(lambda d: d + d, LAST), RESUMED),
    ("last is gone", replaced(nothing, LAST), RESUMED),
    ("last is an empty folder", replaced(Path.mkdir, LAST), WARNED),
    ("last is a pipe", replaced(lambda p: os.mkfifo(p), LAST), WARNED),
    ("last is a link to nothing", replaced(link("nowhere.ckpt"), LAST), WARNED),
    ("last is a link in a circle", replaced(link("last.ckpt"), LAST), WARNED),
    ("last is a link to /dev/zero", replaced(link("/dev/zero"), LAST), WARNED),
    ("last is a link to its predecessor", replaced(link("last-before.ckpt"), LAST), RESUMED),
    ("last was moved to another disk, with a link", moved_and_linked(LAST), RESUMED),
    ("last is a model file", replaced(lambda p: shutil.copy(Fixture.path / "model.nemo", p), LAST), passed_over()),
    ("last is code", on_bytes(always(EVIL), LAST), WARNED),
    ("last was compressed by hand", both(on_bytes(lambda d: d, LAST), move(LAST, SAVES / "last.ckpt.gz")), RESUMED),
    ("last and its predecessor are cut off", both(on_bytes(cut(0.5), LAST), on_bytes(cut(0.5), BEFORE)), WARNED),
    ("all checkpoints are cut off", everywhere(cut(0.5)), no("step 6")),
    ("all checkpoints have a flipped bit", everywhere(flipped(0.5)), no("step 6")),
    ("all checkpoints are gone", no_checkpoints, no("step 6")),
    ("the folder of checkpoints is gone", replaced(nothing, SAVES), no("step 6")),
    ("all checkpoints are gone, and .saved is garbage", both(no_checkpoints, add(SAVED, b"\xff\xfe??")), no()),
    ("all checkpoints are gone, and .saved is empty", both(no_checkpoints, add(SAVED, b"")), no()),
    (".saved is a folder", replaced(Path.mkdir, SAVED), Either(no(".saved"), RESUMED)),
    (".saved says a later step than any checkpoint", add(SAVED, b"step 900\n"), Either(no("900"), RESUMED)),
    (".saved is gone", replaced(nothing, SAVED), RESUMED),
    ("only the best checkpoint is left", only_best, RESUMED),
    ("last and its predecessor are swapped", swap, RESUMED),
    ("last is older than its predecessor by the clock", times(last=-9e6, before=0), RESUMED),
    ("last is from the future", times(last=9e8), RESUMED),
    ("copies lie around", lambda f: [shutil.copy(f / BEFORE, f / SAVES / n) for n in (
        "last (1).ckpt", "last-v1.ckpt", "last.ckpt.bak", "Copy of last.ckpt", "last.ckpt~")], RESUMED),
    ("a copy of the best has a newer step in its name", lambda f: shutil.copy(
        best(f), f / SAVES / "NEST-FastConformer-SSL--val_loss=0.0001-epoch=99-step=9999.ckpt"), RESUMED),
    ("half-written files of a kill lie around", both(
        add(SAVES / "last.ckpt.tmp", b"x" * 999), add(SAVES / ".last.ckpt.tmp123", b"x")), RESUMED),
    ("the best checkpoint is garbage", lambda f: best(f).write_bytes(b"garbage"), RESUMED),
    ("the best checkpoint is gone", lambda f: best(f).unlink(), RESUMED),
    ("the best checkpoint is a folder with files", best_is_folder, RESUMED),
    ("the checkpoints are a file", both(move(SAVES, RUN / "old"), add(SAVES, b"x")), no("checkpoints")),
    ("the checkpoints are on another disk, with a link", moved_and_linked(SAVES), RESUMED),
    ("the run is on another disk, with a link", moved_and_linked(RUN), RESUMED),
    ("the run was moved from another place", edit(
        put("progress", "memory", "best", to={"/old/place/x.ckpt": 4.0991})), RESUMED),
    ("the folder of runs is a file", replaced(lambda p: p.write_text("x"), Path("runs")), no("runs")),
]  # fmt: skip

EDITED: list[Row] = [
    ("a list", edit(lambda c: [c]), passed_over()),
    ("an empty dict", edit(lambda c: {}), passed_over()),
    ("only weights", edit(lambda c: c["state_dict"]), passed_over()),
    ("keys are numbers", edit(lambda c: dict(enumerate(c.values()))), passed_over()),
    *[(f"no {key}", edit(without(key)), passed_over()) for key in (
        "state_dict", "optimizer_states", "lr_schedulers", "global_step", "data_position", "progress")],
    ("no epoch, and no configuration", edit(without("epoch", "hyper_parameters")), passed_over()),
    ("one more section", edit(put("notes", to={"by": "me"})), RESUMED),
    ("weights with code", edit(put("state_dict", LAYER, to=lambda t: Evil())), WARNED),
    ("a NaN weight", edit(put("state_dict", LAYER, to=spoiled(float("nan")))), passed_over()),
    ("a negative variance", edit(put("state_dict", VARIANCE, to=spoiled(-1.0))), passed_over()),
    ("a weight of another shape", edit(put("state_dict", LAYER, to=lambda t: t[:5])), passed_over()),
    ("a weight in half precision", edit(put("state_dict", LAYER, to=lambda t: t.half())), passed_over()),
    ("a weight is missing", edit(within(without(LAYER), "state_dict")), passed_over()),
    ("a weight too many", edit(put("state_dict", "encoder.layers.7.x", to=torch.ones(2))), passed_over()),
    ("a weight is a string", edit(put("state_dict", LAYER, to="x")), passed_over()),
    ("another mel filter bank", edit(put("state_dict", "preprocessor.featurizer.fb", to=torch.zeros_like)),
     passed_over()),
    ("a codebook of NaN", edit(put("state_dict", "quantizer.codebooks", to=lambda t: t * float("nan"))),
     passed_over()),
    ("a moment is NaN", edit(moment("exp_avg", spoiled(float("nan")))), passed_over()),
    ("a second moment is negative", edit(moment("exp_avg_sq", spoiled(-1.0))), passed_over()),
    ("a moment of another shape", edit(moment("exp_avg", lambda t: t.flatten()[:1])), passed_over()),
    ("a moment is missing", edit(within(without("exp_avg"), "optimizer_states", 0, "state", 3)),
     passed_over()),
    ("the optimizer's step is -3", edit(moment("step", lambda t: t * 0 - 3)), passed_over()),
    ("the optimizer's step is NaN", edit(moment("step", lambda t: t * float("nan"))), passed_over()),
    ("half of the optimizer's memory", edit(put("optimizer_states", 0, "state", to=lambda s: {
        k: v for k, v in s.items() if k < 40})), passed_over()),
    ("two optimizers", edit(put("optimizer_states", to=lambda s: s * 2)), passed_over()),
    ("two groups of parameters", edit(put("optimizer_states", 0, "param_groups", to=lambda g: g * 2)), passed_over()),
    ("parameters in another order", edit(put("optimizer_states", 0, "param_groups", 0, "params", to=lambda p: p[::-1])),
     passed_over()),
    ("the optimizer's state is text", edit(put("optimizer_states", 0, to="adam")), passed_over()),
    ("an infinite rate in the optimizer's state", edit(
        put("optimizer_states", 0, "param_groups", 0, "lr", to=float("inf"))), Either(no("last.ckpt"), RESUMED)),
    ("another optimizer's name", edit(put("progress", "optimizer", to="SGD")), Either(no("optim"), RESUMED)),
    ("a schedule of another step", edit(put("lr_schedulers", 0, "last_epoch", to=3)), passed_over()),
    ("a schedule that is a number", edit(put("lr_schedulers", to=[7])), passed_over()),
    ("step -1", edit(put("global_step", to=-1)), passed_over()),
    ("step six in words", edit(put("global_step", to="six")), passed_over()),
    ("step 6.5", edit(put("global_step", to=6.5)), passed_over()),
    ("step 10**15", edit(put("global_step", to=10**15)), passed_over()),
    ("a step that the rest contradicts", edit(put("global_step", to=3)), passed_over()),
    ("batch 10**9", edit(put("data_position", "batch", to=10**9)), passed_over()),
    ("batch -2", edit(put("data_position", "batch", to=-2)), passed_over()),
    ("epoch -1", edit(put("data_position", "epoch", to=-1)), passed_over()),
    ("batch None", edit(put("data_position", "batch", to=None)), passed_over()),
    ("zero ranks", edit(put("data_position", "world_size", to=0)), passed_over()),
    ("another plan of the same data", edit(put("data_position", "plan_hash", to="0" * 64)), Right(
        said("batches", then=resumed))),
    ("a plan that is a number", edit(put("data_position", "plan_hash", to=7)), passed_over()),
    ("bad files counted below zero", edit(put("data_position", "bad_data", to={"num_read": -5, "num_bad": -9})),
     passed_over()),
    ("bad files counted as text", edit(put("data_position", "bad_data", to="none")), passed_over()),
    ("the best score is text", edit(put("progress", "memory", "best", to={"x.ckpt": "good"})), passed_over()),
    ("the best score is NaN", edit(put("progress", "memory", "best", to={"x.ckpt": float("nan")})), passed_over()),
    ("the best is a file that is not the run's", points_at_precious, Right(kept_precious())),
    ("the time trained is NaN", edit(put("progress", "memory", "elapsed_s", to=float("nan"))), passed_over()),
    ("the time trained is negative", edit(put("progress", "memory", "elapsed_s", to=-1e9)), passed_over()),
    ("no memory", edit(put("progress", "memory", to=None)), passed_over()),
    ("a loss scaler that nobody asked for", edit(put("progress", "scaler", to={"scale": float("inf")})),
     passed_over()),
    ("batches seen: minus one", edit(put("progress", "batches_seen", to=-1)), passed_over()),
    ("an epoch that is both over and not begun", edit(put("progress", "epoch_is_over", to="maybe")), passed_over()),
    ("means of NaN", edit(put("epoch_means", "sums", "train_loss_epoch", to=torch.tensor(float("nan")))),
     passed_over()),
    ("means that are text", edit(put("epoch_means", to="4.2")), passed_over()),
    ("written by a later version", edit(put("nest_ssl_version", to="99.0.0")), passed_over()),
    ("its configuration runs a command", edit(put("hyper_parameters", "cfg", "encoder", "_target_", to="os.system")),
     Either(no("last.ckpt"), RESUMED)),
    ("its configuration is of another model", edit(put("hyper_parameters", "cfg", "encoder", "n_layers", to=9)),
     Either(no("last.ckpt"), RESUMED)),
]  # fmt: skip

FOREIGN: list[Row] = [
    ("last is of a narrower model", taken(NARROW, "last.ckpt"), passed_over()),
    ("all are of a narrower model", both(no_checkpoints, taken(NARROW, "last.ckpt")), no("last.ckpt", "shape|d_model")),
    ("last is of another optimizer", both(no_checkpoints, taken(SGD, "last.ckpt")), no("optim")),
    ("last has averaged weights, which are not asked for", whole_run(EMA), Either(no("ema"), continued("ema"))),
    ("last is of two ranks", whole_run(TWO), continued("1 rank (was 2)")),
    ("last is in shards of two ranks", whole_run(SHARDED), continued("1 rank (was 2)")),
    ("shards: one is gone", whole_run(SHARDED, lambda f: sorted((f / LAST).glob("*.distcp"))[0].unlink()),
     Right(said("passed over", "resumed at step", "last.ckpt"))),
    ("shards: one has a flipped bit", whole_run(SHARDED, in_shard("*.distcp", flipped(0.6))),
     Right(said("passed over", "resumed at step", "last.ckpt"))),
    ("shards: the index is code", whole_run(SHARDED, in_shard(".metadata", always(EVIL))),
     Right(said("passed over", "resumed at step", "last.ckpt"))),
    ("shards: the index is another's", whole_run(SHARDED, in_shard(".metadata", cut(0.5))),
     Right(said("passed over", "resumed at step", "last.ckpt"))),
    ("shards: the rest is gone", whole_run(SHARDED, lambda f: (f / LAST / "rest.pt").unlink()),
     Right(said("passed over", "resumed at step", "last.ckpt"))),
    ("shards: the rest is of a file's checkpoint", whole_run(SHARDED, lambda f: shutil.copy(
        Fixture.path / "model.ckpt", f / LAST / "rest.pt")),
     Either(no("last.ckpt"), Right(said("resumed at step")))),
    ("shards: mixed of two saves", whole_run(SHARDED, mixed),
     Either(no("last.ckpt"), Right(said("passed over", "resumed at step", "last.ckpt")))),
    ("shards: a file more", whole_run(SHARDED, add(LAST / "__9_0.distcp", b"x")), continued("1 rank (was 2)")),
]  # fmt: skip

SIDE_FILES: list[Row] = [
    ("metrics are gone", replaced(nothing, METRICS), TAIL),
    ("metrics are empty", on_bytes(always(b""), METRICS), TAIL),
    ("metrics are only a header", on_bytes(lines(lambda x: x[:1]), METRICS), TAIL),
    ("metrics have no header", on_bytes(lines(lambda x: x[1:]), METRICS), TAIL),
    ("metrics end in the middle of a row", on_bytes(lambda d: d[:-40], METRICS), TAIL),
    ("metrics end in the middle of a loss", on_bytes(lines(lambda x: [*x[:-3], x[-3][:18]]), METRICS), TAIL),
    ("metrics are garbage", on_bytes(lambda d: os.urandom(3000), METRICS), TAIL),
    ("metrics have NUL bytes at the end, as after a power cut", on_bytes(lambda d: d + bytes(5000), METRICS), TAIL),
    ("metrics have rows of steps that were never saved", on_bytes(
        lambda d: d + d.splitlines()[1].replace(b"0,", b"77,", 1) + b"\n", METRICS), RESUMED),
    ("metrics have rows twice", on_bytes(lines(lambda x: [x[0], *x[1:], *x[1:]]), METRICS), TAIL),
    ("metrics were sorted backwards", on_bytes(lines(lambda x: [x[0], *x[:0:-1]]), METRICS), TAIL),
    ("metrics have Windows line ends", on_bytes(lambda d: d.replace(b"\n", b"\r\n"), METRICS), RESUMED),
    ("metrics have a byte order mark", on_bytes(lambda d: b"\xef\xbb\xbf" + d, METRICS), TAIL),
    ("metrics have a column of notes", on_bytes(lines(lambda x: [
        line.rstrip("\n") + (",notes\n" if i == 0 else ",mine\n") for i, line in enumerate(x)]), METRICS), RESUMED),
    ("metrics have other columns first", on_bytes(lines(lambda x: [
        ",".join(line.rstrip("\n").split(",")[::-1]) + "\n" for line in x]), METRICS), RESUMED),
    ("metrics were saved with semicolons", on_bytes(lambda d: d.replace(b",", b";"), METRICS), TAIL),
    ("metrics have a field of a megabyte", on_bytes(lambda d: d + b"5," + b"9" * (1 << 20) + b"\n", METRICS), TAIL),
    ("metrics have steps in words", on_bytes(lambda d: d.replace(b"\n3,", b"\nthree,"), METRICS), TAIL),
    ("metrics are a folder", replaced(Path.mkdir, METRICS),
     Either(no("metrics.csv"), Right(said("metrics.csv", then=ended_well)))),
    ("metrics are a link to another file", both(precious, replaced(link("../../precious.ckpt"), METRICS)),
     Either(no("metrics.csv"), Right(tail_resumed))),
    ("hparams are gone", replaced(nothing, HPARAMS), RESUMED),
    ("hparams are garbage", on_bytes(lambda d: os.urandom(999), HPARAMS), RESUMED),
    ("hparams run a command", on_bytes(always(b'!!python/object/apply:os.system ["touch ../pwned"]'), HPARAMS),
     RESUMED),
    ("hparams are a list", on_bytes(always(b"- a\n- b\n"), HPARAMS), RESUMED),
    ("hparams are a billion laughs", on_bytes(always(b"a: &a [x,x,x,x,x,x,x,x,x]\n" + b"".join(
        b"%c: &%c [" % (98 + i, 98 + i) + b",".join([b"*%c" % (97 + i)] * 9) + b"]\n" for i in range(12))), HPARAMS),
     RESUMED),
    ("hparams are of another model", on_bytes(lambda d: d.replace(b"d_model: 32", b"d_model: 64"), HPARAMS), RESUMED),
    ("hparams are a folder", replaced(Path.mkdir, HPARAMS), Either(no("hparams.yaml"), RESUMED)),
    ("hparams have terminal codes", on_bytes(
        lambda d: d.replace(b"window: hann", b'window: "\\e[2Jhann"', 1), HPARAMS), RESUMED),
    ("the log is a folder", replaced(Path.mkdir, RUN / "log_globalrank-0_localrank-0.txt"),
     Either(no("log_globalrank"), RESUMED)),
    ("the report is a folder", replaced(Path.mkdir, RUN / "report.html"), Either(no("report.html"), RESUMED)),
    ("the lock is of a process that is gone", add(RUN / ".lock", b"process 1 on another-host\n"), RESUMED),
    ("the lock is a link to another file", both(precious, replaced(link("../../precious.ckpt"), RUN / ".lock")),
     Either(no(".lock"), Right(kept_precious()))),
    ("the lock is a folder", replaced(Path.mkdir, RUN / ".lock"), Either(no(".lock"), RESUMED)),
    ("the watchdog's state is garbage", add(RUN / "watchdog/node0.json", b"{{{"), RESUMED),
    ("the folder of incidents is a file", add(RUN / "incidents", b"x"), Either(no("incidents"), RESUMED)),
    ("the model at the end is a folder", replaced(Path.mkdir, SAVES / "run.nemo"),
     Either(Refused(("run.nemo",), partial=True), RESUMED)),
]  # fmt: skip


def other_manifest(folder: Path) -> None:
    lines_of = [{"audio_filepath": f"audio/{i}.wav", "duration": 1.6 + 0.1 * i} for i in (7, 6, 5, 4, 3, 2)]
    write_lines(folder / "other.jsonl", lines_of)


SETTINGS: list[tuple[str, tuple[str, ...], Expected]] = [
    ("another optimizer", ("model.optim.name=adam",), no("optim")),
    ("another optimizer by its settings", ("model.optim={name: sgd, lr: 0.1}",), no("optim")),
    ("another width", ("model.encoder.d_model=64",), no("d_model|shape")),
    ("another layer", ("model.encoder.n_layers=3",), no("layers")),
    ("another number of codes", ("model.num_classes=32",), no("num_classes|quantizer|shape")),
    ("another window", ("model.preprocessor.window=hamming",), no("window")),
    ("other mel filters", ("model.preprocessor.lowfreq=50",), no("lowfreq")),
    ("another pre-emphasis", ("model.preprocessor.preemph=0.5",), no("preemph")),
    ("another kind of normalisation", ("model.preprocessor.normalize=all_features",), no("normalize")),
    ("another sample rate", ("model.sample_rate=8000",), no("sample_rate|featurizer.window")),
    ("fewer steps than are done", ("trainer.max_steps=3",), Right(still_six)),
    ("as many steps as are done", (f"trainer.max_steps={BASE_STEPS}",), Right(still_six)),
    ("another learning rate", ("model.optim.lr=0.01",), continued("model.optim.lr", "takes effect")),
    ("another seed", ("seed=77",), continued("seed")),
    ("another mask", ("model.masking.mask_prob=0.02",), continued("mask_prob")),
    ("another batch size", ("model.train_ds.batch_size=4",), continued("batch_size")),
    ("other data", ("model.train_ds.manifest_filepath=other.jsonl",), continued("other.jsonl")),
    ("data that is not there", ("model.train_ds.manifest_filepath=gone.jsonl",), no("gone.jsonl")),
    ("bf16", ("trainer.precision=bf16",), continued("precision")),
    ("averages switched on", ("exp_manager.ema.enable=true",), continued("ema")),
    ("accumulation", ("trainer.accumulate_grad_batches=2",), continued("accumulate_grad_batches")),
    ("two ranks", ("trainer.devices=2",), continued("2 ranks (was 1)")),
    ("no best checkpoints", ("exp_manager.checkpoint_callback_params.save_top_k=0",), RESUMED),
    ("a best checkpoint by a metric that does not exist",
     ("exp_manager.checkpoint_callback_params.monitor=val_los",), no("val_los")),
    ("no resuming, in the folder of a run", ("exp_manager.resume_if_exists=false",),
     Either(no("resume_if_exists|runs/run"), Right(elsewhere_or_kept))),
    ("a dry run in the folder of a run", ("trainer.fast_dev_run=true",), Right(kept_run)),
    ("starting weights besides a checkpoint", ("init_from_nemo_model=runs/run/checkpoints/run.nemo",), RESUMED),
    ("starting weights that are not there, besides a checkpoint", ("init_from_nemo_model=gone.nemo",),
     Either(no("gone.nemo"), RESUMED)),
    ("from the best, by hand", (f'exp_manager.resume_from_checkpoint="{SAVES}/BEST"',), RESUMED),
    ("from a file that is not there", ("exp_manager.resume_from_checkpoint=gone.ckpt",), no("gone.ckpt")),
    ("from a model file", ("exp_manager.resume_from_checkpoint=runs/run/checkpoints/run.nemo",), no("run.nemo")),
    ("from a damaged file, by hand", ("exp_manager.resume_from_checkpoint=damaged.ckpt",), no("damaged.ckpt")),
    ("from code, by hand", ("exp_manager.resume_from_checkpoint=code.ckpt",), no("code.ckpt")),
    ("from a folder, by hand", (f"exp_manager.resume_from_checkpoint={SAVES}",), no("checkpoints")),
    ("from a pipe, by hand", ("exp_manager.resume_from_checkpoint=pipe.ckpt",), no("pipe.ckpt")),
    ("from NaN weights, by hand", ("exp_manager.resume_from_checkpoint=nan.ckpt",), no("nan.ckpt")),
    ("from a number, by hand", ("exp_manager.resume_from_checkpoint=7",), no("resume_from_checkpoint|7")),
    ("no checkpoint, and that is not ignored",
     ("exp_manager.name=new", "exp_manager.resume_ignore_no_checkpoint=false"), no("checkpoint")),
]  # fmt: skip

INITS: list[tuple[str, str, Expected]] = [
    ("init from a checkpoint", "model.ckpt", Right(said("99 loaded"))),
    ("init from a damaged checkpoint", "damaged.ckpt", no("damaged.ckpt")),
    ("init from code", "code.ckpt", no("code.ckpt")),
    ("init from NaN", "nan.ckpt", no("nan.ckpt")),
    ("init from a pipe", "pipe.ckpt", no("pipe.ckpt")),
    ("init from a file that is not there", "gone.ckpt", no("gone.ckpt")),
    ("init from an empty state_dict", "empty.ckpt", no("empty.ckpt")),
    ("init from the folder of a run", "runs/run", no("runs/run")),
    ("init with a typo in include", "{a: {path: model.ckpt, include: [encoder.layer.0]}}", no("include")),
    ("init with a key that does not exist", "{a: {path: model.ckpt, inclde: [encoder]}}", no("inclde")),
    ("init without a path", "{a: {include: [encoder]}}", no("path")),
]


def files(folder: Path) -> None:
    """What the settings name."""
    Fixture.run(folder)
    other_manifest(folder)
    data = (Fixture.path / "model.ckpt").read_bytes()
    (folder / "model.ckpt").write_bytes(data)
    (folder / "damaged.ckpt").write_bytes(flipped(0.5)(data))
    (folder / "code.ckpt").write_bytes(EVIL)
    os.mkfifo(folder / "pipe.ckpt")
    content = torch.load(io.BytesIO(data), weights_only=True)
    torch.save({**content, "state_dict": {}}, folder / "empty.ckpt")
    content["state_dict"][LAYER] *= float("nan")
    torch.save(content, folder / "nan.ckpt")


def twice(folder: Path, command: list[str]) -> str | None:
    """A run that was resumed by hand from an older file goes on from its own last one when it is started again."""
    first = in_process([*command, "trainer.max_steps=8"], folder, {}, 90)
    second = in_process(command, folder, {}, 90)
    if first.code != 0 or second.code != 0:
        return f"exit codes {first.code}, {second.code}: {second.message[-300:]}"
    if "resumed at step 8" not in second.text:
        return "the second start did not go on where the first ended"
    return None if losses(folder / RUN) == losses(Fixture.path / "runs/whole") else "losses differ"


def refusal_keeps_all(folder: Path, command: list[str]) -> str | None:
    """Three refused commands in a row change nothing; then the right one resumes."""
    before = {
        name: value
        for name, value in snapshot(folder / RUN).items()
        if not name.startswith(("log_", ".lock", "watchdog"))
    }
    for key in ("model.encoder.d_model=64", "model.optim.name=sgd", "model.train_ds.manifest_filepath=gone.jsonl"):
        outcome = in_process([*command, key], folder, {}, 90)
        if outcome.code != 1:
            return f"{key}: exit code {outcome.code}"
    after = snapshot(folder / RUN)
    changed = [name for name in before if before[name] != after.get(name)]
    if changed:
        return f"refused, but changed {changed}"
    outcome = in_process(command, folder, {}, 90)
    return f"exit code {outcome.code}" if outcome.code else resumed(folder, outcome)


def trials() -> Iterator[Trial]:
    for prefix, group in (("", DAMAGED), ("edited: ", EDITED), ("foreign: ", FOREIGN), ("", SIDE_FILES)):
        for name, damage, expected in group:
            yield Trial("checkpoints", prefix + name, resume(), expected, both(Fixture.run, damage))
    file = best(Fixture.path).name
    for name, overrides, expected in SETTINGS:
        settings = [override.replace("BEST", file) for override in overrides]
        own = "trainer.devices=2" in overrides
        yield Trial("checkpoints", f"resumed with {name}", resume(*settings), expected, files, own_process=own)
    for name, source, expected in INITS:
        command = pretrain(f"init_from_ptl_ckpt={source}", "exp_manager.name=new")
        setup = both(files, lambda folder: shutil.rmtree(folder / "runs")) if name.endswith("checkpoint") else files
        yield Trial("checkpoints", name, command, expected, setup)
    by_hand = resume("exp_manager.resume_from_checkpoint=model.ckpt")
    yield Trial("checkpoints", "by hand, then the same command again", by_hand, RESUMED, files, act=twice)
    yield Trial("checkpoints", "refused three times, then resumed", resume(), RESUMED, files, act=refusal_keeps_all)
