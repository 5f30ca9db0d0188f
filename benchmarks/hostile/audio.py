"""Bad audio: damaged, odd, foreign and extreme files, and files that change while they are used."""

from __future__ import annotations

import gzip
import io
import os
import shutil
import struct
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import av
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
    disturbed,
    link,
    pretrain,
    replaced,
    said,
    speech,
    trained,
    write_lines,
)
from benchmarks.hostile.manifests import (
    AB,
    MODEL,
    NAMES,
    all_of,
    extract,
    features,
    first_is_right,
    four_steps,
    has_page,
    json_lines,
    labels,
    make_socket,
    named_bad,
    noise,
    one_noise,
    prepared,
    probe,
)

Samples = np.ndarray[Any, Any]
Bytes = Callable[[Samples], bytes]
"""Makes the bytes of a file from the 16-bit samples of 0.wav (1.6 s)."""

# ---- ways to write it


def chunk(name: bytes, data: bytes, size: int | None = None, order: str = "<") -> bytes:
    return name + struct.pack(f"{order}I", len(data) if size is None else size) + data + b"\0" * (len(data) % 2)


def fmt(
    tag: int = 1, channels: int = 1, rate: int = RATE, bits: int = 16, align: int | None = None, more: bytes = b""
) -> bytes:
    align = channels * bits // 8 if align is None else align
    return chunk(b"fmt ", struct.pack("<HHIIHH", tag, channels, rate, (rate * align) % 2**32, align, bits) + more)


def riff(*chunks: bytes, size: int | None = None, name: bytes = b"RIFF") -> bytes:
    body = b"WAVE" + b"".join(chunks)
    return name + struct.pack("<I", len(body) if size is None else size) + body


def data(x: Samples, size: int | None = None) -> bytes:
    return chunk(b"data", x.astype("<i2").tobytes(), size)


def big_endian(x: Samples) -> bytes:
    body = b"WAVE" + chunk(b"fmt ", struct.pack(">HHIIHH", 1, 1, RATE, RATE * 2, 2, 16), order=">")
    body += chunk(b"data", x.astype(">i2").tobytes(), order=">")
    return b"RIFX" + struct.pack(">I", len(body)) + body


def written(form: str, subtype: str | None = None, rate: int = RATE) -> Bytes:
    """As libsndfile writes it."""

    def make(x: Samples) -> bytes:
        file = io.BytesIO()
        soundfile.write(file, x, rate, format=form, subtype=subtype)
        return file.getvalue()

    return make


def floats(change: Callable[[Samples], Samples], subtype: str = "FLOAT") -> Bytes:
    return lambda x: written("WAV", subtype)(change((x / 32768).astype(np.float64)))


def then(first: Bytes, change: Callable[[bytes], bytes]) -> Bytes:
    return lambda x: change(first(x))


def plain(x: Samples) -> bytes:
    return riff(fmt(), data(x))


def share(part: float) -> Callable[[bytes], bytes]:
    return lambda content: content[: int(part * len(content))]


def overwritten(at: float, new: bytes) -> Callable[[bytes], bytes]:
    def change(content: bytes) -> bytes:
        begin = int(at * len(content))
        return content[:begin] + new + content[begin + len(new) :]

    return change


def put(at: int, new: bytes) -> Callable[[bytes], bytes]:
    return lambda content: content[:at] + new + content[at + len(new) :]


def with_value(index: int, value: float) -> Callable[[Samples], Samples]:
    def change(x: Samples) -> Samples:
        x = x.copy()
        x[index] = value
        return x

    return change


