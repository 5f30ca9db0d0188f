"""Manifests and their indexes, as spreadsheets, other tools, half copied folders and slips of the hand leave them.

A wrong line is named by file and number; what can be understood without doubt may be used instead.
"""

from __future__ import annotations

import gzip
import io
import json
import os
import shutil
import socket
import tarfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import soundfile
from benchmarks.hostile.harness import (
    RATE,
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
    disturbed,
    ended_well,
    flipped,
    in_fork,
    link,
    losses,
    nothing,
    on_bytes,
    pretrain,
    replaced,
    resume,
    said,
    same_features,
    trained,
    write_lines,
    zeros,
)

GROUP = "manifests"
TRAIN = Path("train.jsonl")
INDEX = Path("train.jsonl.idx")
ABSENT = object()
SEPARATORS = "one\u2028two\u0085three\u2029four"
PREPARE = ["prepare", "mine.jsonl", "--output", "m.jsonl", "--workers", "0"]
LISTED = ["prepare", "list.txt", *PREPARE[2:]]
EXTRACT = ["extract", "model.nemo", "one.jsonl", "out", "--device", "cpu"]
INSPECT = ["inspect", "train.jsonl", "--examples", "0"]
PROBE = [
    *("probe", "model.nemo", "--train", "train.jsonl", "--test", "train.jsonl", "--label", "label"),
    *("--device", "cpu", "--output", "probe"),
]
SHARDS = [
    *("model.train_ds.is_tarred=true", "model.train_ds.tarred_audio_filepaths=shards/audio__OP_0..1_CL_.tar"),
    "model.train_ds.manifest_filepath=shards/sharded_manifests/manifest__OP_0..1_CL_.json",
]
Row = tuple[str, Setup | None, Sequence[str], Expected]


# ------------------------------------------------------------------------------------------------------------- setting up


def read(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines() if line.strip()]


def text(change: Callable[[str], str | bytes], name: str = "train.jsonl") -> Setup:
    """Change a manifest's text."""

    def setup(folder: Path) -> None:
        new = change((folder / name).read_text())
        (folder / name).write_bytes(new if isinstance(new, bytes) else new.encode())

    return setup


def edited(line: int | None, *, name: str = "train.jsonl", ascii_only: bool = True, **keys: Any) -> Setup:
    """Change keys of one line (from 1), or of all of them; a function gets the old value."""

    def setup(folder: Path) -> None:
        lines = read(folder / name)
        for entry in lines if line is None else [lines[line - 1]]:
            for key, value in keys.items():
                if value is ABSENT:
                    entry.pop(key, None)
                else:
                    entry[key] = value(entry.get(key)) if callable(value) else value
        (folder / name).write_text("".join(json.dumps(entry, ensure_ascii=ascii_only) + "\n" for entry in lines))

    return setup


def renamed(old: str, new: str) -> Setup:
    return text(lambda content: content.replace(f'"{old}"', f'"{new}"'))


def raw_line(number: int, change: Callable[[str], str]) -> Setup:
    """Change the text of one line (from 1)."""

    def new(content: str) -> str:
        lines = content.split("\n")
        lines[number - 1] = change(lines[number - 1])
        return "\n".join(lines)

    return text(new)


def repeated(times: int) -> Setup:
    return text(lambda content: content * times)


def split_in_two(folder: Path) -> None:
    lines = read(folder / TRAIN)
    for number in (0, 1):
        write_lines(folder / f"m_{number}.jsonl", lines[4 * number : 4 * number + 4])


def as_mine(*changes: Setup) -> Setup:
    """The manifest under the name that `prepare` is given."""
    return both(*changes, lambda folder: shutil.move(folder / TRAIN, folder / "mine.jsonl"))


def model(folder: Path) -> None:
    shutil.copy(Fixture.path / "model.nemo", folder)


def ran(*command: str) -> Setup:
    """Run a command that must succeed, as a part of setting up."""

    def setup(folder: Path) -> None:
        outcome = in_fork(command, folder, {}, 120)
        if outcome.code != 0:
            raise RuntimeError(f"cannot set up: {command}: {outcome.text[-500:]}")

    return setup


def one(**keys: Any) -> Setup:
    """A manifest of one line, about a recording whose second second begins the speech of the fixture."""

    def setup(folder: Path) -> None:
        model(folder)
        samples, _ = soundfile.read(folder / "audio/0.wav", dtype="int16")
        soundfile.write(folder / "long.wav", np.concatenate([samples[:RATE], samples, samples[:RATE]]), RATE, "PCM_16")
        (folder / "one.jsonl").write_text(json.dumps({"audio_filepath": "long.wav", **keys}) + "\n")

    return setup


def labelled(*changes: Setup) -> Setup:
    def label(folder: Path) -> None:
        write_lines(folder / TRAIN, [{**line, "label": "ab"[i % 2]} for i, line in enumerate(read(folder / TRAIN))])

    return both(model, label, *changes)


