"""What sinks, segments, positions, blocks of a stream, scales by head and dropout mean, and what they cost."""

from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings

import dense
import oracles
import relskew_core as relskew
import strategies
from libraries import LIBRARIES, NATIVE, Library
from relskew_core import Span, attention_weights, relative_attention_2d, relative_attention_vjp
from strategies import Call, Way

relative_attention: Any = relskew.relative_attention  # the result may be a pair

RNG = np.random.default_rng(7)
Q, K, V = RNG.standard_normal((3, 2, 4, 40, 8))
TABLE = RNG.standard_normal((4, 79, 8))
STEPS = np.arange(40)


@settings(deadline=None)
@given(call=strategies.extended(strategies.rich_calls()))
@pytest.mark.parametrize("way", strategies.WAYS, ids=str)
def test_all_options_together_equal_the_loops(way: Way, call: Call) -> None:
    assert strategies.close(call.on(way), call.oracle())


@pytest.mark.parametrize("case", [case for case in dense.CASES if "dropout" not in case.options], ids=str)
def test_weights_are_those_of_attention(case: dense.Case) -> None:
    """Attention to values that are one-hot."""
    arrays = case.arrays()
    given = {name: x for name, x in arrays.items() if name not in ("v", "rel_v")}
    keys = np.broadcast_to(np.eye(case.m), (*arrays["k"].shape[:-1], case.m))
    expected = relative_attention(v=keys, **given, **case.call())
    weights = attention_weights(**given, **case.call(), chunk_size=3)
    np.testing.assert_allclose(weights, expected, rtol=0, atol=1e-14)


@pytest.mark.parametrize("softcap", [1e-3, 1.5, 64.0, 65.0, 1e6])
def test_a_softcap_of_any_size_loses_no_more_than_rounding(softcap: float) -> None:
    """torch's native path has two branches, for low and for high softcaps."""
    exact, lse = relative_attention(Q, K, V, TABLE, softcap=softcap, return_lse=True)
    single = [torch.tensor(x, dtype=torch.float32) for x in (Q, K, V, TABLE)]
    found, sums = relative_attention(*single, softcap=softcap, return_lse=True, impl=NATIVE)
    np.testing.assert_allclose(found, exact, rtol=0, atol=2e-5)
    np.testing.assert_allclose(sums, lse, rtol=0, atol=2e-5)


def test_a_sink_of_minus_infinity_is_none() -> None:
    for shape, offset in ((4, 0), (4, -20), (Q.shape[:3], -20)):  # the first queries see no key
        none = np.full(shape, -np.inf)
        expected = relative_attention(Q, K, V, offset=offset, causal=True, return_lse=True)
        found = relative_attention(Q, K, V, offset=offset, causal=True, return_lse=True, sinks=none)
        for one, other in zip(found, expected, strict=True):
            np.testing.assert_allclose(one, other, rtol=0, atol=1e-14)


def test_parts_of_keys_merge_with_one_sink_among_them() -> None:
    sinks = RNG.standard_normal(4)
    whole = relative_attention(Q, K, V, TABLE, sinks=sinks, return_lse=True)
    parts = [
        relative_attention(Q, K[:, :, :15], V[:, :, :15], TABLE, Span.full(40), offset=0, sinks=sinks, return_lse=True),
        relative_attention(Q, K[:, :, 15:], V[:, :, 15:], TABLE, Span.full(40), offset=-15, return_lse=True),
    ]
    merged = relskew.merge_attention([out for out, _ in parts], [lse for _, lse in parts])
    for found, expected in zip(merged, whole, strict=True):
        np.testing.assert_allclose(found, expected, rtol=0, atol=1e-13)


