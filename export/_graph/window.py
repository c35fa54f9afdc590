"""The table's window for one call: which stored columns the relative positions of the input read."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from relskew_core.export._graph.emitter import INT64_MAX, Dim, Emitter, Value
from relskew_core.export._plan import GraphPlan


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
    row_symbol: str = "batch"


@dataclass(frozen=True, slots=True)
class StoredTables:
    """The stored tables: ``rel_k (…, head_dim, position)``, or by rows ``(…, position, head_dim)``; ``rel_v`` so.

    ``rel_bias`` is ``(H, position)``, or ``(1, position)`` for all heads.
    """

    rel_k: Value | None
    rel_v: Value | None
    rel_bias: Value | None


class TableWindow:
    """Chooses positions of the stored tables, in the order that the skew expects, by Slice or by Gather.

    One-sided tables give ``keys + 1`` columns, ``r = -keys … 0``; others give ``queries + keys``,
    ``r = -(queries + past) … keys - past - 1``. The first column is the skew's spare one: it is never read. An input
    too long for a limited table gets too few columns, so the reshape of the skew, which names its lengths, fails.
    """

    def __init__(self, g: Emitter, plan: GraphPlan, tables: StoredTables, lengths: Lengths) -> None:
        self._g, self._plan, self._tables = g, plan, tables
        self._bounds: tuple[Value, Value] | None = None
        self._index: Value | None = None
        self.one_sided = plan.one_sided
        self.symbol: int | str = "window"
        if plan.local:
            self.symbol = plan.stored_columns
        elif plan.gathers:
            self._index = _one_sided_index(g, plan, lengths) if plan.one_sided else _index(g, plan, lengths)
        else:
            before = lengths.keys if plan.one_sided else g.plus(lengths.queries, lengths.past, "window/before")
            start = g.minus(plan.lead, before, "window/start")
            end: Dim = INT64_MAX
            if not plan.one_sided:
                after = g.minus(lengths.keys, lengths.past, "window/after")
                end = g.plus(after, plan.lead, "window/end")
            self._bounds = g.dim(start), g.dim(end)

    def product(self, queries: Value) -> Value | None:
        """Return heads of queries times the window of ``rel_k``, ``(batch, H, queries, window)``, if it is there."""
        table, g = self._tables.rel_k, self._g
        if table is None:
            return None
        if not self._plan.by_rows:
            columns = self._cut(table, len(table.shape) - 1, "rel_k")
        else:
            rows = self._cut(table, len(table.shape) - 2, "rel_k")
            rank = len(rows.shape)
            turned = (*rows.shape[:-2], rows.shape[-1], rows.shape[-2])
            perm = [*range(rank - 2), rank - 1, rank - 2]
            columns = g.compute("Transpose", [rows], "window/rel_k_columns", turned, perm=perm)
        return g.compute("MatMul", [queries, columns], "relative/logits", (*queries.shape[:3], self.symbol))

    def rows(self) -> Value:
        """Return the window of ``rel_v``, ``(…, window, head_dim)``."""
        table = self._tables.rel_v
        if table is None:
            raise ValueError("a block without `rel_values` has no table for them")
        return self._cut(table, len(table.shape) - 2, "rel_v")

    def bias(self) -> Value | None:
        """Return the window of ``rel_bias``, ``(heads or 1, 1, window)``; zeros where no table makes logits."""
        table, g = self._bias_table(), self._g
        if table is None:
            return None
        cut = self._cut(table, 1, "rel_bias")
        return g.compute("Unsqueeze", [cut, g.constant([1])], "window/rel_bias_row", (table.shape[0], 1, self.symbol))

    def _bias_table(self) -> Value | None:
        if self._tables.rel_bias is not None or self._tables.rel_k is not None:
            return self._tables.rel_bias
        return self._g.constant(np.zeros((1, self._plan.stored_columns)), self._g.dtype)

    def _cut(self, table: Value, axis: int, name: str) -> Value:
        """Return the window of a table whose positions are on ``axis``."""
        g, shape = self._g, list(table.shape)
        shape[axis] = self.symbol
        if self._bounds is not None:
            inputs = [table, *self._bounds, g.constant([axis])]
            return g.compute("Slice", inputs, f"window/{name}", tuple(shape))
        if self._index is not None:
            return g.compute("Gather", [table, self._index], f"window/{name}", tuple(shape), axis=axis)
        return table

    def hide(self, logits: Value) -> Value:
        """Add what hides columns of relative logits that no query may see, if there are any."""
        g = self._g
        if self._index is None:
            return logits
        stored = self._hiding()
        if stored is None:
            return logits
        bias = g.compute("Gather", [stored, self._index], "window/hidden", (self.symbol,), axis=0)
        return g.compute("Add", [logits, bias], "relative/hide", logits.shape)

    def _hiding(self) -> Value | None:
        """Return what must be added to the logits of every stored column, if to any."""
        plan = self._plan
        hidden = np.zeros(plan.columns)
        if plan.left.past_edge == "hidden":
            hidden[0] = plan.masked_value
        if plan.right.past_edge == "hidden" and not plan.one_sided:
            hidden[-1] = plan.masked_value
        return self._g.constant(hidden, self._g.dtype) if hidden.any() else None


def _one_sided_index(g: Emitter, plan: GraphPlan, lengths: Lengths) -> Value:
    """Columns of ``r = -keys … 0``."""
    if plan.left.past_edge == "limited" and not plan.guarded:
        start = g.minus(plan.lead, lengths.keys, "window/start")
        count = g.plus(lengths.keys, 1, "window/count")
        ramp = _ramp(g, 0, plan.lead + 1, count, "window/ramp", "window")
        return g.index("Add", [ramp, g.dim(start)], "window/index", ("window",))
    start = _scalar(g, "Sub", plan.lead, lengths.keys, "start")
    columns = _range(g, start, g.constant(plan.lead + 1), "window")
    return g.index("Max", [columns, g.constant(0)], "window/index", ("window",))


def _index(g: Emitter, plan: GraphPlan, lengths: Lengths) -> Value:
    """Columns of ``r = -(queries + past) … keys - past - 1``."""
    last = plan.columns - 1
    left_limited = plan.left.past_edge == "limited" and not plan.guarded
    right_limited = plan.right.past_edge == "limited" and not plan.guarded
    before = g.plus(lengths.queries, lengths.past, "window/before")
    after = g.minus(lengths.keys, lengths.past, "window/after")
    if not left_limited and not right_limited:
        start, end = _scalar(g, "Sub", plan.lead, before, "start"), _scalar(g, "Add", plan.lead, after, "end")
        columns = _range(g, start, end, "window")
        return g.index("Clip", [columns, g.constant(0), g.constant(last)], "window/index", ("window",))
    # As many columns before as there are queries, and keys from there on; the other way round behind a past.
    symbols = lengths.query_symbol, lengths.key_symbol
    symbol, key_symbol = symbols if lengths.past == 0 else symbols[::-1]
    if left_limited:
        ramp = _ramp(g, 0, plan.lead, before, "window/past_ramp", symbol)
        start = g.dim(g.minus(plan.lead, before, "window/start"))
        past = g.index("Add", [ramp, start], "window/past", (symbol,))
    else:
        start = _scalar(g, "Sub", plan.lead, before, "start")
        columns = _range(g, start, g.constant(plan.lead), symbol)
        past = g.index("Max", [columns, g.constant(0)], "window/past", (symbol,))
    symbol = key_symbol
    if right_limited:
        future = _ramp(g, plan.lead, plan.columns - plan.lead, after, "window/future", symbol)
    else:
        end = _scalar(g, "Add", plan.lead, after, "end")
        columns = _range(g, g.constant(plan.lead), end, symbol)
        future = g.index("Min", [columns, g.constant(last)], "window/future", (symbol,))
    return g.index("Concat", [past, future], "window/index", ("window",), axis=0)


def _scalar(g: Emitter, op_type: str, lead: int, length: Dim, name: str) -> Value:
    """Return ``lead`` plus or minus a length, as Range wants it."""
    inputs = [g.constant(lead), g.scalar(length, f"window/{name}_length")]
    return g.index(op_type, inputs, f"window/{name}", ())


def _range(g: Emitter, start: Value, end: Value, symbol: int | str) -> Value:
    return g.index("Range", [start, end, g.constant(1)], "window/range", (symbol,))


def _ramp(g: Emitter, first: int, size: int, count: Dim, name: str, symbol: int | str) -> Value:
    """Return ``first, first + 1, …``, ``count`` of them but never more than ``size``: a stored ramp cannot run on."""
    ramp = g.constant(np.arange(first, first + size))
    return g.index("Slice", [ramp, g.constant([0]), g.dim(count)], name, (symbol,))