def noise(*lines: dict[str, Any]) -> Setup:
    return lambda folder: write_lines(folder / "noise.jsonl", lines)


def indexed(change: Callable[[bytes], bytes] | None = None) -> Setup:
    """The manifest with its index, as an earlier run left them; the index's bytes are then changed."""

    def setup(folder: Path) -> None:
        for name in (TRAIN, INDEX):
            shutil.copy2(Fixture.path / name, folder / name)
        if change:
            on_bytes(change, INDEX)(folder)

    return setup


def restored(change: Callable[[str], str]) -> Setup:
    """The manifest is replaced by another from a backup, which is older than the index."""

    def setup(folder: Path) -> None:
        old = (folder / TRAIN).stat().st_mtime - 86_400
        text(change)(folder)
        os.utime(folder / TRAIN, (old, old))

    return both(indexed(), setup)


def sharded(*changes: Setup) -> Setup:
    shards = ("--shards", "2", "--shards-folder", "shards", "--workers", "0")
    return both(ran("prepare", "audio", "--output", "all.jsonl", *shards), *changes)


def packed_again(prefix: str = "", extra: str = "") -> Setup:
    """The second shard, packed again by another program: other names of members, or one more before each."""

    def setup(folder: Path) -> None:
        path = folder / "shards/audio_1.tar"
        with tarfile.open(path) as old:
            members = [(member.name, old.extractfile(member)) for member in old if member.isfile()]
            contents = [(name, file.read()) for name, file in members if file]
        with tarfile.open(path, "w") as new:
            for name, content in contents:
                junk = [(extra + name, b"\0\5\26\7" + bytes(100))] if extra else []
                for member, data in [*junk, (prefix + name, content)]:
                    info = tarfile.TarInfo(member)
                    info.size = len(data)
                    new.addfile(info, io.BytesIO(data))

    return setup


def swapped(folder: Path) -> None:
    first, second = (folder / f"shards/sharded_manifests/manifest_{number}.json" for number in (0, 1))
    content = first.read_bytes()
    first.write_bytes(second.read_bytes())
    second.write_bytes(content)


# ------------------------------------------------------------------------------------------------------- what is right


def bad_files(folder: Path) -> set[str]:
    return {Path(line["audio_filepath"]).name for path in folder.rglob("bad_files_*.jsonl") for line in read(path)}


def bad(*names: str) -> Check:
    """Trained, and exactly these files are recorded as bad."""

    def check(folder: Path, outcome: Outcome) -> str | None:
        found = bad_files(folder)
        return f"recorded as bad: {sorted(found)}" if found != set(names) else trained(folder, outcome)

    return check


all_good = bad()
eight = said("train.jsonl: 8 utterances", then=all_good)
BAD_LINE = Either(Refused(("train.jsonl:3",)), Right(bad("2.wav")))


def either(check: Check, *words: str) -> Either:
    return Either(Refused(words), Right(check))


def left_out(folder: Path, outcome: Outcome) -> str | None:
    """One utterance of the eight is left out, and the log says so, or it is recorded as bad."""
    words = outcome.text
    told = "train.jsonl: 7 utterances" in words and "left out" in words
    return trained(folder, outcome) if told or bad_files(folder) == {"2.wav"} else "an utterance is missing in silence"


def as_whole(folder: Path, outcome: Outcome) -> str | None:
    """Losses as with an undamaged index, in every run of the folder."""
    expected = losses(Fixture.path / "runs/whole")
    wrong = [path.parent.name for path in folder.rglob("metrics.csv") if losses(path.parent) != expected]
    return f"other losses than with an undamaged index: {wrong}" if wrong else None


def prepared(seconds: Sequence[float], bad_lines: int = 0) -> Check:
    """`m.jsonl` has utterances of these durations, as numbers, and so many bad ones."""

    def check(folder: Path, outcome: Outcome) -> str | None:
        found = [line["duration"] for line in read(folder / "m.jsonl")]
        if [round(value, 3) for value in found] != [round(value, 3) for value in seconds]:
            return f"durations {found}"
        rejected = read(folder / "m.bad.jsonl") if (folder / "m.bad.jsonl").exists() else []
        return f"{len(rejected)} bad lines" if len(rejected) != bad_lines else None

    return check


SECONDS = [1.6 + 0.1 * i for i in range(8)]
ALL_EIGHT = prepared(SECONDS)


def feature_lines(count: int) -> Check:
    """Every line of the input has its line in the output, with features that exist."""

    def check(folder: Path, outcome: Outcome) -> str | None:
        lines = read(folder / "out/manifest.jsonl")
        if len(lines) != count:
            return f"{len(lines)} lines for {count} of the input"
        for line in lines:
            path = Path(line["feature_filepath"])
            if not any((start / path).exists() for start in (folder, folder / "out")):
                return f"no file {path}"
        return None

    return check


