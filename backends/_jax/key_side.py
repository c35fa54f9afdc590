"""JAX: keys times a table, the mirror image of queries times a table (see ``_kernel.key_side``).

A chunk's keys are cut into blocks of as many as it has queries. All blocks are one product: each has its own window of
``2n`` columns, made of two neighbours of the table's columns in runs of ``n``.
"""

from __future__ import annotations

from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax import lax

from relskew_core._array.softmax import gather
from relskew_core._array.typing import Array
from relskew_core._kernel.by_value import LookUpChunk
from relskew_core._kernel.call import Options
from relskew_core._kernel.chunk import Chunk
from relskew_core._kernel.key_side import by_query_head
from relskew_core._positions.skew import skew_from
from relskew_core._positions.table import weighed
from relskew_core.backends._jax.loops import Loop, LoopPlan

Product = Callable[[Array, Array], Array]


def blocks(n: int, m: int) -> int:
    """Return the number of blocks of ``n`` keys, the last one padded."""
    return -(-m // n)


def width(loop: Loop, options: Options) -> int:
    """Return the number of columns of ``key_table`` that a chunk uses."""
    return loop.width if options.visibility.by_value else (blocks(loop.n, loop.m) + 1) * loop.n


def reach(plan: LoopPlan, options: Options) -> tuple[int, int]:
    """Return the lowest and the highest query position − key position in the chunks' windows."""
    if options.visibility.by_value or not plan.loops:
        return -plan.high, -plan.low
    lows = [-loop.low[1] - loop.spare - blocks(loop.n, loop.m) * loop.n for loop in plan.loops]
    highs = [-loop.low[0] - loop.spare + loop.n - 1 for loop in plan.loops]
    return min(lows), max(highs)


@jax.custom_vjp
def product_of_seen(keys: Array, columns: Array) -> Array:
    """Return a product of keys with columns; columns without a gradient do not contribute to that of the keys."""
    return jnp.matmul(keys, columns)


def _forward(keys: Array, columns: Array) -> tuple[Array, tuple[Array, Array]]:
    return jnp.matmul(keys, columns), (keys, columns)


def _backward(given: tuple[Array, Array], d_product: Array) -> tuple[Array, Array]:
    keys, columns = given
    _, pull = jax.vjp(jnp.matmul, keys, weighed(columns, d_product, xp=jnp))
    return pull(d_product)


product_of_seen.defvjp(_forward, _backward)


def logits(k: Array, columns: Array, chunk: Chunk, heads: int, *, product: Product) -> Array:
    """Return ``k_j · e_r``, (..., H, n, m), for a chunk's keys (..., Hkv, m, D) and columns (..., D, width).

    ``product`` is what multiplies both where columns are looked up: some may be seen by no query.
    """
    n, m = chunk.stop, chunk.end
    by_head = columns.ndim > 2
    k = by_query_head(k, heads, xp=jnp) if by_head else k
    look_up = chunk.mirrored(0, m, xp=jnp) if isinstance(chunk, LookUpChunk) else None
    found = _skewed(k, columns, n) if look_up is None else _looked_up(k, columns, n, look_up, product)
    found = jnp.matrix_transpose(found[..., :m, :])
    return found if by_head else by_query_head(found, heads, xp=jnp)


def _cut(x: Array, n: int) -> Array:
    """Cut (..., m, a) into blocks of ``n`` rows, the last one padded with zeros: (..., blocks, n, a)."""
    count = blocks(n, x.shape[-2])
    full = jnp.pad(x, [(0, 0)] * (x.ndim - 2) + [(0, count * n - x.shape[-2]), (0, 0)])
    return jnp.reshape(full, (*x.shape[:-2], count, n, x.shape[-1]))


def _joined(x: Array) -> Array:
    """Return the adjoint of :func:`_cut`, including the padding: (..., blocks, n, a) to (..., blocks · n, a)."""
    return jnp.reshape(x, (*x.shape[:-3], x.shape[-3] * x.shape[-2], x.shape[-1]))


def _skewed(k: Array, columns: Array, n: int) -> Array:
    runs = jnp.reshape(columns, (*columns.shape[:-1], -1, n))
    windows = jnp.concat([runs[..., :-1, :], runs[..., 1:, :]], axis=-1)  # (..., D, blocks, 2n)
    windows = jnp.flip(jnp.moveaxis(windows, -2, -3), axis=-3)  # the first block of keys uses the last window
    return _joined(skew_from(jnp.matmul(_cut(k, n), windows), n_keys=n, first=n, xp=jnp))


def _looked_up(k: Array, columns: Array, n: int, chunk: LookUpChunk, product: Product) -> Array:
    """Look up block by block: the whole product would have all columns of the table for every key."""

    def cut(x: Array) -> Array:
        return jnp.moveaxis(_cut(x, n), -3, 0)

    def one(block: tuple[Array, Array, Array | None]) -> Array:
        keys, index, there = block
        found = gather(product(keys, columns), index, xp=jnp)
        return found if there is None else jnp.where(there, found, 0.0)

    there = None if chunk.there is None else cut(chunk.there)
    return _joined(jnp.moveaxis(lax.map(one, (cut(k), cut(chunk.index), there)), 0, -3))
