"""Manifests that people and other programs really write, and some that are meant to do harm.

Through `pretrain`, `prepare`, `inspect`, `extract` and `probe`: the lines, the index next to a manifest, tar shards
with their manifests, and lhotse's cuts. Where the data is the same in another dress, the losses must be those of the
plain manifest; where a line is nonsense, the message must name it.
"""

from __future__ import annotations

import codecs
import gzip
import io
import json
import math
import os
import shutil
import tarfile
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import soundfile
from benchmarks.hostile.harness import (
    EVIL,
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
    always,
    both,
    cut,
    flipped,
    in_fork,
    losses,
    nothing,
    on_bytes,
    replaced,
    resume,
    said,
    speech,
    trained,
    write_lines,
    zeros,
)

Line = dict[str, Any]
TRAIN = Path("train.jsonl")
INDEX = Path("train.jsonl.idx")
STEPS = 4
SHORT = 2000
"""A message with more characters than this has swallowed the input."""


def train(*overrides: str) -> list[str]:
    return resume(f"trainer.max_steps={STEPS}", *overrides)


def prepare(source: str, *options: str) -> list[str]:
    return ["prepare", source, "--output", "out.jsonl", "--workers", "0", *options]


def inspect(source: str, *options: str) -> list[str]:
    return ["inspect", source, "--examples", "1", "--batch-size", "2", *options]


def extract(source: str, *options: str) -> list[str]:
    return ["extract", f"{Fixture.path}/model.nemo", source, "out", "--device", "cpu", *options]


def probe(*options: str) -> list[str]:
    names = ["--train", "train.jsonl", "--test", "valid.jsonl", "--output", "probe", "--device", "cpu"]
    return ["probe", f"{Fixture.path}/model.nemo", *names, "--label", "label", *options]


# -------------------------------------------------------------------------------------------------------- what is right


def read_lines(path: Path) -> list[Line]:
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def same_losses(folder: Path, outcome: Outcome) -> str | None:
    """The run has the losses of the fixture's run, which read the plain manifest."""
    expected = {step: loss for step, loss in losses(Fixture.path / "runs/whole").items() if step < STEPS}
    found = losses(folder / RUN)
    return None if found and found == expected else f"losses {found} are not those of the plain manifest, {expected}"


def stands_in(*names: str) -> Check:
    """Training went on without these files, and says so in its output and in the run's list of bad files."""

    def check(folder: Path, outcome: Outcome) -> str | None:
        listed = "".join(path.read_text() for path in (folder / RUN).glob("bad_files*"))
        if unlisted := [name for name in names if name not in listed]:
            return f"not in the run's bad files: {unlisted}"
        return said(*names)(folder, outcome)

    return check


def accounted(total: int, bad: Sequence[str] = (), all_good: bool = False) -> Check:
    """`prepare` lists each input once, as good with the duration that the file has, or as bad with a reason."""

    def check(folder: Path, outcome: Outcome) -> str | None:
        good_lines, bad_lines = read_lines(folder / "out.jsonl"), read_lines(folder / "out.bad.jsonl")
        if len(good_lines) + len(bad_lines) != total or (all_good and bad_lines):
            return f"{len(good_lines)} good and {len(bad_lines)} bad lines of {total}"
        for line in good_lines:
            path = Path(line["audio_filepath"])
            whole = soundfile.info(path if path.is_absolute() else folder / path).duration
            stated = line["duration"]
            if not (stated <= whole * 1.001 if "offset" in line else math.isclose(stated, whole, rel_tol=0.001)):
                return f"{path.name}: a duration of {stated}, but the file has {whole}"
        if not all(line.get("reason") for line in bad_lines):
            return "a bad file without a reason"
        named = {Path(str(line["audio_filepath"]).replace("\\", "/")).name for line in bad_lines}
        return None if set(bad) <= named else f"bad files are {sorted(named)}, not {sorted(bad)}"

    return check


def extracted(good: int, bad: Sequence[str] = ()) -> Check:
    """So many utterances have finite features with a frame every 80 ms; the bad ones are named in both places."""

    def check(folder: Path, outcome: Outcome) -> str | None:
        listed = read_lines(folder / "out/manifest.jsonl")
        if len(listed) != good:
            return f"{len(listed)} utterances have features, expected {good}"
        for line in listed:
            path = Path(line["feature_filepath"])
            features = np.load(next(p for p in (folder / path, folder / "out" / path, path) if p.is_file()))
            if not np.isfinite(features).all():
                return f"{path.name}: features are not finite"
            if line.get("duration") and abs(features.shape[-1] - line["duration"] / 0.08) > 2:
                return f"{path.name}: {features.shape[-1]} frames for {line['duration']} s"
        where = (folder / "out/bad.jsonl").read_text() if (folder / "out/bad.jsonl").exists() else ""
        missing = [name for name in bad if name not in where or name not in outcome.text]
        return f"not named as bad: {missing}" if missing else None

    return check


