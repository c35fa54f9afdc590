"""The rows of tables, the keys that queries see, and weights as pictures."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import numpy as np

from relskew_core._array.checks import check_int, describe
from relskew_core._array.namespace import check_plain
from relskew_core._functions.weights import attention_weights
from relskew_core._positions.span import Span
from relskew_core.draw._picture import Cell, Panel, Picture, check_cells

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
    notes = [BEYOND[beyond] for beyond in dict.fromkeys(span.beyond for span in spans)]
    return Picture("Rows of a table", [_row_panel(span, longest) for span in spans], 1, ["Cells show the row.", *notes])


def _row_panel(span: Span, longest: int) -> Panel:
    shown: Sequence[int] = range(-span.left - 2, span.right + 3)  # two positions past either end
    if span.rows > longest:
        near = {r for end in (-span.left, 0, span.right) for r in range(end - 1, end + 2)}
        shown = sorted({shown[0], shown[-1], *near})
    cells = list[tuple[str, Cell]]()
    for last, r in pairwise((shown[0] - 1, *shown)):
        cells += [("", Cell(text="…"))] * (r != last + 1) + [(_signed(r), _cell(r, span))]
    return Panel(_in_words(span), [[cell for _, cell in cells]], [""], [r for r, _ in cells], "r = key − query →")


def _signed(number: int) -> str:
    return str(number).replace("-", "−")


def _in_words(span: Span) -> str:
    return f"{_signed(-span.left)} … {_signed(span.right)}, beyond: {span.beyond}"


def _cell(r: int, span: Span | None, reach: int = 1) -> Cell:
    """Return the cell of a relative position: the row that it uses, in the colour of the position of that row."""
    if span is None:
        return Cell(r / reach, _signed(r))
    nearest = min(max(r, -span.left), span.right)
    if nearest != r and span.beyond != "clip":
        return Cell(text="✕" if span.beyond == "error" else "–")
    return Cell(nearest / max(span.left, span.right, 1), str(nearest + span.left))


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
    reach = max(1, int(np.max(np.abs(distances), where=seen, initial=0)))
    shown: Any = np.where(seen, distances, np.full_like(distances, None, dtype=object))
    sink = [Cell(0.0, "s")] * sinks
    cells = [sink + [Cell() if r is None else _cell(r, span, reach) for r in row] for row in shown.tolist()]
    what = "the relative position" if span is None else f"the row of the table {_in_words(span)}"
    hidden = "" if seen.all() else " Hidden keys have none."
    notes = [f"Cells show {what}.{hidden}", *(["s: the sink, which has no key."] if sinks else [])]
    panel = Panel("", cells, [str(int(i)) for i in queries], ["s"] * sinks + [str(j) for j in keys])
    return Picture(_title(n, m, arguments, sinks=sinks), [panel], notes=notes)


def _title(n: int, m: int, arguments: dict[str, Any], *, sinks: bool) -> str:
    queries, keys = f"{n} quer{'y' if n == 1 else 'ies'}", f"{m} key{'s' * (m != 1)}"
    words = [f"{queries}, {keys}" if n != m or n == 1 else f"{n} queries and keys"]
    for name, value in arguments.items():
        if value is not None and value is not False and (name, value) != ("offset", 0):
            bare = value is True or name in ("mask", "segments", "positions")  # values that are too long
            words.append(name if bare else f"{name}={value}")
    return ", ".join([*words, *(["sinks"] if sinks else [])])


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
        shape = "(H, Lq, Lk) or (Lq, Lk), with no axis of length 0"
        raise ValueError(f"`weights` must have shape {shape}, got {describe(weights)}")
    if not np.all(values >= 0):
        raise ValueError("`weights` must all be >= 0, got a negative number or NaN")
    count, n, m = values.shape
    chosen = range(count) if heads is None else [check_int("heads", head, minimum=0) for head in heads]
    for head in chosen:
        if head >= count:
            raise ValueError(f"`heads` must be among the {count} heads 0 … {count - 1}, got {head}")
    check_cells(len(chosen) * n * m, "the heads of `weights` that are drawn")
    first = check_int("first_query", first_query)
    rows, columns = [str(first + i) for i in range(n)], list(map(str, range(m)))
    full = float(values[list(chosen)].max()) or 1.0
    drawn = ([[_weight(x, full) for x in row] for row in values[head].tolist()] for head in chosen)
    panels = [Panel(f"head {head}", x, rows, columns, weights=True) for head, x in zip(chosen, drawn, strict=True)]
    note = f"Colour: the root of the weight; full colour is {full:.2g}."
    return Picture("Weights of attention", panels, min(2, len(panels)), [note])


def _weight(x: float, full: float) -> Cell:
    text = "" if x == 0 else "1" if x > 0.995 else f"{x:.2f}".removeprefix("0")
    return Cell((x / full) ** 0.5 or None, text)  # in proportion to the weight, all but the largest would look alike
