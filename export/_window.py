"""The table's window for one call: which stored columns the relative positions of the input read."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from relskew_core.export._emitter import INT64_MAX, Dim, Emitter, Value
from relskew_core.export._plan import Plan


@dataclass(frozen=True, slots=True)
class Lengths:
    """Lengths of one attention: ``queries``, ``keys`` (the past included) and ``past``, and the keys' symbol."""

    queries: Dim
    keys: Dim
    past: Dim
    query_symbol: int | str
    key_symbol: int | str


class Window:
    """Chooses columns of the stored tables, in the order that the skew expects, by Slice or by Gather.

    One-sided tables give ``keys + 1`` columns, ``r = -keys … 0``; others give ``queries + keys``,
    ``r = -queries … keys - 1``. The first column is the skew's spare one: it is never read. An input too long for a
    limited table gets too few columns, so the reshape of the skew, which names its lengths, fails.
    """

    def __init__(self, g: Emitter, plan: Plan, lengths: Lengths) -> None:
        self._g, self._plan = g, plan
        limited = plan.left.past_edge == "limited" and (plan.one_sided or plan.right.past_edge == "limited")
        self._bounds: tuple[Value, Value] | None = None
        self._index: Value | None = None
        if plan.local:
            self.symbol: int | str = 2 * (plan.spec.block_size or 0) + 1
        elif plan.profile.slice_window and limited:
            self.symbol = "window"
            before = lengths.keys if plan.one_sided else lengths.queries
            start = g.minus(plan.lead, before, "window/start")
            end: Dim = INT64_MAX if plan.one_sided else g.plus(lengths.keys, plan.lead, "window/end")
            self._bounds = g.dim(start), g.dim(end)
        else:
            self.symbol = "window"
            self._index = _one_sided_index(g, plan, lengths) if plan.one_sided else _index(g, plan, lengths)

    def of(self, table: Value, axis: int, name: str) -> Value:
        """Return the window of a stored table."""
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
        plan, g = self._plan, self._g
        if self._index is None:
            return logits
        hidden = np.zeros(plan.columns)
        if plan.left.past_edge == "hidden":
            hidden[0] = plan.masked_value
        if plan.right.past_edge == "hidden" and not plan.one_sided:
            hidden[-1] = plan.masked_value
        if not hidden.any():
            return logits
        stored = g.constant(hidden, g.dtype)
        bias = g.compute("Gather", [stored, self._index], "window/hidden", (self.symbol,), axis=0)
        return g.compute("Add", [logits, bias], "relative/hide", logits.shape)


def _one_sided_index(g: Emitter, plan: Plan, lengths: Lengths) -> Value:
    """Columns of ``r = -keys … 0``."""
    start = g.minus(plan.lead, lengths.keys, "window/start")
    if plan.left.past_edge == "limited":
        count = g.plus(lengths.keys, 1, "window/count")
        ramp = _ramp(g, 0, plan.lead + 1, count, "window/ramp", "window")
        return g.index("Add", [ramp, g.dim(start)], "window/index", ("window",))
    limits = [g.scalar(start, "window/start_scalar"), g.constant(plan.lead + 1), g.constant(1)]
    columns = g.index("Range", limits, "window/range", ("window",))
    return g.index("Max", [columns, g.constant(0)], "window/index", ("window",))


def _index(g: Emitter, plan: Plan, lengths: Lengths) -> Value:
    """Columns of ``r = -queries … keys - 1``."""
    n, m, one = lengths.queries, lengths.keys, g.constant(1)
    left_limited, right_limited = plan.left.past_edge == "limited", plan.right.past_edge == "limited"
    start, last = g.minus(plan.lead, n, "window/start"), plan.columns - 1
    if not left_limited and not right_limited:
        end = g.plus(m, plan.lead, "window/end")
        limits = [g.scalar(start, "window/start_scalar"), g.scalar(end, "window/end_scalar"), one]
        columns = g.index("Range", limits, "window/range", ("window",))
        return g.index("Clip", [columns, g.constant(0), g.constant(last)], "window/index", ("window",))
    if left_limited:
        ramp = _ramp(g, 0, plan.lead, n, "window/past_ramp", lengths.query_symbol)
        past = g.index("Add", [ramp, g.dim(start)], "window/past", (lengths.query_symbol,))
    else:
        limits = [g.scalar(start, "window/start_scalar"), g.constant(plan.lead), one]
        columns = g.index("Range", limits, "window/past_range", (lengths.query_symbol,))
        past = g.index("Max", [columns, g.constant(0)], "window/past", (lengths.query_symbol,))
    if right_limited:
        future = _ramp(g, plan.lead, plan.columns - plan.lead, m, "window/future", lengths.key_symbol)
    else:
        end = g.plus(m, plan.lead, "window/end")
        limits = [g.constant(plan.lead), g.scalar(end, "window/end_scalar"), one]
        columns = g.index("Range", limits, "window/future_range", (lengths.key_symbol,))
        future = g.index("Min", [columns, g.constant(last)], "window/future", (lengths.key_symbol,))
    return g.index("Concat", [past, future], "window/index", ("window",), axis=0)


def _ramp(g: Emitter, first: int, size: int, count: Dim, name: str, symbol: int | str) -> Value:
    """Return ``first, first + 1, …``, ``count`` of them but never more than ``size``: a stored ramp cannot run on."""
    ramp = g.constant(np.arange(first, first + size))
    return g.index("Slice", [ramp, g.constant([0]), g.dim(count)], name, (symbol,))
