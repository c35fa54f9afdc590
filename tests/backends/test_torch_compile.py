"""Numbers and lengths that vary under ``torch.compile``, one graph for the first and one for all others; autocast."""

import inspect
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch._dynamo.testing import CompileCounterWithBackend
from torch.utils._pytree import tree_map_only

import relskew_core
from libraries import NATIVE
from public_calls import NOT_COMPILED, REQUIRED, arguments, cases, randn, rows
from relskew_core import Span, conventions, relative_attention, relative_attention_2d, relative_attention_vjp
from relskew_core.conventions import Convention

Q, KEYS, TABLE = (torch.randn(2, n, 4, generator=torch.Generator().manual_seed(n)) for n in (6, 40, 64))
LEAF = Q.clone().requires_grad_()
NO_CUDA = pytest.mark.skipif(not torch.cuda.is_available(), reason="torch sees no CUDA device")
CUDA = pytest.param("cuda", marks=[pytest.mark.gpu, NO_CUDA])
PAGES = torch.randn(2, 6, 3, 2, 4, generator=torch.Generator().manual_seed(0))
ORDER, FILLED = torch.arange(10).reshape(5, 2) % 6, torch.arange(2, 7)

NUMBERS = [x / 7 for x in range(9, 30)]


def attend(q: Any = Q, **options: Any) -> Any:
    return relative_attention(q, q, q, TABLE, Span(31, 32), **options)


def attend_on(q: Any, grid: Any, table: Any = TABLE, **options: Any) -> Any:
    return relative_attention_2d(q, q, q, table[0, :31], table[1, :31], q_grid=grid, k_grid=grid, **options)


HEIGHTS = [torch.randn(height, 12 - height, 4) for height in range(3, 9)]
WINDOW = ((1, 2), (None, 1))


CALLS: dict[str, tuple[Callable[[Any], Any], list[Any]]] = {
    "offset": (lambda offset: relative_attention(Q[:, :1], KEYS, KEYS, TABLE, Span(31, 32), offset=offset, causal=True),
               list(range(3, 30))),
    "length of the keys": (lambda keys: relative_attention(Q[:, :1], keys, keys, TABLE, Span(63, 0),
                                                           offset=keys.shape[-2] - 1, causal=True),
                           [KEYS[:, :n] for n in range(3, 30)]),
    "grid": (lambda x: attend_on(x.reshape(1, -1, 4), x.shape[:2]), HEIGHTS),
    "grid with a window": (lambda x: attend_on(x.reshape(1, -1, 4), x.shape[:2], window=WINDOW), HEIGHTS),
    "grid with a window, and gradients": (lambda x: attend_on(x.reshape(1, -1, 4) + LEAF[0, 0], x.shape[:2],
                                                              window=WINDOW),
                                          [torch.randn(height, 6, 4) for height in range(3, 9)]),
    "batch of grids with a window": (lambda q: attend_on(q, (3, 2), window=WINDOW),
                                     [torch.randn(batch, 2, 6, 4) for batch in range(2, 6)]),
    "vmap of grids with a window": (lambda q: torch.vmap(lambda x: attend_on(x, (3, 2), window=WINDOW))(q),
                                    [torch.randn(2, batch, 6, 4) for batch in range(2, 6)]),
    "offset on a grid with a window": (
        lambda row: relative_attention_2d(Q[:, :1], KEYS, KEYS, q_grid=(1, 1), k_grid=(8, 5), offset=(row, 2),
                                          window=WINDOW), list(range(2, 7)),
    ),
    "batch with pages": (
        lambda q: relskew_core.paged_attention(q, *PAGES, page_table=ORDER[: q.shape[0]], lengths=FILLED[: q.shape[0]]),
        [torch.randn(batch, 2, 1, 4) for batch in range(2, 6)],
    ),
    "softcap": (lambda softcap: attend(softcap=softcap), NUMBERS),
    "scale": (lambda scale: attend(scale=scale), NUMBERS),
    "scale, and gradients": (lambda scale: attend(LEAF, scale=scale), NUMBERS),
    "rel_scale": (lambda scale: attend(rel_q=Q, key_table=TABLE, scale=0.3, rel_scale=scale), NUMBERS),
    "softcap, and gradients": (lambda softcap: attend(LEAF, softcap=softcap), NUMBERS),
    "scale of the portable code": (lambda scale: attend(scale=scale, impl="portable"), NUMBERS),
}  # fmt: skip


