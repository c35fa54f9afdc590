"""Queries and keys at arbitrary positions: relative positions are looked up pair by pair instead of skewed.

``r = p_k - p_q`` says which column of ``q · table`` a pair reads. No row of a table is copied for a pair, and a chunk's
look-ups are as large as its logits.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from relskew_core._array.precision import shifted
from relskew_core._array.softmax import gather, same_rank, scatter_add
from relskew_core._array.typing import Array, Namespace
from relskew_core._kernel.chunk import Chunk
from relskew_core._positions.span import Span


@dataclass(frozen=True, slots=True, eq=False)
class LookUpChunk(Chunk):
    """A chunk with the column of the tables that each of its pairs reads."""

    index: Array  # (..., 1, n, m)
    there: Array | None  # which pairs have a column, None if all: outside, tables with beyond="zero" add nothing
    unreached: Array | None  # which pairs are beyond the table; an error if they are visible

    def absolute(self, x: Array, *, xp: Namespace) -> Array:
        found = gather(x, self.index, xp=xp)
        return found if self.there is None else xp.where(self.there, found, 0.0)

    def relative(self, s: Array, *, xp: Namespace) -> Array:
        s = s if self.there is None else xp.where(self.there, s, 0.0)
        return scatter_add(s, self.index, self.width, xp=xp)

    def poisoned(self, logits: Array, *, xp: Namespace) -> Array:
        """Put NaN at pairs beyond a table with ``beyond="error"``, which only unknown positions can cause."""
        return logits if self.unreached is None else xp.where(self.unreached, math.nan, logits)

    def mirrored(self, start: int, stop: int, *, xp: Namespace) -> LookUpChunk:
        """Return the keys ``start … stop - 1`` as queries of the chunk's queries, for a table by ``-r``."""
        rows = slice(start - self.first, stop - self.first)

        def turned(x: Array | None) -> Array | None:
            return None if x is None else xp.matrix_transpose(x)[..., rows, :]

        index = self.width - 1 - xp.matrix_transpose(self.index)[..., rows, :]
        there = turned(self.there)
        return LookUpChunk(start, stop, self.start, self.stop, -self.high, self.width, 0, index, there, None)


def looked_up(chunk: Chunk, queries: Array, keys: Array, span: Span, *, xp: Namespace) -> LookUpChunk:
    """Return a chunk whose queries and keys have positions that broadcast to (..., 1, n, m)."""
    queries, keys = same_rank(queries, keys)
    numbers = (chunk.start, chunk.stop, chunk.first, chunk.end, chunk.low, chunk.width, chunk.spare)
    first, last = (shifted(queries, end, xp=xp) for end in (chunk.low, chunk.high))
    nearest = xp.minimum(xp.maximum(keys, first), last)  # keys first: the difference of two arbitrary integers may wrap
    index = nearest - queries - chunk.low
    if span.beyond == "clip":
        return LookUpChunk(*numbers, index, None, None)
    first, last = (shifted(queries, end, xp=xp) for end in (-span.left, span.right))
    there = xp.logical_and(keys >= first, keys <= last)
    return LookUpChunk(*numbers, index, there, xp.logical_not(there) if span.beyond == "error" else None)
