"""Calls with nothing in them: no items, heads, queries, keys or numbers of a value, with every option and library."""

from collections.abc import Callable, Iterator
from itertools import cycle
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

import oracles
import relskew_core as relskew
from libraries import LIBRARIES, Library, device_of
from relskew_core import BlockSpec, Span
from relskew_core.layers.torch import MultiheadAttention, RelativeMultiheadAttention

SIZES = {"items": 2, "heads": 2, "queries": 3, "keys": 4, "width of values": 2}
"""Of an ordinary call."""

KINDS: dict[str, dict[str, Any]] = {
    "plain": {},
    "tables": {"tables": ["rel_k", "rel_v", "rel_bias", "key_table"], "causal": True},
    "segments of all": {"segments": False, "tables": ["rel_k"]},
    "segments by item": {"segments": True, "tables": ["rel_v"]},
    "positions of all": {"positions": False, "tables": ["rel_k", "rel_bias"]},
    "positions by item": {"positions": True, "tables": ["rel_k", "key_table"]},
    "offsets by item": {"offset": True, "tables": ["rel_k", "rel_v", "rel_bias"], "window": (3, 3)},
    "by head": {"by_head": ["sinks", "scale", "rel_scale"], "tables": ["rel_k"]},
    "a boolean mask": {"mask": "bool", "softcap": 2.0},
    "an additive mask": {"mask": "float", "tables": ["rel_bias"]},
    "blocks": {"block_size": 2, "blocks_before": 1, "chunk_size": 2, "tables": ["rel_v"]},
    "dropout": {"dropout": 0.5, "seed": 3},
}
"""What each call has besides."""

ROWS = [row for row in LIBRARIES if not row.traced]


