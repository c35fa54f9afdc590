"""Grids of one, two and three axes: tables, biases, class tokens, windows and neighborhoods, pair by pair."""

import math
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import oracles
import relskew_core as relskew
from libraries import GATES, Library, of_name
from relskew_core import Span, relative_attention_2d, relative_attention_nd, toeplitz_2d

Case = tuple[list[str], dict[str, Any]]
"""The arrays besides queries, keys and values, and the options."""


def grid(arrays: str, q_grid: tuple[int, ...], k_grid: tuple[int, ...] | None = None, **options: Any) -> Case:
    return arrays.split(), {"q_grid": q_grid, "k_grid": k_grid or q_grid, **options}


GRIDS = {
    "square": grid("", (3, 3)),
    "oblong, keys elsewhere": grid("", (2, 3), (4, 2), offset=(1, -1), spans=[Span(9, 9)] * 2),
    "block in its window": grid("", (2, 2), (4, 4), offset=(1, 1), spans=[Span(2, 2)] * 2),
    "one query": grid("", (1, 1), (3, 2), offset=(2, 1), spans=[Span(2, 0), Span(1, 0)]),
    "one key": grid("", (3, 2), (1, 1), offset=(0, 0), spans=[Span(2, 0), Span(1, 0)]),
    "a line": grid("", (7,), (5,), offset=(0,)), "a volume": grid("", (2, 3, 2)),
    "clip and zero": grid("", (4, 5), (5, 4), offset=(0, 1), spans=[Span(1, 1, "clip"), Span(2, 1, "zero")]),
}  # fmt: skip
BOTH = "tables rel_bias"
OBLONG: dict[str, Any] = {
    "q_grid": (4, 3), "k_grid": (2, 5), "offset": (1, 0), "spans": [Span(4, 2), Span(1, 4, "clip")], "scale": 0.7,
    "rel_scale": 1.0,
}  # fmt: skip
CASES = {
    "a sequence": grid(BOTH, (7,), neighborhood=(5,)), "a picture": grid(BOTH, (5, 6), neighborhood=(3, 5)),
    "even sides": grid(BOTH, (6, 4), neighborhood=(4, 2)), "all of an axis": grid(BOTH, (3, 5), neighborhood=(3, 1)),
    "a volume": grid(BOTH, (3, 4, 2), neighborhood=(3, 3, 1)), "all of a volume": grid(BOTH, (2, 3, 2)),
    "a window": grid(BOTH, (5, 4), window=((1, 2), (0, 1))),
    "a half-open window": grid(BOTH, (4, 5), window=((None, 0), (2, None))),
    "a window in time": grid(BOTH, (4, 2, 3), window=((2, 0), None, (1, 1))),
    "a window, class tokens": grid(BOTH, (3, 4), window=((1, 1), (1, None)), prefix=(1, 2)),
    "a neighborhood, class tokens": grid(BOTH, (3, 4), neighborhood=(3, 3), prefix=(2, 1)),
    "a block in a neighborhood": grid(BOTH, (2, 5), (6, 5), offset=(3, 0), neighborhood=(3, 5)),
    "a block in a window": grid(BOTH, (2, 5), (6, 5), offset=(3, 0), window=((2, 1), (1, None))),
    "four axes": grid(f"{BOTH} prefix_bias", (2, 2, 3, 2), (2, 3, 2, 5), offset=(0,) * 4, prefix=(1, 2), scale=0.5),
    "five axes": grid(BOTH, (2,) * 5),  # of which kernels take none
    "pooled keys": grid("", (6, 5), (3, 5), k_step=(2, 1), offset=(0, 0), window=((1, 1), (0, 0))),
    "tables": grid("tables", **OBLONG), "bias": grid("rel_bias", **OBLONG),
    "both, class token": grid("tables rel_bias prefix_bias", **OBLONG, prefix=(1, 1)),
    "class tokens without their bias": grid("tables", **OBLONG, prefix=(2, 1)),
    "keys outside only": grid("tables rel_bias prefix_bias boolean", **OBLONG, prefix=(0, 2)),
    "queries outside only": grid("tables rel_bias prefix_bias additive", **OBLONG, prefix=(1, 0)),
    "prefix bias alone": grid("prefix_bias keys", **OBLONG, prefix=(1, 2)),
    "nothing but a mask": grid("boolean", **OBLONG, prefix=(1, 1)),
    "shared bias, class tokens by head": grid("shared_rel_bias prefix_bias", **OBLONG, prefix=(2, 1)),
    "bias by head, shared class tokens": grid("rel_bias shared_prefix_bias", **OBLONG, prefix=(2, 1)),
    "a factor by head": grid("tables scale", (2, 3)), "relative factors by head": grid("tables rel_scale", (2, 3)),
    "both factors by head": grid("tables scale rel_scale", (2, 3)),
}  # fmt: skip


