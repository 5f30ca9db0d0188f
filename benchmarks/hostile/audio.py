"""Audio files that are odd, broken, lying, empty, huge or not audio at all.

Through `prepare`, `extract`, `pretrain` and `inspect`. An odd file with the samples of a plain one must give the same
features and losses; a file that cannot be used is named with a reason, and nothing else suffers from it.
"""

from __future__ import annotations

import math
import os
import shutil
import socket
import struct
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import soundfile
from benchmarks.hostile.harness import (
    RATE,
    Check,
    Either,
    Expected,
    Outcome,
    Refused,
    Right,
    Setup,
    Trial,
    both,
    link,
    said,
    same_features,
    speech,
    trained,
)
from benchmarks.hostile.manifests import (
    each,
    extract,
    extracted,
    file,
    inspect,
    page,
    prepare,
    read_lines,
    same_losses,
    stands_in,
    third,
    train,
)

Samples = np.ndarray[Any, Any]
Make = Callable[[Path], object]
SECONDS = 2.0
PLAIN = speech(int(RATE * SECONDS), 1)
THIRD = Path("audio/2.wav")


# ---------------------------------------------------------------------------------------------------------- odd files


def wav(
    samples: bytes = (PLAIN * 32767).astype("<i2").tobytes(),
    rate: int = RATE,
    channels: int = 1,
    bits: int = 16,
    code: int = 1,
    size: int | None = None,
    before: bytes = b"",
    after: bytes = b"",
    big: bool = False,
) -> bytes:
    """A WAV file by hand; `size` is what its header claims."""
    end = ">" if big else "<"
    block = channels * bits // 8
    form = struct.pack(f"{end}HHIIHH", code, channels, rate & 0xFFFFFFFF, rate * block & 0xFFFFFFFF, block, bits)
    claimed = len(samples) if size is None else size
    body = b"WAVE" + before + b"fmt " + struct.pack(f"{end}I", 16) + form
    body += b"data" + struct.pack(f"{end}I", claimed) + samples + after
    whole = min(0xFFFFFFFF, len(body) - len(samples) + claimed)
    return (b"RIFX" if big else b"RIFF") + struct.pack(f"{end}I", whole) + body


def floats(*values: float) -> bytes:
    """Speech in floating point, with these values among its samples."""
    samples = PLAIN.copy()
    samples[1000 : 1000 + len(values)] = values
    return wav(samples.astype("<f4").tobytes(), bits=32, code=3)


def content(data: bytes) -> Make:
    return lambda path: path.write_bytes(data)


def coded(kind: str, subtype: str | None = None, change: Callable[[bytes], bytes] = bytes, rate: int = RATE) -> Make:
    """Speech in a format of libsndfile, its bytes changed afterwards."""

    def make(path: Path) -> None:
        soundfile.write(path, np.resize(PLAIN, int(rate * SECONDS)), rate, format=kind, subtype=subtype)
        path.write_bytes(change(path.read_bytes()))

    return make


def part(share: float) -> Callable[[bytes], bytes]:
    return lambda data: data[: int(len(data) * share)]


def hole(data: bytes) -> bytes:
    """The middle third is overwritten, as by a bad sector."""
    third_part = len(data) // 3
    return data[:third_part] + b"\x55" * third_part + data[2 * third_part :]


def sphere(coding: str) -> bytes:
    """A NIST SPHERE file, such as TIMIT's."""
    fields = f"sample_count -i {len(PLAIN)}\nsample_n_bytes -i 2\nchannel_count -i 1\nsample_byte_format -s2 01\n"
    fields += f"sample_rate -i {RATE}\nsample_sig_bits -i 16\nsample_coding -s{len(coding)} {coding}\nend_head\n"
    return f"NIST_1A\n   1024\n{fields}".encode().ljust(1024) + (PLAIN * 32767).astype("<i2").tobytes()


def sparse_wav(seconds: int) -> Make:
    """Hours of silence that take no space on the disk."""

    def make(path: Path) -> None:
        path.write_bytes(wav(b"", size=2 * RATE * seconds))
        os.truncate(path, 44 + 2 * RATE * seconds)

    return make


def zipped(path: Path) -> None:
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("0.wav", wav())


def unix_socket(path: Path) -> None:
    here = os.getcwd()
    os.chdir(path.parent)  # such names have at most 107 characters
    try:
        with socket.socket(socket.AF_UNIX) as listener:
            listener.bind(path.name)
    finally:
        os.chdir(here)


# ------------------------------------------------------------------------------------------------------------- prepare


