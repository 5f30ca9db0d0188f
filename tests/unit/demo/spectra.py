"""Measuring pitch and spectra."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt


def period_hz(samples: npt.NDArray[np.float64], rate: int = 16_000) -> float:
    """Pitch of the middle of a steady sound, by autocorrelation."""
    middle = samples[len(samples) // 2 :][:1600]
    correlation = np.correlate(middle, middle, mode="full")[len(middle) - 1 :]
    shortest = rate // 450
    return rate / (shortest + int(np.argmax(correlation[shortest : rate // 60])))


def energy_share(samples: npt.NDArray[np.float64], low_hz: float, high_hz: float, rate: int = 16_000) -> float:
    power = np.abs(np.fft.rfft(samples)) ** 2
    hz = np.fft.rfftfreq(len(samples), 1 / rate)
    return float(power[(hz >= low_hz) & (hz < high_hz)].sum() / power.sum())
