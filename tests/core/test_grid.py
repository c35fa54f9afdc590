"""Grids: tables of heights and widths, biases of both, class tokens, attention some rows at a time."""

import itertools
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray

import oracles
from libraries import GATES, Library
from relskew_core import Span, relative_attention_2d, relative_logits_2d, toeplitz_2d

Floats = NDArray[Any]


def logits_2d(
    q: Floats, tables: tuple[Floats, Floats], spans: tuple[Span, Span], q_grid: Any, k_grid: Any, offset: Any = (0, 0),
    q_step: Any = (1, 1), k_step: Any = (1, 1),
) -> Floats:  # fmt: skip
    """Height and width, one query and one key at a time."""
    logits = np.zeros((*q.shape[:-1], k_grid[0] * k_grid[1]))
    for lead in np.ndindex(q.shape[:-2]):
        for y, x, ky, kx in itertools.product(*map(range, (*q_grid, *k_grid))):
            i, j = y * q_grid[1] + x, ky * k_grid[1] + kx
            down, right = (
                k * b - q * a - o for q, k, a, b, o in zip((y, x), (ky, kx), q_step, k_step, offset, strict=True)
            )
            for r, table, span in zip((down, right), tables, spans, strict=True):
                row = oracles.row_of(r, span)
                rows = table if table.ndim == 2 else table[lead[-1] if lead else 0]
                if row is not None:
                    logits[(*lead, i, j)] += q[(*lead, i)] @ rows[row]
    return logits


def bias_2d(bias: Floats, spans: tuple[Span, Span], q_grid: Any, k_grid: Any, offset: Any = (0, 0)) -> Floats:
    """The bias of both, one query and one key at a time."""
    matrix = np.zeros((*bias.shape[:-2], q_grid[0] * q_grid[1], k_grid[0] * k_grid[1]))
    for y, x, ky, kx in itertools.product(*map(range, (*q_grid, *k_grid))):
        rows = [oracles.row_of(r, s) for r, s in zip((ky - y - offset[0], kx - x - offset[1]), spans, strict=True)]
        if None not in rows:
            matrix[..., y * q_grid[1] + x, ky * k_grid[1] + kx] = bias[..., rows[0], rows[1]]
    return matrix


GRIDS = {
    "square": ((3, 3), (3, 3), (0, 0), Span.full(3), Span.full(3)),
    "oblong, keys elsewhere": ((2, 3), (4, 2), (1, -1), Span(9, 9), Span(9, 9)),
    "block in its window": ((2, 2), (4, 4), (1, 1), Span(2, 2), Span(2, 2)),
    "one query": ((1, 1), (3, 2), (2, 1), Span(2, 0), Span(1, 0)),
    "one key": ((3, 2), (1, 1), (0, 0), Span(2, 0), Span(1, 0)),
    "clip and zero": ((4, 5), (5, 4), (0, 1), Span(1, 1, "clip"), Span(2, 1, "zero")),
}


@pytest.mark.parametrize("name", GRIDS)
def test_logits_of_a_grid_equal_the_formula(library: Library, name: str) -> None:
    q_grid, k_grid, offset, *spans = GRIDS[name]
    rng = np.random.default_rng(0)
    q = rng.standard_normal((2, 3, q_grid[0] * q_grid[1], 4))
    tables = (rng.standard_normal((spans[0].rows, 4)), rng.standard_normal((3, spans[1].rows, 4)))
    want = logits_2d(q, tables, (spans[0], spans[1]), q_grid, k_grid, offset)
    options = {"q_grid": q_grid, "k_grid": k_grid, "offset": offset, "span_h": spans[0], "span_w": spans[1]}
    for dtype in library.dtypes_of([*GRIDS].index(name)):
        arrays = {"q": q, "table_h": tables[0], "table_w": tables[1]}
        given_arrays = {key: library.asarray(x, dtype) for key, x in arrays.items()}
        got = library.call(relative_logits_2d, given_arrays, **options)
        assert isinstance(got, library.array_type())
        assert oracles.relative_error(library.to_numpy(got), want) < GATES[dtype]


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
        relative_logits_2d(q, **tables, **grids)

    call()
    for axis, (left, right) in reach.items():
        for short in ((left - 1, right), (left, right - 1)):
            with pytest.raises(ValueError, match=f"^`table_{axis}` reaches .* or a `span_{axis}` with"):
                call(**{axis: short})


