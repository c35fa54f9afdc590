"""The portable backward kernel: the forward pass's chunks again, and every gradient by the skew's adjoint.

Nothing but the inputs is kept from the forward pass: all keys of a chunk are at hand, so its weights are computed anew.
With ``P`` the weights, ``dP = dO · (V + EV)`` and ``Δ`` its mean by weight, ``dS = P ∘ (dP - Δ)``; then the product
with the table gets ``unskew(dS)``, and values with relative positions use ``unskew(P)``.
"""

from __future__ import annotations

from typing import NamedTuple

from relskew_core._array.known import in_turn, joined
from relskew_core._array.softmax import share_of
from relskew_core._array.typing import Array, Namespace
from relskew_core._kernel.by_value import placed
from relskew_core._kernel.call import BY_QUERY, Gradients, Operands, Options
from relskew_core._kernel.chunk import Chunk, chunks, visible_columns
from relskew_core._kernel.dropout import kept
from relskew_core._kernel.forward import (
    Tables,
    capped_gradient,
    chunk_logits,
    chunk_visible,
    chunk_weights,
    grouped_matmul,
    relative_queries,
    seen_of,
)
from relskew_core._kernel.key_side import blocks, by_key_head, by_query_head
from relskew_core._kernel.sums import GradientSums
from relskew_core._positions.skew import pad_last


class Cotangents(NamedTuple):
    """The gradients of a call's results, and the results themselves if the caller kept them.

    Results are taken at their word: over a part of the keys those of the whole give this part's gradients.
    """

    d_out: Array
    out: Array | None = None
    sums: Array | None = None
    d_lse: Array | None = None

    def delta(self, weights: Array, d_weights: Array, queries: slice, *, xp: Namespace) -> Array:
        """Return the weighted mean of the weights' gradients, minus the gradient of the log-sum-exp."""
        if self.out is None:
            delta = xp.sum(weights * d_weights, axis=-1, keepdims=True)
        else:
            delta = xp.sum(self.d_out[..., queries, :] * self.out[..., queries, :], axis=-1, keepdims=True)
        return delta if self.d_lse is None else delta - self.d_lse[..., queries][..., None]


def attention_vjp(
    d_out: Array,
    operands: Operands,
    options: Options,
    *,
    out: Array | None = None,
    sums: Array | None = None,
    d_lse: Array | None = None,
    xp: Namespace,
) -> Gradients:
    """Return the gradients of every operand.

    ``out`` and ``sums`` are the forward's, or those of more keys; ``out`` saves a pass over the weights.
    """
    cotangents = Cotangents(d_out, out, sums, d_lse)
    laid = list(chunks(operands, options))
    tables = Tables.of(operands, options, laid, xp=xp)
    sums = GradientSums(operands, tables, xp)
    for chunk in laid:
        if chunk.first == chunk.end:
            sums.add_nothing(chunk)
        else:
            chunk = placed(chunk, operands, options, xp=xp)
            done = sums.done()
            then = in_turn(cotangents, ("d_out",), done, xp=xp)
            _backward(then, in_turn(operands, BY_QUERY, done, xp=xp), options, tables, chunk, sums, xp=xp)
    return sums.gradients()


