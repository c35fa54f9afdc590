"""A call cut into chunks of queries, each with its range of keys and its window of the tables."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from relskew_core._array.checks import is_symbol
from relskew_core._array.known import exported, ranges
from relskew_core._array.namespace import on_cpu
from relskew_core._array.typing import Array, Namespace
from relskew_core._kernel.call import Operands, Options
from relskew_core._positions.labels import Documents
from relskew_core._positions.skew import skew_from, unskew_from

SCRATCH_BYTES = {"cpu": 4 * 2**20, "other": 256 * 2**20}
"""The budget of one logits buffer: about the size of a CPU's caches, and large enough to fill an accelerator."""

SMALLEST = 16
"""The fewest queries of a chunk: smaller chunks cost more calls than they save memory."""

LARGEST = 512
"""The most queries of a chunk."""

UNKNOWN_BATCH = 8
"""The assumed size of a leading axis whose size is unknown."""


@dataclass(frozen=True, slots=True)
class Chunk:
    """Queries ``start … stop - 1``, the keys ``first … end - 1`` they may see, and their window of the tables."""

    start: int
    stop: int
    first: int
    end: int
    low: int  # relative position of the first table column
    width: int  # number of table columns
    spare: int  # columns before that of row 0's first key: in each further row, the skew reads one column earlier

    @classmethod
    def of(cls, options: Options, start: int, stop: int, documents: Documents | None = None) -> Chunk:
        visibility, span = options.visibility, options.span
        first, end = visibility.keys(start, stop)
        if documents is not None:
            first_of, end_of = documents.keys(start, stop)
            first = max(first, first_of)
            end = max(first, min(end, end_of))
        lowest, highest = options.positions()
        if visibility.by_value:  # the table's columns, in which positions are looked up
            low, high = (max(-span.left, min(position, span.right)) for position in (lowest, highest))
            return cls(start, stop, first, end, low, high - low + 1, 0)
        n, m = stop - start, end - first
        offset = visibility.offset + start - first
        spare = n if n > 1 else 0  # rows after the first need one column more than there are positions
        width = min(max(highest + spare + offset + 1, m + (n > 1)), spare + m)
        return cls(start, stop, first, end, -(spare + offset), width, spare)

    def seen(self, options: Options) -> tuple[int, int]:
        """Return the first and the last relative position among the table's columns that some query sees."""
        if options.visibility.by_value:  # any position may be looked up
            return self.low, self.high
        lowest, highest = options.positions()
        return max(self.low + (self.spare > 0), lowest), min(self.high, highest)

    @property
    def high(self) -> int:
        """Relative position of the last table column."""
        return self.low + self.width - 1

    def absolute(self, x: Array, *, xp: Namespace) -> Array:
        """Relative layout (..., n, width) to absolute layout (..., n, m)."""
        return skew_from(x, n_keys=self.end - self.first, first=self.spare, xp=xp)

    def relative(self, s: Array, *, xp: Namespace) -> Array:
        """Absolute layout (..., n, m) to relative layout (..., n, width)."""
        # In full width first: narrower rows overlap, and NaN of one query would reach the next.
        return unskew_from(s, width=self.spare + self.end - self.first, first=self.spare, xp=xp)[..., : self.width]


def chunks(operands: Operands, options: Options) -> Iterator[Chunk]:
    """Cut the queries into chunks of ``options.chunk_size`` or, if that is ``None``, of the scratch budget."""
    n_queries, documents = options.visibility.n_queries, documents_of(operands)
    if is_empty(*operands.q.shape[:-2]):  # an empty chunk sees nothing, and not every library reduces empty axes
        yield Chunk(0, n_queries, 0, 0, 0, 0, 0)
        return
    size = options.chunk_size
    if size is None:
        size = SMALLEST if n_queries <= SMALLEST else chunk_size(operands, options, documents)
    for start, stop in ranges(n_queries, size):
        yield Chunk.of(options, start, stop, documents)


def is_empty(*sizes: Any) -> bool:
    """Whether an array of these sizes is empty; unknown sizes of an exported program count as not empty."""
    return not exported(*sizes) and 0 in sizes  # JAX's symbols are never 0


def documents_of(operands: Operands) -> Documents | None:
    """Return the keys that the segments let queries see, if there are segments with known values."""
    if operands.q_segments is None or operands.k_segments is None:
        return None
    return Documents.of((operands.q_segments, operands.k_segments))


def keys_seen(options: Options, documents: Documents | None = None) -> int:
    """Return the most keys that a query sees, and at least one."""
    low, high = options.positions()
    keys = min(options.visibility.n_keys, high - low + 1)
    return max(1, keys if documents is None else min(keys, documents.longest))


def chunk_size(
    operands: Operands, options: Options, documents: Documents | None = None, *, cpu: bool | None = None
) -> int:
    """Return how many queries fit the scratch budget; ``cpu`` is used if the arrays have no device."""
    q = operands.q
    # torch.compile follows no generator into `prod`
    lead = math.prod([UNKNOWN_BATCH if is_symbol(n) else n for n in q.shape[:-2]])
    bits = 64 if "64" in str(q.dtype) else 32
    cpu = on_cpu(q) if cpu is None else cpu
    keys = keys_seen(options, documents)
    size = SCRATCH_BYTES["cpu" if cpu else "other"] * 8 // (bits * max(1, lead) * keys)
    found = SMALLEST
    while found < LARGEST and 2 * found <= size:  # torch.compile makes a constant of a size whose bits are counted
        found *= 2
    return found
