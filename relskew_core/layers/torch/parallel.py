"""torch's tensor parallelism: the tables' part of a plan for ``parallelize_module``. Import it explicitly."""

from __future__ import annotations

from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import ParallelStyle

from relskew_core._array.checks import describe
from relskew_core._block.spec import TABLES
from relskew_core.layers.torch._relative import RelativeMultiheadAttention

__all__ = ["TableParallel"]


class TableParallel(ParallelStyle):
    """Split the tables by heads over the processes, as ``ColwiseParallel`` splits the projections.

    Tables that all heads share stay whole, and their gradients are summed.

    Examples
    --------
    One process here; the plan is the same for many:

    >>> import torch
    >>> import torch.distributed as dist
    >>> from torch.distributed.tensor import parallel
    >>> from relskew_core import BlockSpec, Span
    >>> spec = BlockSpec(16, 4, Span.clipped(8))
    >>> model = torch.nn.Sequential(RelativeMultiheadAttention(spec))
    >>> plan = {"0": TableParallel(), "0.out_proj": parallel.RowwiseParallel()}
    >>> plan["0.[qkv]_proj"] = parallel.ColwiseParallel()
    >>> dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    >>> mesh = dist.init_device_mesh("cpu", (1,))
    >>> parallel.parallelize_module(model, mesh, plan)(torch.randn(2, 7, 16)).shape
    torch.Size([2, 7, 16])
    >>> dist.destroy_process_group()
    """

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        if not isinstance(module, RelativeMultiheadAttention):
            raise TypeError(f"`TableParallel` is for a RelativeMultiheadAttention, got {describe(module)}")
        for name, table in module.tables().items():
            if table is not None:
                by_bucket = name == "rel_bias" and module.spec.rel_bias == "t5"
                shared = module.spec.shared_table and name in TABLES and not by_bucket
                placement = Replicate() if shared else Shard(1 if by_bucket else 0)
                own = distribute_tensor(table, device_mesh, [placement])
                module.register_parameter(name, nn.Parameter(own, requires_grad=table.requires_grad))
        module.processes, module.rank = device_mesh.size(), device_mesh.get_local_rank()
        return module
