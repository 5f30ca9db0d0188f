from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import nn

from nest_ssl.config.composing import compose
from nest_ssl.data import random_batch
from nest_ssl.model import EncDecDenoiseMaskedTokenPredModel
from nest_ssl.training.parallel import World
from nest_ssl.training.step import REMEMBERED, LookBack, TrainStep, hash_of, skip_gradient
from nest_ssl.training.trainer import build_step
from nest_ssl.training.watching import Watch
from tests.helpers import TINY


class Training:
    """Steps with a given gradient, skipped or not."""

    def __init__(self, name: str, **options: Any) -> None:
        self.model = nn.Linear(3, 2)
        make = {"adamw": torch.optim.AdamW, "adam": torch.optim.Adam, "sgd": torch.optim.SGD}[name]
        self.optimizer: torch.optim.Optimizer = make(self.model.parameters(), lr=0.1, **options)

    def step(self, value: float, *, skip: bool) -> None:
        for parameter in self.model.parameters():
            parameter.grad = torch.full_like(parameter, value)
        skip_gradient(self.optimizer, torch.tensor(float(skip)))
        self.optimizer.step()


class Losses:
    """Stands for the results of steps: the losses of batches and the steps skipped in a row."""

    def __init__(self) -> None:
        self.losses, self.in_a_row, self.num_batches = torch.zeros(REMEMBERED), torch.tensor(0), 0

    def add(self, loss: float) -> None:
        self.losses[self.num_batches % REMEMBERED] = loss
        self.num_batches += 1


def looking_back(model: nn.Module, rank: int = 0) -> tuple[LookBack, Losses]:
    losses: Any = Losses()
    return LookBack(model, losses, rank), losses


def test_files_of_a_batch_that_is_not_finite_are_named_with_their_step(caplog: pytest.LogCaptureFixture) -> None:
    look_back, losses = looking_back(nn.Linear(1, 1), rank=3)
    for step, loss in ((2, 1.0), (2, float("nan")), (3, 1.0), (4, float("inf"))):
        losses.add(loss)
        look_back.note(step, [f"{step}-{loss}.wav"])
    look_back.look(5)
    named = [record.args for record in caplog.records]
    assert named == [(3, 2, "2-nan.wav"), (3, 4, "4-inf.wav")]
    look_back.look(6)
    assert len(caplog.records) == 2  # each is named once


def test_no_loss_is_forgotten_however_rarely_somebody_looks(caplog: pytest.LogCaptureFixture) -> None:
    look_back, losses = looking_back(nn.Linear(1, 1))
    for step in range(2 * REMEMBERED + 5):
        losses.add(float("nan") if step in (3, REMEMBERED + 7, 2 * REMEMBERED + 1) else 1.0)
        look_back.note(step, [f"{step}.wav"])
    look_back.look(0)
    steps = [3, REMEMBERED + 7, 2 * REMEMBERED + 1]
    assert [record.args for record in caplog.records] == [(0, step, f"{step}.wav") for step in steps]


def test_statistics_that_a_batch_has_spoilt_are_repaired() -> None:
    model = nn.BatchNorm1d(2)
    look_back, losses = looking_back(model)
    for step, (loss, mean) in enumerate(((1.0, 3.0), (float("nan"), float("nan")))):
        model.get_buffer("running_mean").fill_(mean)
        losses.add(loss)
        look_back.note(step, [])
        look_back.look(step + 1)
    assert model.get_buffer("running_mean").tolist() == [3.0, 3.0]


def test_a_run_that_does_not_recover_ends() -> None:
    look_back, losses = looking_back(nn.Linear(1, 1))
    losses.add(float("nan"))
    look_back.note(40, [])
    losses.in_a_row.fill_(20)
    with pytest.raises(RuntimeError, match="step 40: no finite gradient for 20 steps in a row"):
        look_back.look(40)


@pytest.mark.parametrize("fused", [True, False])
def test_an_optimizer_resumes_from_one_that_was_fused_or_not(fused: bool) -> None:
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


def test_a_hash_sees_one_bit_and_the_order() -> None:
    tensors = [torch.arange(6.0).view(2, 3), torch.ones(2)]
    before = hash_of(tensors)
    assert hash_of([tensor.clone() for tensor in tensors]) == before
    tensors[0][1, 2] = torch.nextafter(tensors[0][1, 2], torch.tensor(9.0))
    assert hash_of(tensors) != before
    assert hash_of([torch.tensor([1.0, 2.0])]) != hash_of([torch.tensor([2.0, 1.0])])


def tiny_step(device: torch.device, accumulate: int) -> TrainStep:
    torch.manual_seed(0)
    cfg = compose(
        overrides=[
            *(f"model.{key}={value}" for key, value in TINY.items()),
            f"trainer.accumulate_grad_batches={accumulate}",
            "trainer.gradient_clip_val=1",
            "model.optim.sched.warmup_steps=2",
        ]
    )
    model = EncDecDenoiseMaskedTokenPredModel(cfg.model).to(device).train()
    return build_step(cfg, model, World(device=device), Watch(), 10)


@pytest.mark.parametrize(
    "device",
    [
        "cpu",
        pytest.param(
            "cuda", marks=[pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA GPU")]
        ),
    ],
)
@pytest.mark.parametrize("accumulate", [1, 2])
def test_warming_up_changes_no_number_of_the_steps_that_follow(accumulate: int, device: str) -> None:
    losses, kept = [], []
    for warms_up in (False, True):
        step = tiny_step(torch.device(device), accumulate)
        if warms_up:
            for _ in range(2):
                step.warm_up(random_batch(4, 16_000))
            assert step.engine.num_graphs == (accumulate if device == "cuda" else 0)
            assert float(step.results.loss) == 0.0
            assert step.results.num_batches == 0
        for number in range(6):
            torch.manual_seed(number)
            batch = step.to_device(random_batch(3, 9_000 + number))
            updates = (number + 1) % accumulate == 0
            step(batch, begins=number % accumulate == 0, updates=updates, step=number // accumulate)
            losses.append(step.results.loss.clone())
        kept.append([*step.model.state_dict().values(), *step.means.tensors(), *step.results.tensors()])
        step.release()
    assert torch.equal(torch.stack(losses[:6]), torch.stack(losses[6:]))
    assert all(torch.equal(x, y) for x, y in zip(*kept, strict=True))
