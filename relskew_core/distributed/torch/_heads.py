"""The exchange of heads for positions: every rank attends over the whole sequence, for some of the heads.

Jacobs et al. 2023, "DeepSpeed Ulysses".
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from relskew_core._kernel.call import KINDS, SEQUENCES, Arguments, Kind
from relskew_core.distributed._layout import Layout
from relskew_core.distributed.torch._ranks import Ranks
from relskew_core.distributed.torch._sequence import joined, taken_apart, whole

HEADS = -3
"""The axis of the heads, before positions and width."""


class _Exchange(torch.autograd.Function):
    """Some heads (…, H / P, L, D) of all positions, from all heads (…, H, L / P, D) of some; or the reverse."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, ranks: Ranks, layout: Layout, back: bool) -> Tensor:
        ctx.rest = ranks, layout, back
        return _exchanged(x, ranks, layout, back=back)

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Tensor) -> tuple[Tensor, None, None, None]:
        ranks, layout, back = ctx.rest
        return _exchanged(grad_outputs[0], ranks, layout, back=not back), None, None, None


def _exchanged(x: Tensor, ranks: Ranks, layout: Layout, *, back: bool) -> Tensor:
    if back:
        found = ranks.exchanged(taken_apart(x, ranks.size, -2, layout))
        return found.movedim(0, HEADS - 1).flatten(HEADS - 1, HEADS)
    parts = x.unflatten(HEADS, (ranks.size, x.shape[HEADS] // ranks.size)).movedim(HEADS - 1, 0)
    return joined(ranks.exchanged(parts), -2, layout)


def _exchange(x: Tensor, ranks: Ranks, layout: Layout, *, back: bool) -> Tensor:
    apply: Any = _Exchange.apply
    found: Tensor = apply(x, ranks, layout, back)
    return found


def to_heads(x: Tensor, ranks: Ranks, layout: Layout) -> Tensor:
    """Return all positions of this rank's share of the heads."""
    return _exchange(x, ranks, layout, back=False)


def to_positions(x: Tensor, ranks: Ranks, layout: Layout) -> Tensor:
    """Return all heads of this rank's share of the positions."""
    return _exchange(x, ranks, layout, back=True)


def of_heads(given: Arguments, ranks: Ranks, layout: Layout) -> Arguments:
    """Return the call of this rank's heads over all positions."""
    heads, size = given.q.shape[HEADS], ranks.size
    own = slice(ranks.rank * heads // size, (ranks.rank + 1) * heads // size)
    changed: dict[str, Any] = {}
    for name, x in given.arrays().items():
        if x is None:
            continue
        if KINDS[name] in SEQUENCES:
            # there are fewer key heads than ranks: each rank has a copy of the one that it needs
            if x.shape[HEADS] % size:
                x = x.repeat_interleave(size // x.shape[HEADS], dim=HEADS)
            changed[name] = to_heads(x, ranks, layout)
        elif KINDS[name] is Kind.MASK:
            changed[name] = _mask(x, own, given, ranks, layout)
        elif x.ndim > (1 if KINDS[name] is Kind.BIAS else 2) and x.shape[0] == heads:
            changed[name] = x[own]
    if given.segments is not None:
        pair = given.segments if isinstance(given.segments, tuple) else (given.segments, given.segments)
        changed["segments"] = tuple(whole(x, ranks, -1, layout) for x in pair)
    if given.sinks is not None:
        changed["sinks"] = given.sinks[own]
    return replace(given, **changed)


def _mask(mask: Tensor, own: slice, given: Arguments, ranks: Ranks, layout: Layout) -> Tensor:
    """Return a mask of this rank's heads and of all queries."""
    by_head = mask.ndim > 2 and mask.shape[HEADS] == given.q.shape[HEADS]
    if mask.ndim < 2 or mask.shape[-2] != given.q.shape[-2]:
        return mask[..., own, :, :] if by_head else mask
    sent = mask.to(torch.uint8) if mask.dtype == torch.bool else mask  # not every backend sends booleans
    sent = to_heads(sent, ranks, layout) if by_head else whole(sent, ranks, -2, layout)
    return sent.bool() if mask.dtype == torch.bool else sent