def page(folder: Path, outcome: Outcome) -> str | None:
    """`inspect` has written a whole page."""
    text = (folder / "inspect.html").read_text()
    return None if text.rstrip().endswith("</html>") else "inspect.html is not complete"


def refused_shortly(*words: str) -> Right:
    """A refusal that does not print the input."""

    def check(folder: Path, outcome: Outcome) -> str | None:
        if wrong := Refused(words).wrong(folder, outcome):
            return wrong
        return f"a message of {len(outcome.message)} characters" if len(outcome.message) > SHORT else None

    return Right(check, codes=(1, 2))


# ---------------------------------------------------------------------------------------------------------- set-ups


def raw(change: Callable[[bytes], bytes], path: Path = TRAIN) -> Setup:
    return on_bytes(change, path)


def text_of(change: Callable[[list[Line]], str]) -> Setup:
    """Write the manifest in another way: a function from its lines to the text."""
    return raw(lambda data: change([json.loads(line) for line in data.splitlines()]).encode())


def each(change: Callable[[Line, int], object], path: Path = TRAIN) -> Setup:
    """Change every line in place; the number starts at 0."""

    def setup(folder: Path) -> None:
        lines = read_lines(folder / path)
        for number, line in enumerate(lines):
            change(line, number)
        write_lines(folder / path, lines)

    return setup


def third(path: Path = TRAIN, without: str = "", **values: object) -> Setup:
    """Set keys of line 3, or remove one."""

    def change(line: Line, number: int) -> None:
        if number == 2:
            line.update(values)
            line.pop(without, None)

    return each(change, path)


def third_text(text: str) -> Setup:
    """Write this in place of line 3."""

    def change(data: bytes) -> bytes:
        lines = data.splitlines()
        return b"\n".join([*lines[:2], text.encode(), *lines[3:]]) + b"\n"

    return raw(change)


def file(name: str, content: bytes | str) -> Setup:
    def setup(folder: Path) -> None:
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes(content if isinstance(content, bytes) else content.encode())

    return setup


def first(*command: str, then: Setup) -> Setup:
    """Run a command that must end well, then do something to what it has written."""

    def setup(folder: Path) -> None:
        outcome = in_fork(command, folder, {}, 60)
        if outcome.code != 0:
            raise RuntimeError(f"{command}: {outcome.text[-500:]}")
        then(folder)

    return setup


def labels(change: Callable[[Line, int], object] = lambda line, number: None) -> Setup:
    """Two classes, in turn, in both manifests; then change the lines that are trained on."""

    def label(line: Line, number: int) -> None:
        line["label"] = "ab"[number % 2]

    return both(each(label), each(label, Path("valid.jsonl")), each(change))


def indexed(change: Setup) -> Setup:
    """Put the index of the fixture next to its manifest, with the same times, and damage it."""

    def setup(folder: Path) -> None:
        for path in (TRAIN, INDEX):
            shutil.copy2(Fixture.path / path, folder / path)
        change(folder)

    return setup


def shifted_with_the_same_time(folder: Path) -> None:
    """Move the line breaks, but keep size and time: the index fits no line any more."""
    before = (folder / TRAIN).stat()
    lines = (folder / TRAIN).read_bytes().splitlines()
    lines[0] = lines[0].replace(b", ", b",").replace(b": ", b":")
    gained = sum(map(len, (folder / TRAIN).read_bytes().splitlines())) - sum(map(len, lines))
    lines[-1] += b" " * gained
    (folder / TRAIN).write_bytes(b"\n".join(lines) + b"\n")
    os.utime(folder / TRAIN, ns=(before.st_atime_ns, before.st_mtime_ns))


def moved_manifest(folder: Path) -> None:
    """Put the manifest into a folder of its own; the audio stays where it is."""
    (folder / "lists").mkdir()
    (folder / TRAIN).rename(folder / "lists/train.jsonl")


def same_base_names(folder: Path) -> None:
    """Two speakers who call their files the same."""
    for speaker, number in (("a", 0), ("b", 7)):
        (folder / "speakers" / speaker).mkdir(parents=True)
        shutil.copy(folder / f"audio/{number}.wav", folder / f"speakers/{speaker}/take1.wav")


def both_takes(folder: Path, outcome: Outcome) -> str | None:
    """The shard has both files, and the manifest says which is which."""
    lines = read_lines(folder / "sharded_manifests/manifest_0.json")
    with tarfile.open(folder / "audio_0.tar") as tar:
        names = tar.getnames()
        if len(lines) != 2 or len(set(names)) != 2:
            return f"{len(lines)} lines, members {names}"
        for line in lines:
            member = tar.extractfile(line["audio_filepath"])
            found = soundfile.info(io.BytesIO(member.read() if member else b"")).duration
            if not math.isclose(found, line["duration"], rel_tol=0.001):
                return f"{line['audio_filepath']}: {line['duration']} s in the manifest, {found} s in the shard"
    return None


