from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

from nest_ssl.training.nonfinite import check_finite_weights, skip_gradient


@pytest.mark.parametrize("fused", [True, False])
@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_a_skipped_step_changes_neither_weights_nor_state(fused: bool, bad: float) -> None:
    model = nn.Linear(3, 2)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1, fused=fused)

    def step(value: float, skip: bool) -> None:
        for parameter in model.parameters():
            parameter.grad = torch.full_like(parameter, value)
        skip_gradient(optimizer, torch.tensor(skip))
        optimizer.step()

    step(1.0, skip=False)
    weights, state = copy.deepcopy(model.state_dict()), copy.deepcopy(optimizer.state_dict()["state"])
    step(bad, skip=True)
    for name, value in model.state_dict().items():
        assert torch.equal(value, weights[name])
    for place, values in optimizer.state_dict()["state"].items():
        for name, value in values.items():
            assert torch.equal(value, state[place][name]), name
    step(1.0, skip=False)
    assert not torch.equal(model.weight, weights["weight"])


def test_weights_that_are_not_finite_are_not_to_be_written() -> None:
    check_finite_weights({"a": torch.ones(3), "steps": torch.tensor(4)}, "x.ckpt")
    with pytest.raises(RuntimeError, match=r"x\.ckpt: not written, since 1 of 2 tensors are not finite \(b, …\)"):
        check_finite_weights({"a": torch.ones(3), "b": torch.tensor([1.0, float("nan")])}, "x.ckpt")
