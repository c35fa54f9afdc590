"""The skew from any column on, and its adjoint, one number at a time."""

from __future__ import annotations

import itertools

import numpy as np

from relskew_core._array.namespace import namespace_of
from relskew_core._positions.skew import skew_from, unskew_from


def test_every_number_comes_from_its_column_and_goes_back_there() -> None:
    rng, xp = np.random.default_rng(0), namespace_of(np)
    for n, m, first, spare in itertools.product((1, 2, 4), (1, 3), (0, 1, 2, 4), (1, 2, 5)):
        if n > 1 and first > n:
            continue
        width = m + spare + (first if n == 1 else 0)
        x, s, back = rng.standard_normal((2, n, width)), rng.standard_normal((2, n, m)), np.zeros((2, n, width))
        skewed = skew_from(x, n_keys=m, first=first, xp=xp)
        for i, j in itertools.product(range(n), range(m)):
            column = first - i + j
            if 0 <= column < width:
                np.testing.assert_array_equal(skewed[:, i, j], x[:, i, column])
                back[:, i, column] = s[:, i, j]
            else:  # a neighbour's, which is for the caller to mask
                s[:, i, j] = 0.0
        np.testing.assert_array_equal(unskew_from(s, width=width, first=first, xp=xp), back)
