"""What must hold for every call: properties of the layouts and of attention over random shapes, spans and patterns."""

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

import oracles
import relskew_core as relskew
from relskew_core import Span
from strategies import WAYS, Call, Way, calls, close, offsets, seeds, sizes, spans

leads = st.sampled_from([(), (3,), (2, 1), (0,)])
property_test = settings(deadline=None, max_examples=60)


def every_way(function: Callable[..., None]) -> Callable[..., None]:
    """Try a property on NumPy's portable and native path, and on torch's path for ``impl="auto"``."""
    return pytest.mark.parametrize("way", WAYS, ids=str)(property_test(function))


def random(seed: int, *shape: int) -> NDArray[np.float64]:
    return np.random.default_rng(seed).standard_normal(shape)


@property_test
@given(leads, sizes, sizes, seeds)
def test_unskew_is_the_adjoint_of_skew(lead: tuple[int, ...], n: int, m: int, seed: int) -> None:
    """Over the integers, so that both sums are exact."""
    rng = np.random.default_rng(seed)
    x = rng.integers(-9, 10, (*lead, n, n + m - 1))
    s = rng.integers(-9, 10, (*lead, n, m))
    assert np.sum(relskew.skew(x) * s) == np.sum(x * relskew.unskew(s))


@pytest.mark.parametrize("n", [1, 2, 5])
@pytest.mark.parametrize("m", [1, 2, 7])
@pytest.mark.parametrize("lead", [(), (3,), (2, 3)], ids=str)
def test_skew_copies_nothing(lead: tuple[int, ...], n: int, m: int) -> None:
    x = random(0, *lead, n, n + m - 1)
    assert np.shares_memory(relskew.skew(x), x)
    tensor = torch.tensor(x)
    assert relskew.skew(tensor).untyped_storage().data_ptr() == tensor.untyped_storage().data_ptr()


@property_test
@given(st.data(), sizes, sizes, offsets, st.booleans(), seeds)
def test_logits_and_values_equal_the_loops(
    data: st.DataObject, n: int, m: int, offset: int, causal: bool, seed: int
) -> None:
    positions = [r for r in range(-(n - 1 + offset), m - offset) if not causal or r <= 0]
    span = data.draw(spans(positions))
    by_head = data.draw(st.sampled_from([(), (3,)]))
    q, weights = random(seed, 2, 3, n, 2), random(seed, 2, 3, n, m)
    table = random(seed + 1, *by_head, span.rows, 2)
    options: dict[str, Any] = {"offset": offset, "causal": causal}
    logits = relskew.relative_logits(q, table, span, n_keys=m, **options)
    values = relskew.relative_values(weights, table, span, **options)
    assert np.allclose(logits, oracles.relative_logits(q, table, span, n_keys=m, **options), rtol=0, atol=1e-12)
    assert np.allclose(values, oracles.relative_values(weights, table, span, **options), rtol=0, atol=1e-12)
    assert np.isclose(np.sum(logits * weights), np.sum(q * values), rtol=0, atol=1e-11)
    if causal and span.beyond == "error":  # the table has no future
        return
    given: dict[str, Any] = {"span": Span(span.right, span.left, span.beyond), "causal": causal}
    of_keys = relskew.relative_logits(q, table, n_queries=m, side="key", offset=-offset, **given)  # q in place of keys
    seen = True if not causal else np.arange(n) - np.arange(m)[:, None] + offset <= 0
    turned = np.swapaxes(oracles.relative_logits(q, table[..., ::-1, :], span, n_keys=m, offset=offset), -1, -2)
    assert np.allclose(of_keys, np.where(seen, turned, 0.0), rtol=0, atol=1e-12)
    ragged = [-offset, -offset if span.beyond == "error" else 1]
    by_item = relskew.relative_logits(q, table, n_queries=m, side="key", offset=ragged, **given)
    assert np.allclose(by_item[0], of_keys[0], rtol=0, atol=1e-14)


