"""JAX: calls with few logits, all queries at once, differentiated by JAX itself.

A loop of one turn is dear: its places are traced, and its backward pass computes the weights anew. Here the compiler
sees one expression of constant shapes and joins what it can, and the weights stay for the backward pass.
"""

from __future__ import annotations

import math
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from relskew_core._array.checks import is_symbol
from relskew_core._array.softmax import NEGLIGIBLE, joint, of_rank
from relskew_core._array.typing import Array
from relskew_core._kernel.call import Operands, Options, unsupported
from relskew_core._kernel.forward import capped, grouped_matmul
from relskew_core._positions.skew import pad_last, skew_from, unskew_from
from relskew_core._positions.span import Span
from relskew_core.backends._jax.explicit import explicitly_split
from relskew_core.backends._jax.manual import axes_of
from relskew_core.backends._path import COMMON

SUPPORTED = COMMON - {"chunk_size"} | {"softcap", "blocks_before"}
"""The arrays and options that this path supports."""

KEPT = 2**20
"""The most weights that a call may keep for its backward pass: 4 MiB."""

LOGITS = 2**14
"""The most logits of a head for this path, so that it is faster, and keeps little under ``jax.vmap``."""


class Layout(NamedTuple):
    """The keys ``first … end - 1``, and the columns of the tables in relative layout."""

    first: int
    end: int
    width: int  # columns, at least as many as keys
    row: int  # of the tables, for the first column; it may be outside the tables
    seen: slice  # the columns that some query sees

    @classmethod
    def of(cls, options: Options) -> Layout | None:
        """Lay out a call, ``None`` if no query sees a key."""
        visibility, reach = options.visibility, options.visibility.positions()
        if reach is None:
            return None
        first, end = visibility.keys(0, visibility.n_queries)
        low = first - (visibility.n_queries - 1) - visibility.offset
        width = max(reach[1] - low + 1, end - first)
        return cls(first, end, width, low + options.span.left, slice(max(reach[0] - low, 0), reach[1] - low + 1))

    def rows(self, span: Span) -> list[int]:
        """Return the row of every column: the nearest, or one past the last for positions beyond ``"zero"`` tables.

        A table that has to reach has a row for what is seen; what is not seen may be anything.
        """
        rows = range(self.row, self.row + self.width)
        if span.beyond == "zero":
            return [row if 0 <= row < span.rows else span.rows for row in rows]
        return [min(max(row, 0), span.rows - 1) for row in rows]


def serves(x: Operands, options: Options) -> bool:
    """Whether this path is faster, and the values that a call depends on are known."""
    if axes_of(x) or explicitly_split(x):  # the loops create arrays with the types that these require
        return False
    if (
        unsupported(x, options, SUPPORTED)
        or any(map(is_symbol, x.q.shape))
        or 0 in (*x.q.shape, *x.k.shape, *x.v.shape)
    ):
        return False
    logits = x.q.shape[-2] * x.k.shape[-2]
    heads = math.prod(x.q.shape[:-2])
    return logits <= LOGITS and heads * logits <= KEPT and Layout.of(options) is not None


def attention(operands: Operands, options: Options, *, xp: Any) -> tuple[Array, Array | None]:
    """Return the output (..., H, Lq, Dv) and, if requested, the sums of weights (..., H, Lq, 2)."""
    result: tuple[Array, Array | None] = _attend(operands, options)
    return result


@partial(jax.jit, static_argnames="options")
@jax.named_scope("relative_attention")
def _attend(x: Operands, options: Options) -> tuple[Array, Array | None]:
    layout = Layout.of(options)
    assert layout is not None
    keys = slice(layout.first, layout.end)
    visible = _visible(options, x, layout)
    logits = _logits(x, x.k[..., keys, :], options, layout)
    if options.softcap is not None:
        if visible is not None:  # 0 times a slope of NaN is not 0
            logits = jnp.where(visible, logits, 0.0)
        logits = capped(logits, options, xp=jnp)
    if x.mask is not None and x.mask.dtype != bool:
        logits = logits + of_rank(_of_keys(x.mask, layout), logits.ndim)
    if visible is not None:
        logits = jnp.where(visible, logits, -math.inf)

    largest = lax.stop_gradient(jnp.max(logits, axis=-1, keepdims=True))
    dead = None
    if x.mask is not None or options.visibility.some_query_sees_nothing():
        dead = largest == -math.inf
        largest = jnp.where(dead, 0.0, largest)
    shifted = logits - largest  # like `softmax`, in the order that the compiler optimises best
    weights = jnp.where(shifted < NEGLIGIBLE, 0.0, jnp.exp(shifted))
    total = jnp.sum(weights, axis=-1, keepdims=True)
    total = total if dead is None else jnp.where(dead, 1.0, total)
    weights = weights / total
    out = grouped_matmul(weights, x.v[..., keys, :], xp=jnp)
    if x.rel_v is not None:
        out = out + jnp.matmul(_relative(weights, layout), _rows(x.rel_v, options.span, layout))
    if not options.return_lse:
        return out, None
    most = largest if dead is None else jnp.where(dead, -math.inf, largest)
    return out, jnp.concatenate([most, jnp.log(total)], axis=-1)


