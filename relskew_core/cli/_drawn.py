"""A picture in the terminal: coloured numbers if they fit, else two rows per line.

These are half blocks in colour, or shades that need none.
"""

from __future__ import annotations

from itertools import zip_longest
from typing import NamedTuple

from rich.console import Console
from rich.table import Table
from rich.text import Text

from relskew_core.draw._colours import LIGHT, on
from relskew_core.draw._picture import Cell, Panel, Picture

BETWEEN = 3
NUMBERS = 16
"""Wider pictures are drawn without numbers."""

SHADES = "·░▒▓█"
EDGES = (0.12, 0.35, 0.6, 0.85)  # of full brightness: the limits between shades


class Spot(NamedTuple):
    """A cell of a grid: its colour as ``#rrggbb``, and its emphasis, 0 … 1, for terminals without colours."""

    colour: str
    strength: float


def show(picture: Picture, console: Console) -> None:
    """Print a picture, with its panels side by side if there is room."""
    blocks = [_block(panel, console) for panel in picture.panels]
    width = max(len(line) for block in blocks for line in block.plain.splitlines()) + BETWEEN
    across = max(1, min(picture.across, (console.width + BETWEEN) // width))
    console.print(Text(picture.title, style="bold"))
    for start in range(0, len(blocks), across):
        console.print()
        grid = Table.grid(padding=(0, BETWEEN, 0, 0))
        grid.add_row(*blocks[start : start + across])
        console.print(grid)
    console.print()
    for note in picture.notes:
        console.print(Text(note, style="dim"))


def _block(panel: Panel, console: Console) -> Text:
    colour = console.color_system is not None
    margin = max(len(name) for name in panel.rows) + 1
    axes = panel.axes()
    lines = [Text(" " * margin + panel.title, style="bold")] if panel.title else []
    lines.append(Text(" " * margin + axes, style="dim"))
    texts = [cell.text for row in panel.cells for cell in row]
    wide = max(map(len, [*texts, *panel.columns])) + 1
    fits = len(panel.columns) <= NUMBERS and margin + wide * len(panel.columns) <= console.width
    if any(texts) and fits:
        lines.append(Text(" " * margin + "".join(f"{name:>{wide}}" for name in panel.columns), style="dim"))
        lines += [
            Text.assemble(
                (f"{name:>{margin - 1}} ", "dim"), *(_number(panel, cell, wide, colour=colour) for cell in row)
            )
            for name, row in zip(panel.rows, panel.cells, strict=True)
        ]
    else:
        lines += _small(panel, margin, console.width - margin, colour=colour)
    return Text("\n").join(lines)


def _number(panel: Panel, cell: Cell, wide: int, colour: bool) -> tuple[str, str]:
    text = f"{cell.text or '·':>{wide}}"
    if cell.tone is None:
        return text, "dim"
    return text, f"{LIGHT['ink']} on {on(LIGHT['paper'], panel.paint(cell))}" if colour else ""


def _small(panel: Panel, margin: int, room: int, *, colour: bool) -> list[Text]:
    """Return two rows per line; if they are too wide, each place shows the strongest of several cells."""
    step = -(-len(panel.columns) // max(1, room))
    rows = [
        [
            max((_spot(panel, cell) for cell in row[j : j + step]), key=lambda spot: spot.strength if spot else -1.0)
            for j in range(0, len(row), step)
        ]
        for row in panel.cells[::step]
    ]
    pairs = zip_longest(rows[::2], rows[1::2], fillvalue=[None] * len(rows[0]) if rows else [])
    paint = _blocks if colour else _shade
    lines = [Text.assemble(*(paint(*spots) for spots in zip(*pair, strict=True))) for pair in pairs]
    names = [panel.rows[2 * step * k] if k % 4 == 0 else "" for k in range(len(lines))]
    found = [Text.assemble((f"{name:>{margin - 1}} ", "dim"), line) for name, line in zip(names, lines, strict=True)]
    note = f"{len(panel.columns)} columns, {panel.columns[0]} … {panel.columns[-1]}"
    note += f", {step} a place, and one of {step} rows" if step > 1 else ""
    return [*found, Text(" " * margin + note, style="dim")]


def _spot(panel: Panel, cell: Cell) -> Spot | None:
    if cell.tone is None:
        return None
    # Without colours, a terminal emphasises keys near the query, and large weights.
    strength = abs(cell.tone) if panel.weights else 1 - 0.8 * abs(cell.tone)
    return Spot(on(LIGHT["paper"], panel.paint(cell)), strength)


def _shade(upper: Spot | None, lower: Spot | None) -> str:
    """Return the shade of the stronger of two rows, so that a stripe is not interrupted."""
    strengths = [spot.strength for spot in (upper, lower) if spot is not None]
    return SHADES[sum(max(strengths) >= edge for edge in EDGES)] if strengths else " "


def _blocks(upper: Spot | None, lower: Spot | None) -> tuple[str, str]:
    if upper is None:
        return (" ", "") if lower is None else ("▄", lower.colour)
    return ("▀", upper.colour) if lower is None else ("▀", f"{upper.colour} on {lower.colour}")
