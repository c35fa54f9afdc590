"""Other people's tables whose rows descend: every pair of functions flips a table here and back."""

from __future__ import annotations

from relskew_core._array.checks import describe
from relskew_core._array.typing import Array
from relskew_core._positions.span import Span
from relskew_core.conventions._checks import checked, fits, half, symmetric


def from_ukhov(table: Array) -> tuple[Array, Span]:
    """Read a table of the diagonal form (I. Ukhov): from the future to the past.

    ::

        row    0 … n-1 …   2n-2
        rel  n-1 …   0 … -(n-1)

    Parameters
    ----------
    table : array, shape (2n - 1, D) or (H, 2n - 1, D)

    Returns
    -------
    table : array
        Flipped.
    span : Span
        ``Span.full(n)``.

    Examples
    --------
    >>> import numpy as np
    >>> from_ukhov(np.asarray([[1.0], [0.0], [-1.0]]))[0][:, 0]
    array([-1.,  0.,  1.])
    """
    xp = checked(table)
    reach = half(table, "2n - 1")
    return xp.flip(table, axis=-2), Span(reach, reach)


def to_ukhov(table: Array, span: Span) -> Array:
    """Write a table of the diagonal form; the inverse of :func:`from_ukhov`.

    Parameters
    ----------
    table : array, shape (R, D) or (H, R, D)
        Rows of ascending relative positions.
    span : Span
        Which relative positions they are.
    """
    symmetric(fits(table, span))
    return checked(table).flip(table, axis=-2)


def from_distance(table: Array) -> tuple[Array, Span]:
    """Read a table by distance ``query - key``: Lingvo, HF BERT's ``relative_key``, SAM, ViTDet, MViT.

    The same rows as :func:`from_ukhov`::

        row           0 … n-1 …   2n-2
        query - key  -(n-1) … 0 …  n-1
        rel         n-1 …     0 … -(n-1)

    Parameters
    ----------
    table : array, shape (2n - 1, D) or (H, 2n - 1, D)
        ``distance_embedding.weight``, ``rel_pos_h``, ``rel_pos_w`` …

    Returns
    -------
    table : array
        Flipped.
    span : Span
        ``Span.full(n)``. SAM, ViTDet and MViT resize their tables to other sizes: see ``resize_table``.

    Examples
    --------
    >>> import numpy as np
    >>> from_distance(np.asarray([[1.0], [0.0], [-1.0]]))[0][:, 0]
    array([-1.,  0.,  1.])
    """
    return from_ukhov(table)


def to_distance(table: Array, span: Span) -> Array:
    """Write a table by distance ``query - key``; the inverse of :func:`from_distance`.

    Parameters
    ----------
    table : array, shape (R, D) or (H, R, D)
        Rows of ascending relative positions.
    span : Span
        Which relative positions they are.
    """
    return to_ukhov(table, span)


def from_speecht5(table: Array) -> tuple[Array, Span]:
    """Read SpeechT5's table: clipped distances ``query - key``, one less ahead than back, so that rows are even.

    ::

        row           0 … m …   2m-1
        query - key  -m … 0 …    m-1
        rel           m … 0 … -(m-1)      and the edge rows for everything further away

    Parameters
    ----------
    table : array, shape (2m, D) or (H, 2m, D)
        ``pe_k.weight`` of the encoder's relative positional encoding.

    Returns
    -------
    table : array
        Flipped.
    span : Span
        ``Span(m - 1, m, "clip")``.

    Examples
    --------
    >>> import numpy as np
    >>> from_speecht5(np.zeros((320, 2)))[1]
    Span(left=159, right=160, beyond='clip')
    """
    xp = checked(table)
    rows = table.shape[-2]
    if rows % 2:
        raise ValueError(f"`table` must have an even number of rows, 2m, got {describe(table)}")
    return xp.flip(table, axis=-2), Span(rows // 2 - 1, rows // 2, "clip")


def to_speecht5(table: Array, span: Span) -> Array:
    """Write a table as SpeechT5 has it; the inverse of :func:`from_speecht5`.

    Parameters
    ----------
    table : array, shape (R, D) or (H, R, D)
        Rows of ascending relative positions.
    span : Span
        Which relative positions they are.
    """
    fits(table, span)
    if span.right != span.left + 1:
        raise ValueError(f"`span` must reach one further ahead than back, as SpeechT5's tables do, got {span}")
    return checked(table).flip(table, axis=-2)


def from_inkling(table: Array) -> tuple[Array, Span]:
    """Read Inkling's rows: how far back a key lies, zero beyond the extent.

    ::

        row  0    1 …   extent-1
        rel  0   -1 … -(extent-1)

    Parameters
    ----------
    table : array, shape (extent, D) or (H, extent, D)

    Returns
    -------
    table : array
        Flipped.
    span : Span
        ``Span(extent - 1, 0, "zero")``.

    Examples
    --------
    >>> import numpy as np
    >>> table, span = from_inkling(np.asarray([[0.0], [-1.0], [-2.0]]))
    >>> table[:, 0], span
    (array([-2., -1.,  0.]), Span(left=2, right=0, beyond='zero'))
    """
    xp = checked(table)
    return xp.flip(table, axis=-2), Span(table.shape[-2] - 1, 0, "zero")


def to_inkling(table: Array, span: Span) -> Array:
    """Write a table as Inkling has it; the inverse of :func:`from_inkling`.

    Parameters
    ----------
    table : array, shape (R, D) or (H, R, D)
        Rows of ascending relative positions.
    span : Span
        Which relative positions they are.
    """
    if fits(table, span).right:
        raise ValueError(f"`span` must end at 0, as Inkling's tables do, got {span}")
    return checked(table).flip(table, axis=-2)
