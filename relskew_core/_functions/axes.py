"""Grids with any number of axes: tables and biases, checked, with the rows that grids use.

A grid is laid out row by row, as ``(…, n_0, n_1, …, D)`` flattened to ``(…, n_0 · n_1 · …, D)``. Every axis has its own
relative position and is skewed by itself. Only the sum over the axes has an entry for every query and key.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from relskew_core._array.checks import describe
from relskew_core._array.known import compiled_for_any, exported
from relskew_core._array.softmax import moved
from relskew_core._array.typing import Array, Namespace
from relskew_core._functions.bias import bias_between, check_span
from relskew_core._functions.grid_layout import Grids, Surroundings
from relskew_core._positions.span import Span
from relskew_core._positions.table import Table


def axis_tables(
    tables: Sequence[Array | None], spans: Sequence[Span], grids: Grids, *, xp: Namespace
) -> list[Array | None]:
    """Return tables (R, D) or (H, R, D) with the rows that the grids use."""
    return [
        table if table is None
        else xp.matrix_transpose(_used(xp.matrix_transpose(table), span, *grids.reach(axis), xp=xp))
        for axis, (table, span) in enumerate(zip(tables, spans, strict=True))
    ]  # fmt: skip


def axis_numbers(bias: Array, spans: Sequence[Span], grids: Grids, *, xp: Namespace) -> Array:
    """Return a bias over all axes together, (…, R_0, R_1, …), with the numbers that the grids use."""
    for axis, span in enumerate(spans):
        place = axis - len(spans)
        own = _used(moved(bias, place, -1, xp=xp), span, *grids.reach(axis), xp=xp)
        bias = moved(own, -1, place, xp=xp)
    return bias


def _used(x: Array, span: Span, low: int, high: int, *, xp: Namespace) -> Array:
    if compiled_for_any(low, high):  # a program for every length, however long the table is
        return Table(x, span.left, span.beyond).looked_up(low, high, xp=xp).columns
    return bias_between(x, span, low, high, xp=xp)


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