NEWER = {"softcap": (2, 13), "softcap, and gradients": (2, 13)}
"""The releases of torch from which on some of these numbers make two graphs, as far as they were tried."""


@pytest.mark.parametrize("name", CALLS)
def test_a_number_that_varies_makes_two_graphs(name: str) -> None:
    if (needed := NEWER.get(name, (2, 8))) > tuple(map(int, torch.__version__.split(".")[:2])):
        pytest.skip(f"torch {torch.__version__} compiles once for each value, {needed[0]}.{needed[1]} does not")
    if NATIVE == "auto" and name in ("softcap", "scale, and gradients", "softcap, and gradients"):
        pytest.skip("without kernels, torch compiles the portable code, once for each of these numbers")
    torch.compiler.reset()
    function, values = CALLS[name]
    counter = CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(function, fullgraph=True, backend=counter)
    for value in values:
        ours, theirs = compiled(value), function(value)
        torch.testing.assert_close(ours, theirs)
        if theirs.requires_grad:
            torch.testing.assert_close(*(torch.autograd.grad(out.square().sum(), LEAF) for out in (ours, theirs)))
    assert counter.frame_count == 2


def test_functions_do_not_share_the_limit_of_programs() -> None:
    torch.compiler.reset()
    calls: list[tuple[Any, tuple[Any, ...], dict[str, int]]] = [
        (relskew_core.toeplitz, (TABLE[:, :5, 0],), {"n_queries": 3, "n_keys": 3}),
        (relskew_core.relative_logits, (Q, TABLE, Span(31, 32)), {"n_keys": 6}),
        (relskew_core.attention_weights, (Q, Q, TABLE, Span(31, 32)), {}), (relative_attention_vjp, (Q, Q, Q, Q), {}),
    ]  # fmt: skip
    with torch._dynamo.config.patch(recompile_limit=1):
        for function, arrays, options in calls:
            compiled: Any = torch.compile(function, fullgraph=True, backend="eager")
            compiled(*arrays, **options)


def test_an_offset_that_a_program_computes() -> None:
    """As that of a second step, after the cache's length has grown."""
    torch.compiler.reset()

    def attend(offset: Any) -> Any:
        return relative_attention(Q[:, :1], KEYS, KEYS, TABLE, Span(63, 0), offset=offset + 1, causal=True)

    counter = CompileCounterWithBackend("eager")
    compiled = torch.compile(attend, fullgraph=True, backend=counter)
    for place in (3, 0, 20):
        torch.testing.assert_close(compiled(torch.tensor(place)), attend(place))
    assert counter.frame_count == 1


