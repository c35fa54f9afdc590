"""NumPy: a call cut into chunks of queries, and what all heads share of them."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, TypeAlias

import array_api_compat.numpy as xp
import numpy as np

from relskew_core._kernel.call import Operands, Options
from relskew_core._kernel.chunk import Chunk, chunks
from relskew_core._kernel.dropout import hashes
from relskew_core._kernel.forward import Tables, has_dead_rows
from relskew_core._positions.table import Table
from relskew_core.backends._in_place import by_batch, chunk_size, hidden_columns

Array: TypeAlias = np.ndarray[Any, Any]


@dataclass(frozen=True, slots=True)
class HeadwiseCall:
    """The operands with their leading axes flattened to one batch axis, and what all chunks share."""

    q: Array
    k: Array
    v: Array
    rel_q: Array | None
    mask: Array | None
    tables: Tables
    options: Options
    chunks: list[Chunk]  # those that see a key
    hidden: list[list[tuple[slice, Array]]]  # for each chunk, columns and which of their entries the pattern hides
    dead_rows: bool
    segments: tuple[Array, Array] | None  # of queries and of keys, (B or 1, L)
    drawn: tuple[Array, Array] | None  # with dropout, hashes of queries (B, H, Lq, 1) and of keys (Lk,), without signs

    @classmethod
    def of(cls, operands: Operands, options: Options) -> HeadwiseCall:
        """Flatten a call and cut its queries into chunks."""
        if options.chunk_size is None:
            options = replace(options, chunk_size=chunk_size(options, operands.q.itemsize))
        laid = [chunk for chunk in chunks(operands, options) if chunk.first < chunk.end]
        return cls(
            q=by_batch(operands.q, xp=xp),
            k=by_batch(operands.k, xp=xp),
            v=by_batch(operands.v, xp=xp),
            rel_q=None if operands.rel_q is None else by_batch(operands.rel_q, xp=xp),
            mask=None
            if operands.mask is None
            else by_batch(np.broadcast_to(operands.mask, (*operands.q.shape[:-1], operands.k.shape[-2])), xp=xp),
            tables=Tables.of(operands, options, laid, xp=xp),
            options=options,
            chunks=laid,
            hidden=[hidden_columns(options, chunk, xp=xp, device="cpu") for chunk in laid],
            dead_rows=has_dead_rows(operands, options),
            segments=_segments(operands),
            drawn=_drawn(operands, options) if options.dropout else None,
        )

    def of_table(self, table: Table, head: int) -> Array:
        """Return the columns of a table for a head, (D, rows)."""
        columns: Array = table.columns
        return columns if columns.ndim == 2 else columns[head if columns.shape[0] > 1 else 0]

    def of_segments(self, batch: int, chunk: Chunk) -> tuple[Array, Array] | None:
        """Return the segments of a chunk's queries and keys, ``None`` if all are of one."""
        if self.segments is None:
            return None
        queries, keys = (x[batch if x.shape[0] > 1 else 0] for x in self.segments)
        queries, keys = queries[chunk.start : chunk.stop], keys[chunk.first : chunk.end]
        return None if (queries == queries[0]).all() and (keys == queries[0]).all() else (queries, keys)


def _segments(operands: Operands) -> tuple[Array, Array] | None:
    if operands.q_segments is None or operands.k_segments is None:
        return None
    queries, keys = (x.reshape(-1, x.shape[-1]) for x in (operands.q_segments, operands.k_segments))
    return queries, keys


def _drawn(operands: Operands, options: Options) -> tuple[Array, Array]:
    whole = Chunk(0, operands.q.shape[-2], 0, operands.k.shape[-2], 0, 0, 0)
    rows, columns = hashes(operands, options, whole, xp=xp)
    return by_batch(rows, xp=xp).view(np.uint32), columns.view(np.uint32)
