"""The portable forward kernel: one loop over query chunks for every kind of attention.

Global, causal, windowed, local, cross and cached attention differ only in the keys that a chunk may see and in the
table columns that belong to them. Scratch is ``chunk × (chunk + keys)`` and never ``queries × keys``.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from relskew_core._array.known import in_turn, nothing
from relskew_core._array.namespace import device
from relskew_core._array.softmax import joint, of_rank, same_rank, softmax
from relskew_core._array.typing import Array, Namespace
from relskew_core._kernel.by_value import LookUpChunk, of_keys, of_queries, placed
from relskew_core._kernel.call import BY_QUERY, Operands, Options
from relskew_core._kernel.chunk import Chunk, chunks, visible_columns
from relskew_core._kernel.dropout import kept
from relskew_core._kernel.key_side import blocks, key_side_logits, mirrored
from relskew_core._positions.table import Table


def attention(operands: Operands, options: Options, *, xp: Namespace) -> tuple[Array, Array | None]:
    """Return the output (..., H, Lq, Dv) and, if requested, the sums of weights (..., H, Lq, 2)."""
    laid = list(chunks(operands, options))
    tables = Tables.of(operands, options, laid, xp=xp)
    outs: list[Array] = []
    sums: list[Array | None] = []
    for chunk in laid:
        now = in_turn(operands, BY_QUERY, outs[-1:], xp=xp)
        out, own = _attend(now, options, tables, placed(chunk, operands, options, xp=xp), xp=xp)
        outs.append(out)
        sums.append(own)
    if not outs:
        shape = (*operands.q.shape[:-2], 0)
        outs = [nothing((*shape, operands.v.shape[-1]), operands, xp=xp)]
        sums = [nothing((*shape, 2), operands, xp=xp)]
    if len(outs) == 1:
        return outs[0], sums[0]
    return xp.concat(outs, axis=-2), xp.concat(sums, axis=-2) if options.return_lse else None


@dataclass(frozen=True, slots=True)
class Tables:
    """The tables of a call, extended once to all relative positions that its chunks use."""

    rel_k: Table | None
    rel_v: Table | None
    rel_bias: Table | None
    key_table: Table | None  # by query position − key position

    @classmethod
    def of(cls, operands: Operands, options: Options, laid: Sequence[Chunk], *, xp: Namespace) -> Tables:
        """Transpose the tables into columns, and extend them if that is cheap."""
        laid = [chunk for chunk in laid if chunk.first < chunk.end]
        low, high = min([chunk.low for chunk in laid] or [0]), max([chunk.high for chunk in laid] or [0])

        def table(rows: Array | None) -> Table | None:
            if rows is None:
                return None
            columns = Table(xp.matrix_transpose(rows), options.span.left, options.span.beyond)
            return columns.covering(low, high, xp=xp)

        bias, of_keys = operands.rel_bias, None
        if operands.key_table is not None:
            parts = [block for chunk in laid for block in blocks(chunk, options, xp=xp)]
            reach = min([block.low for block in parts] or [0]), max([block.high for block in parts] or [0])
            of_keys = mirrored(operands.key_table, options.span, xp=xp).covering(*reach, xp=xp)
        return cls(
            table(operands.rel_k), table(operands.rel_v), table(None if bias is None else bias[..., None]), of_keys
        )


def _attend(
    operands: Operands, options: Options, tables: Tables, chunk: Chunk, *, xp: Namespace
) -> tuple[Array, Array | None]:
    v = operands.v
    if chunk.first == chunk.end:
        shape = (*operands.q.shape[:-2], chunk.stop - chunk.start)
        out = nothing((*shape, v.shape[-1]), operands, xp=xp)
        return out, nothing((*shape, 2), operands, value=-math.inf, xp=xp) if options.return_lse else None
    visible = chunk_visible(operands, options, chunk, xp=xp)
    k = seen_of(operands.k, chunk, visible, xp=xp)
    logits = chunk_logits(k, operands, options, tables, chunk, xp=xp)
    weights, sums = chunk_weights(logits, operands, options, chunk, visible, sums=options.return_lse, xp=xp)
    if options.dropout:
        weights = weights * kept(operands, options, chunk, xp=xp)
    out = grouped_matmul(weights, seen_of(v, chunk, visible, xp=xp), xp=xp)
    if tables.rel_v is not None:
        relative, low, high = visible_columns(chunk.relative(weights, xp=xp), chunk, options)
        if low <= high:
            out = out + tables.rel_v.mix(relative, low, high, looked_up=options.visibility.by_value, xp=xp)
    return out, sums


def chunk_logits(
    k: Array, operands: Operands, options: Options, tables: Tables, chunk: Chunk, *, xp: Namespace
) -> Array:
    """Return the logits of a chunk with its keys in absolute layout, softcapped, before masks."""
    q = operands.q[..., chunk.start : chunk.stop, :] * options.scale
    logits = grouped_matmul(q, xp.matrix_transpose(k), xp=xp)
    relative = _relative_terms(operands, options, tables, chunk, q, xp=xp)
    if relative is not None:
        logits = logits + of_rank(chunk.absolute(relative, xp=xp), logits.ndim)
    if tables.key_table is not None:
        keys = k * options.rel_scale
        logits = logits + key_side_logits(keys, tables.key_table, chunk, options, q.shape[-3], xp=xp)
    if isinstance(chunk, LookUpChunk):
        logits = chunk.poisoned(logits, xp=xp)
    return capped(logits, options, xp=xp)


def capped(logits: Array, options: Options, *, xp: Namespace) -> Array:
    """Return ``softcap · tanh(logits / softcap)``."""
    return logits if options.softcap is None else xp.tanh(logits * (1 / options.softcap)) * options.softcap


def capped_gradient(d_logits: Array, capped: Array, options: Options, *, xp: Namespace) -> Array:
    """Return the adjoint of :func:`capped` from its result; zero for hidden entries, finite or not."""
    if options.softcap is None:
        return d_logits
    ratio = capped * (1 / options.softcap)
    return xp.where(d_logits == 0, d_logits, d_logits * (1 - ratio * ratio))


def chunk_visible(operands: Operands, options: Options, chunk: Chunk, *, xp: Namespace) -> Array | None:
    """Return which keys the queries may see, masks aside, (..., n, m), ``None`` if all of them."""
    pattern, place = options.visibility, device(operands.q)
    if pattern.by_value:
        queries, keys = of_queries(operands.q_positions, chunk), of_keys(operands.k_positions, chunk)
        visible = pattern.sees(queries, keys, xp=xp)
    else:
        visible = pattern.mask(chunk.start, chunk.stop, chunk.first, chunk.end, xp=xp, device=place)
    if operands.q_segments is None:
        return visible
    queries, keys = same_rank(of_queries(operands.q_segments, chunk), of_keys(operands.k_segments, chunk))
    return joint(visible, queries == keys, xp=xp)


def seen_of(x: Array, chunk: Chunk, visible: Array | None, *, xp: Namespace) -> Array:
    """Return a chunk's keys or values, with zeros for keys that none of its queries may see."""
    x = x[..., chunk.first : chunk.end, :]
    if visible is None or visible.ndim == 2:  # one pattern for all: every key of the chunk's range is visible
        return x
    return xp.where(xp.any(visible, axis=-2)[..., None], x, 0.0)


