"""Grids of one, two and three axes: windows, neighborhoods and biases, one query and one key at a time."""

import itertools
import math
import tracemalloc
from typing import Any

import numpy as np
import pytest
import torch

import oracles
from libraries import GATES, Library
from relskew_core import (
    Span,
    relative_attention,
    relative_attention_2d,
    relative_attention_nd,
    relative_logits_2d,
    relative_logits_nd,
    toeplitz,
    toeplitz_2d,
    toeplitz_nd,
)

CASES: dict[str, dict[str, Any]] = {
    "a sequence": {"grid": (7,), "neighborhood": (5,)},
    "a picture": {"grid": (5, 6), "neighborhood": (3, 5)},
    "even sides": {"grid": (6, 4), "neighborhood": (4, 2)},
    "all of an axis": {"grid": (3, 5), "neighborhood": (3, 1)},
    "a volume": {"grid": (3, 4, 2), "neighborhood": (3, 3, 1)},
    "a window": {"grid": (5, 4), "window": ((1, 2), (0, 1))},
    "a half-open window": {"grid": (4, 5), "window": ((None, 0), (2, None))},
    "a window in time": {"grid": (4, 2, 3), "window": ((2, 0), None, (1, 1))},
    "all of a volume": {"grid": (2, 3, 2)},
}


def sees(case: dict[str, Any], axis: int, i: int, j: int) -> bool:
    """Hassani et al. 2023, equation 2: the neighborhood around a pixel, moved inwards at the borders."""
    size = case.get("neighborhood", [None] * 3)[axis]
    left, right = (case.get("window", (None,) * 3)[axis] or (None, None)) if "window" in case else (None, None)
    if size is None:
        return (left is None or j >= i - left) and (right is None or j <= i + right)
    n, around = case["grid"][axis], size // 2
    first = 0 if i < around else n - size if i >= n - (size - 1 - around) else i - around
    return bool(first <= j < first + size)


def formula(case: dict[str, Any], q: Any, k: Any, v: Any, tables: Any, bias: Any, before: int) -> Any:
    """Attend with all logits in one matrix, in the library of NumPy or torch that the arrays are of."""
    cells = list(itertools.product(*map(range, case["grid"])))
    rows = []
    for i in range(q.shape[-2]):
        logits = [(q[..., i, :] * k[..., j, :]).sum(-1) / 2 for j in range(k.shape[-2])]
        for j, key in enumerate(cells, start=before):
            if i < before:
                break
            query = cells[i - before]
            r = [b - a + n - 1 for a, b, n in zip(query, key, case["grid"], strict=True)]
            if all(sees(case, axis, *pair) for axis, pair in enumerate(zip(query, key, strict=True))):
                logits[j] = logits[j] + bias[(slice(None), *r)]
                for row, table in zip(r, tables, strict=True):
                    if table is not None:
                        logits[j] = logits[j] + (q[..., i, :] * table[..., row, :]).sum(-1) / 2
            else:
                logits[j] = logits[j] - math.inf
        rows.append(torch.stack(logits, -1).softmax(-1))
    return torch.stack(rows, -2) @ v


def made(case: dict[str, Any], before: int = 0) -> tuple[Any, ...]:
    rng = np.random.default_rng(5)
    n = before + math.prod(case["grid"])
    q, k, v = (rng.standard_normal((2, 2, n, 4)) for _ in range(3))
    rows = [2 * side - 1 for side in case["grid"]]
    tables: list[Any] = [rng.standard_normal((2, count, 4) if axis else (count, 4)) for axis, count in enumerate(rows)]
    if len(rows) == 3:
        tables[1] = None
    return q, k, v, tables, rng.standard_normal((2, *rows))


def options(case: dict[str, Any]) -> dict[str, Any]:
    grids = {"q_grid": case["grid"], "k_grid": case["grid"]}
    return grids | {name: case[name] for name in ("window", "neighborhood") if name in case}


