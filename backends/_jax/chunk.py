"""JAX: one chunk of attention at traced positions, and the tables that chunks read."""

from __future__ import annotations

from dataclasses import dataclass, replace

import jax.numpy as jnp
from jax import lax

from relskew_core._array.softmax import joint, of_rank, same_rank, softmax
from relskew_core._array.typing import Array
from relskew_core._kernel import dropout
from relskew_core._kernel.by_value import LookUpChunk, of_keys, of_queries, placed
from relskew_core._kernel.call import Operands, Options
from relskew_core._kernel.chunk import Chunk, is_empty
from relskew_core._kernel.forward import capped, grouped_matmul, has_dead_rows, hide
from relskew_core._positions.table import weighed
from relskew_core.backends._jax import key_side
from relskew_core.backends._jax.columns import Columns
from relskew_core.backends._jax.loops import ChunkPlace, Loop, LoopPlan, Ranges
from relskew_core.backends._jax.offsets import AnyOffset, in_small_numbers


@dataclass(frozen=True)
class ScannedCall:
    """The operands of a call with extended tables, and the plan of its chunks."""

    operands: Operands
    options: Options
    plan: LoopPlan
    rel_k: Columns | None
    rel_v: Columns | None
    rel_bias: Columns | None
    key_table: Columns | None
    drawn: tuple[Array, Array] | None  # with dropout: hashes of queries (..., H, Lq, 1) and of keys (Lk,)

    @classmethod
    def of(cls, operands: Operands, options: Options, ranges: Ranges | None) -> ScannedCall:
        """Plan a call whose chunk size is known."""
        assert options.chunk_size is not None
        empty = is_empty(*operands.q.shape[:-2]) or options.visibility.positions() is None
        plan = LoopPlan.empty(options) if empty else LoopPlan.of(options, options.chunk_size, ranges)
        bias = None if operands.rel_bias is None else operands.rel_bias[..., None]
        rel_k, rel_v, rel_bias = (
            Columns.of(rows, options, plan.low, plan.high) for rows in (operands.rel_k, operands.rel_v, bias)
        )
        key_table = Columns.mirrored(operands.key_table, options, *key_side.reach(plan, options))
        return cls(operands, options, plan, rel_k, rel_v, rel_bias, key_table, _drawn(operands, options))


def _drawn(operands: Operands, options: Options) -> tuple[Array, Array] | None:
    if not options.dropout:
        return None
    pattern = options.visibility
    if isinstance(pattern, AnyOffset) and operands.q_positions is not None:
        options = replace(options, visibility=pattern.ragged(operands.q_positions))
    whole = Chunk(0, pattern.n_queries, 0, pattern.n_keys, 0, 0, 0)
    return dropout.hashes(operands, options, whole, xp=jnp)


