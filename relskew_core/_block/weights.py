"""The initial weights of a block."""

from __future__ import annotations

import random
import sys
from array import array
from collections.abc import Mapping
from math import prod
from typing import Any

from relskew_core import backends
from relskew_core._array.checks import explains, is_array
from relskew_core._array.known import known_values
from relskew_core._array.namespace import device, namespace_of
from relskew_core._array.precision import from_doubles, integer
from relskew_core._array.seed import known_seed
from relskew_core._array.typing import Array, Namespace
from relskew_core._block.spec import ENDLESS, BlockSpec, check_spec
from relskew_core._functions.buckets import alibi_between, alibi_slopes
from relskew_core._positions.span import Span

PIECE = 2**20
"""Bytes drawn at a time: Python's generator does not return the 2^28 of a matrix of width 8192 at once."""


@explains
def init_weights(spec: BlockSpec, *, seed: int | Array, xp: Any = None, dtype: Any = None) -> dict[str, Array]:
    """Draw the weights of a block: the same float32 numbers in every array library.

    Projections are uniform in ``±sqrt(6 / (fan_in + fan_out))`` (Glorot and Bengio 2010, equation 16, as both papers'
    implementations use), tables uniform in ``±sqrt(3 / D)`` so that a row has unit expected length, biases and sinks
    zero.

    Parameters
    ----------
    spec : BlockSpec
        The block.
    seed : int or key of jax.random
        Determines the numbers; no global generator is used or changed. A key must not be traced; ``jax.random.key(5)``
        gives the same numbers as 5.
    xp : module, optional
        Array library to make the arrays in: ``numpy`` (the default), ``torch``, ``cupy``, ``jax.numpy`` …
    dtype : dtype of ``xp``, optional
        Dtype to which the float32 numbers are rounded at the end; ``xp.float32`` by default.

    Returns
    -------
    dict of str to array
        Exactly the keys of ``spec.weight_shapes()``.

    Examples
    --------
    >>> import numpy as np
    >>> from relskew_core import BlockSpec, Span
    >>> weights = init_weights(BlockSpec(4, 2, Span.causal(3), causal=True), seed=0)
    >>> weights["rel_k"].shape, weights["rel_k"].dtype
    ((2, 3, 2), dtype('float32'))
    >>> bool(np.all(weights["q_proj.bias"] == 0))
    True
    """
    check_spec(spec)
    seed = known_seed(seed)
    xp = namespace_of(backends.default_library() if xp is None else xp)
    weights = {}
    for key, shape in spec.weight_shapes().items():
        if starts_at_zero(key):
            weight = xp.zeros(shape, dtype=xp.float32)
        else:
            bits = xp.asarray(_random_words(prod(shape), f"relskew/{seed}/{key}"), dtype=xp.int32)
            # Whole numbers within ±2^22, which float32 represents exactly: only the product rounds.
            centred = xp.astype((bits & (2**23 - 1)) - 2**22, xp.float32)
            weight = xp.reshape(centred * (uniform_bound(spec, key) * 2**-22), shape)
        weights[key] = weight if dtype is None else xp.astype(weight, dtype)
    return weights


def starts_at_zero(key: str) -> bool:
    return key.endswith(".bias") or key == "sinks"


def uniform_bound(spec: BlockSpec, key: str) -> float:
    if starts_at_zero(key):
        return 0.0
    return (3 / spec.head_dim) ** 0.5 if key.startswith("rel_") else (6 / sum(spec.weight_shapes()[key])) ** 0.5


def _random_words(n: int, seed: str) -> array[int]:
    """Draw ``n`` words of 32 random bits, the same on every machine."""
    generator, words = random.Random(seed), array("i")
    for start in range(0, 4 * n, PIECE):
        words.frombytes(generator.randbytes(min(PIECE, 4 * n - start)))
    if sys.byteorder == "big":
        words.byteswap()
    return words


def with_bias(
    tables: Mapping[str, Array | None],
    spec: BlockSpec,
    q: Array,
    k: Array,
    seen: Mapping[str, Any],
    *,
    slopes: Array | None = None,
    buckets: Array | None = None,
    xp: Namespace,
) -> dict[str, Any]:
    """Return the arguments of attention that a block's weights determine: its tables and its bias.

    ``seen`` are the others of the call. ``slopes (H,)`` are ALiBi's for the heads that ``q`` has, which are all by
    default, and ``buckets`` those of T5.
    """
    given = {**tables, "span": spec.span}
    if spec.rel_bias == "t5":
        if buckets is None:
            buckets = xp.asarray(spec.buckets(), dtype=integer(xp), device=device(q))
        given["rel_bias"] = xp.matrix_transpose(xp.take(tables["rel_bias"], buckets, axis=0))
    elif spec.rel_bias == "alibi":
        if slopes is None:
            slopes = from_doubles([alibi_slopes(spec.num_heads)], xp=xp, dtype=q.dtype, device=device(q))[0, ...]
        span = spec.span
        if not spec.has_tables:  # these layers have biases for as many positions as the call has
            left, right = (
                reach if end == ENDLESS - 1 else min(reach, end)
                for reach, end in zip(_reach(q.shape[-2], k.shape[-2], **seen), (span.left, span.right), strict=True)
            )
            span = Span(left, 0 if spec.causal else right)
        given.update(rel_bias=alibi_between(slopes, span.left, span.right, xp=xp), span=span)
    return given


def _reach(n: int, m: int, *, offset: Any = None, positions: Any = None, **_: Any) -> tuple[int, int]:
    """Return how far back and ahead the queries of a call may look.

    An offset or positions that something traces are taken to be among as many places as there are keys. Further ones
    get NaN, as beyond the end of any table.
    """
    if positions is not None:
        (first_query, last_query), (first_key, last_key) = (_bounds(x, 0, m - 1) for x in positions)
        return max(last_query - first_key, 0), max(last_key - first_query, 0)
    if type(offset).__name__ == "SymInt":  # torch would make a guard of any condition on it
        return n - 1 + offset, m - 1
    first, last = _bounds(0 if offset is None else offset, 0, m - 1)
    return max(n - 1 + last, 0), max(m - 1 - first, 0)


def _bounds(x: Any, first: Any, last: Any) -> tuple[Any, Any]:
    """Return the minimum and maximum of a number, list or array; the given bounds if its values are unknown."""
    values = known_values(x) if is_array(x) else x
    if values is None:
        return first, last
    while isinstance(values, (list, tuple)) and any(isinstance(each, (list, tuple)) for each in values):
        values = [each for row in values for each in row]
    if isinstance(values, (list, tuple)):
        return min(values, default=0), max(values, default=0)
    return values, values