def _logits(x: Operands, k: Array, options: Options, layout: Layout) -> Array:
    """Return the logits (..., H, n, m) before softcap and masks. Scaling last lets the compiler fuse it."""
    product = grouped_matmul(x.q, jnp.matrix_transpose(k), xp=jnp)
    relative = None
    if x.rel_k is not None:
        rel_q = x.q if x.rel_q is None else x.rel_q
        relative = _absolute(_product(rel_q, x.rel_k, options.span, layout), layout)
    if relative is not None and options.rel_scale == options.scale:
        logits = (product + relative) * options.scale
    else:
        logits = product * options.scale
        logits = logits if relative is None else logits + relative * options.rel_scale
    if x.rel_bias is None:
        return logits
    bias, n = jnp.matrix_transpose(_rows(x.rel_bias[..., None], options.span, layout)), x.q.shape[-2]
    biases = _absolute(jnp.broadcast_to(bias, (*bias.shape[:-2], n, bias.shape[-1])), layout)
    return logits + of_rank(biases, logits.ndim)


def _visible(options: Options, x: Operands, layout: Layout) -> Array | None:
    """Return the visible keys of the queries, ``None`` if all are visible."""
    pattern = options.visibility
    visible = pattern.mask(0, pattern.n_queries, layout.first, layout.end, xp=np, device="cpu")
    visible = None if visible is None else jnp.asarray(visible)
    if x.mask is None:
        return visible
    mask = _of_keys(x.mask, layout)
    allowed = mask if mask.dtype == bool else mask > -math.inf
    return joint(visible, allowed, xp=jnp)


def _of_keys(mask: Array, layout: Layout) -> Array:
    return mask if mask.shape[-1] == 1 else mask[..., layout.first : layout.end]


def _product(q: Array, table: Array, span: Span, layout: Layout) -> Array:
    """Return the products with the rows of a table for the columns that some query sees."""
    places = _places(span, layout)
    if places[-1] - places[0] == len(places) - 1 or 2 * table.shape[-2] > len(places):
        return jnp.matmul(q, jnp.matrix_transpose(_rows(table, span, layout)))
    # few rows: multiply all of them, and select columns
    return _taken(jnp.matmul(q, jnp.matrix_transpose(table)), places, -1)


def _rows(table: Array, span: Span, layout: Layout) -> Array:
    """Return the rows of a table for the columns of the relative layout that some query sees."""
    return _taken(table, _places(span, layout), -2)


def _places(span: Span, layout: Layout) -> list[int]:
    return layout.rows(span)[layout.seen]


def _taken(x: Array, places: list[int], axis: int) -> Array:
    """Return entries along an axis, zeros for indices past its end."""
    count = x.shape[axis]
    if places[-1] - places[0] == len(places) - 1 and places[-1] < count:  # the places are consecutive
        return lax.slice_in_dim(x, places[0], places[-1] + 1, axis=x.ndim + axis)
    taken = jnp.take(x, np.minimum(places, count - 1), axis=axis)
    if max(places) < count:
        return taken
    there = np.less(places, count)
    return jnp.where(there if axis == -1 else there[:, None], taken, 0.0)


def _absolute(x: Array, layout: Layout) -> Array:
    """Relative layout, of the columns that some query sees (..., n, columns), to absolute layout (..., n, m)."""
    n, m = x.shape[-2], layout.end - layout.first
    width = max(layout.width, m + (n > 1))  # in each further row, the skew reads one column earlier
    wide = pad_last(x, layout.seen.start, width - layout.seen.stop, xp=jnp)
    return skew_from(wide, n_keys=m, first=n - 1, xp=jnp)


def _relative(s: Array, layout: Layout) -> Array:
    """Absolute layout (..., n, m) to relative layout, of the columns that some query sees."""
    n, m = s.shape[-2:]
    return unskew_from(s, width=n + m, first=n - 1, xp=jnp)[..., layout.seen]
