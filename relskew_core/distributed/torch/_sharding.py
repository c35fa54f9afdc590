"""Rules for ``DTensor``: batch and heads are split without communication."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import cache
from typing import Any

from torch.distributed.tensor import Partial, Replicate, Shard
from torch.distributed.tensor.experimental import register_sharding as register

from relskew_core._kernel.call import DIFFERENTIABLE, KINDS, SEQUENCES, Kind, Operands
from relskew_core.backends._torch.cpu.operator import OPERATOR
from relskew_core.backends._torch.operator import COUNT, Operator
from relskew_core.backends._torch.recomputed import OPERATOR as RECOMPUTED
from relskew_core.distributed.torch._heads import HEADS


@cache
def register_sharding() -> None:
    """Register how ``DTensor`` may shard relative attention: along batch axes and heads, without communication.

    After this call, :func:`relskew_core.relative_attention` accepts DTensors. If queries, keys and values are split
    along the same leading axis, or along the heads, the output is split in the same way; tables per head are split with
    the heads. The gradient of a table that every process holds whole is a ``Partial`` sum. Tensors that are sharded in
    other ways are gathered first. To split sequences, use :func:`context_parallel_attention`.

    A second call does nothing.

    See Also
    --------
    context_parallel_attention : for sequences that are split.

    Notes
    -----
    Uses ``torch.distributed.tensor.experimental.register_sharding``. It covers the kernels for CPUs and the portable
    code. With dropout, the same ``seed`` drops other weights than on one device, because positions are counted within
    the part of each process.

    Examples
    --------
    One process here; it is the same for many:

    >>> import torch
    >>> from torch.distributed.tensor import Shard, distribute_tensor
    >>> from relskew_core import relative_attention
    >>> register_sharding()
    >>> torch.distributed.init_process_group(
    ...     "gloo", store=torch.distributed.HashStore(), rank=0, world_size=1
    ... )
    >>> mesh = torch.distributed.init_device_mesh("cpu", (1,))
    >>> q = distribute_tensor(torch.randn(2, 4, 8, 16), mesh, [Shard(1)])
    >>> relative_attention(q, q, q, causal=True).placements
    (Shard(dim=1),)
    >>> torch.distributed.destroy_process_group()
    """
    for operator in _operators():
        register(operator.op._opoverload)(_of_attention)
        register(operator.vjp._opoverload)(_of_gradient)


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
    rules = [([Replicate()] * len(DIFFERENTIABLE), everything)]
    for axis in _axes(operands):
        arrays = {name: _split(name, x, axis, operands) for name, x in operands._asdict().items()}

        def gradient(name: str, arrays: dict[str, Any] = arrays) -> Any:
            if name not in names:
                return Replicate()
            return arrays[name] if isinstance(arrays[name], Shard) else Partial()

        split = [None if x is None else Shard(axis) for x in cotangents]
        rules.append(([gradient(name) for name in DIFFERENTIABLE], [*split, None, *arrays.values(), *rest]))
    return rules


def _whole(x: Any) -> Any:
    return None if x is None else Replicate()


def _axes(operands: Operands) -> Sequence[int]:
    """Return the axes of the queries that may be split: the leading axes, and that of the heads."""
    return range(len(operands.q.shape) - 2)


def _split(name: str, x: Any, axis: int, operands: Operands) -> Any:
    """Return the placement of an operand if queries are split along an axis."""
    if x is None:
        return None
    kind, rank, of_heads = KINDS[name], len(x.shape), axis == len(operands.q.shape) + HEADS
    if kind in SEQUENCES:
        return Shard(axis)
    if kind in (Kind.TABLE, Kind.BIAS):
        by_head = rank == (3 if kind is Kind.TABLE else 2) and x.shape[0] == operands.q.shape[HEADS]
        return Shard(0) if of_heads and by_head else Replicate()
    if kind is Kind.MASK:
        own = axis - (len(operands.q.shape) - rank)
        return Shard(own) if own >= 0 and x.shape[own] > 1 else Replicate()
    if kind is Kind.LABEL:  # (..., L) without heads
        return Shard(axis) if rank > 1 and not of_heads else Replicate()
    return Replicate()
