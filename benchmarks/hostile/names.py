"""Names and texts: of runs, manifests, validation sets, audio, labels, keys and outputs, as they are read and written.

A name is taken as it is or refused by name: two things never share one name, and an output never replaces an input.
"""

from __future__ import annotations

import csv
import hashlib
import json
import os
import re
import shutil
import tarfile
import unicodedata
from collections.abc import Callable
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import numpy as np
import soundfile
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
    both,
    in_fork,
    losses,
    only_run,
    pretrain,
    resume,
    speech,
    trained,
    write_lines,
)

GROUP = "names"
EXTRACT = ["extract", "model.nemo", "m.jsonl", "out", "--device", "cpu"]
FROM_FOLDER = ["extract", "model.nemo", "corpus", "out", "--device", "cpu"]
PREPARE = ["prepare", "corpus", "--output", "new.jsonl", "--workers", "0"]
PROBE = ["probe", "model.nemo", "--train", "l.jsonl", "--test", "l.jsonl", "--output", "out", "--device", "cpu"]
SETS = "model.validation_ds.manifest_filepath="


def row(name: str, command: list[str], expected: Expected, *setups: Setup) -> Trial:
    return Trial(GROUP, name, command, expected, both(*setups), limit_s=90)


def read(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


def model(folder: Path) -> None:
    shutil.copy(Fixture.path / "model.nemo", folder)


# ---------------------------------------------------------------------------------------------------------------- runs


def resumes_as(*overrides: str) -> Callable[[Path, list[str]], str | None]:
    """Train six steps, then ten with the same names: the second command finds the first one's checkpoint."""

    def act(folder: Path, command: list[str]) -> str | None:
        for limit in (6, 10):
            outcome = in_fork(resume(f"trainer.max_steps={limit}", *overrides), folder, {}, 90)
            if outcome.code == 1 and limit == 6 and outcome.message and not list(folder.rglob("metrics.csv")):
                refused = Refused(tuple(override.partition("=")[0].rpartition(".")[2] for override in overrides[:1]))
                return refused.wrong(folder, outcome)
            if outcome.code != 0:
                return f"exit code {outcome.code} with {limit} steps: {outcome.message[-300:]}"
            if "Traceback (most recent call last)" in outcome.text:
                return "a traceback"
        if "resumed at step" not in outcome.text:
            return "the second command does not resume"
        if losses(only_run(folder)) != losses(Fixture.path / "runs/whole"):
            return "losses differ from the undisturbed run"
        if not list(only_run(folder).glob("checkpoints/*.nemo")):
            return "no model in the run folder"
        report = in_fork(["report", str(only_run(folder))], folder, {}, 90)
        page = only_run(folder) / "report.html"
        if report.code != 0 or not page.exists():
            return f"no report: {report.message[-200:]}"
        return None

    return act


def saved(folder: Path, outcome: Outcome) -> str | None:
    return trained(folder, outcome) if list(only_run(folder).glob("checkpoints/*.nemo")) else "no model was saved"


def folder_is(name: str) -> Check:
    def check(folder: Path, outcome: Outcome) -> str | None:
        found = only_run(folder).relative_to(folder)
        return saved(folder, outcome) if str(found) == name else f"the run is in {str(found)!r}, expected {name!r}"

    return check


TWICE: list[tuple[str, tuple[str, ...]]] = [
    ("with the brackets of a search", ("exp_manager.name='lr[0.1]'",)),
    ("with a star", ("exp_manager.name='a*b?'",)),
    ("with an equals sign", ("exp_manager.name='lr=0.1-step=3'",)),
    ("with per cent and braces", ("exp_manager.name='100%d{}{epoch}'",)),
    ("with spaces, not in ASCII", ("exp_manager.name='été 日本 e\u0301'",)),
    ("in a folder with brackets", ("exp_manager.exp_dir='[old] runs*'",)),
    ("in a folder with a comma and a hash", ("exp_manager.exp_dir='a,b#c'",)),
    ("in a folder with a quote", ('exp_manager.exp_dir="O\'Brien"',)),
    ("with the ending of a checkpoint", ("exp_manager.name=run.ckpt",)),
    ("named last", ("exp_manager.name=last",)),
]

NAME = "exp_manager.name"
RUNS: list[tuple[str, list[str], Expected]] = [
    ("a run named ..", pretrain(f"{NAME}=.."), Refused(("name",))),
    ("a run named .", pretrain(f"{NAME}=."), Refused(("name",))),
    (
        "a run without a name",
        pretrain(f"{NAME}="),
        Either(Refused(("name",)), Right(folder_is("runs/NEST-FastConformer-SSL"))),
    ),
    ("a run named like a number", pretrain(f"{NAME}='007'"), Right(folder_is("runs/007"))),
    ("a run named like a date", pretrain(f"{NAME}=2026-11-19"), Right(folder_is("runs/2026-11-19"))),
    ("a run named like a power of ten", pretrain(f"{NAME}='1e5'"), Right(folder_is("runs/1e5"))),
    ("a run with a name of 300 letters", pretrain(f"{NAME}={'n' * 300}"), Refused(("name",))),
    ("a run with a name of 250 letters", pretrain(f"{NAME}={'n' * 250}"), Either(Refused(("name",)), Right(saved))),
    (
        "a run with a line end in its name",
        pretrain(f'{NAME}="a\nb"'),
        Either(Refused(("name",)), Right(folder_is("runs/a\nb"))),
    ),
    (
        "a run with a space at the end",
        pretrain(f"{NAME}='run '"),
        Either(Refused(("name",)), Right(folder_is("runs/run "))),
    ),
    (
        "a run whose name ends a line of a Windows script",
        pretrain(f"{NAME}=run\r"),
        Either(Refused(("name",)), Right(folder_is("runs/run"))),
    ),
    (
        "a folder of runs that ends a line of a Windows script",
        pretrain("exp_manager.exp_dir=runs\r"),
        Either(Refused(("exp_dir",)), Right(folder_is("runs/run"))),
    ),
    ("a run with a tilde for the home", pretrain(f"{NAME}=~/run"), Refused(("name",))),
    (
        "a run of which a file has the name",
        pretrain("exp_manager.exp_dir=.", f"{NAME}=train.jsonl"),
        Refused(("train.jsonl",)),
    ),
    ("a folder of runs that is a file", pretrain("exp_manager.exp_dir=train.jsonl"), Refused(("train.jsonl",))),
]

# ----------------------------------------------------------------------------------------------- manifests, their sets


def manifests(*names: str) -> Setup:
    """Copies of the validation manifest, each with another number of lines."""

    def setup(folder: Path) -> None:
        lines = [
            {**line, "audio_filepath": str(folder / line["audio_filepath"])} for line in read(folder / "valid.jsonl")
        ]
        for i, name in enumerate(names):
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            write_lines(folder / name, lines[: len(lines) - i])

    return setup


def has_sets(*names: str) -> Check:
    """A column for each set, with a value, and no two columns of one name."""

    def check(folder: Path, outcome: Outcome) -> str | None:
        with (only_run(folder) / "metrics.csv").open(newline="", encoding="utf-8") as file:
            header, *content = list(csv.reader(file))
        if len(set(header)) != len(header):
            return f"columns of the same name: {header}"
        if any(len(cells) != len(header) for cells in content):
            return "a row with another number of cells than the header"
        own = [i for i, name in enumerate(header) if name.endswith("_val_loss")]
        filled = [header[i] for i in own if any(cells[i] for cells in content)]
        if len(filled) != len(names):
            return f"columns {filled}, expected {len(names)}"
        missing = [name for name in names if not any(name in column for column in filled)]
        return f"no column with {missing}: {filled}" if missing else trained(folder, outcome)

    return check


VALIDATION: list[tuple[str, tuple[str, ...], str, Expected]] = [
    (
        "two sets of one name",
        ("a/dev.jsonl", "b/dev.jsonl"),
        "[a/dev.jsonl,b/dev.jsonl]",
        Either(Refused(("dev",)), Right(has_sets("", ""))),
    ),
    (
        "two sets, NAME.jsonl and NAME.json",
        ("dev.jsonl", "dev.json"),
        "[dev.jsonl,dev.json]",
        Either(Refused(("dev",)), Right(has_sets("", ""))),
    ),
    ("one set, named twice", ("dev.jsonl",), "[dev.jsonl,dev.jsonl]", Either(Refused(("dev",)), Right(trained))),
    (
        "a set with a comma and quotes",
        ('a",b.jsonl', "c.jsonl"),
        "['a\",b.jsonl',c.jsonl]",
        Either(Refused(('a"',)), Right(has_sets("", "c"))),
    ),
    (
        "a set with a line end",
        ("a\nb.jsonl", "c.jsonl"),
        '["a\nb.jsonl",c.jsonl]',
        Either(Refused(("b.jsonl",)), Right(has_sets("", "c"))),
    ),
    (
        "sets named train and val",
        ("train.jsonl", "val.jsonl"),
        "[train.jsonl,val.jsonl]",
        Right(has_sets("train", "val")),
    ),
    (
        "a set without a name",
        (".jsonl", "c.jsonl"),
        "[.jsonl,c.jsonl]",
        Either(Refused((".jsonl",)), Right(has_sets("", "c"))),
    ),
]

TRAINING: list[tuple[str, str, str]] = [  # what, the name of the manifest, how it is written
    ("with a comma", "a,b.jsonl", "['a,b.jsonl']"),
    ("with braces that are no pattern", "m{x}.jsonl", "'m{x}.jsonl'"),
    ("that looks like a pattern", "m_{0..1}.jsonl", "'m_{0..1}.jsonl'"),
    ("with an equals sign and a hash", "lang=de#1.jsonl", "'lang=de#1.jsonl'"),
    ("with $ and braces", "a${b}.jsonl", "'a\\${b}.jsonl'"),
]

# --------------------------------------------------------------------------------------------------------------- audio


def sound(path: Path, seed: int) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    soundfile.write(str(path), speech(RATE + 100 * seed, seed), RATE, format="WAV")


def corpus(*names: str) -> Setup:
    """A folder of audio, all different, and a manifest of it."""

    def setup(folder: Path) -> None:
        for seed, name in enumerate(names):
            sound(folder / "corpus" / name, seed)
        lines = [
            {"audio_filepath": f"corpus/{name}", "duration": (RATE + 100 * i) / RATE} for i, name in enumerate(names)
        ]
        write_lines(folder / "m.jsonl", lines)

    return setup


def all_features(number: int) -> Check:
    """As many arrays as utterances, all different, and each line names its own."""

    def check(folder: Path, outcome: Outcome) -> str | None:
        lines = read(folder / "out/manifest.jsonl")
        files = [folder / "out" / line["feature_filepath"] for line in lines]
        if len(lines) != number:
            return f"{len(lines)} lines in the manifest, expected {number}"
        content = {hashlib.sha256(path.read_bytes()).hexdigest() for path in files}
        if len(content) != number:
            return f"{len(content)} different features of {number} utterances"
        for line, path in zip(lines, files, strict=True):
            if np.load(path).shape[-1] != line["num_frames"]:
                return f"{path.name}: num_frames is not that of the features"
        return None

    return check


def prepared(number: int, bad: int = 0) -> Check:
    """So many different utterances, and so many bad files; both lists are UTF-8."""

    def check(folder: Path, outcome: Outcome) -> str | None:
        lines = read(folder / "new.jsonl")
        listed = folder / "new.bad.jsonl"
        count = len(read(listed)) if listed.exists() else 0
        if (len({line["audio_filepath"] for line in lines}), count) != (number, bad):
            return f"{len(lines)} utterances and {count} bad files, expected {number} and {bad}"
        missing = [line["audio_filepath"] for line in lines if not (folder / line["audio_filepath"]).exists()]
        return f"names that do not exist: {missing}" if missing else None

    return check


def in_shards(number: int) -> Check:
    """Every utterance of the shards' manifests is a member of its own, with its own content."""

    def check(folder: Path, outcome: Outcome) -> str | None:
        content = []
        for tar in sorted(folder.rglob("audio_*.tar")):
            with tarfile.open(tar) as archive:
                members = [member for member in archive.getmembers() if member.isfile()]
                names = [member.name for member in members]
                if len(set(names)) != len(names):
                    return f"{tar.name}: members of the same name"
                shard = tar.stem.rpartition("_")[2]
                manifest = next(folder.rglob(f"manifest_{shard}.json"))
                if sorted(line["audio_filepath"] for line in read(manifest)) != sorted(names):
                    return f"{manifest.name} does not name the members of {tar.name}"
                for member in members:
                    data = archive.extractfile(member)
                    content.append(hashlib.sha256(data.read() if data else b"").hexdigest())
        expected = {hashlib.sha256(path.read_bytes()).hexdigest() for path in (folder / "corpus").rglob("*.wav")}
        if len(content) != number or set(content) != expected:
            return f"{len(content)} members, {len(set(content) & expected)} of {number} utterances"
        return None

    return check


FLAT = ["a/b_c.wav", "a_b/c.wav", "a.b/c.wav", "a/b.c.wav", "a-b-c.wav", "A/b_c.wav"]
LONG = ["l" * 251 + ".wav", "日" * 83 + ".wav", "/".join(["deep" * 20] * 8) + "/x.wav"]


def foreign(folder: Path) -> None:
    """A name in Latin-1, as old archives have them, next to a good one."""
    for seed, name in enumerate((b"good.wav", b"caf\xe9.wav")):
        sound(folder / "corpus/new", seed)
        os.rename(folder / "corpus/new", os.fsencode(folder / "corpus") + b"/" + name)


def listed_or_used(folder: Path, outcome: Outcome) -> str | None:
    """The name that is no text is in the one list or in the other."""
    return prepared(1, 1)(folder, outcome) and prepared(2)(folder, outcome)


def left_overs(folder: Path) -> None:
    """What macOS, Windows and Jupyter leave in a folder of audio."""
    for name in ("._0.wav", "__MACOSX/._0.wav", ".ipynb_checkpoints/._0.wav"):
        path = folder / "corpus" / name
        path.parent.mkdir(exist_ok=True)
        path.write_bytes(b"\x00\x05\x16\x07" + bytes(200))


def hidden_copies(folder: Path) -> None:
    """Copies in hidden folders: snapshots of a file server, what was deleted on a desktop, Jupyter's."""
    for name in (".snapshot/hourly.0/x.wav", ".Trash-1000/files/y.wav", ".ipynb_checkpoints/x-checkpoint.wav"):
        path = folder / "corpus" / name
        path.parent.mkdir(parents=True)
        shutil.copy(folder / "corpus/x.wav", path)


def line_with(**keys: Any) -> Setup:
    """The first line of the manifest has these keys besides or instead of its own."""

    def setup(folder: Path) -> None:
        first, *rest = read(folder / "m.jsonl")
        write_lines(folder / "m.jsonl", [{**first, **keys}, *rest])

    return setup


def composed(folder: Path) -> None:
    """The manifest has the composed form of a name, and the disk the one that macOS writes."""
    name = "caf\u00e9.wav"
    sound(folder / "corpus" / unicodedata.normalize("NFD", name), 0)
    write_lines(folder / "m.jsonl", [{"audio_filepath": f"corpus/{name}", "duration": 1.0}])


def again(folder: Path) -> None:
    """The manifest is one that `extract` has written before."""
    lines = [{**line, "feature_filepath": "old/x.npy", "num_frames": 1} for line in read(folder / "m.jsonl")]
    write_lines(folder / "m.jsonl", lines)


TWO = ("x.wav", "y.wav")
FOUND = Either(Refused(("caf",), partial=True), Right(all_features(1)))
AUDIO: list[tuple[str, list[str], Expected, Setup]] = [
    ("features of files with one name", FROM_FOLDER, Right(all_features(6)), corpus(*FLAT)),
    (
        "features of files that differ in their ending",
        FROM_FOLDER,
        Right(all_features(3)),
        corpus("x.wav", "x.WAV", "x.wav.wav"),
    ),
    ("features of files with the longest names", FROM_FOLDER, Right(all_features(3)), corpus(*LONG)),
    ("shards of files with one name", [*PREPARE, "--shards", "2"], Right(in_shards(6)), corpus(*FLAT)),
    ("shards of files with the longest names", [*PREPARE, "--shards", "2"], Right(in_shards(3)), corpus(*LONG)),
    ("a file name in Latin-1", PREPARE, Either(Refused(("caf",)), Right(listed_or_used)), foreign),
    (
        "features of a file name in Latin-1",
        FROM_FOLDER,
        Either(Refused(("caf",), partial=True), Right(all_features(2))),
        foreign,
    ),
    ("what systems leave behind", PREPARE, Right(prepared(2)), both(corpus(*TWO), left_overs)),
    ("copies in hidden folders", PREPARE, Right(prepared(2)), both(corpus(*TWO), hidden_copies)),
    ("a name in another Unicode form", EXTRACT, FOUND, composed),
    (
        "a name as a URL",
        EXTRACT,
        Either(Refused(("x.wav",), partial=True), Right(all_features(2))),
        both(corpus(*TWO), line_with(audio_filepath="file:///corpus/x.wav")),
    ),
    (
        "a name with a space at the end",
        EXTRACT,
        Either(Refused(("x.wav",), partial=True), Right(all_features(2))),
        both(corpus(*TWO), line_with(audio_filepath="corpus/x.wav ")),
    ),
    (
        "a name from Windows",
        EXTRACT,
        Right(all_features(2)),
        both(corpus(*TWO), line_with(audio_filepath="corpus\\x.wav")),
    ),
    (
        "a name with a drive letter",
        EXTRACT,
        Refused(("x.wav",), partial=True),
        both(corpus(*TWO), line_with(audio_filepath="D:\\corpus\\x.wav")),
    ),
    ("keys of an earlier extraction", EXTRACT, Right(all_features(2)), both(corpus(*TWO), again)),
]

# -------------------------------------------------------------------------------------------------------------- labels


def labelled(first: Any, second: Any, key: str = "label") -> Setup:
    """Every other utterance has the one label; the others have the other."""

    def setup(folder: Path) -> None:
        lines = read(folder / "train.jsonl")
        write_lines(folder / "l.jsonl", [{**line, key: (first, second)[i % 2]} for i, line in enumerate(lines)])

    return setup


def two_classes(folder: Path, outcome: Outcome) -> str | None:
    """Two classes of four, so the most frequent class is half."""
    if "2 classes" not in outcome.text or "0.500" not in outcome.text:
        return "not two classes of equal size"
    for name in ("layer_weights.svg", "confusion.svg"):
        if "<script" in (folder / "out" / name).read_text(encoding="utf-8"):
            return f"{name}: markup of a label"
    json.loads((folder / "out/results.json").read_text(encoding="utf-8"))
    return None


LABELS: list[tuple[str, Any, Any, str, Expected]] = [
    ("a number and the same as text", 1, "1", "label", Either(Refused(("label",)), Right(two_classes))),
    ("true and false", True, False, "label", Right(two_classes)),
    ("a list", ["a"], ["b"], "label", Refused(("label",))),
    ("nothing and a text", "", "a", "label", Either(Refused(("label",)), Right(two_classes))),
    ("null and a text", None, "a", "label", Refused(("label",))),
    ("markup and a control code", "<script>alert(1)</script>", "\x1b[31mred", "label", Right(two_classes)),
    ("texts of 5,000 letters", "a" * 5000, "b" * 5000, "label", Either(Refused(("label",)), Right(two_classes))),
    ("a key with a dot, a space and an accent", "a", "b", "émo tion.x", Right(two_classes)),
]

# ------------------------------------------------------------------------------------------ outputs that are inputs too


def unharmed(folder: Path, outcome: Outcome) -> str | None:
    """All audio is as it was, and features are there."""
    for path in (Fixture.path / "audio").iterdir():
        if (folder / "audio" / path.name).read_bytes() != path.read_bytes():
            return f"{path.name} was changed"
    return None if len(list((folder / "audio").rglob("*.npy"))) == 8 else "no features of all files"


def a_run(folder: Path) -> None:
    Fixture.run(folder)


REPORT = ["report", str(RUN), "--output"]
OUTPUTS: list[tuple[str, list[str], Expected]] = [
    (
        "inspect writes onto its manifest",
        ["inspect", "train.jsonl", "--examples", "0", "--output", "train.jsonl"],
        Refused(("train.jsonl",)),
    ),
    (
        "inspect writes onto a folder",
        ["inspect", "train.jsonl", "--examples", "0", "--output", "audio"],
        Refused(("audio",)),
    ),
    ("report writes onto the metrics", [*REPORT, f"{RUN}/metrics.csv"], Refused(("metrics.csv",))),
    ("report writes onto a checkpoint", [*REPORT, f"{RUN}/checkpoints/last.ckpt"], Refused(("last.ckpt",))),
    (
        "prepare writes onto its manifest",
        ["prepare", "train.jsonl", "--output", "train.jsonl"],
        Refused(("train.jsonl",)),
    ),
    ("prepare writes onto audio", ["prepare", "audio", "--output", "audio/0.wav"], Refused(("0.wav",))),
    (
        "prepare writes into a file as folder",
        ["prepare", "audio", "--output", "train.jsonl/new.jsonl"],
        Refused(("train.jsonl",)),
    ),
    (
        "export writes onto the manifest",
        ["export", "model.nemo", "train.jsonl", "--format", "safetensors"],
        Refused(("train.jsonl",)),
    ),
    (
        "extract writes into the audio",
        ["extract", "model.nemo", "audio", "audio", "--device", "cpu"],
        Either(Refused(("audio",)), Right(unharmed)),
    ),
]


class Tags(HTMLParser):
    """Collects the elements of a page that have a handler, and the text of its title."""

    def __init__(self) -> None:
        super().__init__()
        self.handlers: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.handlers += [
            f"{tag} {name}" for name, value in attrs if name.startswith("on") and "pwned" in (value or "")
        ]
        if tag == "img" and any(name == "src" and value == "pwned" for name, value in attrs):
            self.handlers.append("img")


MARKUP = "a' onclick='pwned()' --><img src=pwned onerror=pwned()>.wav"


def harmless(folder: Path, outcome: Outcome) -> str | None:
    tags = Tags()
    page = (folder / "inspect.html").read_text(encoding="utf-8")
    tags.feed(page)
    return f"markup of a name in the page: {tags.handlers}" if tags.handlers or "<img src=pwned" in page else None


def trials() -> list[Trial]:
    found = [
        Trial(GROUP, f"a run {what}, twice", [], Refused(), act=resumes_as(*overrides), limit_s=200)
        for what, overrides in TWICE
    ]
    found += [row(name, command, expected) for name, command, expected in RUNS]
    for what, files, value, expected in VALIDATION:
        found.append(row(what, pretrain(SETS + value), expected, manifests(*files)))
    for what, file, value in TRAINING:
        command = pretrain(f"model.train_ds.manifest_filepath={value}")
        found.append(
            row(
                f"a manifest {what}",
                command,
                Either(Refused((re.split("[,{$]", file)[0] + ":",)), Right(saved)),
                manifests(file),
            )
        )
    found += [row(name, command, expected, model, setup) for name, command, expected, setup in AUDIO]
    for what, first, second, key, expected in LABELS:
        found.append(row(f"labels: {what}", [*PROBE, "--label", key], expected, model, labelled(first, second, key)))
    found += [row(name, command, expected, model, a_run) for name, command, expected in OUTPUTS]
    page = ["inspect", "m.jsonl", "model.train_ds.min_duration=0.1"]
    found.append(row("markup in the name of an audio file", page, Right(harmless), corpus("b.wav", MARKUP)))
    return found
