"""Attention between two parts of a sequence as a separate call, in integers only.

The positions of a part follow one another in steps. So the pairs of two parts are a Toeplitz problem like the whole, at
distance zero, with other rows of the tables: any kernel serves them, at any place in the sequence.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from relskew_core._array.known import joined
from relskew_core._positions.span import Beyond, Span


@dataclass(frozen=True, slots=True)
class Run:
    """The positions ``start + step · i`` of ``count`` entries that are adjacent from ``place`` on."""

    start: int
    step: int
    count: int
    place: int = 0

    @property
    def here(self) -> slice:
        return slice(self.place, self.place + self.count)

    @property
    def positions(self) -> slice:
        return slice(self.start, self.start + self.step * (self.count - 1) + 1, self.step)


@dataclass(frozen=True, slots=True)
class Pairs:
    """The visible pairs of two runs: a separate call, in steps instead of positions."""

    offset: int
    causal: bool
    window: tuple[int | None, int | None] | None
    low: int  # the lowest relative position of the call
    high: int  # and the highest, with zero between them
    zero: int  # the relative position in the whole sequence of the call's zero
    step: int

    @classmethod
    def of(cls, queries: Run, keys: Run, offset: int, left: int | None, right: int | None) -> Pairs | None:
        """Return the pairs whose relative position is ``-left … right`` in the whole, ``None`` if there are none."""
        step, between = queries.step, keys.start - queries.start - offset
        low, high = 1 - queries.count, keys.count - 1
        first = low if left is None else max(low, -((left + between) // step))
        last = high if right is None else min(high, (right - between) // step)
        if first > last:
            return None
        window: tuple[int | None, int | None] | None = None
        origin, back, ahead = 0, first > low, last < high
        if ahead:
            origin, window = last, (last - first, None) if back else None
        elif back:
            origin, window = first, (0, None)
        return cls(origin, ahead, window, first - origin, last - origin, between + step * origin, step)

    def rows(self, span: Span) -> Rows:
        return Rows.of(self.zero + span.left, self.step, self.low, self.high, span)


@dataclass(frozen=True, slots=True)
class Rows:
    """A part of a table: every ``step``-th row from ``start`` on, with rows for the positions beyond around it."""

    before: int  # the number of rows for positions before the first row of the table
    start: int
    count: int
    step: int
    after: int
    span: Span  # of the part

    @classmethod
    def of(cls, zero: int, step: int, low: int, high: int, span: Span) -> Rows:
        """Return the rows for ``low … high``, in steps from row ``zero``; never more rows than positions.

        What repeats an edge of the table is one row, which is repeated in its turn.
        """
        first, last = -(zero // step), (span.rows - 1 - zero) // step  # within the table
        if low > last or high < first:
            low = high = 0  # every position uses one edge row
        if low < first:
            low = max(low, min(first - 1, 0))
        if high > last:
            high = min(high, max(last + 1, 0))
        before, after = max(0, min(first - 1, high) - low + 1), max(0, high - max(last + 1, low) + 1)
        start = zero + step * max(low, first)
        return cls(before, start, high - low + 1 - before - after, step, after, Span(-low, high, span.beyond))

    @property
    def here(self) -> slice:
        return slice(self.start, self.start + self.step * (self.count - 1) + 1, self.step) if self.count else slice(0)

    def of_table(self, table: Any, beyond: Beyond, *, xp: Any) -> Any:
        """Return the part of a table (..., R, D)."""
        parts = [table[..., self.here, :]]

        def edge(row: slice, count: int) -> Any:
            one = table[..., row, :]
            one = one if beyond == "clip" else xp.zeros_like(one)
            return xp.broadcast_to(one, (*one.shape[:-2], count, one.shape[-1]))

        if self.before:
            parts.insert(0, edge(slice(1), self.before))
        if self.after:
            parts.append(edge(slice(-1, None), self.after))
        return joined(parts, axis=-2, xp=xp)
