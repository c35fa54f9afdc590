"""The algorithms, as printed in the papers, with their checks of shapes, masks and softmax."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from math import prod
from typing import Any, Literal

from relskew_core._array.checks import check_choice, check_int, describe
from relskew_core._array.namespace import device, namespace_of, namespace_of_arrays
from relskew_core._array.precision import integers
from relskew_core._array.softmax import softmax
from relskew_core._array.typing import Array, Namespace
from relskew_core._kernel.shapes import default_offset


def check_trailing(name: str, array: Array, axes: Mapping[str, int | None], *, exact: bool = False) -> None:
    """Refuse an ``array`` whose last axes are not ``axes``: sizes by symbol, None for any size.

    If ``exact``, axes before them are refused too.
    """
    shape = tuple(array.shape)
    ending = shape[max(len(shape) - len(axes), 0) :]
    fits = len(shape) == len(axes) if exact else len(shape) >= len(axes)
    if not fits or any(size not in (None, found) for size, found in zip(axes.values(), ending, strict=True)):
        form = ", ".join([*([] if exact else ["..."]), *axes])
        sizes = ", ".join(f"{axis} = {size}" for axis, size in axes.items() if size is not None)
        raise ValueError(f"`{name}` must have shape ({form}){' with ' if sizes else ''}{sizes}, got {describe(array)}")


def check_arrays(**arrays: tuple[Array, Mapping[str, int | None]]) -> None:
    first_name, (first, _) = next(iter(arrays.items()))
    lead = tuple(first.shape[:-2])
    for name, (array, axes) in arrays.items():
        check_trailing(name, array, axes)
        if tuple(array.shape[:-2]) != lead:
            raise ValueError(f"`{name}` must have the leading axes of `{first_name}`, {lead}, got {describe(array)}")


def check_table(name: str, table: Array, x: Array, axes: Mapping[str, int | None], *, shared: bool = False) -> None:
    """Refuse a ``table`` whose shape is neither ``axes`` nor, unless ``shared``, ``axes`` behind the heads of ``x``."""
    check_trailing(name, table, axes, exact=shared)
    heads = tuple(table.shape[:-2])
    if heads and heads != tuple(x.shape[-3:-2]):
        form = ", ".join(axes)
        raise ValueError(f"`{name}` must have shape ({form}) or (H, {form}), H as elsewhere, got {describe(table)}")


def weigh(logits: Array, *, xp: Namespace) -> Array:
    """Softmax over the last axis; no row of the logits is all ``-inf``."""
    weights, _ = softmax(logits, dead_rows=False, sums=False, xp=xp)
    return weights


def where_visible(x: Array, otherwise: float, visible: Callable[[Array, Array], Array], *, xp: Namespace) -> Array:
    """Keep the entries of the last two axes where ``visible(row, column)`` holds; put ``otherwise`` elsewhere."""
    rows = xp.expand_dims(integers(0, x.shape[-2], device=device(x), xp=xp), axis=1)
    columns = xp.expand_dims(integers(0, x.shape[-1], device=device(x), xp=xp), axis=0)
    return xp.where(visible(rows, columns), x, xp.full_like(x, otherwise))


Form = Literal["gather", "split"]
FORMS = ("gather", "split")


def clipped_distances(
    n_queries: int, n_keys: int, k: int, *, xp: Any, offset: int | None = None, device: Any = None
) -> Array:
    """Table row of every query and key: ``clip(j - (i + offset), -k, k) + k`` (Shaw et al. 2018, section 3.2).

    The paper's tables hold ``w_{-k} … w_k``; adding ``k`` makes the clipped distance a row number.

    Parameters
    ----------
    n_queries, n_keys : int
        ``n`` and ``m``, both ``>= 0``.
    k : int
        The clipping distance, ``>= 0``.
    xp : module
        Array library to make the matrix in.
    offset : int, optional
        Absolute position of query 0; the paper has 0, as is the default where there are as many queries as keys.
    device : device of ``xp``, optional
        Where the matrix shall lie.

    Returns
    -------
    array of int, shape (n, m)
        Numbers in ``0 … 2k``.

    Examples
    --------
    >>> import numpy as np
    >>> clipped_distances(4, 4, 1, xp=np)
    array([[1, 2, 2, 2],
           [0, 1, 2, 2],
           [0, 0, 1, 2],
           [0, 0, 0, 1]])
    """
    n, m = check_int("n_queries", n_queries, minimum=0), check_int("n_keys", n_keys, minimum=0)
    k = check_int("k", k, minimum=0)
    return _distances(n, m, k, offset, xp=namespace_of(xp), device=device)


def clipped_lookup(table: Array, n_queries: int, n_keys: int, *, offset: int | None = None) -> Array:
    """Gather the row of every query and key: ``a_ij = w_clip(j - i, k)`` (Shaw et al. 2018, section 3.2).

    Parameters
    ----------
    table : array, shape (2k+1, D) or (H, 2k+1, D)
        Rows of the relative positions ``-k … k``.
    n_queries, n_keys : int
        ``n`` and ``m``.
    offset : int, optional
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
    xp = namespace_of_arrays({"table": table})
    n, m = check_int("n_queries", n_queries, minimum=0), check_int("n_keys", n_keys, minimum=0)
    return _lookup("table", table, n, m, offset, xp=xp)


