"""Manifests that are damaged, lie, or come from elsewhere; indexes, tar shards, lhotse's cuts and mixtures of them.

A folder has eight good utterances in `train.jsonl`; a setup writes another one, and the command reads it.
"""

from __future__ import annotations

import gzip
import io
import json
import os
import shutil
import tarfile
from collections.abc import Callable, Iterator, Mapping, Sequence
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
    both,
    finite_features,
    in_fork,
    losses,
    only_run,
    pretrain,
    resume,
    said,
    trained,
    write_lines,
)

GROUP = "manifests"
Line = dict[str, Any]


def lines_of(folder: Path, name: str = "train.jsonl") -> list[Line]:
    return [json.loads(line) for line in (folder / name).read_text().split("\n") if line.strip()]


def four_steps(folder: Path, outcome: Outcome) -> str | None:
    done = sorted(losses(only_run(folder)))
    return trained(folder, outcome) if done == [0, 1, 2, 3] else f"steps {done}"


def named_bad(*words: str, count: int | None = 1) -> Check:
    """It trained, and this many files (None: some) are in the run's list of bad ones, with these words."""

    def check(folder: Path, outcome: Outcome) -> str | None:
        found = [path.read_text() for path in folder.rglob("bad_files_train_ds_rank0.jsonl")]
        names = {json.loads(line)["audio_filepath"] for text in found for line in text.splitlines()}
        if not names or len(names) != (count or len(names)):
            return f"{len(names)} bad files in the list, not {count}"
        missing = [word for word in words if word not in "".join(found)]
        return f"not in the list of bad files: {missing}" if missing else four_steps(folder, outcome)

    return check


TRAINS = Right(four_steps)


def unreadable(*words: str) -> Refused:
    """Training began and found nothing that it could read; the list of bad files is promised (docs/data.md)."""
    return Refused(words, partial=True)


# ----------------------------------------------------------------------------------------------- the text of a manifest


def text(change: Callable[[str], str | bytes], name: str = "train.jsonl") -> Setup:
    """Rewrite the manifest as a whole."""

    def setup(folder: Path) -> None:
        changed = change((folder / name).read_text())
        (folder / name).write_bytes(changed.encode() if isinstance(changed, str) else changed)

    return setup


def as_csv(old: str) -> str:
    lines = [json.loads(line) for line in old.splitlines()]
    return "audio_filepath,duration\n" + "".join(f"{line['audio_filepath']},{line['duration']}\n" for line in lines)


def long_text(old: str) -> str:
    first, rest = old.split("\n", 1)
    return json.dumps({**json.loads(first), "text": "la " * 7_000_000}) + "\n" + rest


TEXTS: dict[str, tuple[Callable[[str], str | bytes], Expected]] = {
    "empty": (lambda old: "", Refused(("train.jsonl",))),
    "blank lines only": (lambda old: "\n  \n\t\n", Refused(("train.jsonl",))),
    "blank lines between": (lambda old: old.replace("\n", "\n\n \n"), TRAINS),
    "no line end at the end": (lambda old: old.rstrip("\n"), TRAINS),
    "windows line ends": (lambda old: old.replace("\n", "\r\n"), TRAINS),
    "old mac line ends": (lambda old: old.replace("\n", "\r"), Either(Refused(("train.jsonl",)), TRAINS)),
    "byte order mark": (lambda old: "\ufeff" + old, TRAINS),
    "utf-16": (lambda old: old.encode("utf-16"), Refused(("train.jsonl",))),
    "gzip": (lambda old: gzip.compress(old.encode()), Either(Refused(("train.jsonl",)), TRAINS)),
    "one json list": (lambda old: f"[{','.join(old.splitlines())}]", Refused(("train.jsonl",))),
    "json over several lines": (
        lambda old: "".join(json.dumps(json.loads(line), indent=1) + "\n" for line in old.splitlines()),
        Refused(("train.jsonl:1",)),
    ),
    "csv": (as_csv, Refused(("train.jsonl:1",))),
    "python's quotes": (lambda old: old.replace('"', "'"), Refused(("train.jsonl:1",))),
    "commas at the ends": (lambda old: old.replace("}\n", "},\n"), Refused(("train.jsonl:1",))),
    "the last line is cut": (lambda old: old[:-20], Refused(("train.jsonl:8",))),
    "a comment": (lambda old: "# made by hand\n" + old, Refused(("train.jsonl:1",))),
    "two objects in a line": (lambda old: old.replace("}\n", "} ", 1), Refused(("train.jsonl:1",))),
    "a number": (lambda old: old + "17\n", Refused(("train.jsonl:9",))),
    "brackets, 100,000 deep": (lambda old: old + "[" * 100_000 + "\n", Refused(("train.jsonl:9",))),
    "a key that is 100,000 deep": (
        lambda old: old.replace("{", '{"x": ' + "[" * 100_000 + "]" * 100_000 + ", ", 1),
        Either(Refused(("train.jsonl:1",)), TRAINS),
    ),
    "a text of 20 MB": (long_text, TRAINS),
    "a number of 5,000 digits": (lambda old: huge_number(old), Either(Refused(("train.jsonl:1",)), TRAINS)),
    "a duration with 400 digits": (lambda old: old.replace("1.6", "9" * 400, 1), Refused(("train.jsonl:1",))),
    "bytes that are no text": (
        lambda old: old.replace("{", '{"text": "\udcff", ', 1).encode(errors="surrogateescape"),
        Either(Refused(("train.jsonl:1",)), TRAINS),
    ),
    "zero bytes at the end": (lambda old: old.encode() + bytes(4096), Refused(("train.jsonl",))),
    "the same key twice": (
        lambda old: old.replace("{", '{"duration": 999, ', 1),
        Either(Refused(("train.jsonl:1",)), TRAINS),
    ),
    "keys in capitals": (lambda old: old.replace("audio_filepath", "AUDIO_FILEPATH"), Refused(("audio_filepath",))),
    "nemo's other name": (lambda old: old.replace("audio_filepath", "audio_filename"), TRAINS),
    "a git conflict": (lambda old: "<<<<<<< HEAD\n" + old, Refused(("train.jsonl:1",))),
    "an html error page": (lambda old: "<!DOCTYPE html>\n<html>404</html>\n", Refused(("train.jsonl:1",))),
    "unicode line separators in a text": (lambda old: old.replace("{", '{"text": "a\u2028b\x85c", ', 1), TRAINS),
}

# ----------------------------------------------------------------------------------------------- one line of a manifest


def line(number: int = 2, **changes: Any) -> Setup:
    """Change keys of one line; a value of `...` removes it."""

    def setup(folder: Path) -> None:
        lines = lines_of(folder)
        changed = {**lines[number], **changes}
        lines[number] = {key: value for key, value in changed.items() if value is not ...}
        write_lines(folder / "train.jsonl", lines)

    return setup


def every_line(change: Callable[[Line], Line]) -> Setup:
    return lambda folder: write_lines(folder / "train.jsonl", [change(line) for line in lines_of(folder)])


