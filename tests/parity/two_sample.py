"""Two-sample tests: the probability of a difference at least this large if both samples had one distribution."""

from __future__ import annotations

import math

import numpy as np
import numpy.typing as npt

Values = npt.NDArray[np.float32]


def kolmogorov_smirnov_p(a: Values, b: Values) -> float:
    """For continuous values, with Stephens' correction for finite samples; NaN are left out."""
    a, b = np.sort(a[~np.isnan(a)]), np.sort(b[~np.isnan(b)])
    both = np.concatenate([a, b])
    share_a, share_b = (np.searchsorted(x, both, side="right") / len(x) for x in (a, b))
    root_n = math.sqrt(len(a) * len(b) / (len(a) + len(b)))
    scaled = (root_n + 0.12 + 0.11 / root_n) * float(np.abs(share_a - share_b).max())
    if scaled < 0.3:  # the series converges slowly there, and the probability is 1 to five digits
        return 1.0
    terms = [(-1.0) ** (k - 1) * math.exp(-2 * (k * scaled) ** 2) for k in range(1, 101)]
    return min(1.0, 2 * sum(terms))


def category_p(a: Values, b: Values) -> float:
    """For categories and counts: chi-square of the two rows of frequencies; NaN are left out."""
    a, b = a[~np.isnan(a)], b[~np.isnan(b)]
    categories = np.unique(np.concatenate([a, b]))
    table = np.array([[np.count_nonzero(x == c) for c in categories] for x in (a, b)], dtype=np.float64)
    if len(categories) == 1:
        return 1.0
    expected = table.sum(1, keepdims=True) * table.sum(0, keepdims=True) / table.sum()
    chi2, degrees = float(((table - expected) ** 2 / expected).sum()), len(categories) - 1
    # Wilson and Hilferty: the cube root of chi-square over its degrees of freedom is nearly normal.
    z = ((chi2 / degrees) ** (1 / 3) - (1 - 2 / (9 * degrees))) / math.sqrt(2 / (9 * degrees))
    return 0.5 * math.erfc(z / math.sqrt(2))
