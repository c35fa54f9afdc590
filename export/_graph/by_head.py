"""Long sequences, one key head after the other, so that the data of a turn stay in the cache of a core."""

from __future__ import annotations

from dataclasses import replace

from relskew_core.export._graph.chunks import Chunks, attend_chunks
from relskew_core.export._graph.emitter import Emitter, Value
from relskew_core.export._graph.parts import AttentionInputs, Heads
from relskew_core.export._graph.window import HeadRange
from relskew_core.export._plan import GraphPlan


def attend_by_head(g: Emitter, plan: GraphPlan, inputs: AttentionInputs, heads: Heads, chunks: Chunks) -> Value:
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
        own = Heads(
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
