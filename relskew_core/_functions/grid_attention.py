"""Attention over a grid in chunks: the logits of height and width are made for some rows of queries at a time."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

from relskew_core._array.checks import check_bool, check_int, check_real, describe, is_array
from relskew_core._array.keywords import explains
from relskew_core._array.known import exported
from relskew_core._array.namespace import device, namespace_of_arrays
from relskew_core._array.nothing import depending
from relskew_core._array.precision import cast, widened
from relskew_core._array.ranks import of_rank, same_rank
from relskew_core._array.typing import Array, Namespace
from relskew_core._functions.attention import relative_attention
from relskew_core._functions.grid import (
    check_grid,
    check_grid_offset,
    check_grid_spans,
    check_pair,
    relative_logits_2d,
    toeplitz_2d,
)
from relskew_core._kernel.by_head import by_head, check_by_head
from relskew_core._kernel.shapes import check_mask, check_shapes
from relskew_core._positions.span import Span

SCRATCH_BYTES = 8 * 2**20
"""Budget of the logits of one chunk."""


@dataclass(frozen=True, slots=True)
class _Positions:
    """What positions add to the logits, made for some rows of the queries' grid at a time."""

    table_h: Array | None
    table_w: Array | None
    rel_bias: Array | None
    prefix_bias: Array | None
    span_h: Span | None
    span_w: Span | None
    q_grid: tuple[int, int]
    k_grid: tuple[int, int]
    prefix: tuple[int, int]
    offset: tuple[int, int]
    q_step: tuple[int, int]
    k_step: tuple[int, int]
    rel_scale: float | Array

    def inside(self, q: Array, top: int, bottom: int, *, xp: Namespace) -> Array | None:
        """Return the part of the grid's query rows ``top … bottom - 1``, by all keys."""
        offset = (self.offset[0] + top * self.q_step[0], self.offset[1])
        total = None
        if self.table_h is not None and self.table_w is not None:
            total = relative_logits_2d(
                self.rows(q, top, bottom) * self.rel_scale, self.table_h, self.table_w,
                q_grid=(bottom - top, self.q_grid[1]), k_grid=self.k_grid,
                span_h=self.span_h, span_w=self.span_w, offset=offset, q_step=self.q_step, k_step=self.k_step,
            )  # fmt: skip
        if self.rel_bias is not None:
            bias = toeplitz_2d(
                self.rel_bias, self.span_h, self.span_w,
                q_grid=(bottom - top, self.q_grid[1]), k_grid=self.k_grid, offset=offset,
            )  # fmt: skip
            total = bias if total is None else total + of_rank(bias, total.ndim)
        return self._with_prefix(total, 0, None, xp=xp)

    def outside(self, *, xp: Namespace) -> Array | None:
        """Return the part of the queries that stand outside the grid, by all keys."""
        return self._with_prefix(None, 2, 1, xp=xp)

    def rows(self, x: Array, top: int, bottom: int) -> Array:
        """Cut the grid's rows ``top … bottom - 1`` out of (..., prefix + h · w, D)."""
        width = self.q_grid[1]
        return x[..., self.prefix[0] + top * width : self.prefix[0] + bottom * width, :]

    def _with_prefix(self, grid: Array | None, at_prefix: int, at_grid: int | None, *, xp: Namespace) -> Array | None:
        """Put the columns of the keys outside the grid before the grid's."""
        if (grid is None and self.prefix_bias is None) or (not self.prefix[1] and at_grid is None):
            return grid
        cells = self.k_grid[0] * self.k_grid[1]
        like: Any = grid if self.prefix_bias is None else self.prefix_bias
        lead = (1,) if grid is None else tuple(grid.shape[:-1])
        if self.prefix_bias is not None and self.prefix_bias.ndim == 2 and len(lead) == 1:
            lead = (self.prefix_bias.shape[0], *lead)  # the heads differ outside the grid, if not inside
            grid = None if grid is None else xp.broadcast_to(grid, (*lead, cells))

        def columns(which: int | None, count: int) -> Array:
            if self.prefix_bias is None or which is None:
                return xp.zeros((*lead, count), dtype=like.dtype, device=device(like))
            return xp.broadcast_to(self.prefix_bias[..., None, which : which + 1], (*lead, count))

        return xp.concat(
            [columns(at_prefix, self.prefix[1]), columns(at_grid, cells) if grid is None else grid], axis=-1
        )


