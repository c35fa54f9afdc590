"""Relative layout to absolute layout and back, as reshapes and slices."""

from __future__ import annotations

from relskew_core.export._graph.emitter import INT64_MAX, Dim, Emitter, Shape, Value
from relskew_core.export._graph.window import Lengths


def skew(
    g: Emitter, x: Value, lengths: Lengths, *, one_sided: bool, reach: str = "", columns: Dim | None = None
) -> Value:
    """Move ``x[i, c]`` to ``s[i, j]``: drop the first row's spare entries, re-row, keep the keys.

    ``x`` has ``keys + 1`` columns if one-sided, where entries of the future become arbitrary but finite, else
    ``queries + keys``; ``columns`` is their number where it is made already. In rows as long as there are queries the
    spare entries are the first row. These rows are named by their lengths and not left to the runtime, so that a window
    that came out too short fails here, in a node whose name says by ``reach`` how far the table goes, and that an empty
    batch does not: next to its 0 no -1 can be inferred.
    """
    batch, heads = x.shape[:2]
    n, m, n_symbol = lengths.queries, lengths.keys, lengths.query_symbol
    if columns is None:
        columns = g.plus(m, 1 if one_sided else n, "skew/columns")
    by_queries = g.dims("skew/rows_shape", 0, 0, columns, n)
    rows = g.compute("Reshape", [x, by_queries], f"skew/rows{reach}", (batch, heads, x.shape[3], n_symbol))
    out: Shape = (batch, heads, n_symbol, lengths.key_symbol)
    if one_sided and n == m:  # the rows of a square already have the new length
        return g.cut(rows, 2, 1, INT64_MAX, n_symbol, "skew/drop")
    dropped = g.cut(rows, 2, 1, INT64_MAX, "later_rows", "skew/drop")
    if one_sided:
        return g.compute("Reshape", [dropped, g.dims("skew/keys_shape", 0, 0, n, m)], "skew/keys", out)
    by_diagonals = g.dims("skew/diagonals_shape", 0, 0, n, g.minus(columns, 1, "skew/diagonals_count"))
    whole = g.compute("Reshape", [dropped, by_diagonals], "skew/diagonals", (batch, heads, n_symbol, "diagonals"))
    return g.cut(whole, 3, 0, m, lengths.key_symbol, "skew/keys")


def unskew(g: Emitter, weights: Value, lengths: Lengths, *, one_sided: bool, symbol: int | str) -> Value:
    """Move ``s[i, j]`` to ``x[i, c]``, with zeros where there is no key: the adjoint of :func:`skew`."""
    batch, heads, n_symbol, m_symbol = weights.shape
    n, m, zero = lengths.queries, lengths.keys, g.constant([0], g.dtype)
    columns = g.plus(m, 1 if one_sided else n, "unskew/columns_count")
    leading = g.index("Shape", [weights], "unskew/leading", (3,), start=0, end=3)
    later, later_symbol = m, m_symbol
    if not one_sided:
        spare = g.minus(n, 1, "unskew/queries_less_1")
        shape = g.dims("unskew/row_end_shape", leading, spare)
        end = g.compute("Expand", [zero, shape], "unskew/row_end", (*weights.shape[:3], "queries_less_1"))
        later, later_symbol = g.minus(columns, 1, "unskew/later_rows_count"), "diagonals"
        weights = g.compute("Concat", [weights, end], "unskew/rows", (batch, heads, n_symbol, later_symbol), axis=3)
    if n != later:
        by_queries = g.dims("unskew/later_rows_shape", 0, 0, later, n)
        shape_of_rows: Shape = (batch, heads, later_symbol, n_symbol)
        weights = g.compute("Reshape", [weights, by_queries], "unskew/later_rows", shape_of_rows)
    entries = g.compute("Expand", [zero, leading], "unskew/spare_entries", (batch, heads, n_symbol))
    first = g.compute("Unsqueeze", [entries, g.constant([2])], "unskew/first_row", (batch, heads, 1, n_symbol))
    padded = g.compute("Concat", [first, weights], "unskew/pad", (batch, heads, symbol, n_symbol), axis=2)
    shape = g.dims("unskew/columns_shape", 0, 0, n, columns)
    return g.compute("Reshape", [padded, shape], "unskew/columns", (batch, heads, n_symbol, symbol))