@given(*[st.integers(1, 3)] * 4, *[st.integers(1, 3)] * 4, st.integers(-3, 3))
def test_logits_of_grids_of_other_scales(
    qh: int, qw: int, kh: int, kw: int, qa: int, qb: int, ka: int, kb: int, down: int
) -> None:
    rng = np.random.default_rng(qh)
    tables, spans = (rng.standard_normal((4, 3)), rng.standard_normal((23, 3))), (Span(2, 1, "clip"), Span(11, 11))
    grids: dict[str, Any] = {"q_grid": (qh, qw), "k_grid": (kh, kw), "q_step": (qa, qb), "k_step": (ka, kb)}
    q, k, v = (rng.standard_normal((2, 1 + cells, 3)) for cells in (qh * qw, kh * kw, kh * kw))
    want = logits_2d(q[:, 1:], tables, spans, **grids, offset=(down, 1))
    options: dict[str, Any] = {**grids, "span_h": spans[0], "span_w": spans[1], "offset": (down, 1)}
    np.testing.assert_allclose(relative_logits_2d(q[:, 1:], *tables, **options), want, atol=1e-12)
    mask = np.zeros((2, 1 + qh * qw, 1 + kh * kw))
    mask[:, 1:, 1:] = want
    got = relative_attention_2d(q, k, v, *tables, **options, prefix=(1, 1), rel_scale=1.0, chunk_size=qw)
    np.testing.assert_allclose(got, oracles.relative_attention(q, k, v, mask=mask).out, atol=1e-12)


@pytest.mark.parametrize("name", GRIDS)
def test_toeplitz_2d_is_the_formula(library: Library, name: str) -> None:
    q_grid, k_grid, offset, *spans = GRIDS[name]
    bias = np.random.default_rng(1).standard_normal((2, spans[0].rows, spans[1].rows))
    want = bias_2d(bias, (spans[0], spans[1]), q_grid, k_grid, offset)
    options = {"q_grid": q_grid, "k_grid": k_grid, "offset": offset, "span_h": spans[0], "span_w": spans[1]}
    got = library.call(toeplitz_2d, {"bias": library.asarray(bias, "float64")}, **options)
    np.testing.assert_array_equal(library.to_numpy(got), want)


def attention_2d(case: dict[str, Any]) -> oracles.Attention:
    """Attention on a grid with class tokens, from the loops above."""
    q, k, v, prefix = case["q"], case["k"], case["v"], case["prefix"]
    spans = (case["span_h"], case["span_w"])
    grids = (case["q_grid"], case["k_grid"], case["offset"])
    term = np.zeros((*q.shape[:-1], k.shape[-2]))
    cells = term[..., prefix[0] :, prefix[1] :]
    if case.get("table_h") is not None:
        cells += case["rel_scale"] * logits_2d(
            q[..., prefix[0] :, :], (case["table_h"], case["table_w"]), spans, *grids
        )
    if case.get("rel_bias") is not None:
        cells += bias_2d(case["rel_bias"], spans, *grids)
    if case.get("prefix_bias") is not None:
        term[..., prefix[0] :, : prefix[1]] += case["prefix_bias"][..., 0, None, None]
        term[..., : prefix[0], prefix[1] :] += case["prefix_bias"][..., 1, None, None]
        term[..., : prefix[0], : prefix[1]] += case["prefix_bias"][..., 2, None, None]
    mask = case.get("mask")
    if mask is not None:
        term = np.where(mask, term, -np.inf) if mask.dtype == bool else term + mask
    return oracles.relative_attention(q, k, v, mask=term, scale=case["scale"])


ARRAYS = ("q", "k", "v", "table_h", "table_w", "rel_bias", "prefix_bias", "mask")


def case(prefix: tuple[int, int] = (0, 0), *, only: tuple[str, ...] = ARRAYS, mask: str = "none") -> dict[str, Any]:
    rng = np.random.default_rng(3)
    n, m = prefix[0] + 12, prefix[1] + 10
    arrays: dict[str, Any] = {
        "q": rng.standard_normal((2, 4, n, 3)),
        "k": rng.standard_normal((2, 2, m, 3)),
        "v": rng.standard_normal((2, 2, m, 5)),
        "table_h": rng.standard_normal((7, 3)),
        "table_w": rng.standard_normal((4, 6, 3)),
        "rel_bias": rng.standard_normal((4, 7, 6)),
        "prefix_bias": rng.standard_normal((4, 3)),
        "mask": {"none": None, "boolean": rng.random((2, 1, n, m)) < 0.6, "additive": rng.standard_normal((4, n, m)),
                 "keys": rng.random((1, m)) < 0.6}[mask],
    }  # fmt: skip
    if mask == "boolean":
        arrays["mask"][0, 0, 1] = False  # for a query that sees nothing
    names = (*only, "q", "k", "v", "mask")
    return {
        **{name: array for name, array in arrays.items() if array is not None and name in names},
        "q_grid": (4, 3), "k_grid": (2, 5), "offset": (1, 0), "prefix": prefix,
        "span_h": Span(4, 2), "span_w": Span(1, 4, "clip"), "scale": 0.7, "rel_scale": 1.0,
    }  # fmt: skip


