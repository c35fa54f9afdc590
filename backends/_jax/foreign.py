"""JAX on CPUs: a call of the compiled kernels in a program that XLA compiles.

They want four axes of every array: items, heads, rows and columns. A mapped call is one call of more items; where what
the items share differs from entry to entry of the map, the kernels work on one entry after the other.
"""

from __future__ import annotations

import math
from functools import cache
from typing import Any

import jax
import jax.ffi
import jax.numpy as jnp
import numpy as np

from relskew_core._array.typing import Array
from relskew_core._kernel.backward import Cotangents
from relskew_core._kernel.call import (
    KINDS,
    TABLES,
    Operands,
    Options,
    shape_of_out,
    shape_of_rows,
    shape_of_sums,
)
from relskew_core._kernel.chunk import Chunk
from relskew_core._kernel.dropout import hashes
from relskew_core.backends import _compiled
from relskew_core.backends._compiled.call import REAL, WHOLE, Call, numbers

SHARED = (*TABLES, "seed")
"""The numbers that all items of a call share; in a mapped call each entry may have different ones."""

SHARE = 2**17
"""The multiplications for which waking one of XLA's threads pays: 8 microseconds of them."""


@cache
def is_registered() -> bool:
    """Register the kernels with XLA, which has been initialised; return false if its version is too old."""
    kernels = _compiled.kernels
    try:
        jax.ffi.register_ffi_target("relskew_attend", kernels.XLA_ATTEND, platform="cpu")
        jax.ffi.register_ffi_target("relskew_pull_back", kernels.XLA_PULL_BACK, platform="cpu")
    except jax.errors.JaxRuntimeError:
        return False
    return True


def pulled(arrays: dict[str, Any]) -> list[str]:
    """Return the names of the arrays that have gradients, in their order."""
    return [name for name in _compiled.GRADIENTS if name != "mask" and arrays.get(name) is not None]


def by_kernels(given: Operands, cotangents: Cotangents | None, options: Options, maps: int) -> list[Array]:
    """Return the results of a call whose arrays have ``maps`` leading mapped axes; with cotangents, its gradients."""
    lead, shared = given.q.shape[:maps], [x for name in SHARED if (x := getattr(given, name)) is not None]
    apart = cotangents is not None or any(math.prod(x.shape[:maps]) > 1 for x in shared)
    entries = math.prod(lead) if shared and apart else 1  # split the items, so that each has its tables
    x = Operands(*(_in_four_axes(name, given, maps) for name in Operands._fields))
    drawn = _drawn(given, options, maps) if options.dropout else (None, None)
    of_kernels = {**x._asdict(), **dict(zip(("query_hashes", "key_hashes"), drawn, strict=True))}
    operands = [of_kernels.get(name) for name in (*_compiled.ARRAYS, *_compiled.INTEGERS)]
    found, rows = numbers(x, options), shape_of_rows(x)
    threads = max(1, Call.of(x, options).work // SHARE)
    whole = [*(found[name] for name in WHOLE), entries, threads]
    real = np.asarray([found[name] for name in REAL], np.float64)
    if cotangents is None:
        wanted = [shape_of_out(x), None, (*rows, 2) if options.return_lse else None]
        results = _call("relskew_attend", whole, real, operands, wanted)
        shapes = [shape_of_out(given), shape_of_sums(given)]
    else:
        operands += [None if each is None else jnp.reshape(each, (*rows, -1)) for each in cotangents]
        wanted = [_of_gradient(name, x, entries) for name in _compiled.GRADIENTS]
        results = _call("relskew_pull_back", whole, real, operands, wanted)
        shapes = [(*lead, *getattr(given, name).shape[maps:]) for name in pulled(given._asdict())]
    return [jnp.reshape(each, shape) for each, shape in zip(results, shapes, strict=False)]


def _call(name: str, numbers: list[int], real: Any, operands: list[Any], wanted: list[Any]) -> list[Array]:
    """Call a kernel with flags that say which of the optional arrays are present."""
    there = [int(each is not None) for each in (*operands, *wanted)]
    whole = np.asarray([*numbers, *there], np.int64)
    types = [jax.ShapeDtypeStruct(shape, operands[0].dtype) for shape in wanted if shape is not None]
    found = jax.ffi.ffi_call(name, types)(*(each for each in operands if each is not None), whole=whole, real=real)
    return list(found)


def _in_four_axes(name: str, given: Operands, maps: int) -> Array | None:
    """Return an array with axes for items, heads, rows and columns; the items of tables are the entries of the map."""
    x, q = getattr(given, name), given.q
    if x is None or name == "seed":
        return None
    x = KINDS[name].flat(x, q.shape[:-3], maps=maps, xp=jnp)
    return jnp.reshape(x, (*x.shape[:-1], *(1,) * (4 - x.ndim), x.shape[-1]))


def _of_gradient(name: str, x: Operands, entries: int) -> tuple[int, ...] | None:
    array = getattr(x, name)
    if array is None or name == "mask":
        return None
    return (entries, *array.shape[1:]) if name in TABLES else array.shape


def _drawn(x: Operands, options: Options, maps: int) -> tuple[Array, Array]:
    """Return the hashes of queries and keys for dropout."""
    assert x.seed is not None
    n, m, lead = x.q.shape[-2], x.k.shape[-2], x.q.shape[:maps]
    own = x._replace(q=x.q[(0,) * maps])

    def of(seed: Array) -> tuple[Array, Array]:
        return hashes(own._replace(seed=seed), options, Chunk(0, n, 0, m, 0, 0, 0), xp=jnp)

    seeds = jnp.broadcast_to(x.seed, (*lead, 1)) if math.prod(x.seed.shape[:maps]) > 1 else x.seed
    queries, keys = jax.vmap(of)(jnp.reshape(seeds, (-1, 1)))
    queries = jnp.broadcast_to(queries, (math.prod(lead), *queries.shape[1:]))
    return jnp.reshape(queries, (-1, *queries.shape[-3:])), keys[:, None, None, :]
