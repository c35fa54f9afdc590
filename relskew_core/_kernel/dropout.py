"""Dropout of weights: a hash of the seed and of the position of a weight, which is never stored and needs no order.

Every weight is drawn on its own, by item, head, query position and key, so that neither chunks nor threads nor a fused
kernel change what a seed drops. A query's and a key's hashes are joined and mixed once more by the finalizer of
MurmurHash3 (A. Appleby, public domain), in integers of 32 bits that wrap.
"""

from __future__ import annotations

import math
from typing import Any

from relskew_core._array.namespace import device
from relskew_core._array.softmax import of_rank, same_rank
from relskew_core._array.typing import Array, Namespace
from relskew_core._kernel.call import Operands, Options, Part
from relskew_core._kernel.chunk import Chunk
from relskew_core._positions.ragged import RaggedVisibility

QUERY, KEY, HEAD = 0x9E3779B1, 0x85EBCA77, 0xC2B2AE3D
"""Odd factors that separate the positions before mixing (the primes of xxHash)."""

FIRST, SECOND = 0x85EBCA6B, 0xC2B2AE35
"""The factors of MurmurHash3's finalizer."""


def kept(queries: Array, keys: Array, share: float, like: Array, *, xp: Namespace) -> Array:
    """Return factors of weights (..., H, n, m) from their hashes: 0, or 1 over the share that is kept."""
    zero, kept = (xp.full((), factor, dtype=like.dtype, device=device(like)) for factor in (0, 1 / (1 - share)))
    drawn = stirred(xp.bitwise_xor(queries, of_rank(keys, queries.ndim)), xp=xp)
    return xp.where(drawn < threshold(share), zero, kept)


def threshold(dropout: float) -> int:
    """Return the threshold of uniform 32-bit integers below which a weight is dropped."""
    return min(round(dropout * 2**32), 2**32 - 1) - 2**31


def hashes(operands: Operands, options: Options, chunk: Chunk, *, xp: Namespace) -> tuple[Array, Array]:
    """Return the hashes of a chunk's queries, (..., H, n, 1), and of its keys, (m,)."""
    q, seed = operands.q, operands.seed
    assert seed is not None
    heads = _heads(q, options.part, xp=xp)
    queries = _query_places(operands, options, chunk, xp=xp)
    queries = mixed(queries * signed(QUERY) + of_rank(seed, queries.ndim), xp=xp)
    queries, heads = same_rank(queries, heads * signed(HEAD))
    rows = mixed(queries + heads, xp=xp)
    keys = _places(chunk.first, chunk.end - chunk.first, q, options.part.step, options.part.key, xp=xp)
    return rows, mixed(keys * signed(KEY) - seed, xp=xp)


def _query_places(operands: Operands, options: Options, chunk: Chunk, *, xp: Namespace) -> Array:
    """Return the positions of a chunk's queries, (n, 1) or with leading axes and (1, n, 1)."""
    pattern, part, n = options.visibility, options.part, chunk.stop - chunk.start
    if part.query is not None:
        return _places(chunk.start, n, operands.q, part.step, part.query, xp=xp)[:, None]
    if not isinstance(pattern, RaggedVisibility):
        return _places(chunk.start + pattern.offset, n, operands.q, xp=xp)[:, None]
    rows = _places(chunk.start, n, operands.q, xp=xp)[:, None]
    first_of_item = narrowed(pattern.offset_by_item, xp=xp)[..., None, None, None]
    return of_rank(rows, first_of_item.ndim) + first_of_item


def _places(first: int, count: int, like: Array, step: int = 1, base: int = 0, *, xp: Namespace) -> Array:
    """Return ``base + step · i`` for ``count`` numbers from ``first`` on, modulo 2**32."""
    places = xp.arange(count, dtype=xp.int32, device=device(like))
    return (places if step == 1 else places * signed(step)) + signed(base + step * first)


def _heads(q: Array, part: Part, *, xp: Namespace) -> Array:
    """Return a number for every head of every item, (..., H, 1, 1)."""
    *lead, count = q.shape[:-2]
    if part.heads is None:
        return xp.reshape(_places(0, math.prod(lead) * count, q, xp=xp), (*lead, count, 1, 1))
    items = xp.reshape(_places(0, math.prod(lead), q, part.heads, part.head, xp=xp), (*lead, 1, 1, 1))
    return items + of_rank(xp.reshape(_places(0, count, q, xp=xp), (count, 1, 1)), items.ndim)


def narrowed(x: Array, *, xp: Namespace) -> Array:
    """Return the lower 32 bits of integers."""
    if x.dtype == xp.int32:
        return x
    low = xp.bitwise_and(x, 2**32 - 1)
    return xp.astype(xp.where(low >= 2**31, low - 2**32, low), xp.int32)


def signed(number: Any) -> Any:
    """Return an int modulo 2**32 as the signed integer with the same bits."""
    return (number + 2**31) % 2**32 - 2**31


def mixed(x: Array, *, xp: Namespace) -> Array:
    """Mix the bits of 32-bit integers: every input bit changes half of the output bits."""
    x = stirred(x, xp=xp)
    return xp.bitwise_xor(x, _shifted(x, 16, xp=xp))


def stirred(x: Array, *, xp: Namespace) -> Array:
    """Mix the bits without the last step, which the upper half, the only one that is compared, does not need."""
    x = xp.bitwise_xor(x, _shifted(x, 16, xp=xp)) * signed(FIRST)
    return xp.bitwise_xor(x, _shifted(x, 13, xp=xp)) * signed(SECOND)


def _shifted(x: Array, bits: int, *, xp: Namespace) -> Array:
    """Shift right, filling with zeros."""
    return xp.bitwise_and(xp.bitwise_right_shift(x, bits), 2 ** (32 - bits) - 1)
