"""Relative logits and relative values: the two products with a table, as building blocks."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any, Literal, get_args

from relskew_core._array.checks import check_bool, check_choice, check_int, describe, explains
from relskew_core._array.known import exported, nothing
from relskew_core._array.namespace import device, namespace_of_arrays
from relskew_core._array.precision import cast, casts, integers, widened
from relskew_core._array.typing import Array, Namespace
from relskew_core._kernel.by_value import looked_up
from relskew_core._kernel.chunk import Chunk
from relskew_core._kernel.shapes import Pattern, check_tables, default_offset
from relskew_core._positions.labels import check_place, check_reach_of
from relskew_core._positions.ragged import RaggedTables, RaggedVisibility
from relskew_core._positions.skew import pad_last, skew_from, unskew, unskew_from
from relskew_core._positions.span import Span
from relskew_core._positions.table import Table
from relskew_core._positions.visibility import Visibility

Side = Literal["query", "key"]


@explains
@casts
def relative_logits(
    q: Array,
    table: Array,
    span: Span | None = None,
    *,
    n_keys: int | None = None,
    n_queries: int | None = None,
    offset: int | Sequence[int] | Array | None = None,
    causal: bool = False,
    side: Side = "query",
    positions: tuple[Array, Array] | None = None,
) -> Array:
    """Multiply each query by the table row of the relative position of each key, ``q_i · e_{j - (i + offset)}``.

    Parameters
    ----------
    q : array, shape (..., H, Lq, D) or (Lq, D)
        Queries, of a real floating dtype; with ``side="key"`` keys ``(..., H, Lk, D)``.
    table : array, shape (R, D) or (H, R, D)
        Rows of ascending relative positions, of the library, device and dtype of ``q``.
    span : Span, optional
        The relative positions of the rows; by default ``Span.causal(R)`` if ``causal``, else
        ``Span.full((R + 1) // 2)`` for odd ``R``.
    n_keys : int
        Number ``Lk`` of keys.
    n_queries : int
        Number ``Lq`` of queries, instead of ``n_keys`` with ``side="key"``.
    offset : int, or ints of the leading axes before the heads, optional
        Position of query 0, with key 0 at position 0; one for all items or one for each item of a batch. By default 0
        if there are as many queries as keys; otherwise required.
    causal : bool, default False
        Later keys are ignored: their entries are zero, for any values of the table at ``r > 0``.
    side : {"query", "key"}, default "query"
        What the table is multiplied by: with ``"key"`` the result is ``k_j · e_{j - (i + offset)}``, DeBERTa's position
        to content.
    positions : pair of integer arrays, shapes (..., Lq) or (Lq,) and (..., Lk) or (Lk,), optional
        The positions of queries and keys, in any order, instead of their numbers and ``offset``: ``r`` is the position
        of the key minus that of the query. To add a second table for another kind of position (pitch in addition to
        time), pass its logits to attention as ``mask``.

    Returns
    -------
    array, shape (..., H, Lq, Lk) or (Lq, Lk)
        Unscaled. The result is a view of the product with ``Lq + Lk`` rows of the table: nothing is gathered, and the
        product is not copied. With ``positions`` it is looked up in the product with the whole table.

    Notes
    -----
    Huang et al. 2018, equation 3 (``S_rel``); Shaw et al. 2018, equation 4 with ``beyond="clip"``; He et al. 2021,
    "DeBERTa", equation 4, third term.

    Examples
    --------
    >>> import numpy as np
    >>> q, table = np.ones((3, 1)), np.asarray([[-2.0], [-1.0], [0.0], [1.0], [2.0]])
    >>> relative_logits(q, table, n_keys=3)
    array([[ 0.,  1.,  2.],
           [-1.,  0.,  1.],
           [-2., -1.,  0.]])

    One query at position 2, as when decoding:

    >>> relative_logits(q[:1], table, n_keys=3, offset=2)
    array([[-2., -1.,  0.]])

    Keys times a table, as in DeBERTa:

    >>> relative_logits(
    ...     np.asarray([[1.0], [10.0], [100.0]]), table, n_queries=2, offset=0, side="key"
    ... )
    array([[  0.,  10., 200.],
           [ -1.,   0., 100.]])

    Positions in any order, such as the pitches of notes:

    >>> pitches = np.asarray([60, 62, 60])
    >>> relative_logits(q, table, positions=(pitches, pitches))
    array([[ 0.,  2.,  0.],
           [-2.,  0., -2.],
           [ 0.,  2.,  0.]])
    """
    xp = namespace_of_arrays({"q": q, "table": table})
    if q.ndim < 2:
        raise ValueError(f"`q` must have shape (..., heads, length, width) or (length, width), got {describe(q)}")
    check_choice("side", side, get_args(Side))
    span = _check_table(q, table, span, causal=causal, n_keys=n_keys if side == "query" else q.shape[-2])
    if table.shape[-1] != q.shape[-1]:
        raise ValueError(f"`table` must have the width of `q`, {q.shape[-1]}, got {describe(table)}")
    if positions is not None:
        for name, unused in (("n_keys", n_keys), ("n_queries", n_queries), ("offset", offset)):
            if unused is not None:
                raise ValueError(f"`{name}` follows from `positions` and must be left out, got {describe(unused)}")
        return _logits_by_value(q, table, span, positions, causal=causal, side=side, xp=xp)
    given, other = (n_keys, n_queries) if side == "query" else (n_queries, n_keys)
    name, unused = ("n_keys", "n_queries") if side == "query" else ("n_queries", "n_keys")
    if other is not None:
        raise ValueError(f"`{unused}` is the length of `q` with side={side!r} and must be None, got {describe(other)}")
    length, window = check_int(name, given, minimum=1), (None, 0) if causal else None
    if side == "query":
        return _logits(q, table, span, length, offset, window, xp=xp)
    offset = default_offset(length, q.shape[-2]) if offset is None else offset
    own = Pattern(right=0 if causal else None).of(q, length, offset, xp=xp)
    replace(own, n_queries=length, n_keys=q.shape[-2]).check_reach("table", span)
    # Seen from a key, queries are what keys are to a query, with past and future exchanged.
    mirrored, back = Span(span.right, span.left, span.beyond), (0, None) if causal else None
    # Signed integers, which those of the caller may not be.
    negative = -own.offset_by_item if isinstance(own, RaggedVisibility) else -own.offset
    return xp.matrix_transpose(_logits(q, xp.flip(table, axis=-2), mirrored, length, negative, back, xp=xp))


def _logits_by_value(
    q: Array, table: Array, span: Span, positions: Any, *, causal: bool, side: Side, xp: Namespace
) -> Array:
    if not isinstance(positions, (tuple, list)) or len(positions) != 2:
        raise TypeError(
            f"`positions` must be a pair of integer arrays, of queries and of keys, got {describe(positions)}"
        )
    lengths = (q.shape[-2], None) if side == "query" else (None, q.shape[-2])
    named = zip(("positions[0]", "positions[1]"), positions, lengths, strict=True)
    queries, keys = pair = [check_place(*each, q, xp=xp) for each in named]
    n, m = queries.shape[-1], keys.shape[-1]
    visibility = Pattern(right=0 if causal else None).of(q, m, 0, by_value=True, xp=xp)
    check_reach_of("table", span, visibility, (pair[0], pair[1]))
    dtype = q.dtype
    q, table = widened((q, table), dtype, xp=xp)
    places = (queries[..., None, :, None], keys[..., None, None, :])
    chunk = looked_up(Chunk(0, n, 0, m, -span.left, span.rows, 0), *places, span, xp=xp)
    heads = q if q.ndim > 2 else q[None, ...]
    turned = chunk if side == "query" else chunk.mirrored(0, m, xp=xp)
    columns = xp.matrix_transpose(table) if side == "query" else xp.flip(xp.matrix_transpose(table), axis=-1)
    logits = turned.absolute(xp.matmul(heads, columns), xp=xp)
    logits = chunk.poisoned(logits if side == "query" else xp.matrix_transpose(logits), xp=xp)
    seen = visibility.sees(*places, xp=xp)
    logits = logits if seen is None else xp.where(seen, logits, 0.0)
    logits = logits if q.ndim > 2 else logits[0, ...]
    return cast(logits, dtype, xp=xp)


def _logits(
    q: Array,
    table: Array,
    span: Span,
    n_keys: int,
    offset: Any,
    window: tuple[int | None, int | None] | None,
    *,
    xp: Namespace,
) -> Array:
    """Return ``q_i · e_r``, zeros where the window hides a key from a query."""
    n, m = q.shape[-2], n_keys
    visibility = Pattern(*window or ()).of(q, m, offset, xp=xp)
    visibility.check_reach("table", span)
    dtype = q.dtype
    q, table = widened((q, table), dtype, xp=xp)
    low = -(n + visibility.offset)  # a spare column, for the skew
    high = low + n + m - 1
    if isinstance(visibility, RaggedVisibility):  # hidden entries are zero already
        windows = RaggedTables(visibility, span, xp)
        table, span, visibility = windows.of(table), windows.window_span, Visibility(n, m)
    if q.ndim == 2 and table.ndim == 3:
        table = table[0, ...]
    columns = Table(xp.matrix_transpose(table), span.left, span.beyond)
    logits = skew_from(_product(q, columns, low, high, visibility, xp=xp), n_keys=m, first=n, xp=xp)
    return cast(logits, dtype, xp=xp)


def _product(q: Array, table: Table, low: int, high: int, visibility: Visibility, *, xp: Namespace) -> Array:
    """Return ``q_i · e_r`` for ``r = low … high``, zeros for positions that no query may see."""
    lowest, highest = visibility.left, visibility.right
    if exported(low, high):
        product = table.covering(low, high, xp=xp).product(q, low, high, xp=xp)
        positions = integers(low, high + 1, device=device(q), xp=xp)
        seen = visibility.sees(0 * positions, positions, xp=xp)
        return product if seen is None else xp.where(seen, product, 0.0)
    first = low if lowest is None else max(low, -lowest)
    last = high if highest is None else min(high, highest)
    if last < first:
        return nothing((*q.shape[:-1], high - low + 1), (q, table.columns), xp=xp)
    product = table.covering(first, last, xp=xp).product(q, first, last, xp=xp)
    return pad_last(product, first - low, high - last, xp=xp)


@explains
@casts
def relative_values(
    weights: Array,
    table: Array,
    span: Span | None = None,
    *,
    offset: int | Sequence[int] | Array | None = None,
    causal: bool = False,
) -> Array:
    """Sum the table rows of the relative positions of all keys, weighted, ``Σ_j w_ij · e_{j - (i + offset)}``.

    The adjoint of :func:`relative_logits` in the table's rows.

    Parameters
    ----------
    weights : array, shape (..., H, Lq, Lk) or (Lq, Lk)
        Attention weights, or anything else in absolute layout, of a real floating dtype.
    table : array, shape (R, Dv) or (H, R, Dv)
        Rows of ascending relative positions, of the library, device and dtype of ``weights``.
    span : Span, optional
        The relative positions of the rows; by default ``Span.causal(R)`` if ``causal``, else
        ``Span.full((R + 1) // 2)`` for odd ``R``.
    offset : int, or ints of the leading axes before the heads, optional
        Position of query 0, with key 0 at position 0; one for all items or one for each item of a batch. By default 0
        if there are as many queries as keys; otherwise required.
    causal : bool, default False
        Weights and rows at ``r > 0`` are ignored.

    Returns
    -------
    array, shape (..., H, Lq, Dv) or (Lq, Dv)

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
    if weights.ndim < 2 or 0 in weights.shape[-2:]:
        raise ValueError(f"`weights` must have shape (..., queries, keys), both at least 1, got {describe(weights)}")
    span = _check_table(weights, table, span, causal=causal, n_keys=weights.shape[-1])
    n, m = weights.shape[-2:]
    visibility = Pattern(right=0 if causal else None).of(weights, m, offset, name="weights", xp=xp)
    visibility.check_reach("table", span)
    dtype = weights.dtype
    weights, table = widened((weights, table), dtype, xp=xp)
    if isinstance(visibility, RaggedVisibility):  # hidden entries are zero already
        windows = RaggedTables(visibility, span, xp)
        if causal:
            weights = xp.where(visibility.mask(0, n, 0, m, xp=xp, device=device(weights)), weights, 0.0)
        table, span, causal = windows.of(table), windows.window_span, False
    if weights.ndim == 2 and table.ndim == 3:
        table = table[0, ...]
    low = -(n - 1 + visibility.offset)
    values = _mixed(weights, Table(xp.matrix_transpose(table), span.left, span.beyond), low, causal=causal, xp=xp)
    return cast(values, dtype, xp=xp)


def _mixed(weights: Array, table: Table, low: int, *, causal: bool, xp: Namespace) -> Array:
    """Return ``Σ_j w_ij · e_r``, where the last query and the first key have the relative position ``low``."""
    n, m = weights.shape[-2:]
    high = low + n + m - 2
    if exported(n, m):
        columns = table.covering(low, high, xp=xp).columns
        relative = unskew(weights)
        if causal:
            seen = integers(low, high + 1, device=device(weights), xp=xp) <= 0
            columns, relative = (xp.where(seen, x, 0.0) for x in (columns, relative))
        return xp.matmul(relative, xp.matrix_transpose(columns))
    last = min(high, 0) if causal else high
    if last < low:
        return nothing((*weights.shape[:-1], table.columns.shape[-2]), (weights, table.columns), xp=xp)
    relative = unskew_from(weights, width=n + m - 1, first=n - 1, xp=xp)[..., : last - low + 1]
    return table.covering(low, last, xp=xp).mix(relative, low, last, xp=xp)


def _check_table(x: Array, table: Array, span: Span | None, *, causal: bool, n_keys: Any) -> Span:
    known = n_keys if type(n_keys) is int else None
    return check_tables({"table": table}, span, x, causal=check_bool("causal", causal), n_keys=known)
