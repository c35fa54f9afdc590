"""JAX: the view of a chunk whose position is traced, so that a loop is compiled once for all chunks."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from relskew_core._array.typing import Array
from relskew_core._kernel import dropout
from relskew_core._kernel.call import Operands, Options
from relskew_core._kernel.chunk import Chunk, is_empty
from relskew_core._kernel.view import Tables, View
from relskew_core._positions.table import Table
from relskew_core.backends._jax import key_side
from relskew_core.backends._jax.loops import ChunkPlace, Loop, LoopPlan, Ranges, reach
from relskew_core.backends._jax.offsets import AnyOffset, in_small_numbers


@dataclass(frozen=True)
class ScannedCall:
    """The operands of a call with extended tables, and the plan of its chunks."""

    operands: Operands
    options: Options
    plan: LoopPlan
    tables: Tables  # columns that no query sees are zeros, even where the caller's table is NaN
    drawn: tuple[Array, Array] | None  # with dropout: hashes of queries (..., H, Lq, 1) and of keys (Lk,)

    @classmethod
    def of(cls, operands: Operands, options: Options, ranges: Ranges | None) -> ScannedCall:
        """Plan a call whose chunk size is known."""
        assert options.chunk_size is not None
        empty = is_empty(*operands.q.shape[:-2]) or options.visibility.positions() is None
        plan = LoopPlan.empty(options) if empty else LoopPlan.of(options, options.chunk_size, ranges)
        low, high = reach(options)
        first, last = key_side.reach(plan, options)
        tables = Tables.of(
            operands,
            options,
            lambda table: table.seen(plan.low, plan.high, (low, high), xp=jnp),
            lambda table: table.seen(first, last, (-high, -low), xp=jnp),
            xp=jnp,
        )
        return cls(operands, options, plan, tables, _drawn(operands, options))


def _drawn(operands: Operands, options: Options) -> tuple[Array, Array] | None:
    if not options.dropout:
        return None
    pattern = options.visibility
    if isinstance(pattern, AnyOffset) and operands.q_positions is not None:
        options = replace(options, visibility=pattern.ragged(operands.q_positions))
    whole = Chunk(0, pattern.n_queries, 0, pattern.n_keys, 0, 0, 0)
    return dropout.hashes(operands, options, whole, xp=jnp)


class TracedView(View):
    """The part of a call that a chunk of a loop needs; its layout is that of the loop's first chunk."""

    def __init__(self, call: ScannedCall, loop: Loop, place: ChunkPlace) -> None:
        self.loop, self.place, self._drawn = loop, place, call.drawn
        chunk = Chunk(0, loop.n, 0, loop.m, loop.low[0], loop.width, loop.spare)
        super().__init__(call.operands, call.options, call.tables, chunk, xp=jnp)

    def queries(self, x: Array, axis: int = -2) -> Array:
        return lax.dynamic_slice_in_dim(x, self.place.start, self.loop.n, axis=x.ndim + axis)

    def keys(self, x: Array, axis: int = -2) -> Array:
        return lax.dynamic_slice_in_dim(x, self.place.first, self.loop.m, axis=x.ndim + axis)

    def fresh(self, x: Array) -> Array:
        x = self.queries(x)
        if not self.loop.overlap:
            return x
        rows = _numbers(self.place.start, self.loop.n)
        return jnp.where((rows >= self.place.fresh)[:, None], x, 0.0)

    def seen(self, x: Array) -> Array:
        x, reached = super().seen(x), self.reached()
        return x if reached is None else jnp.where(reached[:, None], x, 0.0)

    def reached(self) -> Array | None:
        """Return which of the chunk's keys its queries may see by their range, (m,), ``None`` if all of them."""
        if not self.loop.unseen:
            return None
        keys = _numbers(self.place.first, self.loop.m)
        return (keys >= self.place.seen_first) & (keys < self.place.seen_end)

    def column(self, name: str) -> Array | int:
        """Return the chunk's first column of a table."""
        loop, place, visibility = self.loop, self.place, self.options.visibility
        if visibility.by_value:
            return 0
        left = getattr(self.tables, name).left
        if name == "key_table":
            return place.start - place.first + (visibility.offset - key_side.blocks(loop.n, loop.m) * loop.n + left)
        return place.first - place.start - (visibility.offset + loop.spare - left)

    def columns(self, name: str) -> Array:
        """Cut a table to the chunk's columns, (..., D, width)."""
        columns: Array = getattr(self.tables, name).columns
        width = key_side.width(self.loop, self.options) if name == "key_table" else self.loop.width
        return lax.dynamic_slice_in_dim(columns, self.column(name), width, axis=columns.ndim - 1)

    def table(self, name: str) -> Table:
        return Table(self.columns(name), -self.chunk.low, "zero")

    def reach(self) -> tuple[int, int]:
        """Return the whole window: columns that no query sees are zeros."""
        return self.chunk.low, self.chunk.high

    def sees(self) -> Array | None:
        pattern, x = in_small_numbers(self.options.visibility), self.operands
        if x.q_positions is not None:
            return pattern.sees(*self.labels(x.q_positions, x.k_positions), xp=jnp)
        queries = _numbers(self.place.start, self.loop.n).astype(int) + pattern.offset
        return pattern.sees(queries[:, None], _numbers(self.place.first, self.loop.m).astype(int), xp=jnp)

    def hashes(self) -> tuple[Array, Array]:
        assert self._drawn is not None
        queries, keys = self._drawn
        return self.queries(queries), self.keys(keys, -1)

    def key_side_logits(self, keys: Array) -> Array:
        heads = self.operands.q.shape[-3]
        return key_side.logits(keys, self.columns("key_table"), self.chunk, heads, product=jnp.matmul)

    def key_side_gradient(self, d_logits: Array, keys: Array, sums: Any) -> Array:
        product, heads = key_side.product_of_seen, self.operands.q.shape[-3]
        logits = partial(key_side.logits, chunk=self.chunk, heads=heads, product=product)
        _, pull = jax.vjp(logits, keys, self.columns("key_table"))
        d_keys: Array
        d_keys, d_columns = pull(d_logits)
        sums.add("key_table", d_columns, {-1: self.column("key_table")})
        return d_keys


def _numbers(first: Array, count: int) -> Array:
    """Return ``count`` integers from a traced one on, with its dtype."""
    return first + jnp.arange(count, dtype=first.dtype)
