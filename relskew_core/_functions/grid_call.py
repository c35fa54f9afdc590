"""A call of attention over a grid: its checks, and the form in which kernels receive it."""

from __future__ import annotations

import math
from array import array
from collections.abc import Hashable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from relskew_core._array.checks import check_bool, check_int, check_real, describe, has_shape, is_array
from relskew_core._array.known import depending, varies
from relskew_core._array.namespace import device, namespace_of_arrays
from relskew_core._array.precision import cast, casts, integer, widened
from relskew_core._array.softmax import joint, log_sum_exp
from relskew_core._array.typing import Array, Namespace
from relskew_core._functions import attention, prepared
from relskew_core._functions.axes import axis_numbers, axis_tables, check_bias, check_tables
from relskew_core._functions.grid_layout import Grids, Surroundings, check_axes, check_sides
from relskew_core._kernel.by_head import by_head, check_by_head
from relskew_core._kernel.call import Operands, Options, named
from relskew_core._kernel.grids import places
from relskew_core._kernel.kinds import MASK
from relskew_core._kernel.problem import WHOLE, Problem
from relskew_core._kernel.shapes import check_shapes
from relskew_core._positions.span import Span
from relskew_core._positions.visibility import Visibility

Arrays = tuple[Array, Array, Array, Array | None, Array | None, Array | None]
"""``q``, ``k``, ``v``, ``rel_bias``, ``prefix_bias`` and ``mask``."""


def attend(arrays: Arrays, tables: Any, *options: Any, axes: int | None = None) -> Any:
    """Check a call, unless an equal one has passed, and attend.

    The options are those of :func:`relskew_core.relative_attention_nd`, in order.
    """
    kind = prepared.kind_on_grids(arrays, tables, (axes, *options))
    if kind is not None and (results := prepared.attend_on_grids(kind, arrays, tables)) is not None:
        return results
    return _attend(arrays, tables, *options, axes=axes, kind=kind)


@casts
def _attend(arrays: Arrays, tables: Any, *options: Any, axes: int | None, kind: Hashable | None) -> Any:
    call, made = _checked(arrays, tables, *options, axes=axes)
    if kind is not None and (results := prepared.remember_on_grids(kind, call, made, arrays, tables)) is not None:
        return results
    out, sums = attention.attend(call, "auto")
    return (out, log_sum_exp(sums)) if call.options.return_lse else out


@dataclass(frozen=True, slots=True)
class GridForm:
    """How the arrays of a caller become operands."""

    grids: Grids
    spans: tuple[Span, ...]  # of tables
    bias_spans: tuple[Span, ...]
    prefixed: bool  # whether there are queries or keys outside the grids
    heads: bool
    xp: Namespace
    has_tables: bool
    by_head: bool  # whether a table has a heads axis
    fits: bool  # whether there are all tables, with exactly the rows that the grids use
    bias_fits: bool

    @classmethod
    def of(
        cls, grids: Grids, tables: Sequence[Array | None], spans: tuple[Span, ...], bias_spans: tuple[Span, ...],
        *, prefixed: bool, heads: bool, xp: Namespace,
    ) -> GridForm:  # fmt: skip
        return cls(
            grids, spans, bias_spans, prefixed, heads, xp,
            has_tables=any(table is not None for table in tables),
            by_head=any(table is not None and table.ndim > 2 for table in tables),
            fits=all(table is not None for table in tables) and grids.fit(spans),
            bias_fits=grids.fit(bias_spans),
        )  # fmt: skip

    def operands(self, arrays: Arrays, tables: Sequence[Array | None]) -> Operands:
        q, k, v, rel_bias, prefix_bias, mask = arrays
        if not self.heads:
            q, k, v = q[None, ...], k[None, ...], v[None, ...]
        if mask is not None and mask.ndim < 2:
            mask = MASK.form(mask, heads=True, xp=self.xp)
        given = self.tables(tables, q) if self.has_tables else None
        if prefix_bias is not None and not self.prefixed:
            q, prefix_bias = depending(q, [prefix_bias], xp=self.xp), None
        if rel_bias is not None or prefix_bias is not None:
            rel_bias = self.numbers(rel_bias, prefix_bias)
        return Operands(q, k, v, rel_bias=rel_bias, mask=mask, axis_tables=given)

    def with_matrix(self, call: Problem) -> tuple[Matrix, Problem]:
        """Return the form of a call whose bias becomes part of the mask, and that call."""
        made = Matrix.of(self, call.given, call.options)
        plain = replace(call.options, span=Span(0, 0, "zero"), sides=())
        return made, replace(call, given=made.of_numbers(call.given), options=plain)

    def tables(self, tables: Sequence[Array | None], q: Array) -> Array:
        """Return the tables of all axes, one after the other; an axis that has none has zeros."""
        xp = self.xp
        found: Any = tables
        if not self.fits:
            cut = zip(self.grids.sides(), axis_tables(tables, self.spans, self.grids, xp=xp), strict=True)
            found = [
                xp.zeros((side.rows, q.shape[-1]), dtype=q.dtype, device=device(q)) if table is None else table
                for side, table in cut
            ]
        if self.by_head:
            found = [xp.broadcast_to(table, (q.shape[-3], *table.shape[-2:])) for table in found]
        return xp.concat(found, axis=-2)

    def numbers(self, bias: Array | None, of_prefix: Array | None) -> Array:
        """Return a bias as (1 or H, R · R' · …), with the numbers of what is outside the grids around it.

        The first and the last number are for queries before the grid and for keys before it, the last but one for both.
        """
        xp, like = self.xp, of_prefix if bias is None else bias
        assert like is not None
        row = xp.zeros((1, 1), dtype=like.dtype, device=device(like))
        if bias is not None:
            count = len(self.bias_spans)
            if not self.bias_fits:
                bias = axis_numbers(bias, self.bias_spans, self.grids, xp=xp)
            row = xp.reshape(bias, (bias.shape[0] if bias.ndim > count else 1, -1))
        if not self.prefixed:
            return row
        ends = xp.zeros((1, 3), dtype=like.dtype, device=device(like)) if of_prefix is None else of_prefix
        heads = max(row.shape[0], ends.shape[0] if ends.ndim > 1 else 1)
        row, ends = (xp.broadcast_to(x, (heads, x.shape[-1])) for x in (row, ends))
        return xp.concat([ends[..., 1:2], row, ends[..., 2:3], ends[..., 0:1]], axis=-1)