@pytest.mark.parametrize("name", CASES)
def test_attention_is_the_formula(library: Library, name: str) -> None:
    case = CASES[name]
    q, k, v, tables, bias = made(case)
    given = [None if table is None else torch.from_numpy(table) for table in tables]
    own_q, own_k, own_v = map(torch.from_numpy, (q, k, v))
    want = formula(case, own_q, own_k, own_v, given, torch.from_numpy(bias), 0).numpy()
    for dtype in library.dtypes_of([*CASES].index(name)):
        arrays = {"q": q, "k": k, "v": v, "rel_bias": bias}
        own = {key: library.asarray(x, dtype) for key, x in arrays.items()}
        moved = [None if table is None else library.asarray(table, dtype) for table in tables]
        got = library.call(relative_attention_nd, own, tables=moved, **options(case))
        assert isinstance(got, library.array_type())
        assert oracles.relative_error(library.to_numpy(got), want) < GATES[dtype]


@pytest.mark.parametrize("chunk_size", [1, 4, 9, None])
@pytest.mark.parametrize("name", CASES)
def test_prefixes_masks_and_chunks(name: str, chunk_size: int | None) -> None:
    case, before = CASES[name], 2
    *arrays, drawn, numbers = made(case, before)
    q, k, v, bias = (torch.from_numpy(x) for x in (*arrays, numbers))
    tables = [None if table is None else torch.from_numpy(table) for table in drawn]
    hidden = torch.zeros(q.shape[-2], dtype=torch.bool)
    hidden[before + 1] = True
    added = torch.where(hidden, -math.inf, torch.linspace(-1, 1, len(hidden), dtype=torch.float64))
    with_mask = torch.cat([k, added.expand(2, 2, -1)[..., None] * 2], -1)  # the mask as an additional product
    want = formula(case, torch.cat([q, torch.ones_like(q[..., :1])], -1), with_mask, v, [
        None if table is None else torch.nn.functional.pad(table, (0, 1)) for table in tables
    ], bias, before)  # fmt: skip
    more: dict[str, Any] = {"prefix": (before, before), "mask": added, "chunk_size": chunk_size, "scale": 0.5}
    got, lse = relative_attention_nd(q, k, v, tables, rel_bias=bias, **options(case), **more, return_lse=True)
    torch.testing.assert_close(got, want, rtol=0, atol=1e-12)
    assert lse.shape == q.shape[:-1]
    boolean = relative_attention_nd(q, k, v, tables, rel_bias=bias, **options(case), **{**more, "mask": ~hidden})
    assert not torch.allclose(boolean, want)


@pytest.mark.parametrize("name", ["a picture", "a volume", "a window"])
def test_gradients_are_those_of_the_formula(name: str) -> None:
    case = CASES[name]
    q, k, v, tables, bias = made(case)
    leaves = [torch.from_numpy(x).requires_grad_() for x in (q, k, v, bias, *(x for x in tables if x is not None))]
    q, k, v, bias = leaves[:4]
    found = []
    for function in (relative_attention_nd, formula):
        own = iter(leaves[4:])
        given = [None if table is None else next(own) for table in tables]
        if function is formula:
            y = formula(case, q, k, v, given, bias, 0)
        else:
            y = relative_attention_nd(q, k, v, given, rel_bias=bias, **options(case), chunk_size=6)
        found.append(torch.autograd.grad(y.sin().sum(), leaves))
    torch.testing.assert_close(*found, rtol=0, atol=1e-12)


def test_two_axes_are_the_functions_of_grids_and_one_axis_those_of_sequences() -> None:
    q, k, v, tables, bias = made(CASES["a picture"])
    table_h, table_w = tables
    grids: dict[str, Any] = {"q_grid": (5, 6), "k_grid": (5, 6)}
    choices: list[dict[str, Any]] = [{}, {"neighborhood": (3, 5)}, {"window": ((1, 1), (2, 0))}]
    for more in choices:
        np.testing.assert_array_equal(
            relative_attention_2d(q, k, v, table_h, table_w, rel_bias=bias, **grids, **more),
            relative_attention_nd(q, k, v, tables, rel_bias=bias, **grids, **more),
        )
    np.testing.assert_array_equal(relative_logits_2d(q, *tables, **grids), relative_logits_nd(q, tables, **grids))
    np.testing.assert_array_equal(toeplitz_2d(bias, **grids), toeplitz_nd(bias, **grids))
    line: dict[str, Any] = {"q_grid": (30,), "k_grid": (30,)}
    table, row = np.random.default_rng(1).standard_normal((2, 59, 4)), np.arange(59.0)
    got = relative_attention_nd(q, k, v, [table[0]], **line, window=[(3, 1)])
    np.testing.assert_allclose(got, relative_attention(q, k, v, table[0], window=(3, 1)), atol=1e-12)
    np.testing.assert_array_equal(toeplitz_nd(row, **line), toeplitz(row, n_queries=30, n_keys=30))


