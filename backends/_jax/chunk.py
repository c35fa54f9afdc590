"""JAX: one chunk of attention at traced positions, and the tables that chunks look into."""

from __future__ import annotations

import math
from dataclasses import dataclass

import jax.numpy as jnp
from jax import lax

from relskew_core._array.softmax import softmax
from relskew_core._array.typing import Array
from relskew_core._kernel.call import Operands, Options
from relskew_core._kernel.forward import capped, grouped_matmul
from relskew_core._positions.skew import pad_last, skew_from, unskew_from
from relskew_core._positions.table import Extension, Table
from relskew_core.backends._jax.loops import ChunkPlace, LoopPlan, Segment


@dataclass(frozen=True)
class Columns:
    """A table by columns, (..., D, columns), extended once to all relative positions that chunks touch.

    Columns that no query sees are zeros, whatever the table holds there.
    """

    columns: Array
    low: int  # relative position of the first column
    extension: Extension
    before: int  # columns of zeros before the positions that some query sees
    seen: int  # number of those positions
    rows: int  # of the caller's table

    @classmethod
    def of(cls, rows: Array | None, options: Options, plan: LoopPlan) -> Columns | None:
        """Extend a table (..., R, D)."""
        if rows is None:
            return None
        lowest, highest = options.positions()
        table = Table(jnp.matrix_transpose(rows), options.span.left, options.span.beyond)
        extension = table.plan(lowest, highest)
        before = lowest - plan.low
        columns = pad_last(table.spread(lowest, highest, xp=jnp), before, plan.high - highest, xp=jnp)
        return cls(columns, plan.low, extension, before, highest - lowest + 1, rows.shape[-2])

    def gradient(self, columns: Array) -> Array:
        """Turn the gradient of the columns into the gradient of the caller's table."""
        core = self.extension.fold(columns[..., self.before : self.before + self.seen], xp=jnp)
        return jnp.matrix_transpose(self.extension.place(core, self.rows, xp=jnp))


@dataclass(frozen=True)
class ScannedCall:
    """The operands of a call with their tables extended, and the plan of its chunks."""

    operands: Operands
    options: Options
    plan: LoopPlan
    rel_k: Columns | None
    rel_v: Columns | None
    rel_bias: Columns | None

    @classmethod
    def of(cls, operands: Operands, options: Options) -> ScannedCall:
        """LoopPlan a call whose chunk size is known."""
        assert options.chunk_size is not None
        plan = LoopPlan.of(options, options.chunk_size)
        bias = None if operands.rel_bias is None else operands.rel_bias[..., None]
        tables = (Columns.of(rows, options, plan) for rows in (operands.rel_k, operands.rel_v, bias))
        return cls(operands, options, plan, *tables)


@dataclass(frozen=True)
class TracedChunk:
    """A chunk of a segment at its traced place."""

    call: ScannedCall
    segment: Segment
    place: ChunkPlace

    def queries(self, x: Array) -> Array:
        """Cut (..., queries, D) to the chunk's."""
        return lax.dynamic_slice_in_dim(x, self.place.start, self.segment.n, axis=x.ndim - 2)

    def fresh(self, x: Array) -> Array:
        """Cut (..., queries, D) to the chunk's, zeros for queries that another chunk has had."""
        x = self.queries(x)
        if not self.segment.overlap:
            return x
        rows = self.place.start + jnp.arange(self.segment.n)
        return jnp.where((rows >= self.place.fresh)[:, None], x, 0.0)

    def keys(self, x: Array) -> Array:
        """Cut (..., keys, D) to the chunk's, zeros for keys that none of its queries may see."""
        rows = lax.dynamic_slice_in_dim(x, self.place.first, self.segment.m, axis=x.ndim - 2)
        return jnp.matrix_transpose(self.seen(jnp.matrix_transpose(rows)))

    def seen(self, x: Array) -> Array:
        """Put zeros into (..., D, m) for keys that no query of the chunk may see."""
        if not self.segment.unseen:
            return x
        keys = self.place.first + jnp.arange(self.segment.m)
        return jnp.where((keys >= self.place.seen_first) & (keys < self.place.seen_end), x, 0.0)

    def columns(self, table: Columns) -> Array:
        """Cut a table to the chunk's columns, (..., D, width)."""
        columns = table.columns
        return lax.dynamic_slice_in_dim(columns, self.column(table), self.segment.width, axis=columns.ndim - 1)

    def column(self, table: Columns) -> Array:
        """Return the chunk's first column of a table."""
        offset = self.call.options.visibility.offset
        return self.place.first - self.place.start - (offset + self.segment.spare + table.low)

    def mask_starts(self, mask: Array) -> tuple[Array | int, Array | int]:
        """Return the chunk's first row and column of a mask, 0 along axes that broadcast."""
        return (0 if mask.shape[-2] == 1 else self.place.start), (0 if mask.shape[-1] == 1 else self.place.first)

    def of_mask(self, mask: Array) -> Array:
        """Cut a mask to the chunk's rows and columns, whole along axes that broadcast."""
        sizes = (min(mask.shape[-2], self.segment.n), min(mask.shape[-1], self.segment.m))
        for axis, start, size in zip((-2, -1), self.mask_starts(mask), sizes, strict=True):
            mask = lax.dynamic_slice_in_dim(mask, start, size, axis=mask.ndim + axis)
        return mask

    def absolute(self, x: Array) -> Array:
        """Relative layout (..., n, width) to absolute layout (..., n, m)."""
        return skew_from(x, n_keys=self.segment.m, first=self.segment.spare, xp=jnp)

    def relative(self, s: Array) -> Array:
        """Absolute layout (..., n, m) to relative layout (..., n, width)."""
        # In full width first: narrower rows overlap, and a query's NaN would become its neighbour's.
        width = self.segment.spare + self.segment.m
        return unskew_from(s, width=width, first=self.segment.spare, xp=jnp)[..., : self.segment.width]

    def visible(self) -> Array | None:
        """Return which keys the queries may see, shape (n, m), ``None`` if all of them."""
        visibility = self.call.options.visibility
        queries = (self.place.start + visibility.offset + jnp.arange(self.segment.n))[:, None]
        keys = (self.place.first + jnp.arange(self.segment.m))[None, :]
        return visibility.sees(queries, keys, xp=jnp)

    def scaled_queries(self) -> tuple[Array, Array]:
        """Return the queries that meet the keys and those that meet ``rel_k``, scaled."""
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
            relative = product if relative is None else product + relative
        if relative is not None:
            wide = jnp.broadcast_to(relative, (*relative.shape[:-2], self.segment.n, self.segment.width))
            logits = logits + self.absolute(wide)
        return capped(logits, call.options, xp=jnp)

    def weights(self, logits: Array, *, lse: bool) -> tuple[Array, Array | None]:
        """Return the softmax over what may be seen and, if asked for, the log-sum-exp."""
        mask, visible = self.call.operands.mask, self.visible()
        if mask is not None:
            allowed = self.of_mask(mask)
            if allowed.dtype != bool:
                logits, allowed = logits + allowed, allowed > -math.inf
            visible = allowed if visible is None else visible & allowed
        if visible is not None:
            logits = jnp.where(visible, logits, -math.inf)
        dead_rows = mask is not None or self.call.options.visibility.some_query_sees_nothing()
        return softmax(logits, dead_rows=dead_rows, lse=lse, xp=jnp)
