"""Damaged, foreign, moved and half copied checkpoints and run folders, then resume.

A resumed run has, bit for bit, the losses of one that was never interrupted, or it is refused with the file's name.
"""

from __future__ import annotations

import base64
import csv
import fcntl
import gzip
import io
import math
import os
import pickle
import shutil
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
    ended_well,
    flipped,
    in_fork,
    in_process,
    link,
    losses,
    on_bytes,
    patched,
    replaced,
    resume,
    resumed,
    said,
    trained,
)
from safetensors.torch import save_file

GROUP = "checkpoints"
CHECKPOINTS = RUN / "checkpoints"
LAST, BEFORE = CHECKPOINTS / "last.ckpt", CHECKPOINTS / "last-before.ckpt"
Content = dict[str, Any]


# -------------------------------------------------------------------------------------------------------- what is right


def steps_of(path: Path) -> int:
    return int(torch.load(path, weights_only=True)["global_step"])


def whole_again(folder: Path, outcome: Outcome) -> str | None:
    """The losses are those of an undisturbed run, and its last checkpoint is there and good."""
    if wrong := resumed(folder, outcome):
        return wrong
    last = folder / LAST
    if not last.is_file() or steps_of(last) != ALL_STEPS:
        return f"last.ckpt is not one of step {ALL_STEPS}"
    return None


def from_six(folder: Path, outcome: Outcome) -> str | None:
    """The new rows of metrics.csv are right; older ones may be in another form, or kept in another file."""
    expected = losses(Fixture.path / "runs/whole")
    with (folder / RUN / "metrics.csv").open(newline="", encoding="utf-8-sig") as file:
        rows = [row for row in csv.DictReader(file) if row.get("train_loss")]
    found = {}
    for row in rows:
        step = int(float(row["step"]))
        if step in found:
            return f"step {step} has two rows"
        found[step] = row["train_loss"]
    different = [step for step in range(BASE_STEPS, ALL_STEPS) if found.get(step) != expected[step]]
    if different:
        return f"no row or another loss at steps {different}"
    return None


def rows_kept(folder: Path, outcome: Outcome) -> str | None:
    """The new rows are right, and the old ones are in the same file, or in one that is kept."""
    if wrong := from_six(folder, outcome):
        return wrong
    if (folder / RUN / "metrics-before.csv").exists():
        return None
    text = (folder / RUN / "metrics.csv").read_text(encoding="utf-8-sig")
    gone = [step for step, loss in losses(Fixture.path / RUN).items() if step < 4 and loss not in text]
    return f"the rows of steps {gone} are gone" if gone else None


def finished_before(folder: Path, outcome: Outcome) -> str | None:
    """Nothing was left to do: the old losses and the old checkpoint are as they were."""
    if losses(folder / RUN) != losses(Fixture.path / RUN):
        return "the losses of the finished run have changed"
    if steps_of(folder / LAST) != BASE_STEPS:
        return f"last.ckpt is no longer that of step {BASE_STEPS}"
    return None


def one_best(run: str) -> Check:
    """At most one of the best checkpoints is on the disk (save_top_k=1), and another run's folder is as it was."""

    def check(folder: Path, outcome: Outcome) -> str | None:
        if touched := [name for name in outcome.changed if name.startswith("runs/run/")]:
            return f"changed another run: {touched[:3]}"
        best = [path.name for path in (folder / "runs" / run / "checkpoints").glob("*val_loss=*")]
        return f"{len(best)} best checkpoints: {sorted(best)}" if len(best) != 1 else None

    return check


def has_group(**settings: object) -> Check:
    """The optimizer in the last checkpoint works with these settings."""

    def check(folder: Path, outcome: Outcome) -> str | None:
        groups = torch.load(folder / LAST, weights_only=True)["optimizer_states"][0]["param_groups"]
        wrong = {key: group[key] for group in groups for key, value in settings.items() if group[key] != value}
        return f"the optimizer has {wrong}" if wrong else trained(folder, outcome)

    return check


