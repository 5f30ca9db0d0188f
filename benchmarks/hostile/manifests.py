"""Bad manifests: of speech, noise, shards and lhotse cuts, their indexes, and labels for probes."""

from __future__ import annotations

import gzip
import io
import json
import os
import shutil
import socket
import struct
import tarfile
import zipfile
from collections.abc import Callable, Mapping, Sequence
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
    flipped,
    in_fork,
    link,
    losses,
    on_bytes,
    only_run,
    pretrain,
    replaced,
    said,
    speech,
    trained,
    write_lines,
)

TRAIN = Path("train.jsonl")
IDX = Path("train.jsonl.idx")
PREPARE = ["prepare", "train.jsonl", "--output", "m.jsonl", "--workers", "0"]
MODEL = "{model}"
"""Stands for the model of the fixture, which does not exist when this is imported."""
NAMES = [f"{i}.wav" for i in range(8)]

# ---- what is right


def as_planned(folder: Path, outcome: Outcome) -> str | None:
    """Four steps, whose losses are those of the fixture: the same utterances in the same order."""
    expected, found = losses(Fixture.path / "runs/whole"), losses(only_run(folder))
    if len(found) != 4 or any(found[step] != expected.get(step) for step in found):
        return f"losses differ from those with an undamaged manifest: {found}"
    return trained(folder, outcome)


def four_steps(folder: Path, outcome: Outcome) -> str | None:
    found = len(losses(only_run(folder)))
    return f"{found} training rows instead of 4" if found != 4 else trained(folder, outcome)


def named_bad(*names: str, kind: str = "train_ds") -> Check:
    """Training continued; these are in the list of bad files and in the output, and nothing else is."""

    def check(folder: Path, outcome: Outcome) -> str | None:
        listed = only_run(folder) / f"bad_files_{kind}_rank0.jsonl"
        if not listed.exists():
            return "no list of bad files"
        paths = {json.loads(line)["audio_filepath"] for line in listed.read_text().splitlines()}
        missing = [name for name in names if not any(name in path for path in paths)]
        if missing or len(paths) != len(names):
            return f"bad files listed: {sorted(paths)[:4]}, expected {names}"
        return four_steps(folder, outcome)

    return check


