"""Queries and keys on a grid: tables by height and by width, joint biases, and grids with any number of axes."""

from __future__ import annotations

from collections.abc import Sequence

from relskew_core._array.checks import describe, explains
from relskew_core._array.namespace import namespace_of_arrays
from relskew_core._array.precision import cast, casts, widened
from relskew_core._array.typing import Array
from relskew_core._functions.axes import axis_numbers, axis_tables, check_bias, check_tables
from relskew_core._functions.grid_layout import Grids, Surroundings, check_axes
from relskew_core._kernel.grids import axis_bias, axis_logits
from relskew_core._positions.span import Span


@explains
@casts
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
    """Multiply each query by the table rows of the relative height and width of each key, and add both products.

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
        The relative positions of the rows; by default ``Span.full((R + 1) // 2)`` for odd ``R``.
    offset : (int, int), optional
        Height and width of query 0, with key 0 at (0, 0): a block of queries at ``(b, c)`` inside the keys' grid has
        ``(b, c)``; a block whose keys reach ``h`` further on all sides (HaloNet) has ``(h, h)``. By default (0, 0) if
        both grids have the same size, counting steps; otherwise required.
    q_step, k_step : (int, int), default (1, 1)
        Distance between neighbours, in rows of the tables: keys that are pooled two by two (MViT) have
        ``k_step=(2, 2)``.

    Returns
    -------
    array, shape (..., H, qh · qw, kh · kw) or (qh · qw, kh · kw)
        Unscaled. Besides the result, memory holds only ``qh · qw · (qh + kh + qw + kw)`` products; no table is
        gathered.

    Notes
    -----
    Bello et al. 2019, "Attention Augmented Convolutional Networks", section 3.2; Srinivas et al. 2021, "Bottleneck
    Transformers"; Li et al. 2022, "MViTv2", equation 3. Class tokens are outside the grid: see
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

    A single query in the second row, as when an image is generated cell by cell:

    >>> grids = {"q_grid": (1, 1), "k_grid": (2, 2)}
    >>> relative_logits_2d(np.ones((1, 1)), 10 * rows, rows, **grids, offset=(1, 0))
    array([[-10.,  -9.,   0.,   1.]])

    A larger grid with the same tables, clipped at distance 1:

    >>> from relskew_core import Span
    >>> spans = {"span_h": Span.clipped(1), "span_w": Span.clipped(1)}
    >>> grids = {"q_grid": (3, 3), "k_grid": (3, 3)}
    >>> relative_logits_2d(np.ones((9, 1)), 10 * rows, rows, **grids, **spans)[0]
    array([ 0.,  1.,  1., 10., 11., 11., 10., 11., 11.])
    """
    grids = Grids.of(q_grid, k_grid, offset, q_step, k_step, axes=2)
    if table_h is None and table_w is None:
        raise ValueError("`table_h` or `table_w` must be given, got None for both")
    return _logits(q, (table_h, table_w), (span_h, span_w), grids)


