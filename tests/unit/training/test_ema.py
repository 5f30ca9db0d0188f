from __future__ import annotations

import copy

import pytest
import torch
from torch import Tensor, nn

from nest_ssl.config import EmaConfig
from nest_ssl.training.ema import Average, move_toward


class Normed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear, self.norm = nn.Linear(3, 4), nn.BatchNorm1d(4)
        self.codebooks = nn.Parameter(torch.randn(7, dtype=torch.float64), requires_grad=False)


@pytest.fixture
def model() -> Normed:
    return Normed()


def train(model: Normed) -> None:
    for parameter in model.parameters():
        if parameter.requires_grad:
            parameter.data += torch.randn_like(parameter)
    model.norm(torch.randn(5, 4))


def state(model: nn.Module) -> dict[str, Tensor]:
    return copy.deepcopy(model.state_dict())


def test_an_average_moves_and_equal_values_stay_bit_identical(model: Normed) -> None:
    average, before = state(model), state(model)
    train(model)
    move_toward(average, model, 0.1)
    for name, value in average.items():
        current = model.state_dict()[name]
        if name == "norm.num_batches_tracked":
            assert value == current == 1
        else:
            torch.testing.assert_close(value, before[name] + 0.1 * (current - before[name]), msg=name)
    assert torch.equal(average["codebooks"], before["codebooks"])


def test_moving_all_the_way_copies_the_weights(model: Normed) -> None:
    average = state(model)
    train(model)
    move_toward(average, model, 1.0)
    for name, value in average.items():
        assert torch.equal(value, model.state_dict()[name]), name


def test_statistics_that_are_not_finite_leave_the_average_as_it_was(model: Normed) -> None:
    average = state(model)
    model.norm.get_buffer("running_mean").copy_(torch.tensor([1.0, torch.nan, torch.inf, -torch.inf]))
    move_toward(average, model, 0.5)
    assert average["norm.running_mean"].tolist() == [0.5, 0.0, 0.0, 0.0]


def test_the_model_has_the_averaged_weights_inside_and_its_own_afterwards(model: Normed) -> None:
    average = Average(EmaConfig(enable=True, decay=0.5), model)
    average.update(1)
    train(model)
    average.update(2)
    own, averaged = state(model), {name: value.clone() for name, value in average.weights.items()}
    with average.in_the_model():
        assert all(torch.equal(value, averaged[name]) for name, value in model.state_dict().items())
    assert all(torch.equal(value, own[name]) for name, value in model.state_dict().items())
    assert all(torch.equal(value, averaged[name]) for name, value in average.weights.items())


def test_an_update_reads_nothing_back_from_the_device(model: Normed, monkeypatch: pytest.MonkeyPatch) -> None:
    """On a GPU every such read is a wait."""
    average = Average(EmaConfig(enable=True), model)
    train(model)

    def refuse(*_: object) -> None:
        raise AssertionError("a value was read")

    for name in ("item", "__bool__", "__int__", "__float__", "tolist"):
        monkeypatch.setattr(Tensor, name, refuse)
    average.update(1)
    average.update(2)
