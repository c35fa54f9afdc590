"""Other people's tables whose rows ascend as ours do: every pair of functions brings a table here and back.

In the pictures ``rel`` is key position minus query position, negative in the past, as everywhere in this package.
"""

from __future__ import annotations

from relskew_core._array.checks import check_bool, check_int
from relskew_core._array.typing import Array
from relskew_core._positions.span import Span
from relskew_core.conventions._checks import as_is, checked, fits, half, symmetric


def from_vits(table: Array) -> tuple[Array, Span]:
    """Read a table of VITS, HF ``VitsAttention``, Piper: a window ``±w`` around the query, zero outside.

    ::

        row   0 …  w … 2w
        rel  -w …  0 …  w

    Parameters
    ----------
    table : array, shape (1, 2w + 1, D), (H, 2w + 1, D) or (2w + 1, D)
        ``emb_rel_k`` or ``emb_rel_v``; a first axis of 1 is one table for all heads.

    Returns
    -------
    table : array, shape (2w + 1, D) or (H, 2w + 1, D)
    span : Span
        ``Span(w, w, "zero")``.

    Examples
    --------
    >>> import numpy as np
    >>> table, span = from_vits(np.zeros((1, 9, 96)))
    >>> table.shape, span
    ((9, 96), Span(left=4, right=4, beyond='zero'))
    """
    checked(table)
    window = half(table, "2w + 1")
    shared = table.ndim == 3 and table.shape[0] == 1
    return (table[0, ...] if shared else table), Span(window, window, "zero")


def to_vits(table: Array, span: Span) -> Array:
    """Write a table as VITS has it; the inverse of :func:`from_vits`, with a first axis of 1 if heads share it.

    Parameters
    ----------
    table : array, shape (R, D) or (H, R, D)
        Rows of ascending relative positions.
    span : Span
        Which relative positions they are.
    """
    symmetric(fits(table, span))
    return table[None, ...] if table.ndim == 2 else table


def from_tensor2tensor(table: Array, *, causal: bool) -> tuple[Array, Span]:
    """Read a table of tensor2tensor's relative attention version 2, zero beyond it.

    ::

        causal          row       0 … n-1        unmasked   row       0 … n-1 … 2n-2
                        rel  -(n-1) …   0                   rel  -(n-1) …   0 …  n-1

    Parameters
    ----------
    table : array, shape (R, D) or (H, R, D)
        ``key_relative_embeddings`` or ``value_relative_embeddings``; ``R`` is ``n`` if ``causal``, else ``2n - 1``.
    causal : bool
        Which of both attentions it belongs to.

    Returns
    -------
    table : array
        As it came.
    span : Span

    Examples
    --------
    >>> import numpy as np
    >>> from_tensor2tensor(np.zeros((5, 2)), causal=True)[1]
    Span(left=4, right=0, beyond='zero')
    """
    checked(table)
    if check_bool("causal", causal):
        return table, Span(table.shape[-2] - 1, 0, "zero")
    reach = half(table, "2n - 1")
    return table, Span(reach, reach, "zero")


def to_tensor2tensor(table: Array, span: Span) -> Array:
    """Write a table as tensor2tensor has it; the inverse of :func:`from_tensor2tensor`.

    Parameters
    ----------
    table : array, shape (R, D) or (H, R, D)
        Rows of ascending relative positions.
    span : Span
        Which relative positions they are.
    """
    return table if fits(table, span).right == 0 else as_is(table, symmetric(span))


def from_shaw(table: Array, *, left: int | None = None) -> tuple[Array, Span]:
    """Read a clipped table: Shaw et al., fairseq2, CTranslate2, Wav2Vec2-BERT.

    ::

        row   0 … left … left + right
        rel  -left … 0 … right            and the edge rows for everything further away

    Parameters
    ----------
    table : array, shape (R, D) or (H, R, D)
        Row ``clip(rel, -left, right) + left``.
    left : int, optional
        Reach into the past; half of the ``2k + 1`` rows by default.

    Returns
    -------
    table : array
        As it came.
    span : Span
        ``Span(left, right, "clip")``.

    Examples
    --------
    >>> import numpy as np
    >>> from_shaw(np.zeros((73, 2)), left=64)[1]
    Span(left=64, right=8, beyond='clip')
    """
    checked(table)
    left = half(table, "2k + 1") if left is None else check_int("left", left, minimum=0)
    right = table.shape[-2] - 1 - left
    if right < 0:
        raise ValueError(f"`left` must be less than the number of rows, {table.shape[-2]}, got {left}")
    return table, Span(left, right, "clip")


