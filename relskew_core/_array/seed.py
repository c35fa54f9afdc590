"""Seeds as arrays with one 31-bit integer, from ints, integer arrays, and keys of JAX."""

from __future__ import annotations

import sys
from typing import Any

from relskew_core._array.checks import check_int, describe, is_array
from relskew_core._array.namespace import check_companion, device, is_torch
from relskew_core._array.precision import integer
from relskew_core._array.typing import Array, Namespace

BITS = 2**31 - 1


def check_seed(seed: Any, q: Array, *, xp: Namespace) -> Array:
    of_numpy = getattr(sys.modules.get("numpy"), "integer", ()) if is_array(seed) and not is_torch(seed) else ()
    if not is_array(seed) or isinstance(seed, of_numpy):
        return xp.full((1,), check_int("seed", seed, minimum=0) & BITS, dtype=xp.int32, device=device(q))
    if _is_key(seed):
        seed = sys.modules["jax"].random.bits(seed, dtype="uint32")
    check_companion("seed", seed, "q", q, xp=xp)
    if not xp.isdtype(seed.dtype, "integral") or seed.ndim:
        raise TypeError(
            f"`seed` must be an int, an integer array without axes or a key of jax.random, got {describe(seed)}"
        )
    wide = xp.astype(seed, integer(xp))
    return xp.reshape(xp.astype(xp.bitwise_and(wide, BITS), xp.int32), (1,))


def known_seed(seed: Any) -> int:
    """Return a seed as an int, from an int or the words of a JAX key, so that ``jax.random.key(5)`` is 5."""
    if not _is_key(seed):
        return check_int("seed", seed)
    jax = sys.modules["jax"]
    if isinstance(seed, jax.core.Tracer):
        raise ValueError("`seed` must be known, outside of jax.jit and jax.vmap, got a key that is traced")
    return int.from_bytes(b"".join(word.to_bytes(4, "big") for word in jax.random.key_data(seed).tolist()), "big")


def _is_key(seed: Any) -> bool:
    jax = sys.modules.get("jax")
    # torch does not compile this check for tensors
    if jax is None or is_torch(seed) or not isinstance(seed, jax.Array):
        return False
    if jax.dtypes.issubdtype(seed.dtype, jax.dtypes.prng_key):
        return bool(seed.ndim == 0)
    return bool(seed.dtype == "uint32" and seed.shape == (2,))