def shaw_logits(q: Array, k: Array, rel_k: Array, *, form: Form = "gather", offset: int | None = None) -> Array:
    """``e_ij = q_i (k_j + a_ij)ᵀ / √D`` (Shaw et al. 2018, equations 4 and 5).

    ``"gather"`` moves every key for every query: equation 4, in time and memory ``O(B·H·n·m·D)``. ``"split"`` is
    equation 5 with section 3.3: ``(q_i k_jᵀ + q_i a_ijᵀ) / √D``. Its second term is ``n`` parallel products, one for
    each query position, of ``(B·H, D)`` and ``(D, m)``, with one gathered table for all batches and heads.

    Parameters
    ----------
    q : array, shape (..., n, D)
        Queries, ``x_i W^Q``.
    k : array, shape (..., m, D)
        Keys, ``x_j W^K``; leading axes those of ``q``.
    rel_k : array, shape (2k+1, D) or, as ``"gather"``, (H, 2k+1, D)
        The paper's ``w^K``, rows of the relative positions ``-k … k``.
    form : {"gather", "split"}, default "gather"
        One sum over moved keys, or two products.
    offset : int, optional
        As in :func:`clipped_distances`.

    Returns
    -------
    array, shape (..., n, m)

    Examples
    --------
    >>> import numpy as np
    >>> ones, rel_k = np.ones((3, 1)), np.asarray([[-1.0], [0.0], [1.0]])
    >>> shaw_logits(ones, ones, rel_k)
    array([[1., 2., 2.],
           [0., 1., 2.],
           [0., 0., 1.]])
    >>> shaw_logits(ones, ones, rel_k, form="split")[1]
    array([0., 1., 2.])
    """
    check_choice("form", form, FORMS)
    xp = namespace_of_arrays({"q": q, "k": k, "rel_k": rel_k})
    check_arrays(q=(q, {"n": None, "D": None}), k=(k, {"m": None, "D": q.shape[-1]}))
    check_table("rel_k", rel_k, q, {"R": None, "D": q.shape[-1]}, shared=form == "split")
    a = _lookup("rel_k", rel_k, q.shape[-2], k.shape[-2], offset, xp=xp)
    if form == "gather":
        moved = xp.expand_dims(k, axis=-3) + a
        return xp.sum(xp.expand_dims(q, axis=-2) * moved, axis=-1) / q.shape[-1] ** 0.5
    content = xp.matmul(q, xp.matrix_transpose(k))
    position = _by_position(q, xp.matrix_transpose(a), xp=xp)
    return (content + position) / q.shape[-1] ** 0.5


