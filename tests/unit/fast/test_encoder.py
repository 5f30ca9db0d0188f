"""The fused encoder against the plain one, without its Triton kernels: those are in test_kernels.py."""

from __future__ import annotations

import contextlib
import copy
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F  # noqa: N812

from nest_ssl.fast import encoder as fused_encoder
from nest_ssl.fast.encoder import fused
from nest_ssl.fast.graphs import Padding, padding_is_exact
from tests.helpers import NO_DROPOUT, noise_batch, tiny_model
from tests.unit.test_model import LENGTHS, VARIANTS, train_inputs

EXACT: dict[str, Any] = {**NO_DROPOUT, "masking.mask_prob": 0.1, "encoder.stochastic_depth_drop_prob": 0.0}


@pytest.fixture
def uncompiled(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fused_encoder, "compiled", lambda function, budget: function)


def loss_and_gradients(
    model: Any, batch: dict[str, Tensor], *, fast: bool = True, num_samples: Tensor | None = None
) -> tuple[Tensor, dict[str, Tensor]]:
    model.zero_grad()
    featurizer = model.preprocessor.featurizer
    num_frames = None if num_samples is None else featurizer.num_padded_frames(num_samples)
    with fused(model.encoder, 1.0, num_frames) if fast else contextlib.nullcontext():
        loss = model.masked_loss(**batch, generator=torch.Generator().manual_seed(3)).loss
    loss.backward()
    return loss.detach(), {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


def assert_same(plain: Any, fast: Any, batch: dict[str, Tensor], fast_batch: dict[str, Tensor], **options: Any) -> None:
    loss, gradients = loss_and_gradients(plain, batch, fast=False)
    fast_loss, fast_gradients = loss_and_gradients(fast, fast_batch, **options)
    torch.testing.assert_close(fast_loss, loss, atol=1e-5, rtol=1e-5)
    assert gradients.keys() == fast_gradients.keys()
    for name, gradient in gradients.items():
        torch.testing.assert_close(fast_gradients[name], gradient, atol=2e-5, rtol=1e-3, msg=name)
    for (name, buffer), other in zip(plain.named_buffers(), fast.buffers(), strict=True):
        torch.testing.assert_close(other, buffer, atol=1e-5, rtol=1e-5, msg=name)


def twins(overrides: dict[str, Any]) -> tuple[Any, Any]:
    plain = tiny_model(overrides).train()
    return plain, copy.deepcopy(plain)


@pytest.mark.usefixtures("uncompiled")
@pytest.mark.parametrize("name", [name for name in VARIANTS if name != "several_contexts"])
def test_the_fused_encoder_gives_the_plain_loss_gradients_and_statistics(name: str) -> None:
    likely = {"masking.mask_prob": 0.4} if name == "separate_blocks" else {}
    plain, fast = twins({**VARIANTS[name], **EXACT, **likely})
    batch = train_inputs(noise_batch(LENGTHS))
    assert_same(plain, fast, batch, batch)


@pytest.mark.usefixtures("uncompiled")
@pytest.mark.parametrize("norm", ["batch_norm", "layer_norm"])
def test_padding_for_graphs_changes_nothing(norm: str) -> None:
    # With a start in every frame the mask is no matter of chance: the padded batch would draw other numbers.
    plain, fast = twins({**EXACT, "masking.mask_prob": 1.0, "encoder.conv_norm_type": norm})
    batch = train_inputs(noise_batch(LENGTHS))
    for size in (Padding.of(plain).size(LENGTHS[0]), LENGTHS[0] + 16_000):
        padded = {key: F.pad(x, (0, size - x.shape[1])) if x.ndim == 2 else x for key, x in batch.items()}
        assert_same(copy.deepcopy(plain), copy.deepcopy(fast), batch, padded, num_samples=torch.tensor(LENGTHS[0]))


@pytest.mark.usefixtures("uncompiled")
def test_the_padding_would_show_in_the_batch_norm_if_it_were_counted() -> None:
    plain, fast = twins({**EXACT, "masking.mask_prob": 1.0})
    batch = train_inputs(noise_batch(LENGTHS))
    padded = {key: F.pad(x, (0, 16_000)) if x.ndim == 2 else x for key, x in batch.items()}
    with pytest.raises(AssertionError):
        assert_same(plain, fast, batch, padded)


@pytest.mark.usefixtures("uncompiled")
def test_dropout_is_where_the_config_has_it() -> None:
    _, fast = twins({**NO_DROPOUT, "encoder.dropout": 0.5})
    batch = train_inputs(noise_batch(LENGTHS))
    losses = {float(loss_and_gradients(fast, batch)[0]) for _ in range(3)}
    assert len(losses) == 3
    torch.manual_seed(1)
    first = loss_and_gradients(fast, batch)[0]
    torch.manual_seed(1)
    assert torch.equal(loss_and_gradients(fast, batch)[0], first)


def test_one_layer_is_compiled_whole_and_once_for_all_lengths(monkeypatch: pytest.MonkeyPatch) -> None:
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    monkeypatch.setattr(
        fused_encoder, "compiled", lambda function, budget: torch.compile(function, backend="aot_eager", fullgraph=True)
    )
    plain, fast = twins(EXACT)
    for lengths in (LENGTHS, [30_000, 9_000, 22_000, 28_000], [50_000, 40_000]):
        batch = train_inputs(noise_batch(lengths))
        assert_same(copy.deepcopy(plain), fast, batch, batch) if lengths is LENGTHS else loss_and_gradients(fast, batch)
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == 1


def test_hooks_of_the_encoder_itself_run_and_its_own_forward_returns() -> None:
    model = tiny_model().train()
    heard: list[torch.Size] = []
    model.encoder.register_forward_hook(lambda _module, _inputs, out: heard.append(out[0].shape))
    with fused(model.encoder, 1.0):
        assert "forward" in vars(model.encoder)
    assert "forward" not in vars(model.encoder)
    model.masked_loss(**train_inputs(noise_batch(LENGTHS)))
    assert len(heard) == 1


def test_norms_that_count_padding_forbid_it() -> None:
    for norm, exact in (("batch_norm", True), ("layer_norm", True), ("group_norm4", False), ("instance_norm", False)):
        model = tiny_model({"encoder.conv_norm_type": norm})
        assert padding_is_exact(model) == exact
        assert (Padding.of(model).size(24_001) > 24_001) == exact