def seven(folder: Path, outcome: Outcome) -> str | None:
    """All but the third line are prepared; that one is named with its number."""
    reasons = (folder / "m.bad.jsonl").read_text()
    return prepared(SECONDS[:2] + SECONDS[3:], 1)(folder, outcome) if "mine.jsonl:3" in reasons else reasons


# ------------------------------------------------------------------------------------------------------------- the rows


def whole_files() -> list[Row]:
    """What other programs make of a whole manifest."""
    header = "audio_filepath,duration\n"
    lfs = "version https://git-lfs.github.com/spec/v1\noid sha256:4d7a2146\nsize 12345\n"
    page = "<!DOCTYPE html>\n<html><body>Please log in to the cluster portal</body></html>\n"
    conflict = "<<<<<<< HEAD\n"

    def pretty(content: str) -> str:
        return json.dumps([json.loads(line) for line in content.splitlines()], indent=2)

    def columns(content: str) -> str:
        lines = [json.loads(line) for line in content.splitlines()]
        return json.dumps({key: {str(i): line[key] for i, line in enumerate(lines)} for key in lines[0]}) + "\n"

    def table(content: str) -> str:
        lines = [json.loads(line) for line in content.splitlines()]
        return header + "".join(f"{line['audio_filepath']},{line['duration']}\n" for line in lines)

    def conflicted(content: str) -> str:
        lines = content.splitlines(keepends=True)
        return "".join([*lines[:4], conflict, *lines[4:6], "=======\n", *lines[4:6], ">>>>>>> theirs\n", *lines[6:]])

    first, any_line = Refused(("train.jsonl:1",)), Refused(("train.jsonl",))
    table_of: list[tuple[str, Callable[[str], str | bytes], Expected]] = [
        ("saved as UTF-16 by a spreadsheet", lambda t: t.encode("utf-16"), either(eight, "train.jsonl")),
        ("byte order mark in front", lambda t: b"\xef\xbb\xbf" + t.encode(), either(eight, "train.jsonl:1")),
        ("line ends of Windows", lambda t: t.replace("\n", "\r\n"), Right(eight)),
        ("line ends of an old Mac", lambda t: t.replace("\n", "\r"), either(eight, "train.jsonl")),
        ("compressed with gzip", lambda t: gzip.compress(t.encode()), any_line),
        ("a pretty-printed JSON list", pretty, either(eight, "train.jsonl")),
        ("a JSON list on one line", lambda t: json.dumps(json.loads(pretty(t))), either(eight, "train.jsonl:1")),
        ("columns, as pandas writes them by default", columns, Refused(("train.jsonl:1", "audio_filepath"))),
        ("a table with commas", table, first),
        ("Python's quotes instead of JSON's", lambda t: t.replace('"', "'"), first),
        ("curly quotes from a word processor", lambda t: t.replace('"', "\u201d"), first),
        ("a git-lfs pointer", lambda t: lfs, first),
        ("marks of a merge conflict", conflicted, Refused(("train.jsonl:5",))),
        ("a log-in page instead of the download", lambda t: page, first),
        ("srun's labels in front of each line", lambda t: "".join(f"0: {line}\n" for line in t.splitlines()), first),
        ("two lines without a line end between", lambda t: t.replace("\n", "", 1), first),
        ("the copy was cut in the last line", lambda t: t[: len(t) - 20], Refused(("train.jsonl:8",))),
        ("a hole of zeros from a network disk", lambda t: t[:100] + "\0" * 64 + t[164:], Refused(("train.jsonl:2",))),
        ("a tail of zeros after a power cut", lambda t: t + "\0" * 4096, either(eight, "train.jsonl:9")),
        ("a comma after each line", lambda t: t.replace("\n", ",\n"), either(eight, "train.jsonl:1")),
        ("a comment on top", lambda t: "# corpus v3\n" + t, either(eight, "train.jsonl:1")),
        ("empty lines between all", lambda t: t.replace("\n", "\n\n"), either(eight, "train.jsonl:2")),
        ("blanks and tabs around each line", lambda t: " \t" + t.replace("\n", " \t\n \t"), Right(eight)),
        ("no line end at the end", lambda t: t[:-1], Right(eight)),
        ("nothing but line ends", lambda t: "\n\n\n", any_line),
        (
            "a text in Latin-1",
            lambda t: t.replace("}", ', "text": "\xe9t\xe9"}').encode("latin-1"),
            either(eight, ":1"),
        ),
        ("a text of 20 MB in one line", lambda t: t.replace("}", f', "text": "{"x" * 20_000_000}"}}', 1), Right(eight)),
    ]
    return [(name, text(change), pretrain(), expected) for name, change, expected in table_of]


