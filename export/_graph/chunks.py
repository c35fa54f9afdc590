"""Long sequences: a loop over chunks of queries, so that no tensor has the size of all queries times all keys."""

from __future__ import annotations

from typing import NamedTuple

from relskew_core.export._graph.emitter import INT64_MAX, Dim, Emitter, Shape, Value
from relskew_core.export._graph.parts import AttentionInputs, Heads, merge_heads, weighted_heads
from relskew_core.export._graph.visible import Segments, visible
from relskew_core.export._graph.window import Lengths, TableWindow
from relskew_core.export._plan import GraphPlan


class Chunks(NamedTuple):
    """Chunks of one size; the last one starts early enough to end with the last query, and may overlap.

    What it has in common with the one before is dropped.
    """

    size: Value
    number: Value
    last: Value  # where the last chunk starts
    # which keys the last chunk sees; the other chunks use the same columns, counted from the end
    condition: Value | None


def even_chunks(g: Emitter, n: Value, most: int) -> tuple[Value, Value, Value]:
    """Return the number of chunks of at most ``most`` of ``n`` queries, their size, and where the last one starts.

    The size is the least that this number of chunks needs: 129 queries are two chunks of 65 and not of 128.
    """

    def quotient(value: Value, divisor: Value, name: str) -> Value:
        over = g.index("Sub", [g.index("Add", [value, divisor], f"{name}_next"), g.constant([1])], f"{name}_over")
        return g.index("Div", [over, divisor], name)

    count = quotient(n, g.constant([most]), "chunks/count")
    size = quotient(n, count, "chunks/size")
    return count, size, g.index("Sub", [n, size], "chunks/last_start")


def chunks_of(g: Emitter, plan: GraphPlan, inputs: AttentionInputs) -> Chunks:
    """Return the chunks of an attention, made before any loop."""
    lengths = inputs.lengths
    assert plan.chunk_size is not None
    count, size, last = even_chunks(g, g.dim(lengths.queries), plan.chunk_size)
    condition = None
    if plan.one_sided and inputs.mask is None and inputs.segments is None:
        offset = g.plus(lengths.past, last, "chunks/last_position")
        condition = visible(g, plan, Lengths(size, lengths.keys, offset, "chunk", lengths.key_symbol), None)
    return Chunks(size, count, last, condition)


def attend_chunks(g: Emitter, plan: GraphPlan, inputs: AttentionInputs, heads: Heads, chunks: Chunks) -> Value:
    """Return the heads side by side, ``(batch, queries, H * D)``."""
    lengths, (size, count, last, causal) = inputs.lengths, chunks
    n = g.dim(lengths.queries)

    def chunk(body: Emitter, iteration: Value) -> Value:
        step = body.index("Mul", [size, iteration], "chunk/step")
        start = body.index("Min", [step, last], "chunk/start")
        end = body.index("Add", [start, size], "chunk/end")
        rows = body.cut(heads.queries, 2, start, end, "chunk", "chunk/queries")
        first, stop = _keys_of(body, plan, lengths, start, end)
        whole = first == 0 and stop is lengths.keys
        count_of_keys = body.minus(stop, first, "chunk/key_count")
        offset = body.minus(body.plus(lengths.past, start, "chunk/position"), first, "chunk/offset")
        seen = Lengths(size, count_of_keys, offset, "chunk", lengths.key_symbol if whole else "chunk_keys")
        k = heads.keys if whole else body.cut(heads.keys, 3, first, stop, "chunk_keys", "chunk/keys")
        v = heads.values if whole else body.cut(heads.values, 2, first, stop, "chunk_keys", "chunk/values")
        window = TableWindow(body, plan, inputs.tables, seen, inputs.heads)
        mask = _mask_of(body, inputs.mask, start, end, first, stop)
        segments = None
        if inputs.segments is not None:
            of_keys = inputs.segments.keys
            segments = Segments(
                body.cut(inputs.segments.queries, 1, start, end, "chunk", "chunk/segments_of_queries"),
                of_keys if whole else body.cut(of_keys, 1, first, stop, "chunk_keys", "chunk/segments_of_keys"),
            )
        if causal is None:
            condition = visible(body, plan, seen, mask, segments)
        else:
            columns = body.minus(lengths.keys, seen.keys, "chunk/unseen")
            condition = body.cut(causal, 1, columns, INT64_MAX, "chunk_keys", "chunk/visible")
        return merge_heads(body, weighted_heads(body, plan, Heads(rows, k, v, heads.sinks), window, seen, condition))

    turns = g.loop(g.scalar(count, "chunks/count_scalar"), "chunks", chunk)
    _, batch, _, width = turns.shape
    return joined(g, turns, (size, count), n, (-1, int(width)), (batch, lengths.query_symbol, width))


