"""Caches of fixed length, written in place, where every row of the batch has a past of its own."""

from __future__ import annotations

from onnx import TensorProto

from relskew_core.export._graph.emitter import INT64_MAX, Dim, Emitter, Shape, Value
from relskew_core.export._graph.guard import at_most
from relskew_core.export._graph.parts import (
    Heads,
    OptionalInputs,
    Present,
    Projected,
    as_given,
    hide,
    relative_logits,
    split_heads,
    weighted_heads,
)
from relskew_core.export._graph.visible import Segments, visible
from relskew_core.export._graph.window import Lengths, StoredTables, TableWindow
from relskew_core.export._plan import GraphPlan


def attend_in_place(
    g: Emitter,
    plan: GraphPlan,
    projected: Projected,
    tables: StoredTables,
    given: OptionalInputs,
    sinks: Value | None,
) -> tuple[Value, Present]:
    """Return the heads, laid out as the queries came, and the caches with the new keys and values in them.

    ``past (batch, Hkv, cache_length, D)`` holds ``past_lengths (batch,)`` positions of each row; what lies behind them
    is not seen, but must be finite.
    """
    past, past_lengths = given.past, given.past_lengths
    assert past is not None
    assert past_lengths is not None
    spec = plan.spec
    queries = split_heads(g, projected.q, spec.num_heads, spec.head_dim, "q")
    named = ((projected.k, "k"), (projected.v, "v"))
    new = [split_heads(g, x, spec.num_kv_heads, spec.head_dim, name) for x, name in named]
    present = (Value("present_key", past[0].shape, g.dtype), Value("present_value", past[1].shape, g.dtype))
    for cached, added, whole in zip(past, new, present, strict=True):
        g.node("TensorScatter", [cached, added, past_lengths], f"relskew/compute/cache/{whole.name}", [whole], axis=2)
    lengths, reach = _lengths(g, plan, queries, past, past_lengths)
    window = RaggedTableWindow(g, plan, tables, lengths, reach)
    condition = visible(g, plan, lengths, given.mask, _segments(g, lengths, given.segments, past_lengths))
    if not plan.fused:
        keys_shape = (*present[0].shape[:2], spec.head_dim, present[0].shape[2])
        keys = g.compute("Transpose", [present[0]], "cache/keys_transposed", keys_shape, perm=[0, 1, 3, 2])
        heads = weighted_heads(g, plan, Heads(queries, keys, present[1], sinks), window, lengths, condition)
        return as_given(g, projected, heads), present
    bias = relative_logits(g, plan, queries, window, lengths)
    if condition is not None:
        bias = hide(g, plan, bias, condition)
    heads = Value("relskew/compute/attention/output", queries.shape, g.dtype)
    filled = g.index("Add", [past_lengths, g.dim(lengths.queries)], "cache/filled_lengths", (lengths.row_symbol,))
    attributes = {"scale": 1.0} | ({"softmax_precision": TensorProto.FLOAT} if g.dtype.itemsize == 2 else {})
    inputs = [queries, *present, bias, None, None, filled]
    g.node("Attention", inputs, "relskew/compute/attention", [heads], **attributes)
    return as_given(g, projected, heads), present


def _segments(g: Emitter, lengths: Lengths, of_keys: Value | None, past_lengths: Value) -> Segments | None:
    """Read the segments of each row's queries from where they stand in the cache."""
    if of_keys is None:
        return None
    limits = [g.constant(0), g.scalar(lengths.queries, "segments/count"), g.constant(1)]
    ramp = g.index("Range", limits, "segments/range", (lengths.query_symbol,))
    column = g.index("Unsqueeze", [past_lengths, g.constant([1])], "segments/past", (lengths.row_symbol, 1))
    shape: Shape = (lengths.row_symbol, lengths.query_symbol)
    places = g.index("Add", [column, ramp], "segments/places", shape)
    return Segments(g.index("GatherElements", [of_keys, places], "segments/queries", shape, axis=1), of_keys)


def _lengths(
    g: Emitter, plan: GraphPlan, queries: Value, past: Present, past_lengths: Value
) -> tuple[Lengths, Value | None]:
    """Read the lengths; those of the queries cannot be computed where a row is longer than the table.

    Return also how far into the past the longest row reaches, where the table is cut to that.
    """
    n, total = g.length(queries, 2, "query_length"), None
    if plan.left.past_edge == "limited":
        longest = g.index("ReduceMax", [past_lengths, g.constant([0])], "cache/longest_past", keepdims=1)
        total = at_most(g, g.plus(longest, n, "cache/longest"), plan.left.rows + 1, "keys", plan.reach)
        n = g.minus(total, longest, "cache/queries")
    return Lengths(n, g.length(past[0], 2, "cache_length"), past_lengths, "query_length", "cache_length"), total


def _cut(g: Emitter, plan: GraphPlan, tables: StoredTables, reach: Value) -> StoredTables:
    """Leave out of the tables what no row reads: column 0 then is ``r = -reach``."""
    start = g.dim(g.minus(plan.lead, reach, "window/first"))

    def cut(table: Value | None, name: str) -> Value | None:
        if table is None:
            return None
        axis = len(table.shape) - (1 if name == "rel_bias" else 2)
        shape = (*table.shape[:axis], "columns", *table.shape[axis + 1 :])
        bounds = [start, g.constant([INT64_MAX]), g.constant([axis])]
        return g.compute("Slice", [table, *bounds], f"window/{name}_seen", shape)

    return StoredTables(cut(tables.rel_k, "rel_k"), cut(tables.rel_v, "rel_v"), cut(tables.rel_bias, "rel_bias"))


