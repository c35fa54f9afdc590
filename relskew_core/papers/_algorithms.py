"""The algorithms, as printed in the papers, with their checks of shapes, masks and softmax."""

from __future__ import annotations

from collections.abc import Callable
from math import prod
from typing import Any, Literal

from relskew_core._array.checks import check_choice, check_int, describe
from relskew_core._array.namespace import device, namespace_of, namespace_of_arrays
from relskew_core._array.precision import integers
from relskew_core._array.softmax import softmax
from relskew_core._array.typing import Array, Namespace
from relskew_core._kernel.shapes import default_offset

FORMS = {"...": "(..., {0}, {1})", "H": "({0}, {1}) or (H, {0}, {1})", "-": "({0}, {1})"}
"""What comes before the last two axes: anything, the heads of a table if it has any, or nothing."""


def check_axes(sizes: dict[str, Any], **arrays: tuple[Array, str]) -> None:
    """Refuse arrays whose axes are not those of a form: ``"... n D"``, ``"H R D"`` or ``"- R D"``.

    The first array that has an axis says how long it is; ``L`` is at least 1.
    """
    for name, (x, form) in arrays.items():
        (first, *axes), known, lead = form.split(), dict(sizes), tuple(x.shape[:-2])
        whole = sizes.setdefault("...", lead)
        fits = x.ndim >= 2 and lead in {"...": (whole,), "H": ((), whole[-1:]), "-": ((),)}[first]
        fits = fits and all(sizes.setdefault(axis, n) == n for axis, n in zip(axes, x.shape[-2:], strict=True))
        if not fits or sizes.get("L") == 0:
            listed = ["L >= 1"] if fits else [f"{axis} = {known[axis]}" for axis in ("...", *axes) if axis in known]
            with_sizes = f" with {', '.join(listed)}" if listed else ""
            raise ValueError(f"`{name}` must have shape {FORMS[first].format(*axes)}{with_sizes}, got {describe(x)}")


