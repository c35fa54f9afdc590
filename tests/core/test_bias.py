"""Biases by relative position: buckets, slopes, and the matrix that is a view."""

import itertools
import math
from collections.abc import Iterator
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch

import oracles
import relskew_core as relskew
from libraries import Library
from relskew_core import Span, alibi_bias, deberta_buckets, proximal_bias, relative_attention, t5_buckets, toeplitz

SPANS = [Span(6, 6), Span(2, 1, "clip"), Span(1, 2, "zero"), Span(0, 0, "clip"), Span(9, 0, "zero"), Span(0, 9, "clip")]


def expected(bias: Any, span: Span, n: int, m: int, offset: int = 0, *, causal: bool = False) -> Any:
    """The matrix, one number at a time."""
    s = np.zeros((*bias.shape[:-1], n, m))
    for i, j in itertools.product(range(n), range(m)):
        r = j - i - offset
        row = None if causal and r > 0 else oracles.row_of(r, span)
        s[..., i, j] = 0.0 if row is None else bias[..., row]
    return s


@pytest.mark.parametrize("causal", [False, True], ids=["all", "causal"])
@pytest.mark.parametrize("span", SPANS, ids=str)
def test_toeplitz_is_the_formula(library: Library, span: Span, causal: bool) -> None:
    bias = np.random.default_rng(0).standard_normal((2, span.rows))
    for n, m, offset in [(4, 4, 0), (1, 5, 2), (5, 1, 0), (3, 4, 1), (2, 3, -3)]:
        want = expected(bias, span, n, m, offset, causal=causal)
        options = {"span": span, "n_queries": n, "n_keys": m, "offset": offset, "causal": causal}
        got = library.call(toeplitz, {"bias": library.asarray(bias, "float64")}, **options)
        assert isinstance(got, library.array_type())
        np.testing.assert_array_equal(library.to_numpy(got), want)


@pytest.mark.parametrize("causal", [False, True], ids=["all", "causal"])
def test_a_bias_must_reach_as_far_as_queries_see(causal: bool) -> None:
    for n, m, offset in itertools.product((1, 2, 4), (1, 3), range(-4, 6)):
        seen = [j - i - offset for i in range(n) for j in range(m) if not causal or j <= i + offset]
        left, right = -min([0, *seen]), max([0, *seen])
        matrix = partial(toeplitz, n_queries=n, n_keys=m, offset=offset, causal=causal)
        assert matrix(np.ones(left + right + 1), Span(left, right)).shape == (n, m)
        shorter = [(left - 1, right)] * (left > 0) + [(left, right - 1)] * (right > 0)
        for short in (Span(*reach) for reach in shorter):
            with pytest.raises(ValueError, match=rf"^`bias` reaches .*, but queries see {min(seen)} … {max(seen)}"):
                matrix(np.ones(short.rows), short)


def test_a_causal_bias_of_which_nothing_is_seen() -> None:
    for lead in ((), (2,), (3, 2)):  # without a span, a causal one with as many rows
        seen_not = toeplitz(np.ones((*lead, 4)), n_queries=2, n_keys=3, offset=-5, causal=True)
        np.testing.assert_array_equal(seen_not, np.zeros((*lead, 2, 3)))


def test_toeplitz_of_numpy_is_a_read_only_view() -> None:
    bias = np.arange(7.0)
    matrix = toeplitz(bias, n_queries=4, n_keys=4)
    assert np.shares_memory(matrix, bias)
    with pytest.raises(ValueError, match="read-only"):
        matrix[0, 0] = 1.0


def test_toeplitz_keeps_integers_and_any_leading_axes() -> None:
    bias = np.arange(30).reshape(2, 3, 5)
    matrix = toeplitz(bias, n_queries=3, n_keys=3)
    assert matrix.dtype == bias.dtype
    assert matrix.shape == (2, 3, 3, 3)
    np.testing.assert_array_equal(matrix[1, 2], [[27, 28, 29], [26, 27, 28], [25, 26, 27]])


def test_gradient_of_toeplitz_sums_the_diagonals() -> None:
    bias = torch.zeros(2, 7, dtype=torch.float64, requires_grad=True)
    weights = np.random.default_rng(1).standard_normal((2, 4, 4))
    (gradient,) = torch.autograd.grad(toeplitz(bias, n_queries=4, n_keys=4), bias, torch.asarray(weights))
    want = [[np.trace(w, offset=r) for r in range(-3, 4)] for w in weights]
    np.testing.assert_allclose(gradient.numpy(), want, rtol=1e-12)


