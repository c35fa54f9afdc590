"""Huang et al. 2018, "Music Transformer" (arXiv:1809.04281), as printed: relative positions of causal attention."""

from __future__ import annotations

from relskew_core._array.checks import check_int, describe
from relskew_core._array.namespace import namespace_of_arrays
from relskew_core._array.typing import Array, Namespace
from relskew_core.papers._common import check_leading, check_table, check_trailing, weigh, where_visible


def huang_mask(x: Array) -> Array:
    """Zero the upper-left triangle of ``Q·Eᵀ``, the products before the sequence starts (figure 1).

    Column ``c`` belongs to the relative position ``r = c - (L-1)``; query ``i`` has only ``i`` keys in its past, so its
    first ``L-1-i`` columns belong to no key. Time and memory ``O(L²)``.

    Parameters
    ----------
    x : array, shape (..., L, L)
        Queries against the relative positions ``-(L-1) … 0``.

    Returns
    -------
    array, shape (..., L, L)

    See Also
    --------
    huang_skew : the next step.

    Examples
    --------
    >>> import numpy as np
    >>> huang_mask(np.asarray([[-2.0, -1.0, 5.0]] * 3))
    array([[ 0.,  0.,  5.],
           [ 0., -1.,  5.],
           [-2., -1.,  5.]])
    """
    xp = namespace_of_arrays({"x": x})
    _check_square("x", x)
    return where_visible(x, 0.0, lambda i, c: i + c >= x.shape[-1] - 1, xp=xp)


def huang_skew(x: Array) -> Array:
    """Move relative logits to their keys: pad, reshape, slice (section 3.4.1, figure 1).

    1. Pad a column of zeros before the leftmost column.
    2. Reshape the ``(L, L+1)`` matrix to ``(L+1, L)``, row-major.
    3. Keep the last ``L`` rows.

    On and below the diagonal ``s[i, j] = x[i, L-1-i+j]``. The entries above it are meaningless: the padding, and
    entries of the next query, which are zero if :func:`huang_mask` ran before. Time and memory ``O(L²)``: the padded
    product is a copy.

    Parameters
    ----------
    x : array, shape (..., L, L)
        Queries against the relative positions ``-(L-1) … 0``; ``L >= 1``.

    Returns
    -------
    array, shape (..., L, L)
        Queries against keys.

    See Also
    --------
    huang_mask : masks the products first.
    relskew_core.skew : the same without a copy, for any numbers of queries and keys.

    Examples
    --------
    >>> import numpy as np
    >>> x = np.asarray([[-2.0, -1.0, 5.0]] * 3)
    >>> huang_skew(x)
    array([[ 5.,  0., -2.],
           [-1.,  5.,  0.],
           [-2., -1.,  5.]])
    >>> huang_skew(huang_mask(x))
    array([[ 5.,  0.,  0.],
           [-1.,  5.,  0.],
           [-2., -1.,  5.]])
    """
    xp = namespace_of_arrays({"x": x})
    _check_square("x", x)
    *lead, n, _ = x.shape
    padded = xp.concat([xp.zeros_like(x[..., :1]), x], axis=-1)
    flat = xp.reshape(padded, (*lead, n * (n + 1)))  # a separate step, because dask only merges and splits axes
    return xp.reshape(flat, (*lead, n + 1, n))[..., 1:, :]


