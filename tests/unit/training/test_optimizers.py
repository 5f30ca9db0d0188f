"""Optimizers by name, and their parameter groups."""

from __future__ import annotations

import inspect
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from nest_ssl.config import OptimConfig, ScheduleConfig
from nest_ssl.config.optim import OPTIMIZERS
from nest_ssl.nemo_file import nemo_config
from nest_ssl.plugins import optimizers
from nest_ssl.training.optimizers import OPTIMIZER_CLASSES, build_optimizer, check_resumable, parameter_groups
from nest_ssl.training.sharding import load_optimizer_state
from tests.helpers import tiny_model

VALUES: dict[str, Any] = {
    "betas": [0.8, 0.9],
    "etas": [0.4, 1.3],
    "step_sizes": [1e-5, 10.0],
    "amsgrad": True,
    "nesterov": True,
    "centered": True,
}


def test_the_tables_of_names_agree() -> None:
    assert OPTIMIZER_CLASSES.keys() == OPTIMIZERS.keys()


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_every_option_of_the_table_reaches_the_optimizer(name: str) -> None:
    options = OPTIMIZERS[name] - {"fused", "dampening"}  # dampening contradicts nesterov
    given = {key: VALUES.get(key, 0.25) for key in options}
    assert options <= inspect.signature(OPTIMIZER_CLASSES[name]).parameters.keys()
    group = build_optimizer(nn.Linear(2, 2), OptimConfig(name=name, lr=0.5, **given)).param_groups[0]
    assert group["lr"] == 0.5
    for key, value in given.items():
        assert group[key] == (tuple(value) if isinstance(value, list) else value), key


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_an_option_that_is_not_given_has_torchs_default(name: str) -> None:
    model = nn.Linear(2, 2)
    ours = build_optimizer(model, OptimConfig(name=name, lr=0.1)).defaults
    torchs = OPTIMIZER_CLASSES[name](model.parameters(), lr=0.1).defaults
    assert {**ours, "fused": None} == {**torchs, "fused": None}


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_every_optimizer_lowers_a_loss(name: str) -> None:
    torch.manual_seed(0)
    model, x = nn.Linear(4, 1), torch.randn(16, 4)
    optimizer = build_optimizer(model, OptimConfig(name=name, lr=0.01))
    losses = []
    for _ in range(20):
        loss = (model(x) - x.sum(1, keepdim=True)).square().mean()
        losses.append(loss.item())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    assert losses[-1] < losses[0]


def test_one_group_without_frozen_parameters_by_default() -> None:
    model = tiny_model()
    (group,) = parameter_groups(model)
    assert {id(p) for p in group["params"]} == {id(p) for p in model.parameters() if p.requires_grad}
    assert len(group["params"]) < len(list(model.parameters()))  # the quantizer is frozen


def test_norms_and_biases_are_left_out_of_the_decay_on_request() -> None:
    model = tiny_model()
    optimizer = build_optimizer(model, OptimConfig(weight_decay=0.1, no_decay_on_norms_and_biases=True))
    names = {id(p): name for name, p in model.named_parameters()}
    decayed, exempt = ({names[id(p)] for p in group["params"]} for group in optimizer.param_groups)
    assert [group["weight_decay"] for group in optimizer.param_groups] == [0.1, 0.0]
    assert decayed | exempt == {name for name, p in model.named_parameters() if p.requires_grad}
    assert not decayed & exempt
    assert not [name for name in decayed if "norm" in name or "bias" in name]
    assert "encoder.layers.0.norm_out.weight" in exempt
    assert "encoder.layers.0.conv.batch_norm.weight" in exempt
    assert "encoder.layers.0.self_attn.pos_bias_u" in exempt
    assert "encoder.layers.0.self_attn.linear_q.weight" in decayed


def test_weight_decay_moves_only_what_it_should() -> None:
    model = nn.Sequential(nn.Linear(3, 3), nn.LayerNorm(3))
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    cfg = OptimConfig(lr=0.1, weight_decay=0.5, no_decay_on_norms_and_biases=True)
    optimizer = build_optimizer(model, cfg)
    for p in model.parameters():
        p.grad = torch.zeros_like(p)
    optimizer.step()
    moved = {name for name, p in model.named_parameters() if not torch.equal(p, before[name])}
    assert moved == {"0.weight"}


def test_a_completely_frozen_model_is_refused() -> None:
    with pytest.raises(ValueError, match="no trainable parameter"):
        build_optimizer(nn.Linear(2, 2).requires_grad_(False), OptimConfig())


def on_gpu() -> Any:
    needs_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA GPU")
    return pytest.param("cuda", marks=[pytest.mark.gpu, needs_gpu])