class TracedChunk:
    """A chunk of a loop at traced positions."""

    def __init__(self, call: ScannedCall, loop: Loop, place: ChunkPlace) -> None:
        self.call, self.loop, self.place = call, loop, place
        operands = call.operands
        self._labels = operands._replace(
            q_segments=self._label(operands.q_segments, place.start, loop.n),
            k_segments=self._label(operands.k_segments, place.first, loop.m),
            q_positions=self._label(operands.q_positions, place.start, loop.n),
            k_positions=self._label(operands.k_positions, place.first, loop.m),
        )
        chunk = Chunk(0, loop.n, 0, loop.m, loop.low[0], loop.width, loop.spare)  # laid out like the first chunk
        self.layout = placed(chunk, self._labels, call.options, xp=jnp)
        self.visible = self._visible()

    @staticmethod
    def _label(x: Array | None, start: Array, size: int) -> Array | None:
        return None if x is None else lax.dynamic_slice_in_dim(x, start, size, axis=x.ndim - 1)

    def queries(self, x: Array) -> Array:
        """Cut (..., queries, D) to the chunk."""
        return lax.dynamic_slice_in_dim(x, self.place.start, self.loop.n, axis=x.ndim - 2)

    def fresh(self, x: Array) -> Array:
        """Cut (..., queries, D) to the chunk, zeros for queries of an earlier chunk."""
        x = self.queries(x)
        if not self.loop.overlap:
            return x
        rows = _numbers(self.place.start, self.loop.n)
        return jnp.where((rows >= self.place.fresh)[:, None], x, 0.0)

    def keys(self, x: Array) -> Array:
        """Cut (..., keys, D) to the chunk, zeros for keys that none of its queries may see."""
        rows = lax.dynamic_slice_in_dim(x, self.place.first, self.loop.m, axis=x.ndim - 2)
        rows = jnp.matrix_transpose(self.seen(jnp.matrix_transpose(rows)))
        if self.visible is None or self.visible.ndim == 2:  # one pattern for all: every key of the range is visible
            return rows
        return jnp.where(jnp.any(self.visible, axis=-2)[..., None], rows, 0.0)

    def seen(self, x: Array) -> Array:
        """Put zeros into (..., D, m) for keys outside the range that the chunk's queries may see."""
        if not self.loop.unseen:
            return x
        keys = _numbers(self.place.first, self.loop.m)
        return jnp.where((keys >= self.place.seen_first) & (keys < self.place.seen_end), x, 0.0)

    def columns(self, table: Columns) -> Array:
        """Cut a table to the chunk's columns, (..., D, width)."""
        columns = table.columns
        return lax.dynamic_slice_in_dim(columns, self.column(table), self.loop.width, axis=columns.ndim - 1)

    def mixed(self, weights: Array, table: Columns) -> Array:
        """Return sums of a table's rows by weights in relative layout; look-ups may include rows that no query sees."""
        columns = self.columns(table)
        columns = weighed(columns, weights, xp=jnp) if isinstance(self.layout, LookUpChunk) else columns
        return jnp.matmul(weights, jnp.matrix_transpose(columns))

    def column(self, table: Columns) -> Array | int:
        """Return the chunk's first column of a table."""
        visibility = self.call.options.visibility
        if visibility.by_value:
            return 0
        return self.place.first - self.place.start - (visibility.offset + self.loop.spare + table.low)

    def mask_starts(self, mask: Array) -> tuple[Array | int, Array | int]:
        """Return the chunk's first row and column of a mask, 0 along axes that broadcast."""
        return (0 if mask.shape[-2] == 1 else self.place.start), (0 if mask.shape[-1] == 1 else self.place.first)

    def of_mask(self, mask: Array) -> Array:
        """Cut a mask to the chunk's rows and columns, whole along axes that broadcast."""
        sizes = (min(mask.shape[-2], self.loop.n), min(mask.shape[-1], self.loop.m))
        for axis, start, size in zip((-2, -1), self.mask_starts(mask), sizes, strict=True):
            mask = lax.dynamic_slice_in_dim(mask, start, size, axis=mask.ndim + axis)
        return mask

    def absolute(self, x: Array) -> Array:
        """Relative layout (..., n, width) to absolute layout (..., n, m)."""
        return self.layout.absolute(x, xp=jnp)

    def relative(self, s: Array) -> Array:
        """Absolute layout (..., n, m) to relative layout (..., n, width)."""
        return self.layout.relative(s, xp=jnp)

    def _visible(self) -> Array | None:
        """Return the visible keys of the queries, masks aside, (..., n, m), ``None`` if all are visible."""
        pattern, labels = in_small_numbers(self.call.options.visibility), self._labels
        if labels.q_positions is None:
            queries = (_numbers(self.place.start, self.loop.n).astype(int) + pattern.offset)[:, None]
            keys = _numbers(self.place.first, self.loop.m).astype(int)[None, :]
        else:
            queries, keys = of_queries(labels.q_positions, self.layout), of_keys(labels.k_positions, self.layout)
        visible = pattern.sees(queries, keys, xp=jnp)
        if labels.q_segments is None:
            return visible
        queries, keys = same_rank(of_queries(labels.q_segments, self.layout), of_keys(labels.k_segments, self.layout))
        return joint(visible, queries == keys, xp=jnp)

    def scaled_queries(self) -> tuple[Array, Array]:
        """Return the queries for the keys and those for ``rel_k``, scaled."""
        operands, options = self.call.operands, self.call.options
        q = self.queries(operands.q)
        rel_q = q if operands.rel_q is None else self.queries(operands.rel_q)
        return q * options.scale, rel_q * options.rel_scale

    def logits(self, q: Array, rel_q: Array, k: Array) -> Array:
        """Return the logits in absolute layout, softcapped, before masks."""
        call = self.call
        logits = grouped_matmul(q, jnp.matrix_transpose(k), xp=jnp)
        relative = None if call.rel_bias is None else self.columns(call.rel_bias)
        if call.rel_k is not None:
            product = jnp.matmul(rel_q, self.columns(call.rel_k))
            relative = product if relative is None else product + of_rank(relative, product.ndim)
        if relative is not None:
            wide = jnp.broadcast_to(relative, (*relative.shape[:-2], self.loop.n, self.loop.width))
            logits = logits + of_rank(self.absolute(wide), logits.ndim)
        if call.key_table is not None:
            logits = logits + self.key_side_logits(k, self.key_side_columns(call.key_table))
        if isinstance(self.layout, LookUpChunk):
            logits = self.layout.poisoned(logits, xp=jnp)
        return capped(logits, call.options, xp=jnp)

    def key_side_start(self, table: Columns) -> Array | int:
        """Return the first column of ``key_table`` for the chunk."""
        return key_side.start(self.loop, self.place, self.call.options, table)

    def key_side_columns(self, table: Columns) -> Array:
        """Cut ``key_table`` to the chunk's columns."""
        columns, size = table.columns, key_side.width(self.loop, self.call.options)
        return lax.dynamic_slice_in_dim(columns, self.key_side_start(table), size, axis=columns.ndim - 1)

    def key_side_logits(self, k: Array, columns: Array, *, product: key_side.Product = jnp.matmul) -> Array:
        """Return the table's contribution to the logits."""
        heads = self.call.operands.q.shape[-3]
        return key_side.logits(k * self.call.options.rel_scale, columns, self.layout, heads, product=product)

    def weights(self, logits: Array, *, sums: bool) -> tuple[Array, Array | None]:
        """Return the softmax over the visible keys and, if requested, its sums."""
        mask = self.call.operands.mask
        logits = hide(logits, mask if mask is None else self.of_mask(mask), self.visible, xp=jnp)
        return softmax(logits, dead_rows=has_dead_rows(self.call.operands, self.call.options), sums=sums, xp=jnp)

    def kept(self, weights: Array) -> Array:
        """Replace the weights that dropout drops by zeros, and divide the others by the share that is kept."""
        if self.call.drawn is None:
            return weights
        rows, columns = self.call.drawn
        columns = lax.dynamic_slice_in_dim(columns, self.place.first, self.loop.m)
        share = self.call.options.dropout
        drawn = dropout.stirred(jnp.bitwise_xor(self.queries(rows), of_rank(columns, rows.ndim)), xp=jnp)
        return weights * jnp.where(drawn < dropout.threshold(share), 0.0, jnp.asarray(1 / (1 - share), weights.dtype))


def _numbers(first: Array, count: int) -> Array:
    """Return ``count`` integers from a traced one on, with its dtype."""
    return first + jnp.arange(count, dtype=first.dtype)
