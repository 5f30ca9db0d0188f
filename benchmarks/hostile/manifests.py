"""Manifests that other tools, spreadsheets, copies and people have damaged, and manifests that change while in use."""

from __future__ import annotations

import gzip
import json
import math
import os
import re
import shutil
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from benchmarks.hostile.harness import (
    ALL_STEPS,
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
    cut,
    disturbed,
    flipped,
    in_fork,
    losses,
    nothing,
    on_bytes,
    pretrain,
    replaced,
    resume,
    rows,
    trained,
    write_lines,
)
from safetensors import safe_open

GROUP = "manifests"
PROBE = [
    *("probe", "{model}", "--train", "train.jsonl", "--test", "train.jsonl"),
    *("--label", "speaker", "--output", "probe"),
]
TRAIN = Path("train.jsonl")
INDEX = Path("train.jsonl.idx")
COUNT = 8
Line = dict[str, Any]

# ------------------------------------------------------------------------------------------------------ ways to damage


def lines_of(folder: Path, name: str | Path = TRAIN) -> list[Line]:
    found: list[Line] = [json.loads(text) for text in (folder / name).read_text(encoding="utf-8").splitlines()]
    return found


def text_as(change: Callable[[list[str]], str | bytes], name: str | Path = TRAIN) -> Setup:
    """Write the manifest again from its lines (without their ends)."""

    def setup(folder: Path) -> None:
        made = change((folder / name).read_text(encoding="utf-8").splitlines())
        (folder / name).write_bytes(made.encode() if isinstance(made, str) else made)

    return setup


def fields(change: Callable[[Line], Line], only: int | None = None, name: str | Path = TRAIN) -> Setup:
    """Replace every line, or the one with this number from 1, by what `change` makes of it."""

    def setup(folder: Path) -> None:
        made = [
            change(line) if only in (None, number) else line for number, line in enumerate(lines_of(folder, name), 1)
        ]
        text = "".join(json.dumps(line, ensure_ascii=False) + "\n" for line in made)
        (folder / name).write_bytes(text.encode(errors="surrogatepass"))

    return setup


def with_values(only: int | None = None, name: str | Path = TRAIN, **values: Any) -> Setup:
    return fields(lambda line: {**line, **values}, only, name)


def paths_as(form: str) -> Setup:
    return fields(lambda line: {**line, "audio_filepath": form.format(line["audio_filepath"])})


def joined(lines: Sequence[str]) -> str:
    return "".join(line + "\n" for line in lines)


def instead(number: int, new: Callable[[str], str]) -> Callable[[list[str]], str]:
    """Change the text of one line, numbered from 1."""
    return lambda lines: joined([new(line) if at == number else line for at, line in enumerate(lines, 1)])


def ran(*commands: Sequence[str]) -> Setup:
    """Commands that have succeeded before."""

    def setup(folder: Path) -> None:
        for command in commands:
            outcome = in_fork(command, folder, {}, 120)
            if outcome.code != 0:
                raise RuntimeError(f"the setup failed: {command}: {outcome.text[-300:]}")

    return setup


def indexed(folder: Path) -> None:
    ran(["inspect", "train.jsonl", "--examples", "0"])(folder)
    (folder / "inspect.html").unlink(missing_ok=True)
    if not (folder / INDEX).is_file():
        raise RuntimeError("no index was written")


def sharded(folder: Path) -> None:
    (folder / "shards").mkdir()
    ran(["prepare", "train.jsonl", "--output", "shards/all.jsonl", "--shards", "4", "--workers", "0"])(folder)


def extracted(folder: Path) -> None:
    ran(["extract", str(Fixture.path / "model.nemo"), "train.jsonl", "first"])(folder)


def paths_list(encoding: str = "utf-8", end: str = "\n", form: str = "{}") -> Setup:
    def setup(folder: Path) -> None:
        text = "".join(form.format(line["audio_filepath"]) + end for line in lines_of(folder))
        (folder / "list.txt").write_bytes(text.encode(encoding))

    return setup


def two_copies(folder: Path) -> None:
    """Two validation sets of the same name in different folders."""
    for number, name in enumerate("ab"):
        (folder / name).mkdir()
        write_lines(folder / name / "valid.jsonl", lines_of(folder)[2 * number : 2 * number + 2])


