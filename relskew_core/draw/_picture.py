"""A picture: panels of cells, drawn by matplotlib into files and notebooks, and by rich in a terminal."""

from __future__ import annotations

import io
import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from textwrap import wrap
from typing import Any

from relskew_core._array.extras import needs_extra
from relskew_core._files import whole

LIGHT = {"paper": "#ffffff", "ink": "#1f2933", "faint": "#5b6773"}
DARK = {"paper": "#161b22", "ink": "#e6e9ee", "faint": "#a3adb8"}
PAST, SELF, FUTURE, WEIGHT = "#2a6fbb", "#7b8794", "#cb6d00", "#9250bd"
"""Every kind of colour vision distinguishes blue, grey and orange; violet is for weights."""

MOST = 2**20
"""The most cells of a picture."""


@dataclass(frozen=True, slots=True)
class Cell:
    """A cell of a picture.

    Parameters
    ----------
    tone : float, optional
        The colour, from -1 to 1; ``None`` if the cell is empty.
    text : str
        What is written in it.

    Examples
    --------
    >>> Cell(-0.5, "−1")
    Cell(tone=-0.5, text='−1')
    """

    tone: float | None = None
    text: str = ""


@dataclass(frozen=True, slots=True)
class Panel:
    """Rows of cells with the names of their sides.

    Parameters
    ----------
    title : str
    cells : list of lists of Cell
        The rows, from the top.
    rows, columns : list of str
        The name of each row and column.
    row_axis, column_axis : str
        What rows and columns are.
    weights : bool, default False
        Whether tones are weights from 0 to 1, negative if they are marked; else they run from the past to the future.

    Examples
    --------
    >>> Panel("one query", [[Cell(-1, "−1"), Cell(0, "0")]], ["1"], ["0", "1"]).axes()
    'query i ↓, key j →'
    """

    title: str
    cells: list[list[Cell]]
    rows: list[str]
    columns: list[str]
    row_axis: str = "query i"
    column_axis: str = "key j"
    weights: bool = False

    def axes(self) -> str:
        """Return the line that names the sides."""
        named = ((self.row_axis, "↓"), (self.column_axis, "→"))
        return ", ".join(f"{axis} {arrow}" for axis, arrow in named if axis)

    def strength(self, cell: Cell) -> float:
        """Return how conspicuous a cell is: keys near the query, and large weights; -1 if it is empty."""
        if cell.tone is None:
            return -1.0
        return abs(cell.tone) if self.weights else 1 - 0.8 * abs(cell.tone)

    def colour(self, cell: Cell, colours: dict[str, str] = LIGHT) -> str:
        """Return the colour of a cell as ``#rrggbb``: small tones are close to the paper."""
        tone = cell.tone
        if tone is None:
            hue, cover = colours["ink"], 0.05
        elif self.weights:
            hue, cover = WEIGHT if tone >= 0 else FUTURE, 0.7 * min(1.0, abs(tone))
        elif tone:
            hue, cover = PAST if tone < 0 else FUTURE, 0.15 + 0.55 * min(1.0, abs(tone))
        else:
            hue, cover = SELF, 0.35
        mixed = zip(bytes.fromhex(hue[1:]), bytes.fromhex(colours["paper"][1:]), strict=True)
        return "#" + "".join(f"{round(cover * a + (1 - cover) * b):02x}" for a, b in mixed)


def check_cells(cells: int, what: str) -> None:
    if cells > MOST:
        raise ValueError(f"{what} must make at most {MOST} cells, got {cells}")


STYLE: Any = {"svg.fonttype": "none", "svg.hashsalt": "relskew", "font.sans-serif": ["DejaVu Sans", "sans-serif"]}
WIDTH, PAD, LINE, LARGEST, WRITTEN = 6.25, 0.12, 0.19, 0.46, 0.29
"""In inches: the width of a picture, its margins, the height of a line, the largest cells, the smallest with text."""

NUMBERS, BETWEEN = 16, 3
"""In a terminal: the most columns that are drawn with numbers, and the space between panels."""

SHADES, EDGES = "·░▒▓█", (0.12, 0.35, 0.6, 0.85)


