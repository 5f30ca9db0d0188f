"""Drawing without a library: PNG images and SVG shapes as text, pictures over the seconds of an utterance, HTML pages.

H rows, W columns, N samples, M mel bands, T frames.
"""

from __future__ import annotations

import base64
import math
import struct
import zlib
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import jinja2
import numpy as np
from numpy.typing import NDArray

from nest_ssl.config.checks import printable
from nest_ssl.files import replace_text

if TYPE_CHECKING:
    from nest_ssl.modules import AudioToMelSpectrogramPreprocessor

NUM_COLOURS = 64
"""Levels of a heat map: more could not be told apart and would make the file larger."""
MAX_COLUMNS = 900
NICE_STEPS = (1, 2, 5)
_ANCHORS = ("#0b0d1f", "#2a1a5e", "#6a1f7b", "#b0307a", "#e6565a", "#fb9a5d", "#fcd98a", "#fdfbe4")
"""Dark to light in equal steps of lightness, so that brighter reads as louder even in grey."""


def palette() -> NDArray[np.uint8]:
    """The colours of heat maps, (NUM_COLOURS, 3)."""
    anchors = np.array([[int(text[i : i + 2], 16) for i in (1, 3, 5)] for text in _ANCHORS])
    at = np.linspace(0, len(anchors) - 1, NUM_COLOURS)
    channels = [np.interp(at, np.arange(len(anchors)), anchors[:, c]) for c in range(3)]
    colours: NDArray[np.uint8] = np.stack(channels, axis=1).round().astype(np.uint8)
    return colours


def heat_map(values_HW: NDArray[np.float32], low: float, high: float) -> str:
    """A picture of the values as a `data:` URL, first row at the bottom; `low` is dark, `high` is light."""
    levels = (pool_columns(values_HW)[::-1] - low) / max(high - low, 1e-9) * (NUM_COLOURS - 1)
    return png_address(np.clip(np.rint(levels), 0, NUM_COLOURS - 1).astype(np.uint8))


def pool_columns(values_HW: NDArray[np.float32]) -> NDArray[np.float32]:
    """Average neighbouring columns until at most MAX_COLUMNS are left."""
    size = -(-values_HW.shape[1] // MAX_COLUMNS)
    if size <= 1:
        return values_HW
    starts = np.arange(0, values_HW.shape[1], size)
    widths = np.diff(starts, append=values_HW.shape[1])
    return (np.add.reduceat(values_HW, starts, axis=1) / widths).astype(np.float32)


def png_address(levels_HW: NDArray[np.uint8]) -> str:
    """A PNG with our palette, as a `data:` URL."""
    height, width = levels_HW.shape
    rows = np.concatenate([np.zeros((height, 1), np.uint8), levels_HW], axis=1)  # filter type 0
    png = b"\x89PNG\r\n\x1a\n" + b"".join(
        struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))
        for kind, data in (
            (b"IHDR", struct.pack(">IIBBBBB", width, height, 8, 3, 0, 0, 0)),
            (b"PLTE", palette().tobytes()),
            (b"IDAT", zlib.compress(rows.tobytes(), 9)),
            (b"IEND", b""),
        )
    )
    return "data:image/png;base64," + base64.b64encode(png).decode()


def colour_scale() -> str:
    """The colours of heat maps side by side, as a `data:` URL."""
    return png_address(np.arange(NUM_COLOURS, dtype=np.uint8)[None])


def envelope(samples_N: NDArray[np.float32], left: float, width: float, middle: float, scale: float) -> str:
    """A closed SVG path between the lowest and highest sample of each column; `scale` pixels for 1.0."""
    num_columns = min(MAX_COLUMNS, len(samples_N))
    starts = np.arange(num_columns) * len(samples_N) // num_columns
    high = middle - scale * np.maximum.reduceat(samples_N, starts)
    low = middle - scale * np.minimum.reduceat(samples_N, starts)
    low = np.maximum(low, high + 0.6)  # silence stays visible as a thin line
    x = left + (np.arange(num_columns) + 0.5) * width / num_columns
    points = [f"{a:.1f} {b:.1f}" for a, b in zip(x, high, strict=True)]
    points += [f"{a:.1f} {b:.1f}" for a, b in zip(x[::-1], low[::-1], strict=True)]
    return f"M{'L'.join(points)}Z"


def runs(flags: NDArray[np.bool_]) -> Iterator[tuple[int, int]]:
    """Start and stop of every run of True."""
    edges = np.flatnonzero(np.diff(flags.astype(np.int8), prepend=0, append=0))
    yield from zip(edges[::2].tolist(), edges[1::2].tolist(), strict=True)


