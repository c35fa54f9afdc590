"""Other people's tables by bucket and by cell of a window, and back."""

from __future__ import annotations

from array_api_compat import device

from relskew_core._array.checks import check_bool, describe
from relskew_core._array.namespace import namespace_of_arrays
from relskew_core._array.typing import Array
from relskew_core._functions.buckets import deberta_buckets, t5_buckets
from relskew_core._functions.grid import check_grid
from relskew_core._positions.span import Span


def from_t5(weight: Array, *, bidirectional: bool, max_distance: int = 128) -> tuple[Array, Span]:
    """Read T5's table of buckets as a bias by relative position, for every length.

    ::

        bucket   0  1 … 15   16 17 … 31         32 buckets, bidirectional
        rel      0 -1 … far  -  +1 … far        16 is never used

    Parameters
    ----------
    weight : array, shape (num_buckets, H)
        ``relative_attention_bias.weight`` of the first layer.
    bidirectional : bool
        Encoder (True) or decoder.
    max_distance : int, default 128
        ``relative_attention_max_distance``.

    Returns
    -------
    rel_bias : array, shape (H, R)
    span : Span
        Clipped at ``max_distance``, from where on all positions share a bucket. T5 does not scale: ``scale=1``.

    Examples
    --------
    >>> import numpy as np
    >>> rel_bias, span = from_t5(np.asarray([[0.0], [1.0], [2.0], [3.0]]), bidirectional=False, max_distance=4)
    >>> rel_bias, span
    (array([[3., 3., 2., 1., 0.]]), Span(left=4, right=0, beyond='clip'))
    """
    xp = namespace_of_arrays({"weight": weight})
    if weight.ndim != 2:
        raise ValueError(f"`weight` must have shape (num_buckets, H), got {describe(weight)}")
    span = Span(max_distance, max_distance if check_bool("bidirectional", bidirectional) else 0, "clip")
    buckets = t5_buckets(span, num_buckets=weight.shape[0], max_distance=max_distance, bidirectional=bidirectional)
    return xp.matrix_transpose(_take(weight, buckets)), span


def to_t5(rel_bias: Array, span: Span, *, num_buckets: int, bidirectional: bool, max_distance: int = 128) -> Array:
    """Write a bias as T5's table of buckets; the inverse of :func:`from_t5`.

    Each bucket takes the bias of its position nearest to the query; a bucket without a position in ``span`` is zeros.

    Parameters
    ----------
    rel_bias : array, shape (H, R)
        Numbers of ascending relative positions.
    span : Span
        Which relative positions they are.
    num_buckets : int
        ``relative_attention_num_buckets``.
    bidirectional : bool
        Encoder (True) or decoder.
    max_distance : int, default 128
        ``relative_attention_max_distance``.
    """
    xp = namespace_of_arrays({"rel_bias": rel_bias})
    if rel_bias.ndim != 2 or rel_bias.shape[-1] != span.rows:
        raise ValueError(f"`rel_bias` must have shape (H, {span.rows}) for {span}, got {describe(rel_bias)}")
    buckets = t5_buckets(span, num_buckets=num_buckets, max_distance=max_distance, bidirectional=bidirectional)
    return _nearest(xp.matrix_transpose(rel_bias), span, buckets, num_buckets)


