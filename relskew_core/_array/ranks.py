"""Arrays with added or moved axes: ``jax_numpy_rank_promotion`` may forbid that JAX adds axes.

And their axes in another order.
"""

from __future__ import annotations

from relskew_core._array.typing import Array, Namespace


def of_rank(x: Array, rank: int) -> Array:
    """Return an array with at least ``rank`` axes; new ones come first."""
    return x if x.ndim >= rank else x[(*(None,) * (rank - x.ndim), ...)]


def same_rank(x: Array, y: Array) -> tuple[Array, Array]:
    """Return two arrays that broadcast, with the same number of axes."""
    return of_rank(x, y.ndim), of_rank(y, x.ndim)


def moved(x: Array, axis: int, to: int, *, xp: Namespace) -> Array:
    """Return an array with an axis moved; ``torch.vmap`` does not support the name ``moveaxis``."""
    order = [place for place in range(x.ndim) if place != axis % x.ndim]
    order.insert(to % x.ndim, axis % x.ndim)
    return xp.permute_dims(x, tuple(order))
