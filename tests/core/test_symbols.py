"""Programs for every length: the sizes at hand decide nothing, and the numbers are those of a program for them."""

from collections.abc import Callable
from itertools import pairwise
from typing import Any

import array_api_strict as xp
import numpy as np
import pytest

import libraries
import relskew_core as relskew
import symbols
from relskew_core import Span

QUERIES, KEYS = (37, 3, 101), (53, 101, 2)
"""Lengths at hand, and those that a program is for as well: of tables that end earlier, and of others that do not."""

lengths = pytest.mark.parametrize(
    ("queries", "keys"), [(QUERIES, KEYS), (QUERIES, (5,)), ((18,), KEYS)], ids=["both", "queries", "keys"]
)
spans = pytest.mark.parametrize("span", [Span(6, 4, "clip"), Span(7, 3, "zero"), Span(0, 10, "zero")], ids=repr)


@pytest.fixture(autouse=True)
def devices() -> None:
    """Skip where the reference has no second device."""
    libraries.of_name("array-api-strict, second device")


def drawn(*shape: int) -> Any:
    data = np.random.default_rng(sum(shape)).standard_normal(shape)
    return xp.asarray(data, device=xp.Device("device1"))


def same(function: Callable[..., Any], *lengths: tuple[int, ...]) -> None:
    """Compare what a function of some lengths returns, with the lengths known and as symbols."""
    expected = function(*(length[0] for length in lengths))
    with symbols.exporting():
        sizes = [symbols.size(*length) for length in lengths]
        assert all(n + m - 1 < n + m < n * m + n for n, m in pairwise(sizes))  # symbols and the sizes of arrays
        found = function(*sizes)
    assert (found.device, found.dtype) == (expected.device, expected.dtype)
    found, expected = (np.asarray(x.to_device(xp.Device("CPU_DEVICE"))) for x in (found, expected))
    np.testing.assert_allclose(found, expected, rtol=0, atol=1e-12)


@lengths
def test_views_of_windows_are_for_lengths_that_are_known(
    queries: tuple[int, ...], keys: tuple[int, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    """As in torch, whose exporter does not support this view for symbols."""
    bias, made = drawn(2, 11), []

    def unfold(x: Any, axis: int, size: int, step: int) -> Any:
        made.append(size)
        data = np.asarray(x.to_device(xp.Device("CPU_DEVICE")))
        windows = np.lib.stride_tricks.sliding_window_view(data, size, axis=axis)[..., ::step, :]
        return xp.asarray(windows, device=x.device)

    monkeypatch.setattr("relskew_core._kernel.grids.library_name", lambda xp: "torch")
    monkeypatch.setattr(type(bias), "unfold", unfold, raising=False)
    same(lambda n, m: relskew.toeplitz(bias, Span.clipped(5), n_queries=n, n_keys=m, offset=0), queries, keys)
    assert made == [keys[0]]


@pytest.mark.parametrize("causal", [False, True])
@spans
@lengths
def test_products_of_symbolic_lengths_equal_those_of_numbers(
    queries: tuple[int, ...], keys: tuple[int, ...], span: Span, causal: bool
) -> None:
    bias, table, options = drawn(2, 11), drawn(2, 11, 3), {"span": span, "causal": causal}
    of_queries, of_keys, weights = (drawn(2, *size) for size in ((queries[0], 3), (keys[0], 3), (queries[0], keys[0])))
    for offset in (0, 3):
        given: dict[str, Any] = {**options, "offset": offset}
        same(lambda n, m: relskew.toeplitz(bias, n_queries=n, n_keys=m, **given), queries, keys)  # noqa: B023
    for offset in (2, -200):  # from there, causal queries see nothing
        given = {**options, "offset": offset, "table": table}
        same(lambda _, m: relskew.relative_logits(of_queries, n_keys=m, **given), queries, keys)  # noqa: B023
    given = {**options, "table": table, "offset": 2}
    same(lambda n, _: relskew.relative_logits(of_keys, n_queries=n, side="key", **given), queries, keys)
    same(lambda *_: relskew.relative_values(weights, table[0, ...], span, offset=1, causal=causal), queries, keys)


@lengths
def test_layouts_and_weights_of_symbolic_lengths_equal_those_of_numbers(
    queries: tuple[int, ...], keys: tuple[int, ...]
) -> None:
    absolute, relative = drawn(2, queries[0], keys[0]), drawn(2, queries[0], queries[0] + keys[0] - 1)
    same(lambda *_: relskew.unskew(absolute), queries, keys)
    same(lambda *_: relskew.skew(relative), queries, keys)
    q, k, table, sinks = drawn(2, 4, queries[0], 3), drawn(2, 2, keys[0], 3), drawn(11, 3), drawn(4)
    given: dict[str, Any] = {"rel_k": table, "span": Span(6, 4, "clip"), "offset": 0, "sinks": sinks}
    same(lambda *_: relskew.attention_weights(q, k, **given), queries, keys)
    same(lambda *_: relskew.attention_weights(q[0, ...], k[0, ...], causal=True, offset=0), queries, keys)


@pytest.mark.parametrize("offset", [[3, -2], [[3, -2], [0, 1]]], ids=["listed", "array"])
@lengths
def test_offsets_by_item_are_positions(queries: tuple[int, ...], keys: tuple[int, ...], offset: Any) -> None:
    """Operators do not support offsets by item."""
    lead = np.shape(offset)
    q, k = (drawn(*lead, 2, length[0], 3) for length in (queries, keys))
    given: Any = offset if len(lead) == 1 else xp.asarray(offset, device=q.device)
    options: dict[str, Any] = {"span": Span(6, 4, "clip"), "causal": True, "offset": given}
    same(lambda *_: relskew.relative_attention(q, k, k, drawn(11, 3), **options), queries, keys)


HEIGHT, WIDTH = (29, 3, 101), (37, 211, 4)


@pytest.mark.parametrize(("q_grid", "k_grid"), [
    ((HEIGHT, (2,)), ((3,), (2,))), (((2,), WIDTH), ((3,), (2,))), (((2,), (3,)), (HEIGHT, WIDTH)),
], ids=["height", "width", "keys"])  # fmt: skip
def test_grids_of_symbolic_sizes_equal_those_of_numbers(q_grid: Any, k_grid: Any) -> None:
    q, k = (drawn(2, height[0] * width[0], 3) for height, width in (q_grid, k_grid))
    table_h, table_w, span = drawn(11, 3), drawn(2, 11, 3), Span(6, 4, "clip")
    given: dict[str, Any] = {"span_h": span, "span_w": span, "offset": (0, 0)}
    same(lambda *sizes: relskew.relative_attention_2d(q, k, k, table_h, table_w, q_grid=sizes[:2], k_grid=sizes[2:],
                                                      **given), *q_grid, *k_grid)  # fmt: skip
