"""Pictures over the seconds of an utterance: features and masks one below the other. M mel bands, T frames."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np
from numpy.typing import NDArray

from nest_ssl.drawing.draw import heat_map, line, rect, runs, text, ticks
from nest_ssl.modules import AudioToMelSpectrogramPreprocessor

WIDTH, LEFT, RIGHT = 1060, 142, 14
PLOT = WIDTH - LEFT - RIGHT
MEL_HEIGHT, GAP = 84, 8
BAND_TICKS_HZ = (1000, 3000, 8000, 20000)


def mel_range(mels: Iterable[NDArray[np.float32]]) -> tuple[float, float]:
    """Values between which the colours of heat maps spread: all but the outermost percent."""
    values = np.concatenate([mels_MT.ravel()[::7] for mels_MT in mels])
    low, high = np.percentile(values, (1, 99)) if len(values) else (0.0, 1.0)
    return round(float(low), 1), round(float(high), 1)


def band_centres_hz(preprocessor: AudioToMelSpectrogramPreprocessor, sample_rate: int) -> list[float]:
    """Where the filter of each mel band is highest."""
    filters_MF = preprocessor.featurizer.fb[0]
    hz_per_bin = sample_rate / 2 / (filters_MF.shape[1] - 1)
    return [float(bin_number) * hz_per_bin for bin_number in filters_MF.argmax(dim=1)]


def mel_lane(
    y: float, words: list[str], mels_MT: NDArray[np.float32], colours: tuple[float, float], band_hz: list[float]
) -> list[str]:
    """A heat map with its name, what it is for, and the frequencies of its bands; `colours` as of `mel_range`."""
    place = f'x="{LEFT}" y="{y:.1f}" width="{PLOT}" height="{MEL_HEIGHT}"'
    parts = [f'<image {place} preserveAspectRatio="none" href="{heat_map(mels_MT, *colours)}"/>']
    top = y + MEL_HEIGHT / 2 + 4 - 7.5 * (len(words) - 1)
    for i, word in enumerate(words):
        parts.append(text(LEFT - 54, top + 15 * i, word, "tick" if i else "name", "end"))
    for hz in BAND_TICKS_HZ:
        if hz <= band_hz[-1] * 1.05:
            band = min(int(np.searchsorted(band_hz, hz)), len(band_hz) - 1)
            at = y + MEL_HEIGHT * (1 - (band + 0.5) / len(band_hz))
            parts += [line(LEFT - 4, at, LEFT, at), text(LEFT - 7, at + 4, f"{hz // 1000} kHz", anchor="end")]
    return parts


def mask_lane(y: float, mask_T: NDArray[np.bool_]) -> list[str]:
    frame = PLOT / max(len(mask_T), 1)
    masked = [rect(LEFT + a * frame, y, (b - a) * frame, 9, "masked") for a, b in runs(mask_T)]
    return [rect(LEFT, y, PLOT, 9, "lane"), *masked, text(LEFT - 8, y + 9, "mask", "name", "end")]


def time_axis(end_s: float, y: float, title: str) -> list[str]:
    parts = [line(LEFT, y, LEFT + PLOT, y)]
    for tick in ticks(end_s):
        x = LEFT + tick / end_s * PLOT
        parts += [line(x, y, x, y + 4), text(x, y + 17, f"{tick:g}", anchor="middle")]
    parts.append(text(LEFT + PLOT, y + 34, title, anchor="end"))
    return parts
