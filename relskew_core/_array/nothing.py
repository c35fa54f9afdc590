"""Results of arrays of which nothing counts, which autograd has to know as results nevertheless."""

from __future__ import annotations

from collections.abc import Iterable

from relskew_core._array.namespace import device, is_torch
from relskew_core._array.typing import Array, Namespace


def nothing(shape: tuple[int, ...], of: Iterable[Array | None], *, value: float = 0, xp: Namespace) -> Array:
    """Return an array of one value, of the dtype and on the device of the first array.

    torch's graph is drawn by what is computed: sums of none of their entries make it depend on all that can be learned.
    """
    arrays = [x for x in of if x is not None]
    made = xp.full(shape, value, dtype=arrays[0].dtype, device=device(arrays[0]))
    for x in arrays if is_torch(arrays[0]) else ():
        if x.dtype.is_floating_point:
            made = made + xp.sum(x[:0, ...])
    return made