def test_tables_need_no_more_than_what_is_seen() -> None:
    q, k, v, *_ = made({"grid": (9, 8)})
    grids: dict[str, Any] = {"q_grid": (9, 8), "k_grid": (9, 8)}
    bias = np.random.default_rng(2).standard_normal((2, 5, 3))
    wide = np.pad(bias, ((0, 0), (6, 6), (6, 6)), constant_values=np.nan)  # entries for hidden pairs have no effect
    got = relative_attention_2d(q, k, v, rel_bias=bias, neighborhood=(3, 2), **grids)
    np.testing.assert_array_equal(got, relative_attention_2d(q, k, v, rel_bias=wide, neighborhood=(3, 2), **grids))
    for short in (bias[:, 1:-1], bias[:, :, :1]):
        with pytest.raises(ValueError, match=r"^`rel_bias` reaches"):
            relative_attention_2d(q, k, v, rel_bias=short, neighborhood=(3, 2), **grids)
    window = relative_attention_2d(q, k, v, rel_bias=bias[:, 1:-1], window=((1, 1), (1, 1)), **grids)
    assert np.isfinite(window).all()


@pytest.mark.parametrize(("offset", "seen"), [(-5, "5 … 6"), (9, "-5 … -4")])
def test_queries_outside_the_keys_grid_need_tables_that_reach_their_neighborhood(offset: int, seen: str) -> None:
    q, k, table = np.ones((1, 4)), np.ones((6, 4)), np.ones((3, 4))
    grids: dict[str, Any] = {"q_grid": (1,), "k_grid": (6,), "offset": (offset,), "neighborhood": (2,)}
    with pytest.raises(ValueError, match=rf"^`tables\[0\]` reaches .* queries see {seen}:"):
        relative_attention_nd(q, k, k, [table], **grids)
    got = relative_attention_nd(q, k, k, [table], spans=[Span(1, 1, "clip")], **grids, return_lse=True)[1]
    np.testing.assert_allclose(got, [4 + math.log(2)])


def test_logits_need_tables() -> None:
    with pytest.raises(TypeError, match=r"^`tables` must be a sequence .* got None"):
        relative_logits_nd(np.ones((4, 1)), None, q_grid=(2, 2), k_grid=(2, 2))  # type: ignore[arg-type]  # refused