def from_deberta(table: Array, *, max_distance: int | None) -> tuple[Array, Span]:
    """Read DeBERTa's relative embeddings, projected and split into heads, as rows by relative position.

    ::

        row   0 …  S-1  S  S+1 … 2S-1        S = position_buckets
        rel  far …   1  0   -1 …  far        versions 2 and 3 share rows far away

    Parameters
    ----------
    table : array, shape (2S, D) or (H, 2S, D)
        ``pos_key`` for the product with queries, ``pos_query`` for that with keys.
    max_distance : int or None
        As :func:`relskew_core.deberta_buckets` takes it: ``None`` for version 1.

    Returns
    -------
    table : array, shape (R, D) or (H, R, D)
    span : Span
        Clipped where all further positions share a row.

    Examples
    --------
    >>> import numpy as np
    >>> table, span = from_deberta(np.asarray([[2.0], [1.0], [0.0], [-1.0]]), max_distance=None)
    >>> table[:, 0], span
    (array([-1.,  0.,  1.,  2.]), Span(left=1, right=2, beyond='clip'))
    """
    xp = namespace_of_arrays({"table": table})
    if table.ndim not in (2, 3) or table.shape[-2] % 2 or table.shape[-2] == 0:
        raise ValueError(f"`table` must have shape (2S, D) or (H, 2S, D), got {describe(table)}")
    size = table.shape[-2] // 2
    span = Span(size - 1, size, "clip") if max_distance is None else Span(max_distance, max_distance, "clip")
    rows = deberta_buckets(span, position_buckets=size, max_distance=max_distance)
    return xp.moveaxis(_take(xp.moveaxis(table, -2, 0), rows), 0, -2), span


def to_deberta(table: Array, span: Span, *, position_buckets: int, max_distance: int | None) -> Array:
    """Write rows by relative position as DeBERTa's; the inverse of :func:`from_deberta`.

    Each row takes the position nearest to the query; a row without a position in ``span`` is zeros.

    Parameters
    ----------
    table : array, shape (R, D) or (H, R, D)
        Rows of ascending relative positions.
    span : Span
        Which relative positions they are.
    position_buckets : int
        ``S``, half of the rows to write.
    max_distance : int or None
        As in :func:`from_deberta`.
    """
    xp = namespace_of_arrays({"table": table})
    if table.ndim not in (2, 3) or table.shape[-2] != span.rows:
        raise ValueError(f"`table` must have the {span.rows} rows of {span}, got {describe(table)}")
    rows = deberta_buckets(span, position_buckets=position_buckets, max_distance=max_distance)
    moved = _nearest(xp.moveaxis(table, -2, 0), span, rows, 2 * position_buckets)
    return xp.moveaxis(moved, 0, -2)


def from_swin(table: Array, *, window: tuple[int, int]) -> tuple[Array, Span, Span]:
    """Read Swin's table of a window's relative cells as a bias by relative height and width.

    ::

        row  (query - key, height + h-1) · (2w-1) + (query - key, width + w-1)
        so   the first row is the key furthest below and right, the last the one furthest above and left

    Parameters
    ----------
    table : array, shape ((2h-1) · (2w-1), H)
        ``relative_position_bias_table``.
    window : (int, int)
        Height ``h`` and width ``w``.

    Returns
    -------
    rel_bias : array, shape (H, 2h - 1, 2w - 1)
        For ``relative_attention_2d`` or ``toeplitz_2d``.
    span_h, span_w : Span
        ``Span.full(h)`` and ``Span.full(w)``.

    Examples
    --------
    >>> import numpy as np
    >>> from_swin(np.asarray([[1.0], [0.0], [-1.0]]), window=(1, 2))[0]
    array([[[-1.,  0.,  1.]]])
    """
    xp = namespace_of_arrays({"table": table})
    h, w = check_grid("window", window)
    cells = (2 * h - 1) * (2 * w - 1)
    if table.ndim != 2 or table.shape[0] != cells:
        raise ValueError(f"`table` must have shape ({cells}, H) for the window {(h, w)}, got {describe(table)}")
    grid = xp.reshape(xp.matrix_transpose(table), (table.shape[1], 2 * h - 1, 2 * w - 1))
    return xp.flip(grid, axis=(-2, -1)), Span.full(h), Span.full(w)


def to_swin(rel_bias: Array) -> Array:
    """Write a bias ``(H, 2h - 1, 2w - 1)`` as Swin's table; the inverse of :func:`from_swin`.

    Parameters
    ----------
    rel_bias : array, shape (H, 2h - 1, 2w - 1)
        Numbers of ascending relative heights and widths.
    """
    xp = namespace_of_arrays({"rel_bias": rel_bias})
    if rel_bias.ndim != 3 or not (rel_bias.shape[-2] % 2 and rel_bias.shape[-1] % 2):
        raise ValueError(f"`rel_bias` must have shape (H, 2h - 1, 2w - 1), got {describe(rel_bias)}")
    flipped = xp.flip(rel_bias, axis=(-2, -1))
    return xp.matrix_transpose(xp.reshape(flipped, (rel_bias.shape[0], -1)))


