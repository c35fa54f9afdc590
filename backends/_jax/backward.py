"""JAX: the backward pass, the forward pass's loops again, which carry the gradients of everything that chunks share."""

from __future__ import annotations

import math
from functools import partial

import jax
import jax.numpy as jnp
from jax import lax

from relskew_core._array.softmax import share_of
from relskew_core._array.typing import Array
from relskew_core._kernel.backward import Cotangents, grouped_outer
from relskew_core._kernel.call import DIFFERENTIABLE, TABLES, Gradients, Operands, Options
from relskew_core._kernel.forward import capped_gradient, grouped_matmul
from relskew_core._kernel.sums import sum_to
from relskew_core.backends._jax import key_side
from relskew_core.backends._jax.chunk import ScannedCall, TracedChunk
from relskew_core.backends._jax.columns import Columns
from relskew_core.backends._jax.explicit import split_by_compiler
from relskew_core.backends._jax.loops import ChunkPlace, Loop, Ranges
from relskew_core.backends._jax.manual import axes_of, varying


@partial(jax.jit, static_argnames="options")
def attention_vjp(cotangents: Cotangents, operands: Operands, options: Options, ranges: Ranges | None) -> Gradients:
    """Return the gradients of every operand, ``None`` for a boolean mask."""
    floating = {name: x for name in DIFFERENTIABLE if (x := getattr(operands, name)) is not None and x.dtype != bool}
    function = partial(_attention_vjp, options)
    gradients: Gradients = split_by_compiler(function, Gradients(**floating), cotangents, operands, ranges)
    return gradients


def _attention_vjp(options: Options, cotangents: Cotangents, operands: Operands, ranges: Ranges | None) -> Gradients:
    call = ScannedCall.of(operands, options, ranges)
    tables = {name: table for name in TABLES if (table := getattr(call, name, None)) is not None}
    like = {
        "q": operands.q,
        "k": jnp.matrix_transpose(operands.k),  # transposing the weights instead would copy them
        "v": jnp.matrix_transpose(operands.v),
        "rel_q": operands.rel_q,
        "mask": operands.mask if operands.mask is not None and operands.mask.dtype != bool else None,
        **{name: table.columns for name, table in tables.items()},
    }
    sums = varying(Gradients(**jax.tree.map(jnp.zeros_like, like)), axes_of((cotangents, operands)))
    with jax.named_scope("relative_attention_vjp"):
        for loop in call.plan.loops:
            sums, _ = lax.scan(partial(_step, call, loop, cotangents), sums, loop.places)

    rows = {name: table.gradient(getattr(sums, name)) for name, table in tables.items()}
    if "rel_bias" in rows:
        rows["rel_bias"] = rows["rel_bias"][..., 0]
    return sums._replace(k=jnp.matrix_transpose(sums.k), v=jnp.matrix_transpose(sums.v), **rows)


