"""Hidden entries change nothing, whatever they contain: results and gradients equal those with zeros in their place."""

import itertools
from typing import Any

import numpy as np
import pytest

import oracles
from libraries import LIBRARIES, Library, of_name
from relskew_core import Span, relative_attention, relative_attention_vjp

ROWS = [row for row in LIBRARIES if row.name in ("numpy", "array-api-strict, strictest flags", "torch, CPU", "jax.jit")]
ITEMS = 2


def drawn(rng: np.random.Generator, how: str) -> tuple[dict[str, Any], dict[str, Any]]:
    """Draw a call of few queries that see few of many keys."""

    def one_of(*choices: Any) -> Any:
        return choices[rng.integers(len(choices))]

    n, m, rows = int(rng.integers(1, 9)), int(rng.integers(1, 14)), 7
    arrays: dict[str, Any] = {
        "q": rng.standard_normal((ITEMS, 2, n, 3)),
        "k": rng.standard_normal((ITEMS, one_of(1, 2), m, 3)),
    }
    arrays["v"] = rng.standard_normal((*arrays["k"].shape[:-1], 2))
    heads = one_of((), (2,))
    widths = {"rel_k": (3,), "rel_v": (2,), "rel_bias": (), "key_table": (3,)}
    arrays |= {name: rng.standard_normal((*heads, rows, *widths[name])) for name in widths if one_of(True, False)}
    options: dict[str, Any] = {"span": Span(4, 2, one_of("clip", "zero")), "causal": one_of(True, False)}
    options["window"] = one_of(None, (one_of(0, 1, 2, None), one_of(0, 1, None)))
    options["softcap"], options["chunk_size"] = one_of(None, 2.0), one_of(None, 1, 3)
    if how == "positions":
        arrays["positions"] = rng.integers(-6, 9, (ITEMS, n)), rng.integers(-6, 9, one_of((ITEMS, m), (m,)))
    elif how == "offsets":
        options["offset"] = rng.integers(-8, 14, ITEMS).tolist()
    elif how == "segments":
        arrays["segments"] = np.sort(rng.integers(0, 4, (ITEMS, n))), np.sort(rng.integers(0, 4, (ITEMS, m)))
    options.setdefault("offset", 0)
    if one_of(True, False):
        arrays["mask"] = rng.standard_normal((ITEMS, 1, n, m))
    if how == "offsets":
        options["block_size"] = one_of(None, 2, 3)
    return arrays, options


def seen(arrays: dict[str, Any], options: dict[str, Any]) -> tuple[Any, set[int]]:
    """Return which pairs see each other, masks aside, and which rows of tables belong to some pair."""
    n, m, offset = arrays["q"].shape[-2], arrays["k"].shape[-2], options["offset"]
    visible, rows = np.zeros((ITEMS, n, m), bool), set()
    pattern: dict[str, Any] = {name: options.get(name) for name in ("causal", "window", "block_size")}
    for item in range(ITEMS):
        first = offset if isinstance(offset, int) else offset[item]
        queries, keys = oracles.of_item(arrays.get("positions"), (item, 0), n, m)
        of_queries, of_keys = oracles.of_item(arrays.get("segments"), (item, 0), n, m)
        for i, j in np.ndindex(n, m):
            position, key = (queries[i], keys[j]) if "positions" in arrays else (i + first, j)
            if oracles.sees(position, key, **pattern):
                rows.add(oracles.row_of(key - position, options["span"]))
                visible[item, i, j] = of_queries[i] == of_keys[j]
    return visible, {row for row in rows if row is not None}


def filled(arrays: dict[str, Any], options: dict[str, Any], number: float) -> dict[str, Any]:
    """Return the arrays with a number in all places that no query sees."""
    visible, rows = seen(arrays, options)
    arrays = {name: x if isinstance(x, tuple) else x.copy() for name, x in arrays.items()}
    unseen = [row for row in range(options["span"].rows) if row not in rows]
    for name, axis in (("rel_k", -2), ("rel_v", -2), ("rel_bias", -1), ("key_table", -2)):
        if name in arrays:
            np.moveaxis(arrays[name], axis, 0)[unseen] = number
    for item, pairs in enumerate(visible):
        for name in ("k", "v"):
            arrays[name][item][:, ~pairs.any(axis=0)] = number
        if "mask" in arrays:
            arrays["mask"][item][:, ~pairs] = number
    return arrays


