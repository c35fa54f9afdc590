"""Integers of a library's default width: 64 bits, or 32 in JAX without ``jax_enable_x64``."""

from __future__ import annotations

from typing import Any

from relskew_core._array.namespace import device, is_torch
from relskew_core._array.typing import Array, Namespace


def integer(xp: Namespace) -> Any:
    """Return the default integer dtype; sums and differences of smaller or unsigned integers would wrap."""
    if xp.__name__.endswith("torch"):  # its compiler would trace an array
        return xp.int64
    if xp.__name__ == "jax.numpy":  # JAX would compile a program for an array
        return xp.result_type(int)
    return xp.asarray(0).dtype


def integers(start: int, stop: int, *, device: object, xp: Namespace) -> Array:
    """Return ``start … stop - 1``."""
    return xp.arange(start, stop, dtype=integer(xp), device=device)


def bits_of(dtype: Any, *, xp: Namespace) -> int:
    """Return the number of bits of that dtype."""
    return 32 if dtype == xp.int32 else 64


def widest(x: Array, *, xp: Namespace) -> Array:
    """Return integers in that dtype; unsigned ones that exceed its maximum become the maximum."""
    dtype = integer(xp)
    if x.dtype == dtype:
        return x
    bits = bits_of(dtype, xp=xp)
    if str(x.dtype).endswith(f"uint{bits}") and not is_torch(x):  # torch does not compare these
        greatest = 2 ** (bits - 1) - 1
        x = xp.where(x > greatest, xp.asarray(greatest, dtype=x.dtype, device=device(x)), x)
    return xp.astype(x, dtype)


def shifted(x: Array, by: int, *, xp: Namespace) -> Array:
    """Return ``x + by`` for an int of any size, clipped to the dtype's range instead of wrapping."""
    if by == 0:
        return x
    end = 2 ** (bits_of(x.dtype, xp=xp) - 1)
    by = max(2 - 2 * end, min(by, 2 * end - 2))
    last = (end - 1 if by > 0 else -end) - by
    x = xp.where(x > last if by > 0 else x < last, last, x)
    half = by // 2 if abs(by) >= end else 0  # each number that is added must fit the dtype, too
    return (x + half if half else x) + (by - half)


def blocks(x: Array, size: int, *, xp: Namespace) -> Array:
    """Return ``x // size`` for blocks of any size."""
    return x // size if size < 2 ** (bits_of(x.dtype, xp=xp) - 1) else xp.where(x < 0, -1, 0)
