"""A bias by relative position as a matrix, for attention that only accepts a matrix.

``relative_attention`` takes the bias itself as ``rel_bias`` and reads it inside its loop over chunks.
"""

from __future__ import annotations

from relskew_core._array.checks import check_bool, check_int, describe, explains
from relskew_core._array.known import exported, nothing
from relskew_core._array.namespace import device, namespace_of_arrays
from relskew_core._array.precision import integers
from relskew_core._array.typing import Array, Namespace
from relskew_core._kernel.grids import diagonals
from relskew_core._kernel.shapes import default_offset, default_span
from relskew_core._positions.skew import pad_last
from relskew_core._positions.span import Span, span_hint
from relskew_core._positions.table import Extension, Table
from relskew_core._positions.visibility import Visibility


@explains
def toeplitz(
    bias: Array,
    span: Span | None = None,
    *,
    n_queries: int,
    n_keys: int,
    offset: int | None = None,
    causal: bool = False,
) -> Array:
    """Write a bias by relative position as a matrix by query and key, without an index matrix and without a gather.

    Every diagonal of the result is one number of ``bias``::

        r:  -1  0  1              j:  0  1  2
             a  b  c         i=0      b  c  0
                       ->    i=1      a  b  c      (beyond="zero")
                             i=2      0  a  b

    Parameters
    ----------
    bias : array, shape (..., H, R) or (R,)
        Numbers of ascending relative positions, of any dtype.
    span : Span, optional
        Their relative positions; by default ``Span.causal(R)`` if ``causal``, else
        ``Span.full((R + 1) // 2)`` for odd ``R``.
    n_queries, n_keys : int
        Numbers of queries and keys, at least 1.
    offset : int, optional
        Position of query 0, with key 0 at position 0. By default 0 if there are as many queries as keys; otherwise
        required.
    causal : bool, default False
        Later keys are ignored: their entries are zero, for any values of ``bias`` at ``r > 0``.

    Returns
    -------
    array, shape (..., H, n_queries, n_keys) or (n_queries, n_keys)
        In NumPy and CuPy, a read-only view of the ``n_queries + n_keys - 1`` numbers that occur, with no matrix in
        memory. In torch, one copy of the size of the result; in other libraries, one copy of
        ``n_queries · (n_queries + n_keys)`` numbers.

    Examples
    --------
    >>> import numpy as np
    >>> toeplitz(np.asarray([-1, 0, 1]), Span(1, 1, "zero"), n_queries=3, n_keys=3)
    array([[ 0,  1,  0],
           [-1,  0,  1],
           [ 0, -1,  0]])
    >>> toeplitz(np.asarray([5, 7]), Span(1, 0, "clip"), n_queries=1, n_keys=4, offset=3)
    array([[5, 5, 5, 7]])
    """
    xp = namespace_of_arrays({"bias": bias}, floating=False)
    if bias.ndim < 1 or bias.shape[-1] < 1:
        raise ValueError(f"`bias` must have shape (..., H, R) or (R,) with R >= 1, got {describe(bias)}")
    n, m = check_int("n_queries", n_queries, minimum=1), check_int("n_keys", n_keys, minimum=1)
    span = check_span("bias", bias.shape[-1], span, causal=check_bool("causal", causal), n_keys=m)
    offset = default_offset(n, m) if offset is None else check_int("offset", offset)
    Visibility(n, m, offset, right=0 if causal else None).check_reach("bias", span)
    low = -(n - 1 + offset)
    return diagonals(bias_between(bias, span, low, low + n + m - 2, causal=causal, xp=xp), n, m, xp=xp)


def check_span(
    name: str, rows: int, span: Span | None, *, causal: bool = False, n_keys: int | None = None, span_name: str = "span"
) -> Span:
    if span is None:
        return default_span(name, rows, causal=causal, n_keys=n_keys, span_name=span_name)
    if not isinstance(span, Span):
        raise TypeError(f"`{span_name}` must be a Span or None{span_hint(span)}, got {describe(span)}")
    if rows != span.rows:
        raise ValueError(f"`{name}` must have the {span.rows} rows of {span}, got {rows}")
    return span


def bias_between(bias: Array, span: Span, low: int, high: int, *, causal: bool = False, xp: Namespace) -> Array:
    """Return the numbers of the relative positions ``low … high``, shape (..., high - low + 1)."""
    if exported(low, high):
        row = Table(bias, span.left, span.beyond).covering(low, high, xp=xp).columns
        return xp.where(integers(low, high + 1, device=device(bias), xp=xp) <= 0, row, 0) if causal else row
    last = min(high, 0) if causal else high
    if last < low:
        return nothing((*bias.shape[:-1], high - low + 1), (bias,), xp=xp)
    extension = Extension.of(span.left, span.rows, span.beyond, low, last)
    return pad_last(extension.widen(bias[..., extension.start : extension.stop], xp=xp), 0, high - last, xp=xp)
