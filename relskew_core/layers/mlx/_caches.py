"""Caches of constant shape, so that ``mx.compile`` compiles a decoding step once."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

import mlx.core as mx

from relskew_core._array.known import known_values
from relskew_core._array.typing import Array
from relskew_core._block.cache import check_cached


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
    Too many positions are an error where ``length`` is known, and NaN where it is compiled.

    Examples
    --------
    >>> import mlx.core as mx
    >>> from relskew_core import BlockSpec, Span
    >>> from relskew_core.layers.mlx import RelativeMultiheadAttention
    >>> attention = RelativeMultiheadAttention(
    ...     BlockSpec(8, 2, Span.causal(16), causal=True)
    ... )
    >>> x = mx.random.normal((2, 6, 8))
    >>> _, cache = attention(x[:, :4], past=attention.empty_cache(2, length=16))
    >>> cache = cache._replace(length=mx.array([4, 3]))  # the second prompt is shorter
    >>> y, cache = attention(x[:, 4:5], past=cache)
    >>> cache.length
    array([5, 4], dtype=int32)
    """

    keys: Array
    values: Array
    length: Array

    def extend(self, k: Array, v: Array, *, xp: Any) -> tuple[Array, Array, FixedCache, Mapping[str, Any]]:
        """Write the new keys and values after the cached ones; the positions after them are hidden."""
        room, n = self.keys.shape[-2], k.shape[-2]
        last = known_values(mx.max(self.length))
        if last is not None and last + n > room:
            raise ValueError(f"`past` must have room for {n} more positions, got {last} of {room} filled")
        places = mx.minimum(self.length[..., None] + mx.arange(n), room - 1)[..., None, :, None]
        fits = (self.length + n <= room)[..., None, None, None]
        written = []
        for name, old, new in (("past.keys", self.keys, k), ("past.values", self.values, v)):
            check_cached(name, old, room, new)
            new = mx.where(fits, new, mx.nan)
            written.append(mx.put_along_axis(old, mx.broadcast_to(places, new.shape), new, axis=-2))
        keys, values = written
        return keys, values, FixedCache(keys, values, self.length + n), {"offset": self.length}
