from __future__ import annotations

import pytest
import torch

from nest_ssl.fast.ops.dropout import draw_seeds, dropout, keep_mask

CPU = torch.device("cpu")


def masks(num_seeds: int, size: int, rate: float) -> torch.Tensor:
    torch.manual_seed(0)
    return torch.stack([keep_mask(size, rate, seed) for seed in draw_seeds(num_seeds, device=CPU)]).double()


@pytest.mark.parametrize("rate", [0.1, 0.5, 0.9])
def test_the_share_of_dropped_values_is_the_rate(rate: float) -> None:
    kept = masks(64, 4096, rate)
    spread = (rate * (1 - rate) / kept.numel()) ** 0.5
    assert abs(float(kept.mean()) - (1 - rate)) < 4 * spread
    # Every seed and every place by itself: the means of 64 masks vary as those of independent coins do.
    assert float(kept.mean(1).std()) == pytest.approx((rate * (1 - rate) / 4096) ** 0.5, rel=0.3)
    assert float(kept.mean(0).std()) == pytest.approx((rate * (1 - rate) / 64) ** 0.5, rel=0.1)


@pytest.mark.parametrize("distance", [1, 2, 64, 512, 1024])
def test_neighbours_are_independent(distance: int) -> None:
    centred = masks(64, 8192, 0.3) - 0.7
    product = (centred[:, distance:] * centred[:, :-distance]).mean() / (0.3 * 0.7)
    assert abs(float(product)) < 0.008  # 64 · 8192 pairs: 5 standard deviations


def test_two_seeds_are_independent() -> None:
    centred = masks(64, 8192, 0.3) - 0.7
    product = (centred[1:] * centred[:-1]).mean(1) / (0.3 * 0.7)
    assert float(product.abs().max()) < 5 / 8192**0.5


def test_a_seed_gives_the_same_mask_and_another_seed_another() -> None:
    first, second = draw_seeds(2, device=CPU)
    assert torch.equal(keep_mask(1000, 0.5, first), keep_mask(1000, 0.5, first))
    assert not torch.equal(keep_mask(1000, 0.5, first), keep_mask(1000, 0.5, second))


def test_seeds_follow_torchs_generator() -> None:
    torch.manual_seed(5)
    first = draw_seeds(3, device=CPU)
    torch.manual_seed(5)
    assert torch.equal(draw_seeds(3, device=CPU), first)


def test_what_is_kept_is_scaled_and_its_gradient_too() -> None:
    (seed,) = draw_seeds(1, device=CPU)
    x = torch.ones(100, 7, requires_grad=True)
    out = dropout(x, 0.25, seed)
    out.sum().backward()
    assert sorted(set(out.detach().flatten().tolist())) == pytest.approx([0, 4 / 3])
    assert torch.equal(x.grad, out.detach())  # type: ignore[arg-type]


def test_a_rate_of_zero_changes_nothing() -> None:
    x = torch.randn(5)
    assert dropout(x, 0.0, torch.tensor(1, dtype=torch.int32)) is x
