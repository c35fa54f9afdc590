"""cubed as a namespace of the array API: its module, with new arrays in the spec of the others.

An array's spec, where and in how much memory it is computed, takes the place of its device.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import cubed

from relskew_core._array.typing import Array


def __getattr__(name: str) -> Any:
    return getattr(cubed, name)


def _in_spec(name: str) -> Callable[..., Array]:
    return lambda *given, device=None, **options: getattr(cubed, name)(*given, spec=device, **options)


arange, asarray, full, ones, zeros = map(_in_spec, ("arange", "asarray", "full", "ones", "zeros"))


def concat(arrays: Sequence[Array], /, *, axis: int = 0) -> Array:
    """Join whole arrays: cubed reads the chunks of a broadcast one at wrong places, and accepts no negative axis."""
    return cubed.concat([x.rechunk(x.shape) for x in arrays], axis=axis % arrays[0].ndim)


def reshape(x: Array, /, shape: tuple[int, ...]) -> Array:
    """Reshape a whole array, because cubed accepts no chunks of different lengths."""
    return cubed.reshape(x.rechunk(x.shape), shape)
