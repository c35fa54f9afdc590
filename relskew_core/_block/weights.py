"""The initial weights of a block."""

from __future__ import annotations

import random
import sys
from array import array
from math import prod
from typing import Any

from relskew_core import backends
from relskew_core._array.keywords import explains
from relskew_core._array.namespace import namespace_of
from relskew_core._array.seed import known_seed
from relskew_core._array.typing import Array
from relskew_core._block.spec import BlockSpec, check_spec

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

    See Also
    --------
    BlockSpec : describes the block.
    attention_block : runs it.

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
    """Whether a weight is zero before training."""
    return key.endswith(".bias") or key == "sinks"


def uniform_bound(spec: BlockSpec, key: str) -> float:
    """Return the bound of the uniform distribution of a projection or table."""
    return (3 / spec.head_dim) ** 0.5 if key.startswith("rel_") else (6 / sum(spec.weight_shapes()[key])) ** 0.5


def _random_words(n: int, seed: str) -> array[int]:
    """Draw ``n`` words of 32 random bits, the same on every machine."""
    generator, words = random.Random(seed), array("i")
    for start in range(0, 4 * n, PIECE):
        words.frombytes(generator.randbytes(min(PIECE, 4 * n - start)))
    if sys.byteorder == "big":
        words.byteswap()
    return words