def encoded(container: str, codec: str, video: bool = False, sound: bool = True) -> Bytes:
    """As FFmpeg writes it, with or without pictures."""

    def make(x: Samples) -> bytes:
        file = io.BytesIO()
        with av.open(file, "w", format=container) as out:
            pictures = out.add_stream("mpeg4", rate=10) if video else None
            if pictures:
                pictures.width, pictures.height, pictures.pix_fmt = 32, 32, "yuv420p"
            stream = out.add_stream(codec, rate=RATE, layout="mono") if sound else None
            if pictures:
                for _ in range(16):
                    picture = av.VideoFrame.from_ndarray(np.zeros((32, 32, 3), dtype=np.uint8), format="rgb24")
                    out.mux(pictures.encode(picture))
                out.mux(pictures.encode(None))
            if stream:
                frame = av.AudioFrame.from_ndarray(x.astype(np.int16)[None], format="s16", layout="mono")
                frame.sample_rate = RATE
                out.mux(stream.encode(frame))
                out.mux(stream.encode(None))
        return file.getvalue()

    return make


def unknown_total(content: bytes) -> bytes:
    """FLAC as a stream: neither the number of samples nor the checksum of all is known."""
    return content[:21] + bytes([content[21] & 0xF0]) + bytes(4 + 16) + content[42:]


def id3(size: int = 2000) -> bytes:
    return b"ID3\x04\0\0" + bytes([size >> 21 & 127, size >> 14 & 127, size >> 7 & 127, size & 127]) + bytes(size)


def no_marker_pages(content: bytes) -> bytes:
    """Ogg: the position of the last page says that there are 2**60 samples."""
    at = content.rfind(b"OggS")
    return content[: at + 6] + struct.pack("<q", 1 << 60) + content[at + 14 :]


def damaged_page(content: bytes) -> bytes:
    """Ogg: eight bytes in the middle are different, so the checksum of their page is wrong."""
    return overwritten(0.5, b"\xff\0\xff\0\xff\0\xff\0")(content)


def aiff_rate(content: bytes) -> bytes:
    """AIFF: the sample rate, a float of 80 bits, is infinite."""
    at = content.find(b"COMM") + 8 + 8
    return content[:at] + b"\x7f\xff\x80\0\0\0\0\0\0\0" + content[at + 10 :]


def sphere(count: int, coding: str = "pcm") -> Bytes:
    def make(x: Samples) -> bytes:
        head = f"NIST_1A\n   1024\nchannel_count -i 1\nsample_count -i {count}\nsample_rate -i {RATE}\n"
        head += f"sample_n_bytes -i 2\nsample_byte_format -s2 01\nsample_sig_bits -i 16\nsample_coding -s3 {coding}\n"
        return (head + "end_head\n").encode().ljust(1024) + x.astype("<i2").tobytes()

    return make


def playlist(x: Samples) -> bytes:
    return b"#EXTM3U\n#EXT-X-TARGETDURATION:2\n#EXT-X-MEDIA-SEQUENCE:0\n#EXTINF:2.0,\n1.wav\n#EXT-X-ENDLIST\n"


def sdp(x: Samples) -> bytes:
    return b"v=0\no=- 0 0 IN IP4 127.0.0.1\ns=x\nc=IN IP4 127.0.0.1\nt=0 0\nm=audio 54321 RTP/AVP 0\n"


def repeated_channels(count: int) -> Bytes:
    return lambda x: riff(fmt(channels=count), data(np.repeat(x, count)))


# ---- one file, its features


def right_features(folder: Path, outcome: Outcome) -> str | None:
    """The features are those of 0.wav, which has the same samples."""
    found = json_lines(folder / "out/manifest.jsonl")
    if len(found) != 1:
        return f"{len(found)} lines in the manifest"
    values, expected = np.load(next((folder / "out").rglob("*.npy"))), Fixture.feature()
    if values.shape != expected.shape:
        return f"features of shape {values.shape}, expected {expected.shape}"
    return None if np.allclose(values, expected, atol=5e-3) else "features differ from those of the same samples"


def frames(least: int, most: int) -> Check:
    """Finite features with about as many frames as there is audio."""

    def check(folder: Path, outcome: Outcome) -> str | None:
        values = np.load(next((folder / "out").rglob("*.npy")))
        if not np.isfinite(values).all():
            return "features are not finite"
        return None if least <= values.shape[-1] <= most else f"{values.shape[-1]} frames"

    return check


