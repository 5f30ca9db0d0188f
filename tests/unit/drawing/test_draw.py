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
from tests.fuzz.effort import examples


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


@examples(100)
@given(arrays.arrays(np.bool_, st.integers(0, 60)))
def test_runs_cover_what_is_true_and_nothing_else(flags: NDArray[np.bool_]) -> None:
    covered = np.zeros_like(flags)
    for start, stop in runs(flags):
        assert not covered[start:stop].any()
        covered[start:stop] = True
    assert np.array_equal(covered, flags)


@examples(100)
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


@examples(100)
@given(st.floats(1e-3, 1e5))
def test_ticks_are_few_and_inside(end: float) -> None:
    found = ticks(end)
    assert found[0] == 0
    assert 2 <= len(found) <= 11
    assert found[-1] <= end * (1 + 1e-6)
