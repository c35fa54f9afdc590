"""Shaw, Uszkoreit and Vaswani 2018, "Self-Attention with Relative Position Representations", as printed."""

from __future__ import annotations

from math import prod
from typing import Any, Literal

from relskew_core._array.checks import check_choice, check_int
from relskew_core._array.namespace import device, namespace_of, namespace_of_arrays
from relskew_core._array.precision import integers
from relskew_core._array.typing import Array, Namespace
from relskew_core._kernel.shapes import default_offset
from relskew_core.papers._common import check_leading, check_table, check_trailing, weigh

Form = Literal["gather", "split"]
FORMS = ("gather", "split")


def clipped_distances(
    n_queries: int, n_keys: int, k: int, *, xp: Any, offset: int | None = None, device: Any = None
) -> Array:
    """Table row of every query and key: ``clip(j - (i + offset), -k, k) + k`` (Shaw et al. 2018, section 3.2).

    The paper's tables hold ``w_{-k} … w_k``; adding ``k`` makes the clipped distance a row number.
    Time and memory ``O(n·m)``.

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

    See Also
    --------
    clipped_lookup : gathers these rows.
    relskew_core.Span.clipped : the span of such a table.

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

    Every other form avoids this tensor: it takes memory ``O(n·m·D)`` for each head, or once if heads share the table.

    Parameters
    ----------
    table : array, shape (2k+1, D) or (H, 2k+1, D)
        Rows of the relative positions ``-k … k``.
    n_queries, n_keys : int
        ``n`` and ``m``.
    offset : int, optional
        Absolute position of query 0; 0 by default where there are as many queries as keys.

    Returns
    -------
    array, shape (n, m, D) or (H, n, m, D)

    See Also
    --------
    clipped_distances : the row of each pair.
    relskew_core.relative_attention : needs no gathered table.

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
    each query position, of ``(B·H, D)`` and ``(D, m)``: the queries are transposed and reshaped to bring their position
    to the front, and the product is reshaped back. Memory is ``O(B·H·n·m + n·m·D)``, with one gathered table for all
    batches and heads.

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
        Absolute position of query 0; the paper has 0, as is the default where there are as many queries as keys.

    Returns
    -------
    array, shape (..., n, m)

    See Also
    --------
    relskew_core.relative_logits : the second term, unscaled, without a gather.

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
    check_trailing("q", q, {"n": None, "D": None})
    check_trailing("k", k, {"m": None, "D": q.shape[-1]})
    check_table("rel_k", rel_k, q, {"R": None, "D": q.shape[-1]}, shared=form == "split")
    check_leading("k", k, "q", q)
    a = _lookup("rel_k", rel_k, q.shape[-2], k.shape[-2], offset, xp=xp)
    if form == "gather":
        moved = xp.expand_dims(k, axis=-3) + a
        return xp.sum(xp.expand_dims(q, axis=-2) * moved, axis=-1) / q.shape[-1] ** 0.5
    content = xp.matmul(q, xp.matrix_transpose(k))
    position = _by_position(q, xp.matrix_transpose(a), xp=xp)
    return (content + position) / q.shape[-1] ** 0.5


def shaw_values(weights: Array, v: Array, rel_v: Array, *, form: Form = "gather", offset: int | None = None) -> Array:
    """``z_i = Σ_j α_ij (v_j + a_ij)`` (Shaw et al. 2018, equation 3).

    ``"gather"`` moves every value for every query, in time and memory ``O(B·H·n·m·Dv)``. ``"split"`` is
    ``Σ_j α_ij v_j + Σ_j α_ij a_ij``, as section 3.3 says: its second term is ``n`` parallel products of ``(B·H, m)``
    and ``(m, Dv)``, in memory ``O(n·m·Dv)`` besides the weights and the result.

    Parameters
    ----------
    weights : array, shape (..., n, m)
        Softmax weights, ``α``.
    v : array, shape (..., m, Dv)
        Values, ``x_j W^V``; leading axes those of ``weights``.
    rel_v : array, shape (2k+1, Dv) or, as ``"gather"``, (H, 2k+1, Dv)
        The paper's ``w^V``, rows of the relative positions ``-k … k``.
    form : {"gather", "split"}, default "gather"
        One sum over moved values, or two products.
    offset : int, optional
        Absolute position of query 0; the paper has 0, as is the default where there are as many queries as keys.

    Returns
    -------
    array, shape (..., n, Dv)

    See Also
    --------
    relskew_core.relative_values : the second term, without a gather.

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
    check_trailing("weights", weights, {"n": None, "m": None})
    check_trailing("v", v, {"m": weights.shape[-1], "Dv": None})
    check_table("rel_v", rel_v, weights, {"R": None, "Dv": v.shape[-1]}, shared=form == "split")
    check_leading("v", v, "weights", weights)
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

    Time ``O(B·H·n·m·D)``; memory ``O(B·H·n·m·D)`` as ``"gather"``, ``O(B·H·n·m + n·m·D)`` as ``"split"``.

    Parameters
    ----------
    q, k, v : array, shapes (..., n, D), (..., m, D), (..., m, Dv)
        Queries, keys and values with the same leading axes.
    rel_k : array, shape (2k+1, D) or, as ``"gather"``, (H, 2k+1, D)
        Rows of the relative positions ``-k … k``.
    rel_v : array, shape (2k+1, Dv) or, as ``"gather"``, (H, 2k+1, Dv), optional
        The same for the values; without it ``z_i = Σ_j α_ij v_j`` (equation 1).
    form : {"gather", "split"}, default "gather"
        Which of the two forms computes the terms.
    offset : int, optional
        Absolute position of query 0; the paper has 0, as is the default where there are as many queries as keys.

    Returns
    -------
    array, shape (..., n, Dv)

    See Also
    --------
    relskew_core.relative_attention : the same in less memory, with ``Span.clipped(k)``.

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
    check_trailing("v", v, {"m": k.shape[-2], "Dv": None})
    check_leading("v", v, "q", q)
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
