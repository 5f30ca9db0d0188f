"""The module around the model."""

from __future__ import annotations

from types import SimpleNamespace
from unittest import mock

import pytest
import torch
from torch import nn

from nest_ssl.config import NestConfig
from nest_ssl.training.module import PretrainingModule, model_weights
from tests.helpers import tiny_model


def module(seed: int) -> PretrainingModule:
    model = tiny_model(seed=seed)
    return PretrainingModule(model, NestConfig(model.cfg))


def test_weights_by_nemos_names_go_back_to_where_they_were() -> None:
    ours, other = module(seed=1), module(seed=2)
    weights = model_weights(ours.state_dict())
    assert set(weights) == set(ours.model.state_dict())
    other.load_state_dict(weights)
    assert all(torch.equal(value, ours.state_dict()[name]) for name, value in other.state_dict().items())


def test_scaled_gradients_are_not_clipped() -> None:
    """A fused optimizer takes them as they are; in fp16 that is 65536 times too large."""
    ours = module(seed=1)
    ours.cfg.model.optim.fused, ours.cfg.trainer.gradient_clip_val = True, 1.0
    scaling = SimpleNamespace(precision_plugin=SimpleNamespace(scaler=object()))
    with (
        mock.patch.object(PretrainingModule, "trainer", scaling),
        pytest.raises(ValueError, match="Leave out one of the three"),
    ):
        ours.configure_optimizers()


def test_so_they_do_inside_a_wrapper() -> None:
    """FSDP and DDP put the module into another, and a name before its names."""
    ours = module(seed=1)
    wrapper = nn.Module()
    wrapper.add_module("wrapped", module(seed=2))
    wrapper.load_state_dict({f"wrapped.{name}": value for name, value in model_weights(ours.state_dict()).items()})
    for name, value in ours.state_dict().items():
        assert torch.equal(wrapper.state_dict()[f"wrapped.{name}"], value), name