def huang_skew_local(x: Array) -> Array:
    """Move relative logits to the keys of the previous block: pad twice, reshape, slice (section 3.5, figure 2).

    Local attention cuts a sequence into blocks of ``N``; each attends to itself and to the one before. Against itself
    a block is the causal case. Against the previous block nothing is masked, and key ``j`` of that block is
    ``N - j + i`` positions before query ``i`` of this one: relative positions run from ``-1`` (first query, last key)
    to ``-(2N-1)`` (last query, first key). Those are the ``2N-1`` rows of the table here, ascending, so that the first
    query starts at column ``N-1`` (``r = -N``) and each next one a column further left: ``s[i, j] = x[i, N-1-i+j]``.

    1. Pad a column of zeros after the rightmost column.
    2. Flatten, and pad ``N-1`` zeros after the end.
    3. Reshape to ``(N+1, 2N-1)``, row-major.
    4. Keep the first ``N`` rows and the last ``N`` columns.

    Time and memory ``O(N²)`` a block.

    Parameters
    ----------
    x : array, shape (..., N, 2N-1)
        Queries of a block against the relative positions ``-(2N-1) … -1``; ``N >= 1``.

    Returns
    -------
    array, shape (..., N, N)
        Queries of the block against keys of the previous block.

    See Also
    --------
    huang_local_attention : uses it for the previous block.
    relskew_core.skew : the same without a copy.

    Examples
    --------
    >>> import numpy as np
    >>> huang_skew_local(np.asarray([[-5.0, -4.0, -3.0, -2.0, -1.0]] * 3))
    array([[-3., -2., -1.],
           [-4., -3., -2.],
           [-5., -4., -3.]])
    """
    xp = namespace_of_arrays({"x": x})
    if x.ndim < 2 or x.shape[-2] < 1 or x.shape[-1] != 2 * x.shape[-2] - 1:
        raise ValueError(f"`x` must have shape (..., N, 2N-1) with N >= 1, got {describe(x)}")
    *lead, n, width = x.shape
    padded = xp.concat([x, xp.zeros_like(x[..., :1])], axis=-1)
    flat = xp.reshape(padded, (*lead, n * (width + 1)))
    flat = xp.concat([flat, xp.zeros_like(flat[..., : n - 1])], axis=-1)
    return xp.reshape(flat, (*lead, n + 1, width))[..., :n, n - 1 :]


def huang_logits(q: Array, rel_k: Array) -> Array:
    """``S^rel = Skew(Q·Eᵀ)``, unscaled, masked before the skew (section 3.4, figure 1).

    Time ``O(H·L²·D)``, memory ``O(H·L²)`` besides the table's ``O(H·L·D)``; Shaw's gather takes ``O(H·L²·D)``.

    Parameters
    ----------
    q : array, shape (..., L, D)
        Queries.
    rel_k : array, shape (L, D) or (H, L, D)
        The paper's ``E^r``, rows of the relative positions ``-(L-1) … 0``.

    Returns
    -------
    array, shape (..., L, L)
        Zero above the diagonal.

    See Also
    --------
    relskew_core.relative_logits : the same in less memory, with ``causal=True``.

    Examples
    --------
    >>> import numpy as np
    >>> huang_logits(
    ...     np.ones((5, 1)), np.asarray([[-4.0], [-3.0], [-2.0], [-1.0], [0.0]])
    ... ).astype(int)
    array([[ 0,  0,  0,  0,  0],
           [-1,  0,  0,  0,  0],
           [-2, -1,  0,  0,  0],
           [-3, -2, -1,  0,  0],
           [-4, -3, -2, -1,  0]])
    """
    xp = namespace_of_arrays({"q": q, "rel_k": rel_k})
    check_trailing("q", q, {"L": None, "D": None})
    check_table("rel_k", rel_k, q, {"L": q.shape[-2], "D": q.shape[-1]})
    return huang_skew(huang_mask(xp.matmul(q, xp.matrix_transpose(rel_k))))


def huang_attention(q: Array, k: Array, v: Array, rel_k: Array) -> Array:
    """``softmax((Q·Kᵀ + S^rel) / √D) · V``, causally (equation 3).

    Time ``O(H·L²·D)``, memory ``O(H·L²)``: logits, products and their padded copies.

    Parameters
    ----------
    q, k, v : array, shapes (..., L, D), (..., L, D), (..., L, Dv)
        Queries, keys and values with the same leading axes; ``L >= 1``.
    rel_k : array, shape (L, D) or (H, L, D)
        The paper's ``E^r``, rows of the relative positions ``-(L-1) … 0``.

    Returns
    -------
    array, shape (..., L, Dv)

    See Also
    --------
    relskew_core.relative_attention : the same in less memory, with ``causal=True``.

    Examples
    --------
    >>> import numpy as np
    >>> values = np.asarray([[1.0], [2.0], [3.0], [4.0]])
    >>> huang_attention(np.zeros((4, 2)), np.zeros((4, 2)), values, np.zeros((4, 2)))[:, 0]
    array([1. , 1.5, 2. , 2.5])
    """
    xp = _check_attention(q, k, v, rel_k)
    check_table("rel_k", rel_k, q, {"L": q.shape[-2], "D": q.shape[-1]})
    logits = (xp.matmul(q, xp.matrix_transpose(k)) + huang_logits(q, rel_k)) / q.shape[-1] ** 0.5
    logits = where_visible(logits, float("-inf"), lambda i, j: j <= i, xp=xp)
    return xp.matmul(weigh(logits, xp=xp), v)


