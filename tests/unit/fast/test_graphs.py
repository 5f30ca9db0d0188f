"""Steps as CUDA graphs: what keeps from them is tested here; the steps themselves in test_engine.py."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from nest_ssl.fast.as_built import may_be_skipped
from nest_ssl.fast.graphs import Padding, obstacle_to_graphs, with_parameters
from nest_ssl.training.stage_hooks import attach_stage_hooks
from tests.helpers import NO_DROPOUT, noise_batch, tiny_model

# With a start in every frame the mask does not depend on chance.
EXACT: dict[str, Any] = {**NO_DROPOUT, "masking.mask_prob": 1.0}


def test_sizes_are_few_and_never_smaller() -> None:
    padding = Padding.of(tiny_model())
    sizes = [padding.size(n) for n in range(16_000, 960_000, 777)]
    for given, size in zip(range(16_000, 960_000, 777), sizes, strict=True):
        assert given <= size
        assert size <= max(given * 1.04, given + 2 * 1280)  # 3 % and rounding, or two frames
    assert len(set(sizes)) < 250


@pytest.mark.parametrize(
    ("overrides", "word"),
    [({}, None), ({"encoder.att_context_size": [[4, 2], [-1, -1]]}, "several contexts")],
)
def test_the_reason_against_graphs_is_named(overrides: dict[str, Any], word: str | None) -> None:
    obstacle = obstacle_to_graphs(tiny_model(overrides))
    assert obstacle is None if word is None else word in (obstacle or "")


def test_hooks_and_synchronised_norms_prevent_graphs() -> None:
    model = tiny_model()
    handle = model.encoder.layers[0].register_forward_hook(lambda *_: None)
    assert "hook" in (obstacle_to_graphs(model) or "")
    handle.remove()
    model.encoder.layers[0].register_forward_hook(may_be_skipped(lambda *_: None))
    attach_stage_hooks(model, lambda stage, part: None)
    assert obstacle_to_graphs(model) is None
    assert "synchronised" in (obstacle_to_graphs(torch.nn.SyncBatchNorm.convert_sync_batchnorm(model)) or "")


@pytest.mark.parametrize("untie_biases", [True, False])
def test_a_step_can_run_on_the_same_memory_unknown_to_autograd(untie_biases: bool) -> None:
    model = tiny_model({**EXACT, "encoder.untie_biases": untie_biases}).train()
    params = [p for p in model.parameters() if p.requires_grad]
    batch = tuple(noise_batch([20_000, 16_000]).values())
    model.masked_loss(*batch).loss.backward()
    leaves = {p: torch.nn.Parameter(p.detach()) for p in params}
    with with_parameters(model, leaves):
        found = torch.autograd.grad(model.masked_loss(*batch).loss, list(leaves.values()))
    assert all(p is q for p, q in zip(params, (p for p in model.parameters() if p.requires_grad), strict=True))
    for p, gradient in zip(params, found, strict=True):
        torch.testing.assert_close(gradient, p.grad)