class RaggedTableWindow(TableWindow):
    """The window of every row of the batch: the same columns, ``r = -(queries + past) … keys - past - 1``.

    Queries are multiplied by all that the longest row reads of the table, and the products are gathered: else the
    table would have to be gathered for every row of the batch.
    """

    def __init__(
        self, g: Emitter, plan: GraphPlan, tables: StoredTables, lengths: Lengths, reach: Value | None
    ) -> None:
        self._g, self._plan, self._rows = g, plan, lengths.row_symbol
        self._tables = tables if reach is None else _cut(g, plan, tables, reach)
        self.symbol, self.one_sided = "window", False
        size = g.plus(lengths.queries, lengths.keys, "window/size")
        limits = [g.constant(0), g.scalar(size, "window/size_scalar"), g.constant(1)]
        ramp = g.index("Range", limits, "window/range", ("window",))
        lead: Dim = plan.lead if reach is None else reach
        one = g.minus(lead, lengths.queries, "window/start")
        start = g.index("Sub", [g.dim(one), g.dim(lengths.past)], "window/start_rows", (self._rows,))
        column = g.index("Unsqueeze", [start, g.constant([1])], "window/start_column", (self._rows, 1))
        shape: Shape = (self._rows, "window")
        columns = g.index("Add", [ramp, column], "window/columns", shape)
        last = g.constant(plan.columns - 1) if reach is None else g.scalar(reach, "window/last")
        ends = [g.constant(0), last]
        self._of_rows = g.index("Clip", [columns, *ends], "window/index", shape)

    def product(self, queries: Value) -> Value | None:
        """Return heads of queries times the window of ``rel_k``, ``(batch, H, queries, window)``, if it is there."""
        table, g = self._tables.rel_k, self._g
        if table is None:
            return None
        batch, heads, n, width = queries.shape
        turned = g.compute("Transpose", [queries], "relative/queries", (batch, heads, width, n), perm=[0, 1, 3, 2])
        shape: Shape = (batch, heads, table.shape[-2], n)
        whole = g.compute("MatMul", [table, turned], "relative/products", shape)
        axes = g.constant([1, 3])
        index = g.index("Unsqueeze", [self._of_rows, axes], "window/index_column", (batch, 1, "window", 1))
        each = g.dims("window/index_shape", 1, int(heads), 1, 1)
        spread = g.index("Expand", [index, each], "window/index_heads", (batch, heads, "window", 1))
        picked = g.compute("GatherND", [whole, spread], "relative/picked", (batch, heads, "window", n), batch_dims=2)
        return g.compute("Transpose", [picked], "relative/logits", (batch, heads, n, "window"), perm=[0, 1, 3, 2])

    def rows(self) -> Value:
        """Return the window of ``rel_v``, ``(batch, H or 1, window, head_dim)``."""
        table, g = self._tables.rel_v, self._g
        if table is None:
            raise ValueError("a block without `rel_values` has no table for them")
        width = table.shape[-1]
        if len(table.shape) == 2:
            cut = g.compute("Gather", [table, self._of_rows], "window/rel_v", (self._rows, "window", width), axis=0)
            shape: Shape = (self._rows, 1, "window", width)
            return g.compute("Unsqueeze", [cut, g.constant([1])], "window/rel_v_rows", shape)
        heads = table.shape[0]
        cut = g.compute("Gather", [table, self._of_rows], "window/rel_v", (heads, self._rows, "window", width), axis=1)
        shape = (self._rows, heads, "window", width)
        return g.compute("Transpose", [cut], "window/rel_v_rows", shape, perm=[1, 0, 2, 3])

    def bias(self) -> Value | None:
        """Return the window of ``rel_bias``, ``(batch, heads or 1, 1, window)``; zeros where no table makes logits."""
        table, g = self._bias_table(), self._g
        if table is None:
            return None
        heads = table.shape[0]
        cut = g.compute("Gather", [table, self._of_rows], "window/rel_bias", (heads, self._rows, "window"), axis=1)
        turned = g.compute("Transpose", [cut], "window/rel_bias_rows", (self._rows, heads, "window"), perm=[1, 0, 2])
        shape: Shape = (self._rows, heads, 1, "window")
        return g.compute("Unsqueeze", [turned, g.constant([2])], "window/rel_bias_row", shape)

    def hide(self, logits: Value) -> Value:
        """Add what hides columns of relative logits that no query may see, if there are any."""
        stored, g = self._hiding(), self._g
        if stored is None:
            return logits
        cut = g.compute("Gather", [stored, self._of_rows], "window/hidden", (self._rows, "window"), axis=0)
        shape: Shape = (self._rows, 1, 1, "window")
        row = g.compute("Unsqueeze", [cut, g.constant([1, 2])], "window/hidden_row", shape)
        return g.compute("Add", [logits, row], "relative/hide", logits.shape)
