"""Arrays without effect on the results, which must still depend on them for autograd."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from relskew_core._array.namespace import device, is_torch
from relskew_core._array.typing import Array, Namespace


def nothing(shape: tuple[int, ...], of: Iterable[Array | None], *, value: float = 0, xp: Namespace) -> Array:
    """Return an array with one value that depends on all arrays, with the dtype and device of the first."""
    arrays = [x for x in of if x is not None]
    made = xp.full(shape, value, dtype=arrays[0].dtype, device=device(arrays[0]))
    return depending(made, arrays, xp=xp)


def depending(x: Array, others: Iterable[Any], *, xp: Namespace) -> Array:
    """Return an array unchanged, but depending on those of the other arrays that can be learned.

    torch goes by what is computed, and takes sums of none of their entries for it; other libraries go by arguments.
    """
    for other in others:
        if is_torch(other) and other.dtype.is_floating_point:
            x = x + xp.sum(other[None, ...][:0, ...])
    return x
