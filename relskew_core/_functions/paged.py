"""Attention over paged keys and values, which are in pages of a shared pool, as in the caches of serving engines."""

from __future__ import annotations

from collections.abc import Sequence
from numbers import Integral
from typing import Any

from relskew_core import backends
from relskew_core._array.checks import check_bool, check_window, describe, explains, is_array, shape_of
from relskew_core._array.known import known_values, nothing
from relskew_core._array.namespace import check_companion, device, namespace_of_arrays
from relskew_core._array.precision import casts, integer, integers
from relskew_core._array.softmax import log_sum_exp, within
from relskew_core._array.typing import Array, Impl, Namespace
from relskew_core._functions.attention import attend, relative_attention
from relskew_core._kernel.call import TABLES, Arguments
from relskew_core._kernel.problem import problem
from relskew_core._kernel.shapes import check_tables
from relskew_core._positions.span import Span


@explains
@casts
def paged_attention(
    q: Array,
    k_pages: Array,
    v_pages: Array,
    rel_k: Array | None = None,
    span: Span | None = None,
    *,
    page_table: Array | Sequence[Any],
    lengths: Array | Sequence[Any],
    causal: bool = True,
    window: tuple[int | None, int | None] | None = None,
    rel_v: Array | None = None,
    rel_bias: Array | None = None,
    rel_q: Array | None = None,
    key_table: Array | None = None,
    sinks: Array | None = None,
    scale: float | Array | None = None,
    rel_scale: float | Array | None = None,
    softcap: float | None = None,
    chunk_size: int | None = None,
    return_lse: bool = False,
    impl: Impl = "auto",
) -> Array | tuple[Array, Array]:
    """Attend to keys and values in the pages of one pool, with any table or bias by relative position.

    ::

        pool of pages:   0: item 1, keys 4 … 7    1: free    2: item 0, keys 0 … 3    3: item 1, keys 0 … 3
        page_table:      [[2, -1], [3, 0]]        lengths:   [3, 6]

    Parameters
    ----------
    q : array, shape (B, H, Lq, D)
        Queries, the last ``Lq`` positions of each item: one when decoding, more for a prompt or for drafted tokens.
    k_pages : array, shape (P, page, Hkv, D)
        Pages of keys, the layout of vLLM's cache; ``H`` is a multiple of ``Hkv``.
    v_pages : array, shape (P, page, Hkv, Dv)
        Pages of values.
    rel_k, span : optional
        A table and its span, the same for all items, as in :func:`relative_attention`.
    page_table : array of integers, shape (B, n), or sequence of sequences of int
        Numbers of the pages with the keys of each item, in order. Entries after an item's last page are ignored.
    lengths : array of integers, shape (B,), or sequence of int
        Number of keys of each item, including those of its queries. An item of length 0 gets zeros.
    causal : bool, default True
        Queries see no later keys.
    window : (int or None, int or None), optional
        A query sees the keys at ``-left <= r <= right`` only. Pages that no query sees are not read.
    rel_v, rel_bias, rel_q, key_table, sinks : optional
        Tables and biases as well; ``rel_q`` has the shape of ``q``, and ``sinks`` are ``(H,)`` or ``(B, H, Lq)``.
    scale, rel_scale, softcap, chunk_size, return_lse, impl : optional
        As in :func:`relative_attention`.

    Returns
    -------
    out : array, shape (B, H, Lq, Dv)
    lse : array, shape (B, H, Lq)
        Only with ``return_lse``.

    See Also
    --------
    relative_attention : the same call for keys and values that are not in pages.
    alibi_bias : the bias of ALiBi, as ``rel_bias``.

    Notes
    -----
    Kwon et al. 2023, "Efficient Memory Management for Large Language Model Serving with PagedAttention", section 4. If
    ``page_table`` and ``lengths`` are known, as on CPUs, items are processed one by one: only the keys of one item are
    copied at a time, and none if its pages are consecutive. On CUDA, torch's fused kernels read each page where it is,
    outside of ``torch.compile`` and of autograd. Otherwise, if they are traced or on an accelerator, the pages of all
    items are gathered, but never the whole pool. Pages that are not in the pool and items that are too long are only
    detected where the values are known.

    Examples
    --------
    >>> import numpy as np
    >>> k_pages = v_pages = np.arange(8.0).reshape(4, 2, 1, 1)  # four pages of two keys
    >>> q = np.zeros((2, 1, 1, 1))
    >>> pages = {"page_table": [[1, 0], [3, -1]], "lengths": [3, 1]}
    >>> paged_attention(q, k_pages, v_pages, **pages).ravel()
    array([1.66666667, 6.        ])

    With ALiBi, distant keys have lower weights:

    >>> from relskew_core import Span, alibi_bias
    >>> span = Span(7, 0)
    >>> bias = alibi_bias(1, span, xp=np)
    >>> paged_attention(q, k_pages, v_pages, span=span, rel_bias=bias, **pages).ravel()
    array([1.66405912, 6.        ])

    The last two tokens at once, as when drafted tokens are verified; each query sees its own past:

    >>> pages = {"page_table": [[1, 0]], "lengths": [3]}
    >>> paged_attention(np.zeros((1, 1, 2, 1)), k_pages, v_pages, **pages).ravel()
    array([2.5       , 1.66666667])
    """
    arrays = {"q": q, "k_pages": k_pages, "v_pages": v_pages}
    tables = {"rel_k": rel_k, "rel_v": rel_v, "rel_bias": rel_bias, "key_table": key_table, "sinks": sinks}
    xp = namespace_of_arrays(arrays, {**tables, "rel_q": rel_q})
    _check(q, k_pages, v_pages, rel_q)
    if sinks is not None and sinks.ndim > 1 and tuple(sinks.shape) != tuple(q.shape[:-1]):
        raise ValueError(f"`sinks` must have shape (H,) or (B, H, Lq) = {tuple(q.shape[:-1])}, got {describe(sinks)}")
    check_bool("causal", causal)
    window = check_window("window", window)
    table, counts = (_integers(name, x, q, rank, xp=xp) for name, x, rank in
                     (("page_table", page_table, 2), ("lengths", lengths, 1)))  # fmt: skip
    options: dict[str, Any] = {
        **tables, "span": span, "causal": causal, "window": window, "scale": scale, "rel_scale": rel_scale,
        "softcap": softcap, "chunk_size": chunk_size, "impl": impl, "return_lse": True,
    }  # fmt: skip
    known, pools = isinstance(table, list) and isinstance(counts, list), (k_pages, v_pages)
    if known:
        _check_pages(table, counts, k_pages)
    learned = (x for x in (scale, rel_scale) if is_array(x))
    by_page, found = backends.reads_pages((q, *pools, *tables.values(), rel_q, *learned), impl), None
    laid: Any = (page_table, lengths)
    if by_page or not known:
        laid = [xp.asarray(x, dtype=integer(xp), device=device(q)) if isinstance(x, (list, tuple)) else x for x in laid]
    if by_page:
        longest = max(counts, default=0) if known else laid[0].shape[1] * k_pages.shape[1]
        found = _by_page(q, rel_q, (*pools, *laid), longest, known, options, xp=xp)
    if found is None and known:
        found = _by_item(q, rel_q, pools, table, counts, options, xp=xp)
    out, lse = found or _at_once(q, rel_q, pools, laid[0], laid[1], options, xp=xp)
    return (out, lse) if check_bool("return_lse", return_lse) else out


