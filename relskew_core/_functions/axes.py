"""Grids of any number of axes: what relative positions along each of them add to the logits, and who sees whom.

A grid is laid out row by row, as ``(…, n_0, n_1, …, D)`` flattened to ``(…, n_0 · n_1 · …, D)``. Every axis has its own
relative position and is skewed by itself. Only the sum over the axes has an entry for every query and key.
"""

from __future__ import annotations

import functools
import math
import operator
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from relskew_core._array.checks import check_int, check_window, describe
from relskew_core._array.integers import integers
from relskew_core._array.known import exported, same_length
from relskew_core._array.ranks import moved
from relskew_core._array.typing import Array, Namespace
from relskew_core._functions.bias import bias_between, check_span, diagonals
from relskew_core._positions.skew import skew_from
from relskew_core._positions.span import Span
from relskew_core._positions.table import Table
from relskew_core._positions.visibility import Visibility

Sides = tuple[int, ...]
"""A number for each axis."""

OF_TWO = (("table_h", "table_w"), ("span_h", "span_w"))
"""What the arguments of functions of two axes are called."""


@dataclass(frozen=True, slots=True)
class Grids:
    """The grids of queries and keys, where they lie, and how far neighbours are apart."""

    queries: Sides
    keys: Sides
    offset: Sides
    q_step: Sides
    k_step: Sides
    tables: Sequence[str]  # what an error calls the table and the span of each axis
    spans: Sequence[str]

    @classmethod
    def of(
        cls, q_grid: Any, k_grid: Any, offset: Any, q_step: Any = None, k_step: Any = None,
        *, axes: int | None = None, matters: bool = True, biased: bool = False,
    ) -> Grids:  # fmt: skip
        """Return the grids of a call, each number checked; ``axes``: how many there have to be, if that is known.

        ``matters``: the call depends on where they lie. ``biased``: it has a bias, which supports no steps.
        """
        queries = check_sides("q_grid", q_grid, axes, minimum=1)
        keys = check_sides("k_grid", k_grid, len(queries), minimum=1)
        count = len(queries)
        steps = [
            (1,) * count if step is None else check_sides(name, step, count, minimum=1)
            for name, step in (("q_step", q_step), ("k_step", k_step))
        ]
        for name, step in zip(("q_step", "k_step"), steps, strict=True):
            if biased and set(step) != {1}:
                raise ValueError(f"`{name}` must be {(1,) * count} with `rel_bias`, got {step}")
        tables, spans = (
            OF_TWO if axes == 2 else (tuple(f"{name}[{axis}]" for axis in range(count)) for name in ("tables", "spans"))
        )
        found = cls(queries, keys, (0,) * count, steps[0], steps[1], tables, spans)
        if offset is not None:
            return replace(found, offset=check_sides("offset", offset, count))
        sides = zip(queries, steps[0], keys, steps[1], strict=True)
        if matters and not all(same_length(n * step, m * other) for n, step, m, other in sides):
            zeros, further = found.offset, "(b, c)" if count == 2 else f"{count} numbers"
            raise ValueError(
                f"`offset` must be given where the grids differ: {zeros} if both begin at one place, {further} for "
                "queries that begin so much further along each axis, got offset=None for "
                f"q_grid={queries} and k_grid={keys}"
            )
        return found

    @property
    def axes(self) -> range:
        """The axes."""
        return range(len(self.queries))

    @property
    def n_queries(self) -> int:
        """How many queries are on the grid."""
        return math.prod(self.queries)

    @property
    def n_keys(self) -> int:
        """The number of keys on their grid."""
        return math.prod(self.keys)

    def cut(self, top: int, bottom: int, first: int, last: int) -> Grids:
        """Return the grids of the queries' rows ``top … bottom - 1`` and of the keys' rows ``first … last - 1``."""
        offset = self.offset[0] + top * self.q_step[0] - first * self.k_step[0]
        queries, keys = (bottom - top, *self.queries[1:]), (last - first, *self.keys[1:])
        return replace(self, queries=queries, keys=keys, offset=(offset, *self.offset[1:]))

    def check_reach(self, name: str, axis: int, span: Span, seen: Surroundings) -> None:
        """Refuse a table of an axis that is too short for what some query sees."""
        n, m = extent(self.queries[axis], self.q_step[axis]), extent(self.keys[axis], self.k_step[axis])
        along = Visibility(n, m, self.offset[axis], *seen.reach(axis))
        if seen.neighborhood is None:
            along.check_reach(name, span, span_name=self.spans[axis])
        elif span.beyond == "error":
            along.refuse_unreached(name, span, *seen.positions(self, axis), span_name=self.spans[axis])


