"""What ranks say to each other, on real processes, compared with one rank."""

from __future__ import annotations

import itertools
import re
import socket
import threading
import time
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, distributed, nn

from nest_ssl.config import TrainerConfig
from nest_ssl.modules.batch_norm import SynchronizedBatchNorm, synchronize_batch_norms
from nest_ssl.training import parallel
from nest_ssl.training.parallel import (
    ASK_EVERY_N_STEPS,
    FirstRanksClock,
    Gradients,
    World,
    joined,
)
from nest_ssl.watchdog.rank import RankFacts
from tests.helpers import tiny_model
from tests.ranks import on_ranks

SIZES = ((3, 11), (2, 7))
"""Batch and frames of each rank."""
CHANNELS = 5


def batch_of(rank: int) -> Tensor:
    generator = torch.Generator().manual_seed(rank)
    size, frames = SIZES[rank]
    return torch.randn(size, CHANNELS, frames, generator=generator) * (1 + rank) + 3 * rank


def normalize(norm: nn.BatchNorm1d, batches: list[Tensor]) -> dict[str, Any]:
    """Outputs, gradients of a nonlinear loss, and statistics, of batches that share their statistics."""
    flat = torch.cat([x.transpose(0, 1).reshape(CHANNELS, -1) for x in batches], 1)[None].requires_grad_()
    y = norm(flat)
    (y.square() * torch.linspace(0.5, 2, CHANNELS)[:, None]).sum().backward()
    assert flat.grad is not None
    return {
        "y": y.detach(),
        "x": flat.grad,
        "weight": None if norm.weight.grad is None else norm.weight.grad.clone(),
        "mean": norm.running_mean,
        "var": norm.running_var,
    }


def make_norm(kind: type[nn.BatchNorm1d]) -> nn.BatchNorm1d:
    norm = kind(CHANNELS)
    with torch.no_grad():
        norm.weight.copy_(torch.linspace(0.5, 1.5, CHANNELS))
        norm.bias.copy_(torch.linspace(-1, 1, CHANNELS))
    return norm.train()


def synchronized(world: World) -> dict[str, Any]:
    parent = nn.Sequential(make_norm(nn.BatchNorm1d))
    synchronize_batch_norms(parent)
    norm = parent[0]
    assert isinstance(norm, SynchronizedBatchNorm)
    return normalize(norm, [batch_of(world.rank)])


