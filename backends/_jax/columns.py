"""JAX: tables by columns, extended once to all positions that the chunks of a call use."""

from __future__ import annotations

from dataclasses import dataclass

import jax.numpy as jnp

from relskew_core._array.typing import Array
from relskew_core._kernel import key_side
from relskew_core._kernel.call import Options
from relskew_core._positions.skew import pad_last
from relskew_core._positions.table import Extension, Table
from relskew_core.backends._jax.loops import reach


@dataclass(frozen=True)
class Columns:
    """A table by columns, (..., D, columns), extended once to all relative positions that chunks use.

    Columns that no query sees are zeros, even where the table is NaN.
    """

    columns: Array
    low: int  # relative position of the first column
    extension: Extension
    before: int  # columns of zeros before the positions that some query sees
    seen: int  # number of those positions
    rows: int  # of the caller's table
    descending: bool = False  # by query position − key position

    @classmethod
    def of(cls, rows: Array | None, options: Options, low: int, high: int) -> Columns | None:
        """Extend a table (..., R, D) to the relative positions ``low … high``."""
        if rows is None:
            return None
        table = Table(jnp.matrix_transpose(rows), options.span.left, options.span.beyond)
        return cls._extended(table, reach(options), low, high)

    @classmethod
    def mirrored(cls, rows: Array | None, options: Options, low: int, high: int) -> Columns | None:
        """Extend a ``key_table`` (..., R, D) to query positions − key positions from ``low`` to ``high``."""
        if rows is None:
            return None
        lowest, highest = reach(options)
        table = key_side.mirrored(rows, options.span, xp=jnp)
        return cls._extended(table, (-highest, -lowest), low, high, descending=True)

    @classmethod
    def _extended(cls, table: Table, seen: tuple[int, int], low: int, high: int, **more: bool) -> Columns:
        lowest, highest = seen
        before, extension = lowest - low, table.plan(lowest, highest)
        columns = pad_last(table.spread(lowest, highest, xp=jnp), before, high - highest, xp=jnp)
        return cls(columns, low, extension, before, highest - lowest + 1, table.columns.shape[-1], **more)

    def gradient(self, columns: Array) -> Array:
        """Convert the gradient of the columns to that of the caller's table."""
        core = self.extension.fold(columns[..., self.before : self.before + self.seen], xp=jnp)
        rows = jnp.matrix_transpose(self.extension.place(core, self.rows, xp=jnp))
        return jnp.flip(rows, axis=-2) if self.descending else rows