def whole_shards(folder: Path, outcome: Outcome) -> str | None:
    """Two shards with the eight files, and manifests that fit them."""
    total = 0
    for number in range(2):
        with tarfile.open(folder / f"audio_{number}.tar") as tar:
            names = {Path(name).name for name in tar.getnames()}
        lines = read_lines(folder / f"sharded_manifests/manifest_{number}.json")
        if {Path(line["audio_filepath"]).name for line in lines} != names:
            return f"shard {number} has {sorted(names)}, its manifest does not"
        if not all(1 < line["duration"] < 3 for line in lines):
            return f"wrong durations in the manifest of shard {number}"
        total += len(names)
    return None if total == 8 else f"{total} files in the shards"


def untouched(path: str, content: bytes) -> Right:
    """A refusal that has left this file as it was."""

    def check(folder: Path, outcome: Outcome) -> str | None:
        if (folder / path).read_bytes() != content:
            return f"{path} was changed"
        return Refused((Path(path).name,), partial=True).wrong(folder, outcome)

    return Right(check, codes=(1, 2))


# ----------------------------------------------------------------------------------------------------- shards and cuts


def member(name: str, data: bytes) -> tuple[tarfile.TarInfo, bytes]:
    info = tarfile.TarInfo(name)
    info.size = len(data)
    return info, data


def write_tar(path: Path, members: Iterable[tuple[tarfile.TarInfo, bytes]]) -> None:
    with tarfile.open(path, "w") as tar:
        for info, data in members:
            tar.addfile(info, io.BytesIO(data))


def shards(change: Setup | None = None, prefix: str = "") -> Setup:
    """Four files in each of two shards, with a manifest each and one for all; then damage something."""

    def setup(folder: Path) -> None:
        (folder / "shards").mkdir()
        lines = read_lines(folder / TRAIN)
        for shard in range(2):
            mine = lines[4 * shard : 4 * shard + 4]
            paths = [folder / line["audio_filepath"] for line in mine]
            members = [member(prefix + path.name, path.read_bytes()) for path in paths]
            write_tar(folder / f"shards/audio_{shard}.tar", members)
            for line, path in zip(mine, paths, strict=True):
                line.update(audio_filepath=path.name, shard_id=shard)
            write_lines(folder / f"shards/manifest_{shard}.json", mine)
        write_lines(folder / "shards/all.json", lines)
        if change:
            change(folder)

    return setup


LAST_TAR = Path("shards/audio_1.tar")
LAST_MANIFEST = Path("shards/manifest_1.json")
TARS = "model.train_ds.tarred_audio_filepaths=shards/audio__OP_0..1_CL_.tar"
SHARD_MANIFESTS = "model.train_ds.manifest_filepath=shards/manifest__OP_0..1_CL_.json"
ONE_MANIFEST = "model.train_ds.manifest_filepath=shards/all.json"


def tarred(*overrides: str) -> list[str]:
    return train("model.train_ds.is_tarred=true", TARS, SHARD_MANIFESTS, *overrides)


def swap(folder: Path) -> None:
    one, other = folder / "shards/manifest_0.json", folder / LAST_MANIFEST
    (one_bytes, other_bytes) = (one.read_bytes(), other.read_bytes())
    one.write_bytes(other_bytes)
    other.write_bytes(one_bytes)


def links_in_tar(path: Path) -> None:
    """Members that are links to files outside the archive."""
    members = []
    for number in range(4, 8):
        info = tarfile.TarInfo(f"{number}.wav")
        info.type, info.linkname = tarfile.SYMTYPE, f"../audio/{number}.wav"
        members.append((info, b""))
    write_tar(path, members)


def lying_size(data: bytes) -> bytes:
    """The first member claims 8 GB."""
    header = bytearray(data[:512])
    header[124:136] = b"77777777777\0"
    header[148:156] = b" " * 8
    header[148:156] = b"%06o\0 " % sum(header)
    return bytes(header) + data[512:]


def cut_line(folder: Path, number: int) -> Line:
    path = folder / f"audio/{number}.wav"
    samples = soundfile.info(path).frames
    recording = {
        "id": f"rec-{number}",
        "sources": [{"type": "file", "channels": [0], "source": str(path)}],
        "sampling_rate": RATE,
        "num_samples": samples,
        "duration": samples / RATE,
        "channel_ids": [0],
    }
    return {
        "id": f"cut-{number}",
        "start": 0.0,
        "duration": samples / RATE,
        "channel": 0,
        "supervisions": [],
        "recording": recording,
        "type": "MonoCut",
    }


def cuts(change: Callable[[Line], object] = lambda line: None, name: str = "cuts.jsonl", only: int | None = 2) -> Setup:
    """lhotse's cuts of the eight files; one of them, or all, are changed."""

    def setup(folder: Path) -> None:
        lines = [cut_line(folder, number) for number in range(8)]
        for number, line in enumerate(lines):
            if only in {None, number}:
                change(line)
        write_lines(folder / name, lines)

    return setup


def source(**values: object) -> Callable[[Line], None]:
    return lambda line: line["recording"]["sources"][0].update(values)