def compare(row: Library, how: str, seed: int, *, impl: Any, dtype: str, tolerance: float) -> None:
    """Compare a random call with itself, zeros in all places that no query sees."""
    rng = np.random.default_rng(seed)
    arrays, options = drawn(rng, how)
    arrays = {name: x if isinstance(x, tuple) else x.astype(dtype) for name, x in arrays.items()}
    d_out = row.asarray(rng.standard_normal((*arrays["q"].shape[:-1], 2)), dtype)

    def results(number: float) -> list[Any]:
        made = filled(arrays, options, number)
        given = {name: tuple(map(row.asarray, x)) if isinstance(x, tuple) else row.asarray(x)
                 for name, x in made.items()}  # fmt: skip
        with row.setting(), np.errstate(all="ignore"):
            out = row.call(relative_attention, given, **options, return_lse=True, impl=impl)
            gradients = row.call(relative_attention_vjp, {"d_out": d_out, **given}, **options, impl=impl)
        return [row.to_numpy(x) for x in (*out, *gradients) if x is not None]

    wanted = results(0.0)
    for x, like in zip(results(rng.choice([np.nan, np.inf, -np.inf])), wanted, strict=True):
        np.testing.assert_allclose(x, like, rtol=tolerance, atol=tolerance, err_msg=f"seed {seed}, {dtype}: {options}")


@pytest.mark.parametrize("how", ["offset", "offsets", "segments", "positions"])
@pytest.mark.parametrize("row", ROWS, ids=str)
def test_results_do_not_depend_on_entries_that_no_query_sees(row: Library, how: str) -> None:
    row.needed()
    # NumPy runs the same code as the strict row, in a tenth of the time. Seeds 54 and 61 are calls where hidden pairs
    # read rows that no query sees.
    for seed in range(1) if row.compiled else (*range(5 if "strict" in row.name else 25), 54, 61):
        compare(row, how, seed, impl="portable", dtype="float64", tolerance=1e-9)


@pytest.mark.parametrize("how", ["offset", "offsets", "segments", "positions"])
@pytest.mark.parametrize("row", [row for row in ROWS if "strict" not in row.name], ids=str)
def test_native_results_do_not_depend_on_entries_that_no_query_sees(row: Library, how: str) -> None:
    row.needed()
    gates = {"float64": 1e-9, "float32": 1e-5}
    if row.compiled:  # in turn
        dtype = [*gates][how in ("offset", "segments")]
        gates = {dtype: gates[dtype]}
    for dtype, seed in itertools.product(gates, (4,) if row.compiled else range(12)):
        compare(row, how, seed, impl="auto", dtype=dtype, tolerance=gates[dtype])


BLOCKS = [
    {"offset": -1, "block_size": 2, "blocks_before": 0, "n": 2, "m": 1},
    {"offset": -20, "block_size": 16, "blocks_before": 0, "n": 40, "m": 1},
    {"offset": -20, "block_size": 7, "blocks_before": 1, "n": 40, "m": 2},
    {"offset": 45, "block_size": 7, "blocks_before": 1, "n": 40, "m": 50},
    {"offset": 45, "block_size": 7, "causal": True, "n": 40, "m": 50},
]


@pytest.mark.parametrize("tables", [("rel_k", "rel_v", "rel_bias"), ("rel_v", "key_table")], ids=str)
@pytest.mark.parametrize("options", BLOCKS, ids=str)
@pytest.mark.parametrize("name", ["numpy", "torch, CPU"])
def test_results_do_not_depend_on_rows_that_no_block_sees(
    name: str, options: dict[str, Any], tables: tuple[str, ...]
) -> None:
    row, (options, n, m) = of_name(name), (dict(options), options["n"], options["m"])
    del options["n"], options["m"]
    rng, span = np.random.default_rng(0), Span.full(70)
    arrays = {key: rng.standard_normal((2, size, 4)) for key, size in (("q", n), ("k", m), ("v", m), ("d_out", n))}
    tall = {key: rng.standard_normal((span.rows, 4)[: 1 if key == "rel_bias" else 2]) for key in tables}
    pairs = [(i, j) for i, j in np.ndindex(n, m) if oracles.sees(i, j, **options)]
    rows = {j - i - options["offset"] + span.left for i, j in pairs}
    assert rows
    unseen = [at for at in range(span.rows) if at not in rows]
    found = []
    for number in (0.0, np.nan):
        for table in tall.values():
            table[unseen] = number
        given = {key: row.asarray(x) for key, x in {**arrays, **tall}.items()}
        d_out = given.pop("d_out")
        out = relative_attention(**given, span=span, **options)
        gradients = relative_attention_vjp(d_out, **given, span=span, **options)
        found.append([row.to_numpy(x) for x in (out, *gradients) if x is not None])
    for want, got in zip(*found, strict=True):
        np.testing.assert_allclose(got, want, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("impl", ["auto", "portable"])
def test_a_row_of_a_head_that_a_mask_hides_may_be_anything_at_positions(impl: Any) -> None:
    rng, places = np.random.default_rng(0), np.asarray([0, 3, 7])
    q, k, v = rng.standard_normal((3, 2, 3, 4))
    table, mask = rng.standard_normal((2, 15, 4)), np.ones((2, 3, 3), bool)
    mask[0, 2, 1] = False  # the only pair at r = -4
    found: list[Any] = []
    for number in (0.0, np.nan):
        table[0, 3] = number
        out = relative_attention(
            q, k, v, rel_v=table, span=Span.full(8), mask=mask, positions=(places, places), impl=impl
        )
        found.append(out)
    np.testing.assert_array_equal(found[1], found[0])
