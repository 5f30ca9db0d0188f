from __future__ import annotations

import pytest
import torch

from nest_ssl.modules.dropout import Dropout


@pytest.mark.parametrize("shape", [(1000, 1001), (3,), (7, 11, 13, 17)])
def test_kept_values_are_scaled_and_gradients_follow_them(shape: tuple[int, ...]) -> None:
    x = torch.randn(shape, requires_grad=True)
    out = Dropout(0.3)(x)
    out.sum().backward()
    kept = out != 0
    torch.testing.assert_close(out, torch.where(kept, x / 0.7, 0.0))
    torch.testing.assert_close(x.grad, torch.where(kept, 1 / 0.7, 0.0))


@pytest.mark.parametrize("rate", [0.001, 0.1, 0.5, 0.97])
def test_the_share_dropped_is_the_rate_and_places_are_independent(rate: float) -> None:
    torch.manual_seed(0)
    dropped = (Dropout(rate)(torch.ones(4_000_000)) == 0).double()
    spread = (rate * (1 - rate) / len(dropped)) ** 0.5
    assert abs(dropped.mean() - rate) < 5 * spread + 2**-16
    for distance in (1, 2, 3, 4, 8):  # four values share a random number
        both = (dropped[distance:] * dropped[:-distance]).mean()
        assert abs(both - rate**2) < 5 * rate * (1 - rate**2) ** 0.5 / len(dropped) ** 0.5 + 2 * rate * 2**-16


def test_a_seed_repeats_it_and_evaluation_leaves_all() -> None:
    dropout, x = Dropout(0.1), torch.randn(100)
    draws = []
    for _ in range(2):
        torch.manual_seed(3)
        draws.append(dropout(x))
    assert torch.equal(*draws)
    assert not torch.equal(dropout(x), draws[0])
    assert torch.equal(dropout.eval()(x), x)
    assert torch.equal(Dropout(0.0)(x), x)
    assert not Dropout(1.0)(x).any()