Pools = tuple[Array, Array]


def _by_page(
    q: Array, rel_q: Any, pages: tuple[Any, ...], longest: int, known: bool, options: Any, *, xp: Namespace
) -> tuple[Array, Array] | None:
    """Attend by kernels that read the pages where they are, ``None`` if there are none for this call.

    Keys of the longest item, which have no memory, take the place of those in pages in the checks.
    """
    if not longest or not pages[0].shape[0]:
        return None
    given = {name: x for name, x in options.items() if name != "return_lse"}
    k, v = (xp.broadcast_to(x[0, 0, :, None, :], (q.shape[0], x.shape[2], longest, x.shape[3])) for x in pages[:2])
    causal = given["causal"] or (given["window"] or (None, None))[1] == 0
    tables = {name: x for name, x in given.items() if name in TABLES}
    span = check_tables(tables, given["span"], q, causal=causal, n_keys=longest)
    reaches = known or span.beyond != "error"
    given["span"] = span if reaches else Span(span.left, span.right, "zero")
    call = problem(Arguments(q, k, v, rel_q=rel_q, offset=longest - q.shape[-2], **given), return_lse=True)
    path = backends.path_of_pages(call, pages, reaches=reaches)
    if path is None:
        return None
    out, sums = attend(call, given["impl"], path)
    return out, log_sum_exp(sums)