def older_copy(folder: Path) -> None:
    """A shorter manifest with an old time is copied over one that has an index."""
    indexed(folder)
    write_lines(folder / TRAIN, lines_of(folder)[:5])
    os.utime(folder / TRAIN, (1_500_000_000, 1_500_000_000))


# ------------------------------------------------------------------------------------------------------- what is right


def bad_files(folder: Path) -> set[str]:
    paths = (folder / RUN).glob("bad_files_train_ds_*.jsonl")
    return {line["audio_filepath"] for path in paths for line in lines_of(folder, path)}


def bad_shard(name: str) -> Check:
    """Trained on the rest; everything bad is named, and is in this shard."""

    def check(folder: Path, outcome: Outcome) -> str | None:
        listed = bad_files(folder)
        if not listed or any(name not in path for path in listed):
            return f"named as bad: {sorted(listed)}"
        return trained(folder, outcome)

    return check


def used(count: int = COUNT, bad: int = 0) -> Check:
    """Trained on so many utterances, and so many files are named as bad."""

    def check(folder: Path, outcome: Outcome) -> str | None:
        if wrong := trained(folder, outcome):
            return wrong
        if f"train.jsonl: {count:,} utterances" not in outcome.text:
            return f"not in the output: {count} utterances"
        listed = bad_files(folder)
        return None if len(listed) == bad else f"{len(listed)} bad files are named, expected {bad}"

    return check


def counted(count: int) -> Check:
    def check(folder: Path, outcome: Outcome) -> str | None:
        if f"{count} utterances" not in outcome.text:
            return f"not in the output: {count} utterances"
        return None if (folder / "inspect.html").is_file() else "no page"

    return check


def measured(count: int, bad: int = 0, **kept: Any) -> Check:
    """`m.jsonl` has true durations, and every utterance of the input is in it or among the bad ones."""

    def check(folder: Path, outcome: Outcome) -> str | None:
        found = lines_of(folder, "m.jsonl")
        bad_path = folder / "m.bad.jsonl"
        listed = lines_of(folder, bad_path) if bad_path.exists() else []
        if (len(found), len(listed)) != (count, bad):
            return f"{len(found)} good and {len(listed)} bad, expected {count} and {bad}"
        for line in found:
            true = 1.6 + 0.1 * int(Path(line["audio_filepath"]).stem)
            if not isinstance(line["duration"], float) or not abs(line["duration"] - true) < 1e-3:
                return f"duration {line['duration']!r}, should be {true}"
            if any(line.get(key) != value for key, value in kept.items()):
                return f"keys are not kept: {line}"
        return None

    return check


def any_split(total: int) -> Check:
    """Nothing is lost: good and bad lines together are all of the input."""

    def check(folder: Path, outcome: Outcome) -> str | None:
        names = [folder / "m.jsonl", folder / "m.bad.jsonl"]
        found = sum(len(lines_of(folder, name)) for name in names if name.exists())
        return None if found == total else f"{found} of {total} lines are accounted for"

    return check


def features_of(count: int) -> Check:
    def check(folder: Path, outcome: Outcome) -> str | None:
        found = lines_of(folder, "out/manifest.jsonl")
        if len(found) != count:
            return f"{len(found)} lines, expected {count}"
        for line in found:
            name = line["feature_filepath"]
            if not any((base / name).is_file() for base in (folder, folder / "out")):
                return f"{name} does not exist"
            if not 15 <= line["num_frames"] <= 32:
                return f"{line['num_frames']} frames for {line['audio_filepath']}"
        return None

    return check


def two_losses(folder: Path, outcome: Outcome) -> str | None:
    if wrong := trained(folder, outcome):
        return wrong
    names = {name for row in rows(folder / RUN) for name, value in row.items() if name.endswith("_val_loss") and value}
    return None if len(names) == 2 else f"validation losses of two sets are in columns {sorted(names)}"


def continued_with_warning(folder: Path, outcome: Outcome) -> str | None:
    if "resumed at step" not in outcome.text:
        return "it does not say that it resumed"
    if max(losses(folder / RUN)) < ALL_STEPS - 1:
        return "it did not continue to the end"
    warned = re.search(r"data\b.* (have|has) changed|other data|batches differ", outcome.text)
    return None if warned else "no warning that the data is not that of before"


