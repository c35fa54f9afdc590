"""Attention of projected queries, keys and values: one Attention node, separate nodes, or a loop over them."""

from __future__ import annotations

from dataclasses import replace
from typing import NamedTuple

import numpy as np

from relskew_core.export._form.plan import GraphPlan
from relskew_core.export._nodes import parts
from relskew_core.export._nodes.emitter import BOOL, INT64_MAX, Dim, Emitter, Shape, Value
from relskew_core.export._nodes.visible import Segments, visible
from relskew_core.export._nodes.window import HeadRange, Lengths, TableWindow


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


def chunks_of(g: Emitter, plan: GraphPlan, inputs: parts.AttentionInputs) -> Chunks:
    lengths = inputs.lengths
    assert plan.chunk_size is not None
    count, size, last = even_chunks(g, g.dim(lengths.queries), plan.chunk_size)
    condition = None
    if plan.one_sided and inputs.mask is None and inputs.segments is None:
        offset = g.plus(lengths.past, last, "chunks/last_position")
        condition = visible(g, plan, Lengths(size, lengths.keys, offset, "chunk", lengths.key_symbol), None)
    return Chunks(size, count, last, condition)


def attend_chunks(
    g: Emitter, plan: GraphPlan, inputs: parts.AttentionInputs, heads: parts.Heads, chunks: Chunks
) -> Value:
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
        return parts.merge_heads(
            body, parts.weighted_heads(body, plan, parts.Heads(rows, k, v, heads.sinks), window, seen, condition)
        )

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


def attend_by_head(
    g: Emitter, plan: GraphPlan, inputs: parts.AttentionInputs, heads: parts.Heads, chunks: Chunks
) -> Value:
    """Return the heads side by side, ``(batch, queries, H * D)``, from a loop over key heads, each over chunks.

    A turn has the query heads that share a key head, and only their part of the tables.
    """
    spec = plan.spec
    group = spec.num_heads // spec.num_kv_heads
    of_turn = replace(plan, spec=replace(spec, num_heads=group, num_kv_heads=1))

    def turn(body: Emitter, iteration: Value) -> Value:
        def take(x: Value, axis: int, bounds: HeadRange, name: str) -> Value:
            return body.cut(x, axis, bounds.first, bounds.stop, bounds.size, name)

        key_head = _range(body, iteration, 1, "key_head")
        query_heads = key_head if group == 1 else _range(body, iteration, group, "query_heads")
        own = parts.Heads(
            take(heads.queries, 1, query_heads, "head/queries"),
            take(heads.keys, 1, key_head, "head/keys"),
            take(heads.values, 1, key_head, "head/values"),
            None if heads.sinks is None else take(heads.sinks, 0, query_heads, "head/sinks"),
        )
        mask = inputs.mask
        if mask is not None:  # a mask for all heads is not split
            final = body.minus(body.length(mask, 1, "head/mask_heads"), 1, "head/mask_final")
            first = body.index("Min", [query_heads.first, body.dim(final)], "head/mask_first")
            mask = body.cut(mask, 1, first, query_heads.stop, "mask_head", "head/mask")
        own_tables = None if spec.shared_table else query_heads
        return attend_chunks(body, of_turn, replace(inputs, mask=mask, heads=own_tables), own, chunks)

    count = g.constant(spec.num_kv_heads)
    turns = g.loop(count, "heads", turn)
    batch, length = heads.queries.shape[0], inputs.lengths.query_symbol
    width = group * spec.head_dim
    # The reshape gives the shape to onnx's reference evaluator, which joins a loop's results along their first axis.
    stack = g.dims("heads/by_turn_shape", spec.num_kv_heads, -1, inputs.lengths.queries, width)
    stacked = g.compute("Reshape", [turns, stack], "heads/by_turn", (spec.num_kv_heads, batch, length, width))
    turned = g.transpose(stacked, "heads/turned", [1, 2, 0, 3])
    whole = (batch, length, spec.num_heads * spec.head_dim)
    return g.compute("Reshape", [turned, g.constant([0, 0, whole[2]])], "heads/joined", whole)


def _range(g: Emitter, iteration: Value, size: int, name: str) -> HeadRange:
    first = g.index("Mul", [iteration, g.constant([size])], f"head/first_{name}")
    return HeadRange(first, g.dim(g.plus(first, size, f"head/after_{name}")), size)


def guarded(g: Emitter, plan: GraphPlan, lengths: Lengths) -> Lengths:
    """Return lengths whose computation fails if the input exceeds the limited end of a table."""
    queries, keys, past = lengths.queries, lengths.keys, lengths.past
    same = queries == keys
    if plan.left.past_edge == "limited":
        if plan.one_sided:
            keys = at_most(g, keys, plan.left.rows + 1, "keys", plan.reach)
            queries = keys if same else g.minus(keys, past, "guard/queries_left")
        else:
            reach = at_most(g, g.plus(queries, past, "guard/reach"), plan.left.rows + 1, "queries", plan.reach)
            queries = g.minus(reach, past, "guard/queries_left")
            keys = queries if same else keys
    if plan.right.past_edge == "limited":
        keys = at_most(g, keys, g.plus(plan.right.rows + 1, past, "guard/keys_limit"), "keys", plan.reach)
        queries = keys if same else queries
    return Lengths(queries, keys, past, lengths.query_symbol, lengths.key_symbol)