def huang_local_attention(q: Array, k: Array, v: Array, rel_k: Array, *, block_size: int) -> Array:
    """Causal attention of every block of ``N`` to itself and to the whole block before (section 3.5, figure 2).

    The two halves share one table: its first ``2N-1`` rows (``-(2N-1) … -1``) serve the previous block through
    :func:`huang_skew_local`, its last ``N`` rows (``-(N-1) … 0``) the block itself through :func:`huang_skew`.
    The first block has no previous one. Time ``O(H·L·N·D)``, memory ``O(H·L·N)``.

    Parameters
    ----------
    q, k, v : array, shapes (..., L, D), (..., L, D), (..., L, Dv)
        Queries, keys and values with the same leading axes; ``L >= 1``.
    rel_k : array, shape (2N, D) or (H, 2N, D)
        Rows of the relative positions ``-(2N-1) … 0``.
    block_size : int
        ``N``, a divisor of ``L``.

    Returns
    -------
    array, shape (..., L, Dv)

    See Also
    --------
    relskew_core.relative_attention : the same in less memory, with ``block_size``.

    Examples
    --------
    >>> import numpy as np
    >>> values = np.asarray([[1.0], [2.0], [3.0], [4.0], [5.0], [6.0]])
    >>> zeros = np.zeros((6, 1))
    >>> huang_local_attention(zeros, zeros, values, np.zeros((4, 1)), block_size=2)[:, 0]
    array([1. , 1.5, 2. , 2.5, 4. , 4.5])
    """
    xp = _check_attention(q, k, v, rel_k)
    n = check_int("block_size", block_size, minimum=1)
    check_table("rel_k", rel_k, q, {"2N": 2 * n, "D": q.shape[-1]})
    length = q.shape[-2]
    if length % n:
        raise ValueError(f"`block_size` must divide the length {length} of `q`, got {n}")
    q, k, v = (xp.reshape(x, (*x.shape[:-2], length // n, n, x.shape[-1])) for x in (q, k, v))
    if rel_k.ndim > 2:
        rel_k = xp.expand_dims(rel_k, axis=-3)
    k, v = (xp.concat([_previous_block(x, xp=xp), x], axis=-2) for x in (k, v))
    before = huang_skew_local(xp.matmul(q, xp.matrix_transpose(rel_k[..., : 2 * n - 1, :])))
    within = huang_skew(huang_mask(xp.matmul(q, xp.matrix_transpose(rel_k[..., n:, :]))))
    logits = (xp.matmul(q, xp.matrix_transpose(k)) + xp.concat([before, within], axis=-1)) / q.shape[-1] ** 0.5
    logits = where_visible(logits, float("-inf"), lambda i, j: j <= i + n, xp=xp)
    first = where_visible(logits[..., :1, :, :], float("-inf"), lambda i, j: j >= n, xp=xp)
    logits = xp.concat([first, logits[..., 1:, :, :]], axis=-3)
    out = xp.matmul(weigh(logits, xp=xp), v)
    return xp.reshape(out, (*out.shape[:-3], length, out.shape[-1]))


def _previous_block(x: Array, *, xp: Namespace) -> Array:
    """Every block's predecessor, zeros before the first: (..., blocks, N, D) -> the same shape."""
    return xp.concat([xp.zeros_like(x[..., :1, :, :]), x[..., :-1, :, :]], axis=-3)


def _check_square(name: str, x: Array) -> None:
    if x.ndim < 2 or x.shape[-1] < 1 or x.shape[-2] != x.shape[-1]:
        raise ValueError(f"`{name}` must have shape (..., L, L) with L >= 1, got {describe(x)}")


def _check_attention(q: Array, k: Array, v: Array, rel_k: Array) -> Namespace:
    xp = namespace_of_arrays({"q": q, "k": k, "v": v, "rel_k": rel_k})
    check_trailing("q", q, {"L": None, "D": None})
    if q.shape[-2] < 1:
        raise ValueError(f"`q` must have shape (..., L, D) with L >= 1, got {describe(q)}")
    check_trailing("k", k, {"L": q.shape[-2], "D": q.shape[-1]})
    check_trailing("v", v, {"L": q.shape[-2], "Dv": None})
    check_leading("k", k, "q", q)
    check_leading("v", v, "q", q)
    return xp
