"""The skew from any column on and the rows of a table for any run of positions, one number at a time."""

import itertools

import numpy as np
import pytest

import oracles
from relskew_core import Span
from relskew_core._array.namespace import namespace_of
from relskew_core._positions.skew import skew_from, unskew_from
from relskew_core._positions.span import Beyond
from relskew_core._positions.table import Table


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
            else:  # an entry of a neighbour, which the caller masks
                s[:, i, j] = 0.0
        np.testing.assert_array_equal(unskew_from(s, width=width, first=first, xp=xp), back)


@pytest.mark.parametrize("beyond", ["clip", "zero"])
def test_a_table_is_extended_as_its_span_says(beyond: Beyond) -> None:
    """Rows, products and mixtures of any run of positions, near a table and far from it, and their adjoints."""
    rng, xp = np.random.default_rng(1), namespace_of(np)
    for left, right, first, count in itertools.product((0, 2), (0, 3), range(-7, 7), (1, 2, 4, 9)):
        span, last = Span(left, right, beyond), first + count - 1
        rows = rng.standard_normal((2, span.rows, 3))
        at = [oracles.row_of(r, span) for r in range(first, last + 1)]
        expected = np.stack([np.zeros((2, 3)) if row is None else rows[:, row] for row in at], axis=-1)  # (2, 3, count)
        table = Table(xp.matrix_transpose(rows), left, beyond)
        for own in (table, table.covering(first, last, xp=xp), table.covering(first - 3, last + 2, xp=xp)):
            np.testing.assert_array_equal(own.spread(first, last, xp=xp), expected)
            q, weights = rng.standard_normal((2, 4, 3)), rng.standard_normal((2, 4, count))
            np.testing.assert_allclose(own.product(q, first, last, xp=xp), q @ expected, atol=1e-14)
            mixed = own.mix(weights, first, last, xp=xp)
            np.testing.assert_allclose(mixed, weights @ xp.matrix_transpose(expected), atol=1e-13)
        d_columns = rng.standard_normal((2, 3, count))
        extended = table.covering(first, last, xp=xp)
        assert (extended is table) == (2 * span.rows <= count)  # much shorter than requested
        if extended is table:
            continue
        gradient = np.zeros_like(rows)
        for column, row in enumerate(at):
            if row is not None:
                gradient[:, row] += d_columns[..., column]
        np.testing.assert_allclose(extended.gradient(d_columns, xp=xp), gradient, atol=1e-13)
