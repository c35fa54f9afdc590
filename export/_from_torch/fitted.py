"""Tables with as many rows as the input requires: computed in the model, or cut from a longer one."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, cast

import numpy as np

from relskew_core._positions.span import Beyond
from relskew_core.export._from_torch.emitter import TracedEmitter
from relskew_core.export._graph.emitter import BOOL, INT64, Dim, Value
from relskew_core.export._graph.window import HeadRange, Lengths, StoredTables, TableWindow
from relskew_core.export._plan import GraphPlan


@dataclass(frozen=True, slots=True)
class Reach:
    """The reach of tables if it depends on lengths, the form of their ends, and the reach of queries."""

    left: Dim
    right: Dim
    beyond: Beyond
    sees: tuple[int | None, int | None]

    def turned(self) -> Reach:
        """Return the same seen from the keys."""
        return Reach(self.right, self.left, self.beyond, self.sees[::-1])


Ends = tuple[Any, Any]
"""The reach of tables to both sides: ints, or numbers that exist only in the graph."""


def ends_of(args: Sequence[Any]) -> tuple[Ends | None, list[Any]]:
    """Return the reach of a call's tables, ``None`` if it is known; and the arguments with numbers."""
    from relskew_core.backends._torch.operator import COUNT, NAMES

    given = list(args)
    left, right = (COUNT + NAMES.index(f"span_{side}") for side in ("left", "right"))
    ends = given[left], given[right]
    if all(isinstance(end, int) for end in ends):
        return None, given
    given[left] = given[right] = 0
    return ends, given


def dims_of(g: TracedEmitter, ends: Ends) -> tuple[Dim, Dim]:
    """Return the reach as dimensions of the graph."""

    def dim(end: Any, name: str) -> Dim:
        if isinstance(end, int):
            return end
        return g.index("Reshape", [g.adopt(end, f"span/{name}", (), INT64), g.constant([1])], f"span/{name}_end")

    return dim(ends[0], "left"), dim(ends[1], "right")


class FittedWindow(TableWindow):
    """Takes ``r = -(queries + past) … keys - past - 1`` from tables of any number of rows.

    A table may be too short, which torch knew and ONNX does not: the logits that miss a row are NaN.
    """

    def __init__(self, g: TracedEmitter, plan: GraphPlan, tables: StoredTables, lengths: Lengths, reach: Reach) -> None:
        self._reach = reach
        super().__init__(g, plan, tables, lengths)

    def _choose(self, lengths: Lengths, heads: HeadRange | None) -> None:
        g, reach = self._g, self._reach
        before = g.plus(lengths.queries, lengths.past, "window/before")
        after = g.minus(lengths.keys, lengths.past, "window/after")
        first = g.minus(0, before, "window/first")
        self._r = g.range((first, "window/start"), (after, "window/end"), "window/positions", self.symbol)
        row = g.index("Add", [self._r, g.dim(reach.left)], "window/row", (self.symbol,))
        last = g.plus(reach.left, reach.right, "window/last_row")
        bounds = [g.constant(0), g.scalar(last, "window/last")]
        self._index = g.index("Clip", [row, *bounds], "window/index", (self.symbol,))
        self._misses: Value | None = None
        if reach.beyond == "clip":
            return
        inside = g.index("Equal", [row, self._index], "window/inside", (self.symbol,), BOOL)
        misses = g.index("Not", [inside], "window/outside", (self.symbol,), BOOL)
        if reach.beyond == "error":
            # The skew never reads the first column.
            conditions = [("Greater", first)]
            conditions += [
                (op, sign * far)
                for op, sign, far in zip(("GreaterOrEqual", "LessOrEqual"), (-1, 1), reach.sees, strict=True)
                if far is not None
            ]
            for op, bound in conditions:
                seen = g.index(op, [self._r, g.dim(bound)], f"window/seen_{op}", (self.symbol,), BOOL)
                misses = g.index("And", [misses, seen], f"window/missed_{op}", (self.symbol,), BOOL)
        self._misses = misses

    def _bias(self) -> Value | None:
        if self._tables.rel_bias is not None or self._tables.rel_k is not None:
            return super()._bias()
        # No table adds logits here, but the table of values may still be too short.
        shape = (1, 1, self.symbol)
        sizes = self._g.dims("window/no_bias_shape", 1, 1, self._g.length(cast("Value", self._r), 0, "window/columns"))
        nothing = self._g.compute("Expand", [self._g.constant(0.0, self._g.dtype), sizes], "window/no_bias", shape)
        return self._marked(nothing, 2, "no_bias")

    def _cut(self, table: Value, axis: int, name: str) -> Value:
        cut = super()._cut(table, axis, name)
        return cut if self._reach.beyond == "error" and name == "rel_v" else self._marked(cut, axis, name)

    def _marked(self, x: Value, axis: int, name: str) -> Value:
        """Put zeros, or NaN for an error, where there is no row."""
        g, misses = self._g, self._misses
        if misses is None:
            return x
        instead = g.constant(0.0 if self._reach.beyond == "zero" else np.nan, g.dtype)
        if axis < len(x.shape) - 1:
            misses = g.index("Unsqueeze", [misses, g.constant([1])], f"window/{name}_missed", (self.symbol, 1), BOOL)
        return g.compute("Where", [misses, instead, x], f"window/{name}_marked", x.shape)