def three_at_once(folder: Path, outcome: Outcome) -> str | None:
    found = outcome.text.count(f"train.jsonl: {COUNT} utterances")
    return None if found == 3 and len(list(folder.glob("*.html"))) == 3 else f"{found} of 3 are right"


def many(folder: Path) -> None:
    """A corpus of 2,400 names, and lists of its halves."""
    (folder / "many").mkdir()
    names = [f"many/{i}.wav" for i in range(2400)]
    for number, name in enumerate(names):
        os.link(folder / f"audio/{number % COUNT}.wav", folder / name)
    (folder / "a.txt").write_text("".join(f"{name}\n" for name in names[:600]))
    (folder / "b.txt").write_text("".join(f"{name}\n" for name in names[600:1200]))


def all_in_shards(folder: Path, outcome: Outcome) -> str | None:
    """Both commands have said that they succeeded: the features of both are there."""
    found = 0
    for path in (folder / "out").glob("*.safetensors"):
        with safe_open(path, "pt") as file:
            found += len(file.keys())
    return None if found == 1200 else f"{found} of 1200 features are in the shards"


def each_once(folder: Path, outcome: Outcome) -> str | None:
    """Every file of the corpus is in the manifest once, and in the shards once, if there are any."""
    shards = list(folder.glob("m/sharded_manifests/manifest_*.json"))
    for what, paths in (("manifest", [folder / "m/all.jsonl"]), ("shards", shards)):
        if not paths:
            continue
        lines = [line["audio_filepath"] for path in paths for line in lines_of(folder, path)]
        if (len(lines), len(set(lines))) != (2400, 2400):
            return f"{len(lines)} lines, {len(set(lines))} of them different, in the {what}, expected 2400"
    return None


# -------------------------------------------------------------------------------------------------------------- tables

AT_1, AT_3 = Refused(("train.jsonl:1",)), Refused(("train.jsonl:3",))
ALL_USED = Right(used())


def at_line(number: int, *words: str) -> Refused:
    return Refused((f"train.jsonl:{number}", *words))


def unreadable(*words: str) -> Refused:
    """All audio is wrong, which shows when it is read: a run folder may be there."""
    return Refused(words, partial=True)