AT_3 = ("train.jsonl:3",)
LINES: dict[str, tuple[Setup, Expected]] = {
    "a duration in quotes": (line(duration="1.8"), Refused((*AT_3, "duration"))),
    "a duration of null": (line(duration=None), Refused(("duration",))),
    "no duration": (line(duration=...), Refused((*AT_3, "duration"))),
    "a negative duration": (line(duration=-1.0), Refused((*AT_3, "duration"))),
    "a duration that is nan": (line(duration=float("nan")), Refused((*AT_3, "duration"))),
    "a duration that is infinite": (line(duration=float("inf")), Refused((*AT_3, "duration"))),
    "a duration that is true": (line(duration=True), Refused((*AT_3, "duration"))),
    "a duration in a list": (line(duration=[1.8]), Refused((*AT_3, "duration"))),
    "a negative offset": (line(offset=-0.5), Refused((*AT_3, "offset"))),
    "an offset in quotes": (line(offset="0.5"), Refused((*AT_3, "offset"))),
    "an offset that is nan": (line(offset=float("nan")), Refused((*AT_3, "offset"))),
    "an offset after the end": (line(offset=50.0), Right(named_bad("2.wav"))),
    "an offset of a year": (line(offset=3.2e7), Right(named_bad("2.wav"))),
    "a duration of three times the file": (line(duration=5.4), Right(named_bad("2.wav"))),
    "a duration that is 10 ms too long": (line(duration=1.81), TRAINS),
    "a duration shorter than the file": (line(duration=1.2), TRAINS),
    "no path": (line(audio_filepath=...), Refused((*AT_3, "audio_filepath"))),
    "a path of null": (line(audio_filepath=None), Refused((*AT_3, "audio_filepath"))),
    "a path that is a number": (line(audio_filepath=7), Refused((*AT_3, "audio_filepath"))),
    "a path that is a list": (line(audio_filepath=["a.wav"]), Refused((*AT_3, "audio_filepath"))),
    "an empty path": (line(audio_filepath=""), Refused((*AT_3, "audio_filepath"))),
    "a path with a zero byte": (line(audio_filepath="audio/\0.wav"), Either(Refused(AT_3), Right(named_bad()))),
    "half a surrogate pair in a path": (
        line(audio_filepath="audio/\ud800.wav"),
        Either(Refused(AT_3), Right(named_bad())),
    ),
    "a path of 5,000 letters": (line(audio_filepath="a" * 5000), Right(named_bad())),
    "a folder as audio": (line(audio_filepath="audio"), Right(named_bad("audio"))),
    "/dev/zero as audio": (line(audio_filepath="/dev/zero"), Right(named_bad("/dev/zero"))),
    "/dev/null as audio": (line(audio_filepath="/dev/null"), Right(named_bad("/dev/null"))),
    "a url as audio": (line(audio_filepath="http://127.0.0.1:9/a.wav"), Right(named_bad("127.0.0.1"))),
    "the file is not there": (line(audio_filepath="audio/9.wav"), Right(named_bad("9.wav", "No such file"))),
    "no file is there": (
        every_line(lambda old: {**old, "audio_filepath": "gone/" + old["audio_filepath"]}),
        unreadable("No such file"),
    ),
    "every duration is too long": (every_line(lambda old: {**old, "duration": 9.0}), unreadable("train.jsonl|.wav")),
    "kaldi's pipes": (
        every_line(lambda old: {**old, "audio_filepath": "touch ../pwned |"}),
        unreadable("No such file|touch"),
    ),
    "windows paths": (
        every_line(lambda old: {**old, "audio_filepath": old["audio_filepath"].replace("/", "\\")}),
        TRAINS,
    ),
    "whole numbers as durations": (every_line(lambda old: {**old, "duration": 1}), TRAINS),
    "keys of other programs": (
        every_line(lambda old: {**old, "text": "", "offset": 0, "shard_id": -3, "lang": None, "duration_s": "x"}),
        TRAINS,
    ),
}

# ----------------------------------------------------------------------------------------------- which manifests, where


def copies(*names: str) -> Setup:
    def setup(folder: Path) -> None:
        for name in names:
            shutil.copy(folder / "train.jsonl", folder / name)

    return setup


def train(value: str) -> list[str]:
    return pretrain(f"model.train_ds.manifest_filepath={value}")


def utterances(count: int) -> Check:
    """It trained, and the log counts this many utterances in all training manifests."""
    return said(f"{count} utterances", then=four_steps)


PLACES: dict[str, tuple[str, Setup | None, Expected]] = {
    "a range of numbers": ('"m_{0..2}.jsonl"', copies("m_0.jsonl", "m_1.jsonl", "m_2.jsonl"), TRAINS),
    "a range with a gap": ('"m_{0..2}.jsonl"', copies("m_0.jsonl", "m_2.jsonl"), Refused(("m_1.jsonl",))),
    "a range of a billion": ('"m_{0..1000000000}.jsonl"', copies("m_0.jsonl"), Refused(("m_",))),
    "a range backwards": ('"m_{2..0}.jsonl"', copies("m_0.jsonl", "m_1.jsonl"), Refused(("m_",))),
    "an open brace": ('"m_{0..2.jsonl"', copies("m_0.jsonl"), Refused(("m_",))),
    "nemo's range with a gap": ("m__OP_0..2_CL_.jsonl", copies("m_0.jsonl", "m_1.jsonl"), Refused(("m_2.jsonl",))),
    "a star": ('"*.jsonl"', None, Refused(("*.jsonl",))),
    "a list with null": ("[train.jsonl,null]", None, Refused(("manifest_filepath",))),
    "a list with a number": ("[train.jsonl,5]", None, Refused(("5",))),
    "an empty list": ("[]", None, Refused(("manifest_filepath",))),
    "a dict": ("{a:train.jsonl}", None, Refused(("manifest_filepath",))),
    "one of two is not there": ("[train.jsonl,nowhere.jsonl]", None, Refused(("nowhere.jsonl",))),
    "one of two is empty": (
        "[train.jsonl,m.jsonl]",
        lambda folder: (folder / "m.jsonl").touch(),
        Either(Refused(("m.jsonl",)), TRAINS),
    ),
    "/dev/null": ("/dev/null", None, Refused(("/dev/null",))),
    "/dev/zero": ("/dev/zero", None, Refused(("/dev/zero",))),
    "a pipe": ("pipe", lambda folder: os.mkfifo(folder / "pipe"), Refused(("pipe",))),
    "a link to itself": (
        "loop.jsonl",
        lambda folder: (folder / "loop.jsonl").symlink_to("loop.jsonl"),
        Refused(("loop.jsonl",)),
    ),
    "a broken link": (
        "gone.jsonl",
        lambda folder: (folder / "gone.jsonl").symlink_to("nowhere"),
        Refused(("gone.jsonl",)),
    ),
    "in another folder, with relative paths": (
        "sub/m.jsonl",
        both(lambda folder: (folder / "sub").mkdir(), copies("sub/m.jsonl")),
        TRAINS,  # relative to the manifest's folder, then to the working folder
    ),
    "the home folder": ("~/train.jsonl", None, Refused(("train.jsonl",))),
}

# ---------------------------------------------------------------------------------------------------------- the indexes

INDEX = "train.jsonl.idx"


def indexed(folder: Path) -> None:
    """Have the index made, by looking at the data."""
    if in_fork(["inspect", "train.jsonl", "--examples", "0"], folder, {}, 60).code != 0:
        raise RuntimeError("inspect failed")
    (folder / "inspect.html").unlink()
    if not (folder / INDEX).is_file():
        raise RuntimeError("there is no index")


