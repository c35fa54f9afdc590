"""Tables whose rows are split over the ranks.

Stripes that are ``s`` ranks apart have the relative positions ``r = -s - offset`` modulo the number of ranks and no
others, whichever ranks they are. So a rank that has every such row of a table gives it to all in one round of the ring.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any

import array_api_compat.torch as xp
import torch
from torch import Tensor

from relskew_core._array.checks import describe
from relskew_core._kernel.call import TABLES, kind_of_table
from relskew_core._positions.pairs import Pairs, Rows
from relskew_core._positions.span import Span, check_span_given
from relskew_core.distributed.torch._sequence import Ranks, distributed, groups


def shard_table(table: Tensor, group: Any, span: Span, *, bias: bool = False) -> Tensor:
    """Return this rank's rows of a table: every ``P``-th relative position, for ``P`` ranks.

    Parameters
    ----------
    table : Tensor, shape (R, D) or (H, R, D), or of a bias (R,) or (H, R)
        Whole.
    group : ProcessGroup or DeviceMesh
        The ranks that share it: those of :func:`context_parallel_attention`, or of the first axis of a mesh with two.
    span : Span
        The relative positions of its rows.
    bias : bool, default False
        Whether it is a table of numbers, whose last axis contains the rows.

    Returns
    -------
    Tensor
        In separate memory, for ``context_parallel_attention(…, layout="striped", tables="sharded")``.

    Examples
    --------
    >>> import torch
    >>> import torch.distributed as dist
    >>> dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    >>> shard_table(torch.ones(5, 2), dist.group.WORLD, Span.full(3)).shape
    torch.Size([5, 2])
    >>> dist.destroy_process_group()
    """
    if not isinstance(table, Tensor):
        raise TypeError(f"`table` must be a Tensor, got {describe(table)}")
    check_span_given(span)
    axis = -1 if bias else -2
    if table.ndim < -axis or table.shape[axis] != span.rows:
        raise ValueError(f"`table` must have the {span.rows} rows of {span} on its axis {axis}, got {describe(table)}")
    ranks = Ranks.of(groups(group)[0])
    rows = slice(_first(ranks.rank, ranks, span), None, ranks.size)
    own = table[..., rows] if bias else table[..., rows, :]
    return own.clone(memory_format=torch.contiguous_format)


def _first(position: int, ranks: Ranks, span: Span) -> int:
    """Return the first row whose relative position is ``position`` modulo the number of ranks."""
    return (position + span.left) % ranks.size


def _count(position: int, ranks: Ranks, span: Span) -> int:
    return len(range(_first(position, ranks, span), span.rows, ranks.size))


def check_sharded(given: Any, ranks: Ranks) -> Any:
    """Return a call with tables of full size for the checks, from one with this rank's rows."""
    check_span_given(given.span)
    if given.layout != "striped" or given.method != "ring":
        raise ValueError(
            "`tables` may be 'sharded' with layout='striped' and method='ring', "
            f"got layout={given.layout!r} and method={given.method!r}"
        )
    if given.span.rows < ranks.size:
        raise ValueError(f"`span` must have a row for each of {ranks.size} ranks to be sharded, got {given.span}")
    return as_if_whole(given, ranks)


def as_if_whole(given: Any, ranks: Ranks) -> Any:
    """Return a call whose tables only have the right shapes."""
    span, changed = given.span, {}
    for name in TABLES:
        table, axis = getattr(given, name), kind_of_table(name).row_axis
        if table is None:
            continue
        expected = _count(ranks.rank, ranks, span)
        if table.ndim < -axis or table.shape[axis] != expected:
            raise ValueError(f"`{name}` must have {expected} rows on rank {ranks.rank}, got {describe(table)}")
        shape = list(table.shape)
        shape[axis] = span.rows
        changed[name] = table.narrow(axis, 0, 1).expand(shape)
    return replace(given, **changed)


@dataclass(slots=True)
class RankTables:
    """The rows that a part of a call uses of tables that are whole on every rank, and the sums of their gradients."""

    span: Span
    given: dict[str, Tensor]  # biases get an axis of length 1
    sums: dict[str, Tensor] = field(default_factory=dict)

    @classmethod
    def of(cls, x: dict[str, Any], span: Span) -> RankTables:
        return cls(span, _columns(x))

    def begin(self, distance: int | None) -> None:
        """Prepare a round of the ring."""

    def rows(self, pairs: Pairs) -> Rows:
        return pairs.rows(self.span)

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

    def end(self, distance: int | None) -> None:
        """Finish a round of gradients."""

    def gradients(self) -> dict[str, Tensor]:
        return {name: kind_of_table(name).without_width(x) for name, x in self.sums.items()}