WRITTEN_BY_OTHERS: list[tuple[str, Callable[[list[str]], str | bytes], Expected]] = [
    ("byte order mark of Windows", lambda x: b"\xef\xbb\xbf" + joined(x).encode(), Either(AT_1, ALL_USED)),
    ("UTF-16 from PowerShell", lambda x: joined(x).encode("utf-16"), Refused(("train.jsonl", "UTF"))),
    ("line ends of Windows", lambda x: joined(x).replace("\n", "\r\n").encode(), ALL_USED),
    ("line ends of old Macs", lambda x: "\r".join(x), Either(Refused(("train.jsonl",)), ALL_USED)),
    ("CSV", lambda x: "audio_filepath,duration\naudio/0.wav,1.6\naudio/1.wav,1.7\n", AT_1),
    ("TSV of fairseq", lambda x: "/data/audio\n0.wav\t25600\n1.wav\t27200\n", AT_1),
    ("wav.scp with pipes", lambda x: "u0 sph2pipe -f wav a.sph |\nu1 sph2pipe -f wav b.sph |\n", AT_1),
    ("one JSON array", lambda x: "[" + ",".join(x) + "]\n", Either(AT_1, ALL_USED)),
    ("pretty printed JSON", lambda x: joined([json.dumps(json.loads(y), indent=2) for y in x]), Either(AT_1, ALL_USED)),
    ("single quotes of print(dict)", lambda x: joined([str(json.loads(y)) for y in x]), AT_1),
    ("pointer of Git LFS", lambda x: "version https://git-lfs.github.com/spec/v1\noid sha256:4d7a\nsize 1200\n", AT_1),
    (
        "merge conflict of git",
        lambda x: joined([*x[:2], "<<<<<<< HEAD", x[2], "=======", x[3], ">>>>>>> theirs", *x[4:]]),
        AT_3,
    ),
    ("gzip without its suffix", lambda x: gzip.compress(joined(x).encode()), Refused(("train.jsonl",))),
    ("parquet of datasets", lambda x: b"PAR1" + bytes(range(256)) * 4 + b"PAR1", Refused(("train.jsonl",))),
]
DAMAGED: list[tuple[str, Callable[[list[str]], str | bytes], Expected]] = [
    (
        "blank lines between and at the end",
        lambda x: "\n\n".join(x) + "\n\n\n",
        Either(Refused(("train.jsonl:2",)), ALL_USED),
    ),
    ("no line end at the end", lambda x: "\n".join(x), ALL_USED),
    ("two lines in one, no newline before an append", lambda x: joined([*x[:2], x[2] + x[3], *x[4:]]), AT_3),
    ("last line cut by a quota", lambda x: joined(x)[:-20], at_line(8)),
    ("zeros at the end after a crash", lambda x: joined(x).encode() + bytes(512), at_line(9)),
    ("a hole of zeros between two writers", instead(3, lambda y: "\0" * len(y)), AT_3),
    ("two writers in one line", instead(3, lambda y: y[:25] + y + y[25:]), AT_3),
    ("empty after a full disk", lambda x: "", Refused(("train.jsonl",))),
    ("Latin-1", lambda x: joined(x).replace("audio/2", "audio/é").encode("latin-1"), AT_3),
    ("backslashes of Windows, not escaped", lambda x: joined([y.replace("audio/", "C:\\data\\") for y in x]), AT_1),
    ("the same file twice (cat a a)", lambda x: joined([*x, *x]), Right(used(2 * COUNT))),
    (
        "a transcript of 4 MB in one line",
        instead(3, lambda y: y[:-1] + ', "text": "' + "word " * 800_000 + '"}'),
        ALL_USED,
    ),
    (
        "line separators of Unicode in texts",
        lambda x: joined([y[:-1] + ', "text": "one\u2028two\u0085three\u2029"}' for y in x]),
        ALL_USED,
    ),
    ("half a surrogate pair in a text", instead(3, lambda y: y[:-1] + ', "text": "\\ud83d"}'), ALL_USED),
    ("null as a line", instead(3, lambda y: "null"), AT_3),
]

LONG = "model.train_ds.max_duration=null"
FIELDS: list[tuple[str, Setup, Expected, tuple[str, ...]]] = [
    (
        "durations in milliseconds",
        fields(lambda x: {**x, "duration": x["duration"] * 1000}),
        Refused(("max_duration",)),
        (),
    ),
    (
        "durations in milliseconds without a limit",
        fields(lambda x: {**x, "duration": x["duration"] * 1000}),
        unreadable(".wav", "truncated|states|stated|instead of|manifest"),
        (LONG,),
    ),
    (
        "durations divided by 1000",
        fields(lambda x: {**x, "duration": x["duration"] / 1000}),
        Either(unreadable("duration|masked|mask"), Right(trained)),
        ("model.train_ds.min_duration=0",),
    ),
    ("duration with a decimal comma", with_values(3, duration="1,8"), at_line(3, "duration"), ()),
    ("duration NaN from pandas", with_values(3, duration=math.nan), at_line(3, "duration"), ()),
    ("duration -1 for unknown", with_values(3, duration=-1), at_line(3, "duration"), ()),
    ("duration 0", with_values(3, duration=0), Either(at_line(3, "duration"), Right(used(COUNT - 1))), ()),
    (
        "one duration missing with buckets",
        fields(lambda x: {"audio_filepath": x["audio_filepath"]}, 3),
        Refused(("train.jsonl", "1 of 8 lines", "duration")),
        (LONG, "model.train_ds.min_duration=null", "model.train_ds.use_bucketing=true", "model.train_ds.num_buckets=2"),
    ),
    ("offset below 0", with_values(3, offset=-0.5), at_line(3, "offset"), ()),
    (
        "offset NaN from pandas",
        with_values(offset=math.nan),
        Either(Refused(("train.jsonl:1", "offset")), ALL_USED),
        (),
    ),
    (
        "offsets in milliseconds",
        with_values(offset=500, duration=1.0),
        unreadable(".wav", "offset|end|segment|500"),
        (),
    ),
    ("one segment past the end", with_values(3, offset=1.5, duration=4.0), Right(used(bad=1)), ()),
    (
        "keys of Hugging Face",
        fields(lambda x: {"audio": {"path": x["audio_filepath"]}, "duration": 1.6}),
        at_line(1, "audio_filepath"),
        (),
    ),
    (
        "one path per channel",
        with_values(3, audio_filepath=["audio/0.wav", "audio/1.wav"]),
        at_line(3, "audio_filepath"),
        (),
    ),
    ("path empty", with_values(3, audio_filepath=""), at_line(3, "audio_filepath"), ()),
    ("paths with a variable", paths_as("$DATA/{}"), unreadable("$DATA"), ()),
    ("paths in a bucket", paths_as("s3://corpus/{}"), unreadable("s3:"), ()),
    ("paths with a space at the end", paths_as("{} "), Either(unreadable("audio/", "No such file"), ALL_USED), ()),
    (
        "backslashes of Windows, escaped",
        fields(lambda x: {**x, "audio_filepath": x["audio_filepath"].replace("/", "\\")}),
        ALL_USED,
        (),
    ),
]

