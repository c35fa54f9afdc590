"""JAX: how a call is cut into chunks of one shape, so that a loop over traced positions runs them all.

A loop's body is compiled once and its memory is taken once, but every turn has the same shapes. Chunks that see about
as many keys form one loop; a causal pattern is cut into a few, so that little of its triangle is worked on in vain.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise
from typing import NamedTuple

import numpy as np

from relskew_core._array.typing import Array
from relskew_core._kernel.call import Options

LOOPS = 6
"""At most this many loops: compiling takes time by the loop, and of a triangle 1 / LOOPS is worked on in vain."""

TURNS = 4
"""At least this many turns of every loop; for less, one more loop is not worth compiling."""


class ChunkPlace(NamedTuple):
    """Where a chunk stands: in a plan one entry for each chunk, in a loop one traced integer each."""

    start: Array  # first query
    fresh: Array  # first query that no chunk before has had: the last chunk may overlap the one before
    first: Array  # first key
    seen_first: Array  # keys that some query of the chunk may see …
    seen_end: Array  # … up to this one


@dataclass(frozen=True)
class Loop:
    """Chunks of ``n`` queries and ``m`` keys each, and where both meet the tables (see ``_kernel.chunk.Chunk``)."""

    places: ChunkPlace
    n: int
    m: int
    spare: int
    width: int
    low: tuple[int, int]  # the least and the greatest relative position of a chunk's first table column
    overlap: bool  # whether some queries of a chunk are not fresh
    unseen: bool  # whether some keys of a chunk are seen by none of its queries


@dataclass(frozen=True)
class LoopPlan:
    """The loops of a call, and the range of relative positions that their table windows touch."""

    loops: list[Loop]
    low: int
    high: int

    @classmethod
    def of(cls, options: Options, size: int) -> LoopPlan:
        """Cut a call into chunks of at most ``size`` queries; those that see no key are left out."""
        visibility = options.visibility
        n_queries = visibility.n_queries
        count = -(-n_queries // size)
        n = -(-n_queries // max(count, 1))
        chunks = []
        for fresh in range(0, n_queries, max(n, 1)):
            start = min(fresh, n_queries - n)
            first, end = visibility.keys(start, start + n)
            if first < end:
                chunks.append((start, fresh, first, end))
        loops = [_loop(options, part, n) for part in _parts(chunks)]
        lows, highs = [loop.low[0] for loop in loops], [loop.low[1] + loop.width - 1 for loop in loops]
        return cls(loops, min(lows, default=0), max(highs, default=0))


def reach(options: Options) -> tuple[int, int]:
    """Return the lowest and the highest relative position that tables are read at."""
    low, high = options.positions()
    if not options.visibility.by_value:
        return low, high
    left, right = options.span.left, options.span.right  # beyond them nothing is looked up
    return max(-left, min(low, right)), max(-left, min(high, right))


def _parts(chunks: list[tuple[int, int, int, int]]) -> list[list[tuple[int, int, int, int]]]:
    """Cut the chunks into the fewest runs of which one key in twenty is worked on in vain, or as many as is allowed."""
    if not chunks:
        return []
    seen = sum(end - first for *_, first, end in chunks)
    parts = [chunks]
    for count in range(1, min(LOOPS, len(chunks) // TURNS) + 1):
        edges = [len(chunks) * part // count for part in range(count + 1)]
        parts = [chunks[a:b] for a, b in pairwise(edges)]
        worked = sum(len(part) * max(end - first for *_, first, end in part) for part in parts)
        if 20 * worked <= 21 * seen:
            break
    return parts


def _loop(options: Options, chunks: list[tuple[int, int, int, int]], n: int) -> Loop:
    visibility = options.visibility
    start, fresh, seen_first, seen_end = (np.asarray(column, dtype=np.int32) for column in zip(*chunks, strict=True))
    m = int((seen_end - seen_first).max())
    first = np.minimum(seen_first, visibility.n_keys - m)
    places = ChunkPlace(start, fresh, first, seen_first, seen_end)
    overlap, unseen = bool((fresh > start).any()), bool((seen_end - seen_first < m).any())
    low, high = reach(options)
    if visibility.by_value:
        return Loop(places, n, m, 0, high - low + 1, (low, low), overlap, unseen)
    spare = n if n > 1 else 0
    ahead = visibility.offset + int((start - first).min()), visibility.offset + int((start - first).max())
    width = min(max(high + spare + ahead[1] + 1, m + (n > 1)), spare + m)
    return Loop(places, n, m, spare, width, (-ahead[1] - spare, -ahead[0] - spare), overlap, unseen)