def to_shaw(table: Array, span: Span) -> Array:
    """Write a clipped table; the inverse of :func:`from_shaw`, for every ``left`` and ``right``.

    Parameters
    ----------
    table : array, shape (R, D) or (H, R, D)
        Rows of ascending relative positions.
    span : Span
        Which relative positions they are.
    """
    return as_is(table, span)


def from_music_transformer(table: Array) -> tuple[Array, Span]:
    """Read Music Transformer's ``E_r`` (Huang et al. and its ports): the past only.

    ::

        row       0 … n-1
        rel  -(n-1) …   0

    Parameters
    ----------
    table : array, shape (n, D) or (H, n, D)

    Returns
    -------
    table : array
        As it came.
    span : Span
        ``Span.causal(n)``.

    Examples
    --------
    >>> import numpy as np
    >>> from_music_transformer(np.zeros((2048, 64)))[1]
    Span(left=2047, right=0, beyond='error')
    """
    checked(table)
    return table, Span.causal(table.shape[-2])


def to_music_transformer(table: Array, span: Span) -> Array:
    """Write a table as Music Transformer has it; the inverse of :func:`from_music_transformer`.

    Parameters
    ----------
    table : array, shape (R, D) or (H, R, D)
        Rows of ascending relative positions.
    span : Span
        Which relative positions they are.
    """
    if fits(table, span).right:
        raise ValueError(f"`span` must end at 0, as Music Transformer's tables do, got {span}")
    return table


def from_transformer_xl(table: Array, *, n_keys: int | None = None) -> tuple[Array, Span]:
    """Read the projected sinusoids of Transformer-XL, XLNet and the Conformers (ESPnet, NeMo, SpeechBrain, HF).

    Their *contents* descend, from the sinusoid of the furthest past to that of the furthest future, and so their
    *rows* ascend in ``rel``. Nothing is to be flipped::

        sinusoid of query - key   n-1 … 0 … -(n-1)
        row                         0 …      2n-2
        rel                    -(n-1) … 0 …   n-1

    Parameters
    ----------
    table : array, shape (R, D) or (H, R, D)
        ``R(pos)`` after the projection, split into heads.
    n_keys : int, optional
        How many rows lie at or before the query: with Transformer-XL's memory ``R = n_keys``, the past only; XLNet has
        one row more before them, ``R = n_keys + n_queries``, of which the first serves none of its queries. By
        default ``R = 2n - 1``.

    Returns
    -------
    table : array
        As it came.
    span : Span

    Examples
    --------
    >>> import numpy as np
    >>> from_transformer_xl(np.zeros((7, 2)))[1]
    Span(left=3, right=3, beyond='error')
    >>> from_transformer_xl(np.zeros((7, 2)), n_keys=7)[1]
    Span(left=6, right=0, beyond='error')
    >>> from_transformer_xl(np.zeros((7, 2)), n_keys=4)[1]  # XLNet: 4 keys, 3 queries
    Span(left=4, right=2, beyond='error')
    """
    checked(table)
    rows = table.shape[-2]
    if n_keys is None:
        reach = half(table, "2n - 1")
        return table, Span(reach, reach)
    n_keys = check_int("n_keys", n_keys, minimum=1)
    if n_keys == rows:
        return table, Span(rows - 1, 0)
    if n_keys > rows:
        raise ValueError(f"`n_keys` must be at most the number of rows, {rows}, got {n_keys}")
    return table, Span(n_keys, rows - n_keys - 1)


def to_transformer_xl(table: Array, span: Span) -> Array:
    """Write a table in Transformer-XL's order; the inverse of :func:`from_transformer_xl`.

    Parameters
    ----------
    table : array, shape (R, D) or (H, R, D)
        Rows of ascending relative positions.
    span : Span
        Which relative positions they are.
    """
    return as_is(table, span)
