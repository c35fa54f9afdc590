"""Queries and keys on a grid: tables of heights and widths, and biases of both together.

A grid is laid out row by row, as ``(…, h, w, D)`` flattened to ``(…, h · w, D)``. Height and width are two relative
positions; each is skewed along its own axis, and only the sum of both has an entry for every query and key.
"""

from __future__ import annotations

from typing import Any

from relskew_core._array.checks import check_int, describe
from relskew_core._array.keywords import explains
from relskew_core._array.known import exported, same_length
from relskew_core._array.namespace import namespace_of_arrays
from relskew_core._array.precision import cast, widened
from relskew_core._array.typing import Array, Namespace
from relskew_core._functions.bias import bias_between, check_span, diagonals
from relskew_core._positions.skew import skew_from
from relskew_core._positions.span import Span
from relskew_core._positions.table import Table
from relskew_core._positions.visibility import Visibility

Pair = tuple[int, int]
"""Height and width."""


@explains
def relative_logits_2d(
    q: Array,
    table_h: Array,
    table_w: Array,
    *,
    q_grid: tuple[int, int],
    k_grid: tuple[int, int],
    span_h: Span | None = None,
    span_w: Span | None = None,
    offset: tuple[int, int] | None = None,
    q_step: tuple[int, int] = (1, 1),
    k_step: tuple[int, int] = (1, 1),
) -> Array:
    """Multiply every query with the table rows of every key's relative height and relative width, and add both.

    ``logits[(y, x), (Y, X)] = q_yx · e_h[Y - (y + offset[0])] + q_yx · e_w[X - (x + offset[1])]``, with rows and
    columns of queries ``q_step`` and of keys ``k_step`` apart.

    Parameters
    ----------
    q : array, shape (..., H, qh · qw, D) or (qh · qw, D)
        Queries row by row, of a real floating dtype.
    table_h, table_w : array, shape (R, D) or (H, R, D)
        Rows of ascending relative heights (negative is above the query) and widths (negative is left of it).
    q_grid, k_grid : (int, int)
        Height and width of the queries' and of the keys' grid; they may differ.
    span_h, span_w : Span, optional
        Which relative positions the rows stand for; by default ``Span.full((R + 1) // 2)`` for odd ``R``.
    offset : (int, int), optional
        Height and width of query 0 where key 0 is at (0, 0): a block of queries at ``(b, c)`` inside the keys' grid has
        ``(b, c)``; a block whose keys reach ``h`` further on all sides (HaloNet) has ``(h, h)``. (0, 0) by default
        where both grids are of one size, steps counted, and needed where they are not.
    q_step, k_step : (int, int), default (1, 1)
        How far neighbours stand apart, in rows of the tables: keys pooled two by two (MViT) have ``k_step=(2, 2)``.

    Returns
    -------
    array, shape (..., H, qh · qw, kh · kw) or (qh · qw, kh · kw)
        Unscaled. Beside it only ``qh · qw · (qh + kh + qw + kw)`` products are held; no table is gathered.

    Raises
    ------
    ValueError, TypeError
        If an argument does not fit, or a table with ``beyond="error"`` is too short; the message names the argument.

    Notes
    -----
    Bello et al. 2019, "Attention Augmented Convolutional Networks", section 3.2; Srinivas et al. 2021, "Bottleneck
    Transformers"; Li et al. 2022, "MViTv2", equation 3. Class tokens stand outside the grid: see
    :func:`relative_attention_2d`.

    Examples
    --------
    >>> import numpy as np
    >>> rows = np.asarray([[-1.0], [0.0], [1.0]])
    >>> relative_logits_2d(np.ones((4, 1)), 10 * rows, rows, q_grid=(2, 2), k_grid=(2, 2))
    array([[  0.,   1.,  10.,  11.],
           [ -1.,   0.,   9.,  10.],
           [-10.,  -9.,   0.,   1.],
           [-11., -10.,  -1.,   0.]])
    """
    xp = namespace_of_arrays({"q": q, "table_h": table_h, "table_w": table_w})
    (qh, qw), (kh, kw) = check_grid("q_grid", q_grid), check_grid("k_grid", k_grid)
    q_step, k_step = check_grid("q_step", q_step), check_grid("k_step", k_step)
    offset = check_grid_offset(offset, (qh, qw), (kh, kw), q_step, k_step)
    if q.ndim < 2 or q.shape[-2] != qh * qw:
        raise ValueError(f"`q` must have shape (..., {qh} · {qw}, D) for the grid {(qh, qw)}, got {describe(q)}")
    span_h = _check_axis("table_h", table_h, span_h, "span_h", q)
    span_w = _check_axis("table_w", table_w, span_w, "span_w", q)
    heights = Visibility(_extent(qh, q_step[0]), _extent(kh, k_step[0]), offset[0])
    widths = Visibility(_extent(qw, q_step[1]), _extent(kw, k_step[1]), offset[1])
    heights.check_reach("table_h", span_h, span_name="span_h")
    widths.check_reach("table_w", span_w, span_name="span_w")
    dtype = q.dtype
    q, table_h, table_w = widened((q, table_h, table_w), dtype, xp=xp)
    grid = xp.reshape(q, (*q.shape[:-2], qh, qw, q.shape[-1]))
    upright = xp.moveaxis(grid, -3, -2)  # (..., qw, qh, D)
    steps = zip(q_step, k_step, strict=True)
    height = _axis_logits(upright, table_h, span_h, kh, offset[0], next(steps), xp=xp)
    height = xp.moveaxis(height, -3, -2)  # (..., qh, qw, kh)
    width = _axis_logits(grid, table_w, span_w, kw, offset[1], next(steps), xp=xp)  # (..., qh, qw, kw)
    logits = height[..., :, None] + width[..., None, :]
    logits = xp.reshape(logits, (*q.shape[:-1], kh * kw))
    return cast(logits, dtype, xp=xp)