def check_odd(name: str, table: Array) -> int:
    """Refuse a table with an even number of rows; return half of the others."""
    if table.shape[-2] % 2 == 0:
        raise ValueError(f"`{name}` must have an odd number of rows, as many on both sides of 0, got {describe(table)}")
    return int(table.shape[-2] // 2)


def weigh(logits: Array, *, xp: Namespace) -> Array:
    """Softmax over the last axis; no row of the logits is all ``-inf``."""
    weights, _ = softmax(logits, dead_rows=False, sums=False, xp=xp)
    return weights


def where_visible(x: Array, otherwise: float, visible: Callable[[Array, Array], Array], *, xp: Namespace) -> Array:
    """Keep the entries of the last two axes where ``visible(row, column)`` holds; put ``otherwise`` elsewhere."""
    rows, columns = (integers(0, n, device=device(x), xp=xp) for n in x.shape[-2:])
    return xp.where(visible(rows[:, None], columns), x, xp.full_like(x, otherwise))


Form = Literal["gather", "split"]


def clipped_distances(
    n_queries: int, n_keys: int, k: int, *, xp: Any, offset: int | None = None, device: Any = None
) -> Array:
    """Table row of every query and key: ``clip(j - (i + offset), -k, k) + k`` (Shaw et al. 2018, section 3.2).

    Parameters
    ----------
    n_queries, n_keys, k : int
        ``n``, ``m``, and the clipping distance.
    xp : module
        Array library to make the matrix in.
    offset : int, optional
        Absolute position of query 0; the paper has 0, as is the default where there are as many queries as keys.
    device : device of ``xp``, optional
        Of the matrix.

    Returns
    -------
    array of int, shape (n, m)
        Numbers in ``0 … 2k``, for the paper's tables ``w_{-k} … w_k``.

    Examples
    --------
    >>> import numpy as np
    >>> clipped_distances(3, 3, 1, xp=np)
    array([[1, 2, 2],
           [0, 1, 2],
           [0, 0, 1]])
    """
    n, m = check_int("n_queries", n_queries, minimum=0), check_int("n_keys", n_keys, minimum=0)
    k, xp = check_int("k", k, minimum=0), namespace_of(xp)
    offset = default_offset(n, m) if offset is None else check_int("offset", offset)
    i, j = (integers(0, count, device=device, xp=xp) for count in (n, m))
    return xp.clip(j - (i + offset)[:, None], -k, k) + k


def clipped_lookup(table: Array, n_queries: int, n_keys: int, *, offset: int | None = None) -> Array:
    """Gather the row of every query and key: ``a_ij = w_clip(j - i, k)`` (Shaw et al. 2018, section 3.2).

    Parameters
    ----------
    table : array, shape (2k+1, D) or (H, 2k+1, D)
        Rows of the relative positions ``-k … k``.
    n_queries, n_keys, offset : int
        As in :func:`clipped_distances`.

    Returns
    -------
    array, shape (n, m, D) or (H, n, m, D)

    Examples
    --------
    >>> import numpy as np
    >>> clipped_lookup(np.asarray([[-1.0], [0.0], [1.0]]), 3, 3)[..., 0]
    array([[ 0.,  1.,  1.],
           [-1.,  0.,  1.],
           [-1., -1.,  0.]])
    """
    namespace_of_arrays({"table": table})
    check_axes({}, table=(table, "H R D"))
    return _lookup("table", table, n_queries, n_keys, offset)


def shaw_logits(q: Array, k: Array, rel_k: Array, *, form: Form = "gather", offset: int | None = None) -> Array:
    """``e_ij = q_i (k_j + a_ij)ᵀ / √D`` (Shaw et al. 2018, equations 4 and 5).

    Parameters
    ----------
    q, k : array, shapes (..., n, D), (..., m, D)
        Queries, ``x_i W^Q``, and keys, ``x_j W^K``.
    rel_k : array, shape (2k+1, D) or, as ``"gather"``, (H, 2k+1, D)
        The paper's ``w^K``, rows of the relative positions ``-k … k``.
    form : {"gather", "split"}, default "gather"
        ``"gather"`` moves every key for every query: equation 4. ``"split"`` is equation 5 with section 3.3: ``(q_i
        k_jᵀ + q_i a_ijᵀ) / √D``. Its second term is ``n`` parallel products, one for each query position, of ``(B·H,
        D)`` and ``(D, m)``, with one gathered table for all batches and heads.
    offset : int, optional
        As in :func:`clipped_distances`.

    Returns
    -------
    array, shape (..., n, m)

    Examples
    --------
    >>> import numpy as np
    >>> ones, rel_k = np.ones((3, 1)), np.asarray([[-1.0], [0.0], [1.0]])
    >>> shaw_logits(ones, ones, rel_k, form="split")
    array([[1., 2., 2.],
           [0., 1., 2.],
           [0., 0., 1.]])
    """
    check_choice("form", form, ("gather", "split"))
    xp = namespace_of_arrays({"q": q, "k": k, "rel_k": rel_k})
    check_axes({}, q=(q, "... n D"), k=(k, "... m D"), rel_k=(rel_k, "H R D" if form == "gather" else "- R D"))
    a = _lookup("rel_k", rel_k, q.shape[-2], k.shape[-2], offset)
    if form == "gather":
        return xp.sum(q[..., None, :] * (k[..., None, :, :] + a), axis=-1) / q.shape[-1] ** 0.5
    content, position = xp.matmul(q, xp.matrix_transpose(k)), _by_position(q, xp.matrix_transpose(a), xp=xp)
    return (content + position) / q.shape[-1] ** 0.5


def shaw_values(weights: Array, v: Array, rel_v: Array, *, form: Form = "gather", offset: int | None = None) -> Array:
    """``z_i = Σ_j α_ij (v_j + a_ij)`` (Shaw et al. 2018, equation 3).

    Parameters
    ----------
    weights, v : array, shapes (..., n, m), (..., m, Dv)
        Softmax weights, ``α``, and values, ``x_j W^V``.
    rel_v : array, shape (2k+1, Dv) or, as ``"gather"``, (H, 2k+1, Dv)
        The paper's ``w^V``, rows of the relative positions ``-k … k``.
    form, offset : optional
        As in :func:`shaw_logits`; ``"split"`` is ``Σ_j α_ij v_j + Σ_j α_ij a_ij``.

    Returns
    -------
    array, shape (..., n, Dv)

    Examples
    --------
    >>> import numpy as np
    >>> v, rel_v = np.asarray([[[10.0], [20.0], [30.0]], [[-1.0], [0.0], [1.0]]])
    >>> shaw_values(np.fliplr(np.eye(3)), v, rel_v)[:, 0]
    array([31., 20.,  9.])
    """
    check_choice("form", form, ("gather", "split"))
    xp = namespace_of_arrays({"weights": weights, "v": v, "rel_v": rel_v})
    table = "H R Dv" if form == "gather" else "- R Dv"
    check_axes({}, weights=(weights, "... n m"), v=(v, "... m Dv"), rel_v=(rel_v, table))
    a = _lookup("rel_v", rel_v, weights.shape[-2], weights.shape[-1], offset)
    if form == "gather":
        return xp.sum(weights[..., None] * (v[..., None, :, :] + a), axis=-2)
    return xp.matmul(weights, v) + _by_position(weights, a, xp=xp)


def shaw_attention(
    q: Array,
    k: Array,
    v: Array,
    rel_k: Array,
    rel_v: Array | None = None,
    *,
    form: Form = "gather",
    offset: int | None = None,
) -> Array:
    """Attention with relative keys and values: equations 4, 2 and 3 of Shaw et al. 2018, one after the other.

    Parameters
    ----------
    q, k, v, rel_k, form, offset
        As in :func:`shaw_logits` and :func:`shaw_values`.
    rel_v : array, optional
        As in :func:`shaw_values`; without it ``z_i = Σ_j α_ij v_j`` (equation 1).

    Returns
    -------
    array, shape (..., n, Dv)

    Examples
    --------
    >>> import numpy as np
    >>> q, k, v = np.ones((3, 2, 5, 4))
    >>> rel_k, rel_v = np.zeros((3, 4)), np.asarray([[-1.0], [0.0], [1.0]]) * np.ones(4)
    >>> shaw_attention(q, k, v, rel_k, rel_v, form="split")[0, :, 0].round(6)
    array([1.8, 1.4, 1. , 0.6, 0.2])
    """
    xp = namespace_of_arrays({"q": q, "k": k, "v": v, "rel_k": rel_k}, {"rel_v": rel_v})
    check_axes({}, q=(q, "... n D"), k=(k, "... m D"), v=(v, "... m Dv"))
    weights = weigh(shaw_logits(q, k, rel_k, form=form, offset=offset), xp=xp)
    return xp.matmul(weights, v) if rel_v is None else shaw_values(weights, v, rel_v, form=form, offset=offset)


def _lookup(name: str, table: Array, n: int, m: int, offset: int | None) -> Array:
    xp = namespace_of_arrays({name: table})
    rows = clipped_distances(n, m, check_odd(name, table), xp=xp, offset=offset, device=device(table))
    gathered = xp.take(table, xp.reshape(rows, (-1,)), axis=-2)
    return xp.reshape(gathered, (*table.shape[:-2], *rows.shape, table.shape[-1]))


def _by_position(x: Array, a: Array, *, xp: Namespace) -> Array:
    """Multiply every position of ``x (..., n, p)`` by its own matrix in ``a (n, p, q)``: (..., n, q)."""
    *lead, n, p = x.shape
    product = xp.matmul(xp.reshape(xp.moveaxis(x, -2, 0), (n, prod(lead), p)), a)
    return xp.moveaxis(xp.reshape(product, (n, *lead, a.shape[-1])), 0, -2)


def huang_mask(x: Array) -> Array:
    """Zero the upper-left triangle of ``Q·Eᵀ``: the first ``L-1-i`` columns of query ``i`` belong to no key (figure 1).

    Parameters
    ----------
    x : array, shape (..., L, L)
        Queries against the relative positions ``-(L-1) … 0``.

    Returns
    -------
    array, shape (..., L, L)

    Examples
    --------
    >>> import numpy as np
    >>> huang_mask(np.asarray([[-2.0, -1.0, 5.0]] * 3))
    array([[ 0.,  0.,  5.],
           [ 0., -1.,  5.],
           [-2., -1.,  5.]])
    """
    xp = namespace_of_arrays({"x": x})
    check_axes({}, x=(x, "... L L"))
    return where_visible(x, 0.0, lambda i, c: i + c >= x.shape[-1] - 1, xp=xp)


def huang_skew(x: Array) -> Array:
    """Move relative logits to their keys: pad, reshape, slice (section 3.4.1, figure 1).

    1. Pad a column of zeros before the leftmost column.
    2. Reshape the ``(L, L+1)`` matrix to ``(L+1, L)``, row-major.
    3. Keep the last ``L`` rows.

    On and below the diagonal ``s[i, j] = x[i, L-1-i+j]``. The entries above it are meaningless: the padding, and
    entries of the next query, which are zero if :func:`huang_mask` ran before.

    Parameters
    ----------
    x : array, shape (..., L, L)
        As in :func:`huang_mask`.

    Returns
    -------
    array, shape (..., L, L)
        Queries against keys.

    Examples
    --------
    >>> import numpy as np
    >>> huang_skew(np.asarray([[-2.0, -1.0, 5.0]] * 3))
    array([[ 5.,  0., -2.],
           [-1.,  5.,  0.],
           [-2., -1.,  5.]])
    """
    xp = namespace_of_arrays({"x": x})
    check_axes({}, x=(x, "... L L"))
    *lead, n, _ = x.shape
    padded = xp.concat([xp.zeros_like(x[..., :1]), x], axis=-1)
    flat = xp.reshape(padded, (*lead, n * (n + 1)))  # a separate step, because dask only merges and splits axes
    return xp.reshape(flat, (*lead, n + 1, n))[..., 1:, :]


def huang_skew_local(x: Array) -> Array:
    """Move relative logits to the keys of the previous block: pad twice, reshape, slice (section 3.5, figure 2).

    Key ``j`` of that block is ``N - j + i`` positions before query ``i`` of this one: ``s[i, j] = x[i, N-1-i+j]``.

    1. Pad a column of zeros after the rightmost column.
    2. Flatten, and pad ``N-1`` zeros after the end.
    3. Reshape to ``(N+1, 2N-1)``, row-major.
    4. Keep the first ``N`` rows and the last ``N`` columns.

    Parameters
    ----------
    x : array, shape (..., N, 2N-1)
        Queries of a block against the relative positions ``-(2N-1) … -1``; ``N >= 1``.

    Returns
    -------
    array, shape (..., N, N)
        Queries of the block against keys of the previous block.

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

    Parameters
    ----------
    q : array, shape (..., L, D)
        Queries; ``L >= 1``.
    rel_k : array, shape (L, D) or (H, L, D)
        The paper's ``E^r``, rows of the relative positions ``-(L-1) … 0``.

    Returns
    -------
    array, shape (..., L, L)
        Zero above the diagonal.

    Examples
    --------
    >>> import numpy as np
    >>> huang_logits(np.ones((3, 1)), np.asarray([[-2.0], [-1.0], [0.0]])).astype(int)
    array([[ 0,  0,  0],
           [-1,  0,  0],
           [-2, -1,  0]])
    """
    xp = namespace_of_arrays({"q": q, "rel_k": rel_k})
    check_axes({}, q=(q, "... L D"), rel_k=(rel_k, "H L D"))
    return huang_skew(huang_mask(xp.matmul(q, xp.matrix_transpose(rel_k))))


def huang_attention(q: Array, k: Array, v: Array, rel_k: Array) -> Array:
    """``softmax((Q·Kᵀ + S^rel) / √D) · V``, causally (equation 3).

    Parameters
    ----------
    q, k, v : array, shapes (..., L, D), (..., L, D), (..., L, Dv)
        Queries, keys and values; ``L >= 1``.
    rel_k : array, shape (L, D) or (H, L, D)
        As in :func:`huang_logits`.

    Returns
    -------
    array, shape (..., L, Dv)

    Examples
    --------
    >>> import numpy as np
    >>> values = np.asarray([[1.0], [2.0], [3.0], [4.0]])
    >>> huang_attention(np.zeros((4, 2)), np.zeros((4, 2)), values, np.zeros((4, 2)))[:, 0]
    array([1. , 1.5, 2. , 2.5])
    """
    xp = namespace_of_arrays({"q": q, "k": k, "v": v, "rel_k": rel_k})
    check_axes({}, q=(q, "... L D"), k=(k, "... L D"), v=(v, "... L Dv"), rel_k=(rel_k, "H L D"))
    logits = (xp.matmul(q, xp.matrix_transpose(k)) + huang_logits(q, rel_k)) / q.shape[-1] ** 0.5
    logits = where_visible(logits, float("-inf"), lambda i, j: j <= i, xp=xp)
    return xp.matmul(weigh(logits, xp=xp), v)


def huang_local_attention(q: Array, k: Array, v: Array, rel_k: Array, *, block_size: int) -> Array:
    """Causal attention of every block of ``N`` to itself and to the whole block before (section 3.5, figure 2).

    The first ``2N-1`` rows of the table serve the previous block through :func:`huang_skew_local`, its last ``N`` rows
    the block itself through :func:`huang_skew`.

    Parameters
    ----------
    q, k, v
        As in :func:`huang_attention`.
    rel_k : array, shape (2N, D) or (H, 2N, D)
        Rows of the relative positions ``-(2N-1) … 0``.
    block_size : int
        ``N``, a divisor of ``L``.

    Returns
    -------
    array, shape (..., L, Dv)

    Examples
    --------
    >>> import numpy as np
    >>> values = np.asarray([[1.0], [2.0], [3.0], [4.0], [5.0], [6.0]])
    >>> zeros = np.zeros((6, 1))
    >>> huang_local_attention(zeros, zeros, values, np.zeros((4, 1)), block_size=2)[:, 0]
    array([1. , 1.5, 2. , 2.5, 4. , 4.5])
    """
    xp = namespace_of_arrays({"q": q, "k": k, "v": v, "rel_k": rel_k})
    n, length = check_int("block_size", block_size, minimum=1), q.shape[-2] if q.ndim > 1 else 0
    check_axes({"2N": 2 * n}, q=(q, "... L D"), k=(k, "... L D"), v=(v, "... L Dv"), rel_k=(rel_k, "H 2N D"))
    if length % n:
        raise ValueError(f"`block_size` must divide the length {length} of `q`, got {n}")
    q, k, v = (xp.reshape(x, (*x.shape[:-2], length // n, n, x.shape[-1])) for x in (q, k, v))
    rel_k = rel_k if rel_k.ndim == 2 else xp.expand_dims(rel_k, axis=-3)
    before = (xp.concat([xp.zeros_like(x[..., :1, :, :]), x[..., :-1, :, :]], axis=-3) for x in (k, v))
    k, v = (xp.concat(pair, axis=-2) for pair in zip(before, (k, v), strict=True))
    earlier = huang_skew_local(xp.matmul(q, xp.matrix_transpose(rel_k[..., : 2 * n - 1, :])))
    within = huang_skew(huang_mask(xp.matmul(q, xp.matrix_transpose(rel_k[..., n:, :]))))
    logits = (xp.matmul(q, xp.matrix_transpose(k)) + xp.concat([earlier, within], axis=-1)) / q.shape[-1] ** 0.5
    logits = where_visible(logits, float("-inf"), lambda i, j: j <= i + n, xp=xp)
    first = where_visible(logits[..., :1, :, :], float("-inf"), lambda i, j: j >= n, xp=xp)
    logits = xp.concat([first, logits[..., 1:, :, :]], axis=-3)
    out = xp.matmul(weigh(logits, xp=xp), v)
    return xp.reshape(out, (*out.shape[:-3], length, out.shape[-1]))


def diagonal_skew(x: Array, n_keys: int | None = None) -> Array:
    """Stack the diagonals of the product, transpose, truncate (section "Algorithm").

    Columns run from the future to the past, so the diagonal ``T-1-j`` holds what every query has for key ``j``. The
    diagonals ``T-1 … 0``, stacked from top to bottom, are keys against queries; of their transpose the first ``n_keys``
    columns are kept: ``s[i, j] = x[i, T-1+i-j]``.

    Parameters
    ----------
    x : array, shape (..., n, 2T-1)
        Queries against the relative positions ``T-1 … -(T-1)``, descending; ``1 <= n <= T``.
    n_keys : int, optional
        How many keys to keep, at most ``T``, which is the default.

    Returns
    -------
    array, shape (..., n, n_keys)

    Examples
    --------
    >>> import numpy as np
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
    n_keys = longest if n_keys is None else check_int("n_keys", n_keys, minimum=0)
    if n_keys > longest:
        raise ValueError(f"`n_keys` must be at most {longest}, as many as the table has room for, got {n_keys}")
    flat, step = xp.reshape(x, (*lead, n * width)), width + 1  # from an entry (i, i + d) to the next
    diagonals = [flat[..., d : d + (n - 1) * step + 1 : step] for d in range(longest - 1, -1, -1)]
    return xp.matrix_transpose(xp.stack(diagonals, axis=-2))[..., :n_keys]


def diagonal_logits(q: Array, rel_k: Array, *, n_keys: int | None = None) -> Array:
    """``S``, unscaled, of any attention whose queries and keys both start at position 0.

    Parameters
    ----------
    q, rel_k : array, shapes (..., n, D), (2T-1, D) or (H, 2T-1, D)
        Queries, and rows of the relative positions ``T-1 … -(T-1)``, descending; ``1 <= n <= T``.
    n_keys : int, optional
        As in :func:`diagonal_skew`.

    Returns
    -------
    array, shape (..., n, n_keys)

    Examples
    --------
    >>> import numpy as np
    >>> diagonal_logits(np.ones((2, 1)), np.asarray([[2.0], [1.0], [0.0], [-1.0], [-2.0]]))
    array([[ 0.,  1.,  2.],
           [-1.,  0.,  1.]])
    """
    xp = namespace_of_arrays({"q": q, "rel_k": rel_k})
    check_axes({}, q=(q, "... n D"), rel_k=(rel_k, "H 2T-1 D"))
    _check_rows("q", q, rel_k)
    return diagonal_skew(xp.matmul(q, xp.matrix_transpose(rel_k)), n_keys)


def diagonal_attention(q: Array, k: Array, v: Array, rel_k: Array) -> Array:
    """``softmax((Q·Kᵀ + S) / √D) · V`` for self or cross attention without a mask (equation 1).

    Parameters
    ----------
    q, k, v, rel_k : array, shapes (..., n, D), (..., m, D), (..., m, Dv), and as in :func:`diagonal_logits`
        Queries, keys and values, ``1 <= m <= T``, and the table.

    Returns
    -------
    array, shape (..., n, Dv)

    Examples
    --------
    >>> import numpy as np
    >>> q, v = np.ones((3, 1)), np.asarray([[1.0], [2.0], [3.0]])
    >>> far_future = np.asarray([[100.0], [0], [0], [0], [0]])
    >>> diagonal_attention(q, np.zeros((3, 1)), v, far_future)[:, 0]
    array([3., 2., 2.])
    """
    xp = namespace_of_arrays({"q": q, "k": k, "v": v, "rel_k": rel_k})
    check_axes({}, q=(q, "... n D"), k=(k, "... m D"), v=(v, "... m Dv"), rel_k=(rel_k, "H 2T-1 D"))
    _check_rows("k", k, rel_k)
    logits = xp.matmul(q, xp.matrix_transpose(k)) + diagonal_logits(q, rel_k, n_keys=k.shape[-2])
    return xp.matmul(weigh(logits / q.shape[-1] ** 0.5, xp=xp), v)


def _check_rows(name: str, x: Array, rel_k: Array) -> None:
    longest = check_odd("rel_k", rel_k) + 1
    if not 1 <= x.shape[-2] <= longest:
        raise ValueError(f"`{name}` must have 1 to {longest} rows (T for a `rel_k` of 2T-1 rows), got {describe(x)}")
