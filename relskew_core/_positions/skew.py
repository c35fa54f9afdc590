"""The skew, its adjoint, and the general form of both, which may begin at any column.

Row ``i`` of the relative layout is read one column earlier than row ``i - 1``. In memory that is a constant step, so
the absolute layout is a *view*: drop some entries of the flattened rows and cut the rest into rows one entry shorter.
"""

from __future__ import annotations

from relskew_core._array.checks import describe
from relskew_core._array.known import exported, joined
from relskew_core._array.namespace import device, namespace_of_arrays
from relskew_core._array.typing import Array, Namespace


def skew(x: Array) -> Array:
    """Turn the relative layout into the absolute layout, without a copy where the library has views.

    Column ``c`` of ``x`` holds the relative position ``r = c - (n - 1)``; the result holds key ``j`` in column ``j``::

        r:  -2 -1  0  1  2         j:  0  1  2
        i=0  .  .  a  b  c              a  b  c
        i=1  .  d  e  f  .      ->      d  e  f
        i=2  g  h  k  .  .              g  h  k

    Parameters
    ----------
    x : array, shape (..., n, n + m - 1)
        Any dtype; ``n >= 1`` queries, ``m >= 1`` keys.

    Returns
    -------
    array, shape (..., n, m)
        ``s[..., i, j] = x[..., i, n - 1 - i + j]``. A view of ``x`` if the last two axes of ``x`` are contiguous.

    Notes
    -----
    Huang et al. 2018, "Music Transformer", section 3.4.1, generalised from causal squares to all ``n`` and ``m``.

    Examples
    --------
    >>> import numpy as np
    >>> x = np.asarray([[-2, -1, 0, 1, 2]] * 3)
    >>> skew(x)
    array([[ 0,  1,  2],
           [-1,  0,  1],
           [-2, -1,  0]])
    """
    xp = namespace_of_arrays({"x": x}, floating=False)
    if x.ndim < 2 or not 1 <= x.shape[-2] <= x.shape[-1]:
        raise ValueError(f"`x` must have shape (..., n, n + m - 1) with n, m >= 1, got {describe(x)}")
    n, width = x.shape[-2:]
    if exported(n, width):  # with a spare column, a single row is no special case
        return skew_from(pad_last(x, 1, 0, xp=xp), n_keys=width - n + 1, first=n, xp=xp)
    return skew_from(x, n_keys=width - n + 1, first=n - 1, xp=xp)


def unskew(s: Array) -> Array:
    """Turn the absolute layout into the relative layout, with zeros where there is no key; the adjoint of :func:`skew`.

    Parameters
    ----------
    s : array, shape (..., n, m)
        Any dtype; ``n >= 1`` queries, ``m >= 1`` keys.

    Returns
    -------
    array, shape (..., n, n + m - 1)
        ``x[..., i, n - 1 - i + j] = s[..., i, j]``, zero elsewhere.

    Examples
    --------
    >>> import numpy as np
    >>> unskew(np.asarray([[1, 2], [3, 4], [5, 6]]))
    array([[0, 0, 1, 2],
           [0, 3, 4, 0],
           [5, 6, 0, 0]])
    """
    xp = namespace_of_arrays({"s": s}, floating=False)
    if s.ndim < 2 or 0 in s.shape[-2:]:
        raise ValueError(f"`s` must have shape (..., n, m) with n, m >= 1, got {describe(s)}")
    n, m = s.shape[-2:]
    if exported(n, m):
        return unskew_from(s, width=n + m, first=n, xp=xp)[..., 1:]
    return unskew_from(s, width=n + m - 1, first=n - 1, xp=xp)


def skew_from(x: Array, *, n_keys: int, first: int, step: int = 1, xp: Namespace) -> Array:
    """Return ``s[i, j] = x[i, first - step · i + j]``, shape (..., n, n_keys), for ``first <= step · n``.

    ``x`` needs at least ``n_keys + step`` columns unless it has less than two rows. Where ``first - step · i + j`` runs
    past the last column the view shows the next row's entries: such places are for the caller to mask.
    """
    *lead, n, width = x.shape
    if n < 2:
        return x[..., first : first + n_keys]
    flat = xp.reshape(x, (*lead, n * width))
    kept = flat[..., first : first + n * (width - step)]
    return xp.reshape(kept, (*lead, n, width - step))[..., :n_keys]


def unskew_from(s: Array, *, width: int, first: int, xp: Namespace) -> Array:
    """Return the adjoint of :func:`skew_from`, shape (..., n, width); undefined entries of ``s`` are zero."""
    *lead, n, n_keys = s.shape
    if n == 1:
        return pad_last(s, first, width - first - n_keys, xp=xp)
    rows = pad_last(s, 0, width - 1 - n_keys, xp=xp)
    flat = pad_last(xp.reshape(rows, (*lead, n * (width - 1))), first, n - first, xp=xp)
    return xp.reshape(flat, (*lead, n, width))


def pad_last(x: Array, before: int, after: int, *, xp: Namespace) -> Array:
    """Put ``before`` and ``after`` zeros around the last axis."""
    pads = [
        xp.zeros((*x.shape[:-1], count), dtype=x.dtype, device=device(x)) if count else None
        for count in (before, after)
    ]
    pieces = [piece for piece in (pads[0], x, pads[1]) if piece is not None]
    return joined(pieces, axis=-1, xp=xp)
