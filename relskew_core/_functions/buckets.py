"""Buckets of relative positions, which map many positions to the few rows of a table.

``rel_bias`` and ``rel_k`` of ``relative_attention`` are those rows, taken once a call and not once a pair.
"""

from __future__ import annotations

import math
from typing import Any

from relskew_core._array.checks import check_bool, check_int, explains
from relskew_core._array.known import exported, symbolic
from relskew_core._array.namespace import device, namespace_of, namespace_of_arrays
from relskew_core._array.precision import cast, floating, from_doubles, wide
from relskew_core._array.typing import Array, Namespace
from relskew_core._positions.span import Span, check_span_given


@explains
def t5_buckets(span: Span, *, num_buckets: int, max_distance: int, bidirectional: bool) -> tuple[int, ...]:
    """Return the bucket of every relative position of a span, as T5 numbers them.

    Near positions have a bucket each, and farther ones share buckets, whose ranges grow logarithmically. All positions
    from ``max_distance`` on share the last bucket, so ``Span.clipped(max_distance)`` suffices for every length::

        r:       …  -9 -8  …  -1   0   1  …  …        num_buckets=32, max_distance=128, bidirectional
        bucket:  …   8  8  …   1   0  17  …  …        past: 0 … 15, future: 16 … 31

    Parameters
    ----------
    span : Span
        The relative positions.
    num_buckets : int
        Number of buckets; if ``bidirectional``, each side has half of them.
    max_distance : int
        Distance from which on all positions share the last bucket.
    bidirectional : bool
        True for encoders: the future has separate buckets. False for decoders: the whole future has bucket 0.

    Returns
    -------
    tuple of int, length ``span.rows``
        ``rel_bias = table[buckets].T`` for T5's table ``(num_buckets, H)``.

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
    _check_span(span)
    bidirectional = check_bool("bidirectional", bidirectional)
    num_buckets = check_int("num_buckets", num_buckets, minimum=4 if bidirectional else 2)
    side = num_buckets // 2 if bidirectional else num_buckets
    max_distance = check_int("max_distance", max_distance, minimum=side // 2 + 1)
    starts = _t5_starts(side, max_distance)
    future = [bucket + side for bucket in _by_distance(starts, span.right)] if bidirectional else [0] * (span.right + 1)
    return (*reversed(_by_distance(starts, span.left)), *future[1:])


def _check_span(span: Span) -> None:
    check_span_given(span)
    if exported(span.left, span.right):
        raise ValueError(
            "`span` must have ints, whose buckets are constants of a program, got lengths that vary in torch.export: "
            "use a span that is clipped where the last bucket begins, as Span.clipped(max_distance)"
        )


def _t5_starts(side: int, max_distance: int) -> list[int]:
    """Return the first distance of every bucket on one side, ascending."""
    exact = side // 2
    wide = side - exact
    # Bucket exact + b begins at the first distance with (distance / exact)^wide >= (max_distance / exact)^b.
    starts = [*range(exact)]
    for b in range(wide):
        least = max_distance**b * exact ** (wide - b)
        starts.append(_first(exact, max_distance, wide, least))
    return starts


def _first(low: int, high: int, power: int, least: int) -> int:
    """Return the first distance of ``low … high`` whose power is at least a number, else ``high``.

    The module ``bisect`` does the same, and torch.compile does not trace it.
    """
    while low < high:
        middle = (low + high) // 2
        low, high = (low, middle) if middle**power >= least else (middle + 1, high)
    return low


def _by_distance(starts: list[int], furthest: int) -> list[int]:
    """Return the bucket of every distance ``0 … furthest``, from the first distance of each bucket."""
    ends = [min(end, furthest + 1) for end in (*starts[1:], furthest + 1)]
    return [bucket for bucket, (start, end) in enumerate(zip(starts, ends, strict=True)) for _ in range(start, end)]


@explains
def deberta_buckets(span: Span, *, position_buckets: int, max_distance: int | None) -> tuple[int, ...]:
    """Return the row of DeBERTa's relative embeddings for every relative position of a span.

    The rows are ordered by the distance ``query - key``, in the opposite direction. Near distances have a row each;
    farther ones share rows, whose ranges grow logarithmically::

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
        ``max_position_embeddings`` if that is not positive). ``None``: each row is one distance, as in version 1.

    Returns
    -------
    tuple of int, length ``span.rows``
        ``rel_k = table[rows]`` for the projected table ``(2S, D)``.

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
    _check_span(span)
    size = check_int("position_buckets", position_buckets, minimum=1 if max_distance is None else 4)
    if max_distance is not None:
        max_distance = check_int("max_distance", max_distance, minimum=size // 2 + 2)
    starts = [*range(size + 1)] if max_distance is None else _deberta_starts(size, max_distance)
    past = [min(size + bucket, 2 * size - 1) for bucket in _by_distance(starts, span.left)]
    return (*reversed(past), *[size - bucket for bucket in _by_distance(starts, span.right)[1:]])


def _deberta_starts(size: int, max_distance: int) -> list[int]:
    """Return the first distance of every bucket on one side, ascending, up to the last one that has a row."""
    half, last = size // 2, max_distance - 1
    wide = half - 1
    # Bucket half + b + 1 begins at the first distance with (distance / half)^wide > (last / half)^b, below last^2.
    starts = [*range(half + 2)]
    for b in range(1, size - half):
        starts.append(_first(half, last**2, wide, last**b * half**wide // half**b + 1))
    return starts


@explains
def alibi_bias(n_heads: int, span: Span, *, xp: Any = None, like: Array | None = None, dtype: Any = None) -> Array:
    """Return ALiBi's bias: the slope of each head times the distance, negative on both sides.

    Parameters
    ----------
    n_heads : int
        Number ``H`` of heads.
    span : Span
        All relative positions that occur. Spans with ``beyond="clip"`` or ``"zero"`` are rejected, because neither
        continues a linear bias; for a call with a clipped table, make the bias from ``Span(left, right)``.
    xp : module, optional
        Array library to make the array in: ``numpy``, ``torch``, ``cupy``, ``jax.numpy`` … Pass either this or
        ``like``.
    like : array, optional
        An array, such as the queries, whose library, device and floating dtype the bias takes.
    dtype : dtype of the library, optional
        By default that of ``like``, or the library's default floating dtype.

    Returns
    -------
    array, shape (H, R)

    Notes
    -----
    Press et al. 2022, "Train Short, Test Long", section 3: slopes ``2^(-8h/H)``. If ``H`` is not a power of two, the
    slopes are those of the next lower power, followed by every other slope of the next higher power, as in the authors'
    code.

    Examples
    --------
    >>> import numpy as np
    >>> alibi_bias(2, Span.causal(3), xp=np)
    array([[-0.125     , -0.0625    , 0.        ],
           [-0.0078125 , -0.00390625, 0.        ]])
    >>> alibi_bias(2, Span.causal(3), like=np.ones(1, dtype=np.float32)).dtype
    dtype('float32')
    """
    n_heads = check_int("n_heads", n_heads, minimum=1)
    check_span_given(span)
    check_endless(span)
    xp, dtype, where = _placed(xp, like, dtype)
    slopes = alibi_slopes(n_heads)
    if symbolic(span.left, span.right):
        between = xp.asarray(slopes, dtype=wide(dtype, xp=xp), device=where)
        return cast(alibi_between(between, span.left, span.right, xp=xp), dtype, xp=xp)
    rows = ([slope * -abs(r) for r in range(-span.left, span.right + 1)] for slope in slopes)
    return from_doubles(rows, xp=xp, dtype=dtype, device=where)


def alibi_slopes(n_heads: int) -> list[float]:
    power = 1 << n_heads.bit_length() - 1
    slopes = [2.0 ** (-8 * (h + 1) / power) for h in range(power)]
    return slopes + [2.0 ** (-4 * (2 * h + 1) / power) for h in range(n_heads - power)]


def alibi_between(slopes: Array, left: int, right: int, *, xp: Namespace) -> Array:
    """Return ALiBi's bias of the relative positions ``-left … right``, in the dtype of the slopes ``(H,)``."""
    r = xp.arange(-left, right + 1, dtype=wide(slopes.dtype, xp=xp), device=device(slopes))
    return cast(cast(slopes[:, None], r.dtype, xp=xp) * -xp.abs(r), slopes.dtype, xp=xp)


@explains
def proximal_bias(span: Span, *, xp: Any = None, like: Array | None = None, dtype: Any = None) -> Array:
    """Return tensor2tensor's proximal bias ``-log(1 + |r|)``, the same for all heads.

    Parameters
    ----------
    span : Span
        The relative positions, all that occur, as in :func:`alibi_bias`.
    xp, like, dtype : optional
        As in :func:`alibi_bias`.

    Returns
    -------
    array, shape (R,)

    Examples
    --------
    >>> import numpy as np
    >>> proximal_bias(Span(1, 1), xp=np)
    array([-0.69314718,  0.        , -0.69314718])
    """
    check_span_given(span)
    check_endless(span)
    xp, dtype, where = _placed(xp, like, dtype)
    if symbolic(span.left, span.right):
        r = xp.arange(-span.left, span.right + 1, dtype=wide(dtype, xp=xp), device=where)
        return cast(0.0 - xp.log1p(xp.abs(r)), dtype, xp=xp)
    row = [0.0 - math.log1p(abs(r)) for r in range(-span.left, span.right + 1)]
    return from_doubles([row], xp=xp, dtype=dtype, device=where)[0, ...]


def _placed(xp: Any, like: Array | None, dtype: Any) -> tuple[Namespace, Any, Any]:
    """Return the library, the dtype and the device of an array to be made, by those of another if it is given."""
    if (xp is None) == (like is None):
        both = "None" if xp is None else "both"
        raise TypeError(f"either `xp` or `like` must be given, got {both}")
    if like is None:
        xp = namespace_of(xp)
        return xp, floating(dtype, xp=xp), None
    xp = namespace_of_arrays({"like": like}, floating=dtype is None)
    return xp, like.dtype if dtype is None else dtype, device(like)


def check_endless(span: Span) -> None:
    if span.beyond != "error":
        further = "repeated" if span.beyond == "clip" else "zero, as if nothing were nearer,"
        raise ValueError(
            f"`span.beyond` must be 'error', got {span.beyond!r}: beyond {-span.left} … {span.right} the bias would be "
            f"{further} and not follow its formula: use Span.causal(n) or Span.full(n) for the longest length"
        )
