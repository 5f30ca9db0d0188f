"""Odd names: of audio files, manifests, runs, labels and outputs; what they do to terminals, pages and tables.

A name may be ugly, but what was written under it must be found again, and no name may act on its reader.
"""

from __future__ import annotations

import csv
import html.parser
import json
import os
import re
import shutil
import tarfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import numpy as np
from benchmarks.hostile.harness import (
    RUN,
    TINY,
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
    only_run,
    pretrain,
    rows,
    said,
    trained,
    write_lines,
)

GROUP = "names"
SCRIPT = "<script>alert(1)</script>"
ESCAPE = "\x1b]0;owned\x07\x1b[2J\x1b[31m"
BIDI = "\u202egpj.\u2066"


def lines_of(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().split("\n") if line.strip()]


# ---------------------------------------------------------------------------------------------------------- audio files

FILES = {
    "a line end": "a\nb.wav",
    "a tab and a carriage return": "a\tb\rc.wav",
    "codes for the terminal": f"{ESCAPE}.wav",
    "writing from right to left": f"{BIDI}.wav",
    "quotes": 'it\'s "quoted" `here`.wav',
    "shell": "$(touch pwned);touch pwned|&.wav",
    "a dash": "-rf.wav",
    "spaces at both ends": "  a  ",
    "braces": "a_{0..3}_{b,c}.wav",
    "nemo's braces": "a__OP_0..3_CL_.wav",
    "brackets and stars": "[a]*?.wav",
    "percent and format codes": "%s%n{0}{x!r}${y}.wav",
    "a backslash": "a\\b.wav",
    "html": "<img src=x onerror=alert(1)>.wav",
    "emoji and accents": "🎤 naïve Ünïcödé 中文.wav",
    "accents in two parts": "e\u0301.wav",
    "255 bytes": "x" * 251 + ".wav",
    "a comma": "a,b.wav",
    "a hash": "#a.wav",
    "a json fragment": '","duration":99,"x":".wav',
    "only dots": "....wav",
    "an invisible letter": "a\u200b\ufeffb.wav",
    "the line separator of unicode": "a\u2028b\x85c.wav",
}
UNDECODABLE = b"caf\xe9 \xff.wav"


def file_of(name: str | bytes, folder: str = "odd") -> Setup:
    def setup(root: Path) -> None:
        shutil.copy(Fixture.path / "model.nemo", root)
        (root / folder).mkdir(parents=True)
        target = os.fsencode(root / folder) + b"/" + (name if isinstance(name, bytes) else name.encode())
        shutil.copyfile(os.fsencode(root / "audio/0.wav"), target)

    return setup


def round_trip(folder: Path, command: list[str]) -> str | None:
    """Prepare, inspect, extract from the manifest, and train: the file is found under its name each time."""
    made = in_fork(["prepare", "odd", "--output", "m.jsonl", "--workers", "0"], folder, {}, 60)
    if wrong := bad_output(made) or (f"prepare: {made.message}" if made.code else None):
        return wrong
    lines = lines_of(folder / "m.jsonl")
    if len(lines) != 1 or lines[0]["duration"] != 1.6:
        return f"the manifest has {lines}"
    for words in (
        ["inspect", "m.jsonl", "--batch-size", "1"],
        ["extract", "model.nemo", "m.jsonl", "out", "--device", "cpu"],
    ):
        outcome = in_fork(words, folder, {}, 60)
        if wrong := bad_output(outcome) or (f"{words[0]}: {outcome.message}" if outcome.code else None):
            return wrong
        if words[0] == "inspect" and re.search(r"No such file|cannot be opened|unreadable", outcome.text):
            return f"inspect does not find it: {outcome.text[-300:]}"
    line = lines_of(folder / "out/manifest.jsonl")[0]
    if (
        line["audio_filepath"] != lines[0]["audio_filepath"]
        and Path(line["audio_filepath"]).name != Path(lines[0]["audio_filepath"]).name
    ):
        return f"extract calls it {line['audio_filepath']!r}"
    if not np.array_equal(np.load(folder / "out" / line["feature_filepath"]), Fixture.feature()):
        return "other features"
    if wrong := page_faults(folder / "inspect.html"):
        return wrong
    keys = ("batch_size=1", "manifest_filepath=m.jsonl")
    outcome = in_fork(pretrain(*(f"model.train_ds.{key}" for key in keys), "trainer.max_steps=1"), folder, {}, 60)
    if wrong := bad_output(outcome):
        return wrong
    if outcome.code or list(folder.rglob("bad_files_train*")):
        return f"training does not find it: {outcome.message[-300:]}"
    return trained(folder, outcome)


