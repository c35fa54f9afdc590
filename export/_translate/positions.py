"""The contributions of relative positions to a call: by the skew, or by look-up for arbitrary positions."""

from __future__ import annotations

from dataclasses import replace
from functools import cached_property
from typing import Any

import numpy as np

from relskew_core._kernel.call import Operands, Options, has_tables
from relskew_core._positions.span import Span
from relskew_core.export._form.plan import GraphPlan, make_plan
from relskew_core.export._nodes import parts
from relskew_core.export._nodes.attend import guarded
from relskew_core.export._nodes.emitter import BOOL, INT32, INT64, Shape, Value, element_type
from relskew_core.export._nodes.visible import broadcast, by_pair, of_own_segment, visible
from relskew_core.export._nodes.window import Lengths, StoredTables, TableWindow
from relskew_core.export._translate.call import (
    FittedWindow,
    Reach,
    TracedCall,
    adopted_table,
    repeated_rows,
    stored_table,
)
from relskew_core.export._translate.emitter import TracedEmitter

INT64_MIN = -(2**63)


class Skewed:
    """A call with consecutive queries and keys."""

    def __init__(
        self, g: TracedEmitter, plan: GraphPlan, call: TracedCall, operands: Operands, options: Options,
        reach: Reach | None = None,
    ) -> None:  # fmt: skip
        lengths = call.lengths
        # There may be fewer keys than the offset, and no window of the keys' table detects that.
        if operands.key_table is not None or (not call.aligned and lengths.past != 0):
            plan = replace(plan, guarded=True)
            lengths = guarded(g, plan, lengths)
        self._g, self._plan, self._call, self._lengths = g, plan, call, lengths
        self._operands, self._options, self._reach = operands, options, reach

    @cached_property
    def _window(self) -> TableWindow:
        tables = tables_of(self._g, self._operands, self._plan if self._reach is None else None)
        return window_of(self._g, self._plan, tables, self._lengths, self._reach)

    def logits(self) -> Value:
        g, call, plan, lengths = self._g, self._call, self._plan, self._lengths
        ends = plan.left.past_edge, "zero" if plan.one_sided else plan.right.past_edge
        if not has_tables(self._operands) and (plan.dead_rows or ends == ("zero", "zero")):  # the window hides nothing
            sizes = g.dims("relative/none_shape", 1, 1, lengths.queries, lengths.keys)
            pairs = (1, 1, lengths.query_symbol, lengths.key_symbol)
            return g.compute("Expand", [g.constant(0.0, g.dtype), sizes], "relative/none", pairs)
        queries = call.q if call.rel_q is None else call.rel_q
        if self._operands.rel_k is not None:
            queries = parts.scaled(g, queries, self._options.rel_scale, "relative/scaled")
        logits = parts.relative_logits(g, plan, queries, self._window, lengths)
        if self._operands.key_table is None:
            return logits
        shape = (*call.q.shape[:3], logits.shape[3])
        return g.compute("Add", [logits, self._of_keys(shape)], "relative/of_both", shape)

    def condition(self) -> Value | None:
        segments = self._call.labels(self._operands, "segments")
        return visible(self._g, self._plan, self._lengths, self._call.mask, segments)

    def values(self, weights: Value) -> Value:
        return parts.relative_values(self._g, self._window, self._lengths, weights)

    def _of_keys(self, shape: Shape) -> Value:
        """Return the products of keys and ``key_table``: seen from a key, past and future are exchanged."""
        g, plan, lengths, span, reach = self._g, self._plan, self._lengths, self._plan.spec.span, self._reach
        ahead, back = (side.rows if side.past_edge == "hidden" else None for side in (plan.right, plan.left))
        spec = replace(
            plan.spec, span=Span(span.right, span.left, span.beyond), causal=False, window=(ahead, back),
            block_size=None, blocks_before=None,
        )  # fmt: skip
        seen = replace(make_plan(spec, g.dtype, profile="portable", mask=True), guarded=True)
        past = -lengths.past if isinstance(lengths.past, int) else g.index("Neg", [lengths.past], "keys/past")
        turned = Lengths(lengths.keys, lengths.queries, past, lengths.key_symbol, lengths.query_symbol)
        table = adopted_table(g, self._operands.key_table, "key_table")
        assert table is not None
        bounds = [g.constant([number]) for number in (-1, INT64_MIN, len(table.shape) - 2, -1)]
        flipped = g.compute("Slice", [table, *bounds], "key_table/flipped", table.shape)
        with g.within("keys"):
            stored = stored_table(g, seen, flipped, "rel_k") if reach is None else flipped
            window = window_of(g, seen, StoredTables(stored, None, None), turned, reach and reach.turned())
            keys = keys_by_query_head(g, plan, self._call, self._options.rel_scale)
            logits = parts.relative_logits(g, seen, keys, window, turned)
            return g.compute("Transpose", [logits], "turned", shape, perm=[0, 1, 3, 2])