@property_test
@given(st.data(), sizes, sizes, offsets, seeds)
def test_causal_building_blocks_read_nothing_of_the_future(
    data: st.DataObject, n: int, m: int, offset: int, seed: int
) -> None:
    """Neither a table's rows nor weights at r > 0, and no row of queries or weights but one's own."""
    span = data.draw(spans([], beyond=data.draw(st.sampled_from(["clip", "zero"]))))
    q, weights, table = random(seed, n, 2), random(seed, n, m), random(seed + 1, span.rows, 2)

    def both() -> list[Any]:
        options: dict[str, Any] = {"offset": offset, "causal": True}
        logits = relskew.relative_logits(q, table, span, n_keys=m, **options)
        return [logits, relskew.relative_values(weights, table, span, **options)]

    clean, i = both(), data.draw(st.integers(0, n - 1))
    table[span.left + 1 :] = np.nan
    weights[np.arange(m) > np.arange(n)[:, None] + offset] = np.nan
    weights[i] = q[i] = np.nan
    for before, after in zip(clean, both(), strict=True):
        assert np.array_equal(np.delete(after, i, axis=0), np.delete(before, i, axis=0))


@every_way
@given(call=calls(beyond="clip"), left=st.integers(0, 12), right=st.integers(0, 12))
def test_a_table_is_too_short_exactly_if_some_query_sees_beyond_it(way: Way, call: Call, left: int, right: int) -> None:
    span = Span(left, right)
    call = call.but(span=span, rel_bias=np.zeros(span.rows), rel_k=None, rel_v=None, rel_q=None)
    try:
        expected = call.oracle()
    except LookupError:
        with pytest.raises(ValueError, match=r"^`rel_bias` reaches the relative positions .* `span` "):
            call.on(way)
    else:
        assert close(call.on(way), expected)


POISONS = st.sampled_from([np.nan, np.inf, -np.inf, 1e300])


@every_way
@given(call=calls(all_tables=True), poison=POISONS)
def test_keys_that_a_query_may_not_see_do_not_reach_it(way: Way, call: Call, poison: float) -> None:
    """Key by key: whoever may not see it, by the pattern or by the mask, gets what it got before."""
    clean, visible = call.on(way), call.visible()
    for j in range(call.m):
        k = call.arrays["k"].copy()
        k[..., j, :] = poison
        with np.errstate(all="ignore"):
            spoilt = call.but(k=k).on(way)
        blind = ~visible[..., j]
        assert np.array_equal(spoilt.out[blind], clean.out[blind])
        assert np.array_equal(spoilt.lse[blind], clean.lse[blind])


@every_way
@given(call=calls(all_tables=True) | calls(all_tables=True, masked=False))
def test_a_query_of_nan_changes_no_other_query(way: Way, call: Call) -> None:
    """Where one query's row ends in a skewed view, its neighbour's begins: neither may read the other."""
    clean = call.on(way)
    for i in range(call.n):
        spoilt = {name: call.arrays[name].copy() for name in ("q", "rel_q") if name in call.arrays}
        for x in spoilt.values():
            x[..., i, :] = np.nan
        with np.errstate(all="ignore"):
            found = call.but(**spoilt).on(way)
        assert np.array_equal(np.delete(found.out, i, axis=-2), np.delete(clean.out, i, axis=-2))
        assert np.array_equal(np.delete(found.lse, i, axis=-1), np.delete(clean.lse, i, axis=-1))


@pytest.mark.parametrize("function", [
    lambda x, table: relskew.resize_table(x, 40, method="cubic"),
    lambda x, table: relskew.relative_attention_2d(x / 16, x, x, table, table, q_grid=(2, 3), k_grid=(2, 3)),
], ids=["resized", "grid"])  # fmt: skip
def test_half_precision_is_rounded_once(function: Callable[[Any, Any], Any]) -> None:
    rng = np.random.default_rng(7)
    x, table = rng.standard_normal((2, 1, 6, 311)), rng.standard_normal((11, 311))
    half = [y.astype(np.float16) for y in (x, table)]
    found, exact = function(*half), function(*(y.astype(np.float64) for y in half))
    assert found.dtype == np.float16
    np.testing.assert_allclose(found, exact, rtol=2**-10, atol=2**-16 * abs(exact).max())
