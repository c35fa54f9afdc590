"""The published algorithms against small known cases, the loop oracle and the functions of the package."""

import itertools
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import array_api_compat
import numpy as np
import pytest
from numpy.typing import NDArray

import oracles
from libraries import GATES, LIBRARIES, Library, device_of
from relskew_core import Span, papers, relative_attention, relative_logits, skew


@pytest.fixture(
    params=[
        pytest.param(row, id=row.name, marks=[pytest.mark.gpu] if row.gpu else [])
        for row in LIBRARIES
        if row.module != "jax" and not row.traced
    ]
)
def library(request: pytest.FixtureRequest) -> Iterator[Library]:
    """The matrix without its compiled rows and without JAX: this code is for reading, not for compiling."""
    row: Library = request.param
    row.needed()
    with row.setting():
        yield row


def draw(*shape: int, seed: int = 0) -> NDArray[np.float64]:
    return np.random.default_rng([seed, *shape]).standard_normal(shape)


def run(library: Library, function: Callable[..., Any], arrays: dict[str, Any], **options: Any) -> NDArray[np.float64]:
    """Call ``function`` on the library's arrays, check what comes back, and bring it home."""
    given = {name: library.asarray(array) for name, array in arrays.items() if array is not None}
    result = library.call(function, given, **options)
    assert isinstance(result, library.array_type())
    assert device_of(result) == library.device()
    return library.to_numpy(result)


COUNTED, DESCENDING = np.arange(-4.0, 1.0)[:, None], np.arange(3.0, -4.0, -1.0)[:, None]
LOCAL, ONES = np.tile(np.arange(-9.0, 0.0), (5, 1)), np.ones((5, 1))
OF_PAST = [[min(j - i, 0) for j in range(5)] for i in range(5)]
OF_ROWS = [[j - i - 5 for j in range(5)] for i in range(5)]
BY_HAND: dict[str, tuple[Callable[..., Any], dict[str, Any], dict[str, Any], list[list[int]]]] = {
    "causal": (papers.huang_logits, {"q": ONES, "rel_k": COUNTED}, {}, OF_PAST),
    "ours, causal": (relative_logits, {"q": ONES, "table": COUNTED}, {"n_keys": 5, "causal": True}, OF_PAST),
    "local": (papers.huang_skew_local, {"x": LOCAL}, {}, OF_ROWS),
    "ours, local": (skew, {"x": LOCAL}, {}, OF_ROWS),
    "diagonal": (papers.diagonal_logits, {"q": ONES[:4], "rel_k": DESCENDING}, {},  # the matrix S of the text
                 [[0, 1, 2, 3], [-1, 0, 1, 2], [-2, -1, 0, 1], [-3, -2, -1, 0]]),
}  # fmt: skip


@pytest.mark.parametrize("name", BY_HAND)
def test_a_case_by_hand(library: Library, name: str) -> None:
    function, arrays, options, expected = BY_HAND[name]
    assert run(library, function, arrays, **options).tolist() == expected


def test_clipped_distances_by_hand(library: Library) -> None:
    xp = array_api_compat.array_namespace(library.asarray(0.0))
    rows = papers.clipped_distances(3, 5, 2, xp=xp, offset=1, device=library.device())
    assert isinstance(rows, library.array_type())
    assert library.to_numpy(rows).tolist() == [[1, 2, 3, 4, 4], [0, 1, 2, 3, 4], [0, 0, 1, 2, 3]]


def test_mask_zeroes_what_lies_before_the_sequence(library: Library) -> None:
    masked = run(library, papers.huang_mask, {"x": np.full((3, 3), np.nan)})
    assert np.isnan(masked).tolist() == [[False, False, True], [False, True, True], [True, True, True]]
    assert np.all(masked[~np.isnan(masked)] == 0)


def test_without_the_mask_the_future_holds_the_next_queries_products() -> None:
    x = draw(4, 4)
    skewed = papers.huang_skew(x)
    below = np.tril(np.ones((4, 4), dtype=bool))
    assert np.array_equal(skewed[below], papers.huang_skew(papers.huang_mask(x))[below])
    assert skewed[0, 2] == x[1, 0]
    assert skewed[0, 1] == 0  # the padding


