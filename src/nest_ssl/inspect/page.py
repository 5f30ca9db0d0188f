"""The page of `nest-ssl inspect`: one HTML file with everything in it, which opens without a network."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

from markupsafe import Markup

from nest_ssl.drawing import page
from nest_ssl.drawing.draw import colour_scale
from nest_ssl.inspect.examples import ExampleBatch
from nest_ssl.inspect.inspect import Inspection
from nest_ssl.inspect.manifest import ManifestFacts, duration_histogram
from nest_ssl.inspect.pictures import batch_picture, colour_range, histogram_picture, utterance_picture

DRAWN_PER_BATCH = 3
"""Utterances of a batch that are drawn in detail; all are in its overview."""


def write_page(inspection: Inspection, path: Path) -> None:
    page.write(render_page(inspection), path)


def render_page(inspection: Inspection) -> str:
    """The page as text: the same for the same inspection, to the byte."""
    dataset, augmentor = inspection.dataset, inspection.dataset.batch_augmentor
    rows = [row for rows in inspection.batchings.values() for row in rows]
    limits_s = {"min_duration": dataset.min_duration, "max_duration": dataset.max_duration}
    return page.render(
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
    """Most frequent first, equal ones by name."""
    ordered = sorted(counts.items(), key=lambda item: (-item[1], item[0]))
    return [(name, count, count / counts.total()) for name, count in ordered]
