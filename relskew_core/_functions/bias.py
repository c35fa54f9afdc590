"""Biases by relative position: one number for each head and relative position, and rows of tables by bucket.

All of them are ``rel_bias`` of ``relative_attention``, which reads them inside its loop over chunks; only
:func:`toeplitz` writes the whole matrix, for attention that takes nothing but a matrix.
"""

from __future__ import annotations

import math
from typing import Any

from relskew_core import backends
from relskew_core._array.checks import check_bool, check_int, describe
from relskew_core._array.namespace import namespace_of, namespace_of_arrays
from relskew_core._array.typing import Array, Namespace
from relskew_core._kernel.problem import default_span
from relskew_core._positions.skew import pad_last, slide
from relskew_core._positions.span import Span
from relskew_core._positions.table import Extension
from relskew_core._positions.visibility import Visibility


def toeplitz(
    bias: Array,
    span: Span | None = None,
    *,
    n_queries: int,
    n_keys: int,
    offset: int = 0,
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
        Which relative positions they stand for; by default ``Span.causal(R)`` if ``causal``, else
        ``Span.full((R + 1) // 2)`` for odd ``R``.
    n_queries, n_keys : int
        Numbers of queries and keys, at least 1.
    offset : int, default 0
        Position of query 0 where key 0 stands at 0.
    causal : bool, default False
        Keys in a query's future count for nothing: zeros, whatever ``bias`` holds at ``r > 0``.

    Returns
    -------
    array, shape (..., H, n_queries, n_keys) or (n_queries, n_keys)
        NumPy and CuPy: a read-only view of the ``n_queries + n_keys - 1`` numbers that occur, no matrix in memory.
        torch: one copy of the result's size. Elsewhere one copy of ``n_queries · (n_queries + n_keys)`` numbers.

    Raises
    ------
    ValueError, TypeError
        If an argument does not fit, or ``bias`` with ``beyond="error"`` is too short; the message names the argument.

    See Also
    --------
    relskew_core.relative_attention : takes ``bias`` itself as ``rel_bias`` and never holds more than a chunk of it.

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
    span = check_span("bias", bias.shape[-1], span, causal=check_bool("causal", causal))
    n, m = check_int("n_queries", n_queries, minimum=1), check_int("n_keys", n_keys, minimum=1)
    offset = check_int("offset", offset)
    Visibility(n, m, offset, right=0 if causal else None).check_reach("bias", span)
    low = -(n - 1 + offset)
    return windows(occurring(bias, span, low, low + n + m - 2, causal=causal, xp=xp), n, m, xp=xp)


def check_span(name: str, rows: int, span: Span | None, *, causal: bool = False, span_name: str = "span") -> Span:
    """Return the span of ``rows`` rows, refusing one of another size."""
    if span is None:
        return default_span(name, rows, causal=causal, span_name=span_name)
    if not isinstance(span, Span):
        raise TypeError(f"`{span_name}` must be a Span or None, got {describe(span)}")
    if rows != span.rows:
        raise ValueError(f"`{name}` must have the {span.rows} rows of {span}, got {rows}")
    return span


def occurring(bias: Array, span: Span, low: int, high: int, *, causal: bool = False, xp: Namespace) -> Array:
    """Return the numbers of the relative positions ``low … high``, shape (..., high - low + 1)."""
    last = min(high, 0) if causal else high
    if last < low:
        return xp.zeros_like(xp.broadcast_to(bias[..., :1], (*bias.shape[:-1], high - low + 1)))
    extension = Extension.of(span.left, span.rows, span.beyond, low, last)
    return pad_last(extension.widen(bias[..., extension.start : extension.stop], xp=xp), 0, high - last, xp=xp)


def windows(row: Array, n: int, m: int, *, xp: Namespace) -> Array:
    """Return ``s[..., i, j] = row[..., n - 1 - i + j]``, shape (..., n, m), of a row of ``n + m - 1`` entries.

    Row ``i`` starts one entry before row ``i - 1``: a view takes a negative stride, which only some libraries have.
    """
    library = backends.library_name(xp)
    if library in ("numpy", "cupy"):
        return xp.lib.stride_tricks.sliding_window_view(row, m, axis=-1)[..., ::-1, :]
    if library == "torch":
        return xp.flip(row.unfold(-1, m, 1), axis=-2)
    spare = pad_last(row, 1, 0, xp=xp)[..., None, :]
    return slide(xp.broadcast_to(spare, (*row.shape[:-1], n, n + m)), n_keys=m, first=n, xp=xp)


def t5_buckets(span: Span, *, num_buckets: int, max_distance: int, bidirectional: bool) -> tuple[int, ...]:
    """Return the bucket of every relative position of a span, as T5 numbers them.

    Near positions have a bucket each, further ones share buckets that grow logarithmically, and everything from
    ``max_distance`` on at the latest shares the last one, so ``Span.clipped(max_distance)`` serves every length::

        r:       …  -9 -8  …  -1   0   1  …  …        num_buckets=32, max_distance=128, bidirectional
        bucket:  …   8  8  …   1   0  17  …  …        past: 0 … 15, future: 16 … 31

    Parameters
    ----------
    span : Span
        The relative positions.
    num_buckets : int
        Number of buckets; both sides share them if ``bidirectional``, half each.
    max_distance : int
        Distance from which on all positions share the last bucket.
    bidirectional : bool
        Encoders: the future has buckets of its own. Decoders (False): all of the future has bucket 0.

    Returns
    -------
    tuple of int, length ``span.rows``
        ``rel_bias = table[buckets].T`` for T5's table ``(num_buckets, H)``.

    Raises
    ------
    ValueError, TypeError
        If an argument does not fit; the message names it.

    Notes
    -----
    Raffel et al. 2020, "Exploring the Limits of Transfer Learning with a Unified Text-to-Text Transformer", section
    2.1. With ``b`` buckets a side, ``e = b // 2`` of them exact: ``e + floor(log(d / e) / log(max / e) · (b - e))``, at
    most ``b - 1``, computed here in integers, so that no rounding of a logarithm moves a boundary.

    Examples
    --------
    >>> t5_buckets(Span(4, 4), num_buckets=8, max_distance=4, bidirectional=True)
    (3, 3, 2, 1, 0, 5, 6, 7, 7)
    >>> t5_buckets(Span(5, 1), num_buckets=4, max_distance=4, bidirectional=False)
    (3, 3, 3, 2, 1, 0, 0)
    """
    _check_span_type(span)
    bidirectional = check_bool("bidirectional", bidirectional)
    num_buckets = check_int("num_buckets", num_buckets, minimum=4 if bidirectional else 2)
    side = num_buckets // 2 if bidirectional else num_buckets
    max_distance = check_int("max_distance", max_distance, minimum=side // 2 + 1)

    def bucket(r: int) -> int:
        if r > 0:
            return side + _t5_bucket(r, side, max_distance) if bidirectional else 0
        return _t5_bucket(-r, side, max_distance)

    return tuple(bucket(r) for r in range(-span.left, span.right + 1))


def _t5_bucket(distance: int, side: int, max_distance: int) -> int:
    exact = side // 2
    if distance < exact:
        return distance
    if distance >= max_distance:
        return side - 1
    # step is the largest b with (distance / exact)^wide >= (max_distance / exact)^b, in whole numbers.
    wide, step = side - exact, 0
    while distance**wide * exact ** (step + 1) >= max_distance ** (step + 1) * exact**wide:
        step += 1
    return exact + step


def deberta_buckets(span: Span, *, position_buckets: int, max_distance: int | None) -> tuple[int, ...]:
    """Return the row of DeBERTa's relative embeddings for every relative position of a span.

    The rows count distances ``query - key``, the other way round than here; near ones have a row each, further ones
    share rows that grow logarithmically::

        r:     …   2    1   0   -1   -2  …           S = position_buckets, rows 0 … 2S - 1
        row:   …  S-2  S-1  S   S+1  S+2 …

    Parameters
    ----------
    span : Span
        The relative positions.
    position_buckets : int
        ``S``, half of the rows: ``position_buckets`` of versions 2 and 3, ``max_relative_positions`` of version 1.
    max_distance : int or None
        Distance of the last shared row: ``max_relative_positions`` of versions 2 and 3 (their
        ``max_position_embeddings`` where that is not positive). ``None``: every row is one distance, as in version 1.

    Returns
    -------
    tuple of int, length ``span.rows``
        ``rel_k = table[rows]`` for the projected table ``(2S, D)``.

    Raises
    ------
    ValueError, TypeError
        If an argument does not fit; the message names it.

    Notes
    -----
    He et al. 2021, "DeBERTa", equation 3; the buckets are version 2's: beyond ``h = S // 2`` the distance ``d`` becomes
    ``h + ceil(log(d / h) / log((max_distance - 1) / h) · (h - 1))``, computed here in integers.

    Examples
    --------
    >>> deberta_buckets(Span(4, 2), position_buckets=4, max_distance=None)
    (7, 7, 6, 5, 4, 3, 2)
    >>> deberta_buckets(Span(8, 2), position_buckets=6, max_distance=10)
    (11, 11, 11, 10, 10, 9, 8, 7, 6, 5, 4)
    """
    _check_span_type(span)
    size = check_int("position_buckets", position_buckets, minimum=1 if max_distance is None else 4)
    if max_distance is not None:
        max_distance = check_int("max_distance", max_distance, minimum=size // 2 + 2)

    def row(distance: int) -> int:
        bucket = distance if max_distance is None else _deberta_bucket(distance, size // 2, max_distance)
        return min(max(bucket + size, 0), 2 * size - 1)

    return tuple(row(-r) for r in range(-span.left, span.right + 1))


def _deberta_bucket(distance: int, half: int, max_distance: int) -> int:
    far = min(abs(distance), max_distance)  # further ones are beyond the last row
    if far <= half:
        return distance
    # step is the smallest b with (far / half)^wide <= ((max_distance - 1) / half)^b, in whole numbers.
    wide, step = half - 1, 1
    while far**wide * half**step > (max_distance - 1) ** step * half**wide:
        step += 1
    return half + step if distance > 0 else -half - step


def alibi_bias(n_heads: int, span: Span, *, xp: Any, dtype: Any = None) -> Array:
    """Return ALiBi's bias: every head's slope times the distance, negative on both sides.

    Parameters
    ----------
    n_heads : int
        Number ``H`` of heads.
    span : Span
        The relative positions; a line cannot be clipped, so give what occurs.
    xp : module
        Array library to make the array in: ``numpy``, ``torch``, ``cupy``, ``jax.numpy`` …
    dtype : dtype of ``xp``, optional
        The library's default floating dtype if ``None``.

    Returns
    -------
    array, shape (H, R)

    Raises
    ------
    ValueError, TypeError
        If an argument does not fit; the message names it.

    Notes
    -----
    Press et al. 2022, "Train Short, Test Long", section 3: slopes ``2^(-8h/H)``; where ``H`` is no power of two, those
    of the power below, then every other one of the power above, as in the authors' code.

    Examples
    --------
    >>> import numpy as np
    >>> alibi_bias(2, Span.causal(3), xp=np)
    array([[-0.125     , -0.0625    , 0.        ],
           [-0.0078125 , -0.00390625, 0.        ]])
    """
    n_heads = check_int("n_heads", n_heads, minimum=1)
    _check_span_type(span)
    rows = [[slope * -abs(r) for r in range(-span.left, span.right + 1)] for slope in alibi_slopes(n_heads)]
    return namespace_of(xp).asarray(rows, dtype=dtype)


def alibi_slopes(n_heads: int) -> list[float]:
    """Return ALiBi's slopes, one for each head."""
    power = 1 << n_heads.bit_length() - 1
    slopes = [2.0 ** (-8 * (h + 1) / power) for h in range(power)]
    return slopes + [2.0 ** (-4 * (2 * h + 1) / power) for h in range(n_heads - power)]


def proximal_bias(span: Span, *, xp: Any, dtype: Any = None) -> Array:
    """Return tensor2tensor's proximal bias ``-log(1 + |r|)``, the same for all heads.

    Parameters
    ----------
    span : Span
        The relative positions.
    xp : module
        Array library to make the array in.
    dtype : dtype of ``xp``, optional
        The library's default floating dtype if ``None``.

    Returns
    -------
    array, shape (R,)

    Examples
    --------
    >>> import numpy as np
    >>> proximal_bias(Span(1, 1), xp=np)
    array([-0.69314718,  0.        , -0.69314718])
    """
    _check_span_type(span)
    return namespace_of(xp).asarray([0.0 - math.log1p(abs(r)) for r in range(-span.left, span.right + 1)], dtype=dtype)


def _check_span_type(span: Any) -> None:
    if not isinstance(span, Span):
        raise TypeError(f"`span` must be a Span, got {describe(span)}")
