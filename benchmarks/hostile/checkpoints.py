"""Damaged, foreign or misplaced checkpoints and run folders; then the run is resumed.

A run with six steps is damaged, and the same command is given for ten. What must come of it is in docs/run-folder.md:
the losses of the run that was never interrupted, from the newest good checkpoint; or a refusal that changes nothing.
"""

from __future__ import annotations

import io
import os
import pickle
import shutil
import struct
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from benchmarks.hostile.harness import (
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

FOLDER = RUN / "checkpoints"
LAST, BEFORE = FOLDER / "last.ckpt", FOLDER / "last-before.ckpt"
WARNED = said("last.ckpt", "passed over", then=resumed)
"""It names what it passed over, and resumes from another checkpoint."""
LAST_NAMED = Refused(("last.ckpt|checkpoint",))
PASSED_OVER = Right(WARNED)


def best(folder: Path) -> Path:
    return next((folder / FOLDER).glob("run--*.ckpt"))


def content(change: Callable[[dict[str, Any]], object], path: Path = LAST) -> Setup:
    """Change what a checkpoint contains and save it as torch does: its checksums are right."""

    def setup(folder: Path) -> None:
        found = torch.load(folder / path, weights_only=True)
        result = change(found)
        (folder / path).unlink()
        torch.save(found if result is None else result, folder / path)

    return setup


def gone(key: str) -> Setup:
    def change(found: dict[str, Any]) -> None:
        del found[key]

    return content(change)


def put(key: str, value: object) -> Setup:
    return content(lambda found: found.update({key: value}))


def to_all(damage: Callable[[Path], Setup]) -> Setup:
    """Damage every checkpoint of the run."""

    def setup(folder: Path) -> None:
        for path in sorted((folder / FOLDER).glob("*.ckpt")):
            damage(path.relative_to(folder))(folder)

    return setup


def weights(change: Callable[[dict[str, torch.Tensor]], object]) -> Setup:
    def inside(found: dict[str, Any]) -> None:
        change(found["state_dict"])

    return content(inside)


def optimizer(change: Callable[[dict[str, Any]], object]) -> Setup:
    def inside(found: dict[str, Any]) -> None:
        change(found["optimizer_states"][0])

    return content(inside)


def run_file(name: str, change: Callable[[bytes], bytes]) -> Setup:
    return on_bytes(change, RUN / name)


def archive(change: Callable[[str, bytes], bytes | None]) -> Callable[[bytes], bytes]:
    """Write torch's archive anew, with right checksums."""

    def make(data: bytes) -> bytes:
        buffer = io.BytesIO()
        with zipfile.ZipFile(io.BytesIO(data)) as old, zipfile.ZipFile(buffer, "w") as new:
            for name in old.namelist():
                changed = change(name, old.read(name))
                if changed is not None:
                    new.writestr(zipfile.ZipInfo(name), changed)
        return buffer.getvalue()

    return make


def bit(ending: str = "", largest: bool = False, last: bool = False) -> Callable[[bytes], bytes]:
    """Flip a bit in the middle of a record of torch's archive: of that name, the largest, or the last large one.

    Between the records there is padding, where a flipped bit changes nothing.
    """

    def change(data: bytes) -> bytes:
        with zipfile.ZipFile(io.BytesIO(data)) as found:
            of_it = [item for item in found.infolist() if item.filename.endswith(ending) and item.file_size > 1000]
        item = max(of_it, key=lambda one: one.file_size) if largest else of_it[-1 if last else 0]
        names, extra = struct.unpack("<HH", data[item.header_offset + 26 : item.header_offset + 30])
        at = item.header_offset + 30 + names + extra + item.file_size // 2
        return patched(data, at, bytes([data[at] ^ 4]))

    return change


def as_folder(*names: str, data: bytes = b"") -> Callable[[Path], None]:
    def make(path: Path) -> None:
        path.mkdir()
        for name in names:
            (path / name).write_bytes(data)

    return make


def continued(folder: Path, outcome: Outcome) -> str | None:
    """It resumed, went to the end, and what it trained is sound; losses may differ from the undisturbed run's."""
    if "resumed at step" not in outcome.text:
        return "it does not say that it resumed"
    found = losses(folder / RUN)
    if sorted(found) != list(range(10)):
        return f"metrics.csv has the steps {sorted(found)}"
    return trained(folder, outcome)


def steps(count: int, then: Check) -> Check:
    def check(folder: Path, outcome: Outcome) -> str | None:
        found = [int(row["step"]) for row in rows(folder / RUN) if row["train_loss"]]
        return f"metrics.csv has the steps {found}" if found != list(range(count)) else then(folder, outcome)

    return check


def other_run(folder: Path) -> None:
    """last.ckpt of a run with two ranks."""
    shutil.copy(Fixture.path / "runs/two_ranks/checkpoints/last.ckpt", folder / LAST)


def swapped(folder: Path) -> None:
    """The older checkpoint has the newer one's name."""
    a, b = folder / LAST, folder / BEFORE
    old = b.read_bytes()
    new = a.read_bytes()
    for path, data in ((a, old), (b, new)):
        path.unlink()
        path.write_bytes(data)


def moved(folder: Path) -> None:
    """The folder was copied by something that does not keep times: the oldest file is the newest now."""
    for number, path in enumerate([folder / LAST, folder / BEFORE, best(folder)]):
        os.utime(path, (10**9 + number, 10**9 + number))


def future(folder: Path) -> None:
    for path in (folder / FOLDER).iterdir():
        os.utime(path, (2**32, 2**32))


def half_written(folder: Path) -> None:
    """What a kill in the middle of writing leaves, by the usual names."""
    data = (folder / LAST).read_bytes()
    for name in (
        "last.ckpt.tmp",
        ".last.ckpt.tmp",
        "last.ckpt.tmp123",
        "tmpabc.ckpt",
        "run--val_loss=0.0001-epoch=9-step=99.ckpt.tmp",
    ):
        (folder / FOLDER / name).write_bytes(data[: len(data) // 3])


def better_but_broken(folder: Path) -> None:
    """A file of another tool, with a name that promises more steps and a better loss."""
    (folder / FOLDER / "run--val_loss=0.0001-epoch=9-step=99.ckpt").write_bytes(b"not a checkpoint")
    (folder / LAST).unlink()


def newline_csv(data: bytes) -> bytes:
    return data.replace(b"\n", b"\r\n")


def sparse(path: Path) -> None:
    path.touch()
    os.truncate(path, 200 << 30)


def case(name: str, setup: Setup, expected: Expected, *overrides: str, **more: Any) -> Trial:
    return Trial("checkpoints", name, resume(*overrides), expected, both(Fixture.run, setup), **more)


def nan(tensors: dict[str, torch.Tensor]) -> None:
    tensors["encoder.layers.1.norm_out.weight"].fill_(torch.nan)


def files() -> list[Trial]:
    """Damage that the archive itself shows."""
    last = lambda change: on_bytes(change, LAST)  # noqa: E731
    return [
        case("undamaged, as a control", lambda folder: None, Right(resumed)),
        case("last.ckpt: cut at a quarter", last(cut(0.25)), PASSED_OVER),
        case("last.ckpt: its last byte is missing", last(lambda data: data[:-1]), PASSED_OVER),
        case("last.ckpt: one bit in a weight", last(bit(largest=True)), PASSED_OVER),
        case("last.ckpt: one bit in the optimizer's moments", last(bit(last=True)), PASSED_OVER),
        case("last.ckpt: one bit in the pickle", last(bit("data.pkl")), PASSED_OVER),
        case("last.ckpt: a page of zeros in the middle", last(lambda data: patched(data, 409_600, bytes(4096))), PASSED_OVER),
        case("last.ckpt: all zeros, its size is right", last(zeros), PASSED_OVER),
        case("last.ckpt: a kilobyte of the file before, shifted", last(lambda data: data[:500_000] + data[501_024:] + bytes(1024)), PASSED_OVER),
        case("last.ckpt: bytes appended", last(lambda data: data + b"\0" * 8192), Either(LAST_NAMED, Right(resumed))),
        case("last.ckpt: a text", last(always(b"see the other disk\n")), PASSED_OVER),
        case("last.ckpt: a git-lfs pointer", last(always(b"version https://git-lfs.github.com/spec/v1\noid sha256:00\nsize 926369\n")), PASSED_OVER),
        case("last.ckpt: a pickle that runs a command", last(always(EVIL)), PASSED_OVER),
        case("last.ckpt: a plain pickle of a dict", last(always(pickle.dumps({"global_step": 6}))), PASSED_OVER),
        case("last.ckpt: archive whose pickle runs a command, checksums right", last(archive(lambda name, data: EVIL if name.endswith("data.pkl") else data)), Either(LAST_NAMED, PASSED_OVER)),
        case("last.ckpt: a record is missing, the rest is right", last(archive(lambda name, data: None if name.endswith("data/16") else data)), Either(LAST_NAMED, PASSED_OVER)),
        case("last.ckpt: a zip of other things", last(always(b"PK\x05\x06" + bytes(18))), PASSED_OVER),
        case("last.ckpt: a link that leads nowhere", replaced(link("/mnt/gone/last.ckpt"), LAST), PASSED_OVER),
        case("last.ckpt: a link that leads to itself", replaced(link("last.ckpt"), LAST), PASSED_OVER),
        case("last.ckpt: a link to the best", lambda folder: replaced(link(best(folder).name), LAST)(folder), Right(resumed)),
        case("last.ckpt: a link to /dev/zero", replaced(link("/dev/zero"), LAST), Either(LAST_NAMED, PASSED_OVER)),
        case("last.ckpt: an empty folder", replaced(as_folder(), LAST), Either(LAST_NAMED, PASSED_OVER)),
        case("last.ckpt: a folder of shards that are empty", replaced(as_folder(".metadata", "rest.pt", "__0_0.distcp"), LAST), Either(LAST_NAMED, PASSED_OVER)),
        case("last.ckpt: a folder of shards whose index runs a command", replaced(as_folder(".metadata", "rest.pt", data=EVIL), LAST), Either(LAST_NAMED, PASSED_OVER)),
        case("last.ckpt: sparse, 200 GB", replaced(sparse, LAST), PASSED_OVER),
        case("last.ckpt is gone, a better name is broken", better_but_broken, Right(resumed)),
        case("last.ckpt and last-before.ckpt: cut", both(last(cut(0.5)), on_bytes(cut(0.5), BEFORE)), PASSED_OVER),
        case("all cut", to_all(lambda path: on_bytes(cut(0.9), path)), LAST_NAMED),
        case("all empty", to_all(lambda path: on_bytes(always(b""), path)), LAST_NAMED),
        case("all are pipes", to_all(lambda path: replaced(os.mkfifo, path)), LAST_NAMED),
        case("all gone, .saved says step 6", to_all(lambda path: replaced(nothing, path)), LAST_NAMED),
        case("the folder of checkpoints is gone", replaced(nothing, FOLDER), LAST_NAMED),
        case("the folder of checkpoints is a file", replaced(lambda path: path.write_text("full"), FOLDER), Refused(("checkpoints",))),
        case("all gone, resume_ignore_no_checkpoint", to_all(lambda path: replaced(nothing, path)), Either(LAST_NAMED, Right(steps(10, trained))), "exp_manager.resume_ignore_no_checkpoint=true"),
        case("what a kill leaves of half-written files", half_written, Right(resumed)),
        case("the older one has the newer one's name", swapped, Right(resumed)),
        case("all times are those of a copy, in the wrong order", moved, Right(resumed)),
        case("all times are in the year 2106", future, Right(resumed)),
        case("cut, and all times are in the wrong order", both(last(cut(0.7)), moved), PASSED_OVER),
    ]  # fmt: skip


def contents() -> list[Trial]:
    """Whole archives with wrong contents: another tool has saved them, or another program."""
    none = Either(LAST_NAMED, PASSED_OVER)
    huge = 2**62

    def width(tensors: dict[str, torch.Tensor]) -> None:
        name = "encoder.layers.0.norm_out.weight"
        tensors[name] = torch.ones(64)

    def position(**values: object) -> Setup:
        return content(lambda found: found["data_position"].update(values))

    return [
        case("content: NaN in the weights", weights(nan), none),
        case("content: NaN in the weights of all", to_all(lambda path: content(lambda found: nan(found["state_dict"]), path)), LAST_NAMED),
        case("content: infinite moments", optimizer(lambda state: state["state"][5]["exp_avg_sq"].fill_(torch.inf)), none),
        case("content: negative second moments", optimizer(lambda state: state["state"][5]["exp_avg_sq"].fill_(-1.0)), none),
        case("content: no moments", optimizer(lambda state: state["state"].clear()), Either(LAST_NAMED, Right(said("last.ckpt", "optimizer", then=continued)))),
        case("content: moments of one parameter are missing", optimizer(lambda state: state["state"].pop(3)), none),
        case("content: moments of two parameters are swapped", optimizer(lambda state: state["state"].update({0: state["state"][2], 10: state["state"][0]})), none),
        case("content: parameter numbers are strings", optimizer(lambda state: state.update(state={str(k): v for k, v in state["state"].items()})), none),
        case("content: no optimizer_states", gone("optimizer_states"), none),
        case("content: optimizer_states is a dict", put("optimizer_states", {}), none),
        case("content: no lr_schedulers", gone("lr_schedulers"), none),
        case("content: the schedule is at step -3", content(lambda found: found["lr_schedulers"][0].update(last_epoch=-3)), none),
        case("content: another shape", weights(width), none),
        case("content: a weight is missing", weights(lambda tensors: tensors.pop("decoder.decoder_layers.0.bias")), none),
        case("content: a weight of another model", weights(lambda tensors: tensors.update({"lm_head.weight": torch.ones(4, 4)})), none),
        case("content: weights are half precision", weights(lambda tensors: tensors.update({k: v.half() for k, v in tensors.items() if v.is_floating_point()})), Either(LAST_NAMED, Right(continued))),
        case("content: no global_step", gone("global_step"), none),
        case("content: global_step -1", put("global_step", -1), none),
        case("content: global_step 6.5", put("global_step", 6.5), none),
        case("content: global_step NaN", put("global_step", float("nan")), none),
        case("content: global_step 2^62", put("global_step", huge), none),
        case("content: epoch 'one'", put("epoch", "one"), none),
        case("content: no data_position", gone("data_position"), none),
        case("content: batch -1 of the epoch", position(batch=-1), none),
        case("content: batch 10^12 of the epoch", position(batch=10**12), Either(LAST_NAMED, Right(continued))),
        case("content: 0 ranks", position(world_size=0), none),
        case("content: plan_hash is a number", position(plan_hash=17), Either(LAST_NAMED, Either(Refused(), Right(continued)).right)),
        case("content: progress is None", put("progress", None), none),
        case("content: best score is NaN", content(lambda found: found["progress"]["memory"].update(best={next(iter(found["progress"]["memory"]["best"])): float("nan")})), Either(LAST_NAMED, Right(resumed))),
        case("content: best points to /etc/passwd", content(lambda found: found["progress"]["memory"].update(best={"/etc/passwd": -9.0})), Either(LAST_NAMED, Right(untouched_passwd))),
        case("content: best leads out of the folder", both(precious, content(lambda found: found["progress"]["memory"].update(best={"../../../precious.ckpt": 99.0}))), Either(LAST_NAMED, Right(precious_kept))),
        case("content: time trained is -infinity", content(lambda found: found["progress"]["memory"].update(elapsed_s=float("-inf"))), Either(LAST_NAMED, Right(resumed))),
        case("content: epoch_means are NaN", content(lambda found: found["epoch_means"]["sums"].update(train_loss_epoch=torch.tensor(torch.nan))), Either(LAST_NAMED, Right(resumed))),
        case("content: a list", content(lambda found: [found]), none),
        case("content: only a tensor", content(lambda found: torch.ones(3)), none),
        case("content: an object that runs a command besides", content(lambda found: found.update(extra=Evil())), none),
        case("content: a key with escape codes", put("\x1b[2J\x07", "\x1b[31m"), Either(LAST_NAMED, Right(resumed))),
        case("content: the version is of the future", put("nest_ssl_version", "99.0.0"), Either(LAST_NAMED, Right(resumed))),
        case("content: the version is no text", put("nest_ssl_version", [None]), Either(LAST_NAMED, Right(resumed))),
        case("content: only weights, as save_weights_only writes", content(lambda found: {k: found[k] for k in ("state_dict", "global_step", "epoch", "hyper_parameters", "epoch_means")}), none),
        case("foreign: Lightning's, of another model", content(lambda found: {"epoch": 1, "global_step": 6, "pytorch-lightning_version": "2.4", "state_dict": {"a": torch.ones(2)}, "loops": {}, "callbacks": {}, "optimizer_states": [], "lr_schedulers": []}), none),
        case("foreign: last.ckpt is a .nemo file", lambda folder: shutil.copy(folder / FOLDER / "run.nemo", folder / LAST), PASSED_OVER),
        case("foreign: last.ckpt is a .safetensors file", lambda folder: shutil.copy(Fixture.path / "model.safetensors", folder / LAST), PASSED_OVER),
        case("foreign: last.ckpt of a run on two ranks", other_run, Either(LAST_NAMED, Right(said("resumed", then=ended_at_ten)))),
    ]  # fmt: skip


def untouched_passwd(folder: Path, outcome: Outcome) -> str | None:
    return resumed(folder, outcome) if Path("/etc/passwd").is_file() else "/etc/passwd was removed"


def precious(folder: Path) -> None:
    (folder / "precious.ckpt").write_text("somebody else's")


def precious_kept(folder: Path, outcome: Outcome) -> str | None:
    return resumed(folder, outcome) if (folder / "precious.ckpt").is_file() else "a file outside the run was removed"


def ended_at_ten(folder: Path, outcome: Outcome) -> str | None:
    """It had ten steps: no loss of this run may be lost or doubled, whatever it says."""
    found = [int(row["step"]) for row in rows(folder / RUN) if row["train_loss"]]
    return f"metrics.csv has the steps {found}" if len(set(found)) != len(found) else None


def run_folders() -> list[Trial]:
    """Other files of the run folder, and settings that contradict it."""
    metrics = lambda change: run_file("metrics.csv", change)  # noqa: E731

    def rows_after(data: bytes) -> bytes:
        last = data.strip().splitlines()[-1]
        return data + last.replace(b"5,", b"77,", 1) + b"\n"

    def from_file(name: str) -> str:
        return f"exp_manager.resume_from_checkpoint={name}"

    return [
        case("metrics.csv: half of the last row", metrics(lambda data: data[:-40]), Either(Refused(("metrics.csv",)), Right(continued_or_same))),
        case("metrics.csv: a row of zeros, as after a power cut", metrics(lambda data: data + bytes(512)), Right(resumed)),
        case("metrics.csv: rows after the checkpoint", metrics(rows_after), Right(resumed)),
        case("metrics.csv: line ends of Windows", metrics(newline_csv), Right(resumed)),
        case("metrics.csv: empty", metrics(always(b"")), Right(last_four)),
        case("metrics.csv: another table", metrics(always(b"name;price\ntea;3\n")), Right(last_four)),
        case("metrics.csv: a folder", replaced(Path.mkdir, RUN / "metrics.csv"), Either(Refused(("metrics.csv",)), Right(said("metrics.csv", then=said_resumed)))),
        case("metrics.csv: a link to a full device", replaced(link("/dev/full"), RUN / "metrics.csv"), Either(Refused(("metrics.csv",)), Right(said("metrics.csv", then=said_resumed)))),
        case("metrics.csv: UTF-16, saved by a spreadsheet", metrics(lambda data: data.decode().encode("utf-16")), Either(Refused(("metrics.csv",)), Right(last_four))),
        case("hparams.yaml: cut", run_file("hparams.yaml", cut(0.4)), Right(resumed)),
        case("hparams.yaml: a pickle tag", run_file("hparams.yaml", always(b"!!python/object/apply:os.system ['touch ../pwned']\n")), Right(resumed)),
        case("hparams.yaml: not UTF-8", run_file("hparams.yaml", always(b"\xff\xfe\x00model: \xc3\x28")), Right(resumed)),
        case("hparams.yaml: a named pipe", replaced(os.mkfifo, RUN / "hparams.yaml"), Either(Refused(("hparams.yaml",)), Right(resumed))),
        case(".saved: nonsense", run_file(".saved", always(b"\xff\x00maybe")), Right(resumed)),
        case(".saved: a folder", replaced(Path.mkdir, RUN / ".saved"), Either(Refused((".saved",)), Right(resumed))),
        case(".saved: of a later step than the checkpoint", run_file(".saved", always(b"step 9000\n")), Either(Refused(("checkpoint|.saved|9000",)), Right(resumed))),
        case(".lock: a number of a process that has ended", run_file(".lock", always(b"2 elsewhere\n")), Right(resumed)),
        case(".lock: a folder", replaced(Path.mkdir, RUN / ".lock"), Refused((".lock",))),
        case("watchdog: a file instead of the folder", replaced(lambda path: path.write_text("x"), RUN / "watchdog"), Either(Refused(("watchdog",)), Right(resumed))),
        case("watchdog: its state is nonsense", run_file("watchdog/node0.json", always(b'{"ranks": [[[')), Right(resumed)),
        case("the log is a folder", replaced(Path.mkdir, RUN / "log_globalrank-0_localrank-0.txt"), Either(Refused(("log_globalrank",)), Right(resumed))),
        case("the run is a link to another disk", elsewhere, Right(resumed)),
        case("the run was renamed with its folder", renamed, Right(renamed_resumed), "exp_manager.name=renamed"),
        case("resume from a file that is cut", both(copy_of_last("other.ckpt"), on_bytes(cut(0.5), Path("other.ckpt"))), Refused(("other.ckpt",)), from_file("other.ckpt")),
        case("resume from a file that is not there", lambda folder: None, Refused(("nowhere.ckpt",)), from_file("nowhere.ckpt")),
        case("resume from the run's .nemo file", lambda folder: None, Refused(("run.nemo",)), from_file(f"{FOLDER}/run.nemo")),
        case("resume from the folder of checkpoints", lambda folder: None, Refused(("checkpoints",)), from_file(str(FOLDER))),
        case("resume from last-before.ckpt", lambda folder: None, Right(resumed), from_file(str(BEFORE))),
        case("changed: sgd instead of adamw", lambda folder: None, Refused(("optim",)), "model.optim.name=sgd", "~model.optim.betas"),
        case("changed: heads", lambda folder: None, Refused(("n_heads|pos_bias|shape",)), "model.encoder.n_heads=8"),
        case("changed: layers", lambda folder: None, Refused(("n_layers|layers",)), "model.encoder.n_layers=3"),
        case("changed: codes", lambda folder: None, Refused(("num_classes|decoder|quantizer|shape",)), "model.num_classes=128"),
        case("changed: the window of the mels", lambda folder: None, Refused(("window",)), "model.preprocessor.window=blackman"),
        case("changed: fewer steps than are done", lambda folder: None, Either(Refused(("max_steps",)), Right(steps(6, trained))), "trainer.max_steps=3"),
        case("changed: the manifest is gone", lambda folder: (folder / "train.jsonl").unlink(), Refused(("train.jsonl",))),
        case("changed: precision 16 on a CPU", lambda folder: None, Either(Refused(("precision",)), Right(continued)), "trainer.precision=16"),
        case("changed: averages of the weights from now on", lambda folder: None, Either(Refused(("ema",)), Right(continued)), "exp_manager.ema.enable=true"),
    ]  # fmt: skip


def continued_or_same(folder: Path, outcome: Outcome) -> str | None:
    """The torn row is of a step before the checkpoint: it cannot come back, but no wrong one may stand there."""
    expected, found = losses(Fixture.path / "runs/whole"), losses(folder / RUN)
    wrong = [step for step in found if expected.get(step) != found[step]]
    return f"wrong losses at steps {wrong}" if wrong or not {6, 7, 8, 9} <= set(found) else None


def last_four(folder: Path, outcome: Outcome) -> str | None:
    """The steps after the checkpoint are those of the undisturbed run."""
    expected, found = losses(Fixture.path / "runs/whole"), losses(folder / RUN)
    wrong = [step for step in (6, 7, 8, 9) if expected[step] != found.get(step)]
    return f"losses differ at steps {wrong}" if wrong else None


def said_resumed(folder: Path, outcome: Outcome) -> str | None:
    return None if "resumed at step 6" in outcome.text else "it does not say that it resumed"


def copy_of_last(name: str) -> Setup:
    return lambda folder: shutil.copy(folder / LAST, folder / name)


def elsewhere(folder: Path) -> None:
    shutil.move(folder / RUN, folder / "disk2")
    (folder / RUN).symlink_to("../disk2")


def renamed(folder: Path) -> None:
    (folder / RUN).rename(folder / "runs/renamed")


def renamed_resumed(folder: Path, outcome: Outcome) -> str | None:
    expected, found = losses(Fixture.path / "runs/whole"), losses(folder / "runs/renamed")
    return None if expected == found else "losses differ from the undisturbed run's"


def trials() -> list[Trial]:
    return [*files(), *contents(), *run_folders()]
