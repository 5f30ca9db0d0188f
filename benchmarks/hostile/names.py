"""Names and texts as people, systems and tools give them: of files, runs, validation sets, labels, keys and pages.

Whatever the name, the command works on that very file and writes that very name, or says that it cannot.
"""

from __future__ import annotations

import json
import os
import shlex
import shutil
import unicodedata
from collections.abc import Callable, Sequence
from html.parser import HTMLParser
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import safetensors
import soundfile
from benchmarks.hostile.harness import (
    CONTROL,
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
    in_fork,
    only_run,
    pretrain,
    rows,
    same_features,
    speech,
    trained,
    write_lines,
)

MODEL = "model.nemo"
CPU = ("--device", "cpu")
SCRIPT = "<img src=x onerror=alert(1)>"
TEXTS = "a\u2028b\x85c\u2029d \U0001f600 \u05e9\u05dc\u05d5\u05dd"
"""Signs at which careless programs end a line, and others."""


def quoted(text: str) -> str:
    """A value as Hydra's grammar takes it, whatever is in it."""
    return "'" + text.replace("'", "\\'") + "'"


# -------------------------------------------------------------------------------------------------------------- set-ups


def with_model(folder: Path) -> None:
    shutil.copy(Fixture.path / MODEL, folder)


def renamed(source: str, target: str | bytes) -> Setup:
    def setup(folder: Path) -> None:
        whole = os.path.join(os.fsencode(folder), os.fsencode(target))
        os.makedirs(os.path.dirname(whole), exist_ok=True)
        os.rename(folder / source, whole)

    return setup


def moved(source: str, target: str) -> Setup:
    """A copy of a manifest under another name, with absolute paths."""

    def setup(folder: Path) -> None:
        (folder / target).parent.mkdir(exist_ok=True)
        lines = read(folder / source)
        write_lines(
            folder / target, [{**line, "audio_filepath": str(folder / line["audio_filepath"])} for line in lines]
        )

    return setup


def alone(name: str | bytes) -> Setup:
    """A folder with one file of this name, and the model."""

    def setup(folder: Path) -> None:
        (folder / "corpus").mkdir()
        shutil.copy(os.fsencode(folder / "audio/0.wav"), os.fsencode(folder / "corpus/") + b"/" + os.fsencode(name))
        with_model(folder)

    return setup


def several(*names: str) -> Setup:
    """A folder with different sounds of these names, and the model."""

    def setup(folder: Path) -> None:
        for number, name in enumerate(names):
            path = folder / "corpus" / name
            path.parent.mkdir(parents=True, exist_ok=True)
            soundfile.write(path, speech(2 * RATE, number), RATE)
        with_model(folder)

    return setup


def in_manifest(name: str) -> Setup:
    """One of the training files has this name; the manifest is as json.dumps writes it."""

    def setup(folder: Path) -> None:
        renamed("audio/5.wav", "audio/" + name)(folder)
        lines = [json.loads(line) for line in (folder / "train.jsonl").read_text().splitlines()]
        lines[5]["audio_filepath"] = "audio/" + name
        write_lines(folder / "train.jsonl", lines)

    return setup


def labelled(*labels: Any, key: str = "label", test: Sequence[Any] = ()) -> Setup:
    """Manifests for a probe: sixteen utterances with these labels in turn, and eight for the test."""

    def setup(folder: Path) -> None:
        with_model(folder)
        for name, count, values in (("train.jsonl", 16, labels), ("valid.jsonl", 8, test or labels)):
            lines = [
                {"audio_filepath": f"audio/{i % 8}.wav", "duration": 1.6, key: values[i % len(values)]}
                for i in range(count)
            ]
            write_lines(folder / name, lines)

    return setup


def text_lines(name: str, text: str, encoding: str = "utf-8") -> Setup:
    """A manifest with this text, not escaped, in this encoding."""

    def setup(folder: Path) -> None:
        lines = [
            json.dumps({**json.loads(line), "text": text}, ensure_ascii=False)
            for line in (folder / "train.jsonl").read_text().splitlines()
        ]
        (folder / name).write_bytes("".join(line + "\n" for line in lines).encode(encoding))
        with_model(folder)

    return setup


