"""Splitting a sequence over the ranks, and joining it again."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from relskew_core._array.checks import check_choice, check_int, describe
from relskew_core.distributed._layout import LAYOUTS, Layout, divisor, runs
from relskew_core.distributed.torch._ranks import Ranks, groups


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

    See Also
    --------
    unshard_sequence : the inverse.
    context_parallel_attention : attention over the parts.

    Examples
    --------
    >>> import torch
    >>> torch.distributed.init_process_group(
    ...     "gloo", store=torch.distributed.HashStore(), rank=0, world_size=1
    ... )
    >>> shard_sequence(
    ...     torch.arange(4), torch.distributed.group.WORLD, axis=0, layout="striped"
    ... )
    tensor([0, 1, 2, 3])
    >>> torch.distributed.destroy_process_group()
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

    See Also
    --------
    shard_sequence : the inverse.

    Examples
    --------
    >>> import torch
    >>> torch.distributed.init_process_group(
    ...     "gloo", store=torch.distributed.HashStore(), rank=0, world_size=1
    ... )
    >>> part = shard_sequence(
    ...     torch.arange(4.0), torch.distributed.group.WORLD, axis=0, layout="zigzag"
    ... )
    >>> unshard_sequence(part, torch.distributed.group.WORLD, axis=0, layout="zigzag")
    tensor([0., 1., 2., 3.])
    >>> torch.distributed.destroy_process_group()
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
    """Join the parts of all ranks (P, …)."""
    parts = stacked.movedim(axis, 1) if axis < 0 else stacked.movedim(axis + 1, 1)
    if layout == "striped":
        parts = parts.transpose(0, 1)
    elif layout == "zigzag":
        halves = parts.unflatten(1, (2, parts.shape[1] // 2))
        parts = torch.cat([halves[:, 0], halves[:, 1].flip(0)])
    return parts.flatten(0, 1).movedim(0, axis)


def taken_apart(x: Tensor, size: int, axis: int, layout: Layout) -> Tensor:
    """Split a whole into the parts (P, …)."""
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
    """Return the whole sequence from a rank's part, differentiably."""
    apply: Any = _WholeSequence.apply
    found: Tensor = apply(x, ranks, axis, layout)
    return found
