"""The page of `nest-ssl inspect`: one HTML file that contains everything and opens without a network.

B batch, N samples, M mel bands, T frames.
"""

from __future__ import annotations

from collections import Counter
from html import escape
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from markupsafe import Markup
from numpy.typing import NDArray

from nest_ssl.drawing.draw import (
    GAP,
    LEFT,
    MEL_HEIGHT,
    PLOT,
    WIDTH,
    colour_scale,
    envelope,
    line,
    mask_lane,
    mel_lane,
    mel_range,
    path,
    rect,
    render_template,
    runs,
    svg,
    text,
    ticks,
    time_axis,
    write_html,
)
from nest_ssl.inspect.manifest import Histogram, ManifestFacts, duration_histogram

if TYPE_CHECKING:
    from nest_ssl.inspect.examples import ExampleBatch, ExampleUtterance
    from nest_ssl.inspect.inspect import Inspection

DRAWN_PER_BATCH = 3
"""Utterances per batch that are drawn in detail; the overview shows all of them."""


def write_page(inspection: Inspection, path: Path) -> None:
    write_html(render_page(inspection), path)


def render_page(inspection: Inspection) -> str:
    """The page as text: the same inspection gives the same bytes."""
    dataset, augmentor = inspection.dataset, inspection.dataset.batch_augmentor
    rows = [row for rows in inspection.batchings.values() for row in rows]
    limits_s = {"min_duration": dataset.min_duration, "max_duration": dataset.max_duration}
    return render_template(
        "nest_ssl.inspect",
        "inspect.html",
        data=inspection,
        manifests=[
            _manifest(title, facts, limits_s if facts is inspection.speech else {})
            for title, facts in (("Speech", inspection.speech), ("Noise", inspection.noise))
            if facts is not None
        ],
        most_padding=max((row.filling.padding_share for row in rows), default=0.0) or 1.0,
        normalized=inspection.normalized,
        keeps_noise=inspection.noise is not None and augmentor is not None and augmentor.keep_unselected_noise,
        examples=[_example(batch) for batch in inspection.examples],
        colours=colour_scale(),
    )


def _manifest(title: str, facts: ManifestFacts, limits_s: dict[str, float | None]) -> dict[str, Any]:
    known_s = facts.known_s
    return {
        "title": title,
        "facts": facts,
        "percentiles": list(
            zip(
                ("shortest", "5th percentile", "median", "95th percentile", "longest"),
                facts.percentiles_s((0, 5, 50, 95, 100)),
                strict=False,
            )
        ),
        "histogram": Markup(histogram_picture(duration_histogram(known_s), limits_s)) if len(known_s) else None,
        "counters": [
            ("sample rate", _shares(Counter({f"{rate:,} Hz": n for rate, n in facts.rates.items()}))),
            ("format", _shares(facts.formats)),
            ("channels", _shares(Counter({str(number): n for number, n in facts.channels.items()}))),
        ],
    }


def _example(batch: ExampleBatch) -> dict[str, Any]:
    low, high = colour_range(batch)
    drawn = [
        {"number": number, "utterance": utterance, "picture": Markup(utterance_picture(utterance, batch))}
        for number, utterance in enumerate(batch.utterances[:DRAWN_PER_BATCH], start=1)
    ]
    return {"batch": batch, "overview": Markup(batch_picture(batch)), "drawn": drawn, "low": low, "high": high}


def _shares(counts: Counter[str]) -> list[tuple[str, int, float]]:
    """Most frequent first, ties by name."""
    ordered = sorted(counts.items(), key=lambda item: (-item[1], item[0]))
    return [(name, count, count / counts.total()) for name, count in ordered]


WAVE_HEIGHT = 56
MAX_ROWS = 64
"""Utterances per batch in the overview."""


def histogram_picture(histogram: Histogram, limits_s: dict[str, float | None]) -> str:
    """Utterances by duration, with a dashed line at each limit within the range."""
    height, top = 190, 14
    end_s, most = histogram.edges_s[-1], max(histogram.counts)
    x_of, y_of = PLOT / end_s, height / most
    parts = []
    for tick in ticks(most, 4):
        y = top + height - tick * y_of
        parts += [line(LEFT, y, LEFT + PLOT, y, "grid"), text(LEFT - 8, y + 4, f"{tick:,.6g}", anchor="end")]
    for i, count in enumerate(histogram.counts):
        low_s, high_s = histogram.edges_s[i : i + 2]
        last = i + 1 == len(histogram.counts) and histogram.open_end
        title = f"{low_s:g} s and longer: {count:,}" if last else f"{low_s:g} to {high_s:g} s: {count:,}"
        box = (LEFT + low_s * x_of + 1, top + height - count * y_of, (high_s - low_s) * x_of - 2, count * y_of)
        parts.append(rect(*box, "open-bar" if last else "bar", title))
    parts += time_axis(end_s, top + height, "duration in seconds")
    parts.append(text(LEFT - 8, top + height + 34, "utterances ↑", "tick", "end"))
    for name, limit_s in limits_s.items():
        if limit_s is not None and 0 < limit_s < end_s:
            x, side, anchor = LEFT + limit_s * x_of, 5, "start"
            if limit_s > end_s / 2:
                side, anchor = -5, "end"
            parts.append(line(x, top, x, top + height, "limit"))
            parts.append(text(x + side, top + 11, f"{name} {limit_s:g} s", "limit-name", anchor))
    return svg(WIDTH, top + height + 42, parts, "Histogram of durations")