# --------------------------------------------------------------------------------------------------------------- checks


def read(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().split("\n") if line]


def no_bad_files(folder: Path, outcome: Outcome) -> str | None:
    bad = list(only_run(folder).glob("bad_files_*"))
    return f"bad files: {bad[0].read_text()[:200]}" if bad else trained(folder, outcome)


def run_is(name: str) -> Check:
    """The run is in the folder of this name, with a model of this name."""

    def check(folder: Path, outcome: Outcome) -> str | None:
        run = only_run(folder)
        if str(run.relative_to(folder / "runs")) != name:
            return f"the run is in {run.relative_to(folder)}"
        models = [path.name for path in (run / "checkpoints").iterdir() if path.suffix == ".nemo"]
        return trained(folder, outcome) if models == [f"{name}.nemo"] else f"models: {models}"

    return check


def columns(*names: str) -> Check:
    """Each validation set has a loss of its own in metrics.csv."""

    def check(folder: Path, outcome: Outcome) -> str | None:
        found = sorted(key for key in rows(only_run(folder))[0] if key.endswith("_val_loss"))
        if len(found) != len(names) or not all(any(name in key for key in found) for name in names):
            return f"columns: {found}"
        last = [row for row in rows(only_run(folder)) if row[found[0]]][-1]
        return trained(folder, outcome) if all(last[key] for key in found) else "a set without a loss"

    return check


def distinct_features(count: int) -> Check:
    def check(folder: Path, outcome: Outcome) -> str | None:
        files = list((folder / "out").rglob("*.npy"))
        different = {path.read_bytes() for path in files}
        lines = {line["feature_filepath"] for line in read(folder / "out/manifest.jsonl")}
        counts = len(files), len(different), len(lines)
        return None if counts == (count, count, count) else f"{counts} files, different ones, and lines, not {count}"

    return check


def kept_texts(file: str, text: str) -> Check:
    def check(folder: Path, outcome: Outcome) -> str | None:
        found = [line.get("text") for line in read(folder / file)]
        return None if found == [text] * 8 else f"texts: {found[:2]!r}"

    return check


def probed(*labels: str) -> Check:
    """The results are strict JSON, the pictures well-formed and with all labels."""

    def check(folder: Path, outcome: Outcome) -> str | None:
        def refuse(constant: str) -> None:
            raise ValueError(constant)

        json.loads((folder / "probe/results.json").read_text(), parse_constant=refuse)
        text = "".join(ElementTree.parse(folder / "probe/confusion.svg").getroot().itertext())
        missing = [label for label in labels if label not in text]
        if missing:
            return f"not in confusion.svg: {missing}"
        ElementTree.parse(folder / "probe/layer_weights.svg")
        classes = f"{len(labels)} classes"
        return None if classes in outcome.text else f"not in the output: {classes}"

    return check


class Tags(HTMLParser):
    def __init__(self) -> None:
        super().__init__()
        self.tags: list[tuple[str, list[tuple[str, str | None]]]] = []
        self.text = ""

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, attrs))

    def handle_data(self, data: str) -> None:
        self.text += data


def page_is_text(page: str, word: str) -> Check:
    """The name is on the page, and not as markup."""

    def check(folder: Path, outcome: Outcome) -> str | None:
        parser = Tags()
        parser.feed((folder / page).read_text())
        active = [tag for tag in parser.tags if any(name.startswith("on") for name, _ in tag[1])]
        if active:
            return f"markup from a name: {active[:1]}"
        return None if word in parser.text else f"{word} is not on the page"

    return check


def file_is(path: str, *, framework: str = "") -> Check:
    """The only new model file has this name and can be read."""

    def check(folder: Path, outcome: Outcome) -> str | None:
        if not (folder / path).is_file():
            return f"written: {outcome.changed}"
        if framework:
            with safetensors.safe_open(folder / path, framework=framework) as file:
                return None if file.keys() else "empty"
        return None

    return check


