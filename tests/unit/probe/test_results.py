from __future__ import annotations

import xml.etree.ElementTree as ElementTree
from pathlib import Path

import numpy as np
import pytest

from nest_ssl.probe.results import confusion, difference, score, write_confusion, write_layer_weights


def test_an_interval_has_the_width_that_theory_gives() -> None:
    correct = np.arange(400) % 4 != 0
    found = score(correct, seed=0)
    half = 1.96 * np.sqrt(0.75 * 0.25 / 400)
    assert found.accuracy == 0.75
    assert found.low == pytest.approx(0.75 - half, abs=0.006)
    assert found.high == pytest.approx(0.75 + half, abs=0.006)


def test_a_paired_difference_is_sharper_than_two_intervals() -> None:
    rng = np.random.default_rng(0)
    base = rng.random(500) < 0.7
    better = base | (rng.random(500) < 0.1)
    gap = difference(better, base, seed=0)
    assert gap.low > 0
    assert score(base, 0).high > score(better, 0).low  # the intervals of the two overlap
    assert difference(base, base, seed=0) == difference(better, better, seed=1)


def test_confusion_counts_true_classes_by_answers() -> None:
    counts = confusion(np.array([0, 0, 1, 2]), np.array([0, 1, 1, 2]), 3)
    np.testing.assert_array_equal(counts, [[1, 1, 0], [0, 1, 0], [0, 0, 1]])


def test_pictures_are_well_formed_and_name_what_they_show(tmp_path: Path) -> None:
    write_layer_weights([0.1, 0.7, 0.2], [0, 5, 11], tmp_path / "weights.svg")
    write_confusion(
        np.array([[3, 1], [0, 4]]), ["<low>\ufffe", "a\x1b[2Jvery long name of a class"], tmp_path / "confusion.svg"
    )
    for name, words in (
        ("weights.svg", "layer 5: 0.700"),
        ("confusion.svg", r"<low>\ufffe predicted as a\x1b[2Jvery lon…: 1"),
    ):
        root = ElementTree.parse(tmp_path / name).getroot()
        assert root.tag == "{http://www.w3.org/2000/svg}svg"
        assert words in "\n".join(root.itertext())
