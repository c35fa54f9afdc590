"""torch on CPU: the product of queries or keys with a table, written in place."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from relskew_core._positions.table import Table
from relskew_core.backends._in_place import fill, regions


@dataclass(frozen=True, slots=True)
class Product:
    """Where ``q · e_r`` for ``r = low … high`` goes, past the ends of a short table too."""

    start: int  # the table's first column that is multiplied …
    count: int  # … and how many are
    core: Tensor  # their place
    edges: list[tuple[Tensor, Tensor]]  # places beyond a clipped table, and the product at its edge
    zeros: list[Tensor]  # places beyond a table that counts for nothing there

    @classmethod
    def of(cls, table: Table, low: int, high: int, x: Tensor) -> Product:
        extension = table.plan(low, high)
        return cls(extension.start, extension.stop - extension.start, *regions(extension, x))

    def write(self, q: Tensor, columns: Tensor, scale: float) -> None:
        """Multiply queries (stack, n, D) by the columns of a table (stack, D, rows)."""
        torch.baddbmm(self.core, q, columns.narrow(-1, self.start, self.count), beta=0, alpha=scale, out=self.core)
        fill(self.edges, self.zeros)
