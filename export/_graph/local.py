"""Local attention: blocks folded into the batch, each with the blocks before it that it sees."""

from __future__ import annotations

from relskew_core.export._graph.attend import attend
from relskew_core.export._graph.emitter import BOOL, INT64_MAX, Dim, Emitter, Value
from relskew_core.export._graph.parts import AttentionInputs, Projected, merge_heads, split_heads
from relskew_core.export._graph.visible import Segments, of_own_segment
from relskew_core.export._graph.window import Lengths
from relskew_core.export._plan import GraphPlan


def attend_blocks(g: Emitter, plan: GraphPlan, inputs: AttentionInputs) -> Value:
    """Return the heads, laid out as the queries came.

    The length is filled up to a multiple of the block size with zeros, which only the queries of the filling see.
    """
    size, wide = plan.spec.block_size or 0, plan.block_keys
    projected, length = inputs.projected, inputs.lengths.queries
    apart = len(projected.q.shape) == 4
    q, k, v = (
        merge_heads(g, x, f"{name}/side_by_side") if apart else x
        for x, name in ((projected.q, "q"), (projected.k, "k"), (projected.v, "v"))
    )
    blocks = _Blocks(g, plan, q, length)
    both_width = int(k.shape[2]) + int(v.shape[2])
    both = g.compute("Concat", [k, v], "blocks/keys_values", (*k.shape[:2], both_width), axis=2)
    folded = blocks.of_keys(both, "keys_values")

    def part(start: int, end: int, name: str) -> Value:
        bounds = [g.constant([start]), g.constant([end]), g.constant([2])]
        return g.compute("Slice", [folded, *bounds], f"blocks/{name}", (*folded.shape[:2], end - start))

    k_width, q_width = int(k.shape[2]), int(q.shape[2])
    queries = blocks.of_queries(q, "queries")
    in_blocks = Projected(queries, part(0, k_width, "keys"), part(k_width, both_width, "values"))
    lengths = Lengths(size, wide, wide - size, size, wide)
    condition = blocks.condition(inputs.segments)
    given = AttentionInputs(in_blocks, inputs.tables, lengths, condition=condition, sinks=inputs.sinks)
    heads, _ = attend(g, plan, given)
    unfold = g.dims("blocks/unfold_shape", blocks.batch, -1, q_width)
    whole = g.compute("Reshape", [heads, unfold], "blocks/unfolded", (q.shape[0], "filled_length", q_width))
    bounds = [g.constant([0]), g.dim(length), g.constant([1])]
    trimmed = g.compute("Slice", [whole, *bounds], "blocks/trimmed", (*q.shape[:2], q_width))
    return split_heads(g, trimmed, plan.spec.num_heads, plan.spec.head_dim, "out") if apart else trimmed


