"""Weights of attention, a panel for each head."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from relskew_core._array.checks import check_int, describe
from relskew_core._array.namespace import check_plain
from relskew_core.draw._cells import Cell, Panel, check_cells
from relskew_core.draw._picture import Picture

ACROSS = 2
NOTE = "Colour: the root of the weight; full colour is {:.2g}."
"""In proportion to the weight itself, all but the few largest would look alike."""


def draw_weights(weights: Any, *, heads: Sequence[int] | None = None, first_query: int = 0) -> Picture:
    """Draw attention weights, with a panel for each head.

    Parameters
    ----------
    weights : array, shape (H, Lq, Lk) or (Lq, Lk)
        As returned by :func:`relskew_core.attention_weights`, of any array library.
    heads : sequence of int, optional
        Only these heads.
    first_query : int, default 0
        The position of the first query: the ``offset`` of the call.

    Returns
    -------
    Picture
        A colour means the same weight in every panel; a note gives the scale.

    Examples
    --------
    >>> import numpy as np
    >>> from relskew_core import attention_weights
    >>> q = k = np.zeros((2, 3, 1))  # heads, length, width
    >>> picture = draw_weights(attention_weights(q, k, causal=True))
    >>> [panel.title for panel in picture.panels], list(picture.notes)
    (['head 0', 'head 1'], ['Colour: the root of the weight; full colour is 1.'])
    """
    check_plain("weights", weights, converted=True)
    values = np.asarray(weights.tolist() if hasattr(weights, "tolist") else weights, dtype=np.float64)
    values = values[None] if values.ndim == 2 else values
    if values.ndim != 3 or not values.size:
        raise ValueError(
            f"`weights` must have shape (H, Lq, Lk) or (Lq, Lk), with no axis of length 0, got {describe(weights)}"
        )
    if not np.all(values >= 0):
        raise ValueError("`weights` must all be >= 0, got a negative number or NaN")
    chosen = range(len(values)) if heads is None else [_head(head, len(values)) for head in heads]
    check_cells(len(chosen) * values[0].size, "the heads of `weights` that are drawn")
    first = check_int("first_query", first_query)
    rows, columns = ([str(start + k) for k in range(n)] for start, n in zip((first, 0), values.shape[1:], strict=True))
    full = float(values[list(chosen)].max()) or 1.0
    panels = [
        Panel(f"head {head}", _cells((values[head] / full) ** 0.5, values[head]), rows, columns, weights=True)
        for head in chosen
    ]
    return Picture("Weights of attention", panels, min(ACROSS, len(panels)), [NOTE.format(full)])


def _head(head: int, number: int) -> int:
    if check_int("heads", head, minimum=0) >= number:
        raise ValueError(f"`heads` must be among the {number} heads 0 … {number - 1}, got {head}")
    return head


def _cells(tones: Any, values: Any) -> list[list[Cell]]:
    return [
        [Cell(tone or None, _short(value)) for tone, value in zip(*row, strict=True)]
        for row in zip(tones.tolist(), values.tolist(), strict=True)
    ]


def _short(value: float) -> str:
    """Return a weight in three characters, and nothing for zero."""
    return "" if value == 0 else "1" if value > 0.995 else f"{value:.2f}".removeprefix("0")
