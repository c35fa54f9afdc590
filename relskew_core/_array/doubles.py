"""Arrays of numbers that are computed in double precision, for libraries that may not support it."""

from __future__ import annotations

from array import array
from collections.abc import Iterable
from typing import Any

from relskew_core._array.namespace import is_compiling, is_floating
from relskew_core._array.precision import cast, wide
from relskew_core._array.typing import Array, Namespace


def from_doubles(rows: Iterable[list[float]], *, xp: Namespace, dtype: Any = None, device: Any = None) -> Array:
    """Make an array (rows, columns) of ``dtype``, or of the library's default floating dtype.

    The numbers go through a buffer: nested lists take JAX ten times as long.
    """
    dtype = floating(dtype, xp=xp)
    code, buffered = ("d", xp.float64) if wide(dtype, xp=xp) == xp.float64 else ("f", xp.float32)
    if is_compiling():  # torch.compile supports no buffers
        return cast(xp.asarray(list(rows), dtype=buffered, device=device), dtype, xp=xp)
    numbers: array[float] = array(code)
    count = 0
    for row in rows:
        numbers.fromlist(row)
        count += 1
    made = xp.reshape(xp.asarray(numbers, dtype=buffered, device=device), (count, -1))
    return cast(made, dtype, xp=xp)


def floating(dtype: Any, *, xp: Namespace) -> Any:
    """Return a dtype, which must be floating, or the library's default floating one for ``None``."""
    # torch 2.8 exports no constant that nothing uses
    made = xp.empty(0, dtype=dtype, device="meta") if xp.__name__.endswith("torch") else xp.asarray(0.0, dtype=dtype)
    if not is_floating(made, xp=xp):
        raise TypeError(f"`dtype` must be a real floating dtype of the library, got {made.dtype}")
    return made.dtype