def shaw_values(weights: Array, v: Array, rel_v: Array, *, form: Form = "gather", offset: int | None = None) -> Array:
    """``z_i = Σ_j α_ij (v_j + a_ij)`` (Shaw et al. 2018, equation 3).

    ``"gather"`` moves every value for every query. ``"split"`` is ``Σ_j α_ij v_j + Σ_j α_ij a_ij``, as section 3.3
    says: its second term is ``n`` parallel products of ``(B·H, m)`` and ``(m, Dv)``.

    Parameters
    ----------
    weights : array, shape (..., n, m)
        Softmax weights, ``α``.
    v : array, shape (..., m, Dv)
        Values, ``x_j W^V``; leading axes those of ``weights``.
    rel_v : array, shape (2k+1, Dv) or, as ``"gather"``, (H, 2k+1, Dv)
        The paper's ``w^V``, rows of the relative positions ``-k … k``.
    form, offset : optional
        As in :func:`shaw_logits`.

    Returns
    -------
    array, shape (..., n, Dv)

    Examples
    --------
    >>> import numpy as np
    >>> v, rel_v = np.asarray([[[10.0], [20.0], [30.0]], [[-1.0], [0.0], [1.0]]])
    >>> shaw_values(np.eye(3), v, rel_v)[:, 0]
    array([10., 20., 30.])
    >>> shaw_values(np.fliplr(np.eye(3)), v, rel_v, form="split")[:, 0]
    array([31., 20.,  9.])
    """
    check_choice("form", form, FORMS)
    xp = namespace_of_arrays({"weights": weights, "v": v, "rel_v": rel_v})
    check_arrays(weights=(weights, {"n": None, "m": None}), v=(v, {"m": weights.shape[-1], "Dv": None}))
    check_table("rel_v", rel_v, weights, {"R": None, "Dv": v.shape[-1]}, shared=form == "split")
    a = _lookup("rel_v", rel_v, weights.shape[-2], weights.shape[-1], offset, xp=xp)
    if form == "gather":
        moved = xp.expand_dims(v, axis=-3) + a
        return xp.sum(xp.expand_dims(weights, axis=-1) * moved, axis=-2)
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
    q, k, v : array, shapes (..., n, D), (..., m, D), (..., m, Dv)
        Queries, keys and values with the same leading axes.
    rel_k : array, shape (2k+1, D) or, as ``"gather"``, (H, 2k+1, D)
        Rows of the relative positions ``-k … k``.
    rel_v : array, shape (2k+1, Dv) or, as ``"gather"``, (H, 2k+1, Dv), optional
        The same for the values; without it ``z_i = Σ_j α_ij v_j`` (equation 1).
    form, offset : optional
        As in :func:`shaw_logits`.

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
    logits = shaw_logits(q, k, rel_k, form=form, offset=offset)  # which checks these
    check_arrays(q=(q, {"n": None, "D": None}), v=(v, {"m": k.shape[-2], "Dv": None}))
    weights = weigh(logits, xp=xp)
    if rel_v is None:
        return xp.matmul(weights, v)
    return shaw_values(weights, v, rel_v, form=form, offset=offset)


def _distances(n: int, m: int, k: int, offset: int | None, *, xp: Namespace, device: Any) -> Array:
    offset = default_offset(n, m) if offset is None else check_int("offset", offset)
    i = integers(0, n, device=device, xp=xp) + offset
    j = integers(0, m, device=device, xp=xp)
    return xp.clip(xp.expand_dims(j, axis=0) - xp.expand_dims(i, axis=1), -k, k) + k