def spans_of(options: dict[str, Any]) -> list[Span]:
    sides = zip(options["q_grid"], options["k_grid"], strict=True)
    return options.get("spans") or [Span.full(max(each)) for each in sides]


def drawn(arrays: list[str], options: dict[str, Any]) -> dict[str, Any]:
    """Draw the arrays of a case."""
    rng, (before, others) = np.random.default_rng(5), options.get("prefix", (0, 0))
    n, m = before + math.prod(options["q_grid"]), others + math.prod(options["k_grid"])
    rows = [span.rows for span in spans_of(options)]
    tables: list[Any] = [rng.standard_normal((4, count, 3) if axis else (count, 3)) for axis, count in enumerate(rows)]
    if len(rows) == 3:
        tables[1] = None
    of_names = {
        "q": rng.standard_normal((2, 4, n, 3)), "k": rng.standard_normal((2, 2, m, 3)),
        "v": rng.standard_normal((2, 2, m, 5)), "tables": tables, "rel_bias": rng.standard_normal((4, *rows)),
        "prefix_bias": rng.standard_normal((4, 3)), "shared_rel_bias": rng.standard_normal(rows),
        "shared_prefix_bias": rng.standard_normal(3), "scale": rng.uniform(0.2, 0.9, 4),
        "rel_scale": rng.uniform(0.2, 0.9, 4), "boolean": rng.random((2, 1, n, m)) < 0.6,
        "additive": rng.standard_normal((4, n, m)), "keys": rng.random((1, m)) < 0.6,
        "holes": np.where(np.arange(m) == others + 1, -np.inf, np.linspace(-1, 1, m)),
    }  # fmt: skip
    of_names["boolean"][0, 0, 1:2] = False  # type: ignore[index]  # for a query that sees nothing
    masks = ("boolean", "additive", "keys", "holes")
    return {"mask" if name in masks else name.removeprefix("shared_"): of_names[name] for name in [*"qkv", *arrays]}


def tensors(arrays: dict[str, Any], *, learned: bool = False) -> dict[str, Any]:
    def of(x: Any) -> Any:
        if isinstance(x, list):
            return [None if table is None else of(table) for table in x]
        return torch.tensor(x, requires_grad=learned and x.dtype != bool)

    return {name: of(x) for name, x in arrays.items()}