@explains
def relative_attention_2d(
    q: Array,
    k: Array,
    v: Array,
    table_h: Array | None = None,
    table_w: Array | None = None,
    *,
    q_grid: tuple[int, int],
    k_grid: tuple[int, int],
    span_h: Span | None = None,
    span_w: Span | None = None,
    rel_bias: Array | None = None,
    prefix: tuple[int, int] = (0, 0),
    prefix_bias: Array | None = None,
    offset: tuple[int, int] | None = None,
    q_step: tuple[int, int] = (1, 1),
    k_step: tuple[int, int] = (1, 1),
    mask: Array | None = None,
    scale: float | Array | None = None,
    rel_scale: float | Array | None = None,
    chunk_size: int | None = None,
    return_lse: bool = False,
) -> Array | tuple[Array, Array]:
    """Attend on a grid with relative heights and widths, holding some rows of the logits at a time.

    ::

        logits = scale · q·k + rel_scale · (q · e_h[r_h] + q · e_w[r_w]) + rel_bias[r_h, r_w] + mask

    Parameters
    ----------
    q : array, shape (..., H, pq + qh · qw, D)
        Queries of a real floating dtype: ``pq`` outside the grid (class tokens), then the grid row by row. The heads
        axis may be absent from all arrays.
    k : array, shape (..., Hkv, pk + kh · kw, D)
        Keys, likewise; ``H`` is a multiple of ``Hkv``.
    v : array, shape (..., Hkv, pk + kh · kw, Dv)
        Values.
    table_h, table_w : array, shape (R, D) or (H, R, D), optional
        Rows of ascending relative heights and widths; both or neither.
    q_grid, k_grid : (int, int)
        Height and width of both grids.
    span_h, span_w : Span, optional
        Which relative positions the rows of the tables and of ``rel_bias`` stand for; by default
        ``Span.full((R + 1) // 2)`` for odd ``R``.
    rel_bias : array, shape (H, Rh, Rw) or (Rh, Rw), optional
        One number for each relative height and width together (Swin, BEiT).
    prefix : (int, int), default (0, 0)
        How many queries and keys stand before the grid, outside it: no table reaches them.
    prefix_bias : array, shape (H, 3) or (3,), optional
        Bias of a query of the grid at a key outside, of a query outside at a key of the grid, of both outside (BEiT).
    offset : (int, int), optional
        Height and width of the grid's query 0 where its key 0 is at (0, 0): (0, 0) by default where both grids are of
        one size, steps counted, or where nothing depends on it; needed everywhere else.
    q_step, k_step : (int, int), default (1, 1)
        How far neighbours stand apart, in rows of the tables: keys pooled two by two (MViT) have ``k_step=(2, 2)``.
        Without ``rel_bias``.
    mask : array, optional
        Boolean (``True`` = may attend) or additive in the arrays' dtype; broadcasts to ``(..., H, Lq, Lk)``.
    scale, rel_scale : float or array of shape (H,) or (), optional
        Factors of the products; ``D ** -0.5`` and ``scale``. SAM, ViTDet and MViT have ``rel_scale=1``, Swin v2
        (cosine attention) a scale for each head.
    chunk_size : int, optional
        About how many queries are worked on together, in whole rows of the grid; by default what a scratch budget
        allows.
    return_lse : bool, default False
        Also return the log-sum-exp of the logits.

    Returns
    -------
    out : array, shape (..., H, Lq, Dv)
        In the arrays' dtype. A query that may see no key gets zeros.
    lse : array, shape (..., H, Lq)
        Only with ``return_lse``.

    Raises
    ------
    ValueError, TypeError
        If an argument does not fit, or a table with ``beyond="error"`` is too short; the message names the argument.

    Examples
    --------
    >>> import numpy as np
    >>> q = np.ones((4, 1))
    >>> v = np.asarray([[1.0], [2.0], [3.0], [4.0]])
    >>> below = np.asarray([[0.0], [0.0], [50.0]])  # the next row wins
    >>> relative_attention_2d(q, q, v, below, 0 * below, q_grid=(2, 2), k_grid=(2, 2))
    array([[3.5],
           [3.5],
           [2.5],
           [2.5]])
    """
    xp = namespace_of_arrays(
        {"q": q, "k": k, "v": v},
        {"table_h": table_h, "table_w": table_w, "rel_bias": rel_bias, "prefix_bias": prefix_bias},
    )
    q_grid, k_grid = check_grid("q_grid", q_grid), check_grid("k_grid", k_grid)
    prefix = check_pair("prefix", prefix, minimum=0)
    q_step, k_step = check_grid("q_step", q_step), check_grid("k_step", k_step)
    for name, steps in (("q_step", q_step), ("k_step", k_step)):
        if rel_bias is not None and steps != (1, 1):
            raise ValueError(f"`{name}` must be (1, 1) with `rel_bias`, got {steps}")
    matters = any(x is not None for x in (table_h, table_w, rel_bias))
    offset = check_grid_offset(offset, q_grid, k_grid, q_step, k_step, matters=matters)
    _check(q, k, q_grid, k_grid, prefix, table_h, table_w, rel_bias, prefix_bias)
    check_shapes(q, k, v)
    if rel_bias is not None:
        check_grid_spans("rel_bias", rel_bias, span_h, span_w, q_grid, k_grid, offset)
    check_bool("return_lse", return_lse)
    factor = q.shape[-1] ** -0.5 if scale is None else _check_factor("scale", scale, q, xp=xp)
    related = factor if rel_scale is None else _check_factor("rel_scale", rel_scale, q, xp=xp)
    if q.ndim == 2:  # no heads: a bias of one head loses its axis
        rel_bias = rel_bias[0, ...] if rel_bias is not None and rel_bias.ndim == 3 else rel_bias
        prefix_bias = prefix_bias[0, ...] if prefix_bias is not None and prefix_bias.ndim == 2 else prefix_bias
    dtype = q.dtype
    if mask is not None:
        mask = check_mask(mask, q, k, xp=xp)
    arrays = (q, k, v, table_h, table_w, rel_bias, prefix_bias, mask)  # sums are made here as within one call
    q, k, v, table_h, table_w, rel_bias, prefix_bias, mask = widened(arrays, dtype, xp=xp)
    factor, related = (cast(x, q.dtype, xp=xp) if is_array(x) else x for x in (factor, related))
    q = depending(q, [None if any(prefix) else prefix_bias, related if table_h is None else None], xp=xp)
    positions = _Positions(
        table_h, table_w, rel_bias, prefix_bias, span_h, span_w, q_grid, k_grid, prefix, offset,
        q_step, k_step, by_head(related, q),
    )  # fmt: skip

    parts = []

    def attend(start: int, stop: int, bias: Array | None) -> None:
        cut = mask if mask is None or mask.shape[-2] == 1 else mask[..., start:stop, :]
        parts.append(
            relative_attention(
                q[..., start:stop, :], k, v, mask=_combine(bias, cut, xp=xp),
                scale=factor, chunk_size=stop - start, return_lse=True,
            )
        )  # fmt: skip

    if prefix[0]:
        attend(0, prefix[0], positions.outside(xp=xp))
    for top, bottom in _chunks(q, k, q_grid, chunk_size):
        bias = positions.inside(q, top, bottom, xp=xp)
        attend(prefix[0] + top * q_grid[1], prefix[0] + bottom * q_grid[1], bias)
    out, lse = (xp.concat([part[which] for part in parts], axis=which - 2) for which in (0, 1))
    out = cast(out, dtype, xp=xp)
    return (out, lse) if return_lse else out


