"""Masks together: boolean ones, True where something is seen, and numbers that are added to logits."""

from __future__ import annotations

import math

from relskew_core._array.ranks import same_rank
from relskew_core._array.typing import Array, Namespace


def joint(x: Array | None, y: Array | None, *, xp: Namespace) -> Array | None:
    """Return two masks as one: numbers are added, and what either hides is hidden."""
    if x is None or y is None:
        return y if x is None else x
    x, y = same_rank(x, y)
    if x.dtype == y.dtype == xp.bool:
        return xp.logical_and(x, y)
    if xp.bool not in (x.dtype, y.dtype):
        return x + y
    seen, numbers = (x, y) if x.dtype == xp.bool else (y, x)
    return xp.where(seen, numbers, -math.inf)
