"""JAX: cutting a call into chunks of one shape, so that a loop over traced positions runs them all.

A loop's body is compiled once and its memory is taken once, but every turn has the same shapes. Chunks that see about
as many keys form one loop; a causal pattern is cut into a few, so that little of its triangle is computed in vain.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from relskew_core._array.typing import Array
from relskew_core._kernel.call import Options
from relskew_core._positions.labels import Documents

LOOPS = 6
"""The most loops: each takes time to compile, and a share of 1 / LOOPS of a triangle is computed in vain."""

TURNS = 4
"""The fewest turns of a loop; for fewer, another loop is not worth compiling."""


class ChunkPlace(NamedTuple):
    """The position of a chunk: in a plan one entry per chunk, in a loop one traced integer each."""

    start: Array  # first query
    fresh: Array  # first query that no earlier chunk has: the last chunk may overlap its predecessor
    first: Array  # first key
    seen_first: Array  # keys that some query of the chunk may see,
    seen_end: Array  # up to this one


@partial(jax.tree_util.register_dataclass, data_fields=["first", "end"], meta_fields=["longest"])
@dataclass(frozen=True)
class Ranges:
    """The keys of each chunk's documents, if known: numbers that are passed to a compiled loop."""

    first: Array  # one for each chunk
    end: Array
    longest: int  # at least the keys of any chunk: a power of two, so that not every batch is compiled separately

    @classmethod
    def of(cls, options: Options, size: int, documents: Documents | None) -> Ranges | None:
        """Return the ranges of a call's chunks, ``None`` if they are unknown or skip too little."""
        if documents is None:
            return None
        starts, _, n = _starts(options.visibility.n_queries, size)
        pairs = []
        for start in starts:
            first, end = options.visibility.keys(start, start + n)
            first_of, end_of = documents.keys(start, start + n)
            first = max(first, first_of)
            pairs.append((first, max(first, min(end, end_of))))
        longest = 1 << max(0, max(end - first for first, end in pairs) - 1).bit_length()
        if 2 * longest > options.visibility.n_keys:
            return None
        firsts, ends = (jnp.asarray(x, dtype=jnp.int32) for x in zip(*pairs, strict=True))
        return cls(firsts, ends, longest)


@dataclass(frozen=True)
class Loop:
    """Chunks of ``n`` queries and ``m`` keys each, and their window of the tables (see ``_kernel.chunk.Chunk``)."""

    places: ChunkPlace
    n: int
    m: int
    spare: int
    width: int
    low: tuple[int, int]  # the lowest and the highest relative position of a chunk's first table column
    overlap: bool  # whether some queries of a chunk were in the chunk before it
    unseen: bool  # whether no query of a chunk sees some of its keys


@dataclass(frozen=True)
class LoopPlan:
    """The loops of a call, and the range of relative positions that their table windows touch."""

    loops: list[Loop]
    low: int
    high: int

    @classmethod
    def of(cls, options: Options, size: int, ranges: Ranges | None = None) -> LoopPlan:
        """Cut a call into chunks of at most ``size`` queries, without chunks that see no key."""
        starts, freshs, n = _starts(options.visibility.n_queries, size)
        if ranges is None:
            chunks = [
                (start, fresh, first, end)
                for start, fresh in zip(starts, freshs, strict=True)
                for first, end in [options.visibility.keys(start, start + n)]
                if first < end
            ]
            loops = [_loop(options, part, n) for part in _parts(chunks)]
        else:
            loops = [_loop_of_ranges(options, starts, freshs, n, ranges)]
        if not loops:
            return cls.empty(options)
        return cls(loops, min(loop.low[0] for loop in loops), max(loop.low[1] + loop.width - 1 for loop in loops))

    @classmethod
    def empty(cls, options: Options) -> LoopPlan:
        """Return the plan of a call in which no query sees a key."""
        return cls([], *reach(options))


def reach(options: Options) -> tuple[int, int]:
    """Return the lowest and highest relative position at which tables are read."""
    low, high = options.positions()
    if not options.visibility.by_value:
        return low, high
    left, right = options.span.left, options.span.right  # nothing beyond these is looked up
    return max(-left, min(low, right)), max(-left, min(high, right))


def _parts(chunks: list[tuple[int, int, int, int]]) -> list[list[tuple[int, int, int, int]]]:
    """Cut the chunks into the fewest runs in which at most one key in twenty is computed in vain, up to the limit."""
    if not chunks:
        return []
    seen = sum(end - first for *_, first, end in chunks)
    parts = [chunks]
    for count in range(1, min(LOOPS, len(chunks) // TURNS) + 1):
        edges = [len(chunks) * part // count for part in range(count + 1)]
        parts = [chunks[a:b] for a, b in pairwise(edges)]
        computed = sum(len(part) * max(end - first for *_, first, end in part) for part in parts)
        if 20 * computed <= 21 * seen:
            break
    return parts


def _starts(n_queries: int, size: int) -> tuple[list[int], list[int], int]:
    """Return the first query of each chunk, the first that no earlier chunk has, and a chunk's number of queries."""
    count = -(-n_queries // size)
    n = -(-n_queries // max(count, 1))
    freshs = list(range(0, n_queries, max(n, 1)))
    return [min(fresh, n_queries - n) for fresh in freshs], freshs, n


def _loop(options: Options, chunks: list[tuple[int, int, int, int]], n: int) -> Loop:
    start, fresh, seen_first, seen_end = (np.asarray(column, dtype=np.int32) for column in zip(*chunks, strict=True))
    m = int((seen_end - seen_first).max())
    first = np.minimum(seen_first, options.visibility.n_keys - m)
    places = ChunkPlace(start, fresh, first, seen_first, seen_end)
    ahead = int((start - first).min()), int((start - first).max())
    return _laid(options, places, n, m, ahead, unseen=bool((seen_end - seen_first < m).any()))


def _loop_of_ranges(options: Options, starts: list[int], freshs: list[int], n: int, ranges: Ranges) -> Loop:
    m, (start, fresh) = ranges.longest, (np.asarray(x, dtype=np.int32) for x in (starts, freshs))
    last = options.visibility.n_keys - m
    places = ChunkPlace(start, fresh, jnp.minimum(ranges.first, last), ranges.first, ranges.end)
    return _laid(options, places, n, m, (starts[0] - last, starts[-1]), unseen=True)


def _laid(options: Options, places: ChunkPlace, n: int, m: int, ahead: tuple[int, int], *, unseen: bool) -> Loop:
    """Lay out a loop whose chunks' first queries are ``ahead`` of their first keys, between these bounds."""
    overlap, (low, high) = bool((places.fresh > places.start).any()), reach(options)
    if options.visibility.by_value:
        return Loop(places, n, m, 0, high - low + 1, (low, low), overlap, unseen)
    spare, (least, most) = n if n > 1 else 0, (options.visibility.offset + x for x in ahead)
    width = min(max(high + spare + most + 1, m + (n > 1)), spare + m)
    return Loop(places, n, m, spare, width, (-most - spare, -least - spare), overlap, unseen)
