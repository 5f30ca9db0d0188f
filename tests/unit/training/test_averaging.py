from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

from nest_ssl.training.averaging import move_toward


class Normed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear, self.norm = nn.Linear(3, 4), nn.BatchNorm1d(4)
        self.codebooks = nn.Parameter(torch.randn(7, dtype=torch.float64), requires_grad=False)


@pytest.fixture
def pair() -> tuple[Normed, Normed]:
    """An average, and the model some steps later."""
    average = Normed()
    model = copy.deepcopy(average)
    for parameter in model.parameters():
        if parameter.requires_grad:
            parameter.data += torch.randn_like(parameter)
    model.norm(torch.randn(5, 4))
    return average, model


def test_an_average_moves_and_what_is_equal_stays_to_the_bit(pair: tuple[Normed, Normed]) -> None:
    average, model = pair
    before = copy.deepcopy(average.state_dict())
    move_toward(average, model, 0.1)
    for name, value in average.state_dict().items():
        current = model.state_dict()[name]
        if name == "norm.num_batches_tracked":
            assert value == current == 1
        else:
            torch.testing.assert_close(value, before[name] + 0.1 * (current - before[name]), msg=name)
    assert torch.equal(average.codebooks, before["codebooks"])


def test_the_whole_way_is_a_copy(pair: tuple[Normed, Normed]) -> None:
    average, model = pair
    move_toward(average, model, 1.0)
    for name, value in average.state_dict().items():
        assert torch.equal(value, model.state_dict()[name]), name


def test_statistics_that_are_not_finite_leave_the_average_as_it_was(pair: tuple[Normed, Normed]) -> None:
    average, model = pair
    model.norm.get_buffer("running_mean").copy_(torch.tensor([1.0, torch.nan, torch.inf, -torch.inf]))
    move_toward(average, model, 0.5)
    assert average.norm.get_buffer("running_mean").tolist() == [0.5, 0.0, 0.0, 0.0]
