"""Steps on several ranks: gloo processes on CPUs, NCCL ranks on one GPU (marked `gpu`)."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from nest_ssl.fast.engine import Batch
from nest_ssl.modules.batch_norm import synchronize_batch_norms
from nest_ssl.objective import predict_masked
from nest_ssl.training.parallel import World
from nest_ssl.training.step import Clipping, TrainStep, hash_of
from tests.helpers import NO_DROPOUT, gradients_of, noise_batch, tiny_model, train_on, train_step
from tests.ranks import on_ranks

ON_GPU = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU"),
]
DEVICES = [pytest.param("cpu"), pytest.param("cuda", marks=ON_GPU)]
SIZE = 32_000
"""All ranks' batches are equally wide, so that their frames are those of one batch."""


def batch_of(rank: int, device: torch.device, seed: int = 0, num: int = 2) -> Batch:
    lengths = [SIZE] + [SIZE - 3_000 * (rank + row) for row in range(1, num)]
    made = noise_batch(lengths, seed=100 * seed + rank)
    clean, length, noisy, noisy_length = (tensor.to(device) for tensor in made.values())
    return clean, length, noisy, noisy_length


def mask_rows(model: Any, first: int) -> None:
    """Give the masks: row r of all ranks' rows has frames masked in blocks of 40 + 10 r, so ranks mask differently."""

    def draw(lengths_B: Tensor, num_frames: int, *, generator: torch.Generator | None = None) -> Tensor:
        frame_T = torch.arange(num_frames, device=lengths_B.device)
        rows = [(frame_T % 120) < 40 + 10 * (first + row) for row in range(len(lengths_B))]
        return torch.stack(rows) & (frame_T < lengths_B[:, None])

    model.mask_processor.draw = draw


def model_on(device: torch.device, *, synchronized: bool) -> Any:
    model = tiny_model(NO_DROPOUT).to(device).train()
    if synchronized:
        synchronize_batch_norms(model)
    return model


def gradients(world: World, synchronized: bool, compile: str, num_steps: int) -> dict[str, Any]:
    """Gradients after the exchange; on a GPU the third step is a replay."""
    torch.backends.cudnn.allow_tf32 = False
    model = model_on(world.device, synchronized=synchronized)
    mask_rows(model, 2 * world.rank)
    step = train_step(model, world=world, compile=compile)
    for _ in range(num_steps):
        loss = train_on(step, batch_of(world.rank, world.device), planned=SIZE)
    found = {name: gradient.cpu() for name, gradient in gradients_of(model).items()}
    num_graphs = step.engine.num_graphs
    step.release()
    return {"loss": loss.cpu(), "gradients": found, "num_graphs": num_graphs}


def wanted_gradients(size: int, synchronized: bool) -> dict[str, Tensor]:
    """On one rank: of the mean of the ranks' losses over the whole batch, or the mean of gradients rank by rank."""
    cpu = torch.device("cpu")
    batches = [batch_of(rank, cpu) for rank in range(size)]
    if not synchronized:
        each = []
        for rank in range(size):
            model = model_on(cpu, synchronized=False)
            mask_rows(model, 2 * rank)
            model.masked_loss(*batches[rank]).loss.backward()
            each.append(gradients_of(model))
        return {name: torch.stack([one[name] for one in each]).mean(0) for name in each[0]}
    model = model_on(cpu, synchronized=False)
    mask_rows(model, 0)
    audio, length, noisy, noisy_length = (torch.cat(parts) for parts in zip(*batches, strict=True))
    from nest_ssl.modules.inputs import Signal

    clean_mels = model.features(Signal("audio", audio, length))
    masked = model._mask(model.features(Signal("noisy", noisy, noisy_length)), True, None)
    tokens, (encoded, encoded_len) = model._targets(clean_mels), model._encode(masked)
    parts = {"decoder": model.decoder, "loss": model.loss, "masking": model.mask_processor.cfg}
    losses = []
    for rank in range(size):
        rows = slice(2 * rank, 2 * rank + 2)
        whole = (encoded[rows], encoded_len[rows], masked.masks_BDT[rows], tokens[rows])
        losses.append(predict_masked(*whole, **parts).loss)
    torch.stack(losses).mean().backward()
    return gradients_of(model)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("synchronized", [True, False])
def test_gradients_are_the_mean_over_the_ranks(device: str, synchronized: bool) -> None:
    """With dropout and dither 0, masks given, and different numbers of masked tokens on each rank, in float32."""
    wanted = wanted_gradients(2, synchronized)
    compile, steps = ("auto", 3) if device == "cuda" else ("off", 1)
    for found in on_ranks(gradients, 2, synchronized, compile, steps, device=device):
        assert found["num_graphs"] == (1 if device == "cuda" else 0)
        assert found["gradients"].keys() == wanted.keys()
        for name, gradient in wanted.items():
            torch.testing.assert_close(found["gradients"][name], gradient, rtol=1e-3, atol=1e-5, msg=name)


def train(
    world: World, synchronized: bool, accumulate: int, captured: bool, num_steps: int, bf16: bool = False
) -> dict[str, Any]:
    """Losses of a run with random masks and dropout, and a hash of its weights."""
    torch.manual_seed(0)
    model = tiny_model({"masking.mask_prob": 0.05}).to(world.device).train()
    if synchronized:
        synchronize_batch_norms(model)
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-3, fused=True)
    step: TrainStep = train_step(
        model,
        world=world,
        optimizer=optimizer,
        accumulate=accumulate,
        clipping=Clipping(1.0),
        autocast=torch.bfloat16 if bf16 else None,
    )
    step.engine.captures = captured
    losses = []
    for number in range(num_steps * accumulate):
        torch.manual_seed(1000 * world.rank + number)
        place = number % accumulate
        batch = batch_of(world.rank, world.device, seed=number % 5)
        updates = place == accumulate - 1
        losses.append(float(train_on(step, batch, begins=place == 0, updates=updates, planned=SIZE)))
    weights = hash_of([p.detach() for p in model.parameters() if p.requires_grad])
    num_graphs, num_collectives = step.engine.num_graphs, step.gradients.num_collectives
    step.release()
    return {"losses": losses, "weights": weights, "num_graphs": num_graphs, "num_collectives": num_collectives}


@pytest.mark.parametrize("accumulate", [1, 2])
def test_ranks_keep_the_same_weights(accumulate: int) -> None:
    ranks = on_ranks(train, 2, True, accumulate, True, 4)
    assert len({one["weights"] for one in ranks}) == 1
    assert ranks[0]["losses"] != ranks[1]["losses"]
    assert ranks[0]["num_collectives"] == 1


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")
@pytest.mark.parametrize("synchronized", [True, False])
@pytest.mark.parametrize("accumulate", [1, 2])
def test_captured_collectives_give_the_run_of_uncaptured_ones(synchronized: bool, accumulate: int) -> None:
    captured = on_ranks(train, 2, synchronized, accumulate, True, 8, device="cuda")
    uncaptured = on_ranks(train, 2, synchronized, accumulate, False, 8, device="cuda")
    assert captured[0]["num_graphs"] == accumulate
    assert uncaptured[0]["num_graphs"] == 0
    for ranks in (captured, uncaptured):
        assert len({one["weights"] for one in ranks}) == 1
    for one, other in zip(captured, uncaptured, strict=True):
        assert one["losses"] == pytest.approx(other["losses"], rel=1e-4)
