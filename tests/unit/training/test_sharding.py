"""Weights shared out over real processes, compared with whole ones."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import distributed

from nest_ssl.config import OptimConfig
from nest_ssl.training import sharding
from nest_ssl.training.optimizers import build_optimizer
from nest_ssl.training.parallel import World, gradient_norm
from tests.helpers import NO_DROPOUT, tiny_model
from tests.ranks import on_ranks


def sharded(world: World) -> dict[str, Any]:
    """Two steps of a sharded model, its whole state, and the same put back into another sharded model."""

    def train(model: Any, optimizer: Any, steps: int) -> None:
        for _ in range(steps):
            optimizer.zero_grad()
            torch.manual_seed(0)
            audio = 0.1 * torch.randn(2, 16_000)
            length = torch.tensor([16_000, 12_000])
            model.masked_loss(audio, length, audio, length).loss.backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()

    def make(seed: int) -> tuple[Any, Any]:
        model = tiny_model({**NO_DROPOUT, "masking.mask_prob": 1.0}, seed=seed).train()
        if world.size > 1:
            sharding.shard(model)
        return model, build_optimizer(model, OptimConfig(name="sgd", lr=0.1, momentum=0.9))

    model, optimizer = make(1)
    train(model, optimizer, 2)
    whole = [sharding.whole_weights(model), sharding.whole_optimizer_state(model, optimizer)]
    if world.size > 1:
        distributed.broadcast_object_list(whole, src=0)  # as every rank reads a checkpoint
    weights, state = whole
    other, other_optimizer = make(2)
    sharding.load_whole_weights(other, weights)
    sharding.load_whole_optimizer_state(other, other_optimizer, state)
    norm = gradient_norm([p for p in model.parameters() if p.requires_grad])
    train(other, other_optimizer, 1)
    return {"norm": float(norm), "weights": weights, "after": sharding.whole_weights(other)}


def test_sharded_weights_train_are_gathered_and_restored_like_whole_ones() -> None:
    alone = sharded(World())
    for one in on_ranks(sharded, 2):
        assert one["norm"] == pytest.approx(alone["norm"], rel=1e-4)
        for kind in ("weights", "after"):
            for name, value in one[kind].items():  # "after" is gathered on rank 0
                torch.testing.assert_close(value, alone[kind][name], rtol=1e-3, atol=1e-5, msg=f"{kind} {name}")
        assert len(one["weights"]) == len(alone["weights"])
