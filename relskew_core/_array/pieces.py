"""Results that are computed piece by piece."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
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


def ranges(n: int, size: int) -> Iterator[tuple[int, int]]:
    """Return the ranges of ``size`` numbers, and a last one of the rest, that ``0 … n - 1`` consists of.

    A program of ``torch.compile`` depends on how many there are, but not on ``n``; ``range`` would make it a constant.
    """
    start = 0
    while start + size < n:
        yield start, start + size
        start += size
    if start < n:
        yield start, n


def joined(pieces: list[Array], *, axis: int, xp: Namespace) -> Array:
    """Return arrays side by side along an axis; a single one is not copied."""
    return xp.concat(pieces, axis=axis) if len(pieces) > 1 else pieces[0]
