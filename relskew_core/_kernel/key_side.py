"""Keys times a table, ``k_j · e_r``: DeBERTa's position to content.

Seen from a key, queries are what keys are to a query, with past and future changed over: the same skew, on blocks of
keys against the queries of a chunk. Blocks, since a key needs as many columns as there are queries and keys of its
block; all keys at once would need ``n + m`` columns each where ``n`` are needed.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from relskew_core._array.known import joined, ranges
from relskew_core._array.typing import Array, Namespace
from relskew_core._kernel.by_value import LookUpChunk
from relskew_core._kernel.call import Options
from relskew_core._kernel.chunk import Chunk
from relskew_core._positions.span import Span
from relskew_core._positions.table import Table

if TYPE_CHECKING:
    from relskew_core._kernel.sums import Sums
    from relskew_core._kernel.view import View

SMALLEST = 16
"""The fewest keys of a block: some wasted columns cost less than many small products."""


def mirrored(table: Array, span: Span, *, xp: Namespace) -> Table:
    """Return the columns of a table by ``-r``: query position − key position, ascending."""
    return Table(xp.flip(xp.matrix_transpose(table), axis=-1), span.right, span.beyond)


def blocks(chunk: Chunk, options: Options, *, xp: Namespace) -> Iterator[Chunk]:
    """Cut a chunk's keys into blocks, each a chunk with the roles of queries and keys exchanged."""
    n, offset = chunk.stop - chunk.start, options.visibility.offset
    size = max(SMALLEST, -(-n // 2))
    for first, end in ranges(chunk.end - chunk.first, size):
        start, stop = chunk.first + first, chunk.first + end
        if isinstance(chunk, LookUpChunk):
            yield chunk.mirrored(start, stop, xp=xp)
        elif options.visibility.by_value:
            yield Chunk(start, stop, chunk.start, chunk.stop, -chunk.high, chunk.width, 0)
        else:
            spare = stop - start if stop - start > 1 else 0
            low = chunk.start + offset - start - spare
            yield Chunk(start, stop, chunk.start, chunk.stop, low, spare + n, spare)


def logits(view: View, keys: Array) -> Array:
    """Return ``k_j · e_r`` for the scaled keys of a chunk, (..., H, n, m)."""
    xp, chunk, table, heads, pieces = view.xp, view.chunk, view.table("key_table"), view.operands.q.shape[-3], []
    by_head = table.columns.ndim > 2
    for block in blocks(chunk, view.options, xp=xp):
        own = keys[..., block.start - chunk.first : block.stop - chunk.first, :]
        product = table.product(by_query_head(own, heads, xp=xp) if by_head else own, block.low, block.high, xp=xp)
        found = block.absolute(product, xp=xp)
        pieces.append(found if by_head else by_query_head(found, heads, xp=xp))
    return xp.matrix_transpose(joined(pieces, axis=-2, xp=xp))


def gradient(view: View, d_logits: Array, keys: Array, sums: Sums) -> Array:
    """Return the gradient of the scaled keys, and add to that of the table."""
    xp, chunk, options, pieces = view.xp, view.chunk, view.options, []
    lowest, highest = options.positions()
    for block in blocks(chunk, options, xp=xp):
        rows = slice(block.start - chunk.first, block.stop - chunk.first)
        relative = block.relative(xp.matrix_transpose(d_logits[..., rows]), xp=xp)
        low, high = block.low, block.high
        if not options.visibility.by_value:  # columns that no query sees are never multiplied, as in `View.relative`
            low, high = max(low + (block.spare > 0), -highest), min(high, -lowest)
        seen = relative[..., low - block.low : high - block.low + 1]
        sums.add_table(view, "key_table", low, high, seen, by_query_head(keys[..., rows, :], d_logits.shape[-3], xp=xp))
        pieces.append(by_key_head(view.mixed("key_table", seen, low, high), keys.shape[-3], xp=xp))
    return joined(pieces, axis=-2, xp=xp)


def by_query_head(x: Array, heads: int, *, xp: Namespace) -> Array:
    """Repeat entries of key heads for the query heads of their groups: (..., Hkv, a, b) to (..., H, a, b)."""
    *lead, groups, a, b = x.shape
    if heads == groups:
        return x
    size = heads // groups
    wide = xp.broadcast_to(xp.reshape(x, (*lead, groups, 1, a, b)), (*lead, groups, size, a, b))
    return xp.reshape(wide, (*lead, heads, a, b))


def by_key_head(x: Array, groups: int, *, xp: Namespace) -> Array:
    """Return the adjoint of :func:`by_query_head`."""
    *lead, heads, a, b = x.shape
    if heads == groups:
        return x
    return xp.sum(xp.reshape(x, (*lead, groups, heads // groups, a, b)), axis=-3)
