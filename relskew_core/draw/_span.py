"""The relative position of each row of a table, and what is used beyond its ends."""

from __future__ import annotations

from relskew_core._array.checks import check_int, describe
from relskew_core._positions.span import Span
from relskew_core.draw._cells import Cell, Panel, signed
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
