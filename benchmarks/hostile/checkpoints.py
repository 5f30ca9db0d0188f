"""Damaged, foreign and half copied checkpoints and run folders, then resume: the right losses, or words; never step 0."""

from __future__ import annotations

import csv
import fcntl
import gzip
import io
import os
import shutil
import sys
import tarfile
import types
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from benchmarks.hostile.harness import (
    ALL_STEPS,
    BASE_STEPS,
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
    rows,
    said,
    trained,
    zeros,
)

GROUP = "checkpoints"
CHECKPOINTS = RUN / "checkpoints"
LAST, BEFORE, NEMO = (CHECKPOINTS / name for name in ("last.ckpt", "last-before.ckpt", "run.nemo"))
BEST_STEP, SHARDED_STEPS = 4, 5
SHARD = LAST / "__1_0.distcp"

PAGE = b"<!DOCTYPE html><html><head><title>403 Forbidden</title></head><body>Request has expired</body></html>\n"
POINTER = b"version https://git-lfs.github.com/spec/v1\noid sha256:" + b"4d7a" * 16 + b"\nsize 926369\n"


# ------------------------------------------------------------------------------------------------------- how to damage


def best(folder: Path) -> Path:
    return next(folder.glob(f"{CHECKPOINTS}/run--*.ckpt"))


def on_best(change: Callable[[bytes], bytes]) -> Setup:
    return lambda folder: on_bytes(change, best(folder).relative_to(folder))(folder)


def without(*paths: Path) -> Setup:
    return both(*(replaced(nothing, path) for path in paths))


def no_best(folder: Path) -> None:
    best(folder).unlink()


ONLY_LAST = both(Fixture.run, without(BEFORE, NEMO), no_best)
ONLY_BEST = both(Fixture.run, without(LAST, BEFORE))


def with_last(change: Callable[[bytes], bytes]) -> Setup:
    """The run, and its last.ckpt with other bytes."""
    return both(Fixture.run, on_bytes(change, LAST))


def in_run(setup: Setup) -> Setup:
    """The run, and something done to its folder."""
    return both(Fixture.run, lambda folder: setup(folder / RUN))


def rewritten(change: Callable[[dict[str, Any]], object], *paths: Path, **how: Any) -> Setup:
    """Load checkpoints, change their content, and save them as a script would: with good checksums."""

    def setup(folder: Path) -> None:
        for path in paths or (LAST,):
            content = torch.load(folder / path, weights_only=True)
            change(content)
            (folder / path).unlink()
            torch.save(content, folder / path, **how)

    return setup


def scripted(change: Callable[[dict[str, Any]], object], **how: Any) -> Setup:
    return both(Fixture.run, rewritten(change, **how))


def only(*keys: str) -> Callable[[dict[str, Any]], object]:
    return lambda content: [content.pop(key) for key in set(content) - set(keys)]


def weights(change: Callable[[str, torch.Tensor], tuple[str, torch.Tensor]]) -> Callable[[dict[str, Any]], object]:
    def apply(content: dict[str, Any]) -> None:
        content["state_dict"] = dict(change(name, value) for name, value in content["state_dict"].items())

    return apply


def prefixed(prefix: str) -> Callable[[dict[str, Any]], object]:
    return weights(lambda name, value: (prefix + name, value))


def not_finite(content: dict[str, Any]) -> None:
    content["state_dict"]["encoder.layers.1.norm_out.weight"][3] = float("nan")


def of_a_later_version(content: dict[str, Any]) -> None:
    content["nest_ssl_version"] = "7.1.0"
    content["progress"]["curriculum"] = {"stage": 2}


def in_half(content: dict[str, Any]) -> None:
    weights(lambda name, value: (name, value.half() if value.is_floating_point() else value))(content)


