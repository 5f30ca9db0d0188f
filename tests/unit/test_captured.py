"""Steps as CUDA graphs: what they are for is tested on a GPU, what keeps from them everywhere."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor

from nest_ssl.captured import CapturedLoss, friendly_num_samples, obstacle_of, with_parameters
from nest_ssl.modules.as_built import may_be_skipped
from nest_ssl.training.stage_hooks import attach_stage_hooks
from tests.helpers import NO_DROPOUT, noise_batch, tiny_model

on_gpu = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")]
Batch = tuple[Tensor, Tensor, Tensor, Tensor]
# With a start in every frame the mask is no matter of chance.
EXACT: dict[str, Any] = {**NO_DROPOUT, "masking.mask_prob": 1.0}


@pytest.fixture(autouse=True)
def exact_float32(monkeypatch: pytest.MonkeyPatch) -> None:
    """cuDNN's convolutions round to TF32 unless told: 1e-3, where the comparisons are of 1e-5."""
    monkeypatch.setattr(torch.backends.cudnn, "allow_tf32", False)


def batch_of(lengths: list[int], device: str, seed: int = 0) -> Batch:
    made = noise_batch(lengths, seed)
    return (
        made["input_signal"].to(device),
        made["input_signal_length"].to(device),
        made["noisy_input_signal"].to(device),
        made["noisy_input_signal_length"].to(device),
    )


def test_on_a_cpu_it_is_the_models_own_loss() -> None:
    model = tiny_model(EXACT).train()
    captured = CapturedLoss(model)
    batch = batch_of([20_000, 16_000], "cpu")
    assert torch.equal(captured(*batch).loss, model.masked_loss(*batch).loss)
    assert captured.num_graphs == 0


def test_sizes_are_few_and_never_smaller() -> None:
    model = tiny_model()
    sizes = [friendly_num_samples(model, n) for n in range(16_000, 960_000, 777)]
    for given, size in zip(range(16_000, 960_000, 777), sizes, strict=True):
        assert given <= size
        assert size <= max(given * 1.04, given + 2 * 1280)  # 3 % and rounding, or two frames
    assert len(set(sizes)) < 250


@pytest.mark.parametrize(
    ("overrides", "word"),
    [({}, None), ({"encoder.att_context_size": [[4, 2], [-1, -1]]}, "several contexts")],
)
def test_what_a_graph_cannot_hold_is_said(overrides: dict[str, Any], word: str | None) -> None:
    obstacle = obstacle_of(tiny_model(overrides))
    assert obstacle is None if word is None else word in (obstacle or "")


def test_hooks_and_synchronised_norms_keep_from_graphs() -> None:
    model = tiny_model()
    handle = model.encoder.layers[0].register_forward_hook(lambda *_: None)
    assert "hook" in (obstacle_of(model) or "")
    handle.remove()
    model.encoder.layers[0].register_forward_hook(may_be_skipped(lambda *_: None))
    attach_stage_hooks(model, lambda stage, part: None)
    assert obstacle_of(model) is None
    assert "synchronised" in (obstacle_of(torch.nn.SyncBatchNorm.convert_sync_batchnorm(model)) or "")


@pytest.mark.parametrize("untie_biases", [True, False])
def test_a_step_can_run_on_the_same_memory_unknown_to_autograd(untie_biases: bool) -> None:
    model = tiny_model({**EXACT, "encoder.untie_biases": untie_biases}).train()
    params = [p for p in model.parameters() if p.requires_grad]
    batch = batch_of([20_000, 16_000], "cpu")
    model.masked_loss(*batch).loss.backward()
    leaves = {p: torch.nn.Parameter(p.detach()) for p in params}
    with with_parameters(model, leaves):
        found = torch.autograd.grad(model.masked_loss(*batch).loss, list(leaves.values()))
    assert all(p is q for p, q in zip(params, (p for p in model.parameters() if p.requires_grad), strict=True))
    for p, gradient in zip(params, found, strict=True):
        torch.testing.assert_close(gradient, p.grad)


