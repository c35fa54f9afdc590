"""A call of attention over a grid: its checks, and which code runs it."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Any

from relskew_core._array.checks import check_bool, check_int, check_real, describe, has_shape, is_array
from relskew_core._array.known import compiled_for_any, depending, joined
from relskew_core._array.namespace import namespace_of_arrays
from relskew_core._array.precision import cast, widened
from relskew_core._array.typing import Array, Namespace
from relskew_core._functions import grid_kernels
from relskew_core._functions.axes import check_bias, check_tables
from relskew_core._functions.grid_layout import Surroundings, check_sides
from relskew_core._functions.grid_parts import GridParts, rows_of_chunk
from relskew_core._kernel.by_head import by_head, check_by_head
from relskew_core._kernel.kinds import MASK
from relskew_core._kernel.shapes import check_shapes


def matters(window: Any, *arrays: Any) -> bool:
    """Whether a call depends on the positions of its grids."""
    return window is not None or any(x is not None for x in arrays)


@dataclass(frozen=True, slots=True)
class GridCall(GridParts):
    """A call with the arguments of the caller, which are checked and then attended with."""

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
            mask = MASK.form(MASK.check("mask", mask, q, k, xp=xp), heads=True, xp=xp)
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
        own = None if not given else q * by_head(related, q)
        sizes = (*grids.queries, *grids.keys, *grids.offset, *q.shape[:-2])
        if compiled_for_any(*sizes) and (
            not seen.all or rows_of_chunk(q, grids, seen, prefix[1], chunk_size) < grids.queries[0]
        ):  # a program for each number of chunks otherwise
            from relskew_core._functions import grid_operator  # imports torch

            q = q * by_head(factor, q)
            out, lse = grid_operator.attention(laid, q, own, k, v, seen, mask, chunk_size, return_lse=return_lse)
        else:
            parts = [part[1:] for part in laid.parts(q, own, k, v, seen, mask, factor, chunk_size, xp=xp)]
            out, lse = (joined([part[which] for part in parts], axis=which - 2, xp=xp) for which in (0, 1))
        out = cast(out, dtype, xp=xp)
        return (out, lse) if return_lse else out

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
