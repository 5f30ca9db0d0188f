from __future__ import annotations

import pickle
import tracemalloc
from collections import Counter
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from nest_ssl.data.plan import batches as plans
from nest_ssl.data.plan.batches import (
    MAX_SHAPES,
    BatchSpec,
    BucketedPlan,
    Durations,
    FixedSizePlan,
    Plan,
    Shape,
    choose_levels,
    duration_buckets,
    sizes_for_duration,
)
from nest_ssl.data.plan.order import (
    ChainOrder,
    MixtureOrder,
    Order,
    PlainOrder,
    ShardOrder,
    share_out,
)
from tests.fuzz.effort import examples

WORLD_SIZES = st.integers(1, 64)


def fixed(order: Order, batch_size: int, world_size: int, drop_last: bool, layout: str = "interleaved") -> Plan:
    return FixedSizePlan(
        order,
        batch_size=batch_size,
        world_size=world_size,
        drop_last=drop_last,
        seed=1,
        fingerprint="data",
        layout=layout,
    )


def read_epoch(plan: Plan, epoch: int = 0) -> list[list[BatchSpec]]:
    """All batches: a list for each rank."""
    num_batches = plan.num_batches()
    assert num_batches is not None
    return [[plan.batch(epoch, step, rank) for step in range(num_batches)] for rank in range(plan.world_size)]


def counts(batches: list[list[BatchSpec]]) -> Counter[int]:
    return Counter(index for rank in batches for spec in rank for index in spec.indices.tolist())


@examples(60)
@given(
    num=st.integers(1, 600),
    batch_size=st.integers(1, 9),
    world_size=WORLD_SIZES,
    shuffle=st.booleans(),
    layout=st.sampled_from(["interleaved", "contiguous"]),
    epoch=st.integers(0, 3),
)
def test_without_dropping_every_utterance_is_read_and_fewer_than_world_size_are_doubled(
    num: int, batch_size: int, world_size: int, shuffle: bool, layout: str, epoch: int
) -> None:
    plan = fixed(PlainOrder(num, 1, shuffle), batch_size, world_size, False, layout)
    found = counts(read_epoch(plan, epoch))
    assert set(found) == set(range(num))
    padding = sum(found.values()) - num
    assert 0 <= padding < world_size
    if padding <= num:  # the padding is the beginning of the epoch's order
        first = PlainOrder(num, 1, shuffle).indices(epoch)[:padding].tolist()
        assert found == Counter(range(num)) + Counter(first)


@examples(60)
@given(
    num=st.integers(1, 600),
    batch_size=st.integers(1, 9),
    world_size=WORLD_SIZES,
    shuffle=st.booleans(),
    layout=st.sampled_from(["interleaved", "contiguous"]),
)
def test_with_dropping_nothing_is_doubled_and_less_than_one_step_is_lost(
    num: int, batch_size: int, world_size: int, shuffle: bool, layout: str
) -> None:
    batches = read_epoch(fixed(PlainOrder(num, 1, shuffle), batch_size, world_size, True, layout))
    found = counts(batches)
    assert set(found.values()) <= {1}
    assert num - len(found) == num % (world_size * batch_size)
    assert all(len(spec.indices) == batch_size for rank in batches for spec in rank)


@examples(40)
@given(
    sizes=st.lists(st.integers(1, 90), min_size=1, max_size=5),
    batch_size=st.integers(1, 8),
    world_size=WORLD_SIZES,
    drop_last=st.booleans(),
    kind=st.sampled_from(["plain", "shards", "mixture", "in turn", "buckets", "replicated"]),
)
def test_every_rank_has_the_same_number_of_batches_of_the_same_size(
    sizes: list[int], batch_size: int, world_size: int, drop_last: bool, kind: str
) -> None:
    orders = tuple(PlainOrder(n, 1, True, d) for d, n in enumerate(sizes))
    plan: Plan
    if kind == "buckets":
        plan = buckets(sizes, [batch_size + d for d in range(len(sizes))], world_size, drop_last)
    elif kind in ("mixture", "in turn"):
        mixture = MixtureOrder(orders, share_out(sum(sizes), [1.0] * len(sizes)), 1, in_turn=kind == "in turn")
        plan = fixed(mixture, batch_size, world_size, drop_last)
    elif kind == "replicated":
        plan = fixed(ShardOrder(tuple(sizes), 1, True, 10), batch_size, world_size, drop_last, "replicated")
    elif kind == "shards":
        plan = fixed(ShardOrder(tuple(sizes), 1, True, 10), batch_size, world_size, drop_last, "contiguous")
    else:
        plan = fixed(ChainOrder(orders), batch_size, world_size, drop_last)
    shapes = {tuple(len(spec.indices) for spec in rank) for rank in read_epoch(plan)}
    assert len(shapes) == 1
    assert sum(shapes.pop()) == plan.utterances_per_epoch