def has_average(folder: Path, outcome: Outcome) -> str | None:
    missing = "current_model_state" not in torch.load(folder / LAST, weights_only=True)
    return "no averaged weights were saved" if missing else trained(folder, outcome)


def nothing_changed(folder: Path, outcome: Outcome) -> str | None:
    return f"changed {outcome.changed[:4]}" if outcome.changed else None


def not_gone(folder: Path, outcome: Outcome) -> str | None:
    """A page was written although no checkpoint can be read."""
    return None if (folder / RUN / "report.html").stat().st_size > 1000 else "no page"


def begun_beside(folder: Path, outcome: Outcome) -> str | None:
    """It began again, and the metrics of the earlier run are beside the new ones."""
    kept = folder / RUN / "metrics-before.csv"
    same = kept.is_file() and kept.read_bytes() == (Fixture.path / RUN / "metrics.csv").read_bytes()
    return None if same else "the metrics of the earlier run are gone"


UNHARMED = Right(whole_again)
PASSED_OVER = Right(said("passed over", "last.ckpt", then=whole_again))
OPEN = Either(Refused(("last.ckpt",)), UNHARMED)
NO_CHECKPOINT = Refused((" checkpoint",))

METRICS_KEPT = Either(NO_CHECKPOINT, Right(begun_beside))
NEW_ROWS = Right(from_six)
OWN_ONLY = Either(Refused(("teacher.ckpt",)), PASSED_OVER)


# -------------------------------------------------------------------------------------------------- ways to harm a file


def doubled(data: bytes) -> bytes:
    return data + data


def hole(at: float, size: int) -> Callable[[bytes], bytes]:
    """Zeros where a block was never written; the size of the file is right."""
    return lambda data: patched(data, int(at * len(data)), bytes(min(size, len(data) - int(at * len(data)))))