def bad_output(outcome: Outcome) -> str | None:
    """The harness looks at the last command only; here are several."""
    if outcome.code is None:
        return "it does not end"
    if "Traceback (most recent call last)" in outcome.text:
        return "a traceback"
    if found := re.search(r"[\x00-\x08\x0b\x0c\x0e-\x1f\x7f-\x9f\u202a-\u202e\u2066-\u2069]", outcome.text):
        return f"a control code {found[0]!r} in the output"
    return None


# ---------------------------------------------------------------------------------------------------------------- pages


class Page(html.parser.HTMLParser):
    """Notes what could act: handlers, scripts with foreign content, things that load from elsewhere."""

    def __init__(self) -> None:
        super().__init__()
        self.acts: list[str] = []
        self.in_script = False

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.in_script = tag == "script"
        for key, value in attrs:
            loads = key in {"src", "href", "action"} and re.match(r"\s*(javascript|https?):", value or "", re.I)
            if key.startswith("on") or loads:
                self.acts.append(f"{tag} {key}={value}")

    def handle_endtag(self, tag: str) -> None:
        self.in_script = False

    def handle_data(self, data: str) -> None:
        if self.in_script and "alert(1)" in data:
            self.acts.append(f"script {data[:40]}")


def page_faults(path: Path) -> str | None:
    text = path.read_text()
    page = Page()
    page.feed(text)
    if page.acts:
        return f"{path.name} acts: {page.acts[:2]}"
    return f"{path.name} has control codes" if re.search(r"[\x00-\x08\x0b\x0c\x0e-\x1f\x7f]", text) else None


def page(name: str, *words: str) -> Check:
    def check(folder: Path, outcome: Outcome) -> str | None:
        found = list(folder.rglob(name))
        if len(found) != 1:
            return f"{len(found)} pages"
        text = found[0].read_text()
        missing = [word for word in words if word not in text]
        return f"not on the page: {missing}" if missing else page_faults(found[0])

    return check


def in_run(file: str, content: str) -> Setup:
    def setup(folder: Path) -> None:
        Fixture.run(folder)
        (folder / RUN / "report.html").unlink()
        (folder / RUN / file).write_text(content)

    return setup


def metrics(header: str, cell: str) -> Setup:
    """A column and a cell of somebody else's in metrics.csv."""

    def setup(folder: Path) -> None:
        Fixture.run(folder)
        (folder / RUN / "report.html").unlink()
        path = folder / RUN / "metrics.csv"
        with path.open(newline="") as file:
            table = list(csv.reader(file))
        with path.open("w", newline="") as file:
            csv.writer(file).writerows([[*table[0], header], *([*row, cell] for row in table[1:])])

    return setup


def steps_of(value: str) -> Setup:
    """The steps of the last three rows are something else."""

    def setup(folder: Path) -> None:
        Fixture.run(folder)
        (folder / RUN / "report.html").unlink()
        path = folder / RUN / "metrics.csv"
        lines = path.read_text().splitlines()
        lines[-3:] = [value + line[line.index(",") :] for line in lines[-3:]]
        path.write_text("\n".join(lines) + "\n")

    return setup


