"""Making and resizing tables: sinusoids of relative positions, and interpolation to another number of rows."""

from __future__ import annotations

import math
from itertools import chain
from typing import Any, Literal, get_args

from relskew_core._array.checks import check_bool, check_choice, check_int, check_real, describe, explains
from relskew_core._array.known import symbolic
from relskew_core._array.namespace import device, namespace_of, namespace_of_arrays
from relskew_core._array.precision import cast, floating, from_doubles, integers, undisturbed, widened
from relskew_core._array.softmax import moved, within
from relskew_core._array.typing import Array, Namespace
from relskew_core._positions.span import Span, check_span_given

Order = Literal["halves", "interleaved"]
Direction = Literal["past", "future", "both"]
Method = Literal["linear", "cubic"]
ORDERS, DIRECTIONS, METHODS = map(get_args, (Order, Direction, Method))  # torch 2.8 does not compile `get_args`


@explains
def sinusoidal_table(
    span: Span,
    dim: int,
    *,
    xp: Any,
    dtype: Any = None,
    order: Order = "halves",
    direction: Direction = "past",
    base: float = 10000.0,
) -> Array:
    """Return the sinusoids of relative positions, for any span: Transformer-XL's ``R`` before its projection.

    Parameters
    ----------
    span : Span
        The relative positions of the rows.
    dim : int
        Even width ``D``.
    xp : module
        Array library to make the array in: ``numpy``, ``torch``, ``cupy``, ``jax.numpy`` …
    dtype : dtype of ``xp``, optional
        The library's default floating dtype if ``None``.
    order : {"halves", "interleaved"}, default "halves"
        All sines and then all cosines (Transformer-XL, XLNet), or alternating (ESPnet, NeMo, HF's Conformers).
    direction : {"past", "future", "both"}, default "past"
        The direction in which angles are positive: ``query - key`` as in all models above, ``key - query``, or the
        distance in both directions (SpeechBrain). The choice changes the sign of the sines.
    base : float, default 10000.0
        Ratio of the longest to the shortest wave.

    Returns
    -------
    array, shape (R, D)

    Notes
    -----
    Vaswani et al. 2017, section 3.5; Dai et al. 2019, "Transformer-XL", section 3.3. Angles are computed in double
    precision, so distant positions are exact in every library.

    Examples
    --------
    >>> import numpy as np
    >>> sinusoidal_table(Span(1, 1), 2, xp=np).round(4)  # r = -1, 0, 1
    array([[ 0.8415,  0.5403],
           [ 0.    ,  1.    ],
           [-0.8415,  0.5403]])
    """
    check_span_given(span)
    dim = check_int("dim", dim, minimum=2)
    if dim % 2:
        raise ValueError(f"`dim` must be even, got {dim}")
    check_choice("order", order, ORDERS)
    check_choice("direction", direction, DIRECTIONS)
    base = check_real("base", base, positive=True)
    xp = namespace_of(xp)
    rates = sinusoid_rates(dim, base=base)
    if symbolic(span.left, span.right):
        there = device(xp.empty(0, dtype=xp.float32))
        if there.type == "mps":  # Apple's GPUs have no float64
            return sinusoids(span, rates, order, direction, xp=xp, dtype=dtype, where="cpu").to(there)
        return sinusoids(span, rates, order, direction, xp=xp, dtype=dtype)

    def row(r: int) -> list[float]:
        steps = _turned(r, direction)
        sines = [math.sin(steps * rate) + 0.0 for rate in rates]
        cosines = [math.cos(steps * rate) for rate in rates]
        return sines + cosines if order == "halves" else [*chain(*zip(sines, cosines, strict=True))]

    return from_doubles(map(row, range(-span.left, span.right + 1)), xp=xp, dtype=dtype)