def _lookup(name: str, table: Array, n: int, m: int, offset: int | None, *, xp: Namespace) -> Array:
    check_trailing(name, table, {"R": None, "D": None})
    rows, d = table.shape[-2:]
    if table.ndim > 3 or rows % 2 == 0:
        raise ValueError(f"`{name}` must have shape (2k+1, D) or (H, 2k+1, D), got {tuple(table.shape)}")
    distances = _distances(n, m, rows // 2, offset, xp=xp, device=device(table))
    gathered = xp.take(table, xp.reshape(distances, (-1,)), axis=-2)
    return xp.reshape(gathered, (*table.shape[:-2], n, m, d))


def _by_position(x: Array, a: Array, *, xp: Namespace) -> Array:
    """Multiply every position of ``x (..., n, p)`` by its own matrix in ``a (n, p, q)``: (..., n, q)."""
    *lead, n, p = x.shape
    positions_first = xp.reshape(xp.moveaxis(x, -2, 0), (n, prod(lead), p))
    product = xp.matmul(positions_first, a)
    return xp.moveaxis(xp.reshape(product, (n, *lead, a.shape[-1])), 0, -2)


def huang_mask(x: Array) -> Array:
    """Zero the upper-left triangle of ``Q·Eᵀ``, the products before the sequence starts (figure 1).

    Column ``c`` belongs to the relative position ``r = c - (L-1)``; query ``i`` has only ``i`` keys in its past, so its
    first ``L-1-i`` columns belong to no key.

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
    _check_square("x", x)
    return where_visible(x, 0.0, lambda i, c: i + c >= x.shape[-1] - 1, xp=xp)


def huang_skew(x: Array) -> Array:
    """Move relative logits to their keys: pad, reshape, slice (section 3.4.1, figure 1).

    1. Pad a column of zeros before the leftmost column.
    2. Reshape the ``(L, L+1)`` matrix to ``(L+1, L)``, row-major.
    3. Keep the last ``L`` rows.

    On and below the diagonal ``s[i, j] = x[i, L-1-i+j]``. The entries above it are meaningless: the padding, and
    entries of the next query, which are zero if :func:`huang_mask` ran before. The padded product is a copy.

    Parameters
    ----------
    x : array, shape (..., L, L)
        Queries against the relative positions ``-(L-1) … 0``; ``L >= 1``.

    Returns
    -------
    array, shape (..., L, L)
        Queries against keys.

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
        Queries.
    rel_k : array, shape (L, D) or (H, L, D)
        The paper's ``E^r``, rows of the relative positions ``-(L-1) … 0``.

    Returns
    -------
    array, shape (..., L, L)
        Zero above the diagonal.

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

    Parameters
    ----------
    q, k, v : array, shapes (..., L, D), (..., L, D), (..., L, Dv)
        Queries, keys and values with the same leading axes; ``L >= 1``.
    rel_k : array, shape (L, D) or (H, L, D)
        The paper's ``E^r``, rows of the relative positions ``-(L-1) … 0``.

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
    xp = _check_attention(q, k, v, rel_k)
    check_table("rel_k", rel_k, q, {"L": q.shape[-2], "D": q.shape[-1]})
    logits = (xp.matmul(q, xp.matrix_transpose(k)) + huang_logits(q, rel_k)) / q.shape[-1] ** 0.5
    logits = where_visible(logits, float("-inf"), lambda i, j: j <= i, xp=xp)
    return xp.matmul(weigh(logits, xp=xp), v)


def huang_local_attention(q: Array, k: Array, v: Array, rel_k: Array, *, block_size: int) -> Array:
    """Causal attention of every block of ``N`` to itself and to the whole block before (section 3.5, figure 2).

    The two halves share one table: its first ``2N-1`` rows (``-(2N-1) … -1``) serve the previous block through
    :func:`huang_skew_local`, its last ``N`` rows (``-(N-1) … 0``) the block itself through :func:`huang_skew`.
    The first block has no previous one.

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


def _check_square(name: str, x: Array) -> None:
    if x.ndim < 2 or x.shape[-1] < 1 or x.shape[-2] != x.shape[-1]:
        raise ValueError(f"`{name}` must have shape (..., L, L) with L >= 1, got {describe(x)}")


def _check_attention(q: Array, k: Array, v: Array, rel_k: Array) -> Namespace:
    xp = namespace_of_arrays({"q": q, "k": k, "v": v, "rel_k": rel_k})
    check_trailing("q", q, {"L": None, "D": None})
    if q.shape[-2] < 1:
        raise ValueError(f"`q` must have shape (..., L, D) with L >= 1, got {describe(q)}")
    length, width = q.shape[-2:]
    check_arrays(q=(q, {"L": length, "D": width}), k=(k, {"L": length, "D": width}), v=(v, {"L": length, "Dv": None}))
    return xp


def diagonal_skew(x: Array, n_keys: int | None = None) -> Array:
    """Stack the diagonals of the product, transpose, truncate (section "Algorithm").

    Columns run from the future to the past: column ``c`` belongs to ``r = T-1-c``, and so the diagonal ``T-1-j``, on
    which ``c = i + T-1-j``, holds what every query ``i`` has for key ``j``. The diagonals ``T-1 … 0``, stacked from top
    to bottom, are the keys ``0 … T-1`` against the queries; their transpose is queries against keys, of which the
    first ``n_keys`` are kept: ``s[i, j] = x[i, T-1+i-j]``.

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
    step = width + 1  # from an entry (i, i + d) of the matrix to the next, in row-major order
    diagonals = [flat[..., d : d + (n - 1) * step + 1 : step] for d in range(longest - 1, -1, -1)]
    stacked = xp.stack(diagonals, axis=-2)
    return xp.matrix_transpose(stacked)[..., :n_keys]


def diagonal_logits(q: Array, rel_k: Array, *, n_keys: int | None = None) -> Array:
    """``S``, unscaled, of any attention whose queries and keys both start at position 0.

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

    Parameters
    ----------
    q, k, v : array, shapes (..., n, D), (..., m, D), (..., m, Dv)
        Queries, keys and values with the same leading axes; ``m >= 1``.
    rel_k : array, shape (2T-1, D) or (H, 2T-1, D)
        Rows of the relative positions ``T-1 … -(T-1)``, descending; ``1 <= n <= T`` and ``m <= T``.

    Returns
    -------
    array, shape (..., n, Dv)

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
    keys, values = {"m": None, "D": q.shape[-1]}, {"m": k.shape[-2], "Dv": None}
    check_arrays(q=(q, {"n": None, "D": None}), k=(k, keys), v=(v, values))
    _check_rows(rel_k, q)
    if not 1 <= k.shape[-2] <= (rel_k.shape[-2] + 1) // 2:
        raise ValueError(
            f"`k` must have 1 to {(rel_k.shape[-2] + 1) // 2} rows (T for a `rel_k` of 2T-1 rows), got {describe(k)}"
        )
    logits = xp.matmul(q, xp.matrix_transpose(k)) + diagonal_logits(q, rel_k, n_keys=k.shape[-2])
    return xp.matmul(weigh(logits / q.shape[-1] ** 0.5, xp=xp), v)


def _check_rows(rel_k: Array, q: Array) -> None:
    check_table("rel_k", rel_k, q, {"2T-1": None, "D": q.shape[-1]})
    if rel_k.shape[-2] % 2 == 0:
        raise ValueError(f"`rel_k` must have shape (..., 2T-1, D), an odd number of rows, got {describe(rel_k)}")


def _check_n_keys(n_keys: int | None, longest: int) -> int:
    n_keys = longest if n_keys is None else check_int("n_keys", n_keys, minimum=0)
    if n_keys > longest:
        raise ValueError(f"`n_keys` must be at most {longest}, as many as the table has room for, got {n_keys}")
    return n_keys
