"""Reading: every encoding gives the samples that were written, and what is broken is refused with a reason."""

from __future__ import annotations

import io
import json
import os
import pickle
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import soundfile
from hypothesis import example, given
from hypothesis import strategies as st
from numpy.typing import NDArray

from nest_ssl.audio import AudioError, audio_info, ffmpeg, read_audio, read_native, verify_audio
from nest_ssl.audio.read import MAX_SAMPLE
from tests.fuzz.effort import examples
from tests.helpers import fifo_that_is_not_opened

RATE = 16000


def tone(num_samples: int = 2 * RATE, rate: int = RATE) -> NDArray[np.float32]:
    time_s = np.arange(num_samples) / rate
    sweep: NDArray[np.float32] = (0.4 * np.sin(2 * np.pi * (200 + 300 * time_s) * time_s)).astype(np.float32)
    return sweep


def encoded(samples: Any, rate: int = RATE, **kind: Any) -> bytes:
    out = io.BytesIO()
    soundfile.write(out, samples, rate, **kind)
    return out.getvalue()


NOISE = 0.1 * np.random.default_rng(0).standard_normal(10 * RATE)
"""Several pages in Ogg."""


def flipped(ogg: bytes) -> bytes:
    """Flip a bit in the middle of the last page but one."""
    at = ogg.rindex(b"OggS", 0, ogg.rindex(b"OggS")) + 100
    return ogg[:at] + bytes([ogg[at] ^ 4]) + ogg[at + 1 :]


def without_a_page(ogg: bytes) -> bytes:
    last = ogg.rindex(b"OggS")
    return ogg[: ogg.rindex(b"OggS", 0, last)] + ogg[last:]


def correlation(a: NDArray[np.float32], b: NDArray[np.float32]) -> float:
    """Peak of the normalised cross-correlation over shifts: codecs may delay."""
    size = 1 << (len(a) + len(b)).bit_length()
    cross = np.fft.irfft(np.fft.rfft(a, size) * np.conj(np.fft.rfft(b, size)), size)
    return float(cross.max() / (np.linalg.norm(a) * np.linalg.norm(b)))


@pytest.mark.parametrize(
    ("format", "subtype", "tolerance"),
    [
        ("WAV", "PCM_U8", 1e-2),
        ("WAV", "PCM_16", 1e-4),
        ("WAV", "PCM_24", 1e-6),
        ("WAV", "PCM_32", 1e-7),
        ("WAV", "FLOAT", 0),
        ("WAV", "DOUBLE", 0),
        ("WAV", "ULAW", 2e-2),
        ("FLAC", "PCM_16", 1e-4),
        ("AIFF", "PCM_16", 1e-4),
        ("AU", "PCM_16", 1e-4),
        ("W64", "PCM_16", 1e-4),
        ("RF64", "PCM_16", 1e-4),
        ("CAF", "PCM_16", 1e-4),
        ("NIST", "PCM_16", 1e-4),
    ],
)
@pytest.mark.parametrize("int_values", [False, True])
def test_what_was_written_is_read(format: str, subtype: str, tolerance: float, int_values: bool) -> None:
    data = encoded(tone(), format=format, subtype=subtype)
    samples = read_audio(data, sample_rate=RATE, int_values=int_values)
    assert samples.dtype == np.float32
    np.testing.assert_allclose(samples, tone(), atol=tolerance, rtol=0)


def test_a_big_endian_wav_is_not_noise() -> None:
    data = encoded(tone(), format="WAV", subtype="PCM_16", endian="BIG")
    assert data.startswith(b"RIFX")
    np.testing.assert_allclose(read_audio(data, sample_rate=RATE), tone(), atol=1e-4)


def test_a_big_endian_wav_that_libsndfile_refuses_never_reaches_ffmpeg() -> None:
    data = bytearray(encoded(tone(), format="WAV", subtype="PCM_16", endian="BIG"))
    data[20:22] = b"\x7f\x7f"  # an encoding that nobody knows
    with pytest.raises(AudioError) as caught:
        read_audio(bytes(data), sample_rate=RATE, name="x.wav")
    assert "FFmpeg" not in caught.value.reason


@pytest.mark.parametrize(("format", "subtype"), [("OGG", "VORBIS"), ("OGG", "OPUS"), ("MP3", "MPEG_LAYER_III")])
def test_lossy_codecs_give_nearly_what_was_written(format: str, subtype: str) -> None:
    samples = read_audio(encoded(tone(), format=format, subtype=subtype), sample_rate=RATE)
    assert abs(len(samples) - 2 * RATE) < 0.1 * RATE
    assert correlation(samples, tone()) > 0.99