def valid_is(path: str) -> Setup:
    """The settings of the run name something else as validation data."""

    def setup(folder: Path) -> None:
        Fixture.run(folder)
        (folder / RUN / "report.html").unlink()
        settings = folder / RUN / "hparams.yaml"
        settings.write_text(settings.read_text().replace("valid.jsonl", path))

    return setup


def moved_run(name: str) -> Setup:
    def setup(folder: Path) -> None:
        Fixture.run(folder)
        (folder / RUN / "report.html").unlink()
        (folder / RUN).rename(folder / "runs" / name)

    return setup


REPORT = ["report", str(RUN)]
PAGES: dict[str, tuple[list[str], Setup, Expected]] = {
    "a column with a script": (REPORT, metrics(SCRIPT, "1.5"), Right(page("report.html"))),
    "cells with a script": (REPORT, metrics("note", SCRIPT), Right(page("report.html"))),
    "a cell of 1e400": (REPORT, metrics("huge", "1e400"), Right(page("report.html"))),
    "a commit with a script and codes": (REPORT, in_run("git-commit.txt", SCRIPT + ESCAPE), Right(page("report.html"))),
    "a commit of 5 MB": (REPORT, in_run("git-commit.txt", "x " * 2_500_000), Right(page("report.html"))),
    "settings with a script": (
        REPORT,
        in_run("hparams.yaml", f"name: '{SCRIPT}'\nmodel: {{'\"><img src=x onerror=alert(1)>': 1}}\n"),
        Right(page("report.html")),
    ),
    "settings that run python": (
        REPORT,
        in_run("hparams.yaml", "name: !!python/object/apply:os.system ['touch ../pwned']\n"),
        Right(page("report.html")),
    ),
    "metrics that are no table": (
        REPORT,
        in_run("metrics.csv", "\x00\x01\x02" * 1000),
        Either(Refused(("metrics.csv",)), Right(page("report.html"))),
    ),
    "a run called by a script": (
        ["report", f"runs/{SCRIPT.replace('/', '')}"],
        moved_run(SCRIPT.replace("/", "")),
        Right(page("report.html")),
    ),
    "a run called by codes": (["report", f"runs/{ESCAPE}"], moved_run(ESCAPE), Right(page("report.html"))),
    "a page into a folder that is not there": (
        [*REPORT, "--output", "new/place/r.html"],
        Fixture.run,
        Either(Refused(("new",)), Right(page("r.html"))),
    ),
    "a page over the metrics": ([*REPORT, "--output", f"{RUN}/metrics.csv"], Fixture.run, Refused(("metrics.csv",))),
    "steps that are no numbers": (REPORT, steps_of("abc"), Right(page("report.html"))),
    "steps of 20 digits": (REPORT, steps_of("99999999999999999999"), Right(page("report.html"))),
    "negative steps": (REPORT, steps_of("-5"), Right(page("report.html"))),
    "settings that name /dev/zero": (REPORT, valid_is("/dev/zero"), Right(page("report.html"))),
    "settings that name a pipe": (
        REPORT,
        both(valid_is("pipe"), lambda folder: os.mkfifo(folder / "pipe")),
        Right(page("report.html")),
    ),
    "doctor: settings that are no yaml": (
        ["doctor", str(RUN)],
        in_run("hparams.yaml", "\t{]"),
        Right(lambda folder, outcome: None, codes=(0, 1)),
    ),
    "doctor: a run called by codes": (
        ["doctor", f"runs/{ESCAPE}"],
        moved_run(ESCAPE),
        Right(lambda folder, outcome: None, codes=(0, 1)),
    ),
    "inspect: a manifest called by a script": (
        ["inspect", "<b onclick=alert(1)>.jsonl"],
        lambda folder: shutil.copy(folder / "train.jsonl", folder / "<b onclick=alert(1)>.jsonl"),
        Right(page("inspect.html")),
    ),
    "inspect: a manifest called by codes": (
        ["inspect", f"{ESCAPE}.jsonl"],
        lambda folder: shutil.copy(folder / "train.jsonl", folder / f"{ESCAPE}.jsonl"),
        Right(page("inspect.html")),
    ),
    "inspect: a page that ends in a slash": (
        ["inspect", "train.jsonl", "--output", "page/"],
        lambda folder: None,
        Either(Refused(("page",)), Right(lambda folder, outcome: page_faults(folder / "page"))),
    ),
}