@pytest.mark.parametrize("side", ["query", "key"])
@pytest.mark.parametrize("span", [Span.clipped(3), Span(2, 5, "zero"), Span.full(30)], ids=str)
def test_logits_by_position_are_those_of_the_loops(side: Any, span: Span) -> None:
    queries, keys = RNG.integers(-9, 9, (2, 40)), RNG.integers(-9, 9, 11)
    table = RNG.standard_normal((4, span.rows, 8))
    for causal in (False, True):
        given = Q if side == "query" else K[:, :, :11]
        found = relskew.relative_logits(given, table, span, positions=(queries, keys), side=side, causal=causal)
        expected = np.zeros((2, 4, 40, 11))
        for item, head, i, j in np.ndindex(expected.shape):
            r = int(keys[j] - queries[item, i])
            row = None if causal and r > 0 else oracles.row_of(r, span)
            if row is not None:
                expected[item, head, i, j] = table[head, row] @ given[item, head, i if side == "query" else j]
        np.testing.assert_allclose(found, expected, rtol=0, atol=1e-13)


@pytest.mark.parametrize("side", ["query", "key"])
def test_logits_by_position_without_heads_and_in_half_precision(side: Any) -> None:
    positions, table = (np.arange(40) // 2, np.arange(12) * 3), RNG.standard_normal((1, 7, 8))
    given = Q[0, 0] if side == "query" else K[0, 0, :12]
    options: dict[str, Any] = {"positions": positions, "side": side, "causal": True, "span": Span.clipped(3)}
    alone = relskew.relative_logits(given, table, **options)
    with_heads = relskew.relative_logits(given[None], table, **options)
    np.testing.assert_array_equal(with_heads, alone[None], strict=True)
    np.testing.assert_array_equal(relskew.relative_logits(given[None, None], table, **options), with_heads[None])
    far: dict[str, Any] = {"positions": (positions[0], positions[1] * 0 + 100), "side": side, "span": Span.full(4)}
    with pytest.raises(ValueError, match=r"`table` .* queries see 81 … 100"):
        relskew.relative_logits(given, table, **far)
    half = relskew.relative_logits(given.astype("float16"), table.astype("float16"), **options)
    assert half.dtype == np.float16
    np.testing.assert_allclose(half, alone, rtol=0, atol=2e-2)
    assert not alone[positions[0][:, None] < positions[1]].any()  # the future


@pytest.mark.parametrize("dtype", ["float64", "float16"])
def test_a_table_of_one_head_is_the_table_where_there_are_no_heads(dtype: str) -> None:
    q, table = Q[0, 0].astype(dtype), TABLE[:1].astype(dtype)
    weights = RNG.standard_normal((40, 40)).astype(dtype)
    for offset, causal in ((0, False), (2, True)):
        span = Span(39 + offset, 39 - offset)
        given: dict[str, Any] = {"span": span, "offset": offset, "causal": causal}
        for found, same in ((relskew.relative_logits(q, table, n_keys=40, **given),
                             relskew.relative_logits(q, table[0], n_keys=40, **given)),
                            (relskew.relative_values(weights, table, **given),
                             relskew.relative_values(weights, table[0], **given)),
                            (relative_attention(q, q, q, table, **given),
                             relative_attention(q, q, q, table[0], **given))):  # fmt: skip
            np.testing.assert_array_equal(found, same, strict=True)
            assert found.dtype == dtype


def test_a_causal_table_is_long_enough_for_causal_logits_of_keys() -> None:
    k, table = RNG.standard_normal((2, 3, 4))
    logits = relskew.relative_logits(k, table, n_queries=3, causal=True, side="key")
    expected = [[table[j - i + 2] @ k[j] if j <= i else 0.0 for j in range(3)] for i in range(3)]
    np.testing.assert_allclose(logits, expected, atol=1e-14)
    one = relskew.relative_logits(k[:1], table, n_queries=1, offset=0, causal=True, side="key")  # a single row
    np.testing.assert_allclose(one, [[table[2] @ k[0]]], atol=1e-14)


@pytest.mark.parametrize("kind", ["int8", "uint8", "int16", "uint16", "int32", "uint32", "int64", "uint64"])
def test_small_integers_never_wrap(kind: Any) -> None:
    top = min(np.iinfo(kind).max, 2**20)
    values = np.asarray([top, 0, 1, top - 1] * 10)
    narrow = values.astype(kind)
    for name, wide, own in (("positions", (values, values), (narrow, narrow)), ("segments", values, narrow)):
        found, expected = (relative_attention(Q, K, V, TABLE[:, :5], Span.clipped(2), **{name: x}) for x in (own, wide))
        np.testing.assert_array_equal(found, expected)


def test_a_table_need_not_reach_what_no_query_sees() -> None:
    late, short = np.arange(40) % 2 * 50, Span(78, 0)  # the future
    gradients = relative_attention_vjp(Q, Q, K, V, TABLE, short, positions=(late, late), causal=True, softcap=5.0)
    assert all(np.isfinite(x).all() for x in gradients if x is not None)


def test_a_table_that_positions_outrun_is_refused_or_gives_nan() -> None:
    stamps = np.asarray([0, 100, 3, 50] * 10)
    far = r"`rel_k` reaches the relative positions -39 … 39, but queries see -100 … 100"
    with pytest.raises(ValueError, match=far):
        relative_attention(Q, K, V, TABLE, positions=(stamps, stamps))
    with pytest.raises(ValueError, match=r"queries see -50 … 50"):
        relative_attention(Q, K, V, TABLE, positions=(stamps, stamps), window=(50, 50))
    relative_attention(Q, K, V, TABLE, positions=(stamps, stamps), window=(46, 39))  # 47 is the next position
    jax, options = pytest.importorskip("jax"), {"causal": True, "span": Span.full(40)}
    attend = jax.jit(lambda at, *given: relative_attention(*given, positions=(at, at), **options))
    found = np.asarray(attend(stamps, Q, K, V, TABLE))
    np.testing.assert_array_equal(np.isnan(found).all(-1)[0, 0], np.isin(stamps, [50, 100]))


def dropped(impl: Any = "auto", dropout: float = 0.3, seed: int = 3, n: int = 300, **options: Any) -> Any:
    """Which weights are kept, by values that are one-hot."""
    x = torch.zeros(2, 2, n, 4, dtype=torch.float64)
    v = torch.eye(n, dtype=torch.float64).expand(2, 2, n, n)
    out = relative_attention(x, x, v, dropout=dropout, seed=seed, impl=impl, **options)
    assert isinstance(out, torch.Tensor)
    return out * n * (1 - dropout)


def test_a_seed_drops_the_same_in_every_way() -> None:
    expected = dropped()
    assert torch.all((expected - expected.round()).abs() < 1e-9)
    for options in ({"impl": "portable"}, {"chunk_size": 7}, {"impl": NATIVE, "chunk_size": 300}):
        torch.testing.assert_close(dropped(**options), expected, rtol=0, atol=1e-9)
    x, v = np.zeros((2, 2, 300, 4)), np.broadcast_to(np.eye(300), (2, 2, 300, 300))
    found = relative_attention(x, x, v, dropout=0.3, seed=3) * 300 * 0.7
    np.testing.assert_allclose(found, expected.numpy(), rtol=0, atol=1e-9)
    assert not torch.equal(dropped(seed=4), expected)
    assert torch.equal(dropped(seed=3 + 2**31), expected)


def test_dropout_goes_by_positions_and_not_by_steps() -> None:
    options: dict[str, Any] = {"span": Span.full(40), "causal": True, "dropout": 0.4, "seed": 1}
    whole = relative_attention(Q, K, V, TABLE, **options)
    for offset in (30, [30, 30]):
        step = relative_attention(Q[:, :, 30:], K, V, TABLE, **options, offset=offset)
        np.testing.assert_allclose(whole[:, :, 30:], step, rtol=0, atol=1e-13)
    places = torch.arange(300)
    for positions in ((places, places), (7 * places + 5, 9 - places)):  # given positions are not places in the call
        assert torch.equal(dropped(positions=positions), dropped())


def test_what_is_dropped_is_as_good_as_independent() -> None:
    """Rates of everything that could be related: rows, columns, heads, items, seeds, neighbours."""
    kept = dropped(dropout=0.25).round()
    rate, spread = 0.75, (0.75 * 0.25) ** 0.5
    assert kept.mean().item() == pytest.approx(rate, abs=5 * spread / kept.numel() ** 0.5)
    for axis in (-1, -2):  # rows and columns: their means scatter like those of independent draws
        means = kept.mean(axis).flatten()
        assert means.std().item() == pytest.approx(spread / 300**0.5, rel=0.1)
    other = dropped(dropout=0.25, seed=4).round()
    pairs = [
        (kept[0], kept[1]), (kept[:, 0], kept[:, 1]), (kept, other), (kept[..., 1:], kept[..., :-1]),
        (kept[..., 1:, :], kept[..., :-1, :]), (kept[..., 1:, 1:], kept[..., :-1, :-1]), (kept, kept.mT),
    ]  # fmt: skip
    for a, b in pairs:
        correlation = ((a - rate) * (b - rate)).mean().item() / spread**2
        assert abs(correlation) < 5 / a.numel() ** 0.5
    # The four corners of a rectangle would correlate if the hashes of rows and columns were joined too simply.
    a = (kept - rate) / spread
    corners = a[..., ::2, ::2] * a[..., 1::2, ::2] * a[..., ::2, 1::2] * a[..., 1::2, 1::2]
    assert abs(corners.mean().item()) < 5 / corners.numel() ** 0.5


@pytest.mark.parametrize("dropout", [1e-9, 0.999])
def test_dropout_near_0_and_1_keeps_its_share(dropout: float) -> None:
    kept = (dropped(dropout=dropout) > 0).double()
    assert kept.mean().item() == pytest.approx(1 - dropout, abs=2e-3)


def test_seeds_come_in_every_form() -> None:
    expected = relative_attention(Q, K, V, dropout=0.5, seed=12)
    for seed in (np.asarray(12), np.int8(12), np.uint64(12), np.asarray(12, np.uint8)):
        np.testing.assert_array_equal(relative_attention(Q, K, V, dropout=0.5, seed=seed), expected)
    tensors = map(torch.asarray, (Q, K, V))
    np.testing.assert_array_equal(relative_attention(*tensors, dropout=0.5, seed=np.int64(12)), expected)
    jax = pytest.importorskip("jax")
    q, k, v = (jax.numpy.asarray(x) for x in (Q, K, V))
    attend = jax.jit(lambda key: relative_attention(q, k, v, dropout=0.5, seed=key))
    one, same, other = map(np.asarray, map(attend, (jax.random.key(1), jax.random.PRNGKey(1), jax.random.key(2))))
    np.testing.assert_array_equal(one, same)
    assert not np.array_equal(one, other)
    np.testing.assert_allclose(attend(jax.numpy.uint32(12)), expected, rtol=0, atol=1e-12)


def test_blocks_go_by_positions_that_follow_one_another_too() -> None:
    """Position 6 is in the third block of three, and sees nothing of the first, where the key at 2 is."""
    one = np.ones((1, 1))
    at = np.asarray([6]), np.asarray([2])
    _, lse = relative_attention(one, one, one, positions=at, block_size=3, return_lse=True)
    assert lse[0] == -np.inf


@pytest.mark.parametrize("factors", [{"scale": 0.4}, {"rel_scale": -0.7}, {"scale": 0.4, "rel_scale": -0.7}], ids=str)
@pytest.mark.parametrize("heads", [True, False], ids=["heads", "no heads"])
@pytest.mark.parametrize("row", [row for row in LIBRARIES if not row.traced], ids=str)
def test_one_learned_number_is_that_number(row: Library, heads: bool, factors: dict[str, float]) -> None:
    row.needed()
    rng, lead = np.random.default_rng(2), (2, 3) if heads else ()
    dtype = row.dtypes[0]
    arrays = {name: row.asarray(rng.standard_normal((*lead, 5, 4)), dtype) for name in ("q", "k", "v")}
    arrays |= {name: row.asarray(rng.standard_normal((9, 4)), dtype) for name in ("rel_k", "key_table")}
    by_head = {name: row.asarray(np.full(3 if heads else 1, x), dtype) for name, x in factors.items()}
    one = {name: row.asarray(np.asarray(x), dtype) for name, x in factors.items()}
    d_out = row.asarray(rng.standard_normal((*lead, 5, 4)), dtype)

    def both(given: dict[str, Any]) -> tuple[list[Any], tuple[str, ...]]:
        with row.setting():
            out = row.call(relative_attention, {**arrays, **given}, chunk_size=2)
            gradients = row.call(relative_attention_vjp, {"d_out": d_out, **arrays, **given}, chunk_size=2)
            return [out, *gradients], ("out", *gradients._fields)

    (found, names), (expected, _) = both(one), both(by_head)
    for x, like, name in zip(found, expected, names, strict=True):
        if like is not None:
            wanted = row.to_numpy(like)
            wanted = wanted.sum() if name in factors else wanted
            assert row.to_numpy(x).shape == wanted.shape
            np.testing.assert_allclose(row.to_numpy(x), wanted, rtol=1e-4, atol=1e-5 if dtype != "bfloat16" else 0.05)


def test_autograd_learns_one_number() -> None:
    jax, jnp = pytest.importorskip("jax"), pytest.importorskip("jax.numpy")
    q, table = torch.randn(2, 3, 5, 4, dtype=torch.float64), torch.randn(9, 4, dtype=torch.float64)
    one = torch.tensor(0.4, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(lambda scale: relative_attention(q, q, q, table, scale=scale), one)
    gradient = jax.jit(jax.grad(lambda x, q, t: relative_attention(q, q, q, t, rel_scale=x).sum()))
    found = gradient(*(jnp.asarray(x.detach().numpy()) for x in (one, q, table)))
    relative_attention(q, q, q, table, rel_scale=one).sum().backward()
    assert one.grad is not None
    np.testing.assert_allclose(found, one.grad, rtol=1e-10)


def test_one_learned_number_on_a_grid_and_as_weights() -> None:
    q, table = np.random.default_rng(4).standard_normal((2, 3, 6, 4)), np.ones((5, 4))
    grid: dict[str, Any] = {"q_grid": (2, 3), "k_grid": (2, 3), "span_h": Span.clipped(2), "span_w": Span.clipped(2)}
    for factor in ({"scale": 0.3}, {"rel_scale": 0.3}):
        one: Any = {name: np.asarray(x, q.dtype) for name, x in factor.items()}
        number: Any = factor
        np.testing.assert_allclose(attention_weights(q, q, **one), attention_weights(q, q, **number))
        np.testing.assert_allclose(*(relative_attention_2d(q, q, q, table, table, **grid, **x) for x in (one, number)))


@pytest.mark.parametrize("impl", ["auto", "portable"])
@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_factors_in_half_precision_are_as_precise_as_numbers(library: Library, dtype: str, impl: Any) -> None:
    if dtype not in library.dtypes:
        pytest.skip("not a dtype of this library")
    rng = np.random.default_rng(0)
    q, k = (x / np.linalg.norm(x, axis=-1, keepdims=True) for x in rng.standard_normal((2, 2, 2, 40, 8)))
    drawn = {"q": q, "k": k, "v": rng.standard_normal((2, 2, 40, 8)), "rel_k": rng.standard_normal((79, 8)) / 4}
    numbers: dict[str, Any] = {"scale": 100.0, "rel_scale": 9.0}
    half = {name: library.asarray(x, dtype) for name, x in {**drawn, "d_out": np.ones(drawn["v"].shape)}.items()}
    factors = {name: library.asarray(np.full(2, x), dtype) for name, x in numbers.items()}
    rounded = {name: library.to_numpy(half[name]).astype(np.float64) for name in drawn}
    tensors: dict[str, Any] = {name: torch.tensor(x) for name, x in rounded.items()}
    gradients = dense.vjp(np.ones(drawn["v"].shape), rounded, numbers).values()
    expected = [oracles.attention(**tensors, **numbers).out, *gradients]

    def errors(arrays: dict[str, Any], **options: Any) -> list[float]:
        def called(d_out: Any, **given: Any) -> list[Any]:
            found = relative_attention_vjp(d_out, **given, **options, impl=impl)
            return [relative_attention(**given, **options, impl=impl), *(getattr(found, name) for name in drawn)]

        found = map(library.to_numpy, library.call(called, arrays))
        return [oracles.relative_error(x, y) for x, y in zip(found, expected, strict=True)]

    of_numbers = errors(half, **numbers)
    for name, one, other in zip(["out", *drawn], errors({**half, **factors}), of_numbers, strict=True):
        assert one <= 1.2 * other, name