def single_lines() -> list[Row]:
    """Values that a spreadsheet, a script or a wrong unit puts into lines."""
    milliseconds = edited(None, duration=lambda seconds: seconds * 1000)
    no_filter = ("model.train_ds.min_duration=null", "model.train_ds.max_duration=null")
    any_length = pretrain("model.train_ds.min_duration=0")
    duration, path = Refused(("train.jsonl:3", "duration")), Refused(("train.jsonl:3", "audio_filepath"))
    home = edited(None, audio_filepath=lambda name: f"~/{name}")
    return [
        ("a decimal comma", edited(3, duration="1,8"), pretrain(), duration),
        ("a duration as a clock shows it", edited(3, duration="00:00:01.8"), pretrain(), duration),
        ("a duration in exponents as text", edited(3, duration="1.8e0"), pretrain(), duration),
        ("a duration that is a list", edited(3, duration=[0, 1.8]), pretrain(), duration),
        ("a duration that is true", edited(3, duration=True), pretrain(), duration),
        ("a duration of null", edited(3, duration=None), pretrain(), duration),
        ("a duration of NaN from pandas", edited(3, duration=float("nan")), pretrain(), duration),
        ("a duration of Infinity", edited(3, duration=float("inf")), pretrain(*no_filter), duration),
        ("a duration of -1", edited(3, duration=-1), any_length, Either(duration, Right(left_out))),
        ("a duration of 0", edited(3, duration=0.0), any_length, Either(duration, Right(all_good))),  # 0: to the end
        ("durations in milliseconds", milliseconds, pretrain(), Refused(("train.jsonl", "max_duration"))),
        ("milliseconds without filters", milliseconds, pretrain(*no_filter), Refused(("0.wav", "truncated|duration"), partial=True)),
        ("a duration of 1e300", edited(3, duration=1e300), pretrain(*no_filter), BAD_LINE),
        ("no durations, no filters", edited(None, duration=ABSENT), pretrain(*no_filter), Right(all_good)),
        ("durations under another name", renamed("duration", "Duration"), pretrain(), Refused((":1", "duration"))),
        ("audio under another name", renamed("audio_filepath", "wav"), pretrain(), Refused((":1", "audio_filepath"))),
        ("audio_filename instead", renamed("audio_filepath", "audio_filename"), pretrain(), Right(eight)),
        ("one line without audio", edited(3, audio_filepath=ABSENT), pretrain(), path),
        ("audio of null", edited(3, audio_filepath=None), pretrain(), path),
        ("audio of NaN from pandas", edited(3, audio_filepath=float("nan")), pretrain(), path),
        ("a list of microphones", edited(3, audio_filepath=["audio/2.wav", "audio/3.wav"]), pretrain(), path),
        ("an empty path", edited(3, audio_filepath=""), pretrain(), Refused(("train.jsonl:3",))),
        ("a path with a line end behind it", edited(3, audio_filepath="audio/2.wav\n"), pretrain(), Either(
            Refused(("train.jsonl:3",)), Right(trained))),
        ("a line that is null", raw_line(3, lambda line: "null"), pretrain(), Refused(("train.jsonl:3",))),
        ("a line that is only a path", raw_line(3, lambda line: '"audio/2.wav"'), pretrain(), Refused(("train.jsonl:3",))),
        ("a negative offset", edited(3, offset=-0.5), pretrain(), BAD_LINE),
        ("an offset behind the end", edited(3, offset=100.0), pretrain(), Right(bad("2.wav"))),
        ("an offset in quotes", edited(3, offset="0.0"), pretrain(), either(eight, "train.jsonl:3", "offset")),
        ("an offset that is a list", edited(3, offset=[0.0]), pretrain(), Refused(("train.jsonl:3", "offset"))),
        ("offsets of null", edited(None, offset=None), pretrain(), either(eight, "train.jsonl:1", "offset")),
        ("offsets of NaN from pandas", edited(None, offset=float("nan")), pretrain(), either(eight, ":1", "offset")),
        ("separators of Unicode in a text", edited(None, ascii_only=False, text=SEPARATORS), pretrain(), Right(eight)),
        ("paths of Windows", edited(None, audio_filepath=lambda name: name.replace("/", "\\")), pretrain(), Right(eight)),
        ("paths on a drive of Windows", edited(None, audio_filepath=lambda name: f"D:\\data\\{name}"), pretrain(),
         Refused(("D:", "no such file"), partial=True)),
        ("paths in a bucket", edited(None, audio_filepath=lambda name: f"s3://corpus/{name}"), pretrain(),
         Refused(("s3://",), partial=True)),
        ("paths below the home folder", home, pretrain(), Either(Refused(("audio/0.wav",), partial=True), Right(eight))),
        ("one path is a folder", edited(3, audio_filepath="audio"), pretrain(), Right(bad("audio"))),
    ]  # fmt: skip