class TestOnAGpu:
    pytestmark = on_gpu

    def steps(self, model: Any, loss_of: Any, batches: list[Batch]) -> tuple[list[Tensor], dict[str, Tensor]]:
        losses = []
        for batch in batches:
            model.zero_grad(set_to_none=True)
            prediction = loss_of(*batch)
            prediction.loss.backward()
            losses.append(prediction.loss.detach().clone())
        return losses, {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}

    def test_plain_compiled_and_captured_steps_agree(self) -> None:
        plain = tiny_model(EXACT).cuda().train()
        plain.encoder.compile_mode = "off"
        compiled, model = copy.deepcopy(plain), copy.deepcopy(plain)
        compiled.encoder.compile_mode = model.encoder.compile_mode = "auto"
        lengths = ([24_000, 16_007], [24_000, 17_000], [23_900, 20_000], [24_000, 16_007])
        batches = [batch_of(list(n), "cuda", seed) for seed, n in enumerate(lengths)]
        captured = CapturedLoss(model)
        wanted = self.steps(plain, plain.masked_loss, batches)
        for found in (self.steps(compiled, compiled.masked_loss, batches), self.steps(model, captured, batches)):
            torch.testing.assert_close(torch.stack(found[0]), torch.stack(wanted[0]), atol=1e-5, rtol=1e-5)
            for name, gradient in wanted[1].items():
                torch.testing.assert_close(found[1][name], gradient, atol=5e-5, rtol=1e-2, msg=name)
        assert captured.num_graphs == 1
        for (name, buffer), other in zip(plain.named_buffers(), model.buffers(), strict=True):
            torch.testing.assert_close(other, buffer, atol=1e-4, rtol=1e-4, msg=name)

    def test_gradients_accumulate_and_scale(self) -> None:
        model = tiny_model(EXACT).cuda().train()
        captured, batch = CapturedLoss(model), batch_of([24_000, 16_007], "cuda")
        for _ in range(2):
            _, once = self.steps(model, captured, [batch])
        model.zero_grad(set_to_none=True)
        for scale in (1.0, 0.5, 2.0):
            (captured(*batch).loss * scale).backward()
        assert captured.num_graphs == 1
        for name, gradient in once.items():
            torch.testing.assert_close(model.get_parameter(name).grad, 3.5 * gradient, atol=1e-4, rtol=1e-3, msg=name)

    def test_without_memory_to_spare_no_graph_is_made(self) -> None:
        model = tiny_model(EXACT).cuda().train()
        captured, batch = CapturedLoss(model, memory_share=0.0), batch_of([24_000, 16_007], "cuda")
        self.steps(model, captured, [batch] * 3)
        assert captured.num_graphs == 0

    def test_a_seeded_step_repeats_and_the_next_one_differs(self) -> None:
        model = tiny_model({"encoder.dropout": 0.5}).cuda().train()
        captured, batch = CapturedLoss(model), batch_of([24_000, 16_007], "cuda")
        losses = []
        for seed in (1, 2, 3, 3, 4):
            torch.manual_seed(seed)
            loss = captured(*batch).loss
            loss.backward()
            losses.append(float(loss.detach()))
        assert losses[2] == losses[3] != losses[4]

    def test_weights_that_change_are_seen_under_autocast(self) -> None:
        model = tiny_model(EXACT).cuda().train()
        captured, batch = CapturedLoss(model), batch_of([24_000, 16_007], "cuda")
        optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.5)
        losses = []
        for _ in range(8):
            with torch.autocast("cuda", torch.bfloat16):
                loss = captured(*batch).loss
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            losses.append(float(loss.detach()))
        assert losses[-1] < losses[2] - 0.01

    def test_bf16_loss_curves_are_those_of_the_plain_path(self) -> None:
        def curve(compile_mode: str, seed: int) -> Tensor:
            model = tiny_model({"encoder.d_model": 64, "encoder.n_heads": 4}).cuda().train()
            model.encoder.compile_mode = compile_mode
            captured = CapturedLoss(model)
            optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=2e-3)
            batches = [batch_of([48_000, 40_000, 36_000, 47_000], "cuda", n) for n in range(4)]
            losses = []
            for step in range(200):
                torch.manual_seed(1000 * seed + step)
                with torch.autocast("cuda", torch.bfloat16):
                    loss = captured(*batches[step % 4]).loss
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()
                losses.append(loss.detach())
            return torch.stack(losses).view(-1, 40).mean(1).cpu()

        plain, other_seed, fast = curve("off", 1), curve("off", 2), curve("auto", 1)
        noise = float((plain - other_seed).abs().max())
        assert float((fast - plain).abs().max()) < max(3 * noise, 0.05)
        assert fast[-1] < fast[0] - 0.1