@dataclass(frozen=True, slots=True)
class Matrix:
    """A form in which a small bias is part of the mask, so that nothing depends on grids."""

    form: GridForm
    index: array[int]  # the number for each pair; an `array` because libraries may bind arrays to a device or trace
    shape: tuple[int, int]

    @classmethod
    def of(cls, made: GridForm, x: Operands, options: Options) -> Matrix:
        span = options.span
        queries, keys = places(options.sides, x.q.shape[-2], x.k.shape[-2], span.rows)
        pairs = (min(max(key - query, -span.left), span.right) + span.left for query in queries for key in keys)
        return cls(made, array("q", pairs), (x.q.shape[-2], x.k.shape[-2]))

    def operands(self, arrays: Arrays, tables: Sequence[Array | None]) -> Operands:
        return self.of_numbers(self.form.operands(arrays, tables))

    def of_numbers(self, x: Operands) -> Operands:
        """Return operands whose mask includes their bias."""
        xp = self.form.xp
        index = xp.asarray(self.index, dtype=integer(xp), device=device(x.q))
        row: Any = x.rel_bias
        matrix = xp.reshape(xp.take(row, index, axis=-1), (row.shape[0], *self.shape))
        return x._replace(rel_bias=None, mask=joint(matrix, x.mask, xp=xp))


def matters(window: Any, *arrays: Any) -> bool:
    """Whether a call depends on the positions of its grids."""
    return window is not None or any(x is not None for x in arrays)


