"""JAX: offsets in 32 bits, and offsets by item, whose values are unknown in a compiled loop."""

from __future__ import annotations

from dataclasses import dataclass, replace

import jax.numpy as jnp

from relskew_core._array.precision import integer
from relskew_core._array.softmax import of_rank
from relskew_core._array.typing import Array
from relskew_core._kernel.call import Operands, Options
from relskew_core._positions.ragged import RaggedVisibility
from relskew_core._positions.visibility import Visibility


@dataclass(frozen=True)
class AnyOffset(Visibility):
    """The pattern of a batch with arbitrary offsets: visibility follows positions, and tables are by item.

    It holds no array, so that calls of one shape are compiled once.
    """

    def keys(self, start: int, stop: int) -> tuple[int, int]:
        return 0, self.n_keys

    def positions(self) -> tuple[int, int] | None:
        """Return the range of relative positions, as of offset 0, that the items' tables cover."""
        return (1 - self.n_queries, self.n_keys - 1) if self.n_queries and self.n_keys else None

    def some_query_sees_nothing(self) -> bool:
        """Whether a query's range of keys may be empty."""
        return True

    def bounded(self) -> AnyOffset:
        """Return the pattern unchanged: with unknown positions, any bound may hide keys."""
        return self

    def ragged(self, positions: Array) -> RaggedVisibility:
        """Return the pattern with the offsets of items whose queries have the positions ``positions``, (..., Lq)."""
        return RaggedVisibility(self.n_queries, self.n_keys, 0, *self.sides, offset_by_item=positions[..., 0])


def split(operands: Operands, options: Options) -> tuple[Operands, Options]:
    """Move offsets by item out of the options, which are constants of a compiled loop, to the operands."""
    pattern = options.visibility
    if not isinstance(pattern, RaggedVisibility):
        return operands, options
    offsets = pattern.offset_by_item[..., None]
    positions = of_rank(jnp.arange(pattern.n_queries, dtype=int), offsets.ndim) + offsets
    operands = operands._replace(q_positions=positions, k_positions=jnp.arange(pattern.n_keys, dtype=int))
    return operands, replace(options, visibility=AnyOffset(pattern.n_queries, pattern.n_keys, 0, *pattern.sides))


def in_small_numbers(pattern: Visibility) -> Visibility:
    """Return an equivalent pattern whose numbers fit 32 bits, however far away the queries are."""
    offset = pattern.offset
    if pattern.block_size is None and offset:
        left = None if pattern.left is None else pattern.left - offset
        right = None if pattern.right is None else pattern.right + offset
        return Visibility(pattern.n_queries, pattern.n_keys, 0, left, right)
    if not -(2**31) <= offset <= 2**31 - pattern.n_queries and integer(jnp) == jnp.int32:
        raise ValueError(
            f"`offset` must leave positions in 32 bits where `block_size` is given, unless jax_enable_x64 is set, "
            f"got offset={offset}"
        )
    return pattern