@explains
def toeplitz_2d(
    bias: Array,
    span_h: Span | None = None,
    span_w: Span | None = None,
    *,
    q_grid: tuple[int, int],
    k_grid: tuple[int, int],
    offset: tuple[int, int] | None = None,
) -> Array:
    """Write a bias by relative height and width together as a matrix by query and key, without an index matrix.

    Parameters
    ----------
    bias : array, shape (..., H, Rh, Rw) or (Rh, Rw)
        Numbers of ascending relative heights and widths, of any dtype.
    span_h, span_w : Span, optional
        Which relative positions they stand for; by default ``Span.full((R + 1) // 2)`` for odd ``R``.
    q_grid, k_grid : (int, int)
        Height and width of the queries' and of the keys' grid.
    offset : (int, int), optional
        Height and width of query 0 where key 0 is at (0, 0): (0, 0) by default where both grids are of one size, and
        needed where they are not.

    Returns
    -------
    array, shape (..., H, qh · qw, kh · kw) or (qh · qw, kh · kw)

    Raises
    ------
    ValueError, TypeError
        If an argument does not fit, or ``bias`` is too short with ``beyond="error"``; the message names the argument.

    Notes
    -----
    Liu et al. 2021, "Swin Transformer", equation 4; Bao et al. 2022, "BEiT". ``conventions`` brings their tables.

    Examples
    --------
    >>> import numpy as np
    >>> bias = np.asarray([[-11, -10, -9], [-1, 0, 1], [9, 10, 11]])
    >>> toeplitz_2d(bias, q_grid=(2, 2), k_grid=(2, 2))
    array([[  0,   1,  10,  11],
           [ -1,   0,   9,  10],
           [-10,  -9,   0,   1],
           [-11, -10,  -1,   0]])
    """
    xp = namespace_of_arrays({"bias": bias}, floating=False)
    if bias.ndim < 2 or min(bias.shape[-2:]) < 1:
        raise ValueError(f"`bias` must have shape (..., H, Rh, Rw) or (Rh, Rw), got {describe(bias)}")
    (qh, qw), (kh, kw) = check_grid("q_grid", q_grid), check_grid("k_grid", k_grid)
    offset = check_grid_offset(offset, (qh, qw), (kh, kw))
    lead = tuple(bias.shape[:-2])
    spans = check_grid_spans("bias", bias, span_h, span_w, (qh, qw), (kh, kw), offset)
    for axis, n, m, start, span in zip((-2, -1), (qh, qw), (kh, kw), offset, spans, strict=True):
        low = -(n - 1 + start)
        row = xp.moveaxis(bias, axis, -1)
        bias = xp.moveaxis(bias_between(row, span, low, low + n + m - 2, xp=xp), -1, axis)
    wide = diagonals(bias, qw, kw, xp=xp)  # (..., Rh, qw, kw)
    full = diagonals(xp.moveaxis(wide, -3, -1), qh, kh, xp=xp)  # (..., qw, kw, qh, kh)
    first = len(lead)
    order = (*range(first), first + 2, first, first + 3, first + 1)
    return xp.reshape(xp.permute_dims(full, order), (*lead, qh * qw, kh * kw))


