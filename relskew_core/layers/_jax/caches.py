"""Caches for JAX: growing ones, and ones of constant shape, which ``jax.lax.scan`` can carry."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any, ClassVar, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import export
from jax.core import Tracer

from relskew_core._array.namespace import check_plain, is_torch
from relskew_core._array.typing import Array, Namespace
from relskew_core._block.cache import Growing, SlidingCache, check_fixed
from relskew_core._block.module import ModuleBlock
from relskew_core._block.spec import BlockSpec
from relskew_core._block.weights import uniform_bound


class FixedCache(NamedTuple):
    """Room for the keys and values of a whole sequence, with the same shape at every step.

    Parameters
    ----------
    keys, values : array, shape (..., Hkv, N, D)
        The keys and values so far, and room for more.
    length : array of integers, shape () or (...)
        Number of filled positions, for all items or for each. After prompts that were padded on the right, set it with
        ``cache = cache._replace(length=lengths)``: generated tokens then overwrite the padding.

    Notes
    -----
    Too many positions, or a negative ``length``, raise an error if it is known, and give NaN if it is traced.

    Examples
    --------
    >>> import equinox as eqx
    >>> import jax
    >>> from relskew_core import BlockSpec, Span
    >>> from relskew_core.layers.equinox import RelativeMultiheadAttention
    >>> spec = BlockSpec(8, 2, Span.causal(16), causal=True)
    >>> attention = RelativeMultiheadAttention(spec, key=jax.random.key(0))
    >>> x = jax.random.normal(jax.random.key(1), (16, 8), "float32")
    >>> def step(cache, token):
    ...     y, cache = attention(token[None], past=cache)
    ...     return cache, y[0]
    >>> cache, steps = jax.lax.scan(step, attention.empty_cache((), length=16), x)
    >>> bool(jax.numpy.allclose(steps, attention(x), atol=1e-5))
    True
    """

    keys: Array
    values: Array
    length: Array

    def extend(self, k: Array, v: Array, *, xp: Any) -> tuple[Array, Array, FixedCache, Mapping[str, Any]]:
        length = check_plain("past.length", self.length)
        if isinstance(length, int | np.ndarray | np.generic):
            with jax.ensure_compile_time_eval():
                length = jnp.asarray(length)
        room, n = self.keys.shape[-2], k.shape[-2]
        if check_fixed(self._replace(length=length), k, v, known=_known, xp=xp) is None:
            fits = ((length >= 0) & (length <= room - n))[..., None, None, None]
            k, v = (jnp.where(fits, x, jnp.nan) for x in (k, v))
            length = jnp.clip(length, 0, room - n)
        write = partial(jax.lax.dynamic_update_slice_in_dim, axis=-2)
        for _ in range(length.ndim):
            write = jax.vmap(write)
        keys, values = write(self.keys, k, length), write(self.values, v, length)
        return keys, values, FixedCache(keys, values, length + n), {"offset": length}


def _known(length: Array) -> Any:
    """Return numbers, on any device, that are not traced; ``None`` for those that this process has a part of."""
    known = not isinstance(length, Tracer) and length.is_fully_addressable
    return np.asarray(length).tolist() if known else None


Cache = Growing | FixedCache | SlidingCache

for kind in Cache.__args__:  # jax.export can then serialise a step
    export.register_namedtuple_serialization(kind, serialized_name=f"relskew_core.{kind.__name__}")


class JaxBlock(ModuleBlock[FixedCache, SlidingCache]):
    xp: ClassVar[Namespace] = jnp
    caches: ClassVar[tuple[type[Any], type[Any]]] = (FixedCache, SlidingCache)

    @staticmethod
    def _copied(x: Any) -> Array:
        if not is_torch(x):
            return jnp.array(x)
        # NumPy has no bfloat16 for torch, and JAX's `copy=True` would share the memory.
        return jnp.from_dlpack(x.detach().to("cpu", copy=True))


def drawn(spec: BlockSpec, name: str, key: Array, dtype: Any) -> Array:
    shape, bound = spec.weight_shapes()[name], uniform_bound(spec, name)
    return jax.random.uniform(key, shape, dtype, -bound, bound) if bound else jnp.zeros(shape, dtype)