class LookedUp:
    """A call with positions in any order: the ``r`` of a pair selects a column of the product."""

    def __init__(
        self, g: TracedEmitter, plan: GraphPlan, call: TracedCall, operands: Operands, options: Options
    ) -> None:
        self._g, self._plan, self._call, self._operands, self._options = g, plan, call, operands, options
        span = options.span
        self._low, high = (max(-span.left, min(position, span.right)) for position in options.positions())
        self._width = high - self._low + 1
        self._queries, self._keys = by_pair(g, call.labels(operands, "positions") or call.consecutive(), "positions")
        self._pairs: Shape = (*call.q.shape[:3], call.k.shape[2])
        self._loose: Shape = (*broadcast(self._queries.shape, self._keys.shape)[:2], *self._pairs[2:])
        self._r = g.index("Sub", [self._keys, self._queries], "positions/relative", self._loose)

    def logits(self) -> Value:
        g, operands, zero = self._g, self._operands, self._g.constant(0.0, self._g.dtype)
        terms = [] if operands.rel_k is None and operands.rel_bias is None else [self._of_queries()]
        if operands.key_table is not None:
            terms.append(self._of_keys())
        if not terms:
            return g.compute("Expand", [zero, self._sizes], "relative/none", self._pairs)
        whole = terms[0]
        if len(terms) > 1:
            whole = g.compute("Add", terms, "relative/of_both", self._pairs)
        if self._options.span.beyond == "zero":
            return g.compute("Where", [self._there, whole, zero], "relative/within", self._pairs)
        return self._poisoned(whole)

    def condition(self) -> Value | None:
        return self._condition

    def values(self, weights: Value) -> Value:
        g, shape = self._g, (*self._pairs[:3], self._width)
        if self._options.span.beyond == "zero":
            zero = g.constant(0.0, g.dtype)
            weights = g.compute("Where", [self._there, weights, zero], "relative/weights_within", self._pairs)
        sizes = g.index("Shape", [self._call.q], "relative/columns_sizes", (3,), start=0, end=3)
        wide = g.dtype
        if g.dtype.itemsize == 2:  # onnxruntime has no sums of half precision here
            wide = parts.FLOAT32
            weights = g.cast(weights, wide, "relative/to_float32")
        empty = g.compute(
            "Expand", [g.constant([0], wide), g.dims("relative/columns_shape", sizes, self._width)],
            "relative/no_columns", shape, wide,
        )  # fmt: skip
        moved = g.compute(
            "ScatterElements",
            [empty, self._wide(self._column), weights],
            "relative/columns",
            shape,
            wide,
            axis=3,
            reduction="add",
        )
        if wide != g.dtype:
            moved = g.cast(moved, g.dtype, "relative/columns_as_given")
        return g.compute("MatMul", [moved, self._table("rel_v")], "relative/values", self._call.out_shape)

    def _of_queries(self) -> Value:
        g, call, operands = self._g, self._call, self._operands
        shape, product, bias, column = (*self._pairs[:3], self._width), None, None, None
        if operands.rel_k is not None:
            queries = parts.scaled(
                g, call.q if call.rel_q is None else call.rel_q, self._options.rel_scale, "relative/scaled"
            )
            product, column = self._product(queries, "rel_k", "relative/product")
        if operands.rel_bias is not None:
            cut = self._table("rel_bias")
            bias = g.compute("Unsqueeze", [cut, g.constant([1])], "rel_bias/row", (cut.shape[0], 1, self._width))
        if product is None:
            assert bias is not None
            sizes = g.index("Shape", [call.q], "relative/bias_sizes", (3,), start=0, end=3)
            whole = g.dims("relative/bias_shape", sizes, 1)
            product = g.compute("Expand", [bias, whole], "relative/bias", shape)
        elif bias is not None:
            product = g.compute("Add", [product, bias], "relative/biased", shape)
        return g.compute(
            "GatherElements", [product, self._wide(column or self._column)], "relative/looked_up", self._pairs, axis=3
        )

    def _of_keys(self) -> Value:
        g, (batch, heads, n, m) = self._g, self._pairs
        keys = keys_by_query_head(g, self._plan, self._call, self._options.rel_scale)
        product, column = self._product(keys, "key_table", "keys/product")
        columns = self._wide(column or self._column, of_keys=True)
        found = g.compute("GatherElements", [product, columns], "keys/looked_up", (batch, heads, m, n), axis=3)
        return g.compute("Transpose", [found], "keys/logits", self._pairs, perm=[0, 1, 3, 2])

    def _poisoned(self, logits: Value) -> Value:
        """Put NaN beyond a table with ``beyond="error"``: positions are values, which no check of lengths covers."""
        if self._options.span.beyond != "error":
            return logits
        g, seen = self._g, self._condition
        beyond = g.compute("Not", [self._there], "relative/beyond", self._loose, BOOL)
        if seen is not None:
            shape = broadcast(self._loose, seen.shape)
            beyond = g.compute("And", [beyond, seen], "relative/unreached", shape, BOOL)
        return g.compute("Where", [beyond, g.constant(np.nan, g.dtype), logits], "relative/poisoned", self._pairs)

    def _table(self, name: str) -> Value:
        g, table = self._g, adopted_table(self._g, getattr(self._operands, name), name)
        assert table is not None
        axis = len(table.shape) - (1 if name == "rel_bias" else 2)
        first = self._low + self._options.span.left
        if (first, self._width) == (0, table.shape[axis]):
            return table
        return g.cut(table, axis, first, first + self._width, self._width, f"{name}/kept")

    def _product(self, x: Value, name: str, path: str) -> tuple[Value, Value | None]:
        """Return the product with a table, and its column for each pair where it is not that of the position."""
        g, repeated, column = self._g, self._repeated(name), None
        if repeated is None:
            table = self._table(name)
        else:  # rows are multiplied once, from the first to the last that any pair reads
            (source, places), column = repeated, self._column
            whole = g.adopt(places, f"{name}/places", (getattr(self._operands, name).shape[-2],), INT64)
            start = g.constant(self._low + self._options.span.left)
            row = g.index("Add", [column, start], "positions/row", column.shape)
            place = g.index("Gather", [whole, row], f"{name}/place", column.shape)
            first, last = (
                g.index("Reshape", [g.index(op, [place], f"{name}/{op}"), g.constant([1])], f"{name}/{op}_row")
                for op in ("ReduceMin", "ReduceMax")
            )
            column = g.index("Sub", [place, first], f"{name}/column", column.shape)
            table, end = g.adopt(source, f"{name}/repeated", tuple(source.shape)), g.plus(last, 1, f"{name}/end")
            table = g.cut(table, len(table.shape) - 2, first, end, f"{name}_rows", f"{name}/read")
        columns = g.transpose(table, f"{name}/columns")
        return g.compute("MatMul", [x, columns], path, (*x.shape[:3], columns.shape[-1])), column

    def _repeated(self, name: str) -> tuple[Any, Any] | None:
        """Return the rows that products need and their places in the table, unless a bias or values need all rows."""
        operands = self._operands
        others = operands.rel_v is not None or (name == "rel_k" and operands.rel_bias is not None)
        return None if others else repeated_rows(getattr(operands, name))

    @cached_property
    def _sizes(self) -> Value:
        g, call = self._g, self._call
        sizes = g.index("Shape", [call.q], "positions/sizes", (3,), start=0, end=3)
        return g.dims("positions/pairs", sizes, g.length(call.k, 2, "positions/keys"))

    @cached_property
    def _column(self) -> Value:
        g = self._g
        first = g.index("Sub", [self._r, g.constant(self._low)], "positions/from_first", self._loose)
        return g.index("Clip", [first, g.constant(0), g.constant(self._width - 1)], "positions/column", self._loose)

    def _wide(self, column: Value, *, of_keys: bool = False) -> Value:
        """Return the column of each pair in every head, in rows of queries or of keys: with less to read as int32."""
        g, sizes, shape, scope = self._g, self._sizes, self._pairs, "keys" if of_keys else "positions"
        column = g.index("Cast", [column], f"{scope}/int32", column.shape, INT32, to=element_type(INT32))
        if of_keys:
            order = [0, 1, 3, 2]
            loose, shape = (tuple(given[axis] for axis in order) for given in (column.shape, shape))
            column = g.index("Transpose", [column], "keys/column", loose, INT32, perm=order)
            sizes = g.index("Gather", [sizes, g.constant(order)], "keys/pairs", (4,))
        return g.index("Expand", [column, sizes], f"{scope}/columns", shape, INT32)

    @cached_property
    def _there(self) -> Value:
        g, span = self._g, self._options.span
        pairs = (("GreaterOrEqual", -span.left), ("LessOrEqual", span.right))
        ends = [
            g.compute(op, [self._r, g.constant(bound)], f"positions/{op}", self._loose, BOOL) for op, bound in pairs
        ]
        return g.compute("And", ends, "positions/there", self._loose, BOOL)

    @cached_property
    def _condition(self) -> Value | None:
        segments = self._call.labels(self._operands, "segments")
        conditions = [] if segments is None else [of_own_segment(self._g, segments)]
        conditions += [x for x in (self._seen, self._call.mask) if x is not None]
        return self._all("visible/seen", conditions)

    @cached_property
    def _seen(self) -> Value | None:
        g, pattern, conditions = self._g, self._options.visibility, []

        def compare(op_type: str, left: Value, bound: Value, name: str) -> None:
            conditions.append(g.compute(op_type, [left, bound], f"visible/{name}", self._loose, BOOL))

        if pattern.right is not None:
            compare("LessOrEqual", self._r, g.constant(pattern.right), "ahead")
        if pattern.left is not None:
            compare("GreaterOrEqual", self._r, g.constant(-pattern.left), "back")
        if pattern.block_size is not None:
            size = pattern.block_size
            inside = g.index("Mod", [self._queries, g.constant(size)], "visible/in_block", self._queries.shape)
            start = g.index("Sub", [self._queries, inside], "visible/block", self._queries.shape)
            first = g.constant(-pattern.whole_blocks_before * size)
            compare(
                "GreaterOrEqual", self._keys, g.index("Add", [start, first], "visible/first", start.shape), "blocks"
            )
            if pattern.right != 0:
                compare(
                    "Less", self._keys, g.index("Add", [start, g.constant(size)], "visible/end", start.shape), "block"
                )
        return self._all("visible/pattern", conditions)

    def _all(self, name: str, conditions: list[Value]) -> Value | None:
        if not conditions:
            return None
        whole, *others = conditions
        for index, condition in enumerate(others, 1):
            shape = broadcast(whole.shape, condition.shape)
            whole = self._g.compute("And", [whole, condition], f"{name}_{index}", shape, BOOL)
        return whole


