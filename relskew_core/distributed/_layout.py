"""Layouts of a sequence that is split over devices, and checks of a call against the whole sequence."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from types import SimpleNamespace
from typing import Literal, get_args

from relskew_core._array.checks import describe
from relskew_core._array.typing import Namespace
from relskew_core._kernel.call import TABLES, Arguments
from relskew_core._kernel.kinds import MASK
from relskew_core._kernel.problem import Problem
from relskew_core._positions.pairs import Pairs, Run

Layout = Literal["contiguous", "zigzag", "striped"]
LAYOUTS = get_args(Layout)


def runs(layout: Layout, parts: int, index: int, count: int) -> tuple[Run, ...]:
    """Return the positions, of ``parts · count``, that part ``index`` holds, in order.

    ``"contiguous"``: its share of neighbours. ``"zigzag"``: of twice as many shares one from the front and its mirror
    image, so that causal attention costs every part the same. ``"striped"``: every ``parts``-th position.
    """
    if layout == "contiguous":
        return (Run(index * count, 1, count),)
    if layout == "zigzag":
        half = count // 2
        return Run(index * half, 1, half), Run((2 * parts - 1 - index) * half, 1, half, half)
    return (Run(index, parts, count),)


def divisor(layout: Layout, parts: int) -> int:
    return parts * (2 if layout == "zigzag" else 1)


def needed(
    queries: Sequence[Sequence[Run]], keys: Sequence[Sequence[Run]], offset: int, left: int | None, right: int | None
) -> list[int]:
    """Return the distances around a ring at which some part sees keys of another: the hops that are needed."""
    parts = len(queries)

    def is_needed(distance: int) -> bool:
        return any(
            Pairs.of(a, b, offset, left, right) is not None
            for index in range(parts)
            for a in queries[index]
            for b in keys[(index - distance) % parts]
        )

    return [distance for distance in range(parts) if is_needed(distance)]


def check_whole(given: Arguments, call: Problem, size: int, layout: Layout, *, xp: Namespace, outer: int = 1) -> None:
    """Refuse a call that is valid for a shard, but not for the whole sequence of ``size`` shards.

    ``outer`` of the shares are laid out, each of ``size / outer`` neighbours.
    """
    q, k = given.q, given.k
    for name, x in (("q", q), ("k", k)):
        if x.shape[-2] * (size // outer) % (divisor(layout, outer) // outer):
            raise ValueError(
                f"`{name}` must have an even number of positions with layout={layout!r}, got {describe(x)}"
            )
    pattern = call.options.visibility
    of_all = replace(pattern, n_queries=size * pattern.n_queries, n_keys=size * pattern.n_keys)
    for name in TABLES:
        if getattr(given, name) is not None:
            of_all.check_reach(name, call.options.span)
    if given.mask is not None:
        keys = SimpleNamespace(shape=(*k.shape[:-2], size * k.shape[-2], 1))
        MASK.check("mask", given.mask, q, keys, xp=xp)