def lost_byte(data: bytes) -> bytes:
    return data[: len(data) // 2] + data[len(data) // 2 + 1 :]


def extra_byte(data: bytes) -> bytes:
    return data[: len(data) // 2] + b"\r" + data[len(data) // 2 :]


def wrong_order(data: bytes) -> bytes:
    return data[len(data) // 2 :] + data[: len(data) // 2]


def as_text(data: bytes) -> bytes:
    return data.decode("utf-8", "replace").encode()


def padded(data: bytes) -> bytes:
    """Filled up to whole blocks, as `dd conv=sync` does."""
    return data + bytes(-len(data) % 10_240)


def zipped_again(data: bytes) -> bytes:
    """Unpacked by hand and packed by a usual zip program: compressed, under another name."""
    new = io.BytesIO()
    with zipfile.ZipFile(io.BytesIO(data)) as old, zipfile.ZipFile(new, "w", zipfile.ZIP_DEFLATED) as archive:
        for name in old.namelist():
            archive.writestr(name.replace("archive/", "last/", 1), old.read(name))
    return new.getvalue()


PAGE = b"<!DOCTYPE html>\n<html><head><title>404 Not Found</title></head><body>Sign in</body></html>\n"
POINTER = b"version https://git-lfs.github.com/spec/v1\noid sha256:" + b"4d7a" * 16 + b"\nsize 926369\n"
HARM: dict[str, Callable[[bytes], bytes]] = {
    "the error page of a download": always(PAGE),
    "a pointer of git lfs": always(POINTER),
    "packed with gzip under the old name": gzip.compress,
    "sent by FTP as text": lambda data: data.replace(b"\n", b"\r\n"),
    "saved by a text editor": as_text,
    "base64 of a mail": base64.encodebytes,
    "a hole at its start": hole(0, 4096),
    "a hole in its middle": hole(0.5, 1 << 16),
    "zeros in its last block": hole(0.995, 1 << 16),
    "the second half is zeros": hole(0.5, 1 << 30),
    "a byte lost": lost_byte,
    "a byte too many": extra_byte,
    "two parts in the wrong order": wrong_order,
    "a flipped bit in the pickle": flipped(0.03),
}
HARMLESS: dict[str, Callable[[bytes], bytes]] = {
    "a newline at its end": lambda data: data + b"\n",
    "filled up to whole blocks": padded,
    "appended to itself": doubled,
    "unpacked and packed again": zipped_again,
    "a flipped bit in the list of files": flipped(0.98),
}


def half_copied(folder: Path) -> None:
    """`rsync --inplace` was interrupted: the new file's beginning in the old file, of the same size."""
    new, old = (folder / LAST).read_bytes(), (folder / BEFORE).read_bytes()
    (folder / LAST).unlink()
    (folder / LAST).write_bytes(new[: len(new) * 2 // 5] + old[len(new) * 2 // 5 :])


def unpacked(path: Path) -> None:
    """A browser that unpacks every zip archive it finds."""
    with zipfile.ZipFile(Fixture.path / LAST) as archive:
        archive.extractall(path)


def weights_only(path: Path) -> None:
    content = torch.load(Fixture.path / LAST, weights_only=True)
    save_file({name: value.contiguous() for name, value in content["state_dict"].items()}, path)


def copied(source: str) -> Callable[[Path], object]:
    return lambda path: shutil.copy(Fixture.path / source, path)


PLACES: list[tuple[str, Callable[[Path], object], Expected]] = [
    ("is an empty folder", Path.mkdir, PASSED_OVER),
    ("was unpacked into a folder", unpacked, PASSED_OVER),
    ("is a link to itself", link("last.ckpt"), PASSED_OVER),
    ("is a link to a scratch disk that was wiped", link("/scratch/gone/last.ckpt"), PASSED_OVER),
    ("is a link to its predecessor", link("last-before.ckpt"), UNHARMED),
    ("is a .nemo file with the wrong name", copied("model.nemo"), OPEN),
    ("is a .safetensors file with the wrong name", weights_only, OPEN),
]


# --------------------------------------------------------------------------------------------- other tools' checkpoints


def edited(change: Callable[[Content], object], **options: Any) -> Setup:
    """A script of the user has changed last.ckpt: load, change, save."""

    def setup(folder: Path) -> None:
        content = torch.load(folder / LAST, weights_only=True)
        change(content)
        (folder / LAST).unlink()
        torch.save(content, folder / LAST, **options)

    return both(Fixture.run, setup)


def without(*keys: str) -> Callable[[Content], object]:
    return lambda content: [content.pop(key) for key in keys]


def only(*keys: str) -> Callable[[Content], object]:
    return lambda content: [content.pop(key) for key in set(content) - set(keys)]


def renamed(prefix: str) -> Callable[[Content], object]:
    def change(content: Content) -> None:
        content["state_dict"] = {prefix + name: value for name, value in content["state_dict"].items()}

    return change


def as_type(dtype: torch.dtype) -> Callable[[Content], object]:
    def change(content: Content) -> None:
        old = content["state_dict"]
        content["state_dict"] = {k: v.to(dtype) if v.is_floating_point() else v for k, v in old.items()}

    return change


def moments(change: Callable[[torch.Tensor], torch.Tensor], key: str) -> Callable[[Content], object]:
    def apply(content: Content) -> None:
        for state in content["optimizer_states"][0]["state"].values():
            state[key] = change(state[key])

    return apply


def one_weight(change: Callable[[torch.Tensor], torch.Tensor]) -> Callable[[Content], object]:
    def apply(content: Content) -> None:
        name = next(name for name in content["state_dict"] if name.endswith("linear1.weight"))
        content["state_dict"][name] = change(content["state_dict"][name])

    return apply


def lost_weight(content: Content) -> None:
    content["state_dict"].popitem()


def lost_moment(content: Content) -> None:
    content["optimizer_states"][0]["state"].pop(3)


def added_weight(content: Content) -> None:
    content["state_dict"]["head.weight"] = torch.zeros(10, 32)


def with_path(content: Content) -> None:
    content["hyper_parameters"]["from"] = Path("old/last.ckpt")


def pickled(folder: Path) -> None:
    content = torch.load(folder / LAST, weights_only=True)
    (folder / LAST).unlink()
    (folder / LAST).write_bytes(pickle.dumps(content))


EDITED: dict[str, Setup] = {
    "slimmed: only weights are left": edited(only("state_dict", "hyper_parameters")),
    "slimmed: no optimizer": edited(without("optimizer_states")),
    "no learning-rate schedule": edited(without("lr_schedulers")),
    "no position in the data": edited(without("data_position")),
    "no progress, as Lightning writes it": edited(without("progress")),
    "no steps": edited(without("global_step")),
    "no version": edited(without("nest_ssl_version")),
    "names begin with module.": edited(renamed("module.")),
    "names begin with _orig_mod.": edited(renamed("_orig_mod.")),
    "halved to bfloat16": edited(as_type(torch.bfloat16)),
    "halved to float16": edited(as_type(torch.float16)),
    "moments in bfloat16": edited(moments(torch.Tensor.bfloat16, "exp_avg")),
    "moments are NaN": edited(moments(lambda value: value * math.nan, "exp_avg")),
    "second moments are infinite": edited(moments(lambda value: value + math.inf, "exp_avg_sq")),
    "second moments are negative": edited(moments(lambda value: -1 - value, "exp_avg_sq")),
    "a weight of NaN": edited(one_weight(lambda value: value * math.nan)),
    "a transposed weight": edited(one_weight(lambda value: value.T.contiguous())),
    "a weight is missing": edited(lost_weight),
    "a moment is missing": edited(lost_moment),
    "a weight too many": edited(added_weight),
    "a path among its settings": edited(with_path),
    "torch's form of 2019": edited(lambda content: None, _use_new_zipfile_serialization=False),
    "written with pickle": both(Fixture.run, pickled),
}


# ---------------------------------------------------------------------------------------------------- folders that moved


def removed(*patterns: str) -> Setup:
    def setup(folder: Path) -> None:
        for pattern in patterns:
            for path in list((folder / RUN).glob(pattern)):
                path.unlink() if path.is_file() or path.is_symlink() else shutil.rmtree(path)

    return setup


def written(name: str, content: bytes) -> Setup:
    return lambda folder: (folder / RUN / name).write_bytes(content)


def renamed_file(old: str, new: str) -> Setup:
    return lambda folder: (folder / RUN / old).rename(folder / RUN / new)


def foreign(*overrides: str) -> Setup:
    """The last checkpoint of another run lies in the folder too, the newest file there, with more steps."""

    def setup(folder: Path) -> None:
        command = resume("exp_manager.name=foreign", "trainer.max_steps=8", *overrides)
        outcome = in_fork(command, folder, {}, 120)
        if outcome.code != 0:
            raise RuntimeError(outcome.text)
        shutil.copy(folder / "runs/foreign/checkpoints/last.ckpt", folder / CHECKPOINTS / "teacher.ckpt")

    return setup


def on_another_disk(folder: Path) -> None:
    shutil.move(folder / CHECKPOINTS, folder / "scratch")
    (folder / CHECKPOINTS).symlink_to(folder / "scratch")


def restored(folder: Path) -> None:
    """Unpacked from a backup that keeps neither times nor hard links; last.ckpt was not in it."""
    for path in (folder / CHECKPOINTS).iterdir():
        content = path.read_bytes()
        path.unlink()
        path.write_bytes(content)
        os.utime(path, (0, 0))
    (folder / LAST).unlink()


ALL_GONE = removed("checkpoints/*.ckpt")
TORN = on_bytes(cut(0.7), LAST)
FOLDERS: list[tuple[str, Setup, Expected]] = [
    ("half copied by rsync", half_copied, PASSED_OVER),
    ("files of macOS next to it", written("checkpoints/._last.ckpt", b"\0\5\x16\7" + bytes(4092)), UNHARMED),
    (
        "only files of macOS are newer",
        both(removed("checkpoints/last.ckpt"), written("checkpoints/._last.ckpt", b"\0\5\x16\7" + bytes(4092))),
        PASSED_OVER,
    ),
    (
        "a half written file of another program",
        both(TORN, written("checkpoints/.last.ckpt.Xq3vZ1", b"PK\3\4" + bytes(1000))),
        PASSED_OVER,
    ),
    ("a copy by a browser", renamed_file("checkpoints/last.ckpt", "checkpoints/last (1).ckpt"), PASSED_OVER),
    ("a name in capitals", renamed_file("checkpoints/last.ckpt", "checkpoints/LAST.CKPT"), PASSED_OVER),
    ("restored without times", restored, PASSED_OVER),
    (
        "torn, and a bigger model's checkpoint is there",
        both(foreign("model.encoder.d_model=64"), TORN),
        OWN_ONLY,
    ),
    ("torn, and a checkpoint of another seed is there", both(foreign("seed=7"), TORN), OWN_ONLY),
    (
        "torn, and its predecessor too",
        both(TORN, on_bytes(cut(0.7), BEFORE)),
        PASSED_OVER,
    ),
    (
        "all are torn",
        both(TORN, lambda folder: [on_bytes(cut(0.5), p)(folder) for p in list((folder / CHECKPOINTS).iterdir())]),
        Refused(("last.ckpt| checkpoint",)),
    ),
    ("no checkpoint was copied", ALL_GONE, NO_CHECKPOINT),
    ("neither checkpoints nor dot files were copied", both(ALL_GONE, removed(".*")), NO_CHECKPOINT),
    ("the folder of checkpoints was not copied", removed("checkpoints", ".saved"), METRICS_KEPT),
    ("the scratch disk with its checkpoints was wiped", replaced(link("/scratch/gone"), CHECKPOINTS), NO_CHECKPOINT),
    ("checkpoints are on another disk", on_another_disk, UNHARMED),
    ("dot files were not copied", removed(".*"), UNHARMED),
    ("an empty .saved, no checkpoints", both(ALL_GONE, written(".saved", b"")), NO_CHECKPOINT),
    ("a .saved of zeros", written(".saved", bytes(7)), UNHARMED),
    ("a lock of another machine", written(".lock", b"4711 on gpu07.example.org"), UNHARMED),
    ("no hparams.yaml", removed("hparams.yaml"), UNHARMED),
    ("an empty hparams.yaml", written("hparams.yaml", b""), UNHARMED),
    ("hparams.yaml has conflict marks of git", written("hparams.yaml", b"<<<<<<< HEAD\nmodel:\n\ta: 1\n"), UNHARMED),
    ("hparams.yaml is a list", written("hparams.yaml", b"- 1\n- 2\n"), UNHARMED),
    ("no metrics.csv", removed("metrics.csv"), NEW_ROWS),
]


def rows_changed(change: Callable[[str], str]) -> Setup:
    return on_bytes(lambda data: change(data.decode()).encode(), RUN / "metrics.csv")


def with_index(text: str) -> str:
    lines = text.splitlines()
    return "".join(f"{'' if i == 0 else i - 1},{line}\n" for i, line in enumerate(lines))


def with_float_steps(text: str) -> str:
    head, *lines = text.splitlines()
    return "\n".join([head, *(line.replace(",", ".0,", 1) for line in lines)]) + "\n"


def other_order(text: str) -> str:
    return "".join(",".join(reversed(line.split(","))) + "\n" for line in text.splitlines())


TABLES: dict[str, Callable[[str], str]] = {
    "saved by Excel": lambda text: "\ufeff" + text.replace("\n", "\r\n"),
    "saved by Excel with semicolons": lambda text: text.replace(",", ";").replace(".", ","),
    "with an index of pandas": with_index,
    "with steps as floats": with_float_steps,
    "columns in another order": other_order,
    "quoted by LibreOffice": lambda text: text.replace("step,", '"step",', 1),
    "cut in its last line": lambda text: text[: text.rindex("\n4,") + 30],
    "with zeros at its end": lambda text: text + "\0" * 500,
    "with rows of a later start": lambda text: text + text.splitlines()[7].replace("4,", "8,", 1) + "\n",
}


# ----------------------------------------------------------------------------------------------- another file, other keys

NEW = "exp_manager.name=other"
FROM = "exp_manager.resume_from_checkpoint="


def moved_to_other(check: Check) -> Check:
    """Judge runs/other as if it had been runs/run."""

    def judge(folder: Path, outcome: Outcome) -> str | None:
        shutil.rmtree(folder / RUN, ignore_errors=True)
        (folder / "runs/other").rename(folder / RUN)
        return check(folder, outcome)

    return judge


def torn_elsewhere(folder: Path) -> None:
    (folder / "good.ckpt").write_bytes((Fixture.path / LAST).read_bytes()[:500_000])


CONTINUES = Right(moved_to_other(from_six))
FROM_FILE: list[tuple[str, Setup, list[str], Expected]] = [
    ("a typo", Fixture.run, [NEW, f"{FROM}{CHECKPOINTS}/lsat.ckpt"], Refused(("lsat.ckpt",))),
    ("a run folder", Fixture.run, [NEW, f"{FROM}{RUN}"], Either(Refused((str(RUN),)), CONTINUES)),
    (
        "its folder of checkpoints",
        Fixture.run,
        [NEW, f"{FROM}{CHECKPOINTS}"],
        Either(Refused(("checkpoints",)), CONTINUES),
    ),
    ("a .nemo file", Fixture.run, [NEW, f"{FROM}{CHECKPOINTS}/run.nemo"], Refused(("run.nemo",))),
    ("an address in the cloud", Fixture.run, [NEW, f"{FROM}s3://bucket/last.ckpt"], Refused(("bucket/last.ckpt",))),
    ("a variable that was empty", Fixture.run, [FROM], Either(Refused(("resume_from_checkpoint",)), UNHARMED)),
    ("a torn file, new run", torn_elsewhere, [NEW, f"{FROM}good.ckpt"], Refused(("good.ckpt",))),
    (
        "a torn file, run with checkpoints",
        both(Fixture.run, torn_elsewhere),
        [f"{FROM}good.ckpt"],
        Either(Refused(("good.ckpt",)), Right(said("good.ckpt", then=whole_again))),
    ),
    ("a good file, new run", Fixture.run, [NEW, f"{FROM}{LAST}"], CONTINUES),
    (
        "a bigger model's file",
        both(Fixture.run, foreign("model.encoder.d_model=64")),
        [NEW, f"{FROM}{CHECKPOINTS}/teacher.ckpt"],
        Refused(("d_model|teacher.ckpt",)),
    ),
    (
        "a file of another seed",
        both(Fixture.run, foreign("seed=7")),
        [NEW, f"{FROM}{CHECKPOINTS}/teacher.ckpt"],
        Either(Refused(("seed|batches",)), Right(said("batches", then=ended_well))),
    ),
    (
        "weights of two sources",
        Fixture.run,
        [NEW, f"+init_from_ptl_ckpt={LAST}", f"+init_from_nemo_model={CHECKPOINTS}/run.nemo"],
        Refused(("init_from_ptl_ckpt", "init_from_nemo_model")),
    ),
    ("start weights from a torn file", torn_elsewhere, [NEW, "init_from_ptl_ckpt=good.ckpt"], Refused(("good.ckpt",))),
    ("start weights from a run folder", Fixture.run, [NEW, f"init_from_ptl_ckpt={RUN}"], Refused((str(RUN),))),
    ("start weights, but the run has begun", Fixture.run, [f"init_from_ptl_ckpt={LAST}"], UNHARMED),
]


def refused(key: str) -> Refused:
    """With the last two parts of the key in the message."""
    return Refused((".".join(key.split(".")[-2:]),))


def named(key: str, check: Check = trained) -> Right:
    """The log says that the key has changed, and the check holds."""
    return Right(said(f"{key}: ", then=check))


KEYS: list[tuple[str, str, Expected]] = [
    *(
        (key, value, refused(key))
        for key, value in (
            ("model.preprocessor.preemph", "0.5"),
            ("model.preprocessor.mag_power", "1.0"),
            ("model.preprocessor.log_zero_guard_value", "0.001"),
            ("model.preprocessor.normalize", "all_features"),
            ("model.preprocessor.mel_norm", "null"),
            ("model.num_classes", "128"),
            ("model.encoder.n_layers", "3"),
            ("model.encoder.n_heads", "8"),
            ("model.encoder.conv_kernel_size", "5"),
        )
    ),
    *(
        (key, value, Either(refused(key), named(key)))
        for key, value in (
            ("model.encoder.xscaling", "false"),
            ("model.encoder.att_context_size", "[4,4]"),
            ("model.encoder.dropout", "0.3"),
            ("model.loss.mask_threshold", "0.5"),
            ("model.masking.mask_prob", "0.06"),
            ("model.optim.amsgrad", "true"),
            ("model.optim.no_decay_on_norms_and_biases", "true"),
            ("trainer.accumulate_grad_batches", "2"),
            ("trainer.precision", "bf16"),
            ("seed", "7"),
        )
    ),
    ("model.optim.name", "adam", refused("model.optim.name")),
    ("model.optim.betas", "[0.5,0.6]", named("model.optim.betas", has_group(betas=(0.5, 0.6)))),
    ("model.optim.eps", "0.01", named("model.optim.eps", has_group(eps=0.01))),
    ("exp_manager.ema.enable", "true", named("exp_manager.ema.enable", has_average)),
    ("trainer.max_steps", "3", Right(finished_before)),
    ("trainer.max_epochs", "1", Right(finished_before)),
    ("trainer.fast_dev_run", "true", Right(nothing_changed)),
]


# ----------------------------------------------------------------------------------------------------- copies and shards

GREATEST = "exp_manager.checkpoint_callback_params.mode=max"
SHARDED = ("trainer.devices=2", "trainer.strategy=fsdp", "exp_manager.exp_dir=sharded")


def own_run(folder: Path) -> None:
    """A run whose best checkpoint is replaced when it is resumed."""
    outcome = in_fork(resume(f"trainer.max_steps={BASE_STEPS}", GREATEST), folder, {}, 120)
    if outcome.code != 0:
        raise RuntimeError(outcome.text)


def copy_run(folder: Path) -> None:
    shutil.copytree(folder / RUN, folder / "runs/copy")


def move_run(folder: Path) -> None:
    (folder / RUN).rename(folder / "runs/copy")


def shards(folder: Path) -> None:
    """Two ranks, six steps; made once, with a run of ten steps to compare with."""
    with (Fixture.path.parent / "sharded.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        for name, steps in (("whole", ALL_STEPS), ("run", BASE_STEPS)):
            if (Fixture.path / f"sharded/{name}/checkpoints/{name}.nemo").exists():
                continue
            command = resume(*SHARDED, f"exp_manager.name={name}", f"trainer.max_steps={steps}")
            if (outcome := in_process(command, Fixture.path, {}, 120)).code != 0:
                raise RuntimeError(outcome.text)
    shutil.copytree(Fixture.path / "sharded/run", folder / "sharded/run")


def sharded_whole(folder: Path, outcome: Outcome) -> str | None:
    expected, found = (losses(path / "sharded" / name) for path, name in ((Fixture.path, "whole"), (folder, "run")))
    different = sorted(step for step in expected | found if expected.get(step) != found.get(step))
    return f"losses differ from the undisturbed run at steps {different}" if different else None


def in_shards(change: Callable[[Path, Path], object]) -> Setup:
    """Change last.ckpt, a folder, with its predecessor at hand."""

    def setup(folder: Path) -> None:
        shards(folder)
        checkpoints = folder / "sharded/run/checkpoints"
        change(checkpoints / "last.ckpt", checkpoints / "last-before.ckpt")

    return setup


def parts(path: Path) -> list[Path]:
    return sorted(path.glob("*.distcp"))


def without_one(last: Path, before: Path) -> None:
    parts(last)[1].unlink()


def flip_one(last: Path, before: Path) -> None:
    part = parts(last)[0]
    part.write_bytes(flipped(0.5)(part.read_bytes()))


def without_dot_files(last: Path, before: Path) -> None:
    (last / ".metadata").unlink()


def older_part(last: Path, before: Path) -> None:
    shutil.copy(parts(before)[1], parts(last)[1])


def older_rest(last: Path, before: Path) -> None:
    shutil.copy(before / "rest.pt", last / "rest.pt")


def swapped(last: Path, before: Path) -> None:
    first, second = (part.read_bytes() for part in parts(last))
    parts(last)[0].write_bytes(second)
    parts(last)[1].write_bytes(first)


SHARDED_FOUND = Right(said("passed over", "last.ckpt", then=sharded_whole))
SHARDS: dict[str, Callable[[Path, Path], None]] = {
    "a rank's file was not copied": without_one,
    "a flipped bit in a rank's file": flip_one,
    "dot files were not copied": without_dot_files,
    "a rank's file is older": older_part,
    "everything else is older": older_rest,
    "the ranks' files are swapped": swapped,
}


def trials() -> list[Trial]:
    def row(name: str, setup: Setup, expected: Expected, *overrides: str) -> Trial:
        return Trial(GROUP, name, resume(*overrides), expected, setup, limit_s=120)

    def of_run(name: str, setup: Setup, expected: Expected, *overrides: str) -> Trial:
        return row(name, both(Fixture.run, setup), expected, *overrides)

    page = both(
        Fixture.run, lambda folder: [on_bytes(always(PAGE), p)(folder) for p in list((folder / CHECKPOINTS).iterdir())]
    )
    return [
        *(of_run(f"last.ckpt: {name}", on_bytes(change, LAST), PASSED_OVER) for name, change in HARM.items()),
        *(of_run(f"last.ckpt: {name}", on_bytes(change, LAST), UNHARMED) for name, change in HARMLESS.items()),
        *(of_run(f"last.ckpt {name}", replaced(make, LAST), expected) for name, make, expected in PLACES),
        *(row(f"edited: {name}", setup, OPEN) for name, setup in EDITED.items()),
        *(of_run(f"folder: {name}", setup, expected) for name, setup, expected in FOLDERS),
        *(of_run(f"metrics.csv: {name}", rows_changed(change), Right(rows_kept)) for name, change in TABLES.items()),
        of_run("metrics.csv: emptied", rows_changed(lambda text: ""), NEW_ROWS),
        *(row(f"from: {name}", setup, expected, *keys) for name, setup, keys, expected in FROM_FILE),
        *(row(f"changed: {key}={value}", Fixture.run, expected, f"{key}={value}") for key, value, expected in KEYS),
        row("a copied run", both(own_run, copy_run), Right(one_best("copy")), "exp_manager.name=copy", GREATEST),
        row("a renamed run", both(own_run, move_run), Right(one_best("copy")), "exp_manager.name=copy", GREATEST),
        *(
            Trial(
                GROUP,
                f"shards: {name}",
                resume(*SHARDED),
                SHARDED_FOUND,
                in_shards(change),
                own_process=True,
                limit_s=150,
            )
            for name, change in SHARDS.items()
        ),
        Trial(GROUP, "report: no checkpoint can be read", ["report", str(RUN)], Right(not_gone), page),
        Trial(GROUP, "doctor: no checkpoint can be read", ["doctor", str(RUN)], Right(ended_well, (0, 1)), page),
    ]