def check_grid_spans(
    name: str,
    bias: Array,
    span_h: Span | None,
    span_w: Span | None,
    q_grid: tuple[int, int],
    k_grid: tuple[int, int],
    offset: tuple[int, int],
) -> tuple[Span, Span]:
    """Return the spans of a bias ``(..., Rh, Rw)``, refusing those that do not fit it or the grids."""
    of_cells = (2 * q_grid[0] - 1) * (2 * q_grid[1] - 1)
    narrow = span_w is None and not exported(*q_grid, *k_grid) and bias.shape[-1] < q_grid[1] + k_grid[1] - 1
    if narrow and bias.ndim == 2 and bias.shape[0] == of_cells:
        raise ValueError(
            f"`{name}` must have an axis for heights and one for widths, (Rh, Rw) or (H, Rh, Rw): what Swin stores as "
            f"({of_cells}, H), conventions.Swin(window={q_grid}).load brings here, got {describe(bias)}"
        )
    height = check_span(name, bias.shape[-2], span_h, span_name="span_h")
    width = check_span(name, bias.shape[-1], span_w, span_name="span_w")
    for span_name, span, n, m, start in zip(("span_h", "span_w"), (height, width), q_grid, k_grid, offset, strict=True):
        Visibility(n, m, start).check_reach(name, span, span_name=span_name)
    return height, width


def _axis_logits(
    x: Array, table: Array, span: Span, m: int, offset: int, steps: tuple[int, int], *, xp: Namespace
) -> Array:
    """Relative logits along one axis, (..., H, a, n, D) -> (..., H, a, n, m), where ``a`` runs along the other one."""
    n, (q_step, k_step) = x.shape[-2], steps
    if table.ndim == 3:  # by head: the heads stand before the other axis, which shares them
        table = table[:, None, :, :]
    first, places = n * q_step, _extent(m, k_step)
    low = -(first + offset)
    high = low + first + places - 1
    columns = Table(xp.matrix_transpose(table), span.left, span.beyond).covering(low, high, xp=xp)
    logits = skew_from(columns.product(x, low, high, xp=xp), n_keys=places, first=first, step=q_step, xp=xp)
    return logits[..., ::k_step]


def _extent(count: int, step: int) -> int:
    """Return how many rows of a table a row of ``count`` cells is long."""
    return (count - 1) * step + 1


def _check_axis(name: str, table: Array, span: Span | None, span_name: str, q: Array) -> Span:
    if table.ndim not in (2, 3) or table.shape[-1] != q.shape[-1] or table.shape[-2] == 0:
        raise ValueError(
            f"`{name}` must have shape (R, D) or (H, R, D) with the width of `q`, {q.shape[-1]}, got {describe(table)}"
        )
    n_heads = q.shape[-3] if q.ndim > 2 else 1
    if table.ndim == 3 and table.shape[0] != n_heads:
        raise ValueError(f"`{name}` must have H = {n_heads} heads on its first axis, got {describe(table)}")
    return check_span(name, table.shape[-2], span, span_name=span_name)


def check_pair(name: str, value: Any, *, minimum: int | None = None) -> tuple[int, int]:
    """Return ``value`` as a pair (height, width) of ints."""
    if not isinstance(value, (tuple, list)) or len(value) != 2:
        raise TypeError(f"`{name}` must be a pair (height, width) of ints, got {describe(value)}")
    height, width = (check_int(f"{name}[{index}]", side, minimum=minimum) for index, side in enumerate(value))
    return height, width


def check_grid_offset(
    offset: Any, q_grid: Pair, k_grid: Pair, q_step: Pair = (1, 1), k_step: Pair = (1, 1), *, matters: bool = True
) -> Pair:
    """Return the offset of a grid; where none is given, (0, 0) if both grids are as large or nothing depends on it."""
    if offset is not None:
        return check_pair("offset", offset)
    sides = zip(q_grid, q_step, k_grid, k_step, strict=True)
    if matters and not all(same_length(n * step, m * other) for n, step, m, other in sides):
        raise ValueError(
            "`offset` must be given where the grids differ: (0, 0) if both begin at one place, (b, c) for queries that "
            f"begin b rows and c columns further, got offset=None for q_grid={q_grid} and k_grid={k_grid}"
        )
    return 0, 0


def check_grid(name: str, value: Any) -> tuple[int, int]:
    """Return ``value`` as the height and width of a grid, both at least 1."""
    return check_pair(name, value, minimum=1)
