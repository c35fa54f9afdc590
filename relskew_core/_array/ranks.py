"""Arrays of as many axes as others: JAX may be set to add no axes by itself (``jax_numpy_rank_promotion``)."""

from __future__ import annotations

from relskew_core._array.typing import Array


def of_rank(x: Array, rank: int) -> Array:
    """Return an array with at least ``rank`` axes, new ones in front."""
    return x if x.ndim >= rank else x[(*(None,) * (rank - x.ndim), ...)]


def same_rank(x: Array, y: Array) -> tuple[Array, Array]:
    """Return two arrays that broadcast, with as many axes each."""
    return of_rank(x, y.ndim), of_rank(y, x.ndim)
