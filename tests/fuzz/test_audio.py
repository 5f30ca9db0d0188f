"""Any bytes are audio or refused with a reason, in little time and memory, whichever way they are read."""

from __future__ import annotations

import io
import struct
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import soundfile
from hypothesis import given
from hypothesis import strategies as st

from nest_ssl.audio import AudioError, audio_info, read_audio, read_native, verify_audio
from tests.fuzz.effort import examples, outcome

RATE = 16000


def encoded(format: str, subtype: str | None = None, num_channels: int = 1) -> bytes:
    samples_NC = 0.3 * np.sin(np.arange(4000)[:, None] * np.linspace(0.1, 0.2, num_channels))
    out = io.BytesIO()
    soundfile.write(out, samples_NC, RATE, format=format, subtype=subtype)
    return out.getvalue()


def _samples_of_all_formats() -> dict[str, bytes]:
    found = {}
    for format in sorted(soundfile.available_formats()):
        for subtype in {soundfile.default_subtype(format), "IMA_ADPCM", "GSM610", "OPUS", "FLOAT", "ALAC_16"} - {None}:
            # libsndfile writes half of an SD2 file to the working folder, also when the other half goes to memory.
            if format not in ("RAW", "SD2") and soundfile.check_format(format, subtype):
                try:
                    found[f"{format}/{subtype}"] = encoded(format, subtype)
                except soundfile.LibsndfileError:  # formats that store other rates
                    continue
    return found


FILES = _samples_of_all_formats() | {"WAV stereo": encoded("WAV", None, 2), "FLAC of 8": encoded("FLAC", None, 8)}

edges = st.sampled_from([0, 1, 2, 3, 8, 16, 24, 255, 256, 1024, 0x7FFF, 0x8000, 0xFFFF, 0x7FFFFFFF, 0xFFFFFFFF])
numbers = st.builds(
    lambda value, kind: struct.pack(kind, value & (1 << 8 * struct.calcsize(kind)) - 1),
    edges | st.integers(0, 2**64 - 1),
    st.sampled_from(["<B", "<H", ">H", "<I", ">I", "<Q", ">Q"]),
)
places = st.integers(0, 100) | st.integers(0, 1000)
Change = Callable[[bytes], bytes]
changes: st.SearchStrategy[Change] = st.one_of(
    st.builds(lambda at, new: lambda data: data[:at] + new + data[at + len(new) :], places, numbers),
    st.builds(lambda at, new: lambda data: data[:at] + new + data[at:], places, st.binary(max_size=8)),
    st.builds(lambda at, size: lambda data: data[:at] + data[at + size :], places, st.integers(1, 64)),
    st.builds(lambda at, size: lambda data: data[: at + size] + data[at:], places, st.integers(1, 64)),
    st.builds(lambda size: lambda data: data[:size], st.integers(0, 10_000)),
    st.builds(lambda more: lambda data: data + more, st.binary(max_size=50)),
)


@st.composite
def damaged(draw: st.DrawFn) -> bytes:
    data = FILES[draw(st.sampled_from(sorted(FILES)))]
    for change in draw(st.lists(changes, min_size=1, max_size=4)):
        data = change(data)
    return data


@st.composite
def made_up_wav(draw: st.DrawFn) -> bytes:
    """Every field of the header is drawn; in most files, most of them fit together."""
    kind = draw(st.sampled_from([1, 1, 1, 3, 6, 7, 0x11, 0x55, 0xFFFE, 0]))
    num_channels = draw(st.sampled_from([1, 1, 2, 8, 0, 255, 1024, 0xFFFF]))
    rate = draw(st.sampled_from([16000, 8000, 48000, 0, 1, 999, 1000, 768_000, 0x7FFFFFFF, 0xFFFFFFFF]))
    bits = draw(st.sampled_from([16, 8, 24, 32, 64, 0, 1, 17, 0xFFFF]))
    frame_bytes = draw(st.just(num_channels * bits // 8 & 0xFFFF) | st.integers(0, 0xFFFF))
    samples = draw(st.binary(max_size=200)) * draw(st.sampled_from([1, 20]))
    size = draw(st.just(len(samples)) | edges)
    header = struct.pack("<HHIIHH", kind, num_channels, rate, rate * frame_bytes & 0xFFFFFFFF, frame_bytes, bits)
    header += draw(st.sampled_from([b"", b"\0\0", b"\x16\0" + bytes(22), b"\xff\xff"]))
    chunks = [b"fmt " + struct.pack("<I", draw(st.just(len(header)) | edges)) + header]
    chunks += draw(
        st.lists(st.sampled_from([b"LIST\4\0\0\0abcd", b"fact\4\0\0\0\xff\xff\xff\xff", b"fmt \0\0\0\0"]), max_size=2)
    )
    chunks.append(b"data" + struct.pack("<I", size) + samples)
    if draw(st.integers(0, 9)) == 0:
        chunks.reverse()
    body = b"".join(chunks)
    magic = draw(st.sampled_from([b"RIFF", b"RIFF", b"RIFX", b"RF64"]))
    return magic + struct.pack("<I", draw(st.just(len(body) + 4) | edges)) + b"WAVE" + body


def audio(read: Callable[[], Any]) -> Any:
    """Return what was read, or None if it is refused with a reason."""
    result, error = outcome(read, AudioError, memory_gb=2.5)
    if error is not None:
        assert error.path == "x.wav"
        assert 0 < len(error.reason) < 500
        assert "\n" not in error.reason
    return result


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")  # soundfile, of a seek before 0
@examples(150)
@given(
    damaged() | made_up_wav() | st.binary(max_size=64),
    st.sampled_from([0.0, 0.1, 1e9]),
    st.sampled_from([None, 0.1, 1e9]),
)
def test_any_bytes_are_audio_or_refused_with_a_reason(data: bytes, offset_s: float, duration_s: float | None) -> None:
    part: dict[str, Any] = {"offset_s": offset_s, "duration_s": duration_s, "name": "x.wav"}
    audio(lambda: audio_info(data, name="x.wav"))
    samples = audio(lambda: read_audio(data, sample_rate=RATE, **part))
    info = audio(lambda: verify_audio(data, **part))
    native = audio(lambda: read_native(data, **part))
    if samples is not None:
        assert samples.ndim == 1
        assert np.isfinite(samples).all()
        assert info is not None, "it is read, but 'prepare' refuses it"
        assert native[0].shape == (info.num_samples, info.num_channels)
        assert native[1] == info.sample_rate
