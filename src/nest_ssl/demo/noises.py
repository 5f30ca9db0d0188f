"""Noises for the demo, each made from a random generator alone."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import numpy.typing as npt
import soxr

from nest_ssl.demo.formants import RATE_HZ, speak_formants
from nest_ssl.demo.voices import LANGUAGES, random_text

Samples = npt.NDArray[np.float64]


def coloured(num_samples: int, exponent: float, rng: np.random.Generator) -> Samples:
    """Return noise whose power falls as 1 / frequency^exponent: 0 white, 1 pink, 2 brown."""
    spectrum = np.fft.rfft(rng.standard_normal(num_samples))
    index = np.maximum(1, np.arange(len(spectrum)))
    return np.fft.irfft(spectrum * index ** (-exponent / 2), num_samples)


def white(num_samples: int, _rate: int, rng: np.random.Generator) -> Samples:
    return coloured(num_samples, 0, rng)


def pink(num_samples: int, _rate: int, rng: np.random.Generator) -> Samples:
    return coloured(num_samples, 1, rng)


def brown(num_samples: int, _rate: int, rng: np.random.Generator) -> Samples:
    return coloured(num_samples, 2, rng)


def hum(num_samples: int, rate: int, rng: np.random.Generator) -> Samples:
    """Mains hum, 50 or 60 Hz, with weaker harmonics."""
    seconds = np.arange(num_samples) / rate
    mains_hz = rng.choice([50, 60])
    out = 0.02 * rng.standard_normal(num_samples)
    for k in range(1, 9):
        out += rng.uniform(0.2, 1) / k * np.sin(2 * np.pi * (k * mains_hz * seconds + rng.uniform()))
    return out


def wind(num_samples: int, rate: int, rng: np.random.Generator) -> Samples:
    """Brownish noise that swells and fades."""
    num_gusts = max(2, num_samples // rate + 2)
    swell = np.interp(np.linspace(0, num_gusts - 1, num_samples), np.arange(num_gusts), rng.uniform(0.1, 1, num_gusts))
    return swell * coloured(num_samples, 1.5, rng)


def clicks(num_samples: int, rate: int, rng: np.random.Generator) -> Samples:
    """Keys, dishes, doors: short ringing at random times."""
    out = 1e-4 * rng.standard_normal(num_samples)
    ring_s = np.arange(round(0.05 * rate)) / rate
    for start in rng.integers(0, num_samples, size=max(1, round(6 * num_samples / rate))):
        hz, decay_s = rng.uniform(300, 0.4 * rate), rng.uniform(0.002, 0.012)
        ring = rng.uniform(0.2, 1) * np.exp(-ring_s / decay_s) * np.sin(2 * np.pi * hz * ring_s)
        out[start : start + len(ring)] += ring[: num_samples - start]
    return out


def chords(num_samples: int, rate: int, rng: np.random.Generator) -> Samples:
    """Slow music: three notes at a time, changing every half second or so."""
    out = np.zeros(num_samples)
    start = 0
    while start < num_samples:
        length = min(num_samples - start, round(rng.uniform(0.3, 0.9) * rate))
        seconds = np.arange(length) / rate
        for note in rng.choice(24, size=3, replace=False):
            hz = 130.8 * 2 ** (note / 12)
            out[start : start + length] += np.exp(-2 * seconds) * sum(
                np.sin(2 * np.pi * k * hz * seconds) / k for k in range(1, 6)
            )
        start += length
    return out


def babble(num_samples: int, rate: int, rng: np.random.Generator) -> Samples:
    """Six people talking at once."""
    out = np.zeros(num_samples)
    for _ in range(6):
        tract, pitch = rng.uniform(0.85, 1.15), rng.uniform(0.6, 1.3)
        language = LANGUAGES[rng.integers(len(LANGUAGES))]
        text = random_text(language, round(14 * num_samples / rate) + 20, rng)
        speech = soxr.resample(speak_formants(text, pitch), RATE_HZ * tract, rate)
        out += np.resize(speech, num_samples) / np.sqrt(np.mean(speech**2))
    return out


NOISES: dict[str, Callable[[int, int, np.random.Generator], Samples]] = {
    noise.__name__: noise for noise in (white, pink, brown, hum, wind, clicks, chords, babble)
}
"""Maps names to functions of the number of samples, the sample rate and a generator."""
