"""Names and texts: of files, folders, runs, validation sets, speakers and labels, as they are shown and written.

A name must reach files and pages as it is, but never a terminal as a control code, a page as
markup, or a path as a way out. That control codes stay out of the output and the log is a rule of the harness.
"""

from __future__ import annotations

import itertools
import json
import math
import os
import shutil
import tarfile
from collections.abc import Sequence
from pathlib import Path
from xml.etree import ElementTree

import numpy as np
from benchmarks.hostile.harness import (
    RUN,
    Either,
    Expected,
    Fixture,
    Outcome,
    Refused,
    Right,
    Setup,
    Trial,
    only_run,
    pretrain,
    rows,
    same_features,
    trained,
    write_lines,
)

ESCAPE = "\x1b[31m\x1b]0;owned\x07"
TURNED = "speech\u202evaw."
MARKUP = "<img src=x onerror=alert(1)>"
ODD = [
    *(" space .wav", "new\nline.wav", f"escape{ESCAPE}.wav", f"{TURNED}wav", "[bold]x[].wav", "100%s{0}$HOME`id`.wav"),
    *("quote\"'&<b>.wav", "back\\slash.wav", "-rf.wav", "語音 🎤.wav"),
]
TEXT = {"text": "a\u2028b\t\"'\\ 🎤 <b>", "number": 2**70, "nested": {"a": [1, None, True]}, "empty": ""}
"""Keys of other programs, which are kept."""
EXTRACT = ("--device", "cpu")
PROBE = ["probe", "model.nemo", "--train", "t.jsonl", "--test", "t.jsonl", "--label", "label", "--output", "probe"]

# --------------------------------------------------------------------------------------------------------------- set-up


def model(folder: Path, name: str = "model.nemo") -> None:
    (folder / name).parent.mkdir(exist_ok=True)
    shutil.copy(Fixture.path / "model.nemo", folder / name)


def copies(*names: str | bytes) -> Setup:
    """The model, and a folder `in` with different audio under these names."""

    def setup(folder: Path) -> None:
        model(folder)
        for i, name in enumerate(names):
            target = os.path.join(os.fsencode(folder / "in"), os.fsencode(name))
            os.makedirs(os.path.dirname(target), exist_ok=True)
            shutil.copy(os.fsencode(folder / f"audio/{i % 8}.wav"), target)

    return setup


def manifest(name: str, keys: Sequence[dict[str, object]] = ({},) * 8) -> Setup:
    """The model, and a manifest of this name of a line for each of these, in turn for the eight files."""

    def setup(folder: Path) -> None:
        model(folder)
        lines = [json.loads(line) for line in (folder / "train.jsonl").read_text().splitlines()]
        (folder / name).parent.mkdir(exist_ok=True)
        for line in lines:
            line["audio_filepath"] = str(folder / line["audio_filepath"])
        write_lines(folder / name, [{**line, **more} for line, more in zip(itertools.cycle(lines), keys, strict=False)])

    return setup


def named_run(name: str) -> Setup:
    """The fixture's run in a folder of another name, which is in its configuration, too."""

    def setup(folder: Path) -> None:
        shutil.copytree(Fixture.path / RUN, folder / "runs" / name)
        settings = folder / "runs" / name / "hparams.yaml"
        settings.write_text(settings.read_text().replace("valid.jsonl", json.dumps(f"{name}.jsonl")[1:-1]))
        shutil.copy(folder / "valid.jsonl", folder / f"{name}.jsonl")

    return setup


def two_of_a_name(folder: Path) -> None:
    for i, place in enumerate(("a", "b")):
        manifest(f"{place}/valid.jsonl", ({},) * (2 + i))(folder)


# -------------------------------------------------------------------------------------------------------- what is right


def lines_of(path: Path) -> list[dict[str, object]]:
    return [json.loads(line) for line in path.read_text().split("\n") if line] if path.exists() else []


def all_listed(folder: Path, outcome: Outcome) -> str | None:
    """Every file is in the manifest under a path that opens, or among the bad ones."""
    good, bad = lines_of(folder / "m.jsonl"), lines_of(folder / "m.bad.jsonl")
    there = len(os.listdir(folder / "in"))
    if len(good) + len(bad) != there:
        return f"{len(good)} good and {len(bad)} bad of {there} files"
    lost = [line for line in good if not (folder / str(line["audio_filepath"])).is_file()]
    return f"paths that do not open: {lost[:2]}" if lost else None


def all_good(folder: Path, outcome: Outcome) -> str | None:
    return all_listed(folder, outcome) or ("bad files" if lines_of(folder / "m.bad.jsonl") else None)