def recording(**values: object) -> Callable[[Line], None]:
    return lambda line: line["recording"].update(values)


def lhotse(*overrides: str, cuts_path: str = "cuts.jsonl") -> list[str]:
    by = [f"model.train_ds.cuts_path={cuts_path}", "model.train_ds.manifest_filepath=null"] if cuts_path else []
    return train("model.train_ds.use_lhotse=true", *by, *overrides)


# ---------------------------------------------------------------------------------------------------------- the trials

Row = tuple[str, Setup | None, Expected]
L3 = Refused(("train.jsonl:3",))
FILE = Refused(("train.jsonl",))
SAME = Right(same_losses)
OR_SAME = Either(FILE, SAME)
EMPTY = Refused(("no utterance|empty|no line|0 utterances|no batch|drop_last",))


def in_other_words() -> list[Row]:
    """The whole file, as other programs and systems write it."""
    return [
        ("Windows line ends", raw(lambda data: data.replace(b"\n", b"\r\n")), SAME),
        ("a byte order mark, as Windows editors write it", raw(lambda data: codecs.BOM_UTF8 + data), OR_SAME),
        ("UTF-16, as PowerShell's > writes it", raw(lambda data: data.decode().encode("utf-16")), OR_SAME),
        ("a text in Latin-1", raw(lambda data: data.replace(b"}", b', "text": "m\xfcde"}')), OR_SAME),
        ("blank lines between and after", raw(lambda data: data.replace(b"\n", b"\n\n") + b" \n\n"), OR_SAME),
        ("no line end at the end", raw(lambda data: data.rstrip()), SAME),
        ("the copy broke off in the last line", raw(lambda data: data[:-25]), Refused(("train.jsonl:8",))),
        ("gzipped, without saying so", raw(gzip.compress), FILE),
        ("one JSON array", text_of(json.dumps), FILE),
        ("indented JSON", text_of(lambda lines: json.dumps(lines[0], indent=2) * 8), Refused(("train.jsonl:1",))),
        (
            "a CSV table",
            text_of(lambda lines: "path,duration\n" + "".join(f"{x['audio_filepath']},1.8\n" for x in lines)),
            Refused(("train.jsonl:1",)),
        ),
        ("an empty file", raw(always(b"")), FILE),
        ("zeros, as a crashed disk leaves them", raw(zeros), FILE),
        ("one line of 3 MB of nothing", raw(always(b"a" * 3_000_000)), refused_shortly("train.jsonl:1")),
        ("a FIFO", replaced(os.mkfifo, TRAIN), FILE),
    ]


def wrong_lines() -> list[Row]:
    """One line, the third, is wrong."""
    good = '"audio_filepath": "audio/2.wav"'
    left_out = Either(L3, Right(said("shorter than")))
    gone = Either(L3, Right(stands_in("gone.wav")))
    return [
        ("a line that is null", third_text("null"), L3),
        ("100,000 nested brackets", third_text('{"x": ' + "[" * 100_000), refused_shortly("train.jsonl:3")),
        ("a duration twice in a line", third_text(f'{{{good}, "duration": -3, "duration": 1.8}}'), Either(L3, SAME)),
        ("duration NaN", third(duration=math.nan), L3),
        ("duration -1", third(duration=-1), L3),
        ("duration 0", third(duration=0), left_out),
        ("duration in quotes", third(duration="1.8"), Refused(("train.jsonl:3", "duration", "prepare"))),
        ("duration 10**400", third(duration=10**400), L3),
        ("no duration", third(without="duration"), Refused(("train.jsonl:3", "no 'duration'", "prepare"))),
        ("a duration twice that of the file", third(duration=3.6), Either(L3, Right(stands_in("2.wav")))),
        ("offset -0.5", third(offset=-0.5), Refused(("train.jsonl:3", "offset"))),
        ("an offset behind the end", third(offset=100.0), Either(L3, Right(stands_in("2.wav")))),
        ("no audio_filepath", third(without="audio_filepath"), Refused(("train.jsonl:3", "audio_filepath"))),
        ("audio_filepath is a number", third(audio_filepath=2), Refused(("train.jsonl:3", "audio_filepath"))),
        ("audio_filepath has one entry in a list", third(audio_filepath=["audio/2.wav"]), Either(L3, SAME)),
        ("a path with NUL", third(audio_filepath="audio/2\0.wav"), Either(L3, Right(stands_in("audio/2")))),
        ("a path that is a folder", third(audio_filepath="audio"), Either(L3, Right(stands_in("audio")))),
        ("a path that is not there", third(audio_filepath="audio/gone.wav"), Right(stands_in("gone.wav"))),
        ("a path on the web", third(audio_filepath="https://x.invalid/gone.wav"), gone),
        ("a path on drive D:", third(audio_filepath="D:\\corpus\\gone.wav"), gone),
        (
            "a shell command as the path",
            third(audio_filepath="touch ../pwned |"),
            Either(L3, Right(stands_in("pwned"))),
        ),
    ]


