"""Grids with any number of axes: the contributions of relative positions along each axis to the logits.

A grid is laid out row by row, as ``(…, n_0, n_1, …, D)`` flattened to ``(…, n_0 · n_1 · …, D)``. Every axis has its own
relative position and is skewed by itself. Only the sum over the axes has an entry for every query and key.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from relskew_core._array.checks import describe
from relskew_core._array.known import exported
from relskew_core._array.softmax import moved
from relskew_core._array.typing import Array, Namespace
from relskew_core._functions.bias import bias_between, check_span, diagonals
from relskew_core._functions.grid_layout import Grids, Surroundings, extent
from relskew_core._positions.skew import skew_from
from relskew_core._positions.span import Span
from relskew_core._positions.table import Table


def axis_logits(
    q: Array, tables: Sequence[Array | None], spans: Sequence[Span], grids: Grids, *, xp: Namespace
) -> Array:
    """Return the sum of the tables' logits for every query and key, ``(…, H, queries, keys)``; there is a table."""
    count = len(grids.queries)
    cells = xp.reshape(q, (*q.shape[:-2], *grids.queries, q.shape[-1]))
    total = None
    for axis in reversed(grids.axes):
        table = tables[axis]
        if table is None:
            continue
        along = _along(moved(cells, axis - count - 1, -2, xp=xp), table, spans[axis], grids, axis, xp=xp)
        along = moved(along, -2, axis - count - 1, xp=xp)  # (…, n_0, n_1, …, m)
        part = along[(..., *(slice(None) if other == axis else None for other in grids.axes))]
        total = part if total is None else part + total
    assert total is not None
    # a table may have a heads axis that q does not have
    total = xp.broadcast_to(total, (*total.shape[:-count], *grids.keys))
    return xp.reshape(total, (*q.shape[:-1], grids.n_keys))


def axis_bias(bias: Array, spans: Sequence[Span], grids: Grids, *, xp: Namespace) -> Array:
    """Return a bias over all axes together by query and key, ``(…, R_0, R_1, …)`` to ``(…, queries, keys)``."""
    count = len(grids.queries)
    lead = tuple(bias.shape[:-count])
    for axis in grids.axes:  # the axis is the first of the remaining ones; its two new axes are appended
        n, m, low = grids.queries[axis], grids.keys[axis], -(grids.queries[axis] - 1 + grids.offset[axis])
        row = bias_between(moved(bias, len(lead), -1, xp=xp), spans[axis], low, low + n + m - 2, xp=xp)
        bias = diagonals(row, n, m, xp=xp)
    order = [*range(len(lead)), *(len(lead) + 2 * axis + side for side in (0, 1) for axis in grids.axes)]
    shape = (*lead, grids.n_queries, grids.n_keys)
    return xp.reshape(xp.permute_dims(bias, tuple(order)), shape)


def check_tables(
    q: Array, tables: Sequence[Array | None], spans: Any, grids: Grids, seen: Surroundings
) -> tuple[Span, ...]:
    """Return the span of each axis that has a table, refusing tables that do not fit the queries or the grids."""
    found = []
    for axis, table in enumerate(tables):
        given = None if spans is None else spans[axis]
        name = grids.tables[axis]
        if table is None:
            found.append(Span(0, 0, "zero"))
            continue
        if table.ndim not in (2, 3) or table.shape[-1] != q.shape[-1] or table.shape[-2] == 0:
            raise ValueError(
                f"`{name}` must have shape (R, D) or (H, R, D) with the width of `q`, {q.shape[-1]}, "
                f"got {describe(table)}"
            )
        n_heads = q.shape[-3] if q.ndim > 2 else 1
        if table.ndim == 3 and table.shape[0] != n_heads:
            raise ValueError(f"`{name}` must have H = {n_heads} heads on its first axis, got {describe(table)}")
        span = check_span(name, table.shape[-2], given, span_name=grids.spans[axis])
        grids.check_reach(name, axis, span, seen)
        found.append(_hidden_beyond(span, seen))
    return tuple(found)


def check_bias(name: str, bias: Array, spans: Any, grids: Grids, seen: Surroundings) -> tuple[Span, ...]:
    """Return the spans of a bias ``(…, R_0, R_1, …)``, refusing those that do not fit it or the grids."""
    found, count = [], len(grids.queries)
    _refuse_flat(name, bias, spans, grids)
    for axis in grids.axes:
        given = None if spans is None else spans[axis]
        found.append(check_span(name, bias.shape[axis - count], given, span_name=grids.spans[axis]))
    for axis, span in enumerate(found):
        grids.check_reach(name, axis, span, seen)
    return tuple(_hidden_beyond(span, seen) for span in found)


def _refuse_flat(name: str, bias: Array, spans: Any, grids: Grids) -> None:
    """Refuse a bias of two axes as Swin stores it, ``(cells, H)``."""
    if len(grids.queries) != 2 or exported(*grids.queries, *grids.keys):
        return
    of_cells = math.prod([2 * side - 1 for side in grids.queries])
    narrow = (spans is None or spans[1] is None) and bias.shape[-1] < grids.queries[1] + grids.keys[1] - 1
    if narrow and bias.ndim == 2 and bias.shape[0] == of_cells:
        raise ValueError(
            f"`{name}` must have an axis for heights and one for widths, (Rh, Rw) or (H, Rh, Rw): convert Swin's table "
            f"({of_cells}, H) with conventions.Swin(window={grids.queries}).load, got {describe(bias)}"
        )


def _hidden_beyond(span: Span, seen: Surroundings) -> Span:
    """Return a span for the products: beyond the table, every pair is hidden."""
    return span if seen.all or span.beyond != "error" else Span(span.left, span.right, "zero")


def _along(x: Array, table: Array, span: Span, grids: Grids, axis: int, *, xp: Namespace) -> Array:
    """Relative logits along one axis, (..., H, a, n, D) -> (..., H, a, n, m), where ``a`` are the other axes."""
    n, m, q_step, k_step = grids.queries[axis], grids.keys[axis], grids.q_step[axis], grids.k_step[axis]
    if table.ndim == 3:  # by head: the other axes share the heads
        table = table[(slice(None), *(None,) * (len(grids.queries) - 1), ...)]
    first, places = n * q_step, extent(m, k_step)
    low = -(first + grids.offset[axis])
    high = low + first + places - 1
    columns = Table(xp.matrix_transpose(table), span.left, span.beyond).covering(low, high, xp=xp)
    logits = skew_from(columns.product(x, low, high, xp=xp), n_keys=places, first=first, step=q_step, xp=xp)
    return logits[..., ::k_step]
