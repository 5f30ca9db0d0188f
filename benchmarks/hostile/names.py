"""Names and texts: of audio, manifests, runs, validation sets, labels and keys, as they are read, shown and written.

A name reaches files and pages as it is, but never a terminal as a control code, a page as markup, a shell as several
words, or a path as a way out. That control codes stay out of the output and the log is a rule of the harness.
"""

from __future__ import annotations

import csv
import json
import os
import shlex
import shutil
import tarfile
from collections.abc import Callable, Sequence
from html.parser import HTMLParser
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

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
    losses,
    only_run,
    pretrain,
    said,
    trained,
    write_lines,
)

GROUP = "names"
ESCAPE = "\x1b]0;owned\x07\x1b[2J"
MARKUP = "</script><svg onload=alert(1)>"
ODD = [
    *("two  spaces.wav", " first.wav", "tab\there.wav", "line\nend.wav", f"clear{ESCAPE}.wav", "turned\u202evaw.wav"),
    *(
        "%d%s{}{0}.wav",
        "$(touch pwned)`id`;.wav",
        "'\"&<b>.wav",
        "a\\b.wav",
        "--help.wav",
        "#1?x=y.wav",
        "日本 é 🎧.wav",
    ),
    *("e\u0301.wav", "\u00e9.wav", "A.wav", "a.wav", "x.tar.wav", "~.wav", "\u2028.wav", "[1-9]*.wav", "{a,b}.wav"),
]
PROBE = [
    *("probe", "model.nemo", "--train", "l.jsonl", "--test", "l.jsonl", "--label", "label"),
    *("--output", "probe", "--device", "cpu"),
]
TEXT = {
    "text": "\u2029\u0085 \"'\\ \x00 \x1b[1m 🎧 </script>",
    "n": -(2**80),
    "deep": [{"a": [None, False, 1e-300]}],
    "": 1,
}
"""Keys of other programs, which are kept."""

# --------------------------------------------------------------------------------------------------------------- set-up


def model(folder: Path) -> None:
    shutil.copy(Fixture.path / "model.nemo", folder / "model.nemo")


def copies(*names: str | bytes) -> Setup:
    """A folder `in` with audio under these names, which may contain folders."""

    def setup(folder: Path) -> None:
        model(folder)
        for i, name in enumerate(names):
            target = os.path.join(os.fsencode(folder / "in"), os.fsencode(name))
            os.makedirs(os.path.dirname(target), exist_ok=True)
            shutil.copy(os.fsencode(folder / f"audio/{i % 8}.wav"), target)

    return setup


def in_manifest(folder: Path) -> None:
    """All odd names, in the training manifest."""
    copies(*ODD)(folder)
    lines = read(folder / "train.jsonl")
    write_lines(
        folder / "train.jsonl",
        [{"audio_filepath": f"in/{name}", "duration": lines[i % 8]["duration"]} for i, name in enumerate(ODD)],
    )


def read(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().split("\n") if line]


def moved(name: str) -> Setup:
    """The training manifest under another name."""

    def setup(folder: Path) -> None:
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / "train.jsonl").rename(folder / name)

    return setup


def labels(*values: Any) -> Setup:
    def setup(folder: Path) -> None:
        model(folder)
        lines = read(folder / "train.jsonl")
        write_lines(folder / "l.jsonl", [x | {"label": values[i % len(values)]} for i, x in enumerate(lines)])

    return setup


def odd_run(folder: Path) -> None:
    """A finished run whose manifests, keys and names have markup."""
    Fixture.run(folder)
    (folder / MARKUP.replace("/", "")).mkdir()
    bad = folder / MARKUP.replace("/", "") / "a.wav"
    shutil.copy(folder / "audio/0.wav", bad)
    lines = [x | {"text": MARKUP, "speaker": MARKUP} for x in read(folder / "valid.jsonl")]
    lines[0]["audio_filepath"] = f"{bad.parent.name}/a.wav"
    write_lines(folder / "valid.jsonl", lines)
    hparams = folder / RUN / "hparams.yaml"
    hparams.write_text(hparams.read_text().replace("name: run", f"name: '{MARKUP}'"))