def _backward(
    cotangents: Cotangents,
    operands: Operands,
    options: Options,
    tables: Tables,
    chunk: Chunk,
    sums: GradientSums,
    *,
    xp: Namespace,
) -> None:
    queries = slice(chunk.start, chunk.stop)
    d_out = cotangents.d_out[..., queries, :]
    q = operands.q[..., queries, :] * options.scale
    visible = chunk_visible(operands, options, chunk, xp=xp)
    k, v = (seen_of(x, chunk, visible, xp=xp) for x in (operands.k, operands.v))

    logits = chunk_logits(k, operands, options, tables, chunk, xp=xp)
    whole = cotangents.sums
    weights, own = chunk_weights(logits, operands, options, chunk, visible, sums=whole is not None, xp=xp)
    if whole is not None:
        weights = weights * share_of(own, whole[..., queries, :], xp=xp)[..., None]
    factors = kept(operands, options, chunk, xp=xp) if options.dropout else None
    of_values = weights if factors is None else weights * factors

    sums.add_keys(chunk, v=grouped_outer(of_values, d_out, v.shape[-3], xp=xp))
    d_weights = grouped_matmul(d_out, xp.matrix_transpose(v), xp=xp)
    if tables.rel_v is not None:
        relative, low, high = visible_columns(chunk.relative(of_values, xp=xp), chunk, options)
        if low <= high:
            product = tables.rel_v.product(d_out, low, high, xp=xp)
            product = pad_last(product, low - chunk.low, chunk.high - high, xp=xp)
            d_weights = d_weights + chunk.absolute(product, xp=xp)
            d_weights = xp.where(weights == 0, weights, d_weights)  # hidden pairs may read rows that no query sees
            sums.add_table("rel_v", low, high, relative, d_out)
    if factors is not None:
        d_weights = d_weights * factors

    d_logits = weights * (d_weights - cotangents.delta(weights, d_weights, queries, xp=xp))
    sums.add_mask(chunk, d_logits)
    d_logits = capped_gradient(d_logits, logits, options, xp=xp)

    d_k = grouped_outer(d_logits, q, k.shape[-3], xp=xp)
    if tables.key_table is not None:
        d_k = d_k + _key_side_gradient(d_logits, k * options.rel_scale, options, chunk, sums, xp=xp)
    sums.add_keys(chunk, k=d_k)
    d_q = grouped_matmul(d_logits, k, xp=xp) * options.scale
    d_rel_q = _relative_gradient(d_logits, q, operands, options, chunk, sums, xp=xp)
    if operands.rel_q is None and d_rel_q is not None:
        d_q = d_q + d_rel_q
    sums.add_queries(chunk, q=d_q, rel_q=d_rel_q)


def _relative_gradient(
    d_logits: Array, q: Array, operands: Operands, options: Options, chunk: Chunk, sums: GradientSums, *, xp: Namespace
) -> Array | None:
    """Add to the gradients of ``rel_k`` and ``rel_bias``, and return that of ``rel_k``'s queries."""
    tables = sums.tables
    if tables.rel_k is None and tables.rel_bias is None:
        return None
    relative, low, high = visible_columns(chunk.relative(d_logits, xp=xp), chunk, options)
    if low > high:
        return None
    if tables.rel_bias is not None:
        sums.add_table("rel_bias", low, high, relative, None)
    if tables.rel_k is None:
        return None
    sums.add_table("rel_k", low, high, relative, relative_queries(operands, options, chunk, q))
    return tables.rel_k.mix(relative, low, high, looked_up=options.visibility.by_value, xp=xp) * options.rel_scale


def _key_side_gradient(
    d_logits: Array, keys: Array, options: Options, chunk: Chunk, sums: GradientSums, *, xp: Namespace
) -> Array:
    """Return the gradient of the chunk's keys through ``key_table``, and add to the table's gradient."""
    table, pieces = sums.tables.key_table, []
    assert table is not None
    lowest, highest = options.positions()
    for block in blocks(chunk, options, xp=xp):
        rows = slice(block.start - chunk.first, block.stop - chunk.first)
        relative = block.relative(xp.matrix_transpose(d_logits[..., rows]), xp=xp)
        low, high = block.low, block.high
        if not options.visibility.by_value:  # columns that no query sees are never multiplied, as in `visible_columns`
            low, high = max(low + (block.spare > 0), -highest), min(high, -lowest)
        own = keys[..., rows, :]
        seen = relative[..., low - block.low : high - block.low + 1]
        sums.add_table("key_table", low, high, seen, by_query_head(own, d_logits.shape[-3], xp=xp))
        mixed = table.mix(seen, low, high, looked_up=options.visibility.by_value, xp=xp)
        pieces.append(by_key_head(mixed * options.rel_scale, keys.shape[-3], xp=xp))
    return joined(pieces, axis=-2, xp=xp)


def grouped_outer(x: Array, y: Array, groups: int, *, xp: Namespace) -> Array:
    """Return ``Σ x_i y_iᵀ`` over the queries of a key head: (..., H, n, m), (..., H, n, D) -> (..., Hkv, m, D)."""
    *lead, heads, n, _ = x.shape
    if heads != groups:
        x, y = (xp.reshape(z, (*lead, groups, heads // groups * n, z.shape[-1])) for z in (x, y))
    return xp.matmul(xp.matrix_transpose(x), y)
