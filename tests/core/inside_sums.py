"""Sums of gradients, and factors that vary: where they go inside of a call."""

import numpy as np
import pytest
from core.test_gradient import NUMPY, check, gradients_on
from hypothesis import given, settings
from hypothesis import strategies as st

import dense
from relskew_core import relative_attention
from relskew_core._array.namespace import namespace_of
from relskew_core._kernel.call import Arguments
from relskew_core._kernel.problem import problem
from relskew_core._kernel.sums import RunningSum, sum_to

XP = namespace_of(np)


@settings(max_examples=100, deadline=None)
@given(starts=st.lists(st.integers(0, 4), max_size=5).map(sorted),
       sizes=st.lists(st.integers(0, 4), min_size=5, max_size=5), after=st.integers(0, 2))  # fmt: skip
def test_pieces_are_summed_where_they_start(starts: list[int], sizes: list[int], after: int) -> None:
    rng = np.random.default_rng(2)
    expected = np.zeros((2, max([*map(sum, zip(starts, sizes, strict=False)), 0]) + after, 3))
    running = RunningSum(expected, XP)
    for start, size in zip(starts, sizes, strict=False):
        piece = rng.standard_normal((2, size, 3))
        expected[:, start : start + size] += piece
        running.add(start, piece)
    np.testing.assert_allclose(running.total(), expected, atol=1e-14)


def test_a_sum_goes_to_the_axes_along_which_a_factor_was_broadcast() -> None:
    x = np.random.default_rng(3).standard_normal((2, 3, 4, 1, 5, 6))
    for lead in ((), (1,), (4, 1), (1, 1), (3, 4, 1), (3, 1, 1), (1, 4, 1), (2, 1, 4, 1), (1, 3, 1, 1), (2, 3, 4, 1)):
        summed = tuple(axis for axis, size in enumerate((1,) * (4 - len(lead)) + lead) if size == 1)
        expected = x.sum(axis=summed).reshape(*lead, 5, 6)
        np.testing.assert_allclose(sum_to(x, lead, xp=XP), expected, atol=1e-13, err_msg=f"{lead}")
    x = x.reshape(2, 1, 3, 4, 5, 6)
    np.testing.assert_allclose(sum_to(x, (3, 1), xp=XP), x.sum((0, 1, 3))[:, None], atol=1e-13)


@pytest.mark.parametrize("tables", ["rel_k", "key_table", "rel_k key_table"])
@pytest.mark.parametrize("rel_scale", [None, 0.7])
@pytest.mark.parametrize("own", [True, False])
def test_factors_that_vary_are_taken_in_before_a_kernel(
    tables: str, rel_scale: float | None, own: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    case = dense.Case("varying", tables=tables, options={"scale": 0.3, "rel_scale": rel_scale}, own_tables=own)
    expected = dense.vjp(case.d_out(), case.arrays(), case.call())
    monkeypatch.setattr("relskew_core._kernel.by_head.varies", lambda x: isinstance(x, float))
    options = problem(Arguments(**case.arrays(), **case.call())).options
    assert (options.scale, options.rel_scale) == (1.0, 1.0)
    check(gradients_on(NUMPY, case.d_out(), case.arrays(), case.call()), expected)
    for name in ("scale", "rel_scale"):
        with pytest.raises(ValueError, match=f"^`{name}` must be a finite number, got float inf$"):
            relative_attention(**case.arrays(), **{**case.call(), name: np.inf})