def where_they_are() -> list[Row]:
    """Where manifests and their audio are, and how a configuration names them."""

    def key(value: str, section: str = "train_ds", name: str = "manifest_filepath") -> list[str]:
        return pretrain(f"model.{section}.{name}={value}")

    def without(count: int) -> Setup:
        return both(*(replaced(nothing, Path(f"audio/{i}.wav")) for i in range(8 - count, 8)))

    def moved(folder: Path) -> None:
        (folder / "lists").mkdir()
        shutil.move(folder / TRAIN, folder / "lists/train.jsonl")

    def two_places(folder: Path) -> None:
        model(folder)
        (folder / "lists/audio").mkdir(parents=True)
        shutil.move(folder / "audio/0.wav", folder / "lists/audio/0.wav")
        shutil.copy(folder / "audio/5.wav", folder / "audio/0.wav")
        write_lines(folder / "lists/one.jsonl", [{"audio_filepath": "audio/0.wav", "duration": 1.6}])

    wrong_noise = both(repeated(4), noise({"audio_filepath": "gone/noise.wav", "duration": 5.0}))
    noisy = ["model.train_ds.noise_manifest=noise.jsonl", "model.train_ds.batch_augmentor.prob=1"]
    every_noise = pretrain(*noisy, "model.train_ds.batch_augmentor.noise_ratio=1", "trainer.max_steps=16")
    strict = pretrain("model.train_ds.max_bad_fraction=0.0001")
    both_sets = ["model.train_ds.is_concat=true"]
    no_valid = replaced(nothing, Path("valid.jsonl"))
    lost = edited(None, name="valid.jsonl", audio_filepath=lambda name: f"gone/{name}")
    short = edited(None, name="valid.jsonl", duration=0.3)
    return [
        ("moved away from its audio, started where it was", moved, key("lists/train.jsonl"), Right(eight)),
        ("two files of one name", two_places, [*EXTRACT[:2], "lists/one.jsonl", *EXTRACT[3:]], Right(same_features)),
        ("half of the audio is not yet copied", without(4), pretrain(),
         Right(bad("4.wav", "5.wav", "6.wav", "7.wav"))),
        ("no audio is copied", without(8), pretrain(), Refused(("No such file",), partial=True)),
        ("one file is gone, and none may be", without(1), strict, Refused(("7.wav", "max_bad_fraction"), partial=True)),
        ("noise with wrong paths", wrong_noise, every_noise, Refused(("noise",), partial=True)),
        ("an empty noise manifest", noise(), pretrain(*noisy), Refused(("noise.jsonl",))),
        ("noise without durations", noise({"audio_filepath": "audio/7.wav"}), pretrain(*noisy),
         either(all_good, "noise.jsonl:1", "duration")),
        ("noise with a wrong line", noise({"audio_filepath": 5}), pretrain(*noisy), Refused(("noise.jsonl:1",))),
        ("a folder instead of a manifest", None, key("audio"), Refused(("audio",))),
        ("a recording instead of a manifest", None, key("audio/0.wav"), Refused(("audio/0.wav",))),
        ("/dev/null instead of a manifest", None, key("/dev/null"), Refused(("/dev/null",))),
        ("a link to itself", replaced(link("train.jsonl"), TRAIN), pretrain(), Refused(("train.jsonl",))),
        ("a pipe that nobody writes to", replaced(os.mkfifo, TRAIN), pretrain(), Refused(("train.jsonl",))),
        ("a range with a gap", split_in_two, key("'m__OP_0..2_CL_.jsonl'"), Refused(("m_2.jsonl",))),
        ("a range from high to low", split_in_two, key('"m_{1..0}.jsonl"'), either(all_good, "m_{1..0}|m__OP|m_")),
        ("a range of words", split_in_two, key("m__OP_a..z_CL_.jsonl"), Refused(("a..z|m_a.jsonl|m_b.jsonl|m_c.jsonl",))),
        ("a range that does not close", split_in_two, key("m__OP_0..1.jsonl"), Refused(("m_{0..1.jsonl", "_CL_"))),
        ("a range with zeros too many", split_in_two, key("m__OP_0..99999999999_CL_.jsonl"), Refused(("m_",))),
        ("shards instead of manifests", sharded(), key("shards/audio__OP_0..1_CL_.tar"), Refused(("audio_0.tar",))),
        ("offsets in milliseconds", edited(None, offset=500, duration=1.0), pretrain(), Refused(("500",), partial=True)),
        ("buckets without durations", edited(None, duration=ABSENT), pretrain("model.train_ds.use_bucketing=true",
            "model.train_ds.num_buckets=2", "model.train_ds.min_duration=null", "model.train_ds.max_duration=null"),
         Refused(("duration",))),
        ("a wrong line, two workers", raw_line(3, lambda line: line[:-5]), pretrain("model.train_ds.num_workers=2"),
         Refused(("train.jsonl:3",))),
        ("a star of the shell", split_in_two, key("m_*.jsonl"), either(all_good, "m_*.jsonl")),
        ("blanks behind the comma of a list", split_in_two, key("'m_0.jsonl, m_1.jsonl'"), either(all_good, "m_1.jsonl")),
        ("a comma at the end of a list", split_in_two, key("'m_0.jsonl,m_1.jsonl,'"), either(all_good, "manifest")),
        ("an empty one among several", both(split_in_two, lambda f: (f / "m_1.jsonl").write_text("")),
         [*key("[m_0.jsonl,m_1.jsonl]"), *both_sets], Refused(("m_1.jsonl",))),
        ("a wrong line in the second of two", both(split_in_two, text(lambda t: "x\n" + t, "m_1.jsonl")),
         key("[m_0.jsonl,m_1.jsonl]"), Refused(("m_1.jsonl:1",))),
        ("a wrong line for validation", text(lambda t: t[:-20], "valid.jsonl"), pretrain(), Refused(("valid.jsonl:4",))),
        ("validation is gone, in a run to resume", both(Fixture.run, no_valid), resume(), Refused(("valid.jsonl",))),
        ("validation has no audio", lost, pretrain(), Refused(("gone", "No such file"), partial=True)),
        ("validation is too short", short, pretrain(), Refused(("valid.jsonl", "min_duration"))),
        ("the manifest is empty, in a run to resume", both(Fixture.run, text(lambda t: "")), resume(),
         Refused(("train.jsonl",))),
        ("the manifest has grown, in a run to resume", both(Fixture.run, repeated(3)), resume(),
         Right(said("resumed at step", "have changed since the checkpoint"))),
    ]  # fmt: skip