def formula_of_t5(r: int, buckets: int, furthest: int, *, bidirectional: bool) -> int:
    """The published formula, with the logarithm rounded away from its jumps by exact powers."""
    start, side = (buckets // 2 if r > 0 else 0, buckets // 2) if bidirectional else (0, buckets)
    distance = abs(r) if bidirectional else max(-r, 0)
    exact = side // 2
    if distance < exact:
        return start + distance
    step = math.log(distance / exact) / math.log(furthest / exact) * (side - exact)
    return start + min(exact + math.floor(step + 1e-9), side - 1)


BUCKETS = [(32, 128), (8, 16), (4, 2), (5, 3), (7, 10), (320, 800), (12, 97)]


@pytest.mark.parametrize(("buckets", "furthest", "bidirectional"), [
    (buckets, furthest, bidirectional) for bidirectional in (True, False) for buckets, furthest in BUCKETS
    if furthest > (buckets // 2 if bidirectional else buckets) // 2  # there is room for shared buckets
])  # fmt: skip
def test_t5_buckets_are_the_formula(buckets: int, furthest: int, bidirectional: bool) -> None:
    reach = 2 * furthest
    got = t5_buckets(Span(reach, reach), num_buckets=buckets, max_distance=furthest, bidirectional=bidirectional)
    want = [formula_of_t5(r, buckets, furthest, bidirectional=bidirectional) for r in range(-reach, reach + 1)]
    assert list(got) == want
    near = Span(furthest, furthest, "clip")
    clipped = t5_buckets(near, num_buckets=buckets, max_distance=furthest, bidirectional=bidirectional)
    assert set(got[:furthest]) == {clipped[0]}
    assert set(got[-furthest:]) == {clipped[-1]}


def test_the_fewest_buckets() -> None:
    """Present and past; and of DeBERTa the present, which is the furthest past too, and the future."""
    assert t5_buckets(Span(2, 1), num_buckets=2, max_distance=2, bidirectional=False) == (1, 1, 0, 0)
    assert deberta_buckets(Span(2, 1), position_buckets=1, max_distance=None) == (1, 1, 1, 0)


@pytest.mark.parametrize(
    ("size", "furthest"), [(256, 512), (6, 10), (32, 128), (4, 4), (10, 50), (5, 4), (5, 9), (7, 20), (31, 40)]
)
def test_deberta_buckets_are_the_formula(size: int, furthest: int) -> None:
    def bucket(distance: int) -> int:
        half, far = size // 2, abs(distance)
        if far <= half:
            return distance
        step = math.log(far / half) / math.log((furthest - 1) / half) * (half - 1)
        return int(math.copysign(math.ceil(step - 1e-9) + half, distance))

    reach = 3 * furthest if size % 2 == 0 else furthest**2  # an odd size has one more bucket, far out
    got = deberta_buckets(Span(reach, reach), position_buckets=size, max_distance=furthest)
    assert list(got) == [min(max(bucket(-r) + size, 0), 2 * size - 1) for r in range(-reach, reach + 1)]


def test_deberta_rows_without_sharing_are_clipped_distances() -> None:
    got = deberta_buckets(Span(9, 9), position_buckets=4, max_distance=None)
    assert list(got) == [min(max(-r + 4, 0), 7) for r in range(-9, 10)]


@pytest.mark.parametrize("n_heads", [1, 2, 3, 8, 12, 20])
def test_alibi_slopes_fall_geometrically(library: Library, n_heads: int) -> None:
    xp = library.namespace()
    bias = alibi_bias(n_heads, Span(3, 2), xp=xp, dtype=xp.float32)
    rows = np.asarray(bias.get() if hasattr(bias, "get") else bias)
    power = 2 ** int(math.log2(n_heads))
    slopes = sorted([2 ** (-8 * h / power) for h in range(1, power + 1)], reverse=True)
    between = [2 ** (-8 * (h - 0.5) / power) for h in range(1, n_heads - power + 1)]
    want = [[slope * -abs(r) for r in range(-3, 3)] for slope in slopes + between]
    np.testing.assert_allclose(rows, want, rtol=1e-6)
    assert str(bias.dtype).endswith("float32")


def test_formulas_take_after_an_array(library: Library) -> None:
    xp, like = library.namespace(), library.asarray(np.ones((2, 3)), "float32")
    for function in (partial(alibi_bias, 3), proximal_bias):
        got = library.to_numpy(function(Span(3, 2), like=like))
        np.testing.assert_array_equal(got, library.to_numpy(function(Span(3, 2), xp=xp, dtype=xp.float32)))
        assert function(Span(3, 2), like=like).dtype == like.dtype
    for both in ({}, {"like": like, "xp": xp}):
        with pytest.raises(TypeError, match=r"^either `xp` or `like` must be given, got "):
            proximal_bias(Span(1, 1), **both)
    with pytest.raises(TypeError, match=r"^`like` must be an array of a real floating dtype"):
        proximal_bias(Span(1, 1), like=library.asarray(np.ones(2), "int64"))


def test_proximal_bias() -> None:
    bias = proximal_bias(Span(2, 1), xp=np)
    np.testing.assert_allclose(bias, [-math.log(3), -math.log(2), 0, -math.log(2)], rtol=1e-15)
    assert proximal_bias(Span(2, 1), xp=np, dtype=np.float32).dtype == np.float32


@pytest.mark.parametrize("function", [partial(alibi_bias, 2), proximal_bias], ids=["ALiBi", "proximal"])
def test_a_formula_goes_on_where_a_span_would_not(function: Any) -> None:
    for beyond, further in {"clip": "repeated and not", "zero": "zero, as if nothing were nearer, and not"}.items():
        match = rf"^`span.beyond` must be 'error', got '{beyond}': .* {further} .*Span.causal\("
        with pytest.raises(ValueError, match=match):
            function(Span(7, 0, beyond), xp=np)  # type: ignore[arg-type]  # one of the three


@pytest.mark.parametrize("library", ["numpy", "cupy"])
def test_libraries_with_steps_backwards_copy_nothing(library: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("relskew_core._kernel.grids.library_name", lambda xp: library)
    bias = np.arange(20.0)
    assert np.shares_memory(toeplitz(bias, Span(9, 10), n_queries=3, n_keys=4, offset=0), bias)


def test_slopes_of_a_block_are_as_precise_as_its_arrays() -> None:
    rng, heads = np.random.default_rng(0), 12  # the slopes of 12 heads are no powers of 2
    spec = relskew.BlockSpec.alibi(heads, heads, causal=True, bias=False)
    weights: Any = relskew.init_weights(spec, seed=0, dtype=np.dtype("float64"))
    x = 3 * rng.standard_normal((1, 60, heads))
    q, k, v = ((x @ weights[f"{name}_proj.weight"].T).mT[..., None] for name in "qkv")
    span = Span.causal(60)
    out = relative_attention(q, k, v, None, span, rel_bias=alibi_bias(heads, span, xp=np), causal=True)
    expected = out[..., 0].mT @ weights["out_proj.weight"].T
    np.testing.assert_allclose(relskew.attention_block(x, weights, spec), expected, rtol=0, atol=1e-13)


APART = np.arange(20) - np.arange(20)[:, None]


def recipes() -> Iterator[Any]:
    """Yield calls that take biases of papers and of other code, and these by query and key."""
    rng = np.random.default_rng(0)
    h, sums = rng.standard_normal((2, 20)), np.zeros((2, 20, 20))
    for i, j in np.ndindex(20, 20):
        sums[:, i, j] = -np.log1p(np.exp(h[:, j + 1 : i + 1])).sum(-1)
    mask = np.cumsum(np.log1p(np.exp(h)), axis=-1)[:, None]
    # Veisi and others 2025, equation 5: the bias is the sum of -softplus(h[t]) over j < t <= i
    yield pytest.param({"mask": mask, "causal": True}, sums, id="CABLE")
    first, second = rng.standard_normal((1, 4)), rng.standard_normal((4, 2))

    def network(ratio: Any) -> Any:
        return np.moveaxis(np.tanh(ratio[..., None] @ first) @ second, -1, 0)

    bias = network(np.log1p(0.3 * np.maximum(-APART, 0)) / np.log1p(0.3 * np.maximum(19, np.arange(20)[:, None])))
    numbers = network(np.log1p(0.3 * np.arange(19.0, -1, -1)) / np.log1p(0.3 * 19))
    # Li et al. 2024, equations 4 and 6: f(log(c (i - j) + 1) / log(c max(L, i) + 1)), up to its threshold
    yield pytest.param({"rel_bias": numbers, "causal": True}, bias, id="FIRE")
    r = np.arange(-19, 20)
    numbers, bias = (np.stack([np.where(x * side > 0, -np.inf, -abs(x)) for side in (1, -1)]) for x in (r, APART))
    yield pytest.param({"rel_bias": numbers}, bias, id="heads that see one side")
    for bidirectional in (True, False):
        table, bias = rng.standard_normal((2, 8)), np.zeros((2, 20, 20))  # a row of buckets of key - query by head
        for i, j in np.ndindex(20, 20):
            count, behind = (4, int(j > i) * 4) if bidirectional else (8, 0)
            near, distance = count // 2, abs(j - i) if bidirectional else max(i - j, 0)
            if distance >= near:
                grown = near + int(math.log(distance / near) / math.log(12 / near) * (count - near))
                distance = min(grown, count - 1)
            bias[..., i, j] = table[:, behind + distance]
        t5 = relskew.conventions.T5(bidirectional=bidirectional, num_buckets=8, max_distance=12)
        numbers, span = t5.load(table.T)
        given = {"rel_bias": numbers, "span": span, "causal": not bidirectional}
        yield pytest.param(given, bias, id=f"T5X, {bidirectional=}")


@pytest.mark.parametrize(("given", "bias"), [*recipes()])
def test_a_recipe_gives_the_bias_of_its_paper(given: dict[str, Any], bias: Any) -> None:
    x = np.random.default_rng(1).standard_normal((2, 20, 8))
    want = oracles.relative_attention(x, x, x, mask=bias, causal=given.get("causal", False)).out
    assert oracles.relative_error(relative_attention(x, x, x, **given), want) < 1e-12
