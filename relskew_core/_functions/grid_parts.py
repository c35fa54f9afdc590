"""Attention over a grid in chunks: some rows of queries with the rows of keys that they see."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

from relskew_core._array.known import exported, ranges
from relskew_core._array.namespace import device
from relskew_core._array.softmax import joint, of_rank
from relskew_core._array.typing import Array, Namespace
from relskew_core._functions.attention import relative_attention
from relskew_core._functions.axes import axis_bias, axis_logits
from relskew_core._functions.grid_layout import Grids, Surroundings

SCRATCH_BYTES = 8 * 2**20
"""Budget of the logits of one chunk."""


@dataclass(frozen=True, slots=True)
class GridParts:
    """The positional part of the logits, for some rows of the queries' grid and the rows of keys that they see."""

    grids: Grids
    tables: tuple[Array | None, ...]
    spans: Any
    rel_bias: Array | None
    prefix: Any
    prefix_bias: Array | None

    def parts(
        self, q: Array, own: Array | None, k: Array, v: Array, seen: Surroundings, mask: Array | None, scale: Any,
        chunk_size: int | None, *, xp: Namespace,
    ) -> Iterator[tuple[slice, Array, Array]]:  # fmt: skip
        """Attend with some queries at a time: return which, their output and their log-sum-exp.

        ``own``: the queries that the tables are multiplied by, if there are tables.
        """
        grids, before = self.grids, self.prefix

        def part(
            chosen: slice, bias: Array | None, rows: tuple[int, int] | None, visible: Array | None
        ) -> tuple[slice, Array, Array]:
            cut = mask if mask is None or mask.shape[-2] == 1 else mask[..., chosen, :]
            keys, values = (self.of_rows(x, -2, rows, xp=xp) for x in (k, v))
            if cut is not None and cut.shape[-1] != 1:
                cut = self.of_rows(cut, -1, rows, xp=xp)
            bias = joint(bias, joint(cut, visible, xp=xp), xp=xp)
            size = chosen.stop - chosen.start
            options: Any = {"mask": bias, "scale": scale, "chunk_size": size, "return_lse": True}
            return chosen, *relative_attention(q[..., chosen, :], keys, values, **options)

        if before[0]:
            yield part(slice(0, before[0]), self.outside(xp=xp), None, None)
        for top, bottom in _chunks(q, grids, seen, before[1], chunk_size):
            rows = None if seen.all or exported(*grids.queries, *grids.keys) else seen.rows(grids, top, bottom)
            first, last = (0, grids.keys[0]) if rows is None else rows
            visible = None
            if not seen.all:
                visible = seen.visible(grids, (top, bottom, first, last), device=device(q), xp=xp)
                visible = self.seen_before(visible, xp=xp)
            bias = self.inside(own, (top, bottom, first, last), xp=xp)
            start, stop = (before[0] + row * (grids.n_queries // grids.queries[0]) for row in (top, bottom))
            rows = None if (first, last) == (0, grids.keys[0]) else (first, last)
            yield part(slice(start, stop), bias, rows, visible)

    def of_rows(self, x: Array, axis: int, rows: tuple[int, int] | None, *, xp: Namespace) -> Array:
        """Return the keys outside the grid and those in some rows of its first axis, along an axis of ``x``."""
        if rows is None:
            return x
        width, before = self.grids.n_keys // self.grids.keys[0], self.prefix[1]
        behind = (slice(None),) * (-1 - axis)
        inside = x[(..., slice(before + rows[0] * width, before + rows[1] * width), *behind)]
        return inside if not before else xp.concat([x[(..., slice(0, before), *behind)], inside], axis=axis)

    def seen_before(self, visible: Array, *, xp: Namespace) -> Array:
        """Return a mask with the keys outside the grid, which are always visible, before those on it."""
        if not self.prefix[1]:
            return visible
        always = xp.ones((visible.shape[0], self.prefix[1]), dtype=visible.dtype, device=device(visible))
        return xp.concat([always, visible], axis=-1)

    def inside(self, own: Array | None, rows: tuple[int, int, int, int], *, xp: Namespace) -> Array | None:
        """Return the part for the queries on some rows of the grid, by the keys of some rows."""
        top, bottom, first, last = rows
        spans, bias_spans = self.spans
        grids = self.grids.cut(top, bottom, first, last)
        total = None
        if own is not None:
            width = self.grids.n_queries // self.grids.queries[0]
            cells = own[..., self.prefix[0] + top * width : self.prefix[0] + bottom * width, :]
            total = axis_logits(cells, self.tables, spans, grids, xp=xp)
        if self.rel_bias is not None:
            bias = axis_bias(self.rel_bias, bias_spans, grids, xp=xp)
            total = bias if total is None else total + of_rank(bias, total.ndim)
        return self._with_prefix(total, 0, None, grids.n_keys, xp=xp)

    def outside(self, *, xp: Namespace) -> Array | None:
        """Return the part for the queries outside the grid, by all keys."""
        return self._with_prefix(None, 2, 1, self.grids.n_keys, xp=xp)

    def _with_prefix(
        self, grid: Array | None, at_prefix: int, at_grid: int | None, cells: int, *, xp: Namespace
    ) -> Array | None:
        """Put the columns of the keys outside the grid before those on it."""
        if (grid is None and self.prefix_bias is None) or (not self.prefix[1] and at_grid is None):
            return grid
        like: Any = grid if self.prefix_bias is None else self.prefix_bias
        lead = (1,) if grid is None else tuple(grid.shape[:-1])
        if self.prefix_bias is not None and self.prefix_bias.ndim == 2 and len(lead) == 1:
            # without a heads axis inside the grid, heads may still differ outside it
            lead = (self.prefix_bias.shape[0], *lead)
            grid = None if grid is None else xp.broadcast_to(grid, (*lead, cells))

        def columns(which: int | None, count: int) -> Array:
            if self.prefix_bias is None or which is None:
                return xp.zeros((*lead, count), dtype=like.dtype, device=device(like))
            return xp.broadcast_to(self.prefix_bias[..., None, which : which + 1], (*lead, count))

        return xp.concat(
            [columns(at_prefix, self.prefix[1]), columns(at_grid, cells) if grid is None else grid], axis=-1
        )


def _chunks(
    q: Array, grids: Grids, seen: Surroundings, before: int, chunk_size: int | None
) -> Iterable[tuple[int, int]]:
    """Return the rows of the first axis that are processed together, as ranges."""
    height = grids.queries[0]
    if exported(*grids.queries, *grids.keys, *q.shape):  # a program has the same number of chunks for all sizes
        return [(0, height)]
    step = rows_of_chunk(q, grids, seen, before, chunk_size)
    if seen.all:
        return ranges(height, step)
    # a constant for torch.compile, which would take minutes to trace windows of any height: they are an operator
    return pairwise([*range(0, height, step), height])


def rows_of_chunk(q: Array, grids: Grids, seen: Surroundings, before: int, chunk_size: int | None) -> int:
    """Return how many rows of the first axis are processed together."""
    inner = math.prod(grids.queries[1:])
    if chunk_size is not None:
        return max(1, chunk_size // inner)
    left, right = seen.reach(0)
    reach = grids.keys[0] if left is None or right is None else min(grids.keys[0], left + right + 1)
    reach = reach if seen.neighborhood is None else seen.neighborhood[0]
    row: int = math.prod(q.shape[:-2]) * inner * (before + reach * math.prod(grids.keys[1:]))
    step = max(1, SCRATCH_BYTES // (4 * max(1, row)))
    # A chunk of `reach` rows sees about twice as many.
    return max(1, min(step // 2, reach)) if reach < grids.keys[0] else step