def ticks(end: float, max_ticks: int = 10, start: float = 0.0) -> list[float]:
    """Round numbers from `start` up to `end`."""
    step = round_step((end - start) / max_ticks)
    first, last = math.ceil(start / step - 1e-9), math.floor(end / step + 1e-9)
    return [float(f"{step * i:.9g}") for i in range(first, last + 1)]


def round_step(least: float) -> float:
    """The smallest of 1, 2 and 5 times a power of ten that is at least `least`."""
    power = 10.0 ** np.floor(np.log10(least))
    for step in (*NICE_STEPS, 10):
        if step * power >= least * (1 - 1e-9):
            return float(step * power)
    raise AssertionError("unreachable: 10 * power > least")


def rect(x: float, y: float, width: float, height: float, kind: str, title: str = "") -> str:
    """`kind` is a class of the style sheet; `title` is shown on hover."""
    inner = f"<title>{title}</title>" if title else ""
    return f'<rect class="{kind}" x="{x:.1f}" y="{y:.1f}" width="{width:.1f}" height="{height:.1f}">{inner}</rect>'


def text(x: float, y: float, content: str, kind: str = "tick", anchor: str = "start") -> str:
    return f'<text class="{kind}" x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}">{content}</text>'


def path(shape: str, kind: str) -> str:
    """`shape` is what SVG calls `d`."""
    return f'<path class="{kind}" d="{shape}"/>'


def line(x1: float, y1: float, x2: float, y2: float, kind: str = "axis") -> str:
    return f'<line class="{kind}" x1="{x1:.1f}" y1="{y1:.1f}" x2="{x2:.1f}" y2="{y2:.1f}"/>'


def svg(width: float, height: float, parts: list[str], label: str) -> str:
    inner = "\n".join(parts)
    return f'<svg viewBox="0 0 {width:g} {height:g}" role="img" aria-label="{label}">\n{inner}\n</svg>'


WIDTH, LEFT, RIGHT = 1060, 142, 14
PLOT = WIDTH - LEFT - RIGHT
MEL_HEIGHT, GAP = 84, 8
BAND_TICKS_HZ = (1000, 3000, 8000, 20000)


def mel_range(mels: Iterable[NDArray[np.float32]]) -> tuple[float, float]:
    """The range that the colours of heat maps cover: all values but the outermost percent."""
    values = np.concatenate([mels_MT.ravel()[::7] for mels_MT in mels])
    low, high = np.percentile(values, (1, 99)) if len(values) else (0.0, 1.0)
    return round(float(low), 1), round(float(high), 1)


def band_centres_hz(preprocessor: AudioToMelSpectrogramPreprocessor, sample_rate: int) -> list[float]:
    """The frequency where the filter of each mel band peaks."""
    filters_MF = preprocessor.featurizer.fb[0]
    hz_per_bin = sample_rate / 2 / (filters_MF.shape[1] - 1)
    return [float(bin_number) * hz_per_bin for bin_number in filters_MF.argmax(dim=1)]


def mel_lane(
    y: float, words: list[str], mels_MT: NDArray[np.float32], colours: tuple[float, float], band_hz: list[float]
) -> list[str]:
    """A heat map with its name, its purpose, and the frequencies of its bands; `colours` come from `mel_range`."""
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


# ---- pages ----


def render_template(package: str, template: str, **values: Any) -> str:
    """Render a template of `package` with `values`: the same values give the same bytes.

    `page.html` of this package has the common style: a page is one file that opens without a network.
    """
    environment = jinja2.Environment(
        loader=jinja2.ChoiceLoader([jinja2.PackageLoader(package, ""), jinja2.PackageLoader("nest_ssl.drawing", "")]),
        autoescape=True,  # file names come from outside; only the pictures, which escape their own texts, are safe
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
    )
    return environment.get_template(template).render(**values)


DOCTYPE = "<!doctype html>"


def write_html(page: str, path: Path) -> None:
    """Write a page whole, with control codes of names written out, or say why it cannot be written."""
    try:
        if path.is_file():
            with path.open("rb") as file:
                start = file.read(len(DOCTYPE)).decode(errors="replace").lower()
            if start not in ("", DOCTYPE):
                raise ValueError(f"{path}: is no page, and would be overwritten. Name another file.")
        replace_text(path, printable(page))
    except OSError as error:
        reason = error.strerror or str(error)
        raise ValueError(f"{path}: cannot be written: {reason}. Name another file with --output.") from error
