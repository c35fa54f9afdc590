"""I. Ukhov 2024, "Relative positional embedding for any attention mechanism": diagonals of the product, as printed."""

from __future__ import annotations

from relskew_core._array.checks import check_int, describe
from relskew_core._array.namespace import namespace_of_arrays
from relskew_core._array.typing import Array
from relskew_core.papers._common import check_leading, check_table, check_trailing, weigh


def diagonal_skew(x: Array, n_keys: int | None = None) -> Array:
    """Stack the diagonals of the product, transpose, truncate (section "Algorithm").

    Columns run from the future to the past: column ``c`` belongs to ``r = T-1-c``, and so the diagonal ``T-1-j``, on
    which ``c = i + T-1-j``, holds what every query ``i`` has for key ``j``. The diagonals ``T-1 … 0``, stacked from top
    to bottom, are the keys ``0 … T-1`` against the queries; their transpose is queries against keys, of which the
    first ``n_keys`` are kept: ``s[i, j] = x[i, T-1+i-j]``. Time and memory ``O(n·T)``, all ``T`` diagonals copied.

    Parameters
    ----------
    x : array, shape (..., n, 2T-1)
        Queries against the relative positions ``T-1 … -(T-1)``, descending; ``1 <= n <= T``.
    n_keys : int, optional
        How many keys to keep, at most ``T``, which is the default.

    Returns
    -------
    array, shape (..., n, n_keys)

    See Also
    --------
    relskew_core.skew : the same for ascending columns, without a copy.

    Examples
    --------
    >>> import numpy as np
    >>> diagonal_skew(np.asarray([[2.0, 1.0, 0.0, -1.0, -2.0]] * 3))
    array([[ 0.,  1.,  2.],
           [-1.,  0.,  1.],
           [-2., -1.,  0.]])
    >>> diagonal_skew(np.asarray([[2.0, 1.0, 0.0, -1.0, -2.0]] * 3), n_keys=2)
    array([[ 0.,  1.],
           [-1.,  0.],
           [-2., -1.]])
    """
    xp = namespace_of_arrays({"x": x})
    if x.ndim < 2 or x.shape[-1] % 2 == 0 or not 1 <= x.shape[-2] <= (x.shape[-1] + 1) // 2:
        raise ValueError(f"`x` must have shape (..., n, 2T-1) with 1 <= n <= T, got {describe(x)}")
    *lead, n, width = x.shape
    longest = (width + 1) // 2
    n_keys = _check_n_keys(n_keys, longest)
    flat = xp.reshape(x, (*lead, n * width))
    stacked = xp.stack([_diagonal(flat, d, n, width) for d in range(longest - 1, -1, -1)], axis=-2)
    return xp.matrix_transpose(stacked)[..., :n_keys]


def diagonal_logits(q: Array, rel_k: Array, *, n_keys: int | None = None) -> Array:
    """``S``, unscaled, of any attention whose queries and keys both start at position 0.

    Time ``O(H·n·T·D)``, memory ``O(H·n·T)``.

    Parameters
    ----------
    q : array, shape (..., n, D)
        Queries.
    rel_k : array, shape (2T-1, D) or (H, 2T-1, D)
        Rows of the relative positions ``T-1 … -(T-1)``, descending; ``1 <= n <= T``.
    n_keys : int, optional
        Number of keys, at most ``T``, which is the default.

    Returns
    -------
    array, shape (..., n, n_keys)

    See Also
    --------
    relskew_core.relative_logits : the same for ascending rows.

    Examples
    --------
    >>> import numpy as np
    >>> diagonal_logits(np.ones((2, 1)), np.asarray([[2.0], [1.0], [0.0], [-1.0], [-2.0]]))
    array([[ 0.,  1.,  2.],
           [-1.,  0.,  1.]])
    """
    xp = namespace_of_arrays({"q": q, "rel_k": rel_k})
    check_trailing("q", q, {"n": None, "D": None})
    _check_rows(rel_k, q)
    longest = (rel_k.shape[-2] + 1) // 2
    if not 1 <= q.shape[-2] <= longest:
        raise ValueError(f"`q` must have 1 to {longest} rows (T for a `rel_k` of 2T-1 rows), got {describe(q)}")
    return diagonal_skew(xp.matmul(q, xp.matrix_transpose(rel_k)), _check_n_keys(n_keys, longest))


def diagonal_attention(q: Array, k: Array, v: Array, rel_k: Array) -> Array:
    """``softmax((Q·Kᵀ + S) / √D) · V`` for self or cross attention without a mask (equation 1).

    Time ``O(H·n·T·D)``, memory ``O(H·n·T)``.

    Parameters
    ----------
    q, k, v : array, shapes (..., n, D), (..., m, D), (..., m, Dv)
        Queries, keys and values with the same leading axes; ``m >= 1``.
    rel_k : array, shape (2T-1, D) or (H, 2T-1, D)
        Rows of the relative positions ``T-1 … -(T-1)``, descending; ``1 <= n <= T`` and ``m <= T``.

    Returns
    -------
    array, shape (..., n, Dv)

    See Also
    --------
    relskew_core.relative_attention : the same for ascending rows, with every option.

    Examples
    --------
    >>> import numpy as np
    >>> far_future = np.asarray([[100.0], [0.0], [0.0], [0.0], [0.0]])
    >>> diagonal_attention(
    ...     np.ones((3, 1)), np.zeros((3, 1)), np.asarray([[1.0], [2.0], [3.0]]), far_future
    ... )[:, 0]
    array([3., 2., 2.])
    """
    xp = namespace_of_arrays({"q": q, "k": k, "v": v, "rel_k": rel_k})
    check_trailing("q", q, {"n": None, "D": None})
    check_trailing("k", k, {"m": None, "D": q.shape[-1]})
    check_trailing("v", v, {"m": k.shape[-2], "Dv": None})
    check_leading("k", k, "q", q)
    check_leading("v", v, "q", q)
    _check_rows(rel_k, q)
    if not 1 <= k.shape[-2] <= (rel_k.shape[-2] + 1) // 2:
        raise ValueError(
            f"`k` must have 1 to {(rel_k.shape[-2] + 1) // 2} rows (T for a `rel_k` of 2T-1 rows), got {describe(k)}"
        )
    logits = xp.matmul(q, xp.matrix_transpose(k)) + diagonal_logits(q, rel_k, n_keys=k.shape[-2])
    return xp.matmul(weigh(logits / q.shape[-1] ** 0.5, xp=xp), v)


def _diagonal(flat: Array, d: int, n: int, width: int) -> Array:
    """Entries ``(i, i + d)`` of the ``(n, width)`` matrix in ``flat``: one step of ``width + 1`` in row-major order."""
    return flat[..., d : d + (n - 1) * (width + 1) + 1 : width + 1]


def _check_rows(rel_k: Array, q: Array) -> None:
    check_table("rel_k", rel_k, q, {"2T-1": None, "D": q.shape[-1]})
    if rel_k.shape[-2] % 2 == 0:
        raise ValueError(f"`rel_k` must have shape (..., 2T-1, D), an odd number of rows, got {describe(rel_k)}")


def _check_n_keys(n_keys: int | None, longest: int) -> int:
    n_keys = longest if n_keys is None else check_int("n_keys", n_keys, minimum=0)
    if n_keys > longest:
        raise ValueError(f"`n_keys` must be at most {longest}, as many as the table has room for, got {n_keys}")
    return n_keys