@dataclass(frozen=True, slots=True)
class Surroundings:
    """Who sees whom along each axis: a window around the query, or a neighborhood that shifts at borders."""

    window: tuple[tuple[int | None, int | None], ...] | None = None
    neighborhood: Sides | None = None

    @classmethod
    def of(cls, window: Any, neighborhood: Any, grids: Grids) -> Surroundings:
        """Return what a call says, checked."""
        count = len(grids.queries)
        if window is not None and neighborhood is not None:
            raise ValueError(f"`neighborhood` must be None with `window`, got {describe(neighborhood)}")
        if window is not None:
            if not isinstance(window, (tuple, list)) or len(window) != count:
                of = "((up, down), (left, right))" if count == 2 else f"{count} pairs, one for each axis,"
                raise TypeError(f"`window` must be None or {of} of ints >= 0 or None, got {describe(window)}")
            sides = (check_window(f"window[{axis}]", window[axis]) or (None, None) for axis in grids.axes)
            return cls(window=tuple(sides))
        if neighborhood is None:
            return cls()
        sizes = check_sides("neighborhood", neighborhood, count, minimum=1)
        for name, steps in (("q_step", grids.q_step), ("k_step", grids.k_step)):
            if set(steps) != {1}:
                raise ValueError(f"`{name}` must be {(1,) * count} with `neighborhood`, got {steps}")
        if not exported(*grids.keys) and any(size > m for size, m in zip(sizes, grids.keys, strict=True)):
            raise ValueError(f"`neighborhood` must be no larger than `k_grid`, {grids.keys}, got {sizes}")
        return cls(neighborhood=sizes)

    @property
    def all(self) -> bool:
        """Whether every query sees every key."""
        return self.window is None and self.neighborhood is None

    def reach(self, axis: int) -> tuple[int | None, int | None]:
        """Return how far a window reaches back and ahead along an axis."""
        return (None, None) if self.window is None else self.window[axis]

    def positions(self, grids: Grids, axis: int) -> tuple[int, int]:
        """Return the least and the greatest relative position along an axis in a neighborhood, at a border too."""
        assert self.neighborhood is not None
        size, low = self.neighborhood[axis], grids.offset[axis]
        if exported(*grids.queries, *grids.keys):
            return 1 - size, size - 1
        high = low + grids.queries[axis] - 1
        first, last = (self._first(axis, place, grids.keys[axis]) for place in (low, high))
        return last - high, first + size - 1 - low

    def _first(self, axis: int, query: int, m: int) -> int:
        """Return the first key along an axis in the neighborhood of a query."""
        assert self.neighborhood is not None
        size = self.neighborhood[axis]
        return min(max(query - size // 2, 0), m - size)

    def rows(self, grids: Grids, top: int, bottom: int) -> tuple[int, int]:
        """Return which key rows of the first axis the query rows ``top … bottom - 1`` see, as a range; one at least."""
        m, step = grids.keys[0], grids.k_step[0]
        low, high = (grids.offset[0] + row * grids.q_step[0] for row in (top, bottom - 1))
        if self.neighborhood is not None:
            return self._first(0, low, m), self._first(0, high, m) + self.neighborhood[0]
        left, right = self.reach(0)
        first = 0 if left is None else min(max(-(-(low - left) // step), 0), m - 1)
        last = m if right is None else min(max((high + right) // step + 1, 0), m)
        return first, max(first + 1, last)

    def visible(self, grids: Grids, rows: tuple[int, int, int, int], *, device: Any, xp: Namespace) -> Array:
        """Return which keys are seen, ``(queries, keys)``, of rows ``top, bottom, first, last`` of the first axis."""
        top, bottom, first, last = rows
        count, conditions = len(grids.queries), []
        for axis in grids.axes:
            low, high, start, stop = rows if axis == 0 else (0, grids.queries[axis], 0, grids.keys[axis])
            queries = integers(low, high, device=device, xp=xp)[:, None] * grids.q_step[axis] + grids.offset[axis]
            keys = integers(start, stop, device=device, xp=xp)[None, :] * grids.k_step[axis]
            for condition in self._along(axis, queries, keys, grids.keys[axis], xp=xp):
                places = tuple(slice(None) if place % count == axis else None for place in range(2 * count))
                conditions.append(condition[places])
        shape = (bottom - top, *grids.queries[1:], last - first, *grids.keys[1:])
        seen = (
            functools.reduce(operator.and_, conditions)
            if conditions
            else xp.ones((1,) * (2 * count), dtype=xp.bool, device=device)
        )
        whole = xp.broadcast_to(seen, shape)
        return xp.reshape(whole, (math.prod(shape[:count]), math.prod(shape[count:])))

    def _along(self, axis: int, queries: Array, keys: Array, m: int, *, xp: Namespace) -> list[Array]:
        if self.neighborhood is not None:
            size = self.neighborhood[axis]
            first = queries - size // 2
            first = xp.where(first < 0, 0, xp.where(first > m - size, m - size, first))
            return [keys >= first, keys < first + size]
        left, right = self.reach(axis)
        found = [] if left is None else [keys >= queries - left]
        return found if right is None else [*found, keys <= queries + right]


def axis_logits(
    q: Array, tables: Sequence[Array | None], spans: Sequence[Span], grids: Grids, *, xp: Namespace
) -> Array:
    """Return what tables add for every query and key, ``(…, H, queries, keys)``; one of them at least is there."""
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
    total = xp.broadcast_to(total, (*total.shape[:-count], *grids.keys))  # heads of a table may lead, one without q's
    return xp.reshape(total, (*q.shape[:-1], grids.n_keys))


def axis_bias(bias: Array, spans: Sequence[Span], grids: Grids, *, xp: Namespace) -> Array:
    """Return a bias of all axes together by query and key, ``(…, R_0, R_1, …)`` to ``(…, queries, keys)``."""
    count = len(grids.queries)
    lead = tuple(bias.shape[:-count])
    for axis in grids.axes:  # which is the first of those that are left; two take its place, at the end
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
            f"`{name}` must have an axis for heights and one for widths, (Rh, Rw) or (H, Rh, Rw): what Swin stores as "
            f"({of_cells}, H), conventions.Swin(window={grids.queries}).load brings here, got {describe(bias)}"
        )


def _hidden_beyond(span: Span, seen: Surroundings) -> Span:
    """Return a span for the numbers that are computed: beyond one that reaches what is seen, nothing is seen."""
    return span if seen.all or span.beyond != "error" else Span(span.left, span.right, "zero")


def _along(x: Array, table: Array, span: Span, grids: Grids, axis: int, *, xp: Namespace) -> Array:
    """Relative logits along one axis, (..., H, a, n, D) -> (..., H, a, n, m), where ``a`` are the others."""
    n, m, q_step, k_step = grids.queries[axis], grids.keys[axis], grids.q_step[axis], grids.k_step[axis]
    if table.ndim == 3:  # by head: the heads come before the other axes, which share them
        table = table[(slice(None), *(None,) * (len(grids.queries) - 1), ...)]
    first, places = n * q_step, extent(m, k_step)
    low = -(first + grids.offset[axis])
    high = low + first + places - 1
    columns = Table(xp.matrix_transpose(table), span.left, span.beyond).covering(low, high, xp=xp)
    logits = skew_from(columns.product(x, low, high, xp=xp), n_keys=places, first=first, step=q_step, xp=xp)
    return logits[..., ::k_step]


def extent(count: int, step: int) -> int:
    """Return how many rows of a table a row of ``count`` cells is long."""
    return (count - 1) * step + 1


def check_sides(name: str, value: Any, axes: int | None, *, minimum: int | None = None) -> Sides:
    """Return ``value`` as an int for each axis."""
    if not isinstance(value, (tuple, list)) or len(value) == 0 or (axes is not None and len(value) != axes):
        kinds = {None: "a tuple of ints, one for each axis", 2: "a pair (height, width) of ints"}
        wanted = kinds.get(axes, f"a tuple of ints, one for each of the {axes} axes")
        raise TypeError(f"`{name}` must be {wanted}, got {describe(value)}")
    return tuple(check_int(f"{name}[{index}]", side, minimum=minimum) for index, side in enumerate(value))


def check_axes(name: str, value: Any, grids: Grids, *, needed: bool = False) -> None:
    """Refuse what is not a sequence with a member for each axis; ``None`` is one unless it is ``needed``."""
    if (needed or value is not None) and (not isinstance(value, (tuple, list)) or len(value) != len(grids.queries)):
        raise TypeError(
            f"`{name}` must be a sequence with one for each of the {len(grids.queries)} axes, got {describe(value)}"
        )