def _by_item(
    q: Array, rel_q: Any, pools: Pools, table: list[list[int]], counts: list[int], options: Any, *, xp: Namespace
) -> tuple[Array, Array]:
    """Attend item by item: only an item's pages are concatenated, from the first visible one on."""
    size, n, left = pools[0].shape[1], q.shape[-2], (options["window"] or (None, None))[0]
    parts = []
    for item, (pages, count) in enumerate(zip(table, counts, strict=True)):
        first = 0 if left is None else max(0, (count - n - left) // size)
        own = pages[first : -(-count // size)]
        k, v = (_of_pages(x, own, count - first * size, xp=xp) for x in pools)
        given = {**options, "rel_q": None if rel_q is None else rel_q[item, ...]}
        if options["sinks"] is not None and options["sinks"].ndim > 1:
            given["sinks"] = options["sinks"][item, ...]
        parts.append(relative_attention(q[item, ...], k, v, offset=count - n - first * size, **given))
    if not parts:
        shape = q.shape[:-1]
        return nothing((*shape, pools[1].shape[-1]), (q,), xp=xp), nothing(shape, (q,), xp=xp)
    out, lse = (xp.stack([part[which] for part in parts], axis=0) for which in (0, 1))
    return out, lse


def _of_pages(x: Array, pages: list[int], count: int, *, xp: Namespace) -> Array:
    """Return the first ``count`` keys of some pages, ``(Hkv, count, D)``: a view if the pages are consecutive."""
    if pages and pages == list(range(pages[0], pages[0] + len(pages))):
        found = x[pages[0] : pages[0] + len(pages), ...]
    else:
        found = xp.take(x, xp.asarray(pages, dtype=integer(xp), device=device(x)), axis=0)
    flat = xp.reshape(found, (len(pages) * x.shape[1], *x.shape[2:]))
    return xp.permute_dims(flat[: max(count, 0), ...], (1, 0, 2))


def _at_once(
    q: Array, rel_q: Any, pools: Pools, page_table: Array, lengths: Array, options: Any, *, xp: Namespace
) -> tuple[Array, Array]:
    """Attend to the gathered pages of all items; entries after an item's last key are hidden, and zero."""
    rows, each = page_table.shape
    table, counts = (xp.astype(x, integer(xp)) for x in (page_table, lengths))
    places = xp.reshape(within(table, pools[0].shape[0], xp=xp), (-1,))
    total = each * pools[0].shape[1]
    there = integers(0, total, device=device(q), xp=xp) < counts[:, None]
    gathered = []
    for x in pools:
        own = xp.reshape(xp.take(x, places, axis=0), (rows, total, *x.shape[2:]))
        gathered.append(xp.permute_dims(xp.where(there[:, :, None, None], own, 0.0), (0, 2, 1, 3)))
    mask = None if options["causal"] else there[:, None, None, :]
    return relative_attention(q, *gathered, rel_q=rel_q, mask=mask, offset=counts - q.shape[-2], **options)


def _integers(name: str, value: Any, q: Array, rank: int, *, xp: Namespace) -> Any:
    """Return integers as nested lists, or as an array if their values are unknown."""

    def refused() -> ValueError:  # torch.compile makes a constant of a size that a message contains
        shape = "(B, n)" if rank == 2 else "(B,)"
        return ValueError(f"`{name}` must be integers of shape {shape} with B = {q.shape[0]}, got {describe(value)}")

    if isinstance(value, (list, tuple)):
        rows = [list(row) if isinstance(row, (list, tuple)) else row for row in value]
        flat = rows if rank == 1 else [each for row in rows if isinstance(row, list) for each in row]
        shaped = rank == 1 or (all(isinstance(row, list) for row in rows) and len(set(map(len, rows))) <= 1)
        if len(rows) != q.shape[0] or not shaped or not all(map(_is_int, flat)):
            raise refused()
        return rows
    check_companion(name, value, "q", q, xp=xp)
    if len(shape_of(value)) != rank or value.shape[0] != q.shape[0] or not xp.isdtype(value.dtype, "integral"):
        raise refused()
    known = known_values(value)
    return value if known is None else known


def _is_int(value: Any) -> bool:
    return type(value) is int or (isinstance(value, Integral) and not isinstance(value, bool))


def _check(q: Array, k_pages: Array, v_pages: Array, rel_q: Array | None) -> None:
    if q.ndim != 4:
        raise ValueError(f"`q` must have shape (B, H, Lq, D), got {describe(q)}")
    for name, x in (("k_pages", k_pages), ("v_pages", v_pages)):
        if x.ndim != 4:
            raise ValueError(f"`{name}` must have shape (P, page, Hkv, D), got {describe(x)}")
    if k_pages.shape[-1] != q.shape[-1] or k_pages.shape[1] < 1:
        raise ValueError(f"`k_pages` must have pages of keys as wide as `q`, {q.shape[-1]}, got {describe(k_pages)}")
    if k_pages.shape[2] < 1 or q.shape[1] % k_pages.shape[2]:
        raise ValueError(f"`k_pages` must have heads that divide the {q.shape[1]} of `q`, got {describe(k_pages)}")
    if tuple(v_pages.shape[:3]) != tuple(k_pages.shape[:3]):
        raise ValueError(f"`v_pages` must have the pages and heads of `k_pages`, got {describe(v_pages)}")
    if rel_q is not None and tuple(rel_q.shape) != tuple(q.shape):
        raise ValueError(f"`rel_q` must have the shape of `q`, {tuple(q.shape)}, got {describe(rel_q)}")


def _check_pages(table: list[list[int]], counts: list[int], k_pages: Array) -> None:
    pool, size = k_pages.shape[:2]
    for item, (pages, count) in enumerate(zip(table, counts, strict=True)):
        if not 0 <= count <= len(pages) * size:
            raise ValueError(
                f"`lengths` must be 0 … {len(pages) * size} for item {item}, whose {len(pages)} pages have {size} "
                f"keys each, got {count}"
            )
        for page in pages[: -(-count // size)]:
            if not 0 <= page < pool:
                raise ValueError(f"`page_table` must have pages 0 … {pool - 1} for item {item}, got {page}")