def _step(
    call: ScannedCall, loop: Loop, cotangents: Cotangents, sums: Gradients, place: ChunkPlace
) -> tuple[Gradients, None]:
    """Add one chunk's gradients."""
    d_out, out, whole, d_lse = cotangents
    operands, options, chunk = call.operands, call.options, TracedChunk(call, loop, place)
    d_rows = chunk.fresh(d_out)
    (q, rel_q), k, v = chunk.scaled_queries(), chunk.keys(operands.k), chunk.keys(operands.v)
    capped = chunk.logits(q, rel_q, k)
    weights, own = chunk.weights(capped, sums=whole is not None)
    if whole is not None:
        weights = weights * share_of(own, chunk.queries(whole), xp=jnp)[..., None]

    d_weights = grouped_matmul(d_rows, jnp.matrix_transpose(v), xp=jnp)
    of_values = chunk.kept(weights)
    d_v = grouped_outer(d_rows, of_values, v.shape[-3], xp=jnp)
    new = {"v": _add(sums.v, chunk.seen(d_v), {-1: place.first})}
    if call.rel_v is not None:
        d_weights = d_weights + chunk.absolute(jnp.matmul(d_rows, chunk.columns(call.rel_v)))
        d_weights = jnp.where(weights == 0, weights, d_weights)  # hidden pairs may read rows that no query sees
        new["rel_v"] = _add_columns(chunk, call.rel_v, sums.rel_v, d_rows, chunk.relative(of_values))
    d_weights = chunk.kept(d_weights)

    if out is None:
        delta = jnp.sum(weights * d_weights, axis=-1, keepdims=True)
    else:
        delta = jnp.sum(d_rows * chunk.queries(out), axis=-1, keepdims=True)
    if d_lse is not None:
        delta = delta - chunk.fresh(d_lse[..., None])
    d_logits = weights * (d_weights - delta)
    if sums.mask is not None:
        row, column = chunk.mask_starts(sums.mask)
        piece = _sum_mask(d_logits, sums.mask)
        new["mask"] = _add(sums.mask, piece, {-2: row, -1: column})
    d_logits = capped_gradient(d_logits, capped, options, xp=jnp)

    d_k = grouped_outer(q, d_logits, k.shape[-3], xp=jnp)
    if call.key_table is not None:
        d_k = d_k + jnp.matrix_transpose(_add_key_side(chunk, call.key_table, d_logits, k, sums, new))
    new["k"] = _add(sums.k, chunk.seen(d_k), {-1: place.first})
    d_q = grouped_matmul(d_logits, k, xp=jnp) * options.scale
    d_rel_q = _add_relative(chunk, d_logits, rel_q, sums, new)
    if d_rel_q is not None and sums.rel_q is not None:
        new["rel_q"] = _add(sums.rel_q, d_rel_q, {-2: place.start})
    elif d_rel_q is not None:
        d_q = d_q + d_rel_q
    new["q"] = _add(sums.q, d_q, {-2: place.start})
    return sums._replace(**new), None


def _add_relative(
    chunk: TracedChunk, d_logits: Array, rel_q: Array, sums: Gradients, new: dict[str, Array]
) -> Array | None:
    """Add to the gradients of ``rel_k`` and ``rel_bias``, and return that of ``rel_k``'s queries."""
    call = chunk.call
    if call.rel_k is None and call.rel_bias is None:
        return None
    relative = chunk.relative(d_logits)
    if call.rel_bias is not None:
        ones = jnp.ones((*rel_q.shape[:-1], 1), dtype=rel_q.dtype)
        new["rel_bias"] = _add_columns(chunk, call.rel_bias, sums.rel_bias, ones, relative)
    if call.rel_k is None:
        return None
    new["rel_k"] = _add_columns(chunk, call.rel_k, sums.rel_k, rel_q, relative)
    return chunk.mixed(relative, call.rel_k) * call.options.rel_scale


def _add_key_side(
    chunk: TracedChunk, table: Columns, d_logits: Array, k: Array, sums: Gradients, new: dict[str, Array]
) -> Array:
    """Add to the gradient of ``key_table``, and return that of the keys."""
    logits = partial(chunk.key_side_logits, product=key_side.product_of_seen)
    _, pull = jax.vjp(logits, k, chunk.key_side_columns(table))
    d_k, d_columns = pull(d_logits)
    new["key_table"] = _add(sums.key_table, d_columns, {-1: chunk.key_side_start(table)})
    return d_k


def _add(total: Array, piece: Array, starts: dict[int, Array | int]) -> Array:
    """Add a piece to a larger array that the loop carries; XLA does it in place."""
    at = [jnp.asarray(starts.get(axis - total.ndim, 0), dtype=jnp.int32) for axis in range(total.ndim)]
    return lax.dynamic_update_slice(total, lax.dynamic_slice(total, at, piece.shape) + piece, at)


def _add_columns(chunk: TracedChunk, table: Columns, total: Array, x: Array, relative: Array) -> Array:
    """Add ``Σ_i x_i relative_i`` to the chunk's columns of a table's gradient, summed over all that share the table."""
    if table.columns.ndim == 2:  # one product for all heads and items that share the table
        x, relative = (jnp.reshape(y, (math.prod(y.shape[:-1]), y.shape[-1])) for y in (x, relative))
    piece = sum_to(jnp.matmul(jnp.matrix_transpose(x), relative), total.shape[:-2], xp=jnp)
    return _add(total, piece, {-1: chunk.column(table)})


def _sum_mask(d_logits: Array, mask: Array) -> Array:
    """Sum along the axes on which a mask broadcasts."""
    for axis in (-2, -1):
        if mask.shape[axis] == 1:
            d_logits = jnp.sum(d_logits, axis=axis, keepdims=True)
    return sum_to(d_logits, mask.shape[:-2], xp=jnp)
