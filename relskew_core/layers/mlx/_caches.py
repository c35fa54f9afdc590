"""Caches of constant shape, so that ``mx.compile`` compiles a decoding step once."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

import mlx.core as mx

from relskew_core._array.typing import Array
from relskew_core._block.cache import check_fixed


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
    Too many positions, or a negative ``length``, raise an error if it is known, and give NaN if it is compiled.

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
        length, room, n = self.length, self.keys.shape[-2], k.shape[-2]
        if check_fixed(self, k, v, xp=xp) is None:
            fits = mx.logical_and(length >= 0, length <= room - n)[..., None, None, None]
            k, v = (mx.where(fits, x, mx.nan) for x in (k, v))
            length = mx.clip(length, 0, room - n)
        places = (length[..., None] + mx.arange(n))[..., None, :, None]
        keys, values = (
            mx.put_along_axis(old, mx.broadcast_to(places, new.shape), new, axis=-2)
            for old, new in ((self.keys, k), (self.values, v))
        )
        return keys, values, FixedCache(keys, values, length + n), {"offset": length}
