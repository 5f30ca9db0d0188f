"""The order of an epoch: every utterance, shuffled, sharded, mixed."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from nest_ssl.data.plan.order import MixtureOrder, PlainOrder, ShardOrder, share_out, temperature_weights
from tests.fuzz.effort import examples


def test_an_utterance_moves_by_at_most_shuffle_n_places_in_its_shards() -> None:
    order = ShardOrder((1000,), 1, True, shuffle_n=50)
    moved = np.abs(order.indices(0).astype(int) - np.arange(1000))
    assert 10 < moved.max() <= 50


def test_epochs_differ_when_shuffled_and_repeat_the_manifest_otherwise() -> None:
    shuffled = [PlainOrder(50, 1, True).indices(epoch).tolist() for epoch in (0, 1, 0)]
    assert shuffled[0] != shuffled[1]
    assert shuffled[0] == shuffled[2]
    assert PlainOrder(50, 1, False).indices(7).tolist() == list(range(50))


@examples(100)
@given(
    sizes=st.lists(st.integers(1, 40), min_size=1, max_size=4),
    scale=st.floats(0.3, 3),
    temperature=st.floats(0.5, 10),
    in_turn=st.booleans(),
)
def test_a_mixture_uses_the_utterances_of_a_dataset_equally_often_over_epochs(
    sizes: list[int], scale: float, temperature: float, in_turn: bool
) -> None:
    total = max(int(sum(sizes) * scale), len(sizes))
    orders = tuple(PlainOrder(n, 5, True, d) for d, n in enumerate(sizes))
    mixture = MixtureOrder(orders, share_out(total, temperature_weights(sizes, temperature)), 5, in_turn)
    drawn = np.concatenate([mixture.indices(epoch) for epoch in range(4)])
    assert len(drawn) == 4 * total
    times, first = np.bincount(drawn, minlength=sum(sizes)), 0
    for d, size in enumerate(sizes):
        of_dataset = times[first : first + size]
        assert of_dataset.max() - of_dataset.min() <= 1
        assert of_dataset.sum() == 4 * mixture.counts[d]
        first += size


def test_temperature_one_keeps_proportions_and_a_high_one_makes_datasets_equal() -> None:
    assert share_out(110, temperature_weights([100, 10], 1.0)) == (100, 10)
    assert share_out(110, temperature_weights([100, 10], 1e6)) == (55, 55)
    assert share_out(10, [1e-9, 1.0]) == (1, 9)


def test_taking_datasets_in_turn_alternates_between_them() -> None:
    mixture = MixtureOrder((PlainOrder(10, 1, True), PlainOrder(10, 1, True, 1)), (6, 6), 1, in_turn=True)
    assert (mixture.indices(0) // 10).tolist() == [0, 1] * 6