# --------------------------------------------------------------------------------------------------------- runs by name


def run_named(name: str) -> Check:
    """The run is in a folder of this name below `runs`, and its model is there and can be read."""

    def check(folder: Path, outcome: Outcome) -> str | None:
        run = folder / "runs" / name
        if not (run / "metrics.csv").is_file():
            return f"the run is in {only_run(folder).relative_to(folder)}"
        found = list(run.glob("checkpoints/*.nemo"))
        if len(found) != 1:
            return f"{len(found)} models"
        after = in_fork(["info", str(found[0])], folder, {}, 60)
        if after.code:
            return f"the model cannot be read: {after.message[-200:]}"
        again = in_fork(command_of(name), folder, {}, 60)
        if again.code or "resumed at step" not in again.text:
            return f"it cannot be resumed: {again.message[-200:]}"
        return page_faults(run / "report.html")

    return check


def command_of(name: str) -> list[str]:
    quoted = name.replace("'", "\\'")
    return pretrain(f"exp_manager.name='{quoted}'", "trainer.max_steps=2")


RUNS: dict[str, tuple[str, Expected]] = {
    "spaces and quotes": ("my 'first' \"run\"", Right(run_named("my 'first' \"run\""))),
    "emoji": ("läuft 🎉 中文", Right(run_named("läuft 🎉 中文"))),
    "a script": ("<svg onload=alert(1)>", Either(Refused(("name",)), Right(run_named("<svg onload=alert(1)>")))),
    "a format code": ("run {val_loss:.2f} %s %d", Right(run_named("run {val_loss:.2f} %s %d"))),
    "shell": (
        "$(touch pwned);`touch pwned`",
        Either(Refused(("name",)), Right(run_named("$(touch pwned);`touch pwned`"))),
    ),
    "equals signs and commas": ("lr=5,wd=1", Right(run_named("lr=5,wd=1"))),
    "a subfolder": ("group/run", Either(Refused(("name",)), Right(run_named("group/run")))),
    "a line end": ("a\nb", Either(Refused(("name",)), Right(run_named("a\nb")))),
    "codes for the terminal": (ESCAPE, Either(Refused(("name",)), Right(run_named(ESCAPE)))),
    "from right to left": (BIDI, Either(Refused(("name",)), Right(run_named(BIDI)))),
    "the folder above": ("..", Refused(("name",))),
    "out of the folder": ("../../escape", Refused(("name",))),
    "an absolute path": ("/tmp/h_hostile_run", Refused(("name",))),
    "nothing": ("", Refused(("name",))),
    "a dot": (".", Refused(("name",))),
    "200 letters": ("n" * 200, Either(Refused(("name",)), Right(run_named("n" * 200)))),
    "300 letters": ("n" * 300, Refused(("name",))),
    "10,000 letters": ("n" * 10_000, Refused(("name",))),
    "a zero byte, written out": ("a\\x00b", Either(Refused(("name",)), Right(run_named("a\\x00b")))),
    "a dash": ("--help", Right(run_named("--help"))),
}

# ------------------------------------------------------------------------------------------------------ validation sets


def sets(*names: str) -> Setup:
    def setup(folder: Path) -> None:
        lines = lines_of(folder / "valid.jsonl")
        absolute = [{**line, "audio_filepath": str(folder / line["audio_filepath"])} for line in lines]
        for i, name in enumerate(names):
            (folder / name).parent.mkdir(exist_ok=True)
            write_lines(folder / name, absolute[i : i + 2])

    return setup


