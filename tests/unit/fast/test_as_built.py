from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from nest_ssl.fast.as_built import is_as_built, may_be_skipped
from nest_ssl.fast.engine import accelerate
from nest_ssl.modules import ConformerEncoder
from tests.helpers import noise_batch, tiny_model


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
    objective = accelerate(model, compile="on")
    model.encoder.layers[1].register_forward_hook(lambda _module, _inputs, out: heard.append(out.shape))
    objective.gradients(batch)  # type: ignore[arg-type]
    assert heard == [(2, 16, model.encoder.d_model)]
    assert "hooks" in objective.description


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")
def test_an_adapter_is_trained_where_fused_attention_would_not_call_it() -> None:
    model: Any = tiny_model()
    adapted(model.encoder)
    model.cuda().train()
    batch = tuple(x.cuda() for x in noise_batch([20_000, 16_000]).values())
    accelerate(model).gradients(batch)  # type: ignore[arg-type]
    assert model.encoder.layers[0].self_attn.linear_q.more.weight.grad.any()
