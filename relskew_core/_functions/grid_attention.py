"""Attention over grids: with two axes, and with any number of axes."""

from __future__ import annotations

from collections.abc import Sequence

from relskew_core._array.checks import explains
from relskew_core._array.typing import Array
from relskew_core._functions.grid_call import attend
from relskew_core._positions.span import Span


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
    window: tuple[tuple[int | None, int | None], tuple[int | None, int | None]] | None = None,
    neighborhood: tuple[int, int] | None = None,
    mask: Array | None = None,
    scale: float | Array | None = None,
    rel_scale: float | Array | None = None,
    chunk_size: int | None = None,
    return_lse: bool = False,
) -> Array | tuple[Array, Array]:
    """Attend on a grid with relative heights and widths, materialising only some rows of the logits at a time.

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
        The relative positions of the rows of the tables and of ``rel_bias``; by default
        ``Span.full((R + 1) // 2)`` for odd ``R``.
    rel_bias : array, shape (H, Rh, Rw) or (Rh, Rw), optional
        One number for each relative height and width together (Swin, BEiT).
    prefix : (int, int), default (0, 0)
        Numbers of queries and keys that precede the grid, such as class tokens. Tables do not apply to them.
    prefix_bias : array, shape (H, 3) or (3,), optional
        Three biases: of queries in the grid to keys in the prefix, of queries in the prefix to keys in the grid, and
        within the prefix (BEiT).
    offset : (int, int), optional
        Height and width of the grid's query 0, with its key 0 at (0, 0). By default (0, 0) if both grids have the same
        size, counting steps, or if nothing depends on it; otherwise required.
    q_step, k_step : (int, int), default (1, 1)
        Distance between neighbours, in rows of the tables: keys that are pooled two by two (MViT) have
        ``k_step=(2, 2)``. Not available with ``rel_bias``.
    window : ((up, down), (left, right)), optional
        A query sees only the keys at ``-up <= r_h <= down`` and ``-left <= r_w <= right``; ``None`` is unbounded. Keys
        of the prefix are always seen.
    neighborhood : (int, int), optional
        Height and width of the area around a query that it sees. At borders the area is shifted, so that every query
        sees the same number of keys: neighborhood attention (Hassani et al. 2023), NATTEN's ``kernel_size``. Pass
        either this or ``window``. Tables must reach ``size - 1`` to both sides. Key rows that no query of a chunk sees
        cost nothing.
    mask : array, optional
        Boolean (``True`` = may attend) or additive in the arrays' dtype; broadcasts to ``(..., H, Lq, Lk)``.
    scale, rel_scale : float or array of shape (H,) or (), optional
        Factors of the products; ``D ** -0.5`` and ``scale`` by default. SAM, ViTDet and MViT use ``rel_scale=1``, and
        Swin v2 (cosine attention) uses a scale for each head.
    chunk_size : int, optional
        Approximate number of queries that are processed together, in whole rows of the grid; chosen by a scratch budget
        by default.
    return_lse : bool, default False
        Also return the log-sum-exp of the logits.

    Returns
    -------
    out : array, shape (..., H, Lq, Dv)
        In the arrays' dtype. A query that may see no key gets zeros.
    lse : array, shape (..., H, Lq)
        Only with ``return_lse``.

    See Also
    --------
    relative_attention : attention over a sequence.
    relative_attention_nd : the same for any number of axes.
    relative_logits_2d : the logits of the two tables alone.

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

    A bias by relative height and width, as in Swin; here a query prefers the key to its left:

    >>> left = np.zeros((3, 3))
    >>> left[1, 0] = 50.0
    >>> grids = {"q_grid": (2, 2), "k_grid": (2, 2)}
    >>> relative_attention_2d(q, q, v, rel_bias=left, **grids)[[1, 3], 0]
    array([1., 3.])

    A window around each query, without any table; here it is the query's row:

    >>> row = ((0, 0), (None, None))
    >>> relative_attention_2d(q, q, v, window=row, **grids)[:, 0]
    array([1.5, 1.5, 3.5, 3.5])
    """
    return attend(
        (q, k, v, rel_bias, prefix_bias, mask), (table_h, table_w), q_grid, k_grid, (span_h, span_w), prefix, offset,
        q_step, k_step, window, neighborhood, scale, rel_scale, chunk_size, return_lse, axes=2,
    )  # fmt: skip