# --------------------------------------------------------------------------------------------------------------- checks


class Page(HTMLParser):
    """The tags of a page that a browser would act on."""

    def __init__(self) -> None:
        super().__init__()
        self.wrong: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        if any(name == "onload" and value == "alert(1)" for name, value in attrs):
            self.wrong.append(tag)


def safe_page(name: str) -> Check:
    def check(folder: Path, outcome: Outcome) -> str | None:
        page = Page()
        page.feed((folder / name).read_text())
        return f"markup of a name is in the page: {page.wrong}" if page.wrong else None

    return check


def undisturbed(folder: Path, outcome: Outcome) -> str | None:
    expected, found = losses(Fixture.path / "runs/whole"), losses(only_run(folder))
    if not found or any(expected[step] != value for step, value in found.items()):
        return f"losses differ from those of plain names: {found}"
    return trained(folder, outcome)


def run_called(*names: str) -> Check:
    """The run folder and its model have this name, whose alternatives are other names for it."""

    def check(folder: Path, outcome: Outcome) -> str | None:
        run = only_run(folder)
        if run.parent != folder / "runs" or run.name not in names:
            return f"the run is in {run.relative_to(folder)}"
        if [path.name for path in run.glob("checkpoints/*.nemo")] != [f"{run.name}.nemo"]:
            return f"models: {[path.name for path in run.glob('checkpoints/*')]}"
        return undisturbed(folder, outcome)

    return check


def all_listed(names: Sequence[str]) -> Check:
    """`prepare` found each of these names, and only these."""

    def check(folder: Path, outcome: Outcome) -> str | None:
        found = [line["audio_filepath"] for line in read(folder / "m.jsonl")]
        wrong = {os.path.basename(path) for path in found} ^ {os.path.basename(name) for name in names}
        if len(found) != len(names) or wrong:
            return f"{len(found)} of {len(names)} names, wrong ones: {sorted(wrong)[:5]}"
        lost = [path for path in found if not os.path.exists(os.path.join(os.fsencode(folder), os.fsencode(path)))]
        return f"paths that lead nowhere: {lost[:3]}" if lost else None

    return check


def all_features(number: int) -> Check:
    """Each utterance has a file of its own, inside the output folder."""

    def check(folder: Path, outcome: Outcome) -> str | None:
        lines = read(folder / "out/manifest.jsonl")
        paths = {
            path.resolve()
            for line in lines
            for path in (folder / line["feature_filepath"], folder / "out" / line["feature_filepath"])
            if path.exists()
        }
        if len(lines) != number or len(paths) != number:
            return f"{len(lines)} lines and {len(paths)} files for {number} utterances"
        if any(not path.is_relative_to((folder / "out").resolve()) for path in paths):
            return "features outside their folder"
        frames = {line["audio_filepath"]: line["num_frames"] for line in lines}
        wrong = [p.name for p in paths if np.load(p).shape[-1] not in frames.values()]
        return f"frames of another file: {wrong}" if wrong else None

    return check


def in_shards(number: int) -> Check:
    """Each line of the shards' manifests names a member of its own, with the bytes of its file."""

    def check(folder: Path, outcome: Outcome) -> str | None:
        members: list[str] = []
        contents = set()
        for path in sorted((folder / "s").glob("audio_*.tar")):
            with tarfile.open(path) as tar:
                for info in tar:
                    if info.name.startswith("/") or ".." in Path(info.name).parts:
                        return f"a member called {info.name!r}"
                    file = tar.extractfile(info)
                    members.append(info.name)
                    contents.add(file.read() if file else b"")
        lines = read(folder / "s/tarred_audio_manifest.json")
        if len(members) != number or len(set(members)) != number or len(lines) != number:
            return f"{len(lines)} lines, {len(members)} members, {len(set(members))} names for {number} utterances"
        missing = {line["audio_filepath"] for line in lines} - set(members)
        if missing:
            return f"lines without a member: {sorted(missing)[:3]}"
        return None if len(contents) == min(number, 8) else f"{len(contents)} different contents"

    return check