def all_lines() -> list[Row]:
    """All lines are wrong in the same way, or odd and right."""

    def set_all(**values: object) -> Setup:
        return each(lambda line, number: line.update(values))

    def rename(old: str, new: str) -> Setup:
        return each(lambda line, number: line.update({new: line.pop(old)}))

    def paths(change: Callable[[str], str]) -> Setup:
        return each(lambda line, number: line.update(audio_filepath=change(line["audio_filepath"])))

    limits = Refused(("min_duration|max_duration",))
    unreadable = Refused(("No such file",), partial=True)
    return [
        ("durations in milliseconds", each(lambda line, n: line.update(duration=line["duration"] * 1000)), limits),
        ("the key is called audio_path", rename("audio_filepath", "audio_path"), Refused(("train.jsonl:1", "audio_"))),
        ("the key is called audio_filename", rename("audio_filepath", "audio_filename"), SAME),
        ("paths with backslashes", paths(lambda path: path.replace("/", "\\")), SAME),
        ("paths of the machine it was made on", paths(lambda path: "/data/ann/" + path), unreadable),
        ("durations twice those of the files", each(lambda x, n: x.update(duration=3.9)), Refused((".wav",), True)),
        ("all lines are the same utterance", set_all(audio_filepath="audio/0.wav", duration=1.6), Right(trained)),
        ("a single line", raw(lambda data: data.splitlines()[0] + b"\n"), Either(EMPTY, Right(trained))),
        ("a text of 1 MB in each line", set_all(text="x" * 1_000_000), SAME),
    ]


def names_of_manifests() -> list[Trial]:
    """What the configuration names."""

    def row(name: str, value: str, expected: Expected, setup: Setup | None = None, key: str = SPEECH) -> Trial:
        augmentor = [f"model.train_ds.batch_augmentor.{name}=1.0" for name in ("prob", "noise_ratio")]
        more = augmentor if key == NOISE else []
        return Trial("manifests", name, train(f"model.{key}={value}", *more), expected, setup)

    patterned = both(*[file(f"part_{n}.jsonl", '{"audio_filepath": "audio/0.wav", "duration": 1.6}\n') for n in (0, 2)])
    numbers = Refused(("part_",))
    noise = '{"audio_filepath": "audio/gone.wav", "duration": 5.0}\n'
    return [
        row("no such manifest", "nowhere.jsonl", Refused(("nowhere.jsonl", "no such"))),
        row("a star in the name", "*.jsonl", Either(Refused(("*.jsonl",)), Right(trained))),
        row("in another folder, paths from the working folder", "lists/train.jsonl", SAME, moved_manifest),
        row("gzipped, and called .gz", "train.jsonl.gz", Either(Refused(("train.jsonl.gz",)), SAME), gzipped),
        row("a pattern with a gap", "part__OP_0..2_CL_.jsonl", Refused(("part_1.jsonl",)), patterned),
        row("a pattern backwards", "part__OP_2..0_CL_.jsonl", numbers, patterned),
        row("a pattern of a billion", "part__OP_0..1000000000_CL_.jsonl", numbers, patterned),
        row("validation: an empty manifest", "valid.jsonl", Refused(("valid.jsonl",)), file("valid.jsonl", ""), VALID),
        row(
            "validation: a broken line",
            "valid.jsonl",
            Refused(("valid.jsonl:2",)),
            file("valid.jsonl", '{"audio_filepath": "audio/0.wav", "duration": 1.6}\n{"audio_file'),
            VALID,
        ),
        row(
            "validation: no file is there",
            "valid.jsonl",
            Either(Refused(("gone.wav",), partial=True), Right(said("gone.wav"))),
            file("valid.jsonl", noise.replace("5.0", "1.6") * 2),
            VALID,
        ),
        row("noise: no such manifest", "noise.jsonl", Refused(("noise.jsonl",)), None, NOISE),
        row(
            "noise: no file is there, all utterances get noise",
            "noise.jsonl",
            Either(Refused(("gone.wav",), partial=True), Right(said("gone.wav"))),
            file("noise.jsonl", noise),
            NOISE,
        ),
    ]


SPEECH = "train_ds.manifest_filepath"
VALID = "validation_ds.manifest_filepath"
NOISE = "train_ds.noise_manifest"


def gzipped(folder: Path) -> None:
    (folder / "train.jsonl.gz").write_bytes(gzip.compress((folder / TRAIN).read_bytes()))


def indexes() -> list[Row]:
    """The index is damaged and the manifest is not: the losses are those of the manifest."""
    or_named = Either(Refused((".idx",)), SAME)
    again = Either(Refused(("train.jsonl", "index"), partial=True), SAME)

    def of_another(folder: Path) -> None:
        shutil.copy2(Fixture.path / "valid.jsonl.idx", folder / INDEX)

    return [
        ("index: cut in half", indexed(on_bytes(cut(0.5), INDEX)), SAME),
        ("index: a bit flipped in the middle", indexed(on_bytes(flipped(0.5), INDEX)), SAME),
        ("index: a pickle that runs a command", indexed(on_bytes(always(EVIL), INDEX)), SAME),
        ("index: that of another manifest", indexed(of_another), SAME),
        ("index: of the same size and time, but other lines", indexed(shifted_with_the_same_time), again),
        ("index: a FIFO", indexed(replaced(os.mkfifo, INDEX)), or_named),
        ("index: a folder", indexed(replaced(Path.mkdir, INDEX)), or_named),
    ]


