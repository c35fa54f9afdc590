"""Biases that are a formula of the distance: ALiBi's lines and tensor2tensor's logarithm."""

from __future__ import annotations

import math
from typing import Any

from relskew_core._array.checks import check_int
from relskew_core._array.doubles import from_doubles
from relskew_core._array.keywords import explains
from relskew_core._array.namespace import namespace_of
from relskew_core._array.typing import Array
from relskew_core._positions.span import Span, check_span_given


@explains
def alibi_bias(n_heads: int, span: Span, *, xp: Any, dtype: Any = None) -> Array:
    """Return ALiBi's bias: every head's slope times the distance, negative on both sides.

    Parameters
    ----------
    n_heads : int
        Number ``H`` of heads.
    span : Span
        The relative positions, all that occur: neither a line nor a span of it goes on with ``beyond="clip"`` or
        ``"zero"``, which are refused. Beside a table that is clipped, the bias is made from ``Span(left, right)``.
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
    check_span_given(span)
    _check_endless(span)
    rows = ([slope * -abs(r) for r in range(-span.left, span.right + 1)] for slope in alibi_slopes(n_heads))
    return from_doubles(rows, xp=namespace_of(xp), dtype=dtype)


def alibi_slopes(n_heads: int) -> list[float]:
    """Return ALiBi's slopes, one for each head."""
    power = 1 << n_heads.bit_length() - 1
    slopes = [2.0 ** (-8 * (h + 1) / power) for h in range(power)]
    return slopes + [2.0 ** (-4 * (2 * h + 1) / power) for h in range(n_heads - power)]


@explains
def proximal_bias(span: Span, *, xp: Any, dtype: Any = None) -> Array:
    """Return tensor2tensor's proximal bias ``-log(1 + |r|)``, the same for all heads.

    Parameters
    ----------
    span : Span
        The relative positions, all that occur, as in :func:`alibi_bias`.
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
    check_span_given(span)
    _check_endless(span)
    row = [0.0 - math.log1p(abs(r)) for r in range(-span.left, span.right + 1)]
    return from_doubles([row], xp=namespace_of(xp), dtype=dtype)[0, ...]


def _check_endless(span: Span) -> None:
    """Refuse a span that goes on with other numbers than the formula's."""
    if span.beyond != "error":
        further = "repeated" if span.beyond == "clip" else "zero, as if nothing were nearer,"
        raise ValueError(
            f"`span.beyond` must be 'error', got {span.beyond!r}: beyond {-span.left} … {span.right} the bias would be "
            f"{further} where its formula goes on; Span.causal(n) or Span.full(n) of the longest length has it all"
        )
