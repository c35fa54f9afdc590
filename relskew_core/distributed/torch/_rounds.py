"""The transport of keys and values to the queries: around a ring, part by part, or all at once."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from relskew_core._positions.pairs import Run
from relskew_core.distributed._layout import Layout, runs
from relskew_core.distributed.torch._ranks import Ranks
from relskew_core.distributed.torch._sequence import joined, taken_apart

Held = Sequence[Tensor]
"""The tensors that travel: keys and values, and the keys' labels if there are any."""

Step = Callable[[int | None, Sequence[Run], Held], Any]
"""``step(distance, keys, held)``: the distance that the held keys have travelled, and their positions."""


@dataclass(frozen=True, slots=True)
class Ring:
    """Every rank passes its keys on and attends to those that it receives (Liu et al. 2023, "Ring Attention").

    Only rounds in which some rank sees something take place: what a window hides is never sent.
    """

    ranks: Ranks
    keys: Sequence[Sequence[Run]]  # for each rank
    distances: Sequence[int]  # how many ranks the keys have passed, for each round

    def forward(self, held: Held, step: Step) -> Held:
        """Attend to the keys of every rank while the next are in transit; return what the backward pass needs."""
        own, at = held, 0
        for index, distance in enumerate(self.distances):
            if distance > at:  # the first round has the keys of another rank
                held, at = self.ranks.send_round(held, distance - at).arrived(), distance
            coming = None
            if index + 1 < len(self.distances):
                coming, at = self.ranks.send_round(held, self.distances[index + 1] - at), self.distances[index + 1]
            step(distance, self._keys(distance), held)
            held = held if coming is None else coming.arrived()
        return own

    def backward(self, held: Held, like: Held, step: Step) -> Held:
        """Visit the keys again; return the gradients of those held here, shaped ``like`` them, from all ranks.

        Gradients travel one hop behind what they belong to, and home at the end; a rank's own stay where they are.
        """
        own: Held | None = None
        travelling: Held | None = None
        at = 0
        for index, distance in enumerate(self.distances):
            if distance > at:
                held, at = self.ranks.send_round(held, distance - at).arrived(), distance
            coming, ahead = None, self.ranks.size
            if index + 1 < len(self.distances):
                ahead = self.distances[index + 1]
                coming, at = self.ranks.send_round(held, ahead - distance), ahead
            found = step(distance, self._keys(distance), held)
            if distance == 0:
                own = found
            else:
                found = found if travelling is None else _sum(found, travelling)
                travelling = self.ranks.send_round(found, ahead - distance).arrived()
            held = held if coming is None else coming.arrived()
        if own is None or travelling is None:
            return own or travelling or [torch.zeros_like(x) for x in like]
        return _sum(own, travelling)

    def _keys(self, distance: int) -> Sequence[Run]:
        return self.keys[(self.ranks.rank - distance) % self.ranks.size]


def _sum(some: Held, others: Held) -> Held:
    return [one + other for one, other in zip(some, others, strict=True)]


@dataclass(frozen=True, slots=True)
class Gathered:
    """Every rank gathers all keys and values: this takes more memory than a ring, and fewer, larger messages."""

    ranks: Ranks
    keys: Sequence[Run]  # of all ranks, in the order of `layout`
    layout: Layout

    @classmethod
    def of(cls, ranks: Ranks, layout: Layout, count: int) -> Gathered:
        """Arrange the parts in their order in the whole sequence; stripes are adjacent, each a run."""
        if layout != "striped":
            return cls(ranks, [Run(0, 1, ranks.size * count)], layout)
        stripes = [run for index in range(ranks.size) for run in runs("striped", ranks.size, index, count)]
        side_by_side = [Run(run.start, run.step, count, index * count) for index, run in enumerate(stripes)]
        return cls(ranks, side_by_side, "contiguous")

    def forward(self, held: Held, step: Step) -> Held:
        """Attend to all keys at once; return them."""
        held = [joined(self.ranks.gathered(x), -2, self.layout) for x in held]
        step(None, self.keys, held)
        return held

    def backward(self, held: Held, like: Held, step: Step) -> Held:
        """Return the gradients of the keys and values of this rank."""
        size, found = self.ranks.size, step(None, self.keys, held)
        return [self.ranks.exchanged(taken_apart(x, size, -2, self.layout)).sum(0) for x in found]