def keys_kept(folder: Path, outcome: Outcome) -> str | None:
    lines = read(folder / "m.jsonl")
    if len(lines) != 8:
        return f"{len(lines)} lines"
    wrong = {key: lines[0].get(key, "nothing") for key, value in TEXT.items() if lines[0].get(key, "nothing") != value}
    return f"other programs' keys were changed: {wrong}" if wrong else None


def columns(*names: str) -> Check:
    """metrics.csv is a table in which each validation set has a column, and all rows have the same number of cells."""

    def check(folder: Path, outcome: Outcome) -> str | None:
        with (only_run(folder) / "metrics.csv").open(newline="") as file:
            table = list(csv.reader(file))
        if len({len(row) for row in table}) != 1:
            return f"rows of {sorted({len(row) for row in table})} cells"
        missing = [name for name in names if f"{name}_val_loss" not in table[0]]
        if missing or len(set(table[0])) != len(table[0]):
            return f"columns {table[0]}"
        return trained(folder, outcome)

    return check


def probed(classes: int) -> Check:
    """The results can be read, and the pictures are XML."""

    def check(folder: Path, outcome: Outcome) -> str | None:
        results = json.loads((folder / "probe/results.json").read_text())
        for name in ("confusion.svg", "layer_weights.svg"):
            ElementTree.parse(folder / "probe" / name)
            if "alert(1)" in {e.get("onload") for e in ElementTree.parse(folder / "probe" / name).iter()}:
                return f"markup of a label is in {name}"
        matrix = [value for key, value in results.items() if "confusion" in key]
        while matrix and isinstance(matrix[0], dict):
            matrix = [value for value in matrix[0].values() if isinstance(value, list) and value]
        return None if f"{classes} classes" in outcome.text else "another number of classes"

    return check


def usable_command(folder: Path, outcome: Outcome) -> str | None:
    """The last line that `demo` prints can be pasted into a shell: its manifests are there."""
    words = shlex.split(outcome.out.strip().splitlines()[-1])
    paths = [word.partition("=")[2].strip("'\"") for word in words if "manifest" in word]
    missing = [path for path in paths if not (folder / path).exists()]
    return f"the command that it prints does not work: {missing or words}" if missing or not paths else None


# --------------------------------------------------------------------------------------------------------------- trials


def runs() -> list[Trial]:
    def run(name: str, value: str, expected: Expected | None = None, *, own: bool = False) -> Trial:
        quoted = "'" + value.replace("\\", "\\\\").replace("'", "\\'") + "'"
        fallback = Either(Refused(("name",)), Right(run_called(value)))
        return Trial(GROUP, f"a run {name}", pretrain(f"exp_manager.name={quoted}"), expected or fallback)

    return [
        run("with two words", "my first run", Right(run_called("my first run"))),
        run("with a line end", "two\nlines", Refused(("name",))),
        run("with an escape code", f"a{ESCAPE}b", Refused(("name",))),
        run("that is turned around", "a\u202eb"),
        run("with an emoji", "läuft 🎧", Right(run_called("läuft 🎧"))),
        run("that looks like an option", "-rf"),
        run("with formats", "100%s {0} {epoch}"),
        run("with markup", MARKUP.replace("/", "")),
        run("for a shell", "$(touch pwned)`touch pwned`; # & |"),
        run("of 250 letters", "n" * 250),
        run("of 300 letters", "n" * 300, Refused(("name|too long",))),
        run("with a slash", "a/b", Either(Refused(("name",)), Right(said("a/b")))),
        run("called last, as the checkpoint is", "last"),
        run("of spaces", "   "),
        Trial(
            GROUP,
            "an experiment folder with odd letters",
            pretrain("exp_manager.exp_dir='é [1] %s {x} \"q\"'"),
            Right(undisturbed),
        ),
        Trial(
            GROUP,
            "a checkpoint named after what is never logged",
            pretrain("exp_manager.checkpoint_callback_params.filename='{wer:.2f}'"),
            Refused(("filename|wer",)),
        ),
    ]