class Whole(NamedTuple):
    """An algorithm and its options, the sizes of a call, and the options of ours that say the same."""

    literal: Callable[..., Any]
    options: dict[str, Any]
    n: int
    m: int
    rows: int
    ours: dict[str, Any]
    values: bool = False
    descends: bool = False  # the table


def wholes() -> Iterator[tuple[str, Whole, bool]]:
    """Yield every algorithm with tables for all heads, and by head if it supports them."""
    for form, values in itertools.product(("gather", "split"), (True, False)):
        ours = {"span": Span.clipped(2), "offset": 1}
        whole = Whole(papers.shaw_attention, {"form": form, "offset": 1}, 4, 6, 5, ours, values)
        for by_head in (False, True)[: 1 + (form == "gather")]:
            yield f"Shaw, {form}{', values' * values}", whole, by_head
    found = {f"Huang, {n}": Whole(papers.huang_attention, {}, n, n, n, {"causal": True}) for n in (1, 6)}
    for blocks, size in ((1, 3), (3, 1), (3, 4)):
        given, n = {"block_size": size}, blocks * size
        whole = Whole(papers.huang_local_attention, given, n, n, 2 * size, {"causal": True, **given})
        found[f"Huang, {blocks} blocks of {size}"] = whole
    for n, m, longest in ((1, 1, 1), (5, 5, 5), (3, 6, 6), (4, 2, 7)):
        ours = {"span": Span.full(longest), "offset": 0}
        whole = Whole(papers.diagonal_attention, {}, n, m, 2 * longest - 1, ours, descends=True)
        found[f"diagonal, {n} of {m}"] = whole
    yield from ((name, whole, by_head) for name, whole in found.items() for by_head in (False, True))


@pytest.mark.parametrize(
    ("whole", "by_head"),
    [pytest.param(whole, by_head, id=f"{name}{', by head' * by_head}") for name, whole, by_head in wholes()],
)
def test_attention(library: Library, whole: Whole, by_head: bool) -> None:
    heads, (n, m, rows) = (3,) * by_head, whole[2:5]
    arrays: dict[str, Any] = {"q": draw(2, 3, n, 4), "k": draw(2, 3, m, 4, seed=1), "v": draw(2, 3, m, 5)}
    arrays |= {"rel_k": draw(*heads, rows, 4)} | ({"rel_v": draw(*heads, rows, 5)} if whole.values else {})
    ours = {**arrays, "rel_k": np.flip(arrays["rel_k"], axis=-2).copy()} if whole.descends else arrays
    literal = run(library, whole.literal, arrays, **whole.options)
    actual = run(library, relative_attention, ours, **whole.ours)
    assert oracles.relative_error(actual, literal) < GATES["float64"]
    assert oracles.relative_error(actual, oracles.relative_attention(**ours, **whole.ours).out) < 1e-12


def zeros(*shape: int) -> NDArray[Any]:
    return np.zeros(shape)


SQUARE, Q, TABLE = zeros(3, 3), zeros(3, 2), zeros(3, 2)