def joined(
    g: Emitter, turns: Value, chunks: tuple[Value, Value], n: Value, sizes: tuple[Dim, Dim], shape: Shape
) -> Value:
    """Return the results of a loop over chunks, one after the other, ``(…, n, width)``.

    ``chunks`` are their size and their number, ``sizes`` the leading axes and the width.
    """
    (size, count), (leading, width), axis = chunks, sizes, len(shape) - 2
    # The reshape gives the shape to onnx's reference evaluator, which joins a loop's results along their first axis.
    by_turn = g.dims("chunks/by_turn_shape", count, leading, size, width)
    stacked = g.compute("Reshape", [turns, by_turn], "chunks/by_turn", turns.shape)
    turned = g.transpose(stacked, "chunks/turned", [*range(1, axis + 1), 0, axis + 1, axis + 2])
    whole = g.index("Mul", [count, size], "chunks/chunked_length")
    together = g.dims("chunks/joined_shape", leading, whole, width)
    long = (*shape[:axis], "chunked_length", shape[-1])
    flat = g.compute("Reshape", [turned, together], "chunks/joined", long)
    before = g.index("Sub", [whole, size], "chunks/before_last")
    rest = g.index("Sub", [before, n], "chunks/rest_from_end")
    head = g.cut(flat, axis, 0, before, "before_last", "chunks/head")
    tail = g.cut(flat, axis, rest, INT64_MAX, "rest", "chunks/tail")
    return g.compute("Concat", [head, tail], "chunks/heads", shape, axis=axis)


def _keys_of(g: Emitter, plan: GraphPlan, lengths: Lengths, start: Value, end: Value) -> tuple[Dim, Dim]:
    """Return the first key that a query of the chunk may see, and the end after the last."""
    first: Dim = 0
    stop: Dim = lengths.keys
    if plan.left.past_edge == "hidden":
        position = g.plus(lengths.past, start, "chunk/first_position")
        reach = g.minus(position, plan.left.rows, "chunk/first_reach")
        # A query beyond the end of a memory sees none of it; one key remains, so that no axis is empty.
        final = g.minus(lengths.keys, 1, "chunk/final_key")
        positive = g.index("Max", [g.dim(reach), g.constant([0])], "chunk/first_positive")
        first = g.index("Min", [positive, g.dim(final)], "chunk/first")
    if plan.right.past_edge == "hidden":
        after = g.plus(lengths.past, end, "chunk/after")
        reach = g.plus(after, plan.right.rows, "chunk/stop_reach")
        stop = reach if plan.one_sided else g.index("Min", [g.dim(reach), g.dim(lengths.keys)], "chunk/stop")
    return first, stop


def _mask_of(g: Emitter, mask: Value | None, start: Value, end: Value, first: Dim, stop: Dim) -> Value | None:
    """Return the mask of a chunk; axes of length one broadcast, and are not cut."""
    if mask is None:
        return None
    for axis, low, high, name in ((2, start, end, "queries"), (3, first, stop, "keys")):
        begin = low
        if low != 0:
            final = g.minus(g.length(mask, axis, f"chunk/mask_{name}"), 1, f"chunk/mask_final_{name}")
            begin = g.index("Min", [g.dim(low), g.dim(final)], f"chunk/mask_first_{name}")
        mask = g.cut(mask, axis, begin, high, f"mask_chunk_{name}", f"chunk/mask_{name}")
    return mask
