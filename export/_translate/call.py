"""The operands of one call of torch's operator, as heads with one batch axis, and what is known about lengths."""

from __future__ import annotations

from collections.abc import Sequence
from copy import copy
from typing import Any, NamedTuple, cast

import numpy as np

from relskew_core._kernel.call import Operands
from relskew_core._positions.span import Beyond
from relskew_core.export._form.plan import GraphPlan
from relskew_core.export._nodes.emitter import BOOL, INT64, Dim, Shape, Value
from relskew_core.export._nodes.visible import Segments
from relskew_core.export._nodes.window import HeadRange, Lengths, StoredTables, TableWindow
from relskew_core.export._translate.emitter import TracedEmitter


class TracedCall:
    """Queries, keys and values ``(batch, heads, length, D)``, their lengths and the mask.

    ``aligned``: the keys are ``offset`` ones of the past and one for each query. ``square``: and nothing
    is past.
    """

    def __init__(self, g: TracedEmitter, operands: Operands, offset: Any) -> None:
        q, k = operands.q, operands.k
        self._g, self._leading = g, len(q.shape) - 3
        self._given = q
        self.aligned = _is_sum(k.shape[-2], q.shape[-2], _length_of(offset))
        self.square = self.aligned and offset == 0
        self.q, self.k, self.v = (self._heads(getattr(operands, name), name) for name in "qkv")
        self.rel_q = None if operands.rel_q is None else self._heads(operands.rel_q, "rel_q")
        self.out_shape: Shape = (*self.q.shape[:3], self.v.shape[3])
        self.lengths = self._lengths(offset)
        self.mask, self.additive = self._masks(operands.mask)

    def of(self, lengths: Lengths) -> TracedCall:
        """Return the call for other lengths."""
        other = copy(self)
        other.lengths, other.aligned, other.square = lengths, False, False
        return other

    def result(self, x: Value, name: str) -> Any:
        """Return an array of the heads, ``(batch, …)``, with the leading axes of the caller's queries."""
        g = self._g
        if self._leading == 1:
            return g.tensor(x)
        if self._leading == 0:
            return g.tensor(g.compute("Squeeze", [x, g.constant([0])], name, x.shape[1:], x.dtype))
        shape = (*shape_of(self._given, "given")[: self._leading], *x.shape[1:])
        given = g.adopt(self._given, f"{name}/given", shape_of(self._given, "given"))
        leading = g.index("Shape", [given], f"{name}/leading", (self._leading,), start=0, end=self._leading)
        rest = g.index("Shape", [x], f"{name}/rest", (len(x.shape) - 1,), start=1)
        whole = g.dims(f"{name}/shape", leading, rest)
        return g.tensor(g.compute("Reshape", [x, whole], name, shape, x.dtype, allowzero=1))

    def labels(self, operands: Operands, kind: str) -> Segments | None:
        of_queries, of_keys = (getattr(operands, f"{side}_{kind}") for side in "qk")
        if of_queries is None:
            return None
        return Segments(self._label(of_queries, f"q_{kind}"), self._label(of_keys, f"k_{kind}"))

    def consecutive(self) -> Segments:
        g, lengths = self._g, self.lengths
        ends = (lengths.queries, "queries", lengths.query_symbol), (lengths.keys, "keys", lengths.key_symbol)
        queries, keys = (
            g.range((0, ""), (length, f"positions/count_of_{name}"), f"positions/numbers_of_{name}", symbol)
            for length, name, symbol in ends
        )
        queries = g.index("Add", [queries, g.dim(lengths.past)], "positions/queries", queries.shape)
        rows, first = {"queries": queries, "keys": keys}, g.constant([0])
        return Segments(
            *(g.index("Unsqueeze", [x, first], f"positions/row_of_{name}", (1, *x.shape)) for name, x in rows.items())
        )

    def _label(self, x: Any, name: str) -> Value:
        g, shape = self._g, shape_of(x, name)
        whole = g.adopt(x, name, shape, INT64)
        if len(shape) == 1:
            return g.index("Unsqueeze", [whole, g.constant([0])], f"{name}/batch", (1, *shape))
        if len(shape) == 2:
            return whole
        merged = g.dims(f"{name}/merged", -1, g.length(whole, len(shape) - 1, f"{name}/length"))
        return g.index("Reshape", [whole, merged], f"{name}/batch", (f"{name}_batch", shape[-1]))

    def _heads(self, x: Any, name: str) -> Value:
        g, shape = self._g, shape_of(x, name)
        whole = g.adopt(x, name, shape)
        if self._leading == 1:
            return whole
        if self._leading == 0:
            return g.compute("Unsqueeze", [whole, g.constant([0])], f"{name}/batch", (1, *shape))
        rest = g.index("Shape", [whole], f"{name}/rest", (3,), start=self._leading)
        merged = g.dims(f"{name}/merged", -1, rest)
        return g.compute("Reshape", [whole, merged], f"{name}/batch", (f"{name}_batch", *shape[self._leading :]))

    def _lengths(self, offset: Any) -> Lengths:
        g = self._g
        queries = g.length(self.q, 2, "queries")
        keys = queries if self.square else g.length(self.k, 2, "keys")
        past: Dim
        if isinstance(offset, int):
            past = offset
        else:
            scalar = g.adopt(offset, "offset", (), INT64)
            past = g.index("Reshape", [scalar, g.constant([1])], "past")
        return Lengths(queries, keys, past, "queries", "queries" if self.square else "keys")

    def _masks(self, mask: Any) -> tuple[Value | None, Value | None]:
        if mask is None:
            return None, None
        g = self._g
        shape = shape_of(mask, "mask")
        if mask.dtype.numpy() == BOOL:
            return g.adopt(mask, "mask", shape, BOOL), None
        additive = g.adopt(mask, "mask", shape)
        lowest = g.constant(-np.inf, g.dtype)
        return g.compute("Greater", [additive, lowest], "mask/shows", shape, BOOL), additive


