"""Gathering along the last axis with the same indices for all heads, and the adjoint.

What belongs to all heads is moved as one row: one look-up instead of one for each head.
"""

from __future__ import annotations

import math

from relskew_core._array.namespace import device
from relskew_core._array.typing import Array, Namespace


def gather(x: Array, index: Array, *, xp: Namespace) -> Array:
    """Return ``x[..., h, i, index[..., 0, i, j]]``: (..., H, n, w) and (..., 1, n, m) to (..., H, n, m)."""
    n, m = index.shape[-2:]
    heads, width = x.shape[-3], x.shape[-1]
    # one of them has no leading axes, or both have the same
    lead = index.shape[:-3] if index.ndim >= x.ndim else x.shape[:-3]
    x = xp.broadcast_to(x, (*lead, heads, n, width))
    index = xp.broadcast_to(index, (*lead, 1, n, m))
    if hasattr(xp, "gather") and heads:  # torch, where copying short rows is slow
        own = index[..., 0, :, :]
        return xp.stack([xp.gather(x[..., head, :, :], -1, own) for head in range(heads)], axis=-3)
    rows = xp.reshape(_heads_last(x, xp=xp), (math.prod(lead) * n * width, heads))
    found = xp.take(rows, _places(index, width, xp=xp), axis=0)
    return _heads_first(xp.reshape(found, (*lead, n, m, heads)), xp=xp)


def scatter_add(s: Array, index: Array, width: int, *, xp: Namespace) -> Array:
    """Return the adjoint of :func:`gather`: sums of ``s`` by column, (..., H, n, m) to (..., H, n, w)."""
    *lead, heads, n, _ = s.shape
    index = xp.broadcast_to(index, (*lead, 1, *index.shape[-2:]))
    size, places = math.prod(lead) * n * width, _places(index, width, xp=xp)
    if hasattr(xp, "index_add"):  # torch
        rows = xp.reshape(_heads_last(s, xp=xp), (math.prod(lead) * n * s.shape[-1], heads))
        return _heads_first(
            s.new_zeros((size, heads)).index_add(0, places, rows).reshape(*lead, n, width, heads), xp=xp
        )
    if not hasattr(xp, "bincount"):
        return xp.stack([xp.sum(xp.where(index == c, s, 0.0), axis=-1) for c in range(width)], axis=-1)
    # JAX has an argument for a size that does not depend on values
    length = "length" if "jax" in xp.__name__ else "minlength"
    by_head = [
        xp.bincount(places, weights=xp.reshape(s[..., head, :, :], (-1,)), **{length: size}) for head in range(heads)
    ]
    return xp.stack([xp.astype(xp.reshape(own, (*lead, n, width)), s.dtype) for own in by_head], axis=-3)


def within(index: Array, width: int, *, xp: Namespace) -> Array:
    """Return columns clipped to the ``width`` columns that exist.

    array-api-compat's ``clip`` looks at types in a way that torch 2.8 cannot compile.
    """
    return xp.where(index < 0, 0, xp.where(index >= width, width - 1, index))


def _places(index: Array, width: int, *, xp: Namespace) -> Array:
    """Return the indices of columns among all columns of all items and queries, flat."""
    *lead, _, n, _ = index.shape
    first = xp.arange(math.prod(lead) * n, dtype=index.dtype, device=device(index)) * width
    return xp.reshape(index + xp.reshape(first, (*lead, 1, n, 1)), (-1,))


def _heads_last(x: Array, *, xp: Namespace) -> Array:
    lead = x.ndim - 3
    return xp.permute_dims(x, (*range(lead), lead + 1, lead + 2, lead))


def _heads_first(x: Array, *, xp: Namespace) -> Array:
    lead = x.ndim - 3
    return xp.permute_dims(x, (*range(lead), lead + 2, lead, lead + 1))