def other_commands() -> list[Row]:
    """The same mistakes with the commands that read manifests besides training."""
    quoted = as_mine(edited(None, duration=str, offset="0"))
    strange = as_mine(edited(None, ascii_only=False, text=SEPARATORS))
    paths = "".join(f"audio/{i}.wav\n" for i in range(8))
    same = ["prepare", "train.jsonl", "--output", "train.jsonl", "--workers", "0"]
    folder_in = ["prepare", "audio", "--output", "m.jsonl", "--workers", "0"]
    touched_up = both(ran(*folder_in), text(lambda t: t.replace("}", ', "text": "a"}'), "m.jsonl"))
    job = ran(*folder_in, "--job", "0/2")

    state, result = Path("m.jsonl.state"), Path("m.jsonl")
    left_behind: list[tuple[str, Setup]] = [
        ("its state is empty", on_bytes(always(b""), state)),
        ("its state is cut", on_bytes(cut(0.5), state)),
        ("its state is of zeros", on_bytes(zeros, state)),
        ("its state is lost", replaced(nothing, state)),
        ("its result is empty", on_bytes(always(b""), result)),
        ("its result is cut", on_bytes(cut(0.5), result)),
        ("its result is lost", replaced(nothing, result)),
    ]

    def copied(folder: Path) -> None:
        shutil.copy(folder / TRAIN, folder / "test.jsonl")

    def listed(content: bytes) -> Setup:
        return lambda folder: (folder / "list.txt").write_bytes(content)

    def strange_kept(folder: Path, outcome: Outcome) -> str | None:
        kept = [json.loads(line).get("text") for line in (folder / "m.jsonl").read_text().split("\n") if line]
        return None if kept == [SEPARATORS] * 8 else f"texts {kept[:2]}"

    segment = {"offset": 1.0, "duration": 1.6}
    twice = both(one(**segment), text(lambda t: t * 2, "one.jsonl"))
    two_segments = both(one(**segment), text(lambda t: t + t.replace("1.6", "0.8"), "one.jsonl"))
    features = Either(Refused(("one.jsonl:1|long.wav",), partial=True), Right(same_features))
    return [
        ("prepare: numbers in quotes", quoted, PREPARE, Right(ALL_EIGHT)),
        ("prepare: wrong durations", as_mine(edited(None, duration=99.0)), PREPARE, Either(
            Refused(("truncated", "m.bad.jsonl"), partial=True), Right(ALL_EIGHT))),
        ("prepare: separators of Unicode in a text", strange, PREPARE, Right(strange_kept)),
        ("prepare: a segment behind the end", as_mine(edited(8, offset=100.0, duration=1.0)), PREPARE,
         Right(prepared(SECONDS[:7], 1))),
        ("prepare: a wrong line", as_mine(raw_line(3, lambda line: line[:-5])), PREPARE, Right(seven)),
        ("prepare: a list with line ends of Windows", listed(paths.replace("\n", "\r\n").encode()), LISTED,
         Right(ALL_EIGHT)),
        ("prepare: a list with a byte order mark", listed(b"\xef\xbb\xbf" + paths.encode()), LISTED,
         either(ALL_EIGHT, "list.txt")),
        ("prepare: a list with empty lines", listed(paths.replace("\n", "\n\n").encode()), LISTED, Right(ALL_EIGHT)),
        ("prepare: an empty list", listed(b""), LISTED, Refused(("list.txt",))),
        ("prepare: output over its input", None, same, Refused(("train.jsonl",))),
        ("prepare: a result that was edited since", touched_up, folder_in, Refused(("m.jsonl", "--restart"))),
        ("prepare: merged before all jobs ran", job, [*folder_in, "--merge", "2"], Refused(("1",))),
        ("prepare: merged with another number of jobs", job, [*folder_in, "--merge", "3"], Refused(("job",))),
        ("prepare: jobs counted from one", None, [*folder_in, "--job", "2/2"], Refused(("--job|job",))),
        ("prepare: a share in percent", None, [*folder_in, "--split", "hash", "--valid-share", "20"],
         Refused(("--valid-share",))),
        ("extract: a segment of a file", one(**segment), EXTRACT, Right(same_features)),
        ("extract: an offset in quotes", one(offset="1.0", duration=1.6), EXTRACT, features),
        ("extract: an offset in samples", one(offset=16000, duration=25600), EXTRACT,
         Refused(("long.wav",), partial=True)),
        ("extract: the same segment twice", twice, EXTRACT, Right(feature_lines(2))),
        ("extract: two segments from one offset", two_segments, EXTRACT, Right(feature_lines(2))),
        ("extract: NaN beside it, from pandas", both(one(duration=float("nan"), offset=float("nan"))), EXTRACT,
         Right(feature_lines(1))),
        ("extract: a wrong line", both(one(), text(lambda t: t + "x\n", "one.jsonl")), EXTRACT,
         Refused(("one.jsonl:2",), partial=True)),
        ("inspect: a wrong line", raw_line(3, lambda line: line[:-5]), INSPECT, Refused(("train.jsonl:3",))),
        ("inspect: separators of Unicode", edited(None, ascii_only=False, text=SEPARATORS), INSPECT,
         Right(said("8 utterances", then=ended_well))),
        ("inspect: no durations at all", edited(None, duration=ABSENT), INSPECT,
         Either(Refused(("duration",)), Right(said("8 utterances", then=ended_well)))),
        ("probe: a line without the label", labelled(edited(3, label=ABSENT)), PROBE, Refused((":3", "label"))),
        ("probe: a label of NaN from pandas", labelled(edited(3, label=float("nan"))), PROBE, Refused((":3", "label"))),
        ("probe: labels as numbers, and as text in the test", both(labelled(edited(None, label=lambda label: "ab".index(label))), copied, edited(
            None, name="test.jsonl", label=str)), [*PROBE[:5], "test.jsonl", *PROBE[6:]], Either(
                Refused(("label",)), Right(said("2 classes", then=ended_well)))),
        *((f"prepare: {name}", both(ran(*folder_in), change), folder_in, Either(
            Refused(("m.jsonl", "--restart")), Right(ALL_EIGHT))) for name, change in left_behind),
        ("probe: one label for all", labelled(edited(None, label="a")), PROBE, Refused(("label",))),
    ]  # fmt: skip


