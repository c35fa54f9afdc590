"""Results that were computed piece by piece."""

from __future__ import annotations

from relskew_core._array.typing import Array, Namespace


def joined(pieces: list[Array], *, axis: int, xp: Namespace) -> Array:
    """Return arrays side by side along an axis; a single one is not copied."""
    return xp.concat(pieces, axis=axis) if len(pieces) > 1 else pieces[0]