def _checked(
    arrays: Arrays, tables: Any, q_grid: Any, k_grid: Any, spans: Any, prefix: Any, offset: Any, q_step: Any,
    k_step: Any, window: Any, neighborhood: Any, scale: Any, rel_scale: Any, chunk_size: Any, return_lse: Any,
    *, axes: int | None,
) -> tuple[Problem, GridForm]:  # fmt: skip
    q, k, v, rel_bias, prefix_bias, mask = arrays
    given = tables if isinstance(tables, (tuple, list)) else (tables,)
    grids = Grids.of(
        q_grid, k_grid, offset, q_step, k_step, axes=axes, matters=matters(window, *given, rel_bias),
        biased=rel_bias is not None,
    )  # fmt: skip
    check_axes("tables", tables, grids)
    check_axes("spans", spans, grids)
    if axes == 2 and (tables[0] is None) != (tables[1] is None):
        absent, other = grids.tables if tables[0] is None else grids.tables[::-1]
        raise ValueError(f"`{absent}` must be given with `{other}`, got None")
    seen = Surroundings.of(window, neighborhood, grids)
    tables = (None,) * len(grids.queries) if tables is None else tuple(tables)
    optional = {**dict(zip(grids.tables, tables, strict=True)), "rel_bias": rel_bias, "prefix_bias": prefix_bias}
    xp = namespace_of_arrays({"q": q, "k": k, "v": v}, optional)
    prefix = check_sides("prefix", prefix, 2, minimum=0)
    _check_sizes(q, k, rel_bias, prefix_bias, grids, prefix)
    check_shapes(q, k, v)
    found = check_tables(q, tables, spans, grids, seen)
    bias_spans = () if rel_bias is None else check_bias("rel_bias", rel_bias, spans, grids, seen)
    check_bool("return_lse", return_lse)
    if chunk_size is not None:
        check_int("chunk_size", chunk_size, minimum=1)
    factor = q.shape[-1] ** -0.5 if scale is None else _check_factor("scale", scale, q, xp=xp)
    related = factor if rel_scale is None else _check_factor("rel_scale", rel_scale, q, xp=xp)
    dtype, mask = q.dtype, None if mask is None else MASK.check("mask", mask, q, k, xp=xp)
    made = GridForm.of(grids, tables, found, bias_spans, prefixed=any(prefix), heads=q.ndim > 2, xp=xp)
    applied = any(is_array(x) or varies(x) for x in (factor, related))
    if applied:  # products are not to be rounded
        q, k, v, rel_bias, prefix_bias, mask, *tables = widened(
            (q, k, v, rel_bias, prefix_bias, mask, *tables), dtype, xp=xp
        )
    if not made.has_tables:
        q = depending(q, [related], xp=xp)
    operands = made.operands((q, k, v, rel_bias, prefix_bias, mask), tables)
    if applied:
        own, rel_q = operands.q, None
        factor, related = (cast(x, own.dtype, xp=xp) if is_array(x) else x for x in (factor, related))
        if operands.axis_tables is not None:
            rel_q, related = own * by_head(related, own), 1.0
        operands = Operands(**{**named(operands), "q": own * by_head(factor, own), "rel_q": rel_q})
        factor = 1.0
    sides, row = grids.sides(seen), operands.rel_bias
    if operands.axis_tables is None and row is None and seen.all:
        sides = ()
    options = Options(
        span=Span(0, 0, "zero") if row is None else _span_of(row.shape[-1], grids, made.prefixed, bool(bias_spans)),
        visibility=Visibility(q.shape[-2], k.shape[-2], 0),
        scale=factor,
        rel_scale=related if operands.axis_tables is not None else factor,
        chunk_size=chunk_size,
        return_lse=return_lse,
        part=WHOLE,
        sides=sides,
    )
    return Problem(operands, options, xp, dtype, made.heads, None, None, None), made


def _span_of(rows: int, grids: Grids, prefixed: bool, by_cell: bool) -> Span:
    """Return the span of the numbers of a bias, as differences of the positions of cells."""
    left, step = int(prefixed), 1
    for axis in reversed(grids.axes):
        low, high = grids.reach(axis)
        left, step = left + (grids.queries[axis] - 1) * step * by_cell, step * (high - low + 1)
    return Span(left, rows - 1 - left, "clip")


def _check_sizes(
    q: Array, k: Array, bias: Array | None, outer: Array | None, grids: Grids, prefix: tuple[int, ...]
) -> None:
    axes = len(grids.queries)
    for name, x, grid, outside in (("q", q, grids.queries, prefix[0]), ("k", k, grids.keys, prefix[1])):
        if x.ndim < 2 or x.shape[-2] != outside + math.prod(grid):
            raise ValueError(
                f"`{name}` must have {outside + math.prod(grid)} positions on axis -2, "
                f"{' · '.join(map(str, grid))} of its grid and {outside} of its prefix, got {describe(x)}"
            )
    n_heads = q.shape[-3] if q.ndim > 2 else 1
    if bias is not None and (bias.ndim not in (axes, axes + 1) or (bias.ndim > axes and bias.shape[0] != n_heads)):
        rows = "Rh, Rw" if axes == 2 else ", ".join(f"R_{axis}" for axis in grids.axes)
        raise ValueError(f"`rel_bias` must have shape ({n_heads}, {rows}) or ({rows}), got {describe(bias)}")
    if outer is not None and not has_shape(outer, (3,), (n_heads, 3)):
        raise ValueError(f"`prefix_bias` must have shape ({n_heads}, 3) or (3,), got {describe(outer)}")


def _check_factor(name: str, x: Any, q: Array, *, xp: Namespace) -> float | Array:
    return check_by_head(name, x, q, one=True, xp=xp) if is_array(x) else check_real(name, x)
