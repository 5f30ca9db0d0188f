from __future__ import annotations

import copy
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch
from torch import nn

from nest_ssl.training.nonfinite import SkipNonFinite, check_finite_weights, skip_gradient


class Training:
    """Steps with a given gradient, skipped or not."""

    def __init__(self, name: str, **options: Any) -> None:
        self.model = nn.Linear(3, 2)
        make = {"adamw": torch.optim.AdamW, "adam": torch.optim.Adam, "sgd": torch.optim.SGD}[name]
        self.optimizer: torch.optim.Optimizer = make(self.model.parameters(), lr=0.1, **options)

    def step(self, value: float, *, skip: bool) -> None:
        for parameter in self.model.parameters():
            parameter.grad = torch.full_like(parameter, value)
        skip_gradient(self.optimizer, torch.tensor(skip))
        self.optimizer.step()


def test_a_step_of_several_batches_is_named_by_its_number(caplog: pytest.LogCaptureFixture) -> None:
    """Five batches an epoch, two to a step: the third step of an epoch has one."""
    callback = SkipNonFinite(log_every_n_steps=50)
    trainer: Any = SimpleNamespace(global_step=0, global_rank=0)
    module: Any = nn.Linear(1, 1)
    callback.on_train_start(trainer, module)
    for place, within in enumerate([True, False, True, False, False] * 2):
        trainer.global_step += not within
        trainer.fit_loop = SimpleNamespace(epoch_loop=mock.Mock(_should_accumulate=mock.Mock(return_value=within)))
        loss = torch.tensor(float("nan") if place in (4, 5, 9) else 1.0)
        callback.on_train_batch_end(
            trainer, module, {"loss": loss}, SimpleNamespace(audio_filepaths=[f"{place}.wav"]), place
        )
    callback.on_train_end(trainer, module)
    named = [(record.args[1], record.args[2]) for record in caplog.records]  # type: ignore[index]
    assert named == [(2, "4.wav"), (3, "5.wav"), (5, "9.wav")]


@pytest.mark.parametrize("fused", [True, False])
def test_an_optimizer_goes_on_from_one_that_was_fused_or_not(fused: bool) -> None:
    before, after = Training("adamw", fused=fused), Training("adamw", fused=not fused)
    before.step(1.0, skip=False)
    after.model.load_state_dict(before.model.state_dict())
    after.optimizer.load_state_dict(copy.deepcopy(before.optimizer.state_dict()))
    for training in (before, after):
        training.step(float("nan"), skip=True)
        training.step(2.0, skip=False)
    assert torch.equal(before.model.weight, after.model.weight)


@pytest.mark.parametrize("fused", [True, False])
def test_the_first_momentum_after_a_skipped_step_is_the_gradient(fused: bool) -> None:
    training = Training("sgd", fused=fused, momentum=0.9)
    training.step(float("nan"), skip=True)
    weight = training.model.weight.detach().clone()
    training.step(1.0, skip=False)
    torch.testing.assert_close(training.model.weight, weight - 0.1)


@pytest.mark.parametrize("fused", [True, False])
@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_a_skipped_step_changes_neither_weights_nor_state(fused: bool, bad: float) -> None:
    training = Training("adamw", fused=fused)
    model, optimizer, step = training.model, training.optimizer, training.step
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
