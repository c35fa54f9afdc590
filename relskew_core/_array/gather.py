"""Numbers looked up along the last axis, and the adjoint: what the standard has no one name for in every library."""

from __future__ import annotations

import math

from relskew_core._array.namespace import device
from relskew_core._array.typing import Array, Namespace


def gather(x: Array, index: Array, *, xp: Namespace) -> Array:
    """Return ``x[..., i, index[..., i, j]]``; leading axes broadcast, ``index`` has two axes of its own."""
    if not hasattr(xp, "take_along_axis"):  # dask
        columns = [xp.where(index == c, x[..., c : c + 1], 0.0) for c in range(x.shape[-1])]
        return sum(columns[1:], columns[0])
    lead = _broadcast(x.shape[:-2], index.shape[:-2])
    x = xp.broadcast_to(x, (*lead, *x.shape[-2:]))
    return xp.take_along_axis(x, xp.broadcast_to(index, (*lead, *index.shape[-2:])), axis=-1)


def scatter_add(s: Array, index: Array, size: int, *, xp: Namespace) -> Array:
    """Return ``x[..., i, c]``, the sum of ``s[..., i, j]`` where ``index[..., i, j] == c``, for ``size`` columns."""
    index = xp.broadcast_to(index, s.shape)
    if hasattr(xp, "scatter_add"):  # torch
        return xp.scatter_add(s.new_zeros((*s.shape[:-1], size)), -1, index, s)
    if not hasattr(xp, "bincount"):
        return xp.stack([xp.sum(xp.where(index == c, s, 0.0), axis=-1) for c in range(size)], axis=-1)
    rows = math.prod(s.shape[:-1])
    first = xp.reshape(xp.arange(rows, dtype=index.dtype, device=device(s)), (*s.shape[:-1], 1)) * size
    flat, weights = xp.reshape(index + first, (-1,)), xp.reshape(s, (-1,))
    counted = _bincount(flat, weights, rows * size, xp=xp)
    return xp.astype(xp.reshape(counted, (*s.shape[:-1], size)), s.dtype)


def _bincount(flat: Array, weights: Array, size: int, *, xp: Namespace) -> Array:
    if "jax" in xp.__name__:  # whose sizes are never those of values
        return xp.bincount(flat, weights=weights, length=size)
    return xp.bincount(flat, weights=weights, minlength=size)


def _broadcast(*shapes: tuple[int, ...]) -> tuple[int, ...]:
    """Return the shape that shapes broadcast to."""
    count = max(len(shape) for shape in shapes)
    padded = [(1,) * (count - len(shape)) + tuple(shape) for shape in shapes]
    return tuple(max(sizes) if min(sizes) else 0 for sizes in zip(*padded, strict=True))