DATA = "model.train_ds.manifest_filepath="
OTHERS: list[tuple[str, Setup | None, Expected, tuple[str, ...]]] = [
    ("a list with one that is missing", None, Refused(("gone.jsonl",)), (DATA + "[train.jsonl,gone.jsonl]",)),
    (
        "a pattern of which one part was not copied",
        lambda folder: [shutil.copy(folder / TRAIN, folder / f"m_{i}.jsonl") for i in (0, 1, 3)],
        Refused(("m_2.jsonl",)),
        (DATA + '"m_{0..3}.jsonl"',),
    ),
    ("an audio file", None, Refused(("0.wav",)), (DATA + "audio/0.wav",)),
    (
        "a compressed manifest",
        lambda folder: (folder / "t.jsonl.gz").write_bytes(gzip.compress((folder / TRAIN).read_bytes())),
        Refused(("t.jsonl.gz",)),
        (DATA + "t.jsonl.gz",),
    ),
    (
        "validation has no durations",
        fields(lambda x: {"audio_filepath": x["audio_filepath"]}, None, "valid.jsonl"),
        Either(Refused(("valid.jsonl:1", "duration")), ALL_USED),
        (),
    ),
    (
        "two validation sets of one name",
        two_copies,
        Either(Refused(("valid.jsonl",)), Right(two_losses)),
        ("model.validation_ds.manifest_filepath=[a/valid.jsonl,b/valid.jsonl]",),
    ),
    (
        "all noise is gone",
        both(
            text_as(lambda x: joined(x * 4)),
            lambda folder: write_lines(
                folder / "noise.jsonl", [{"audio_filepath": f"/gone/{i}.wav", "duration": 2.0} for i in range(30)]
            ),
        ),
        unreadable("noise"),
        ("model.train_ds.noise_manifest=noise.jsonl", "trainer.max_steps=16"),
    ),
]

INDEXES: list[tuple[str, Setup]] = [
    ("empty", on_bytes(lambda data: b"", INDEX)),
    ("a flipped bit", on_bytes(flipped(0.7), INDEX)),
    ("twice as long", on_bytes(lambda data: data + data, INDEX)),
    ("a folder", replaced(lambda path: path.mkdir(), INDEX)),
    ("a link to nothing", replaced(lambda path: path.symlink_to("/gone/train.jsonl.idx"), INDEX)),
]

SHARDS = (
    "model.train_ds.is_tarred=true",
    "model.train_ds.tarred_audio_filepaths=shards/audio__OP_0..3_CL_.tar",
    DATA + "shards/sharded_manifests/manifest__OP_0..3_CL_.json",
)


def reversed_manifests(folder: Path) -> None:
    """Shards and manifests were sorted in different ways, so each manifest belongs to another shard."""
    names = [folder / f"shards/sharded_manifests/manifest_{i}.json" for i in range(4)]
    contents = [name.read_bytes() for name in names]
    for name, content in zip(names, reversed(contents), strict=True):
        name.write_bytes(content)


def compressed(folder: Path) -> None:
    for path in (folder / "shards").glob("audio_*.tar"):
        path.write_bytes(gzip.compress(path.read_bytes()))