def pasted(folder: Path, outcome: Outcome) -> str | None:
    """The command that is printed for the next step names the model, after a shell has split it."""
    lines = [line for line in outcome.text.splitlines() if line.strip().startswith("nest-ssl info ")]
    words = shlex.split(lines[0], comments=True)
    if len(words) != 3 or not (folder / words[2]).is_file():
        return f"cannot be pasted: {lines[0]}"
    return trained(folder, outcome)


def at_home(folder: Path, outcome: Outcome) -> str | None:
    return None if (folder.parent / "home/runs/run/metrics.csv").is_file() else f"written: {outcome.changed[:2]}"


def in_turn(*commands: Sequence[str], then: Check) -> Callable[[Path, list[str]], str | None]:
    """Several commands, each of which has to end well; the check is for the last."""

    def act(folder: Path, command: list[str]) -> str | None:
        for one in (command, *commands):
            outcome = in_fork(one, folder, {}, 90)
            if outcome.code != 0 or "Traceback" in outcome.text or CONTROL.search(outcome.text):
                return f"{one[0]}: exit code {outcome.code}: {outcome.text[-300:]}"
        return then(folder, outcome)

    return act


def continued(name: str) -> Check:
    """It says that it resumed; there are six steps, and no more of the best checkpoints than asked for."""

    def check(folder: Path, outcome: Outcome) -> str | None:
        if "resumed at step" not in outcome.text:
            return "it did not resume"
        run = folder / "runs" / name
        steps = [row["step"] for row in rows(run) if row["train_loss"]]
        best = [path.name for path in (run / "checkpoints").iterdir() if "--val_loss" in path.name.removeprefix(name)]
        if steps != [str(step) for step in range(6)]:
            return f"steps {steps}"
        return None if 1 <= len(best) <= 2 else f"best checkpoints: {best}"

    return check


# --------------------------------------------------------------------------------------------------------------- trials


def trial(
    name: str, command: Sequence[str], expected: Expected | Check, setup: Setup | None = None, **options: Any
) -> Trial:
    right = expected if isinstance(expected, Refused | Right | Either) else Right(expected)
    return Trial("names", name, command, right, setup, **{"limit_s": 90.0, **options})


def audio_names() -> list[Trial]:
    prepare = ["prepare", "corpus", "--output", "m.jsonl", "--workers", "0"]
    extract = ["extract", MODEL, "corpus", "out", *CPU]
    decomposed = unicodedata.normalize("NFD", "\u00e9t\u00e9 \u1ec7")
    or_named = Either(Refused((".wav",), partial=True), Right(same_features))
    return [
        *(
            trial(f"extract: file {name!r}", extract, same_features, alone(name))
            for name in ("-x --layers last.wav", "100%s {0} $(id).wav", "x" * 251 + ".wav")
        ),
        trial("extract: file with a newline", extract, or_named, alone("two\nlines.wav")),
        trial("extract: file named in Latin-1", extract, or_named, alone(b"caf\xe9.wav")),
        *(
            trial(f"prepare, then extract: {name!r}", prepare, same_features, alone(name),
                  act=in_turn(["extract", MODEL, "m.jsonl", "out", *CPU], then=same_features))
            for name in ("a\\b.wav", "a\u2028b.wav")
        ),
        trial("extract: names that differ in case, folder and form", extract, distinct_features(5),
              several("A.wav", "a.wav", "s1/a.wav", "s2/a.wav", f"s2/{decomposed}.wav")),
        *(
            trial(f"pretrain: file {name!r} in the manifest", pretrain(), no_bad_files, in_manifest(name))
            for name in (decomposed + ".wav", "spk=1,take#2 [x].wav", " leading and trailing .wav")
        ),
        trial("pretrain: file:// instead of a path", pretrain(), Refused(("file:",), partial=True),
              lambda folder: write_lines(folder / "train.jsonl",
                                         [{"audio_filepath": "file:///data/0.wav", "duration": 2.0}] * 8)),
        trial("inspect: markup in file and manifest names",
              ["inspect", f"{SCRIPT}.jsonl", "--batch-size", "2", "--examples", "1"],
              page_is_text("inspect.html", "onerror"),
              both(in_manifest(f"{SCRIPT}.wav"), renamed("train.jsonl", f"{SCRIPT}.jsonl"))),
    ]  # fmt: skip


