"""Local attention: blocks folded into the batch, each with the preceding blocks that it sees."""

from __future__ import annotations

from relskew_core.export._form.plan import GraphPlan
from relskew_core.export._nodes.attend import attend
from relskew_core.export._nodes.emitter import BOOL, INT64_MAX, Dim, Emitter, Shape, Value
from relskew_core.export._nodes.parts import AttentionInputs, Projected, merge_heads, split_heads
from relskew_core.export._nodes.visible import Segments, of_own_segment
from relskew_core.export._nodes.window import Lengths


def attend_blocks(g: Emitter, plan: GraphPlan, inputs: AttentionInputs) -> Value:
    """Return the heads, laid out like the queries.

    The length is filled up to a multiple of the block size with zeros, which only the queries of the filling see. An
    input shorter than a block is one block of that length.
    """
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

    k_width, q_width = int(k.shape[2]), int(q.shape[2])
    queries = blocks.of_queries(q, "queries")
    keys = g.cut(folded, 2, 0, k_width, k_width, "blocks/keys")
    values = g.cut(folded, 2, k_width, both_width, both_width - k_width, "blocks/values")
    in_blocks = Projected(queries, keys, values)
    condition = blocks.condition(inputs.segments)
    given = AttentionInputs(in_blocks, inputs.tables, blocks.lengths, condition=condition, sinks=inputs.sinks)
    heads, _ = attend(g, plan, given)
    unfold = g.dims("blocks/unfold_shape", -1, blocks.filled, q_width)
    whole = g.compute("Reshape", [heads, unfold], "blocks/unfolded", (q.shape[0], "filled_length", q_width))
    trimmed = g.cut(whole, 1, 0, length, q.shape[1], "blocks/trimmed")
    return split_heads(g, trimmed, plan.spec.num_heads, plan.spec.head_dim, "out") if apart else trimmed


