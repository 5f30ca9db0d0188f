"""Audio as it occurs: half copied, mislabelled, from telephones, recorders, corpora and downloads, and special files.

A file is either used with its true length, or named with a reason; it never becomes features or losses of nothing.
"""

from __future__ import annotations

import io
import json
import os
import shutil
import struct
import subprocess
from collections.abc import Callable, Sequence
from dataclasses import dataclass
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
    link,
    only_run,
    output_of,
    pretrain,
    same_features,
    speech,
    start,
    trained,
    write_lines,
)

Samples = np.ndarray[Any, Any]
MODEL = "model.nemo"
FRAME_S = 0.08
PREPARE = ["prepare", "corpus", "--output", "m.jsonl", "--workers", "0"]
EXTRACT = ["extract", MODEL, "corpus", "out", "--device", "cpu"]
MANIFEST_EXTRACT = ["extract", MODEL, "m.jsonl", "out", "--device", "cpu"]
SECONDS = 2.0
SOUND = speech(int(SECONDS * RATE), 3)
LONG = 1 << 30


@dataclass(frozen=True)
class Sound:
    """A file: what is written, and the seconds it has; None: it must be named as bad. `or_bad`: that is right, too."""

    file: str
    make: Callable[[Path], object]
    seconds: float | None = None
    or_bad: bool = False
    tolerance: float = 0.02


# -------------------------------------------------------------------------------------------------------- making files


def encoded(
    data: Samples = SOUND, rate: int = RATE, form: str = "WAV", subtype: str = "PCM_16", endian: str = "FILE"
) -> bytes:
    file = io.BytesIO()
    soundfile.write(file, data, rate, format=form, subtype=subtype, endian=endian)
    return file.getvalue()


def at_rate(rate: int, data: Samples = SOUND) -> Samples:
    """The same sound at a higher rate, by adding zeros to its spectrum."""
    length = len(data) * rate // RATE
    return np.asarray(np.fft.irfft(np.fft.rfft(data), length) * rate / RATE, dtype=np.float64)


def pcm(data: Samples = SOUND) -> bytes:
    return np.asarray(np.round(data * 32767), dtype="<i2").tobytes()


def fmt(tag: int = 1, channels: int = 1, rate: int = RATE, bits: int = 16) -> tuple[bytes, bytes]:
    align = channels * bits // 8
    return b"fmt ", struct.pack("<HHIIHH", tag, channels, rate, (rate * align) & 0xFFFFFFFF, align & 0xFFFF, bits)


def riff(*chunks: tuple[bytes, bytes], size: int | None = None, data_size: int | None = None) -> bytes:
    """A WAV file of these chunks; the sizes in its header can be wrong."""
    body = b""
    for name, content in chunks:
        length = data_size if name == b"data" and data_size is not None else len(content)
        body += name + struct.pack("<I", length) + content + b"\0" * (len(content) % 2)
    return b"RIFF" + struct.pack("<I", 4 + len(body) if size is None else size) + b"WAVE" + body


def sphere(coding: str, channels: int, width: int, rate: int, content: bytes) -> bytes:
    """NIST SPHERE, as LDC ships it."""
    frames = len(content) // (channels * width)
    order = "-s2 01" if width == 2 else "-s1 1"
    fields = [
        *(f"channel_count -i {channels}", f"sample_count -i {frames}", f"sample_rate -i {rate}"),
        *(f"sample_n_bytes -i {width}", f"sample_byte_format {order}", f"sample_coding -s{len(coding)} {coding}"),
        "end_head",
    ]
    return ("NIST_1A\n   1024\n" + "\n".join(fields) + "\n").encode().ljust(1024) + content


def content(data: bytes) -> Callable[[Path], object]:
    return lambda path: path.write_bytes(data)


def no_length(flac: bytes) -> bytes:
    """FLAC from a pipe: the number of samples in STREAMINFO is 0, which means unknown."""
    return flac[:21] + bytes([flac[21] & 0xF0]) + bytes(4) + flac[26:]