def pairs(options: dict[str, Any]) -> tuple[Any, list[Any]]:
    """Which cells see each other, and the rows of all axes that serve them, -1 for none, each (cells, cells)."""
    q_grid, k_grid = options["q_grid"], options["k_grid"]
    axes, found = range(len(q_grid)), []
    for axis, span in enumerate(spans_of(options)):
        n, m = q_grid[axis], k_grid[axis]
        offset, q_step, k_step = (options.get(name, [one] * 5)[axis] for name, one in
                                  (("offset", 0), ("q_step", 1), ("k_step", 1)))  # fmt: skip
        left, right = (options.get("window") or [None] * 5)[axis] or (None, None)
        size = (options.get("neighborhood") or [None] * 5)[axis]
        seen, rows = np.zeros((n, m), bool), np.full((n, m), -1)
        for i, j in np.ndindex(n, m):
            r = k_step * j - q_step * i - offset
            seen[i, j] = (left is None or r >= -left) and (right is None or r <= right)
            if size is not None:  # Hassani et al. 2023, equation 2: around a cell, moved inwards at the borders
                at, around = i + offset, size // 2
                first = 0 if at < around else m - size if at >= m - (size - 1 - around) else at - around
                seen[i, j] = first <= j < first + size
            row = oracles.row_of(r, span) if seen[i, j] else None
            rows[i, j] = -1 if row is None else row
        shape = [n if at == axis else 1 for at in axes] + [m if at == axis else 1 for at in axes]
        whole = [np.broadcast_to(x.reshape(shape), (*q_grid, *k_grid)) for x in (seen, rows)]
        found.append([torch.tensor(x.reshape(math.prod(q_grid), -1)) for x in whole])
    visible, rows_of = zip(*found, strict=True)
    return torch.stack(visible).all(0), list(rows_of)


def added(options: dict[str, Any], q: Any, tables: Any = (), rel_bias: Any = None, rel_scale: Any = 1.0) -> Any:
    """What is added to the logits of cells."""
    visible, rows = pairs(options)
    cells = torch.where(visible, 0.0, -math.inf).double()
    for row, table in zip(rows, tables, strict=False):
        if table is not None:
            products = q @ table.mT
            picked = products.gather(-1, row.clamp(min=0).expand(*products.shape[:-1], -1))
            cells = cells + rel_scale * picked.masked_fill(row < 0, 0.0)
    if rel_bias is not None:
        picked = rel_bias[(..., *(row.clamp(min=0) for row in rows))]
        cells = cells + picked.masked_fill((torch.stack(rows) < 0).any(0), 0.0)
    return cells


def formula(
    q: Any, k: Any, v: Any, tables: Any = (), rel_bias: Any = None, prefix_bias: Any = None, mask: Any = None,
    scale: Any = None, rel_scale: Any = None, prefix: tuple[int, int] = (0, 0), **options: Any,
) -> oracles.Attention:  # fmt: skip
    """Attend in torch, with everything that is added to the logits as a mask."""
    scale = q.shape[-1] ** -0.5 if scale is None else scale
    rel_scale = scale if rel_scale is None else rel_scale
    rel_scale = rel_scale[:, None, None] if isinstance(rel_scale, torch.Tensor) else rel_scale
    (before, others), term = prefix, torch.zeros(*q.shape[:-1], k.shape[-2], dtype=torch.float64)
    term[..., before:, others:] = added(options, q[..., before:, :], tables, rel_bias, rel_scale)
    if prefix_bias is not None:
        term[..., before:, :others] = prefix_bias[..., 0, None, None]
        term[..., :before, others:] = prefix_bias[..., 1, None, None]
        term[..., :before, :others] = prefix_bias[..., 2, None, None]
    if mask is not None:
        term = torch.where(mask, term, -math.inf) if mask.dtype == torch.bool else term + mask
    return oracles.attention(q, k, v, mask=term, scale=scale)


def called(library: Library, function: str, arrays: dict[str, Any], options: dict[str, Any], dtype: str) -> Any:
    """Call a function of grids in its form for two axes where there are two, else in that for any number."""
    given = {name: library.asarray(x, None if x.dtype == bool else dtype)
             for name, x in arrays.items() if name != "tables"}  # fmt: skip
    tables = [None if x is None else library.asarray(x, dtype) for x in arrays.get("tables", ())]
    options = dict(options)
    if len(options["q_grid"]) == 2:
        given |= {f"table_{axis}": table for axis, table in zip("hw", tables, strict=False)}
        options |= {f"span_{axis}": span for axis, span in zip("hw", options.pop("spans", ()), strict=False)}
        return library.call(getattr(relskew, f"{function}_2d"), given, **options)
    return library.call(getattr(relskew, f"{function}_nd"), given, **options, **({"tables": tables} if tables else {}))


