"""Relative logits and relative values: the two products with a table, as building blocks."""

from __future__ import annotations

from collections.abc import Sequence

from relskew_core._checks import check_int, describe
from relskew_core._namespace import device, is_half, namespace_of_arrays
from relskew_core._problem import check_tables, visibility_of
from relskew_core._rows import RowVisibility, Windows
from relskew_core._skew import pad_last, slide, unslide
from relskew_core._span import Span
from relskew_core._table import Table
from relskew_core._typing import Array


def relative_logits(
    q: Array,
    table: Array,
    span: Span | None = None,
    *,
    n_keys: int,
    offset: int | Sequence[int] | Array = 0,
    causal: bool = False,
) -> Array:
    """Multiply every query with the table row of every key's relative position, ``q_i · e_{j - (i + offset)}``.

    Parameters
    ----------
    q : array, shape (..., H, Lq, D) or (Lq, D)
        Queries, of a real floating dtype.
    table : array, shape (R, D) or (H, R, D)
        Rows of ascending relative positions, of the library, device and dtype of ``q``.
    span : Span, optional
        Which relative positions the rows stand for; by default ``Span.causal(R)`` if ``causal``, else
        ``Span.full((R + 1) // 2)`` for odd ``R``.
    n_keys : int
        Number ``Lk`` of keys.
    offset : int, or ints of the leading axes before the heads, default 0
        Position of query 0 where key 0 stands at 0; one for all or one for each item of a batch.
    causal : bool, default False
        Keys in a query's future count for nothing: zeros, whatever the table holds at ``r > 0``.

    Returns
    -------
    array, shape (..., H, Lq, Lk) or (Lq, Lk)
        Unscaled. A view of the product with ``Lq + Lk`` rows of the table: nothing is gathered, and the product is
        not copied.

    Raises
    ------
    ValueError, TypeError
        If an argument does not fit, or a table with ``beyond="error"`` is too short; the message names the argument.

    Notes
    -----
    Huang et al. 2018, equation 3 (``S_rel``); Shaw et al. 2018, equation 4 with ``beyond="clip"``.

    Examples
    --------
    >>> import numpy as np
    >>> q, table = np.ones((3, 1)), np.asarray([[-2.0], [-1.0], [0.0], [1.0], [2.0]])
    >>> relative_logits(q, table, n_keys=3)
    array([[ 0.,  1.,  2.],
           [-1.,  0.,  1.],
           [-2., -1.,  0.]])
    >>> relative_logits(q[:1], table, n_keys=3, offset=2)
    array([[-2., -1.,  0.]])
    """
    xp = namespace_of_arrays({"q": q, "table": table})
    if q.ndim < 2:
        raise ValueError(f"`q` must have shape (..., heads, length, width) or (length, width), got {describe(q)}")
    span = _check_table(q, table, span, causal=causal)
    if table.shape[-1] != q.shape[-1]:
        raise ValueError(f"`table` must have the width of `q`, {q.shape[-1]}, got {describe(table)}")
    n, m = q.shape[-2], check_int("n_keys", n_keys, minimum=1)
    visibility = visibility_of(q, m, offset, causal, xp=xp)
    visibility.check_reach("table", span)
    dtype = q.dtype
    if is_half(dtype, xp=xp):
        q, table = xp.astype(q, xp.float32), xp.astype(table, xp.float32)
    if isinstance(visibility, RowVisibility):  # what is not to be seen is zeros already
        windows = Windows(visibility, span, xp)
        table, span, causal = windows.of(table), windows.window_span, False
    if q.ndim == 2 and table.ndim == 3:
        table = table[0, ...]
    # Columns r = low … high, the first a spare one; what lies in the future of every query is zeros.
    low = -(n + visibility.offset)
    high = low + n + m - 1
    last = min(high, 0) if causal else high
    if last < low:
        product = q[..., :0]
    else:
        columns = Table(xp.matrix_transpose(table), span.left, span.beyond).covering(low, last, xp=xp)
        product = columns.product(q, low, last, xp=xp)
    x = pad_last(product, 0, high - max(last, low - 1), xp=xp) if causal else product
    logits = slide(x, n_keys=m, first=n, xp=xp)
    return logits if logits.dtype == dtype else xp.astype(logits, dtype)


