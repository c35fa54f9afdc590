"""Two grids: their positions, the distances of neighbours, and the visible keys along each axis."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from relskew_core._array.checks import check_int, check_window, describe
from relskew_core._array.known import exported, same_length
from relskew_core._array.namespace import is_compiling
from relskew_core._kernel.call import EVERYWHERE, Side
from relskew_core._positions.span import Span
from relskew_core._positions.visibility import Visibility

Sides = tuple[int, ...]
"""A number for each axis."""

OF_TWO = (("table_h", "table_w"), ("span_h", "span_w"))
"""The names of the arguments of functions with two axes."""


@dataclass(frozen=True, slots=True)
class Grids:
    queries: Sides
    keys: Sides
    offset: Sides
    q_step: Sides
    k_step: Sides
    tables: Sequence[str]  # the names of each axis' table and span in errors
    spans: Sequence[str]

    @classmethod
    def of(
        cls, q_grid: Any, k_grid: Any, offset: Any, q_step: Any = None, k_step: Any = None,
        *, axes: int | None = None, matters: bool = True, biased: bool = False,
    ) -> Grids:  # fmt: skip
        """Return the grids of a call, with every number checked; ``axes`` is the required number of axes, if known.

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
                f"`offset` must be given where the grids differ: {zeros} if both begin at the same place, {further} "
                "for queries that begin that much further along each axis, got offset=None for "
                f"q_grid={queries} and k_grid={keys}"
            )
        return found

    @property
    def axes(self) -> range:
        return range(len(self.queries))

    @property
    def n_queries(self) -> int:
        return math.prod(self.queries)

    def reach(self, axis: int) -> tuple[int, int]:
        """Return the first and the last relative position along an axis, whether or not it is seen."""
        low = -((self.queries[axis] - 1) * self.q_step[axis] + self.offset[axis])
        places = extent(self.queries[axis], self.q_step[axis]) + extent(self.keys[axis], self.k_step[axis])
        return low, low + places - 2

    def fit(self, spans: Sequence[Span]) -> bool:
        """Whether tables have exactly the rows that the grids use; a program must not depend on that."""
        return not is_compiling() and all(
            self.reach(axis) == (-span.left, span.right) for axis, span in enumerate(spans)
        )

    def sides(self, seen: Surroundings | None = None) -> tuple[Side, ...]:
        sides = zip(self.queries, self.keys, self.q_step, self.k_step, self.offset, strict=True)
        return tuple(Side(*side, *(() if seen is None else seen.along(axis))) for axis, side in enumerate(sides))

    def check_reach(self, name: str, axis: int, span: Span, seen: Surroundings) -> None:
        n, m = extent(self.queries[axis], self.q_step[axis]), extent(self.keys[axis], self.k_step[axis])
        along = Visibility(n, m, self.offset[axis], *seen.reach(axis))
        if seen.neighborhood is None:
            along.check_reach(name, span, span_name=self.spans[axis])
        elif span.beyond == "error":
            along.refuse_unreached(name, span, *seen.positions(self, axis), span_name=self.spans[axis])


@dataclass(frozen=True, slots=True)
class Surroundings:
    """Visibility along each axis: a window around the query, or a neighborhood that shifts at borders."""

    window: tuple[tuple[int | None, int | None], ...] | None = None
    neighborhood: Sides | None = None

    @classmethod
    def of(cls, window: Any, neighborhood: Any, grids: Grids) -> Surroundings:
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
        return self.window is None and self.neighborhood is None

    def along(self, axis: int) -> tuple[int, int, int]:
        """Return how far back and ahead a query sees along an axis, and whether that shifts at borders."""
        if self.neighborhood is not None:
            size = self.neighborhood[axis]
            return size // 2, size - 1 - size // 2, 1
        back, ahead = (EVERYWHERE if side is None else min(side, EVERYWHERE) for side in self.reach(axis))
        return back, ahead, 0

    def reach(self, axis: int) -> tuple[int | None, int | None]:
        """Return how far a window reaches back and ahead along an axis."""
        return (None, None) if self.window is None else self.window[axis]

    def positions(self, grids: Grids, axis: int) -> tuple[int, int]:
        """Return the minimum and maximum relative position along an axis of a neighborhood, including at borders."""
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


def extent(count: int, step: int) -> int:
    """Return the number of rows of a table for a side of ``count`` cells."""
    return (count - 1) * step + 1


def check_sides(name: str, value: Any, axes: int | None, *, minimum: int | None = None) -> Sides:
    if not isinstance(value, (tuple, list)) or len(value) == 0 or (axes is not None and len(value) != axes):
        kinds = {None: "a tuple of ints, one for each axis", 2: "a pair (height, width) of ints"}
        wanted = kinds.get(axes, f"a tuple of ints, one for each of the {axes} axes")
        raise TypeError(f"`{name}` must be {wanted}, got {describe(value)}")
    return tuple(check_int(f"{name}[{index}]", side, minimum=minimum) for index, side in enumerate(value))


def check_axes(name: str, value: Any, grids: Grids, *, needed: bool = False) -> None:
    """Refuse anything but a sequence with a member for each axis; ``None`` is allowed unless ``needed``."""
    if (needed or value is not None) and (not isinstance(value, (tuple, list)) or len(value) != len(grids.queries)):
        raise TypeError(
            f"`{name}` must be a sequence with one entry for each of the {len(grids.queries)} axes, got "
            f"{describe(value)}"
        )