def call_of(kind: dict[str, Any], empty: str) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return the arrays and the options of a call."""
    rng = np.random.default_rng(5)
    items, heads, n, m, dv = ({**SIZES, empty: 0}).values()
    options = dict(kind)
    arrays: dict[str, Any] = {
        "q": rng.standard_normal((items, heads, n, 3)),
        "k": rng.standard_normal((items, heads or 1, m, 3)),
        "v": rng.standard_normal((items, heads or 1, m, dv)),
    }
    widths = {"rel_k": (3,), "rel_v": (dv,), "rel_bias": (), "key_table": (3,)}
    tables = options.pop("tables", [])
    arrays |= {name: rng.standard_normal((5, *widths[name])) for name in tables}
    arrays |= {name: rng.uniform(0.2, 0.8, heads) for name in options.pop("by_head", [])}
    for name in {"segments", "positions"} & options.keys():
        lead = (items,) if options.pop(name) else ()
        arrays[name] = tuple(rng.integers(0, 3, (*lead, length)) for length in (n, m))
    if "mask" in options:
        arrays["mask"] = rng.standard_normal((n, m)).astype(options.pop("mask"))
    options["offset"] = [0, 1][:items] if "offset" in options else 0
    return arrays, {**options, "span": Span.clipped(2) if tables else None}


@pytest.mark.parametrize("impl", ["auto", "portable"])
@pytest.mark.parametrize("empty", SIZES)
@pytest.mark.parametrize("row", ROWS, ids=str)
def test_of_nothing_comes_nothing(row: Library, empty: str, impl: str) -> None:
    """Libraries that compile every operation for every shape are tried with all kinds in turn over the axes."""
    row.needed()
    start = list(SIZES).index(empty) + 2 * (impl == "auto")
    for name, kind in list(KINDS.items())[start % 4 if row.compiled else 0 :: 4 if row.compiled else 1]:
        numbers, options = call_of(kind, empty)
        arrays = {name: given(row, x) for name, x in numbers.items()}
        if impl == "auto" or "offset" not in kind:
            hold(row, name, numbers, arrays, {**options, "impl": impl})


def given(row: Library, x: Any) -> Any:
    """Return numbers, or a pair of them, as arrays of a library."""
    if isinstance(x, tuple):
        return tuple(given(row, each) for each in x)
    return row.asarray(x, "float32" if x.dtype.kind == "f" else None)


def hold(row: Library, name: str, numbers: dict[str, Any], arrays: dict[str, Any], options: dict[str, Any]) -> None:
    """Hold the results against those of the loops; a gradient is zero where there is nothing to have one."""
    wanted = oracles.relative_attention(
        **numbers, **{name: x for name, x in options.items() if name not in ("chunk_size", "impl")}
    )
    d_out = given(row, np.ones(wanted.out.shape))
    with row.setting():
        results = relskew.relative_attention(**arrays, **options, return_lse=True)
        gradients = relskew.relative_attention_vjp(d_out, **arrays, **options)._asdict()
        for x, like in zip(results, wanted, strict=True):
            same(row, name, x, like)
        for which, x in gradients.items():
            if x is not None:
                same(row, f"{name}, {which}", x, np.zeros(numbers[which].shape))


def same(row: Library, name: str, x: Any, like: NDArray[Any]) -> None:
    """In float32, which is not the default dtype of all libraries."""
    assert (x.shape, device_of(x)) == (like.shape, row.device()), name
    assert str(x.dtype).endswith("float32"), name
    np.testing.assert_allclose(row.to_numpy(x), like, rtol=0, atol=1e-5, err_msg=name)


def test_a_matrix_is_refused_by_name() -> None:
    q = np.ones((3, 2))
    matrix = q.view(np.matrix)
    for name in ("q", "k", "v", "rel_k", "mask", "segments"):
        arrays: dict[str, Any] = {"q": q, "k": q, "v": q, name: matrix}
        with pytest.raises(TypeError, match=rf"`{name}` must be an array of numbers alone"):
            relskew.relative_attention(**arrays, span=Span.causal(3), causal=True)


CLIP: dict[str, Any] = {"span": Span.clipped(2), "offset": 0}
GRID: dict[str, Any] = {"span_h": Span.clipped(2), "span_w": Span.clipped(2), "offset": (0, 0)}


def merged(*parts: Any) -> Any:
    return relskew.merge_attention(parts[:2], parts[2:])[0]


def block(x: Any, memory: Any, k: Any, v: Any, *weights: Any, spec: BlockSpec) -> Any:
    named = dict(zip(spec.weight_shapes(), weights, strict=True))
    if spec.cross:
        return relskew.attention_block(x, named, spec, memory=memory)
    return relskew.attention_block(x, named, spec, past=(k, v))[0]


def others(empty: str) -> Iterator[tuple[Callable[..., Any], list[tuple[int, ...]], dict[str, Any], tuple[int, ...]]]:
    """Give functions, the shapes of their arrays, their options, and the shape of what comes of them."""
    b, h, n, m, dv, width = ({**SIZES, "width": 3, empty: 0}).values()
    q, k, v, table = (b, h, n, width), (b, h or 1, m, width), (b, h or 1, m, dv), (5, width)
    ragged: dict[str, Any] = {"offset": [0, 1][:b]}
    placed: dict[str, Any] = {"span": Span.clipped(2), "positions": (np.arange(n), np.zeros((b, m), int))}
    square: dict[str, Any] = {**GRID, "q_grid": (1, n), "k_grid": (1, m)}
    yield relskew.relative_logits, [q, table], {**CLIP, "n_keys": m, "causal": True}, (b, h, n, m)
    yield relskew.relative_logits, [q, (h, *table)], {**CLIP, **ragged, "n_keys": m}, (b, h, n, m)
    yield relskew.relative_logits, [(b, h, m, width), table], {**CLIP, "n_queries": n, "side": "key"}, (b, h, n, m)
    yield relskew.relative_logits, [q, table], placed, (b, h, n, m)
    yield relskew.relative_values, [(b, h, n, m), (5, dv)], CLIP, (b, h, n, dv)
    yield relskew.relative_values, [(b, h, n, m), (h, 5, dv)], {**CLIP, **ragged, "causal": True}, (b, h, n, dv)
    yield relskew.toeplitz, [(h, 5)], {**CLIP, "n_queries": n, "n_keys": m}, (h, n, m)
    yield relskew.attention_weights, [q, k, table], {**CLIP, "chunk_size": 2}, (b, h, n, m)
    yield relskew.attention_weights, [q, k, table], placed, (b, h, n, m)
    unseen: dict[str, Any] = {**CLIP, "offset": -9, "causal": True}
    yield relskew.attention_weights, [q, k, table], {**unseen, "chunk_size": 2}, (b, h, n, m)
    yield relskew.relative_values, [(b, h, n, m), (h, 5, dv)], unseen, (b, h, n, dv)
    yield relskew.relative_logits_2d, [q, table, (h, *table)], square, (b, h, n, m)
    yield relskew.toeplitz_2d, [(h, 5, 5)], square, (h, n, m)
    yield relskew.relative_attention_2d, [q, k, v, table, table], square, (b, h, n, dv)
    prefixed: list[tuple[int, ...]] = [(b, h, n + 1, width), (b, h or 1, m + 1, width), (b, h or 1, m + 1, dv)]
    yield relskew.relative_attention_2d, prefixed, {**square, "prefix": (1, 1)}, (b, h, n + 1, dv)
    yield merged, [(b, h, n, dv), (b, h, n, dv), (b, h, n), (b, h, n)], {}, (b, h, n, dv)
    yield relskew.skew, [(b, h, n, n + m - 1)], {}, (b, h, n, m)
    yield relskew.unskew, [(b, h, n, m)], {}, (b, h, n, n + m - 1)
    for cross in (False, True):
        spec = BlockSpec(4, 2, Span.clipped(2), cross=cross, rel_values=True)
        arrays = [(b, n, 4), (b, m, 4), (b, 2, m, 2), (b, 2, m, 2), *spec.weight_shapes().values()]
        yield block, arrays, {"spec": spec}, (b, n, 4)


@pytest.mark.parametrize("row", ROWS, ids=str)
def test_other_functions_give_nothing_of_nothing_or_name_what_is_empty(row: Library) -> None:
    """Libraries that compile every operation for every shape are tried with one empty axis for each function."""
    row.needed()
    axes = [*SIZES, "width"]
    drawn = [(empty, place, call) for empty in axes for place, call in enumerate(others(empty))]
    chosen = [empty for empty, _ in zip(cycle(axes), range(len(drawn) // len(axes)), strict=False)]
    for empty, place, (function, shapes, options, shape) in drawn:
        if not row.compiled or chosen[place] == empty:
            arrays = [given(row, np.ones(size)) for size in shapes]
            named = {name: given(row, x) if name == "positions" else x for name, x in options.items()}
            with row.setting():
                try:
                    result = function(*arrays, **named)
                except ValueError as error:
                    assert str(error).startswith("`"), (function, empty, error)  # noqa: PT017 - a result is as good
                    assert empty in ("queries", "keys", "width"), (function, empty)
                else:
                    assert (result.shape, device_of(result)) == (shape, row.device()), (function, empty)
                    assert str(result.dtype).endswith("float32"), (function, empty)
                    numbers = row.to_numpy(result)
                    assert empty == "width" or function is block or not numbers[..., :0].any()
                    assert options.get("offset") != -9 or not numbers.any()


def test_modules_take_a_batch_of_nothing() -> None:
    module = RelativeMultiheadAttention(
        BlockSpec(8, 2, Span.causal(8), causal=True, rel_values=True, rel_bias=True, sinks=True)
    )
    x, y = torch.zeros((0, 3, 8), requires_grad=True), torch.zeros((2, 0, 8), requires_grad=True)
    drop_in = MultiheadAttention(8, 2, Span.clipped(2), batch_first=True)
    outs = module(x), module(y), drop_in(x, x, x, need_weights=False)[0], drop_in(x, x, x)[0]
    for out, like in zip(outs, (x, y, x, x), strict=True):
        assert out.shape == like.shape
        out.sum().backward()
    assert all(each.grad is not None for each in (x, y, *module.parameters()))
    assert drop_in(x, x, x, average_attn_weights=False)[1].shape == (0, 2, 3, 3)
    out, cache = module(x, past=module.empty_cache(0))
    assert out.shape == module(x, past=cache)[0].shape == x.shape
