"""A small speech synthesizer: letters become phones, and phones control the resonances that shape a buzz and a hiss.

It pronounces letters as they are written, and sounds like it; it lets the demo run where py-nanotts has no wheel
(macOS). It has what pre-training needs of speech: moving formants and pitch, voiced and voiceless sounds.

F frames of 5 ms, N samples, K frequencies.
"""

from __future__ import annotations

import unicodedata
import zlib
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

Samples = npt.NDArray[np.float64]

RATE_HZ = 16_000
FRAME_SAMPLES = 80  # 5 ms
WINDOW_SAMPLES = 320
PITCH_HZ = 200.0
SMOOTHING_FRAMES = 7  # tongues do not jump


class Phone(NamedTuple):
    duration_ms: int
    voiced: float
    """Strength of the buzz."""
    formants_hz: tuple[int, int, int]
    hiss: float = 0.0
    hiss_hz: int = 3000
    """Centre of the hiss."""
    closure_ms: int = 0
    """Silence before a plosive bursts."""


_PAUSE = Phone(60, 0.0, (500, 1500, 2500))
PHONES: dict[str, Phone] = {
    "a": Phone(110, 1.0, (750, 1250, 2600)),
    "e": Phone(95, 1.0, (480, 1950, 2600)),
    "i": Phone(85, 0.9, (300, 2300, 3000)),
    "o": Phone(105, 1.0, (480, 850, 2500)),
    "u": Phone(90, 0.9, (320, 750, 2300)),
    "y": Phone(80, 0.8, (310, 1950, 2500)),
    "m": Phone(70, 0.45, (250, 1050, 2100)),
    "n": Phone(65, 0.45, (250, 1500, 2500)),
    "l": Phone(60, 0.6, (360, 1150, 2800)),
    "r": Phone(60, 0.6, (420, 1300, 1700)),
    "w": Phone(65, 0.6, (310, 700, 2200)),
    "j": Phone(60, 0.6, (280, 2200, 2900)),
    "v": Phone(65, 0.4, (300, 1100, 2300), 0.12, 4500),
    "z": Phone(75, 0.35, (300, 1600, 2600), 0.35, 5800),
    "s": Phone(95, 0.0, (400, 1700, 2600), 0.7, 6000),
    "c": Phone(90, 0.0, (400, 1800, 2600), 0.6, 3300),
    "x": Phone(85, 0.0, (400, 1700, 2600), 0.5, 4500),
    "f": Phone(85, 0.0, (400, 1200, 2400), 0.3, 5000),
    "h": Phone(60, 0.1, (500, 1500, 2500), 0.3, 1600),
    "b": Phone(25, 0.6, (300, 900, 2200), 0.2, 900, 50),
    "d": Phone(25, 0.6, (300, 1700, 2600), 0.3, 3500, 45),
    "g": Phone(30, 0.6, (300, 2000, 2400), 0.3, 2000, 50),
    "p": Phone(30, 0.0, (400, 900, 2200), 0.5, 900, 70),
    "t": Phone(30, 0.0, (400, 1700, 2600), 0.7, 4500, 65),
    "k": Phone(35, 0.0, (400, 1900, 2400), 0.6, 2000, 70),
    "q": Phone(35, 0.0, (400, 1300, 2400), 0.6, 1700, 70),
    " ": Phone(20, 0.1, (500, 1500, 2500)),
    ".": Phone(320, 0.0, (500, 1500, 2500)),
}


def phones_of(text: str) -> list[Phone]:
    """Return one phone per letter; accents are dropped, and a closure becomes a pause."""
    letters = unicodedata.normalize("NFKD", text.lower().replace("ß", "ss"))
    phones: list[Phone] = []
    for phone in (PHONES[letter] for letter in letters if letter in PHONES):
        if phone.closure_ms:
            phones.append(_PAUSE._replace(duration_ms=phone.closure_ms, formants_hz=phone.formants_hz))
        phones.append(phone)
    return phones or [_PAUSE]