def run_names() -> list[Trial]:
    saving = "exp_manager.checkpoint_callback_params.save_top_k=2"
    every = ["trainer.val_check_interval=1", "trainer.check_val_every_n_epoch=null", saving]
    or_refused = Refused(("name",))

    def resumes(name: str) -> Trial:
        command = pretrain(f"exp_manager.name={quoted(name)}", *every)
        more = [*command, "trainer.max_steps=6"]
        return trial(f"run {name!r}, resumed", command, trained, act=in_turn(more, then=continued(name)))

    return [
        *(resumes(name) for name in ("a[1]", "lr{lr:.3f} 100%", "x--val_loss=0.1-epoch=9-step=9", "last")),
        *(
            trial(f"run {name!r}", pretrain(f"exp_manager.name={name}"), Either(or_refused, Right(run_is(name))))
            for name in ("large.v1.5", "1e3", "True")
        ),
        *(
            trial(f"run {name!r}", pretrain(f"exp_manager.name={quoted(name)}"), Refused(("name",)))
            for name in ("..", "x" * 300, "a\nb")
        ),
        trial("run with spaces: the printed command", pretrain("exp_manager.name='my first run; v2'"), pasted),
        trial("exp_dir with a tilde", pretrain("exp_manager.exp_dir=~/runs"),
              Either(Refused(("exp_dir",)), Right(at_home))),
        trial("report of a run named as markup", pretrain(f"exp_manager.name={quoted(SCRIPT)}"), trained,
              act=in_turn(["report", f"runs/{SCRIPT}"],
                          then=page_is_text(f"runs/{SCRIPT}/report.html", "onerror"))),
        *(
            trial(f"validation sets {first} and {second}",
                  pretrain(f"model.validation_ds.manifest_filepath=[{quoted(first)},{quoted(second)}]",
                           "trainer.check_val_every_n_epoch=1"),
                  columns(*shown),
                  both(moved("valid.jsonl", first), moved("train.jsonl", second)))
            for first, second, *shown in (
                ("dev.clean.jsonl", "dev.other.jsonl", "clean", "other"),
                ("en/dev.jsonl", "de/dev.jsonl", "dev", "dev"),
                ("dev clean.jsonl", "val.jsonl", "clean", "val"),
            )
        ),
    ]  # fmt: skip


def path_names() -> list[Trial]:
    def manifest(name: str) -> Trial:
        key = "model.train_ds.manifest_filepath="
        right = Right(no_bad_files)
        expected = (
            Either(Refused((".jsonl|no such manifest",)), right) if "," in name else right
        )  # a comma separates paths
        return trial(f"manifest {name!r}", pretrain(key + quoted(name)), expected, moved("train.jsonl", name))

    weird = "model v1.0 [final], lr=5e-4.nemo"
    return [
        *(manifest(name) for name in ("donn\u00e9es 2/entra\u00eenement.jsonl", "train_{v1}.jsonl", "a,b.jsonl")),
        trial("start from a model with spaces, commas and brackets",
              pretrain(f"init_from_nemo_model={quoted(weird)}"), no_bad_files,
              both(with_model, renamed(MODEL, weird))),
        trial("export to a name with two dots",
              ["export", MODEL, "my model.v2.safetensors", "--format", "safetensors"],
              file_is("my model.v2.safetensors", framework="pt"), with_model),
        trial("export onto its own input", ["export", MODEL, MODEL, "--format", "nemo"],
              Refused((MODEL,)), with_model),
    ]  # fmt: skip