def from_beit(table: Array, *, window: tuple[int, int]) -> tuple[Array, Array, Span, Span]:
    """Read BEiT's table: Swin's rows, and three more for the class token.

    ::

        row    0 … (2h-1)(2w-1)-1   as Swin's
        row   -3                    class token as query, a patch as key
        row   -2                    a patch as query, class token as key
        row   -1                    class token to itself

    Parameters
    ----------
    table : array, shape ((2h-1) · (2w-1) + 3, H)
        ``relative_position_bias_table``.
    window : (int, int)
        Height ``h`` and width ``w`` in patches.

    Returns
    -------
    rel_bias : array, shape (H, 2h - 1, 2w - 1)
    prefix_bias : array, shape (H, 3)
        In the order of ``relative_attention_2d``: a patch at the class token, the class token at a patch, at itself.
    span_h, span_w : Span
        ``Span.full(h)`` and ``Span.full(w)``.

    Examples
    --------
    >>> import numpy as np
    >>> rel_bias, prefix_bias, *_ = from_beit(np.asarray([[5.0], [1.0], [2.0], [3.0]]), window=(1, 1))
    >>> rel_bias, prefix_bias
    (array([[[5.]]]), array([[2., 1., 3.]]))
    """
    xp = namespace_of_arrays({"table": table})
    h, w = check_grid("window", window)
    cells = (2 * h - 1) * (2 * w - 1)
    if table.ndim != 2 or table.shape[0] != cells + 3:
        raise ValueError(f"`table` must have shape ({cells} + 3, H) for the window {(h, w)}, got {describe(table)}")
    last = table[cells:, :]
    prefix = xp.concat([last[1:2, :], last[:1, :], last[2:, :]], axis=0)
    rel_bias, span_h, span_w = from_swin(table[:cells, :], window=(h, w))
    return rel_bias, xp.matrix_transpose(prefix), span_h, span_w


def to_beit(rel_bias: Array, prefix_bias: Array) -> Array:
    """Write biases as BEiT's table; the inverse of :func:`from_beit`.

    Parameters
    ----------
    rel_bias : array, shape (H, 2h - 1, 2w - 1)
        Numbers of ascending relative heights and widths.
    prefix_bias : array, shape (H, 3)
        In the order of :func:`from_beit`.
    """
    xp = namespace_of_arrays({"rel_bias": rel_bias, "prefix_bias": prefix_bias})
    table = to_swin(rel_bias)
    if tuple(prefix_bias.shape) != (rel_bias.shape[0], 3):
        raise ValueError(f"`prefix_bias` must have shape ({rel_bias.shape[0]}, 3), got {describe(prefix_bias)}")
    last = xp.matrix_transpose(prefix_bias)
    return xp.concat([table, last[1:2, :], last[:1, :], last[2:, :]], axis=0)


def _take(table: Array, rows: tuple[int, ...]) -> Array:
    """Take rows by number along the first axis: once for a table, never for a pair of positions."""
    xp = namespace_of_arrays({"table": table})
    return xp.take(table, xp.asarray(list(rows), device=device(table)), axis=0)


def _nearest(rows: Array, span: Span, numbers: tuple[int, ...], count: int) -> Array:
    """Return for each of ``count`` numbers the row nearest to ``r = 0`` that has it, zeros where none has."""
    xp = namespace_of_arrays({"rows": rows})
    nearest: dict[int, int] = {}
    for r in sorted(range(-span.left, span.right + 1), key=abs):
        nearest.setdefault(numbers[r + span.left], r + span.left)
    zeros = xp.zeros_like(rows[:1, ...])
    padded = xp.concat([rows, zeros], axis=0)
    return _take(padded, tuple(nearest.get(number, span.rows) for number in range(count)))
