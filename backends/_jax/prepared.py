"""JAX on CPUs: calls on concrete arrays, checked once for all equal calls, without tracing or compiling."""

from __future__ import annotations

from operator import attrgetter
from types import NoneType

import jax
import numpy as np

from relskew_core._array.typing import Array
from relskew_core._kernel.call import Operands, Options
from relskew_core.backends._compiled import Call
from relskew_core.backends._jax import compiled as kernels
from relskew_core.backends._jax import eager
from relskew_core.backends._numpy import compiled as of_numpy
from relskew_core.backends._numpy import prepared

# if the first array is made inside `jax.jit`, the type would otherwise be a tracer's
with jax.ensure_compile_time_eval():
    TYPES = frozenset((type(jax.device_put(np.float32(0))), NoneType))
"""The types of arguments: concrete arrays. Traced ones have a different type."""

HALF = False
"""Whether the kernels accept half precision."""


def ordinary() -> bool:
    """Whether no debugging mode of JAX has to see every step."""
    return not kernels.watched()


about = attrgetter("dtype", "sharding")
"""The properties of an array that a call's checks depend on, except for its shape."""


def call_of(x: Operands, options: Options) -> Call | None:
    """Return the description of a call for the compiled kernels, ``None`` if they do not support it."""
    there = eager.are_concrete([each for each in x if each is not None])
    return of_numpy.call_of(_of_numpy(x), options) if there and kernels.serves(x, options) else None


def attend(x: Operands, call: Call) -> tuple[Array, Array | None]:
    """Return the output (..., H, Lq, Dv) and, if requested, the log-sum-exp (..., H, Lq)."""
    out, lse = prepared.attend(_of_numpy(x), call, library=eager.LIBRARY)
    like = [each for each in x if each is not None]
    if lse is None:
        return eager.to_jax([out], like)[0], None
    out, lse = eager.to_jax([out, lse], like)
    return out, lse


def _of_numpy(x: Operands) -> Operands:
    return Operands(*[each if each is None else np.asarray(each) for each in x])