def listed(seconds: float | None, bad: bool) -> Check:
    """The odd file is listed with the seconds it has, or (where that may be) as bad; the two good ones as always."""

    def check(folder: Path, outcome: Outcome) -> str | None:
        good_lines = {Path(x["audio_filepath"]).name: x["duration"] for x in read_lines(folder / "out.jsonl")}
        bad_lines = {Path(x["audio_filepath"]).name: x.get("reason") for x in read_lines(folder / "out.bad.jsonl")}
        for name, duration in (("0.wav", 1.6), ("1.wav", 1.7)):
            if not math.isclose(good_lines.pop(name, 0), duration, rel_tol=0.001):
                return f"the good file {name} is not listed as it was"
        if bad_lines:
            return None if bad and len(bad_lines) == 1 and all(bad_lines.values()) else f"bad files: {bad_lines}"
        if len(good_lines) != 1:
            return f"besides the good files: {good_lines}"
        found = next(iter(good_lines.values()))
        if seconds is None:
            return f"listed as good, with {found} s"
        return None if math.isclose(found, seconds, rel_tol=0.03) else f"listed with {found} s, it has {seconds} s"

    return check


def corpus(make: Make, name: str) -> Setup:
    """A folder with two good files and this one."""

    def setup(folder: Path) -> None:
        (folder / "corpus").mkdir()
        for number in (0, 1):
            shutil.copy(folder / f"audio/{number}.wav", folder / "corpus")
        make(folder / "corpus" / name)

    return setup


def two_good(folder: Path, outcome: Outcome) -> str | None:
    """The two good files are listed, once each, and nothing else is."""
    names = sorted(Path(line["audio_filepath"]).name for line in read_lines(folder / "out.jsonl"))
    bad = read_lines(folder / "out.bad.jsonl")
    return None if names == ["0.wav", "1.wav"] and not bad else f"listed: {names}; bad: {bad}"


def with_clutter(folder: Path) -> None:
    """What lies around in folders of audio."""
    corpus(content(b"x"), "notes.txt")(folder)
    clutter = {"table.csv": "a,b", "cover.png": "\x89PNG", ".DS_Store": "Bud1", "._0.wav": "AppleDouble", "a.zip": "PK"}
    for name, text in clutter.items():
        file(f"corpus/{name}", text)(folder)
    (folder / "corpus/empty.wav").mkdir()


def with_loop(folder: Path) -> None:
    corpus(Path.mkdir, "sub")(folder)
    (folder / "corpus/sub/loop").symlink_to("..")


GOOD, BAD, ANY = (SECONDS, False), (None, True), (SECONDS, True)
"""Must be listed with its seconds; must be listed as bad; may be either, but with the right seconds."""

ODD: list[tuple[str, str, Make, tuple[float | None, bool]]] = [
    # copies that broke off, and headers that lie
    ("an empty file", "x.wav", content(b""), BAD),
    ("a WAV without samples", "x.wav", content(wav(b"")), BAD),
    ("a WAV cut in the middle", "x.wav", content(wav()[: 44 + 2 * RATE]), (1.0, False)),
    ("a WAV from a pipe, of unknown size", "x.wav", content(wav(size=0xFFFFFFFF)), ANY),
    ("a WAV whose header says 0 bytes", "x.wav", content(wav(size=0)), ANY),
    ("a FLAC cut in the middle", "x.flac", coded("FLAC", None, part(0.5)), BAD),
    ("a FLAC with a hole", "x.flac", coded("FLAC", None, hole), BAD),
    ("an Ogg cut in the middle", "x.ogg", coded("OGG", "VORBIS", part(0.5)), (1.0, True)),
    ("an MP3 with a hole", "x.mp3", coded("MP3", None, hole), ANY),
    # other files under the name of audio
    ("an error page", "x.wav", content(b"<!DOCTYPE html><html><body>403 Forbidden</body></html>"), BAD),
    ("a Git LFS pointer", "x.wav", content(b"version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 9\n"), BAD),
    ("a zip archive called .wav", "x.wav", zipped, BAD),
    ("raw samples called .wav", "x.wav", content((PLAIN * 9999).astype("<i2").tobytes()), BAD),
    ("the beginning of an MP4", "x.m4a", content(b"\0\0\0\x18ftypM4A \0\0\0\0M4A mp42\0\0\xff\xffmdat"), BAD),
    ("a FLAC called .wav", "x.wav", coded("FLAC"), ANY),
    ("a WAV called .mp3", "x.mp3", content(wav()), ANY),
    # samples that are no sound
    ("a NaN among the samples", "x.wav", content(floats(math.nan)), BAD),
    ("samples of 1e30", "x.wav", content(floats(1e30, -1e30)), BAD),
    ("float samples between -32768 and 32767", "x.wav", content(floats(-32768.0, 32767.0)), ANY),
    ("nothing but silence", "x.wav", content(wav(bytes(4 * RATE))), ANY),
    ("a single sample", "x.wav", content(wav(b"\1\1")), (1 / RATE, True)),
    # formats
    ("a rate of 0 Hz", "x.wav", content(wav(rate=0)), BAD),
    ("a rate of 4 GHz", "x.wav", content(wav(rate=4_000_000_000)), BAD),
    ("no channels", "x.wav", content(wav(channels=0)), BAD),
    ("1,000 channels", "x.wav", content(wav(bytes(2000 * 64), channels=1000)), (64 / RATE, True)),
    ("big-endian RIFX", "x.wav", content(wav((PLAIN * 32767).astype(">i2").tobytes(), big=True)), GOOD),
    ("SPHERE, as TIMIT has it", "x.wav", content(sphere("pcm")), GOOD),
    ("SPHERE, compressed with shorten", "x.sph", content(sphere("pcm,embedded-shorten-v2.00")), BAD),
    # no plain files
    ("a link to nowhere", "x.wav", link("gone.wav"), BAD),
    ("a link to /dev/zero", "x.wav", link("/dev/zero"), BAD),
    ("a FIFO", "x.wav", os.mkfifo, BAD),
    # files that make FFmpeg open others
    ("a playlist called .wav", "x.wav", content(b"#EXTM3U\n#EXT-X-TARGETDURATION:9\n#EXTINF:9,\n0.wav\n"), BAD),
    ("a list for FFmpeg to join", "x.ffconcat", content(b"ffconcat version 1.0\nfile '0.wav'\n"), BAD),
]


