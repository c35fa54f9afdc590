"""One of several processes that share a module: ``python shards.py STORE PROCESSES RANK``."""

import copy
import sys
from typing import Any

import torch
import torch.distributed
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

from relskew_core import BlockSpec, Span
from relskew_core.layers.torch import RelativeMultiheadAttention
from relskew_core.layers.torch.parallel import TableParallel

TENSOR = {"0": TableParallel(), "0.[qkv]_proj": ColwiseParallel(), "0.out_proj": RowwiseParallel()}
SEQUENCE = {
    "0": TableParallel(),
    "0.[qkv]_proj": ColwiseParallel(input_layouts=Shard(1)),
    "0.out_proj": RowwiseParallel(output_layouts=Shard(1)),
}


def split(model: Any, way: str, mesh: Any) -> None:
    if way == "fsdp":
        fully_shard(model[0], mesh=mesh)
    elif way == "fsdp of projections":
        for projection in model[0].children():
            fully_shard(projection, mesh=mesh)
    else:
        parallelize_module(model, mesh, TENSOR if way == "tensor" else SEQUENCE)


def main(store: str, processes: int, rank: int) -> None:
    distributed: Any = torch.distributed
    distributed.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=processes)
    mesh, ways = init_device_mesh("cpu", (processes,)), 0
    options: dict[str, Any] = {"causal": True, "num_kv_heads": 2}
    more = {"rel_values": True, "rel_bias": True, **options}
    tables = [BlockSpec(8, 4, Span.causal(16), shared_table=shared, **more) for shared in (False, True)]
    for spec in (*tables, BlockSpec.alibi(8, 4, **options)):
        torch.manual_seed(0)
        whole = nn.Sequential(RelativeMultiheadAttention(spec, dtype=torch.float64))
        x = torch.randn(2, 6, 8, dtype=torch.float64)
        y = whole(x)
        gradients = torch.autograd.grad(y.sin().sum(), list(whole.parameters()))
        for way in ("tensor", "sequence", "fsdp", "fsdp of projections"):
            model = copy.deepcopy(whole)
            split(model, way, mesh)
            given, expected = (z.chunk(processes, 1)[rank] if way == "sequence" else z for z in (x, y))
            actual = model(given)
            torch.testing.assert_close(actual, expected, rtol=0, atol=1e-12)
            actual.sin().sum().backward()
            for parameter, gradient in zip(model.parameters(), gradients, strict=True):
                shard: Any = parameter.grad
                shard = shard.full_tensor() if hasattr(shard, "full_tensor") else shard
                torch.testing.assert_close(shard, gradient, rtol=0, atol=1e-12)
            attention: Any = model[0]
            with torch.no_grad():
                cached, _ = attention(given, past=attention.empty_cache(2, length=16))
            torch.testing.assert_close(cached, expected, rtol=0, atol=1e-12)
            ways += 1
    distributed.barrier()
    distributed.destroy_process_group()
    print(f"{ways} ways agree")


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), int(sys.argv[3]))