def sinusoid_rates(dim: int, *, base: float) -> list[float]:
    return [base ** (-2 * index / dim) for index in range(dim // 2)]


def sinusoids(
    span: Span, rates: list[float], order: Order, direction: Direction, *, xp: Namespace, dtype: Any, where: Any = None
) -> Array:
    """Return the result of :func:`sinusoidal_table` by the library's sine, for a number of rows that may change."""
    row = from_doubles([rates], xp=xp, dtype=xp.float64, device=where)
    steps = xp.arange(-span.left, span.right + 1, dtype=xp.float64, device=device(row))
    angles = _turned(steps, direction)[:, None] * row
    parts = xp.stack((xp.sin(angles), xp.cos(angles)), axis=-2 if order == "halves" else -1)
    table = xp.reshape(parts, (span.rows, 2 * len(rates)))
    return cast(table, floating(dtype, xp=xp), xp=xp)


def _turned(r: Any, direction: Direction) -> Any:
    return abs(r) if direction == "both" else r if direction == "future" else -r


@explains
def resize_table(
    table: Array, rows: int, *, method: Method = "linear", align_corners: bool = False, axis: int = -2
) -> Array:
    """Interpolate a table to another number of rows, as vision models do for images of another size.

    Parameters
    ----------
    table : array, shape (..., R, D)
        Of a real floating dtype.
    rows : int
        New number of rows: ``2n - 1`` for ``n`` positions, with ``Span.full(n)``.
    method : {"linear", "cubic"}, default "linear"
        Linear interpolation, or the cubic convolution with ``a = -0.75``, both as in
        ``torch.nn.functional.interpolate``.
    align_corners : bool, default False
        Keep the first and the last row; otherwise rows are cells whose outer edges are kept.
    axis : int, default -2
        Axis of the rows. Two calls resize a table of both heights and widths ``(H, Rh, Rw)``: axes -2 and -1.

    Returns
    -------
    array, shape (..., rows, D)
        In the table's dtype. It is the product with a small matrix, so libraries with automatic differentiation
        differentiate it.

    Examples
    --------
    >>> import numpy as np
    >>> resize_table(np.asarray([[0.0], [1.0], [2.0]]), 5, align_corners=True)[:, 0]
    array([0. , 0.5, 1. , 1.5, 2. ])
    """
    xp = namespace_of_arrays({"table": table})
    axis = check_int("axis", axis)
    if not -table.ndim <= axis < table.ndim or table.shape[axis] < 1:
        raise ValueError(f"`table` must have rows on its axis {axis}, got {describe(table)}")
    check_choice("method", method, METHODS)
    new = check_int("rows", rows, minimum=1)
    corners = check_bool("align_corners", align_corners)
    [columns] = widened((moved(table, axis, -1, xp=xp),), table.dtype, xp=xp)
    with undisturbed(columns):
        resized = xp.matmul(columns, _weights(columns, new, method, align_corners=corners, xp=xp))
    return cast(moved(resized, -1, axis, xp=xp), table.dtype, xp=xp)


def _weights(columns: Array, new: int, method: Method, *, align_corners: bool, xp: Namespace) -> Array:
    """Return the weights of the old rows in each new one, (old, new), for columns (..., old)."""
    old = columns.shape[-1]
    rows, olds = (integers(0, count, device=device(columns), xp=xp) for count in (new, old))
    # The place of a new row among the old ones is above / below: its fraction is exact at any number of rows.
    above, below = (rows * (old - 1), max(new - 1, 1)) if align_corners else ((2 * rows + 1) * old - new, 2 * new)
    start = (above + below) // below - 1  # not of a negative number, which libraries round differently
    t = xp.astype(above - start * below, columns.dtype) / below
    matrix = xp.zeros((old, new), dtype=columns.dtype, device=device(columns))
    for index, tap in (_linear(t) if method == "linear" else _cubic(t)).items():
        nearest = within(start + index, old, xp=xp)
        matrix = matrix + xp.where(olds[:, None] == nearest, tap, 0.0)
    return matrix


def _linear(t: Array) -> dict[int, Array]:
    return {0: 1 - t, 1: t}


def _cubic(t: Array, a: float = -0.75) -> dict[int, Array]:
    """Return the weights of cubic convolution for the four nearest rows (Keys 1981)."""

    def near(x: Array) -> Array:
        return ((a + 2) * x - (a + 3)) * x * x + 1

    def far(x: Array) -> Array:
        return ((a * x - 5 * a) * x + 8 * a) * x - 4 * a

    return {-1: far(t + 1), 0: near(t), 1: near(1 - t), 2: far(2 - t)}