def texts() -> list[Trial]:
    probe = ["probe", MODEL, "--train", "train.jsonl", "--test", "valid.jsonl", "--output", "probe", *CPU, "--label"]
    strange = ["R&B <b>", "\u0639\u0631\u0628\u064a", 'say "hi"']
    ascii_only = {"LC_ALL": "C", "LANG": None}
    accents = "corpus/\u00e9t\u00e9.wav"
    return [
        trial("extract carries texts with line separators", ["extract", MODEL, "m.jsonl", "out", *CPU],
              kept_texts("out/manifest.jsonl", TEXTS), text_lines("m.jsonl", TEXTS)),
        trial("prepare keeps texts with line separators",
              ["prepare", "t.jsonl", "--output", "m.jsonl", "--workers", "0"],
              kept_texts("m.jsonl", TEXTS), text_lines("t.jsonl", TEXTS)),
        trial("pretrain with a manifest in Latin-1", pretrain("model.train_ds.manifest_filepath=m.jsonl"),
              Either(Refused(("m.jsonl",)), Right(no_bad_files)), text_lines("m.jsonl", "caf\u00e9", "latin-1")),
        trial("probe: markup, Arabic and quotes in labels", [*probe, "label"], probed(*strange), labelled(*strange)),
        trial("probe: labels that differ in a space or in case", [*probe, "label"],
              Either(Refused(("label",), partial=True), Right(probed("happy", "Happy", "sad"))),
              labelled("happy", "Happy", "sad")),
        trial("probe: numbers as labels in one manifest, texts in the other", [*probe, "label"],
              Either(Refused(("label",), partial=True), Right(probed("0", "1"))),
              labelled(0, 1, test=("0", "1"))),
        trial("probe: null among the labels", [*probe, "label"], Refused(("label", "train.jsonl"), partial=True),
              labelled("a", "b", None)),
        trial("probe: key typed in another Unicode form", [*probe, "\u00e9motion"],
              Refused(("train.jsonl", "motion"), partial=True), labelled("a", "b", key="e\u0301motion")),
        trial("extract: accents in an ASCII environment",
              ["extract", MODEL, "corpus", "out", *CPU], same_features,
              alone(Path(accents).name), environment=ascii_only, own_process=True),
        trial("inspect in an ASCII environment", ["inspect", "train.jsonl", "--batch-size", "2"],
              page_is_text("inspect.html", "train.jsonl"), environment=ascii_only, own_process=True),
        trial("pretrain: accents in an environment of code page 1252",
              pretrain("exp_manager.name=\u5b9e\u9a8c"), run_is("\u5b9e\u9a8c"), in_manifest("\u00e9t\u00e9 \u8a9e.wav"),
              environment={**ascii_only, "PYTHONIOENCODING": "cp1252"}, own_process=True),
    ]  # fmt: skip


def copied_texts() -> list[Trial]:
    """Commands as they come out of word processors, web pages, chats and scripts that were edited on Windows."""
    last = "run--val_loss=4.1-epoch=0-step=4.ckpt"
    named_key = Refused(("did you mean|max_steps|U+",))

    return [
        trial("CRLF script: run name", pretrain("exp_manager.name=run\r"),
              Either(Refused(("name",)), Right(run_is("run")))),
        trial("CRLF script: manifest", pretrain("model.train_ds.manifest_filepath=train.jsonl\r"),
              Either(Refused(("train.jsonl",)), Right(trained))),
        trial("CRLF script: output folder", ["extract", MODEL, "audio/0.wav", *CPU, "out\r"],
              Either(Refused(("out",)), Right(same_features)), with_model),
        trial("a space after the backslash", pretrain(" "),
              Either(Refused(("space|blank|empty|key=value",)), Right(trained))),
        trial("spaces around the equals sign", pretrain("trainer.max_steps", "=", "8"), named_key),
        trial("full-width equals sign", pretrain("trainer.max_steps\uff1d8"), named_key),
        trial("zero-width space in a key", pretrain("trainer.max_\u200bsteps=8"), named_key),
        trial("Cyrillic letter in a key", pretrain("tr\u0430iner.max_steps=8"), named_key),
        trial("en dash before an option", ["pretrain", "\u2013config-name", "nest_demo"], Refused(("config-name",))),
        trial("checkpoint's own name, not quoted", pretrain(f"init_from_ptl_ckpt={last}"),
              Either(Refused(("quote|escape|'\\\\=",)), Right(trained)),
              lambda folder: shutil.copy(Fixture.path / "model.ckpt", folder / last)),
    ]  # fmt: skip


def trials() -> list[Trial]:
    return [*audio_names(), *run_names(), *path_names(), *texts(), *copied_texts()]