def sparse(path: Path) -> None:
    """A recorder that was left on: nine hours of silence, which take no room on the disk."""
    header = riff(fmt(), (b"data", b""), size=LONG + 36, data_size=LONG)
    with path.open("wb") as file:
        file.write(header)
        file.truncate(len(header) + LONG)


def id3(size: int) -> bytes:
    digits = bytes(size >> shift & 127 for shift in (21, 14, 7, 0))
    return b"ID3\x03\0\0" + digits + bytes(size)


def named_bad(data: bytes, *files: str) -> list[Sound]:
    return [Sound(file, content(data)) for file in files]


def with_sample(value: float, dtype: str = "FLOAT") -> bytes:
    data = SOUND.astype(np.float64)
    data[len(data) // 2] = value
    return encoded(data, subtype=dtype)


def prepared_sounds() -> list[Sound]:
    wav, flac, ogg = encoded(), encoded(form="FLAC"), encoded(form="OGG", subtype="VORBIS")
    mp3 = encoded(form="MP3", subtype="MPEG_LAYER_III")
    opus = encoded(form="OGG", subtype="OPUS")
    data = (b"data", pcm())
    mu_law = np.random.default_rng(0).integers(0, 256, 2 * 8000 * 2, dtype=np.uint8).tobytes()
    half = SECONDS / 2
    return [
        *named_bad(b"<!DOCTYPE html><html><title>404 Not Found</title></html>", "downloaded.wav"),
        *named_bad(bytes(len(wav)), "preallocated.wav"),
        *named_bad(flac[: len(flac) * 6 // 10], "half a download.flac"),
        *named_bad(flac[:8000] + bytes(4096) + flac[12096:], "a hole from the network disk.flac"),
        *named_bad(with_sample(3e38), "one huge sample.wav"),
        *named_bad(with_sample(1e300, "DOUBLE"), "beyond float32.wav"),
        *named_bad(riff(fmt(), (b"data", b"")), "recorder without sound.wav"),
        *named_bad(riff(fmt(rate=16), data), "rate in kHz.wav"),
        *named_bad(
            sphere("pcm,embedded-shorten-v2.00", 1, 2, RATE, np.random.default_rng(1).bytes(60_000)), "shorten.sph"
        ),
        Sound("fisher.sph", content(sphere("ulaw", 2, 1, 8000, mu_law)), SECONDS),
        Sound("from a pipe.wav", content(riff(fmt(), data, size=0xFFFFFFFF, data_size=0xFFFFFFFF)), SECONDS),
        Sound("recorder crashed.wav", content(riff(fmt(), data, size=0, data_size=0)), SECONDS, or_bad=True),
        Sound("cut.wav", content(wav[: 44 + (len(wav) - 44) // 2]), half),
        Sound("cut.ogg", content(ogg[: len(ogg) // 2]), half, or_bad=True, tolerance=0.6),
        Sound("cut.mp3", content(mp3[: len(mp3) // 2]), half, or_bad=True, tolerance=0.2),
        Sound("gsm.wav", content(encoded(SOUND[:16_000], 8000, subtype="GSM610")), SECONDS, tolerance=0.05),
        Sound("joined.mp3", content(mp3 + mp3), 2 * SECONDS, tolerance=0.25),
        Sound("joined.ogg", content(ogg + ogg), 2 * SECONDS, or_bad=True, tolerance=0.1),
        Sound("cover art.mp3", content(id3(300_000) + mp3), SECONDS, tolerance=0.15),
        Sound("voice message without a suffix", content(opus), SECONDS, tolerance=0.05),
        Sound("really mp3.wav", content(mp3), SECONDS, tolerance=0.15),
        Sound("streamed.flac", content(no_length(flac)), SECONDS, or_bad=True),
        Sound("fifo.wav", os.mkfifo),
        Sound("device.wav", link("/dev/zero")),
    ]


# -------------------------------------------------------------------------------------------------------------- set-ups


def placed(sound: Sound) -> Setup:
    """A folder with this file and a good one; the model."""

    def setup(folder: Path) -> None:
        (folder / "corpus").mkdir()
        shutil.copy(folder / "audio/0.wav", folder / "corpus/good.wav")
        sound.make(folder / "corpus" / sound.file)
        with_model(folder)

    return setup


def with_model(folder: Path) -> None:
    shutil.copy(Fixture.path / MODEL, folder)


def in_place_of(make: Callable[[Path], object], *numbers: int) -> Setup:
    """These files of the training manifest are replaced, and its durations stay."""

    def setup(folder: Path) -> None:
        for number in numbers:
            path = folder / f"audio/{number}.wav"
            path.unlink()
            make(path)

    return setup


def corpus(**files: Callable[[Path], object]) -> Setup:
    """A folder with the eight good files, and these."""

    def setup(folder: Path) -> None:
        (folder / "audio").rename(folder / "corpus")
        for name, make in files.items():
            make(folder / "corpus" / name)
        with_model(folder)

    return setup


def lines(name: str, *content: dict[str, Any]) -> Setup:
    return lambda folder: write_lines(folder / name, content)


def listing(data: bytes) -> Setup:
    return lambda folder: (folder / "list.txt").write_bytes(data)


def transcripts(folder: Path) -> None:
    (folder / "corpus").mkdir()
    (folder / "corpus/trans.txt").write_text("HELLO\n")


# --------------------------------------------------------------------------------------------------------------- checks


def read(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def by_file(path: Path) -> dict[str, dict[str, Any]]:
    return {Path(line["audio_filepath"]).name: line for line in read(path)}


def verdict(sound: Sound, good: dict[str, Any], bad: dict[str, dict[str, Any]], found: float | None) -> str | None:
    if "good.wav" not in good:
        return "the good file is missing"
    if (sound.file in good) == (sound.file in bad):
        return "in both lists" if sound.file in good else "in no list"
    if sound.file in bad:
        if sound.seconds is not None and not sound.or_bad:
            return f"refused: {bad[sound.file]['reason']}"
        return None if bad[sound.file]["reason"] else "bad without a reason"
    if sound.seconds is None:
        return f"taken for good, {found} s"
    if found is None or abs(found - sound.seconds) > sound.tolerance:
        return f"{found} s, not {sound.seconds} s"
    return None


def listed(sound: Sound) -> Check:
    def check(folder: Path, outcome: Outcome) -> str | None:
        good, bad = by_file(folder / "m.jsonl"), by_file(folder / "m.bad.jsonl")
        return verdict(sound, good, bad, good.get(sound.file, {}).get("duration"))

    return check


def extracted(sound: Sound) -> Check:
    """Features of about the right length, all finite; or the file is in bad.jsonl and named, with exit code 1."""

    def check(folder: Path, outcome: Outcome) -> str | None:
        good, bad = by_file(folder / "out/manifest.jsonl"), by_file(folder / "out/bad.jsonl")
        frames = good.get(sound.file, {}).get("num_frames")
        longer = Sound(sound.file, sound.make, sound.seconds, sound.or_bad, sound.tolerance + 2 * FRAME_S)
        if wrong := verdict(longer, good, bad, None if frames is None else frames * FRAME_S):
            return wrong
        if outcome.code != int(sound.file in bad):
            return f"exit code {outcome.code}"
        if sound.file in bad and sound.file not in outcome.text:
            return "the bad file is not named"
        return finite_features(folder, outcome)

    return check


def prepared(good: int, bad: int = 0) -> Check:
    """So many lines in the manifest, all with durations, and so many bad files."""

    def check(folder: Path, outcome: Outcome) -> str | None:
        found = read(folder / "m.jsonl")
        counts = len(found), len(read(folder / "m.bad.jsonl"))
        if counts != (good, bad):
            return f"{counts} good and bad files, not {(good, bad)}"
        return None if all(1.5 < line["duration"] < 2.4 for line in found) else "wrong durations"

    return check


def named(*files: str, of: str = "train_ds") -> Check:
    """Training is right, and these files, and no others, are in the run's list of bad files."""

    def check(folder: Path, outcome: Outcome) -> str | None:
        bad = by_file(only_run(folder) / f"bad_files_{of}_rank0.jsonl")
        if set(bad) != set(files):
            return f"bad files: {sorted(bad)}"
        return trained(folder, outcome)

    return check


def alike(folder: Path, outcome: Outcome) -> str | None:
    """The features nearly point in the direction of those of the original."""
    files = list((folder / "out").rglob("*.npy"))
    if len(files) != 1:
        return f"{len(files)} feature files"
    found, expected = np.load(files[0]), Fixture.feature()
    width = min(found.shape[-1], expected.shape[-1])
    a, b = found[..., :width].ravel(), expected[..., :width].ravel()
    cosine = float(a @ b / np.linalg.norm(a) / np.linalg.norm(b))
    return None if cosine > 0.9 and abs(found.shape[-1] - expected.shape[-1]) <= 1 else f"cosine {cosine:.3f}"


def shows(*words: str) -> Check:
    def check(folder: Path, outcome: Outcome) -> str | None:
        missing = [word for word in words if word not in outcome.text]
        return f"not in the output: {missing}" if missing else None

    return check


def again(*checks: Check) -> Callable[[Path, list[str]], str | None]:
    """The same command twice: both end well, and the second leaves what the first has written."""

    def act(folder: Path, command: list[str]) -> str | None:
        written: list[dict[str, bytes]] = []
        for _ in range(2):
            outcome = in_fork(command, folder, {}, 90)
            if outcome.code != 0 or "Traceback" in outcome.text:
                return f"exit code {outcome.code}: {outcome.text[-300:]}"
            results = [path for path in folder.rglob("*") if path.suffix in {".jsonl", ".npy"}]
            written.append({str(path.relative_to(folder)): path.read_bytes() for path in results})
            for check in checks:
                if wrong := check(folder, outcome):
                    return wrong
        different = [name for name in written[0] | written[1] if written[0].get(name) != written[1].get(name)]
        return f"the second run changed {different[:3]}" if different else None

    return act


def two_at_once(*checks: Check, then: Sequence[str] = ()) -> Callable[[Path, list[str]], str | None]:
    """The same command twice at the same time: each ends well or is refused; `then` succeeds; the result is right."""

    def act(folder: Path, command: list[str]) -> str | None:
        processes = [start(command, folder, {}) for _ in range(2)]
        try:
            codes = sorted(process.wait(120) for process in processes)
        except subprocess.TimeoutExpired:
            for process in processes:
                process.kill()
            return "does not end within 120 s"
        text = output_of(folder)
        if codes not in ([0, 0], [0, 1]) or "Traceback" in text:
            return f"exit codes {codes}: {text[-300:]}"
        last = in_fork(then, folder, {}, 60) if then else Outcome(0, text, "", 0.0)
        if last.code != 0:
            return f"afterwards: {last.text[-300:]}"
        wrong = [check(folder, last) for check in checks]
        return next((fault for fault in wrong if fault), None)

    return act


def unusable_paths(folder: Path) -> None:
    """Lines whose paths are a folder, below a file, a link to itself, too long, and the manifest itself."""
    (folder / "loop.wav").symlink_to("loop.wav")
    paths = ["audio", "audio/0.wav/0.wav", "loop.wav", "x" * 300 + ".wav", "train.jsonl"]
    write_lines(folder / "train.jsonl", read(folder / "train.jsonl") + [
        {"audio_filepath": path, "duration": SECONDS} for path in paths
    ])  # fmt: skip


def bad_ones(count: int) -> Check:
    def check(folder: Path, outcome: Outcome) -> str | None:
        bad = {
            line["audio_filepath"]: line["reason"] for line in read(only_run(folder) / "bad_files_train_ds_rank0.jsonl")
        }
        return trained(folder, outcome) if len(bad) == count and all(bad.values()) else f"bad files: {bad}"

    return check


def many(folder: Path) -> None:
    """The eight files under 320 names."""
    (folder / "corpus").mkdir()
    for number in range(320):
        os.link(folder / f"audio/{number % 8}.wav", folder / f"corpus/{number}.wav")
    with_model(folder)


def only_features(count: int, manifest: str) -> Check:
    def check(folder: Path, outcome: Outcome) -> str | None:
        found = len(read(folder / manifest))
        return None if found == count else f"{found} lines in {manifest}, not {count}"

    return check


# --------------------------------------------------------------------------------------------------------------- trials


def trial(
    name: str, command: Sequence[str], expected: Expected | Check, setup: Setup | None = None, limit_s: float = 90
) -> Trial:
    right = expected if isinstance(expected, Refused | Right | Either) else Right(expected)
    return Trial("audio", name, command, right, setup, limit_s=limit_s)


def same_samples() -> list[Trial]:
    """Features of the same samples in other files are the same, or alike where the samples are rounded."""
    forms: dict[str, Callable[[Samples], bytes]] = {
        "0.AIF": lambda data: encoded(data, form="AIFF"),
        "big-endian.wav": lambda data: encoded(data, endian="BIG"),
        "little-endian.sph": lambda data: encoded(data, form="NIST", endian="LITTLE"),
        "float.wav": lambda data: encoded(data, subtype="FLOAT"),
        "flac.mp3": lambda data: encoded(data, form="FLAC"),
        "twice.flac": lambda data: encoded(np.stack([data, data], 1), form="FLAC"),
    }
    rounded: dict[str, Callable[[Samples], bytes]] = {
        "8 bit.wav": lambda data: encoded(data, subtype="PCM_U8"),
        "mu-law.au": lambda data: encoded(data, form="AU", subtype="ULAW"),
        "48 kHz.flac": lambda data: encoded(at_rate(48_000, data), 48_000, "FLAC", "PCM_24"),
        "opus.ogg": lambda data: encoded(data, form="OGG", subtype="OPUS"),
    }

    def setup(file: str, encode: Callable[[Samples], bytes]) -> Setup:
        def make(folder: Path) -> None:
            data, _ = soundfile.read(folder / "audio/0.wav")
            (folder / file).write_bytes(encode(data))
            with_model(folder)

        return make

    return [
        trial(f"the same sound as {file}", ["extract", MODEL, file, "out", "--device", "cpu"], check, setup(file, make))
        for table, check in ((forms, same_features), (rounded, alike))
        for file, make in table.items()
    ]


def prepare_trials() -> list[Trial]:
    paths = [f"audio/{i}.wav" for i in range(8)]
    kaldi = "".join(f"utt{i} {path}\n" for i, path in enumerate(paths)).encode()
    prepare_list = ["prepare", "list.txt", "--output", "m.jsonl", "--workers", "0"]
    none_good = Either(Refused(("list.txt|audio/0.wav|m.bad.jsonl",), partial=True), Right(prepared(0, 8)))
    return [
        *(trial(f"prepare: {sound.file}", PREPARE, listed(sound), placed(sound)) for sound in prepared_sounds()),
        trial(
            "prepare: list with CRLF and BOM",
            prepare_list,
            prepared(8),
            listing(b"\xef\xbb\xbf" + "".join(f"{path}\r\n" for path in paths).encode()),
        ),
        trial(
            "prepare: list from PowerShell, UTF-16",
            prepare_list,
            Either(Refused(("list.txt",), partial=True), Right(prepared(8))),
            listing("".join(f"{path}\r\n" for path in paths).encode("utf-16")),
        ),
        trial("prepare: Kaldi's wav.scp", prepare_list, none_good, listing(kaldi)),
        trial(
            "prepare: one audio file instead of a list",
            ["prepare", "audio/0.wav", "--output", "m.jsonl"],
            Either(Refused(("0.wav",), partial=True), Right(prepared(1))),
        ),
        trial(
            "prepare: folder with a link to itself",
            PREPARE,
            prepared(8),
            corpus(again=link("../corpus"), here=link(".")),
        ),
        trial(
            "prepare: what macOS and rsync leave",
            PREPARE,
            prepared(8),
            corpus(
                **{
                    "._0.wav": content(b"\0\x05\x16\x07" + bytes(4000)),
                    ".DS_Store": content(b"\0\0\0\1Bud1"),
                    ".0.wav.Qx12ab": content(encoded()[:999]),
                }
            ),
        ),
        trial(
            "prepare: folder of texts only",
            PREPARE,
            Refused(("corpus",), partial=True),
            transcripts,
        ),
        Trial(
            "audio",
            "prepare twice, the manifest among the audio",
            ["prepare", "audio", "--output", "audio/m.jsonl", "--workers", "0"],
            Right(finite_features),
            act=again(only_features(8, "audio/m.jsonl"), only_features(0, "audio/m.bad.jsonl")),
        ),
    ]


def heavy_trials() -> list[Trial]:
    """A file of nine hours, and commands that are started twice."""
    hours = Sound("left on.wav", sparse, LONG / 2 / RATE)
    return [
        trial("prepare: nine hours", PREPARE, listed(hours), placed(hours), limit_s=150),
        trial("pretrain: nine hours where two seconds are stated", pretrain("model.train_ds.num_workers=2"),
              trained, in_place_of(sparse, 5), limit_s=150),
        trial("pretrain: paths that no file can have", pretrain("trainer.max_steps=7"), bad_ones(5), unusable_paths),
        Trial("audio", "prepare: the same command twice at once", PREPARE, Right(finite_features), many,
              act=two_at_once(prepared(320)), limit_s=150),
        Trial("audio", "prepare: a job of the array twice at once, then merged", [*PREPARE, "--job", "0/1"],
              Right(finite_features), many,
              act=two_at_once(prepared(320), then=[*PREPARE, "--merge", "1"]), limit_s=150),
        Trial("audio", "extract: the same command twice at once", EXTRACT, Right(finite_features), many,
              act=two_at_once(only_features(320, "out/manifest.jsonl"), finite_features), limit_s=150),
    ]  # fmt: skip


def extract_trials() -> list[Trial]:
    tiny = Sound("one sample.wav", content(encoded(SOUND[:1])), 0.0, or_bad=True)
    window = Sound("less than a window.wav", content(encoded(SOUND[:300])), 0.0, or_bad=True)
    silent = Sound("silence.flac", content(encoded(np.zeros_like(SOUND), form="FLAC")), SECONDS)
    faint = Sound("faint.wav", content(encoded(SOUND * 1e-38, subtype="FLOAT")), SECONDS)
    too_long = Sound("left on.wav", sparse)
    device = Sound("device.wav", link("/dev/zero"))
    sounds = [tiny, window, silent, faint, too_long, device]

    def segment(**keys: float) -> Setup:
        return both(with_model, lines("m.jsonl", {"audio_filepath": "audio/0.wav", **keys}))

    return [
        *(trial(f"extract: {s.file}", EXTRACT, Right(extracted(s), codes=(0, 1)), placed(s)) for s in sounds),
        trial(
            "extract: a segment after the end",
            MANIFEST_EXTRACT,
            Refused(("0.wav",), partial=True),
            segment(offset=30.0, duration=1.0),
        ),
        trial(
            "extract: a segment of a file that was replaced by a shorter one",
            MANIFEST_EXTRACT,
            Refused(("0.wav",), partial=True),
            both(segment(offset=0.5, duration=1.1), in_place_of(content(encoded(SOUND[: RATE // 2])), 0)),
        ),
        trial(
            "extract: a segment that ends 5 ms late, by rounding",
            MANIFEST_EXTRACT,
            only_features(1, "out/manifest.jsonl"),
            segment(offset=0.605, duration=1.0),
        ),
        Trial(
            "audio",
            "extract twice, features among the audio",
            ["extract", MODEL, "audio", "audio/features", "--device", "cpu"],
            Right(finite_features),
            with_model,
            act=again(only_features(8, "audio/features/manifest.jsonl")),
        ),
        trial(
            "probe: two unreadable files of different kinds",
            [
                *("probe", MODEL, "--train", "m.jsonl", "--test", "m.jsonl", "--label", "label"),
                *("--output", "probe", "--device", "cpu"),
            ],
            Refused(("2.wav", "5.wav"), partial=True),
            both(
                with_model,
                lambda folder: write_lines(
                    folder / "m.jsonl",
                    [{"audio_filepath": f"audio/{i}.wav", "duration": 1.6, "label": "ab"[i % 2]} for i in range(8)],
                ),
                in_place_of(content(with_sample(float("nan"))), 2),
                in_place_of(os.mkfifo, 5),
            ),
        ),
    ]


def pretrain_trials() -> list[Trial]:
    workers = "model.train_ds.num_workers=2"
    wrong_rate = content(riff(fmt(rate=44_100), (b"data", pcm())))
    no_bad = "model.train_ds.max_bad_fraction=0"
    nan = content(with_sample(float("nan")))
    silence = content(encoded(np.zeros_like(SOUND)))
    mixed = [
        *(content(encoded(at_rate(rate), rate, "FLAC", "PCM_24")) for rate in (22_050, 32_000, 96_000)),
        *(content(encoded(np.stack([SOUND] * count, 1), form="FLAC")) for count in (2, 6)),
    ]

    def noise(make: Callable[[Path], object], duration: float = SECONDS) -> Setup:
        line = {"audio_filepath": "noise.wav", "duration": duration}
        return both(lambda folder: make(folder / "noise.wav"), lines("noise.jsonl", line))

    with_noise = pretrain("model.train_ds.noise_manifest=noise.jsonl")
    every = range(8)
    return [
        trial("pretrain: an LFS pointer, two workers", pretrain(workers), named("5.wav"),
              in_place_of(content(b"version https://git-lfs.github.com/spec/v1\n"), 5)),
        trial("pretrain: header says 44.1 kHz", pretrain(), named("5.wav"), in_place_of(wrong_rate, 5)),
        trial("pretrain: a FIFO in the place of a file", pretrain(), named("5.wav"), in_place_of(os.mkfifo, 5)),
        trial("pretrain: /dev/zero in the place of a file, two workers", pretrain(workers), named("5.wav"),
              in_place_of(link("/dev/zero"), 5)),
        trial("pretrain: replaced by a shorter file", pretrain(), named("5.wav"),
              in_place_of(content(encoded(SOUND[:RATE])), 5)),
        trial("pretrain: no bad file allowed, one is", pretrain(no_bad), Refused(("5.wav", "bad"), partial=True),
              in_place_of(nan, 5)),
        trial("pretrain: all files NaN, two workers", pretrain(workers), Refused(("nan",), partial=True),
              in_place_of(nan, *every)),
        trial("pretrain: disk not mounted, two workers", pretrain(workers),
              Refused(("No such file",), partial=True), lambda folder: shutil.rmtree(folder / "audio")),
        trial("pretrain: all files silent", pretrain(), Either(Refused(("silent|silence|.wav",), partial=True),
              Right(trained)), in_place_of(silence, *every)),
        trial("pretrain: a silent file, silence is trimmed", pretrain("model.train_ds.trim_silence=true"), trained,
              in_place_of(silence, 5)),
        trial("pretrain: other rates and channels", pretrain(workers), named(),
              both(*(in_place_of(make, number) for number, make in enumerate(mixed)))),
        trial("pretrain: second channel of mono files", pretrain("model.train_ds.channel_selector=1"),
              Refused(("channel",), partial=True)),
        trial("pretrain: validation files are all gone", pretrain("model.validation_ds.manifest_filepath=v.jsonl"),
              Refused(("gone.wav",), partial=True), lines("v.jsonl", {"audio_filepath": "gone.wav", "duration": 2.0})),
        trial("pretrain: noise of NaN only", with_noise, named("noise.wav"), noise(nan)),
        trial("pretrain: noise of ten samples", with_noise, named(), noise(content(encoded(SOUND[:10])), 10 / RATE)),
        trial("inspect: missing, mislabelled and special files", ["inspect", "train.jsonl", "--examples", "0"],
              shows("1.wav", "2.wav", "5.wav"),
              both(in_place_of(link("/mnt/unmounted/1.wav"), 1), in_place_of(wrong_rate, 2),
                   in_place_of(os.mkfifo, 5))),
        trial("inspect: batches with a NaN file", ["inspect", "train.jsonl", "--batch-size", "2", "--examples", "4"],
              Either(Refused(("5.wav",), partial=True), Right(shows("5.wav"))), in_place_of(nan, 5)),
    ]  # fmt: skip


def trials() -> list[Trial]:
    return [*prepare_trials(), *heavy_trials(), *extract_trials(), *same_samples(), *pretrain_trials()]
