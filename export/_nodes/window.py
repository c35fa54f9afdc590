"""The table's window for one call: the stored columns that the relative positions of the input read."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from relskew_core.export._form.plan import GraphPlan
from relskew_core.export._nodes.emitter import BFLOAT16, BOOL, INT64_MAX, Dim, Emitter, Shape, Value


@dataclass(frozen=True, slots=True)
class Lengths:
    """Lengths of one attention: ``queries``, ``keys`` (the past included) and ``past``, and the symbols of two.

    With a cache of fixed length ``keys`` is its length, and ``past`` has one length for each row of the batch.
    """

    queries: Dim
    keys: Dim
    past: Dim
    query_symbol: int | str
    key_symbol: int | str


class HeadRange(NamedTuple):
    """Some consecutive heads: ``first … stop - 1``, ``size`` of them."""

    first: Value
    stop: Value
    size: int


class StoredTables(NamedTuple):
    """The stored tables: ``rel_k`` and ``rel_v (…, position, head_dim)``, ``rel_bias (H or 1, position)``."""

    rel_k: Value | None
    rel_v: Value | None
    rel_bias: Value | None


class TableWindow:
    """Selects positions of the stored tables, in the order that the skew expects, by Slice or by Gather.

    One-sided tables give ``keys + 1`` columns, ``r = -keys … 0``; others give ``queries + keys``,
    ``r = -(queries + past) … keys - past - 1``. The first column is the skew's spare one: it is never read. An input
    too long for a limited table gets too few columns, so the reshape of the skew, which names its lengths, fails.

    ``heads``: those to take of tables that have one for each, where the window is a Slice.

    Past the other ends nothing is multiplied: what comes of the last column that is stored is repeated. Of a formula
    without an end no column is stored, and all are computed.
    """

    def __init__(
        self, g: Emitter, plan: GraphPlan, tables: StoredTables, lengths: Lengths, heads: HeadRange | None = None
    ) -> None:
        self._g, self._plan, self._tables, self._heads = g, plan, tables, heads
        self._bounds: tuple[Value, Value] | None = None
        self._index: Value | None = None
        self._r: Value | None = None
        self._repeats: tuple[Dim, Dim] = (0, 0)
        self.one_sided = plan.one_sided
        self.symbol = self._stored_symbol = "window"
        self._choose(lengths, heads)

    def logits(self, queries: Value, count: Dim, *, hide: bool) -> Value:
        """Return the contribution of relative positions, by column, ``(batch, H, queries, window)``.

        A bias alone is the same for every batch, ``(1, H or 1, queries, window)``, and ``count`` is how many queries
        there are. ``hide``: positions that no query may see are hidden here.
        """
        g, table, row = self._g, self._tables.rel_k, self._bias()
        if table is None:
            assert row is not None
            row = self._extended(self._hidden(row) if hide else row, 2, "window/bias")
            whole = g.dims("relative/bias_shape", 1, 1, count, 1)
            wide: Shape = (1, row.shape[0], queries.shape[2], self.symbol)
            return g.compute("Expand", [row, whole], "relative/logits", wide)
        rows = self._cut(table, len(table.shape) - 2, "rel_k")
        columns = g.transpose(rows, "window/rel_k_columns")
        shape = (*queries.shape[:3], self._stored_symbol)
        logits = g.compute("MatMul", [queries, columns], "relative/logits", shape)
        if row is not None:
            logits = g.compute("Add", [logits, row], "relative/biased", shape)
        return self._extended(self._hidden(logits) if hide else logits, 3, "relative")

    def rows(self) -> Value:
        table = self._tables.rel_v
        if table is None:
            raise ValueError("a block without `rel_values` has no table for them")
        axis = len(table.shape) - 2
        return self._extended(self._cut(table, axis, "rel_v"), axis, "window/values")

    def _choose(self, lengths: Lengths, heads: HeadRange | None) -> None:
        g, plan = self._g, self._plan
        before: Dim = lengths.keys
        after: Dim = 1
        if not plan.one_sided:
            before = g.plus(lengths.queries, lengths.past, "window/before")
            after = g.minus(lengths.keys, lengths.past, "window/after")
        if plan.endless:
            first = g.minus(0, before, "window/first")
            self._r = g.range((first, "window/start"), (after, "window/end"), "window/positions", self.symbol)
            return
        soft = plan.left.past_edge != "limited", plan.right.past_edge != "limited" and not plan.one_sided
        start, end = first, last = g.minus(plan.lead, before, "window/first"), g.plus(after, plan.lead, "window/last")
        repeats: list[Dim] = [0, 0]
        if soft[0]:
            start = g.index("Max", [g.dim(first), g.constant([0])], "window/start")
            repeats[0] = g.minus(start, first, "window/repeats_before")
        if soft[1]:
            end = g.index("Min", [g.dim(last), g.constant([plan.columns])], "window/end")
            repeats[1] = g.minus(last, end, "window/repeats_after")
        if soft[0] and plan.guarded and not plan.one_sided:
            # Behind a long past, all of a window may be before the first column, which is then repeated alone.
            others = g.minus(g.plus(before, after, "window/count"), 1, "window/others")
            repeats[0] = g.index("Min", [g.dim(repeats[0]), g.dim(others)], "window/repeats_of_first")
            end = g.index("Max", [g.dim(end), g.constant([1])], "window/end_behind_first")
            if soft[1]:
                repeats[1] = g.index("Max", [g.dim(repeats[1]), g.constant([0])], "window/repeats_of_last")
        if any(soft):
            self._repeats, self._stored_symbol = (repeats[0], repeats[1]), "stored_window"
        if plan.profile.slice_window:
            self._bounds = g.dim(start), g.dim(INT64_MAX if plan.one_sided else end)
            if heads is not None:
                first, stop, _ = heads
                self._bounds_with_heads = (
                    g.dims("window/starts", first, self._bounds[0]),
                    g.dims("window/ends", stop, self._bounds[1]),
                )
        elif plan.guarded or (soft[0] and (soft[1] or plan.one_sided)):
            self._index = _range(g, start, end, "window", self._stored_symbol)
        elif plan.one_sided:
            count = g.plus(before, 1, "window/columns")
            ramp = _ramp(g, 0, plan.lead + 1, count, "window/ramp", "window")
            self._index = g.index("Add", [ramp, g.dim(start)], "window/index", ("window",))
        else:
            # As many columns before the window as there are queries, and keys after it; with a past it is the reverse.
            symbols = (lengths.query_symbol, lengths.key_symbol)[:: 1 if lengths.past == 0 else -1]
            self._index = self._joined(soft, (start, end), (before, after), symbols)

    def _joined(
        self, soft: tuple[bool, bool], ends: tuple[Dim, Dim], counts: tuple[Dim, Dim], symbols: tuple[int | str, ...]
    ) -> Value:
        """Return the columns of the past, followed by those from ``r = 0`` on; at a limited end only existing ones."""
        g, plan = self._g, self._plan
        if soft[0]:
            past = _range(g, ends[0], plan.lead, "past", "stored_past")
        else:
            ramp = _ramp(g, 0, plan.lead, counts[0], "window/past_ramp", symbols[0])
            past = g.index("Add", [ramp, g.dim(ends[0])], "window/past", (symbols[0],))
        if soft[1]:
            future = _range(g, plan.lead, ends[1], "future", "stored_future")
        else:
            future = _ramp(g, plan.lead, plan.columns - plan.lead, counts[1], "window/future", symbols[1])
        return g.index("Concat", [past, future], "window/index", (self._stored_symbol,), axis=0)

    def _bias(self) -> Value | None:
        """Return the stored part of the bias's window, ``(heads or 1, 1, …)``; zeros if no table adds logits."""
        g, table = self._g, self._tables.rel_bias
        if self._plan.endless:
            return self._by_distance()
        if table is None:
            if self._tables.rel_k is not None:
                return None
            table = g.constant(np.zeros((1, self._plan.columns), dtype=np.float64), g.dtype)
        cut = self._cut(table, 1, "rel_bias")
        shape = (cut.shape[0], 1, self._stored_symbol)
        return g.compute("Unsqueeze", [cut, g.constant([1])], "window/rel_bias_row", shape)

    def _by_distance(self) -> Value:
        """Return a bias of one slope per head times the distance, ``(heads or 1, 1, window)``."""
        g, slopes = self._g, self._tables.rel_bias
        assert self._r is not None
        if slopes is None:
            slopes = g.constant([[0.0]], g.dtype)
        elif self._heads is not None:
            slopes = g.cut(slopes, 0, self._heads.first, self._heads.stop, self._heads.size, "window/slopes")
        distances = g.index("Abs", [self._r], "window/distances", (self.symbol,))
        numbers = g.cast(distances, slopes.dtype, "window/distance")
        shape = (slopes.shape[0], self.symbol)
        bias = g.compute("Mul", [slopes, numbers], "window/rel_bias", shape, slopes.dtype)
        if slopes.dtype != g.dtype:
            bias = g.cast(bias, g.dtype, "window/rel_bias_rounded")
        return g.compute("Unsqueeze", [bias, g.constant([1])], "window/rel_bias_row", (shape[0], 1, self.symbol))

    def _cut(self, table: Value, axis: int, name: str) -> Value:
        g, shape = self._g, list(table.shape)
        shape[axis] = self._stored_symbol
        if self._index is not None:
            return g.compute("Gather", [table, self._index], f"window/{name}", tuple(shape), axis=axis)
        assert self._bounds is not None
        bounds, axes = self._bounds, [axis]
        if self._heads is not None and axis == 1 and table.shape[0] != 1:  # tables shared by all heads are not split
            shape[0] = self._heads.size
            bounds, axes = self._bounds_with_heads, [0, 1]
        return g.compute("Slice", [table, *bounds, g.constant(axes)], f"window/{name}", tuple(shape))

    def _extended(self, x: Value, axis: int, name: str) -> Value:
        """Repeat the first and the last entry of ``axis`` for positions past the table's soft ends."""
        g, pieces, (before, after) = self._g, [x], self._repeats
        whole = (*x.shape[:axis], self.symbol, *x.shape[axis + 1 :])
        if (before, after) != (0, 0) and self._plan.profile.slice_window and g.dtype != BFLOAT16:
            zeros = [0] * (len(x.shape) - 1)
            pads = g.dims(f"{name}/pads", *zeros[:axis], before, *zeros, after, *zeros[axis:])
            return g.compute("Pad", [x, pads], f"{name}/extended", whole, mode="edge")
        for end, place, count, bounds in (("first", 0, before, (0, 1)), ("last", 2, after, (-1, INT64_MAX))):
            if count == 0:
                continue
            shape = list(x.shape)
            shape[axis] = 1
            inputs = [x, *(g.constant([number]) for number in (*bounds, axis))]
            edge = g.compute("Slice", inputs, f"{name}/{end}", tuple(shape))
            shape[axis] = f"repeats_of_{end}"
            ones = len(shape)
            sizes = g.dims(f"{name}/{end}_shape", *(count if index == axis else 1 for index in range(ones)))
            repeated = g.compute("Expand", [edge, sizes], f"{name}/{end}_repeated", tuple(shape))
            pieces.insert(place, repeated)
        if len(pieces) == 1:
            return x
        return g.compute("Concat", pieces, f"{name}/extended", whole, axis=axis)

    def _hidden(self, logits: Value) -> Value:
        g, plan = self._g, self._plan
        if self._r is not None and plan.endless:
            sides = (("Less", -1, plan.left), ("Greater", 1, plan.right))
            for op, sign, side in sides[: 1 if plan.one_sided else 2]:
                if side.past_edge == "hidden":
                    name = f"window/hidden_{op}"
                    past = g.index(op, [self._r, g.constant([sign * side.rows])], name, (self.symbol,), BOOL)
                    logits = g.compute(
                        "Where", [past, g.constant(plan.masked_value, g.dtype), logits], f"{name}_logits", logits.shape
                    )
            return logits
        added = np.zeros(plan.columns, dtype=np.float64)
        if plan.left.past_edge == "hidden":
            added[0] = plan.masked_value
        if plan.right.past_edge == "hidden" and not plan.one_sided:
            added[-1] = plan.masked_value
        if not added.any():
            return logits
        cut = self._cut(g.constant(added, g.dtype), 0, "hidden")
        return g.compute("Add", [logits, cut], "relative/hide", logits.shape)


def _range(g: Emitter, start: Dim, end: Dim, name: str, symbol: int | str) -> Value:
    ends = (start, f"window/{name}_start"), (end, f"window/{name}_end")
    return g.range(*ends, f"window/{name}_range", symbol)


def _ramp(g: Emitter, first: int, size: int, count: Dim, name: str, symbol: int | str) -> Value:
    """Return ``first, first + 1, …``, ``count`` numbers but at most ``size``, because a stored ramp has an end."""
    ramp = g.constant(np.arange(first, first + size, dtype=np.int64))
    return g.index("Slice", [ramp, g.constant([0]), g.dim(count)], name, (symbol,))


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