def indexes() -> list[Row]:
    """Indexes that a full disk, a network disk or a copy of half a folder has left."""
    another: Callable[[bytes], bytes] = lambda data: (Fixture.path / "valid.jsonl.idx").read_bytes()  # noqa: E731

    def stand_in(make: Callable[[Path], object]) -> Setup:
        return both(indexed(), replaced(make, INDEX))

    same_size = restored(lambda t: t.replace("audio/7.wav", "audio/9.wav"))

    def dated(seconds: float) -> Setup:
        return lambda folder: os.utime(folder / TRAIN, (seconds, seconds))

    def rewritten(folder: Path) -> None:
        before = (folder / TRAIN).stat()
        text(lambda t: t.replace("audio/7.wav", "audio/9.wav"))(folder)
        os.utime(folder / TRAIN, ns=(before.st_atime_ns, before.st_mtime_ns))

    damaged = [
        ("a manifest of the year 2100", dated(4_102_444_800)),
        ("a manifest of 1970", dated(0)),
        ("a manifest of 1960", dated(-315_619_200)),
        ("empty", indexed(always(b""))),
        ("cut in half", indexed(cut(0.5))),
        ("cut by one byte", indexed(lambda data: data[:-1])),
        ("a bit is flipped at the beginning", indexed(flipped(0.02))),
        ("a bit is flipped in the middle", indexed(flipped(0.5))),
        ("a bit is flipped at the end", indexed(flipped(1.0))),
        ("all zeros", indexed(zeros)),
        ("the index of another manifest", indexed(another)),
        ("twice, one behind the other", indexed(lambda data: data * 2)),
        ("a folder of its name", stand_in(Path.mkdir)),
        ("a link to nowhere", stand_in(link("/nowhere/train.jsonl.idx"))),
        ("a link to itself", stand_in(link("train.jsonl.idx"))),
        ("a pipe of its name", stand_in(os.mkfifo)),
        ("a socket of its name", stand_in(lambda path: socket_at(path))),
    ]
    return [
        *((f"index: {name}", setup, resume(), Right(as_whole)) for name, setup in damaged),
        ("index: the manifest is older and shorter", restored(lambda t: "".join(t.splitlines(True)[:4])), pretrain(),
         Right(said("train.jsonl: 4 utterances"))),
        ("index: the manifest is older and as long", same_size, pretrain(), Right(bad("9.wav"))),
        ("index: the manifest is as old and as long", both(indexed(), rewritten), pretrain(),
         Either(Refused(("train.jsonl", "repeat")), Right(bad("9.wav")))),
    ]  # fmt: skip


