"""Caches of fixed length, written in place, with a separate past for every row of the batch."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from relskew_core.export._form.plan import GraphPlan
from relskew_core.export._nodes import parts
from relskew_core.export._nodes.emitter import BFLOAT16, BOOL, Dim, Emitter, Shape, Value
from relskew_core.export._nodes.visible import Segments, visible
from relskew_core.export._nodes.window import Lengths, StoredTables, TableWindow, skew, unskew

CACHE_LENGTH = "cache_length"  # the symbol of the caches' length


def attend_filled(
    g: Emitter, queries: Value, present: parts.Present, bias: Value, lengths: tuple[Dim, Dim, Dim], heads: Value, *,
    branches: bool = True, **attributes: Any,
) -> None:  # fmt: skip
    """Assign the result of an Attention to the first ``total`` positions of the caches to ``heads``.

    The mask ``bias`` has ``total`` keys; ``lengths`` are the number of queries, ``total`` and the caches' length.

    A Slice copies, which takes longer than the products of one query with as many keys. A cache is therefore read
    whole if the products with its empty part, which are hidden, cost less than the copy of its filled part. Half
    precision multiplies more slowly and copies faster. Without ``branches``, and in bfloat16, which has no Pad, the
    filled part is always copied.
    """
    n, total, length = lengths

    def attention(g: Emitter, keys: Value, values: Value, mask: Value, out: Value) -> list[Value]:
        g.node("Attention", [queries, keys, values, mask], g.path("attention"), [out], **attributes)
        return [out]

    def of_filled(g: Emitter, out: Value) -> list[Value]:
        pairs = zip(present, ("keys", "values"), strict=True)
        keys, values = (g.cut(x, 2, 0, total, "total_length", f"cache/{name}") for x, name in pairs)
        return attention(g, keys, values, bias, out)

    if not branches or g.dtype == BFLOAT16:
        of_filled(g, heads)
        return
    free = g.minus(length, total, "cache/free")
    queries_by_key = int(queries.shape[1]) // int(present[0].shape[1])
    wasted = g.times(n, queries_by_key * (1 if g.dtype == np.float32 else 3), "cache/products_by_key")
    wasted = g.index("Mul", [g.dim(wasted), g.dim(free)], "cache/wasted_products")
    mostly = g.index("Less", [wasted, g.dim(total)], "cache/is_mostly_filled", (1,), BOOL)

    def whole(g: Emitter) -> list[Value]:
        pads = g.dims("cache/pads", *[0] * (2 * len(bias.shape) - 1), free)
        shape = (*bias.shape[:-1], CACHE_LENGTH)
        mask = g.compute("Pad", [bias, pads, g.constant(-np.inf, g.dtype)], "cache/mask", shape)
        return attention(g, *present, mask, Value(g.path("attention"), heads.shape, g.dtype))

    def filled(g: Emitter) -> list[Value]:
        return of_filled(g, Value(g.path("attention"), heads.shape, g.dtype))

    g.choose(mostly, "attention", [heads], whole=whole, filled=filled)


def attend_in_place(
    g: Emitter, plan: GraphPlan, projected: parts.Projected, tables: StoredTables, given: Mapping[str, Value],
    sinks: Value | None,
) -> tuple[Value, parts.Present]:  # fmt: skip
    """Return the heads, laid out like the queries, and the caches with the new keys and values.

    ``past (batch, Hkv, cache_length, D)`` holds ``past_lengths (batch,)`` positions of each row; what lies behind them
    is not seen, but must be finite. Attention reads of the caches what the longest row has filled.
    """
    spec, past, past_lengths = plan.spec, (given["past_key"], given["past_value"]), given["past_lengths"]
    queries = parts.split_heads(g, projected.q, spec.num_heads, spec.head_dim, "q")
    rows = _Rows(g, plan, tables, given, queries)
    bias = rows.logits(queries)
    condition = visible(g, plan, rows.lengths, rows.mask, rows.segments)
    if plan.dead_rows:
        lowest = g.constant(plan.masked_value, g.dtype)
        seen = g.compute("Greater", [bias, lowest], "visible/by_position", bias.shape, BOOL)
        if condition is not None:
            # Without a table of logits, positions hide the same keys from all heads; a mask may not.
            of_heads = bias.shape[1] if bias.shape[1] == spec.num_heads else "visible_heads"
            shape = (bias.shape[0], of_heads, *bias.shape[2:])
            seen = g.compute("And", [seen, condition], "visible/all", shape, BOOL)
        condition = seen
    if plan.fused:
        bias = parts.hide(g, plan, bias, condition)
    present = (Value("present_key", past[0].shape, g.dtype), Value("present_value", past[1].shape, g.dtype))
    named = ((projected.k, "k"), (projected.v, "v"))
    new = [parts.split_heads(g, x, spec.num_kv_heads, spec.head_dim, name) for x, name in named]
    for cached, added, whole in zip(past, new, present, strict=True):
        added = rows.that_fit(added, whole.name)
        g.node("TensorScatter", [cached, added, past_lengths], f"relskew/compute/cache/{whole.name}", [whole], axis=2)
    if plan.fused:
        heads = Value(g.path("attention/output"), queries.shape, g.dtype)
        lengths = rows.lengths.queries, rows.total, g.length(past[0], 2, CACHE_LENGTH)
        attributes = parts.fused_attributes(g, plan)
        attend_filled(g, queries, present, bias, lengths, heads, branches=plan.branches, **attributes)
        return parts.as_given(g, projected, parts.without_dead_rows(g, plan, heads, condition)), present
    keys, values = (rows.of_filled(x, 2, f"cache/{name}") for x, name in zip(present, ("keys", "values"), strict=True))
    turned = g.transpose(keys, "cache/keys_transposed")
    n = rows.lengths.queries
    logits = parts.content_logits(g, plan, queries, turned, bias, n)
    heads, softmax = parts.weighted_values(g, plan, logits, condition, values, n, rows.relative_values)
    if sinks is not None:
        heads = parts.with_sinks(g, heads, softmax, sinks)
    return parts.as_given(g, projected, heads), present


class _Rows:
    """Rows of the batch whose queries follow separate pasts, cut to the filled length of the longest.

    All read one window of the table, ``r = -total … 0``. TensorScatter writes each row's products as far to the right,
    in a buffer, at the positions of its queries; then one skew serves them all. The rest of the buffer hides the
    future.
    """

    def __init__(
        self, g: Emitter, plan: GraphPlan, tables: StoredTables, given: Mapping[str, Value], queries: Value
    ) -> None:
        self._g, self._plan, self._past = g, plan, given["past_lengths"]
        self._n = n = g.length(queries, 2, "query_length")
        first = g.constant([0])
        # For an empty batch the longest past is 0: the maximum of nothing is the lowest number.
        pasts = g.index("Concat", [first, self._past], "cache/pasts_and_0", ("batch_and_1",), axis=0)
        self._longest = longest = g.index("ReduceMax", [pasts, first], "cache/longest_past", keepdims=1)
        self.total = g.plus(longest, n, "cache/total")
        self._room = given["past_key"]
        self.lengths = Lengths(n, self.total, self._past, "query_length", "total_length")
        self._window = TableWindow(g, plan, tables, self.lengths)
        self._columns = g.plus(self.total, 1, "cache/total_and_1")
        self.mask = self.of_filled(given["mask"], 3, "visible/mask", "mask_total") if plan.mask else None
        self.segments = self._segments(given["segments"]) if plan.segments else None

    def logits(self, queries: Value) -> Value:
        """Return the relative logits, ``(batch, H, queries, total)``, with the future and distant positions hidden."""
        g, n, plan = self._g, self._n, self._plan
        whole = self._checked(self._window.logits(queries, n, hide=True))
        batch = g.length(self._past, 0, "batch")
        if whole.shape[0] == 1:
            sizes = g.dims("relative/rows_shape", batch, 1, 1, 1)
            whole = g.compute("Expand", [whole, sizes], "relative/rows", ("batch", *whole.shape[1:]))
        width = g.plus(self.total, self.total, "relative/width")  # wide enough for every row of the skew
        placed = self._placed(whole, width, self._past, plan.masked_value, "relative")
        keys = g.minus(width, 1, "relative/width_less_1")
        skewed = skew(g, placed, Lengths(n, keys, 0, "query_length", "placed_keys"), one_sided=True, columns=width)
        end = g.plus(self._longest, self.total, "relative/end")
        return g.cut(skewed, 3, self._longest, end, "total_length", "relative/by_key")

    def relative_values(self, weights: Value) -> Value:
        g, n = self._g, self._n
        width = g.plus(self.total, self.total, "unskew/width_of_rows")
        behind = g.index("Sub", [g.dim(self._longest), self._past], "unskew/behind_longest", self._past.shape)
        placed = self._placed(weights, width, behind, 0.0, "unskew")
        lengths = Lengths(n, width, 0, "query_length", "placed")
        moved = unskew(g, placed, lengths, one_sided=True, symbol="placed_and_1")
        by_position = g.cut(moved, 3, 0, self._columns, "window", "unskew/by_position")
        shape = (*weights.shape[:3], self._plan.spec.head_dim)
        return g.compute("MatMul", [by_position, self._window.rows()], "relative/values", shape)

    def that_fit(self, new: Value, name: str) -> Value:
        """Return the new rows of a cache, ``(batch, Hkv, queries, D)``; fail if the longest row has no room for them.

        TensorScatter fails by itself on CPUs, and on other devices writes behind the cache. A reshape to more queries
        than there are fails everywhere.
        """
        g = self._g
        excess = g.minus(self.total, g.length(self._room, 2, CACHE_LENGTH), "cache/excess")
        excess = g.index("Max", [g.dim(excess), g.constant([0])], "cache/excess_or_0")
        count = g.plus(self._n, excess, "cache/queries_that_fit")
        shape = (*new.shape[:2], "queries_that_fit", new.shape[3])
        return g.compute("Reshape", [new, g.dims("cache/new_shape", 0, 0, count, 0)], f"cache/new_{name}", shape)

    def of_filled(self, x: Value, axis: int, name: str, symbol: str = "total_length") -> Value:
        return self._g.cut(x, axis, 0, self.total, symbol, name)

    def _checked(self, x: Value) -> Value:
        """Give the number of columns a name in errors; rows too long for the table fail here."""
        g, plan, count = self._g, self._plan, self._columns
        if plan.left.past_edge != "limited":
            return x
        # onnxruntime removes a reshape between equal symbolic shapes, and treats a single unknown length as -1.
        shape = (*x.shape[:3], "total_and_1")
        return g.compute(
            "Reshape", [x, g.dims("relative/named_shape", 0, 0, self._n, count)], f"relative/named{plan.reach}", shape
        )

    def _placed(self, x: Value, width: Dim, first: Value, filling: float, name: str) -> Value:
        """Place rows of ``x`` into wider ones, at a separate start for each row of the batch."""
        g = self._g
        sizes = g.index("Shape", [x], f"{name}/sizes", (3,), start=0, end=3)
        shape: Shape = (*x.shape[:3], f"{name}_width")
        buffer_shape = g.dims(f"{name}/buffer_shape", sizes, width)
        buffer = g.compute("Expand", [g.constant([filling], g.dtype), buffer_shape], f"{name}/buffer", shape)
        return g.compute("TensorScatter", [buffer, x, first], f"{name}/placed", shape, axis=3)

    def _segments(self, of_keys: Value) -> Segments:
        """Read the segments of each row's queries at their positions in the cache."""
        g, n, past = self._g, self._n, self._past
        ramp = g.range((0, ""), (n, "segments/count"), "segments/range", "query_length")
        column = g.index("Unsqueeze", [past, g.constant([1])], "segments/past", (*past.shape, 1))
        shape: Shape = (*past.shape, "query_length")
        places = g.index("Add", [column, ramp], "segments/places", shape)
        of_queries = g.index("GatherElements", [of_keys, places], "segments/queries", shape, axis=1)
        return Segments(of_queries, self.of_filled(of_keys, 1, "segments/keys"))