def preparing() -> list[Trial]:
    def row(name: str, setup: Setup, expected: Expected, *options: str) -> Trial:
        return Trial("audio", f"prepare: {name}", prepare("corpus", *options), expected, setup)

    hours = 8
    long = Right(listed(3600.0 * hours, False))
    huge = corpus(sparse_wav(3600 * hours), "x.wav")
    a_socket = Either(Refused(("x.wav",)), Right(listed_or_skipped))
    return [
        *(row(name, corpus(make, file_name), Right(listed(*verdict))) for name, file_name, make, verdict in ODD),
        row("a socket", corpus(unix_socket, "x.wav"), a_socket),
        row("clutter between the files", with_clutter, Right(two_good)),
        row("folders in a loop of links", with_loop, Either(Refused(("loop",)), Right(two_good))),
        row("a recording of 8 hours", huge, long),
        row("only the header of 8 hours", huge, long, "--check", "header"),
        row("a damaged FLAC with two processes", corpus(coded("FLAC", None, hole), "x.flac"), LOST, "--workers", "2"),
    ]


LOST = Right(listed(*BAD))


def listed_or_skipped(folder: Path, outcome: Outcome) -> str | None:
    return listed(*BAD)(folder, outcome) and two_good(folder, outcome)


# --------------------------------------------------------------------------------------------------- the other commands


def in_place_of_third(make: Make) -> Setup:
    """This file in place of the third utterance's."""

    def setup(folder: Path) -> None:
        (folder / THIRD).unlink()
        make(folder / THIRD)

    return setup


def every(change: Callable[[Samples], Samples], rate: int = RATE, subtype: str = "PCM_16", kind: str = "WAV") -> Setup:
    """All files again, with other samples or in another format, under the same names."""

    def setup(folder: Path) -> None:
        for path in (folder / "audio").iterdir():
            samples, _ = soundfile.read(path, dtype="float32")
            soundfile.write(path, change(samples), rate, subtype=subtype, format=kind)

    return setup


def same(samples: Samples) -> Samples:
    return samples


def twice(samples: Samples) -> Samples:
    return np.stack([samples, samples], axis=1)


def first_with_chunks(folder: Path) -> None:
    """Chunks of recorders and editors, before the format and after the samples, one of an odd size."""
    data = (folder / "audio/0.wav").read_bytes()[44:]
    notes = b"bext" + struct.pack("<I", 602) + bytes(602)
    (folder / "audio/0.wav").write_bytes(wav(data, before=notes, after=b"LIST\3\0\0\0abc\0" + b"id3 \2\0\0\0ID"))