def buckets(
    sizes: list[int],
    batch_sizes: list[int],
    world_size: int,
    drop_last: bool,
    strategy: str = "synced_randomized",
    durations: Durations | None = None,
) -> BucketedPlan:
    return BucketedPlan(
        PlainOrder(sum(sizes), 1, True),
        np.repeat(np.arange(len(sizes), dtype=np.uint16), sizes),
        batch_sizes=batch_sizes,
        world_size=world_size,
        drop_last=drop_last,
        seed=1,
        fingerprint="data",
        strategy=strategy,
        durations=durations,
    )


@examples(40)
@given(
    sizes=st.lists(st.integers(0, 90), min_size=1, max_size=5).filter(any),
    batch_size=st.integers(1, 8),
    world_size=WORLD_SIZES,
    drop_last=st.booleans(),
    strategy=st.sampled_from(["fixed_order", "synced_randomized", "fully_randomized"]),
)
def test_buckets_lose_and_double_as_little_as_stated_and_never_mix(
    sizes: list[int], batch_size: int, world_size: int, drop_last: bool, strategy: str
) -> None:
    plan = buckets(sizes, [batch_size] * len(sizes), world_size, drop_last, strategy)
    batches = read_epoch(plan)
    found = counts(batches)
    for b, size in enumerate(sizes):
        first = sum(sizes[:b])
        in_bucket = sum(found[i] for i in range(first, first + size))
        lost = size % (world_size * batch_size) if drop_last else 0
        assert size - lost <= in_bucket < size - lost + (1 if drop_last else world_size)
    bucket_of = np.repeat(np.arange(len(sizes)), sizes)
    assert all(len(set(bucket_of[spec.indices])) == 1 for rank in batches for spec in rank)
    if strategy == "synced_randomized":
        assert all(len({bucket_of[spec.indices[0]] for spec in step}) == 1 for step in zip(*batches, strict=True))


def test_replicated_shards_give_every_rank_everything_in_an_order_of_its_own() -> None:
    plan = fixed(ShardOrder((30, 20), 1, True, 8), 4, 3, False, "replicated")
    batches = read_epoch(plan)
    assert all(counts([rank]) == Counter(range(50)) for rank in batches)
    assert len({tuple(batches[rank][0].indices.tolist()) for rank in range(3)}) == 3


