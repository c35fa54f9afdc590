"""A call of attention over a grid, in chunks: some rows of queries with the rows of keys that they see."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any

from relskew_core._array.checks import check_bool, check_int, check_real, describe, has_shape, is_array
from relskew_core._array.known import exported
from relskew_core._array.namespace import device, namespace_of_arrays
from relskew_core._array.nothing import depending
from relskew_core._array.pieces import joined, ranges
from relskew_core._array.precision import cast, widened
from relskew_core._array.ranks import of_rank, same_rank
from relskew_core._array.typing import Array, Namespace
from relskew_core._functions import grid_kernels
from relskew_core._functions.attention import relative_attention
from relskew_core._functions.axes import axis_bias, axis_logits, check_bias, check_tables
from relskew_core._functions.grid_layout import Grids, Surroundings, check_sides
from relskew_core._kernel.by_head import by_head, check_by_head
from relskew_core._kernel.problem import form
from relskew_core._kernel.shapes import check_mask, check_shapes

SCRATCH_BYTES = 8 * 2**20
"""Budget of the logits of one chunk."""


def matters(window: Any, *arrays: Any) -> bool:
    """Whether a call depends on the positions of its grids."""
    return window is not None or any(x is not None for x in arrays)


@dataclass(frozen=True, slots=True)
class GridCall:
    """The positional part of the logits, for some rows of the queries' grid and the rows of keys that they see."""

    grids: Grids
    tables: tuple[Array | None, ...]
    spans: Any
    rel_bias: Array | None
    prefix: Any
    prefix_bias: Array | None

    def attend(
        self,
        q: Array,
        k: Array,
        v: Array,
        seen: Surroundings,
        *,
        mask: Array | None,
        scale: Any,
        rel_scale: Any,
        chunk_size: int | None,
        return_lse: bool,
    ) -> Array | tuple[Array, Array]:
        """Check the call and attend, chunk by chunk."""
        grids, named = self.grids, dict(zip(self.grids.tables, self.tables, strict=True))
        optional = {**named, "rel_bias": self.rel_bias, "prefix_bias": self.prefix_bias}
        xp = namespace_of_arrays({"q": q, "k": k, "v": v}, optional)
        prefix = check_sides("prefix", self.prefix, 2, minimum=0)
        self._check(q, k, prefix)
        check_shapes(q, k, v)
        spans = check_tables(q, self.tables, self.spans, grids, seen)
        bias_spans = None
        if self.rel_bias is not None:
            bias_spans = check_bias("rel_bias", self.rel_bias, self.spans, grids, seen)
        check_bool("return_lse", return_lse)
        if chunk_size is not None:
            check_int("chunk_size", chunk_size, minimum=1)
        factor = q.shape[-1] ** -0.5 if scale is None else _check_factor("scale", scale, q, xp=xp)
        related = factor if rel_scale is None else _check_factor("rel_scale", rel_scale, q, xp=xp)
        rel_bias, prefix_bias = self._without_heads(q.ndim == 2)
        dtype = q.dtype
        if mask is not None:
            mask = form("mask", check_mask(mask, q, k, xp=xp), heads=True, xp=xp)
        arrays = (q, k, v, rel_bias, prefix_bias, mask, *self.tables)  # the dtype of sums must be that within one call
        q, k, v, rel_bias, prefix_bias, mask, *tables = widened(arrays, dtype, xp=xp)
        factor, related = (cast(x, q.dtype, xp=xp) if is_array(x) else x for x in (factor, related))
        unused = [None if any(prefix) else prefix_bias, related if all(table is None for table in tables) else None]
        q = depending(q, unused, xp=xp)
        laid = replace(
            self, tables=tuple(tables), spans=(spans, bias_spans), rel_bias=rel_bias, prefix=prefix,
            prefix_bias=prefix_bias,
        )  # fmt: skip
        found, given = None, () if all(table is None for table in tables) else tables
        if seen.all:
            found = grid_kernels.attend(
                q, k, v, grid_kernels.GridPair.of(grids, prefix), given, spans, rel_bias, bias_spans, prefix_bias,
                mask=mask, scale=factor, rel_scale=related, xp=xp,
            )  # fmt: skip
        if found is not None:
            out = cast(found[0], dtype, xp=xp)
            return (out, found[1]) if return_lse else out
        related = by_head(related, q)
        parts = []

        def part(
            start: int, stop: int, bias: Array | None, rows: tuple[int, int] | None, visible: Array | None
        ) -> None:
            cut = mask if mask is None or mask.shape[-2] == 1 else mask[..., start:stop, :]
            keys, values = (laid.of_rows(x, -2, rows, xp=xp) for x in (k, v))
            if cut is not None and cut.shape[-1] != 1:
                cut = laid.of_rows(cut, -1, rows, xp=xp)
            bias = _combine(bias, _both(cut, visible, xp=xp), xp=xp)
            options: Any = {"mask": bias, "scale": factor, "chunk_size": stop - start, "return_lse": True}
            parts.append(relative_attention(q[..., start:stop, :], keys, values, **options))

        if prefix[0]:
            part(0, prefix[0], laid.outside(xp=xp), None, None)
        for top, bottom in _chunks(q, grids, seen, prefix[1], chunk_size):
            rows = None if seen.all or exported(*grids.queries, *grids.keys) else seen.rows(grids, top, bottom)
            first, last = (0, grids.keys[0]) if rows is None else rows
            visible = None
            if not seen.all:
                visible = seen.visible(grids, (top, bottom, first, last), device=device(q), xp=xp)
                visible = laid.seen_before(visible, xp=xp)
            bias = laid.inside(q, related, (top, bottom, first, last), xp=xp)
            start, stop = (prefix[0] + row * (grids.n_queries // grids.queries[0]) for row in (top, bottom))
            part(start, stop, bias, None if (first, last) == (0, grids.keys[0]) else (first, last), visible)
        out, lse = (joined([done[which] for done in parts], axis=which - 2, xp=xp) for which in (0, 1))
        out = cast(out, dtype, xp=xp)
        return (out, lse) if return_lse else out

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

    def inside(self, q: Array, factor: Any, rows: tuple[int, int, int, int], *, xp: Namespace) -> Array | None:
        """Return the part for the queries on some rows of the grid, by the keys of some rows."""
        top, bottom, first, last = rows
        spans, bias_spans = self.spans
        grids = self.grids.cut(top, bottom, first, last)
        total = None
        if any(table is not None for table in self.tables):
            width = self.grids.n_queries // self.grids.queries[0]
            own = q[..., self.prefix[0] + top * width : self.prefix[0] + bottom * width, :]
            total = axis_logits(own * factor, self.tables, spans, grids, xp=xp)
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

    def _without_heads(self, none: bool) -> tuple[Array | None, Array | None]:
        """Return the biases; if the arrays have no heads axis, a bias with one head loses it."""
        axes = len(self.grids.queries)
        found = ((self.rel_bias, axes + 1), (self.prefix_bias, 2))
        rel_bias, prefix_bias = (x[0, ...] if none and x is not None and x.ndim == rank else x for x, rank in found)
        return rel_bias, prefix_bias

    def _check(self, q: Array, k: Array, prefix: tuple[int, ...]) -> None:
        grids, axes = self.grids, len(self.grids.queries)
        of_both = (("q", q, grids.queries, prefix[0]), ("k", k, grids.keys, prefix[1]))
        for name, x, grid, outside in of_both:
            if x.ndim < 2 or x.shape[-2] != outside + math.prod(grid):
                raise ValueError(
                    f"`{name}` must have {outside + math.prod(grid)} positions on axis -2, "
                    f"{' · '.join(map(str, grid))} of its grid and {outside} of its prefix, got {describe(x)}"
                )
        n_heads, bias, outer = q.shape[-3] if q.ndim > 2 else 1, self.rel_bias, self.prefix_bias
        if bias is not None and (bias.ndim not in (axes, axes + 1) or (bias.ndim > axes and bias.shape[0] != n_heads)):
            rows = "Rh, Rw" if axes == 2 else ", ".join(f"R_{axis}" for axis in grids.axes)
            raise ValueError(f"`rel_bias` must have shape ({n_heads}, {rows}) or ({rows}), got {describe(bias)}")
        if outer is not None and not has_shape(outer, (3,), (n_heads, 3)):
            raise ValueError(f"`prefix_bias` must have shape ({n_heads}, 3) or (3,), got {describe(outer)}")


def _check_factor(name: str, x: Any, q: Array, *, xp: Namespace) -> float | Array:
    return check_by_head(name, x, q, one=True, xp=xp) if is_array(x) else check_real(name, x)


def _both(mask: Array | None, visible: Array | None, *, xp: Namespace) -> Array | None:
    """Return a mask that also hides keys outside the pattern."""
    if mask is None or visible is None:
        return visible if mask is None else mask
    mask, visible = same_rank(mask, visible)
    return mask & visible if xp.isdtype(mask.dtype, "bool") else xp.where(visible, mask, -math.inf)


def _combine(bias: Array | None, mask: Array | None, *, xp: Namespace) -> Array | None:
    """Add a mask to a bias; hidden entries of a boolean mask become minus infinity."""
    if bias is None or mask is None:
        return mask if bias is None else bias
    bias, mask = same_rank(bias, mask)
    if xp.isdtype(mask.dtype, "bool"):
        return xp.where(mask, bias, -math.inf)
    return bias + mask


def _chunks(
    q: Array, grids: Grids, seen: Surroundings, before: int, chunk_size: int | None
) -> Iterable[tuple[int, int]]:
    """Return the rows of the first axis that are processed together, as ranges."""
    height, inner = grids.queries[0], math.prod(grids.queries[1:])
    if exported(*grids.queries, *grids.keys, *q.shape):  # a program has the same number of chunks for all sizes
        return [(0, height)]
    if chunk_size is not None:
        step = max(1, chunk_size // inner)
    else:
        left, right = seen.reach(0)
        reach = grids.keys[0] if left is None or right is None else min(grids.keys[0], left + right + 1)
        reach = reach if seen.neighborhood is None else seen.neighborhood[0]
        row: int = math.prod(q.shape[:-2]) * inner * (before + reach * math.prod(grids.keys[1:]))
        step = max(1, SCRATCH_BYTES // (4 * max(1, row)))
        if reach < grids.keys[0]:
            step = max(1, min(step // 2, reach))  # a chunk of `reach` rows sees about twice as many
    if seen.all:
        return ranges(height, step)
    # torch.compile makes a program for each height: it would take minutes to trace windows of any height
    return pairwise([*range(0, height, step), height])
