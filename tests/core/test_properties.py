"""What must hold for every call: properties of the layouts and of attention over random shapes, spans and patterns."""

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

import oracles
import relskew_core as relskew
from libraries import LIBRARIES
from relskew_core import Span
from strategies import WAYS, Call, Way, calls, close, offsets, pieces, seeds, sizes, spans

leads = st.sampled_from([(), (3,), (2, 1), (0,)])
property_test = settings(deadline=None, max_examples=60)


def every_way(function: Callable[..., None]) -> Callable[..., None]:
    """Try a property on NumPy's portable and native path, and on torch's path for ``impl="auto"``."""
    missing = {row.name: row.missing() for row in LIBRARIES}
    marks = {way: [pytest.mark.skip(reason=reason)] if (reason := missing[way.row]) is not None else [] for way in WAYS}
    params = [pytest.param(way, id=str(way), marks=marks[way]) for way in WAYS]
    return pytest.mark.parametrize("way", params)(property_test(function))


def random(seed: int, *shape: int) -> NDArray[np.float64]:
    return np.random.default_rng(seed).standard_normal(shape)


# Layout ---------------------------------------------------------------------------------------------------------------


@property_test
@given(leads, sizes, sizes, seeds)
def test_skew_is_a_gather(lead: tuple[int, ...], n: int, m: int, seed: int) -> None:
    x = random(seed, *lead, n, n + m - 1)
    columns = n - 1 - np.arange(n)[:, None] + np.arange(m)
    gathered = np.take_along_axis(x, np.broadcast_to(columns, (*lead, n, m)), axis=-1)
    assert np.array_equal(relskew.skew(x), gathered)


@property_test
@given(leads, sizes, sizes, seeds)
def test_unskew_is_the_adjoint_of_skew(lead: tuple[int, ...], n: int, m: int, seed: int) -> None:
    """Over the integers, so that both sums are exact."""
    rng = np.random.default_rng(seed)
    x = rng.integers(-9, 10, (*lead, n, n + m - 1))
    s = rng.integers(-9, 10, (*lead, n, m))
    assert np.sum(relskew.skew(x) * s) == np.sum(x * relskew.unskew(s))


@property_test
@given(leads, sizes, sizes, seeds)
def test_skew_undoes_unskew(lead: tuple[int, ...], n: int, m: int, seed: int) -> None:
    s = random(seed, *lead, n, m)
    assert np.array_equal(relskew.skew(relskew.unskew(s)), s)
    assert np.count_nonzero(relskew.unskew(s)) == np.count_nonzero(s)


@pytest.mark.parametrize("n", [1, 2, 5])
@pytest.mark.parametrize("m", [1, 2, 7])
@pytest.mark.parametrize("lead", [(), (3,), (2, 3)], ids=str)
def test_skew_copies_nothing(lead: tuple[int, ...], n: int, m: int) -> None:
    x = random(0, *lead, n, n + m - 1)
    assert np.shares_memory(relskew.skew(x), x)
    torch = pytest.importorskip("torch")
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


@property_test
@given(st.data(), sizes, sizes, offsets, st.integers(1, 9), st.booleans(), seeds)
def test_logits_depend_on_relative_positions_only(
    data: st.DataObject, n: int, m: int, offset: int, shift: int, causal: bool, seed: int
) -> None:
    span = data.draw(spans([], beyond=data.draw(st.sampled_from(["clip", "zero"]))))
    q, table = random(seed, n, 2), random(seed + 1, span.rows, 2)
    here = relskew.relative_logits(q, table, span, n_keys=m, offset=offset, causal=causal)
    there = relskew.relative_logits(q, table, span, n_keys=m + shift, offset=offset + shift, causal=causal)
    assert np.allclose(here, there[:, shift:], rtol=0, atol=1e-13)


