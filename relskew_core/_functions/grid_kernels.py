"""Attention over grids as one call of the compiled kernels, for any number of axes.

Tables of the axes go there as they are. A bias of all axes together is one of consecutive positions: those of the
cells, counted as if each row of the grid went on until no difference of two cells is that of two others.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, fields
from typing import Any

from relskew_core import backends
from relskew_core._array.checks import is_array
from relskew_core._array.known import exporting
from relskew_core._array.namespace import device
from relskew_core._array.typing import Array, Namespace
from relskew_core._functions.bias import bias_between
from relskew_core._functions.grid_layout import Grids
from relskew_core._kernel.by_head import by_head
from relskew_core._kernel.call import Arguments, GridOperands, GridOptions, Options, Side
from relskew_core._kernel.problem import problem
from relskew_core._positions.span import Span

SMALL = 2**17
"""Up to this many entries, a bias by query and key costs less than look-ups: the windows of a batch share it."""


@dataclass(frozen=True, slots=True)
class GridPair:
    """The sides of both grids, where the grid of queries begins, and the number of queries and keys before them."""

    sides: tuple[Side, ...]
    offset: tuple[int, ...]
    prefix: tuple[int, ...]

    @classmethod
    def of(cls, grids: Grids, prefix: tuple[int, ...]) -> GridPair:
        """Return those of a call."""
        sides = zip(grids.queries, grids.keys, grids.q_step, grids.k_step, strict=True)
        return cls(tuple(Side(*side) for side in sides), grids.offset, prefix)

    def window(self, axis: int, x: Array, span: Span, *, xp: Namespace) -> Array:
        """Return the entries of a last axis that the cells along a side use."""
        side = self.sides[axis]
        low = -((side.queries - 1) * side.query_step + self.offset[axis])
        return bias_between(x, span, low, low + side.rows - 1, xp=xp)

    def axis_tables(self, tables: Sequence[Array | None], spans: Sequence[Span], q: Array, *, xp: Namespace) -> Array:
        """Return the tables (R, D) or (H, R, D) of all axes as (1 or H, Σ R, D), each with the rows that the grids use.

        An axis that has none has zeros.
        """
        found = [
            xp.zeros((side.rows, q.shape[-1]), dtype=q.dtype, device=device(q))
            if table is None
            else xp.matrix_transpose(self.window(axis, xp.matrix_transpose(table), span, xp=xp))
            for axis, (table, span, side) in enumerate(zip(tables, spans, self.sides, strict=True))
        ]
        heads = max(table.shape[0] if table.ndim > 2 else 1 for table in found)
        return xp.concat([xp.broadcast_to(table, (heads, *table.shape[-2:])) for table in found], axis=-2)

    def numbers(
        self, bias: Array | None, spans: Sequence[Span], of_prefix: Array | None, *, xp: Namespace
    ) -> tuple[Array, Span]:
        """Return a bias (H, R, R', …) or (R, R', …) as numbers of consecutive positions, including the prefix's.

        The first and the last number are for queries before the grid and for keys before it, the last but one for both.
        """
        n_axes, left = len(self.sides), 0
        like: Any = of_prefix if bias is None else bias
        row = xp.zeros((1,), dtype=like.dtype, device=device(like))
        if bias is not None:
            for axis, span in enumerate(spans):
                moved = self.window(axis, xp.moveaxis(bias, axis - n_axes, -1), span, xp=xp)
                bias = xp.moveaxis(moved, -1, axis - n_axes)
            row = xp.reshape(bias, (*bias.shape[:-n_axes], -1))
            left = sum((side.queries - 1) * step for side, step in zip(self.sides, self._steps, strict=True))
        if any(self.prefix):
            ends = xp.zeros((3,), dtype=like.dtype, device=device(like)) if of_prefix is None else of_prefix
            lead = max(row.shape[:-1], ends.shape[:-1], key=len)
            row, ends = (xp.broadcast_to(x, (*lead, x.shape[-1])) for x in (row, ends))
            row, left = xp.concat([ends[..., 1:2], row, ends[..., 2:3], ends[..., 0:1]], axis=-1), left + 1
        return row, Span(left, row.shape[-1] - 1 - left, "clip")

    def positions(self, span: Span, like: Array, *, cells: bool, xp: Namespace) -> tuple[Array, Array]:
        """Return the positions of queries and keys in these numbers; without a bias, all cells share one position."""
        found = []
        for which in ("queries", "keys"):
            total = xp.zeros((1,), dtype=xp.int32, device=device(like))
            for side, step in zip(self.sides, self._steps, strict=True):
                along = xp.arange(getattr(side, which), dtype=xp.int32, device=device(like)) * (step if cells else 0)
                total = xp.reshape(total[:, None] + along, (-1,))
            found.append(total)
        last = [sum((n - 1) * step for n, step in zip(sizes, self._steps, strict=True)) if cells else 0
                for sizes in zip(*(side[:2] for side in self.sides), strict=True)]  # fmt: skip
        # of keys before the grid: beyond all cells
        far = max(last[0] + span.right, last[1] + span.left + span.right - 1)
        outside = far - span.right + 1, far
        queries, keys = (
            xp.concat([xp.full((count,), place, dtype=xp.int32, device=device(like)), x])
            for count, place, x in zip(self.prefix, outside, found, strict=True)
        )
        return queries, keys

    @property
    def _steps(self) -> list[int]:
        """The distances of neighbours along each axis in the combined numbering of all axes."""
        return [math.prod(side.rows for side in self.sides[axis + 1 :]) for axis in range(len(self.sides))]


def attend(
    q: Array,
    k: Array,
    v: Array,
    grids: GridPair,
    tables: Sequence[Array | None],
    spans: Any,
    bias: Array | None,
    bias_spans: Any,
    prefix_bias: Array | None,
    *,
    mask: Array | None,
    scale: float | Array,
    rel_scale: float | Array,
    xp: Namespace,
) -> tuple[Array, Array] | None:
    """Return the output and the log-sum-exp, ``None`` if the compiled kernels do not support the call."""
    written = (
        0
        if bias is None or tables
        else math.prod((*(mask.shape[:-3] if mask is not None else ()), *q.shape[-3:-1], k.shape[-2]))
    )
    kernels = None if exporting() or 0 < written <= SMALL else backends.prepared(type(q))
    given = (q, k, v, *tables, bias, prefix_bias, mask)
    factors = [x for x in (scale, rel_scale) if is_array(x)]
    if kernels is None or not kernels.ordinary() or not kernels.TYPES.issuperset(map(type, (*given, *factors))):
        return None
    more: dict[str, Any] = {}
    if bias is not None or (prefix_bias is not None and any(grids.prefix)):
        more["rel_bias"], more["span"] = grids.numbers(bias, bias_spans, prefix_bias, xp=xp)
        more["positions"] = grids.positions(more["span"], q, cells=bias is not None, xp=xp)
    call = problem(Arguments(q, k, v, mask=mask, scale=scale, **more), return_lse=True)
    operands, options = call.operands(half=kernels.HALF), call.options
    labels = {
        name: xp.astype(x, xp.int32)
        for name in ("q_positions", "k_positions")
        if (x := getattr(operands, name)) is not None
    }  # in the dtype of the kernels
    operands = operands._replace(**labels)
    if tables:
        operands = GridOperands(*operands, axis_tables=grids.axis_tables(tables, spans, q, xp=xp))
        own: dict[str, Any] = {field.name: getattr(options, field.name) for field in fields(Options)}
        own["rel_scale"] = rel_scale
        if factors:  # these may be part of the queries for the keys already
            operands = operands._replace(rel_q=call.operand(q * by_head(rel_scale, q), half=kernels.HALF))
            own["rel_scale"] = 1.0
        options = GridOptions(**own, sides=grids.sides)
    known = kernels.call_of(operands, options)
    if known is None:
        return None
    out, lse = kernels.attend(operands, known)
    return call.result(out), call.result(lse, dtype=call.wide)