@pytest.mark.parametrize("device", ["cpu", on_gpu()])
def test_adamw_is_fused_by_default(device: str) -> None:
    model = nn.Linear(2, 2).to(device)
    assert build_optimizer(model, OptimConfig()).defaults["fused"] is True
    assert build_optimizer(model, OptimConfig(fused=False)).defaults["fused"] is False
    assert build_optimizer(model, OptimConfig(), loss_is_scaled=True).defaults["fused"] is False
    assert build_optimizer(model.to("meta"), OptimConfig()).defaults["fused"] is False


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"name": "adamx"}, "there is no 'adamx'. Did you mean 'adam"),
        ({"name": "AdamW"}, "Did you mean 'adamw'"),
        ({"name": "novograd"}, "exists in NeMo but not in nest-ssl; use one of adamw, adam, sgd"),
        ({"name": "adamw", "momentum": 0.9}, "adamw does not take it \\(sgd, rmsprop would\\)"),
        ({"betas": [0.9]}, "is not a pair of numbers"),
        ({"betas": [0.9, 1.0]}, "not a probability below 1"),
        ({"weight_decay": -1.0}, "optim.weight_decay: -1.0 is less than 0"),
        ({"name": "sgd", "nesterov": True}, "needs a momentum"),
        ({"extra": {"beta3": 1}}, "optim.beta3: adamw does not take it. Only registered names take extra"),
        ({"name": "rprop", "no_decay_on_norms_and_biases": True}, "rprop has no weight decay"),
    ],
)
def test_invalid_settings_are_refused(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        OptimConfig(**settings)


def test_a_saved_model_holds_only_keys_that_nemos_optimizer_takes() -> None:
    model = tiny_model()
    model.cfg.optim = OptimConfig(
        betas=[0.9, 0.98],
        fused=False,
        no_decay_on_norms_and_biases=True,
        sched=ScheduleConfig(d_model=32, warmup_steps=5),
    )
    section = nemo_config(model.cfg, "EncDecDenoiseMaskedTokenPredModel")["optim"]
    schedule = section.pop("sched")
    assert section == {"name": "adamw", "lr": 1e-3, "betas": [0.9, 0.98]}
    assert schedule == {"name": "NoamAnnealing", "d_model": 32, "warmup_steps": 5, "min_lr": 0.0}


# ---- resuming ----


def stepped(cfg: OptimConfig) -> dict[str, Any]:
    """The state of an optimizer after one step, as a checkpoint holds it."""
    model = nn.Linear(3, 3)
    optimizer = build_optimizer(model, cfg)
    model(torch.ones(1, 3)).sum().backward()
    optimizer.step()
    return {"hyper_parameters": {"cfg": {"optim": {"name": cfg.name}}}, "optimizer_states": [optimizer.state_dict()]}


def test_a_resumed_optimizer_has_the_settings_of_the_command_and_the_moments_of_the_checkpoint() -> None:
    checkpoint = stepped(OptimConfig(lr=0.1, weight_decay=0.5, betas=[0.9, 0.999], eps=1e-8))
    resumed = build_optimizer(nn.Linear(3, 3), OptimConfig(lr=0.2, weight_decay=0.0, betas=[0.8, 0.98], eps=1e-6))
    load_optimizer_state(resumed, checkpoint["optimizer_states"][0])
    (group,) = resumed.param_groups
    assert (group["lr"], group["weight_decay"], group["betas"], group["eps"]) == (0.2, 0.0, (0.8, 0.98), 1e-6)
    saved = checkpoint["optimizer_states"][0]["state"][0]
    assert torch.equal(resumed.state[group["params"][0]]["exp_avg"], saved["exp_avg"])
    assert float(resumed.state[group["params"][0]]["step"]) == 1


@pytest.mark.parametrize(
    ("before", "now", "message"),
    [
        ({"name": "adamw"}, {"name": "sgd"}, "model.optim.name: last.ckpt contains the state of adamw, which sgd"),
        ({"name": "adamw"}, {"amsgrad": True}, "model.optim.amsgrad: last.ckpt was saved without it"),
        ({}, {"no_decay_on_norms_and_biases": True}, "no_decay_on_norms_and_biases: it was false in last.ckpt"),
        ({"no_decay_on_norms_and_biases": True}, {}, "no_decay_on_norms_and_biases: it was true in last.ckpt"),
    ],
)
def test_an_optimizer_that_cannot_use_the_state_of_the_checkpoint_is_refused_with_the_way_out(
    before: dict[str, Any], now: dict[str, Any], message: str
) -> None:
    with pytest.raises(ValueError, match=f"{message}.*init_from_ptl_ckpt"):
        check_resumable(OptimConfig(**now), stepped(OptimConfig(**before)), Path("last.ckpt"))


def test_adam_continues_with_the_state_of_adamw() -> None:
    check_resumable(OptimConfig(name="adam"), stepped(OptimConfig(name="adamw")), Path("last.ckpt"))


def test_a_registered_optimizer_that_does_not_take_an_argument_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(optimizers._things, "mine", torch.optim.SGD)
    with pytest.raises(ValueError, match="model.optim.extra: 'mine' does not take these arguments.*beta3"):
        build_optimizer(nn.Linear(2, 2), OptimConfig(name="mine", extra={"beta3": 1}))
