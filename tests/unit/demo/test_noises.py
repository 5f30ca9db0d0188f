"""The noises of the demo."""

from __future__ import annotations

import numpy as np
import pytest

from nest_ssl.demo.noises import NOISES, coloured
from tests.unit.demo.spectra import energy_share


@pytest.mark.parametrize("name", NOISES)
def test_a_noise_is_finite_has_its_length_and_repeats(name: str) -> None:
    first, again, other = (NOISES[name](12_345, 16_000, np.random.default_rng(seed)) for seed in (1, 1, 2))
    assert first.shape == (12_345,)
    assert np.isfinite(first).all()
    assert first.std() > 0
    assert np.array_equal(first, again)
    assert not np.array_equal(first, other)


@pytest.mark.parametrize(("exponent", "fall_db"), [(0, 0.0), (1, 3.0), (2, 6.0)])
def test_coloured_noise_falls_by_so_many_decibels_per_octave(exponent: float, fall_db: float) -> None:
    power = np.abs(np.fft.rfft(coloured(2**18, exponent, np.random.default_rng(0)))) ** 2
    octaves_db = [10 * np.log10(power[2**k : 2 ** (k + 1)].mean()) for k in range(8, 16)]
    assert -np.diff(octaves_db).mean() == pytest.approx(fall_db, abs=0.3)


def test_hum_is_that_of_the_mains() -> None:
    hum = NOISES["hum"](160_000, 16_000, np.random.default_rng(0))
    assert energy_share(hum, 45, 500) > 0.95
