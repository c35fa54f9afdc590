"""Weights of JAX's modules: drawn with keys of ``jax.random``."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp

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