BAD = Refused(("x.wav",), partial=True)
SAME = Right(right_features)
SAME_OR_BAD = Either(BAD, SAME)
ABOUT = Right(frames(19, 22))
ABOUT_OR_BAD = Either(BAD, ABOUT)

ONE_FILE: list[tuple[str, Bytes, Expected]] = [
    (
        "a WAV with a megabyte of notes before its data",
        lambda x: riff(fmt(), chunk(b"LIST", bytes(1 << 20)), data(x)),
        SAME,
    ),
    (
        "a WAV with data behind which a tool wrote notes",
        lambda x: riff(fmt(), data(x), chunk(b"bext", bytes(601)), chunk(b"LIST", b"INFO")) + b"junk",
        SAME,
    ),
    (
        "a WAV from a pipe, with the largest sizes",
        lambda x: riff(fmt(), data(x, 2**32 - 1), size=2**32 - 1),
        SAME_OR_BAD,
    ),
    ("a WAV from a pipe, with sizes of zero", lambda x: riff(fmt(), data(x, 0), size=0), SAME_OR_BAD),
    ("a WAV whose data comes before its format", lambda x: riff(data(x), fmt()), SAME_OR_BAD),
    (
        "a WAV with two data chunks",
        lambda x: riff(fmt(), data(x[:12800]), data(x[12800:])),
        Either(BAD, Right(frames(10, 22))),
    ),
    (
        "a WAV with a chunk that claims four gigabytes",
        lambda x: riff(fmt(), chunk(b"LIST", b"", 2**32 - 16), data(x)),
        SAME_OR_BAD,
    ),
    ("a WAV without channels", lambda x: riff(fmt(channels=0, align=2), data(x)), BAD),
    ("a WAV with blocks of zero bytes", lambda x: riff(fmt(align=0), data(x)), SAME_OR_BAD),
    ("a WAV with samples of zero bits", lambda x: riff(fmt(bits=0, align=2), data(x)), BAD),
    ("a WAV with a rate of zero", lambda x: riff(fmt(rate=0), data(x)), BAD),
    ("a WAV with the rate of a radio wave", lambda x: riff(fmt(rate=2**32 - 1), data(x)), BAD),
    ("a WAV of a format that nobody knows", lambda x: riff(fmt(tag=0xABCD), data(x)), BAD),
    (
        "a WAV with ADPCM blocks of zero bytes",
        lambda x: riff(fmt(tag=2, bits=4, align=0, more=struct.pack("<HHH", 4, 0, 0)), data(x)),
        BAD,
    ),
    ("a WAV with 64 channels that are all the same", repeated_channels(64), SAME),
    ("a WAV with big-endian numbers", big_endian, SAME),
    ("a WAV with floats of 64 bits", floats(lambda x: x, "DOUBLE"), SAME),
    ("a WAV of a telephone, in mu-law", written("WAV", "ULAW"), ABOUT),
    ("a FLAC file that is named WAV", written("FLAC"), SAME),
    ("a FLAC file behind a tag for MP3", then(written("FLAC"), lambda content: id3() + content), SAME_OR_BAD),
    ("a FLAC stream of unknown length", then(written("FLAC"), unknown_total), SAME_OR_BAD),
    ("a FLAC file with damage in its middle", then(written("FLAC"), overwritten(0.5, b"\x55" * 40)), BAD),
    ("a FLAC file cut in half", then(written("FLAC"), share(0.5)), BAD),
    (
        "a FLAC file that promises 2**36 samples",
        then(written("FLAC"), lambda content: content[:21] + bytes([content[21] | 15]) + b"\xff" * 4 + content[26:]),
        BAD,
    ),
    (
        "an MP3 whose beginning is missing",
        then(written("MP3"), lambda content: content[700:]),
        Either(BAD, Right(frames(15, 22))),
    ),
    (
        "an MP3 with a page of junk in its middle",
        then(written("MP3"), overwritten(0.4, bytes(range(256)) * 8)),
        Either(BAD, Right(frames(5, 23))),
    ),
    ("an Ogg file with a damaged page", then(written("OGG", "VORBIS"), damaged_page), BAD),
    ("an Ogg file that claims 2**60 samples", then(written("OGG", "VORBIS"), no_marker_pages), ABOUT_OR_BAD),
    ("an Opus file cut in half", then(written("OGG", "OPUS"), share(0.5)), Either(BAD, Right(frames(8, 13)))),
    ("an AIFF file with an infinite rate", then(written("AIFF"), aiff_rate), BAD),
    ("an AU file of unknown length", then(written("AU"), put(8, b"\xff\xff\xff\xff")), SAME_OR_BAD),
    ("a SPHERE file that promises a hundred times more", sphere(2_560_000), SAME_OR_BAD),
    ("a SPHERE file compressed by shorten", sphere(25_600, "pcm,embedded-shorten-v2.00"), BAD),
    ("a W64 file cut in its header", then(written("W64"), lambda content: content[:60]), BAD),
    ("an RF64 file whose sizes are 2**63", then(written("RF64"), put(20, b"\xff" * 24)), SAME_OR_BAD),
    ("an M4A file from a recorder that lost power", then(encoded("mp4", "aac"), share(0.6)), BAD),
    ("a video without sound", encoded("matroska", "aac", video=True, sound=False), BAD),
    ("a video with sound", encoded("matroska", "pcm_s16le", video=True), ABOUT),
    ("a playlist that points to another file", playlist, BAD),
    ("a list of files for FFmpeg to join", lambda x: b"ffconcat version 1.0\nfile '1.wav'\n", BAD),
    ("a description of a network stream", sdp, BAD),
    ("samples without a header", lambda x: x.astype("<i2").tobytes(), BAD),
    ("a WAV compressed by gzip", then(plain, gzip.compress), BAD),
    ("a page of HTML named as audio", lambda x: b"<html>502 Bad Gateway</html>" * 500, BAD),
    ("a WAV of which only zeros were downloaded", lambda x: bytes(51_244), BAD),
    ("a header without a single sample", lambda x: riff(fmt(), data(x[:0])), BAD),
    ("a single sample", lambda x: riff(fmt(), data(x[:1])), Either(BAD, Right(frames(1, 2)))),
    ("audio a little shorter than a window", lambda x: riff(fmt(), data(x[:399])), Either(BAD, Right(frames(1, 2)))),
    ("samples so large that energies overflow", floats(lambda x: x * 1e38), Either(BAD, Right(frames(19, 22)))),
    ("samples too small for normal floats", floats(lambda x: x * 1e-42), Either(BAD, Right(frames(19, 22)))),
    ("a single NaN among good samples", floats(with_value(9000, np.nan)), BAD),
    ("a constant instead of a signal", floats(lambda x: x * 0 + 0.5), ABOUT),
]


