"""Audio that is damaged, odd or extreme, in every container, given to prepare, inspect, extract and pretrain.

A bad file stops nothing, is named with a reason, and never reaches the model as noise (docs/prepare.md, "Formats"; docs/
data.md, "Bad data"). Odd files that are accepted must have the duration and the features of what is in them.
"""

from __future__ import annotations

import gzip
import io
import json
import os
import shutil
import struct
import tarfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import soundfile
from benchmarks.hostile.harness import (
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
    both,
    cut,
    finite_features,
    flipped,
    patched,
    pretrain,
    said,
    same_features,
    speech,
    trained,
    write_lines,
)

Make = Callable[[], bytes]
SECONDS = 1.6  # of audio/0.wav
BAD = "bad"
EXTRACT = ("--device", "cpu")

# ------------------------------------------------------------------------------------------------------------ encoders


def samples() -> np.ndarray[Any, Any]:
    """The 16-bit samples of audio/0.wav."""
    found: np.ndarray[Any, Any] = soundfile.read(Fixture.path / "audio/0.wav", dtype="int16")[0]
    return found


def original() -> bytes:
    return (Fixture.path / "audio/0.wav").read_bytes()


def encoded(
    form: str, subtype: str | None = None, data: Any = None, rate: int = RATE, endian: str | None = None
) -> bytes:
    buffer = io.BytesIO()
    soundfile.write(buffer, samples() if data is None else data, rate, format=form, subtype=subtype, endian=endian)
    return buffer.getvalue()


def chunk(name: bytes, data: bytes) -> bytes:
    return name + struct.pack("<I", len(data)) + data + b"\0" * (len(data) % 2)


def riff(*chunks: bytes, size: int | None = None) -> bytes:
    body = b"WAVE" + b"".join(chunks)
    return b"RIFF" + struct.pack("<I", len(body) if size is None else size) + body


def wav_header(
    tag: int = 1, channels: int = 1, rate: int = RATE, bits: int = 16, align: int | None = None, more: bytes = b""
) -> bytes:
    align = channels * bits // 8 if align is None else align
    per_second = min(rate * align, 2**32 - 1)
    return chunk(b"fmt ", struct.pack("<HHIIHH", tag, channels, rate, per_second, align & 0xFFFF, bits) + more)


def wav(data: bytes | None = None, *before: bytes, stated: int | None = None, **header: Any) -> bytes:
    data = samples().tobytes() if data is None else data
    body = b"data" + struct.pack("<I", len(data) if stated is None else stated) + data
    return riff(wav_header(**header), *before, body)


def floats(change: Callable[[np.ndarray[Any, Any]], Any], subtype: str = "FLOAT") -> Make:
    def make() -> bytes:
        values = samples().astype(np.float64) / 32768
        result = change(values)
        return encoded("WAV", subtype, values if result is None else result)

    return make


def put(at: int, value: float) -> Callable[[np.ndarray[Any, Any]], None]:
    def change(values: np.ndarray[Any, Any]) -> None:
        values[at] = value

    return change


def sphere(more: str = "", count: int | None = None, coding: str = "pcm", size: int = 1024) -> bytes:
    text = f"NIST_1A\n{size:7}\nchannel_count -i 1\nsample_count -i {len(samples()) if count is None else count}\n"
    text += f"sample_rate -i {RATE}\nsample_n_bytes -i 2\nsample_byte_format -s2 01\nsample_sig_bits -i 16\n"
    text += f"sample_coding -s{len(coding)} {coding}\n{more}end_head\n"
    return text.encode().ljust(1024, b" ") + samples().astype("<i2").tobytes()


def au(size: int | None = None, offset: int = 24, rate: int = RATE, coding: int = 3) -> bytes:
    data = samples().astype(">i2").tobytes()
    return b".snd" + struct.pack(">5I", offset, len(data) if size is None else size, coding, rate, 1) + data


def aifc(kind: bytes = b"sowt", frames: int | None = None) -> bytes:
    data = samples().astype("<i2").tobytes()
    extended = b"\x40\x0c\xfa\x00" + bytes(6)  # 16000 as a float of 80 bits
    count = len(samples()) if frames is None else frames
    common = struct.pack(">hIh", 1, count, 16) + extended + kind + b"\x00\x00"

    def part(name: bytes, body: bytes) -> bytes:
        return name + struct.pack(">I", len(body)) + body

    body = b"AIFC" + part(b"FVER", struct.pack(">I", 0xA2805140)) + part(b"COMM", common)
    body += part(b"SSND", bytes(8) + data)
    return part(b"FORM", body)


