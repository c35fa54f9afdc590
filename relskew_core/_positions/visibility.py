"""Which keys a query may see: causal, window and local blocks, in integers only."""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import reduce
from typing import Any

from relskew_core._array.typing import Array, Namespace
from relskew_core._positions.span import Span


@dataclass(frozen=True, slots=True)
class Visibility:
    """The pattern of a call: query ``i`` stands at position ``p = i + offset`` and sees a range of keys.

    The first and the last visible key never decrease with ``p``; everything here follows from that.
    """

    n_queries: int = field(metadata={"length of": "q"})
    n_keys: int = field(metadata={"length of": "k"})
    offset: int = 0
    left: int | None = None  # how far back a query sees, None for all of the past
    right: int | None = None  # how far ahead, None for all of the future; 0 is causal
    block_size: int | None = None  # a query sees no further back than the block before its own

    def first_key(self, position: int) -> int:
        """Return the first key that a query at ``position`` may see."""
        first = 0
        if self.left is not None:
            first = max(first, position - self.left)
        if self.block_size is not None:
            first = max(first, first_of_blocks(position, self.block_size))
        return first

    def last_key(self, position: int) -> int:
        """Return the last key that a query at ``position`` may see; less than the first if there is none."""
        last = self.n_keys - 1
        if self.right is not None:
            last = min(last, position + self.right)
        return last

    def sees(self, queries: Array, keys: Array, *, xp: Namespace) -> Array | None:
        """Compare positions that broadcast: which keys the queries may see, ``None`` if all of them."""
        conditions = []
        if self.right is not None:
            conditions.append(keys <= queries + self.right)
        if self.left is not None:
            conditions.append(keys >= queries - self.left)
        if self.block_size is not None:
            conditions.append(keys >= first_of_blocks(queries, self.block_size))
        return reduce(xp.logical_and, conditions) if conditions else None

    def within(self, start: int, stop: int, first: int, end: int) -> Visibility:
        """Return the pattern without what hides none of the keys ``first … end - 1`` from the queries."""
        low, high = start + self.offset, stop - 1 + self.offset
        left, right, block_size = self.left, self.right, self.block_size
        return Visibility(
            self.n_queries,
            self.n_keys,
            self.offset,
            left=None if left is None or first >= high - left else left,
            right=None if right is None or end - 1 <= low + right else right,
            block_size=None if block_size is None or first >= first_of_blocks(high, block_size) else block_size,
        )

    def bounded(self) -> Visibility:
        """Return the pattern without what hides nothing: no number is larger than the positions are."""
        return self.within(0, self.n_queries, 0, self.n_keys)

    def keys(self, start: int, stop: int) -> tuple[int, int]:
        """Return the range of keys that some query of ``start … stop - 1`` may see."""
        first = min(self.first_key(start + self.offset), self.n_keys)
        return first, max(first, self.last_key(stop - 1 + self.offset) + 1)

    def positions(self) -> tuple[int, int] | None:
        """Return the lowest and highest relative position that some query may see, ``None`` if none sees a key."""
        low, high = self.offset, self.offset + self.n_queries - 1  # positions of the queries that see a key
        if self.right is not None:
            low = max(low, -self.right)
        if self.left is not None:
            high = min(high, self.n_keys - 1 + self.left)
        if self.block_size is not None:
            high = min(high, ((self.n_keys - 1) // self.block_size + 2) * self.block_size - 1)
        if low > high or self.n_keys == 0 or self.first_key(low) > self.last_key(low):
            return None
        furthest = [high]
        if self.block_size is not None:  # a block's last query looks back furthest
            furthest.append(max(low, (high + 1) // self.block_size * self.block_size - 1))
        return min(self.first_key(p) - p for p in furthest), self.last_key(low) - low

    def check_reach(self, name: str, span: Span) -> None:
        """Refuse a table too short for the visible relative positions when ``span.beyond`` is ``"error"``."""
        positions = self.positions()
        if span.beyond != "error" or positions is None:
            return
        low, high = positions
        if low < -span.left or high > span.right:
            raise ValueError(
                f"`{name}` reaches the relative positions {-span.left} … {span.right}, but queries see "
                f"{low} … {high}: give a longer table, or a `span` with beyond='clip' or beyond='zero'"
                + (", or pass causal=True if no query may see its future" if high > span.right == 0 else "")
            )

    def mask(self, start: int, stop: int, first: int, end: int, *, xp: Namespace, device: object) -> Array | None:
        """Return which of the keys ``first … end - 1`` the queries may see, shape (n, m), ``None`` if all of them."""
        queries = xp.arange(start + self.offset, stop + self.offset, device=device)[:, None]
        keys = xp.arange(first, end, device=device)[None, :]
        return self.within(start, stop, first, end).sees(queries, keys, xp=xp)

    def seen_keys(self, start: int, stop: int, first: int, end: int, *, xp: Namespace, device: object) -> Array | None:
        """Return which of the keys that :meth:`keys` names some query may see, ``None`` if all of them."""
        return None

    def partly_hidden(self, start: int, stop: int, first: int, end: int) -> list[tuple[int, int]]:
        """Return the ranges of the keys ``first … end - 1`` outside of which the queries see everything."""
        low, high = start + self.offset, stop - 1 + self.offset
        after, before = end, first
        if self.right is not None:
            after = max(first, min(end, low + self.right + 1))
        if self.left is not None:
            before = max(before, high - self.left)
        if self.block_size is not None:
            before = max(before, first_of_blocks(high, self.block_size))
        before = min(before, end)
        if after <= before:
            return [(first, end)]
        return [(a, b) for a, b in ((first, before), (after, end)) if a < b]

    def some_query_sees_nothing(self) -> bool:
        """Whether a query's range of keys is empty."""
        if self.n_queries == 0:
            return False
        ends = (self.offset, self.offset + self.n_queries - 1)
        return any(self.first_key(p) > self.last_key(p) for p in ends)


def first_of_blocks(position: Any, block_size: int) -> Any:
    """Return the first position of the block before that of ``position``, a number or an array."""
    return (position // block_size - 1) * block_size