@pytest.mark.parametrize(("function", "arguments", "options", "name"), [
    (papers.clipped_distances, (-1, 2, 1), {"xp": np}, "n_queries"),
    (papers.clipped_distances, (1, 2.0, 1), {"xp": np}, "n_keys"),
    (papers.clipped_distances, (1, 2, -1), {"xp": np}, "k"),
    (papers.clipped_distances, (1, 2, 1), {"xp": "numpy"}, "xp"),
    (papers.clipped_distances, (1, 2, 1), {"xp": np, "offset": 0.5}, "offset"),
    (papers.clipped_distances, (3, 5, 2), {"xp": np}, "offset"),
    (papers.shaw_attention, (Q[:1], Q, Q, TABLE), {}, "offset"),
    (papers.clipped_lookup, (zeros(4, 2), 3, 3), {}, "table"), (papers.clipped_lookup, (zeros(3), 3, 3), {}, "table"),
    (papers.clipped_lookup, (zeros(1, 1, 3, 2), 3, 3), {}, "table"),
    (papers.clipped_lookup, (TABLE, -1, 3), {}, "n_queries"), (papers.clipped_lookup, (TABLE, 3, None), {}, "n_keys"),
    (papers.clipped_lookup, ([[1.0]], 3, 3), {}, "table"), (papers.shaw_logits, (zeros(3), Q, TABLE), {}, "q"),
    (papers.shaw_logits, (Q, zeros(3, 1), TABLE), {}, "k"), (papers.shaw_logits, (Q, zeros(2, 3, 2), TABLE), {}, "k"),
    (papers.shaw_logits, (Q, Q, zeros(3, 1)), {}, "rel_k"), (papers.shaw_logits, (Q, Q, zeros(1, 3, 2)), {}, "rel_k"),
    (papers.shaw_logits, (Q, Q, zeros(2, 2)), {"form": "split"}, "rel_k"),
    (papers.shaw_logits, (*[zeros(2, 3, 4)] * 3,), {"form": "split"}, "rel_k"),  # by head
    (papers.shaw_values, (zeros(2, 3, 3), zeros(2, 3, 4), zeros(2, 3, 4)), {"form": "split"}, "rel_v"),
    (papers.shaw_logits, (Q, Q.astype("float32"), TABLE), {"form": "split"}, "k"),
    (papers.shaw_logits, (Q, Q, TABLE), {"form": "split", "offset": "0"}, "offset"),
    (papers.shaw_values, (zeros(3), Q, TABLE), {}, "weights"),
    (papers.shaw_values, (SQUARE, zeros(2, 2), TABLE), {}, "v"),
    (papers.shaw_values, (SQUARE, Q, zeros(3, 3)), {"form": "split"}, "rel_v"),
    (papers.shaw_values, (SQUARE, Q, TABLE), {"form": "fast"}, "form"),
    (papers.shaw_attention, (Q, Q, Q, TABLE), {"form": "fast"}, "form"),
    (papers.shaw_attention, (Q, Q, zeros(2, 2), TABLE), {}, "v"),
    (papers.shaw_values, (zeros(2, 3, 3), zeros(2, 3, 2), zeros(1, 2, 3, 2)), {}, "rel_v"),
    (papers.shaw_attention, (Q, Q, Q, TABLE, zeros(3, 4)), {}, "rel_v"), (papers.huang_mask, (zeros(3, 4),), {}, "x"),
    (papers.huang_skew, (zeros(0, 0),), {}, "x"), (papers.huang_skew, (zeros(3, 3).astype(int),), {}, "x"),
    (papers.huang_skew_local, (zeros(3, 6),), {}, "x"), (papers.huang_logits, (Q, zeros(4, 2)), {}, "rel_k"),
    (papers.huang_logits, (zeros(2, 3, 2), zeros(3, 3, 2)), {}, "rel_k"),
    (papers.huang_attention, (zeros(0, 2), Q, Q, TABLE), {}, "q"),
    (papers.huang_attention, (Q, zeros(2, 2), Q, TABLE), {}, "k"),
    (papers.huang_attention, (Q, Q, zeros(1, 3, 2), TABLE), {}, "v"),
    (papers.huang_local_attention, (Q, Q, Q, zeros(4, 2)), {"block_size": 2}, "block_size"),
    (papers.huang_local_attention, (Q, Q, Q, zeros(4, 2)), {"block_size": 3}, "rel_k"),
    (papers.huang_local_attention, (Q, Q, Q, TABLE), {"block_size": 0}, "block_size"),
    (papers.diagonal_skew, (zeros(3, 4),), {}, "x"), (papers.diagonal_skew, (zeros(3, 3),), {}, "x"),
    (papers.diagonal_skew, (zeros(3, 5), 4), {}, "n_keys"), (papers.diagonal_logits, (Q, zeros(4, 2)), {}, "rel_k"),
    (papers.diagonal_logits, (Q, TABLE), {}, "q"), (papers.diagonal_logits, (Q, zeros(5, 2)), {"n_keys": -1}, "n_keys"),
    (papers.diagonal_attention, (Q, zeros(4, 2), zeros(4, 2), zeros(5, 2)), {}, "k"),
    (papers.diagonal_attention, (Q, Q, zeros(4, 2), zeros(5, 2)), {}, "v"),
    (papers.diagonal_attention, (Q, Q, Q, zeros(4, 2)), {}, "rel_k"),
])  # fmt: skip
def test_errors_name_the_argument(
    function: Callable[..., Any], arguments: tuple[Any, ...], options: dict[str, Any], name: str
) -> None:
    with pytest.raises((ValueError, TypeError), match=f"^`{name}` must "):
        function(*arguments, **options)