def index_bytes(change: Callable[[bytes], bytes]) -> Setup:
    def setup(folder: Path) -> None:
        indexed(folder)
        (folder / INDEX).write_bytes(change((folder / INDEX).read_bytes()))

    return setup


def foreign_index(folder: Path) -> None:
    """The index of a manifest with other lines."""
    indexed(folder)
    kept = (folder / INDEX).read_bytes()
    lines = lines_of(folder)
    write_lines(folder / "train.jsonl", [{"text": "x" * 50, **line} for line in reversed(lines)])
    (folder / INDEX).write_bytes(kept)


def linked_index(folder: Path) -> None:
    (folder / "precious.txt").write_text("do not overwrite")
    (folder / INDEX).symlink_to("precious.txt")


def precious_kept(folder: Path, outcome: Outcome) -> str | None:
    kept = (folder / "precious.txt").read_text() == "do not overwrite"
    return four_steps(folder, outcome) if kept else "the file that the link names was overwritten"


def grown(folder: Path) -> None:
    indexed(folder)
    with (folder / "train.jsonl").open("a") as file:
        file.write(json.dumps({"audio_filepath": "audio/0.wav", "duration": "long"}) + "\n")


INDEXES: dict[str, tuple[Setup, Expected]] = {
    "empty": (index_bytes(lambda old: b""), TRAINS),
    "half": (index_bytes(lambda old: old[: len(old) // 2]), TRAINS),
    "a flipped bit in the middle": (index_bytes(lambda old: old[:200] + bytes([old[200] ^ 1]) + old[201:]), TRAINS),
    "zeros": (index_bytes(lambda old: bytes(len(old))), TRAINS),
    "something appended": (index_bytes(lambda old: old + b"x" * 1000), TRAINS),
    "a pickle": (index_bytes(lambda old: b"\x80\x04cposix\nsystem\n(X\x10\x00\x00\x00touch ../pwned  tR."), TRAINS),
    "of another manifest": (foreign_index, TRAINS),
    "a folder": (lambda folder: (folder / INDEX).mkdir(), TRAINS),
    "a pipe": (lambda folder: os.mkfifo(folder / INDEX), TRAINS),
    "a link to something else": (linked_index, Right(precious_kept)),
    "the manifest has grown by a bad line": (grown, Refused(("train.jsonl:9",))),
}

# ------------------------------------------------------------------------------------------------------ validation sets

RESUMED: dict[str, tuple[Setup, Expected]] = {  # refused: the run that was there must be as it was
    "all audio is gone": (lambda folder: shutil.rmtree(folder / "audio"), Refused((".wav",))),
    "the manifest is empty": (text(lambda old: ""), Refused(("train.jsonl",))),
    "all audio is text": (
        lambda folder: [path.write_text("x") for path in (folder / "audio").iterdir()],
        Refused((".wav",)),
    ),
}

VALID: dict[str, tuple[Setup, Expected]] = {
    "empty": (text(lambda old: "", "valid.jsonl"), Refused(("valid.jsonl",))),
    "a bad line": (text(lambda old: old + "{]\n", "valid.jsonl"), Refused(("valid.jsonl:5",))),
    "no file is there": (
        text(lambda old: old.replace("audio/", "gone/"), "valid.jsonl"),
        Either(unreadable("gone|valid"), Right(said("gone"))),
    ),
    "one utterance": (text(lambda old: old.split("\n")[0] + "\n", "valid.jsonl"), TRAINS),
}

# ----------------------------------------------------------------------------------------------------------- tar shards

Member = tuple[str, bytes]


def tar_bytes(members: Sequence[Member | tarfile.TarInfo], kind: int = tarfile.GNU_FORMAT) -> bytes:
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w", format=kind) as archive:
        for member in members:
            if isinstance(member, tarfile.TarInfo):
                archive.addfile(member)
            else:
                info = tarfile.TarInfo(member[0])
                info.size = len(member[1])
                archive.addfile(info, io.BytesIO(member[1]))
    return buffer.getvalue()


def special(name: str, kind: bytes, target: str = "") -> tarfile.TarInfo:
    info = tarfile.TarInfo(name)
    info.type, info.linkname = kind, target
    return info


Shards = Callable[[list[list[Any]], list[list[Line]]], "list[bytes] | None"]
"""Changes members and lines of two shards; may return the bytes of the files itself."""


def shards(change: Shards | None = None, after: Setup | None = None) -> Setup:
    """Two shards of four utterances each, with a manifest for each."""

    def setup(folder: Path) -> None:
        members: list[list[Any]] = [[], []]
        lines: list[list[Line]] = [[], []]
        for i, line in enumerate(lines_of(folder)):
            data = (folder / line["audio_filepath"]).read_bytes()
            members[i % 2].append((f"{i}.wav", data))
            lines[i % 2].append({**line, "audio_filepath": f"{i}.wav", "shard_id": i % 2})
        made = change(members, lines) if change else None
        for k in (0, 1):
            (folder / f"audio_{k}.tar").write_bytes(made[k] if made else tar_bytes(members[k]))
            write_lines(folder / f"manifest_{k}.json", lines[k])
        shutil.rmtree(folder / "audio")  # so that nothing can be read from there
        (folder / "audio").mkdir()
        data_of_validation(folder)
        if after:
            after(folder)

    return setup


def data_of_validation(folder: Path) -> None:
    for line in lines_of(folder, "valid.jsonl"):
        shutil.copy(Fixture.path / line["audio_filepath"], folder / line["audio_filepath"])


def folder_for_shard(folder: Path) -> None:
    (folder / "audio_1.tar").unlink()
    (folder / "audio_1.tar").mkdir()


def tarred(*overrides: str) -> list[str]:
    keys = (
        "is_tarred=true",
        "tarred_audio_filepaths=audio__OP_0..1_CL_.tar",
        "manifest_filepath=manifest__OP_0..1_CL_.json",
    )
    return pretrain(*(f"model.train_ds.{key}" for key in keys), *overrides)


def compressed(members: list[list[Any]], lines: list[list[Line]]) -> list[bytes]:
    return [gzip.compress(tar_bytes(one)) for one in members]


def truncated(members: list[list[Any]], lines: list[list[Line]]) -> list[bytes]:
    whole = tar_bytes(members[1])
    return [tar_bytes(members[0]), whole[: len(whole) // 2]]


def liar(members: list[list[Any]], lines: list[list[Line]]) -> list[bytes]:
    """A member that claims to have 8 GB."""
    info = tarfile.TarInfo("0.wav")
    info.size = (8 << 30) - 1
    data = info.tobuf(tarfile.GNU_FORMAT) + members[0][0][1]
    return [data + tar_bytes(members[0][1:]), tar_bytes(members[1])]


def first_member(make: Callable[[str, bytes], Any]) -> Shards:
    def change(members: list[list[Any]], lines: list[list[Line]]) -> None:
        members[0][0] = make(*members[0][0])

    return change


def two_of_a_name(members: list[list[Any]], lines: list[list[Line]]) -> None:
    members[0].append(members[0][0])


def longer_names(members: list[list[Any]], lines: list[list[Line]]) -> list[bytes]:
    for k in (0, 1):
        members[k] = [(f"{'ä' * 120}/{name}", data) for name, data in members[k]]
        lines[k][:] = [{**one, "audio_filepath": f"{'ä' * 120}/{one['audio_filepath']}"} for one in lines[k]]
    return [tar_bytes(one, tarfile.PAX_FORMAT) for one in members]


def climbing(members: list[list[Any]], lines: list[list[Line]]) -> None:
    members[0][0] = ("../../evil.wav", members[0][0][1])
    lines[0][0]["audio_filepath"] = "../../evil.wav"


def without_a_member(members: list[list[Any]], lines: list[list[Line]]) -> None:
    del members[0][1]


def without_a_line(members: list[list[Any]], lines: list[list[Line]]) -> None:
    del lines[0][0]


def swapped(members: list[list[Any]], lines: list[list[Line]]) -> None:
    members[0], members[1] = members[1], members[0]


TARS: dict[str, tuple[Setup, list[str], Expected]] = {
    "good": (shards(), tarred(), TRAINS),
    "compressed": (shards(compressed), tarred(), unreadable("audio_0.tar|audio_1.tar")),
    "cut in the middle": (shards(truncated), tarred(), Either(unreadable("audio_1.tar"), Right(named_bad(count=None)))),
    "empty files": (shards(lambda members, lines: [b"", b""]), tarred(), unreadable("audio_0.tar|audio_1.tar")),
    "an archive of nothing": (
        shards(lambda members, lines: [tar_bytes([])] * 2),
        tarred(),
        unreadable("audio_0.tar|manifest_0"),
    ),
    "no archive at all": (shards(lambda members, lines: [b"hello" * 500] * 2), tarred(), unreadable("audio_0.tar")),
    "a member is missing": (
        shards(without_a_member),
        tarred(),
        Either(Refused(("2.wav",)), Right(named_bad("2.wav"))),
    ),
    "a member that no line names": (shards(without_a_line), tarred(), Right(trained)),
    "a member that claims 8 GB": (
        shards(liar),
        tarred(),
        Either(unreadable("audio_0.tar"), Right(named_bad(count=None))),
    ),
    "a member is a link to a file of the system": (
        shards(first_member(lambda name, data: special(name, tarfile.SYMTYPE, "/etc/passwd"))),
        tarred(),
        Either(Refused(("0.wav|audio_0.tar",)), Right(named_bad("0.wav"))),
    ),
    "a member is a pipe": (
        shards(first_member(lambda name, data: special(name, tarfile.FIFOTYPE))),
        tarred(),
        Either(Refused(("0.wav|audio_0.tar",)), Right(named_bad("0.wav"))),
    ),
    "a member is no audio": (
        shards(first_member(lambda name, data: (name, b"text" * 99))),
        tarred(),
        Right(named_bad("0.wav")),
    ),
    "a member is empty": (shards(first_member(lambda name, data: (name, b""))), tarred(), Right(named_bad("0.wav"))),
    "two members of one name": (shards(two_of_a_name), tarred(), Either(Refused(("0.wav",)), TRAINS)),
    "long names beyond ascii": (shards(longer_names), tarred(), TRAINS),
    "a name that climbs out": (shards(climbing), tarred(), Either(Refused(("evil.wav",)), TRAINS)),
    "manifests swapped": (shards(swapped), tarred(), unreadable(".wav|audio_")),
    "a shard is missing": (
        shards(after=lambda folder: (folder / "audio_1.tar").unlink()),
        tarred(),
        Refused(("audio_1.tar",)),
    ),
    "a manifest is missing": (
        shards(after=lambda folder: (folder / "manifest_1.json").unlink()),
        tarred(),
        Refused(("manifest_1.json",)),
    ),
    "a shard is a folder": (
        shards(after=folder_for_shard),
        tarred(),
        Refused(("audio_1.tar",)),
    ),
    "one manifest, three shards": (
        shards(after=lambda folder: shutil.copy(folder / "audio_0.tar", folder / "audio_2.tar")),
        tarred("model.train_ds.tarred_audio_filepaths=audio__OP_0..2_CL_.tar"),
        Refused(("manifest|audio_2.tar",)),
    ),
    "a shard twice": (
        shards(),
        tarred(
            "model.train_ds.tarred_audio_filepaths=[audio_0.tar,audio_0.tar]",
            "model.train_ds.manifest_filepath=manifest_0.json",
        ),
        Either(Refused(("0.wav",)), Right(trained)),
    ),
    "an unknown strategy": (
        shards(),
        tarred("model.train_ds.tarred_shard_strategy=gather"),
        Refused(("tarred_shard_strategy",)),
    ),
    "replicated": (shards(), tarred("model.train_ds.tarred_shard_strategy=replicate"), TRAINS),
    "a plain manifest": (
        shards(),
        tarred("model.train_ds.manifest_filepath=train.jsonl"),
        Either(unreadable("audio/|train.jsonl|.tar"), Right(trained)),  # audio/0.wav may be the member 0.wav
    ),
    "in buckets": (shards(), tarred("model.train_ds.use_bucketing=true", "model.train_ds.num_buckets=2"), TRAINS),
}

# --------------------------------------------------------------------------------------------------------------- lhotse


def cut(folder: Path, number: int, line: Line, **changes: Any) -> Line:
    samples = round(line["duration"] * RATE)
    recording = {
        "id": f"r{number}",
        "sources": [{"type": "file", "channels": [0], "source": str(folder / line["audio_filepath"])}],
        "sampling_rate": RATE,
        "num_samples": samples,
        "duration": samples / RATE,
    }
    whole = {"id": f"c{number}", "start": 0.0, "duration": samples / RATE, "channel": 0, "supervisions": []}
    return {**whole, "recording": {**recording, **changes.pop("recording", {})}, "type": "MonoCut", **changes}


def cuts(name: str = "cuts.jsonl", **changes: Any) -> Setup:
    """All eight utterances as cuts; the changes are for each of them."""

    def setup(folder: Path) -> None:
        lines = [cut(folder, i, line, **changes) for i, line in enumerate(lines_of(folder))]
        content = "".join(json.dumps(line) + "\n" for line in lines).encode()
        (folder / name).write_bytes(gzip.compress(content) if name.endswith(".gz") else content)

    return setup


def lhotse(*keys: str) -> list[str]:
    first = ("use_lhotse=true", "manifest_filepath=null")
    return pretrain(*(f"model.train_ds.{key}" for key in (*first, *keys)))


FROM_CUTS = lhotse("cuts_path=cuts.jsonl")


def source(kind: str, value: str) -> dict[str, Any]:
    return {"sources": [{"type": kind, "channels": [0], "source": value}]}


def padding(number: int) -> Line:
    size = {"duration": 2.0, "sampling_rate": RATE, "num_samples": 2 * RATE, "feat_value": -23.0}
    return {"id": f"c{number}", **size, "type": "PaddingCut"}


def shar() -> Setup:
    """lhotse's own shards of the eight cuts."""

    def setup(folder: Path) -> None:
        import lhotse as library

        cuts()(folder)
        (folder / "shar").mkdir()
        library.CutSet.from_file(folder / "cuts.jsonl").to_shar(folder / "shar", {"recording": "wav"}, shard_size=8)

    return setup


LHOTSE: dict[str, tuple[Setup | None, list[str], Expected]] = {
    "good": (cuts(), FROM_CUTS, Right(trained)),
    "compressed": (cuts("cuts.jsonl.gz"), lhotse("cuts_path=cuts.jsonl.gz"), Right(trained)),
    "cut off, compressed": (
        both(cuts("c.jsonl.gz"), lambda folder: os.truncate(folder / "c.jsonl.gz", 150)),
        lhotse("cuts_path=c.jsonl.gz"),
        unreadable("c.jsonl.gz"),
    ),
    "commands as sources": (
        cuts(recording=source("command", "touch ../pwned; cat audio/0.wav")),
        FROM_CUTS,
        unreadable("command|cuts.jsonl"),
    ),
    "urls as sources": (
        cuts(recording=source("url", "http://127.0.0.1:9/a.wav")),
        FROM_CUTS,
        unreadable("127.0.0.1|url|cuts.jsonl"),
    ),
    "an unknown kind of source": (cuts(recording=source("tape", "x")), FROM_CUTS, unreadable("tape|cuts.jsonl")),
    "files that are not there": (cuts(recording=source("file", "gone.wav")), FROM_CUTS, unreadable("gone.wav")),
    "an empty file": (lambda folder: (folder / "cuts.jsonl").touch(), FROM_CUTS, unreadable("cuts.jsonl")),
    "no json": (lambda folder: (folder / "cuts.jsonl").write_text("hello\n"), FROM_CUTS, unreadable("cuts.jsonl")),
    "a nemo manifest as cuts": (copies("cuts.jsonl"), FROM_CUTS, unreadable("cuts.jsonl|cuts_path")),
    "not there": (None, lhotse("cuts_path=nowhere.jsonl"), Refused(("nowhere.jsonl",))),
    "a python tag in yaml": (
        lambda folder: (folder / "c.yaml").write_text("- !!python/object/apply:os.system ['touch ../pwned']\n"),
        lhotse("cuts_path=c.yaml"),
        unreadable("c.yaml"),
    ),
    "no recordings": (cuts(recording={"sources": []}), FROM_CUTS, unreadable("cuts.jsonl|channel")),
    "longer than their recordings": (cuts(duration=30.0), FROM_CUTS, unreadable("cuts.jsonl|.wav|30")),
    "a negative start": (  # lhotse reads such a cut from 0 on
        cuts(start=-3.0),
        FROM_CUTS,
        Either(unreadable("cuts.jsonl|.wav|start"), Right(trained)),
    ),
    "a duration of 0": (cuts(duration=0.0), FROM_CUTS, unreadable("cuts.jsonl|min_duration|duration")),
    "an unknown kind of cut": (cuts(type="PaperCut"), FROM_CUTS, unreadable("cuts.jsonl|PaperCut")),
    "a rate that is wrong": (
        cuts(recording={"sampling_rate": 8000, "duration": 9.0, "num_samples": 72000}),
        FROM_CUTS,
        Either(unreadable(".wav|cuts.jsonl"), Right(trained)),
    ),
    "nothing is named": (None, lhotse(), Refused(("manifest_filepath|cuts_path",))),
    "cuts and a manifest": (
        cuts(),
        lhotse("cuts_path=cuts.jsonl", "manifest_filepath=train.jsonl"),
        Either(Refused(("cuts_path",)), Right(trained)),
    ),
    "a manifest": (None, lhotse("manifest_filepath=train.jsonl"), Right(trained)),
    "a manifest without durations": (
        every_line(lambda old: {"audio_filepath": old["audio_filepath"]}),
        lhotse("manifest_filepath=train.jsonl"),
        Refused(("duration",)),
    ),
    "an empty folder as shar": (lambda folder: (folder / "shar").mkdir(), lhotse("shar_path=shar"), unreadable("shar")),
    "input_cfg is not there": (None, lhotse("input_cfg=nowhere.yaml"), Refused(("nowhere.yaml",))),
    "input_cfg of an unknown kind": (
        None,
        lhotse("input_cfg=[{type:tape,manifest_filepath:train.jsonl}]"),
        Refused(("tape",)),
    ),
    "input_cfg without a kind": (None, lhotse("input_cfg=[{manifest_filepath:train.jsonl}]"), Refused(("type",))),
    "input_cfg with a negative weight": (
        None,
        lhotse(
            "input_cfg=[{type:nemo,manifest_filepath:train.jsonl,weight:-1},{type:nemo,manifest_filepath:valid.jsonl,weight:2}]"
        ),
        Refused(("weight",)),
    ),
    "input_cfg whose weights are 0": (
        None,
        lhotse("input_cfg=[{type:nemo,manifest_filepath:train.jsonl,weight:0}]"),
        Refused(("weight",)),
    ),
    "input_cfg with a weight that is nan": (
        None,
        lhotse("input_cfg=[{type:nemo,manifest_filepath:train.jsonl,weight:nan}]"),
        Refused(("weight",)),
    ),
    "input_cfg with a misspelt weight": (
        None,
        lhotse(
            "input_cfg=[{type:nemo,manifest_filepath:train.jsonl,wieght:0.9},"
            "{type:nemo,manifest_filepath:valid.jsonl,wieght:0.1}]"
        ),
        Refused(("wieght",)),
    ),
    "input_cfg that names nothing": (None, lhotse("input_cfg=[{type:nemo,weight:1}]"), Refused(("manifest_filepath",))),
    "input_cfg whose manifest is not there": (
        None,
        lhotse("input_cfg=[{type:nemo,manifest_filepath:nowhere.jsonl}]"),
        Refused(("nowhere.jsonl",)),
    ),
    "input_cfg, mixed": (
        cuts(),
        lhotse(
            "input_cfg=[{type:nemo,manifest_filepath:train.jsonl,weight:0.5},{type:lhotse,cuts_path:cuts.jsonl,weight:0.5}]"
        ),
        Right(trained),
    ),
    "input_cfg, an empty list": (None, lhotse("input_cfg=[]"), Refused(("input_cfg|manifest_filepath",))),
    "input_cfg that names itself": (
        lambda folder: (folder / "i.yaml").write_text("- {type: group, input_cfg: i.yaml, weight: 1}\n"),
        lhotse("input_cfg=i.yaml"),
        Refused(("i.yaml|input_cfg",)),
    ),
    "a batch duration shorter than every cut": (
        cuts(),
        lhotse("cuts_path=cuts.jsonl", "batch_size=null", "batch_duration=0.1"),
        Either(Refused(("batch_duration",)), Right(trained)),
    ),
    "only padding": (
        lambda folder: write_lines(folder / "cuts.jsonl", [padding(i) for i in range(8)]),
        FROM_CUTS,
        unreadable("cuts.jsonl|padding|c0"),
    ),
    "supervisions as cuts": (
        lambda folder: write_lines(
            folder / "cuts.jsonl",
            [{"id": f"s{i}", "recording_id": f"r{i}", "start": 0, "duration": 2.0, "channel": 0} for i in range(8)],
        ),
        FROM_CUTS,
        unreadable("cuts.jsonl|cuts_path"),
    ),
    "shar": (shar(), lhotse("shar_path=shar"), Right(trained)),
    "shar whose audio is cut off": (
        both(shar(), lambda folder: os.truncate(next((folder / "shar").glob("recording*.tar")), 40_000)),
        lhotse("shar_path=shar"),
        Either(unreadable("shar|recording"), Right(named_bad(count=None))),
    ),
    "shar without its audio": (
        both(shar(), lambda folder: next((folder / "shar").glob("recording*.tar")).unlink()),
        lhotse("shar_path=shar"),
        unreadable("shar|recording"),
    ),
    "shar without its cuts": (
        both(shar(), lambda folder: next((folder / "shar").glob("cuts*")).unlink()),
        lhotse("shar_path=shar"),
        unreadable("shar"),
    ),
}

# ------------------------------------------------------------------------------------- prepare, inspect, extract, probe


def made(name: str, count: int, bad: int = 0, third: float | None = None) -> Check:
    """The manifest has so many lines, the list of bad files so many, and 2.wav this duration."""

    def check(folder: Path, outcome: Outcome) -> str | None:
        good = lines_of(folder, name)
        path = folder / (Path(name).stem + ".bad.jsonl")
        worse = lines_of(folder, path.name) if path.exists() else []
        if (len(good), len(worse)) != (count, bad):
            return f"{len(good)} good and {len(worse)} bad, not {count} and {bad}"
        found = {Path(line["audio_filepath"]).stem: line["duration"] for line in good}
        wrong = third is not None and abs(found["2"] - third) > 0.001
        return f"durations {found}" if wrong else None

    return check


def kept_keys(folder: Path, outcome: Outcome) -> str | None:
    lines = lines_of(folder, "m.jsonl")
    if [line.get("speaker") for line in lines] != [{"nested": [1, "ä"]}] * 8:
        return "the other keys are not kept"
    return made("m.jsonl", 8, third=1.8)(folder, outcome)


def parts(folder: Path, outcome: Outcome) -> str | None:
    """Train and valid have all lines between them, and none twice."""
    both_parts = [
        line["audio_filepath"] for name in ("m.train.jsonl", "m.valid.jsonl") for line in lines_of(folder, name)
    ]
    return (
        None if sorted(both_parts) == sorted(line["audio_filepath"] for line in lines_of(folder, "m.jsonl")) else "lost"
    )


def segments(folder: Path) -> None:
    lines = [{"audio_filepath": "audio/7.wav", "offset": 0.5 * i, "duration": 0.5} for i in range(4)]
    write_lines(folder / "cut.jsonl", lines)


def cut_shards(folder: Path, outcome: Outcome) -> str | None:
    """Segments are stored losslessly: together they are the first two seconds of the file."""
    whole, _ = soundfile.read(folder / "audio/7.wav", dtype="int16")
    pieces = []
    for k in (0, 1):
        with tarfile.open(folder / f"audio_{k}.tar") as archive:
            for member in archive.getmembers():
                file = archive.extractfile(member)
                pieces.append((k, soundfile.read(io.BytesIO(file.read() if file else b""), dtype="int16")[0]))
    ordered = [pieces[0][1], pieces[2][1], pieces[1][1], pieces[3][1]]
    return (
        None if np.array_equal(np.concatenate(ordered), whole[: 2 * RATE]) else "the segments are not those of the file"
    )


def extracted(count: int) -> Check:
    def check(folder: Path, outcome: Outcome) -> str | None:
        lines = lines_of(folder, "out/manifest.jsonl")
        if len(lines) != count:
            return f"{len(lines)} lines in the manifest of the features"
        for line in lines:
            shape = np.load(folder / "out" / line["feature_filepath"]).shape
            if shape[:2] != (2, 32) or shape[2] != line["num_frames"]:
                return f"{line}: features of {shape}"
        return finite_features(folder, outcome)

    return check


def with_model(*setups: Setup) -> Setup:
    return both(lambda folder: shutil.copy(Fixture.path / "model.nemo", folder), *setups)


def state(content: bytes) -> Setup:
    """The state of an earlier prepare is damaged."""

    def setup(folder: Path) -> None:
        if in_fork(["prepare", "audio", "--output", "m.jsonl", "--workers", "0"], folder, {}, 60).code != 0:
            raise RuntimeError("prepare failed")
        (folder / "m.jsonl").unlink()
        (folder / "m.jsonl.state").write_bytes(content)

    return setup


PREPARE = ["prepare", "train.jsonl", "--output", "m.jsonl", "--workers", "0"]
EXTRACT = ["extract", "model.nemo", "train.jsonl", "out", "--device", "cpu"]
AT_1 = ("train.jsonl:1",)


def huge_number(old: str) -> str:
    """Python refuses to read a whole number of so many digits."""
    return old.replace("{", '{"x": ' + "9" * 5000 + ", ", 1)


def either_count(folder: Path, outcome: Outcome) -> str | None:
    return made("m.jsonl", 8)(folder, outcome) and made("m.jsonl", 7, 1)(folder, outcome)


def emptied(folder: Path) -> None:
    shutil.copytree(folder / "audio", folder / "corpus")
    if in_fork(["prepare", "corpus", "--output", "m.jsonl", "--workers", "0"], folder, {}, 60).code != 0:
        raise RuntimeError("prepare failed")
    shutil.rmtree(folder / "corpus")
    (folder / "corpus").mkdir()


def two_corpora(folder: Path) -> None:
    """Two folders of four files each; the first has been made into shards, in the place where the others would go."""
    for i in range(8):
        (folder / "ab"[i // 4]).mkdir(exist_ok=True)
        shutil.copy(folder / f"audio/{i}.wav", folder / "ab"[i // 4] / f"{i % 4}.wav")
    command = ["prepare", "a", "--output", "a.jsonl", "--shards", "2", "--workers", "0"]
    if in_fork(command, folder, {}, 60).code != 0:
        raise RuntimeError("prepare failed")


def sharded(then: Setup) -> Setup:
    """All files are in two shards; then something changes."""

    def setup(folder: Path) -> None:
        command = ["prepare", "audio", "--output", "m.jsonl", "--shards", "2", "--workers", "0"]
        if in_fork(command, folder, {}, 60).code != 0:
            raise RuntimeError("prepare failed")
        then(folder)

    return setup


def shards_are(source_folder: str, count: int) -> Check:
    """The shards have the bytes of the files, utterance k in shard k mod `count`."""

    def check(folder: Path, outcome: Outcome) -> str | None:
        files = sorted((folder / source_folder).iterdir())
        for k in range(count):
            with tarfile.open(folder / f"audio_{k}.tar") as archive:
                found = [file.read() for member in archive.getmembers() if (file := archive.extractfile(member))]
            if found != [path.read_bytes() for path in files[k::count]]:
                return f"audio_{k}.tar has other audio"
        return None

    return check


def jobs(*done: str) -> Setup:
    def setup(folder: Path) -> None:
        for job in done:
            command = ["prepare", "audio", "--output", "m.jsonl", "--job", job, "--workers", "0"]
            if in_fork(command, folder, {}, 60).code != 0:
                raise RuntimeError("a job failed")

    return setup


OTHERS: dict[str, tuple[list[str], Setup | None, Expected]] = {
    "prepare: no durations": (
        PREPARE,
        every_line(lambda old: {"audio_filepath": old["audio_filepath"]}),
        Right(made("m.jsonl", 8, third=1.8)),
    ),
    "prepare: durations that are rounded up": (
        PREPARE,
        every_line(lambda old: {**old, "duration": old["duration"] + 0.05}),
        Right(made("m.jsonl", 8, third=1.8)),
    ),
    "prepare: a duration of three times the file": (PREPARE, line(duration=5.4), Right(made("m.jsonl", 7, 1))),
    "prepare: durations in quotes": (
        PREPARE,
        every_line(lambda old: {**old, "duration": "1"}),
        Either(Refused(("train.jsonl:1",)), Right(made("m.jsonl", 8, third=1.0))),
    ),
    "prepare: other keys are kept": (
        PREPARE,
        every_line(lambda old: {**old, "speaker": {"nested": [1, "ä"]}}),
        Right(kept_keys),
    ),
    "prepare: a file is missing": (PREPARE, line(audio_filepath="audio/9.wav"), Right(made("m.jsonl", 7, 1))),
    "prepare: a line is no json": (
        PREPARE,
        text(lambda old: old + "{]\n"),
        Either(Refused(("train.jsonl:9",)), Right(made("m.jsonl", 8, 1))),
    ),
    "prepare: onto itself": (
        ["prepare", "train.jsonl", "--output", "train.jsonl", "--workers", "0"],
        None,
        Either(Refused(("train.jsonl",)), Right(made("train.jsonl", 8))),
    ),
    "prepare: segments into shards": (
        ["prepare", "cut.jsonl", "--output", "m.jsonl", "--shards", "2", "--workers", "0"],
        segments,
        Right(cut_shards),
    ),
    "prepare: more shards than files": (
        [*PREPARE, "--shards", "50"],
        None,
        Either(Refused(("shards",)), Right(made("m.jsonl", 8))),
    ),
    "prepare: split by hash": ([*PREPARE, "--split", "hash", "--valid-share", "0.5"], None, Right(parts)),
    "prepare: all are for validation": (
        [*PREPARE, "--split", "hash", "--valid-share", "1"],
        None,
        Either(Refused(("valid-share|valid_share",)), Right(parts)),
    ),
    "prepare: a share of 2": (
        [*PREPARE, "--split", "hash", "--valid-share", "2"],
        None,
        Refused(("valid-share|valid_share|share",)),
    ),
    "prepare: a share that is nan": (
        [*PREPARE, "--split", "hash", "--valid-share", "nan"],
        None,
        Refused(("valid-share|valid_share|share",)),
    ),
    "prepare: folder level 0": (
        ["prepare", "audio", "--output", "m.jsonl", "--split", "folder", "--folder-level", "0"],
        None,
        Refused(("folder-level|folder_level",)),
    ),
    "prepare: job 5 of 3": ([*PREPARE, "--job", "5/3"], None, Refused(("5/3|job",))),
    "prepare: job 0 of 0": ([*PREPARE, "--job", "0/0"], None, Refused(("0/0|job",))),
    "prepare: job a of b": ([*PREPARE, "--job", "a/b"], None, Refused(("a/b|job",))),
    "prepare: merge without jobs": ([*PREPARE, "--merge", "3"], None, Refused(("job",))),
    "prepare: a job and merge": ([*PREPARE, "--job", "0/2", "--merge", "2"], None, Refused(("merge",))),
    "prepare: shards' folder without shards": ([*PREPARE, "--shards-folder", "s"], None, Refused(("shards",))),
    "prepare: the output is a folder": (["prepare", "train.jsonl", "--output", "audio"], None, Refused(("audio",))),
    "prepare: the output is an audio file": (
        ["prepare", "train.jsonl", "--output", "audio/0.wav"],
        None,
        Refused(("0.wav",)),
    ),
    "prepare: into a new folder": (
        ["prepare", "train.jsonl", "--output", "new/m.jsonl", "--workers", "0"],
        None,
        Either(Refused(("new",)), Right(made("new/m.jsonl", 8))),
    ),
    "prepare: an empty folder": (
        ["prepare", "void", "--output", "m.jsonl"],
        lambda folder: (folder / "void").mkdir(),
        Refused(("void",)),
    ),
    "prepare: nothing there": (["prepare", "nowhere", "--output", "m.jsonl"], None, Refused(("nowhere",))),
    "prepare: an audio file": (
        ["prepare", "audio/0.wav", "--output", "m.jsonl", "--workers", "0"],
        None,
        Either(Refused(("0.wav",)), Right(made("m.jsonl", 1))),
    ),
    "prepare: its state is damaged": (
        ["prepare", "audio", "--output", "m.jsonl", "--workers", "0"],
        state(b"{]"),
        Either(Refused(("m.jsonl.state",)), Right(made("m.jsonl", 8, third=1.8))),
    ),
    "prepare: its state is a pickle": (
        ["prepare", "audio", "--output", "m.jsonl", "--workers", "0"],
        state(b"cposix\nsystem\n(S'touch ../pwned'\ntR."),
        Either(Refused(("m.jsonl.state",)), Right(made("m.jsonl", 8))),
    ),
    "inspect: no file is there": (
        ["inspect", "train.jsonl"],
        every_line(lambda old: {**old, "audio_filepath": "gone.wav"}),
        Either(Refused(("gone.wav",)), Right(said("gone.wav", then=lambda folder, outcome: None))),
    ),
    "inspect: an utterance of 1e9 s": (
        ["inspect", "train.jsonl", "model.train_ds.max_duration=null"],
        line(duration=1e9),
        Either(Refused(("2.wav|train.jsonl",)), Right(said("2.wav", then=lambda folder, outcome: None))),
    ),
    "inspect: /dev/zero": (["inspect", "/dev/zero"], None, Refused(("/dev/zero",))),
    "inspect: a negative duration": (["inspect", "train.jsonl"], line(duration=-1.0), Refused((*AT_3, "duration"))),
    "extract: the same utterance twice": (
        EXTRACT,
        with_model(text(lambda old: old + old.split("\n")[0] + "\n")),
        Right(extracted(9)),
    ),
    "extract: segments of one file": (
        ["extract", "model.nemo", "cut.jsonl", "out", "--device", "cpu"],
        with_model(segments),
        Right(extracted(4)),
    ),
    "extract: a line has feature_filepath": (
        EXTRACT,
        with_model(every_line(lambda old: {**old, "feature_filepath": "../../x.npy", "num_frames": -1})),
        Right(extracted(8)),
    ),
    "extract: an empty manifest": (EXTRACT, with_model(text(lambda old: "")), Refused(("train.jsonl",))),
    "extract: a bad line": (
        EXTRACT,
        with_model(text(lambda old: old + "{]\n")),
        Refused(("train.jsonl:9",), partial=True),
    ),
    "extract: an empty folder": (
        ["extract", "model.nemo", "void", "out", "--device", "cpu"],
        with_model(lambda folder: (folder / "void").mkdir()),
        Refused(("void",)),
    ),
    "extract: a missing file": (
        EXTRACT,
        with_model(line(audio_filepath="audio/9.wav")),
        Refused(("9.wav",), partial=True),
    ),
    "prepare: the corpus is gone, its manifest is there": (
        ["prepare", "corpus", "--output", "m.jsonl", "--workers", "0"],
        emptied,
        Refused(("corpus",)),  # an unmounted disk must not cost the manifest
    ),
    "prepare: shards of another corpus are there": (
        ["prepare", "b", "--output", "b.jsonl", "--shards", "2", "--workers", "0"],
        two_corpora,
        Refused(("audio_0.tar|shard",), partial=True),  # the manifest itself is complete
    ),
    "prepare: another number of shards": (
        ["prepare", "audio", "--output", "m.jsonl", "--shards", "3", "--workers", "0"],
        sharded(lambda folder: None),
        Either(Refused(("shard",)), Right(shards_are("audio", 3))),
    ),
    "prepare: shards of a file that was replaced": (
        ["prepare", "audio", "--output", "m.jsonl", "--shards", "2", "--workers", "0"],
        sharded(lambda folder: shutil.copy(folder / "audio/7.wav", folder / "audio/0.wav")),
        Either(Refused(("shard",)), Right(shards_are("audio", 2))),
    ),
    "prepare: a shard was cut off": (
        ["prepare", "audio", "--output", "m.jsonl", "--shards", "2", "--workers", "0"],
        sharded(lambda folder: os.truncate(folder / "audio_1.tar", 9000)),
        Either(Refused(("audio_1.tar",)), Right(shards_are("audio", 2))),
    ),
    "extract: into the folder of a manifest.jsonl": (
        ["extract", "model.nemo", "manifest.jsonl", ".", "--device", "cpu"],
        with_model(copies("manifest.jsonl")),
        Refused(("manifest.jsonl",)),
    ),
    "prepare: one of two jobs is missing": (
        ["prepare", "audio", "--output", "m.jsonl", "--merge", "2", "--workers", "0"],
        jobs("0/2"),
        Refused(("job",)),
    ),
    "prepare: jobs of different numbers": (
        ["prepare", "audio", "--output", "m.jsonl", "--merge", "2", "--workers", "0"],
        jobs("0/2", "1/3"),
        Refused(("job",)),
    ),
    "prepare: all jobs": (
        ["prepare", "audio", "--output", "m.jsonl", "--merge", "2", "--workers", "0"],
        jobs("0/2", "1/2"),
        Right(made("m.jsonl", 8, third=1.8)),
    ),
    "prepare: half a surrogate pair in a text": (PREPARE, line(text="\ud800"), Right(made("m.jsonl", 8))),
    "prepare: a number of 5,000 digits": (PREPARE, text(huge_number), Either(Refused(AT_1), Right(either_count))),
    "extract: half a surrogate pair in a text": (EXTRACT, with_model(line(text="\ud800")), Right(extracted(8))),
    "extract: a number of 5,000 digits": (
        EXTRACT,
        with_model(text(huge_number)),
        Either(Refused(AT_1, partial=True), Right(extracted(8))),
    ),
    "inspect: a duration of 1e308": (
        ["inspect", "train.jsonl", "model.train_ds.max_duration=null"],
        both(line(duration=1e308), line(3, duration=1e308)),
        Either(Refused(("train.jsonl|2.wav",)), Right(said("2.wav", then=lambda folder, outcome: None))),
    ),
    "inspect: one utterance": (
        ["inspect", "train.jsonl"],
        text(lambda old: old.split("\n")[0] + "\n"),
        Right(said("1 utterance", then=lambda folder, outcome: None)),
    ),
    "inspect: durations of 1e-300": (
        ["inspect", "train.jsonl", "model.train_ds.min_duration=0"],
        every_line(lambda old: {**old, "duration": 1e-300}),
        Either(Refused(("train.jsonl",)), Right(lambda folder, outcome: None)),
    ),
}


def classes(labels: Mapping[int, Any], test: Mapping[int, Any] | None = None) -> Setup:
    def setup(folder: Path) -> None:
        lines = lines_of(folder)
        for name, of in (("a.jsonl", labels), ("b.jsonl", test or labels)):
            write_lines(
                folder / name,
                [{**lines[i % 8], **({} if label is ... else {"label": label})} for i, label in of.items()],
            )

    return with_model(setup)


def probed(count: int) -> Check:
    def check(folder: Path, outcome: Outcome) -> str | None:
        found = json.loads((folder / "out/results.json").read_text())
        scores = [found[name]["accuracy"] for name in ("encoder", "log_mel", "random_encoder")]
        if not all(0 <= score <= 1 for score in scores):
            return f"accuracies {scores}"
        return None if f"{count} classes" in outcome.text else f"it does not say {count} classes"

    return check


AB = dict(enumerate("abababab"))
PROBES: dict[str, tuple[Setup, Expected]] = {
    "no label in line 3": (classes({**AB, 2: ...}), Refused(("a.jsonl:3",))),
    "a label of null": (classes({**AB, 2: None}), Refused(("a.jsonl:3",))),
    "a label that is a list": (classes({**AB, 2: ["a"]}), Refused(("a.jsonl:3",))),
    "a label that is nan": (classes({**AB, 2: float("nan")}), Refused(("a.jsonl:3",))),
    "an empty label": (classes({**AB, 2: ""}), Either(Refused(("a.jsonl:3",)), Right(probed(3)))),
    "a number and its text": (classes({i: (1, "1")[i % 2] for i in range(8)}), Refused(("label|class|1",))),
    "a test label that is never trained": (classes(AB, {**AB, 2: "zebra"}), Refused(("zebra",))),
    "numbers": (classes({i: i % 2 for i in range(8)}), Right(probed(2))),
    "a class has one example": (classes({**AB, 2: "c"}), Either(Refused(("c",)), Right(probed(3)))),
    "every utterance is a class": (
        classes({i: f"k{i}" for i in range(8)}),
        Either(Refused(("class",)), Right(probed(8))),
    ),
    "one test utterance": (classes(AB, {0: "a"}), Either(Refused(("b.jsonl",)), Right(probed(2)))),
}


def trials() -> Iterator[Trial]:
    for name, (change, expected) in TEXTS.items():
        yield Trial(GROUP, f"text: {name}", pretrain(), expected, text(change))
    for name, (setup, expected) in LINES.items():
        yield Trial(GROUP, f"line: {name}", pretrain(), expected, setup)
    no_limits = pretrain("model.train_ds.min_duration=null", "model.train_ds.max_duration=null")
    unmeasured = every_line(lambda old: {"audio_filepath": old["audio_filepath"]})
    yield Trial(GROUP, "line: no durations, no limits", no_limits, TRAINS, unmeasured)
    for name, (value, at, expected) in PLACES.items():
        yield Trial(GROUP, f"place: {name}", train(value), expected, at)
    for name, (setup, expected) in INDEXES.items():
        yield Trial(GROUP, f"index: {name}", pretrain(), expected, setup)
    for name, (change_data, expected) in RESUMED.items():
        yield Trial(GROUP, f"resumed: {name}", resume(), expected, both(Fixture.run, change_data))
    for name, (setup, expected) in VALID.items():
        yield Trial(GROUP, f"validation: {name}", pretrain(), expected, setup)
    for name, (setup, command, expected) in TARS.items():
        yield Trial(GROUP, f"tar: {name}", command, expected, setup)
    for name, (before, command, expected) in LHOTSE.items():
        yield Trial(GROUP, f"lhotse: {name}", command, expected, before)
    for name, (command, before, expected) in OTHERS.items():
        yield Trial(GROUP, name, command, expected, before)
    for name, (setup, expected) in PROBES.items():
        command = ["probe", "model.nemo", "--train", "a.jsonl", "--test", "b.jsonl", "--label", "label"]
        yield Trial(GROUP, f"probe: {name}", [*command, "--output", "out", "--device", "cpu"], expected, setup)
