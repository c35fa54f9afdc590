"""Biases that are a formula of the distance: ALiBi's linear one and tensor2tensor's logarithm."""

from __future__ import annotations

import math
from typing import Any

from relskew_core._array.checks import check_int
from relskew_core._array.doubles import floating, from_doubles
from relskew_core._array.keywords import explains
from relskew_core._array.known import symbolic
from relskew_core._array.namespace import device, namespace_of, namespace_of_arrays
from relskew_core._array.precision import cast, wide
from relskew_core._array.typing import Array, Namespace
from relskew_core._positions.span import Span, check_span_given


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

    See Also
    --------
    t5_buckets : the buckets of a learned bias.
    relative_attention : takes either as ``rel_bias``.

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
    """Return ALiBi's slopes, one for each head."""
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

    See Also
    --------
    alibi_bias : a linear bias.
    relative_attention : takes the bias as ``rel_bias``.

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
    """Refuse a span whose positions beyond its ends would not follow the formula."""
    if span.beyond != "error":
        further = "repeated" if span.beyond == "clip" else "zero, as if nothing were nearer,"
        raise ValueError(
            f"`span.beyond` must be 'error', got {span.beyond!r}: beyond {-span.left} … {span.right} the bias would be "
            f"{further} and not follow its formula: use Span.causal(n) or Span.full(n) for the longest length"
        )
