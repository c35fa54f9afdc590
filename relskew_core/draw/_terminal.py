"""A picture in a terminal: numbers if they fit, else half blocks in colour, or shades that need none."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import zip_longest
from typing import Any

from rich.table import Table
from rich.text import Text

from relskew_core.draw._cells import LIGHT, Cell, Panel

NUMBERS, BETWEEN = 16, 3
"""The most columns that are drawn with numbers, and the space between panels."""

SHADES, EDGES = "·░▒▓█", (0.12, 0.35, 0.6, 0.85)


def printed(picture: Any, console: Any) -> Iterator[Any]:
    """Yield the parts of a picture, its panels side by side if there is room."""
    blocks = [_block(panel, console) for panel in picture.panels]
    width = max(len(line) for block in blocks for line in block.plain.splitlines()) + BETWEEN
    across = max(1, min(picture.across, (console.width + BETWEEN) // width))
    yield Text(picture.title, style="bold")
    for start in range(0, len(blocks), across):
        grid = Table.grid(padding=(0, BETWEEN, 0, 0))
        grid.add_row(*blocks[start : start + across])
        yield from (Text(), grid)
    yield from (Text(), *(Text(note, style="dim") for note in picture.notes))


def _block(panel: Panel, console: Any) -> Text:
    margin = max(map(len, panel.rows)) + 1
    lines = [Text(" " * margin + panel.title, style="bold")] if panel.title else []
    lines.append(Text(" " * margin + panel.axes(), style="dim"))
    texts = [cell.text for row in panel.cells for cell in row]
    wide = max(map(len, [*texts, *panel.columns])) + 1
    if any(texts) and len(panel.columns) <= NUMBERS and margin + wide * len(panel.columns) <= console.width:
        lines.append(Text(" " * margin + "".join(f"{name:>{wide}}" for name in panel.columns), style="dim"))
        for name, row in zip(panel.rows, panel.cells, strict=True):
            cells = ((f"{cell.text or '·':>{wide}}", _style(panel, cell, console)) for cell in row)
            lines.append(Text.assemble((f"{name:>{margin - 1}} ", "dim"), *cells))
    else:
        lines += _small(panel, margin, console)
    return Text("\n").join(lines)


def _style(panel: Panel, cell: Cell, console: Any) -> str:
    if cell.tone is None:
        return "dim"
    return f"{LIGHT['ink']} on {panel.colour(cell)}" if console.color_system else ""


def _small(panel: Panel, margin: int, console: Any) -> list[Text]:
    """Return two rows per line; if they are too wide, each place shows the strongest of several cells."""
    step = -(-len(panel.columns) // max(1, console.width - margin))
    rows = [
        [max(row[j : j + step], key=lambda cell: _strength(panel, cell)) for j in range(0, len(row), step)]
        for row in panel.cells[::step]
    ]
    lines = []
    for k, (upper, lower) in enumerate(zip_longest(rows[::2], rows[1::2], fillvalue=[Cell()] * len(rows[0]))):
        name = panel.rows[2 * step * k] if k % 4 == 0 else ""
        cells = (_half(panel, *pair, colour=bool(console.color_system)) for pair in zip(upper, lower, strict=True))
        lines.append(Text.assemble((f"{name:>{margin - 1}} ", "dim"), *cells))
    note = f"{len(panel.columns)} columns, {panel.columns[0]} … {panel.columns[-1]}"
    note += f", {step} a place, and one of {step} rows" if step > 1 else ""
    return [*lines, Text(" " * margin + note, style="dim")]


def _strength(panel: Panel, cell: Cell) -> float:
    """Return how conspicuous a cell is: keys near the query, and large weights; -1 if it is empty."""
    if cell.tone is None:
        return -1.0
    return abs(cell.tone) if panel.weights else 1 - 0.8 * abs(cell.tone)


def _half(panel: Panel, upper: Cell, lower: Cell, *, colour: bool) -> tuple[str, str]:
    """Return the character and the style of a cell and the one below it; without colours, of the stronger one."""
    strongest = max(_strength(panel, upper), _strength(panel, lower))
    if strongest < 0:
        return " ", ""
    if not colour:
        return SHADES[sum(strongest >= edge for edge in EDGES)], ""
    if upper.tone is None:
        return "▄", panel.colour(lower)
    return "▀", panel.colour(upper) + ("" if lower.tone is None else f" on {panel.colour(lower)}")
