"""A module's call: what came is checked, and the block applied."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import jax.numpy as jnp

from relskew_core._array.checks import check_choice, check_int, check_real, describe
from relskew_core._array.ranks import same_rank
from relskew_core._array.typing import Array
from relskew_core._block.block import apply_block, check_inputs
from relskew_core._block.cache import Growing
from relskew_core._block.spec import BlockSpec
from relskew_core._functions.attention import relative_attention
from relskew_core._kernel.shapes import check_mask
from relskew_core.layers._jax.caches import Cache, FixedCache, SlidingCache


class Settings(NamedTuple):
    """A module's options that are no arrays."""

    dropout: float
    impl: str
    chunk_size: int | None

    @classmethod
    def of(cls, spec: Any, dropout: float, impl: str, chunk_size: int | None) -> Settings:
        """Return what a caller chose, if it can be chosen."""
        if not isinstance(spec, BlockSpec):
            raise TypeError(f"`spec` must be a BlockSpec, got {describe(spec)}")
        dropout = check_real("dropout", dropout)
        if not 0 <= dropout < 1:
            raise ValueError(f"`dropout` must be at least 0 and less than 1, got {dropout}")
        check_choice("impl", impl, ("auto", "portable", "native"))
        return cls(dropout, impl, None if chunk_size is None else check_int("chunk_size", chunk_size, minimum=1))


def call_block(
    x: Array,
    memory: Array | None,
    spec: BlockSpec,
    settings: Settings,
    *,
    project: Callable[[str, Array], Array],
    tables: Mapping[str, Array],
    key: Array | None,
    past: tuple[Array, Array] | Cache | None,
    mask: Array | None,
    key_padding_mask: Array | None,
    **given: Any,
) -> Array | tuple[Array, Cache]:
    """Apply a block; ``key`` is that of dropout, ``None`` for no dropout."""
    check_inputs(x, memory, spec)
    options = {name: value for name, value in given.items() if value is not None}
    if past is not None:
        for name in ("offset", "positions"):
            if name in options:
                raise ValueError(f"`{name}` must be None with `past`, which knows, got {describe(options[name])}")
        past = past if isinstance(past, FixedCache | SlidingCache) else Growing.of(past, spec)
    if key is not None:
        options.update(dropout=settings.dropout, seed=key)
    options.update(impl=settings.impl, chunk_size=settings.chunk_size)

    def attend(q: Array, k: Array, v: Array, *, unfilled: Array | None = None, **seen: Any) -> Array:
        met = {name: table.astype(q.dtype) for name, table in tables.items()}
        shown = mask
        for hidden in (None if key_padding_mask is None else _padding(key_padding_mask, k), unfilled):
            shown = shown if hidden is None else _without(hidden, shown, q, k)
        return relative_attention(q, k, v, mask=shown, **met, **{**seen, **options})

    y, present = apply_block(x, spec, project, {}, memory=memory, cache=past, attend=attend, xp=jnp)
    return y if present is None else (y, present)


def _padding(padding: Any, k: Array) -> Array:
    """Return which keys are padding, if it is that."""
    shape = (*k.shape[:-3], k.shape[-2])
    if getattr(padding, "dtype", None) != jnp.bool or padding.shape != shape:
        raise ValueError(
            f"`key_padding_mask` must be a boolean array of shape {shape}, True where a key is padding, "
            f"got {describe(padding)}"
        )
    found: Array = padding
    return found


def _without(hidden: Array, mask: Array | None, q: Array, k: Array) -> Array:
    """Return a mask that hides some keys (..., Lk) from all heads and queries, besides what ``mask`` hides."""
    seen = ~hidden[..., None, None, :]
    if mask is None:
        return seen
    given = check_mask(mask, q, k, xp=jnp)
    given, seen = same_rank(given, seen)
    return given & seen if given.dtype == jnp.bool else jnp.where(seen, given, -jnp.inf)