CASES = {
    "tables": case(only=("table_h", "table_w")),
    "bias": case(only=("rel_bias",)),
    "both, class token": case((1, 1)),
    "class tokens without their bias": case((2, 1), only=("table_h", "table_w")),
    "keys outside only": case((0, 2), mask="boolean"),
    "queries outside only": case((1, 0), mask="additive"),
    "prefix bias alone": case((1, 2), only=("prefix_bias",), mask="keys"),
    "nothing but a mask": case((1, 1), only=(), mask="boolean"),
}
_BIASES = case((2, 1), only=("rel_bias", "prefix_bias"))
CASES["shared bias, class tokens by head"] = {**_BIASES, "rel_bias": _BIASES["rel_bias"][0]}
CASES["bias by head, shared class tokens"] = {**_BIASES, "prefix_bias": _BIASES["prefix_bias"][0]}


@pytest.mark.parametrize("name", CASES)
def test_attention_is_the_formula(library: Library, name: str) -> None:
    want = attention_2d(CASES[name])
    arrays = {key: x for key, x in CASES[name].items() if key in ARRAYS}
    options = {key: x for key, x in CASES[name].items() if key not in ARRAYS}
    ways: list[tuple[str, int | None]] = [(library.dtypes[0], None), (library.dtypes[-1], 5)]
    if library.compiled:  # each way in every second case
        ways = [ways[list(CASES).index(name) % 2]]
    for dtype, chunk_size in ways:
        given_arrays = {key: library.asarray(x, None if x.dtype == bool else dtype) for key, x in arrays.items()}
        out, lse = library.call(relative_attention_2d, given_arrays, **options, chunk_size=chunk_size, return_lse=True)
        assert str(out.dtype).endswith(dtype)
        assert oracles.relative_error(library.to_numpy(out), want.out) < GATES[dtype]
        assert oracles.relative_error(library.to_numpy(lse), want.lse) < GATES[dtype]


def test_results_do_not_depend_on_the_chunks_nor_on_the_heads_axis() -> None:
    arguments = CASES["both, class token"]
    whole: Any = relative_attention_2d(**arguments)
    for chunk_size in (1, 4, 6, 100):
        np.testing.assert_allclose(relative_attention_2d(**arguments, chunk_size=chunk_size), whole, rtol=1e-12)
    one = {**arguments, "q": arguments["q"][0, 1], "k": arguments["k"][0, 0], "v": arguments["v"][0, 0]}
    one |= {"table_w": arguments["table_w"][1:2], "rel_bias": arguments["rel_bias"][1:2]}
    one |= {"prefix_bias": arguments["prefix_bias"][1:2]}
    np.testing.assert_allclose(relative_attention_2d(**one), whole[0, 1], rtol=1e-12)


def test_a_bias_by_head_needs_no_batch() -> None:
    rng = np.random.default_rng(10)
    q, bias = rng.standard_normal((1, 3, 6, 4)), rng.standard_normal((3, 3, 5))
    grids: dict[str, Any] = {"q_grid": (2, 3), "k_grid": (2, 3), "rel_bias": bias}
    np.testing.assert_array_equal(
        relative_attention_2d(q[0], q[0], q[0], **grids), relative_attention_2d(q, q, q, **grids)[0]
    )
    with pytest.raises(ValueError, match=r"^`table_h` must be given with `table_w`, got None"):
        relative_attention_2d(q, q, q, None, q[0, 0, :5], q_grid=(2, 3), k_grid=(2, 3))


