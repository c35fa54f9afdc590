"""MLX as a namespace of the array API: its module, except for functions that it lacks or computes less precisely.

Its arrays are in the host's memory, which its devices share, and no function takes a device.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import mlx.core as mx

from relskew_core._array.typing import Array


def __getattr__(name: str) -> Any:
    if name == "softmax":  # in float64, MLX's is only as precise as float32
        raise AttributeError(name)
    return getattr(mx, "bool_" if name == "bool" else name)


def _anywhere(name: str) -> Callable[..., Array]:
    def call(*given: Any, device: Any = None, **options: Any) -> Array:
        return getattr(mx, name)(*given, **options)

    call.__doc__ = getattr(mx, name).__doc__
    return call


arange, asarray, full, ones, zeros = map(_anywhere, ("arange", "asarray", "full", "ones", "zeros"))


def after(x: Array, done: list[Array]) -> Array:
    """Return an array that is computed after all of ``done``, like MLX's ``depends``, but with ``vmap``."""
    ends = [mx.isnan(mx.sum(each[..., :1, :1])) for each in done]
    return x + mx.astype(mx.any(mx.stack(ends)) & False, x.dtype)


def exp(x: Array) -> Array:
    """Return exponentials; in float64, a step of Halley's method corrects MLX's float32 results."""
    found = mx.exp(x)
    if x.dtype != mx.float64:
        return found
    there = found > 0
    rest = mx.where(there, x, 0.0) - mx.log(mx.where(there, found, 1.0))
    return found * (1 + rest + rest * rest / 2)
