"""The portable backward kernel: the forward pass's chunks again, and every gradient by the skew's adjoint.

Nothing but the inputs is kept from the forward pass: all keys of a chunk are at hand, so its weights are computed anew.
With ``P`` the weights, ``dP = dO · (V + EV)`` and ``Δ`` its mean by weight, ``dS = P ∘ (dP - Δ)``; then the product
with the table gets ``unskew(dS)``, and values with relative positions use ``unskew(P)``.
"""

from __future__ import annotations

from typing import NamedTuple

from relskew_core._array.known import in_turn
from relskew_core._array.softmax import share_of
from relskew_core._array.typing import Array, Namespace
from relskew_core._kernel.call import BY_QUERY, Gradients, Operands, Options
from relskew_core._kernel.chunk import chunks
from relskew_core._kernel.sums import GradientSums, Sums
from relskew_core._kernel.view import Tables, View, grouped_matmul
from relskew_core._positions.skew import pad_last


class Cotangents(NamedTuple):
    """The gradients of a call's results, and the results themselves if the caller kept them.

    Results are taken at their word: over a part of the keys those of the whole give this part's gradients.
    """

    d_out: Array
    out: Array | None = None
    sums: Array | None = None
    d_lse: Array | None = None


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
    tables = Tables.covering(operands, options, laid, xp=xp)
    gradients = GradientSums(operands, tables, xp)
    for chunk in laid:
        if chunk.first == chunk.end:
            gradients.add_nothing(chunk)
        else:
            done = gradients.done()
            now, then = in_turn(operands, BY_QUERY, done, xp=xp), in_turn(cotangents, ("d_out",), done, xp=xp)
            pull_back(View(now, options, tables, chunk, xp=xp), then, gradients)
    return gradients.gradients()


def pull_back(view: View, cotangents: Cotangents, sums: Sums) -> None:
    operands, options, tables, xp = view.operands, view.options, view.tables, view.xp
    d_out, whole = view.fresh(cotangents.d_out), cotangents.sums
    q, rel_q = view.scaled_queries()
    k, v = view.seen(operands.k), view.seen(operands.v)
    logits = view.logits(q, rel_q, k)
    weights, own = view.weights(logits, sums=whole is not None)
    if whole is not None:
        weights = weights * share_of(own, view.queries(whole), xp=xp)[..., None]
    factors = view.factors()
    of_values = weights if factors is None else weights * factors

    sums.add_keys(view, "v", of_values, d_out)
    d_weights = grouped_matmul(d_out, xp.matrix_transpose(v), xp=xp)
    if tables.rel_v is not None:
        relative, low, high = view.relative(of_values)
        if low <= high:
            product = view.table("rel_v").product(d_out, low, high, xp=xp)
            product = pad_last(product, low - view.chunk.low, view.chunk.high - high, xp=xp)
            d_weights = d_weights + view.absolute(product)
            d_weights = xp.where(weights == 0, weights, d_weights)  # hidden pairs may read rows that no query sees
            sums.add_table(view, "rel_v", low, high, relative, d_out)
    if factors is not None:
        d_weights = d_weights * factors

    d_logits = weights * (d_weights - _delta(view, cotangents, d_out, weights, d_weights))
    sums.add_mask(view, d_logits)
    if options.softcap is not None:
        ratio = logits * (1 / options.softcap)
        d_logits = xp.where(d_logits == 0, d_logits, d_logits * (1 - ratio * ratio))  # hidden logits may be infinite

    of_table = None
    if tables.key_table is not None:
        of_table = view.key_side_gradient(d_logits, k * options.rel_scale, sums) * options.rel_scale
    sums.add_keys(view, "k", d_logits, q, of_table)
    d_q = grouped_matmul(d_logits, k, xp=xp) * options.scale
    d_rel_q = _relative_gradient(view, d_logits, rel_q, sums)
    if operands.rel_q is None and d_rel_q is not None:
        d_q = d_q + d_rel_q
    sums.add_queries(view, q=d_q, rel_q=d_rel_q)


def _delta(view: View, cotangents: Cotangents, d_out: Array, weights: Array, d_weights: Array) -> Array:
    """Return the weighted mean of the weights' gradients, minus the gradient of the log-sum-exp."""
    _, out, _, d_lse = cotangents
    pairs = weights * d_weights if out is None else d_out * view.queries(out)
    delta = view.xp.sum(pairs, axis=-1, keepdims=True)
    return delta if d_lse is None else delta - view.fresh(d_lse[..., None])


def _relative_gradient(view: View, d_logits: Array, rel_q: Array, sums: Sums) -> Array | None:
    """Add to the gradients of ``rel_k`` and ``rel_bias``, and return that of ``rel_k``'s queries."""
    tables = view.tables
    if tables.rel_k is None and tables.rel_bias is None:
        return None
    relative, low, high = view.relative(d_logits)
    if low > high:
        return None
    if tables.rel_bias is not None:
        sums.add_table(view, "rel_bias", low, high, relative, None)
    if tables.rel_k is None:
        return None
    sums.add_table(view, "rel_k", low, high, relative, rel_q)
    return view.mixed("rel_k", relative, low, high) * view.options.rel_scale