def batch_picture(batch: ExampleBatch) -> str:
    """Every utterance of the batch as a bar: audio, masked frames, what was added, and padding."""
    rows = batch.utterances[:MAX_ROWS]
    step, bar, top = 20, 15, 4
    row_s = batch.num_samples / batch.sample_rate
    x_of = PLOT / row_s
    parts = []
    for number, utterance in enumerate(rows):
        y = top + number * step
        audio_s = len(utterance.audio_N) / batch.sample_rate
        parts.append(text(LEFT - 8, y + 12, f"{number + 1}: {audio_s:.1f} s", anchor="end"))
        parts.append(rect(LEFT, y, audio_s * x_of, bar, "audio", escape(_short(utterance.name))))
        if audio_s < row_s:
            parts.append(rect(LEFT + audio_s * x_of, y, (row_s - audio_s) * x_of, bar, "padding"))
        frame = audio_s * x_of / max(len(utterance.mask_T), 1)
        parts += [rect(LEFT + a * frame, y, (b - a) * frame, bar, "masked") for a, b in runs(utterance.mask_T)]
        added = _filled(utterance.added_N, batch.sample_rate)
        cell = audio_s * x_of / max(len(added), 1)
        parts += [rect(LEFT + a * cell, y + bar - 4, (b - a) * cell, 4, "added") for a, b in runs(added)]
    parts += time_axis(row_s, top + len(rows) * step, "seconds")
    return svg(WIDTH, top + len(rows) * step + 40, parts, f"Batch {batch.number}")


def utterance_picture(utterance: ExampleUtterance, batch: ExampleBatch) -> str:
    """Clean, added and noisy waveforms and their features on one time axis."""
    end_s = len(utterance.audio_N) / batch.sample_rate
    peak = max(float(np.abs(x).max()) for x in (utterance.audio_N, utterance.added_N, utterance.noisy_N))
    colours = colour_range(batch)
    parts: list[str] = []
    y = 4.0
    waves = (("clean", utterance.audio_N), ("added", utterance.added_N), ("noisy", utterance.noisy_N))
    for name, samples_N in waves:
        parts += _wave_lane(y, name, samples_N, peak)
        y += WAVE_HEIGHT + GAP
    lanes = (
        (["clean mel", "source of", "targets"], utterance.clean_MT),
        (["noisy mel"], utterance.noisy_MT),
        (["masked mel", "encoder", "input"], utterance.masked_MT),
    )
    for words, mels_MT in lanes:
        if mels_MT is not None:
            parts += mel_lane(y, words, mels_MT, colours, batch.band_hz)
            y += MEL_HEIGHT + GAP
    parts += mask_lane(y, utterance.mask_T)
    y += 12
    parts += time_axis(end_s, y, "seconds")
    return svg(WIDTH, y + 40, parts, escape(f"Utterance {_short(utterance.name)}"))


def colour_range(batch: ExampleBatch) -> tuple[float, float]:
    """The range that the colours of a batch's heat maps cover."""
    return mel_range(mels_MT for u in batch.utterances for mels_MT in (u.clean_MT, u.noisy_MT))


def _wave_lane(y: float, name: str, samples_N: NDArray[np.float32], peak: float) -> list[str]:
    middle = y + WAVE_HEIGHT / 2
    shape = envelope(samples_N, LEFT, PLOT, middle, WAVE_HEIGHT / 2 / max(peak, 1e-9))
    return [
        rect(LEFT, y, PLOT, WAVE_HEIGHT, "lane"),
        path(shape, f"wave-{name}"),
        text(LEFT - 8, middle - 2, name, "name", "end"),
        text(LEFT - 8, middle + 13, f"± {peak:.2g}", anchor="end"),
    ]


def _filled(samples_N: NDArray[np.float32], sample_rate: int) -> NDArray[np.bool_]:
    """Which pieces of 10 ms contain anything but zeros."""
    size = max(1, sample_rate // 100)
    return np.maximum.reduceat(np.abs(samples_N), np.arange(0, len(samples_N), size)) > 0


def _short(name: str) -> str:
    return Path(name).name