def preparing() -> list[Trial]:
    """Manifests and lists of paths as the input of `prepare`, and what an earlier command has left."""

    def row(name: str, setup: Setup | None, expected: Expected, *options: str, input: str = "train.jsonl") -> Trial:
        return Trial("manifests", f"prepare: {name}", prepare(input, *options), expected, setup)

    extra = {"text": "Grüße \u202f", "big": 2**70, "nested": {"a": [None, 1.5]}, "": "empty key"}

    def kept(folder: Path, outcome: Outcome) -> str | None:
        found = [line for line in read_lines(folder / "out.jsonl") if "big" in line]
        if len(found) != 8 or any(line.get(key) != value for line in found for key, value in extra.items()):
            return f"keys are not kept: {found[:1]}"
        return accounted(8, all_good=True)(folder, outcome)

    complete = Right(accounted(8, all_good=True))
    files = [f"audio/{number}.wav" for number in range(8)]
    once = tuple(prepare("train.jsonl"))
    in_shards = tuple(prepare("train.jsonl", "--shards", "2"))
    state = Path("out.jsonl.state")
    foreign = file("audio_0.tar", b"somebody else's archive")
    fresh = speech(RATE * 5, 3)

    def longer(folder: Path) -> None:
        soundfile.write(folder / "audio/3.wav", fresh, RATE)

    return [
        row("durations in quotes", each(lambda x, n: x.update(duration=str(x["duration"]))), complete),
        row("durations in milliseconds", each(lambda x, n: x.update(duration=1800)), Refused(("0.wav",), partial=True)),
        row(
            "other keys are kept",
            each(lambda line, n: line.update(extra)),
            Either(Refused(("train.jsonl:1",)), Right(kept)),
        ),
        row(
            "a broken line",
            third_text('{"audio_filepath": "audio/2.wav", "dur'),
            Right(accounted(8, ["train.jsonl:3"])),
        ),
        row("a segment behind the end", third(offset=50.0), Either(L3, Right(accounted(8, ["2.wav"])))),
        row(
            "the copy broke off in the last line", raw(lambda data: data[:-25]), Right(accounted(8, ["train.jsonl:8"]))
        ),
        row("a list with Windows line ends", file("l.txt", "\r\n".join(files) + "\r\n"), complete, input="l.txt"),
        row(
            "a list with a byte order mark and blank lines",
            file("l.txt", codecs.BOM_UTF8 + "\n\n".join(files).encode()),
            Either(Refused(("l.txt",)), complete),
            input="l.txt",
        ),
        row(
            "a list with files that are not there",
            file("l.txt", "\n".join([*files, "audio/gone.wav"])),
            Right(accounted(9, ["gone.wav"])),
            input="l.txt",
        ),
        row("into its own input", None, Either(FILE, Right(own_input)), "--output", "train.jsonl"),
        row("the output is a folder", made_folder, Refused(("out.jsonl",))),
        row("its state is garbage", first(*once, then=file("out.jsonl.state", b"\xff{]")), complete),
        row("its state is cut", first(*once, then=on_bytes(cut(0.5), state)), complete),
        row(
            "its manifest was cut since",
            first(*once, then=on_bytes(cut(0.5), Path("out.jsonl"))),
            Refused(("out.jsonl",)),
        ),
        row(
            "a file was replaced since",
            first(*prepare("audio"), then=longer),
            complete,
            input="audio",
        ),
        row(
            "merging a job that was not run",
            first(*once, "--job", "0/2", then=nothing),
            Refused(("job", "1")),
            *("--merge", "2"),
        ),
        row(
            "shards: another's archive is there",
            foreign,
            untouched("audio_0.tar", b"somebody else's archive"),
            *SHARDED,
        ),
        row(
            "shards: one was cut since",
            first(*in_shards, then=on_bytes(cut(0.4), Path("audio_1.tar"))),
            WHOLE,
            *SHARDED,
        ),
        row(
            "shards: a manifest was changed since",
            first(*in_shards, then=on_bytes(cut(0.4), Path("sharded_manifests/manifest_1.json"))),
            WHOLE,
            *SHARDED,
        ),
        row("shards: files of the same name", same_base_names, Right(both_takes), "--shards", "1", input="speakers"),
    ]


SHARDED = ("--shards", "2")
WHOLE = Right(whole_shards)


def made_folder(folder: Path) -> None:
    (folder / "out.jsonl").mkdir()