@property_test
@given(st.data(), sizes, sizes, offsets, seeds)
def test_causal_building_blocks_read_nothing_of_the_future(
    data: st.DataObject, n: int, m: int, offset: int, seed: int
) -> None:
    """Neither a table's rows nor weights at r > 0, and no row of queries or weights but one's own."""
    span = data.draw(spans([], beyond=data.draw(st.sampled_from(["clip", "zero"]))))
    q, weights, table = random(seed, n, 2), random(seed, n, m), random(seed + 1, span.rows, 2)
    clean = [
        relskew.relative_logits(q, table, span, n_keys=m, offset=offset, causal=True),
        relskew.relative_values(weights, table, span, offset=offset, causal=True),
    ]
    i = data.draw(st.integers(0, n - 1))
    table[span.left + 1 :] = np.nan
    weights[np.arange(m) > np.arange(n)[:, None] + offset] = np.nan
    weights[i] = q[i] = np.nan
    spoilt = [
        relskew.relative_logits(q, table, span, n_keys=m, offset=offset, causal=True),
        relskew.relative_values(weights, table, span, offset=offset, causal=True),
    ]
    for before, after in zip(clean, spoilt, strict=True):
        assert np.array_equal(np.delete(after, i, axis=0), np.delete(before, i, axis=0))


# Attention against the loops ------------------------------------------------------------------------------------------


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


@every_way
@given(call=calls(), chunk_size=st.integers(1, 12))
def test_chunks_do_not_matter(way: Way, call: Call, chunk_size: int) -> None:
    assert close(call.but(chunk_size=chunk_size).on(way), call.but(chunk_size=None).on(way))


@every_way
@given(call=calls())
def test_a_group_of_queries_shares_its_keys(way: Way, call: Call) -> None:
    q, k, v = (call.arrays[name] for name in "qkv")
    if q.ndim == 2:
        return
    group = q.shape[-3] // k.shape[-3]
    repeated = call.but(k=np.repeat(k, group, axis=-3), v=np.repeat(v, group, axis=-3))
    assert close(call.on(way), repeated.on(way))


# Positions ------------------------------------------------------------------------------------------------------------


@every_way
@given(call=calls(), data=st.data())
def test_queries_may_come_in_pieces(way: Way, call: Call, data: st.DataObject) -> None:
    parts = [queries(call, start, stop).on(way) for start, stop in pieces(data.draw, call.n)]
    assert close(joined(parts), call.on(way))


@every_way
@given(call=calls(beyond="zero") | calls(beyond="clip"), data=st.data())
def test_decoding_with_a_cache_equals_the_whole(way: Way, call: Call, data: st.DataObject) -> None:
    """A causal query needs no key after itself: step by step or in pieces, with only the keys so far."""
    if "mask" in call.arrays:
        call = call.but(mask=np.broadcast_to(call.arrays["mask"], (*call.arrays["q"].shape[:-1], call.m)))
    call = call.but(causal=True, offset=max(call.m - call.n, 0))
    parts = []
    for start, stop in pieces(data.draw, call.n):
        part = queries(call, start, stop)
        end = min(stop + call.offset, call.m)
        part = part.but(k=part.arrays["k"][..., :end, :], v=part.arrays["v"][..., :end, :])
        if "mask" in part.arrays:
            part = part.but(mask=part.arrays["mask"][..., :end])
        parts.append(part.on(way))
    assert close(joined(parts), call.on(way))


@every_way
@given(call=calls(beyond="zero") | calls(beyond="clip"), shift=st.integers(1, 6), seed=seeds)
def test_only_relative_positions_matter(way: Way, call: Call, shift: int, seed: int) -> None:
    """Hidden keys before all others only shift the positions."""
    shift *= call.options["block_size"] or 1
    shape = (*call.arrays["q"].shape[:-1], call.m)
    hidden = np.concatenate(
        [np.zeros((*shape[:-1], shift), dtype=bool), np.broadcast_to(call.visible(), shape)], axis=-1
    )
    mask = call.arrays.get("mask")
    if mask is not None and mask.dtype != np.bool_:
        before = np.zeros((*shape[:-1], shift))
        hidden = np.where(hidden, np.concatenate([before, np.broadcast_to(mask, shape)], axis=-1), -np.inf)
    junk = {
        name: np.concatenate([random(seed, *x.shape[:-2], shift, x.shape[-1]), x], axis=-2)
        for name, x in call.arrays.items()
        if name in ("k", "v")
    }
    assert close(call.but(**junk, mask=hidden, offset=call.offset + shift).on(way), call.on(way))


