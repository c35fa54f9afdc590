"""The relative position of each row of a table, and what is used beyond its ends."""

from __future__ import annotations

from typing import Any

import numpy as np

from relskew_core._array.checks import check_int, describe
from relskew_core._functions.weights import attention_weights
from relskew_core._positions.span import Span
from relskew_core.draw._cells import Cell, Panel, check_cells, signed
from relskew_core.draw._picture import Picture

PAST = 2
"""How many positions are drawn past either end."""

BEYOND = {
    "error": "error: a call that sees past the ends is refused.",
    "clip": "clip: the rows at the ends serve what is past them.",
    "zero": "zero: nothing is added past the ends.",
}


def draw_span(*spans: Span, longest: int = 11) -> Picture:
    """Draw the relative position of each row of a table, and what is used beyond its ends.

    Parameters
    ----------
    *spans : Span
        One below the other.
    longest : int, default 11
        For longer tables, only the ends and the middle are drawn.

    Returns
    -------
    Picture
        A panel for each span, with the relative positions above the cells and the rows in them.

    Examples
    --------
    >>> (panel,) = draw_span(Span.clipped(1)).panels
    >>> panel.columns
    ['−3', '−2', '−1', '0', '1', '2', '3']
    >>> [cell.text for cell in panel.cells[0]]
    ['0', '0', '0', '1', '2', '2', '2']
    """
    check_int("longest", longest, minimum=1)
    for index, span in enumerate(spans):
        if not isinstance(span, Span):
            raise TypeError(f"`spans[{index}]` must be a Span, got {describe(span)}")
    if not spans:
        raise ValueError("`spans` must name at least one Span, got none")
    panels = [_panel(span, longest) for span in spans]
    notes = [BEYOND[beyond] for beyond in dict.fromkeys(span.beyond for span in spans)]
    return Picture("Rows of a table", panels, notes=["Cells show the row.", *notes])


def span_words(span: Span) -> str:
    """Return a span in words."""
    return f"{signed(-span.left)} … {signed(span.right)}, beyond: {span.beyond}"


def row_of(r: int, span: Span) -> int | None:
    """Return the row of a table for a relative position, ``None`` if there is none."""
    if span.beyond != "clip" and not -span.left <= r <= span.right:
        return None
    return min(max(r, -span.left), span.right) + span.left


def row_cell(r: int, span: Span) -> Cell:
    """Return the cell of a relative position: the row that it uses, in the colour of the position of that row."""
    row = row_of(r, span)
    if row is None:
        return Cell(text="✕" if span.beyond == "error" else "–")
    return Cell((row - span.left) / max(span.left, span.right, 1), str(row))


def _panel(span: Span, longest: int) -> Panel:
    columns, cells = list[str](), list[Cell]()
    last = None
    for r in _shown(span, longest):
        if last is not None and r != last + 1:
            columns.append("")
            cells.append(Cell(text="…"))
        columns.append(signed(r))
        cells.append(row_cell(r, span))
        last = r
    return Panel(span_words(span), [cells], [""], columns, "", "r = key − query")


def _shown(span: Span, longest: int) -> list[int]:
    """Return the positions to draw: all of them, or the ends and the middle."""
    low, high = -span.left - PAST, span.right + PAST
    if span.rows <= longest:
        return list(range(low, high + 1))
    near = {r for end in (-span.left, 0, span.right) for r in range(end - 1, end + 2)}
    return sorted({low, high, *near, -span.left - 1, span.right + 1})


ARRAYS = ("mask", "segments", "positions")
"""Arguments whose values are too long for a title."""


def draw_call(
    n_queries: int, n_keys: int | None = None, span: Span | None = None, *, sinks: bool = False, **arguments: Any
) -> Picture:
    """Draw which keys each query of a call sees, by making the call in NumPy with uniform logits.

    Parameters
    ----------
    n_queries : int
        Number of queries, the rows.
    n_keys : int, optional
        Number of keys, the columns; by default as many as queries, plus the ``offset``, for the cache.
    span : Span, optional
        The span of a table. Each cell then shows the row that is used, instead of the relative position.
    sinks : bool, default False
        Add a column for the sink, to which every query may attend.
    **arguments
        The options that determine which keys a query sees, as in :func:`relskew_core.attention_weights`: ``causal``,
        ``window``, ``block_size``, ``blocks_before``, ``mask``, ``segments``, ``offset`` (an int), ``positions``.

    Returns
    -------
    Picture
        One panel. Cells that a query may not see are empty.

    Examples
    --------
    >>> picture = draw_call(2, span=Span.causal(3, "clip"), causal=True, offset=2)
    >>> [[cell.text for cell in row] for row in picture.panels[0].cells]
    [['0', '1', '2', ''], ['0', '0', '1', '2']]
    """
    n = check_int("n_queries", n_queries, minimum=1)
    if n_keys is None and "positions" not in arguments:
        arguments = {"offset": 0, **arguments}  # the cache has the same length
    offset = arguments.get("offset") or 0
    m = n + check_int("offset", offset) if n_keys is None else check_int("n_keys", n_keys, minimum=1)
    check_cells(n * m, "`n_queries` times `n_keys`")
    q, k, table = (np.zeros((rows, 1), dtype=np.float64) for rows in (n, m, 0 if span is None else span.rows))
    seen = attention_weights(q, k, rel_k=None if span is None else table, span=span, **arguments) > 0
    queries, keys = arguments.get("positions") or (range(offset, offset + n), range(m))
    distances = np.asarray(keys)[None, :] - np.asarray(queries)[:, None]
    shown = distances[seen] if seen.any() else np.zeros(1, dtype=int)
    reach = max(1, int(abs(shown).max()))
    cells = [
        [_cell(int(r), bool(s), span, reach) for r, s in zip(*row, strict=True)]
        for row in zip(distances, seen, strict=True)
    ]
    columns = [str(j) for j in keys]
    if sinks:
        cells, columns = [[Cell(0.0, "s"), *row] for row in cells], ["s", *columns]
    what = "the relative position" if span is None else f"the row of the table {span_words(span)}"
    notes = [f"Cells show {what}. Empty: not seen.", *(["s: the sink, which has no key."] if sinks else [])]
    panel = Panel("", cells, [str(int(i)) for i in queries], columns)
    return Picture(_title(n, m, arguments, sinks=sinks), [panel], notes=notes)


def _cell(r: int, seen: bool, span: Span | None, reach: int) -> Cell:
    if not seen:
        return Cell()
    return Cell(r / reach, signed(r)) if span is None else row_cell(r, span)


def _title(n: int, m: int, arguments: dict[str, Any], *, sinks: bool) -> str:
    queries, keys = f"{n} quer{'y' if n == 1 else 'ies'}", f"{m} key{'s' * (m != 1)}"
    words = [f"{queries}, {keys}" if n != m or n == 1 else f"{n} queries and keys"]
    for name, value in arguments.items():
        if isinstance(value, bool) or name in ARRAYS:
            words += [name] if value is not None and value is not False else []
        elif value is not None and (name, value) != ("offset", 0):
            words.append(f"{name}={value}")
    return ", ".join([*words, *(["sinks"] if sinks else [])])
