from __future__ import annotations

import pytest
import torch

from nest_ssl.modules.random_numbers import random_chances, standard_normal

MILLION = 1_000_000


def test_normal_numbers_are_normal_and_no_part_repeats_another() -> None:
    x = standard_normal(MILLION, torch.Generator().manual_seed(0)).double()
    sorted_x, expected = x.sort()[0], torch.special.ndtri((torch.arange(MILLION) + 0.5).double() / MILLION)
    assert (torch.special.ndtr(sorted_x) - torch.special.ndtr(expected)).abs().max() < 2e-3  # Kolmogorov-Smirnov
    for distance in (1, 2, 1 << 18, 1 << 19):
        assert abs((x[distance:] * x[:-distance]).mean()) < 5e-3


def test_normal_numbers_follow_the_generator_and_not_the_number_of_cores() -> None:
    draws = []
    for num_threads in (1, 3):
        before = torch.get_num_threads()
        torch.set_num_threads(num_threads)
        draws.append(standard_normal(MILLION, torch.Generator().manual_seed(5)))
        torch.set_num_threads(before)
    assert torch.equal(*draws)
    generator = torch.Generator().manual_seed(5)
    assert torch.equal(standard_normal(7, generator), standard_normal(7, torch.Generator().manual_seed(5)))
    assert not torch.equal(standard_normal(7, generator), draws[0][:7])
    assert standard_normal(0).shape == (0,)


@pytest.mark.parametrize("chance", [0.0, 0.001, 0.9, 1.0])
def test_ones_come_with_the_chance_asked_for(chance: float) -> None:
    torch.manual_seed(0)
    ones = random_chances(MILLION + 1, chance)
    assert ones.dtype == torch.uint8
    assert len(ones) == MILLION + 1
    spread = (chance * (1 - chance) / MILLION) ** 0.5
    assert abs(ones.double().mean() - chance) <= 5 * spread + 2**-16 * (0 < chance < 1)
    assert len(random_chances(0, chance)) == 0