def speak_formants(text: str, pitch: float, tempo: float = 1.0) -> Samples:
    """Return `text` as samples at RATE_HZ; `pitch` 1 is 200 Hz. The same text and pitch give the same samples."""
    rng = np.random.default_rng(zlib.crc32(text.encode()))
    phones = phones_of(text)
    durations = np.array([max(1, round(phone.duration_ms * rng.uniform(0.8, 1.2) / tempo / 5)) for phone in phones])

    def track(values: list[float], smoothing: int = SMOOTHING_FRAMES) -> Samples:
        steps = np.pad(np.repeat(np.array(values, dtype=float), durations), smoothing // 2, mode="edge")
        return np.convolve(steps, np.ones(smoothing) / smoothing, mode="valid")

    formants_3F = [track([phone.formants_hz[i] for phone in phones]) for i in range(3)]
    voiced_F, hiss_F = track([phone.voiced for phone in phones], 5), track([phone.hiss for phone in phones], 3)
    hiss_hz_F = track([phone.hiss_hz for phone in phones], 3)
    buzz_N = buzz(melody(len(voiced_F), pitch, rng))
    hz_K = np.fft.rfftfreq(2 * WINDOW_SAMPLES, 1 / RATE_HZ)
    shape_FK = sum(
        gain / np.sqrt(1 + ((hz_K - centre[:, None]) / width) ** 2)
        for centre, width, gain in zip(formants_3F, (50, 70, 110), (1.0, 0.5, 0.25), strict=True)
    )
    hiss_FK = np.exp(-0.5 * ((hz_K - hiss_hz_F[:, None]) / 900) ** 2)
    voice_N = filtered(buzz_N, voiced_F[:, None] * shape_FK)
    breath_N = filtered(0.3 * rng.standard_normal(len(buzz_N)), hiss_F[:, None] * hiss_FK)
    return voice_N + breath_N


def melody(num_frames: int, pitch: float, rng: np.random.Generator) -> Samples:
    """Return (F,) the fundamental frequency in Hz: it falls over about two seconds, again and again, and wanders."""
    fall_F = 1.15 - 0.3 * ((np.arange(num_frames) / rng.uniform(300, 500)) % 1)
    wander_F = np.convolve(rng.standard_normal(num_frames + 39), np.ones(40) / np.sqrt(40), mode="valid")
    return PITCH_HZ * pitch * fall_F * np.exp(0.06 * wander_F)


def buzz(pitch_hz_F: Samples) -> Samples:
    """Return (N,) what the vocal folds produce: a sawtooth of this pitch."""
    num_samples = len(pitch_hz_F) * FRAME_SAMPLES
    pitch_hz_N = np.interp(np.arange(num_samples), np.arange(len(pitch_hz_F)) * FRAME_SAMPLES, pitch_hz_F)
    phase_N = np.cumsum(pitch_hz_N) / RATE_HZ
    return 2 * (phase_N % 1) - 1


def filtered(source_N: Samples, response_FK: Samples) -> Samples:
    """Filter the source with a response per frame; windows overlap by three quarters and are added."""
    num_frames = len(response_FK)
    window = np.hanning(WINDOW_SAMPLES + 1)[:-1]  # sums to 2 at this overlap
    padded = np.pad(source_N, (0, WINDOW_SAMPLES))
    frames = np.lib.stride_tricks.sliding_window_view(padded, WINDOW_SAMPLES)[::FRAME_SAMPLES][:num_frames]
    shaped = np.fft.irfft(np.fft.rfft(frames * window, 2 * WINDOW_SAMPLES) * response_FK)
    blocks = shaped.reshape(num_frames, -1, FRAME_SAMPLES)
    out = np.zeros((num_frames + blocks.shape[1], FRAME_SAMPLES))
    for offset in range(blocks.shape[1]):
        out[offset : offset + num_frames] += 0.5 * blocks[:, offset]
    return out.ravel()[: len(source_N)]
