"""Integers of 32 bits: libraries that have no others, and casts that do not wrap."""

from typing import Any

import array_api_compat.numpy
import array_api_strict
import numpy as np
import pytest

from relskew_core._array.precision import blocks, shifted
from relskew_core._kernel.dropout import narrowed
from relskew_core._kernel.shapes import Pattern
from relskew_core._positions.ragged import RaggedVisibility, is_ragged
from relskew_core._positions.visibility import FURTHEST

STRICT, XP = array_api_strict, array_api_compat.numpy
Q = STRICT.zeros((2, 4, 3), device=STRICT.Device("device1"))


@pytest.fixture(params=[32, 64])
def bits(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Give the standard's reference integers of 32 bits where none are asked for, as JAX has them; or leave it be."""
    asarray = STRICT.asarray

    def narrow(x: Any, *, dtype: Any = None, **options: Any) -> Any:
        return asarray(x, dtype=STRICT.int32 if dtype is None and type(x) is int else dtype, **options)

    if request.param == 32:
        monkeypatch.setattr(STRICT, "asarray", narrow)
    return request.param


@pytest.mark.parametrize("how", ["by offset", "by value", "by item"])
def test_bounds_are_no_larger_than_integers_can_be_counted_to(bits: int, how: str) -> None:
    # Python's integers are unbounded; positions may be as far apart as integers allow, and offsets are limited further.
    furthest = FURTHEST if bits == 64 else {"by offset": FURTHEST, "by value": 2**32 - 2, "by item": 2**30}[how]
    offset: Any = [1, 2] if how == "by item" else 1
    q = Q[:, None, ...] if how == "by item" else Q

    def of(left: int, right: int) -> Any:
        return Pattern(left, right).of(q, 5, offset, by_value=how == "by value", xp=STRICT)

    kept, gone = of(furthest, furthest - 1), of(furthest + 1, furthest + 1)
    assert (kept.left, kept.right) == (furthest, furthest - 1)
    assert (gone.left, gone.right) == (None, None)
    if isinstance(kept, RaggedVisibility):
        assert kept.known == (1, 2)
        assert (kept.offset_by_item.dtype, kept.offset_by_item.device) == (getattr(STRICT, f"int{bits}"), Q.device)


INTEGERS = pytest.mark.parametrize(("dtype", "end"), [("int32", 2**31), ("int64", 2**63)])


@INTEGERS
def test_sums_stop_at_the_ends_of_integers(dtype: str, end: int) -> None:
    x = np.asarray([1 - end, 2 - end, -1, 0, 1, end - 3, end - 2], dtype)
    for by in (0, 1, 5, end // 2, end - 1, end, end + 1, end + 5, 2 * end - 3, 2 * end - 2, 2**70):
        for number in (by, -by):
            found = shifted(x, number, xp=XP)
            assert found.dtype == x.dtype
            assert found.tolist() == [max(-end, min(each + number, end - 1)) for each in x.tolist()], number
    ends = np.asarray([-end, end - 1], dtype)
    assert shifted(ends, 1, xp=XP).tolist() == [1 - end, end - 1]
    assert shifted(ends, -1, xp=XP).tolist() == [-end, end - 2]


@INTEGERS
def test_blocks_of_any_size(dtype: str, end: int) -> None:
    x = np.asarray([-end, 1 - end, -4, -1, 0, 3, end - 1], dtype)
    for size in (1, 4, end - 1, end, end + 1, 2 * end, 2**70):
        assert blocks(x, size, xp=XP).tolist() == [each // size for each in x.tolist()]


def test_the_higher_bits_are_left_out_by_hand(monkeypatch: pytest.MonkeyPatch) -> None:
    """A cast of what does not fit wraps in some libraries, and gives the largest integer in others."""
    astype = vars(XP)["astype"]

    def fitting(x: Any, dtype: Any) -> Any:
        assert x.min() >= -(2**31)
        assert x.max() < 2**31
        return astype(x, dtype)

    monkeypatch.setattr(XP, "astype", fitting)
    numbers = [0, 5, -5, 2**31 - 1, 2**31, -(2**31), -(2**31) - 1, 2**32, 2**32 + 2**31 + 1, 2**33 + 7, -(2**40) - 3]
    found = narrowed(np.asarray(numbers), xp=XP)
    assert found.dtype == np.int32
    assert found.tolist() == [(number + 2**31) % 2**32 - 2**31 for number in numbers]


def test_traced_offsets_are_ragged() -> None:
    class Traced:
        """A number that a tracer has: no integer."""

        ndim, dtype = 0, "int32"

    assert is_ragged(Traced())
    assert is_ragged(np.asarray([3]))
    assert not is_ragged(np.asarray(3))