def columns(count: int) -> Check:
    """metrics.csv is a proper table with so many columns for validation sets, each with its own values."""

    def check(folder: Path, outcome: Outcome) -> str | None:
        table = rows(only_run(folder))
        found = [name for name in table[0] if name and name.endswith("_val_loss")]
        if len(found) != count:
            return f"columns {found}"
        if any(None in row or None in row.values() for row in table):
            return "rows of different lengths"
        empty = [name for name in found if not any(row[name] for row in table)]
        return f"without values: {empty}" if empty else trained(folder, outcome)

    return check


VALIDATION: dict[str, tuple[tuple[str, str], Expected]] = {
    "two of one name": (("a/dev.jsonl", "b/dev.jsonl"), Either(Refused(("dev",)), Right(columns(2)))),
    "quotes": (("a'b.jsonl", 'c"d.jsonl'), Right(columns(2))),
    "a line end": (("a\nb.jsonl", "c.jsonl"), Either(Refused(("jsonl",)), Right(columns(2)))),
    "codes for the terminal": ((f"{ESCAPE}.jsonl", "c.jsonl"), Either(Refused(("jsonl",)), Right(columns(2)))),
    "a formula of a spreadsheet": (("=1+1.jsonl", "c.jsonl"), Right(columns(2))),
    "names that are the same when cleaned": (("a b.jsonl", "a_b.jsonl"), Right(columns(2))),
    "endings that differ": (("dev.jsonl", "dev.json"), Either(Refused(("dev",)), Right(columns(2)))),
}


def of_sets(names: tuple[str, str]) -> list[str]:
    quoted = ",".join("'" + name.replace("'", "\\'") + "'" for name in names)
    return pretrain(f"model.validation_ds.manifest_filepath=[{quoted}]")


# --------------------------------------------------------------------------------------------------------------- labels


def labels(first: Any, second: Any, key: str = "label") -> Setup:
    def setup(folder: Path) -> None:
        shutil.copy(Fixture.path / "model.nemo", folder)
        lines = lines_of(folder / "train.jsonl")
        write_lines(folder / "p.jsonl", [{**line, key: (first, second)[i % 2]} for i, line in enumerate(lines)])

    return setup


def drawn(first: str, second: str) -> Check:
    """results.json has the labels as they are; the pictures are XML, and nothing in them acts."""

    def check(folder: Path, outcome: Outcome) -> str | None:
        found = (folder / "out/results.json").read_text()
        if any(
            json.dumps(label) not in found and json.dumps(label, ensure_ascii=False) not in found
            for label in (first, second)
        ):
            return "results.json does not have the labels"
        for name in ("confusion.svg", "layer_weights.svg"):
            text = (folder / "out" / name).read_text()
            ElementTree.fromstring(text)
            if wrong := page_faults(folder / "out" / name):
                return wrong
            if len(text) > 2_000_000:
                return f"{name} has {len(text)} bytes"
        return None

    return check


def either_label(first: str, second: str) -> Either:
    return Either(Refused(("label|p.jsonl",)), Right(drawn(first, second)))


LABELS: dict[str, tuple[str, str, Expected]] = {
    "html": ("<svg onload=alert(1)>", "a&b", Right(drawn("<svg onload=alert(1)>", "a&b"))),
    "emoji, from right to left": ("😀", "عربي", Right(drawn("😀", "عربي"))),
    "codes for the terminal": (ESCAPE, "b", either_label(ESCAPE, "b")),
    "a zero byte": ("a\x00b", "b", either_label("a\x00b", "b")),
    "10,000 letters": ("x" * 10_000, "b", either_label("x" * 10_000, "b")),
    "line ends": ("a\nb", "a\r\nb", either_label("a\nb", "a\r\nb")),
    "the same but for a space": ("a", "a ", either_label("a", "a ")),
    "half a surrogate pair": ("\ud800", "b", either_label("\ud800", "b")),
    "the mark-up of the table": ("[red]x[/red]", "[/]", Right(drawn("[red]x[/red]", "[/]"))),
}

# --------------------------------------------------------------------------------------------------------------- others