def at_most(g: Emitter, length: Dim, limit: Dim, name: str, reach: str) -> Value:
    """Return ``length``, as the last number of two ramps ``0 … length``, one of which ends at ``limit``."""
    after = g.plus(length, 1, f"guard/{name}_after")
    symbol = f"{name}_and_1"
    if isinstance(limit, int):
        stored = g.constant(np.arange(limit + 1, dtype=np.int64))
    else:
        stored = _ramp(g, g.plus(limit, 1, f"guard/{name}_limit_after"), f"{name}_limit", f"{name}_limit_and_1")
    cut = g.index("Slice", [stored, g.constant([0]), g.dim(after)], f"guard/{name}_stored", (symbol,))
    counted = _ramp(g, after, name, symbol)
    # A Max of unequal lengths fails in every runtime; OpenVINO removes a small reshape that should fail.
    both = g.index("Max", [cut, counted], f"guard/{name}_both{reach}", (symbol,))
    return g.index("Gather", [both, g.constant([-1])], f"guard/{name}", axis=0)


def _ramp(g: Emitter, end: Dim, name: str, symbol: str) -> Value:
    return g.range((0, ""), (end, f"guard/{name}_end"), f"guard/{name}_counted", symbol)


def attend(g: Emitter, plan: GraphPlan, inputs: parts.AttentionInputs) -> tuple[Value, parts.Present | None]:
    """Return the heads, laid out like the queries, and the presents if there is a past."""
    if plan.looped:
        return (_by_length if plan.profile.branches else _in_chunks)(g, plan, inputs)
    queries = parts.split_heads(g, inputs.projected.q, plan.spec.num_heads, plan.spec.head_dim, "q")
    window = TableWindow(g, plan, inputs.tables, inputs.lengths)
    if plan.fused:
        bias = parts.relative_logits(g, plan, queries, window, inputs.lengths)
        condition = _condition(g, plan, inputs)
        bias = parts.hide(g, plan, bias, condition)
        heads, present = parts.attend_fused(g, plan, inputs, queries, bias)
        return parts.without_dead_rows(g, plan, heads, condition), present
    condition = _condition(g, plan, inputs)
    keys, values, present = parts.keys_and_values(g, plan, inputs.projected, inputs.past)
    heads = parts.weighted_heads(
        g, plan, parts.Heads(queries, keys, values, inputs.sinks), window, inputs.lengths, condition
    )
    return parts.as_given(g, inputs.projected, heads), present


def _by_length(g: Emitter, plan: GraphPlan, inputs: parts.AttentionInputs) -> tuple[Value, parts.Present | None]:
    """Attention in chunks, or at once for a single chunk of queries, for which a loop would cost more than it saves."""

    def results(heads: Value, present: parts.Present | None) -> list[Value]:
        return [heads, *(present or ())]

    compared = [g.dim(inputs.lengths.queries), g.constant([plan.chunk_size])]
    one_chunk = g.index("LessOrEqual", compared, "chunks/one_is_enough", (1,), BOOL)
    heads = Value(g.path("heads"), inputs.projected.q.shape, g.dtype)
    present = None if inputs.past is None else parts.present_values(g, plan, inputs.past)
    g.choose(
        one_chunk, "attention_by_length", results(heads, present),
        short=lambda g: results(*attend(g, replace(plan, looped=False, guarded=False), inputs)),
        long=lambda g: results(*_in_chunks(g, plan, inputs)),
    )  # fmt: skip
    return heads, present


def _in_chunks(g: Emitter, plan: GraphPlan, inputs: parts.AttentionInputs) -> tuple[Value, parts.Present | None]:
    count, width, projected = plan.spec.num_heads, plan.spec.head_dim, inputs.projected
    queries = parts.split_heads(g, projected.q, count, width, "q")
    keys, values, present = parts.keys_and_values(g, plan, projected, inputs.past)
    inputs = replace(inputs, lengths=guarded(g, plan, inputs.lengths))
    form = attend_by_head if plan.profile.by_head and plan.spec.num_kv_heads > 1 else attend_chunks
    heads = form(g, plan, inputs, parts.Heads(queries, keys, values, inputs.sinks), chunks_of(g, plan, inputs))
    if len(projected.q.shape) == 4:
        heads = parts.split_heads(g, heads, count, width, "out")
    return heads, present


def _condition(g: Emitter, plan: GraphPlan, inputs: parts.AttentionInputs) -> Value | None:
    if inputs.condition is not None:
        return inputs.condition
    return visible(g, plan, inputs.lengths, inputs.mask, inputs.segments)
