"""The tables of the heads of this process."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from relskew_core._array.checks import describe
from relskew_core._block.spec import BlockSpec


def local_table(name: str, table: Any, q: Tensor, spec: BlockSpec) -> Tensor:
    """Return a table for the queries of this process, with their heads and dtype; gradients reach the original."""
    if hasattr(table, "placements"):  # a DTensor, whose import is slow
        from torch.distributed.tensor import Partial

        # A shared table serves different heads in each process, so its local gradient is a partial sum.
        placements = [Partial() if placement.is_replicate() else placement for placement in table.placements]
        table = table.to_local(grad_placements=placements)
    elif q.ndim > 2 and q.shape[-3] != spec.num_heads:
        raise ValueError(
            f"`{name}` must be sharded like the heads, of which {q.shape[-3]} of {spec.num_heads} are here: give "
            f"the module itself relskew_core.layers.torch.parallel.TableParallel() in its plan, got {describe(table)}"
        )
    return table if table.dtype == q.dtype else table.to(q.dtype)