def same_names(folder: Path) -> None:
    """a/x.wav and b/x.wav, and names that are equal when slashes and dots are replaced."""
    shutil.copy(Fixture.path / "model.nemo", folder)
    for i, name in enumerate(("a/x.wav", "b/x.wav", "a_x.wav", "b/x.flac.wav", "b_x_flac.wav", "a/x_wav.wav")):
        (folder / "odd" / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(folder / f"audio/{i}.wav", folder / "odd" / name)


def six_members(folder: Path, outcome: Outcome) -> str | None:
    """Every line of the shards' manifests names a member of its own, with the bytes of its file."""
    with tarfile.open(folder / "audio_0.tar") as archive:
        members = {member.name: member.size for member in archive.getmembers()}
        contents = {name: archive.extractfile(name).read() for name in members}  # type: ignore[union-attr]
    lines = lines_of(folder / "sharded_manifests/manifest_0.json")
    if len(members) != 6 or len({line["audio_filepath"] for line in lines}) != 6:
        return f"{len(members)} members, {len(lines)} lines"
    sizes = {line["audio_filepath"]: round(line["duration"] * 16000) * 2 + 44 for line in lines}
    wrong = [name for name, size in sizes.items() if len(contents.get(name, b"")) != size]
    return f"other content: {wrong}" if wrong else None


def six_features(folder: Path, outcome: Outcome) -> str | None:
    lines = lines_of(folder / "out/manifest.jsonl")
    files = {line["feature_filepath"] for line in lines}
    counts = {line["num_frames"] for line in lines}
    return None if len(files) == 6 and len(counts) > 3 else f"{len(files)} files for {len(lines)} utterances"


def listed(content: str | bytes) -> Setup:
    return lambda folder: (folder / "list.txt").write_bytes(content.encode() if isinstance(content, str) else content)


def count(good: int, bad: int = 0) -> Check:
    def check(folder: Path, outcome: Outcome) -> str | None:
        found = [len(lines_of(path)) if path.exists() else 0 for path in (folder / "m.jsonl", folder / "m.bad.jsonl")]
        return None if found == [good, bad] else f"{found[0]} good, {found[1]} bad"

    return check


def one_or_two(folder: Path, outcome: Outcome) -> str | None:
    return count(1)(folder, outcome) and count(2)(folder, outcome)


def is_there(name: str) -> Right:
    return Right(lambda folder, outcome: None if (folder / name).is_file() else "it is not there")


def model(folder: Path) -> None:
    shutil.copy(Fixture.path / "model.nemo", folder)


def readable(path: str) -> Check:
    def check(folder: Path, outcome: Outcome) -> str | None:
        after = in_fork(["info", path], folder, {}, 60)
        return None if after.code == 0 else f"it cannot be read: {after.message[-200:]}"

    return check


def in_emoji(folder: Path) -> None:
    (folder / "dätä 🎤").mkdir()
    shutil.copy(folder / "train.jsonl", folder / "dätä 🎤/m.jsonl")


LIST = ["prepare", "list.txt", "--output", "m.jsonl", "--workers", "0"]
OTHERS: dict[str, tuple[list[str], Setup | None, Expected]] = {
    "prepare: the same names in several folders": (
        ["prepare", "odd", "--output", "m.jsonl", "--shards", "1", "--workers", "0"],
        same_names,
        Right(six_members),
    ),
    "extract: the same names in several folders": (
        ["extract", "model.nemo", "odd", "out", "--device", "cpu"],
        same_names,
        Right(six_features),
    ),
    "prepare: a list with windows line ends": (LIST, listed("audio/0.wav\r\naudio/1.wav\r\n"), Right(count(2))),
    "prepare: a list with blank lines": (LIST, listed("\naudio/0.wav\n\n\naudio/1.wav\n \n"), Right(count(2))),
    "prepare: a list with a byte order mark": (LIST, listed("\ufeffaudio/0.wav\naudio/1.wav\n"), Right(count(2))),
    "prepare: a list with quotes": (
        LIST,
        listed('"audio/0.wav"\naudio/1.wav\n'),
        Either(Refused(("list.txt",)), Right(count(1, 1))),
    ),
    "prepare: a list with one path twice": (LIST, listed("audio/0.wav\naudio/0.wav\n"), Right(one_or_two)),
    "prepare: a list of codes": (LIST, listed(f"{ESCAPE}.wav\naudio/0.wav\n"), Right(count(1, 1))),
    "prepare: a list in utf-16": (LIST, listed("audio/0.wav\naudio/1.wav\n".encode("utf-16")), Refused(("list.txt",))),
    "prepare: a list of commands": (
        LIST,
        listed("touch ../pwned |\n|touch ../pwned\naudio/0.wav\n"),
        Right(count(1, 2)),
    ),
    "prepare: an output called by codes": (
        ["prepare", "audio", "--output", f"{ESCAPE}.jsonl", "--workers", "0"],
        None,
        is_there(f"{ESCAPE}.jsonl"),
    ),
    "prepare: an output with braces": (
        ["prepare", "audio", "--output", "m_{0..1}.jsonl", "--workers", "0"],
        None,
        Either(Refused(("m_",)), is_there("m_{0..1}.jsonl")),
    ),
    "prepare: an output of 300 letters": (
        ["prepare", "audio", "--output", "m" * 300 + ".jsonl", "--workers", "0"],
        None,
        Refused(("mmm",)),
    ),
    "prepare: an output of 250 letters": (
        ["prepare", "audio", "--output", "m" * 244 + ".jsonl", "--workers", "0"],
        None,
        Either(Refused(("mmm",)), is_there("m" * 244 + ".jsonl")),
    ),
    "export: spaces and emoji": (
        ["export", "model.nemo", "my 🎉 model.safetensors", "--format", "safetensors"],
        model,
        Right(readable("my 🎉 model.safetensors")),
    ),
    "export: into a folder that is not there": (
        ["export", "model.nemo", "new/deep/m.nemo", "--format", "nemo"],
        model,
        Either(Refused(("new",)), Right(readable("new/deep/m.nemo"))),
    ),
    "export: no ending": (
        ["export", "model.nemo", "noending", "--format", "nemo"],
        model,
        Either(Refused(("noending|.nemo",)), Right(readable("noending"))),
    ),
    "export: the wrong ending": (
        ["export", "model.nemo", "m.onnx", "--format", "safetensors"],
        model,
        Either(Refused(("m.onnx",)), Right(readable("m.onnx"))),
    ),
    "info: a name of codes": (["info", f"{ESCAPE}{BIDI}.nemo"], None, Refused()),
    "extract: a model named by codes": (
        ["extract", f"{ESCAPE}.nemo", "audio", "out", "--device", "cpu"],
        None,
        Refused(),
    ),
    "a key of codes": (pretrain(f"model.{ESCAPE}=1"), None, Refused()),
    "a value of codes": (pretrain(f"model.optim.name='{ESCAPE}'"), None, Refused(("optim.name",))),
    "a command of codes": ([ESCAPE], None, Refused()),
    "a value of 1 MB": (pretrain("model.optim.name=" + "x" * 100_000), None, Refused(("optim.name",))),
    "the mark-up of messages": (
        pretrain("model.optim.name='[bold red]x[/bold]'"),
        None,
        Refused(("[bold red]x[/bold]",)),
    ),
    "the mark-up of a path": (["inspect", "[/red][link=x]m.jsonl"], None, Refused(("[/red][link=x]m.jsonl",))),
    "a manifest with a comma in its name": (
        pretrain("model.train_ds.manifest_filepath='a,b.jsonl'"),
        lambda folder: shutil.copy(folder / "train.jsonl", folder / "a,b.jsonl"),
        Either(Refused(("a: no such manifest",)), Right(trained)),
    ),
    "a manifest in a folder of emoji": (
        pretrain("model.train_ds.manifest_filepath='dätä 🎤/m.jsonl'"),
        in_emoji,
        Right(trained),
    ),
    "a folder of runs in the home folder": (
        ["pretrain", *TINY[:-2], "exp_manager.exp_dir=~/runs", "exp_manager.name=run"],
        None,
        Either(
            Refused(("~",)), Right(lambda folder, outcome: "a folder called ~" if (folder / "~").exists() else None)
        ),
    ),
    "a folder of runs with quotes": (
        ["pretrain", *TINY[:-2], 'exp_manager.exp_dir="it\'s here"', "exp_manager.name=run"],
        None,
        Right(said("it's here")),
    ),
    "demo: a folder of emoji": (
        [
            "demo",
            "--data-dir",
            "dätä 🎤",
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
        None,
        Right(
            lambda folder, outcome: None if len(lines_of(folder / "dätä 🎤/train.jsonl")) == 2 else "not two utterances"
        ),
    ),
    "a label key that is not there, of codes": (
        [
            "probe",
            "model.nemo",
            "--train",
            "p.jsonl",
            "--test",
            "p.jsonl",
            "--label",
            ESCAPE,
            "--output",
            "out",
            "--device",
            "cpu",
        ],
        both(model, labels("a", "b")),
        Refused(("p.jsonl:1",)),
    ),
    "a label key that is the path": (
        [
            "probe",
            "model.nemo",
            "--train",
            "p.jsonl",
            "--test",
            "p.jsonl",
            "--label",
            "audio_filepath",
            "--output",
            "out",
            "--device",
            "cpu",
        ],
        labels("a", "b"),
        Either(Refused(("audio_filepath|class",)), Right(lambda folder, outcome: None)),
    ),
}


def trials() -> Iterator[Trial]:
    for name, file in FILES.items():
        yield Trial(GROUP, f"file: {name}", [], Right(trained), file_of(file), act=round_trip)
    yield Trial(GROUP, "file: bytes that are no text", [], Right(trained), file_of(UNDECODABLE), act=undecodable)
    for name, (command, setup, expected) in PAGES.items():
        yield Trial(GROUP, f"page: {name}", command, expected, setup)
    for name, (run, expected) in RUNS.items():
        yield Trial(GROUP, f"run: {name}", command_of(run), expected)
    for name, (files, expected) in VALIDATION.items():
        yield Trial(GROUP, f"validation: {name}", of_sets(files), expected, sets(*files))
    for name, (first, second, expected) in LABELS.items():
        command = [
            "probe",
            "model.nemo",
            "--train",
            "p.jsonl",
            "--test",
            "p.jsonl",
            "--label",
            "label",
            "--output",
            "out",
        ]
        yield Trial(GROUP, f"label: {name}", [*command, "--device", "cpu"], expected, labels(first, second))
    for name, (command, before, expected) in OTHERS.items():
        yield Trial(GROUP, name, command, expected, before)


def undecodable(folder: Path, command: list[str]) -> str | None:
    """A name that is not UTF-8 is either used like any other, or listed as bad; nothing fails because of it."""
    shutil.copy(folder / "audio/1.wav", folder / "odd/good.wav")
    made = in_fork(["prepare", "odd", "--output", "m.jsonl", "--workers", "0"], folder, {}, 60)
    if wrong := bad_output(made) or (f"prepare: {made.message}" if made.code else None):
        return wrong
    lines = lines_of(folder / "m.jsonl")
    bad = lines_of(folder / "m.bad.jsonl") if (folder / "m.bad.jsonl").exists() else []
    if len(lines) + len(bad) != 2:
        return f"{len(lines)} good and {len(bad)} bad"
    outcome = in_fork(["extract", "model.nemo", "m.jsonl", "out", "--device", "cpu"], folder, {}, 60)
    if wrong := bad_output(outcome) or (f"extract: {outcome.message}" if outcome.code else None):
        return wrong
    done = len(lines_of(folder / "out/manifest.jsonl"))
    return None if done == len(lines) else f"features of {done} of {len(lines)} files"
