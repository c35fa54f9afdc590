"""A short call, whose queries are worked on all at once: all that is known of it before its numbers.

Column ``c`` of the relative layout holds ``r = low + c``, and ``s[i, j] = x[i, n - 1 - i + j]`` is a view of rows that
are stepped through as if they were one entry shorter. Kernels that may step through memory as they like need no spare
column for it.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any, NamedTuple

from relskew_core._array.typing import Array
from relskew_core._kernel.call import Options
from relskew_core._positions.span import Span
from relskew_core._positions.visibility import Visibility


class Layout(NamedTuple):
    """The keys ``first … end - 1``, and the columns of the tables in relative layout."""

    first: int
    end: int
    width: int  # columns, at least as many as keys
    row: int  # of the tables, which the first column stands for: not always one that they have
    seen: slice  # the columns that some query sees

    @classmethod
    def of(cls, options: Options) -> Layout | None:
        """Lay out a call, ``None`` if no query sees a key."""
        visibility, reach = options.visibility, options.visibility.positions()
        if reach is None:
            return None
        first, end = visibility.keys(0, visibility.n_queries)
        low = first - (visibility.n_queries - 1) - visibility.offset
        width = max(reach[1] - low + 1, end - first)
        return cls(first, end, width, low + options.span.left, slice(max(reach[0] - low, 0), reach[1] - low + 1))

    @classmethod
    def of_one(cls, pattern: Visibility, span: Span, n_keys: int, offset: int) -> Layout | None:
        """Lay out a call of one query, for any number of keys and any offset; ``None`` if it sees no key."""
        first, last = pattern.bounds(offset)
        first = max(first or 0, 0)
        last = n_keys - 1 if last is None or last >= n_keys else last
        if first > last:
            return None
        count = last - first + 1
        return cls(first, last + 1, count, first - offset + span.left, slice(0, count))

    def within(self, span: Span) -> bool:
        """Whether the tables have a row for every column."""
        return self.row >= 0 and self.row + self.width <= span.rows

    def rows(self, span: Span) -> list[int]:
        """Return the row of every column: the nearest, or one past the last where tables count for nothing.

        A table that has to reach has a row for what is seen; what is not seen may be anything.
        """
        rows = range(self.row, self.row + self.width)
        if span.beyond == "zero":
            return [row if 0 <= row < span.rows else span.rows for row in rows]
        return [min(max(row, 0), span.rows - 1) for row in rows]


class Plan(NamedTuple):
    """All that is known of a short call before its numbers."""

    options: Options
    layout: Layout
    hidden: Any = None  # what the pattern hides from queries, in the kernels' own form; None if nothing
    dead_rows: bool = False  # whether it hides all keys from some query
    rows: Array | None = None  # of the tables, which the columns stand for, where they do not just follow one another
    only_rel_k: bool = False  # whether this is the one array beside queries, keys and values

    def options_for(self, n_keys: int) -> Options:
        """Return the call's own options: those of one query are known for all that are alike, wherever they stand."""
        pattern, layout = self.options.visibility, self.layout
        if pattern.n_queries > 1:
            return self.options
        own = replace(pattern, n_keys=n_keys, offset=layout.first - layout.row + self.options.span.left)
        return replace(self.options, visibility=own)

    @property
    def is_plain(self) -> bool:
        """Whether the logits are scaled sums of two products, and no more is asked for than the output."""
        options = self.options
        return (
            self.only_rel_k
            and self.hidden is self.rows is options.softcap is None
            and options.rel_scale == options.scale
            and not options.return_lse
        )
