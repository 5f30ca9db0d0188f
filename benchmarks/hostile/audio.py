"""Audio files as recorders, downloads, converters and tired disks leave them, prepared, inspected, extracted, trained on.

A bad file is named and costs its own utterance only. A good one gives the same samples in whatever it is wrapped.
"""

from __future__ import annotations

import io
import json
import os
import shutil
import struct
from collections.abc import Callable, Mapping, Sequence
from functools import partial
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
    finite_features,
    in_fork,
    link,
    nothing,
    on_bytes,
    patched,
    pretrain,
    replaced,
    resume,
    said,
    same_features,
    speech,
    trained,
    write_lines,
    zeros,
)

GROUP = "audio"
Samples = np.ndarray[Any, Any]
Make = Callable[[Path], object]
SECONDS = 2.0
VOICE = speech(int(SECONDS * RATE), 3)
PREPARE = ["prepare", "corpus", "--output", "m.jsonl", "--workers", "0"]
EXTRACT = ["extract", "model.nemo", "corpus", "out", "--device", "cpu"]
SECOND = Path("audio/2.wav")
HUGE = 1e30


# ---------------------------------------------------------------------------------------------------------- making files


def encoded(samples: Samples = VOICE, rate: int = RATE, **options: Any) -> bytes:
    """The bytes of a file; `format` is WAV and its samples are 16-bit unless other options are given."""
    file = io.BytesIO()
    soundfile.write(file, samples, rate, **{"format": "WAV", **options})
    return file.getvalue()


def voice_of_fixture() -> Samples:
    samples: Samples = soundfile.read(Fixture.path / "audio/0.wav", dtype="int16")[0]
    return samples


def written(content: bytes) -> Make:
    return lambda path: path.write_bytes(content)


def wav(samples: Samples, **options: Any) -> Make:
    return written(encoded(samples, **options))


def spoiled(value: float, subtype: str = "FLOAT", count: int = 1) -> Make:
    """Speech in which some samples in the middle have this value."""
    samples = VOICE.astype(np.float64)
    samples[RATE : RATE + count] = value
    return wav(samples, subtype=subtype)


def chunk(name: bytes, content: bytes) -> bytes:
    return name + struct.pack("<I", len(content)) + content + bytes(len(content) % 2)


def riff(*chunks: bytes, size: int | None = None) -> bytes:
    content = b"WAVE" + b"".join(chunks)
    return b"RIFF" + struct.pack("<I", len(content) if size is None else size) + content


def form(channels: int = 1, rate: int = RATE, bits: int = 16, tag: int = 1) -> bytes:
    width = channels * bits // 8
    return chunk(b"fmt ", struct.pack("<HHIIHH", tag, channels, rate, (rate * width) % 2**32, width % 2**16, bits))


def pcm(samples: Samples = VOICE) -> bytes:
    return (samples if samples.dtype == np.int16 else (samples * 32767).astype(np.int16)).astype("<i2").tobytes()


def endless(samples: Samples = VOICE, size: int = 0xFFFFFFFF) -> bytes:
    """A WAV of a program that wrote to a pipe, and could not go back to write the size."""
    return riff(form(), b"data" + struct.pack("<I", size) + pcm(samples), size=size)


def flac_of(total: int, samples: Samples = VOICE) -> bytes:
    """A FLAC whose header promises another number of samples; 0 is what a pipe leaves: unknown."""
    data = encoded(samples, format="FLAC")
    packed = struct.unpack(">Q", data[18:26])[0]
    return patched(data, 18, struct.pack(">Q", packed >> 36 << 36 | total))


def sphere_with_shorten() -> bytes:
    """The header of a corpus on CD-ROM, whose samples are compressed by a program of 1994."""
    fields = ["sample_count -i 32000", "sample_n_bytes -i 2", "channel_count -i 1", "sample_byte_format -s2 01"]
    fields += ["sample_rate -i 16000", "sample_coding -s26 pcm,embedded-shorten-v2.00", "end_head"]
    header = "NIST_1A\n   1024\n" + "\n".join(fields) + "\n"
    return header.encode().ljust(1024) + b"ajkg\2" + np.random.default_rng(0).bytes(30_000)


def ogg_crc(page: bytes) -> int:
    crc = 0
    for byte in page:
        crc ^= byte << 24
        for _ in range(8):
            crc = (crc << 1 ^ (0x04C11DB7 if crc & 0x80000000 else 0)) & 0xFFFFFFFF
    return crc


