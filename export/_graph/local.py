"""Music Transformer's local attention: blocks folded into the batch, each with the block before it."""

from __future__ import annotations

from relskew_core.export._graph.attend import attend
from relskew_core.export._graph.emitter import BOOL, INT64_MAX, Dim, Emitter, Value
from relskew_core.export._graph.parts import AttentionInputs, Projected, merge_heads, split_heads
from relskew_core.export._graph.window import Lengths
from relskew_core.export._plan import GraphPlan


def attend_blocks(g: Emitter, plan: GraphPlan, inputs: AttentionInputs) -> Value:
    """Return the heads, laid out as the queries came; keys are cut into blocks ``2N`` wide.

    The length is filled up to a multiple of ``N`` with zeros, which only the queries of the filling see.
    """
    size = plan.spec.block_size or 0
    projected, length = inputs.projected, inputs.lengths.queries
    apart = len(projected.q.shape) == 4
    q, k, v = (
        merge_heads(g, x, f"{name}/side_by_side") if apart else x
        for x, name in ((projected.q, "q"), (projected.k, "k"), (projected.v, "v"))
    )
    zero = g.constant([0], g.dtype)
    negative = g.index("Neg", [g.dim(length)], "blocks/negative_length")
    fill = g.index("Mod", [negative, g.constant([size])], "blocks/fill")
    batch = g.length(q, 0, "batch")

    def filled(x: Value, name: str, *, front: bool) -> Value:
        width = int(x.shape[2])
        end_shape = g.dims(f"blocks/{name}_end_shape", batch, fill, width)
        pieces = [x, g.compute("Expand", [zero, end_shape], f"blocks/{name}_end", (x.shape[0], "fill", width))]
        if front:
            front_shape = g.dims(f"blocks/{name}_front_shape", batch, size, width)
            start = g.compute("Expand", [zero, front_shape], f"blocks/{name}_front", (x.shape[0], size, width))
            pieces.insert(0, start)
        # Runtimes share buffers between tensors of equal symbolic shapes: unequal lengths need unequal symbols.
        length = "filled_length_and_block" if front else "filled_length"
        return g.compute("Concat", pieces, f"blocks/{name}_filled", (x.shape[0], length, width), axis=1)

    both_width = int(k.shape[2]) + int(v.shape[2])
    both = g.compute("Concat", [k, v], "blocks/keys_values", (*k.shape[:2], both_width), axis=2)
    both = filled(both, "keys_values", front=True)
    cut = g.compute(
        "Reshape", [both, g.constant([0, -1, size, both_width])], "blocks/cut", (k.shape[0], "cuts", size, both_width)
    )
    shape = (k.shape[0], "blocks", size, both_width)
    axis = g.constant([1])
    previous = g.compute("Slice", [cut, g.constant([0]), g.constant([-1]), axis], "blocks/previous", shape)
    own = g.compute("Slice", [cut, g.constant([1]), g.constant([INT64_MAX]), axis], "blocks/own", shape)
    pairs = g.compute("Concat", [previous, own], "blocks/pairs", (*shape[:2], 2 * size, both_width), axis=2)
    folded_shape = ("batch_blocks", 2 * size, both_width)
    folded = g.compute("Reshape", [pairs, g.constant([-1, 2 * size, both_width])], "blocks/folded", folded_shape)

    def part(start: int, end: int, name: str) -> Value:
        bounds = [g.constant([start]), g.constant([end]), g.constant([2])]
        return g.compute("Slice", [folded, *bounds], f"blocks/{name}", (*folded_shape[:2], end - start))

    k_width, q_width = int(k.shape[2]), int(q.shape[2])
    q_filled = filled(q, "queries", front=False)
    queries = g.compute(
        "Reshape", [q_filled, g.constant([-1, size, q_width])], "blocks/queries", ("batch_blocks", size, q_width)
    )
    blocks = Projected(queries, part(0, k_width, "keys"), part(k_width, both_width, "values"))
    lengths = Lengths(size, 2 * size, size, size, 2 * size)
    condition = _condition(g, plan, batch, fill, length)
    heads, _ = attend(g, plan, AttentionInputs(blocks, inputs.tables, lengths, condition=condition))
    unfold = g.dims("blocks/unfold_shape", batch, -1, q_width)
    whole = g.compute("Reshape", [heads, unfold], "blocks/unfolded", (q.shape[0], "filled_length", q_width))
    bounds = [g.constant([0]), g.dim(length), g.constant([1])]
    trimmed = g.compute("Slice", [whole, *bounds], "blocks/trimmed", (*q.shape[:2], q_width))
    return split_heads(g, trimmed, plan.spec.num_heads, plan.spec.head_dim, "out") if apart else trimmed


def _condition(g: Emitter, plan: GraphPlan, batch: Dim, fill: Value, length: Dim) -> Value:
    """Within a block causal and no further than the window; the first block has none before it."""
    size = plan.spec.block_size or 0
    keys = g.constant(list(range(-size, size)))
    queries = g.constant([[row] for row in range(size)])
    square = (size, 2 * size)
    inside = g.compute("LessOrEqual", [keys, queries], "visible/causal", square, BOOL)
    if plan.left.rows < 2 * size - 1 and plan.left.past_edge == "hidden":
        first = g.constant([[row - plan.left.rows] for row in range(size)])
        reached = g.compute("GreaterOrEqual", [keys, first], "visible/window", square, BOOL)
        inside = g.compute("And", [inside, reached], "visible/inside", square, BOOL)
    whole = g.plus(length, fill, "blocks/filled_length")
    count = g.index("Div", [g.dim(whole), g.constant([size])], "blocks/count")
    limits = [g.constant(0), g.scalar(count, "blocks/count_scalar"), g.constant(1)]
    numbers = g.index("Range", limits, "blocks/numbers", ("blocks",))
    column = g.index("Unsqueeze", [numbers, g.constant([1])], "blocks/number_column", ("blocks", 1))
    least = g.constant([1] * size + [0] * size)
    exists = g.compute("GreaterOrEqual", [column, least], "visible/exists", ("blocks", 2 * size), BOOL)
    shape = g.dims("visible/exists_shape", batch, count, 2 * size)
    spread = g.compute("Expand", [exists, shape], "visible/each", ("batch", "blocks", 2 * size), BOOL)
    folded = g.compute(
        "Reshape", [spread, g.constant([-1, 1, 1, 2 * size])], "visible/folded", ("batch_blocks", 1, 1, 2 * size), BOOL
    )
    return g.compute("And", [inside, folded], "visible/blocks", ("batch_blocks", 1, *square), BOOL)