TARRED: list[tuple[str, Setup, Expected]] = [
    ("one is missing", lambda folder: (folder / "shards/audio_2.tar").unlink(), Refused(("audio_2.tar",))),
    ("one is cut", on_bytes(cut(0.4), Path("shards/audio_2.tar")), Right(bad_shard("audio_2.tar"))),
    ("compressed", compressed, unreadable("audio_0.tar|audio_1.tar|audio_2.tar|audio_3.tar", "uncompressed")),
    ("manifests in another order", reversed_manifests, unreadable("audio_0.tar|audio_1.tar|audio_2.tar|audio_3.tar")),
]

IN_USE: list[tuple[str, Callable[[Path], object], tuple[str, ...]]] = [
    ("emptied in place", lambda folder: (folder / TRAIN).write_bytes(b""), ()),
    (
        "emptied in place, with workers",
        lambda folder: (folder / TRAIN).write_bytes(b""),
        ("model.train_ds.num_workers=2",),
    ),
    ("written again in another order", text_as(lambda x: joined(x[::-1])), ()),
    ("removed with its index", both(replaced(nothing, TRAIN), replaced(nothing, INDEX)), ()),
    ("index cut in place", lambda folder: os.truncate(folder / INDEX, 16), ()),
]


def prepare(source: str, *options: str) -> list[str]:
    return ["prepare", source, "--output", "m.jsonl", "--workers", "0", *options]


JOBS = ran(*(prepare("audio", "--job", f"{i}/4") for i in (0, 1, 3)))
COMMANDS: list[tuple[str, Setup | None, list[str], Expected]] = [
    (
        "prepare: numbers in quotes",
        fields(lambda x: {**x, "duration": str(x["duration"]), "speaker": "s1"}),
        prepare("train.jsonl"),
        Right(measured(COUNT, speaker="s1")),
    ),
    (
        "prepare: NaN from pandas",
        with_values(duration=math.nan, offset=math.nan),
        prepare("train.jsonl"),
        Right(measured(COUNT)),
    ),
    (
        "prepare: one path composed by another system",
        with_values(3, audio_filepath="audio/e\u0301.wav"),
        prepare("train.jsonl"),
        Right(measured(COUNT - 1, 1)),
    ),
    ("prepare: list with line ends of Windows", paths_list(end="\r\n"), prepare("list.txt"), Right(measured(COUNT))),
    (
        "prepare: list with quotes",
        paths_list(form='"{}"'),
        prepare("list.txt"),
        Either(Refused(("audio/0.wav|bad",), partial=True), Right(measured(COUNT))),
    ),
    (
        "prepare: wav.scp as a list",
        paths_list(form="utt {}"),
        prepare("list.txt"),
        Refused(("bad|No such file|list.txt",), partial=True),
    ),
    (
        "prepare: one line is not JSON",
        text_as(instead(3, lambda y: y[:-9])),
        prepare("train.jsonl"),
        Either(AT_3, Right(any_split(COUNT))),
    ),
    (
        "prepare: onto its own input",
        None,
        ["prepare", "train.jsonl", "--output", "train.jsonl", "--workers", "0"],
        Refused(("train.jsonl",)),
    ),
    (
        "prepare: onto its own input with --restart",
        None,
        ["prepare", "train.jsonl", "--output", "train.jsonl", "--workers", "0", "--restart"],
        Refused(("train.jsonl",)),
    ),
    (
        "prepare: onto a manifest of somebody else",
        None,
        ["prepare", "audio", "--output", "train.jsonl", "--workers", "0"],
        Refused(("train.jsonl", "--restart")),
    ),
    ("prepare: jobs numbered from 1", None, prepare("audio", "--job", "4/4"), Refused(("job",))),
    ("prepare: merge without job 2", JOBS, prepare("audio", "--merge", "4"), Refused(("2",))),
    ("prepare: merge of another number of jobs", JOBS, prepare("audio", "--merge", "2"), Refused(("job",))),
    (
        "inspect: comma and space between manifests",
        None,
        ["inspect", "train.jsonl, valid.jsonl", "--examples", "0"],
        Either(Refused(("valid.jsonl",)), Right(counted(12))),
    ),
    (
        "inspect: an older, shorter copy over an indexed one",
        older_copy,
        ["inspect", "train.jsonl", "--examples", "0"],
        Right(counted(5)),
    ),
    (
        "extract: NaN from pandas",
        with_values(duration=math.nan, offset=math.nan),
        ["extract", "{model}", "train.jsonl", "out"],
        Right(features_of(COUNT)),
    ),
    (
        "extract: its own output as input",
        extracted,
        ["extract", "{model}", "first/manifest.jsonl", "out"],
        Right(features_of(COUNT)),
    ),
    (
        "extract: durations in milliseconds",
        fields(lambda x: {**x, "duration": x["duration"] * 1000}),
        ["extract", "{model}", "train.jsonl", "out"],
        Refused(("600|longer|truncated|bad",), partial=True),
    ),
    (
        "extract: one line is cut",
        text_as(instead(3, lambda y: y[:-9])),
        ["extract", "{model}", "train.jsonl", "out"],
        Refused(("train.jsonl:3",), partial=True),
    ),
    (
        "probe: a label is null",
        both(with_values(speaker="a"), with_values(3, speaker=None)),
        PROBE,
        at_line(3, "speaker"),
    ),
    (
        "probe: one class only",
        with_values(speaker="a"),
        PROBE,
        Refused(("speaker|class",)),
    ),
]