class _Blocks:
    """A length cut into blocks: ``(batch, length, width)`` to ``(batch * blocks, …, width)``."""

    def __init__(self, g: Emitter, plan: GraphPlan, like: Value, length: Dim) -> None:
        self._g, self._plan, self._length = g, plan, length
        self._size, self._wide = plan.spec.block_size or 0, plan.block_keys
        negative = g.index("Neg", [g.dim(length)], "blocks/negative_length")
        self._fill = g.index("Mod", [negative, g.constant([self._size])], "blocks/fill")
        self.batch = g.length(like, 0, "batch")

    def of_queries(self, x: Value, name: str) -> Value:
        """Return the blocks of a tensor."""
        filled, shape = self._filled(x, name, front=False), ("batch_blocks", self._size, int(x.shape[2]))
        constant = self._g.constant([-1, *shape[1:]])
        return self._g.compute("Reshape", [filled, constant], f"blocks/{name}", shape, x.dtype)

    def of_keys(self, x: Value, name: str) -> Value:
        """Return each block with the blocks before it that its queries see; zeros before the first one."""
        g, size, width = self._g, self._size, int(x.shape[2])
        before = self._wide // size - 1
        filled = self._filled(x, name, front=before > 0)
        cuts = "blocks" if before == 0 else f"blocks_and_{before}"
        cut_shape = (x.shape[0], cuts, size, width)
        constant = g.constant([0, -1, size, width])
        cut = g.compute("Reshape", [filled, constant], f"blocks/{name}_cut", cut_shape, x.dtype)
        pieces = [cut] if before == 0 else []
        shape = (x.shape[0], "blocks", size, width)
        for first in range(before + 1 if before else 0):
            end = INT64_MAX if first == before else first - before
            bounds = [g.constant([first]), g.constant([end]), g.constant([1])]
            pieces.append(g.compute("Slice", [cut, *bounds], f"blocks/{name}_{before - first}_before", shape, x.dtype))
        joined = pieces[0]
        if before:
            wide = (*shape[:2], self._wide, width)
            joined = g.compute("Concat", pieces, f"blocks/{name}_joined", wide, x.dtype, axis=2)
        folded = ("batch_blocks", self._wide, width)
        return g.compute("Reshape", [joined, g.constant([-1, *folded[1:]])], f"blocks/{name}_folded", folded, x.dtype)

    def _filled(self, x: Value, name: str, *, front: bool) -> Value:
        g, width, pieces = self._g, int(x.shape[2]), [x]
        zero, front_length = g.constant([0], x.dtype), self._wide - self._size
        for place, length, symbol in (("end", self._fill, "fill"), ("front", front_length, front_length)):
            if place == "end" or front:
                shape = g.dims(f"blocks/{name}_{place}_shape", self.batch, length, width)
                piece_shape = (x.shape[0], symbol, width)
                piece = g.compute("Expand", [zero, shape], f"blocks/{name}_{place}", piece_shape, x.dtype)
                pieces = [*pieces, piece] if place == "end" else [piece, *pieces]
        # Runtimes share buffers between tensors of equal symbolic shapes: unequal lengths need unequal symbols.
        symbol = f"filled_length_and_{front_length}" if front else "filled_length"
        return g.compute("Concat", pieces, f"blocks/{name}_filled", (x.shape[0], symbol, width), x.dtype, axis=1)

    def condition(self, segments: Segments | None) -> Value:
        """Return which keys a block's queries see, ``(batch * blocks, 1, queries, keys)``."""
        g, size, wide = self._g, self._size, self._wide
        exists = self._exists()
        inside = self._inside()
        shape = ("batch_blocks", 1, size, wide)
        whole = exists if inside is None else g.compute("And", [inside, exists], "visible/blocks", shape, BOOL)
        if segments is None:
            return whole
        own = []
        for x, name, fold in ((segments.queries, "queries", self.of_queries), (segments.keys, "keys", self.of_keys)):
            column = g.index("Unsqueeze", [x, g.constant([2])], f"segments/{name}_column", (*x.shape, 1))
            folded = fold(column, f"segments_of_{name}")
            own.append(g.index("Squeeze", [folded, g.constant([2])], f"segments/{name}_folded", folded.shape[:2]))
        same = of_own_segment(g, Segments(*own))
        return g.compute("And", [whole, same], "visible/blocks_and_segments", shape, BOOL)

    def _inside(self) -> Value | None:
        """Return which keys a block's queries see where all exist, ``(queries, keys)``; ``None`` if all of them."""
        g, plan, size = self._g, self._plan, self._size
        keys = g.constant(list(range(size - self._wide, size)))
        square = (size, self._wide)
        conditions = []

        def compare(op_type: str, shift: int, name: str) -> None:
            bounds = g.constant([[row + shift] for row in range(size)])
            conditions.append(g.compute(op_type, [keys, bounds], f"visible/{name}", square, BOOL))

        if plan.one_sided:
            compare("LessOrEqual", 0, "causal")
        if plan.left.past_edge == "hidden" and plan.left.rows < self._wide - 1:
            compare("GreaterOrEqual", -plan.left.rows, "window")
        if plan.right.past_edge == "hidden" and not plan.one_sided and plan.right.rows < size - 1:
            compare("LessOrEqual", plan.right.rows, "window_ahead")
        whole = None
        for index, condition in enumerate(conditions):
            whole = (
                condition
                if whole is None
                else g.compute("And", [whole, condition], f"visible/inside_{index}", square, BOOL)
            )
        return whole

    def _exists(self) -> Value:
        """Return which of a block's keys there are, ``(batch * blocks, 1, 1, keys)``: none before the first block.

        What fills up the last block is hidden by causality already, or here.
        """
        g, size, wide = self._g, self._size, self._wide
        whole = g.plus(self._length, self._fill, "blocks/filled_length")
        count = g.index("Div", [g.dim(whole), g.constant([size])], "blocks/count")
        limits = [g.constant(0), g.scalar(count, "blocks/count_scalar"), g.constant(1)]
        numbers = g.index("Range", limits, "blocks/numbers", ("blocks",))
        column = g.index("Unsqueeze", [numbers, g.constant([1])], "blocks/number_column", ("blocks", 1))
        shape = ("blocks", wide)
        before = wide // size - 1
        least = g.constant([before - key // size for key in range(wide)])
        exists = g.compute("GreaterOrEqual", [column, least], "visible/exists", shape, BOOL)
        if not self._plan.one_sided:
            first = g.index("Mul", [column, g.constant([[size]])], "blocks/first_position", ("blocks", 1))
            places = g.constant(list(range(size - wide, size)))
            positions = g.index("Add", [first, places], "blocks/key_positions", shape)
            there = g.compute("Less", [positions, g.dim(self._length)], "visible/there", shape, BOOL)
            exists = g.compute("And", [exists, there], "visible/exists_there", shape, BOOL)
        each = g.dims("visible/exists_shape", self.batch, count, wide)
        spread = g.compute("Expand", [exists, each], "visible/each", ("batch", "blocks", wide), BOOL)
        folded = ("batch_blocks", 1, 1, wide)
        return g.compute("Reshape", [spread, g.constant([-1, *folded[1:]])], "visible/folded", folded, BOOL)
