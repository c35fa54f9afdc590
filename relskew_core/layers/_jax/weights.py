"""Weights of JAX's modules: drawn with keys of ``jax.random``, or copied from a mapping of any array library."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp

from relskew_core._array.namespace import is_torch
from relskew_core._array.typing import Array
from relskew_core._block.spec import BlockSpec
from relskew_core._block.weights import starts_at_zero, uniform_bound


def drawn(spec: BlockSpec, name: str, key: Array, dtype: Any) -> Array:
    """Draw the weight of a name, in the bounds of :func:`relskew_core.init_weights`."""
    shape = spec.weight_shapes()[name]
    if starts_at_zero(name):
        return jnp.zeros(shape, dtype)
    bound = uniform_bound(spec, name)
    return jax.random.uniform(key, shape, dtype, -bound, bound)


def taken(weights: Any, spec: BlockSpec) -> Mapping[str, Array]:
    """Return copies of a mapping's arrays as JAX arrays."""
    spec.check_weights(weights)
    return {name: _copy(weights[name]) for name in spec.weight_shapes()}


def _copy(x: Any) -> Array:
    if not is_torch(x):
        return jnp.array(x)
    # NumPy has no bfloat16 for torch, and JAX's `copy=True` would share the memory.
    return jnp.from_dlpack(x.detach().to("cpu", copy=True))
