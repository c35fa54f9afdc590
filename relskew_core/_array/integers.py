"""Integers as wide as a library makes them unasked: 64 bits, or 32 where JAX has no others."""

from __future__ import annotations

from typing import Any

from relskew_core._array.typing import Array, Namespace


def integer(xp: Namespace) -> Any:
    """Return the dtype; small and unsigned integers, of which calls take sums and differences, would wrap."""
    return xp.asarray(0).dtype


def integers(start: int, stop: int, *, device: object, xp: Namespace) -> Array:
    """Return ``start … stop - 1``."""
    return xp.arange(start, stop, dtype=integer(xp), device=device)
