from __future__ import annotations

import os

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from nest_ssl.data import AudioNoiseDataset
from nest_ssl.drawing.draw import round_step
from nest_ssl.inspect.manifest import ManifestFacts, choose, duration_histogram, look_at
from tests.fuzz.effort import examples
from tests.unit.inspect.conftest import RATE, Speech


def facts_of(path: object, max_files: int = 1000) -> ManifestFacts:
    return look_at([AudioNoiseDataset(manifest_filepath=str(path), sample_rate=RATE)], max_files=max_files)


def test_hours_rates_and_formats_are_those_of_the_files(speech: Speech) -> None:
    facts = facts_of(speech.manifest)
    assert facts.num_utterances == facts.num_stated == facts.num_looked_at == 14
    assert not facts.is_sample
    assert facts.hours == pytest.approx(sum(speech.durations_s) / 3600)
    assert facts.rates == {8000: 2, 16000: 12}
    assert facts.formats == {"FLAC/PCM_16": 2, "WAV/PCM_16": 12}
    assert facts.channels == {1: 14}
    assert facts.unusable == []
    assert facts.percentiles_s((0, 100)) == pytest.approx([min(speech.durations_s), max(speech.durations_s)])


def test_two_datasets_count_as_one(speech: Speech) -> None:
    paths = (speech.manifest, speech.noise)
    sources = [AudioNoiseDataset(manifest_filepath=str(path), sample_rate=RATE) for path in paths]
    facts = look_at(sources, max_files=1000)
    assert (facts.num_utterances, facts.num_looked_at) == (16, 16)
    assert facts.name == "speech.jsonl, noise.jsonl"
    assert facts.hours == pytest.approx((sum(speech.durations_s) + 6) / 3600)


def test_a_fixed_sample_of_many_files_is_examined(speech: Speech) -> None:
    facts = facts_of(speech.manifest, max_files=5)
    assert facts.is_sample
    assert facts.rates.total() == facts.num_looked_at == 5
    assert facts.rates == facts_of(speech.manifest, max_files=5).rates


@pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="no FIFOs on this system")
def test_unusable_files_are_named_with_the_reason(speech: Speech) -> None:
    (speech.folder / "text.wav").write_text("no audio")
    os.mkfifo(speech.folder / "pipe.wav")
    lines = [("text.wav", 1.5), ("missing.wav", 1.5), ("pipe.wav", 1.5), ("1.wav", 30.0), ("2.wav", 1.0)]
    path = speech.other("bad.jsonl", [{"audio_filepath": name, "duration": s} for name, s in lines])
    reasons = {os.path.basename(bad.name): bad.reason for bad in facts_of(path).unusable}
    assert set(reasons) == {"text.wav", "missing.wav", "pipe.wav", "1.wav"}
    assert reasons["missing.wav"] == "No such file or directory"
    assert reasons["pipe.wav"] == "not a regular file"
    assert "where the manifest states 30.00 s" in reasons["1.wav"]


def test_durations_that_the_manifest_does_not_state_come_from_the_headers(speech: Speech) -> None:
    lines: list[dict[str, object]] = [
        {"audio_filepath": "1.wav"},
        {"audio_filepath": "1.wav", "offset": 0.5},
        {"audio_filepath": "gone.wav"},
    ]
    facts = facts_of(speech.other("unstated.jsonl", lines))
    length_s = speech.durations_s[1]
    assert facts.num_stated == 0
    assert facts.durations_s[:2].tolist() == pytest.approx([length_s, length_s - 0.5])
    assert np.isnan(facts.durations_s[2])
    assert facts.hours_are_estimated
    assert facts.hours == pytest.approx(3 * (length_s - 0.25) / 3600)


def test_the_filters_are_counted_as_training_applies_them(speech: Speech) -> None:
    facts = facts_of(speech.manifest)
    limit_s = speech.durations_s[3]
    assert len(facts.between(None, limit_s)) == sum(s <= limit_s for s in speech.durations_s)
    assert len(facts.between(limit_s, None)) == sum(s >= limit_s for s in speech.durations_s)


@examples(100)
@given(st.integers(0, 200), st.integers(1, 50), st.integers(0, 5))
def test_a_sample_has_the_requested_size_and_no_duplicates(num_all: int, num_wanted: int, seed: int) -> None:
    chosen = choose(num_all, num_wanted, seed).tolist()
    assert len(chosen) == min(num_all, num_wanted)
    assert chosen == sorted(set(chosen))
    assert all(0 <= index < num_all for index in chosen)


@examples(100)
@given(st.lists(st.floats(0.0, 10_000.0), min_size=1, max_size=300))
def test_a_histogram_counts_every_utterance_in_its_bin(lengths: list[float]) -> None:
    values = np.array(lengths)
    histogram = duration_histogram(values)
    assert sum(histogram.counts) == len(values)
    assert len(histogram.edges_s) == len(histogram.counts) + 1 <= 26
    for i, count in enumerate(histogram.counts[:-1]):
        low_s, high_s = histogram.edges_s[i : i + 2]
        inside = np.count_nonzero((values >= low_s + 1e-6) & (values < high_s - 1e-6))
        assert inside <= count <= np.count_nonzero((values >= low_s - 1e-6) & (values <= high_s + 1e-6))
    assert histogram.open_end == (values.max() >= histogram.edges_s[-1])


def test_one_very_long_file_does_not_flatten_the_histogram() -> None:
    histogram = duration_histogram(np.array([*np.linspace(1, 20, 999), 7200.0]))
    assert histogram.edges_s[-1] <= 30
    assert histogram.open_end


@pytest.mark.parametrize(("least", "step"), [(0.03, 0.05), (0.1, 0.1), (1.1, 2.0), (7.0, 10.0), (240.0, 500.0)])
def test_steps_are_round(least: float, step: float) -> None:
    assert round_step(least) == pytest.approx(step)