def flac(change: Callable[[bytes], bytes] = bytes) -> Make:
    return lambda: change(encoded("FLAC", "PCM_16"))


def flac_total(total: int) -> Callable[[bytes], bytes]:
    """STREAMINFO's number of samples: 36 bits, from byte 21."""
    return lambda data: patched(
        data, 21, bytes([data[21] & 0xF0 | total >> 32 & 0xF]) + struct.pack(">I", total & 0xFFFFFFFF)
    )


def crc_of_ogg(page: bytes) -> bytes:
    table = []
    for i in range(256):
        value = i << 24
        for _ in range(8):
            value = (value << 1 ^ 0x04C11DB7 if value & 0x80000000 else value << 1) & 0xFFFFFFFF
        table.append(value)
    found = 0
    for byte in patched(page, 22, bytes(4)):
        found = (found << 8 & 0xFFFFFFFF) ^ table[found >> 24 ^ byte]
    return patched(page, 22, struct.pack("<I", found))


def pages(data: bytes) -> list[bytes]:
    starts = [at for at in range(len(data)) if data[at : at + 5] == b"OggS\0"]
    return [data[a:b] for a, b in zip(starts, [*starts[1:], len(data)], strict=True)]


def last_granule(value: int) -> Callable[[bytes], bytes]:
    def change(data: bytes) -> bytes:
        *first, last = pages(data)
        return b"".join([*first, crc_of_ogg(patched(last, 6, struct.pack("<q", value)))])

    return change


def id3(size: int) -> bytes:
    parts = bytes(size >> shift & 0x7F for shift in (21, 14, 7, 0))
    return b"ID3\x04\x00\x00" + parts + bytes(size)


def opus() -> bytes:
    return encoded("OGG", "OPUS")


def vorbis() -> bytes:
    return encoded("OGG", "VORBIS")


def mp3() -> bytes:
    return encoded("MP3", "MPEG_LAYER_III")


def guid(first: int) -> bytes:
    return struct.pack("<HHI", 22, 16, 4) + struct.pack("<IHH", first, 0, 0x10) + bytes.fromhex("800000aa00389b71")


# ------------------------------------------------------------------------------------------------------ set-up and checks


def placed(make: Make, name: str, folder_name: str = "in") -> Setup:
    """The file, next to one that is good."""

    def setup(folder: Path) -> None:
        (folder / folder_name).mkdir(exist_ok=True)
        (folder / folder_name / name).write_bytes(make())
        shutil.copy(folder / "audio/1.wav", folder / folder_name / "good.wav")

    return setup


def there(act: Callable[[Path], object], name: str) -> Setup:
    """Something that is no plain file."""

    def setup(folder: Path) -> None:
        (folder / "in").mkdir()
        shutil.copy(folder / "audio/1.wav", folder / "in/good.wav")
        act(folder / "in" / name)

    return setup


def lines_of(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()] if path.is_file() else []


def prepared(name: str, verdict: str | float | tuple[float, float], listed: bool = True) -> Check:
    """The good neighbour is in the manifest; the file is, with its duration, or it is among the bad ones.

    A verdict of two numbers: bad, or a duration between them.
    """

    def check(folder: Path, outcome: Outcome) -> str | None:
        good = {Path(line["audio_filepath"]).name: line["duration"] for line in lines_of(folder / "m.jsonl")}
        bad = {Path(line["audio_filepath"]).name: line["reason"] for line in lines_of(folder / "m.bad.jsonl")}
        if abs(good.get("good.wav", 0) - 1.7) > 1e-3:
            return f"the good file has the duration {good.get('good.wav')}"
        if name in good and name in bad:
            return "both good and bad"
        if name in bad:
            if not str(bad[name]).strip():
                return "bad without a reason"
            return f"a good file counts as bad: {bad[name]}" if isinstance(verdict, float) else None
        if name not in good:
            return "neither good nor bad" if listed else None
        if verdict == BAD:
            return f"a bad file counts as good, {good[name]} s"
        assert not isinstance(verdict, str)
        low, high = (verdict, verdict) if isinstance(verdict, float) else verdict
        fits = low - 0.05 <= good[name] <= high + 0.05
        return None if fits else f"a duration of {good[name]} s, expected {low} to {high}"

    return check


def prepare(
    name: str,
    file: str,
    make: Make | Setup,
    verdict: str | float | tuple[float, float],
    listed: bool = True,
    limit_s: float = 60,
) -> Trial:
    setup = placed(make, file) if not _takes_folder(make) else make  # type: ignore[arg-type]
    command = ["prepare", "in", "--output", "m.jsonl", "--workers", "1"]
    return Trial("audio", f"prepare: {name}", command, Right(prepared(file, verdict, listed)), setup, limit_s=limit_s)  # type: ignore[arg-type]


