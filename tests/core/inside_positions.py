"""Positions, by one look at each: parts of a sequence as calls of their own, the skew, and the rows of a table."""

import itertools
from typing import Any

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

import oracles
from relskew_core import Span
from relskew_core._array.namespace import namespace_of
from relskew_core._positions.pairs import Pairs, Rows, Run
from relskew_core._positions.skew import skew_from, unskew_from
from relskew_core._positions.table import Table

SIDES = st.none() | st.integers(-4, 12)
COUNTS = st.integers(1, 5)
XP = namespace_of(np)


@st.composite
def two_runs(draw: st.DrawFn) -> tuple[Run, Run]:
    """Draw runs that step alike, as the shares of one sequence do."""
    step = draw(st.integers(1, 3))
    queries, keys = (Run(draw(st.integers(0, 9)), step, draw(COUNTS)) for _ in range(2))
    return queries, keys


@given(runs=two_runs(), offset=st.integers(-6, 6), left=SIDES, right=SIDES)
@example(runs=(Run(2, 1, 3), Run(2, 1, 3)), offset=0, left=0, right=0)
@example(runs=(Run(0, 1, 5), Run(0, 1, 5)), offset=0, left=1, right=1)
def test_pairs_are_a_call_of_their_own(runs: tuple[Run, Run], offset: int, left: int | None, right: int | None) -> None:
    queries, keys = runs
    positions = [range(100)[run.positions] for run in runs]
    r = {(i, j): k - q - offset for i, q in enumerate(positions[0]) for j, k in enumerate(positions[1])}
    seen = {pair for pair, x in r.items() if (left is None or x >= -left) and (right is None or x <= right)}
    pairs = Pairs.of(queries, keys, offset, left, right)
    if pairs is None:
        assert not seen
        return
    pattern: Any = {"offset": pairs.offset, "causal": pairs.causal, "window": pairs.window}
    assert seen == {pair for pair in r if oracles.sees(*pair, **pattern)}
    steps = {pair: pair[1] - pair[0] - pairs.offset for pair in r}
    assert all(r[pair] == pairs.zero + pairs.step * steps[pair] for pair in r)
    met = sorted(steps[pair] for pair in seen)
    assert (pairs.low, pairs.high) == (met[0], met[-1])
    assert pairs.low <= 0 <= pairs.high
    # Bounds without effect are omitted: there are fewer kinds of calls then, and paths without windows support them.
    unseen = sorted(set(steps.values()) - set(met))
    assert pairs.causal == any(x > met[-1] for x in unseen)
    assert (pairs.window is not None and pairs.window[0] is not None) == any(x < met[0] for x in unseen)


@given(zero=st.integers(-30, 30), step=st.integers(1, 3), low=st.integers(-9, 0), high=st.integers(0, 9),
       left=st.integers(0, 6), right=st.integers(0, 6), beyond=st.sampled_from(["clip", "zero"]))  # fmt: skip
@example(zero=0, step=1, low=0, high=0, left=0, right=0, beyond="clip")
@example(zero=-1, step=2, low=0, high=1, left=0, right=0, beyond="clip")  # steps that skip the table
@example(zero=-12, step=2, low=-4, high=0, left=0, right=1, beyond="clip")  # an edge row alone
def test_rows_are_those_that_the_pairs_meet(
    zero: int, step: int, low: int, high: int, left: int, right: int, beyond: Any
) -> None:
    span = Span(left, right, beyond)
    table = np.arange(1.0, 6 * span.rows + 1).reshape(3, -1, 2)  # by head
    rows = Rows.of(zero + left, step, low, high, span)  # `zero` is a relative position, and `Rows.of` begins at a row
    part = rows.of_table(table, beyond, xp=XP)
    assert rows.span.beyond == beyond
    assert part.shape == (3, rows.span.rows, 2)
    assert rows.span.rows == rows.before + rows.count + rows.after <= high - low + 1
    # Beyond an end of the table one row is enough, or as many as there are up to a position in the span.
    assert rows.before <= 1 or rows.span.left == 0
    assert rows.after <= 1 or rows.span.right == 0
    assert rows.count or min(rows.before, rows.after) > 0 or rows.span.rows == 1

    def read(table: Any, r: int, span: Span) -> Any:
        row = oracles.row_of(r, span)
        return [[0.0, 0.0]] * 3 if row is None else table[:, row].tolist()

    assert [read(part, r, rows.span) for r in range(low, high + 1)] == [
        read(table, zero + step * r, span) for r in range(low, high + 1)
    ]
    np.testing.assert_array_equal(table[:, rows.here], part[:, rows.before : rows.span.rows - rows.after])


def test_every_number_comes_from_its_column_and_goes_back_there() -> None:
    rng = np.random.default_rng(0)
    for n, m, first, spare in itertools.product((1, 2, 4), (1, 3), (0, 1, 2, 4), (1, 2, 5)):
        if n > 1 and first > n:
            continue
        width = m + spare + (first if n == 1 else 0)
        x, s, back = rng.standard_normal((2, n, width)), rng.standard_normal((2, n, m)), np.zeros((2, n, width))
        skewed = skew_from(x, n_keys=m, first=first, xp=XP)
        for i, j in itertools.product(range(n), range(m)):
            column = first - i + j
            if 0 <= column < width:
                np.testing.assert_array_equal(skewed[:, i, j], x[:, i, column])
                back[:, i, column] = s[:, i, j]
            else:  # an entry of a neighbour, which the caller masks
                s[:, i, j] = 0.0
        np.testing.assert_array_equal(unskew_from(s, width=width, first=first, xp=XP), back)


@pytest.mark.parametrize("beyond", ["clip", "zero"])
def test_a_table_is_extended_as_its_span_says(beyond: Any) -> None:
    """Rows, products and mixtures of any run of positions, near a table and far from it, and their adjoints."""
    rng = np.random.default_rng(1)
    for left, right, first, count in itertools.product((0, 2), (0, 3), range(-7, 7), (1, 2, 4, 9)):
        span, last = Span(left, right, beyond), first + count - 1
        rows = rng.standard_normal((2, span.rows, 3))
        at = [oracles.row_of(r, span) for r in range(first, last + 1)]
        expected = np.stack([np.zeros((2, 3)) if row is None else rows[:, row] for row in at], axis=-1)  # (2, 3, count)
        table = Table(XP.matrix_transpose(rows), left, beyond)
        for own in (table, table.covering(first, last, xp=XP), table.covering(first - 3, last + 2, xp=XP)):
            np.testing.assert_array_equal(own.spread(first, last, xp=XP), expected)
            q, weights = rng.standard_normal((2, 4, 3)), rng.standard_normal((2, 4, count))
            np.testing.assert_allclose(own.product(q, first, last, xp=XP), q @ expected, atol=1e-14)
            mixed = own.mix(weights, first, last, xp=XP)
            np.testing.assert_allclose(mixed, weights @ XP.matrix_transpose(expected), atol=1e-13)
        d_columns = rng.standard_normal((2, 3, count))
        extended = table.covering(first, last, xp=XP)
        assert (extended is table) == (2 * span.rows <= count)  # much shorter than requested
        if extended is table:
            continue
        gradient = np.zeros_like(rows)
        for column, row in enumerate(at):
            if row is not None:
                gradient[:, row] += d_columns[..., column]
        np.testing.assert_allclose(extended.gradient(d_columns, xp=XP), gradient, atol=1e-13)