@pytest.mark.parametrize("name", GRIDS)
def test_logits_and_biases_of_a_grid_equal_the_formula(library: Library, name: str) -> None:
    options = GRIDS[name][1]
    arrays = drawn(["tables", "rel_bias"], options)
    own = tensors(arrays)
    for dtype in library.dtypes_of([*GRIDS].index(name)):
        logits = called(library, "relative_logits", {key: arrays[key] for key in ("q", "tables")}, options, dtype)
        assert isinstance(logits, library.array_type())
        want = added(options, own["q"], own["tables"]).numpy()
        assert oracles.relative_error(library.to_numpy(logits), want) < GATES[dtype]
    matrix = called(library, "toeplitz", {"bias": arrays["rel_bias"]}, options, "float64")
    np.testing.assert_array_equal(library.to_numpy(matrix), added(options, None, rel_bias=own["rel_bias"]))


@pytest.mark.parametrize("name", CASES)
def test_attention_is_the_formula(library: Library, name: str) -> None:
    arrays, options = drawn(*CASES[name]), CASES[name][1]
    want = formula(**tensors(arrays), **options)
    ways: list[tuple[str, int | None]] = [(library.dtypes[0], None), (library.dtypes[-1], 5)]
    if library.compiled:  # each way in every second case
        ways = [ways[list(CASES).index(name) // 3 % 2]]
    for dtype, chunk_size in ways:
        more = {"chunk_size": chunk_size, "return_lse": True}
        out, lse = called(library, "relative_attention", arrays, {**options, **more}, dtype)
        assert isinstance(out, library.array_type())
        assert str(out.dtype).endswith(dtype)
        assert oracles.relative_error(library.to_numpy(out), want.out) < GATES[dtype]
        assert oracles.relative_error(library.to_numpy(lse), want.lse) < GATES[dtype]


@pytest.mark.parametrize(("chunk_size", "mask"), [(1, "boolean"), (4, "additive"), (9, "holes"), (None, "keys")])
@pytest.mark.parametrize("name", CASES)
def test_prefixes_masks_and_chunks(name: str, chunk_size: int | None, mask: str) -> None:
    options = {**CASES[name][1], "prefix": (2, 2)}
    given = tensors(drawn([array for array in CASES[name][0] if array not in ("boolean", "keys")] + [mask], options))
    found = relative_attention_nd(**given, **options, chunk_size=chunk_size, return_lse=True)
    torch.testing.assert_close(found, tuple(formula(**given, **options)), rtol=0, atol=1e-12)


@pytest.mark.parametrize("name", ["a picture", "a volume", "a window", "both, class token", "both factors by head"])
def test_gradients_are_those_of_the_formula(name: str) -> None:
    options = CASES[name][1]
    given = tensors(drawn(*CASES[name]), learned=True)
    leaves = [x for x in (*given.pop("tables"), *given.values()) if x is not None]
    given["tables"] = leaves[: -len(given)] if len(options["q_grid"]) == 2 else [leaves[0], None, leaves[1]]
    outs = relative_attention_nd(**given, **options, chunk_size=6), formula(**given, **options).out
    torch.testing.assert_close(*(torch.autograd.grad(y.sin().sum(), leaves) for y in outs), rtol=0, atol=1e-12)


@settings(deadline=None)
@given(*[st.integers(1, 3)] * 8, st.integers(-3, 3))
def test_grids_of_other_scales(
    qh: int, qw: int, kh: int, kw: int, qa: int, qb: int, ka: int, kb: int, down: int
) -> None:
    steps = {"q_step": (qa, qb), "k_step": (ka, kb), "spans": [Span(2, 1, "clip"), Span(11, 11)]}
    case = grid("tables", (qh, qw), (kh, kw), **steps, offset=(down, 1))
    arrays = drawn(*case)
    cells = {name: arrays[name] for name in ("q", "tables")}
    own = tensors(cells)
    np.testing.assert_allclose(called(of_name("numpy"), "relative_logits", cells, case[1], "float64"),
                               added(case[1], own["q"], own["tables"]), atol=1e-12)  # fmt: skip
    options = {**case[1], "prefix": (1, 1)}
    given = drawn(case[0], options)
    got = relative_attention_nd(**given, **options, chunk_size=qw)
    np.testing.assert_allclose(got, formula(**tensors(given), **options).out, atol=1e-12)


@pytest.mark.parametrize("name", ["both, class token", "both factors by head", "a factor by head", "bias"])
def test_axes_of_items_and_of_heads_may_be_absent(name: str) -> None:
    arrays, options = drawn(*CASES[name]), CASES[name][1]
    whole: Any = relative_attention_nd(**arrays, **options)
    item = {key: x[0] if key in "qkv" else x for key, x in arrays.items()}
    np.testing.assert_allclose(relative_attention_nd(**item, **options), whole[0], rtol=1e-12)
    head = {key: x[1:2] for key, x in arrays.items()}
    head |= {"q": arrays["q"][0, 1], "k": arrays["k"][0, 0], "v": arrays["v"][0, 0]}
    if "tables" in arrays:
        head["tables"] = [arrays["tables"][0], arrays["tables"][1][1:2]]
    np.testing.assert_allclose(relative_attention_nd(**head, **options), whole[0, 1], rtol=1e-12)


def test_a_bias_of_integers_with_one_row_of_heights() -> None:
    matrix = toeplitz_2d(np.asarray([[1, 2, 3]]), q_grid=(1, 2), k_grid=(1, 2))
    assert matrix.dtype == int
    np.testing.assert_array_equal(matrix, [[2, 3], [1, 2]])


def test_each_axis_must_reach_as_far_as_its_queries_see() -> None:
    grids: dict[str, Any] = {"q_grid": (2, 3), "k_grid": (3, 2), "q_step": (2, 3), "k_step": (1, 4), "offset": (1, -2)}
    q, reach = np.ones((6, 4)), {"h": (3, 1), "w": (4, 6)}  # 1·[0, 2] - 2·[0, 1] - 1 and 4·[0, 1] - 3·[0, 2] + 2

    def call(**changed: tuple[int, int]) -> None:
        spans = {axis: Span(*sides) for axis, sides in {**reach, **changed}.items()}
        tables: dict[str, Any] = {f"table_{axis}": np.ones((span.rows, 4)) for axis, span in spans.items()}
        tables |= {f"span_{axis}": span for axis, span in spans.items()}
        relskew.relative_logits_2d(q, **tables, **grids)

    call()
    for axis, (left, right) in reach.items():
        for short in ((left - 1, right), (left, right - 1)):
            with pytest.raises(ValueError, match=f"^`table_{axis}` reaches .* or a `span_{axis}` with"):
                call(**{axis: short})


def test_tables_need_no_more_than_what_is_seen() -> None:
    q, k, v = np.random.default_rng(5).standard_normal((3, 2, 2, 72, 4))
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


def test_half_precision_is_summed_in_float32() -> None:
    """Height and width cancel but for one part in a thousand: rounded before their sum, nothing would be right."""
    rng = np.random.default_rng(6)
    q, height = rng.random((1, 64)).astype(np.float16), (1 + rng.random((1, 64)) / 2).astype(np.float16)
    width = -height - np.float16(2**-10)  # the next number in half precision
    got = relskew.relative_logits_2d(q, height, width, q_grid=(1, 1), k_grid=(1, 1))
    assert got.dtype == np.float16
    np.testing.assert_allclose(got, -q.astype(np.float64).sum() * 2**-10, rtol=1e-3)


@pytest.mark.parametrize("options", [{}, {"window": ((1, 0), None, (0, 1), None, None)}], ids=["all", "window"])
def test_arrays_in_the_other_byte_order(options: dict[str, Any]) -> None:
    """On five axes, since kernels, which read the machine's own byte order alone, take none of them at once."""
    case = grid(BOTH, (2, 1, 3, 2, 2), **options)
    arrays = drawn(*case)
    tables = arrays.pop("tables")
    outs = [relative_attention_nd(**{key: x.astype(kind) for key, x in arrays.items()}, **case[1],
                                  tables=[x.astype(kind) for x in tables]) for kind in (">f4", "<f4")]  # fmt: skip
    np.testing.assert_array_equal(*outs)


Q, ONE = np.ones((6, 4)), np.ones((5, 4))
WHOLE: dict[str, Any] = {"q_grid": (2, 3), "k_grid": (2, 3)}
FULL: dict[str, Any] = {"q_grid": (3, 3), "k_grid": (3, 3)}
NEAR: dict[str, Any] = {**WHOLE, "neighborhood": (1, 1)}
BEYOND = "`bias` reaches the relative positions -1 … 1, but queries see -2 … 2.* a `span_{}` with"


@pytest.mark.parametrize(("call", "words"), [
    (lambda: toeplitz_2d(np.zeros(3), q_grid=(1, 1), k_grid=(1, 1)), "`bias` must have shape"),
    (lambda: toeplitz_2d(np.zeros((5, 3)), **FULL), BEYOND.format("w")),
    (lambda: toeplitz_2d(np.zeros((3, 5)), **FULL), BEYOND.format("h")),
    (lambda: relative_attention_2d(Q, Q, Q, None, ONE, **WHOLE), "^`table_h` must be given with `table_w`, got None"),
    (lambda: relative_attention_2d(Q, Q, Q, **NEAR, window=((0, 0), (0, 0))),
     "^`neighborhood` must be None with `window`, got tuple"),
    (lambda: relative_attention_2d(Q, Q, Q, **{**NEAR, "neighborhood": (3, 3)}),
     r"^`neighborhood` must be no larger than `k_grid`, \(2, 3\), got \(3, 3\)"),
    (lambda: relative_attention_2d(Q, Q, Q, **NEAR, q_step=(2, 1), offset=(0, 0)),
     r"^`q_step` must be \(1, 1\) with `neighborhood`, got \(2, 1\)"),
    (lambda: relative_attention_2d(Q, Q, Q, **WHOLE, window=((-1, 0), None)),  # type: ignore[arg-type]  # refused
     r"^`window\[0\]\[0\]` must be an int"),
    (lambda: relative_attention_2d(Q, Q, Q, **WHOLE, window=((0, 1), (0, 0.5))),  # type: ignore[arg-type]
     r"^`window\[1\]\[1\]` must be an int"),
    (lambda: relskew.relative_logits_nd(Q, [None, None], **WHOLE), "^`tables` must have a table for at least one axis"),
    (lambda: relskew.relative_logits_nd(Q, None, **WHOLE), r"^`tables` must be a sequence .* got None"),  # type: ignore[arg-type]
    (lambda: relskew.relative_logits_2d(Q, None, None, **WHOLE), "^`table_h` or `table_w` must be given, got None for"),
])  # fmt: skip
def test_grids_that_do_not_fit_are_refused(call: Callable[[], Any], words: str) -> None:
    with pytest.raises((ValueError, TypeError), match=words):
        call()


@pytest.mark.parametrize("length", [12, 13, 14])
def test_a_dilated_neighborhood_is_one_of_every_third_token(length: int) -> None:
    """The window of NATTEN's ``get_window_start`` and the rows of its ``get_pb_start``, one key at a time."""
    size, step, around = 3, 3, 1
    x, numbers = np.random.default_rng(0).standard_normal((2, length, 4)), np.arange(10.0).reshape(2, 5)
    want, got = np.empty_like(x), np.empty_like(x)
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
    for part, out in ((x[:, start::step], got[:, start::step]) for start in range(step)):
        grids: dict[str, Any] = {"q_grid": part.shape[1:2], "k_grid": part.shape[1:2], "neighborhood": (size,)}
        out[...] = relative_attention_nd(part, part, part, rel_bias=numbers, **grids)
    assert oracles.relative_error(got, want) < 1e-12