def by_nemo(content: dict[str, Any]) -> None:
    """Lightning's keys, and an object of a class that only NeMo has."""
    for key in ("progress", "data_position", "epoch_means", "nest_ssl_version"):
        content.pop(key)
    content["callbacks"] = {"ModelCheckpoint{'monitor': 'val_loss'}": {"best_model_score": torch.tensor(4.0)}}
    content["loops"] = {"fit_loop": {"state_dict": {}, "epoch_progress": {"total": {"ready": 1}}}}
    content["pytorch-lightning_version"] = "2.4.0"
    content["hyper_parameters"] = {"cfg": nemo_object()}


def nemo_object() -> object:
    module = types.ModuleType("nemo_only")
    kind = type("NeMoConfig", (), {"__module__": "nemo_only"})
    module.NeMoConfig = kind  # type: ignore[attr-defined]
    sys.modules["nemo_only"] = module  # pickle wants to find it; no program that loads the file does
    return kind()


def saved_by_nemo(path: Path) -> Setup:
    def setup(folder: Path) -> None:
        try:
            rewritten(by_nemo, path)(folder)
        finally:
            sys.modules.pop("nemo_only", None)

    return setup


def zipped_again(compression: int) -> Callable[[bytes], bytes]:
    """Unpacked and packed again by an archiver."""

    def change(data: bytes) -> bytes:
        packed = io.BytesIO()
        with zipfile.ZipFile(io.BytesIO(data)) as old, zipfile.ZipFile(packed, "w", compression) as new:
            for name in old.namelist():
                new.writestr(name, old.read(name))
        return packed.getvalue()

    return change


def unpacked(path: Path) -> None:
    """A browser or an archiver has taken the checkpoint for a zip file and unpacked it."""
    with zipfile.ZipFile(path.parent / "last-before.ckpt") as archive:
        archive.extractall(path)


