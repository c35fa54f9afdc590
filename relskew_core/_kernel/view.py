"""The part of a call that one chunk of queries needs, and the algebra of its logits and weights.

Global, causal, windowed, local, cross and cached attention differ only in the keys that a chunk may see and in the
table columns that belong to them. The algebra is the same wherever a chunk is cut: by slices here, and at traced
starts in a loop that is compiled once for all chunks.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from relskew_core._array.namespace import device
from relskew_core._array.softmax import joint, of_rank, same_rank, softmax
from relskew_core._array.typing import Array, Namespace
from relskew_core._kernel import dropout, key_side
from relskew_core._kernel.by_value import LookUpChunk, looked_up
from relskew_core._kernel.call import Operands, Options, has_tables, kind_of_table
from relskew_core._kernel.chunk import Chunk
from relskew_core._positions.table import Table

if TYPE_CHECKING:
    from relskew_core._kernel.sums import Sums


@dataclass(frozen=True, slots=True)
class Tables:
    """The tables of a call by columns, extended once to all relative positions that its chunks use."""

    rel_k: Table | None
    rel_v: Table | None
    rel_bias: Table | None
    key_table: Table | None  # by query position − key position

    @classmethod
    def of(
        cls,
        operands: Operands,
        options: Options,
        extend: Callable[[Table], Table],
        extend_mirrored: Callable[[Table], Table],
        *,
        xp: Namespace,
    ) -> Tables:
        """Transpose the tables into columns, and extend them."""

        def table(name: str) -> Table | None:
            if getattr(operands, name) is None:
                return None
            rows = kind_of_table(name).with_width(getattr(operands, name))
            return extend(Table(xp.matrix_transpose(rows), options.span.left, options.span.beyond))

        keys = operands.key_table
        of_keys = None if keys is None else extend_mirrored(key_side.mirrored(keys, options.span, xp=xp))
        return cls(table("rel_k"), table("rel_v"), table("rel_bias"), of_keys)

    @classmethod
    def covering(cls, operands: Operands, options: Options, laid: Sequence[Chunk], *, xp: Namespace) -> Tables:
        """Return the tables of a call in these chunks, extended if that is cheap."""
        laid = [chunk for chunk in laid if chunk.first < chunk.end]

        def over(table: Table, windows: Sequence[Chunk]) -> Table:
            low, high = min([each.low for each in windows] or [0]), max([each.high for each in windows] or [0])
            return table.covering(low, high, xp=xp)

        def over_mirrored(table: Table) -> Table:
            return over(table, [block for chunk in laid for block in key_side.blocks(chunk, options, xp=xp)])

        return cls.of(operands, options, lambda table: over(table, laid), over_mirrored, xp=xp)

    def gradient(self, name: str, columns: Array, *, xp: Namespace) -> Array:
        """Convert the gradient of a table's columns to that of the caller's table."""
        rows: Array = getattr(self, name).gradient(columns, xp=xp)
        if name == "key_table":  # its columns descend
            return xp.flip(rows, axis=-2)
        return kind_of_table(name).without_width(rows)


class View:
    """The part of a call that one chunk needs, and what it makes of it."""

    def __init__(self, operands: Operands, options: Options, tables: Tables, chunk: Chunk, *, xp: Namespace) -> None:
        self.operands, self.options, self.tables, self.xp = operands, options, tables, xp
        self.chunk = chunk
        if options.visibility.by_value and has_tables(operands):
            positions = self.labels(operands.q_positions, operands.k_positions)
            self.chunk = looked_up(chunk, *positions, options.span, xp=xp)
        self.visible = self._visible()

    def queries(self, x: Array, axis: int = -2) -> Array:
        """Cut an array to the chunk's queries, along its last axis or the one before it."""
        queries = slice(self.chunk.start, self.chunk.stop)
        return x[..., queries] if axis == -1 else x[..., queries, :]

    def keys(self, x: Array, axis: int = -2) -> Array:
        """Cut an array to the chunk's keys, along its last axis or the one before it."""
        keys = slice(self.chunk.first, self.chunk.end)
        return x[..., keys] if axis == -1 else x[..., keys, :]

    def fresh(self, x: Array) -> Array:
        """Cut (..., queries, D) to the chunk, with zeros for queries that an earlier chunk has."""
        return self.queries(x)

    def seen(self, x: Array) -> Array:
        """Cut (..., keys, D) to the chunk, with zeros for keys that none of its queries may see."""
        x, visible = self.keys(x), self.visible
        if visible is None or visible.ndim == 2:  # one pattern for all: every key of the chunk's range is visible
            return x
        return self.xp.where(self.xp.any(visible, axis=-2)[..., None], x, 0.0)

    def table(self, name: str) -> Table:
        """Return a table with the columns of the chunk's window."""
        return getattr(self.tables, name)

    def labels(self, queries: Array, keys: Array) -> tuple[Array, Array]:
        """Return integers of the chunk's queries and keys, with axes for heads, queries and keys."""
        return same_rank(self.queries(queries, -1)[..., None, :, None], self.keys(keys, -1)[..., None, None, :])

    def of_mask(self, mask: Array) -> Array:
        """Cut a mask to the chunk's queries and keys, whole along axes that broadcast."""
        mask = mask if mask.shape[-2] == 1 else self.queries(mask)
        return mask if mask.shape[-1] == 1 else self.keys(mask, -1)

    def sees(self) -> Array | None:
        """Return which keys the queries may see by the pattern, (..., n, m), ``None`` if all of them."""
        pattern, chunk, operands = self.options.visibility, self.chunk, self.operands
        if pattern.by_value:
            return pattern.sees(*self.labels(operands.q_positions, operands.k_positions), xp=self.xp)
        place = device(operands.q)
        return pattern.mask(chunk.start, chunk.stop, chunk.first, chunk.end, xp=self.xp, device=place)

    def _visible(self) -> Array | None:
        """Return which keys the queries may see, masks aside, (..., n, m), ``None`` if all of them."""
        visible = self.sees()
        if self.operands.q_segments is None:
            return visible
        queries, keys = self.labels(self.operands.q_segments, self.operands.k_segments)
        return joint(visible, queries == keys, xp=self.xp)

    def hashes(self) -> tuple[Array, Array]:
        return dropout.hashes(self.operands, self.options, self.chunk, xp=self.xp)

    def factors(self) -> Array | None:
        """Return what dropout multiplies the weights by, (..., H, n, m), ``None`` without dropout."""
        share = self.options.dropout
        return dropout.kept(*self.hashes(), share, self.operands.q, xp=self.xp) if share else None

    def absolute(self, x: Array) -> Array:
        return self.chunk.absolute(x, xp=self.xp)

    def relative(self, s: Array) -> tuple[Array, int, int]:
        """Absolute layout (..., n, m) to relative layout, of the positions that some query sees, and these.

        Rows of a table that no query may see are never multiplied, not even by zero.
        """
        relative, (low, high) = self.chunk.relative(s, xp=self.xp), self.reach()
        if low > high:
            return relative[..., :0], low, high
        return relative[..., low - self.chunk.low : high - self.chunk.low + 1], low, high

    def reach(self) -> tuple[int, int]:
        """Return the first and the last relative position of the window that some query sees."""
        return self.chunk.seen(self.options)

    def mixed(self, name: str, relative: Array, low: int, high: int) -> Array:
        """Return sums of a table's rows for ``low … high`` by weights in relative layout."""
        looked_up = self.options.visibility.by_value
        return self.table(name).mix(relative, low, high, looked_up=looked_up, xp=self.xp)

    def scaled_queries(self) -> tuple[Array, Array]:
        operands, options = self.operands, self.options
        q = self.queries(operands.q) * options.scale
        if operands.rel_k is None or (operands.rel_q is None and options.rel_scale == options.scale):
            return q, q
        return q, self.queries(operands.q if operands.rel_q is None else operands.rel_q) * options.rel_scale

    def logits(self, q: Array, rel_q: Array, k: Array) -> Array:
        """Return the logits of scaled queries with the chunk's keys in absolute layout, softcapped, before masks."""
        xp, cap = self.xp, self.options.softcap
        logits = grouped_matmul(q, xp.matrix_transpose(k), xp=xp)
        relative = self._relative_terms(rel_q)
        if relative is not None:
            logits = logits + of_rank(self.absolute(relative), logits.ndim)
        if self.tables.key_table is not None:
            logits = logits + self.key_side_logits(k * self.options.rel_scale)
        if isinstance(self.chunk, LookUpChunk):
            logits = self.chunk.poisoned(logits, xp=xp)
        return logits if cap is None else xp.tanh(logits * (1 / cap)) * cap

    def _relative_terms(self, rel_q: Array) -> Array | None:
        """Return all terms that depend on the relative position, in relative layout (..., n, width)."""
        tables, low, high = self.tables, self.chunk.low, self.chunk.high
        bias = None if tables.rel_bias is None else self.table("rel_bias").spread(low, high, xp=self.xp)
        if tables.rel_k is not None:
            product = self.table("rel_k").product(rel_q, low, high, xp=self.xp)
            return product if bias is None else product + of_rank(bias, product.ndim)
        return None if bias is None else self.xp.broadcast_to(bias, (*bias.shape[:-2], rel_q.shape[-2], bias.shape[-1]))

    def key_side_logits(self, keys: Array) -> Array:
        return key_side.logits(self, keys)

    def key_side_gradient(self, d_logits: Array, keys: Array, sums: Sums) -> Array:
        return key_side.gradient(self, d_logits, keys, sums)

    def weights(self, logits: Array, *, sums: bool) -> tuple[Array, Array | None]:
        """Return the softmax over the visible keys and, if requested, its sums."""
        operands, pattern, mask = self.operands, self.options.visibility, self.operands.mask
        logits = _hide(logits, None if mask is None else self.of_mask(mask), self.visible, xp=self.xp)
        by_others = mask is not None or operands.q_segments is not None
        return softmax(logits, dead_rows=by_others or pattern.some_query_sees_nothing(), sums=sums, xp=self.xp)


def _hide(logits: Array, mask: Array | None, visible: Array | None, *, xp: Namespace) -> Array:
    """Add an additive mask, and put ``-inf`` at hidden keys."""
    if mask is not None:
        if xp.isdtype(mask.dtype, "bool"):
            allowed = mask
        else:
            logits, allowed = logits + of_rank(mask, logits.ndim), mask > -math.inf
        visible = joint(visible, allowed, xp=xp)
    return logits if visible is None else xp.where(visible, logits, -math.inf)


def grouped_matmul(x: Array, y: Array, *, xp: Namespace) -> Array:
    """Multiply (..., H, n, a) by (..., Hkv, a, b): the ``H / Hkv`` heads of a group share one ``y`` without copies."""
    heads, groups = x.shape[-3], y.shape[-3]
    if heads == groups:
        return xp.matmul(x, y)
    *lead, _, n, width = x.shape
    split = xp.reshape(x, (*lead, groups, heads // groups, n, width))  # dask splits and merges one axis at a time
    product = xp.matmul(xp.reshape(split, (*lead, groups, heads // groups * n, width)), y)
    split = xp.reshape(product, (*lead, groups, heads // groups, n, y.shape[-1]))
    return xp.reshape(split, (*lead, heads, n, y.shape[-1]))
