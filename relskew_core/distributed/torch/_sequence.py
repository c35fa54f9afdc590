"""The processes that share a sequence and their messages; splitting a sequence, and joining it again."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from relskew_core._array.checks import check_choice, check_int, describe
from relskew_core.distributed._layout import LAYOUTS, Layout, divisor, runs

distributed: Any = torch.distributed  # its functions have no types

# the name before torch 2.13
_all_gather = getattr(distributed, "all_gather_single", None) or distributed.all_gather_into_tensor


@dataclass(frozen=True, slots=True)
class Ranks:
    group: Any
    rank: int
    size: int

    @classmethod
    def of(cls, group: Any) -> Ranks:
        return cls(group, distributed.get_rank(group), distributed.get_world_size(group))

    def gathered(self, x: Tensor) -> Tensor:
        found = x.new_empty((self.size, *x.shape))
        _all_gather(found, x.contiguous()[None], group=self.group)
        return found

    def exchanged(self, x: Tensor) -> Tensor:
        """Send each rank its entry of ``x`` (P, …), and return the entries for this rank, (P, …)."""
        found = torch.empty_like(x, memory_format=torch.contiguous_format)
        distributed.all_to_all_single(found, x.contiguous(), group=self.group)
        return found

    def send_round(self, tensors: Sequence[Tensor], hops: int) -> Callable[[], list[Tensor]]:
        """Start to send tensors to a rank some places ahead; return what waits for those of the rank as far behind."""
        given = [x.contiguous() for x in tensors]
        found = [torch.empty_like(x) for x in given]
        there, back = (
            distributed.get_global_rank(self.group, (self.rank + step) % self.size) for step in (hops, -hops)
        )
        sent = [distributed.P2POp(distributed.isend, x, there, self.group) for x in given]
        received = [distributed.P2POp(distributed.irecv, x, back, self.group) for x in found]
        works = distributed.batch_isend_irecv([*sent, *received]) if given else []

        def arrived() -> list[Tensor]:
            for work in works if given else ():  # `given` must stay alive until it is sent
                work.wait()
            return found

        return arrived


def groups(group: Any) -> tuple[Any, Any]:
    """Return the group that shares a sequence, and the one within it that exchanges heads, from a 2-D mesh."""
    if isinstance(group, DeviceMesh):
        if group.ndim == 1:
            return group.get_group(), None
        if group.ndim == 2:
            return group.get_group(0), group.get_group(1)
        raise ValueError(f"`group` must have one axis, or two (ring, heads), got a mesh of {group.ndim}")
    if not isinstance(group, distributed.ProcessGroup):
        raise TypeError(f"`group` must be a ProcessGroup or a DeviceMesh, got {describe(group)}")
    return group, None


def agreed(check: Callable[[], Mapping[str, Any]], like: Any, ranks: Ranks) -> Mapping[str, str]:
    """Run every rank's checks, and raise an error on all of them if one fails or if they differ.

    ``check`` raises what is wrong here, or returns what must be the same everywhere, by the names of the arguments.
    ``like`` is on the device that the group sends from.
    """
    error: Exception | None = None
    facts: dict[str, str] = {}
    try:
        facts = {name: str(fact) for name, fact in check().items()}
    except (ValueError, TypeError) as found:
        error = found
    digest = int.from_bytes(hashlib.sha256(repr(sorted(facts.items())).encode()).digest()[:7])
    device = like.device if isinstance(like, Tensor) else None
    answers = ranks.gathered(torch.tensor([error is None, digest], dtype=torch.int64, device=device)).tolist()
    if all(one == [1, digest] for one in answers) and error is None:
        return facts
    everything: list[Any] = [None] * ranks.size
    shape = tuple(like.shape) if isinstance(like, Tensor) else None
    distributed.all_gather_object(everything, (None if error is None else str(error), facts, shape), group=ranks.group)
    if any(message is not None for message, _, _ in everything):
        for rank, (_, _, other) in enumerate(everything):  # different lengths are why a table seems too short
            if shape and other and other != shape:
                raise ValueError(
                    f"`q` must be alike on all ranks, got shape {shape} on rank {ranks.rank} and {other} on rank {rank}"
                )
    if error is not None:
        raise error
    for rank, (message, _, _) in enumerate(everything):
        if message is not None:
            raise ValueError(f"rank {rank} of the group failed: {message}")
    for name, fact in facts.items():
        for rank, (_, others, _) in enumerate(everything):
            if others.get(name) != fact:
                raise ValueError(
                    f"`{name}` must be alike on all ranks, got {fact} on rank {ranks.rank} and {others.get(name)} on "
                    f"rank {rank}"
                )
    raise AssertionError(
        "ranks differ, but not in anything that was compared"
    )  # pragma: no cover -- facts that are alike have one digest


def shard_sequence(x: Tensor, group: Any, *, axis: int = -2, layout: Layout = "contiguous") -> Tensor:
    """Return this rank's shard of a sequence that every rank holds whole.

    Parameters
    ----------
    x : Tensor
        Tokens, positions, hidden states: anything with an axis of positions.
    group : ProcessGroup or DeviceMesh
        The ranks that share the sequence. With a mesh of two axes, (ring, heads), the sequence is split by ``layout``
        along the first and into contiguous parts along the second.
    axis : int, default -2
        Of the positions.
    layout : {"contiguous", "zigzag", "striped"}, default "contiguous"
        Contiguous positions; two parts, the second mirrored, so that causal attention costs the same on every rank; or
        every ``parts``-th position.

    Returns
    -------
    Tensor
        In separate memory.

    Raises
    ------
    ValueError, TypeError
        If the length is not a multiple of the number of ranks, or of twice that number for zigzag; the message names
        the argument.

    Examples
    --------
    >>> import torch
    >>> import torch.distributed as dist
    >>> dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    >>> shard_sequence(torch.arange(4), dist.group.WORLD, axis=0, layout="striped")
    tensor([0, 1, 2, 3])
    >>> dist.destroy_process_group()
    """
    outer, inner = _checked(x, group, axis, layout)
    x = _own(x, Ranks.of(outer), axis, layout)
    return x if inner is None else _own(x, Ranks.of(inner), axis, "contiguous")


def unshard_sequence(x: Tensor, group: Any, *, axis: int = -2, layout: Layout = "contiguous") -> Tensor:
    """Return the whole sequence on every rank; the inverse of :func:`shard_sequence`.

    Parameters
    ----------
    x : Tensor
        This rank's part; of one shape on all ranks.
    group, axis, layout
        As in :func:`shard_sequence`.

    Returns
    -------
    Tensor
        Its gradient is the sum of the gradients on all ranks: if each rank computes the same loss, divide it by the
        number of ranks, as averaging gradients over ranks does.

    Examples
    --------
    >>> import torch
    >>> import torch.distributed as dist
    >>> dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    >>> part = shard_sequence(torch.arange(4.0), dist.group.WORLD, axis=0, layout="zigzag")
    >>> unshard_sequence(part, dist.group.WORLD, axis=0, layout="zigzag")
    tensor([0., 1., 2., 3.])
    >>> dist.destroy_process_group()
    """
    outer, inner = _checked(x, group, axis, layout)
    if inner is not None:
        x = whole(x, Ranks.of(inner), axis, "contiguous")
    return whole(x, Ranks.of(outer), axis, layout)


def _checked(x: Any, group: Any, axis: Any, layout: Any) -> tuple[Any, Any]:
    if not isinstance(x, Tensor):
        raise TypeError(f"`x` must be a Tensor, got {describe(x)}")
    if not -x.ndim <= check_int("axis", axis) < x.ndim:
        raise ValueError(f"`axis` must be an axis of `x`, got {axis} for {describe(x)}")
    check_choice("layout", layout, LAYOUTS)
    return groups(group)


def _own(x: Tensor, ranks: Ranks, axis: int, layout: Layout) -> Tensor:
    length, times = x.shape[axis], divisor(layout, ranks.size)
    if length % times:
        raise ValueError(f"`x` must have a multiple of {times} positions on its axis {axis}, got {describe(x)}")
    rows = x.movedim(axis, 0)
    own = [rows[run.positions] for run in runs(layout, ranks.size, ranks.rank, length // ranks.size) if run.count]
    return torch.cat(own or [rows[:0]]).movedim(0, axis).clone(memory_format=torch.contiguous_format)


def joined(stacked: Tensor, axis: int, layout: Layout) -> Tensor:
    parts = stacked.movedim(axis, 1) if axis < 0 else stacked.movedim(axis + 1, 1)
    if layout == "striped":
        parts = parts.transpose(0, 1)
    elif layout == "zigzag":
        halves = parts.unflatten(1, (2, parts.shape[1] // 2))
        parts = torch.cat([halves[:, 0], halves[:, 1].flip(0)])
    return parts.flatten(0, 1).movedim(0, axis)


def taken_apart(x: Tensor, size: int, axis: int, layout: Layout) -> Tensor:
    rows = x.movedim(axis, 0)
    if layout == "striped":
        parts = rows.unflatten(0, (rows.shape[0] // size, size)).transpose(0, 1)
    elif layout == "zigzag":
        halves = rows.unflatten(0, (2 * size, rows.shape[0] // (2 * size)))
        parts = torch.stack([halves[:size], halves[size:].flip(0)], dim=1).flatten(1, 2)
    else:
        parts = rows.unflatten(0, (size, rows.shape[0] // size))
    return parts.movedim(1, axis if axis < 0 else axis + 1)


class _WholeSequence(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, ranks: Ranks, axis: int, layout: Layout) -> Tensor:
        ctx.rest = ranks, axis, layout
        return joined(ranks.gathered(x), axis, layout)

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Tensor) -> tuple[Tensor, None, None, None]:
        ranks, axis, layout = ctx.rest
        return ranks.exchanged(taken_apart(grad_outputs[0], ranks.size, axis, layout)).sum(0), None, None, None


def whole(x: Tensor, ranks: Ranks, axis: int, layout: Layout) -> Tensor:
    apply: Any = _WholeSequence.apply
    return apply(x, ranks, axis, layout)
