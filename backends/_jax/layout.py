"""The layout of a call with all queries at once: its keys, and the columns of the relative layout.

Column ``c`` of the relative layout holds ``r = low + c``, and ``s[i, j] = x[i, n - 1 - i + j]``.
"""

from __future__ import annotations

from typing import NamedTuple

from relskew_core._kernel.call import Options
from relskew_core._positions.span import Span


class Layout(NamedTuple):
    """The keys ``first … end - 1``, and the columns of the tables in relative layout."""

    first: int
    end: int
    width: int  # columns, at least as many as keys
    row: int  # of the tables, for the first column; it may be outside the tables
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

    def rows(self, span: Span) -> list[int]:
        """Return the row of every column: the nearest, or one past the last for positions beyond ``"zero"`` tables.

        A table that has to reach has a row for what is seen; what is not seen may be anything.
        """
        rows = range(self.row, self.row + self.width)
        if span.beyond == "zero":
            return [row if 0 <= row < span.rows else span.rows for row in rows]
        return [min(max(row, 0), span.rows - 1) for row in rows]