@every_way
@given(call=calls(), data=st.data())
def test_runs_of_keys_merge_into_the_whole(way: Way, call: Call, data: st.DataObject) -> None:
    """Every part sees its keys from 0 on, so that its offset is the distance to them, negative ones included."""
    parts = []
    for start, stop in pieces(data.draw, call.m, call.options["block_size"] or 1):
        part = call.but(k=call.arrays["k"][..., start:stop, :], v=call.arrays["v"][..., start:stop, :],
                        offset=call.offset - start)  # fmt: skip
        mask = call.arrays.get("mask")
        if mask is not None and mask.shape[-1] > 1:
            part = part.but(mask=mask[..., start:stop])
        parts.append(part.on(way))
    assert close(oracles.Attention(*relskew.merge_attention(*transposed(parts))), call.on(way))


@every_way
@given(call=calls(masked=False), parts=st.integers(1, 4), seed=seeds)
def test_any_sets_of_keys_merge_into_the_whole(way: Way, call: Call, parts: int, seed: int) -> None:
    whose = np.random.default_rng(seed).integers(0, parts, (call.n, call.m))
    found = [call.but(mask=whose == part).on(way) for part in range(parts)]
    assert close(oracles.Attention(*relskew.merge_attention(*transposed(found))), call.on(way))


# What a query may not see ---------------------------------------------------------------------------------------------

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
@given(call=calls(all_tables=True), poison=POISONS)
def test_keys_and_values_that_no_query_sees_change_nothing(way: Way, call: Call, poison: float) -> None:
    unseen = ~call.pattern().any(axis=0)
    k, v = call.arrays["k"].copy(), call.arrays["v"].copy()
    k[..., unseen, :] = v[..., unseen, :] = poison
    assert close(call.but(k=k, v=v).on(way), call.on(way), 0)


@every_way
@given(call=calls(all_tables=True), poison=POISONS)
def test_table_rows_that_no_query_sees_change_nothing(way: Way, call: Call, poison: float) -> None:
    unseen = [row for row in range(call.options["span"].rows) if row not in call.seen_rows()]
    spoilt = {name: call.arrays[name].copy() for name in ("rel_k", "rel_v", "rel_bias") if name in call.arrays}
    for name, table in spoilt.items():
        if name == "rel_bias":
            table[..., unseen] = poison
        else:
            table[..., unseen, :] = poison
    with np.errstate(all="ignore"):
        assert close(call.but(**spoilt).on(way), call.on(way), 0)


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


@every_way
@given(call=calls(), seed=seeds)
def test_what_a_query_may_not_see_changes_nothing(way: Way, call: Call, seed: int) -> None:
    """Query by query: other keys, other values and other numbers in the mask's hidden places make no difference."""
    clean, visible = call.on(way), call.visible()
    everyone: NDArray[np.bool_] = np.any(visible.reshape(-1, call.n, call.m), axis=0)
    for i in range(call.n):
        hidden = ~everyone[i]
        k, v = call.arrays["k"].copy(), call.arrays["v"].copy()
        k[..., hidden, :] = random(seed, *k[..., hidden, :].shape)
        v[..., hidden, :] = random(seed + 1, *v[..., hidden, :].shape)
        changed = call.but(k=k, v=v).on(way)
        assert np.array_equal(changed.out[..., i, :], clean.out[..., i, :])
        assert np.array_equal(changed.lse[..., i], clean.lse[..., i])


@every_way
@given(call=calls())
def test_a_query_that_sees_no_key_gets_zeros(way: Way, call: Call) -> None:
    out, lse = call.on(way)
    dead = ~call.visible().any(axis=-1)
    assert np.all(out[dead] == 0)
    assert np.array_equal(lse == -np.inf, dead)
    assert not np.isnan(out).any()
    assert not np.isnan(lse).any()


def queries(call: Call, start: int, stop: int) -> Call:
    """Return the call of some of its queries, at the same positions."""
    some: dict[str, Any] = {
        name: call.arrays[name][..., start:stop, :] for name in ("q", "rel_q") if name in call.arrays
    }
    mask = call.arrays.get("mask")
    if mask is not None and mask.ndim > 1 and mask.shape[-2] > 1:
        some["mask"] = mask[..., start:stop, :]
    return call.but(**some, offset=call.offset + start)


def joined(parts: list[oracles.Attention]) -> oracles.Attention:
    outs, lses = transposed(parts)
    return oracles.Attention(np.concatenate(outs, axis=-2), np.concatenate(lses, axis=-1))


def transposed(parts: list[oracles.Attention]) -> tuple[list[Any], list[Any]]:
    return [part.out for part in parts], [part.lse for part in parts]


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