def own_input(folder: Path, outcome: Outcome) -> str | None:
    """The manifest that was both input and output still has its eight utterances."""
    found = read_lines(folder / TRAIN)
    return None if len(found) == 8 and all(line["duration"] > 1 for line in found) else f"{len(found)} lines are left"


def tar_shards() -> list[Trial]:
    def row(name: str, setup: Setup, expected: Expected, *overrides: str) -> Trial:
        return Trial("manifests", f"shards: {name}", tarred(*overrides), expected, setup)

    tar = Refused(("audio_1.tar",))
    tar_or_bad = Either(Refused(("audio_1.tar",), partial=True), Right(said("audio_1.tar")))
    ok = Right(trained)
    gone = third(LAST_MANIFEST, audio_filepath="gone.wav")
    html = b"<html><body>404 Not Found</body></html>" * 40
    return [
        row("one is missing", shards(replaced(nothing, LAST_TAR)), tar),
        row("one is an error page", shards(on_bytes(always(html), LAST_TAR)), tar),
        row("one is gzipped", shards(on_bytes(gzip.compress, LAST_TAR)), tar),
        row("the copy of one broke off", shards(on_bytes(cut(0.6), LAST_TAR)), tar_or_bad),
        row("a member claims 8 GB", shards(on_bytes(lying_size, LAST_TAR)), tar_or_bad),
        row("members are links to files outside", shards(replaced(links_in_tar, LAST_TAR)), tar_or_bad),
        row("members are called ./0.wav", shards(prefix="./"), Either(Refused(("audio_0.tar|audio_1.tar",)), ok)),
        row(
            "a name that is not in the tar", shards(gone), Either(Refused(("gone.wav",)), Right(stands_in("gone.wav")))
        ),
        row("two manifests are swapped", shards(swap), Refused((".wav|manifest_0.json|audio_0.tar",), partial=True)),
        row("a broken line", shards(raw(cut(0.9), LAST_MANIFEST)), Refused(("manifest_1.json:4",))),
        row(
            "one manifest for all, without shard_id",
            shards(each(lambda line, n: line.pop("shard_id"), Path("shards/all.json"))),
            Either(Refused(("all.json", "shard_id")), ok),
            ONE_MANIFEST,
        ),
        row(
            "fewer archives than manifests",
            shards(),
            Refused(("tarred_audio_filepaths|manifest_filepath|shards",)),
            "model.train_ds.tarred_audio_filepaths=shards/audio_0.tar",
        ),
        row("no archives are named", shards(), Refused(("tarred_audio_filepaths",)), f"{TARS.partition('=')[0]}=null"),
    ]


def lhotse_cuts() -> list[Trial]:
    def row(name: str, setup: Setup | None, expected: Expected, command: list[str] | None = None) -> Trial:
        return Trial("manifests", f"lhotse: {name}", command or lhotse(), expected, setup)

    cuts_file = Refused(("cuts.jsonl",))
    no_command = Refused(("command",), partial=True)
    packed = both(cuts(name="plain"), lambda folder: half_gzip(folder / "plain", folder / "cuts.jsonl.gz"))
    no_recording = Either(Refused(("cuts.jsonl|cut-2",), partial=True), Right(said("cut-2")))
    bad_or_named = Either(Refused(("cuts.jsonl|cut-2|rec-2|2.wav",), partial=True), Right(said("2.wav")))
    unknown_cfg = file("input.yaml", "- type: parquet_of_doom\n  manifest_filepath: train.jsonl\n")
    object_cfg = file("input.yaml", "- !!python/object/apply:os.system ['touch ../pwned']\n")
    by_cfg = lhotse("model.train_ds.manifest_filepath=null", "model.train_ds.input_cfg=input.yaml", cuts_path="")
    by_shar = lhotse("model.train_ds.manifest_filepath=null", "model.train_ds.shar_path=shar", cuts_path="")
    return [
        row("the compressed file broke off", packed, Refused(("cuts.jsonl.gz",)), lhotse(cuts_path="cuts.jsonl.gz")),
        row("a line broke off", both(cuts(), raw(lambda data: data[:-30], Path("cuts.jsonl"))), cuts_file),
        row(
            "recordings instead of cuts",
            cuts(lambda x: only_recording(x), only=None),
            Either(cuts_file, Right(trained)),
        ),
        row("the audio is a shell command", cuts(source(type="command", source="touch ../pwned")), no_command),
        row(
            "the audio is a pipe",
            cuts(source(type="url", source="pipe:touch ../pwned")),
            Refused(("url|pipe",), partial=True),
        ),
        row("the audio is not there", cuts(source(source="/gone/2.wav")), bad_or_named),
        row("a cut without a recording", cuts(lambda line: line.pop("recording")), no_recording),
        row("a recording of twice its samples", cuts(twice_as_long), bad_or_named),
        row(
            "a recording at half its rate",
            cuts(recording(sampling_rate=8000)),
            Either(bad_or_named.refused, Right(trained)),
        ),
        row("a NeMo manifest with a broken line", third_text('{"audio_fil'), FILE, lhotse(cuts_path="")),
        row("input_cfg has an unknown type", unknown_cfg, Refused(("parquet_of_doom",)), by_cfg),
        row("input_cfg makes a Python object", object_cfg, Refused(("input.yaml",)), by_cfg),
        row("an empty Shar folder", lambda folder: (folder / "shar").mkdir(), Refused(("shar",)), by_shar),
    ]


