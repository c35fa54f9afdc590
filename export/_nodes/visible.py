"""The visible keys of a query, as one boolean tensor, unless the table's window expresses them."""

from __future__ import annotations

from typing import NamedTuple

from relskew_core.export._form.plan import GraphPlan
from relskew_core.export._nodes.emitter import BOOL, INT64_MAX, Dim, Emitter, Shape, Value
from relskew_core.export._nodes.window import Lengths


class Segments(NamedTuple):
    """Segments of the queries ``(batch, queries)`` and of the keys ``(batch, keys)``, in int64."""

    queries: Value
    keys: Value


def visible(
    g: Emitter, plan: GraphPlan, lengths: Lengths, mask: Value | None, segments: Segments | None = None
) -> Value | None:
    """Return the condition for visible keys, which broadcasts to the logits; ``None`` if none is needed.

    Where a query may see no key at all, the condition must say it all, hidden ends of the table included.
    """
    symbols: Shape = (lengths.query_symbol, lengths.key_symbol)
    if plan.in_place:  # the rows of the batch have different positions
        symbols = ("batch", 1, *symbols)
    conditions: list[Value] = []
    positions = _KeyAndQueryPositions(g, plan, lengths)

    def compare(op_type: str, keys: Value, bounds: Value, name: str) -> None:
        conditions.append(g.compute(op_type, [keys, bounds], f"visible/{name}", symbols, BOOL))

    # The relative logits of a cache in place contain both already.
    if plan.one_sided and not plan.causal_attribute and not plan.in_place:
        compare("LessOrEqual", positions.keys, positions.queries, "causal")
    if plan.spec.block_size is not None:
        size = g.constant(plan.spec.block_size)
        keys = g.index("Div", [positions.keys, size], "visible/key_block", positions.keys.shape)
        queries = g.index("Div", [positions.queries, size], "visible/query_block", positions.queries.shape)
        if plan.left.past_edge != "limited":  # else no input is so long that a block of its past is hidden
            before = g.constant(plan.blocks_before)
            furthest = g.index("Sub", [queries, before], "visible/furthest_block", queries.shape)
            compare("GreaterOrEqual", keys, furthest, "block")
        if not plan.one_sided:
            compare("LessOrEqual", keys, queries, "own_block")
    if plan.dead_rows and plan.left.past_edge == "hidden" and not plan.in_place:
        shape = positions.queries.shape
        first = g.index("Sub", [positions.queries, g.constant(plan.left.rows)], "visible/first", shape)
        compare("GreaterOrEqual", positions.keys, first, "past")
    if plan.dead_rows and plan.right.past_edge == "hidden" and not plan.one_sided:
        shape = positions.queries.shape
        last = g.index("Add", [positions.queries, g.constant(plan.right.rows)], "visible/last", shape)
        compare("LessOrEqual", positions.keys, last, "future")
    if segments is not None:
        conditions.append(of_own_segment(g, segments))
    if mask is not None:
        conditions.append(mask)
    if not conditions:
        return None
    whole = conditions[0]
    for index, condition in enumerate(conditions[1:]):
        shape = (*broadcast(whole.shape, condition.shape)[:-2], *symbols[-2:])
        whole = g.compute("And", [whole, condition], f"visible/and_{index}", shape, BOOL)
    return whole


def of_own_segment(g: Emitter, segments: Segments) -> Value:
    """Return the keys in a query's segment, ``(batch, 1, queries, keys)``."""
    pair = by_pair(g, segments, "segments")
    return g.compute("Equal", pair, "visible/segment", broadcast(*(x.shape for x in pair)), BOOL)


def by_pair(g: Emitter, labels: Segments, name: str) -> tuple[Value, Value]:
    """Return integers of the queries, ``(batch, 1, queries, 1)``, and of the keys, ``(batch, 1, 1, keys)``."""
    queries, keys = labels
    rows, columns = (queries.shape[0], 1, queries.shape[1], 1), (keys.shape[0], 1, 1, keys.shape[1])
    of_queries = g.index("Unsqueeze", [queries, g.constant([1, 3])], f"{name}/of_queries", rows)
    return of_queries, g.index("Unsqueeze", [keys, g.constant([1, 2])], f"{name}/of_keys", columns)


def broadcast(one: Shape, other: Shape) -> Shape:
    """Return the broadcast shape of two tensors; of two different symbols the first, because the other may be 1."""
    size = max(len(one), len(other))
    pairs = zip(*((1,) * (size - len(shape)) + shape for shape in (one, other)), strict=True)
    return tuple(b if a == 1 else a for a, b in pairs)


class _KeyAndQueryPositions:
    """Positions of keys ``(keys,)`` and queries ``(queries, 1)``, made on first use."""

    def __init__(self, g: Emitter, plan: GraphPlan, lengths: Lengths) -> None:
        self._g, self._plan, self._lengths = g, plan, lengths
        self._keys: Value | None = None
        self._queries: Value | None = None

    @property
    def keys(self) -> Value:
        if self._keys is None:
            self._keys = self._range("key", 0, self._lengths.keys, self._lengths.key_symbol)
        return self._keys

    @property
    def queries(self) -> Value:
        if self._queries is None:
            g, lengths = self._g, self._lengths
            symbol = lengths.query_symbol
            if self._plan.in_place:
                return self._of_rows()
            if lengths.past == 0 and lengths.queries == lengths.keys:
                flat = self.keys
            elif self._plan.one_sided:
                inputs = [self.keys, g.dim(lengths.past), g.constant([INT64_MAX])]
                flat = g.index("Slice", inputs, "visible/query_positions", (symbol,))
            else:
                flat = self._range("query", lengths.past, lengths.queries, symbol)
            shape: Shape = (symbol, 1)
            self._queries = g.index("Unsqueeze", [flat, g.constant([1])], "visible/query_column", shape)
        return self._queries

    def _of_rows(self) -> Value:
        """Positions of the queries of every row of the batch, ``(batch, 1, queries, 1)``."""
        g, lengths = self._g, self._lengths
        flat = self._range("query", 0, lengths.queries, lengths.query_symbol)
        column = g.index("Unsqueeze", [flat, g.constant([1])], "visible/query_column", (lengths.query_symbol, 1))
        axes = g.constant([1, 2, 3])
        past = g.index("Unsqueeze", [g.dim(lengths.past), axes], "visible/past_rows", ("batch", 1, 1, 1))
        shape: Shape = ("batch", 1, lengths.query_symbol, 1)
        self._queries = g.index("Add", [column, past], "visible/query_positions_by_row", shape)
        return self._queries

    def _range(self, name: str, first: Dim, length: Dim, symbol: int | str) -> Value:
        g = self._g
        end = g.plus(first, length, f"visible/{name}_end")
        ends = (first, f"visible/{name}_first"), (end, f"visible/{name}_count")
        return g.range(*ends, f"visible/{name}_positions", symbol)
