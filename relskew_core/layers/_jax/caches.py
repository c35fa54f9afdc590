"""Caches for JAX: growing ones, and ones of constant shape, which ``jax.lax.scan`` can carry."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any, ClassVar, NamedTuple

import jax
import jax.numpy as jnp
from jax import export
from jax.core import Tracer

from relskew_core._array.namespace import is_torch
from relskew_core._array.typing import Array, Namespace
from relskew_core._block.cache import Growing, SlidingCache, check_cached
from relskew_core._block.module import ModuleBlock


class FixedCache(NamedTuple):
    """Room for the keys and values of a whole sequence, with the same shape at every step.

    Parameters
    ----------
    keys, values : array, shape (..., Hkv, N, D)
        The keys and values so far, and room for more.
    length : array of integers, shape () or (...)
        Number of filled positions, for all items or for each; the next keys are written after them. After prompts that
        were padded on the right, set their lengths with ``cache = cache._replace(length=lengths)``: generated tokens
        then overwrite the padding.

    Notes
    -----
    Too many positions raise an error if ``length`` is known, and give NaN if it is traced.

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
        """Write the new keys and values after the cached ones; the positions after them are hidden."""
        room, n = self.keys.shape[-2], k.shape[-2]
        length = jnp.asarray(self.length)
        fits = length + n <= room
        if not isinstance(length, Tracer) and not fits.all():
            raise ValueError(f"`past` must have room for {n} more positions, got {int(length.max())} of {room} filled")
        write = partial(jax.lax.dynamic_update_slice_in_dim, axis=-2)
        for _ in range(length.ndim):
            write = jax.vmap(write)
        written = []
        for name, old, new in (("past.keys", self.keys, k), ("past.values", self.values, v)):
            check_cached(name, old, room, new)
            written.append(write(old, jnp.where(fits[..., None, None, None], new, jnp.nan), length))
        keys, values = written
        return keys, values, FixedCache(keys, values, length + n), {"offset": length}


Cache = Growing | FixedCache | SlidingCache

for kind in Cache.__args__:  # jax.export can then serialise a step
    export.register_namedtuple_serialization(kind, serialized_name=f"relskew_core.{kind.__name__}")


class JaxBlock(ModuleBlock[FixedCache, SlidingCache]):
    """The shared part of the modules of both frameworks."""

    xp: ClassVar[Namespace] = jnp
    caches: ClassVar[tuple[type[Any], type[Any]]] = (FixedCache, SlidingCache)

    @staticmethod
    def _copied(x: Any) -> Array:
        if not is_torch(x):
            return jnp.array(x)
        # NumPy has no bfloat16 for torch, and JAX's `copy=True` would share the memory.
        return jnp.from_dlpack(x.detach().to("cpu", copy=True))