def av_encoded(codec: str, container: str, rate: int = RATE) -> bytes:
    av = pytest.importorskip("av")
    out = io.BytesIO()
    with av.open(out, "w", format=container) as file:
        stream = file.add_stream(codec, rate=rate, layout="mono")
        stream.bit_rate = 64_000
        sample_format = stream.codec_context.format.name
        resampler = av.AudioResampler(format=sample_format, layout="mono", rate=rate)
        frame = av.AudioFrame.from_ndarray(tone(2 * rate, rate)[None], format="fltp", layout="mono")
        frame.sample_rate = rate
        fifo = av.AudioFifo()
        for converted in [*resampler.resample(frame), *resampler.resample(None)]:
            fifo.write(converted)
        size = stream.codec_context.frame_size or 4096
        while (piece := fifo.read(size, partial=True)) is not None:
            file.mux(stream.encode(piece))
        file.mux(stream.encode(None))
    return out.getvalue()


@pytest.mark.parametrize(
    ("codec", "container", "rate"),
    [
        ("aac", "mp4", RATE),
        ("aac", "adts", RATE),
        ("alac", "mp4", RATE),
        ("libopus", "webm", 48000),
        ("wmav2", "asf", 44100),
        ("wavpack", "wv", RATE),
        ("flac", "ogg", RATE),
        ("flac", "matroska", RATE),
    ],
)
def test_ffmpeg_reads_what_libsndfile_does_not(codec: str, container: str, rate: int) -> None:
    data = av_encoded(codec, container, rate)
    assert abs(audio_info(data).duration_s - 2.0) < 0.2
    samples = read_audio(data, sample_rate=rate)
    assert correlation(samples, tone(2 * rate, rate)) > 0.98