def later(data: bytes, samples: int) -> bytes:
    """An Ogg as recorded from a radio stream that had been on the air for this long: its clock does not begin at 0."""
    pages = [b"OggS" + page for page in data.split(b"OggS")[1:]]
    moved = b""
    for page in pages:
        clock = struct.unpack("<q", page[6:14])[0]
        new = patched(page, 6, struct.pack("<q", clock + samples if clock > 0 else clock))
        new = patched(new, 22, bytes(4))
        moved += patched(new, 22, struct.pack("<I", ogg_crc(new)))
    return moved


def xing_of(frames: int) -> bytes:
    """An MP3 whose first frame promises another number of frames."""
    at = max(MP3.find(b"Xing"), MP3.find(b"Info"))
    return patched(MP3, at + 8, struct.pack(">I", frames))


def without_first_frame(data: bytes) -> bytes:
    return data[data.index(data[:2], 4) :]


def sparse(path: Path) -> None:
    """A download that reserved its gigabyte, and got nothing."""
    path.touch()
    os.truncate(path, 1 << 30)


FLAC, OGG, MP3 = (encoded(format=name) for name in ("FLAC", "OGG", "MP3"))
OPUS = encoded(format="OGG", subtype="OPUS")
BAD: Mapping[str, Make] = {
    "empty": written(b""),
    "only a header": written(encoded()[:44]),
    "half a header": written(encoded()[:30]),
    "all zeros": written(bytes(64_000)),
    "a log-in page": written(b"<!DOCTYPE html><html><body>Please log in</body></html>" * 50),
    "a git-lfs pointer": written(b"version https://git-lfs.github.com/spec/v1\noid sha256:4d7a\nsize 64044\n"),
    "an error of a bucket": written(b'<?xml version="1.0"?><Error><Code>AccessDenied</Code></Error>'),
    "encrypted": written(np.random.default_rng(1).bytes(64_000)),
    "flac cut in half": written(FLAC[: len(FLAC) // 2]),
    "flac with zeros in the middle": written(patched(FLAC, len(FLAC) // 2, bytes(4096))),
    "flac with a hole": written(FLAC[: len(FLAC) // 3] + FLAC[len(FLAC) // 3 + 3000 :]),
    "flac that promises more": written(flac_of(20 * RATE)),
    "one NaN": spoiled(np.nan),
    "one infinity": spoiled(-np.inf),
    "one sample of 1e30": spoiled(HUGE),
    "one sample of -3e38": spoiled(-3e38),
    "one double of 1e300": spoiled(1e300, "DOUBLE"),
    "all of 1e30": wav(VOICE.astype(np.float64) * HUGE, subtype="FLOAT"),
    "a rate of 0": written(riff(form(rate=0), chunk(b"data", pcm()))),
    "a rate of 500 Hz": written(riff(form(rate=500), chunk(b"data", pcm()))),
    "a rate of 4 GHz": written(riff(form(rate=2**32 - 1), chunk(b"data", pcm()))),
    "0 channels": written(riff(form(channels=0), chunk(b"data", pcm()))),
    "65,535 channels": written(riff(form(channels=65_535), chunk(b"data", pcm()))),
    "0 bits": written(riff(form(bits=0), chunk(b"data", pcm()))),
    "a codec of nobody": written(riff(form(tag=0x7A21), chunk(b"data", pcm()))),
    "speech compressed by shorten": written(sphere_with_shorten()),
    "a gigabyte of nothing": sparse,
    "a pipe": os.mkfifo,
    "a link to nowhere": link("gone.wav"),
    "a link to itself": link("2.wav"),
    "a link to /dev/null": link("/dev/null"),
}
"""Files that nothing can be learned from. In a corpus each is called 2.wav."""


def unsized_caf(samples: Samples) -> bytes:
    data = encoded(samples, format="CAF")
    return patched(data, data.index(b"data") + 4, b"\xff" * 8)


def wrapped() -> dict[str, Make]:
    """The samples of the fixture's first recording, 16-bit exactly, in other files."""
    samples = voice_of_fixture()
    data = encoded(samples)
    formats: dict[str, dict[str, Any]] = {
        "flac": {"format": "FLAC"},
        "AIFF": {"format": "AIFF"},
        "AU": {"format": "AU"},
        "CAF": {"format": "CAF"},
        "W64": {"format": "W64"},
        "RF64": {"format": "RF64"},
        "NIST SPHERE": {"format": "NIST"},
        "extensible WAV": {"format": "WAVEX"},
        "big-endian WAV": {"endian": "BIG"},
        "24-bit WAV": {"subtype": "PCM_24"},
        "24-bit flac": {"format": "FLAC", "subtype": "PCM_24"},
    }
    list_chunk = chunk(b"LIST", b"INFO" + chunk(b"ISFT", b"Recorder 1.0"))
    rows = {name: wav(samples, **options) for name, options in formats.items()}
    floats = samples / 32768
    return {
        **rows,
        "float WAV": wav(floats, subtype="FLOAT"),
        "double WAV": wav(floats, subtype="DOUBLE"),
        "stereo, both the same": wav(np.stack([samples, samples], 1)),
        "8 channels, all the same": wav(np.stack([samples] * 8, 1)),
        "WAV of a pipe": written(endless(samples)),
        "WAV with chunks in front": written(riff(list_chunk, chunk(b"bext", bytes(602)), form(), data[36:])),
        "AU of a pipe": written(patched(encoded(samples, format="AU"), 8, b"\xff\xff\xff\xff")),
        "CAF of a pipe": written(unsized_caf(samples)),
        "WAV with its data before the format": written(riff(chunk(b"data", pcm(samples)), form())),
        "WAV with a tag behind": written(data + b"TAG" + bytes(125)),
        "WAV with zeros behind": written(data + bytes(4096)),
        "WAV with another WAV behind": written(data + encoded()),
        "flac of a pipe": written(flac_of(0, samples)),
        "flac with an ID3 tag in front": written(b"ID3\3\0\0\0\0\0\x14" + bytes(20) + encoded(samples, format="FLAC")),
    }


ANY_ENDING = ("mp3", "FLAC", "ogg", "bin")


# ------------------------------------------------------------------------------------------------------------ setting up


def corpus(files: Mapping[str, Make]) -> Setup:
    """A folder of these files and one good one, and the model."""

    def setup(folder: Path) -> None:
        (folder / "corpus").mkdir()
        shutil.copy(Fixture.path / "model.nemo", folder)
        for name, make in {"good.wav": wav(VOICE), **files}.items():
            (folder / "corpus" / name).parent.mkdir(parents=True, exist_ok=True)
            make(folder / "corpus" / name)

    return setup


def alone(make: Make, name: str = "one.wav") -> Setup:
    """A folder of one file, and the model."""
    return both(corpus({name: make}), remove_good)


def remove_good(folder: Path) -> None:
    (folder / "corpus/good.wav").unlink()


def in_training(make: Make, *paths: Path) -> Setup:
    return both(*(replaced(make, path) for path in paths or (SECOND,)))


def everywhere(make: Make) -> Setup:
    return both(in_training(make, *(Path(f"audio/{i}.wav") for i in range(8))), lines(duration=1.6))


def noise(make: Make, **keys: Any) -> Setup:
    def setup(folder: Path) -> None:
        make(folder / "noise.wav")
        write_lines(folder / "noise.jsonl", [{"audio_filepath": "noise.wav", "duration": SECONDS, **keys}])

    return setup


def lines(**keys: Any) -> Setup:
    """Change keys of all lines of the training manifest."""

    def setup(folder: Path) -> None:
        old = [json.loads(line) for line in (folder / "train.jsonl").read_text().splitlines()]
        write_lines(folder / "train.jsonl", [{**line, **keys} for line in old])

    return setup


# ---------------------------------------------------------------------------------------------------------- what is right


def names(path: Path) -> dict[str, Any]:
    """What a manifest says about each file, by its name."""
    found = [json.loads(line) for line in path.read_text().split("\n") if line] if path.exists() else []
    return {Path(line["audio_filepath"]).name: line for line in found}


def sorted_out(bad: Sequence[str], good: Mapping[str, float | None]) -> Check:
    """`prepare` lists these good files with their seconds (None: any), and those bad ones with reasons; nothing else."""

    def check(folder: Path, outcome: Outcome) -> str | None:
        listed, rejected = names(folder / "m.jsonl"), names(folder / "m.bad.jsonl")
        if set(listed) != set(good) or set(rejected) != set(bad):
            return f"good {sorted(listed)}, bad {sorted(rejected)}"
        if not all(line["reason"] for line in rejected.values()):
            return "no reason"
        wrong = [f"{k}: {listed[k]['duration']} s" for k, v in good.items() if v and not near(listed[k]["duration"], v)]
        return f"durations {wrong}" if wrong else None

    return check


def near(found: float, expected: float) -> bool:
    return abs(found - expected) <= 0.03 * expected + 0.1  # encoders delay by up to a tenth of a second


def any_of(*checks: Check) -> Check:
    """One of these holds; otherwise all say what is wrong."""

    def check(folder: Path, outcome: Outcome) -> str | None:
        wrong = [one(folder, outcome) for one in checks]
        return None if None in wrong else " / ".join(str(one) for one in wrong)

    return check


def recorded(*bad: str, then: Check = trained) -> Check:
    """Trained, with exactly these files recorded as bad."""

    def check(folder: Path, outcome: Outcome) -> str | None:
        found = {name for path in folder.rglob("bad_files_*.jsonl") for name in names(path)}
        return f"recorded as bad: {sorted(found)}" if found != set(bad) else then(folder, outcome)

    return check


def lost_one(folder: Path, outcome: Outcome) -> str | None:
    """`extract` names 2.wav, with a reason, and has features of the other only."""
    found, rejected = names(folder / "out/manifest.jsonl"), names(folder / "out/bad.jsonl")
    if set(found) != {"good.wav"} or set(rejected) != {"2.wav"} or "2.wav" not in outcome.text:
        return f"features of {sorted(found)}, bad {sorted(rejected)}"
    return finite_features(folder, outcome)


def as_at(rate: int, least: float = 0.7) -> Check:
    """Features of resampled speech are those of the same speech at the model's rate, but for rounding."""

    def check(folder: Path, outcome: Outcome) -> str | None:
        found = {line["audio_filepath"]: np.load(feature(folder, line)) for line in features_of(folder)}
        (one,) = (value for name, value in found.items() if name.endswith("2.wav"))
        (other,) = (value for name, value in found.items() if name.endswith("good.wav"))
        if abs(one.shape[-1] - other.shape[-1]) > 1:
            return f"{one.shape[-1]} and {other.shape[-1]} frames"
        length = min(one.shape[-1], other.shape[-1])
        likeness = float(np.corrcoef(one[..., :length].ravel(), other[..., :length].ravel())[0, 1])
        return f"features at {rate} Hz correlate with {likeness:.2f} only" if likeness < least else None

    return check


def features_of(folder: Path) -> list[dict[str, Any]]:
    return list(names(folder / "out/manifest.jsonl").values())


def feature(folder: Path, line: Mapping[str, Any]) -> Path:
    paths = [start / str(line["feature_filepath"]) for start in (folder, folder / "out")]
    return next(path for path in paths if path.exists())


# ---------------------------------------------------------------------------------------------------------------- the rows


Row = tuple[str, Setup | None, Sequence[str], Expected]


def bad_files() -> list[Row]:
    """Each kind of bad file in a corpus that is prepared; some of them in features and in training."""
    in_training_too = (
        *("empty", "a log-in page", "encrypted", "flac cut in half", "flac with zeros in the middle", "one NaN"),
        *("one sample of 1e30", "one double of 1e300", "all of 1e30", "a rate of 500 Hz", "a rate of 4 GHz"),
        *("speech compressed by shorten", "a pipe", "a link to itself", "a gigabyte of nothing"),
    )
    prepared = sorted_out(["2.wav"], {"good.wav": SECONDS})
    rows: list[Row] = [(f"prepare: {k}", corpus({"2.wav": v}), PREPARE, Right(prepared)) for k, v in BAD.items()]
    for kind in in_training_too:
        setup = corpus({"2.wav": BAD[kind]})
        rows.append((f"extract: {kind}", setup, EXTRACT, Right(lost_one, codes=(1,))))
        rows.append((f"pretrain: {kind}", in_training(BAD[kind]), pretrain(), Right(recorded("2.wav"))))
    return rows


def good_files() -> list[Row]:
    """The same samples in many wrappings, and the same speech at other rates and in lossy codings."""
    exact = [(f"extract: {k}", alone(v), EXTRACT, Right(same_features)) for k, v in wrapped().items()]
    endings: list[Row] = [
        (
            f"extract: a WAV called .{ending}",
            alone(wav(voice_of_fixture()), f"a.{ending}"),
            EXTRACT,
            Right(same_features),
        )
        for ending in ANY_ENDING
    ]
    rates = [8000, 11_025, 22_050, 44_100, 48_000, 192_000]
    return [
        *exact,
        *endings,
        *((f"extract: {rate} Hz", corpus({"2.wav": at_rate(rate)}), EXTRACT, Right(as_at(rate))) for rate in rates),
        *((f"extract: {name}", corpus({"2.wav": written(data)}), EXTRACT, Right(as_at(RATE))) for name, data in LOSSY.items()),
    ]  # fmt: skip


def at_rate(rate: int) -> Make:
    """The voice at another rate: drawn again from its spectrum, so exactly the same below half of both rates."""
    length = int(SECONDS * rate)
    spectrum = np.fft.rfft(VOICE)
    resampled = np.fft.irfft(spectrum[: length // 2 + 1], length) * (length / len(VOICE))
    return wav(resampled, rate=rate)


LOSSY = {
    "MP3": MP3,
    "Vorbis": OGG,
    "Opus": OPUS,
    "u-law": encoded(subtype="ULAW"),
    "A-law": encoded(subtype="ALAW"),
    "GSM": encoded(VOICE[::2], 8000, subtype="GSM610"),
    "IMA ADPCM": encoded(subtype="IMA_ADPCM"),
    "MS ADPCM": encoded(subtype="MS_ADPCM"),
    "8-bit": encoded(subtype="PCM_U8"),
    "floats as large as 16-bit numbers": encoded(VOICE.astype(np.float64) * 32768, subtype="FLOAT"),
    "floats of 1e-9": encoded(VOICE.astype(np.float64) * 1e-9, subtype="FLOAT"),
}


LONG = speech(6 * RATE, 5)
CONTAINERS: Mapping[str, bytes] = {
    "FLAC": encoded(LONG, format="FLAC"),
    "Vorbis": encoded(LONG, format="OGG"),
    "Opus": encoded(LONG, format="OGG", subtype="OPUS"),
    "MP3": encoded(LONG, format="MP3"),
    "MP3 of varying bit rate": encoded(LONG, format="MP3", bitrate_mode="VARIABLE", compression_level=0.9),
    "IMA ADPCM": encoded(LONG, subtype="IMA_ADPCM"),
    "GSM": encoded(LONG, 8000, subtype="GSM610"),
    "G.721": encoded(LONG, 8000, format="AU", subtype="G721_32"),
    "MS ADPCM": encoded(LONG, subtype="MS_ADPCM"),
    "A-law": encoded(LONG, subtype="ALAW"),
}


def segments() -> list[Row]:
    """A segment of a coded file gives the features of the same samples, cut out of the whole decoded file."""

    def setup(data: bytes) -> Setup:
        def make(folder: Path) -> None:
            shutil.copy(Fixture.path / "model.nemo", folder)
            (folder / "2.wav").write_bytes(data)
            samples, rate = soundfile.read(io.BytesIO(data), dtype="float32")
            begin, end = 2 * rate, 3 * rate + rate // 2
            soundfile.write(folder / "good.wav", samples[begin:end], rate, "FLOAT")
            segment = {"audio_filepath": "2.wav", "offset": 2.0, "duration": 1.5}
            write_lines(folder / "corpus.jsonl", [segment, {"audio_filepath": "good.wav", "duration": 1.5}])

        return make

    command = [argument.replace("corpus", "corpus.jsonl") for argument in EXTRACT]
    return [(f"extract: a segment of {k}", setup(v), command, Right(as_at(RATE, 0.99))) for k, v in CONTAINERS.items()]


def corpora() -> list[Row]:
    """Folders with more than audio in them, and files that are good as far as they go."""
    cut_wav, junk = written(encoded()[: 44 + RATE]), written(b"x" * 100)
    beside = dict.fromkeys(("a.txt", "a.json", "a.csv", "cover.jpg", "a.zip", "._good.wav", ".DS_Store"), junk)
    half = SECONDS / 4
    whole = sorted_out([], {"good.wav": SECONDS, "2.wav": SECONDS})

    def listed(seconds: float) -> Check:
        return sorted_out([], {"good.wav": SECONDS, "2.wav": seconds})

    rejected = sorted_out(["2.wav"], {"good.wav": SECONDS})
    one_second = VOICE[:RATE]
    joined: list[Row] = [
        (f"prepare: two {name} files in one", corpus({"2.wav": written(data + encoded(one_second, format=name))}), PREPARE,
         Right(any_of(listed(SECONDS + 1.0), rejected)))
        for name, data in (("MP3", MP3), ("OGG", OGG))
    ]  # fmt: skip
    only_header = [*PREPARE, "--check", "header"]
    every_bad = both(corpus({"2.wav": BAD["empty"]}), replaced(BAD["one NaN"], Path("corpus/good.wav")))
    return [
        *joined,
        ("prepare: a WAV that was cut", corpus({"2.wav": cut_wav}), PREPARE, Right(listed(half))),
        ("prepare: a WAV of a pipe", corpus({"2.wav": written(endless())}), PREPARE, Right(whole)),
        ("prepare: a WAV that was cut inside a sample", corpus({"2.wav": written(encoded()[: 44 + RATE - 1])}), PREPARE,
         Right(listed(half))),
        *((f"prepare: {name} from a radio stream", corpus({"2.wav": written(later(data, 36_000 * 48_000))}), PREPARE,
           Right(any_of(rejected, listed(SECONDS)))) for name, data in (("Vorbis", OGG), ("Opus", OPUS))),
        ("prepare: an MP3 that begins inside a frame", corpus({"2.wav": written(MP3[700:])}), PREPARE,
         Right(any_of(rejected, listed(SECONDS)))),
        *((f"prepare: a stream of MP3 with {name} bit rate", corpus({"2.wav": written(without_first_frame(encoded(
            LONG, format="MP3", bitrate_mode=mode, compression_level=0.5)))}), PREPARE, Right(any_of(rejected, listed(6.0))))
          for name, mode in (("constant", "CONSTANT"), ("varying", "VARIABLE"))),
        ("extract: a stream of MP3 with varying bit rate", alone(written(without_first_frame(encoded(
            LONG, format="MP3", bitrate_mode="VARIABLE", compression_level=0.5)))), EXTRACT, Either(
                Refused(("one.wav",), partial=True), Right(features_are_finite(6.0)))),
        ("prepare: an MP3 that promises ten times as much", corpus({"2.wav": written(xing_of(600))}), PREPARE,
         Right(any_of(rejected, listed(SECONDS)))),
        ("prepare: a recorder lost power", corpus({"2.wav": written(endless(size=0))}), PREPARE,
         Right(any_of(rejected, whole))),
        ("prepare: a cut MP3", corpus({"2.wav": written(MP3[: len(MP3) // 2])}), PREPARE,
         Right(any_of(rejected, listed(SECONDS / 2), listed(half)))),
        ("prepare: only headers, of good files", corpus({"2.wav": written(FLAC)}), only_header, Right(whole)),
        ("prepare: only headers, of a cut WAV", corpus({"2.wav": cut_wav}), only_header,
         Right(any_of(listed(half), rejected))),
        ("prepare: only headers, of a pipe", corpus({"2.wav": os.mkfifo}), only_header, Right(rejected)),
        ("prepare: other files beside it", corpus(beside), PREPARE, Right(sorted_out([], {"good.wav": SECONDS}))),
        ("prepare: a folder that is called .wav", corpus({"2.wav/a.wav": wav(VOICE)}), PREPARE,
         Right(sorted_out([], {"good.wav": SECONDS, "a.wav": SECONDS}))),
        ("prepare: a link to the folder above", corpus({"again": link("..")}), PREPARE, Either(
            Refused(("again",)), Right(once))),
        ("prepare: a link to the folder itself", corpus({"again": link(".")}), PREPARE, Either(
            Refused(("again",)), Right(once))),
        ("prepare: nothing good", every_bad, PREPARE, Either(
            Refused(("bad",), partial=True), Right(said("bad", then=ended_well)))),
        ("prepare: an empty folder", lambda folder: (folder / "corpus").mkdir(), PREPARE, Refused(("corpus",))),
        ("prepare: a recording as the input", None, ["prepare", "audio/0.wav", *PREPARE[2:]], Either(
            Refused(("audio/0.wav",)), Right(sorted_out([], {"0.wav": 1.6})))),
        ("prepare: shards of a WAV of a pipe", corpus({"2.wav": written(endless())}),
         [*PREPARE, "--shards", "1"], Right(whole)),
        ("inspect: a bad file", in_training(BAD["a log-in page"]), ["inspect", "train.jsonl"],
         Right(said("2.wav", then=ended_well))),
        ("inspect: all files are bad", everywhere(BAD["empty"]), ["inspect", "train.jsonl"], Either(
            Refused(("empty|read",), partial=True), Right(said("empty", then=ended_well)))),
        ("inspect: a sample of 1e30", everywhere(BAD["all of 1e30"]), ["inspect", "train.jsonl"], Either(
            Refused((".wav",), partial=True), Right(said(".wav", then=ended_well)))),
        ("extract: no audio in the folder", both(corpus({"a.txt": junk}), remove_good), EXTRACT,
         Refused(("corpus",))),
        ("extract: a recording of 11 minutes", corpus({"2.wav": wav(np.zeros(660 * 8000, np.int16), rate=8000)}), EXTRACT,
         Right(lost_one, codes=(1,))),
        ("extract: silence", alone(wav(np.zeros(RATE, np.int16))), EXTRACT, Right(features_are_finite(1.0))),
        ("extract: a constant", alone(wav(np.full(RATE, 0.5))), EXTRACT, Right(features_are_finite(1.0))),
        *((f"extract: {count} samples", corpus({"2.wav": wav(VOICE[:count])}), EXTRACT, Either(
            Refused(("2.wav",), partial=True), Right(finite_features))) for count in (1, 100, 399)),
    ]  # fmt: skip


def once(folder: Path, outcome: Outcome) -> str | None:
    """Links that go round: the good file is listed once, and not once for each round."""
    listed = (folder / "m.jsonl").read_text().count("corpus/good.wav")
    return None if listed == 1 else f"listed {listed} times"


def features_are_finite(seconds: float) -> Check:
    def check(folder: Path, outcome: Outcome) -> str | None:
        (path,) = (folder / "out").rglob("*.npy")
        shape = np.load(path).shape
        return finite_features(folder, outcome) if abs(shape[-1] - seconds / 0.08) <= 2 else f"{shape[-1]} frames"

    return check


def training() -> list[Row]:
    """Bad audio where training reads it: in workers, noise, validation, with wrong durations and after other settings."""
    workers = ("model.train_ds.num_workers=2", "model.validation_ds.num_workers=1")
    nothing_left = Refused((".wav",), partial=True)
    noisy = [
        *("model.train_ds.noise_manifest=noise.jsonl", "model.train_ds.batch_augmentor.prob=1"),
        *("model.train_ds.batch_augmentor.noise_ratio=1", "model.train_ds.batch_size=4"),
    ]
    stereo = wav(np.stack([VOICE, -VOICE], 1))
    noises: Mapping[str, Make] = {
        "silent": wav(np.zeros(2 * RATE, np.int16)),
        "in opposite phase": stereo,
        "at 8 kHz": wav(VOICE, rate=8000),
        "of 1e30": BAD["all of 1e30"],
        "with a NaN": BAD["one NaN"],
        "cut FLAC": BAD["flac cut in half"],
        "of a pipe": BAD["a pipe"],
    }
    spoilt = {"of 1e30", "with a NaN", "cut FLAC", "of a pipe"}
    second_channel = ("model.train_ds.channel_selector=1", "model.validation_ds.channel_selector=0")
    valid = [Path(f"audio/{i}.wav") for i in range(4)]
    short = both(
        lambda folder: wav(VOICE[: RATE // 50])(folder / "short.wav"), lines(audio_filepath="short.wav", duration=0.02)
    )
    return [
        *((f"pretrain: noise {name}", noise(make), pretrain(*noisy), Right(
            recorded("noise.wav") if name in spoilt else recorded())) for name, make in noises.items()),
        ("pretrain: noise in GSM", noise(written(CONTAINERS["GSM"]), duration=12.0), pretrain(*noisy), Right(recorded())),
        ("pretrain: speech in GSM", in_training(written(CONTAINERS["GSM"])), pretrain(), Right(recorded())),
        ("pretrain: noise of one sample", noise(wav(VOICE[:1]), duration=1 / RATE), pretrain(*noisy), Right(recorded())),
        ("pretrain: noise behind its end", noise(wav(VOICE), offset=60.0), pretrain(*noisy), Right(recorded("noise.wav"))),
        ("pretrain: bad files, two workers", both(*(in_training(BAD[kind], Path(f"audio/{i}.wav")) for i, kind in
            enumerate(("empty", "one NaN", "one sample of 1e30", "flac cut in half"), 4))), pretrain(*workers),
         Right(recorded("4.wav", "5.wav", "6.wav", "7.wav"))),
        ("pretrain: all bad", everywhere(BAD["empty"]), pretrain(), nothing_left),
        ("pretrain: all bad, two workers", everywhere(BAD["empty"]), pretrain(*workers), nothing_left),
        ("pretrain: all pipes, two workers", everywhere(os.mkfifo), pretrain(*workers), nothing_left),
        ("pretrain: all folders", everywhere(Path.mkdir), pretrain(), nothing_left),
        ("pretrain: every file of 1e30", everywhere(BAD["all of 1e30"]), pretrain(), nothing_left),
        ("pretrain: all silent", everywhere(wav(np.zeros(2 * RATE, np.int16))), pretrain(), Right(trained)),
        ("pretrain: all silent and trimmed", everywhere(wav(np.zeros(2 * RATE, np.int16))),
         pretrain("model.train_ds.trim_silence=true"), Either(nothing_left, Right(trained))),
        ("pretrain: all floats as large as 16-bit numbers", everywhere(written(LOSSY["floats as large as 16-bit numbers"])),
         pretrain(), Right(recorded())),
        ("pretrain: the second channel of mono", None, pretrain(*second_channel), Refused(("channel",), partial=True)),
        ("pretrain: the second channel, one is mono", both(everywhere(stereo), in_training(wav(VOICE))),
         pretrain(*second_channel), Right(recorded("2.wav"))),
        ("pretrain: validation all bad", both(other_training, in_training(BAD["empty"], *valid)), pretrain(), Refused(
            ("0.wav|1.wav|2.wav|3.wav",), partial=True)),
        ("pretrain: lines state 5 s", lines(duration=5.0), pretrain(), Refused((".wav",), partial=True)),
        ("pretrain: one line states 5 s", in_training(wav(VOICE[: RATE // 4])), pretrain(), Right(recorded("2.wav"))),
        ("pretrain: a header of ten hours", in_training(written(endless())), pretrain(), Right(recorded())),
        ("pretrain: utterances of 20 ms", short,
         pretrain("model.train_ds.min_duration=0", "model.train_ds.max_bad_fraction=1"), Either(
             Refused(("min_duration|mask|short",), partial=True), Right(trained))),
        ("pretrain: two ranks, bad files", in_training(BAD["one sample of 1e30"]), pretrain("trainer.devices=2",
            "model.train_ds.batch_size=1"), Right(recorded("2.wav"))),
    ]  # fmt: skip


def again() -> list[Row]:
    """`extract`, once more, after something has happened to its results or to the audio."""

    def extracted(folder: Path) -> None:
        outcome = in_fork(EXTRACT, folder, {}, 120)
        if outcome.code != 0:
            raise RuntimeError(outcome.text[-500:])

    def on_features(change: Callable[[bytes], bytes]) -> Setup:
        def setup(folder: Path) -> None:
            (path,) = (folder / "out").rglob("*.npy")
            on_bytes(change, path)(folder)

        return setup

    def lost(folder: Path) -> None:
        (path,) = (folder / "out").rglob("*.npy")
        path.unlink()

    one = alone(wav(voice_of_fixture()))
    changes: list[tuple[str, Setup]] = [
        ("the features are empty", on_features(always(b""))),
        ("the features are cut", on_features(cut(0.5))),
        ("the features are lost", lost),
        ("its manifest is cut", on_bytes(cut(0.5), Path("out/manifest.jsonl"))),
        ("its manifest is of zeros", on_bytes(zeros, Path("out/manifest.jsonl"))),
        ("its description is lost", replaced(nothing, Path("out/extract.json"))),
        ("its description is empty", on_bytes(always(b""), Path("out/extract.json"))),
    ]
    replaced_audio = both(corpus({"2.wav": wav(VOICE)}), extracted, replaced(BAD["one NaN"], Path("corpus/2.wav")))
    rows: list[Row] = [
        (f"extract again: {name}", both(one, extracted, change), EXTRACT, Either(
            Refused(("out|extract.json",)), Right(same_features))) for name, change in changes
    ]  # fmt: skip
    return [*rows, ("extract again: a file went bad", replaced_audio, EXTRACT, Right(lost_of_two, codes=(1,)))]


def lost_of_two(folder: Path, outcome: Outcome) -> str | None:
    """The manifest has the good file only, and the other is named."""
    found, rejected = names(folder / "out/manifest.jsonl"), names(folder / "out/bad.jsonl")
    return None if (set(found), set(rejected)) == ({"good.wav"}, {"2.wav"}) else f"{sorted(found)}, {sorted(rejected)}"


def other_training(folder: Path) -> None:
    """Training has no file of validation."""
    write_lines(folder / "train.jsonl", [{"audio_filepath": f"audio/{i}.wav", "duration": 1.6} for i in range(4, 8)])


def while_running() -> list[Trial]:
    changes: list[tuple[str, Setup]] = [
        ("all audio removed", lambda folder: shutil.rmtree(folder / "audio")),
        ("audio emptied", both(*(on_bytes(cut(0.0), Path(f"audio/{i}.wav")) for i in range(8)))),
        ("a file written again, shorter", replaced(wav(VOICE[:4000]), SECOND)),
    ]
    command = resume("trainer.max_steps=30")
    return [
        Trial(GROUP, f"while running: {name}", command, Right(ended_well), act=disturbed(change), limit_s=120)
        for name, change in changes
    ]


def trials() -> list[Trial]:
    rows = [*bad_files(), *good_files(), *corpora(), *segments(), *again(), *training()]
    trial = partial(Trial, GROUP, limit_s=90.0)
    plain = [
        trial(name, command, expected, setup, own_process="two ranks" in name)
        for name, setup, command, expected in rows
    ]
    at_once = '"$@" & first=$!; "$@"; a=$?; wait $first; b=$?; [ $a -eq 0 ] || [ $b -eq 0 ]'
    twice = trial(
        "extract: twice at once", EXTRACT, Right(same_features), alone(wav(voice_of_fixture())), shell=at_once
    )
    return [*plain, twice, *while_running()]
