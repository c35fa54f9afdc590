"""The visible keys of a query: causal, window and local blocks, in integers only."""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import reduce

from relskew_core._array.checks import SLOPES
from relskew_core._array.known import holds
from relskew_core._array.precision import blocks, integers, shifted
from relskew_core._array.softmax import same_rank
from relskew_core._array.typing import Array, Namespace
from relskew_core._positions.span import Span

FURTHEST = 2**62
"""Beyond every distance of an offset and a key, and beyond counting in 64-bit integers."""


@dataclass(frozen=True, slots=True)
class Visibility:
    """The pattern of a call: query ``i`` has the position ``p = i + offset`` and sees a range of keys.

    The first and the last visible key never decrease with ``p``; everything here follows from that.
    """

    n_queries: int = field(metadata={"length of": "q"})
    n_keys: int = field(metadata={"length of": "k"})
    offset: int = 0
    left: int | None = None  # how far back a query sees; None: all of the past
    right: int | None = None  # how far ahead; None: all of the future; 0: causal
    block_size: int | None = None  # a query sees no further ahead than the end of its block,
    blocks_before: int | None = None  # and no further back than this many blocks before it; None: one, and causal
    by_value: bool = False  # positions are integers of the call, in any order, and unknown here

    def first_key(self, position: int) -> int:
        first, _ = self.bounds(position)
        return 0 if first is None else max(0, first)

    def last_key(self, position: int) -> int:
        """Return the last key that a query at ``position`` may see; less than the first if there is none."""
        _, last = self.bounds(position)
        return self.n_keys - 1 if last is None else min(self.n_keys - 1, last)

    def bounds(self, position: int) -> tuple[int | None, int | None]:
        first = None if self.left is None else position - self.left
        last = None if self.right is None else position + self.right
        if self.block_size is None:
            return first, last
        of_blocks, of_block = self.first_of_blocks(position), self.last_of_block(position)
        return of_blocks if first is None else max(first, of_blocks), of_block if last is None else min(last, of_block)

    @property
    def sides(self) -> tuple[int | None, int | None, int | None, int | None]:
        return self.left, self.right, self.block_size, self.blocks_before

    @property
    def whole_blocks_before(self) -> int:
        return 1 if self.blocks_before is None else self.blocks_before

    def first_of_blocks(self, position: int) -> int:
        assert self.block_size is not None
        return (position // self.block_size - self.whole_blocks_before) * self.block_size

    def last_of_block(self, position: int) -> int:
        assert self.block_size is not None
        return (position // self.block_size + 1) * self.block_size - 1

    def sees(self, queries: Array, keys: Array, *, xp: Namespace) -> Array | None:
        """Compare positions that broadcast: return the visible keys, ``None`` if all are visible."""
        queries, keys = same_rank(queries, keys)
        conditions = []
        if self.right is not None:
            conditions.append(keys <= shifted(queries, self.right, xp=xp))
        if self.left is not None:
            conditions.append(keys >= shifted(queries, -self.left, xp=xp))
        if self.block_size is not None:
            own, others = (blocks(x, self.block_size, xp=xp) for x in (queries, keys))
            conditions.append(others >= shifted(own, -self.whole_blocks_before, xp=xp))
            if self.right != 0:
                conditions.append(others <= own)
        return reduce(xp.logical_and, conditions) if conditions else None

    def within(self, start: int, stop: int, first: int, end: int) -> Visibility:
        """Return the pattern without bounds that hide none of the keys ``first … end - 1`` from the queries."""
        if self.by_value:
            return self
        low, high = start + self.offset, stop - 1 + self.offset
        left = None if self.left is None or first >= high - self.left else self.left
        right = None if self.right is None or end - 1 <= low + self.right else self.right
        of_blocks = self.block_size is not None and not (
            first >= self.first_of_blocks(high) and (self.right == 0 or end - 1 <= self.last_of_block(low))
        )
        local = (self.block_size, self.blocks_before) if of_blocks else (None, None)
        return Visibility(self.n_queries, self.n_keys, self.offset, left, right, *local)

    def bounded(self) -> Visibility:
        """Return the pattern without bounds that hide nothing, so that no number exceeds the positions."""
        return self.within(0, self.n_queries, 0, self.n_keys)

    def keys(self, start: int, stop: int) -> tuple[int, int]:
        if self.by_value:
            return 0, self.n_keys
        first = min(self.first_key(start + self.offset), self.n_keys)
        return first, max(first, self.last_key(stop - 1 + self.offset) + 1)

    def positions(self) -> tuple[int, int] | None:
        """Return the lowest and highest visible relative position, ``None`` if no key is visible."""
        if self.by_value:
            return self.furthest()
        low, high = self.offset, self.offset + self.n_queries - 1  # positions of the queries that see a key
        if self.right is not None:
            low = max(low, -self.right)
        if self.left is not None:
            high = min(high, self.n_keys - 1 + self.left)
        if self.block_size is not None:
            low = max(low, 0)
            behind = (self.n_keys - 1) // self.block_size + 1 + self.whole_blocks_before
            high = min(high, behind * self.block_size - 1)
        if low > high or self.n_keys == 0 or self.first_key(low) > self.last_key(low):
            return None
        back, ahead = [high], [low]
        if self.block_size is not None:  # a block's last query sees furthest back, and its first one furthest ahead
            back.append(max(low, (high + 1) // self.block_size * self.block_size - 1))
            ahead.append(min(high, -(-low // self.block_size) * self.block_size))
        return min(self.first_key(p) - p for p in back), max(self.last_key(p) - p for p in ahead)

    def furthest(self) -> tuple[int, int]:
        """Return the relative positions that a query at any position may see, of all that integers can have."""
        low = -FURTHEST if self.left is None else -self.left
        high = FURTHEST if self.right is None else self.right
        if self.block_size is not None:
            low = max(low, 1 - (self.whole_blocks_before + 1) * self.block_size)
            high = min(high, self.block_size - 1)
        return low, high

    def check_reach(self, name: str, span: Span, *, span_name: str = "span") -> None:
        if span.beyond == "error" and not self.by_value and (positions := self.positions()) is not None:
            self.refuse_unreached(name, span, *positions, span_name=span_name)

    def refuse_unreached(self, name: str, span: Span, low: int, high: int, *, span_name: str = "span") -> None:
        if not (holds(low >= -span.left) and holds(high <= span.right)):
            ahead = high > span.right == 0 and span_name == "span"  # an axis of a grid is never causal
            raise ValueError(
                f"`{name}` reaches the relative positions {-span.left} … {span.right}, but queries see "
                f"{low} … {high}: give a longer table, or a `{span_name}` with beyond='clip' or beyond='zero'"
                + (", or pass causal=True if no query may see its future" if ahead else SLOPES.get(name, ""))
            )

    def mask(self, start: int, stop: int, first: int, end: int, *, xp: Namespace, device: object) -> Array | None:
        """Return which of the keys ``first … end - 1`` the queries may see, shape (n, m), ``None`` if all of them."""
        pattern = self.within(start, stop, first, end)
        queries = integers(start, stop, device=device, xp=xp)[:, None]
        keys = integers(first, end, device=device, xp=xp)[None, :]
        if pattern.block_size is None:  # with a far offset and a wide window, only their difference is a small number
            left = None if pattern.left is None else pattern.left - self.offset
            right = None if pattern.right is None else pattern.right + self.offset
            return Visibility(self.n_queries, self.n_keys, 0, left, right).sees(queries, keys, xp=xp)
        return pattern.sees(queries + self.offset, keys, xp=xp)

    def some_query_sees_nothing(self) -> bool:
        if self.n_queries == 0 or self.by_value:
            return self.by_value
        ends = (self.offset, self.offset + self.n_queries - 1)
        return any(self.first_key(p) > self.last_key(p) for p in ends)