def test_shapes_that_vary_are_those_of_the_queries() -> None:
    """Segments and offsets, whose sizes are symbols of the queries'; more than the smallest chunk, with gradients."""
    torch.compiler.reset()
    table = torch.randn(13, 4, requires_grad=True)

    def attend(x: Any, labels: Any, offsets: Any) -> Any:
        options: dict[str, Any] = {"segments": labels} if labels is not None else {}
        return relative_attention(x, x, x, table, Span(6, 6, "clip"), **options, offset=offsets, causal=True)

    compiled = torch.compile(attend, fullgraph=True, dynamic=True, backend="aot_eager")
    for batch, length in ((2, 17), (4, 19)):
        x, places = torch.randn(batch, 2, length, 4, requires_grad=True), torch.arange(length)
        for labels in (places // 4, None):
            outs = [function(x, labels, torch.arange(batch) % 2) for function in (compiled, attend)]
            found = [(out, *torch.autograd.grad(out.square().sum(), (x, table))) for out in outs]
            torch.testing.assert_close(*found, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("local", [{"window": WINDOW}, {"neighborhood": (3, 2), "chunk_size": 9}])
@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
@pytest.mark.parametrize("device", ["cpu", CUDA])
def test_every_gradient_of_grids_of_any_height(device: str, local: dict[str, Any], dtype: torch.dtype) -> None:
    """With heads that share keys, cells outside the grid, a mask and every array, also in half precision."""
    torch.compiler.reset()

    def attend(arrays: dict[str, Any], grid: Any) -> Any:
        found = relative_attention_2d(
            **arrays, q_grid=grid, k_grid=grid, prefix=(1, 2), scale=0.3, rel_scale=0.7, return_lse=True, **local
        )
        return [x.to(torch.float64) for x in found]

    counter = CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(attend, fullgraph=True, dynamic=True, backend=counter)
    for height, width in ((5, 7), (6, 9), (9, 6)):  # unequal to other sizes, which torch would assume to stay equal
        n = height * width
        shapes = {"q": (2, 4, n + 1, 8), "k": (2, 2, n + 2, 8), "v": (2, 2, n + 2, 3), "mask": (n + 1, n + 2)}
        shapes |= {"table_h": (4, 17, 8), "table_w": (17, 8), "rel_bias": (4, 17, 17), "prefix_bias": (4, 3)}
        generator = torch.Generator().manual_seed(n)
        arrays = {
            name: torch.randn(shape, generator=generator).to(device, dtype).requires_grad_()
            for name, shape in shapes.items()
        }
        outs = [function(arrays, (height, width)) for function in (compiled, attend)]
        found = [torch.autograd.grad([x.sin().sum() for x in each], [*arrays.values()]) for each in outs]
        bound = 1e-9 if dtype == torch.float64 else 0.02
        torch.testing.assert_close(outs[0], outs[1], rtol=bound, atol=bound)
        torch.testing.assert_close(found[0], found[1], rtol=bound, atol=bound)
    assert counter.frame_count == 1


LENGTHS = (29, 31, 35)
"""Lengths beyond the smallest chunk and twice a clipped table, with the same number of chunks of 12: programs of the
portable code, which serves offsets that differ by item, depend on these."""


def test_every_public_function_is_tried() -> None:
    functions = {name for name in relskew_core.__all__ if inspect.isfunction(getattr(relskew_core, name))}
    assert functions == REQUIRED.keys() | NOT_COMPILED


@pytest.mark.no_cover
@pytest.mark.parametrize(("name", "option"), cases())
def test_lengths_that_vary_make_two_graphs(name: str, option: str) -> None:
    torch.compiler.reset()
    function = getattr(relskew_core, name)
    counter = CompileCounterWithBackend("eager")
    compiled = torch.compile(lambda given: function(**given), fullgraph=True, backend=counter)
    for n in LENGTHS:
        given = arguments(name, option, n)
        torch.testing.assert_close(compiled(given), function(**given), rtol=1e-4, atol=1e-4)
    assert counter.frame_count <= 2


CONVENTIONS: dict[str, tuple[Callable[[], Any], int]] = {
    "T5": (lambda: conventions.T5(bidirectional=True), 32),
    "DeBERTa": (lambda: conventions.DeBERTa(position_buckets=8, max_distance=20), 16),
    "DeBERTa, version 1": (lambda: conventions.DeBERTa(position_buckets=8, max_distance=None), 16),
    "Swin": (lambda: conventions.Swin(window=(2, 3)), 15),
    "BEiT": (lambda: conventions.BEiT(window=(2, 3)), 18),
    "Convention": (lambda: Convention("mine", "descending", "odd", "clip"), 7),
} | {
    name: (lambda value=value: value, 8 if value.reach == "even" else 7)
    for name, value in vars(conventions).items()
    if isinstance(value, Convention)
}
"""Conventions, and the rows of a table of each."""


def test_every_convention_is_tried() -> None:
    with_load = {name for name in conventions.__all__ if hasattr(getattr(conventions, name), "load")}
    assert with_load == CONVENTIONS.keys() - {"DeBERTa, version 1"}


@pytest.mark.parametrize("name", CONVENTIONS)
@pytest.mark.parametrize("inside", [True, False], ids=["made inside", "made outside"])
def test_tables_are_loaded_and_stored_in_programs(name: str, inside: bool) -> None:
    torch.compiler.reset()
    make, count = CONVENTIONS[name]
    made = make()

    def there_and_back(table: Any) -> Any:
        convention = make() if inside else made
        loaded = convention.load(table)
        return loaded[0], convention.store(*loaded)

    table = randn(count, 4)
    compiled = torch.compile(there_and_back, fullgraph=True, backend="eager")
    torch.testing.assert_close(compiled(table), there_and_back(table), rtol=0, atol=0)


def test_a_bias_by_buckets_in_a_model_has_two_graphs() -> None:
    """With the gradient of T5's table, which is resized before."""
    torch.compiler.reset()
    t5, table = conventions.T5(bidirectional=False, num_buckets=8, max_distance=20), randn(5, 2).requires_grad_()

    def attend(x: Any) -> Any:
        rel_bias, span = t5.load(relskew_core.resize_table(table, 8))
        return relative_attention(x, x, x, None, span, rel_bias=rel_bias, causal=True)

    counter = CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(attend, fullgraph=True, backend=counter)
    for n in LENGTHS:
        found = [torch.autograd.grad(each(rows(n)).square().sum(), table) for each in (compiled, attend)]
        torch.testing.assert_close(*found)
    assert counter.frame_count == 2


EXACT = {"deberta_buckets", "merge_attention", "proximal_bias", "alibi_bias", "resize_table", "sinusoidal_table",
         "skew", "t5_buckets", "toeplitz", "toeplitz_2d", "toeplitz_nd", "unskew"}  # fmt: skip
"""Functions that move or make numbers, which a region leaves as they are."""

SUMS = ("lse", "d_lse")
"""Arrays that have the dtype of sums."""


def to(dtype: torch.dtype, given: Any) -> Any:
    def cast(x: torch.Tensor) -> torch.Tensor:
        return x.to(dtype) if x.is_floating_point() else x

    return tree_map_only(torch.Tensor, cast, given)


def without_region(given: dict[str, Any]) -> dict[str, Any]:
    return {name: x if name in SUMS else to(torch.bfloat16, x) for name, x in given.items()}


@pytest.mark.parametrize(("name", "option"), cases())
def test_arrays_are_cast_as_for_attention_on_sequences(name: str, option: str) -> None:
    """All in float32, or queries and keys as a linear layer of the region returns them and parameters as they are."""
    function, given = getattr(relskew_core, name), arguments(name, option, 7)
    sequences = {key: x for key, x in given.items() if key in ("q", "k", "v", "k_pages", "v_pages", "x", "weights")}
    expected = function(**(given if name in EXACT else without_region(given)))
    # without a region, a small bias over a grid is part of the mask, and products are rounded elsewhere
    atol = 2**-6 if "q_grid" in given and option in ("rel_bias", "prefix_bias") else 0
    for mixed in ({}, {} if name in EXACT else to(torch.bfloat16, sequences)):
        with torch.autocast("cpu", dtype=torch.bfloat16):
            found = function(**{**given, **mixed})
        if name == "relative_attention_vjp":  # gradients have the dtype of their arrays
            torch.testing.assert_close(to(torch.bfloat16, found), expected)
        else:
            torch.testing.assert_close(found, expected, rtol=0, atol=atol)