def relative_values(
    weights: Array,
    table: Array,
    span: Span | None = None,
    *,
    offset: int | Sequence[int] | Array = 0,
    causal: bool = False,
) -> Array:
    """Sum the table rows of all keys' relative positions by weight, ``Σ_j w_ij · e_{j - (i + offset)}``.

    The adjoint of :func:`relative_logits` in the table's rows.

    Parameters
    ----------
    weights : array, shape (..., H, Lq, Lk) or (Lq, Lk)
        Attention weights, or anything else in absolute layout, of a real floating dtype.
    table : array, shape (R, Dv) or (H, R, Dv)
        Rows of ascending relative positions, of the library, device and dtype of ``weights``.
    span : Span, optional
        Which relative positions the rows stand for; by default ``Span.causal(R)`` if ``causal``, else
        ``Span.full((R + 1) // 2)`` for odd ``R``.
    offset : int, or ints of the leading axes before the heads, default 0
        Position of query 0 where key 0 stands at 0; one for all or one for each item of a batch.
    causal : bool, default False
        Weights and rows at ``r > 0`` count for nothing.

    Returns
    -------
    array, shape (..., H, Lq, Dv) or (Lq, Dv)

    Raises
    ------
    ValueError, TypeError
        If an argument does not fit, or a table with ``beyond="error"`` is too short; the message names the argument.

    Notes
    -----
    Shaw et al. 2018, equation 3, without their ``O(L² · D)`` gather.

    Examples
    --------
    >>> import numpy as np
    >>> table = np.asarray([[10.0], [20.0], [30.0]])  # r = -1, 0, 1
    >>> relative_values(np.asarray([[0.5, 0.5], [0.0, 1.0]]), table)
    array([[25.],
           [20.]])
    """
    xp = namespace_of_arrays({"weights": weights, "table": table})
    if weights.ndim < 2 or min(weights.shape[-2:]) < 1:
        raise ValueError(f"`weights` must have shape (..., queries, keys), both at least 1, got {describe(weights)}")
    span = _check_table(weights, table, span, causal=causal)
    n, m = weights.shape[-2:]
    visibility = visibility_of(weights, m, offset, causal, xp=xp)
    visibility.check_reach("table", span)
    dtype = weights.dtype
    if is_half(dtype, xp=xp):
        weights, table = xp.astype(weights, xp.float32), xp.astype(table, xp.float32)
    if isinstance(visibility, RowVisibility):  # what is not to be seen is zeros already
        windows = Windows(visibility, span, xp)
        if causal:
            weights = xp.where(visibility.mask(0, n, 0, m, xp=xp, device=device(weights)), weights, 0.0)
        table, span, causal = windows.of(table), windows.window_span, False
    if weights.ndim == 2 and table.ndim == 3:
        table = table[0, ...]
    low = -(n - 1 + visibility.offset)
    high = low + n + m - 2
    last = min(high, 0) if causal else high
    if last < low:
        return xp.zeros((*weights.shape[:-1], table.shape[-1]), dtype=dtype, device=device(weights))
    relative = unslide(weights, width=n + m - 1, first=n - 1, xp=xp)[..., : last - low + 1]
    columns = Table(xp.matrix_transpose(table), span.left, span.beyond).covering(low, last, xp=xp)
    values = columns.mix(relative, low, last, xp=xp)
    return values if values.dtype == dtype else xp.astype(values, dtype)


def _check_table(x: Array, table: Array, span: Span | None, *, causal: bool) -> Span:
    return check_tables({"table": table}, span, x, None, causal=causal)