def _takes_folder(make: Any) -> bool:
    return bool(getattr(make, "__qualname__", "").startswith(("there.", "placed.")))


def extract(name: str, file: str, make: Make, expected: Expected) -> Trial:
    def setup(folder: Path) -> None:
        (folder / file).write_bytes(make())

    return Trial(
        "audio", f"extract: {name}", ["extract", "model.nemo", file, "out", *EXTRACT], expected, both(model, setup)
    )


def model(folder: Path) -> None:
    shutil.copy(Fixture.path / "model.nemo", folder / "model.nemo")


def close_features(most: float) -> Check:
    def check(folder: Path, outcome: Outcome) -> str | None:
        files = list((folder / "out").rglob("*.npy"))
        if len(files) != 1:
            return f"{len(files)} feature files"
        found, expected = np.load(files[0]), Fixture.feature()
        if found.shape != expected.shape:
            return f"features of shape {found.shape}, expected {expected.shape}"
        difference = float(np.abs(found - expected).max())
        return None if difference <= most else f"features differ by {difference:.2g}"

    return check


def some_finite(folder: Path, outcome: Outcome) -> str | None:
    return finite_features(folder, outcome) if list((folder / "out").rglob("*.npy")) else "no features"


def in_training(
    make: Make | Callable[[Path], object], name: str = "audio/3.wav", duration: float | None = None
) -> Setup:
    """Put it in the place of one of the eight training files."""

    def setup(folder: Path) -> None:
        path = folder / name
        path.unlink(missing_ok=True)
        if make.__code__.co_argcount:
            make(path)  # type: ignore[call-arg]
        else:
            path.write_bytes(make())  # type: ignore[call-arg, arg-type]
        if duration is not None:
            lines = lines_of(folder / "train.jsonl")
            for line in lines:
                if line["audio_filepath"] == name:
                    line["duration"] = duration
            write_lines(folder / "train.jsonl", lines)
            write_lines(folder / "valid.jsonl", lines_of(folder / "valid.jsonl")[:3])

    return setup


def replaced_in_training(name: str = "3.wav") -> Check:
    """The file is named among the bad ones, and training went on with the others."""

    def check(folder: Path, outcome: Outcome) -> str | None:
        lines = lines_of(folder / RUN / "bad_files_train_ds_rank0.jsonl")
        named = [line for line in lines if Path(line["audio_filepath"]).name == name]
        if not named or not named[0]["reason"]:
            return f"not named in bad_files_train_ds_rank0.jsonl: {lines[:2]}"
        return trained(folder, outcome)

    return check


def train(name: str, setup: Setup, expected: Expected, *overrides: str) -> Trial:
    return Trial("audio", f"pretrain: {name}", pretrain(*overrides), expected, setup)


# -------------------------------------------------------------------------------------------------------------- trials