@explains
@casts
def relative_logits_nd(
    q: Array,
    tables: Sequence[Array | None],
    *,
    q_grid: Sequence[int],
    k_grid: Sequence[int],
    spans: Sequence[Span | None] | None = None,
    offset: Sequence[int] | None = None,
    q_step: Sequence[int] | None = None,
    k_step: Sequence[int] | None = None,
) -> Array:
    """Multiply each query by the table row of the relative position along each axis of a grid, and add the products.

    :func:`relative_logits_2d` for any number of axes: video and volumes have three.

    Parameters
    ----------
    q : array, shape (..., H, n_0 · n_1 · …, D) or (n_0 · n_1 · …, D)
        Queries row by row, of a real floating dtype.
    tables : sequence of array, shape (R, D) or (H, R, D), or None
        Rows of ascending relative positions for each axis, ``None`` for an axis without a table; at least one table is
        required.
    q_grid, k_grid : sequence of int
        Sides of the queries' and of the keys' grid; they may differ.
    spans : sequence of Span or None, optional
        The relative positions of the rows; by default ``Span.full((R + 1) // 2)`` for odd ``R``.
    offset, q_step, k_step : sequence of int, optional
        As in :func:`relative_logits_2d`, for each axis.

    Returns
    -------
    array, shape (..., H, queries, keys) or (queries, keys)
        Unscaled.

    Examples
    --------
    >>> import numpy as np
    >>> rows = np.asarray([[-1.0], [0.0], [1.0]])
    >>> grids = {"q_grid": (2, 1, 2), "k_grid": (2, 1, 2)}
    >>> relative_logits_nd(np.ones((4, 1)), [10 * rows, None, rows], **grids)[0]
    array([ 0.,  1., 10., 11.])

    One axis, which is a sequence; the table is clipped:

    >>> from relskew_core import Span
    >>> sequence = {"q_grid": (4,), "k_grid": (4,), "spans": [Span.clipped(1)]}
    >>> relative_logits_nd(np.ones((4, 1)), [rows], **sequence)[0]
    array([0., 1., 1., 1.])

    Keys that are pooled by 2 along time, so that neighbours are two frames apart:

    >>> pooled = {"q_grid": (4,), "k_grid": (2,), "k_step": (2,), "spans": [Span.full(4)]}
    >>> frames = np.arange(-3.0, 4.0)[:, None]
    >>> relative_logits_nd(np.ones((4, 1)), [frames], **pooled)
    array([[ 0.,  2.],
           [-1.,  1.],
           [-2.,  0.],
           [-3., -1.]])
    """
    return _logits(q, tables, spans, Grids.of(q_grid, k_grid, offset, q_step, k_step))


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
        Their relative positions; by default ``Span.full((R + 1) // 2)`` for odd ``R``.
    q_grid, k_grid : (int, int)
        Height and width of the queries' and of the keys' grid.
    offset : (int, int), optional
        Height and width of query 0, with key 0 at (0, 0). By default (0, 0) if both grids have the same size; otherwise
        required.

    Returns
    -------
    array, shape (..., H, qh · qw, kh · kw) or (qh · qw, kh · kw)

    Notes
    -----
    Liu et al. 2021, "Swin Transformer", equation 4; Bao et al. 2022, "BEiT". ``conventions`` converts their tables.

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
    return _matrix(bias, (span_h, span_w), Grids.of(q_grid, k_grid, offset, axes=2))


@explains
def toeplitz_nd(
    bias: Array,
    spans: Sequence[Span | None] | None = None,
    *,
    q_grid: Sequence[int],
    k_grid: Sequence[int],
    offset: Sequence[int] | None = None,
) -> Array:
    """Write a bias by the relative positions along all axes of a grid together as a matrix by query and key.

    :func:`toeplitz_2d` for any number of axes: the biases of video Swin and SwinUNETR have three.

    Parameters
    ----------
    bias : array, shape (..., H, R_0, R_1, …) or (R_0, R_1, …)
        Numbers of ascending relative positions, of any dtype: leading axes, followed by one axis for each axis of the
        grids.
    spans : sequence of Span or None, optional
        Their relative positions; by default ``Span.full((R + 1) // 2)`` for odd ``R``.
    q_grid, k_grid, offset : sequence of int
        As in :func:`toeplitz_2d`, for each axis.

    Returns
    -------
    array, shape (..., H, queries, keys) or (queries, keys)

    Notes
    -----
    Liu et al. 2022, "Video Swin Transformer", section 3.1.

    Examples
    --------
    >>> import numpy as np
    >>> bias = np.asarray([[[-10, 0, 10]], [[-1, 5, 1]], [[7, 8, 9]]])
    >>> toeplitz_nd(bias, q_grid=(2, 1, 2), k_grid=(2, 1, 2))[0]
    array([5, 1, 8, 9])
    """
    return _matrix(bias, spans, Grids.of(q_grid, k_grid, offset))


def _logits(q: Array, tables: Sequence[Array | None], spans: Sequence[Span | None] | None, grids: Grids) -> Array:
    check_axes("tables", tables, grids, needed=True)
    check_axes("spans", spans, grids)
    named = dict(zip(grids.tables, tables, strict=True))
    xp = namespace_of_arrays({"q": q}, named)
    if all(table is None for table in tables):
        raise ValueError("`tables` must have a table for at least one axis, got None")
    if q.ndim < 2 or q.shape[-2] != grids.n_queries:
        sides = " · ".join(map(str, grids.queries))
        raise ValueError(f"`q` must have shape (..., {sides}, D) for the grid {grids.queries}, got {describe(q)}")
    found = check_tables(q, tables, spans, grids, Surroundings())
    dtype = q.dtype
    q, *tables = widened((q, *tables), dtype, xp=xp)
    tables = axis_tables(tables, found, grids, xp=xp)
    return cast(axis_logits(q, tables, grids.sides(), xp=xp), dtype, xp=xp)


def _matrix(bias: Array, spans: Sequence[Span | None] | None, grids: Grids) -> Array:
    xp = namespace_of_arrays({"bias": bias}, floating=False)
    check_axes("spans", spans, grids)
    count = len(grids.queries)
    if bias.ndim < count or min(bias.shape[bias.ndim - count :]) < 1:
        rows = "Rh, Rw" if count == 2 else ", ".join(f"R_{axis}" for axis in grids.axes)
        raise ValueError(f"`bias` must have shape (..., H, {rows}) or ({rows}), got {describe(bias)}")
    found = check_bias("bias", bias, spans, grids, Surroundings())
    return axis_bias(axis_numbers(bias, found, grids, xp=xp), grids.sides(), xp=xp)
