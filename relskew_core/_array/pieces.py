"""Results that are computed piece by piece."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from relskew_core._array.typing import Array, Namespace


def in_turn(arrays: Any, names: Sequence[str], done: list[Array], *, xp: Namespace) -> Any:
    """Return arrays, the named ones of which wait until others are computed, in libraries that compute lazily.

    MLX would compute many pieces side by side, and keep what each needs.
    """
    wait = getattr(xp, "after", None)
    if wait is None or not done:
        return arrays
    given = {name: x for name in names if (x := getattr(arrays, name)) is not None}
    return arrays._replace(**{name: wait(x, done) for name, x in given.items()})


def joined(pieces: list[Array], *, axis: int, xp: Namespace) -> Array:
    """Return arrays side by side along an axis; a single one is not copied."""
    return xp.concat(pieces, axis=axis) if len(pieces) > 1 else pieces[0]
