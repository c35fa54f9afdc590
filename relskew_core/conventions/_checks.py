"""Checks that all conversions of tables share."""

from __future__ import annotations

from relskew_core._array.checks import describe
from relskew_core._array.namespace import namespace_of_arrays
from relskew_core._array.typing import Array, Namespace
from relskew_core._positions.span import Span


def checked(table: Array) -> Namespace:
    """Return the namespace of a table by rows."""
    xp = namespace_of_arrays({"table": table}, floating=False)
    if table.ndim not in (2, 3) or table.shape[-2] < 1:
        raise ValueError(f"`table` must have shape (R, D) or (H, R, D), R >= 1, got {describe(table)}")
    return xp


def half(table: Array, rows: str) -> int:
    """Return the reach of an odd number of rows around 0."""
    if table.shape[-2] % 2 == 0:
        raise ValueError(f"`table` must have an odd number of rows, {rows}, got {describe(table)}")
    return int(table.shape[-2] // 2)


def fits(table: Array, span: Span) -> Span:
    """Return the span of a table that has its rows."""
    checked(table)
    if not isinstance(span, Span):
        raise TypeError(f"`span` must be a Span, got {describe(span)}")
    if table.shape[-2] != span.rows:
        raise ValueError(f"`table` must have the {span.rows} rows of {span}, got {describe(table)}")
    return span


def as_is(table: Array, span: Span) -> Array:
    """Return a table that has the rows of its span."""
    fits(table, span)
    return table


def symmetric(span: Span) -> Span:
    """Return a span that reaches as far ahead as back."""
    if span.left != span.right:
        raise ValueError(f"`span` must reach as far ahead as back, got {span}")
    return span