def features_of(number: int) -> Right:
    """Each file has features of its own length, at the place that the manifest says."""

    def check(folder: Path, outcome: Outcome) -> str | None:
        lines = lines_of(folder / "out/manifest.jsonl")
        places = {str(line["feature_filepath"]) for line in lines}
        if len(lines) != number or len(places) != number:
            return f"{len(lines)} lines and {len(places)} feature files of {number}"
        for line in lines:
            found = next((p for p in (folder / "out", folder) if (p / str(line["feature_filepath"])).is_file()), None)
            if found is None:
                return f"no file {line['feature_filepath']}"
            if np.load(found / str(line["feature_filepath"])).shape[-1] != line["num_frames"]:
                return f"other frames than stated: {line}"
        return None

    return Right(check)


def keys_kept(name: str) -> Right:
    def check(folder: Path, outcome: Outcome) -> str | None:
        for line in lines_of(folder / name) or [{}]:
            if lost := {key: line.get(key) for key, value in TEXT.items() if line.get(key) != value}:
                return f"{name}: other values than in the input: {lost}"
        return None

    return Right(check)


def page_without_markup(name: str) -> Right:
    def check(folder: Path, outcome: Outcome) -> str | None:
        page = next(folder.rglob(name)).read_text()
        return "markup of a name is in the page as it is" if MARKUP in page else None

    return Right(check)


def run_named(name: str) -> Right:
    """The run is in `runs/NAME`, trained, with a model of that name."""

    def check(folder: Path, outcome: Outcome) -> str | None:
        if not (folder / "runs" / name / f"checkpoints/{name}.nemo").is_file():
            return f"no model in {sorted(str(path) for path in folder.glob('runs/*/checkpoints/*'))}"
        return trained(folder, outcome)

    return Right(check)


def inside(folder: Path, outcome: Outcome) -> str | None:
    """The one run is below `runs`."""
    run = only_run(folder)
    return trained(folder, outcome) if folder / "runs" in run.parents else f"the run is in {run}"


def probed(*labels: str) -> Right:
    """The pictures are XML, and the results have these labels."""

    def check(folder: Path, outcome: Outcome) -> str | None:
        for name in ("confusion.svg", "layer_weights.svg"):
            ElementTree.parse(folder / "probe" / name)
        content = json.dumps(json.loads((folder / "probe/results.json").read_text()), ensure_ascii=False)
        missing = [label for label in labels if json.dumps(label, ensure_ascii=False) not in content]
        return f"labels not in results.json: {missing}" if missing else None

    return Right(check)


def two_columns(folder: Path, outcome: Outcome) -> str | None:
    """Two validation sets have a column each, and their losses differ."""
    last = [row for row in rows(only_run(folder)) if row["val_loss"]][-1]
    values = {key: value for key, value in last.items() if key.endswith("_val_loss")}
    if len(values) != 2 or not all(value and math.isfinite(float(value)) for value in values.values()):
        return f"losses of the sets: {values}"
    return f"the same loss twice: {values}" if len(set(values.values())) == 1 else None


def speakers_apart(folder: Path, outcome: Outcome) -> str | None:
    """No speaker is in both parts, and no utterance is lost."""
    train, valid = (lines_of(folder / f"m.{part}.jsonl") for part in ("train", "valid"))
    shared = {str(line["speaker"]) for line in train} & {str(line["speaker"]) for line in valid}
    if len(train) + len(valid) != 32:
        return f"{len(train)} and {len(valid)} of 32 utterances"
    return f"in both parts: {shared}" if shared else None


def three_members(folder: Path, outcome: Outcome) -> str | None:
    """A shard has three files of different names, whose bytes are those of the three inputs."""
    with tarfile.open(next(folder.rglob("audio_0.tar"))) as tar:
        members = [member for member in tar.getmembers() if member.isfile()]
        content = {b"".join(tar.extractfile(member) or []) for member in members}
    inputs = {path.read_bytes() for path in (folder / "in").rglob("*.wav")}
    if len({member.name for member in members}) != 3 or content != inputs:
        return f"members {[member.name for member in members]}"
    unsafe = [member.name for member in members if member.name.startswith("/") or ".." in member.name.split("/")]
    return f"names that leave the folder: {unsafe}" if unsafe else None


# ----------------------------------------------------------------------------------------------------------- the trials


