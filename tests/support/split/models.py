"""Models whose sequences, batches or heads are split, compared with the whole."""

import copy
import tempfile
from typing import Any

import torch
import torch.distributed
import torch.distributed.checkpoint
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Replicate, Shard, distribute_tensor
from torch.distributed.tensor.debug import CommDebugMode
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.utils.checkpoint import checkpoint

from relskew_core import BlockSpec, Span, relative_attention
from relskew_core.distributed.torch import ContextParallel, register_sharding, shard_sequence
from relskew_core.layers.torch import RelativeMultiheadAttention
from relskew_core.layers.torch.parallel import TableParallel

distributed: Any = torch.distributed
checkpoints: Any = torch.distributed.checkpoint


class Model(nn.Module):
    def __init__(self, spec: BlockSpec, *, checkpointed: bool) -> None:
        super().__init__()
        self.first = nn.Linear(spec.embed_dim, spec.embed_dim)
        self.attention = RelativeMultiheadAttention(spec, dropout=0.3)
        self.checkpointed = checkpointed

    def forward(self, x: Tensor, padding: Tensor, segments: Tensor) -> Tensor:
        options: dict[str, Any] = {"key_padding_mask": padding, "segments": segments}
        x = self.first(x)
        y: Tensor = (
            checkpoint(self.attention, x, **options, use_reentrant=False)
            if self.checkpointed
            else self.attention(x, **options)
        )
        return y


def modules_agree(p: int) -> None:
    """The same output with the same dropout, and gradients that add up; sharded and checkpointed as well."""
    mesh = init_device_mesh("cpu", (p,))
    table = BlockSpec(12, 6, Span.clipped(5), causal=True, rel_values=True)
    alibi = BlockSpec.alibi(12, 6, causal=True)
    padding = torch.zeros(2, 4 * p, dtype=torch.bool)
    padding[1, -3:] = True
    segments = torch.arange(4 * p) // 5
    for spec, method, sharded, checkpointed in ((table, "ring", False, True), (table, "ring", True, False),
                                                (table, "heads", True, False),
                                                (alibi, "ring", False, False)):  # fmt: skip
        torch.manual_seed(0)
        model = Model(spec, checkpointed=checkpointed).double()
        x, part = torch.randn(2, 4 * p, 12).double(), copy.deepcopy(model)
        how = ContextParallel(method=method, layout="zigzag")  # type: ignore[arg-type]
        parallelize_module(part, mesh, {"attention": how})
        if sharded:
            fully_shard(part, mesh=mesh)
        torch.manual_seed(5)  # every process draws the dropout of the first one
        y = model(x, padding, segments)
        y.sin().sum().backward()
        torch.manual_seed(5 + distributed.get_rank())
        own = [shard_sequence(labels, mesh, axis=-1, layout="zigzag") for labels in (padding, segments)]
        z = part(shard_sequence(x, mesh, layout="zigzag"), *own)
        torch.testing.assert_close(z, shard_sequence(y, mesh, layout="zigzag"), rtol=0, atol=1e-12)
        z.sin().sum().backward()
        for (name, one), other in zip(part.named_parameters(), model.parameters(), strict=True):
            gradient: Any = one.grad
            if sharded:
                gradient = gradient.full_tensor() * p  # the mean over the processes
            else:
                distributed.all_reduce(gradient)
            error = float((gradient - other.grad).abs().max())
            assert error < 1e-11, f"{name}, {method}: {error}"


def dtensors_agree(p: int) -> None:
    """Batch and heads are split without communication, forward and backward."""
    register_sharding()
    register_sharding()
    mesh = init_device_mesh("cpu", (p,))
    torch.manual_seed(0)
    q = torch.randn(p, 6, 8, 4, dtype=torch.float64, requires_grad=True)
    tables = [torch.randn(shape, dtype=torch.float64, requires_grad=True) for shape in ((15, 4), (6, 15, 4))]
    mask, labels = torch.rand(6, 8, 8) < 0.8, torch.arange(8) // 3
    for axis in (0, 1):
        for table in tables:
            options: dict[str, Any] = {"mask": mask, "segments": labels}
            y: Any = relative_attention(q, q, q, table, **options)
            expected = torch.autograd.grad(y.sin().sum(), [q, table])
            by_head = Shard(0) if axis == 1 else Replicate()
            x = distribute_tensor(q.detach(), mesh, [Shard(axis)]).requires_grad_()
            own_table = distribute_tensor(table.detach(), mesh, [by_head if table.ndim > 2 else Replicate()])
            own_table.requires_grad_()
            options = {
                "mask": distribute_tensor(mask, mesh, [by_head]),
                "segments": distribute_tensor(labels, mesh, [Replicate()]),
            }
            with CommDebugMode() as sent:
                z: Any = relative_attention(x, x, x, own_table, **options)
                actual: Any = torch.autograd.grad(z.sin().sum(), [x, own_table])
            assert sent.get_total_counts() == 0, sent.get_comm_counts()
            assert z.placements == (Shard(axis),)
            torch.testing.assert_close(z.full_tensor(), y, rtol=0, atol=1e-12)
            for one, other in zip(actual, expected, strict=True):
                torch.testing.assert_close(one.full_tensor(), other, rtol=0, atol=1e-12)


def tensor_and_context_parallel_agree(p: int) -> None:
    """Heads split along one axis of a mesh, the sequence along the other; a checkpoint of it; compiled."""
    mesh = init_device_mesh("cpu", (p // 2, 2), mesh_dim_names=("sequence", "heads"))
    ring = mesh["sequence"]
    torch.manual_seed(0)
    model = nn.Sequential(RelativeMultiheadAttention(BlockSpec(16, 4, Span.clipped(5), causal=True))).double()
    part = copy.deepcopy(model)
    plan = {"0": TableParallel(), "0.[qkv]_proj": ColwiseParallel(), "0.out_proj": RowwiseParallel()}
    parallelize_module(part, mesh["heads"], plan)
    parallelize_module(part, ring, {"0": ContextParallel(layout="striped")})
    x = torch.randn(2, 8, 16).double()
    y = model(x)
    y.sin().sum().backward()
    own, expected = (shard_sequence(z, ring, layout="striped") for z in (x, y))
    z = part(own)
    torch.testing.assert_close(z, expected, rtol=0, atol=1e-12)
    z.sin().sum().backward()
    for (name, one), other in zip(part.named_parameters(), model.parameters(), strict=True):
        gradient: Any = one.grad
        gradient = gradient.full_tensor() if hasattr(gradient, "full_tensor") else gradient
        distributed.all_reduce(gradient, group=ring.get_group())
        assert float((gradient - other.grad).abs().max()) < 1e-11, name
    with tempfile.TemporaryDirectory() as folder:
        folders = [folder]
        distributed.broadcast_object_list(folders)
        state = part.state_dict()
        checkpoints.save(state, checkpoint_id=folders[0])
        for parameter in state.values():
            parameter.zero_()
        checkpoints.load(state, checkpoint_id=folders[0])
        distributed.barrier()
    with torch.no_grad():
        torch.testing.assert_close(part(own), expected, rtol=0, atol=1e-12)
        compiled = torch.compile(part, backend="eager")
        torch.testing.assert_close(compiled(own), expected, rtol=0, atol=1e-12)