def preparing() -> list[Trial]:
    upto = (0.0, SECONDS)
    rate = lambda value: lambda: wav(rate=value)  # noqa: E731
    return [
        prepare("wav: ends within its format chunk", "x.wav", lambda: original()[:26], BAD),
        prepare("wav: cut in the middle, good as far as it goes", "x.wav", lambda: cut(0.5)(original()), (0.78, 0.82)),
        prepare("wav: header from a stream, sizes of 2^32-1", "x.wav", lambda: wav(stated=2**32 - 1), (SECONDS, SECONDS)),
        prepare("wav: header from a stream, sizes of 0", "x.wav", lambda: wav(stated=0), (SECONDS, SECONDS)),
        prepare("wav: preallocated, only zeros", "x.wav", lambda: bytes(51_244), BAD),
        prepare("wav: only the data chunk, no format", "x.wav", lambda: riff(chunk(b"data", samples().tobytes())), BAD),
        prepare("wav: data before format", "x.wav", lambda: riff(chunk(b"data", samples().tobytes()), wav_header()), (SECONDS, SECONDS)),
        prepare("wav: a list of 300 kB before the data", "x.wav", lambda: wav(None, chunk(b"LIST", b"INFO" + bytes(300_000))), SECONDS),
        prepare("wav: 20,000 small chunks before the data", "x.wav", lambda: wav(None, *[chunk(b"junk", b"ab")] * 20_000), (SECONDS, SECONDS)),
        prepare("wav: a chunk that claims 4 GB", "x.wav", lambda: wav(None, b"junk\xf0\xff\xff\xff"), (SECONDS, SECONDS)),
        prepare("wav: no channels", "x.wav", lambda: wav(channels=0, align=2), BAD),
        prepare("wav: 65,535 channels", "x.wav", lambda: wav(channels=65_535), BAD),
        prepare("wav: rate 0", "x.wav", rate(0), BAD),
        prepare("wav: rate 999", "x.wav", rate(999), BAD),
        prepare("wav: rate 1000, the lowest", "x.wav", rate(1000), 25.6),
        prepare("wav: rate 769,000", "x.wav", rate(769_000), BAD),
        prepare("wav: rate 2^32-1", "x.wav", rate(2**32 - 1), BAD),
        prepare("wav: no samples", "x.wav", lambda: wav(b""), BAD),
        prepare("wav: 16 bits in blocks of 3 bytes", "x.wav", lambda: wav(align=3), (0.0, SECONDS)),
        prepare("wav: 13 bits", "x.wav", lambda: wav(bits=13, align=2), (0.0, 2.0)),
        prepare("wav: an unknown codec", "x.wav", lambda: wav(tag=0x7A7A), BAD),
        prepare("wav: extensible, an unknown subformat", "x.wav", lambda: wav(tag=0xFFFE, more=guid(0x7A7A)), BAD),
        prepare("wav: extensible, PCM", "x.wav", lambda: wav(tag=0xFFFE, more=guid(1)), SECONDS),
        prepare("wav: MP3 within RIFF", "x.wav", lambda: wav(mp3(), tag=0x55, bits=0, align=1, more=bytes(14)), (1.5, 1.8)),
        prepare("wav: one NaN", "x.wav", floats(put(12_345, float("nan"))), BAD),
        prepare("wav: the last sample is infinite", "x.wav", floats(put(-1, float("inf"))), BAD),
        prepare("wav: a sample of 1e30", "x.wav", floats(put(99, 1e30)), BAD),
        prepare("wav: float64 beyond float32", "x.wav", floats(put(99, 1e300), "DOUBLE"), BAD),
        prepare("wav: floats of the size of 16-bit integers", "x.wav", floats(lambda v: v * 32768), (SECONDS, SECONDS)),
        prepare("wav: floats up to 1.5", "x.wav", floats(lambda v: v / np.abs(v).max() * 1.5), SECONDS),
        prepare("wav: silence", "x.wav", lambda: wav(bytes(51_200)), (SECONDS, SECONDS)),
        prepare("wav: big-endian, RIFX, cut", "x.wav", lambda: cut(0.5)(encoded("WAV", "PCM_16", endian="BIG")), (0.78, 0.82)),
        prepare("wav: IMA ADPCM, a block is cut", "x.wav", lambda: encoded("WAV", "IMA_ADPCM")[:-100], (1.5, 1.7)),
        prepare("rf64: ds64 claims 2^60 bytes", "x.wav", lambda: patched(encoded("RF64", "PCM_16"), 28, struct.pack("<Q", 2**60)), (SECONDS, SECONDS)),
        prepare("w64: cut in its header", "x.w64", lambda: encoded("W64", "PCM_16")[:100], BAD),
        prepare("flac: cut at half", "x.flac", flac(cut(0.5)), BAD),
        prepare("flac: one bit in a frame", "x.flac", flac(flipped(0.6)), BAD),
        prepare("flac: 2 kB of zeros in the middle", "x.flac", flac(lambda d: patched(d, len(d) // 2, bytes(2048))), BAD),
        prepare("flac: does not know its length", "x.flac", flac(flac_total(0)), (SECONDS, SECONDS)),
        prepare("flac: promises 2^36-1 samples", "x.flac", flac(flac_total(2**36 - 1)), BAD),
        prepare("flac: states half its samples", "x.flac", flac(flac_total(12_800)), (0.8, SECONDS)),
        prepare("flac: ID3 in front", "x.flac", flac(lambda d: id3(700) + d), (SECONDS, SECONDS)),
        prepare("flac: only the metadata", "x.flac", flac(lambda d: d[:200]), BAD),
        prepare("flac: two files in one", "x.flac", flac(lambda d: d + d), (SECONDS, 2 * SECONDS)),
        prepare("vorbis: cut at 60 %", "x.ogg", lambda: cut(0.6)(vorbis()), upto),
        prepare("vorbis: without its setup header", "x.ogg", lambda: b"".join(pages(vorbis())[:1]), BAD),
        prepare("opus: last granule claims a year", "x.opus", lambda: last_granule(48_000 * 31_536_000)(opus()), BAD),
        prepare("opus: last granule below 0", "x.opus", lambda: last_granule(-5)(opus()), upto),
        prepare("opus: a byte within the last page", "x.opus", lambda: flipped(0.97)(opus()), upto),
        prepare("opus: pages in another order", "x.opus", lambda: b"".join([*pages(opus())[:2], *reversed(pages(opus())[2:])]), upto),
        prepare("opus: 64 kB of noise in front", "x.opus", lambda: b"\x5a" * 65_536 + opus(), upto),
        prepare("mp3: 3 MB of ID3 in front", "x.mp3", lambda: id3(3_000_000) + mp3(), (SECONDS, SECONDS + 0.1)),
        prepare("mp3: cut at half", "x.mp3", lambda: cut(0.5)(mp3()), (0.0, 0.9)),
        prepare("mp3: sync words and nothing else", "x.mp3", lambda: b"\xff\xfb\x90\x00" * 5000, (0.0, 60.0)),
        prepare("mp3 with the name of a wav", "x.wav", mp3, (SECONDS, SECONDS + 0.2)),
        prepare("aifc: little-endian by 'sowt'", "x.aiff", aifc, SECONDS),
        prepare("aifc: an unknown compression", "x.aiff", lambda: aifc(b"zzzz"), BAD),
        prepare("aifc: states ten times its frames", "x.aiff", lambda: aifc(frames=256_000), (SECONDS, SECONDS)),
        prepare("au: data of unknown size", "x.au", lambda: au(2**32 - 1), (SECONDS, SECONDS)),
        prepare("au: data begins at 2 GB", "x.au", lambda: au(offset=2**31 - 8), BAD),
        prepare("au: coding 4711", "x.au", lambda: au(coding=4711), BAD),
        prepare("caf: cut at a third", "x.caf", lambda: cut(0.33)(encoded("CAF", "PCM_16")), (0.0, 0.6)),
        prepare("sphere: as on LDC's discs", "x.sph", sphere, SECONDS),
        prepare("sphere: compressed with shorten", "x.sph", lambda: sphere(coding="pcm,embedded-shorten-v2.00"), BAD),
        prepare("sphere: states 20 times its samples", "x.sph", lambda: sphere(count=512_000), (SECONDS, SECONDS)),
        prepare("sphere: the size of its header is no number", "x.sph", lambda: sphere().replace(b"   1024\n", b"   abcd\n"), SECONDS),
        prepare("gzip with the name of a wav", "x.wav", lambda: gzip.compress(original()), BAD),
        prepare("raw samples with the name of a wav", "x.wav", lambda: samples().tobytes(), BAD),
        prepare("a git-lfs pointer", "x.flac", lambda: b"version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 9\n", BAD),
        prepare("m4a, for which FFmpeg is needed", "x.m4a", lambda: b"\0\0\0\x18ftypM4A \0\0\0\0M4A mp42" + b"\0\0\x10\0mdat" + bytes(4088), BAD),
        prepare("webm, only its first bytes", "x.webm", lambda: b"\x1a\x45\xdf\xa3" + bytes(60), BAD),
        prepare("a named pipe", "x.wav", there(os.mkfifo, "x.wav"), BAD, listed=False),
        prepare("a folder with the name of a wav", "x.wav", there(Path.mkdir, "x.wav"), BAD, listed=False),
        prepare("a link that leads nowhere", "x.wav", there(lambda path: path.symlink_to("gone.wav"), "x.wav"), BAD),
        prepare("a link to /dev/zero", "x.wav", there(lambda path: path.symlink_to("/dev/zero"), "x.wav"), BAD, listed=False),
        prepare("a link to the memory of the process", "x.wav", there(lambda path: path.symlink_to("/proc/self/mem"), "x.wav"), BAD, listed=False),
        prepare("a folder that contains itself", "x", there(lambda path: path.symlink_to("."), "x"), (0.0, 2.0), listed=False),
        prepare("a sparse wav of 600 MB", "x.wav", there(long_wav, "x.wav"), (19_660.8, 19_660.8), limit_s=120),
    ]  # fmt: skip


def long_wav(path: Path) -> None:
    size = 600 << 20
    path.write_bytes(wav(b"", stated=size))
    os.truncate(path, 44 + size)


def extracting() -> list[Trial]:
    exact = Right(same_features)
    near = Right(close_features(0.05))
    any_finite = Either(Refused(partial=True), Right(some_finite))

    def stereo(left: Any, right: Any) -> bytes:
        return encoded("WAV", "PCM_16", np.stack([left, right], 1))

    def bad(name: str, file: str, make: Make) -> Trial:
        return extract(name, file, make, Refused((file,), partial=True))

    def mixed(folder: Path) -> None:
        for name, make in (
            ("empty.wav", lambda: b""),
            ("cut.flac", flac(cut(0.4))),
            ("nan.wav", floats(put(5, float("nan")))),
            ("text.mp3", lambda: b"no audio"),
        ):
            placed(make, name)(folder)
        shutil.copy(folder / "audio/0.wav", folder / "in/good.wav")

    def of_good_and_bad(folder: Path, outcome: Outcome) -> str | None:
        named = {Path(line["audio_filepath"]).name for line in lines_of(folder / "out/bad.jsonl")}
        if named != {"empty.wav", "cut.flac", "nan.wav", "text.mp3"}:
            return f"bad.jsonl names {sorted(named)}"
        return same_features(folder, outcome)

    def listed(content: bytes) -> Setup:
        return lambda folder: (folder / "list.txt").write_bytes(content)

    command = ["extract", "model.nemo", "list.txt", "out", *EXTRACT]
    return [
        extract("24 bits", "x.wav", lambda: encoded("WAV", "PCM_24", samples().astype(np.int32) << 16), exact),
        extract("32-bit floats", "x.wav", floats(lambda v: v), exact),
        extract("big-endian WAV", "x.wav", lambda: encoded("WAV", "PCM_16", endian="BIG"), exact),
        extract("hand-written AIFF-C, little-endian", "x.aiff", aifc, exact),
        extract("hand-written NIST SPHERE", "x.sph", sphere, exact),
        extract("hand-written AU of unknown size", "x.au", lambda: au(2**32 - 1), Either(Refused(("x.au",), partial=True), exact)),
        extract("FLAC without a length", "x.flac", flac(flac_total(0)), Either(Refused(("x.flac",), partial=True), exact)),
        extract("two equal channels", "x.wav", lambda: stereo(samples(), samples()), exact),
        extract("channels that cancel each other", "x.wav", lambda: stereo(samples(), -samples()), any_finite),
        extract("mu-law", "x.wav", lambda: encoded("WAV", "ULAW"), Right(some_finite)),
        extract("48 kHz, by repeating samples", "x.wav", lambda: encoded("WAV", "PCM_16", samples().repeat(3), 48_000), Right(some_finite)),
        extract("floats scaled by 1e-30", "x.wav", floats(lambda v: v * 1e-30), any_finite),
        extract("floats scaled by 1e6", "x.wav", floats(lambda v: v * 1e6), any_finite),
        extract("silence", "x.wav", lambda: wav(bytes(51_200)), any_finite),
        extract("a constant of full scale", "x.wav", lambda: wav(b"\xff\x7f" * 25_600), any_finite),
        extract("one sample", "x.wav", lambda: wav(b"\1\0"), any_finite),
        extract("five milliseconds", "x.wav", lambda: wav(samples()[:80].tobytes()), any_finite),
        extract("an odd byte at the end", "x.wav", lambda: wav(samples().tobytes() + b"\7"), Either(Refused(("x.wav",), partial=True), exact)),
        extract("a good file with the wrong ending", "x.mp3", original, exact),
        bad("infinite samples", "x.wav", floats(put(0, -float("inf")))),
        bad("a sample of 1e30", "x.wav", floats(put(77, 1e30))),
        bad("a cut FLAC", "x.flac", flac(cut(0.6))),
        bad("a name with quotes, and no audio", "it's \"x\".wav", lambda: b"RIFF"),
        bad("700 s, longer than the limit", "long.flac", lambda: encoded("FLAC", "PCM_16", np.zeros(700 * RATE, np.int16))),
        Trial("audio", "extract: one good file, four bad ones", ["extract", "model.nemo", "in", "out", *EXTRACT], Right(of_good_and_bad, codes=(1,)), both(model, mixed)),
        Trial("audio", "extract: a list with line ends of Windows", command, exact, both(model, listed(b"audio/0.wav\r\n"))),
        Trial("audio", "extract: a list with a device that never ends", command, Either(Refused(partial=True), Right(same_features)), both(model, listed(b"audio/0.wav\n/dev/zero\n"))),
        Trial("audio", "extract: a list with a file that is gone", command, Right(same_features, codes=(1,)), both(model, listed(b"audio/0.wav\naudio/gone.wav\n"))),
        Trial("audio", "extract: AIFF through a wrong name, near", ["extract", "model.nemo", "x.wav", "out", *EXTRACT], near, both(model, lambda folder: (folder / "x.wav").write_bytes(encoded("AIFF", "PCM_24", samples().astype(np.int32) << 16)))),
    ]  # fmt: skip


def manifests_of_audio() -> list[Trial]:
    """prepare and inspect, with manifests whose audio is not as they say."""

    def manifest(*lines: dict[str, Any]) -> Setup:
        good = {"audio_filepath": "audio/1.wav", "duration": 1.7}
        return lambda folder: write_lines(folder / "given.jsonl", [good, *lines])

    def found(check: Callable[[list[dict[str, Any]], list[dict[str, Any]]], str | None]) -> Right:
        return Right(lambda folder, outcome: check(lines_of(folder / "m.jsonl"), lines_of(folder / "m.bad.jsonl")))

    def only_good(good: list[dict[str, Any]], bad: list[dict[str, Any]]) -> str | None:
        return None if len(good) == 1 and len(bad) == 1 else f"{len(good)} good, {len(bad)} bad"

    def measured(good: list[dict[str, Any]], bad: list[dict[str, Any]]) -> str | None:
        return None if [round(line["duration"], 3) for line in good] == [1.7, 1.6] else f"{good} {bad}"

    def not_beyond(good: list[dict[str, Any]], bad: list[dict[str, Any]]) -> str | None:
        beyond = [line for line in good if line.get("offset", 0) + line["duration"] > 1.71 or line["duration"] <= 0]
        return f"beyond the end: {beyond}" if beyond else None

    def prepared_from(name: str, setup: Setup, expected: Expected) -> Trial:
        command = ["prepare", "given.jsonl", "--output", "m.jsonl", "--workers", "1"]
        return Trial("audio", f"prepare: {name}", command, expected, setup)

    def looked_at(name: str, setup: Setup, expected: Expected, *more: str) -> Trial:
        return Trial("audio", f"inspect: {name}", ["inspect", "train.jsonl", *more], expected, setup)

    def page(folder: Path, outcome: Outcome) -> str | None:
        text = (folder / "inspect.html").read_text()
        return "NaN in the page" if ">nan" in text.lower() or '"nan' in text.lower() else None

    def shards(folder: Path, outcome: Outcome) -> str | None:
        count = 0
        for path in folder.glob("audio_*.tar"):
            with tarfile.open(path) as archive:
                for member in archive.getmembers():
                    file = archive.extractfile(member)
                    assert file
                    values, rate = soundfile.read(io.BytesIO(file.read()))
                    count += bool(len(values) and np.isfinite(values).all() and rate == RATE)
        return None if count == 1 else f"{count} good members in the shards"

    zero = {"audio_filepath": "audio/0.wav"}
    every = lambda make: both(*[in_training(make, f"audio/{i}.wav") for i in range(8)])  # noqa: E731
    return [
        prepared_from("a stated duration of 3 hours", manifest({**zero, "duration": 10_800}), found(not_beyond)),
        prepared_from("no duration, and one in quotes", manifest({**zero, "duration": "1.6"}), found(measured)),
        prepared_from("a segment beyond the end", manifest({**zero, "offset": 50.0, "duration": 1.0}), found(only_good)),
        prepared_from("a segment before the beginning", manifest({**zero, "offset": -1.0, "duration": 1.0}), Either(Refused(("given.jsonl|offset",)), found(not_beyond))),
        prepared_from("a segment of no length", manifest({**zero, "offset": 0.5, "duration": 0.0}), Either(Refused(("given.jsonl|duration",)), found(not_beyond))),
        prepared_from("a segment across the end", manifest({**zero, "offset": 1.0, "duration": 60.0}), found(not_beyond)),
        Trial("audio", "prepare: shards of a good and a bad file", ["prepare", "in", "--output", "m.jsonl", "--workers", "1", "--shards", "1"], Right(shards), placed(floats(put(3, float("nan"))), "x.wav")),
        Trial("audio", "prepare: header check of damage inside", ["prepare", "in", "--output", "m.jsonl", "--workers", "1", "--check", "header"], Right(prepared("x.flac", (SECONDS, SECONDS))), placed(flac(flipped(0.6)), "x.flac")),
        Trial("audio", "prepare: nothing but bad files", ["prepare", "in", "--output", "m.jsonl"], Refused(("x.wav|no usable audio",), partial=True), both(placed(lambda: b"", "x.wav"), lambda folder: (folder / "in/good.wav").unlink())),
        looked_at("a file is a text", in_training(lambda: b"no audio at all"), Right(said("3.wav", then=page))),
        looked_at("a file has a tenth of its line's duration", in_training(original, duration=16.0), Right(said("3.wav", then=page))),
        looked_at("a file with NaN", in_training(floats(put(5, float("nan")))), Right(page)),
        looked_at("a named pipe", in_training(os_mkfifo), Either(Refused(("3.wav",)), Right(said("3.wav", then=page)))),
        looked_at("every file is empty", every(lambda: b""), Either(Refused(("wav",)), Right(said("wav", then=page)))),
        looked_at("every file is silent", every(lambda: wav(bytes(51_200))), Right(page)),
        looked_at("noise that is a text", both(in_training(lambda: b"no audio", "audio/7.wav"), lambda folder: write_lines(folder / "noise.jsonl", [{"audio_filepath": "audio/7.wav", "duration": 2.3}])), Either(Refused(("7.wav",)), Right(said("7.wav", then=page))), "--noise", "noise.jsonl"),
    ]  # fmt: skip


def os_mkfifo(path: Path) -> None:
    os.mkfifo(path)


def pretraining() -> list[Trial]:
    named = Right(replaced_in_training())
    workers = "model.train_ds.num_workers=2"
    noisy = "model.train_ds.noise_manifest=noise.jsonl"

    def one(name: str, make: Make | Callable[[Path], object], *overrides: str, duration: float | None = None) -> Trial:
        return train(name, in_training(make, duration=duration), named, *overrides)

    def noise(*makes: Make) -> Setup:
        def setup(folder: Path) -> None:
            for i, make in enumerate(makes):
                (folder / f"noise{i}.wav").write_bytes(make())
            write_lines(
                folder / "noise.jsonl",
                [{"audio_filepath": f"noise{i}.wav", "duration": 1.6} for i in range(len(makes))],
            )

        return setup

    def every(make: Make) -> Setup:
        return both(*[in_training(make, f"audio/{i}.wav") for i in range(8)])

    def rates(folder: Path) -> None:
        for i, rate in enumerate((8000, 11_025, 22_050, 44_100, 48_000, 96_000, 192_000, 1000)):
            soundfile.write(folder / f"audio/{i}.wav", np.tile(speech(rate, i), 2), rate)
        write_lines(folder / "train.jsonl", [{"audio_filepath": f"audio/{i}.wav", "duration": 2.0} for i in range(8)])

    mostly = Either(Refused(("bad|read",), partial=True), Right(trained))
    return [
        one("a file with NaN", floats(put(9, float("nan")))),
        one("a sample of 1e30", floats(put(9, 1e30))),
        one("a cut FLAC, with workers", flac(cut(0.5)), workers),
        one("one bit in a FLAC", flac(flipped(0.5))),
        one("an empty file, with workers", lambda: b"", workers),
        one("a folder in its place", Path.mkdir),
        one("a named pipe in its place", os_mkfifo),
        one("a link to /dev/zero", lambda path: path.symlink_to("/dev/zero")),
        one("a line that promises 16 s of 1.6", original, duration=16.0),
        train("every file is empty", every(lambda: b""), Refused(("read|bad",), partial=True)),
        train("every file is silent", every(lambda: wav(bytes(64_000))), Either(Refused(partial=True), Right(trained))),
        train("every file is a constant", every(lambda: wav(b"\0\x40" * 32_000)), Either(Refused(partial=True), Right(trained))),
        train("every file has 1e-30 as its largest sample", every(floats(lambda v: v * 1e-30)), Either(Refused(partial=True), Right(trained))),
        train("eight rates from 1 to 192 kHz", rates, Right(trained)),
        train("five of eight files are texts", both(*[in_training(lambda: b"text", f"audio/{i}.wav") for i in range(5)]), mostly),
        train("noise: all files are texts", noise(lambda: b"text", lambda: b"other"), Either(Refused(("noise",), partial=True), Right(said("noise"))), noisy),
        train("noise: one of two has infinite samples", noise(original, floats(put(4, float("inf")))), Right(trained), noisy),
        train("noise: silence", noise(lambda: wav(bytes(51_200))), Right(trained), noisy),
        train("noise: one sample", noise(lambda: wav(b"\1\0")), Either(Refused(("noise",), partial=True), Right(trained)), noisy),
        train("validation: every file is a text", lambda folder: other_validation(folder, b"text"), Either(Refused(("valid|read",), partial=True), Right(trained))),
        train("channel 3 of two", both(*[in_training(lambda: encoded("WAV", "PCM_16", np.stack([samples(), samples()], 1)), f"audio/{i}.wav") for i in range(8)]), Refused(("channel",), partial=True), "model.train_ds.channel_selector=3"),
    ]  # fmt: skip


def other_validation(folder: Path, content: bytes) -> None:
    for i in range(2):
        (folder / f"v{i}.wav").write_bytes(content)
    write_lines(folder / "valid.jsonl", [{"audio_filepath": f"v{i}.wav", "duration": 2.0} for i in range(2)])


def trials() -> list[Trial]:
    tables: Sequence[Callable[[], list[Trial]]] = (preparing, extracting, manifests_of_audio, pretraining)
    return [trial for table in tables for trial in table()]
