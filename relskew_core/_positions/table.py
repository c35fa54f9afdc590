"""The rows of a table for a run of relative positions, including positions past its ends.

Tables are held transposed, one *column* per relative position, so that one plan of integers extends a table and the
product of queries with it alike, and folds back what belongs to it.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

from relskew_core._array.checks import describe
from relskew_core._array.known import exported, joined
from relskew_core._array.namespace import device
from relskew_core._array.precision import integers
from relskew_core._array.softmax import within
from relskew_core._array.typing import Array, Namespace
from relskew_core._positions.skew import pad_last
from relskew_core._positions.span import Beyond


@dataclass(frozen=True, slots=True)
class Extension:
    """The sources of the columns ``first … last``: zeros, a repeated edge, ``start … stop - 1``, an edge, zeros."""

    zeros_before: int
    edge_before: int
    start: int
    stop: int
    edge_after: int
    zeros_after: int

    @classmethod
    def of(cls, left: int, rows: int, beyond: Beyond, first: int, last: int) -> Extension:
        """Plan the positions ``first … last`` of a table whose column ``c`` is for ``c - left``."""
        low, high = first + left, last + left
        if high < 0:  # all positions are before the table
            return cls._beyond(0, beyond, last - first + 1)
        if low >= rows:  # all positions are after it
            return cls._beyond(rows - 1, beyond, last - first + 1)
        start, stop = max(low, 0), min(high + 1, rows)
        before, after = start - low, high + 1 - stop
        if beyond == "clip":
            return cls(0, before, start, stop, after, 0)
        return cls(before, 0, start, stop, 0, after)

    @classmethod
    def _beyond(cls, edge: int, beyond: Beyond, count: int) -> Extension:
        if beyond == "clip":
            return cls(0, count - 1, edge, edge + 1, 0, 0)
        return cls(count, 0, edge, edge, 0, 0)

    def widen(self, core: Array, *, axis: int = -1, xp: Namespace) -> Array:
        """Extend ``stop - start`` columns, or rows along ``axis=-2``, to all planned ones; a view if none are added."""

        def run(length: int) -> tuple[int, ...]:
            return (*core.shape[:-1], length) if axis == -1 else (*core.shape[:-2], length, core.shape[-1])

        def edge(place: slice, length: int) -> Array:
            return xp.broadcast_to(core[..., place] if axis == -1 else core[..., place, :], run(length))

        def zeros(length: int) -> Array:
            return xp.zeros(run(length), dtype=core.dtype, device=device(core))

        pieces = [
            zeros(self.zeros_before) if self.zeros_before else None,
            edge(slice(0, 1), self.edge_before) if self.edge_before else None,
            core,
            edge(slice(-1, None), self.edge_after) if self.edge_after else None,
            zeros(self.zeros_after) if self.zeros_after else None,
        ]
        return joined([piece for piece in pieces if piece is not None], axis=axis, xp=xp)

    def place(self, core: Array, rows: int, *, xp: Namespace) -> Array:
        """Put (..., stop - start) columns at their places among ``rows``, zeros elsewhere."""
        return pad_last(core, self.start, rows - self.stop, xp=xp)

    def fold(self, wide: Array, *, xp: Namespace) -> Array:
        """Return the adjoint of :meth:`widen`: sum the planned columns into (..., stop - start)."""
        begin = self.zeros_before + self.edge_before
        end = begin + self.stop - self.start
        core = wide[..., begin:end]
        if self.edge_before:
            edge = xp.sum(wide[..., self.zeros_before : begin + 1], axis=-1, keepdims=True)
            core = xp.concat([edge, core[..., 1:]], axis=-1)
        if self.edge_after:
            edge = core[..., -1:] + xp.sum(wide[..., end : end + self.edge_after], axis=-1, keepdims=True)
            core = xp.concat([core[..., :-1], edge], axis=-1)
        return core


@dataclass(frozen=True, slots=True)
class Table:
    """A table by columns, shape (..., D, rows); column ``c`` is for the relative position ``c - left``."""

    columns: Array
    left: int
    beyond: Beyond
    extension: Extension | None = None  # how the columns were extended from the caller's table, if they were
    rows: int = 0  # of the caller's table, if its columns were extended

    def plan(self, first: int, last: int) -> Extension:
        return Extension.of(self.left, self.columns.shape[-1], self.beyond, first, last)

    def covering(self, first: int, last: int, *, xp: Namespace) -> Table:
        """Return a table whose chunks are views, extended once to ``first … last`` unless it is much shorter.

        Of a short table it costs less to multiply what is there and to extend the products.
        """
        if exported(first, last):
            return self.looked_up(first, last, xp=xp)
        if 2 * self.columns.shape[-1] <= last - first + 1:
            return self
        return self._extended(self.plan(first, last), first, xp=xp)

    def seen(self, first: int, last: int, reach: tuple[int, int], *, xp: Namespace) -> Table:
        """Return a table extended once to ``first … last``, with zeros for all that is outside of ``reach``."""
        plan = self.plan(*reach)
        before, after = plan.zeros_before + reach[0] - first, plan.zeros_after + last - reach[1]
        return self._extended(replace(plan, zeros_before=before, zeros_after=after), first, xp=xp)

    def _extended(self, extension: Extension, first: int, *, xp: Namespace) -> Table:
        # By rows, in the memory order of the caller's table; columns would be copied across it.
        rows = xp.matrix_transpose(self.columns[..., extension.start : extension.stop])
        columns = xp.matrix_transpose(extension.widen(rows, axis=-2, xp=xp))
        return Table(columns, -first, "zero", extension, self.columns.shape[-1])

    def looked_up(self, first: int, last: int, *, xp: Namespace) -> Table:
        """Return a table of ``first … last`` for any number of rows: NaN past the end with ``beyond="error"``."""
        rows = self.columns.shape[-1]
        places = integers(first + self.left, last + 1 + self.left, device=device(self.columns), xp=xp)
        columns = xp.take(self.columns, within(places, rows, xp=xp), axis=-1)
        if self.beyond == "error" and not xp.isdtype(self.columns.dtype, "real floating"):
            raise ValueError(
                "a table of integers with beyond='error' cannot be exported for other lengths, because no integer "
                f"can mark the end of the table, got {describe(self.columns)}: choose beyond='clip' or 'zero'"
            )
        if self.beyond != "clip":
            there = xp.logical_and(places >= 0, places < rows)
            columns = xp.where(there, columns, 0.0 if self.beyond == "zero" else math.nan)
        return Table(columns, -first, "zero")

    def gradient(self, columns: Array, *, xp: Namespace) -> Array:
        """Convert the gradient of the columns to that of the caller's table, (..., rows, D)."""
        if self.extension is not None:
            core = self.extension.fold(columns, xp=xp)
            columns = self.extension.place(core, self.rows, xp=xp)
        return xp.matrix_transpose(columns)

    def product(self, q: Array, first: int, last: int, *, xp: Namespace) -> Array:
        """Return ``q · e_r`` for ``r = first … last``: (..., n, D) -> (..., n, last - first + 1)."""
        extension = self.plan(first, last)
        return extension.widen(xp.matmul(q, self.columns[..., extension.start : extension.stop]), xp=xp)

    def mix(self, weights: Array, first: int, last: int, *, looked_up: bool = False, xp: Namespace) -> Array:
        """Return ``Σ_r w_r e_r`` over ``r = first … last``: (..., n, last - first + 1) -> (..., n, D).

        Some of those that are looked up may be seen by no query.
        """
        extension = self.plan(first, last)
        core, columns = extension.fold(weights, xp=xp), self.columns[..., extension.start : extension.stop]
        columns = weighed(columns, core, xp=xp) if looked_up else columns
        return xp.matmul(core, xp.matrix_transpose(columns))

    def spread(self, first: int, last: int, *, xp: Namespace) -> Array:
        extension = self.plan(first, last)
        return extension.widen(self.columns[..., extension.start : extension.stop], xp=xp)


def weighed(columns: Array, weights: Array, *, xp: Namespace) -> Array:
    """Return columns (D, c) or (H, D, c), zeros for those without a weight in (..., H, n, c): they may contain NaN."""
    kept = (weights.ndim - 1,) if columns.ndim == 2 else (weights.ndim - 3, weights.ndim - 1)
    some = xp.any(weights != 0, axis=tuple(axis for axis in range(weights.ndim) if axis not in kept))
    return xp.where(some[..., None, :], columns, 0.0)