def json_lines(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def base(line: Mapping[str, Any]) -> str:
    return os.path.basename(str(line["audio_filepath"]))


def prepared(
    good: Sequence[str] = NAMES, bad: Sequence[str] = (), durations: Mapping[str, float] | None = None
) -> Check:
    """The manifest has exactly these files, M.bad.jsonl exactly those; durations are right within 2 %."""

    def check(folder: Path, outcome: Outcome) -> str | None:
        found, wrong = json_lines(folder / "m.jsonl"), json_lines(folder / "m.bad.jsonl")
        if sorted(map(base, found)) != sorted(good):
            return f"listed {sorted(map(base, found))[:10]}, expected {list(good)[:10]}"
        texts = [str(line["audio_filepath"]) for line in wrong]
        if len(texts) != len(bad) or any(not any(name in text for text in texts) for name in bad):
            return f"bad: {texts[:6]}, expected {list(bad)[:6]}"
        if any(not line.get("reason") for line in wrong):
            return "a bad file without a reason"
        expected = {f"{i}.wav": 1.6 + 0.1 * i for i in range(8)} | dict(durations or {})
        for line in found:
            if abs(line["duration"] / expected.get(base(line), line["duration"]) - 1) > 0.02:
                return f"{base(line)} has a duration of {line['duration']}"
        return None

    return check


def features(good: Sequence[str], bad: Sequence[str] = ()) -> Check:
    """Finite features for these utterances, and the others named at the end and in bad.jsonl."""

    def check(folder: Path, outcome: Outcome) -> str | None:
        found = json_lines(folder / "out/manifest.jsonl")
        if sorted(map(base, found)) != sorted(good):
            return f"features of {sorted(map(base, found))}, expected {sorted(good)}"
        for line in found:
            values = np.load(folder / "out" / line["feature_filepath"].removeprefix("out/"))
            if not np.isfinite(values).all() or values.shape[-1] != line["num_frames"] or not values.shape[-1]:
                return f"{base(line)}: features are not finite, or of another length"
        listed = (folder / "out/bad.jsonl").read_text() if bad else ""
        missing = [name for name in bad if name not in outcome.text or name not in listed]
        return f"not named: {missing}" if missing else None

    return check


def first_is_right(folder: Path, outcome: Outcome) -> str | None:
    """The features of 0.wav are those of the fixture."""
    for line in json_lines(folder / "out/manifest.jsonl"):
        if base(line) == "0.wav":
            found = np.load(folder / "out" / line["feature_filepath"].removeprefix("out/"))
            right = found.shape == Fixture.feature().shape and np.allclose(found, Fixture.feature(), atol=1e-3)
            return None if right else "the features of 0.wav are wrong"
    return "no features of 0.wav"


def all_of(*checks: Check) -> Check:
    def check(folder: Path, outcome: Outcome) -> str | None:
        return next((wrong for one in checks if (wrong := one(folder, outcome))), None)

    return check


def probed(classes: int) -> Check:
    def check(folder: Path, outcome: Outcome) -> str | None:
        results = json.loads((folder / "out/results.json").read_text())
        if not 0 <= results["encoder"]["accuracy"] <= 1:
            return "no accuracy"
        return None if f"{classes} classes" in outcome.text else f"not {classes} classes"

    return check


def has_page(*words: str, without: str = "") -> Check:
    """The inspection is written, and says these words."""

    def check(folder: Path, outcome: Outcome) -> str | None:
        page = (folder / "inspect.html").read_text()
        if without and without in page:
            return f"the page has {without!r}"
        missing = [word for word in words if word.lower() not in outcome.text.lower()]
        return f"not in the output: {missing}" if missing else None

    return check


# ---- how it is set up

Edit = Callable[[list[str]], "list[str] | str | bytes"]


def edited(edit: Edit, name: str = "train.jsonl") -> Setup:
    """Replace a manifest by what is made of its lines."""

    def setup(folder: Path) -> None:
        new = edit((folder / name).read_text().splitlines())
        if isinstance(new, list):
            new = "".join(line + "\n" for line in new)
        (folder / name).write_bytes(new.encode() if isinstance(new, str) else new)

    return setup


def third(text: str) -> Edit:
    """The third line is this text."""
    return lambda lines: [*lines[:2], text, *lines[3:]]


def keys(number: int | None = 2, **changes: Any) -> Callable[[list[str]], list[str]]:
    """Keys of one line (None: of all) are set; `...` removes a key."""

    def edit(lines: list[str]) -> list[str]:
        new = []
        for i, line in enumerate(lines):
            values = json.loads(line)
            if number is None or i == number:
                values = {key: value for key, value in {**values, **changes}.items() if value is not ...}
            new.append(json.dumps(values))
        return new

    return edit


def third_path(path: str) -> Edit:
    return keys(audio_filepath=path)


def make(path: str, content: str | bytes) -> Setup:
    def setup(folder: Path) -> None:
        (folder / path).parent.mkdir(parents=True, exist_ok=True)
        (folder / path).write_bytes(content.encode() if isinstance(content, str) else content)

    return setup


def make_socket(path: Path) -> None:
    here = os.getcwd()
    os.chdir(path.parent)
    with socket.socket(socket.AF_UNIX) as made:
        made.bind(path.name)
    os.chdir(here)


def first_opened(folder: Path) -> None:
    """An index as the program itself writes it: an inspection has opened the manifest."""
    in_fork(["inspect", "train.jsonl", "--examples", "0"], folder, {}, 60)
    (folder / "inspect.html").unlink(missing_ok=True)


def index_of_another(folder: Path) -> None:
    """The index of a shorter manifest, newer than the manifest that it lies next to."""
    whole = (folder / TRAIN).read_text()
    edited(lambda lines: lines[:3])(folder)
    first_opened(folder)
    (folder / TRAIN).write_text(whole)
    if (folder / IDX).exists():
        os.utime(folder / IDX)


def copied_back(folder: Path) -> None:
    """Another manifest of the same size, restored with an older time (`cp -p`, `rsync -t`)."""
    first_opened(folder)
    edited(lambda lines: lines[::-1])(folder)
    os.utime(folder / TRAIN, (1e9, 1e9))


def cut_in_place(name: str, size: int = 0) -> Setup:
    return lambda folder: os.truncate(folder / name, size)


# ---- noise

NOISY = [
    *("model.train_ds.noise_manifest=noise.jsonl", "model.train_ds.batch_augmentor.prob=1.0"),
    "model.train_ds.batch_augmentor.noise_ratio=1.0",
]


def noise(content: Sequence[Mapping[str, Any]] | str, **audio: np.ndarray[Any, Any]) -> Setup:
    """A noise manifest, and the files it needs; without any, one good file `noise.wav` of 4 s."""

    def setup(folder: Path) -> None:
        for name, samples in (audio or {"noise": speech(4 * RATE, 9)}).items():
            soundfile.write(folder / f"{name}.wav", samples, RATE, subtype="FLOAT")
        if isinstance(content, str):
            (folder / "noise.jsonl").write_text(content)
        else:
            write_lines(folder / "noise.jsonl", content)

    return setup


def one_noise(**changes: Any) -> list[dict[str, Any]]:
    values = {"audio_filepath": "noise.wav", "duration": 4.0, **changes}
    return [{key: value for key, value in values.items() if value is not ...}]


# ---- shards

TARRED = [
    *("model.train_ds.is_tarred=true", "model.train_ds.tarred_audio_filepaths=audio__OP_0..1_CL_.tar"),
    "model.train_ds.manifest_filepath=sharded/manifest__OP_0..1_CL_.json",
]
Members = list[tuple[tarfile.TarInfo, bytes]]


def shards(
    change: Callable[[Members], Members] | None = None,
    rename: Callable[[str], str] = str,
    line: Callable[[dict[str, Any]], dict[str, Any]] = dict,
    form: int = tarfile.PAX_FORMAT,
) -> Setup:
    """Two shards of four utterances; `change` is for the members of the first one, `line` for all lines."""

    def setup(folder: Path) -> None:
        (folder / "sharded").mkdir()
        of_manifest = json_lines(folder / TRAIN)
        for k in range(2):
            members, lines = [], []
            for i in range(k, 8, 2):
                data = (folder / f"audio/{i}.wav").read_bytes()
                member = tarfile.TarInfo(rename(f"{i}.wav"))
                member.size = len(data)
                members.append((member, data))
                lines.append(
                    line({"audio_filepath": f"{i}.wav", "duration": of_manifest[i]["duration"], "shard_id": k})
                )
            if change and k == 0:
                members = change(members)
            with tarfile.open(folder / f"audio_{k}.tar", "w", format=form) as tar:
                for member, data in members:
                    tar.addfile(member, io.BytesIO(data) if member.isreg() else None)
            write_lines(folder / f"sharded/manifest_{k}.json", lines)

    return setup


def as_link(target: str) -> Callable[[Members], Members]:
    """The second member is a symbolic link."""

    def change(members: Members) -> Members:
        member = tarfile.TarInfo(members[1][0].name)
        member.type, member.linkname = tarfile.SYMTYPE, target
        return [members[0], (member, b""), *members[2:]]

    return change


def twice_different(members: Members) -> Members:
    """`tar r` has appended a new version of a member, which is not audio."""
    member = tarfile.TarInfo(members[1][0].name)
    member.size = 5
    return [*members, (member, b"empty")]


def huge_member(data: bytes) -> bytes:
    """The first header says that its member has 2**62 bytes; its checksum is right."""
    header = bytearray(data[:512])
    header[124:136] = b"\x80\0\0\0" + struct.pack(">Q", 1 << 62)
    header[148:156] = b" " * 8
    header[148:156] = f"{sum(header):06o}\0 ".encode()
    return bytes(header) + data[512:]


def zipped(data: bytes) -> bytes:
    file = io.BytesIO()
    with zipfile.ZipFile(file, "w") as archive:
        archive.writestr("0.wav", data[:60_000])
    return file.getvalue()


def swapped_manifests(folder: Path) -> None:
    one, two = (folder / f"sharded/manifest_{k}.json" for k in range(2))
    content = one.read_bytes()
    one.write_bytes(two.read_bytes())
    two.write_bytes(content)


TAR = Path("audio_0.tar")

# ---- lhotse

LHOTSE = ["model.train_ds.use_lhotse=true", "model.train_ds.manifest_filepath=null", "model.train_ds.shuffle=false"]
CUTS = [*LHOTSE, "model.train_ds.cuts_path=cuts.jsonl"]


def cuts(edit: Callable[[list[dict[str, Any]]], Any] = list, name: str = "cuts.jsonl") -> Setup:
    """Cuts of the eight files, changed by `edit`, which may return bytes."""

    def setup(folder: Path) -> None:
        made = []
        for i in range(8):
            samples = soundfile.info(folder / f"audio/{i}.wav").frames
            source = {"type": "file", "channels": [0], "source": str(folder / f"audio/{i}.wav")}
            recording = {"id": f"r{i}", "sources": [source], "sampling_rate": RATE, "num_samples": samples}
            recording |= {"duration": samples / RATE, "channel_ids": [0]}
            values = {"id": f"c{i}", "start": 0.0, "duration": samples / RATE, "channel": 0, "supervisions": []}
            made.append({**values, "recording": recording, "type": "MonoCut"})
        new = edit(made)
        data = new if isinstance(new, bytes) else "".join(json.dumps(one) + "\n" for one in new).encode()
        (folder / name).write_bytes(data)

    return setup


def cut_with(**changes: Any) -> Callable[[list[dict[str, Any]]], list[dict[str, Any]]]:
    return lambda made: [{**one, **changes} if i == 2 else one for i, one in enumerate(made)]


def recording_with(**changes: Any) -> Callable[[list[dict[str, Any]]], list[dict[str, Any]]]:
    return lambda made: [
        {**one, "recording": {**one["recording"], **changes}} if i == 2 else one for i, one in enumerate(made)
    ]


def packed(made: list[dict[str, Any]]) -> bytes:
    return gzip.compress("".join(json.dumps(one) + "\n" for one in made).encode())


# ---- probes


def labels(train: Sequence[Any], test: Sequence[Any] = ("a", "b", "a", "b")) -> Setup:
    """Labelled manifests; `...` leaves the label out."""

    def setup(folder: Path) -> None:
        lines = json_lines(folder / TRAIN)
        for name, values in (("lt.jsonl", train), ("lv.jsonl", test)):
            pairs = zip(lines, values, strict=False)  # the test set has fewer lines
            both_ = [line if value is ... else {**line, "label": value} for line, value in pairs]
            (folder / name).write_text("".join(json.dumps(line) + "\n" for line in both_))

    return setup


AB = ["a", "b"] * 4


def probe(*more: str) -> list[str]:
    files = ["--train", "lt.jsonl", "--test", "lv.jsonl", "--output", "out"]
    return ["probe", MODEL, *files, "--label", "label", "--device", "cpu", *more]


def extract(source: str, *more: str) -> list[str]:
    return ["extract", MODEL, source, "out", "--device", "cpu", *more]


# ---- the table

NAMED = Refused(("train.jsonl",))
LINE_3 = Refused(("train.jsonl:3",))
ALL_8 = Right(said("8 utterances", then=as_planned))
SEVEN = Right(said("7 utterances", then=lambda folder, outcome: None if losses(only_run(folder)) else "no steps"))

LINES: list[tuple[str, Edit, Expected]] = [
    ("a last line that the copy cut", lambda lines: "\n".join(lines)[:-20], Refused(("train.jsonl:8",))),
    ("a byte order mark", lambda lines: b"\xef\xbb\xbf" + "\n".join(lines).encode(), Either(NAMED, ALL_8)),
    ("text saved as UTF-16 by an editor", lambda lines: "\n".join(lines).encode("utf-16"), NAMED),
    ("Windows line ends and blank lines", "\r\n\r\n".join, ALL_8),
    ("one array instead of lines", lambda lines: "[" + ",\n".join(lines) + "]", Either(NAMED, ALL_8)),
    (
        "markers of a merge conflict",
        lambda lines: ["<<<<<<< HEAD", *lines[:4], "=======", *lines[4:], ">>>>>>> theirs"],
        Refused(("train.jsonl:1",)),
    ),
    ("single quotes, as Python prints", lambda lines: [str(json.loads(one)) for one in lines], NAMED),
    ("zeros at its end, after a power cut", lambda lines: "\n".join(lines).encode() + bytes(4096), NAMED),
    ("a lost block in the middle", lambda lines: "\n".join(lines)[:120] + "\0" * 100 + "\n".join(lines)[220:], NAMED),
    ("two lines glued together", lambda lines: [*lines[:2], lines[2] + lines[3], *lines[4:]], LINE_3),
    ("a duration of NaN", third('{"audio_filepath": "audio/2.wav", "duration": NaN}'), LINE_3),
    ("a duration that is true", keys(duration=True), LINE_3),
    ("a duration with a decimal comma", keys(duration="1,8"), LINE_3),
    (
        "a duration of five thousand digits",
        third('{"audio_filepath": "audio/2.wav", "duration": ' + "1" * 5000 + "}"),
        LINE_3,
    ),
    (
        "durations in milliseconds",
        lambda lines: [json.dumps({**json.loads(one), "duration": 1700}) for one in lines],
        Refused(("max_duration",)),
    ),
    ("an offset of NaN", third('{"audio_filepath": "audio/2.wav", "duration": 1.0, "offset": NaN}'), LINE_3),
    ("an offset behind the end of the file", keys(offset=1000.0), Right(named_bad("2.wav"))),
    ("a path that is a list of channels", keys(audio_filepath=["audio/2.wav", "audio/3.wav"]), LINE_3),
    ("the keys of another corpus", keys(None, audio_filepath=..., path="audio/0.wav"), Refused(("train.jsonl:1",))),
    ("a hundred thousand opening brackets", third("[" * 100_000), LINE_3),
    (
        "brackets nested deep in another key",
        third('{"audio_filepath": "audio/2.wav", "duration": 1.8, "x": ' + "[" * 5000 + "]" * 5000 + "}"),
        Either(LINE_3, ALL_8),
    ),
    ("a transcript of 30 MB in one line", keys(text="word " * 6_000_000), Either(LINE_3, ALL_8)),
    (
        "a transcript in Latin-1",
        lambda lines: "\n".join(keys(text="caf\0")(lines)).replace("\\u0000", "\0").encode().replace(b"\0", b"\xe9"),
        Either(NAMED, ALL_8),
    ),
    ("a path with a zero byte", third_path("audio/2\0.wav"), Either(LINE_3, Right(named_bad("2")))),
    ("half of a surrogate pair in a path", third_path("audio/\ud800.wav"), Either(LINE_3, Right(named_bad(".wav")))),
    ("codes in a path that clear the screen", third_path("a\x1b[2J\x07\u202egnp.wav"), Right(named_bad("gnp.wav"))),
    ("a path to endless zeros", third_path("/dev/zero"), Right(named_bad("/dev/zero"))),
]


def fifo_path(folder: Path) -> None:
    os.mkfifo(folder / "pipe.wav")
    edited(third_path("pipe.wav"))(folder)


FILES: list[tuple[str, Setup, Sequence[str], Expected]] = [
    ("a manifest that is a pipe without a writer", replaced(os.mkfifo, TRAIN), pretrain(), NAMED),
    ("a manifest that links to endless zeros", replaced(link("/dev/zero"), TRAIN), pretrain(), NAMED),
    ("a path to a pipe without a writer", fifo_path, pretrain(), Right(named_bad("pipe.wav"))),
    (
        "a pattern with a manifest missing in between",
        lambda folder: [shutil.copy(folder / TRAIN, folder / f"m_{i}.json") for i in (0, 2)],
        pretrain("model.train_ds.manifest_filepath=m__OP_0..2_CL_.json"),
        Refused(("m_1.json",)),
    ),
    (
        "a pattern that counts to a trillion",
        make("m_0.json", ""),
        pretrain("model.train_ds.manifest_filepath=m__OP_0..999999999999_CL_.json"),
        Refused(("m_",)),
    ),
    (
        "an empty list of manifests",
        make("x", ""),
        pretrain("model.train_ds.manifest_filepath=[]"),
        Refused(("manifest_filepath|train_ds",)),
    ),
    (
        "a list of manifests with an empty name",
        make("x", ""),
        pretrain("model.train_ds.manifest_filepath='train.jsonl,,'"),
        Either(Refused(("manifest_filepath|manifest",)), Right(said("8 utterances", then=as_planned))),
    ),
    ("an index of another, shorter manifest", index_of_another, pretrain(), ALL_8),
    ("an index that is a folder", replaced(Path.mkdir, IDX), pretrain(), ALL_8),
    ("an index that is a pipe", replaced(os.mkfifo, IDX), pretrain(), Either(NAMED, ALL_8)),
    ("an index with a flipped bit", both(first_opened, on_bytes(flipped(0.6), IDX)), pretrain(), ALL_8),
    ("an index cut in half", both(first_opened, on_bytes(cut(0.5), IDX)), pretrain(), ALL_8),
    (
        "an older manifest restored next to a newer index",
        copied_back,
        pretrain(),
        Right(said("8 utterances", then=four_steps)),
    ),
]

NOISES: list[tuple[str, Setup, Expected]] = [
    ("a noise manifest without a line", noise(""), Refused(("noise.jsonl",))),
    (
        "a noise manifest whose files are all gone",
        noise([{"audio_filepath": f"gone{i}.wav", "duration": 3.0} for i in range(30)]),
        Either(Refused(("gone|noise",), partial=True), Right(said("gone"))),
    ),
    ("a noise file of pure silence", noise(one_noise(), noise=np.zeros(4 * RATE)), Right(four_steps)),
    (
        "a noise file that is not a number",
        noise(one_noise(), noise=np.full(4 * RATE, np.nan)),
        Either(Refused(("noise.wav",), partial=True), Right(said("noise.wav"))),
    ),
    (
        "a noise manifest without durations",
        noise(one_noise(duration=...)),
        Either(Refused(("noise.jsonl",)), Right(four_steps)),
    ),
    (
        "noise that is shorter than its line says",
        noise(one_noise(duration=4000.0)),
        Either(Refused(("noise",), partial=True), Right(said("noise.wav"))),
    ),
    (
        "noise so loud that its energy overflows",
        noise(one_noise(), noise=np.full(4 * RATE, 3e38)),
        Either(Refused(("noise.wav",), partial=True), Right(four_steps)),
    ),
]

SHARDS: list[tuple[str, Setup, Expected]] = [
    ("a shard compressed by gzip", both(shards(), on_bytes(gzip.compress, TAR)), Refused(("audio_0.tar",))),
    (
        "a shard cut in the middle",
        both(shards(), on_bytes(cut(0.5), TAR)),
        Either(Refused(("audio_0.tar",)), Right(said("audio_0.tar"))),
    ),
    ("a shard of zero bytes", both(shards(), on_bytes(always(b""), TAR)), Refused(("audio_0.tar",))),
    (
        "a shard with a flipped bit in a header",
        both(shards(), on_bytes(flipped(0.00004), TAR)),
        Either(Refused(("audio_0.tar",)), Right(said("audio_0.tar"))),
    ),
    (
        "a shard whose header promises 2**62 bytes",
        both(shards(), on_bytes(huge_member, TAR)),
        Either(Refused(("audio_0.tar",)), Right(said("audio_0.tar"))),
    ),
    (
        "a shard without a file of its manifest",
        shards(lambda members: members[1:]),
        Either(Refused(("0.wav|audio_0.tar",)), Right(said("0.wav"))),
    ),
    (
        "a shard member that links to a secret",
        shards(as_link("/etc/passwd")),
        Either(Refused(("2.wav|audio_0.tar",)), Right(said("2.wav"))),
    ),
    (
        "a shard with a member appended twice",
        shards(twice_different),
        Either(Refused(("2.wav|audio_0.tar",)), Right(four_steps)),
    ),
    (
        "shards made from within a folder with ./",
        shards(rename=lambda name: f"./{name}"),
        Either(Refused(("audio_0.tar|0.wav",)), Right(four_steps)),
    ),
    ("shard manifests in the wrong order", both(shards(), swapped_manifests), Refused(("audio_0.tar|.wav|manifest",))),
    (
        "a shard manifest that is empty",
        both(shards(), on_bytes(always(b""), Path("sharded/manifest_0.json"))),
        Either(Refused(("manifest_0.json",)), Right(said("manifest_0.json: is empty"))),
    ),
]

TARRED_FILES: list[tuple[str, Setup, Sequence[str], Expected]] = [
    (
        "more shards than manifests",
        both(shards(), lambda folder: shutil.copy(folder / TAR, folder / "audio_2.tar")),
        pretrain(*TARRED, "model.train_ds.tarred_audio_filepaths=audio__OP_0..2_CL_.tar"),
        Refused(("manifest|shard|tarred",)),
    ),
    (
        "shards without their paths in the configuration",
        shards(),
        pretrain(*TARRED, "model.train_ds.tarred_audio_filepaths=null"),
        Refused(("tarred_audio_filepaths",)),
    ),
]

LHOTSES: list[tuple[str, Setup, Sequence[str], Expected]] = [
    (
        "a lhotse cut behind the end of its recording",
        cuts(cut_with(start=99.0)),
        CUTS,
        Either(Refused(("c2|cuts.jsonl|2.wav",), partial=True), Right(said("2.wav"))),
    ),
    (
        "a lhotse cut of negative duration",
        cuts(cut_with(duration=-1.0)),
        CUTS,
        Either(Refused(("c2|cuts.jsonl",), partial=True), Right(said("c2"))),
    ),
    (
        "lhotse cuts whose last line is cut",
        cuts(lambda made: "\n".join(map(json.dumps, made)).encode()[:-40]),
        CUTS,
        Refused(("cuts.jsonl",), partial=True),
    ),
    (
        "compressed lhotse cuts whose end is missing",
        cuts(lambda made: packed(made)[:-150], "cuts.jsonl.gz"),
        [*CUTS, "model.train_ds.cuts_path=cuts.jsonl.gz"],
        Refused(("cuts.jsonl.gz",), partial=True),
    ),
    (
        "a lhotse recording with a rate of zero",
        cuts(recording_with(sampling_rate=0)),
        CUTS,
        Either(Refused(("c2|r2|cuts.jsonl|2.wav",), partial=True), Right(said("2.wav"))),
    ),
    (
        "lhotse cuts that are a manifest of NeMo",
        lambda folder: shutil.copy(folder / TRAIN, folder / "cuts.jsonl"),
        CUTS,
        Refused(("cuts.jsonl",)),
    ),
    (
        "an input_cfg of a type that does not exist",
        make("in.yaml", "- type: nemoo\n  manifest_filepath: train.jsonl\n"),
        [*LHOTSE, "model.train_ds.input_cfg=in.yaml"],
        Refused(("in.yaml|input_cfg",)),
    ),
    (
        "an input_cfg that contains itself",
        make("in.yaml", "- type: group\n  input_cfg: in.yaml\n  weight: 1\n"),
        [*LHOTSE, "model.train_ds.input_cfg=in.yaml"],
        Refused(("in.yaml|input_cfg",)),
    ),
    (
        "an input_cfg whose weights are not numbers",
        make("in.yaml", "- type: nemo\n  manifest_filepath: train.jsonl\n  weight: .nan\n"),
        [*LHOTSE, "model.train_ds.input_cfg=in.yaml"],
        Refused(("weight|in.yaml|input_cfg",)),
    ),
]

PROBES: list[tuple[str, Setup, Sequence[str], Expected]] = [
    ("a label that one line lacks", labels([*AB[:4], ..., *AB[5:]]), (), Refused(("lt.jsonl:5",))),
    ("a single label for everything", labels(["a"] * 8, ["a"] * 4), (), Refused(("label",))),
    ("a label that only the test set has", labels(AB, ["a", "b", "novel", "b"]), (), Refused(("novel",))),
    (
        "labels that look the same in Unicode",
        labels(["e\u0301", "b"] * 4, ["\xe9", "b"] * 2),
        (),
        Either(Refused(("lv.jsonl|label",)), Right(probed(2))),
    ),
    ("labels that are lists", labels([["a"], ["b"]] * 4, [["a"], ["b"]] * 2), (), Refused(("lt.jsonl",))),
    ("labels of null", labels([None, "b"] * 4, [None, "b"] * 2), (), Refused(("lt.jsonl",))),
    (
        "labels with codes that clear the screen",
        labels(["\x1b[2J\x07", "b"] * 4, ["\x1b[2J\x07", "b"] * 2),
        (),
        Either(Refused(("lt.jsonl|label",)), Right(probed(2))),
    ),
    (
        "numbers in one manifest, their text in the other",
        labels([0, 1] * 4, ["0", "1"] * 2),
        (),
        Either(Refused(("lv.jsonl|label",)), Right(probed(2))),
    ),
    (
        "more labels per class than there are",
        labels(AB),
        ("--labels-per-class", "50"),
        Either(Refused(("labels-per-class|label",)), Right(said("4", then=probed(2)))),
    ),
    (
        "noise for a probe that is silent",
        both(labels(AB), noise(one_noise(), noise=np.zeros(4 * RATE))),
        ("--snr", "0", "--noise", "noise.jsonl"),
        Refused(("noise",)),
    ),
]


def with_bad_lines(lines: list[str]) -> bytes:
    """Five kinds of bad lines among good ones."""
    bad = ["", "{", '{"duration": 1}', '{"audio_filepath": 7}', '{"audio_filepath": "audio/gone.wav"}', "null"]
    return "\n".join([*lines[:4], *bad, *lines[4:]]).encode()


def tree_loop(folder: Path) -> None:
    (folder / "audio/up").symlink_to("..")
    (folder / "audio/self").symlink_to("self")


def half_done(change: Callable[[bytes], bytes], name: str) -> Setup:
    """A first, complete run; then its file is damaged."""

    def setup(folder: Path) -> None:
        in_fork(PREPARE, folder, {}, 60)
        on_bytes(change, Path(name))(folder)

    return setup


def jobs(*numbers: str, damage: Setup | None = None) -> Setup:
    def setup(folder: Path) -> None:
        for number in numbers:
            in_fork([*PREPARE, "--job", number], folder, {}, 60)
        if damage:
            damage(folder)

    return setup


def cut_parts(folder: Path) -> None:
    """The lines that job 1 has measured are cut in half."""
    os.truncate(folder / "m.jobs/1-of-2.log", 106)


def other_shards(folder: Path) -> None:
    """Shards of another corpus in the folder."""
    (folder / "other").mkdir()
    soundfile.write(folder / "other/x.wav", speech(RATE * 2, 5), RATE)
    in_fork(["prepare", "other", "--output", "o.jsonl", "--shards", "2", "--workers", "0"], folder, {}, 60)


LISTED = Right(prepared())
PREPARES: list[tuple[str, Setup | None, Sequence[str], Expected]] = [
    (
        "bad lines of five kinds to prepare",
        edited(with_bad_lines),
        PREPARE,
        Right(
            lambda folder, outcome: (
                "not 8 lines"
                if len(json_lines(folder / "m.jsonl")) != 8
                else None
                if len(json_lines(folder / "m.bad.jsonl")) == 5
                else "not 5 bad lines"
            )
        ),
    ),
    (
        "a list of paths with Windows ends and a byte order mark",
        make("list.txt", "\ufeff" + "".join(f"audio\\{name}\r\n" for name in NAMES)),
        ["prepare", "list.txt", *PREPARE[2:]],
        Either(Refused(("list.txt",)), LISTED),
    ),
    (
        "a folder with links that lead in circles",
        tree_loop,
        ["prepare", "audio", *PREPARE[2:]],
        Either(
            Refused(("audio",)),
            Right(
                lambda folder, outcome: (
                    None
                    if set(NAMES) <= {base(line) for line in json_lines(folder / "m.jsonl")}
                    else "files are missing"
                )
            ),
        ),
    ),
    (
        "an output that is the input manifest",
        None,
        ["prepare", "train.jsonl", "--output", "train.jsonl"],
        Either(NAMED, Right(lambda folder, outcome: None if len(json_lines(folder / TRAIN)) == 8 else "lost")),
    ),
    ("an output that is a folder", make("m.jsonl/x", ""), PREPARE, Refused(("m.jsonl",))),
    (
        "a state of junk from an earlier run",
        half_done(always(b"\xff\0junk"), "m.jsonl.state"),
        PREPARE,
        Either(Refused(("m.jsonl.state",)), LISTED),
    ),
    (
        "a result that was cut after it was complete",
        half_done(cut(0.4), "m.jsonl"),
        PREPARE,
        Either(Refused(("m.jsonl",)), LISTED),
    ),
    ("a merge while one job has not run", jobs("0/3", "1/3"), [*PREPARE, "--merge", "3"], Refused(("2",))),
    (
        "a merge where the result of a job is cut",
        jobs("0/2", "1/2", damage=cut_parts),
        [*PREPARE, "--merge", "2"],
        Either(Refused(("job|m.jsonl",)), LISTED),
    ),
    (
        "shards of another corpus in the folder",
        other_shards,
        [*PREPARE, "--shards", "2"],
        Refused(("audio_|shard",), partial=True),
    ),
    (
        "a segment of a file that is longer than the file",
        edited(keys(offset=0.5, duration=99.0)),
        PREPARE,
        Right(prepared([name for name in NAMES if name != "2.wav"], ["audio/2.wav"])),
    ),
]

OTHERS: list[tuple[str, Setup | None, Sequence[str], Expected]] = [
    (
        "a script for the browser in a path to inspect",
        edited(third_path("<script>alert(1)</script>.wav")),
        ["inspect", "train.jsonl", "--batch-size", "2"],
        Right(has_page("script>.wav", without="<script>alert(1)")),
    ),
    (
        "durations to inspect that are twice the audio",
        edited(
            lambda lines: [
                json.dumps({**json.loads(one), "duration": 2 * json.loads(one)["duration"]}) for one in lines
            ]
        ),
        ["inspect", "train.jsonl", "--batch-size", "2"],
        Either(Refused((".wav",)), Right(has_page(".wav", "8"))),
    ),
    (
        "durations to inspect of 1e300 s",
        edited(keys(duration=1e300)),
        ["inspect", "train.jsonl", "--batch-size", "2", "model.train_ds.max_duration=null"],
        Either(NAMED, Right(has_page("2.wav"))),
    ),
    (
        "a manifest to inspect whose audio has moved",
        lambda folder: (folder / "audio").rename(folder / "moved"),
        ["inspect", "train.jsonl", "--batch-size", "2"],
        Either(Refused((".wav",)), Right(has_page("0.wav"))),
    ),
    (
        "a segment to extract behind the end",
        edited(keys(offset=50.0)),
        extract("train.jsonl"),
        Right(features([name for name in NAMES if name != "2.wav"], ["2.wav"]), codes=(1,)),
    ),
    (
        "lines to extract that are repeated",
        edited(lambda lines: [lines[0]] * 2 + lines[:2]),
        extract("train.jsonl"),
        Right(all_of(first_is_right, features(["0.wav"] * 3 + ["1.wav"]))),
    ),
    (
        "lines to extract that have features already",
        edited(keys(None, feature_filepath="/etc/x.npy", num_frames=-3)),
        extract("train.jsonl"),
        Right(all_of(first_is_right, features(NAMES))),
    ),
    (
        "a bad line among those to extract",
        edited(third('{"audio_filepath": "audio/2.wav", "dur')),
        extract("train.jsonl"),
        Either(LINE_3, Right(features([name for name in NAMES if name != "2.wav"], ["train.jsonl:3"]), codes=(1,))),
    ),
]

LONG = pretrain("trainer.max_steps=60", "exp_manager.name=run")
DISTURBED: list[tuple[str, Setup]] = [
    ("a manifest that is emptied while it is read", cut_in_place("train.jsonl")),
    ("an index that is emptied while it is used", cut_in_place("train.jsonl.idx")),
]


def trials() -> list[Trial]:
    def one(name: str, command: Sequence[str], expected: Expected, setup: Setup | None = None, **more: Any) -> Trial:
        command = [argument.replace(MODEL, str(Fixture.path / "model.nemo")) for argument in command]
        return Trial("manifests", name, command, expected, setup, **more)

    return [
        *(one(f"a manifest with {name}", pretrain(), expected, edited(edit)) for name, edit, expected in LINES),
        *(one(name, command, expected, setup) for name, setup, command, expected in FILES),
        *(one(name, pretrain(*NOISY), expected, setup) for name, setup, expected in NOISES),
        *(one(name, pretrain(*TARRED), expected, setup) for name, setup, expected in SHARDS),
        *(one(name, command, expected, setup) for name, setup, command, expected in TARRED_FILES),
        *(one(name, pretrain(*keys_), expected, setup) for name, setup, keys_, expected in LHOTSES),
        *(one(name, probe(*more), expected, setup) for name, setup, more, expected in PROBES),
        *(one(name, command, expected, setup) for name, setup, command, expected in PREPARES),
        *(one(name, command, expected, setup) for name, setup, command, expected in OTHERS),
        *(one(name, LONG, Right(trained), act=disturbed(disturb), limit_s=120) for name, disturb in DISTURBED),
    ]
