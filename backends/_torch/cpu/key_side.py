"""torch on CPU: keys that meet a table of their own, in blocks as in `_kernel.key_side`, added to logits transposed.

Keys further from all queries of a chunk than a clipped table reaches meet its last row alone: one product for all.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

import array_api_compat.torch as xp
from torch import Tensor

from relskew_core._kernel.call import Options
from relskew_core._kernel.chunk import Chunk
from relskew_core._kernel.key_side import blocks
from relskew_core._positions.table import Extension, Table
from relskew_core.backends._torch.cpu.product import Product

Buffer = Callable[[int, int], Tensor]
"""Makes a buffer (stack, rows, width)."""


@dataclass(frozen=True, slots=True)
class Block:
    """Some keys of a chunk, and where their product with the table goes."""

    keys: slice  # among those of the call
    logits: Tensor  # (stack, n, keys)
    relative: Tensor  # (stack, keys, width), by query position less key position
    absolute: Tensor  # the same memory, (stack, n, keys), or (stack, 1, keys) where all queries meet one row
    seen: tuple[int, int]  # the columns that some query sees …
    extension: Extension  # … and the table's that they come from
    product: Product

    @classmethod
    def near(cls, block: Chunk, chunk: Chunk, logits: Tensor, table: Table, options: Options, buffer: Buffer) -> Block:
        """Lay out keys that meet a row for each query."""
        relative = buffer(block.stop - block.start, block.width)
        lowest, highest = options.positions()
        low, high = max(block.low + (block.spare > 0), -highest), min(block.high, -lowest)
        return cls(
            slice(block.start, block.stop),
            logits[..., block.start - chunk.first : block.stop - chunk.first],
            relative,
            block.absolute(relative, xp=xp).mT,
            (low - block.low, high - block.low + 1),
            table.plan(low, max(low, high)),
            Product.of(table, block.low, block.high, relative),
        )

    @classmethod
    def far(cls, keys: slice, position: int, chunk: Chunk, logits: Tensor, table: Table, buffer: Buffer) -> Block:
        """Lay out keys that meet one row, that of a query's position less a key's."""
        relative = buffer(keys.stop - keys.start, 1)
        return cls(
            keys,
            logits[..., keys.start - chunk.first : keys.stop - chunk.first],
            relative,
            relative.mT,
            (0, 1),
            table.plan(position, position),
            Product.of(table, position, position, relative),
        )

    def add(self, k: Tensor, columns: Tensor, scale: float) -> None:
        """Add the product of keys (stack, Lk, D) with the columns of a table (stack, D, rows) to the logits."""
        self.product.write(k[:, self.keys], columns, scale)
        self.logits.add_(self.absolute)

    def folded(self) -> Tensor | None:
        """Return what the logits' gradients sum to for the table's columns, ``None`` if no query sees one."""
        low, high = self.seen
        if low >= high:
            return None
        self.relative.zero_()
        self.absolute.copy_(self.logits.sum_to_size(self.absolute.shape))
        return self.extension.fold(self.relative[..., low:high], xp=xp)


def cut(chunk: Chunk, logits: Tensor, table: Table, options: Options, buffer: Buffer) -> Iterator[Block]:
    """Cut a chunk's keys into blocks."""
    offset, lowest, highest = options.visibility.offset, *options.positions()
    first_query, last_query = chunk.start + offset, chunk.stop - 1 + offset
    reach = table.columns.shape[-1] - 1 - table.left
    first = min(max(chunk.first, first_query - reach), chunk.end)  # keys before it are further than the table reaches
    end = max(first, min(chunk.end, last_query + table.left + 1))
    for block in blocks(replace(chunk, first=first, end=end), options, xp=xp):
        yield Block.near(block, chunk, logits, table, options, buffer)
    for begin, stop in ((chunk.first, first), (end, chunk.end)):
        low, high = max(first_query - (stop - 1), -highest), min(last_query - begin, -lowest)
        if table.beyond == "clip" and begin < stop and low <= high:
            yield Block.far(slice(begin, stop), low, chunk, logits, table, buffer)
