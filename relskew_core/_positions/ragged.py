"""Ragged batches: offsets that differ from item to item, of padded sequences and caches of different lengths.

Every item gets its window of the tables, shifted by its offset, so that from there on all items have the
offset 0; what may be seen is a mask with the batch's axes. The values of offsets may be unknown, under
``jax.jit`` or on a device: nothing but sizes decides what is done.
"""

from __future__ import annotations

import math
import operator
from dataclasses import dataclass, field
from itertools import chain
from typing import Any

from relskew_core._array.checks import check_offset, describe, has_shape, is_array
from relskew_core._array.known import comparable
from relskew_core._array.namespace import check_companion, device, is_torch, on_cpu
from relskew_core._array.precision import bits_of, integer, integers, shifted, widest
from relskew_core._array.softmax import of_rank, within
from relskew_core._array.typing import Array, Namespace
from relskew_core._positions.labels import known_items
from relskew_core._positions.span import Beyond, Span
from relskew_core._positions.table import Extension
from relskew_core._positions.visibility import Visibility

FURTHEST = {64: 2**61, 32: 2**30 + 2**29}
"""The limit of offsets, by the bits of integers: beyond any window, and small enough to count positions from it."""


@dataclass(frozen=True, eq=False)
class RaggedVisibility(Visibility):
    """The pattern of a batch whose query ``i`` has the position ``i + offsets[item]``."""

    offset_by_item: Array = None  # integers, one for each item of the batch
    known: tuple[int, ...] | None = field(default=None, compare=False)  # their values in order, if they are known

    def each(self) -> list[Visibility]:
        return [
            Visibility(self.n_queries, self.n_keys, offset, *self.sides) for offset in sorted(set(self.known or ()))
        ]

    def keys(self, start: int, stop: int) -> tuple[int, int]:
        if self.known is None:
            return 0, self.n_keys
        ranges = [pattern.keys(start, stop) for pattern in self.each()] or [(0, 0)]
        # Lists, and no `default`: torch.compile does not support the alternatives.
        first, end = min([first for first, _ in ranges]), max([end for _, end in ranges])
        return first, max(first, end)

    def positions(self) -> tuple[int, int] | None:
        """Return the range of relative positions, as of offset 0, that the items' windows cover."""
        return (1 - self.n_queries, self.n_keys - 1) if self.n_queries and self.n_keys else None

    def check_reach(self, name: str, span: Span, *, span_name: str = "span") -> None:
        for pattern in self.each():
            pattern.check_reach(name, span, span_name=span_name)

    def mask(self, start: int, stop: int, first: int, end: int, *, xp: Namespace, device: object) -> Array | None:
        """Return which of the keys ``first … end - 1`` the queries may see, shape (..., 1, n, m), ``None`` if all."""
        first_of_item = self.offset_by_item[..., None, None, None]
        queries = of_rank(integers(start, stop, device=device, xp=xp)[:, None], first_of_item.ndim) + first_of_item
        return self.sees(queries, integers(first, end, device=device, xp=xp), xp=xp)

    def some_query_sees_nothing(self) -> bool:
        return True

    def occurs(self, positions: Array, *, xp: Namespace) -> Array:
        """Return which relative positions (..., W) occur between a query and a visible key."""
        low, high = self.offset_by_item[..., None], self.offset_by_item[..., None] + (self.n_queries - 1)
        # The queries that have a key there have the positions `low` to `high`.
        low, high = xp.maximum(low, -positions), xp.minimum(high, self.n_keys - 1 - positions)
        seen = low <= high
        if self.right is not None:
            seen = xp.logical_and(seen, positions <= self.right)
        if self.left is not None:
            seen = xp.logical_and(seen, positions >= -self.left)
        if self.block_size is not None:  # a block's last query sees furthest back, and its first one furthest ahead
            size = self.block_size
            back = xp.where(high // size > low // size, size - 1, high % size)
            ahead = xp.where(high // size > (low - 1) // size, size - 1, size - 1 - low % size)
            seen = xp.logical_and(seen, -positions <= shifted(back, self.whole_blocks_before * size, xp=xp))
            seen = xp.logical_and(seen, positions <= ahead)
        return seen


@dataclass(frozen=True, slots=True)
class RaggedTables:
    """The windows of a batch's tables: column ``c`` of item ``b`` is for ``r = c - n_queries - offsets[b]``."""

    visibility: RaggedVisibility
    span: Span  # of the tables
    xp: Namespace

    @property
    def window_span(self) -> Span:
        """The positions, at offset 0, of a window's rows: one more than occur, for the skew."""
        return Span(self.visibility.n_queries, max(0, self.visibility.n_keys - 1), "zero")

    def _positions(self) -> Array:
        offsets, span = self.visibility.offset_by_item, self.window_span
        columns = integers(-span.left, span.right + 1, device=device(offsets), xp=self.xp)
        return of_rank(columns, offsets.ndim + 1) - offsets[..., None]  # JAX may refuse to promote ranks

    def of(self, table: Array) -> Array:
        """Return every item's rows of a table: (R, D) or (H, R, D) to (..., 1 or H, W, D).

        Rows that no query may see are zeros, even if they are NaN; rows beyond a table that has to reach are NaN, which
        only offsets that are not known lead to.
        """
        xp, span = self.xp, self.span
        positions = self._positions()
        lead, width = positions.shape[:-1], positions.shape[-1]
        table = table if table.ndim == 3 else table[None, ...]
        indices = within(positions + span.left, span.rows, xp=xp)
        rows = xp.take(table, xp.reshape(indices, (-1,)), axis=1)
        heads, _, size = rows.shape
        rows = xp.reshape(rows, (heads, math.prod(lead), width, size))
        rows = xp.reshape(xp.permute_dims(rows, (1, 0, 2, 3)), (*lead, heads, width, size))
        if span.beyond != "clip":
            there = xp.logical_and(positions >= -span.left, positions <= span.right)[..., None, :, None]
            rows = xp.where(there, rows, 0.0 if span.beyond == "zero" else math.nan)
        return xp.where(self.visibility.occurs(positions, xp=xp)[..., None, :, None], rows, 0.0)

    def gradient(self, windows: Array, table: Array) -> Array:
        xp, visibility = self.xp, self.visibility
        if visibility.known is None:
            raise TypeError(
                "`offset` must be known for the gradient of a table: a sequence of ints, or an array that is not "
                f"traced, got {describe(visibility.offset_by_item)}"
            )
        seen = visibility.occurs(self._positions(), xp=xp)[..., None, :, None]
        columns = xp.matrix_transpose(xp.where(seen, windows, 0.0))
        columns = xp.reshape(columns, (math.prod(columns.shape[:-3]), *columns.shape[-3:]))
        span, reach = self.span, self.window_span
        beyond: Beyond = "clip" if span.beyond == "clip" else "zero"
        total = xp.zeros((*columns.shape[1:-1], span.rows), dtype=columns.dtype, device=device(columns))
        for item, offset in enumerate(visibility.known):
            extension = Extension.of(span.left, span.rows, beyond, -reach.left - offset, reach.right - offset)
            total = total + extension.place(extension.fold(columns[item, ...], xp=xp), span.rows, xp=xp)
        return xp.reshape(xp.matrix_transpose(total), table.shape)


def is_ragged(offset: Any) -> bool:
    """Whether there is one offset for each item: a sequence, an array with axes, or an array with an unknown value."""
    if not is_array(offset):
        return isinstance(offset, (list, tuple))
    if offset.ndim:
        return True
    try:
        return not comparable(operator.index(offset))
    except (TypeError, RuntimeError, ValueError):  # JAX traces it, torch maps or fakes it, or MLX does
        return True


def ragged_offsets(offset: Any, q: Array, *, name: str = "q", xp: Namespace) -> tuple[Array, tuple[int, ...] | None]:
    """Check offsets by item; return them as an array of the call's library, and their values if known."""
    lead = tuple(q.shape[:-3])
    expected = f"`offset` must be an int, or one for each item of the leading axes of `{name}`, {lead}"
    wide = integer(xp)
    furthest = FURTHEST[bits_of(wide, xp=xp)]
    if isinstance(offset, (list, tuple)):
        known = tuple(check_offset(f"offset[{index}]", value) for index, value in enumerate(offset))
        if (len(known),) != lead:
            raise ValueError(f"{expected}, got {len(known)}")
        near = [max(-furthest, min(value, furthest)) for value in known]
        return xp.asarray(near, dtype=wide, device=device(q)), known
    check_companion("offset", offset, name, q, xp=xp)
    if not xp.isdtype(offset.dtype, "integral"):
        raise TypeError(f"`offset` must be of integers, got {describe(offset)}")
    if not has_shape(offset, (), lead):
        raise ValueError(f"{expected}, got {describe(offset)}")
    values = _values(offset, xp=xp)
    for value in values or ():
        check_offset("offset", value)
    offset = widest(offset, xp=xp)
    offset = xp.where(offset > furthest, furthest, xp.where(offset < -furthest, -furthest, offset))
    return offset, values


def _values(offset: Array, *, xp: Namespace) -> tuple[int, ...] | None:
    standard = not is_torch(offset) and not hasattr(offset, "tolist")  # torch 2.8 does not trace `hasattr` of tensors
    if standard and on_cpu(offset):
        return tuple(int(value) for value in xp.reshape(offset, (-1,)))
    items = known_items(offset) if offset.ndim else None
    return None if items is None else tuple(chain.from_iterable(items))