@explains
def relative_attention_nd(
    q: Array,
    k: Array,
    v: Array,
    tables: Sequence[Array | None] | None = None,
    *,
    q_grid: Sequence[int],
    k_grid: Sequence[int],
    spans: Sequence[Span | None] | None = None,
    rel_bias: Array | None = None,
    prefix: tuple[int, int] = (0, 0),
    prefix_bias: Array | None = None,
    offset: Sequence[int] | None = None,
    q_step: Sequence[int] | None = None,
    k_step: Sequence[int] | None = None,
    window: Sequence[tuple[int | None, int | None]] | None = None,
    neighborhood: Sequence[int] | None = None,
    mask: Array | None = None,
    scale: float | Array | None = None,
    rel_scale: float | Array | None = None,
    chunk_size: int | None = None,
    return_lse: bool = False,
) -> Array | tuple[Array, Array]:
    """Attend on a grid of any number of axes: :func:`relative_attention_2d` for sequences, volumes and video.

    Parameters
    ----------
    q, k, v : array, shape (..., H, prefix + n_0 · n_1 · …, D)
        Queries, keys and values, row by row, as in :func:`relative_attention_2d`.
    tables : sequence of array, shape (R, D) or (H, R, D), or None, optional
        Rows of ascending relative positions for each axis, ``None`` for an axis without a table.
    q_grid, k_grid : sequence of int
        Sides of both grids.
    spans : sequence of Span or None, optional
        The relative positions of the rows of the tables and of ``rel_bias``.
    rel_bias : array, shape (H, R_0, R_1, …) or (R_0, R_1, …), optional
        One number for the relative positions along all axes together (video Swin, SwinUNETR).
    prefix, prefix_bias, offset, q_step, k_step : optional
        As in :func:`relative_attention_2d`; ``offset`` and the steps have a number for each axis.
    window : sequence of (int or None, int or None), optional
        How far back and ahead a query sees along each axis.
    neighborhood : sequence of int, optional
        Sizes of the area around a query that it sees, shifted at borders, as in :func:`relative_attention_2d`.
    mask, scale, rel_scale, chunk_size, return_lse : optional
        As in :func:`relative_attention_2d`.

    Returns
    -------
    out : array, shape (..., H, Lq, Dv)
        In the arrays' dtype. A query that may see no key gets zeros.
    lse : array, shape (..., H, Lq)
        Only with ``return_lse``.

    See Also
    --------
    relative_attention : attention over a sequence, with every option.
    relative_attention_2d : the same for images, with the names of two axes.
    relative_logits_nd : the logits of the tables alone.

    Notes
    -----
    Liu et al. 2022, "Video Swin Transformer", section 3.1; Hassani et al. 2023, "Neighborhood Attention Transformer",
    equations 2 and 3.

    Examples
    --------
    >>> import numpy as np
    >>> q = np.zeros((8, 1))
    >>> v = np.arange(8.0)[:, None]
    >>> grids = {"q_grid": (2, 2, 2), "k_grid": (2, 2, 2)}
    >>> row = [(0, 0), (0, 0), (None, None)]  # along the last axis alone
    >>> relative_attention_nd(q, q, v, **grids, window=row)[:, 0]
    array([0.5, 0.5, 2.5, 2.5, 4.5, 4.5, 6.5, 6.5])

    A table for one axis of three, time: a query prefers the next frame, and has no preference in the last one:

    >>> time = np.asarray([[0.0], [0.0], [50.0]])
    >>> relative_attention_nd(q + 1, q, v, [time, None, None], **grids)[:, 0]
    array([5.5, 5.5, 5.5, 5.5, 3.5, 3.5, 3.5, 3.5])

    Neighborhood attention along a sequence, shifted at its ends so that every query sees three keys:

    >>> relative_attention_nd(q, q, v, q_grid=(8,), k_grid=(8,), neighborhood=(3,))[:, 0]
    array([1., 1., 2., 3., 4., 5., 6., 6.])
    """
    return attend(
        (q, k, v, rel_bias, prefix_bias, mask), tables, q_grid, k_grid, spans, prefix, offset,
        q_step, k_step, window, neighborhood, scale, rel_scale, chunk_size, return_lse,
    )  # fmt: skip