def test_keys_of_other_grids() -> None:
    """A block of queries inside the keys' grid sees what it sees as a part of the whole."""
    q, k, v, (table_h, table_w), bias = made({"grid": (6, 5)})
    whole: dict[str, Any] = {"q_grid": (6, 5), "k_grid": (6, 5)}
    part: dict[str, Any] = {"q_grid": (2, 5), "k_grid": (6, 5), "offset": (3, 0)}
    choices: list[dict[str, Any]] = [{"neighborhood": (3, 5)}, {"window": ((2, 1), (1, None))}]
    for more in choices:
        more |= {"table_h": table_h, "table_w": table_w, "rel_bias": bias}
        want = relative_attention_2d(q, k, v, **whole, **more)[..., 15:25, :]
        got = relative_attention_2d(q[..., 15:25, :], k, v, **part, **more, chunk_size=5)
        np.testing.assert_allclose(got, want, atol=1e-13)
    pooled: dict[str, Any] = {"q_grid": (6, 5), "k_grid": (3, 5), "k_step": (2, 1), "offset": (0, 0)}
    got = relative_attention_2d(q, k[..., :15, :], v[..., :15, :], **pooled, window=((1, 1), (0, 0)), chunk_size=5)
    seen = [[abs(2 * (j // 5) - i // 5) <= 1 and i % 5 == j % 5 for j in range(15)] for i in range(30)]
    want = relative_attention(q, k[..., :15, :], v[..., :15, :], mask=np.asarray(seen))
    np.testing.assert_allclose(got, want, atol=1e-13)


def test_memory_grows_with_the_rows_that_are_seen() -> None:
    q = np.ones((1, 96 * 96, 4), dtype=np.float32)
    bias = np.zeros((1, 13, 13), dtype=np.float32)
    tracemalloc.start()
    relative_attention_2d(q, q, q, rel_bias=bias, q_grid=(96, 96), k_grid=(96, 96), neighborhood=(7, 7))
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak < 32 * 2**20 < 96**4 * 4 / 8


def test_grids_that_do_not_fit_are_refused() -> None:
    q = np.ones((6, 4))
    grids: dict[str, Any] = {"q_grid": (2, 3), "k_grid": (2, 3)}
    with pytest.raises(ValueError, match=r"^`neighborhood` must be None with `window`, got tuple"):
        relative_attention_2d(q, q, q, **grids, neighborhood=(1, 1), window=((0, 0), (0, 0)))
    with pytest.raises(ValueError, match=r"^`neighborhood` must be no larger than `k_grid`, \(2, 3\), got \(3, 3\)"):
        relative_attention_2d(q, q, q, **grids, neighborhood=(3, 3))
    with pytest.raises(ValueError, match=r"^`q_step` must be \(1, 1\) with `neighborhood`, got \(2, 1\)"):
        relative_attention_2d(q, q, q, **grids, neighborhood=(1, 1), q_step=(2, 1), offset=(0, 0))
    wrong: list[tuple[Any, str]] = [
        (((-1, 0), None), r"window\[0\]\[0\]"),
        (((0, 1), (0, 0.5)), r"window\[1\]\[1\]"),
    ]
    for window, name in wrong:
        with pytest.raises((ValueError, TypeError), match=f"^`{name}` must be an int"):
            relative_attention_2d(q, q, q, **grids, window=window)
    with pytest.raises(ValueError, match=r"^`tables` must have a table for at least one axis"):
        relative_logits_nd(q, [None, None], **grids)
    with pytest.raises(ValueError, match=r"^`table_h` or `table_w` must be given, got None for both"):
        relative_logits_2d(q, None, None, **grids)


@pytest.mark.parametrize("length", [12, 13, 14])
def test_a_dilated_neighborhood_is_one_of_every_third_token(length: int) -> None:
    """The window of NATTEN's ``get_window_start`` and the rows of its ``get_pb_start``, one key at a time."""
    size, step, around = 3, 3, 1
    x, numbers = np.random.default_rng(0).standard_normal((2, length, 4)), np.arange(10.0).reshape(2, 5)
    want = np.empty_like(x)
    for i in range(length):
        first = i - around * step
        if first < 0:
            first = i % step
        elif i + around * step >= length:
            whole = length // step * step
            left = length - whole
            last = length - left + i % step if i % step < left else whole + i % step - step
            first = last - (size - 1) * step
        keys = [first + step * n for n in range(size)]
        row = (first - i) // step + size - 1
        logits = np.einsum("hd,hkd->hk", x[:, i], x[:, keys]) / 2 + numbers[:, row : row + size]
        weights = np.exp(logits - logits.max(-1, keepdims=True))
        want[:, i] = np.einsum("hk,hkd->hd", weights / weights.sum(-1, keepdims=True), x[:, keys])
    got = np.empty_like(x)
    for start in range(step):
        part = x[:, start::step]
        grid = (part.shape[1],)
        got[:, start::step] = relative_attention_nd(
            part, part, part, rel_bias=numbers, q_grid=grid, k_grid=grid, neighborhood=(size,)
        )
    assert oracles.relative_error(got, want) < 1e-12