def _check_factor(name: str, x: Any, q: Array, *, xp: Namespace) -> float | Array:
    return check_by_head(name, x, q, one=True, xp=xp) if is_array(x) else check_real(name, x)


def _check(
    q: Array,
    k: Array,
    q_grid: tuple[int, int],
    k_grid: tuple[int, int],
    prefix: tuple[int, int],
    table_h: Array | None,
    table_w: Array | None,
    rel_bias: Array | None,
    prefix_bias: Array | None,
) -> None:
    for name, x, grid, outside in (("q", q, q_grid, prefix[0]), ("k", k, k_grid, prefix[1])):
        if x.ndim < 2 or x.shape[-2] != outside + grid[0] * grid[1]:
            raise ValueError(
                f"`{name}` must have {outside + grid[0] * grid[1]} positions on axis -2, {grid[0]} · {grid[1]} of its "
                f"grid and {outside} of its prefix, got {describe(x)}"
            )
    if (table_h is None) != (table_w is None):
        absent, given = ("table_h", "table_w") if table_h is None else ("table_w", "table_h")
        raise ValueError(f"`{absent}` must be given with `{given}`, got None")
    n_heads = q.shape[-3] if q.ndim > 2 else 1
    if rel_bias is not None and (rel_bias.ndim not in (2, 3) or (rel_bias.ndim == 3 and rel_bias.shape[0] != n_heads)):
        raise ValueError(f"`rel_bias` must have shape ({n_heads}, Rh, Rw) or (Rh, Rw), got {describe(rel_bias)}")
    if prefix_bias is not None and tuple(prefix_bias.shape) not in ((3,), (n_heads, 3)):
        raise ValueError(f"`prefix_bias` must have shape ({n_heads}, 3) or (3,), got {describe(prefix_bias)}")


def _combine(bias: Array | None, mask: Array | None, *, xp: Namespace) -> Array | None:
    """Add a mask to a bias; a boolean one becomes minus infinity."""
    if bias is None or mask is None:
        return mask if bias is None else bias
    if xp.isdtype(mask.dtype, "bool"):
        return xp.where(mask, bias, -math.inf)
    bias, mask = same_rank(bias, mask)
    return bias + mask


def _chunks(q: Array, k: Array, grid: tuple[int, int], chunk_size: int | None) -> Iterable[tuple[int, int]]:
    """Return which rows of the grid are worked on together, as ranges."""
    height, width = grid
    size = None if chunk_size is None else check_int("chunk_size", chunk_size, minimum=1)
    if exported(height, width, *q.shape, *k.shape):  # a program has as many chunks for any size
        return [(0, height)]
    if size is None:
        row: int = math.prod(q.shape[:-2]) * width * k.shape[-2]
        step = max(1, SCRATCH_BYTES // (4 * max(1, row)))
    else:
        step = max(1, size // width)
    return pairwise([*range(0, height, step), height])
