"""The parallel style for ``parallelize_module`` that lets a module attend to a split sequence."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import cache, partial
from typing import Any

import array_api_compat.torch as xp
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Partial, Replicate, Shard
from torch.distributed.tensor.experimental import register_sharding as register
from torch.distributed.tensor.parallel import ParallelStyle

from relskew_core._array.checks import check_bool, check_choice, describe
from relskew_core._block.block import check_padding
from relskew_core._kernel.call import KINDS, LEARNED, Operands
from relskew_core.backends._torch.cpu.operator import OPERATOR
from relskew_core.backends._torch.operator import COUNT, Operator
from relskew_core.backends._torch.recomputed import OPERATOR as RECOMPUTED
from relskew_core.distributed._layout import LAYOUTS, Layout
from relskew_core.distributed.torch._attention import HEADS, METHODS, Method, context_parallel_attention
from relskew_core.distributed.torch._sequence import distributed, groups
from relskew_core.layers.torch._attention import TableAttention


class ContextParallel(ParallelStyle):
    """Make attention modules attend to a sequence that is split over processes.

    Call the module as before, with this rank's shard of the positions (:func:`shard_sequence`); it returns this rank's
    shard of the output. The rest of a model works position by position and does not change. The gradients of parameters
    on each rank are parts of a sum, as in data parallelism: ``DistributedDataParallel`` or ``fully_shard`` over the
    same ranks adds them up, or an ``all_reduce``.

    Parameters
    ----------
    method : {"ring", "gather", "heads"}, default "ring"
        As in :func:`context_parallel_attention`.
    layout : {"contiguous", "zigzag", "striped"}, default "contiguous"
        How the sequence was split.
    check : bool, default True
        As in :func:`context_parallel_attention`.

    Notes
    -----
    A ``mask`` covers this rank's queries and all keys; ``key_padding_mask`` and ``segments`` cover this rank's shard. A
    ``past`` raises an error.

    Examples
    --------
    One process here; the plan is the same for many:

    >>> import torch
    >>> import torch.distributed as dist
    >>> from torch.distributed.tensor.parallel import parallelize_module
    >>> from relskew_core import BlockSpec, Span
    >>> from relskew_core.layers.torch import RelativeMultiheadAttention
    >>> spec = BlockSpec(16, 4, Span.causal(32), causal=True)
    >>> model = torch.nn.Sequential(RelativeMultiheadAttention(spec))
    >>> dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    >>> mesh = dist.init_device_mesh("cpu", (1,))
    >>> model = parallelize_module(model, mesh, {"0": ContextParallel(layout="zigzag")})
    >>> model(torch.randn(2, 8, 16)).shape
    torch.Size([2, 8, 16])
    >>> dist.destroy_process_group()
    """

    def __init__(self, *, method: Method = "ring", layout: Layout = "contiguous", check: bool = True) -> None:
        super().__init__()
        check_choice("method", method, METHODS)
        check_choice("layout", layout, LAYOUTS)
        self.how: dict[str, Any] = {"method": method, "layout": layout, "check": check_bool("check", check)}

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        if not isinstance(module, TableAttention):
            raise TypeError(f"`ContextParallel` is for relskew_core.layers.torch's modules, got {describe(module)}")
        # On this module only: a different class would lose what subclasses and wrappers add.
        module.attend = partial(_attend, module, device_mesh, self.how)  # type: ignore[method-assign]
        return module


def _attend(
    module: TableAttention,
    group: DeviceMesh,
    how: dict[str, Any],
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    key_padding_mask: Tensor | None = None,
    segments: Any = None,
    **options: Any,
) -> Any:
    if "unfilled" in options or (k.shape[-2] != q.shape[-2] and not module.spec.cross):
        raise ValueError("`past` must be None, because the sequence is split over processes")
    if key_padding_mask is not None:
        segments = _without_padding(check_padding(key_padding_mask, k, xp=xp), segments, q)
    if "seed" in options:
        options["seed"] = _seed_of_all(group, options["seed"])
    last = max(q.shape[-2], k.shape[-2]) * group.size() - 1  # of the whole sequence
    tables = module.with_bias(q, k, {"positions": ((0, last), (0, last))})
    options |= {**tables, "impl": module.impl, "chunk_size": module.chunk_size}
    return context_parallel_attention(q, k, v, segments=segments, group=group, **how, **options)


def _seed_of_all(group: DeviceMesh, seed: Tensor) -> Tensor:
    for ranks in reversed(groups(group)):
        if ranks is not None:
            distributed.broadcast(seed, group_src=0, group=ranks)
    return seed


def _without_padding(padding: Tensor, segments: Any, q: Tensor) -> tuple[Tensor, Tensor]:
    """Return segments of queries and keys in which padding has a number that no query has, so that it travels along."""
    if segments is None:
        segments = torch.zeros(q.shape[-2], dtype=torch.int64, device=q.device), torch.zeros_like(padding[..., :1])
    of_queries, of_keys = segments if isinstance(segments, tuple) else (segments, segments)
    return of_queries.long(), torch.where(padding, torch.iinfo(torch.int64).min, of_keys.long())


@cache
def register_sharding() -> None:
    """Register how ``DTensor`` may shard relative attention: along batch axes and heads, without communication.

    After this call, :func:`relskew_core.relative_attention` accepts DTensors. If queries, keys and values are split
    along the same leading axis, or along the heads, the output is split in the same way; tables per head are split with
    the heads. The gradient of a table that every process holds whole is a ``Partial`` sum. Tensors that are sharded in
    other ways are gathered first. To split sequences, use :func:`context_parallel_attention`.

    A second call does nothing.

    Notes
    -----
    Uses ``torch.distributed.tensor.experimental.register_sharding``. It covers the kernels for CPUs and the portable
    code. With dropout, the same ``seed`` drops other weights than on one device, because positions are counted within
    the part of each process.

    Examples
    --------
    One process here; it is the same for many:

    >>> import torch
    >>> import torch.distributed as dist
    >>> from torch.distributed.tensor import Shard, distribute_tensor
    >>> from relskew_core import relative_attention
    >>> register_sharding()
    >>> dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    >>> mesh = dist.init_device_mesh("cpu", (1,))
    >>> q = distribute_tensor(torch.randn(2, 4, 8, 16), mesh, [Shard(1)])
    >>> relative_attention(q, q, q, causal=True).placements
    (Shard(dim=1),)
    >>> dist.destroy_process_group()
    """
    for operator in _operators():
        for overload, sharding in zip(operator.overloads, (_of_attention, _of_gradient), strict=True):
            register(overload)(sharding)


def _operators() -> Iterator[Operator]:
    yield from (OPERATOR, RECOMPUTED)
    try:
        from relskew_core.backends._torch.triton import operator as fused
    except ImportError:  # Triton is not installed
        return
    yield fused.OPERATOR


def _of_attention(*args: Any) -> list[tuple[list[Any], list[Any]]]:
    """Return which placements of the results belong to which placements of the arguments."""
    operands = Operands(*args[:COUNT])
    rest: list[None] = [None] * (len(args) - COUNT)
    rules: list[tuple[list[Any], list[Any]]] = [([Replicate()] * 2, [_whole(x) for x in operands] + rest)]
    for axis in _axes(operands):
        given = [_split(name, x, axis, operands) for name, x in operands._asdict().items()]
        rules.append(([Shard(axis), Shard(axis)], given + rest))
    return rules


def _of_gradient(*args: Any) -> list[tuple[list[Any], list[Any]]]:
    d_out, d_lse, out, lse, wanted, *given = args
    operands, names = Operands(*given[:COUNT]), wanted.split()
    rest: list[None] = [None] * (len(given) - COUNT)
    cotangents = (d_out, d_lse, out, lse)
    everything = [*map(_whole, cotangents), None, *map(_whole, operands), *rest]
    rules = [([Replicate()] * len(LEARNED), everything)]
    for axis in _axes(operands):
        arrays = {name: _split(name, x, axis, operands) for name, x in operands._asdict().items()}

        def gradient(name: str, arrays: dict[str, Any] = arrays) -> Any:
            if name not in names:
                return Replicate()
            return arrays[name] if isinstance(arrays[name], Shard) else Partial()

        split = [None if x is None else Shard(axis) for x in cotangents]
        rules.append(([gradient(name) for name in LEARNED], [*split, None, *arrays.values(), *rest]))
    return rules


def _whole(x: Any) -> Any:
    return None if x is None else Replicate()


def _axes(operands: Operands) -> Sequence[int]:
    return range(len(operands.q.shape) - 2)


def _split(name: str, x: Any, axis: int, operands: Operands) -> Any:
    if x is None:
        return None
    wanted = ("heads", "key_heads") if axis == len(operands.q.shape) + HEADS else (axis,)
    along = KINDS[name].along(x, operands.q)
    return next((Shard(own) for own, each in enumerate(along) if each in wanted), Replicate())
