"""Attention of this rank's queries to keys that arrive in parts, and its gradient."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise
from typing import Any

import array_api_compat.torch as xp
import torch
from torch import Tensor

from relskew_core._array.precision import undisturbed
from relskew_core._functions.attention import Backward, attend, pull_back
from relskew_core._kernel.call import BY_KEY, DIFFERENTIABLE, TABLES, Arguments, Part, kind_of_table
from relskew_core._kernel.merge import merged
from relskew_core._kernel.problem import problem
from relskew_core._positions.pairs import Pairs, Rows, Run
from relskew_core._positions.span import Span
from relskew_core.distributed._layout import Layout, runs
from relskew_core.distributed.torch._sequence import Ranks, joined, taken_apart

Held = Sequence[Tensor]
"""The tensors that travel: those by key, such as keys and values, and the labels of keys if there are any."""

Step = Callable[[Sequence[Run], Held], Any]
"""``step(keys, held)``: the positions of the held keys, and the keys."""


@dataclass(frozen=True, slots=True)
class Ring:
    """Every rank passes its keys on and attends to those that it receives (Liu et al. 2023, "Ring Attention").

    Only rounds in which some rank sees something take place: what a window hides is never sent.
    """

    ranks: Ranks
    keys: Sequence[Sequence[Run]]  # for each rank
    distances: Sequence[int]  # how many ranks the keys have passed, for each round

    def forward(self, held: Held, step: Step) -> Held:
        """Attend to the keys of every rank; return what the backward pass needs."""
        for distance, _, given in self._rounds(held):
            step(self._keys(distance), given)
        return held

    def backward(self, held: Held, like: Held, step: Step) -> Held:
        """Visit the keys again; return the gradients of those held here, shaped ``like`` them, from all ranks.

        Gradients travel one hop behind what they belong to, and home at the end; a rank's own stay where they are.
        """
        own: Held | None = None
        travelling: Held | None = None
        for distance, ahead, given in self._rounds(held):
            found = step(self._keys(distance), given)
            if distance == 0:
                own = found
            else:
                found = found if travelling is None else _sum(found, travelling)
                travelling = self.ranks.send_round(found, ahead - distance)()
        if own is None or travelling is None:
            return own or travelling or [torch.zeros_like(x) for x in like]
        return _sum(own, travelling)

    def _rounds(self, held: Held) -> Iterator[tuple[int, int, Held]]:
        """Yield the distance of each round, that of the next, and its keys, while the next are in transit."""
        at = 0
        for distance, ahead in pairwise((*self.distances, self.ranks.size)):
            if distance > at:  # the first round has the keys of another rank
                held = self.ranks.send_round(held, distance)()
            last = ahead == self.ranks.size
            coming, at = None if last else self.ranks.send_round(held, ahead - distance), ahead
            yield distance, ahead, held
            held = held if coming is None else coming()

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
        if layout != "striped":
            return cls(ranks, [Run(0, 1, ranks.size * count)], layout)
        stripes = [run for index in range(ranks.size) for run in runs("striped", ranks.size, index, count)]
        side_by_side = [Run(run.start, run.step, count, index * count) for index, run in enumerate(stripes)]
        return cls(ranks, side_by_side, "contiguous")

    def forward(self, held: Held, step: Step) -> Held:
        held = [joined(self.ranks.gathered(x), -2, self.layout) for x in held]
        step(self.keys, held)
        return held

    def backward(self, held: Held, like: Held, step: Step) -> Held:
        size, found = self.ranks.size, step(self.keys, held)
        return [self.ranks.exchanged(taken_apart(x, size, -2, self.layout)).sum(0) for x in found]


LABELS = ("q_segments", "k_segments", "seed")


@dataclass(frozen=True, slots=True)
class PartsPlan:
    options: Arguments  # its arrays are not those of the call
    span: Span
    offset: int
    left: int | None
    right: int | None
    queries: Sequence[Run]  # of this rank
    rounds: Ring | Gathered
    part: Part  # which heads


@dataclass(slots=True)
class PartTables:
    """The rows that a part of a call uses of its tables, and the sums of their gradients."""

    span: Span
    given: dict[str, Tensor]  # biases get an axis of length 1
    sums: dict[str, Tensor] = field(default_factory=dict)

    @classmethod
    def of(cls, x: dict[str, Any], span: Span) -> PartTables:
        given = {name: x[name] for name in TABLES if x[name] is not None}
        return cls(span, {name: kind_of_table(name).with_width(table) for name, table in given.items()})

    def part(self, name: str, rows: Rows) -> Tensor:
        found: Tensor = rows.of_table(self.given[name], self.span.beyond, xp=xp)
        return kind_of_table(name).without_width(found)

    def want(self, names: set[str], dtype: torch.dtype) -> None:
        self.sums = {name: torch.zeros_like(x, dtype=dtype) for name, x in self.given.items() if name in names}

    def add(self, name: str, gradient: Tensor, rows: Rows) -> None:
        """Add the gradient of the rows of a part; rows that repeat an edge add to the edge."""
        total, edges = self.sums[name], rows.span.beyond == "clip"
        gradient = kind_of_table(name).with_width(gradient)
        if edges and rows.before:
            total[..., 0, :] += gradient[..., : rows.before, :].sum(-2)
        if rows.count:
            total[..., rows.here, :] += gradient[..., rows.before : rows.before + rows.count, :]
        if edges and rows.after:
            total[..., -1, :] += gradient[..., -rows.after :, :].sum(-2)

    def gradients(self) -> dict[str, Tensor]:
        return {name: kind_of_table(name).without_width(x) for name, x in self.sums.items()}


@dataclass(frozen=True, slots=True)
class OnePart:
    """A run of queries against a run of keys: a separate call."""

    given: Arguments
    part: Part
    queries: Run
    keys: Run
    rows: Rows

    @classmethod
    def of(
        cls, plan: PartsPlan, x: dict[str, Any], tables: PartTables, held: Held, queries: Run, keys: Run
    ) -> OnePart | None:
        pairs = Pairs.of(queries, keys, plan.offset, plan.left, plan.right)
        if pairs is None:
            return None
        rows = pairs.rows(plan.span)
        names = _by_key(x)
        labels = held[len(names) :]
        arrays: dict[str, Any] = dict.fromkeys(DIFFERENTIABLE)
        arrays |= {name: own[..., keys.here, :] for name, own in zip(names, held, strict=False)}
        for name in DIFFERENTIABLE:
            array = x[name]
            if array is None or name in names:
                continue
            if name in TABLES:
                arrays[name] = tables.part(name, rows)
            else:
                arrays[name] = array[of_mask(array, queries, keys)] if name == "mask" else array[..., queries.here, :]
        segments = None
        if labels:
            segments = x["q_segments"][..., queries.here], labels[0][..., keys.here, 0]
        given = replace(
            plan.options, **arrays, span=rows.span if any(arrays[name] is not None for name in TABLES) else None,
            causal=pairs.causal, window=pairs.window, offset=pairs.offset, segments=segments, seed=x["seed"] if
            x["seed"] is not None else plan.options.seed,
        )  # fmt: skip
        part = replace(plan.part, of_more=True, query=queries.start + plan.offset, key=keys.start, step=queries.step)
        return cls(given, part, queries, keys, rows)

    def attend(self) -> tuple[Tensor, Tensor]:
        out, sums = attend(problem(self.given, return_lse=True, part=self.part), self.given.impl)
        assert sums is not None
        return out, sums


def of_mask(mask: Tensor, queries: Run, keys: Run) -> tuple[Any, ...]:
    columns = slice(None) if mask.shape[-1] == 1 else keys.positions
    if mask.ndim < 2:
        return (..., columns)
    return (..., slice(None) if mask.shape[-2] == 1 else queries.here, columns)


class PartsAttention(torch.autograd.Function):
    """``(plan, *arrays) -> (out, sums)``: keeps its inputs and results, and visits the keys again for the gradient."""

    @staticmethod
    def forward(ctx: Any, plan: PartsPlan, *arrays: Tensor | None) -> tuple[Tensor, Tensor]:
        x = dict(zip((*DIFFERENTIABLE, *LABELS), arrays, strict=True))
        q, v = arrays[0], x["v"]
        assert q is not None
        assert v is not None
        wide = torch.float32 if q.dtype.itemsize == 2 else q.dtype
        out = q.new_zeros((*q.shape[:-1], v.shape[-1]), dtype=wide)
        sums = q.new_full((*q.shape[:-1], 2), -torch.inf, dtype=wide)

        def step(keys: Sequence[Run], held: Held) -> None:
            for run in plan.queries:
                for other in keys:
                    call = OnePart.of(plan, x, tables, held, run, other)
                    if call is not None:
                        rows = (..., run.here, slice(None))
                        more, more_sums = call.attend()
                        out[rows], sums[rows] = merged([out[rows], more], [sums[rows], more_sums], xp=xp)

        with undisturbed(q):
            tables = PartTables.of(x, plan.span)
            held = plan.rounds.forward(_held(x), step)
        ctx.save_for_backward(*arrays, *held, out, sums)
        ctx.plan, ctx.count = plan, len(arrays)
        return out, sums

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Tensor) -> tuple[Any, ...]:
        d_out, d_lse = grad_outputs[0], grad_outputs[1][..., 1]
        plan, saved = ctx.plan, ctx.saved_tensors  # read once: a checkpoint releases them after the first access
        arrays, (*held, out, of_whole) = saved[: ctx.count], saved[ctx.count :]
        x = dict(zip((*DIFFERENTIABLE, *LABELS), arrays, strict=True))
        q = x["q"]
        wanted = {name for name, needed in zip(DIFFERENTIABLE, ctx.needs_input_grad[1:], strict=False) if needed}
        others = wanted - {*BY_KEY, *TABLES}
        sums = {name: torch.zeros_like(x[name], dtype=out.dtype) for name in others}
        by_key = _by_key(x)

        def step(keys: Sequence[Run], given: Held) -> Held:
            d_given = [torch.zeros_like(part, dtype=out.dtype) for part in given[: len(by_key)]]
            for run in plan.queries:
                for other in keys:
                    call = OnePart.of(plan, x, tables, given, run, other)
                    if call is None:
                        continue
                    rows = (..., run.here, slice(None))
                    cotangents = {"d_out": d_out[rows].to(q.dtype), "out": out[rows].to(q.dtype)}
                    cotangents["d_lse"] = d_lse[..., run.here]
                    found = pull_back(Backward(**cotangents, **vars(call.given)), call.part, of_whole[rows])
                    for name, total in zip(by_key, d_given, strict=True):
                        total[..., other.here, :] += getattr(found, name)
                    for name, total in sums.items():
                        where = of_mask(x[name], run, other) if name == "mask" else rows
                        total[where] += getattr(found, name)
                    for name in wanted.intersection(TABLES):
                        tables.add(name, getattr(found, name), call.rows)
            return d_given

        with undisturbed(q):
            tables = PartTables.of(x, plan.span)
            tables.want(wanted, out.dtype)
            d_held = plan.rounds.backward(held, _like(x, out.dtype), step)
            sums |= {**tables.gradients(), **dict(zip(by_key, d_held, strict=True))}
        gradients = [sums[name].to(x[name].dtype) if name in wanted else None for name in DIFFERENTIABLE]
        return (None, *gradients, *(None for _ in LABELS))


def _held(x: dict[str, Any]) -> Held:
    labels = [] if x["k_segments"] is None else [x["k_segments"][..., None]]
    return [*(x[name] for name in _by_key(x)), *labels]


def _by_key(x: dict[str, Any]) -> list[str]:
    return [name for name in BY_KEY if x[name] is not None]


def _like(x: dict[str, Any], dtype: torch.dtype) -> Held:
    return [x[name].to(dtype) for name in _by_key(x)]