def trials() -> list[Trial]:
    long_name, deep_name = "語" * 80 + ".wav", "x" * 250 + ".wav"
    prepare = ["prepare", "in", "--output", "m.jsonl", "--workers", "0"]
    labels: list[dict[str, object]] = [{"label": (f"a{ESCAPE}\x00", f"{MARKUP}&\"'")[i % 2]} for i in range(8)]
    mixed: list[dict[str, object]] = [{"label": (1, "1", "one")[i % 3]} for i in range(8)]
    lists: list[dict[str, object]] = [{"label": ["a", "b"]} for _ in range(8)]
    spoken = ["ana", "ANA", "ana ", "", f"b{ESCAPE}", "7", "a/b", "../a", "[red]", "語", "é", "e\u0301", *"wxyz"]
    voices: list[dict[str, object]] = [
        {"speaker": spoken[i // 2], "offset": 0.3 * (i // 8), "duration": 0.5} for i in range(32)
    ]
    kept: list[dict[str, object]] = [dict(TEXT) for _ in range(8)]
    run_long = "exp_manager.name=" + "n" * 300
    table: list[tuple[str, Sequence[str], Expected, Setup | None]] = [
        ("odd file names, prepared", prepare, Right(all_listed), copies(*ODD)),
        ("odd file names, extracted", ["extract", "model.nemo", "in", "out", *EXTRACT], features_of(10), copies(*ODD)),
        (
            "a file name that is no text",
            prepare,
            Either(Refused(("m.bad.jsonl",), partial=True), Right(all_listed)),
            copies(b"caf\xe9.wav", b"good.wav"),
        ),
        ("composed and decomposed letters", prepare, Right(all_good), copies("\xe9.wav", "e\u0301.wav")),
        (
            "equal but for case and folder",
            ["extract", "model.nemo", "in", "out", *EXTRACT],
            features_of(4),
            copies("a.wav", "A.wav", "b/a.wav", "b_a.wav"),
        ),
        (
            "shards of names that look alike",
            [*prepare, "--shards", "1"],
            Right(three_members),
            copies("a/b.wav", "a_b.wav", "a-b.wav"),
        ),
        (
            "names as long as the system allows",
            ["extract", "model.nemo", "in", "out", *EXTRACT],
            features_of(2),
            copies(long_name, deep_name),
        ),
        (
            "a missing file with tags of the terminal's library",
            ["extract", "model.nemo", "[red]x[/red][/].wav", "out", *EXTRACT],
            Refused(("[red]x[/red][/].wav",)),
            model,
        ),
        ("a missing model with control codes", ["info", f"mo{ESCAPE}del.nemo"], Refused(("del.nemo",)), None),
        ("a key with control codes", pretrain(f"model.o{ESCAPE}ptim=1"), Refused(("ptim",)), None),
        (
            "a model file with an odd name",
            ["extract", "mod\xe8le [v1] 100% #2.nemo", "audio/0.wav", "out", *EXTRACT],
            Right(same_features),
            lambda folder: model(folder, "mod\xe8le [v1] 100% #2.nemo"),
        ),
        (
            "a run with spaces and signs",
            pretrain("exp_manager.name='Büro 語 #2 100%'"),
            run_named("Büro 語 #2 100%"),
            None,
        ),
        (
            "a run whose name is markup, reported",
            ["report", f"runs/{MARKUP}"],
            page_without_markup("report.html"),
            named_run(MARKUP),
        ),
        (
            "a run name with control codes",
            pretrain(f"exp_manager.name='a{ESCAPE}b'"),
            Either(Refused(("name",)), Right(inside)),
            None,
        ),
        ("a run name of 300 letters", pretrain(run_long), Refused(("name",)), None),
        ("a run name that is a path", pretrain("exp_manager.name={folder}/elsewhere"), Refused(("name",)), None),
        (
            "a manifest whose name is markup, inspected",
            ["inspect", f"{MARKUP}.jsonl", "--examples", "1"],
            page_without_markup("inspect.html"),
            manifest(f"{MARKUP}.jsonl"),
        ),
        (
            "a manifest with a comma in its name",
            pretrain("model.train_ds.manifest_filepath='[\"one, two.jsonl\"]'".replace("'", "")),
            Either(Refused(("one",)), Right(trained)),
            manifest("one, two.jsonl"),
        ),
        (
            "two validation sets of one name",
            pretrain("model.validation_ds.manifest_filepath=[a/valid.jsonl,b/valid.jsonl]"),
            Right(two_columns),
            two_of_a_name,
        ),
        (
            "speakers with odd names",
            [
                "prepare",
                "s.jsonl",
                "--output",
                "m.jsonl",
                "--workers",
                "0",
                "--split",
                "folder",
                "--valid-share",
                "0.5",
            ],
            Right(speakers_apart),
            manifest("s.jsonl", voices),
        ),
        (
            "other keys, prepared",
            ["prepare", "t.jsonl", "--output", "m.jsonl", "--workers", "0"],
            keys_kept("m.jsonl"),
            manifest("t.jsonl", kept),
        ),
        (
            "other keys, extracted",
            ["extract", "model.nemo", "t.jsonl", "out", *EXTRACT],
            keys_kept("out/manifest.jsonl"),
            manifest("t.jsonl", kept),
        ),
        ("labels with markup and control codes", PROBE, probed(f"{MARKUP}&\"'"), manifest("t.jsonl", labels)),
        (
            "labels of two types",
            PROBE,
            Either(Refused(("t.jsonl",)), probed("one")),
            manifest("t.jsonl", mixed),
        ),
        ("labels that are lists", PROBE, Refused(("t.jsonl:1", "label")), manifest("t.jsonl", lists)),
    ]
    return [Trial("names", name, command, expected, setup) for name, command, expected, setup in table]