def one_file(make: Bytes) -> Setup:
    def setup(folder: Path) -> None:
        samples = soundfile.read(folder / "audio/0.wav", dtype="int16")[0]
        (folder / "audio/x.wav").write_bytes(make(samples))

    return setup


# ---- among good files, in all commands

THIRD = Path("audio/2.wav")
OTHERS = [name for name in NAMES if name != "2.wav"]


def third(make: Bytes) -> Setup:
    """2.wav is made from the samples of 2.wav."""

    def setup(folder: Path) -> None:
        samples = soundfile.read(folder / THIRD, dtype="int16")[0]
        (folder / THIRD).write_bytes(make(samples))

    return setup


def each(make: Bytes) -> Setup:
    def setup(folder: Path) -> None:
        for name in NAMES:
            samples = soundfile.read(folder / "audio" / name, dtype="int16")[0]
            (folder / "audio" / name).write_bytes(make(samples))

    return setup


def sparse(folder: Path) -> None:
    """A WAV of 3.9 GB, of which the disk holds a page: 34 hours of zeros."""
    size = 3_900_000_000
    with (folder / THIRD).open("wb") as file:
        file.write(riff(fmt(), chunk(b"data", b"", size), size=size + 36))
        file.truncate(44 + size)


def hours_of_silence(folder: Path) -> None:
    """Three hours in a few hundred kilobytes."""
    with soundfile.SoundFile(folder / THIRD, "w", RATE, 1, format="FLAC") as file:
        for _ in range(180):
            file.write(np.zeros(60 * RATE, dtype=np.int16))


