"""What keeps a model from CUDA graphs and from fused layers; the steps themselves are tested in test_engine.py."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from nest_ssl.fast.graphs import Leaves, Padding, is_as_built, may_be_skipped, obstacle_to_graphs
from nest_ssl.modules import ConformerEncoder
from nest_ssl.modules.batch_norm import synchronize_batch_norms
from nest_ssl.training.watching import mark_stages
from tests.helpers import NO_DROPOUT, noise_batch, tiny_model, train_on, train_step

# With a start in every frame the mask does not depend on chance.
EXACT: dict[str, Any] = {**NO_DROPOUT, "masking.mask_prob": 1.0}


def test_sizes_are_few_and_never_smaller() -> None:
    padding = Padding.of(tiny_model())
    sizes = [padding.size(n) for n in range(16_000, 960_000, 777)]
    for given, size in zip(range(16_000, 960_000, 777), sizes, strict=True):
        assert given <= size
        assert size <= max(given * 1.04, given + 2 * 1280)  # 3 % and rounding, or two frames
    assert len(set(sizes)) < 250


def test_hooks_and_norms_of_others_prevent_graphs() -> None:
    model = tiny_model()
    handle = model.encoder.layers[0].register_forward_hook(lambda *_: None)
    assert "hook" in (obstacle_to_graphs(model) or "")
    handle.remove()
    model.encoder.layers[0].register_forward_hook(may_be_skipped(lambda *_: None))
    mark_stages(model, lambda stage, part: None)
    assert obstacle_to_graphs(model) is None
    synchronize_batch_norms(model)
    assert obstacle_to_graphs(model) is None
    assert "norm" in (obstacle_to_graphs(torch.nn.SyncBatchNorm.convert_sync_batchnorm(model)) or "")


@pytest.mark.parametrize("untie_biases", [True, False])
def test_a_step_can_run_on_the_same_memory_unknown_to_autograd(untie_biases: bool) -> None:
    model = tiny_model({**EXACT, "encoder.untie_biases": untie_biases}).train()
    params = [p for p in model.parameters() if p.requires_grad]
    batch = tuple(noise_batch([20_000, 16_000]).values())
    model.masked_loss(*batch).loss.backward()
    leaves = Leaves(model, params)
    with leaves.in_the_model():
        found = torch.autograd.grad(model.masked_loss(*batch).loss, list(leaves.of.values()))
    assert all(p is q for p, q in zip(params, (p for p in model.parameters() if p.requires_grad), strict=True))
    for p, gradient in zip(params, found, strict=True):
        torch.testing.assert_close(gradient, p.grad)


# ---- is a model still what it was built as? ----


class Adapter(nn.Module):
    """As LoRA's: the weight it shows is the one beneath."""

    def __init__(self, beneath: nn.Linear) -> None:
        super().__init__()
        self.beneath = beneath
        self.more = nn.Linear(beneath.in_features, beneath.out_features)

    @property
    def weight(self) -> Tensor:
        return self.beneath.weight

    @property
    def bias(self) -> Tensor:
        return self.beneath.bias

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.beneath(x) + self.more(x)
        return out


@pytest.fixture
def encoder() -> ConformerEncoder:
    return tiny_model().encoder


def test_an_untouched_encoder_is_as_built(encoder: ConformerEncoder) -> None:
    encoder.register_forward_hook(lambda *_: None)  # it is called itself
    encoder.layers[0].register_forward_pre_hook(may_be_skipped(lambda *_: None))
    assert is_as_built(encoder)


def watched(encoder: Any) -> None:
    encoder.layers[1].register_forward_hook(lambda *_: None)


def normed(encoder: Any) -> None:
    nn.utils.parametrizations.weight_norm(encoder.layers[0].self_attn.linear_q)


def adapted(encoder: Any) -> None:
    encoder.layers[0].self_attn.linear_q = Adapter(encoder.layers[0].self_attn.linear_q)


def given_another_forward(encoder: Any) -> None:
    encoder.layers[0].forward = lambda x, *_: x


@pytest.mark.parametrize("change", [watched, normed, adapted, given_another_forward])
def test_a_changed_encoder_is_recognised(encoder: ConformerEncoder, change: Any) -> None:
    change(encoder)
    assert not is_as_built(encoder)


def test_a_hook_on_a_layer_runs_where_fused_layers_would_not_call_it() -> None:
    model = tiny_model().train()
    heard: list[torch.Size] = []
    batch = tuple(noise_batch([20_000, 16_000]).values())
    step = train_step(model, compile="on")
    model.encoder.layers[1].register_forward_hook(lambda _module, _inputs, out: heard.append(out.shape))
    train_on(step, batch)  # type: ignore[arg-type]
    assert heard == [(2, 16, model.encoder.d_model)]
    assert "hooks" in step.engine.description


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")
def test_an_adapter_is_trained_where_fused_attention_would_not_call_it() -> None:
    model: Any = tiny_model()
    adapted(model.encoder)
    model.cuda().train()
    batch = tuple(x.cuda() for x in noise_batch([20_000, 16_000]).values())
    train_on(train_step(model), batch)  # type: ignore[arg-type]
    assert model.encoder.layers[0].self_attn.linear_q.more.weight.grad.any()