def test_a_block_of_wavpack_that_fails_its_checksum_is_a_bad_file() -> None:
    data = bytearray(av_encoded("wavpack", "wv"))
    data[len(data) // 2 : len(data) // 2 + 400] = bytes(400)
    with pytest.raises(AudioError, match=r"x\.wv: .*FFmpeg: Invalid data"):
        verify_audio(bytes(data), name="x.wv")


@pytest.mark.parametrize(
    ("codec", "container", "rate"),
    [("libopus", "webm", 48_000), ("flac", "matroska", 48_000), ("wmav2", "asf", 44_100)],
)
def test_a_recording_of_which_a_part_is_missing_is_a_bad_file(codec: str, container: str, rate: int) -> None:
    data = av_encoded(codec, container, rate)
    rest = (
        bytes(2_000) + data[len(data) // 2 + 2_000 :] if container == "asf" else b""
    )  # FFmpeg refuses one that is cut
    for read in (verify_audio, partial(read_audio, sample_rate=RATE)):
        read(data, name="x.webm")
        with pytest.raises(AudioError, match=r"x\.webm: .*is cut or damaged: it has [01]\.\d of 2\.\d s"):
            read(data[: len(data) // 2] + rest, name="x.webm")


def test_a_recording_whose_rate_changes_in_the_middle_is_one_bad_file() -> None:
    data = av_encoded("aac", "adts") + av_encoded("aac", "adts", 44_100)
    for read in (audio_info, verify_audio, partial(read_audio, sample_rate=RATE)):
        with pytest.raises(AudioError, match=r"radio\.aac: .*its sample rate or channels change in the middle"):
            read(data, name="radio.aac")


def test_a_header_that_points_beyond_any_file_is_one_bad_file(tmp_path: Path) -> None:
    data = av_encoded("wmav2", "asf", 44_100)
    path = tmp_path / "x.wma"
    path.write_bytes(data[:44] + b"\xff" * 8 + data[52:])
    with pytest.raises(AudioError, match=r"x\.wma: .*FFmpeg: Invalid argument"):
        verify_audio(path)


@pytest.mark.parametrize("container", ["matroska", "mp4", "ogg"])
def test_an_offset_through_ffmpeg_gives_the_same_samples_as_the_whole_file(container: str) -> None:
    data = av_encoded("flac" if container != "mp4" else "alac", container)
    whole = read_audio(data, sample_rate=RATE)
    part = read_audio(data, sample_rate=RATE, offset_s=1.2, duration_s=0.5)
    np.testing.assert_array_equal(part, whole[int(1.2 * RATE) :][: int(0.5 * RATE)])


@pytest.mark.parametrize("num_channels", [2, 6, 18])
def test_ffmpeg_keeps_channels_in_order_and_survives_many(num_channels: int) -> None:
    pytest.importorskip("av")
    samples_NC = np.random.default_rng(0).uniform(-1, 1, (5000, num_channels)).astype(np.float32)
    decoded_NC, rate = ffmpeg.decode(encoded(samples_NC, format="WAV", subtype="FLOAT"), "x.wav")
    assert rate == RATE
    np.testing.assert_array_equal(decoded_NC, samples_NC)


def test_a_flac_of_unstated_length_is_read_to_its_end() -> None:
    pytest.importorskip("av")
    data = bytearray(encoded(tone(), format="FLAC"))
    data[21] &= 0xF0  # the 36 bits of STREAMINFO that hold the number of samples
    data[22:26] = bytes(4)
    np.testing.assert_allclose(read_audio(bytes(data), sample_rate=RATE), tone(), atol=1e-4)


def test_without_the_second_decoder_the_error_says_how_to_get_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(__import__("sys").modules, "av", None)
    with pytest.raises(AudioError, match=r"nest-ssl\[decoders\]"):
        read_audio(b"\x1a\x45\xdf\xa3 not a real webm file", sample_rate=RATE, name="x.webm")


def corrupt_flac() -> bytes:
    noise = np.random.default_rng(0).uniform(-0.5, 0.5, size=2 * RATE)
    data = bytearray(encoded(noise, format="FLAC"))
    middle = len(data) // 2
    data[middle : middle + 200] = np.random.default_rng(1).bytes(200)
    return bytes(data)


def truncated_flac() -> bytes:
    data = encoded(np.random.default_rng(0).uniform(-0.5, 0.5, size=2 * RATE), format="FLAC")
    return data[: len(data) // 2]


BAD_FILES = {
    "empty": (b"", "empty file"),
    "random bytes": (np.random.default_rng(0).bytes(4096), "format not recognised"),
    "a text": (b"This is a transcript, not audio.\n" * 20, "format not recognised"),
    "a web page": (b"<html><body>404 Not Found</body></html>", "format not recognised"),
    "a Git LFS pointer": (b"version https://git-lfs.github.com/spec/v1\noid sha256:00\nsize 1\n", "Git LFS"),
    "a playlist": (b"#EXTM3U\n#EXT-X-TARGETDURATION:1\n#EXTINF:1,\n/etc/hostname\n", "format not recognised"),
    "a header alone": (encoded(tone(0), format="WAV"), "no samples"),
    "a corrupt FLAC": (corrupt_flac(), "corrupt"),
    "a truncated FLAC": (truncated_flac(), "corrupt|truncated"),
    "NaN": (encoded(np.array([0.1, np.nan, np.inf] * 100), format="WAV", subtype="FLOAT"), "200 samples are NaN"),
    "far too loud": (
        encoded(np.array([0.1, -1e30] * 100), format="WAV", subtype="FLOAT"),
        "are not audio",
    ),
    "far too loud, but not in the mean": (
        encoded(np.array([[1e30, -1e30]] * 100), format="WAV", subtype="FLOAT"),
        "are not audio",
    ),
    "Vorbis with a flipped bit": (flipped(encoded(NOISE, format="OGG")), "corrupt: page"),
    "two Vorbis files in one": (2 * encoded(tone(), format="OGG"), "several Ogg streams"),
    "Vorbis without a page": (without_a_page(encoded(NOISE, format="OGG")), "comes after a gap"),
    "a rate of 1 Hz": (encoded(tone(100), rate=1, format="WAV"), "sample rate 1 Hz"),
    "no channel": (encoded(tone(), format="WAV")[:22] + b"\0\0" + encoded(tone(), format="WAV")[24:], "libsndfile"),
}


@pytest.mark.parametrize("kind", BAD_FILES)
@pytest.mark.parametrize("reader", [lambda *a, **k: read_audio(*a, sample_rate=RATE, **k), verify_audio])
def test_bad_files_are_refused_with_a_reason(kind: str, reader: Any, tmp_path: Path) -> None:
    data, reason = BAD_FILES[kind]
    path = tmp_path / "x.wav"
    path.write_bytes(data)
    for source, name in ((data, "shard.tar/x.wav"), (path, None)):
        with pytest.raises(AudioError, match=reason) as caught:
            reader(source, name=name)
        assert caught.value.path == (name or str(path))


SEEDS = [
    encoded(tone(800), format="WAV"),
    encoded(tone(800), format="WAV", subtype="FLOAT"),
    encoded(np.stack([tone(400)] * 2, axis=1), format="FLAC"),
    encoded(tone(800), format="AIFF"),
    encoded(tone(800), format="AU"),
    encoded(tone(800), format="OGG"),
]
patches = st.lists(st.tuples(st.integers(0, 90), st.binary(min_size=1, max_size=8)), min_size=1, max_size=3)
ends = st.none() | st.integers(0, 2000)


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")  # soundfile, of a seek before 0
@examples(150)
@given(st.sampled_from(SEEDS), patches, ends)
@example(SEEDS[0], [(24, b"\x01\0\0\0")], None)  # 1 Hz
@example(SEEDS[0], [(40, b"\xff\xff\xff\x7f")], None)  # 2 GB of samples
@example(SEEDS[1], [(60, np.float32(1e30).tobytes())], None)
def test_a_damaged_header_gives_audio_or_a_reason(
    data: bytes, patched: list[tuple[int, bytes]], end: int | None
) -> None:
    damaged = bytearray(data)
    for place, patch in patched:
        damaged[place : place + len(patch)] = patch
    try:
        samples = read_audio(bytes(damaged[:end]), sample_rate=RATE, name="x.wav")
        info = verify_audio(bytes(damaged[:end]), name="x.wav")
    except AudioError as error:
        refused: Any = error
    else:
        refused = None
    if refused is not None:
        assert refused.path == "x.wav"
        assert refused.reason
        return
    assert samples.ndim == 1
    assert len(samples) > 0
    assert np.abs(samples).max() <= 2 * MAX_SAMPLE  # resampling may overshoot
    assert info.num_samples > 0


@pytest.mark.parametrize("name", ["missing.wav", ".", "x.raw"])
def test_paths_that_are_no_audio_file_are_refused(name: str, tmp_path: Path) -> None:
    (tmp_path / "x.raw").write_bytes(bytes(1000))
    for reader in (lambda path: read_audio(path, sample_rate=RATE), audio_info, verify_audio):
        with pytest.raises(AudioError):
            reader(tmp_path / name)


def varying_without_length(samples: NDArray[np.floating[Any]]) -> bytes:
    """An MP3 of varying bit rate without its first frame, which has the length: a stream that was recorded."""
    mp3 = encoded(samples, format="MP3", bitrate_mode="VARIABLE", compression_level=0.5)
    return mp3[mp3.index(mp3[:2], 4) :]


JOINED = {"joined": lambda: 2 * encoded(tone(), format="MP3"), "stream": lambda: varying_without_length(NOISE)}


@pytest.mark.parametrize(("kind", "least_s"), [("joined", 4.0), ("stream", 10.0)])
def test_an_mp3_of_which_libsndfile_reads_a_part_is_read_by_ffmpeg(kind: str, least_s: float) -> None:
    pytest.importorskip("av")
    data = JOINED[kind]()
    samples, _ = read_native(data)
    assert least_s <= len(samples) / RATE < least_s + 0.2
    assert verify_audio(data).num_samples == len(samples)
    np.testing.assert_allclose(
        read_native(data, offset_s=1.0, duration_s=least_s - 1.0)[0], samples[RATE : int(least_s * RATE)], atol=1e-5
    )


@pytest.mark.parametrize("kind", JOINED)
def test_without_ffmpeg_an_mp3_that_would_be_read_in_part_is_refused(
    kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "av", None)
    for reader in (partial(read_audio, sample_rate=RATE), verify_audio):
        with pytest.raises(AudioError, match=r"MP3 that does not begin with its length: \S+ s of .*decoders"):
            reader(JOINED[kind]())


@pytest.mark.parametrize("rate", [8_000, 11_025, 22_050, 44_100, 48_000])
@pytest.mark.parametrize("mode", ["CONSTANT", "VARIABLE", "AVERAGE"])
def test_libsndfile_reads_an_mp3_that_begins_with_its_length(rate: int, mode: str) -> None:
    tags = b"ID3\x04\x00\x00\x00\x00\x07\x68" + b"\xff\xfb\x90\x00" * 250
    mp3 = encoded(tone(2 * rate, rate), rate, format="MP3", bitrate_mode=mode, compression_level=0.5)
    picture = np.random.default_rng(0).bytes(1 << 20)  # has four thousand bytes 0xff
    assert verify_audio(tags + mp3 + b"APETAGEX" + picture).format == "MP3/MPEG_LAYER_III"


@pytest.mark.parametrize(("format", "subtype"), [("WAV", "GSM610"), ("AU", "G721_32"), ("AU", "G723_24")])
def test_a_part_of_a_file_that_can_only_be_read_from_its_start(format: str, subtype: str) -> None:
    data = encoded(tone(), format=format, subtype=subtype)
    samples, _ = read_native(data)
    part, _ = read_native(data, offset_s=0.5, duration_s=1.0)
    np.testing.assert_array_equal(part, samples[RATE // 2 : RATE // 2 + RATE])
    assert verify_audio(data, offset_s=0.5, duration_s=1.0).num_samples == RATE


def test_an_mp3_is_decoded_to_the_same_samples_with_an_offset_of_0() -> None:
    data = encoded(tone(), format="MP3")
    with soundfile.SoundFile(io.BytesIO(data)) as sound:
        np.testing.assert_array_equal(read_native(data)[0][:, 0], sound.read(dtype="float32"))


def test_an_mp3_cut_in_half_is_truncated() -> None:
    data = encoded(tone(), format="MP3", subtype="MPEG_LAYER_III")
    with pytest.raises(AudioError, match=r"truncated: \d\.\d\d s of 2\.\d\d s"):
        read_audio(data[: len(data) // 2], sample_rate=RATE)


def test_a_file_shorter_than_the_manifest_says_is_truncated_but_rounding_is_not() -> None:
    data = encoded(tone(), format="WAV")
    assert len(read_audio(data, sample_rate=RATE, duration_s=2.01)) == 2 * RATE
    with pytest.raises(AudioError, match="truncated"):
        read_audio(data, sample_rate=RATE, duration_s=4.0)


def test_samples_beyond_1_are_kept() -> None:
    loud = 2.5 * tone()
    np.testing.assert_array_equal(read_audio(encoded(loud, format="WAV", subtype="FLOAT"), sample_rate=RATE), loud)


@pytest.mark.parametrize("format", ["WAV", "FLAC", "OGG"])
def test_an_offset_gives_the_same_samples_as_the_whole_file(format: str, tmp_path: Path) -> None:
    path = tmp_path / f"x.{format.lower()}"
    soundfile.write(path, tone(), RATE)
    whole = read_audio(path, sample_rate=RATE)
    part = read_audio(str(path), sample_rate=RATE, offset_s=0.7, duration_s=0.6)
    np.testing.assert_allclose(part, whole[int(0.7 * RATE) : int(0.7 * RATE) + int(0.6 * RATE)], atol=1e-6)
    np.testing.assert_array_equal(read_audio(path, sample_rate=RATE, duration_s=0.0), whole)  # NeMo: 0 is all
    with pytest.raises(AudioError, match="no samples after the offset of 3"):
        read_audio(path, sample_rate=RATE, offset_s=3.0)


def test_an_offset_does_not_decode_the_whole_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "long.flac"
    soundfile.write(path, np.tile(tone(), 60), RATE)
    asked: list[int] = []
    read = soundfile.SoundFile.read

    def watched_read(self: Any, frames: int, **kind: Any) -> Any:
        asked.append(frames)
        return read(self, frames, **kind)

    monkeypatch.setattr(soundfile.SoundFile, "read", watched_read)
    read_audio(path, sample_rate=RATE, offset_s=100.0, duration_s=1.0)
    assert asked == [RATE]


@pytest.mark.parametrize(("offset_s", "duration_s"), [(-1.0, None), (0.0, -1.0)])
def test_negative_times_are_a_mistake_of_the_caller(offset_s: float, duration_s: float | None) -> None:
    with pytest.raises(ValueError, match="negative"):
        read_audio(encoded(tone(), format="WAV"), sample_rate=RATE, offset_s=offset_s, duration_s=duration_s)


def test_channels_are_averaged_or_selected() -> None:
    left, right = tone(), -0.5 * tone()
    data = encoded(np.stack([left, right], axis=1), format="WAV", subtype="FLOAT")
    for selector, expected in (
        (None, 0.25 * tone()),
        ("average", 0.25 * tone()),
        (0, left),
        (1, right),
        ([0, 1], 0.25 * tone()),
        ([1], right),
    ):
        samples = read_audio(data, sample_rate=RATE, channel_selector=selector)
        np.testing.assert_allclose(samples, expected, atol=1e-7)
    with pytest.raises(AudioError, match="2 channel"):
        read_audio(data, sample_rate=RATE, channel_selector=2)
    with pytest.raises(TypeError, match="channel_selector is 'left'"):
        read_audio(data, sample_rate=RATE, channel_selector="left")


def test_info_and_verification_agree_with_what_is_read() -> None:
    data = encoded(np.zeros((4410, 2)), rate=44100, format="WAV", subtype="PCM_24")
    info = audio_info(data)
    assert (info.sample_rate, info.num_samples, info.num_channels, info.format) == (44100, 4410, 2, "WAV/PCM_24")
    assert info.duration_s == pytest.approx(0.1)
    assert verify_audio(data) == info
    assert verify_audio(data, offset_s=0.02, duration_s=0.05).num_samples == 2205
    samples_NC, rate = read_native(data)
    assert (samples_NC.shape, rate) == ((4410, 2), 44100)


def test_verification_of_a_long_file_holds_one_block_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("nest_ssl.audio.read.BLOCK_FRAMES", 1000)
    assert verify_audio(encoded(tone(), format="WAV")).num_samples == 2 * RATE


def test_a_header_that_promises_too_much_costs_no_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("nest_ssl.audio.read.MAX_FRAMES_AT_ONCE", 1000)
    np.testing.assert_allclose(read_audio(encoded(tone(), format="WAV"), sample_rate=RATE), tone(), atol=1e-4)


def test_the_error_survives_pickling() -> None:
    error = pickle.loads(pickle.dumps(AudioError("a.wav", "no samples")))
    assert (str(error), error.path, error.reason) == ("a.wav: no samples", "a.wav", "no samples")


def nemo_file() -> bytes:
    """Noise between two stretches 100 dB quieter: 22,050 Hz, stereo, 16 bit."""
    num_samples = 44100
    position = np.arange(num_samples)
    envelope = np.where((position > 9000) & (position < 33000), 1.0, 1e-5)
    noise = np.random.default_rng(7).uniform(-1, 1, (num_samples, 2))
    samples_NC = np.round(noise * envelope[:, None] * 20000) / 32768
    return encoded(samples_NC, rate=22050, format="WAV", subtype="PCM_16")


@pytest.mark.parametrize(
    ("case", "arguments"),
    [
        ("average_resampled", {"sample_rate": 16000, "channel_selector": "average"}),
        ("channel_1_native", {"sample_rate": 22050, "channel_selector": 1}),
        ("segment", {"sample_rate": 16000, "channel_selector": 0, "offset_s": 0.5, "duration_s": 0.77}),
        ("trimmed", {"sample_rate": 16000, "channel_selector": "average", "trim_silence": True}),
        ("int_values", {"sample_rate": 48000, "channel_selector": "average", "int_values": True}),
    ],
)
def test_samples_equal_those_of_nemo_2_7_3(case: str, arguments: dict[str, Any]) -> None:
    recorded = json.loads(Path(__file__).with_name("nemo_audio_segment.json").read_text())[case]
    samples = read_audio(nemo_file(), **arguments)
    assert len(samples) == recorded["num_samples"]
    np.testing.assert_allclose(samples[::997], recorded["every_997th"], atol=1e-7)


@pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="no FIFOs on this system")
@pytest.mark.parametrize("read", [audio_info, verify_audio, read_native, partial(read_audio, sample_rate=16000)])
def test_a_fifo_is_refused_at_once_however_it_is_read(tmp_path: Path, read: Callable[[Path], object]) -> None:
    pipe = tmp_path / "pipe.wav"
    with fifo_that_is_not_opened(pipe), pytest.raises(AudioError, match=r"pipe\.wav: not a regular file"):
        read(pipe)


@pytest.mark.parametrize("subtype", ["VORBIS", "OPUS"])
def test_ogg_files_may_be_cut_or_have_tags_at_their_end(subtype: str) -> None:
    whole = encoded(NOISE, format="OGG", subtype=subtype)
    assert verify_audio(whole + b"TAG" + bytes(125)).num_samples == verify_audio(whole).num_samples
    assert 0 < verify_audio(whole[: 2 * len(whole) // 3]).num_samples < verify_audio(whole).num_samples