def half_gzip(plain: Path, packed: Path) -> None:
    data = gzip.compress(plain.read_bytes())
    packed.write_bytes(data[: len(data) // 2])


def only_recording(line: Line) -> None:
    recording_line = line["recording"]
    line.clear()
    line.update(recording_line)


def twice_as_long(line: Line) -> None:
    whole = line["recording"]
    whole["num_samples"] *= 2
    whole["duration"] *= 2
    line["duration"] *= 2


def looking_and_using() -> list[Trial]:
    """The other commands that take manifests."""

    def row(name: str, command: list[str], setup: Setup | None, expected: Expected) -> Trial:
        return Trial("manifests", name, command, expected, setup)

    one_bad = Right(extracted(7, ["gone.wav"]), codes=(1,))
    seven = Right(extracted(7, ["2.wav"]), codes=(1,))
    eight = Right(extracted(8))
    gone = third(audio_filepath="audio/gone.wav")
    tsv = "client_id\tpath\tsentence\nx\t0.wav\thello\n"

    def sub_labels(line: Line, number: int) -> None:
        line["label"] = [1, "1"][number % 2]

    mixed = both(each(sub_labels), each(sub_labels, Path("valid.jsonl")))
    one_class = both(*[each(lambda line, n: line.update(label="a"), Path(f"{x}.jsonl")) for x in ("train", "valid")])
    new_in_test = both(labels(), third(Path("valid.jsonl"), label="never seen"))
    scored = Either(Refused(("label",)), Right(results))
    return [
        row("inspect: a broken line", inspect("train.jsonl"), third_text('{"audio_fil'), Refused(("train.jsonl:3",))),
        row("inspect: a file is not there", inspect("train.jsonl"), gone, Right(said("gone.wav", then=page))),
        row(
            "inspect: less audio than stated",
            inspect("train.jsonl"),
            third(duration=9),
            Right(said("2.wav", then=page)),
        ),
        row(
            "inspect: no durations",
            inspect("train.jsonl"),
            each(lambda line, number: line.pop("duration")),
            Either(Refused(("train.jsonl:1", "duration")), Right(said("8 utterances", then=page))),
        ),
        row(
            "inspect: durations in milliseconds",
            inspect("train.jsonl"),
            each(lambda line, number: line.update(duration=line["duration"] * 1000)),
            Either(Refused(("max_duration",)), Right(said("max_duration", then=page))),
        ),
        row(
            "extract: a broken line",
            extract("train.jsonl"),
            third_text('{"audio_fil'),
            Right(extracted(7, ["jsonl:3"]), (1,)),
        ),
        row("extract: a file is not there", extract("train.jsonl"), gone, one_bad),
        row("extract: a segment behind the end", extract("train.jsonl"), third(offset=60.0), Either(L3, seven)),
        row("extract: no durations", extract("train.jsonl"), each(lambda line, n: line.pop("duration")), eight),
        row("extract: keys of its own", extract("train.jsonl"), third(feature_filepath="/x", num_frames=-1), eight),
        row("extract: Common Voice's table", extract("cv.tsv"), file("cv.tsv", tsv), Refused(("cv.tsv|0.wav",), True)),
        row("probe: a label is missing", probe(), labels(lambda x, n: x.pop("label") if n == 4 else None), FIFTH),
        row("probe: a single class", probe(), one_class, Refused(("label|class",))),
        row("probe: a test label that is never trained", probe(), new_in_test, Refused(("never seen",))),
        row("probe: 1 and '1' as labels", probe(), mixed, Either(Refused(("label",)), Right(results))),
        row("probe: a file is not there", probe(), both(labels(), gone), Refused(("gone.wav",))),
        row("probe: more labels per class than there are", probe("--labels-per-class", "50"), labels(), scored),
    ]


FIFTH = Refused(("train.jsonl:5", "label"))


def results(folder: Path, outcome: Outcome) -> str | None:
    """An accuracy between 0 and 1 for each of the three systems."""
    found = json.loads((folder / "probe/results.json").read_text())
    scores = [found[system]["accuracy"] for system in ("encoder", "log_mel", "random_encoder")]
    return None if all(0 <= score <= 1 for score in scores) else f"accuracies of {scores}"


def trials() -> list[Trial]:
    rows = [*in_other_words(), *wrong_lines(), *all_lines(), *indexes()]
    return [
        *(Trial("manifests", name, train(), expected, setup) for name, setup, expected in rows),
        *names_of_manifests(),
        *preparing(),
        *tar_shards(),
        *lhotse_cuts(),
        *looking_and_using(),
    ]