def clutter(folder: Path) -> None:
    """What systems and people leave next to audio."""
    for name in ("._0.wav", ".DS_Store", "Thumbs.db", "notes.txt", "words.TextGrid", "cover.jpg", "all.zip", "0.json"):
        (folder / "audio" / name).write_bytes(b"\0\5\x16\7 not audio " * 30)


def chained(folder: Path) -> None:
    """Two Ogg streams, one behind the other, as `cat` and recorders make them."""
    samples = soundfile.read(folder / THIRD, dtype="int16")[0]
    (folder / THIRD).write_bytes(written("OGG", "VORBIS")(samples) + written("OGG", "VORBIS")(samples[::-1]))


def without_third(folder: Path, outcome: Outcome) -> str | None:
    return prepared(OTHERS, ["2.wav"])(folder, outcome)


def listed_or_bad(seconds: float) -> Right:
    """The file is in the manifest with this duration, or among the bad ones."""

    def check(folder: Path, outcome: Outcome) -> str | None:
        if without_third(folder, outcome) is None:
            return None
        return prepared(durations={"2.wav": seconds})(folder, outcome)

    return Right(check)


def clutter_right(folder: Path, outcome: Outcome) -> str | None:
    """The eight files are listed; what is tried and bad has a reason, and hidden files are not."""
    found = sorted(Path(line["audio_filepath"]).name for line in json_lines(folder / "m.jsonl"))
    bad = [Path(line["audio_filepath"]).name for line in json_lines(folder / "m.bad.jsonl")]
    if found != NAMES:
        return f"listed {found}"
    skipped = {"._0.wav", ".DS_Store", "notes.txt", "cover.jpg", "all.zip"}
    return f"tried {skipped & set(bad)}" if skipped & set(bad) else None


