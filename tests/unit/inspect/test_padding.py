from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from nest_ssl.config import DatasetConfig
from nest_ssl.data import build_loader
from nest_ssl.inspect import padding as inspect_padding
from nest_ssl.inspect.padding import Batching, compare, fill, sorted_batches
from tests.fuzz.effort import examples
from tests.unit.inspect.conftest import Speech

durations = st.lists(st.floats(0.1, 60.0), min_size=1, max_size=40)


def train_ds(speech: Speech, *overrides: str) -> DatasetConfig:
    dataset = speech.config(overrides).train_ds
    assert dataset is not None
    return dataset


def by_name(rows: list[Batching]) -> dict[str, Batching]:
    return {row.name.split(" (")[0]: row for row in rows}


def test_a_small_example_by_hand() -> None:
    # [4, 2] pads 2 s of 8, [3, 3, 1] pads 2 s of 9: 4 of 17.
    filling = fill([np.array([4.0, 2.0]), np.array([3.0, 3.0, 1.0])])
    assert (filling.num_batches, filling.num_utterances) == (2, 5)
    assert (filling.audio_s, filling.padded_s, filling.largest_s) == (13.0, 17.0, 9.0)
    assert filling.padding_share == pytest.approx(4 / 17)
    assert filling.mean_s == 8.5


def test_sorted_batches_by_hand() -> None:
    batches = [batch.tolist() for batch in sorted_batches(np.array([1.0, 5.0, 2.0, 4.0, 3.0]), 2)]
    assert batches == [[5.0], [4.0, 3.0], [2.0, 1.0]]  # 5 + 8 + 4, less than with the single one second or last
    batches = [batch.tolist() for batch in sorted_batches(np.array([1.0, 3.0, 3.0]), 2)]
    assert batches == [[3.0, 3.0], [1.0]]


def test_no_batches_have_no_padding() -> None:
    assert fill([]).padding_share == 0.0


@examples(100)
@given(durations, st.integers(1, 8), st.randoms())
def test_no_other_order_pads_less_than_the_sorted_one(lengths: list[float], size: int, random: object) -> None:
    values = np.array(lengths)
    best = fill(sorted_batches(values, size)).padded_s
    shuffled = list(lengths)
    random.shuffle(shuffled)  # type: ignore[attr-defined]
    # Any division into complete batches and an incomplete one is a shuffle with the incomplete one last.
    other = fill(np.array(shuffled[i : i + size]) for i in range(0, len(shuffled), size))
    assert best <= other.padded_s + 1e-9
    assert other.audio_s == pytest.approx(values.sum())
    assert 0 <= other.padding_share < 1


@examples(100)
@given(durations)
def test_batches_of_one_pad_nothing(lengths: list[float]) -> None:
    assert fill(sorted_batches(np.array(lengths), 1)).padding_share == pytest.approx(0, abs=1e-12)


def test_every_way_places_every_utterance_without_drop_last(speech: Speech) -> None:
    rows = compare(train_ds(speech, "model.train_ds.drop_last=false"), 4)
    assert [row.problem for row in rows] == [""] * 5
    for row in rows:
        assert row.filling.num_utterances == len(speech.durations_s)
        assert row.filling.audio_s == pytest.approx(sum(speech.durations_s), rel=1e-5)
        assert row.left_out_share == 0.0
    found = by_name(rows)
    assert (
        found["lower bound"].filling.padded_s <= found["buckets"].filling.padded_s < found["shuffled"].filling.padded_s
    )
    assert found["buckets, by duration"].filling.largest_s <= found["shuffled"].filling.largest_s + 1e-3


def test_drop_last_shows_as_left_out(speech: Speech) -> None:
    shuffled = by_name(compare(train_ds(speech), 4))["shuffled"]
    assert shuffled.num_batches == 3
    assert shuffled.left_out_share == pytest.approx(2 / 14)


def test_short_utterances_count_with_the_length_that_the_loader_pads_them_to(speech: Speech) -> None:
    dataset = replace(train_ds(speech, "model.train_ds.drop_last=false"), min_audio_len_secs=5.0)
    filling = by_name(compare(dataset, 4))["shuffled"].filling
    assert filling.audio_s == pytest.approx(5.0 * 14)
    assert filling.padding_share == pytest.approx(0.0)


def test_large_data_is_extrapolated_from_a_part(speech: Speech, monkeypatch: pytest.MonkeyPatch) -> None:
    whole = by_name(compare(train_ds(speech), 2))["shuffled"]
    monkeypatch.setattr(inspect_padding, "MAX_UTTERANCES", 6)
    part = by_name(compare(train_ds(speech), 2))["shuffled"]
    assert whole.complete
    assert not part.complete
    assert part.filling.num_utterances == 6
    assert part.left_out_share is None
    assert part.num_batches == whole.num_batches == 7


def test_a_way_that_the_settings_do_not_allow_says_why(speech: Speech) -> None:
    rows = by_name(compare(train_ds(speech, "model.train_ds.num_buckets=30"), 4))
    assert "30 buckets (num_buckets) from 14 utterances" in rows["lhotse, by duration"].problem
    rows = by_name(compare(train_ds(speech, "model.train_ds.is_concat=true"), 4))
    assert "is_concat" in rows["buckets"].problem


def test_the_keys_of_a_row_give_its_batches_in_training(speech: Speech) -> None:
    rows = by_name(compare(train_ds(speech), 4, seed=3))
    for name in ("shuffled", "buckets", "buckets, by duration"):
        keys = [f"model.train_ds.{key}" for key in rows[name].keys.split()]
        dataset = train_ds(speech, "model.train_ds.batch_size=2", "model.train_ds.shuffle=true", *keys)
        assert len(build_loader(dataset, seed=3)) == rows[name].num_batches, name
