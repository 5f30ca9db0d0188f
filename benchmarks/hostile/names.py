"""Names and texts: of files, folders, runs, manifest fields, speakers and labels, as they are shown and written."""

from __future__ import annotations

import json
import os
import re
import shutil
import tarfile
import unicodedata
import xml.etree.ElementTree as ElementTree
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import soundfile
from benchmarks.hostile.harness import (
    RATE,
    RUN,
    Check,
    Either,
    Fixture,
    Outcome,
    Refused,
    Right,
    Setup,
    Trial,
    both,
    ended_well,
    in_fork,
    losses,
    pretrain,
    resume,
    said,
    same_features,
    speech,
    trained,
    write_lines,
)

ESC = "\x1b]0;owned\x07\x1b[2J\x1b[31mred"
TURNED = "a\u202egpj.wav"
LONG = "n" * 251 + ".wav"
BYTES = os.fsdecode(b"caf\xe9.wav")
SCRIPT = "</script><script>alert(1)</script><img src=x onerror=alert(1)>"


def no(*words: str) -> Refused:
    return Refused(words)


def model(folder: Path) -> None:
    shutil.copy(Fixture.path / "model.nemo", folder)


def lines_of(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def audio_named(*names: str) -> Setup:
    """A folder `in` with audio of these names, each with its own content, and the manifest in.jsonl."""

    def setup(folder: Path) -> None:
        lines = []
        for number, name in enumerate(names):
            path = folder / "in" / name
            path.parent.mkdir(parents=True, exist_ok=True)
            samples = speech(int(RATE * (1.5 + 0.25 * number)), number)
            with path.open("wb") as file:
                soundfile.write(file, samples, RATE, format="WAV")
            lines.append({"audio_filepath": f"in/{name}", "duration": len(samples) / RATE})
        write_lines(folder / "in.jsonl", lines)

    return setup


def fields(*changes: dict[str, Any]) -> Setup:
    """Change fields of the first lines of the manifest for training."""

    def setup(folder: Path) -> None:
        lines = lines_of(folder / "train.jsonl")
        for line, change in zip(lines, changes, strict=False):
            line.update(change)
        write_lines(folder / "train.jsonl", lines)

    return setup


def all_fields(*changes: dict[str, Any]) -> Setup:
    """Change fields of all lines, with these changes in turn."""
    return fields(*[changes[i % len(changes)] for i in range(8)])


def moved(old: str, new: str) -> Setup:
    def setup(folder: Path) -> None:
        (folder / new).parent.mkdir(parents=True, exist_ok=True)
        (folder / old).rename(folder / new)

    return setup


def prepared(number: int, bad: int = 0, manifest: str = "m.jsonl") -> Check:
    """So many utterances, each once; each path leads to audio of that duration; the rest is listed as bad."""

    def check(folder: Path, outcome: Outcome) -> str | None:
        lines = lines_of(folder / manifest)
        paths = {line["audio_filepath"] for line in lines}
        if len(lines) != number or len(paths) != number:
            return f"{len(lines)} lines with {len(paths)} paths, expected {number}"
        for line in lines:
            path = (folder / manifest).parent / line["audio_filepath"]
            if not path.exists():
                return f"{line['audio_filepath']!r} does not lead to a file"
            with path.open("rb") as file:
                seconds = soundfile.info(file).duration
            if abs(seconds - line["duration"]) > 0.01:
                return f"{line['audio_filepath']!r}: {line['duration']} s, the file has {seconds} s"
        listed = folder / manifest.replace(".jsonl", ".bad.jsonl")
        found = len(lines_of(listed)) if listed.exists() else 0
        return None if found == bad else f"{found} bad files are listed, expected {bad}"

    return check


def features(number: int) -> Check:
    """So many utterances in the manifest of features, each with a file of its own that can be read."""

    def check(folder: Path, outcome: Outcome) -> str | None:
        lines = lines_of(folder / "out/manifest.jsonl")
        arrays = {}
        for line in lines:
            name = line["feature_filepath"]
            places = [folder / name, folder / "out" / name]
            path = next((place for place in places if place.is_file()), None)
            if path is None:
                return f"{name!r} is not there"
            if folder / "out" not in path.resolve().parents:
                return f"{name!r} is outside the folder"
            array = np.load(path)
            arrays[path] = array
            if not np.isfinite(array).all() or array.shape[-1] != line["num_frames"]:
                return f"{name!r}: {array.shape}, num_frames {line['num_frames']}"
        return None if len(lines) == len(arrays) == number else f"{len(lines)} lines, {len(arrays)} files"

    return check


def in_tars(number: int) -> Check:
    """All utterances are in the shards, under names of their own without a way out, with the right length."""

    def check(folder: Path, outcome: Outcome) -> str | None:
        members: dict[str, int] = {}
        for path in folder.glob("audio_*.tar"):
            with tarfile.open(path) as tar:
                for member in tar:
                    if member.name.startswith("/") or ".." in Path(member.name).parts or not member.isfile():
                        return f"a member {member.name!r}"
                    if member.name in members:
                        return f"two members {member.name!r}"
                    members[member.name] = member.size
        lines = lines_of(folder / "tarred_audio_manifest.json")
        unknown = [line["audio_filepath"] for line in lines if line["audio_filepath"] not in members]
        if unknown:
            return f"not in the shards: {unknown[:2]}"
        sizes = sorted(members.values())
        if len(lines) != number or len(members) != number or len(set(sizes)) != number:
            return f"{len(lines)} lines, {len(members)} members, {len(set(sizes))} different ones"
        return None

    return check


def run_in(name: str) -> Check:
    """The run is in a folder of this name below `runs`, and nowhere else; it has trained and saved."""

    def check(folder: Path, outcome: Outcome) -> str | None:
        found = [path.parent for path in folder.rglob("metrics.csv")]
        if found != [folder / "runs" / name]:
            return f"runs in {found}"
        nemos = list((found[0] / "checkpoints").glob("*.nemo"))
        return f"{len(nemos)} .nemo files" if len(nemos) != 1 else trained(folder, outcome)

    return check


def harmless(page: str) -> Check:
    """The page is there, and has no markup from names."""

    def check(folder: Path, outcome: Outcome) -> str | None:
        text = (folder / page).read_text(errors="replace")
        found = [mark for mark in ("<script>alert(1)", "<img src=x", "onerror=alert(1)>") if mark in text]
        return f"markup in {page}: {found}" if found or len(text) < 1000 else None

    return check


def drawn(folder: Path, outcome: Outcome) -> str | None:
    """The pictures of a probe are well-formed, and there are results."""
    for path in (folder / "out").glob("*.svg"):
        text = path.read_text()
        ElementTree.fromstring(text)
        if "<script>" in text:
            return f"a script in {path.name}"
    results = json.loads((folder / "out/results.json").read_text())
    return None if 0 <= results["encoder"]["accuracy"] <= 1 else "no accuracy"


def twice(name: str) -> Callable[[Path, list[str]], str | None]:
    """Six steps, then four more with the same name: the losses are those of the run that was never interrupted."""

    def act(folder: Path, command: list[str]) -> str | None:
        for limit in ("trainer.max_steps=6", "trainer.max_steps=10"):
            outcome = in_fork([*command, limit], folder, {}, 60)
            if outcome.code != 0:
                return f"exit code {outcome.code}: {outcome.message[-300:]}"
        if "resumed at step" not in outcome.text:
            return "it does not say that it resumed"
        run = folder / "runs" / name
        if losses(run) != losses(Fixture.path / "runs/whole"):
            return "losses differ from the undisturbed run"
        best = [path.name for path in (run / "checkpoints").glob("*.ckpt") if "val_loss" in path.name]
        return None if len(best) == 1 else f"best checkpoints, one is to be kept: {best}"

    return act


def prepare(*options: str) -> list[str]:
    return ["prepare", "in", "--output", "m.jsonl", "--workers", "0", *options]


def extract(*what: str) -> list[str]:
    return ["extract", "model.nemo", *(what or ("in.jsonl", "out")), "--device", "cpu"]


def named(name: str) -> list[str]:
    return pretrain(f"exp_manager.name={name}")


Row = tuple[str, Sequence[str], Refused | Right | Either, Setup | None]

NFC, NFD = (unicodedata.normalize(form, "käse.wav") for form in ("NFC", "NFD"))
FOUR = ("a.wav", "b.wav", "c.wav", "d.wav")


def best_checkpoint() -> str:
    """A name such as run--val_loss=4.1-epoch=1-step=6.ckpt."""
    return next(path.name for path in (Fixture.path / RUN / "checkpoints").glob("*val_loss=*.ckpt"))


def loop_of_links(folder: Path) -> None:
    audio_named("x/a.wav", *FOUR[1:])(folder)
    (folder / "in/x/again").symlink_to("..")
    (folder / "in/gone.wav").symlink_to("nowhere.wav")


def pipe(folder: Path) -> None:
    audio_named(*FOUR)(folder)
    os.mkfifo(folder / "in/pipe.wav")


def lists_paths(folder: Path) -> None:
    """A list from Windows: a byte order mark, carriage returns, backslashes, a blank line."""
    audio_named(*FOUR)(folder)
    text = "".join(f"in\\{name}\r\n" for name in FOUR) + "\r\n"
    (folder / "list.txt").write_bytes(b"\xef\xbb\xbf" + text.encode())


def secret(folder: Path) -> None:
    """A corpus whose manifest leads out of its folder, and through a link to a text that is not audio."""
    audio_named(*FOUR)(folder)
    (folder / "secret.txt").write_text("password=hunter2\n")
    (folder / "in/e.wav").symlink_to("../secret.txt")


def run_named(name: str) -> Setup:
    def setup(folder: Path) -> None:
        Fixture.run(folder)
        (folder / RUN).rename(folder / "runs" / name)

    return setup


def hparams_with(text: str) -> Setup:
    """Someone else's run, with a text in place of its name, everywhere."""

    def setup(folder: Path) -> None:
        Fixture.run(folder)
        path = folder / RUN / "hparams.yaml"
        changed = re.sub(r"(?m)^(\s*name:) run$", lambda match: f"{match[1]} {json.dumps(text)}", path.read_text())
        assert json.dumps(text) in changed
        path.write_text(changed)

    return setup


def scripts(folder: Path) -> None:
    """The audio of training and validation has markup in its names (without a slash), and in other fields."""
    name = SCRIPT.replace("/", "\u2215")
    (folder / "audio/0.wav").rename(folder / "audio" / f"<img src=x onerror=alert(1)>{name}.wav"[:200])
    for manifest in ("train.jsonl", "valid.jsonl"):
        lines = lines_of(folder / manifest)
        lines[0]["audio_filepath"] = "audio/" + f"<img src=x onerror=alert(1)>{name}.wav"[:200]
        write_lines(folder / manifest, [{**line, "speaker": SCRIPT, "text": SCRIPT} for line in lines])


def probe(*options: str) -> list[str]:
    data = ("--train", "train.jsonl", "--test", "train.jsonl", "--label", "label")
    return ["probe", "model.nemo", *data, "--output", "out", "--device", "cpu", *options]


PREPARES: list[Row] = [
    (
        "audio files with line ends and tabs in their names",
        prepare(),
        Right(prepared(2)),
        audio_named("a\nb.wav", "c\td\r.wav"),
    ),
    ("audio files whose names clear the screen", prepare(), Right(prepared(1)), audio_named(f"{ESC}.wav")),
    (
        "damaged audio whose name clears the screen",
        prepare(),
        Right(prepared(1, bad=1)),
        both(audio_named("a.wav"), lambda folder: (folder / f"in/{ESC}.wav").write_text("no audio")),
    ),
    ("audio files whose names turn the writing", prepare(), Right(prepared(2)), audio_named(TURNED, "\u2066b.wav")),
    ("an audio file with the longest possible name", prepare("--shards", "1"), Right(in_tars(1)), audio_named(LONG)),
    ("audio files whose names begin with dashes", prepare(), Right(prepared(2)), audio_named("-rf.wav", "--help.wav")),
    (
        "audio files whose names are patterns",
        prepare(),
        Right(prepared(4)),
        audio_named("a{0..3}.wav", "b_OP_0..3_CL_.wav", "c*[0-9]?.wav", "d,e.wav"),
    ),
    (
        "audio files whose names are templates",
        prepare(),
        Right(prepared(3)),
        audio_named("%s%n%d.wav", "{0.__class__}.wav", "${oc.env:HOME}$(id)`id`.wav"),
    ),
    (
        "audio files whose names are rich markup",
        prepare(),
        Right(prepared(2)),
        audio_named("[bold red]a[-b].wav", "[link=x]c.wav"),
    ),
    (
        "audio files with a backslash in their names",
        prepare(),
        Either(Refused(("back",)), Right(prepared(2))),
        audio_named("a\\b.wav", "a/b.wav"),
    ),
    ("two audio files whose names look the same", prepare("--shards", "2"), Right(in_tars(2)), audio_named(NFC, NFD)),
    (
        "audio files of the same name in several folders",
        prepare("--shards", "2"),
        Right(in_tars(4)),
        audio_named("x/a.wav", "y/a.wav", "x_a.wav", "x/y/a.wav"),
    ),
    (
        "audio files whose names have many dots",
        prepare("--shards", "2"),
        Right(in_tars(3)),
        audio_named("a.b.c.wav", "a.b.wav", "a.wav"),
    ),
    ("a folder with the name of an audio file", prepare(), Right(prepared(2)), audio_named("x.wav/a.wav", "b.wav")),
    ("a folder with a link to its own parent", prepare(), Right(prepared(4, bad=1)), loop_of_links),
    ("a pipe with the name of an audio file", prepare(), Right(prepared(4, bad=1)), pipe),
    (
        "a list of paths from a Windows editor",
        ["prepare", "list.txt", "--output", "m.jsonl", "--workers", "0"],
        Right(prepared(4)),
        lists_paths,
    ),
    ("a link in a corpus to a text that is not audio", prepare("--shards", "1"), Right(prepared(4, bad=1)), secret),
    (
        "a manifest to write whose name clears the screen",
        ["prepare", "in", "--output", f"{ESC}.jsonl", "--workers", "0"],
        Either(no("owned"), Right(prepared(4, manifest=f"{ESC}.jsonl"))),
        audio_named(*FOUR),
    ),
    (
        "a manifest to write on top of the audio",
        ["prepare", "in", "--output", "in/a.wav", "--workers", "0"],
        no("a.wav"),
        audio_named(*FOUR),
    ),
    (
        "speakers that are numbers, lists and nothing",
        [
            "prepare",
            "train.jsonl",
            "--output",
            "m.jsonl",
            "--split",
            "folder",
            "--valid-share",
            "0.5",
            "--workers",
            "0",
        ],
        Either(no("speaker"), Right(prepared(8))),
        fields(
            {"speaker": 1},
            {"speaker": "1"},
            {"speaker": None},
            {"speaker": ["a"]},
            {"speaker": {"a": 1}},
            {"speaker": ""},
            {"speaker": "x" * 10000},
            {"speaker": ESC},
        ),
    ),
]

MANIFESTS: list[Row] = [
    (
        "a manifest line whose missing file clears the screen",
        pretrain(),
        Right(said("owned")),
        fields({"audio_filepath": f"audio/{ESC}.wav"}),
    ),
    (
        "a manifest line with a zero byte in its path",
        pretrain(),
        Either(no("train.jsonl"), Right(said("0"))),
        fields({"audio_filepath": "audio/0\0.wav"}),
    ),
    (
        "a manifest line with half a character in its path",
        pretrain(),
        Either(no("train.jsonl"), Right(said("No such file"))),
        fields({"audio_filepath": "audio/\ud83d.wav"}),
    ),
    (
        "a manifest line with a path of ten thousand letters",
        pretrain(),
        Either(no("train.jsonl"), Right(said("too long"))),
        fields({"audio_filepath": "x" * 10_000 + ".wav"}),
    ),
    (
        "a manifest line that names an endless device",
        pretrain(),
        Either(no("/dev/zero"), Right(said("/dev/zero"))),
        fields({"audio_filepath": "/dev/zero"}),
    ),
    (
        "a manifest line with an address on the web",
        pretrain(),
        Either(no("http"), Right(said("example.invalid"))),
        fields({"audio_filepath": "http://example.invalid/a.wav"}),
    ),
    (
        "a manifest whose name has commas, which mean a list",
        pretrain("model.train_ds.manifest_filepath='a,b.jsonl'"),
        Either(no("a"), Right(trained)),
        moved("train.jsonl", "a,b.jsonl"),
    ),
    (
        "a manifest whose name has braces, which mean a pattern",
        pretrain("model.train_ds.manifest_filepath='a{0..1}.jsonl'"),
        Either(no("a0.jsonl|a{0"), Right(trained)),
        moved("train.jsonl", "a{0..1}.jsonl"),
    ),
    (
        "a missing manifest whose name clears the screen",
        pretrain(f"model.train_ds.manifest_filepath='{ESC}'"),
        no("owned"),
        None,
    ),
    (
        "a pattern of a billion manifests",
        pretrain("model.train_ds.manifest_filepath='a{0..999999999}.jsonl'"),
        no("a0|a{0"),
        None,
    ),
]

RUNS: list[Row] = [
    (
        "a run whose name leads out of the folder",
        named("../../outside"),
        Either(no("name"), Right(run_in("outside"))),
        None,
    ),
    (
        "a run whose name is an absolute path",
        named("{folder}/elsewhere"),
        Either(no("name|elsewhere"), Right(trained)),
        None,
    ),
    ("a run whose name is empty", named("''"), Either(no("name"), Right(trained)), None),
    ("a run whose name clears the screen", named(f"'{ESC}'"), Either(no("name"), Right(run_in(ESC))), None),
    (
        "a run whose name is too long for a checkpoint",
        named("r" * 240),
        Either(no("name|rrr"), Right(run_in("r" * 240))),
        None,
    ),
    (
        "a run whose name is a commit that looks like a number",
        named("12e4567"),
        Either(no("name"), Right(run_in("12e4567"))),
        None,
    ),
    ("a run whose name begins with zeros", named("007"), Either(no("name"), Right(run_in("007"))), None),
    (
        "a run whose name is a template of a checkpoint",
        named("'{epoch}-{nope:d}%s'"),
        Either(no("name|nope"), Right(run_in("{epoch}-{nope:d}%s"))),
        None,
    ),
    ("resumed from a best checkpoint, whose name has signs", ["RESUME"], Right(trained), Fixture.run),
]

OTHERS: list[Row] = [
    ("features of audio with the longest possible name", extract(), Right(features(1)), audio_named(LONG)),
    (
        "features of audio of the same name in two folders",
        extract(),
        Right(features(3)),
        audio_named("x/a.wav", "y/a.wav", "x/y/a.wav"),
    ),
    (
        "features of audio whose name clears the screen",
        extract("in", "out"),
        Right(features(1)),
        audio_named(f"{ESC}.wav"),
    ),
    (
        "features of lines that bring names of features along",
        extract("train.jsonl", "out"),
        Right(features(8)),
        all_fields({"feature_filepath": "../../../stolen.npy", "num_frames": -1}),
    ),
    (
        "features of a model with brackets and spaces in its name",
        ["extract", "my model [1]{0..1}.nemo", "audio/0.wav", "out", "--device", "cpu"],
        Right(same_features),
        moved("model.nemo", "my model [1]{0..1}.nemo"),
    ),
    ("a model to read whose name clears the screen", ["info", f"{ESC}.nemo"], no("owned"), None),
    (
        "a model exported on top of itself",
        ["export", "model.nemo", "model.nemo", "--format", "nemo"],
        Either(no("model.nemo"), Right(ended_well)),
        None,
    ),
    (
        "the report of a run with markup in its name",
        ["report", str(RUN)],
        Right(harmless("runs/run/report.html")),
        hparams_with(SCRIPT),
    ),
    (
        "the report of a run with brackets in its folder",
        ["report", "runs/[1] a&b"],
        Right(harmless("runs/[1] a&b/report.html")),
        run_named("[1] a&b"),
    ),
    (
        "an inspection of audio with markup in its name",
        ["inspect", "train.jsonl"],
        Right(harmless("inspect.html")),
        scripts,
    ),
    (
        "a run to explain whose name clears the screen",
        ["doctor", f"runs/{ESC}"],
        Right(ended_well, codes=(0, 1)),
        run_named(ESC),
    ),
    (
        "labels with markup and control codes",
        probe(),
        Right(drawn),
        all_fields({"label": SCRIPT}, {"label": f"{ESC}&<"}),
    ),
    ("labels of ten thousand letters", probe(), Right(drawn), all_fields({"label": "a" * 10_000}, {"label": "b"})),
    (
        "labels that are a number and the same in quotes",
        probe(),
        Either(no("label"), Right(drawn)),
        all_fields({"label": 1}, {"label": "1"}, {"label": "2"}, {"label": 2}),
    ),
]


def trials() -> list[Trial]:
    group = "names"
    best = best_checkpoint()
    found = []
    for name, command, expected, setup in (*PREPARES, *MANIFESTS, *RUNS, *OTHERS):
        words = list(command)
        if words == ["RESUME"]:
            words = resume(f"exp_manager.resume_from_checkpoint={RUN}/checkpoints/{best}", "exp_manager.name=new")
            expected = Either(no("resume_from_checkpoint|val_loss="), Right(said("resumed at step", then=ended_well)))
        if any("model.nemo" in word for word in words) or "my model" in name or "brackets and spaces" in name:
            setup = both(model, setup) if setup else model
        found.append(Trial(group, name, words, expected, setup))
    found += [
        Trial(
            group,
            "a run whose name has brackets is resumed",
            resume("exp_manager.name='a[1] *b'"),
            Right(ended_well),
            act=twice("a[1] *b"),
        ),
        Trial(
            group,
            "a run named like a best checkpoint is resumed",
            resume("exp_manager.name='x--val_loss=0.1-epoch=9-step=9'"),
            Right(ended_well),
            act=twice("x--val_loss=0.1-epoch=9-step=9"),
        ),
        Trial(
            group,
            "a run with the name of the last checkpoint is resumed",
            resume("exp_manager.name=last"),
            Right(ended_well),
            act=twice("last"),
        ),
        Trial(
            group,
            "an audio file whose name is not UTF-8",
            prepare(),
            Either(Refused(("caf",)), Right(prepared(1, bad=1))),
            audio_named("a.wav", BYTES),
            own_process=True,
        ),
        Trial(
            group,
            "features of a folder with a name that is not UTF-8",
            extract("in", "out"),
            Right(features_or_named, codes=(0, 1)),
            both(model, audio_named("a.wav", BYTES)),
            own_process=True,
        ),
        Trial(
            group,
            "a best checkpoint, whose name has signs, is shown",
            ["info", f"{RUN}/checkpoints/{best}"],
            Right(said("encoder", then=ended_well)),
            Fixture.run,
        ),
    ]
    return found


def features_or_named(folder: Path, outcome: Outcome) -> str | None:
    """Features of both files, or of the one, and the other is named as bad."""
    if outcome.code == 0:
        return features(2)(folder, outcome)
    return features(1)(folder, outcome) or (None if "caf" in outcome.text else "the bad file is not named")
