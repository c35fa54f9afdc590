"""The precision in which sums are accumulated, and that of the results."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from relskew_core._array.typing import Array, Namespace


def wide(dtype: Any, *, xp: Namespace) -> Any:
    """Return the dtype in which arrays are summed: float16 and bfloat16 are never accumulated.

    NumPy's dtypes in the other byte order are not those of results.
    """
    dtype = dtype.newbyteorder("=") if hasattr(dtype, "newbyteorder") else dtype
    half = any(dtype == getattr(xp, name) for name in ("float16", "bfloat16") if hasattr(xp, name))
    return xp.float32 if half else dtype


def widened(arrays: Iterable[Array | None], dtype: Any, *, xp: Namespace) -> list[Any]:
    """Return the arrays of ``dtype`` in the dtype in which they are summed; others are unchanged."""
    return [x if x is None or x.dtype != dtype else cast(x, wide(dtype, xp=xp), xp=xp) for x in arrays]


def cast(x: Array, dtype: Any, *, xp: Namespace) -> Array:
    """Return an array in a dtype, without a copy if it has that dtype."""
    return x if x.dtype == dtype else xp.astype(x, dtype)


def settled(x: Array, dtype: Any, *, xp: Namespace) -> Array:
    """Return an array in a dtype if JAX says that it has none yet: made of Python's floats, as by ``jnp.where``."""
    weak = x.dtype != dtype and getattr(x, "weak_type", False) and xp.isdtype(x.dtype, "real floating")
    return cast(x, dtype, xp=xp) if weak else x
