"""torch on CPU: positions in any order, which table columns a chunk's pairs read and write.

The product with the table has one column more than the table: what pairs read that the table has nothing for.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from relskew_core._kernel.call import Options
from relskew_core._kernel.chunk import Chunk


@dataclass(frozen=True, slots=True)
class LookUp:
    """The columns that the pairs of a chunk read, written for each batch entry."""

    chunk: Chunk
    index: Tensor  # (n, m), the last column where a table counts for nothing
    beyond: str
    reach: tuple[int, int]  # lowest and highest relative position of the tables

    @classmethod
    def of(cls, chunk: Chunk, options: Options, index: Tensor) -> LookUp:
        """Look up in columns of the options' span."""
        return cls(chunk, index, options.span.beyond, (-options.span.left, options.span.right))

    def write(self, queries: Tensor, keys: Tensor) -> None:
        """Write which column each pair of positions (n,) and (m,) reads."""
        torch.sub(keys, queries[:, None], out=self.index)
        absent = None
        if self.beyond != "clip":
            absent = (self.index < self.reach[0]) | (self.index > self.reach[1])
        self.index.sub_(self.chunk.low).clamp_(0, self.chunk.width - 1)
        if absent is not None:
            self.index.masked_fill_(absent, self.chunk.width)

    def gather(self, product: Tensor, out: Tensor) -> Tensor:
        """Read from the product with a table, (stack, n, width + 1), into absolute layout, (stack, n, m)."""
        # What a table should have reached is NaN: only positions that were not known when the call was made get here.
        product[..., -1] = math.nan if self.beyond == "error" else 0.0
        for one, place in zip(product, out, strict=True):  # one index for all heads is slow in one call
            torch.gather(one, -1, self.index, out=place)
        return out

    def scatter(self, x: Tensor, out: Tensor) -> Tensor:
        """Add what stands in absolute layout, (stack, n, m), to its columns, and return all but the last."""
        out.zero_()
        for one, place in zip(x, out, strict=True):
            place.scatter_add_(-1, self.index, one)
        return out[..., :-1]