FOLDER = ["prepare", "audio", "--output", "m.jsonl", "--workers", "0"]
INSPECT = ["inspect", "train.jsonl", "--batch-size", "2"]
SILENT = floats(np.zeros_like, "PCM_16")
AMONG: list[tuple[str, Setup, Sequence[str], Expected]] = [
    (
        "a WAV cut in half, to prepare",
        third(then(plain, share(0.5))),
        FOLDER,
        Right(prepared(durations={"2.wav": 0.9})),
    ),
    ("a WAV cut in half, to train on", third(then(plain, share(0.5))), pretrain(), Right(named_bad("2.wav"))),
    ("a pipe among the files to prepare", replaced(os.mkfifo, THIRD), FOLDER, Right(without_third)),
    (
        "a pipe among the files to extract",
        replaced(os.mkfifo, THIRD),
        extract("audio"),
        Right(features(OTHERS, ["2.wav"]), codes=(1,)),
    ),
    ("a socket among the files to prepare", replaced(make_socket, THIRD), FOLDER, Right(without_third)),
    ("a file that is endless zeros, to prepare", replaced(link("/dev/zero"), THIRD), FOLDER, Right(without_third)),
    ("two Ogg streams in one file, to prepare", chained, FOLDER, listed_or_bad(3.6)),
    (
        "a WAV of 34 hours that takes no disk, to extract",
        sparse,
        extract("audio"),
        Right(all_of(first_is_right, features(OTHERS, ["2.wav"])), codes=(1,)),
    ),
    ("three hours where the line says two seconds", hours_of_silence, pretrain(), Right(four_steps)),
    (
        "three hours of silence in a small file, to extract",
        hours_of_silence,
        extract("audio"),
        Right(features(OTHERS, ["2.wav"]), codes=(1,)),
    ),
    ("hidden files, pictures and notes between the audio", clutter, FOLDER, Right(clutter_right)),
    (
        "a single infinite sample, to train on",
        third(floats(with_value(5, np.inf))),
        pretrain(),
        Right(named_bad("2.wav")),
    ),
    ("nothing but silence, to train on", each(SILENT), pretrain(), Either(Refused((".wav|silen",)), Right(four_steps))),
    (
        "energies that overflow, to train on",
        third(floats(lambda x: x * 1e38)),
        pretrain(),
        Right(said("2.wav", then=trained)),
    ),
    (
        "FLAC with damage inside, to train on",
        third(then(written("FLAC"), overwritten(0.5, b"\x55" * 40))),
        pretrain(),
        Right(named_bad("2.wav")),
    ),
    (
        "damaged audio that only validation reads",
        third(lambda x: b"not audio"),
        pretrain(
            "model.train_ds.manifest_filepath=rest.jsonl", "trainer.check_val_every_n_epoch=1", "trainer.max_steps=3"
        ),
        Right(said("2.wav")),
    ),
    ("no file that can be read, to train on", each(lambda x: b"RIFF"), pretrain(), Refused((".wav",), partial=True)),
    (
        "no file that can be read, to prepare",
        each(lambda x: b"RIFF"),
        FOLDER,
        Refused(("audio|m.jsonl|m.bad.jsonl",), partial=True),
    ),
    (
        "energies that overflow, to inspect",
        third(floats(lambda x: x * 1e38)),
        INSPECT,
        Either(Refused(("2.wav",)), Right(has_page())),
    ),
    (
        "an empty file and a cut one, to inspect",
        both(third(lambda x: b""), lambda folder: os.truncate(folder / "audio/5.wav", 9000)),
        INSPECT,
        Right(has_page("2.wav", "5.wav")),
    ),
    (
        "a NaN in the audio of a probe",
        both(labels(AB), third(floats(with_value(77, np.nan)))),
        probe(),
        Refused(("2.wav",)),
    ),
    (
        "silence in the audio of a probe",
        both(labels(AB), third(SILENT)),
        probe(),
        Either(
            Refused(("2.wav",)),
            Right(
                lambda folder, outcome: (
                    None if "nan" not in (folder / "out/results.json").read_text().lower() else "NaN in results.json"
                )
            ),
        ),
    ),
    (
        "noise for a probe that is damaged",
        both(labels(AB), noise(one_noise()), lambda folder: os.truncate(folder / "noise.wav", 30)),
        probe("--snr", "0", "--noise", "noise.jsonl"),
        Refused(("noise.wav",)),
    ),
]


def without_the_third(folder: Path) -> None:
    """A training manifest without the file that is damaged; it is in valid.jsonl."""
    write_lines(
        folder / "rest.jsonl",
        [line for line in json_lines(folder / "train.jsonl") if not line["audio_filepath"].endswith("/2.wav")],
    )


def all_deleted(folder: Path) -> None:
    shutil.rmtree(folder / "audio")


def cut_while_read(folder: Path) -> None:
    for name in NAMES[:3]:
        os.truncate(folder / "audio" / name, 100)


def longer_now(folder: Path) -> None:
    """Files are replaced by longer ones at another rate, while training goes on."""
    for name in NAMES:
        soundfile.write(folder / "audio" / name, speech(44_100 * 5, 3), 44_100)


LONG = pretrain("trainer.max_steps=60", "exp_manager.name=run")
DISTURBED: list[tuple[str, Setup]] = [
    ("all audio deleted while training reads it", all_deleted),
    ("files cut short while training reads them", cut_while_read),
    ("files replaced by longer ones during training", longer_now),
]


def trials() -> list[Trial]:
    def one(name: str, command: Sequence[str], expected: Expected, setup: Setup, **more: Any) -> Trial:
        command = [argument.replace(MODEL, str(Fixture.path / "model.nemo")) for argument in command]
        return Trial("audio", name, command, expected, setup, **more)

    return [
        *(one(name, extract("audio/x.wav"), expected, one_file(make)) for name, make, expected in ONE_FILE),
        *(one(name, command, expected, both(without_the_third, setup)) for name, setup, command, expected in AMONG),
        *(
            one(name, LONG, Right(trained), without_the_third, act=disturbed(disturb), limit_s=120)
            for name, disturb in DISTURBED
        ),
    ]
