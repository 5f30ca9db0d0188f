"""The places for masked tokens. That the objective is the model's own loss is tested in test_model.py."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from nest_ssl.objective import TakePlaces, gather_places
from tests.helpers import tiny_model

SEPARATE: dict[str, Any] = {"masking.allow_overlap": False}


@pytest.mark.parametrize(
    ("overrides", "batch", "num_tokens", "most_places"),
    [
        ({}, 32, 202, 0.6),
        ({}, 64, 7, 1.0),
        ({"loss.mask_threshold": 0.0}, 400, 750, 0.45),
        ({"encoder.subsampling_factor": 2}, 1000, 20, 1.0),
        ({"mask_position": "post_conv"}, 1000, 6, 1.0),
        ({"mask_position": "post_conv"}, 64, 200, 0.3),
        ({**SEPARATE, "masking.mask_prob": 0.05}, 512, 8, 0.8),
        ({**SEPARATE, "masking.mask_prob": 0.4}, 64, 100, 0.6),
        ({**SEPARATE, "masking.mask_prob": 0.4, "loss.mask_threshold": 0.0}, 64, 100, 0.6),
    ],
)
def test_the_places_for_masked_tokens_are_always_enough(
    overrides: dict[str, Any], batch: int, num_tokens: int, most_places: float
) -> None:
    model = tiny_model(overrides)
    generator = torch.Generator().manual_seed(0)
    num_frames = num_tokens * model.loss.cfg.combine_time_steps
    places = model.num_places(batch, num_tokens)
    assert places <= most_places * batch * num_tokens
    most = 0
    for _ in range(20):
        mask = model.mask_processor.draw(torch.full((batch,), num_frames), num_frames, generator=generator)
        most = max(most, int(model.loss.masked_tokens(mask).sum()))
    assert 0 < most <= places


def test_a_small_batch_has_a_place_for_every_token() -> None:
    assert tiny_model().num_places(1, 12) == 12


def test_gathering_keeps_order_and_never_overflows() -> None:
    selected = torch.tensor([False, True, True, False, True])
    places, filled = gather_places(selected, 4)
    assert places[filled].tolist() == [1, 2, 4]
    assert filled.tolist() == [True, True, True, False]
    places, filled = gather_places(selected, 2)
    assert places.tolist() == [1, 2]
    assert filled.all()


def test_gradients_of_taken_places_are_those_of_an_index() -> None:
    x = torch.randn(6, 3, requires_grad=True)
    places, filled = gather_places(torch.tensor([False, True, True, False, True, False]), 4)
    weight = torch.randn(4, 3) * filled[:, None]  # empty places do not count
    (expected,) = torch.autograd.grad((x[places] * weight).sum(), x)
    taken: torch.Tensor = TakePlaces.apply(x, places, filled)  # type: ignore[no-untyped-call]
    assert torch.equal(taken, x[places])
    (found,) = torch.autograd.grad((taken * weight).sum(), x)
    assert torch.equal(found, expected)