def manifest_names() -> list[Trial]:
    def called(name: str, value: str, expected: Expected | None = None) -> Trial:
        quoted = value.replace("\\", "\\\\").replace("'", "\\'")
        command = pretrain(f"model.train_ds.manifest_filepath='{quoted}'")
        return Trial(GROUP, f"a manifest {name}", command, expected or Right(undisturbed), moved(value))

    comma = Either(Refused(("manifest|,|no such",)), Right(undisturbed))
    return [
        called("with spaces", "my data/all of it .jsonl"),
        called("with an equals sign", "a=b.jsonl"),
        called("with brackets", "t[12].jsonl"),
        called("with a comma", "a,b.jsonl", comma),
        called("with braces", "t{1,2}.jsonl", Either(Refused(("t{1,2}.jsonl|t1.jsonl",)), Right(undisturbed))),
        called("with formats", "%s{}{0}.jsonl", Either(Refused((".jsonl",)), Right(undisturbed))),
        called("with accents", "Übung \u0065\u0301.jsonl"),
        called("with an escape code", f"t{ESCAPE}.jsonl", Either(Refused((".jsonl",)), Right(undisturbed))),
        Trial(
            GROUP,
            "validation sets with odd names",
            pretrain("model.validation_ds.manifest_filepath=[\"v 'x' 1.jsonl\",'w\"q\" ü.jsonl']"),
            Either(Refused(("name|manifest|.jsonl",)), Right(columns("v 'x' 1", 'w"q" ü'))),
            both(
                lambda folder: shutil.copy(folder / "valid.jsonl", folder / "v 'x' 1.jsonl"),
                lambda folder: shutil.copy(folder / "valid.jsonl", folder / 'w"q" ü.jsonl'),
            ),
        ),
        Trial(
            GROUP,
            "a validation set that is called like another's column",
            pretrain("model.validation_ds.manifest_filepath=[val.jsonl,val_val.jsonl]"),
            Either(Refused(("val",)), Right(columns("val", "val_val"))),
            both(
                lambda folder: shutil.copy(folder / "valid.jsonl", folder / "val.jsonl"),
                lambda folder: shutil.copy(folder / "valid.jsonl", folder / "val_val.jsonl"),
            ),
        ),
    ]


