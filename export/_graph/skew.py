"""Relative layout to absolute layout and back, as reshapes and slices."""

from __future__ import annotations

from relskew_core.export._graph.emitter import INT64_MAX, Emitter, Shape, Value
from relskew_core.export._graph.window import Lengths


def skew(g: Emitter, x: Value, lengths: Lengths, *, one_sided: bool, reach: str = "") -> Value:
    """Move ``x[i, c]`` to ``s[i, j]``: drop the first row's spare entries, re-row, keep the keys.

    ``x`` has ``keys + 1`` columns if one-sided, where entries of the future become arbitrary but finite, else
    ``queries + keys``. The new rows are named by their lengths and not left to the runtime, so that a window that
    came out too short fails here, in a node whose name says by ``reach`` how far the table goes.
    """
    batch, heads = x.shape[:2]
    n, m = lengths.queries, lengths.keys
    flat = g.compute("Reshape", [x, g.constant([0, 0, -1])], "skew/flatten", (batch, heads, "flat"))
    bounds = [g.dim(n), g.constant([INT64_MAX]), g.constant([2])]
    dropped = g.compute("Slice", [flat, *bounds], "skew/drop", (batch, heads, "flat_rest"))
    out: Shape = (batch, heads, lengths.query_symbol, lengths.key_symbol)
    rows_name = f"skew/rows{reach}"
    if one_sided:
        return g.compute("Reshape", [dropped, g.dims("skew/rows_shape", 0, 0, n, m)], rows_name, out)
    width = g.plus(n, g.minus(m, 1, "skew/keys_less_1"), "skew/width")
    rows_shape = g.dims("skew/rows_shape", 0, 0, n, width)
    rows = g.compute("Reshape", [dropped, rows_shape], rows_name, (batch, heads, lengths.query_symbol, "diagonals"))
    return g.compute("Slice", [rows, g.constant([0]), g.dim(m), g.constant([3])], "skew/keys", out)


def unskew(g: Emitter, weights: Value, lengths: Lengths, *, one_sided: bool, symbol: int | str) -> Value:
    """Move ``s[i, j]`` to ``x[i, c]`` with zeros where no key is: the adjoint of :func:`skew`."""
    batch, heads = weights.shape[:2]
    n, m, zero = lengths.queries, lengths.keys, g.constant([0], g.dtype)
    leading = g.index("Shape", [weights], "unskew/leading", (3,), start=0, end=3)
    if not one_sided:
        spare = g.minus(n, 1, "unskew/queries_less_1")
        shape = g.dims("unskew/row_end_shape", leading, spare)
        end = g.compute("Expand", [zero, shape], "unskew/row_end", (*weights.shape[:3], "queries_less_1"))
        rows_shape = (*weights.shape[:3], "diagonals")
        weights = g.compute("Concat", [weights, end], "unskew/rows", rows_shape, axis=3)
    flat = g.compute("Reshape", [weights, g.constant([0, 0, -1])], "unskew/flatten", (batch, heads, "flat_rest"))
    front = g.compute("Expand", [zero, leading], "unskew/front", (batch, heads, lengths.query_symbol))
    padded = g.compute("Concat", [front, flat], "unskew/pad", (batch, heads, "flat"), axis=2)
    width = g.plus(m, 1 if one_sided else n, "unskew/width")
    shape = g.dims("unskew/columns_shape", 0, 0, n, width)
    return g.compute("Reshape", [padded, shape], "unskew/columns", (batch, heads, lengths.query_symbol, symbol))