def socket_at(path: Path) -> None:
    """A socket with a path; the path that it is bound to must be short."""
    before = Path.cwd()
    os.chdir(path.parent)
    with socket.socket(socket.AF_UNIX) as made:
        made.bind(path.name)
    os.chdir(before)


def shards() -> list[Row]:
    """Tar shards that were lost, cut, compressed, or packed by another program."""
    second = Path("shards/audio_1.tar")
    refused = Refused(("audio_1.tar",))
    part = Either(Refused(("audio_1",), partial=True), Right(said("audio_1")))
    rows: list[tuple[str, Setup, Expected]] = [
        ("one is missing", replaced(nothing, second), refused),
        ("one is empty", on_bytes(always(b""), second), part),
        ("one is cut in half", on_bytes(cut(0.5), second), part),
        ("one is compressed", on_bytes(gzip.compress, second), part),
        ("two manifests are swapped", swapped, Refused(("audio_0|audio_1|manifest_0|manifest_1",))),
        ("packed with ./ in front", packed_again(prefix="./"), either(all_good, "audio_1.tar")),
        ("packed on a Mac", packed_again(extra="._"), Right(all_good)),
    ]
    return [(f"shards: {name}", sharded(change), pretrain(*SHARDS), expected) for name, change, expected in rows]


def with_a_shell() -> list[Trial]:
    """Several commands at a time, and what a shell passes as a file."""
    at_once = '"$@" & first=$!; "$@"; a=$?; wait $first; b=$?; [ $a -eq 0 ] || [ $b -eq 0 ]'
    three = 'for i in 1 2 3; do "$@" exp_manager.name=run$i & done; s=0; for j in $(jobs -p); do wait $j || s=1; done; exit $s'
    few = '"$@" model.train_ds.manifest_filepath=<(head -n 4 train.jsonl)'
    found = "find audio -name '*.wav' | sort | \"$@\""
    piped = ["prepare", "/dev/stdin", "--output", "m.jsonl", "--workers", "0"]
    folder_in = ["prepare", "audio", "--output", "m.jsonl", "--workers", "0"]
    rows: list[tuple[str, str, Sequence[str], Expected]] = [
        ("three runs open a new manifest at once", three, resume(), Right(as_whole)),
        ("prepare: twice at once", at_once, folder_in, Right(ALL_EIGHT)),
        ("a manifest from a pipe of the shell", few, pretrain(), either(trained, "/dev/fd")),
        ("prepare: a list from a pipe", found, piped, either(ALL_EIGHT, "/dev/stdin")),
    ]
    return [Trial(GROUP, name, command, expected, shell=shell, limit_s=200) for name, shell, command, expected in rows]


def two_ranks() -> list[Trial]:
    """Ranks that find the same wrong line, or the same damaged index, at the same time."""
    command = resume("trainer.devices=2")
    rows: list[tuple[str, Setup, Expected]] = [
        ("a wrong line", raw_line(3, lambda line: line[:-5]), Refused(("train.jsonl:3",))),
        ("a damaged index", indexed(cut(0.5)), Right(trained)),
        ("no index", lambda folder: None, Right(trained)),
    ]
    return [
        Trial(GROUP, f"two ranks: {name}", command, expected, setup, own_process=True, limit_s=150)
        for name, setup, expected in rows
    ]


def while_running() -> list[Trial]:
    changes: list[tuple[str, Setup]] = [
        ("removed", lambda folder: (folder / TRAIN).unlink()),
        ("emptied", lambda folder: (folder / TRAIN).write_text("")),
        ("written again with half of its lines", text(lambda t: "".join(t.splitlines(True)[:4]))),
        ("index emptied", lambda folder: (folder / INDEX).write_bytes(b"")),
    ]
    slow = resume("trainer.max_steps=30")
    return [
        Trial(GROUP, f"while running: {name}", slow, Right(ended_well), act=disturbed(change), limit_s=120)
        for name, change in changes
    ]


def trials() -> list[Trial]:
    rows = [*whole_files(), *single_lines(), *where_they_are(), *other_commands(), *indexes(), *shards()]
    plain = [Trial(GROUP, name, command, expected, setup) for name, setup, command, expected in rows]
    return [*plain, *with_a_shell(), *two_ranks(), *while_running()]