def test_scattered_shards_are_each_opened_by_few_ranks() -> None:
    sizes = (100,) * 16
    batches = read_epoch(fixed(ShardOrder(sizes, 1, True), 10, 4, True, "contiguous"))
    opened = [{int(i) // 100 for spec in rank for i in spec.indices} for rank in batches]
    assert [len(shards) for shards in opened] == [4, 4, 4, 4]


@pytest.mark.parametrize("kind", ["fixed", "buckets", "endless"])
def test_any_batch_can_be_computed_without_those_before_it(kind: str) -> None:
    def plan() -> Plan:
        if kind == "buckets":
            return buckets([40, 30, 7], [4, 3, 2], 2, False)
        order = MixtureOrder((PlainOrder(40, 1, True), PlainOrder(9, 1, True, 1)), (40, 8), 1)
        return FixedSizePlan(
            order, batch_size=4, world_size=2, drop_last=False, seed=1, fingerprint="", endless=kind == "endless"
        )

    in_sequence, num = plan(), plan().num_batches() or 20
    sequence = [in_sequence.batch(2, step, 1).indices.tolist() for step in range(num)]
    assert [plan().batch(2, step, 1).indices.tolist() for step in reversed(range(num))] == sequence[::-1]


def test_the_hash_changes_with_seed_data_world_size_and_settings_only() -> None:
    def hash_of(seed: int = 1, data: str = "a", world: int = 2, size: int = 4, shuffle: bool = True) -> str:
        return FixedSizePlan(
            PlainOrder(40, seed, shuffle),
            batch_size=size,
            world_size=world,
            drop_last=True,
            seed=seed,
            fingerprint=data,
        ).hash()

    hashes = [hash_of(), hash_of(2), hash_of(data="b"), hash_of(world=3), hash_of(size=5), hash_of(shuffle=False)]
    assert len(set(hashes)) == len(hashes)
    assert hash_of() == hashes[0]


def test_an_endless_plan_continues_past_its_rounds() -> None:
    order = MixtureOrder((PlainOrder(12, 1, True), PlainOrder(4, 1, True, 1)), (12, 4), 1)
    plan = FixedSizePlan(order, batch_size=4, world_size=2, drop_last=False, seed=1, fingerprint="", endless=True)
    assert plan.num_batches() is None
    drawn = Counter(i for step in range(8) for rank in (0, 1) for i in plan.batch(0, step, rank).indices.tolist())
    assert drawn == Counter(dict.fromkeys(range(16), 4))


def test_spares_are_the_utterances_that_follow_in_the_plan() -> None:
    plan = fixed(PlainOrder(40, 1, True), 4, 2, True)
    order = PlainOrder(40, 1, True).indices(0)
    assert plan.batch(0, 1, 0).spares[:4].tolist() == order[12:16].tolist()
    assert plan.batch(0, 4, 1).spares[:4].tolist() == order[:4].tolist()


def test_duration_buckets_share_the_audio_equally_and_bound_the_batch() -> None:
    durations_s = np.random.default_rng(0).uniform(1, 20, 5000).astype(np.float32)
    bucket_of, longest_s = duration_buckets(durations_s, num_buckets=5)
    shares = np.bincount(bucket_of, weights=durations_s) / durations_s.sum()
    assert np.allclose(shares, 0.2, atol=0.01)
    assert longest_s == sorted(longest_s)
    sizes = sizes_for_duration(longest_s, batch_duration_s=100, quadratic_s=None, max_size=None)
    assert all(size * longest <= 100 < (size + 1) * longest for size, longest in zip(sizes, longest_s, strict=True))
    quadratic = sizes_for_duration(longest_s, batch_duration_s=100, quadratic_s=15, max_size=None)
    counted = [longest + longest**2 / 15 for longest in longest_s]
    assert all(size * length <= 100 < (size + 1) * length for size, length in zip(quadratic, counted, strict=True))
    assert sizes_for_duration(longest_s, batch_duration_s=1, quadratic_s=None, max_size=3) == [1] * 5


@pytest.mark.parametrize(
    ("counts", "sizes", "expected"),
    [
        ([40, 40, 40], [8, 4, 2], [40, 40, 40]),
        ([7, 40, 40], [8, 4, 2], [0, 47, 40]),  # joins the longer one, whose batches are smaller
        ([40, 40, 1], [8, 4, 2], [40, 0, 41]),  # the longest keeps its batch size: its batches fill the memory
        ([7, 3, 1], [8, 4, 2], [0, 0, 11]),
        ([40, 0, 3], [8, 4, 2], [0, 0, 43]),
        ([1, 0, 0], [8, 4, 2], [1, 0, 0]),
        ([5, 5, 5], [8, 4, 2], [0, 10, 5]),
    ],
)
def test_buckets_that_fill_no_step_join_their_neighbours(
    counts: list[int], sizes: list[int], expected: list[int]
) -> None:
    bucket_of = np.repeat(np.arange(3, dtype=np.uint16), counts)
    options: dict[str, Any] = {"world_size": 2, "layout": "interleaved"}
    merged = plans.merge_incomplete(bucket_of, sizes, drop_last=True, **options)
    assert np.bincount(merged, minlength=3).tolist() == expected
    assert merged.dtype == np.uint16
    assert plans.merge_incomplete(bucket_of, sizes, drop_last=False, **options) is bucket_of


def test_given_bins_put_a_duration_on_the_boundary_into_the_lower_bucket() -> None:
    durations_s = np.array([1, 2, 2.5, 9], np.float32)
    bucket_of, longest_s = duration_buckets(durations_s, num_buckets=99, bins_s=[2.0, 5.0, 6.0])
    assert bucket_of.tolist() == [0, 0, 1, 3]
    assert longest_s == [2.0, 2.5, 0.0, 9.0]


def test_ten_million_utterances_cost_four_bytes_each_and_nothing_per_batch() -> None:
    tracemalloc.start()
    plan = fixed(PlainOrder(10_000_000, 1, True), 32, 64, True)
    far = plan.batch(3, 4000, 63)
    held, peak = tracemalloc.get_traced_memory()
    for step in range(200):
        plan.batch(3, step, 0)
    held_after, _ = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert held < 41e6
    assert peak < 50e6
    assert held_after - held < 1e5
    assert len(pickle.dumps(far)) < 1000  # what is sent to a worker


# ---- shapes ----

RATE = 16_000
STRATEGIES = ["fixed_order", "synced_randomized"]


def with_durations(num: int, least_s: float = 0.0) -> Durations:
    """Mixed durations, 2 to 30 s, as many short as long ones on a logarithmic scale."""
    draw = np.random.default_rng(num).uniform(np.log(2), np.log(30), num)
    return Durations(np.exp(draw).astype(np.float32), RATE, least_s)


def shaped_plan(kind: str, num: int, batch_size: int, world_size: int, drop_last: bool) -> tuple[Plan, Durations]:
    durations = with_durations(num)
    shared: dict[str, Any] = {
        "world_size": world_size,
        "drop_last": drop_last,
        "seed": 1,
        "fingerprint": "",
        "durations": durations,
    }
    if kind in STRATEGIES:
        bucket_of, longest_s = duration_buckets(durations.seconds, num_buckets=5)
        sizes = sizes_for_duration(longest_s, batch_duration_s=30.0 * batch_size, quadratic_s=None, max_size=None)
        repeats = [1 + number % 2 for number in range(len(sizes))]
        plain = PlainOrder(num, 1, True)
        plan = BucketedPlan(plain, bucket_of, batch_sizes=sizes, strategy=kind, repeats=repeats, **shared)
        return plan, durations
    halves = PlainOrder(num // 2, 1, True), PlainOrder(num - num // 2, 1, True, 1)
    step_size = batch_size * world_size
    shards = ShardOrder((num // 2, num - num // 2), 1, True, 10)
    orders: dict[str, Order] = {
        "in order": PlainOrder(num, 1, False),
        "shuffled": PlainOrder(num, 1, True),
        "mixture": MixtureOrder(halves, share_out(num, [1.0, 3.0]), 1),
        "endless": MixtureOrder(halves, share_out(-(-num // step_size) * step_size, [1.0, 2.0]), 1),
        "contiguous": shards,
        "replicated": shards,
    }
    layout = kind if orders[kind] is shards else "interleaved"
    is_endless = kind == "endless"
    return FixedSizePlan(orders[kind], batch_size=batch_size, layout=layout, endless=is_endless, **shared), durations


@examples(60)
@given(
    kind=st.sampled_from(
        ["in order", "shuffled", "contiguous", "replicated", "mixture", "endless", *STRATEGIES],
    ),
    num=st.integers(2, 400),
    batch_size=st.integers(1, 9),
    world_size=st.sampled_from([1, 2, 3, 8]),
    drop_last=st.booleans(),
)
def test_all_ranks_have_one_of_few_shapes_in_every_step_and_every_utterance_fits(
    kind: str, num: int, batch_size: int, world_size: int, drop_last: bool
) -> None:
    plan, durations = shaped_plan(kind, num, batch_size, world_size, drop_last)
    shapes = plan.shapes()
    assert len(shapes) <= MAX_SHAPES
    for epoch in (1, 0):
        num_steps = plan.num_batches()
        for step in range(12 if num_steps is None else num_steps):
            specs = [plan.batch(epoch, step, rank) for rank in range(world_size)]
            (shape,) = {Shape(len(spec.indices), spec.num_samples or 0) for spec in specs}
            assert shape in shapes
            assert max(float(durations.seconds[spec.indices].max()) for spec in specs) * RATE < shape.num_samples


def test_shapes_do_not_change_the_plan_nor_its_hash() -> None:
    for kind in ("shuffled", "synced_randomized"):
        plan, _ = shaped_plan(kind, 100, 4, 2, False)
        before = plan.settings(), plan.hash()
        plan.step_shapes = None
        assert (plan.settings(), plan.hash()) == before
        assert plan.batch(0, 0, 0).num_samples is None


def test_a_shape_costs_little_more_padding_than_the_longest_utterance_of_a_step() -> None:
    durations = with_durations(20_000)
    bucket_of, longest_s = duration_buckets(durations.seconds, num_buckets=30)
    sizes = sizes_for_duration(longest_s, batch_duration_s=400, quadratic_s=None, max_size=None)
    few_sizes = [4 if seconds > 15 else 8 for seconds in longest_s]  # buckets of one batch size share their shapes
    order = PlainOrder(20_000, 1, True)
    for batch_sizes in (sizes, few_sizes):
        plan = BucketedPlan(
            order,
            bucket_of,
            batch_sizes=batch_sizes,
            world_size=8,
            drop_last=True,
            seed=1,
            fingerprint="",
            durations=durations,
        )
        specs = [plan.batch(0, step, rank) for step in range(plan.num_batches()) for rank in range(8)]
        padded_s = sum(len(spec.indices) * (spec.num_samples or 0) for spec in specs) / RATE
        own_s = sum(len(spec.indices) * float(durations.seconds[spec.indices].max()) for spec in specs)
        assert own_s < padded_s < 1.015 * own_s


def test_a_rare_long_utterance_does_not_make_every_step_long() -> None:
    lengths = np.array([1000] * 500 + [1100] * 400 + [9000], dtype=np.int64)
    assert choose_levels({8: lengths}, {8: 9000}, 32)[8].tolist() == [1000, 1100, 9000]
    assert choose_levels({8: lengths}, {8: 9000}, 2)[8].tolist() == [1100, 9000]
    assert choose_levels({8: lengths, 2: lengths[-1:]}, {8: 9000, 2: 9000}, 1) == {8: [9000]}, "most audio"


def test_the_last_smaller_steps_of_many_buckets_have_no_shape() -> None:
    sizes = [50 + n for n in range(30)]
    seconds = np.repeat(np.arange(1, 31, dtype=np.float32), sizes)
    plan = buckets(sizes, list(range(2, 32)), 1, False, durations=Durations(seconds, RATE))
    planned = {(len(spec.indices), spec.num_samples) for (spec,) in zip(*read_epoch(plan), strict=True)}
    assert len(plan.shapes()) == 30
    assert {Shape(size, length) for size, length in planned if length is not None} == set(plan.shapes())
    assert any(length is None for _, length in planned)


def test_own_buckets_per_rank_are_planned_for_one_rank_only() -> None:
    durations = Durations(np.full(60, 3.0, np.float32), RATE)
    of_one, of_two = (buckets([30, 30], [2, 3], n, True, "fully_randomized", durations) for n in (1, 2))
    assert of_one.shapes() == [Shape(2, 48_160), Shape(3, 48_160)]
    assert of_two.shapes() == []
    assert of_one.largest_batch == of_two.largest_batch == 3 * 48_160
    assert of_two.batch(0, 0, 1).num_samples is None


def test_too_many_own_orders_are_not_looked_at(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(plans, "MAX_LOOKED_AT", 100)
    plan, durations = shaped_plan("replicated", 60, 4, 2, True)
    assert plan.shapes() == [Shape(4, int(durations.num_samples(durations.seconds.max(keepdims=True))[0]))]


def test_short_audio_counts_with_what_it_is_padded_to_and_rounded_durations_have_room() -> None:
    seconds = np.array([0.3, 2.0, 2.345], np.float32)
    assert Durations(seconds, RATE, 1.0).num_samples(seconds).tolist() == [16_160, 32_160, 37_600]
    assert Durations(seconds, 22_050).num_samples(seconds).tolist() == [6820, 44_220, 51_920]
