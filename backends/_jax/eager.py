"""JAX on CPUs: pass concrete arrays to the kernels like those of NumPy, and return the results as arrays of JAX."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import jax
import numpy as np

from relskew_core._array.typing import Array
from relskew_core.backends._numpy import compiled as of_numpy

ALIGNMENT = 64
"""The alignment of arrays that XLA reads without a copy."""


def are_concrete(arrays: Sequence[Array]) -> bool:
    """Whether arrays are concrete, unsplit, and on one CPU."""
    device = None
    for x in arrays:
        if not isinstance(x, jax.Array) or isinstance(x, jax.core.Tracer):  # arrays made inside `jax.jit` are tracers
            return False
        devices = x.sharding.device_set
        if len(devices) != 1 or (device is not None and device not in devices):
            return False
        (device,) = devices
    return device is not None and device.platform == "cpu"


def to_jax(found: Sequence[Any], like: Sequence[Any]) -> list[Array]:
    """Return NumPy arrays as JAX arrays, on the device of those that they were computed from."""
    place = next((x.sharding for x in like if x.committed), None)
    return [jax.device_put(x, place) for x in found]


def _empty(shape: Sequence[int], dtype: Any) -> Any:
    """Return an array that JAX adopts without a copy."""
    count, size = math.prod(shape), dtype.itemsize
    room = np.empty(count + ALIGNMENT // size, dtype)
    start = -room.ctypes.data % ALIGNMENT // size
    return room[start : start + count].reshape(shape)


LIBRARY = of_numpy.NUMPY._replace(empty=_empty)