def tables_of(g: TracedEmitter, operands: Operands, plan: GraphPlan | None) -> StoredTables:
    """Return the tables of a call, in the form that the windows of a plan read, or unchanged without one."""

    def table(name: str) -> Value | None:
        given = adopted_table(g, getattr(operands, name), name)
        return given if plan is None else stored_table(g, plan, given, name)

    return StoredTables(*map(table, StoredTables._fields))


def window_of(
    g: TracedEmitter, plan: GraphPlan, tables: StoredTables, lengths: Lengths, reach: Reach | None
) -> TableWindow:
    return TableWindow(g, plan, tables, lengths) if reach is None else FittedWindow(g, plan, tables, lengths, reach)


def keys_by_query_head(g: TracedEmitter, plan: GraphPlan, call: TracedCall, scale: float) -> Value:
    """Return scaled keys, repeated for the query heads of their groups: ``(batch, H, keys, D)``."""
    spec, (batch, groups, m, width) = plan.spec, call.k.shape
    x = parts.scaled(g, call.k, scale, "keys/scaled")
    size = spec.num_heads // spec.num_kv_heads
    if size == 1:
        return x
    apart = g.compute("Unsqueeze", [x, g.constant([2])], "keys/groups", (batch, groups, 1, m, width))
    repeated = g.constant([1, 1, size, 1, 1])
    wide = g.compute("Expand", [apart, repeated], "keys/repeated", (batch, groups, size, m, width))
    merged = g.dims("keys/by_query_head_shape", 0, spec.num_heads, call.lengths.keys, int(width))
    return g.compute("Reshape", [wide, merged], "keys/by_query_head", (batch, spec.num_heads, m, width))