@pytest.mark.parametrize("dtype", ["float64", "float16"])
def test_factors_by_head_are_those_of_each_head_alone(dtype: str) -> None:
    rng = np.random.default_rng(9)
    q, k, v = (rng.standard_normal((2, 3, 6, 4)).astype(dtype) for _ in range(3))
    heights, widths = rng.standard_normal((3, 4)).astype(dtype), rng.standard_normal((5, 4)).astype(dtype)
    scale, rel_scale = (rng.uniform(0.2, 0.9, 3).astype(dtype) for _ in range(2))
    tables: dict[str, Any] = {"table_h": heights, "table_w": widths, "q_grid": (2, 3), "k_grid": (2, 3)}
    every: list[dict[str, Any]] = [{"scale": scale}, {"rel_scale": rel_scale}, {"scale": scale, "rel_scale": rel_scale}]
    for factors in every:
        out: Any = relative_attention_2d(q, k, v, **tables, **factors)
        assert out.dtype == q.dtype
        np.testing.assert_array_equal(relative_attention_2d(q[0], k[0], v[0], **tables, **factors), out[0])
        for head in range(3):
            own: dict[str, Any] = {"q": q[0, head], "k": k[0, head], "v": v[0, head], **tables}
            numbers: dict[str, Any] = {name: float(factor[head]) for name, factor in factors.items()}
            alone = relative_attention_2d(**own, **numbers)
            arrays: dict[str, Any] = {name: factor[head : head + 1] for name, factor in factors.items()}
            same = relative_attention_2d(**own, **arrays)
            atol = 1e-13 if dtype == "float64" else 2e-3
            np.testing.assert_allclose(out[0, head], alone, rtol=0, atol=atol)
            np.testing.assert_allclose(out[0, head], same, rtol=0, atol=atol)


def test_the_defaults_are_full_spans_and_the_usual_scale() -> None:
    rng = np.random.default_rng(4)
    q, table_h, table_w = rng.standard_normal((6, 4)), rng.standard_normal((3, 4)), rng.standard_normal((5, 4))
    got = relative_attention_2d(q, q, q, table_h, table_w, q_grid=(2, 3), k_grid=(2, 3))
    term = logits_2d(q, (table_h, table_w), (Span.full(2), Span.full(3)), (2, 3), (2, 3))
    want = oracles.relative_attention(q, q, q, mask=term / 2).out
    np.testing.assert_allclose(got, want, rtol=1e-12)


def test_gradients_flow_to_the_tables_and_the_bias() -> None:
    torch = pytest.importorskip("torch")
    arguments = {
        key: torch.tensor(x, requires_grad=x.dtype != bool) if key in ARRAYS else x for key, x in case((1, 1)).items()
    }
    names = [name for name in ARRAYS if name in arguments]
    others = {key: x for key, x in arguments.items() if key not in names}

    def function(*arrays: Any) -> Any:
        return relative_attention_2d(**dict(zip(names, arrays, strict=True)), **others, chunk_size=6)

    assert torch.autograd.gradcheck(function, [arguments[name] for name in names], fast_mode=True)


def test_toeplitz_2d_refuses_what_is_no_bias() -> None:
    with pytest.raises(ValueError, match="`bias` must have shape"):
        toeplitz_2d(np.zeros(3), q_grid=(1, 1), k_grid=(1, 1))
    for axis, shape in (("w", (5, 3)), ("h", (3, 5))):
        told = f"`bias` reaches the relative positions -1 … 1, but queries see -2 … 2.* a `span_{axis}` with"
        with pytest.raises(ValueError, match=told):
            toeplitz_2d(np.zeros(shape), q_grid=(3, 3), k_grid=(3, 3))


def test_half_precision_is_summed_in_float32() -> None:
    """Height and width cancel but for one part in a thousand: rounded before their sum, nothing would be right."""
    rng = np.random.default_rng(6)
    q, height = rng.random((1, 64)).astype(np.float16), (1 + rng.random((1, 64)) / 2).astype(np.float16)
    width = -height - np.float16(2**-10)  # the next number in half precision
    got = relative_logits_2d(q, height, width, q_grid=(1, 1), k_grid=(1, 1))
    assert got.dtype == np.float16
    np.testing.assert_allclose(got, -q.astype(np.float64).sum() * 2**-10, rtol=1e-3)


@pytest.mark.parametrize("options", [{}, {"window": ((1, 1), (1, 2))}], ids=["tables", "window"])
def test_arrays_in_the_other_byte_order(options: dict[str, Any]) -> None:
    """As files of other machines have them."""
    draw = np.random.default_rng(0)
    arrays = [draw.standard_normal(shape).astype(">f4") for shape in [(1, 2, 12, 8)] * 3 + [(5, 8), (7, 8)]]
    options = {**options, "q_grid": (3, 4), "k_grid": (3, 4)}
    out = relative_attention_2d(*arrays, **options)
    np.testing.assert_array_equal(out, relative_attention_2d(*(x.astype("f4") for x in arrays), **options))