@dataclass(frozen=True, slots=True, repr=False)
class Picture:
    """Panels of cells: notebooks display them, ``rich.print`` prints them in a terminal, and ``save`` writes a file.

    Parameters
    ----------
    title : str
        A description of the picture, also for readers who cannot see it.
    panels : list of Panel
        The panels; each holds its ``title``, and its ``cells`` with their ``text`` and ``tone``.
    across : int, default 1
        The number of panels side by side.
    notes : sequence of str
        Lines below.

    Examples
    --------
    >>> from relskew_core.draw import draw_call
    >>> picture = draw_call(3, causal=True)
    >>> picture
    <Picture '3 queries and keys, causal': 1 panel of 3 × 3 cells; .save(path) writes it>
    >>> for row in picture.panels[0].cells:
    ...     print([cell.text for cell in row])
    ['0', '', '']
    ['−1', '0', '']
    ['−2', '−1', '0']
    """

    title: str
    panels: list[Panel]
    across: int = 1
    notes: Sequence[str] = ()

    def __repr__(self) -> str:
        sizes = " and ".join(dict.fromkeys(f"{len(x.cells)} × {len(x.columns)}" for x in self.panels))
        panels = f"{len(self.panels)} panel{'s' * (len(self.panels) != 1)}"
        return f"<Picture {self.title!r}: {panels} of {sizes} cells; .save(path) writes it>"

    def save(self, path: str | os.PathLike[str], *, dark: bool = False) -> Path:
        """Write the picture with matplotlib (the extra ``plot``), completely or not at all.

        Parameters
        ----------
        path : path
            Ending in ``.svg`` or ``.png``.
        dark : bool, default False
            Draw on dark paper.

        Returns
        -------
        Path
            The path of the file.
        """
        target = Path(path)
        ending = target.suffix.lower()
        if ending not in (".svg", ".png"):
            raise ValueError(f"`path` must end in .svg or .png, got {os.fspath(path)!r}")
        drawn = self._drawn(ending[1:], DARK if dark else LIGHT)
        with whole(target) as unfinished:
            unfinished.write_bytes(drawn)
        return target

    def _repr_svg_(self) -> str | None:
        try:
            return self._drawn("svg", LIGHT).decode()
        except ModuleNotFoundError:  # a notebook displays the text then
            return None

    def __rich_console__(self, console: Any, options: Any) -> Iterator[Any]:
        from rich.table import Table  # as whoever prints it has
        from rich.text import Text

        blocks = [Text("\n").join(Text.assemble(*line) for line in _lines(panel, console)) for panel in self.panels]
        width = max(len(line) for block in blocks for line in block.plain.splitlines()) + BETWEEN
        across = max(1, min(self.across, (console.width + BETWEEN) // width))
        yield Text(self.title, style="bold")
        for start in range(0, len(blocks), across):
            grid = Table.grid(padding=(0, BETWEEN, 0, 0))
            grid.add_row(*blocks[start : start + across])
            yield from (Text(), grid)
        yield from (Text(), *(Text(note, style="dim") for note in self.notes))

    def _drawn(self, kind: str, colours: dict[str, str]) -> bytes:
        try:
            from matplotlib import rc_context
        except ModuleNotFoundError as error:
            raise needs_extra("drawing a picture", "plot", error) from error

        about = {"Title": self.title, "Date": None} if kind == "svg" else {"Title": self.title, "Software": None}
        # Text stays text, and the file is the same each time.
        with io.BytesIO() as file, rc_context(STYLE):
            self._figure(colours).savefig(file, format=kind, metadata=about)
            return file.getvalue()

    def _figure(self, colours: dict[str, str]) -> Any:
        from matplotlib.figure import Figure

        margin = 0.09 * max(len(name) for panel in self.panels for name in panel.rows) + 0.1
        rows = [self.panels[start : start + self.across] for start in range(0, len(self.panels), self.across)]
        free = [(WIDTH - PAD) / len(row) - margin - PAD for row in rows]
        most = [max(len(panel.columns) for panel in row) for row in rows]
        side = min(LARGEST, *(room / columns for room, columns in zip(free, most, strict=True)))
        titles, notes = wrap(self.title, 60), [line for note in self.notes for line in wrap(note, 88)]
        heads = [LINE * (2 + any(panel.title for panel in row)) for row in rows]
        tall = [side * max(len(panel.cells) for panel in row) for row in rows]
        height = 3 * PAD + LINE * (1.2 * len(titles) + len(notes)) + sum(heads) + sum(tall) + PAD * len(rows)
        figure = Figure(figsize=(WIDTH, height), dpi=192, facecolor=colours["paper"])

        def write(x: float, y: float, text: str, size: float, ink: str = "faint", weight: str = "normal") -> None:
            figure.text(x / WIDTH, 1 - y / height, text, size=size, color=colours[ink], weight=weight, va="top")

        y = PAD
        for line in titles:
            write(PAD, y, line, 12, "ink", "bold")
            y += 1.2 * LINE
        for row, head, below in zip(rows, heads, tall, strict=True):
            y += PAD / 2
            for number, panel in enumerate(row):
                left = PAD + number * (WIDTH - PAD) / len(row) + margin
                write(left, y, "\n".join(filter(None, (panel.title, panel.axes()))), 9)
                wide, high = side * len(panel.columns), side * len(panel.cells)
                place = (left / WIDTH, 1 - (y + head + high) / height, wide / WIDTH, high / height)
                _draw(figure.add_axes(place), panel, side, colours)
            y += head + below + PAD / 2
        for line in notes:
            write(PAD, y + PAD, line, 9)
            y += LINE
        return figure


def _draw(axes: Any, panel: Panel, side: float, colours: dict[str, str]) -> None:
    from matplotlib.colors import to_rgb

    m, n = len(panel.columns), len(panel.cells)
    pixels = [[to_rgb(panel.colour(cell, colours)) for cell in row] for row in panel.cells]
    axes.imshow(pixels, extent=(0, m, n, 0), aspect="auto", interpolation="none")
    if m * n <= 900:
        lines = {"color": colours["paper"], "linewidth": 5 * side}
        axes.vlines(range(m + 1), 0, n, **lines)
        axes.hlines(range(n + 1), 0, m, **lines)
    axes.spines[:].set_visible(False)
    axes.tick_params(length=0, pad=2, labelsize=7.5, labelcolor=colours["faint"], labeltop=True, labelbottom=False)
    for axis, names, letter in ((axes.xaxis, panel.columns, 0.07), (axes.yaxis, panel.rows, 0.0)):
        room = (letter * max(map(len, names)) + 0.1) / side
        step = next((step for step in (1, 5, 10, 20, 50, 100, 200, 500) if step >= room), len(names))
        axis.set_ticks([k + 0.5 for k in range(0, len(names), step)], names[::step])
    if side >= WRITTEN:
        for i, row in enumerate(panel.cells):
            for j, cell in enumerate(row):
                if cell.text:
                    size = min(9.0, 90 * side / max(3, len(cell.text)))
                    ink = colours["faint" if cell.tone is None else "ink"]
                    axes.text(j + 0.5, i + 0.5, cell.text, ha="center", va="center", size=size, color=ink)


def _lines(panel: Panel, console: Any) -> Iterator[list[tuple[str, str]]]:
    """Yield the lines of a panel, each as texts with their styles: numbers if they fit, else blocks or shades."""
    margin, coloured = max(map(len, panel.rows)) + 1, bool(console.color_system)
    blank, count = " " * margin, len(panel.columns)
    if panel.title:
        yield [(blank + panel.title, "bold")]
    yield [(blank + panel.axes(), "dim")]
    texts = [cell.text for row in panel.cells for cell in row]
    wide = max(map(len, [*texts, *panel.columns])) + 1
    if any(texts) and count <= NUMBERS and margin + wide * count <= console.width:
        yield [(blank + "".join(f"{name:>{wide}}" for name in panel.columns), "dim")]
        for name, row in zip(panel.rows, panel.cells, strict=True):
            ink = f"{LIGHT['ink']} on " if coloured else ""
            styles = ("dim" if cell.tone is None else ink and ink + panel.colour(cell) for cell in row)
            cells = (f"{cell.text or '·':>{wide}}" for cell in row)
            yield [(f"{name:>{margin - 1}} ", "dim"), *zip(cells, styles, strict=True)]
        return
    step = -(-count // max(1, console.width - margin))  # a place is twice as high as wide
    for i in range(0, len(panel.cells), 2 * step):
        places = ([row[j : j + step] for row in panel.cells[i : i + 2 * step]] for j in range(0, count, step))
        strongest = (max((cell for row in place for cell in row), key=panel.strength) for place in places)
        name = panel.rows[i] if i % (8 * step) == 0 else ""
        yield [(f"{name:>{margin - 1}} ", "dim"), *(_place(panel, cell, coloured) for cell in strongest)]
    note = f"{count} columns, {panel.columns[0]} … {panel.columns[-1]}; a place is the strongest of {2 * step} × {step}"
    yield [(blank + note, "dim")]


def _place(panel: Panel, cell: Cell, coloured: bool) -> tuple[str, str]:
    if cell.tone is None:
        return " ", ""
    return ("█", panel.colour(cell)) if coloured else (SHADES[sum(panel.strength(cell) >= x for x in EDGES)], "")