def audio_names() -> list[Trial]:
    def files(name: str, command: list[str], setup: Setup, expected: Expected) -> Trial:
        return Trial(GROUP, name, command, expected, setup)

    prepare = ["prepare", "in", "--output", "m.jsonl", "--workers", "0"]
    shards = [*prepare, "--shards", "2", "--shards-folder", "s"]
    extract = ["extract", "model.nemo", "in", "out", "--device", "cpu"]
    namesakes = [f"{part}/{i}.wav" for i, part in enumerate("abcd")] + [f"{part}/0.wav" for part in "bcd"] + ["a_0.wav"]
    long = "n" * 251 + ".wav"
    deep = "/".join(["d" * 200] * 3) + "/x.wav"
    unreadable = [b"\xff\xfe.wav", b"caf\xe9.wav"]
    return [
        files("prepare: odd names", prepare, copies(*ODD), Right(all_listed(ODD))),
        files(
            "prepare: odd names, bad content",
            prepare,
            both(copies(*ODD), spoiled),
            Either(Refused(("bad",), partial=True), Right(bad_named())),
        ),
        files(
            "prepare: names in Latin-1",
            prepare,
            copies(*unreadable, "good.wav"),
            Either(Refused((".wav",), partial=True), Right(bytes_kept(3))),
        ),
        files(
            "prepare: keys of other programs",
            ["prepare", "k.jsonl", "--output", "m.jsonl", "--workers", "0"],
            lambda folder: write_lines(folder / "k.jsonl", [x | TEXT for x in read(folder / "train.jsonl")]),
            Right(keys_kept),
        ),
        files("prepare: shards of odd names", shards, copies(*ODD), Right(in_shards(len(ODD)))),
        files("prepare: shards of namesakes", shards, copies(*namesakes), Right(in_shards(len(namesakes)))),
        files("prepare: shards of names of 255 letters", shards, copies(long, deep), Right(in_shards(2))),
        files(
            "pretrain: odd names",
            pretrain("model.train_ds.batch_size=4"),
            in_manifest,
            Right(said(f"{len(ODD)} utterances")),
        ),
        files(
            "pretrain: odd names that are gone",
            pretrain(),
            both(in_manifest, gone),
            Either(Refused(("No such file|cannot be read",), partial=True), Right(trained)),
        ),
        files("extract: odd names", extract, copies(*ODD), Right(all_features(len(ODD)))),
        files("extract: namesakes", extract, copies(*namesakes), Right(all_features(len(namesakes)))),
        files("extract: names of 255 letters", extract, copies(long, deep), Right(all_features(2))),
        files(
            "extract: a path that climbs out",
            ["extract", "model.nemo", "in/up.jsonl", "out", "--device", "cpu"],
            both(
                copies("0.wav"),
                lambda folder: write_lines(
                    folder / "in/up.jsonl", [{"audio_filepath": "../in/../audio/../audio/1.wav", "duration": 1.7}]
                ),
            ),
            Right(all_features(1)),
        ),
        files(
            "extract: odd names that are gone",
            ["extract", "model.nemo", "train.jsonl", "out", "--device", "cpu"],
            both(in_manifest, gone, few),
            Refused(("in/",), partial=True),
        ),
        files("inspect: markup in names", ["inspect", "train.jsonl"], markup_files, Right(safe_page("inspect.html"))),
        files("report: markup everywhere", ["report", str(RUN)], odd_run, Right(safe_page(f"{RUN}/report.html"))),
    ]


def spoiled(folder: Path) -> None:
    for path in (folder / "in").iterdir():
        path.write_bytes(b"RIFF" + bytes(99))


def gone(folder: Path) -> None:
    shutil.rmtree(folder / "in")


def few(folder: Path) -> None:
    """Only names that change how a terminal shows them, so that a message names them all."""
    odd = set("\x1b\n\t\u202e\u2028")
    write_lines(folder / "train.jsonl", [x for x in read(folder / "train.jsonl") if odd & set(x["audio_filepath"])])


def markup_files(folder: Path) -> None:
    part = folder / MARKUP.partition("/")[0]
    part.mkdir()
    lines = read(folder / "train.jsonl")
    for i, line in enumerate(lines):
        target = part / MARKUP.partition("/")[2]
        target.mkdir(exist_ok=True)
        shutil.copy(folder / f"audio/{i}.wav", target / f"{i}.wav")
        line |= {"audio_filepath": f"{MARKUP}/{i}.wav", "text": MARKUP, "speaker": MARKUP}
    write_lines(folder / "train.jsonl", lines)


def bad_named() -> Check:
    def check(folder: Path, outcome: Outcome) -> str | None:
        found = {os.path.basename(line["audio_filepath"]) for line in read(folder / "m.bad.jsonl")}
        return None if found == set(ODD) else f"bad files: {sorted(found ^ set(ODD))[:5]}"

    return check


