"""Audio that is damaged, lies in its header, is something else, or is odd and must still be read right.

Files are built byte by byte. `prepare` must sort them into good and bad, with the right durations; `extract` must give
the very features of the plain file; training must name what it cannot read, and stay finite.
"""

from __future__ import annotations

import io
import json
import os
import shutil
import socket
import struct
from collections.abc import Callable, Iterator
from fractions import Fraction
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
    finite_features,
    in_fork,
    pretrain,
    same_features,
    speech,
    trained,
    write_lines,
)

GROUP = "audio"
Samples = np.ndarray[Any, np.dtype[Any]]
SECONDS = 2.0
VOICE: Samples = speech(int(SECONDS * RATE), 3)

# --------------------------------------------------------------------------------------------------- files of all kinds


def encoded(
    kind: str, subtype: str | None = None, samples: Samples = VOICE, rate: int = RATE, endian: str = "FILE"
) -> bytes:
    buffer = io.BytesIO()
    soundfile.write(buffer, samples, rate, format=kind, subtype=subtype, endian=endian)
    return buffer.getvalue()


def chunk(name: bytes, content: bytes, size: int | None = None) -> bytes:
    return name + struct.pack("<I", len(content) if size is None else size) + content + b"\0" * (len(content) % 2)


PCM = (VOICE * 32767).astype("<i2").tobytes()


def fmt(tag: int = 1, channels: int = 1, rate: int = RATE, bits: int = 16, align: int | None = None) -> bytes:
    step = channels * bits // 8 if align is None else align
    return chunk(b"fmt ", struct.pack("<HHIIHH", tag, channels, rate, rate * step & 0xFFFFFFFF, step, bits))


def wav(*chunks: bytes, size: int | None = None) -> bytes:
    body = b"WAVE" + b"".join(chunks)
    return b"RIFF" + struct.pack("<I", len(body) if size is None else size) + body


def with_ffmpeg(container: str, codec: str, video: bool = False, sound: bool = True) -> bytes:
    """A file as phones and browsers write it."""
    buffer = io.BytesIO()
    with av.open(buffer, "w", format=container) as out:
        picture: Any = out.add_stream("mpeg4", rate=Fraction(5)) if video else None
        stream: Any = out.add_stream(codec, rate=RATE) if sound else None
        if stream:
            stream.layout = "mono"
        if picture:
            picture.width, picture.height, picture.pix_fmt = 64, 64, "yuv420p"
            for _ in range(10):
                out.mux(picture.encode(av.VideoFrame.from_ndarray(np.zeros((64, 64, 3), np.uint8), format="rgb24")))
            out.mux(picture.encode())
        if stream:
            frame = av.AudioFrame.from_ndarray(VOICE[None], format="fltp", layout="mono")
            frame.sample_rate = RATE
            for packet in [*stream.encode(frame), *stream.encode()]:
                out.mux(packet)
    return buffer.getvalue()


def flac_total(total: int) -> Callable[[], bytes]:
    """A FLAC whose header states another number of samples (36 bits from byte 21 on)."""

    def make() -> bytes:
        data = bytearray(encoded("FLAC"))
        data[21] = (data[21] & 0xF0) | (total >> 32)
        data[22:26] = struct.pack(">I", total & 0xFFFFFFFF)
        return bytes(data)

    return make


def flipped(make: Callable[[], bytes], share: float) -> Callable[[], bytes]:
    def change() -> bytes:
        data = bytearray(make())
        at = int(len(data) * share)
        data[at : at + 8] = bytes(byte ^ 0x55 for byte in data[at : at + 8])
        return bytes(data)

    return change


