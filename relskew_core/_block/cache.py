"""The cache of a block: the keys and values of the positions before the queries."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from itertools import chain
from typing import Any, NamedTuple, Protocol

from relskew_core._array.checks import check_int, describe, has_shape, is_array
from relskew_core._array.known import known_values, symbolic
from relskew_core._array.namespace import check_plain, device, is_torch
from relskew_core._array.precision import cast, integers
from relskew_core._array.typing import Array, Namespace
from relskew_core._block.spec import BlockSpec

PAST = ("past[0]", "past[1]")
"""The names of keys and values in errors."""


class Cache(Protocol):
    def extend(self, k: Array, v: Array, *, xp: Namespace) -> tuple[Array, Array, Any, Mapping[str, Any]]: ...


class Growing(NamedTuple):
    """All keys and values so far, ``(..., Hkv, P, D)``; every call appends to them."""

    keys: Array
    values: Array

    @classmethod
    def of(cls, past: Any, spec: BlockSpec) -> Growing:
        if spec.cross:
            raise ValueError("`past` must be None because `spec.cross` is True: a memory does not grow")
        if not isinstance(past, (tuple, list)) or len(past) != 2:
            raise TypeError(f"`past` must be a pair (keys, values) of arrays, got {describe(past)}")
        return cls(*past)

    def extend(self, k: Array, v: Array, *, xp: Namespace) -> tuple[Array, Array, Growing, Mapping[str, Any]]:
        shape: tuple[int, ...] = tuple(getattr(self.keys, "shape", ()))
        length = shape[-2] if len(shape) > 1 else 0
        for name, value, new in zip(PAST, self, (k, v), strict=True):
            check_cached(name, value, length, new)
        # NumPy's results have the byte order of the machine
        k, v = (cast(xp.concat([old, new], axis=-2), new.dtype, xp=xp) for old, new in zip(self, (k, v), strict=True))
        return k, v, Growing(k, v), {"offset": length}


def slid(cache: Any, k: Array, v: Array, *, xp: Namespace) -> tuple[Array, Array, Any, dict[str, Any]]:
    """Append new keys and values to the last ones, given with their number, and drop as many old ones."""
    check_filled(cache, k, v, xp=xp)
    keep, n = cache.keys.shape[-2], k.shape[-2]
    k, v = (xp.concat(pair, axis=-2) for pair in ((cache.keys, k), (cache.values, v)))
    # JAX may have split the arrays over devices, and then integers on one of them would not fit
    place = device(k) if is_torch(k) else None
    unfilled = integers(0, keep + n, device=place, xp=xp) < keep - cache.length
    length = cache.length + n
    # array-api-compat 1.15 has no `minimum` of a tensor and a number
    length = xp.where(length < keep, length, keep)
    kept = (x[..., n:, :] for x in (k, v))
    if is_torch(k):  # a view would keep the whole prompt, and its strides would differ at the next step
        kept = (x.contiguous() for x in kept)
    return k, v, type(cache)(*kept, length), {"offset": keep, "window": (keep, 0), "unfilled": unfilled}


class SlidingCache(NamedTuple):
    """The last keys and values: attention with this cache equals attention with ``window=(keep, 0)``.

    A query attends to itself and the ``keep`` positions before it. Positions further away are dropped, while
    :class:`FixedCache` keeps all.

    Parameters
    ----------
    keys, values : array, shape (..., Hkv, keep, D)
        The last positions, in order; in the beginning, room in front of them.
    length : array of integers, shape ()
        How many of them there are, at most ``keep``.

    Examples
    --------
    >>> import equinox as eqx
    >>> import jax
    >>> from relskew_core import BlockSpec, Span
    >>> from relskew_core.layers.equinox import RelativeMultiheadAttention
    >>> spec = BlockSpec(8, 2, Span.causal(4), causal=True, window=(3, 0))
    >>> attention = RelativeMultiheadAttention(spec, key=jax.random.key(0))
    >>> x = jax.random.normal(jax.random.key(1), (100, 8), "float32")
    >>> def step(cache, token):
    ...     y, cache = attention(token[None], past=cache)
    ...     return cache, y[0]
    >>> cache, steps = jax.lax.scan(step, attention.empty_cache((), keep=3), x)
    >>> bool(jax.numpy.allclose(steps, attention(x), atol=1e-5))
    True
    """

    keys: Array
    values: Array
    length: Array

    def extend(self, k: Array, v: Array, *, xp: Any) -> tuple[Array, Array, SlidingCache, Mapping[str, Any]]:
        return slid(self, k, v, xp=xp)


def check_cached(name: str, value: Any, length: int, new: Array) -> None:
    *lead, heads, _, width = new.shape
    check_plain(name, value)
    if tuple(getattr(value, "shape", ())) != (*lead, heads, length, width):
        raise ValueError(
            f"`{name}` must have shape (..., {heads}, past length, {width}) with the leading axes of `x`, "
            f"{tuple(lead)}, and one past length, got {describe(value)}"
        )
    if value.dtype != new.dtype:
        raise TypeError(f"`{name}` must have the dtype of the new keys and values, {new.dtype}, got {describe(value)}")


def check_filled(
    cache: Any, k: Array, v: Array, *, known: Callable[[Array], Any] = known_values, xp: Namespace
) -> list[int] | None:
    """Refuse a cache of constant shape that new keys and values cannot follow.

    Return how many positions of each item are filled, or of all; ``None`` if that is not ``known``.
    """
    for name, old, new in (("past.keys", cache.keys, k), ("past.values", cache.values, v)):
        check_cached(name, old, cache.keys.shape[-2], new)
    length, lead = check_plain("past.length", cache.length), tuple(k.shape[:-3])
    try:
        integral = is_array(length) and xp.isdtype(length.dtype, "integral")
    except TypeError:  # raised by MLX for NumPy's dtypes
        integral = False
    if not integral:
        raise TypeError(f"`past.length` must be an array of integers, of the library of `x`, got {describe(length)}")
    if not has_shape(length, (), lead):
        raise ValueError(
            f"`past.length` must be one for all items, or one for each of the leading axes of `x`, {lead}, got "
            f"{describe(length)}"
        )
    values: Any = known(length)
    values = [values] if isinstance(values, int) else values
    for _ in length.shape[1:]:
        values = values if values is None else list(chain.from_iterable(values))
    if values is not None and min(values, default=0) < 0:
        raise ValueError(f"`past.length` must be at least 0, got {min(values)}")
    return values


def check_fixed(
    cache: Any, k: Array, v: Array, *, known: Callable[[Array], Any] = known_values, xp: Namespace
) -> list[int] | None:
    """Refuse a cache that has no room for new keys and values; return what :func:`check_filled` does."""
    values, room, n = check_filled(cache, k, v, known=known, xp=xp), cache.keys.shape[-2], k.shape[-2]
    if values and max(values) + n > room:
        raise ValueError(f"`past` must have room for {n} more positions, got {max(values)} of {room} filled")
    if not values and not symbolic(n, room) and n > room:
        raise ValueError(f"`past` must have room for {n} more positions, got room for {room}")
    return values


def check_room(
    spec: BlockSpec, batch: int | tuple[int, ...], length: int | None, keep: int | None
) -> tuple[tuple[int, ...], int | None, int | None]:
    """Return the leading axes of an empty cache, and the positions that it has room for or keeps, if given."""
    if spec.cross or not spec.causal:
        raise ValueError(f"a cache needs `spec.causal`, and no `spec.cross`, got {spec}")
    if length is not None and keep is not None:
        raise ValueError(f"`keep` must be None with `length`, got {keep} and {length}")
    if keep is not None and spec.block_size is not None:
        raise ValueError(f"`keep` must be None because `spec.block_size` is {spec.block_size}, got {keep}")
    lead = batch if isinstance(batch, tuple) else (check_int("batch", batch, minimum=0),)
    if length is not None:
        return lead, check_int("length", length, minimum=1), None
    if keep is not None:
        left = None if spec.window is None else spec.window[0]
        keep = check_int("keep", keep, minimum=0)
        keep = keep if left is None else min(keep, left)
    return lead, None, keep