def with_one_leading_axis(g: TracedEmitter, operands: Operands) -> Operands:
    """Return the operands of a call with a mask by head whose leading axes, like those of the queries, are one."""
    q, mask = operands.q, operands.mask
    leading = len(q.shape) - 3
    if mask is None or leading < 2 or len(mask.shape) < 4:
        return operands
    given = shape_of(mask, "mask_given")
    whole = g.adopt(mask, "mask/given", given, BOOL if mask.dtype.numpy() == BOOL else g.dtype)
    queries = g.adopt(q, "mask/queries", shape_of(q, "mask_queries"))
    before = g.index("Shape", [queries], "mask/leading", (leading,), start=0, end=leading)
    size = g.dims("mask/expanded_shape", before, 1, 1, 1)
    shape = (*queries.shape[:leading], *given[-3:])
    expanded = g.compute("Expand", [whole, size], "mask/expanded", shape, whole.dtype)
    rest = g.index("Shape", [expanded], "mask/rest", (3,), start=leading)
    merged = g.dims("mask/merged_shape", -1, rest)
    one = g.compute("Reshape", [expanded, merged], "mask/merged", ("mask_0", *given[-3:]), whole.dtype)
    return operands._replace(mask=g.typed(one))


def adopted_table(g: TracedEmitter, table: Any, name: str) -> Value | None:
    return None if table is None else g.adopt(table, name, shape_of(table, name))


def repeated_rows(table: Any) -> tuple[Any, Any] | None:
    """Return what the rows of a table are gathered from and their places, if most are repeated, as those of buckets."""
    node = None if table is None else table.producer()
    if node is None or node.op_type != "Gather":
        return None
    (source, places), axis = node.inputs, len(table.shape) - 2
    if len(source.shape) != len(table.shape) or node.attributes.get_int("axis", 0) % len(table.shape) != axis:
        return None
    few, rows = source.shape[axis], table.shape[axis]
    return (source, places) if isinstance(few, int) and isinstance(rows, int) and 2 * few <= rows else None


def stored_table(g: TracedEmitter, plan: GraphPlan, stored: Value | None, name: str) -> Value | None:
    """Return a table for its window: trimmed to the visible rows, with columns for the positions past them."""
    if stored is None:
        return None
    shape = stored.shape
    axis = len(shape) - (1 if name == "rel_bias" else 2)
    rows = plan.spec.span.rows
    start, stop = plan.kept_rows

    def cut(x: Value, first: int, last: int, part: str) -> Value:
        return g.cut(x, axis, first, last, last - first, f"{name}/{part}")

    def with_rows(rows: int) -> Shape:
        return (*shape[:axis], rows, *shape[axis + 1 :])

    def zeros(rows: int) -> Value:
        return g.constant(np.zeros(with_rows(rows), dtype=np.float64), g.dtype)

    if (start, stop) != (0, rows):
        stored = cut(stored, start, stop, "kept")
    rows = stop - start
    before: list[Value] = []
    after: list[Value] = []
    ends = zip((before, after), plan.added_rows, plan.spare_rows, (0, rows - 1), ("first", "last"), strict=True)
    for pieces, added, spare, place, part in ends:
        edges = added if plan.spec.span.beyond == "clip" else 0
        if edges:
            edge = cut(stored, place, place + 1, part)
            size = g.constant(with_rows(edges))
            pieces.append(g.compute("Expand", [edge, size], f"{name}/{part}s", with_rows(edges)))
        if added + spare > edges:
            pieces.append(zeros(added + spare - edges))
    if before or after:
        pieces = [*before[::-1], stored, *after]
        stored = g.compute("Concat", pieces, f"{name}/stored", with_rows(plan.columns), axis=axis)
    return stored


def shape_of(x: Any, name: str) -> Shape:
    """Return the shape of a tensor of the graph, with a separate symbol for each unknown length."""
    return tuple(size if isinstance(size, int) else f"{name}_{axis}" for axis, size in enumerate(x.shape))


def _length_of(offset: Any) -> Any:
    """Return an offset as the length of the axis that it was read from, ``None`` if it has another source."""
    value = offset
    while not isinstance(value, int):
        node = value.producer()
        if node is None:
            return None
        if node.op_type == "Shape":
            start, end = node.attributes.get_int("start", 0), node.attributes.get_int("end")
            return node.inputs[0].shape[start] if end == start + 1 else None
        if node.op_type not in ("Squeeze", "Reshape", "Identity", "Cast"):
            return None
        value = node.inputs[0]
    return value


def _is_sum(total: Any, *parts: Any) -> bool:
    if any(part is None for part in parts):
        return False
    lengths = [length for length in (total, *parts) if not isinstance(length, int)]
    if any(length.value is None for length in lengths):
        return False
    rest = total
    for part in parts:
        rest = rest - part
    return rest == 0 if isinstance(rest, int) else rest.value == "0"


class Reach(NamedTuple):
    left: Dim
    right: Dim
    beyond: Beyond
    sees: tuple[int | None, int | None]

    def turned(self) -> Reach:
        return Reach(self.right, self.left, self.beyond, self.sees[::-1])


Ends = tuple[Any, Any]  # the reach of tables to both sides: ints, or numbers that exist only in the graph


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