def half(make: Callable[[], bytes]) -> Callable[[], bytes]:
    return lambda: make()[: len(make()) // 2]


def id3(make: Callable[[], bytes]) -> Callable[[], bytes]:
    """A tag with a large picture before the sound."""
    size = 300_000
    sizes = bytes([size >> 21 & 127, size >> 14 & 127, size >> 7 & 127, size & 127])
    return lambda: b"ID3\x03\x00\x00" + sizes + bytes(size) + make()


# ---------------------------------------------------------------------------------- prepare sorts the good from the bad

GOOD: dict[str, tuple[str, Callable[[], bytes], float]] = {
    "8 bit": ("a.wav", lambda: encoded("WAV", "PCM_U8"), SECONDS),
    "24 bit": ("a.wav", lambda: encoded("WAV", "PCM_24"), SECONDS),
    "64-bit floats": ("a.wav", lambda: encoded("WAV", "DOUBLE"), SECONDS),
    "a-law": ("a.wav", lambda: encoded("WAV", "ALAW"), SECONDS),
    "mu-law in au": ("a.au", lambda: encoded("AU", "ULAW"), SECONDS),
    "ms adpcm": ("adpcm.wav", lambda: encoded("WAV", "MS_ADPCM"), SECONDS),
    "gsm, 8 kHz": ("a.wav", lambda: encoded("WAV", "GSM610", VOICE[::2], 8000), SECONDS),
    "rf64": ("a.wav", lambda: encoded("RF64"), SECONDS),
    "w64": ("a.w64", lambda: encoded("W64"), SECONDS),
    "big-endian wav": ("a.wav", lambda: encoded("WAV", endian="BIG"), SECONDS),
    "nist sphere": ("a.sph", lambda: encoded("NIST"), SECONDS),
    "vorbis": ("a.ogg", lambda: encoded("OGG", "VORBIS"), SECONDS),
    "opus at 48 kHz": ("a.opus", lambda: encoded("OGG", "OPUS", np.repeat(VOICE, 3), 48000), SECONDS),
    "a flac that is called wav": ("a.wav", lambda: encoded("FLAC"), SECONDS),
    "a wav without an ending": ("speech", lambda: encoded("WAV"), SECONDS),
    "a wav with an ending of capitals": ("A.WAV", lambda: encoded("WAV"), SECONDS),
    "768 kHz": ("a.wav", lambda: encoded("WAV", rate=768_000), len(VOICE) / 768_000),
    "1 kHz": ("a.wav", lambda: encoded("WAV", rate=1000, samples=VOICE[:2000]), 2.0),
    "sixteen channels": ("a.wav", lambda: encoded("WAV", samples=np.repeat(VOICE[:, None], 16, 1)), SECONDS),
    "a stream of unknown length, as ffmpeg pipes it": (
        "a.wav",
        lambda: wav(fmt(), chunk(b"data", PCM, 0xFFFFFFFF), size=0xFFFFFFFF),
        SECONDS,
    ),
    "chunks of others around the data": (
        "a.wav",
        lambda: wav(
            chunk(b"JUNK", b"x" * 27), fmt(), chunk(b"LIST", b"INFOodd"), chunk(b"data", PCM), chunk(b"cue ", b"y")
        ),
        SECONDS,
    ),
    "a wav that was cut off": ("a.wav", lambda: encoded("WAV")[: 44 + len(PCM) // 2], SECONDS / 2),
    "a flac of unknown length": ("a.flac", flac_total(0), SECONDS),
    "one sample": ("a.wav", lambda: encoded("WAV", samples=VOICE[:1]), 1 / RATE),
    "silence": ("a.wav", lambda: encoded("WAV", samples=np.zeros(RATE)), 1.0),
    "floats of the range of 16 bit": ("a.wav", lambda: encoded("WAV", "FLOAT", VOICE * 32768), SECONDS),
    "an mp3 with a picture": ("a.mp3", id3(lambda: encoded("MP3")), SECONDS),
    "an hour of silence": (
        "a.flac",
        lambda: encoded("FLAC", samples=np.zeros(3600 * 8000, np.int16), rate=8000),
        3600.0,
    ),
    "alac of a phone": ("a.m4a", lambda: with_ffmpeg("ipod", "alac"), SECONDS),
    "aac of a phone": ("a.m4a", lambda: with_ffmpeg("ipod", "aac"), SECONDS),
    "opus of a browser": ("a.webm", lambda: with_ffmpeg("webm", "libopus"), SECONDS),
    "the sound of a film": ("a.mp4", lambda: with_ffmpeg("mp4", "aac", video=True), SECONDS),
}

BAD: dict[str, tuple[str, Callable[[], bytes]]] = {
    "an empty file": ("a.wav", lambda: b""),
    "a header alone": ("a.wav", lambda: wav(fmt(), chunk(b"data", b""))),
    "a text": ("a.wav", lambda: b"I am not a sound.\n" * 100),
    "a page that says 404": ("a.mp3", lambda: b"<!DOCTYPE html><html><title>404 Not Found</title></html>"),
    "a pointer of git lfs": ("a.flac", lambda: b"version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 4\n"),
    "random bytes": ("a.wav", lambda: np.random.default_rng(0).bytes(50_000)),
    "random bytes that are called mp3": ("a.mp3", lambda: np.random.default_rng(1).bytes(300_000)),
    "zeros": ("a.wav", lambda: bytes(64_000)),
    "raw samples": ("a.raw", lambda: PCM),
    "nan among the samples": (
        "a.wav",
        lambda: encoded("WAV", "FLOAT", np.where(np.arange(len(VOICE)) == 999, np.nan, VOICE)),
    ),
    "an infinite sample at the end": ("a.wav", lambda: encoded("WAV", "FLOAT", np.append(VOICE, np.inf))),
    "no channels": ("a.wav", lambda: wav(fmt(channels=0), chunk(b"data", PCM))),
    "a rate of 0": ("a.wav", lambda: wav(fmt(rate=0), chunk(b"data", PCM))),
    "a rate of 10 Hz": ("a.wav", lambda: wav(fmt(rate=10), chunk(b"data", PCM))),
    "a rate of 4 GHz": ("a.wav", lambda: wav(fmt(rate=0xFFFFFFFF), chunk(b"data", PCM))),
    "0 bits": ("a.wav", lambda: wav(fmt(bits=0), chunk(b"data", PCM))),
    "an unknown encoding": ("a.wav", lambda: wav(fmt(tag=0x4242), chunk(b"data", PCM))),
    "no format": ("a.wav", lambda: wav(chunk(b"data", PCM))),
    "half a flac": ("a.flac", half(lambda: encoded("FLAC"))),
    "a flac with a fault inside": ("a.flac", flipped(lambda: encoded("FLAC"), 0.5)),
    "a flac that states ten times its length": ("a.flac", flac_total(10 * len(VOICE))),
    "a flac that states 2^36 samples": ("a.flac", flac_total((1 << 36) - 1)),
    "a tag without a sound": ("a.mp3", id3(lambda: b"")),
    "a film without sound": ("a.mp4", lambda: with_ffmpeg("mp4", "aac", video=True, sound=False)),
    "a picture": ("a.wav", lambda: b"\x89PNG\r\n\x1a\n\0\0\0\rIHDR\0\0\0\x01\0\0\0\x01\x08\x02\0\0\0\x90wS\xde"),
    "a list of other files (m3u)": (
        "a.wav",
        lambda: b"#EXTM3U\n#EXT-X-TARGETDURATION:9\n#EXTINF:9,\ngood.wav\n#EXT-X-ENDLIST\n",
    ),
    "a list of other files (ffconcat)": ("a.wav", lambda: b"ffconcat version 1.0\nfile good.wav\n"),
    "a session of the network (sdp)": (
        "a.wav",
        lambda: b"v=0\no=- 0 0 IN IP4 127.0.0.1\ns=x\nc=IN IP4 127.0.0.1\nt=0 0\nm=audio 5004 RTP/AVP 0\n",
    ),
    "an mp4 that was cut off": ("a.m4a", half(lambda: with_ffmpeg("ipod", "aac"))),
    "an ogg header alone": ("a.ogg", lambda: encoded("OGG", "VORBIS")[:60]),
}

EITHER_WAY: dict[str, tuple[str, Callable[[], bytes]]] = {
    "half an mp3": ("a.mp3", half(lambda: encoded("MP3"))),
    "half an ogg": ("a.ogg", half(lambda: encoded("OGG", "VORBIS"))),
    "two oggs in one": ("a.ogg", lambda: encoded("OGG", "VORBIS") * 2),
    "two wavs in one": ("a.wav", lambda: encoded("WAV") * 2),
    "65,535 channels": ("a.wav", lambda: wav(fmt(channels=65_535, align=65_534), chunk(b"data", PCM))),
    "a step between frames that is wrong": ("a.wav", lambda: wav(fmt(align=3), chunk(b"data", PCM))),
    "samples of 1e30": ("a.wav", lambda: encoded("WAV", "FLOAT", VOICE * 1e30)),
    "an mp3 with a fault inside": ("a.mp3", flipped(lambda: encoded("MP3"), 0.5)),
    "an odd number of bytes": ("a.wav", lambda: wav(fmt(), chunk(b"data", PCM + b"x"))),
    "a header that was never finished": ("a.wav", lambda: wav(fmt(), chunk(b"data", PCM, 0), size=0)),
    "the data before the format": ("a.wav", lambda: wav(chunk(b"data", PCM), fmt())),
}


def corpus(name: str, make: Callable[[], bytes]) -> Setup:
    """The file, next to a good one."""

    def setup(folder: Path) -> None:
        (folder / "odd").mkdir()
        (folder / "odd" / name).write_bytes(make())
        shutil.copy(folder / "audio/0.wav", folder / "odd/good.wav")

    return setup


def sorted_into(name: str, seconds: float | None, either: bool = False) -> Check:
    """The file is in the manifest with this duration (None: in the list of bad ones), next to the good one."""

    def check(folder: Path, outcome: Outcome) -> str | None:
        found: dict[str, list[dict[str, Any]]] = {}
        for part in ("m", "m.bad"):
            path = folder / f"{part}.jsonl"
            found[part] = [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []
        good = {Path(line["audio_filepath"]).name: float(line["duration"]) for line in found["m"]}
        bad = {Path(line["audio_filepath"]).name: line["reason"] for line in found["m.bad"]}
        if "good.wav" not in good:
            return f"the good file is missing: {bad}"
        if len(good) + len(bad) != 2:
            return f"{sorted(good)} and {sorted(bad)}"
        if either:
            return None if bad.get(name) or 0 < good.get(name, 0) < 10 else f"{good} {bad}"
        if seconds is None:
            return None if bad.get(name) else f"it counts as good, with {good.get(name)} s"
        if name not in good:
            return f"it counts as bad: {bad[name]}"
        lossy = 0.15 if Path(name).suffix in {".mp3", ".m4a", ".webm", ".mp4", ".opus"} or "adpcm" in name else 0.002
        slack = max(lossy, 0.05 if seconds > 10 else 0)
        return None if abs(good[name] - seconds) <= slack else f"{good[name]} s, not {seconds}"

    return check


PREPARE = ["prepare", "odd", "--output", "m.jsonl", "--workers", "0"]

# ------------------------------------------------------------------------------ extract: the features of the plain file


def from_plain(change: Callable[[Samples], bytes], name: str) -> Setup:
    """The samples of `audio/0.wav` (16 bit), written in another way."""

    def setup(folder: Path) -> None:
        shutil.copy(Fixture.path / "model.nemo", folder)
        samples, _ = soundfile.read(folder / "audio/0.wav", dtype="int16")
        (folder / "audio/0.wav").unlink()
        (folder / name).write_bytes(change(samples))

    return setup


SAME: dict[str, tuple[str, Callable[[Samples], bytes]]] = {
    "flac": ("a.flac", lambda samples: encoded("FLAC", samples=samples)),
    "24 bit": ("a.wav", lambda samples: encoded("WAV", "PCM_24", samples)),
    "32-bit floats": ("a.wav", lambda samples: encoded("WAV", "FLOAT", samples / 32768)),
    "64-bit floats": ("a.wav", lambda samples: encoded("WAV", "DOUBLE", samples / 32768)),
    "stereo, both the same": ("a.wav", lambda samples: encoded("WAV", samples=np.stack([samples, samples], 1))),
    "big-endian": ("a.wav", lambda samples: encoded("WAV", samples=samples, endian="BIG")),
    "aiff": ("a.aiff", lambda samples: encoded("AIFF", samples=samples)),
    "caf": ("a.caf", lambda samples: encoded("CAF", samples=samples)),
    "rf64": ("a.rf64", lambda samples: encoded("RF64", samples=samples)),
    "w64": ("a.w64", lambda samples: encoded("W64", samples=samples)),
    "sphere": ("a.sph", lambda samples: encoded("NIST", samples=samples)),
    "a stream of unknown length": (
        "a.wav",
        lambda samples: wav(fmt(), chunk(b"data", samples.tobytes(), 0xFFFFFFFF), size=0xFFFFFFFF),
    ),
    "called mp3": ("a.mp3", lambda samples: encoded("WAV", samples=samples)),
    "three bytes of rubbish after the data": ("a.wav", lambda samples: encoded("WAV", samples=samples) + b"abc"),
}


def one_file(samples: Samples, rate: int = RATE, subtype: str = "FLOAT") -> Setup:
    def setup(folder: Path) -> None:
        shutil.copy(Fixture.path / "model.nemo", folder)
        (folder / "a.wav").write_bytes(encoded("WAV", subtype, samples, rate))

    return setup


def frames(count: int, slack: int = 1) -> Check:
    """There is one array of finite features with about this many frames, and they are not all the same."""

    def check(folder: Path, outcome: Outcome) -> str | None:
        found = [np.load(path) for path in (folder / "out").rglob("*.npy")]
        if len(found) != 1 or abs(found[0].shape[2] - count) > slack:
            return f"features of {[one.shape for one in found]}, expected {count} frames"
        return finite_features(folder, outcome)

    return check


NO_FEATURES = Refused((".wav",), partial=True)
ODD_SOUNDS: dict[str, tuple[Setup, Expected]] = {
    "one sample": (one_file(VOICE[:1]), Either(NO_FEATURES, Right(frames(1)))),
    "ten samples": (one_file(VOICE[:10]), Either(NO_FEATURES, Right(frames(1)))),
    "20 ms": (one_file(VOICE[:320]), Either(NO_FEATURES, Right(frames(1)))),
    "digital silence": (one_file(np.zeros(RATE)), Right(frames(13))),
    "a constant": (one_file(np.ones(RATE)), Right(frames(13))),
    "one impulse": (one_file((np.arange(RATE) == 8000).astype(np.float32)), Right(frames(13))),
    "samples of 1e30": (one_file(VOICE * 1e30), Either(NO_FEATURES, Right(frames(25)))),
    "samples of 1e-30": (one_file(VOICE * 1e-30), Right(frames(25))),
    "nan among the samples": (one_file(np.append(VOICE, np.nan)), NO_FEATURES),
    "8 kHz": (one_file(VOICE[::2], 8000), Right(frames(25))),
    "44.1 kHz": (
        one_file(np.interp(np.arange(88200) / 44100, np.arange(len(VOICE)) / RATE, VOICE), 44100),
        Right(frames(25)),
    ),
    "1 kHz": (one_file(VOICE[:2000], 1000), Right(frames(25))),
    "11 minutes": (one_file(np.zeros(8000 * 660, np.int16), 8000, "PCM_16"), NO_FEATURES),
}

# ------------------------------------------------------------------------------------------------------------- training


def every_file(make: Callable[[int, Samples], bytes]) -> Setup:
    """Other bytes for each file; the manifests stay."""

    def setup(folder: Path) -> None:
        for i in range(8):
            samples, _ = soundfile.read(folder / f"audio/{i}.wav", dtype="float32")
            (folder / f"audio/{i}.wav").write_bytes(make(i, samples))

    return setup


def third_file(make: Callable[[], bytes]) -> Setup:
    return lambda folder: (folder / "audio/5.wav").write_bytes(make())


def named(*words: str) -> Check:
    """It trained, and the one bad file is in the run's list, with these words."""

    def check(folder: Path, outcome: Outcome) -> str | None:
        found = "".join(path.read_text() for path in folder.rglob("bad_files_train_ds_rank0.jsonl"))
        names = {json.loads(line)["audio_filepath"] for line in found.splitlines()}
        if [Path(name).name for name in names] != ["5.wav"]:
            return f"bad files: {sorted(names)}"
        missing = [word for word in words if word not in found]
        return f"not in the reason: {missing}" if missing else trained(folder, outcome)

    return check


def noises(*sounds: tuple[Samples, int]) -> Setup:
    def setup(folder: Path) -> None:
        lines = []
        for i, (samples, rate) in enumerate(sounds):
            (folder / f"noise{i}.wav").write_bytes(encoded("WAV", samples=samples, rate=rate))
            lines.append({"audio_filepath": f"noise{i}.wav", "duration": len(samples) / rate})
        write_lines(folder / "noise.jsonl", lines)

    return setup


def says(*words: str) -> Check:
    def check(folder: Path, outcome: Outcome) -> str | None:
        missing = [word for word in words if word not in outcome.text]
        return f"not in the output: {missing}" if missing else None

    return check


def no_noise(folder: Path) -> None:
    write_lines(folder / "noise.jsonl", [{"audio_filepath": "gone.wav", "duration": 3.0}])


WITH_NOISE = pretrain("model.train_ds.noise_manifest=noise.jsonl", "model.train_ds.batch_augmentor.noise_ratio=1")
NO_MINIMUM = pretrain("model.train_ds.min_duration=0", "model.validation_ds.min_duration=0")


def short_ones(folder: Path) -> None:
    lines = []
    for i, count in enumerate((1, 2, 100, 400, 1600, 3200, 6400, 16000)):
        (folder / f"audio/{i}.wav").write_bytes(encoded("WAV", samples=VOICE[:count]))
        lines.append({"audio_filepath": f"audio/{i}.wav", "duration": count / RATE})
    write_lines(folder / "train.jsonl", lines)
    write_lines(folder / "valid.jsonl", lines[-2:])


def measured(folder: Path) -> None:
    """What is stated becomes what is there, so that only the sound is odd."""
    lines = [
        {"audio_filepath": f"audio/{i}.wav", "duration": soundfile.info(folder / f"audio/{i}.wav").duration}
        for i in range(8)
    ]
    write_lines(folder / "train.jsonl", lines)


TRAINING: dict[str, tuple[list[str], Setup, Expected]] = {
    "all are silent": (pretrain(), every_file(lambda i, samples: encoded("WAV", samples=samples * 0)), Right(trained)),
    "all are constant": (
        pretrain(),
        every_file(lambda i, samples: encoded("WAV", samples=samples * 0 + 0.5)),
        Right(trained),
    ),
    "channels that cancel out": (
        pretrain(),
        every_file(lambda i, samples: encoded("WAV", samples=np.stack([samples, -samples], 1))),
        Right(trained),
    ),
    "samples of 1e30": (
        pretrain(),
        every_file(lambda i, samples: encoded("WAV", "FLOAT", samples * 1e30)),
        Either(Refused(("train.jsonl|.wav|finite",), partial=True), Right(trained)),
    ),
    "samples of 1e-30": (
        pretrain(),
        every_file(lambda i, samples: encoded("WAV", "FLOAT", samples * 1e-30)),
        Right(trained),
    ),
    "a different rate and format each": (
        pretrain(),
        both(
            every_file(
                lambda i, samples: encoded(
                    ("WAV", "FLAC", "AIFF", "OGG")[i % 4], samples=samples, rate=(8000, 16000, 44100, 48000)[i % 4]
                )
            ),
            measured,
            lambda folder: shutil.copy(folder / "train.jsonl", folder / "valid.jsonl"),
        ),
        Right(trained),
    ),
    "utterances of 1 to 16,000 samples": (NO_MINIMUM, short_ones, Right(trained)),
    "one is empty": (pretrain(), third_file(lambda: b""), Right(named("empty"))),
    "one has nan": (pretrain(), third_file(lambda: encoded("WAV", "FLOAT", VOICE + np.nan)), Right(named("NaN"))),
    "one is half as long as stated": (
        pretrain(),
        third_file(lambda: encoded("WAV", samples=VOICE[:16000])),
        Right(named()),
    ),
    "one is a text": (pretrain(), third_file(lambda: b"hello " * 999), Right(named())),
    "one is a flac with a fault inside": (
        pretrain(),
        third_file(flipped(lambda: encoded("FLAC"), 0.5)),
        Right(named()),
    ),
    "one plays another file (m3u)": (pretrain(), third_file(lambda: b"#EXTM3U\n#EXTINF:9,\n0.wav\n"), Right(named())),
    "all are text": (pretrain(), every_file(lambda i, samples: b"hello"), Refused((".wav",), partial=True)),
    "silent noise": (WITH_NOISE, noises((np.zeros(RATE * 3), RATE)), Right(trained)),
    "noise of three samples": (
        WITH_NOISE,
        noises((VOICE[:3], RATE)),
        Either(Refused(("noise",), partial=True), Right(trained)),
    ),
    "noise of 8 kHz in stereo": (WITH_NOISE, noises((np.stack([VOICE, VOICE], 1), 8000)), Right(trained)),
    "noise that cannot be read": (WITH_NOISE, no_noise, Right(says("bad noise file", "gone.wav"))),
    "noise that cannot be read, none is allowed": (
        [*WITH_NOISE, "model.train_ds.max_bad_fraction=0.001"],
        no_noise,
        Refused(("gone.wav",), partial=True),
    ),
    "silence is trimmed from silence": (
        pretrain("model.train_ds.trim_silence=true"),
        every_file(lambda i, samples: encoded("WAV", samples=samples * 0)),
        Either(Refused((".wav|silen|trim",), partial=True), Right(trained)),
    ),
    "the second of two channels": (
        pretrain("model.train_ds.channel_selector=1", "model.validation_ds.channel_selector=1"),
        every_file(lambda i, samples: encoded("WAV", samples=np.stack([samples * 0, samples], 1))),
        Right(trained),
    ),
}

# --------------------------------------------------------------------------------------------- things that are no files


def special(make: Callable[[Path], object]) -> Setup:
    def setup(folder: Path) -> None:
        (folder / "odd").mkdir()
        shutil.copy(folder / "audio/0.wav", folder / "odd/good.wav")
        make(folder / "odd/a.wav")

    return setup


def a_socket(path: Path) -> None:
    here = Path.cwd()
    os.chdir(path.parent)  # names of sockets must be short
    try:
        socket.socket(socket.AF_UNIX).bind(path.name)
    finally:
        os.chdir(here)


SPECIAL: dict[str, Callable[[Path], object]] = {
    "a pipe": lambda path: os.mkfifo(path),
    "a socket": a_socket,
    "a link to /dev/zero": lambda path: path.symlink_to("/dev/zero"),
    "a broken link": lambda path: path.symlink_to("nowhere"),
    "a link to itself": lambda path: path.symlink_to("a.wav"),
}


def only_good(folder: Path, outcome: Outcome) -> str | None:
    """The good file is in the manifest and the other is not."""
    names = [Path(json.loads(line)["audio_filepath"]).name for line in (folder / "m.jsonl").read_text().splitlines()]
    return None if names == ["good.wav"] else f"in the manifest: {names}"


def circle(folder: Path) -> None:
    (folder / "odd/deep").mkdir(parents=True)
    shutil.copy(folder / "audio/0.wav", folder / "odd/good.wav")
    (folder / "odd/deep/up").symlink_to("..")


def changed_since(folder: Path) -> None:
    """Features exist; then the file is replaced by another of the same name."""
    shutil.copy(Fixture.path / "model.nemo", folder)
    if in_fork(["extract", "model.nemo", "audio/1.wav", "out", "--device", "cpu"], folder, {}, 60).code != 0:
        raise RuntimeError("extract failed")
    shutil.copy(folder / "audio/0.wav", folder / "audio/1.wav")


def new_features(folder: Path, outcome: Outcome) -> str | None:
    lines = [json.loads(line) for line in (folder / "out/manifest.jsonl").read_text().splitlines()]
    same = len(lines) == 1 and np.array_equal(np.load(folder / "out" / lines[0]["feature_filepath"]), Fixture.feature())
    return None if same else "the features are those of the file that was replaced"


def probe_data(folder: Path) -> None:
    shutil.copy(Fixture.path / "model.nemo", folder)
    (folder / "audio/5.wav").write_bytes(b"")
    (folder / "audio/6.wav").write_bytes(b"text")
    lines = [{"audio_filepath": f"audio/{i}.wav", "duration": 1.6, "label": "ab"[i % 2]} for i in range(8)]
    write_lines(folder / "p.jsonl", lines)


def a_pipe(folder: Path) -> None:
    shutil.copy(Fixture.path / "model.nemo", folder)
    os.mkfifo(folder / "pipe.wav")


INSPECT = ["inspect", "train.jsonl"]
PROBE = ["probe", "model.nemo", "--train", "p.jsonl", "--test", "p.jsonl", "--label", "label", "--output", "out"]
OTHERS: dict[str, tuple[list[str], Setup, Expected]] = {
    "prepare: folders in a circle": (PREPARE, circle, Either(Refused(("odd|loop",)), Right(only_good))),
    "prepare: only headers, nan inside": (
        [*PREPARE, "--check", "header"],
        corpus("a.wav", lambda: encoded("WAV", "FLOAT", VOICE + np.nan)),
        Right(sorted_into("a.wav", None, either=True)),
    ),
    "prepare: only headers, an empty file": (
        [*PREPARE, "--check", "header"],
        corpus("a.wav", lambda: b""),
        Right(sorted_into("a.wav", None)),
    ),
    "prepare: only headers, a flac that states ten times its length": (
        [*PREPARE, "--check", "header"],
        corpus("a.flac", flac_total(10 * len(VOICE))),
        Right(sorted_into("a.flac", 10 * SECONDS)),  # docs/prepare.md: damage inside is found in training
    ),
    "prepare: a resource fork": (PREPARE, corpus("._a.wav", lambda: b"\0\x05\x16\x07" + bytes(4000)), Right(only_good)),
    "prepare: nothing is good": (
        PREPARE,
        special(lambda path: path.with_name("good.wav").write_bytes(b"x")),
        Refused(("odd|m.bad.jsonl|good",), partial=True),
    ),
    "prepare: many workers": (
        ["prepare", "odd", "--output", "m.jsonl", "--workers", "3"],
        corpus("a.flac", flipped(lambda: encoded("FLAC"), 0.5)),
        Right(sorted_into("a.flac", None)),
    ),
    "inspect: one is empty": (INSPECT, third_file(lambda: b""), Right(says("5.wav", "empty"))),
    "inspect: one is shorter than stated": (
        INSPECT,
        third_file(lambda: encoded("WAV", samples=VOICE[:8000])),
        Right(says("5.wav")),
    ),
    "inspect: one is a text": (INSPECT, third_file(lambda: b"hello " * 50), Right(says("5.wav"))),
    "inspect: all are silent": (
        INSPECT,
        every_file(lambda i, samples: encoded("WAV", samples=samples * 0)),
        Right(says("inspect.html")),
    ),
    "extract: the file was replaced": (
        ["extract", "model.nemo", "audio/1.wav", "out", "--device", "cpu"],
        changed_since,
        Right(new_features),
    ),
    "extract: a folder with one bad file": (
        ["extract", "model.nemo", "audio", "out", "--device", "cpu"],
        both(third_file(lambda: b""), lambda folder: shutil.copy(Fixture.path / "model.nemo", folder)),
        Refused(("5.wav", "empty"), partial=True),
    ),
    "extract: a pipe": (
        ["extract", "model.nemo", "pipe.wav", "out", "--device", "cpu"],
        a_pipe,
        Refused(("pipe.wav",), partial=True),
    ),
    "extract: /dev/zero": (
        ["extract", "model.nemo", "/dev/zero", "out", "--device", "cpu"],
        lambda folder: shutil.copy(Fixture.path / "model.nemo", folder),
        Refused(("/dev/zero",), partial=True),
    ),
    "probe: two are bad": ([*PROBE, "--device", "cpu"], probe_data, Refused(("5.wav", "6.wav"))),
}


def stalled(folder: Path) -> None:
    (folder / "audio/5.wav").unlink()
    os.mkfifo(folder / "audio/5.wav")


def trials() -> Iterator[Trial]:
    for name, (file, make, seconds) in GOOD.items():
        yield Trial(GROUP, f"prepare: {name}", PREPARE, Right(sorted_into(file, seconds)), corpus(file, make))
    for name, (file, make) in BAD.items():
        yield Trial(GROUP, f"prepare: {name}", PREPARE, Right(sorted_into(file, None)), corpus(file, make))
    for name, (file, make) in EITHER_WAY.items():
        expected: Expected = Right(sorted_into(file, None, either=True))
        yield Trial(GROUP, f"prepare: {name}", PREPARE, expected, corpus(file, make))
    for name, place in SPECIAL.items():
        yield Trial(GROUP, f"prepare: {name}", PREPARE, Right(only_good), special(place))
    for name, (file, change) in SAME.items():
        command = ["extract", "model.nemo", file, "out", "--device", "cpu"]
        yield Trial(GROUP, f"extract: {name}", command, Right(same_features), from_plain(change, file))
    for name, (setup, expected) in ODD_SOUNDS.items():
        command = ["extract", "model.nemo", "a.wav", "out", "--device", "cpu"]
        yield Trial(GROUP, f"extract: {name}", command, expected, setup)
    for name, (command, setup, expected) in TRAINING.items():
        yield Trial(GROUP, f"training: {name}", command, expected, setup)
    for name, (command, setup, expected) in OTHERS.items():
        yield Trial(GROUP, name, command, expected, setup)
    waiting = pretrain("watchdog.floor_s=3")
    blocked = Right(says("5.wav"), codes=(0, 75))
    yield Trial(GROUP, "training: one is a pipe", waiting, blocked, stalled, own_process=True)