def continued(name: str, change: Setup) -> Trial:
    expected = Either(Refused(("train.jsonl|data",)), Right(continued_with_warning))
    return Trial(GROUP, f"resumed: {name}", resume(), expected, both(Fixture.run, change))


AT_ONCE = """"$@" & first=$!
"${@/a.txt/b.txt}"; second=$?
wait $first; first=$?
[ $first != 0 ] && exit $first; exit $second"""
"""The same command twice at the same time, the second with another list."""


def at_once(name: str, command: list[str], check: Check, refusal: str) -> Trial:
    expected = Either(Refused((refusal, "another|in use|is using|at the same time"), partial=True), Right(check))
    return Trial(GROUP, f"at the same time: {name}", command, expected, many, shell=AT_ONCE, limit_s=120)


def trials() -> list[Trial]:
    model = str(Fixture.path / "model.nemo")
    texts = [*WRITTEN_BY_OTHERS, *DAMAGED]
    return [
        *(Trial(GROUP, name, pretrain(), expected, text_as(change)) for name, change, expected in texts),
        *(
            Trial(GROUP, name, pretrain(*overrides), expected, setup)
            for name, setup, expected, overrides in [*FIELDS, *OTHERS]
        ),
        *(Trial(GROUP, f"index: {name}", pretrain(), ALL_USED, both(indexed, damage)) for name, damage in INDEXES),
        *(
            Trial(GROUP, f"shards: {name}", pretrain(*SHARDS), expected, both(sharded, damage))
            for name, damage, expected in TARRED
        ),
        *(
            Trial(
                *(GROUP, f"while training: {name}", resume("trainer.max_steps=40", *overrides)),
                *(Right(trained), indexed),
                act=disturbed(change),
            )
            for name, change, overrides in IN_USE
        ),
        *(
            Trial(GROUP, name, [part.replace("{model}", model) for part in command], expected, setup)
            for name, setup, command, expected in COMMANDS
        ),
        continued("a manifest that has grown", text_as(lambda x: joined([*x, *x]))),
        continued("the same lines in another order", text_as(lambda x: joined(x[::-1]))),
        at_once(
            "two extractions into one folder",
            ["extract", model, "a.txt", "out", "--format", "shards", "--shard-mb", "0.3"],
            *(all_in_shards, "out"),
        ),
        *(
            at_once(
                f"prepare, started twice{name}",
                ["prepare", "many", "--output", "m/all.jsonl", "--workers", "0", *options],
                *(each_once, "m/all.jsonl"),
            )
            for name, options in (("", ()), (", with shards", ("--shards", "3")))
        ),
        Trial(
            *(GROUP, "three commands build one index", ["inspect", "train.jsonl", "--examples", "0"]),
            Right(three_at_once),
            shell='for i in 1 2 3; do "$@" --output $i.html & done; wait',
            limit_s=120,
        ),
        Trial(
            *(GROUP, "a pipe as manifest", ["prepare", "/dev/stdin", "--output", "m.jsonl", "--workers", "0"]),
            Either(Refused(("/dev/stdin",)), Right(measured(COUNT))),
            shell='cat train.jsonl | "$@"',
        ),
    ]