@dataclass(slots=True, kw_only=True)
class ShardedTables(RankTables):
    """The same for tables of which this rank has some rows: a round sends rows to all ranks, and gradients back."""

    ranks: Ranks
    offset: int
    own: dict[str, Tensor]  # the rows of this rank
    edges: dict[str, tuple[Tensor, Tensor]] = field(default_factory=dict)
    totals: dict[str, Tensor] = field(default_factory=dict)  # the gradients of this rank's rows,
    of_edges: dict[str, Tensor] = field(default_factory=dict)  # and of the rows that repeat its ends
    owner: int = 0  # the rank whose rows are used in this round

    @classmethod
    def of_rows(cls, x: dict[str, Any], span: Span, ranks: Ranks, offset: int) -> ShardedTables:
        """Return the tables of a call, after fetching the edges that a clipped table repeats."""
        tables = cls(span, {}, ranks=ranks, offset=offset, own=_columns(x))
        if span.beyond == "clip":
            for name, own in tables.own.items():
                ends = ((-span.left, slice(0, 1)), (span.right, slice(-1, None)))
                first, last = (tables._from(position, own[..., rows, :], 1) for position, rows in ends)
                tables.edges[name] = first, last
        return tables

    def _from(self, position: int, rows: Tensor, count: int) -> Tensor:
        owner = position % self.ranks.size
        shape = (*rows.shape[:-2], count, rows.shape[-1])
        found = rows.contiguous() if owner == self.ranks.rank else rows.new_empty(shape)
        distributed.broadcast(found, group_src=owner, group=self.ranks.group)
        return found

    def begin(self, distance: int | None) -> None:
        assert distance is not None
        self.owner = (-distance - self.offset) % self.ranks.size
        count = _count(self.owner, self.ranks, self.span)
        for name, own in self.own.items():
            found = self._from(self.owner, own, count)
            first, last = self.edges.get(name, (None, None))
            self.given[name] = found if first is None or last is None else torch.cat([first, found, last], dim=-2)
            if name in self.totals:
                self.sums[name] = torch.zeros_like(self.given[name], dtype=self.totals[name].dtype)

    def rows(self, pairs: Pairs) -> Rows:
        before = int(bool(self.edges))
        count = _count(self.owner, self.ranks, self.span)
        zero = (pairs.zero + self.span.left - _first(self.owner, self.ranks, self.span)) // self.ranks.size
        return Rows.of(zero + before, 1, pairs.low, pairs.high, Span(count - 1 + 2 * before, 0, self.span.beyond))

    def want(self, names: set[str], dtype: torch.dtype) -> None:
        self.totals = {name: torch.zeros_like(x, dtype=dtype) for name, x in self.own.items() if name in names}
        for name, total in self.totals.items():
            if name in self.edges:
                self.of_edges[name] = total.new_zeros((2, *self.edges[name][0].shape))

    def end(self, distance: int | None) -> None:
        for name, total in self.totals.items():
            found = self.sums[name]
            if name in self.edges:
                self.of_edges[name][0] += found[..., :1, :]
                self.of_edges[name][1] += found[..., -1:, :]
                found = found[..., 1:-1, :]
            found = found.contiguous()
            distributed.reduce(found, group_dst=self.owner, group=self.ranks.group)
            if self.owner == self.ranks.rank:
                total += found

    def gradients(self) -> dict[str, Tensor]:
        for name, found in self.of_edges.items():
            distributed.all_reduce(found, group=self.ranks.group)
            for edge, position, row in ((0, -self.span.left, 0), (1, self.span.right, -1)):
                if position % self.ranks.size == self.ranks.rank:
                    self.totals[name][..., row, :] += found[edge][..., 0, :]
        return {name: kind_of_table(name).without_width(x) for name, x in self.totals.items()}


def _columns(x: dict[str, Any]) -> dict[str, Tensor]:
    given = {name: x[name] for name in TABLES if x[name] is not None}
    return {name: kind_of_table(name).with_width(table) for name, table in given.items()}