def extracting() -> list[Trial]:
    def row(name: str, setup: Setup, expected: Expected, source: str = "audio/0.wav", *options: str) -> Trial:
        return Trial("audio", f"extract: {name}", extract(source, *options), expected, setup)

    alike = Right(same_features)
    of_third = Refused(("2.wav",), partial=True)
    seven = Right(extracted(7, ["2.wav"]), codes=(1,))
    eight = Right(extracted(8))
    cropped = Either(of_third, eight)
    any_third = Either(of_third, Right(extracted(1)))
    return [
        row("both channels are the same", every(twice), alike),
        row("W64 called .wav", every(same, kind="W64"), alike),
        row("chunks before and after, one of an odd size", first_with_chunks, alike),
        row("one file is empty", in_place_of_third(content(b"")), seven, "train.jsonl"),
        row("one file has samples of 1e30", in_place_of_third(content(floats(1e30))), seven, "audio"),
        row("one file is a FIFO", in_place_of_third(os.mkfifo), seven, "train.jsonl"),
        row("one file is much longer than stated", in_place_of_third(sparse_wav(3600)), cropped, "train.jsonl"),
        row("silence", in_place_of_third(content(wav(bytes(4 * RATE)))), any_third, "audio/2.wav"),
        row("a single sample", in_place_of_third(content(wav(b"\1\1"))), any_third, "audio/2.wav"),
        row("11 minutes", in_place_of_third(sparse_wav(660)), Refused(("2.wav", "600"), partial=True), "audio/2.wav"),
        row("rates of 8 kHz", every(lambda samples: samples[::2], 8000), eight, "train.jsonl"),
    ]


def training() -> list[Trial]:
    def row(name: str, setup: Setup, expected: Expected, *overrides: str) -> Trial:
        return Trial("audio", f"pretrain: {name}", train(*overrides), expected, setup)

    named = Right(stands_in("2.wav"))
    ok = Right(trained)
    alike = Right(same_losses)
    workers = "model.train_ds.num_workers=2"
    noise = "model.train_ds.noise_manifest=noise.jsonl"
    broken = coded("FLAC", None, hole)
    noise_line = '{"audio_filepath": "noise.wav", "duration": 2.0}\n'
    nan_noise = both(file("noise.jsonl", noise_line), file("noise.wav", floats(math.nan)))
    no_noise = both(file("noise.jsonl", noise_line), file("noise.wav", wav(bytes(4 * RATE))))
    all_nan = every(lambda samples: samples * np.float32(math.nan), subtype="FLOAT")
    hopeless = Refused((".wav",), partial=True)
    return [
        row("both channels are the same, FLAC called .wav", every(twice, kind="FLAC"), alike),
        row("one file is empty", in_place_of_third(content(b"")), named),
        row("one file is damaged inside", in_place_of_third(broken), named),
        row("one file is damaged inside, read by workers", in_place_of_third(broken), named, workers),
        row("one file has samples of 1e30", in_place_of_third(content(floats(1e30))), named),
        row("one file ends early", in_place_of_third(content(wav()[: 44 + RATE])), named),
        row("one file is a FIFO", in_place_of_third(os.mkfifo), named),
        row("one file is now an hour long", in_place_of_third(sparse_wav(3600)), ok),
        row("all files are silent", every(lambda samples: samples * 0), ok),
        row("all files have NaN, read by workers", all_nan, hopeless, workers),
        row("the noise has NaN", nan_noise, Either(hopeless, Right(said("noise.wav"))), noise),
        row("the noise is silent", no_noise, ok, noise),
        row("a channel that no file has", every(same), Refused(("channel|.wav",), True), CHANNEL),
    ]


CHANNEL = "model.train_ds.channel_selector=5"


def inspecting() -> list[Trial]:
    def row(name: str, setup: Setup, expected: Expected) -> Trial:
        return Trial("audio", f"inspect: {name}", inspect("train.jsonl"), expected, setup)

    named = Right(said("2.wav", then=page))
    named_or_refused = Either(Refused(("2.wav|train.jsonl",)), named)
    half_at_8000 = both(in_place_of_third(coded("WAV", None, rate=8000)), third(duration=SECONDS))
    no_durations = each(lambda line, number: line.pop("duration"))
    error_page = both(no_durations, in_place_of_third(content(b"<html>")))
    return [
        row("one file is empty", in_place_of_third(content(b"")), named),
        row("one file is a FIFO", in_place_of_third(os.mkfifo), named),
        row("one file is an error page, no durations", error_page, named_or_refused),
        row("one file has 8 kHz", half_at_8000, Right(said("8000 Hz", then=page))),
        row("all files are silent", every(lambda samples: samples * 0), Right(page)),
    ]


def trials() -> list[Trial]:
    return [*preparing(), *extracting(), *training(), *inspecting()]
