from __future__ import annotations

import base64
import io
import re

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as arrays
from numpy.typing import NDArray

from nest_ssl.drawing.draw import MAX_COLUMNS, NUM_COLOURS, envelope, heat_map, pool_columns, runs, ticks
from nest_ssl.inspect.inspect import Inspection, InspectOptions, inspect_data
from nest_ssl.inspect.page import render_page
from tests.unit.drawing.page_parser import Page, assert_needs_no_network
from tests.unit.inspect.conftest import Speech


def inspect(speech: Speech, *overrides: str, num_examples: int = 1) -> Inspection:
    return inspect_data(speech.config(overrides), InspectOptions(batch_sizes=[4], num_examples=num_examples))


def test_the_page_holds_all_its_pictures_and_needs_no_network(speech: Speech) -> None:
    text = render_page(inspect(speech))
    page = assert_needs_no_network(text)
    assert len(page.addresses) == 1 + 3 * 3  # the colours of the legend; three features of three utterances


def test_the_same_data_gives_the_same_page_to_the_byte(speech: Speech) -> None:
    assert render_page(inspect(speech)) == render_page(inspect(speech))


def test_the_page_says_what_was_found(speech: Speech) -> None:
    found = inspect(speech)
    text = render_page(found)
    assert "speech.jsonl" in text
    assert f"{found.speech.hours:,.2f} h" in text
    assert "FLAC/PCM_16" in text
    assert "8,000 Hz" in text
    for row in found.batchings[4]:
        assert f"<b>{100 * row.filling.padding_share:.1f} %</b>" in text
    for utterance in found.examples[0].utterances[:3]:
        assert utterance.name in text
        assert utterance.ratio_db is not None
        assert f"{utterance.ratio_db:+.1f} dB" in text


def test_names_of_files_cannot_put_tags_into_the_page(speech: Speech) -> None:
    evil = "<script>alert(1)</script>"
    (speech.folder / "<b>x.wav").write_bytes((speech.folder / "1.wav").read_bytes())
    lines = [{"audio_filepath": name, "duration": 1.2} for name in ("<b>x.wav", f"{evil}.wav", "2.wav", "3.wav")]
    config = speech.config(manifest=speech.other("evil.jsonl", lines))
    text = render_page(inspect_data(config, InspectOptions(batch_sizes=[4])))
    assert evil not in text
    assert "<b>x.wav" not in text
    assert "&lt;b&gt;x.wav" in text


def test_a_page_without_examples_and_without_durations_is_whole(speech: Speech) -> None:
    lines = [{"audio_filepath": f"gone_{i}.wav"} for i in range(3)]
    config = speech.config(manifest=speech.other("gone.jsonl", lines))
    text = render_page(inspect_data(config, InspectOptions(batch_sizes=[4])))
    assert Page(text).open == []
    assert "No duration is known" in text


def test_features_of_a_picture_have_their_colours() -> None:
    image = pytest.importorskip("PIL.Image")
    values = np.array([[0.0, 1.0, 2.0], [9.0, -9.0, 1.0]], dtype=np.float32)
    address = heat_map(values, 0.0, 2.0)
    picture = image.open(io.BytesIO(base64.b64decode(address.partition(",")[2])))
    levels = np.array(picture)
    assert levels.tolist() == [[NUM_COLOURS - 1, 0, 32], [0, 32, NUM_COLOURS - 1]]  # the first row is at the bottom
    lightness = np.array(picture.convert("RGB").convert("L"))
    assert lightness[0, 0] > 240
    assert lightness[0, 1] < 20


@given(arrays.arrays(np.bool_, st.integers(0, 60)))
def test_runs_cover_what_is_true_and_nothing_else(flags: NDArray[np.bool_]) -> None:
    covered = np.zeros_like(flags)
    for start, stop in runs(flags):
        assert not covered[start:stop].any()
        covered[start:stop] = True
    assert np.array_equal(covered, flags)


@given(st.integers(1, 5000))
def test_pictures_of_any_length_have_a_bounded_width(num_frames: int) -> None:
    ramp = np.arange(num_frames, dtype=np.float32)[None]
    pooled = pool_columns(ramp)
    assert 1 <= pooled.shape[1] <= MAX_COLUMNS
    assert (np.diff(pooled) > 0).all()
    path = envelope(ramp[0] / num_frames, 10, 100, 50, 20)
    assert len(re.findall("[ML]", path)) == 2 * min(num_frames, MAX_COLUMNS)


def test_an_envelope_reaches_the_highest_and_lowest_sample() -> None:
    samples = np.zeros(4000, np.float32)
    samples[1234], samples[3456] = 1.0, -0.5
    heights = [float(point.split()[1]) for point in envelope(samples, 0, 100, 50, 20)[1:-1].split("L")]
    assert (min(heights), max(heights)) == (30.0, 60.0)


@given(st.floats(1e-3, 1e5))
def test_ticks_are_few_and_inside(end: float) -> None:
    found = ticks(end)
    assert found[0] == 0
    assert 2 <= len(found) <= 11
    assert found[-1] <= end * (1 + 1e-6)
