"""A call cut into chunks of queries: the keys that each may see, and where both meet the tables."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise

from relskew_core._array.namespace import device
from relskew_core._array.typing import Array, Namespace
from relskew_core._kernel.call import Operands, Options
from relskew_core._positions.skew import skew_from, unskew_from
from relskew_core._positions.visibility import Visibility

SCRATCH_BYTES = {"cpu": 4 * 2**20, "other": 256 * 2**20}
"""Budget of one logits buffer: near the caches on a CPU, large enough to fill an accelerator elsewhere."""

SMALLEST = 16
"""Queries of a chunk at least, whatever the budget: fewer would cost more calls than they save memory."""


@dataclass(frozen=True, slots=True)
class Chunk:
    """Queries ``start … stop - 1``, the keys ``first … end - 1`` they may see, and where both meet the tables."""

    start: int
    stop: int
    first: int
    end: int
    low: int  # relative position of the first table column
    width: int  # number of table columns
    spare: int  # columns before that of row 0's first key: the skew reads each row one column earlier

    @classmethod
    def of(cls, visibility: Visibility, start: int, stop: int, highest: int) -> Chunk:
        """Lay out a chunk whose queries see no relative position above ``highest``."""
        first, end = visibility.keys(start, stop)
        n, m = stop - start, end - first
        offset = visibility.offset + start - first
        spare = n if n > 1 else 0  # rows after the first need one column more than the positions that occur
        width = min(max(highest + spare + offset + 1, m + (n > 1)), spare + m)
        return cls(start, stop, first, end, -(spare + offset), width, spare)

    @property
    def high(self) -> int:
        """Relative position of the last table column."""
        return self.low + self.width - 1

    def of_mask(self, mask: Array) -> tuple[slice, slice]:
        """Rows and columns of a mask, whole along axes that broadcast."""
        rows = slice(None) if mask.shape[-2] == 1 else slice(self.start, self.stop)
        return rows, slice(None) if mask.shape[-1] == 1 else slice(self.first, self.end)

    def absolute(self, x: Array, *, xp: Namespace) -> Array:
        """Relative layout (..., n, width) to absolute layout (..., n, m)."""
        return skew_from(x, n_keys=self.end - self.first, first=self.spare, xp=xp)

    def relative(self, s: Array, *, xp: Namespace) -> Array:
        """Absolute layout (..., n, m) to relative layout (..., n, width)."""
        # In full width first: narrower rows overlap, and a query's NaN would become its neighbour's.
        return unskew_from(s, width=self.spare + self.end - self.first, first=self.spare, xp=xp)[..., : self.width]


def chunks(operands: Operands, options: Options) -> Iterator[Chunk]:
    """Cut the queries into chunks of ``options.chunk_size`` or, if that is ``None``, of the scratch budget."""
    visibility = options.visibility
    size = options.chunk_size or (SMALLEST if visibility.n_queries <= SMALLEST else chunk_size(operands, visibility))
    _, highest = options.positions()
    edges = [*range(0, visibility.n_queries, size), visibility.n_queries]
    for start, stop in pairwise(edges):
        yield Chunk.of(visibility, start, stop, highest)


def chunk_size(operands: Operands, visibility: Visibility, *, cpu: bool | None = None) -> int:
    """Return how many queries the scratch budget allows; ``cpu`` says where, where the arrays do not."""
    q = operands.q
    lead, bits = math.prod(q.shape[:-2]), 64 if "64" in str(q.dtype) else 32
    positions = visibility.positions() or (0, 0)
    keys = max(1, min(visibility.n_keys, positions[1] - positions[0] + 1))
    cpu = "cpu" in str(device(q)).lower() if cpu is None else cpu
    size = SCRATCH_BYTES["cpu" if cpu else "other"] * 8 // (bits * max(1, lead) * keys)
    return max(SMALLEST, min(512, 1 << max(size, 1).bit_length() - 1))


def visible_columns(relative: Array, chunk: Chunk, options: Options) -> tuple[Array, int, int]:
    """Cut the relative layout to the positions that some query sees, and say which.

    Rows of a table that nobody may see are never multiplied, not even by zero.
    """
    lowest, highest = options.positions()
    low, high = max(chunk.low + (chunk.spare > 0), lowest), min(chunk.high, highest)
    if low > high:
        return relative[..., :0], low, high
    return relative[..., low - chunk.low : high - chunk.low + 1], low, high