def test_a_synchronised_batch_norm_is_that_of_the_whole_batch() -> None:
    """Ranks with different numbers of frames; gradients of the parameters add up over the ranks."""
    whole = normalize(make_norm(nn.BatchNorm1d), [batch_of(0), batch_of(1)])
    ranks = on_ranks(synchronized, 2)
    for name in ("y", "x"):
        torch.testing.assert_close(torch.cat([one[name] for one in ranks], 2), whole[name], rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(ranks[0]["weight"] + ranks[1]["weight"], whole["weight"], rtol=1e-5, atol=1e-5)
    for one in ranks:
        torch.testing.assert_close(one["mean"], whole["mean"])
        torch.testing.assert_close(one["var"], whole["var"])


def test_synchronising_changes_neither_names_nor_values() -> None:
    model = tiny_model()
    before = {name: value.clone() for name, value in model.state_dict().items()}
    assert synchronize_batch_norms(model) == len(model.encoder.layers)
    assert synchronize_batch_norms(model) == 0
    after = model.state_dict()
    assert list(after) == list(before)
    assert all(torch.equal(after[name], value) for name, value in before.items())
    model.eval()
    norm = next(module for module in model.modules() if isinstance(module, SynchronizedBatchNorm))
    norm(torch.randn(2, norm.num_features, 4))  # without a process group


def averaged(world: World, bucket_bytes: int, adds: bool, travels_as: torch.dtype) -> dict[str, Any]:
    """Two backward passes; rank 1 does not use the second parameter."""
    parallel.BUCKET_BYTES = bucket_bytes
    parameters = [nn.Parameter(torch.zeros(size)) for size in (3, 5, 2)]
    gradients = Gradients(parameters, world, adds=adds, travels_as=travels_as)
    gradients.begin()
    for exchanges in (False, True):
        used = [p.sum() * (world.rank + n) for n, p in enumerate(parameters) if (n, world.rank) != (1, 1)]
        gradients.backward(torch.stack(used).sum() * gradients.share, {p: p for p in parameters}, exchanges=exchanges)
    gradients.wait()
    return {
        "found": [parameter.grad.tolist() for parameter in parameters if parameter.grad is not None],
        "norm": float(gradients.norm()),
        "num_buckets": gradients.num_buckets,
        "num_collectives": gradients.num_collectives,
        "num_hooks": sum(len(p._post_accumulate_grad_hooks or ()) for p in parameters),
    }


WAYS = list(itertools.product((1, 1000), (True, False), (torch.float32, torch.bfloat16)))


def averaged_all_ways(world: World) -> list[dict[str, Any]]:
    return [averaged(world, *way) for way in WAYS]


def test_gradients_are_averaged_in_buckets_of_any_size() -> None:
    for rank in on_ranks(averaged_all_ways, 2):
        for (bucket_bytes, adds, _), one in zip(WAYS, rank, strict=True):
            times = 2 if adds else 1
            assert one["found"] == [[0.5 * times] * 3, [0.5 * times] * 5, [2.5 * times] * 2]
            assert one["norm"] == pytest.approx(times * (0.25 * 3 + 0.25 * 5 + 6.25 * 2) ** 0.5)
            assert one["num_buckets"] == one["num_collectives"] == (3 if bucket_bytes == 1 else 1)
            assert one["num_hooks"] == 0  # the model may be used by others between two steps


def test_a_gradient_that_is_not_finite_leaves_nothing_behind() -> None:
    """Clipping by a norm that is not a number reaches the places between two parameters too."""
    parameters = [nn.Parameter(torch.zeros(3)), nn.Parameter(torch.zeros(2))]
    gradients = Gradients(parameters, World())
    for factor in (float("nan"), 2.0):
        loss = torch.stack([p.sum() * factor for p in parameters]).sum()
        gradients.backward(loss, {p: p for p in parameters}, exchanges=True)
        norm = gradients.norm()
        gradients.clip(1.0, norm)
    assert float(norm) == pytest.approx(2 * 5**0.5)
    assert float(gradients.norm()) == pytest.approx(1.0, abs=1e-5)


def voted(world: World) -> tuple[list[str], list[int]]:
    first, second = world.counter(), world.counter()
    assert first is not None
    assert second is not None
    if world.rank == 1:  # the other has nothing to add
        first("bad", 2)
        first("bad", 1)
        second("bad", 5)
    votes = [*world.votes(f"rank {world.rank}"), *replace(world).votes("same")]
    return votes, [first("bad", 0), second("bad", 0), second("good", 0)]


def test_all_ranks_hear_what_each_has_said_and_counted() -> None:
    assert on_ranks(voted, 2) == [(["rank 0", "rank 1", "same", "same"], [3, 5, 0])] * 2
    assert World().votes("yes") == ["yes"]
    assert World().counter() is None


def copied(world: World) -> list[Any]:
    mixed = [torch.full((3,), float(world.rank)), torch.tensor(world.rank), torch.full((2, 2), 1.0 + world.rank)]
    world.copy_from_first(mixed)
    return [tensor.tolist() for tensor in mixed]


def test_every_rank_gets_the_first_ranks_values() -> None:
    assert on_ranks(copied, 2) == [[[0.0] * 3, 0, [[1.0, 1.0]] * 2]] * 2


def clock(world: World, first_step: int) -> dict[int, int]:
    """Rank 0 asks from step 33 until it is heard; the others never ask."""
    clock = FirstRanksClock(world)
    answers, heard = {}, False
    for step in range(first_step, first_step + 60):
        answers[step] = clock.answer(step, int(world.is_first and step >= 33 and not heard))
        heard = heard or answers[step] != 0
    return {step: answer for step, answer in answers.items() if answer}


@pytest.mark.parametrize("first_step", [1, 27])
def test_all_ranks_hear_the_first_ranks_clock_once_at_the_same_step(first_step: int) -> None:
    first, second = on_ranks(clock, 2, first_step)
    assert first == second == {40 + ASK_EVERY_N_STEPS: 1}


def test_one_rank_hears_its_own_clock_at_once() -> None:
    assert FirstRanksClock(World()).answer(7, 3) == 3


@pytest.mark.parametrize("launcher", ["nest-ssl", "environment"])
def test_a_port_that_was_taken_after_it_was_checked_is_an_error_that_names_the_variable(
    launcher: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    with socket.create_server(("", 0)) as taken:
        facts = RankFacts(0, 0, 2, 2, 0, launcher, "127.0.0.1", taken.getsockname()[1])
        for name, value in facts.variables().items():
            monkeypatch.setenv(name, value)
        message = f"port {facts.master_port}: another program has taken it. Set MASTER_PORT to a free port"
        with pytest.raises(ValueError, match=re.escape(message)), joined(TrainerConfig(accelerator="cpu"), facts):
            pass


def test_the_rank_with_the_store_leaves_last(monkeypatch: pytest.MonkeyPatch) -> None:
    store = distributed.HashStore()  # type: ignore[attr-defined]
    monkeypatch.setattr(parallel, "group_store", lambda: store)
    left: list[int] = []

    def leave(rank: int) -> None:
        World(rank, rank, 3).leave()
        left.append(rank)

    first = threading.Thread(target=leave, args=(0,))
    first.start()
    leave(2)
    time.sleep(0.3)
    assert left == [2]
    leave(1)
    first.join(timeout=10)
    assert sorted(left) == [0, 1, 2]  # rank 0 may be told before this thread goes on


def test_the_first_rank_does_not_wait_for_ever_for_one_that_has_died(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(parallel, "group_store", distributed.HashStore)  # type: ignore[attr-defined]
    monkeypatch.setattr(parallel, "LEAVE_S", 0.1)
    World(0, 0, 2).leave()