def bytes_kept(number: int) -> Check:
    """Each name, in UTF-8 or not, is in one of the two lists; those that are good lead to their files."""

    def check(folder: Path, outcome: Outcome) -> str | None:
        good = read(folder / "m.jsonl")
        bad = read(folder / "m.bad.jsonl") if (folder / "m.bad.jsonl").exists() else []
        if len(good) + len(bad) != number:
            return f"{len(good)} good and {len(bad)} bad of {number} files"
        lost = [
            line["audio_filepath"]
            for line in good
            if not os.path.exists(os.path.join(os.fsencode(folder), os.fsencode(line["audio_filepath"])))
        ]
        return f"paths that lead nowhere: {lost}" if lost else None

    return check


def texts() -> list[Trial]:
    def probe(name: str, values: Sequence[Any], expected: Expected | None = None) -> Trial:
        fallback = Either(Refused(("label",)), Right(probed(len(values))))
        return Trial(GROUP, f"probe: {name}", PROBE, expected or fallback, labels(*values))

    def keys(folder: Path) -> None:
        model(folder)
        lines = read(folder / "train.jsonl")
        write_lines(folder / "l.jsonl", [x | {f"k{ESCAPE}\n\n": 1, MARKUP: 2} for x in lines])

    return [
        probe("labels with markup", [MARKUP, "<b>&amp;"]),
        probe("labels with escape codes", [f"a{ESCAPE}", "b\n\nnest-ssl: fine"]),
        probe("labels that are numbers and text", [1, "1"], Either(Refused(("label",)), Right(ended_well))),
        probe("labels of 5,000 letters", ["x" * 5000, "y" * 5000]),
        probe("empty labels", ["", " "]),
        probe("labels in two forms of Unicode", ["\u00e9", "e\u0301"]),
        Trial(GROUP, "probe: keys with escape codes", PROBE, Refused(("label", "l.jsonl")), keys),
        Trial(
            GROUP,
            "demo: a folder with spaces and quotes",
            [
                "demo",
                "--data-dir",
                "my 'demo' data",
                "--num-train",
                "2",
                "--num-val",
                "1",
                "--num-noise",
                "1",
                "--duration",
                "1.5",
                "--synthesizer",
                "formants",
            ],
            Right(usable_command),
        ),
        Trial(
            GROUP,
            "export: a name with spaces and dots",
            ["export", "model.nemo", "./my model.v1.2.nemo", "--format", "nemo"],
            Right(written("my model.v1.2.nemo")),
            model,
        ),
        Trial(
            GROUP,
            "info: a model called like a setting",
            ["info", "a=b.nemo"],
            Either(Refused(("a=b.nemo|a",)), Right(ended_well)),
            lambda folder: shutil.copy(Fixture.path / "model.nemo", folder / "a=b.nemo"),
        ),
        Trial(
            GROUP,
            "info: a name in capitals",
            ["info", "MODEL.NEMO"],
            Either(Refused(("MODEL.NEMO",)), Right(ended_well)),
            lambda folder: shutil.copy(Fixture.path / "model.nemo", folder / "MODEL.NEMO"),
        ),
        Trial(GROUP, "info: an escape code as name", ["info", f"x{ESCAPE}.nemo"], Refused((".nemo",))),
        Trial(GROUP, "doctor: an escape code as run", ["doctor", f"runs/x{ESCAPE}"], Refused(("runs",))),
        Trial(GROUP, "pretrain: an escape code as key", ["pretrain", f"model.{ESCAPE}=1"], Refused(("model|key",))),
        Trial(
            GROUP,
            "prepare: half a character as input",
            ["prepare", "a\udce9b", "--output", "m.jsonl"],
            Refused(("a|b",)),
        ),
    ]


def written(name: str) -> Callable[[Path, Outcome], str | None]:
    def check(folder: Path, outcome: Outcome) -> str | None:
        if outcome.changed != [name]:
            return f"wrote {outcome.changed}"
        return None if tarfile.is_tarfile(folder / name) else "not a .nemo file"

    return check


def trials() -> list[Trial]:
    return [*runs(), *manifest_names(), *audio_names(), *texts()]