def other_half(path: Path) -> Setup:
    """The first half is new, the second half still the old file's: an interrupted copy in place."""

    def setup(folder: Path) -> None:
        old, new = (folder / path).read_bytes(), (folder / LAST).read_bytes()
        on_bytes(always(new[: len(new) // 2] + old[len(new) // 2 :]), LAST)(folder)

    return setup


def page(share: float, content: bytes) -> Callable[[bytes], bytes]:
    """A page of the file is lost, at a multiple of 4096."""
    return lambda data: patched(data, int(share * len(data)) // 4096 * 4096, content)


def swapped_blocks(data: bytes) -> bytes:
    a, b = 65536, 5 * 65536
    return patched(patched(data, a, data[b : b + 65536]), b, data[a : a + 65536])


def here(folder: Path) -> None:
    """A run that was made in this folder: its checkpoints name the best by this path."""
    Fixture.run(folder)
    name = best(folder).name

    def change(content: dict[str, Any]) -> None:
        memory = content["progress"]["memory"]
        memory["best"] = {str(folder / CHECKPOINTS / name): score for score in memory["best"].values()}

    rewritten(change, LAST, BEFORE, CHECKPOINTS / name)(folder)


def moved(source: str, target: str) -> Setup:
    def setup(folder: Path) -> None:
        (folder / target).parent.mkdir(parents=True, exist_ok=True)
        (folder / source).rename(folder / target)

    return setup


def copied(source: Path, target: Path) -> Setup:
    def setup(folder: Path) -> None:
        (shutil.copytree if (folder / source).is_dir() else shutil.copy)(folder / source, folder / target)

    return setup


def stored_elsewhere(path: Path) -> Setup:
    """Moved to an archive, with a link in its old place."""

    def setup(folder: Path) -> None:
        (folder / "archive").mkdir()
        (folder / path).rename(folder / "archive" / path.name)
        (folder / path).symlink_to(folder / "archive" / path.name)

    return setup


def other_weights_in(path: Path) -> Setup:
    """A checkpoint of a colleague's smaller model, newer than all others."""

    def narrow(content: dict[str, Any]) -> None:
        weights(lambda name, value: (name, value[:16] if value.ndim and value.shape[0] == 32 else value))(content)
        content["global_step"] = 9000

    def setup(folder: Path) -> None:
        shutil.copy(folder / BEFORE, folder / path)
        rewritten(narrow, path)(folder)

    return setup


def in_future(folder: Path) -> None:
    os.utime(best(folder), (2_300_000_000, 2_300_000_000))


def as_spreadsheet(data: bytes) -> bytes:
    return b"\xef\xbb\xbf" + data.replace(b",", b";").replace(b".", b",").replace(b"\n", b"\r\n")


def narrower(name: str) -> Setup:
    """Only the first utterances are left in a manifest."""
    return lambda folder: (folder / name).write_text("".join((folder / name).read_text().splitlines(True)[:6]))


def sharded(folder: Path) -> None:
    """A run with two ranks that share the weights; made once."""
    made = Fixture.path.parent / "sharded/folder"
    with (Fixture.path.parent / "sharded.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not (made / RUN / "report.html").exists():
            shutil.rmtree(made.parent, ignore_errors=True)
            for name in ("folder", "home", "tmp"):
                (made.parent / name).mkdir(parents=True)
            Fixture.data(made)
            command = resume(f"trainer.max_steps={SHARDED_STEPS}", "trainer.devices=2", "trainer.strategy=fsdp")
            outcome = in_process(command, made, {}, 200)
            if outcome.code != 0:
                raise RuntimeError(f"no sharded run: {outcome.text}")
    shutil.copytree(made / RUN, folder / RUN)


def shards_with(*setups: Setup) -> Setup:
    return both(sharded, *setups)


def tarred(path: Path) -> Setup:
    """Packed for the archive, and the archive renamed to what was packed."""

    def setup(folder: Path) -> None:
        with tarfile.open(folder / "packed.tar", "w") as archive:
            archive.add(folder / path, path.name)
        shutil.rmtree(folder / path)
        (folder / "packed.tar").rename(folder / path)

    return setup


def two_ranks(folder: Path) -> None:
    shutil.copytree(Fixture.path / "runs/two_ranks", folder / RUN)
    for path in (folder / CHECKPOINTS).glob("two_ranks*"):
        path.unlink()


# -------------------------------------------------------------------------------------------------------- what is right


def from_step(step: int, *words: str, then: Check = resumed) -> Right:
    return Right(said(f"resumed at step {step}", *words, then=then))


LAST_GOOD = from_step(BASE_STEPS)
PASSED_OVER = from_step(BEST_STEP, "last.ckpt")
"""The damaged file is named, its predecessor is taken, and nothing is lost."""


def ends_right(folder: Path, outcome: Outcome) -> str | None:
    """The rows that were written now are those of the whole run; older ones may be lost, but none is wrong or double."""
    expected = losses(Fixture.path / "runs/whole")
    with (folder / RUN / "metrics.csv").open(newline="", encoding="utf-8-sig") as file:
        table = csv.DictReader(file)
        found = [(int(float(row["step"])), row["train_loss"]) for row in table if row.get("train_loss")]
    steps = [step for step, _ in found]
    if steps != sorted(set(steps)):
        return f"metrics.csv has steps {steps}"
    wrong = [step for step, loss in found if loss != expected[step]]
    missing = sorted({*range(BASE_STEPS, ALL_STEPS)} - {*steps})
    return f"losses differ at {wrong}, are missing at {missing}" if wrong or missing else None


def old_rows_kept(folder: Path, outcome: Outcome) -> str | None:
    if not (folder / RUN / "metrics-before.csv").is_file():
        return "the old metrics.csv is not kept as metrics-before.csv"
    return ends_right(folder, outcome)


def began_again(folder: Path, outcome: Outcome) -> str | None:
    """All steps are new, and the old curve is kept apart."""
    if "resumed at step" in outcome.text:
        return "it resumed"
    return old_rows_kept(folder, outcome)


def began_elsewhere(folder: Path, outcome: Outcome) -> str | None:
    """A new run has a folder of its own."""
    new = [path.parent for path in folder.glob("runs/**/metrics.csv") if path.parent != folder / RUN]
    if len(new) != 1 or losses(folder / RUN) != losses(Fixture.path / RUN):
        return f"{len(new)} new runs, or the old one has changed"
    return None if losses(new[0]) == losses(Fixture.path / "runs/whole") else "the losses are not those of a new run"


def untouched(prefix: str, then: Check) -> Check:
    def check(folder: Path, outcome: Outcome) -> str | None:
        changed = [name for name in outcome.changed if name.startswith(prefix)]
        return f"changed {changed[:4]}" if changed else then(folder, outcome)

    return check


def few_best(where: str, then: Check) -> Check:
    """With save_top_k=1 there is one best checkpoint in the folder."""

    def check(folder: Path, outcome: Outcome) -> str | None:
        found = [path.name for path in folder.glob(f"{where}/checkpoints/*--*.ckpt")]
        return f"{len(found)} best checkpoints: {found}" if len(found) != 1 else then(folder, outcome)

    return check


def resumed_in(where: str) -> Check:
    def check(folder: Path, outcome: Outcome) -> str | None:
        same = losses(folder / where) == losses(Fixture.path / "runs/whole")
        return None if same and "resumed at step 6" in outcome.text else "not resumed with the right losses"

    return check


def still_a_link(path: Path) -> Check:
    def check(folder: Path, outcome: Outcome) -> str | None:
        return resumed(folder, outcome) if (folder / path).is_symlink() else f"{path.name} is no link any more"

    return check


def whole_model(folder: Path, outcome: Outcome) -> str | None:
    with tarfile.open(folder / NEMO) as archive:
        names = {Path(name).name for name in archive.getnames()}
    return resumed(folder, outcome) if "model_weights.ckpt" in names else "the .nemo file was not written again"


def every_step(folder: Path, outcome: Outcome) -> str | None:
    """No step is missing or double: the rows before the checkpoint are kept, those after it are new."""
    steps = [int(row["step"]) for row in rows(folder / RUN) if row["train_loss"]]
    return trained(folder, outcome) if steps == list(range(ALL_STEPS)) else f"metrics.csv has steps {steps}"


def as_two_ranks(folder: Path, outcome: Outcome) -> str | None:
    same = losses(folder / RUN) == losses(Fixture.path / "runs/two_ranks")
    return None if same else "losses differ from the undisturbed run with two ranks"


def page_written(folder: Path, outcome: Outcome) -> str | None:
    text = (folder / RUN / "report.html").read_text()
    return None if "</html>" in text and "step" in text else "no page"


def refused(*words: str) -> Refused:
    return Refused(words)


# --------------------------------------------------------------------------------------------------------------- trials

Row = tuple[str, Setup, Expected]


def damaged_last() -> list[Row]:
    """last.ckpt is not what was saved; its predecessor is good."""
    changes = {
        "one byte short": lambda data: data[:-1],
        "an interrupted transfer left zeros to the end": lambda data: (
            data[: len(data) // 3] + bytes(len(data) * 2 // 3)
        ),
        "only zeros, of the right size": zeros,
        "a page of zeros from a network disk": page(0.4, bytes(4096)),
        "two blocks swapped by a RAID": swapped_blocks,
        "text mode: LF became CRLF": lambda data: data.replace(b"\n", b"\r\n"),
        "a git lfs pointer": always(POINTER),
        "a proxy's page": always(PAGE),
    }
    return [
        *((f"last.ckpt: {name}", with_last(change), PASSED_OVER) for name, change in changes.items()),
        ("last.ckpt: the second half is its predecessor's", both(Fixture.run, other_half(BEFORE)), PASSED_OVER),
        ("last.ckpt: unpacked by a browser", both(Fixture.run, replaced(unpacked, LAST)), PASSED_OVER),
        ("last.ckpt: sparse, 3 GB of nothing", with_sparse(), PASSED_OVER),
        ("last.ckpt: a line break was appended", with_last(lambda data: data + b"\n"), Right(resumed)),
        ("last.ckpt: packed again by zip", with_last(zipped_again(zipfile.ZIP_DEFLATED)), Right(resumed)),
        ("last.ckpt: gzip -9 of the folder to save space", in_run(gzipped), Right(said("last.ckpt", then=resumed))),
    ]


def with_sparse() -> Setup:
    return both(Fixture.run, lambda folder: os.truncate(folder / LAST, 3 << 30))


def gzipped(run: Path) -> None:
    """Only last.ckpt.gz is left of last.ckpt; the others were made before it."""
    path = run / "checkpoints/last.ckpt"
    Path(f"{path}.gz").write_bytes(gzip.compress(path.read_bytes()))
    path.unlink()


def several_damaged() -> list[Row]:
    return [
        (
            "last.ckpt and last-before.ckpt empty after a full quota",
            both(Fixture.run, on_bytes(always(b""), LAST), on_bytes(always(b""), BEFORE)),
            from_step(BEST_STEP, "last.ckpt", "last-before.ckpt"),
        ),
        (
            "all are git lfs pointers, after a clone",
            both(Fixture.run, *(on_bytes(always(POINTER), path) for path in (LAST, BEFORE)), on_best(always(POINTER))),
            refused("last.ckpt"),
        ),
        (
            "all cut off, in a copy of a full disk",
            both(Fixture.run, *(on_bytes(cut(0.6), path) for path in (LAST, BEFORE)), on_best(cut(0.1))),
            refused("last.ckpt"),
        ),
        (
            "a colleague's newer checkpoint next to a damaged one",
            both(with_last(cut(0.5)), without(BEFORE), other_from_best()),
            Either(refused("last.ckpt"), from_step(BEST_STEP)),
        ),
        (
            "AppleDouble files of a Mac next to the only good one",
            both(
                ONLY_BEST,
                in_checkpoints(
                    {"._last.ckpt": 4096, "._run--val_loss=4.0991-epoch=0-step=4.ckpt": 4096, ".DS_Store": 6148}
                ),
            ),
            from_step(BEST_STEP, "last.ckpt"),
        ),
        (
            "'last (1).ckpt' of a browser is newer than what is left",
            both(Fixture.run, moved(str(LAST), str(CHECKPOINTS / "last (1).ckpt")), without(BEFORE)),
            Right(resumed),
        ),
        (
            "last.ckpt became LAST.CKPT on a Windows share",
            both(Fixture.run, moved(str(LAST), str(CHECKPOINTS / "LAST.CKPT"))),
            Right(resumed),
        ),
        (
            "the good one is from the year 2042",
            both(with_last(cut(0.3)), on_bytes(cut(0.3), BEFORE), in_future),
            from_step(BEST_STEP, "last.ckpt"),
        ),
        (
            "rsync's half of last.ckpt under its temporary name",
            both(
                Fixture.run,
                moved(str(LAST), str(CHECKPOINTS / ".last.ckpt.q8TzXw")),
                on_bytes(cut(0.5), CHECKPOINTS / ".last.ckpt.q8TzXw"),
            ),
            PASSED_OVER,
        ),
        (
            "last-before.ckpt was renamed to last.ckpt by hand",
            both(Fixture.run, moved(str(BEFORE), str(LAST))),
            from_step(BEST_STEP),
        ),
    ]


def other_from_best() -> Setup:
    def setup(folder: Path) -> None:
        foreign = CHECKPOINTS / "xlarge--val_loss=2.0001-epoch=90-step=9000.ckpt"
        shutil.copy(best(folder), folder / BEFORE)
        other_weights_in(foreign)(folder)
        (folder / BEFORE).unlink()

    return setup


def in_checkpoints(sizes: dict[str, int]) -> Setup:
    def setup(folder: Path) -> None:
        for name, size in sizes.items():
            (folder / CHECKPOINTS / name).write_bytes(b"\x00\x05\x16\x07\x00\x02\x00\x00Mac OS X".ljust(size, b"\0"))

    return setup


def run_folders() -> list[Row]:
    """A part of the run folder was copied, moved, linked, edited or deleted."""
    small = ("metrics.csv", "hparams.yaml", ".saved", "git-commit.txt")
    return [
        ("only the small files were synchronised", in_run(kept(*small)), refused("checkpoint")),
        ("'cp run/*' left .saved and .lock behind", in_run(deleted(".saved", ".lock")), LAST_GOOD),
        (
            "all .ckpt files excluded, the .nemo file copied",
            in_run(deleted("checkpoints/*.ckpt", ".saved")),
            refused("checkpoint|.nemo"),
        ),
        (
            "only metrics.csv and hparams.yaml are left",
            in_run(kept("metrics.csv", "hparams.yaml")),
            Either(refused("checkpoint"), Right(began_again)),
        ),
        ("copied into itself: checkpoints/checkpoints", in_run(nested), refused("checkpoint")),
        (
            "checkpoints is a link to a purged scratch",
            both(Fixture.run, replaced(link("/scratch/purged/ckpt"), CHECKPOINTS)),
            refused("checkpoints"),
        ),
        (
            "checkpoints is a link to a larger disk",
            both(Fixture.run, stored_elsewhere(CHECKPOINTS)),
            Right(still_a_link(CHECKPOINTS)),
        ),
        (
            "last.ckpt is a link into an archive that must not change",
            both(Fixture.run, stored_elsewhere(LAST)),
            Right(untouched("archive/", resumed)),
        ),
        (
            ".saved is full of zeros and there is no checkpoint",
            in_run(both(written(".saved", bytes(7)), deleted("checkpoints/*"))),
            refused("checkpoint"),
        ),
        (".lock of a node that no longer exists", in_run(written(".lock", b"4711 on gpu-node-17\n")), LAST_GOOD),
        (
            "hparams.yaml has merge conflicts",
            in_run(written("hparams.yaml", b"<<<<<<< HEAD\nmodel:\n  a: 1\n=======\n\tmodel: {\n>>>>>>> b\n")),
            LAST_GOOD,
        ),
        ("the .nemo file was cut off", both(Fixture.run, on_bytes(cut(0.4), NEMO)), Right(whole_model)),
        ("metrics.csv ends in the middle of a row", in_run(table(cut(0.72))), Right(ends_right)),
        (
            "metrics.csv ends in zeros after a power cut",
            in_run(table(lambda data: data[:-300] + bytes(300))),
            Right(ends_right),
        ),
        ("metrics.csv is empty", in_run(table(always(b""))), Right(ends_right)),
        ("metrics.csv went through a spreadsheet", in_run(table(as_spreadsheet)), Right(old_rows_kept)),
        (
            "metrics.csv got a byte order mark, and rows go",
            both(in_run(table(lambda data: b"\xef\xbb\xbf" + data)), on_bytes(cut(0.5), LAST)),
            Right(ends_right),
        ),
        (
            "metrics.csv: steps as 1.0, from pandas, and rows go",
            both(in_run(table(lambda data: b"\n".join(floating(data)))), on_bytes(cut(0.5), LAST)),
            Right(ends_right),
        ),
        (
            "half of the training manifest is gone",
            both(Fixture.run, narrower("train.jsonl")),
            from_step(BASE_STEPS, "batch", then=every_step),
        ),
    ]


def kept(*names: str) -> Setup:
    def setup(run: Path) -> None:
        for path in run.iterdir():
            if path.name not in names:
                shutil.rmtree(path) if path.is_dir() else path.unlink()

    return setup


def deleted(*patterns: str) -> Setup:
    def setup(run: Path) -> None:
        for path in [path for pattern in patterns for path in run.glob(pattern)]:
            path.unlink()

    return setup


def written(name: str, content: bytes) -> Setup:
    return lambda run: (run / name).write_bytes(content)


def table(change: Callable[[bytes], bytes]) -> Setup:
    return on_bytes(change, Path("metrics.csv"))


def floating(data: bytes) -> list[bytes]:
    head, *lines = data.splitlines()
    return [head, *(line.replace(b",", b".0,", 1) for line in lines), b""]


def nested(run: Path) -> None:
    (run / "checkpoints").rename(run / "inner")
    (run / "checkpoints").mkdir()
    (run / "inner").rename(run / "checkpoints/checkpoints")


def scripts() -> list[Row]:
    """A person's script has loaded a checkpoint and saved it again, or another program has written it."""
    by_weights = "init_from_ptl_ckpt"
    return [
        (
            "weights averaged by a script: only state_dict",
            both(ONLY_LAST, rewritten(only("state_dict"))),
            refused("last.ckpt", by_weights),
        ),
        (
            "a best checkpoint with weights only is all that is left",
            both(
                ONLY_LAST,
                rewritten(
                    only(
                        "epoch",
                        "global_step",
                        "nest_ssl_version",
                        "state_dict",
                        "hyper_parameters",
                        "data_position",
                        "epoch_means",
                    )
                ),
            ),
            refused("last.ckpt", by_weights),
        ),
        ("NeMo's checkpoint as last.ckpt", both(ONLY_LAST, saved_by_nemo(LAST)), refused("last.ckpt", by_weights)),
        (
            "NeMo's run folder",
            both(
                ONLY_LAST,
                saved_by_nemo(LAST),
                moved(str(LAST), str(CHECKPOINTS / "run--val_loss=4.0741-epoch=1-last.ckpt")),
                without(RUN / ".saved"),
            ),
            refused("ckpt", by_weights),
        ),
        (
            "weights in half precision",
            both(ONLY_LAST, rewritten(in_half)),
            Either(refused("last.ckpt"), Right(said("float16"))),
        ),
        (
            "names with DataParallel's 'module.'",
            scripted(prefixed("module.")),
            Either(refused("last.ckpt"), Right(resumed)),
        ),
        ("a NaN weight with good checksums", scripted(not_finite), Either(refused("last.ckpt"), Right(resumed))),
        (
            "saved again in torch's form from before 2020",
            scripted(lambda content: None, _use_new_zipfile_serialization=False),
            Either(refused("last.ckpt"), Right(resumed)),
        ),
        ("saved by a later version", scripted(of_a_later_version), Either(refused("7.1.0"), Right(resumed))),
    ]


def shards() -> list[Row]:
    """A folder of shards, copied in part, then resumed by one rank; its predecessor is of step 4."""
    fallback = from_step(BEST_STEP, "last.ckpt", then=every_step)
    return [
        ("shards: undamaged, by one rank", sharded, from_step(SHARDED_STEPS, then=every_step)),
        ("shards: the other node's file was not copied", shards_with(without(SHARD)), fallback),
        ("shards: 'cp last.ckpt/*' left .metadata behind", shards_with(without(LAST / ".metadata")), fallback),
        (
            "shards: one file is of the checkpoint before",
            shards_with(without(SHARD), copied(BEFORE / SHARD.name, SHARD)),
            fallback,
        ),
        ("shards: a tar archive under the folder's name", shards_with(tarred(LAST)), fallback),
    ]


def trial(name: str, setup: Setup, expected: Expected, *overrides: str, **options: Any) -> Trial:
    return Trial(GROUP, name, resume(*overrides), expected, setup, limit_s=options.pop("limit_s", 120), **options)


def commands() -> list[Trial]:
    """The command differs from the one that began the run."""
    source = "exp_manager.resume_from_checkpoint="
    one_best = "exp_manager.checkpoint_callback_params.save_top_k=1"
    as_pasted = "run--val_loss=4.0991-epoch=0-step=4.ckpt"
    return [
        trial(
            "a copy of the run leaves the original alone",
            both(here, copied(RUN, Path("runs/second"))),
            Right(untouched("runs/run/", resumed_in("runs/second"))),
            "exp_manager.name=second",
            one_best,
        ),
        trial(
            "a moved run keeps save_top_k",
            both(here, moved(str(RUN), "moved/run")),
            Right(few_best("moved/run", resumed_in("moved/run"))),
            "exp_manager.exp_dir=moved",
            one_best,
        ),
        trial("the best was deleted to make room", both(here, no_best), Right(few_best(str(RUN), resumed)), one_best),
        trial(
            "resume_from_checkpoint: does not exist",
            Fixture.run,
            refused("step40.ckpt"),
            f"{source}{CHECKPOINTS}/step40.ckpt",
        ),
        trial(
            "resume_from_checkpoint: a name pasted with its '='",
            Fixture.run,
            Either(refused("'|quot|escape|\\="), from_step(BEST_STEP)),
            f"{source}{CHECKPOINTS}/{as_pasted}",
        ),
        trial(
            "resume_from_checkpoint: the folder of checkpoints",
            Fixture.run,
            refused("checkpoints"),
            f"{source}{CHECKPOINTS}",
        ),
        trial("resume_from_checkpoint: a .nemo file", Fixture.run, refused("run.nemo"), f"{source}{NEMO}"),
        trial(
            "resume_from_checkpoint: an address on S3",
            Fixture.run,
            refused("s3:"),
            f"{source}s3://bucket/runs/last.ckpt",
        ),
        trial(
            "resume_if_exists=false on a folder with results",
            Fixture.run,
            Right(began_elsewhere),
            "exp_manager.resume_if_exists=false",
        ),
        *(
            trial(f"another {key}", Fixture.run, refused(key.rpartition(".")[2]), f"{key}={value}")
            for key, value in (
                ("model.encoder.n_heads", "8"),
                ("model.preprocessor.window_stride", "0.02"),
            )
        ),
        trial(
            "two ranks, last.ckpt cut off",
            both(two_ranks, on_bytes(cut(0.5), LAST)),
            Right(said("last.ckpt", "resumed at step", then=as_two_ranks)),
            "trainer.devices=2",
            own_process=True,
        ),
        trial(
            "two ranks, all cut off",
            both(two_ranks, *(on_bytes(cut(0.5), path) for path in (LAST, BEFORE))),
            refused("last.ckpt"),
            "trainer.devices=2",
            own_process=True,
        ),
        Trial(
            GROUP,
            "report of a run whose last.ckpt is cut off",
            ["report", str(RUN)],
            Right(page_written),
            with_last(cut(0.5)),
        ),
    ]


def averaged(folder: Path) -> None:
    """A run of six steps with an average of the weights; the average does not change how it trains."""
    outcome = in_process(resume(f"trainer.max_steps={BASE_STEPS}", "exp_manager.ema.enable=true"), folder, {}, 120)
    if outcome.code != 0:
        raise RuntimeError(outcome.text)


def removed(key: str) -> Callable[[dict[str, Any]], object]:
    return lambda content: content.pop(key)


def without_decoder(content: dict[str, Any]) -> None:
    for name in [name for name in content["state_dict"] if name.startswith("decoder.")]:
        content["state_dict"].pop(name)


def later() -> list[Trial]:
    """The run goes on under other circumstances, or a script has left out what it took for superfluous."""
    whole = Either(refused("last.ckpt"), Right(resumed))
    return [
        trial("the starting weights were deleted since", Fixture.run, LAST_GOOD, "init_from_nemo_model=gone.nemo"),
        trial("an average of the weights is switched off", averaged, Either(refused("ema"), LAST_GOOD)),
        trial(
            "an average of the weights is switched on",
            Fixture.run,
            Either(refused("ema"), LAST_GOOD),
            "exp_manager.ema.enable=true",
        ),
        *(
            trial(f"a script has left out {key}", scripted(removed(key)), whole)
            for key in ("data_position", "lr_schedulers", "progress")
        ),
        trial("a script has left out the decoder", scripted(without_decoder), whole),
        trial(
            "global_step became a tensor", scripted(lambda content: content.update(global_step=torch.tensor(6))), whole
        ),
    ]


def trials() -> list[Trial]:
    table_rows = [*damaged_last(), *several_damaged(), *run_folders(), *scripts(), *shards()]
    return [*(trial(*row) for row in table_rows), *commands(), *later()]