def chunk_weights(
    logits: Array,
    operands: Operands,
    options: Options,
    chunk: Chunk,
    visible: Array | None,
    *,
    sums: bool,
    xp: Namespace,
) -> tuple[Array, Array | None]:
    """Return the softmax over the visible keys and, if requested, its sums."""
    mask = operands.mask if operands.mask is None else operands.mask[(..., *chunk.of_mask(operands.mask))]
    logits = hide(logits, mask, visible, xp=xp)
    return softmax(logits, dead_rows=has_dead_rows(operands, options), sums=sums, xp=xp)


def has_dead_rows(operands: Operands, options: Options) -> bool:
    """Whether some query may see no key at all."""
    by_others = operands.mask is not None or operands.q_segments is not None
    return by_others or options.visibility.some_query_sees_nothing()


def _relative_terms(
    operands: Operands, options: Options, tables: Tables, chunk: Chunk, scaled_q: Array, *, xp: Namespace
) -> Array | None:
    """Return all terms that depend on the relative position, in relative layout (..., n, width)."""
    bias = None if tables.rel_bias is None else tables.rel_bias.spread(chunk.low, chunk.high, xp=xp)
    if tables.rel_k is None:
        if bias is None:
            return None
        return xp.broadcast_to(bias, (*bias.shape[:-2], chunk.stop - chunk.start, chunk.width))
    q = relative_queries(operands, options, chunk, scaled_q)
    product = tables.rel_k.product(q, chunk.low, chunk.high, xp=xp)
    return product if bias is None else product + of_rank(bias, product.ndim)


def relative_queries(operands: Operands, options: Options, chunk: Chunk, scaled_q: Array) -> Array:
    """Return the chunk's queries for the product with ``rel_k``, scaled."""
    if operands.rel_q is None and options.rel_scale == options.scale:
        return scaled_q
    rel_q = operands.q if operands.rel_q is None else operands.rel_q
    return rel_q[..., chunk.start : chunk.stop, :] * options.rel_scale


def hide(logits: Array, mask: Array | None, visible: Array | None, *, xp: Namespace) -> Array:
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