class _Blocks:
    """A length cut into blocks: ``(batch, length, width)`` to ``(batch * blocks, …, width)``."""

    def __init__(self, g: Emitter, plan: GraphPlan, like: Value, length: Dim) -> None:
        self._g, self._plan, self._length = g, plan, length
        self._before = plan.blocks_before
        longest = g.constant([plan.spec.block_size or 0])
        self._size = g.index("Min", [g.dim(length), longest], "blocks/size")
        negative = g.index("Neg", [g.dim(length)], "blocks/negative_length")
        self._fill = g.index("Mod", [negative, self._size], "blocks/fill")
        self.filled = g.plus(length, self._fill, "blocks/filled_length")
        self._count = g.index("Div", [g.dim(self.filled), self._size], "blocks/count")
        self.batch = g.length(like, 0, "batch")
        self._front = self._wide = self._size
        self._wide_symbol = "block"
        if self._before != 1:
            self._front = g.index("Mul", [self._size, g.constant([self._before])], "blocks/length_before")
        if self._before:
            self._wide_symbol = "block_keys"
            self._wide = g.index("Add", [self._front, self._size], "blocks/block_keys")
        past: Dim = self._front if self._before else 0
        self.lengths = Lengths(self._size, self._wide, past, "block", self._wide_symbol)

    def of_queries(self, x: Value, name: str) -> Value:
        g, width = self._g, int(x.shape[2])
        filled = self._filled(x, name, front=False)
        shape = g.dims(f"blocks/{name}_shape", -1, self._size, width)
        return g.compute("Reshape", [filled, shape], f"blocks/{name}", ("batch_blocks", "block", width), x.dtype)

    def of_keys(self, x: Value, name: str) -> Value:
        """Return each block with the preceding blocks that its queries see; zeros before the first one."""
        g, before, width = self._g, self._before, int(x.shape[2])
        if not before:
            return self.of_queries(x, f"{name}_folded")
        filled = self._filled(x, name, front=True)
        # There is one cut for each block and for each block before the first; a reshape cannot infer it for an empty
        # batch.
        all_cuts = g.plus(self._count, before, "blocks/count_and_before")
        cut_shape = g.dims(f"blocks/{name}_cut_shape", 0, all_cuts, self._size, width)
        shape: Shape = (x.shape[0], "blocks", "block", width)
        cuts = (shape[0], f"blocks_and_{before}", *shape[2:])
        cut = g.compute("Reshape", [filled, cut_shape], f"blocks/{name}_cut", cuts, x.dtype)
        pieces = [
            g.cut(cut, 1, before - back, -back or INT64_MAX, shape[1], f"blocks/{name}_{back}_before")
            for back in range(before, -1, -1)
        ]
        wide = (*shape[:2], self._wide_symbol, width)
        joined = g.compute("Concat", pieces, f"blocks/{name}_joined", wide, x.dtype, axis=2)
        folded = g.dims(f"blocks/{name}_folded_shape", -1, self._wide, width)
        whole = ("batch_blocks", self._wide_symbol, width)
        return g.compute("Reshape", [joined, folded], f"blocks/{name}_folded", whole, x.dtype)

    def _filled(self, x: Value, name: str, *, front: bool) -> Value:
        g, width, pieces = self._g, int(x.shape[2]), [x]
        zero = g.constant([0], x.dtype)
        for place, length in (("end", self._fill), ("front", self._front)):
            if place == "end" or front:
                shape = g.dims(f"blocks/{name}_{place}_shape", self.batch, length, width)
                piece_shape = (x.shape[0], f"{place}_filling", width)
                piece = g.compute("Expand", [zero, shape], f"blocks/{name}_{place}", piece_shape, x.dtype)
                pieces = [*pieces, piece] if place == "end" else [piece, *pieces]
        # Runtimes share buffers between tensors of equal symbolic shapes: unequal lengths need unequal symbols.
        symbol = "filled_length_and_front" if front else "filled_length"
        return g.compute("Concat", pieces, f"blocks/{name}_filled", (x.shape[0], symbol, width), x.dtype, axis=1)

    def condition(self, segments: Segments | None) -> Value:
        """Return the keys that a block's queries see, ``(batch * blocks, 1, queries, keys)``."""
        g = self._g
        keys = self._range("key", self._wide, self._wide_symbol)
        whole, shape = self._exists(keys), ("batch_blocks", 1, "block", self._wide_symbol)
        if self._plan.one_sided:
            inside = self._causal(keys)
            whole = g.compute("And", [inside, whole], "visible/blocks", shape, BOOL)
        if segments is None:
            return whole
        own = []
        for x, name, fold in ((segments.queries, "queries", self.of_queries), (segments.keys, "keys", self.of_keys)):
            column = g.index("Unsqueeze", [x, g.constant([2])], f"segments/{name}_column", (*x.shape, 1))
            folded = fold(column, f"segments_of_{name}")
            own.append(g.index("Squeeze", [folded, g.constant([2])], f"segments/{name}_folded", folded.shape[:2]))
        same = of_own_segment(g, Segments(*own))
        return g.compute("And", [whole, same], "visible/blocks_and_segments", shape, BOOL)

    def _range(self, name: str, count: Dim, symbol: str) -> Value:
        return self._g.range((0, ""), (count, f"blocks/{name}_count"), f"blocks/{name}_numbers", symbol)

    def _causal(self, keys: Value) -> Value:
        g, queries = self._g, keys
        if self._before:
            bounds = [self._front, g.constant([INT64_MAX])]
            queries = g.index("Slice", [keys, *bounds], "blocks/query_numbers", ("block",))
        column = g.index("Unsqueeze", [queries, g.constant([1])], "blocks/query_column", ("block", 1))
        return g.compute("LessOrEqual", [keys, column], "visible/causal", ("block", self._wide_symbol), BOOL)

    def _exists(self, keys: Value) -> Value:
        """Return which keys of a block exist, ``(batch * blocks, 1, 1, keys)``: none before the first block.

        What fills up the last block is hidden by causality already, or here.
        """
        g = self._g
        numbers = self._range("block", self._count, "blocks")
        firsts = g.index("Mul", [numbers, self._size], "blocks/firsts", ("blocks",))
        if self._before:
            firsts = g.index("Sub", [firsts, self._front], "blocks/first_keys", ("blocks",))
        column = g.index("Unsqueeze", [firsts, g.constant([1])], "blocks/first_column", ("blocks", 1))
        shape: Shape = ("blocks", self._wide_symbol)
        positions = g.index("Add", [column, keys], "blocks/key_positions", shape)
        exists = g.compute("GreaterOrEqual", [positions, g.constant([0])], "visible/exists", shape, BOOL)
        if not self._plan.one_sided:
            there = g.compute("Less", [positions, g.dim(self._length)], "visible/there", shape, BOOL)
            exists = g.compute("And", [exists, there], "visible/exists_there", shape, BOOL)
        each = g.dims("visible/exists_shape", self.batch, self._count, self._wide)
        spread = g.compute("Expand", [exists, each], "visible/each", ("batch", *shape), BOOL)
        folded = g.dims("visible/folded_shape", -1, 1, 1, self._wide)
        return g.compute("Reshape", [spread, folded], "visible/folded", ("batch_blocks", 1, 1, shape[1]), BOOL)
